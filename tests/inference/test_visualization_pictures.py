"""Pictures of what a model sees: PNG files of the right content, the same bytes each time; bad
input is a line.
"""

import io

import numpy as np
import paddle
import pytest
from PIL import Image
from sklearn.datasets import load_sample_images
from support.small_checkpoints import MODELS, cut, opened, saved

from errors import InputError, RunError
from inference import Predictor
from inference.visualization import overlay
from inference.visualization.attention import attention
from inference.visualization.components import principal
from inference.visualization.draw import heat, to_colours
from inference.visualization.embeddings import WRONG, plane, pooled_features, predictions
from inference.visualization.maps import MapOptions, cam_panels, feature_panels
from inference.visualization.positions import positions, similarities, tables
from inference.visualization.predicted_image import class_index, predict_image
from tools.visualize import list_images, true_class


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: saved(folder, name) for name in MODELS}


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    return cut(tmp_path_factory.mktemp("photographs"))


@pytest.mark.smoke
@pytest.mark.parametrize("name", MODELS)
def test_an_overlay_is_the_attention_where_there_is_some(files, name):
    predictor = Predictor(files[name])
    photograph = load_sample_images().images[1]
    found = overlay(predictor, photograph)
    assert found == overlay(predictor, photograph)
    assert Image.open(io.BytesIO(found)).format == "PNG"
    seen = predict_image(predictor, photograph)
    assert seen.base.shape == opened(found).shape == (224, 224, 3)
    assert (seen.base[::7, ::7] == predictor.pixels(photograph)).all()
    if name == "convnext_tiny":
        assert found == overlay(predictor, photograph, "cam")
        with pytest.raises(
            InputError, match="ConvNeXt has no attention that can be drawn; use cam"
        ):
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
        drawn[:, 10],
        np.broadcast_to(0.3 * grey + 0.7 * to_colours(np.zeros(1)), (20, 3)),
        atol=0.003,
    )
    np.testing.assert_allclose(
        drawn[:, 29],
        np.broadcast_to(0.3 * grey + 0.7 * to_colours(np.ones(1)), (20, 3)),
        atol=0.003,
    )
    np.testing.assert_allclose(
        heat(base, np.array([[0.5]]), None, 1.0)[0, 0] / 255,
        0.3 * grey + 0.7 * to_colours(np.full(1, 0.5))[0],
        atol=0.003,
    )


