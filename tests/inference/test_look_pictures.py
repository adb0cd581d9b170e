"""Pictures of what a model sees: PNG files of the right content, the same bytes each time; bad input is a line."""

import io
import subprocess
import sys

import numpy as np
import paddle
import pytest
from conftest import ROOT
from PIL import Image
from sklearn.datasets import load_sample_images

from config import get_config
from errors import InputError, RunError
from inference import Predictor
from inference.look import overlay
from inference.look.attention import attention
from inference.look.draw import coloured, heat
from inference.look.embeddings import WRONG, plane, pooled, predictions
from inference.look.maps import Asked, cam_panels, feature_panels, principal
from inference.look.positions import positions, similarities, tables
from inference.look.sight import check_checkpoint, output_of, sight
from models import build_model
from tools.visualize import _parser, _write, check, listed, one_by_one
from training.checkpoint import describe
from training.checkpoint.description import METADATA
from weights import file_arrays
from weights.formats import write_weights

SIZES = ["DATA.IMAGE_SIZE", "32", "DATA.CROP_PCT", "0.5", "MODEL.NUM_CLASSES", "2"]
MODELS = {
    "vit_small_patch16_224": ["MODEL.PATCH_SIZE", "8", "MODEL.EMBED_DIM", "16", "MODEL.DEPTH", "2",
                              "MODEL.NUM_HEADS", "2"],
    "swin_tiny_patch4_window7_224": [
        "MODEL.EMBED_DIM", "8", "MODEL.STAGE_DEPTHS", "[2, 1]", "MODEL.NUM_HEADS", "[1, 2]", "MODEL.WINDOW_SIZE", "4",
    ],
    "convnext_tiny": ["MODEL.EMBED_DIMS", "[4, 8, 8, 16]", "MODEL.STAGE_DEPTHS", "[1, 1, 1, 1]"],
}  # fmt: skip


def saved(folder, name, classes=("bridge", "flower, red"), options=(), task="classification"):
    """A checkpoint's file of a small model that wasn't trained."""
    paddle.seed(0)
    config = get_config(name, [*(SIZES + MODELS[name] if name in MODELS else []), *options])
    file = folder / f"{name}.safetensors"
    told = describe(config, list(classes), task)
    write_weights(file, file_arrays(build_model(config)), {METADATA: told.written()})
    return file


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: saved(folder, name) for name in MODELS}


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """Four crops of two photographs, in a folder of each class."""
    root = tmp_path_factory.mktemp("photographs")
    for name, photograph in zip(("bridge", "flower, red"), load_sample_images().images, strict=True):
        (root / name).mkdir()
        for place in range(4):
            Image.fromarray(photograph[40 * place : 40 * place + 200, :300]).save(root / name / f"{place}.png")
    return root