@pytest.mark.parametrize(
    ("mode", "box"), [("center", (120, 40, 280, 200)), ("squash", (100, 60, 300, 180))]
)
def test_the_part_of_the_original_is_what_the_model_sees(files, mode, box):
    rows, columns = np.mgrid[:240, :400]
    slopes = np.stack([columns // 2, rows, 0 * rows], 2).astype(np.uint8)
    if mode == "center":  # the short side is 320 pixels at CROP_PCT 0.1: more is seen at 0.75
        box = (110, 30, 290, 210)
    crop = "0.75" if mode == "center" else "0.5"
    options = ["DATA.CROP_PCT", crop, "DATA.CROP_MODE", mode]
    predictor = Predictor(files["convnext_tiny"], options=options)
    seen = predict_image(predictor, slopes, original=True)
    assert (seen.base == slopes).all()
    np.testing.assert_allclose(seen.box, box, atol=4)
    left, top, right, bottom = seen.box
    # what is seen at its corners is what lies there
    pixels = predictor.pixels(slopes).astype(float)
    np.testing.assert_allclose(pixels[0, 0, :2], (left / 2, top), atol=6)
    np.testing.assert_allclose(pixels[-1, -1, :2], (right / 2, bottom), atol=6)


def test_classes_are_meant_by_name_or_number(files):
    predictor = Predictor(files["convnext_tiny"])
    assert [class_index(predictor, name) for name in ("flower, red", "0", "1")] == [1, 0, 1]
    with pytest.raises(
        InputError, match="-class is 'fridge', which the model doesn't know; did you mean bridge\\?"
    ):
        class_index(predictor, "fridge")
    with pytest.raises(
        InputError, match="-class is '2', which .* know; give a name, or a number from 0 to 1"
    ):
        class_index(predictor, "2")
    seen = predict_image(predictor, load_sample_images().images[0])
    assert cam_panels(predictor, seen, MapOptions(method="gradcam", output="flower, red"))[
        1
    ].title.startswith("for flower, red")


def test_principal_components_are_of_all_images_together():
    rng = np.random.default_rng(0)
    maps = [
        rng.normal(0, (9, 1, 4, 0.1, 2), (6, 4, 5)),
        rng.normal(0, (9, 1, 4, 0.1, 2), (3, 5, 5)) + 1,
    ]
    found = principal(maps)
    assert [one.shape for one in found] == [(6, 4, 3), (3, 5, 3)]
    flat = np.concatenate([one.reshape(-1, 5) for one in maps])
    flat = flat - flat.mean(0)
    _, _, vectors = np.linalg.svd(flat, full_matrices=False)
    vectors *= np.sign(vectors[np.arange(5), np.abs(vectors).argmax(1)])[:, None]
    values = flat @ vectors[:3].T
    low, high = np.quantile(values, [0.01, 0.99], axis=0)
    expected = np.clip((values - low) / (high - low), 0, 1)
    np.testing.assert_allclose(
        np.concatenate([one.reshape(-1, 3) for one in found]), expected, atol=1e-9
    )
    assert not principal([np.ones((2, 2, 2))])[0].any()


def test_features_are_of_each_stage(files, photographs):
    predictor = Predictor(files["convnext_tiny"])
    sights = [
        predict_image(predictor, photographs / "bridge" / f"{place}.png") for place in range(2)
    ]
    rows = feature_panels(predictor, sights, MapOptions(method="pca"))
    assert [panel.title for panel in rows[0][1:]] == [
        f"stages.{i}\n{8 >> i} x {8 >> i}" for i in range(4)
    ]
    [[_, one], _] = feature_panels(predictor, sights, MapOptions(1, "pca"))
    assert one.title == "stages.1\n4 x 4"
    with paddle.no_grad():
        maps = [
            predictor.model.forward_intermediates(seen.image, [1], intermediates_only=True)[0]
            for seen in sights
        ]
    expected = principal([each.numpy()[0].transpose(1, 2, 0) for each in maps])[0]
    np.testing.assert_allclose(one.image[28::56, 28::56] / 255, expected, atol=0.003)
    rows = feature_panels(predictor, sights, MapOptions(0, "channels"))
    assert (
        [panel.title for panel in rows[0][1:]]
        == [panel.title for panel in rows[1][1:]]
        == [f"channel {i}" for i in range(4)]
    )
    with pytest.raises(
        InputError, match="-block is 4, but the model has 4 intermediates: give 0 to 3"
    ):
        feature_panels(predictor, sights, MapOptions(4, "pca"))


def test_positions_are_the_models(files):
    predictor = Predictor(files["vit_small_patch16_224"])
    alike = similarities(predictor.model)
    places = predictor.model.pos_embed.numpy()[0, 1:].astype(float)
    one = places[1 * 4 + 2]
    other = places[3 * 4 + 0]
    assert alike[1, 2, 3, 0] == pytest.approx(
        one @ other / np.linalg.norm(one) / np.linalg.norm(other)
    )
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
    with pytest.raises(InputError, match="-block is 3, but the model has 3 tables: give 0 to 2"):
        positions(predictor, 3)
    with pytest.raises(
        InputError,
        match="ConvNeXt has no position embeddings and no table of relative positions; positions supports",
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
    with pytest.raises(InputError, match="found 4 images, expected at least 5"):
        plane(features[:4])
    with pytest.raises(
        InputError, match="umap-learn isn't installed; pip install umap-learn, or use -method tsne"
    ):
        plane(features, "umap")


def test_predictions_and_mistakes(files, photographs, monkeypatch):
    predictor = Predictor(files["vit_small_patch16_224"], batch_size=3)
    images, between = list_images([str(photographs)])
    truth = [true_class(folders, predictor.classes) for folders in between]
    assert truth == ["bridge"] * 4 + ["flower, red"] * 4
    features, shares = pooled_features(predictor, images)
    assert features.shape == (8, 16)
    head = predictor.model.head
    logits = features @ head.weight.numpy() + head.bias.numpy()
    np.testing.assert_allclose(predictor.probabilities(logits), shares, atol=1e-6)
    right = sum(
        predictor.classes[row.argmax()] == name for row, name in zip(shares, truth, strict=True)
    )
    assert predictions(predictor, images, truth)[1] == f"{right} of 8 right"
    said = [predictor.classes[row.argmax()] for row in shares]
    drawn = []
    monkeypatch.setattr(
        "inference.visualization.embeddings.sheet", lambda *args: drawn.append(args) or b""
    )
    wrong = [name for name in predictor.classes for _ in range(4)][::-1] if said == truth else truth
    predictions(predictor, images, wrong, mistakes=True, most=2)
    [([panels], title)] = drawn
    certain = sorted(
        (row.max() for row, one, name in zip(shares, said, wrong, strict=True) if one != name),
        reverse=True,
    )
    assert [panel.title.partition("(")[2][:3] for panel in panels] == [
        f"{share:.0%}" for share in certain[:2]
    ]
    assert f"2 of {len(certain)} shown" in title
    assert {panel.frame for panel in panels} == {WRONG}
    assert all("\nit is " in panel.title for panel in panels)
    with pytest.raises(InputError, match="there are no mistakes to show: 8 of 8 right"):
        predictions(predictor, images, said, mistakes=True)
    with pytest.raises(InputError, match="-mistakes needs the true classes"):
        predictions(predictor, images, [None] * 8, mistakes=True)
    with pytest.raises(
        InputError, match="the class 'bridges', which the model doesn't know; did you mean bridge"
    ):
        predictions(predictor, images, ["bridges"] * 8)
    (photographs / "flower, red" / "9.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(RunError, match="9.png: "):
        predictions(predictor, list_images([str(photographs)])[0], [None] * 9)
    (photographs / "flower, red" / "9.png").unlink()