def opened(data):
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def visualize(*arguments):
    command = [sys.executable, str(ROOT / "tools" / "visualize.py"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={"PATH": "/usr/bin:/bin"})
    return done.returncode, done.stdout, done.stderr


@pytest.mark.smoke
@pytest.mark.parametrize("name", MODELS)
def test_an_overlay_is_the_attention_where_there_is_some(files, name):
    predictor, photograph = Predictor(files[name]), load_sample_images().images[1]
    found = overlay(predictor, photograph)
    assert found == overlay(predictor, photograph)
    assert Image.open(io.BytesIO(found)).format == "PNG"
    seen = sight(predictor, photograph)
    assert seen.base.shape == opened(found).shape == (224, 224, 3)
    assert (seen.base[::7, ::7] == predictor.pixels(photograph)).all()
    if name == "convnext_tiny":
        assert found == overlay(predictor, photograph, "cam")
        with pytest.raises(InputError, match="ConvNeXt has no attention; cam shows"):
            overlay(predictor, photograph, "attention")
    else:
        values = attention(predictor.model, seen.image).mean(0)
        assert (opened(found) == heat(seen.base, values, None, 2 * values.mean())).all()
    with pytest.raises(InputError, match="kind is 'x', expected auto, attention, rollout or cam"):
        overlay(predictor, photograph, "x")
    with pytest.raises(RunError, match="image 0: "):
        overlay(predictor, b"no image")


def test_a_map_is_drawn_in_its_colours_where_it_lies():
    base = np.full((20, 40, 3), 90, np.uint8)
    drawn = heat(base, np.array([[0.0, 0.5]]), (10, 0, 30, 20)) / 255
    grey = 90 / 255
    np.testing.assert_allclose(drawn[:, :10], grey / 3, atol=0.003)
    np.testing.assert_allclose(drawn[:, 30:], grey / 3, atol=0.003)
    np.testing.assert_allclose(
        drawn[:, 10], np.broadcast_to(0.3 * grey + 0.7 * coloured(np.zeros(1)), (20, 3)), atol=0.003
    )
    np.testing.assert_allclose(
        drawn[:, 29], np.broadcast_to(0.3 * grey + 0.7 * coloured(np.ones(1)), (20, 3)), atol=0.003
    )
    np.testing.assert_allclose(
        heat(base, np.array([[0.5]]), None, 1.0)[0, 0] / 255,
        0.3 * grey + 0.7 * coloured(np.full(1, 0.5))[0],
        atol=0.003,
    )


@pytest.mark.parametrize(("mode", "box"), [("center", (120, 40, 280, 200)), ("squash", (100, 60, 300, 180))])
def test_the_part_of_the_original_is_what_the_model_sees(files, mode, box):
    rows, columns = np.mgrid[:240, :400]
    slopes = np.stack([columns // 2, rows, 0 * rows], 2).astype(np.uint8)
    if mode == "center":  # the short side is 320 pixels at CROP_PCT 0.1: more is seen at 0.75
        box = (110, 30, 290, 210)
    crop = "0.75" if mode == "center" else "0.5"
    options = ["DATA.CROP_PCT", crop, "DATA.CROP_MODE", mode]
    predictor = Predictor(files["convnext_tiny"], options=options)
    seen = sight(predictor, slopes, original=True)
    assert (seen.base == slopes).all()
    np.testing.assert_allclose(seen.box, box, atol=4)
    left, top, right, bottom = seen.box
    pixels = predictor.pixels(slopes).astype(float)  # what is seen at its corners is what lies there
    np.testing.assert_allclose(pixels[0, 0, :2], (left / 2, top), atol=6)
    np.testing.assert_allclose(pixels[-1, -1, :2], (right / 2, bottom), atol=6)


def test_classes_are_meant_by_name_or_number(files):
    predictor = Predictor(files["convnext_tiny"])
    assert [output_of(predictor, name) for name in ("flower, red", "0", "1")] == [1, 0, 1]
    with pytest.raises(InputError, match="-class is 'fridge', which the model doesn't know; did you mean bridge\\?"):
        output_of(predictor, "fridge")
    with pytest.raises(InputError, match="-class is '2', which .* know; give a name, or a number from 0 to 1"):
        output_of(predictor, "2")
    seen = sight(predictor, load_sample_images().images[0])
    assert cam_panels(predictor, seen, Asked(method="gradcam", output="flower, red"))[1].title.startswith(
        "for flower, red"
    )


def test_principal_components_are_of_all_images_together():
    rng = np.random.default_rng(0)
    maps = [rng.normal(0, (9, 1, 4, 0.1, 2), (6, 4, 5)), rng.normal(0, (9, 1, 4, 0.1, 2), (3, 5, 5)) + 1]
    found = principal(maps)
    assert [one.shape for one in found] == [(6, 4, 3), (3, 5, 3)]
    flat = np.concatenate([one.reshape(-1, 5) for one in maps])
    flat = flat - flat.mean(0)
    _, _, vectors = np.linalg.svd(flat, full_matrices=False)
    vectors *= np.sign(vectors[np.arange(5), np.abs(vectors).argmax(1)])[:, None]
    values = flat @ vectors[:3].T
    low, high = np.quantile(values, [0.01, 0.99], axis=0)
    expected = np.clip((values - low) / (high - low), 0, 1)
    np.testing.assert_allclose(np.concatenate([one.reshape(-1, 3) for one in found]), expected, atol=1e-9)
    assert not principal([np.ones((2, 2, 2))])[0].any()


def test_features_are_of_each_stage(files, photographs):
    predictor = Predictor(files["convnext_tiny"])
    sights = [sight(predictor, photographs / "bridge" / f"{place}.png") for place in range(2)]
    rows = feature_panels(predictor, sights, Asked(method="pca"))
    assert [panel.title for panel in rows[0][1:]] == [f"stages.{i}\n{8 >> i} x {8 >> i}" for i in range(4)]
    [[_, one], _] = feature_panels(predictor, sights, Asked(1, "pca"))
    assert one.title == "stages.1\n4 x 4"
    with paddle.no_grad():
        maps = [predictor.model.forward_intermediates(seen.image, [1], intermediates_only=True)[0] for seen in sights]
    expected = principal([each.numpy()[0].transpose(1, 2, 0) for each in maps])[0]
    np.testing.assert_allclose(one.image[28::56, 28::56] / 255, expected, atol=0.003)
    rows = feature_panels(predictor, sights, Asked(0, "channels"))
    assert (
        [panel.title for panel in rows[0][1:]]
        == [panel.title for panel in rows[1][1:]]
        == [f"channel {i}" for i in range(4)]
    )
    with pytest.raises(InputError, match="-block is 4, the model has 4 intermediates: give 0 to 3"):
        feature_panels(predictor, sights, Asked(4, "pca"))


def test_positions_are_the_models(files):
    predictor = Predictor(files["vit_small_patch16_224"])
    alike = similarities(predictor.model)
    places = predictor.model.pos_embed.numpy()[0, 1:].astype(float)
    one, other = places[1 * 4 + 2], places[3 * 4 + 0]
    assert alike[1, 2, 3, 0] == pytest.approx(one @ other / np.linalg.norm(one) / np.linalg.norm(other))
    assert positions(predictor) == positions(predictor)
    with pytest.raises(InputError, match="-block is for tables of relative positions"):
        positions(predictor, 0)
    predictor = Predictor(files["swin_tiny_patch4_window7_224"])
    found = tables(predictor.model)
    assert {name: table.shape for name, table in found.items()} == {
        "layers.0.blocks.0.attn": (1, 7, 7), "layers.0.blocks.1.attn": (1, 7, 7), "layers.1.blocks.0.attn": (2, 7, 7),
    }  # fmt: skip
    layer = predictor.model.layers[0].blocks[0].attn
    bias = layer.position_bias().numpy()[0]  # of the query (2, 1) = 9 and the key (0, 3) = 3
    assert found["layers.0.blocks.0.attn"][0, 2 - 0 + 3, 1 - 3 + 3] == bias[9, 3]
    assert opened(positions(predictor, 2)).ndim == 3
    with pytest.raises(InputError, match="-block is 3, the model has 3 tables: give 0 to 2"):
        positions(predictor, 3)
    with pytest.raises(
        InputError, match="ConvNeXt has no position embeddings and no relative positions; positions is for"
    ):
        positions(Predictor(files["convnext_tiny"]))


def test_places_in_the_plane_keep_groups_together_and_hang_on_the_seed():
    rng = np.random.default_rng(0)
    features = np.concatenate([rng.normal(0, 1, (12, 8)), rng.normal(9, 1, (12, 8))])
    places = plane(features)
    assert (plane(features) == places).all()
    assert (plane(features, seed=1) != places).any()
    near = np.linalg.norm(places[:, None] - places, axis=2)
    near[range(24), range(24)] = np.inf
    assert (near.argmin(1) // 12 == np.arange(24) // 12).all()
    with pytest.raises(InputError, match="found 4 images, expected 5 or more"):
        plane(features[:4])
    with pytest.raises(InputError, match="umap-learn isn't installed; pip install umap-learn, or take -method tsne"):
        plane(features, "umap")


def test_predictions_and_mistakes(files, photographs, monkeypatch):
    predictor = Predictor(files["vit_small_patch16_224"], batch_size=3)
    images, truth = listed([str(photographs)])
    assert truth == ["bridge"] * 4 + ["flower, red"] * 4
    features, shares = pooled(predictor, images)
    assert features.shape == (8, 16)
    head = predictor.model.head
    logits = features @ head.weight.numpy() + head.bias.numpy()
    np.testing.assert_allclose(predictor.probabilities(logits), shares, atol=1e-6)
    right = sum(predictor.classes[row.argmax()] == name for row, name in zip(shares, truth, strict=True))
    assert predictions(predictor, images, truth)[1] == f"{right} of 8 right"
    said = [predictor.classes[row.argmax()] for row in shares]
    drawn = []
    monkeypatch.setattr("inference.look.embeddings.sheet", lambda *args: drawn.append(args) or b"")
    wrong = [name for name in predictor.classes for _ in range(4)][::-1] if said == truth else truth
    predictions(predictor, images, wrong, mistakes=True, most=2)
    [([panels], title)] = drawn
    certain = sorted(
        (row.max() for row, one, name in zip(shares, said, wrong, strict=True) if one != name), reverse=True
    )
    assert [panel.title.partition("(")[2][:3] for panel in panels] == [f"{share:.0%}" for share in certain[:2]]
    assert f"2 of {len(certain)} shown" in title
    assert {panel.frame for panel in panels} == {WRONG}
    assert all("\nit is " in panel.title for panel in panels)
    with pytest.raises(InputError, match="there is no mistake to show: 8 of 8 right"):
        predictions(predictor, images, said, mistakes=True)
    with pytest.raises(InputError, match="-mistakes needs the true classes"):
        predictions(predictor, images, [None] * 8, mistakes=True)
    with pytest.raises(InputError, match="the class 'bridges', which the model doesn't know; did you mean bridge"):
        predictions(predictor, images, ["bridges"] * 8)
    (photographs / "flower, red" / "9.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(RunError, match="9.png: "):
        predictions(predictor, listed([str(photographs)])[0], [None] * 9)
    (photographs / "flower, red" / "9.png").unlink()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("attention M PHOTO -output there.png", "-output is there.png, which is there already; choose a new name"),
        ("attention M PHOTO -output x.jpg", "-output is x.jpg, expected a name that ends in .png, or a folder's"),
        ("attention M PHOTO -output x.png -class 1", "-class does nothing for attention; it is for cam"),
        ("rollout M PHOTO -output x.png -block 1", "-block does nothing for rollout; it is for attention, features"),
        ("cam M PHOTO -output x.png -method cam", "-method is 'cam', expected gradcam, hirescam, gradcam++, layercam"),
        ("rollout M PHOTO -output x.png -method a", "-method is 'a', rollout has no methods; leave it out"),
        ("positions M PHOTO -output x.png", "positions takes no images; leave them out"),
        ("cam M -output x.png", "cam needs images"),
        ("predictions M PHOTO -output x.png -most 0", "-most is 0, expected 1 or more"),
        ("cam M none.jpg -output x.png", "none.jpg: found no image there, and no folder"),
        ("cam M PHOTO -output there.png/a/x.png", "there.png is no folder that can be written to; choose another"),
        ("cam M empty -output x.png", "empty: holds no image; they end in .jpg .jpeg .png"),
    ],
)
def test_a_wrong_command_line_is_a_line(tmp_path, monkeypatch, arguments, message):
    (tmp_path / "there.png").touch()
    (tmp_path / "photo.png").touch()
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as caught:
        read = _parser().parse_args(arguments.replace("PHOTO", "photo.png").split())
        check(read)
        listed(read.images)
    assert message in str(caught.value)


def test_the_tool_draws_one_picture_or_one_for_each_image(files, photographs, tmp_path):
    vit, one, other = files["vit_small_patch16_224"], photographs / "bridge/0.png", photographs / "flower, red/0.png"
    status, said, errors = visualize("attention", vit, one, other, "-output", tmp_path / "a")
    assert (status, said, errors) == (0, f"{tmp_path / 'a'}: 2 pictures of attention\n", "")
    assert sorted(file.name for file in (tmp_path / "a").iterdir()) == ["0.png", "0_2.png"]
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    status, said, errors = visualize("cam", vit, one, tmp_path / "broken.png", "-output", tmp_path / "b")
    assert (status, said) == (1, "")
    assert errors.startswith(f"error: {tmp_path / 'broken.png'}: ")
    assert errors.count("\n") == 1
    swin = Predictor(files["swin_tiny_patch4_window7_224"])
    with pytest.raises(InputError, match="rollout isn't defined for SwinTransformer"):
        one_by_one("rollout", swin, [str(one)], Asked(), tmp_path / "c")
    with pytest.raises(InputError, match="found 17 images, a picture shows 16 at most; give -output a folder"):
        one_by_one("cam", swin, [str(one)] * 17, Asked(), tmp_path / "c.png")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "broken.png"]


def test_an_exported_model_isnt_looked_into(files, tmp_path):
    (tmp_path / "inference.pdiparams").touch()
    (tmp_path / "model.onnx").touch()
    for path in (tmp_path, tmp_path / "model.onnx"):
        with pytest.raises(InputError, match="an exported model has no layers to look into; give the checkpoint"):
            check_checkpoint(path)
    check_checkpoint(files["convnext_tiny"])
    check_checkpoint(tmp_path / "none")
    predictor = Predictor(files["convnext_tiny"])
    predictor.model = None
    for look in (overlay, sight):
        with pytest.raises(InputError, match="an exported model has no layers to look into"):
            look(predictor, load_sample_images().images[0])
    with pytest.raises(InputError, match="an exported model has no layers to look into"):
        positions(predictor)


def test_a_picture_that_cant_be_written_is_a_line(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(
        RunError, match=r"a.png isn't written \(No space left on device\); .*, or choose another -output"
    ):
        _write(tmp_path / "a.png", b"x")
    assert not list(tmp_path.iterdir())


def test_models_without_a_classifier_or_of_many_labels_are_looked_at(tmp_path):
    none = Predictor(saved(tmp_path, "convnext_tiny", (), ["MODEL.NUM_CLASSES", "0"]))
    photograph = load_sample_images().images[0]
    with pytest.raises(InputError, match=r"the model has no classifier \(NUM_CLASSES 0\): no class has a map"):
        overlay(none, photograph)
    assert opened(
        overlay(Predictor(saved(tmp_path, "vit_small_patch16_224", (), ["MODEL.NUM_CLASSES", "0"])), photograph)
    ).any()
    many = Predictor(saved(tmp_path, "vit_small_patch16_224", ("a", "b"), task="multi_label"))
    seen = sight(many, photograph)
    assert seen.said.classes == [["a", "b"][int(many.model(seen.image).numpy().argmax())]]
    assert cam_panels(many, seen, Asked(method="layercam"))[1].title.startswith(f"for {seen.said.classes[0]}")
