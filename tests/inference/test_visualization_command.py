"""tools/visualize.py: what it leaves, and that a wrong command, an export, a full disk are a line
each.
"""

import contextlib
import re
import subprocess
import sys

import pytest
from conftest import ROOT
from sklearn.datasets import load_sample_images
from support.small_checkpoints import MODELS, cut, opened, saved
from support.small_models import SMALL_MODELS

from errors import InputError, RunError
from inference import Predictor
from inference.visualization import overlay
from inference.visualization.attention import has_attention, has_rollout
from inference.visualization.maps import MapOptions, cam_panels
from inference.visualization.positions import positions, similarities, tables
from inference.visualization.predicted_image import predict_image
from tools import visualize as tool
from tools.visualize import _parser, _write, check, list_images, one_by_one


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: saved(folder, name) for name in MODELS}


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    return cut(tmp_path_factory.mktemp("photographs"))


def visualize(*arguments):
    command = [sys.executable, str(ROOT / "tools" / "visualize.py"), *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={"PATH": "/usr/bin:/bin"}
    )
    return done.returncode, done.stdout, done.stderr


# What the help calls an architecture, where it isn't the class's name.
NAMES = {
    "eva": "EVA-02",
    "metaformer": "CAFormer",
    "naflexvit": "NaFlexViT",
    "swinv2": "Swin V2",
    "t2t_vit": "T2T-ViT",
    "vit": "ViT",
}


def has_positions(model):
    with contextlib.suppress(AttributeError):
        return similarities(model).size > 0
    return bool(tables(model))


@pytest.mark.parametrize("kind", SMALL_MODELS)
def test_the_help_names_the_architectures_that_are_drawn(kind):
    model = SMALL_MODELS[kind]()
    drawn = {
        "attention": has_attention(model),
        "rollout": has_rollout(model),
        "positions": has_positions(model),
    }
    for way, expected in drawn.items():
        listed = re.search(rf"{way}: ([^.]*)\.", tool.__doc__)[1]
        names = {name.lower() for name in re.split(r",\s+", listed)}
        assert (NAMES.get(kind, kind).lower() in names) == expected, way


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "attention M PHOTO -output there.png",
            "-output is there.png, which already exists; choose a new name",
        ),
        (
            "attention M PHOTO -output x.jpg",
            "-output is x.jpg, expected a file that ends in .png, or a folder",
        ),
        (
            "attention M PHOTO -output x.png -class 1",
            "-class has no effect for attention; it is for cam",
        ),
        (
            "rollout M PHOTO -output x.png -block 1",
            "-block has no effect for rollout; it is for attention, features",
        ),
        (
            "rollout M PHOTO -output x.png -mass 0.6",
            "-mass has no effect for rollout; it is for attention",
        ),
        ("attention M PHOTO -output x.png -mass 0", "-mass is 0, expected above 0 to 1"),
        ("attention M PHOTO -output x.png -mass nan", "-mass is nan, expected above 0 to 1"),
        (
            "features M PHOTO -output x.png -threshold 0.5",
            "-threshold only has an effect on features -method foreground",
        ),
        (
            "features M PHOTO -output x.png -method foreground -threshold 1.5",
            "-threshold is 1.5, expected 0 to 1",
        ),
        (
            "cam M PHOTO -output x.png -method cam",
            "-method is 'cam', expected gradcam, hirescam, gradcam++, layercam",
        ),
        (
            "rollout M PHOTO -output x.png -method a",
            "-method is 'a', rollout has no methods; leave it out",
        ),
        ("positions M PHOTO -output x.png", "positions doesn't need images; leave them out"),
        ("cam M -output x.png", "cam needs images"),
        ("predictions M PHOTO -output x.png -most 0", "-most is 0, expected 1 or more"),
        ("cam M none.jpg -output x.png", "'none.jpg': there is no such file or folder"),
        (
            "cam M PHOTO -output there.png/a/x.png",
            "there.png isn't a writable folder; choose another",
        ),
        ("cam M empty -output x.png", "empty: no image files found; images end in .jpg .jpeg .png"),
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
        list_images(read.images)
    assert message in str(caught.value)


def test_the_tool_draws_one_picture_or_one_for_each_image(files, photographs, tmp_path):
    vit = files["vit_small_patch16_224"]
    one = photographs / "bridge/0.png"
    other = photographs / "flower, red/0.png"
    status, said, errors = visualize("attention", vit, one, other, "-output", tmp_path / "a")
    assert (status, said, errors) == (0, f"{tmp_path / 'a'}: 2 pictures of attention\n", "")
    assert sorted(file.name for file in (tmp_path / "a").iterdir()) == ["0.png", "0_2.png"]
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    status, said, errors = visualize(
        "cam", vit, one, tmp_path / "broken.png", "-output", tmp_path / "b"
    )
    assert (status, said) == (1, "")
    assert errors.startswith(f"error: {tmp_path / 'broken.png'}: ")
    assert errors.count("\n") == 1
    swin = Predictor(files["swin_tiny_patch4_window7_224"])
    with pytest.raises(InputError, match="rollout isn't defined for SwinTransformer"):
        one_by_one("rollout", swin, [str(one)], MapOptions(), tmp_path / "c")
    with pytest.raises(
        InputError, match="found 17 images, a picture shows 16 at most; set -output to a folder"
    ):
        one_by_one("cam", swin, [str(one)] * 17, MapOptions(), tmp_path / "c.png")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "broken.png"]


def test_an_exported_model_isnt_looked_into(files):
    predictor = Predictor(files["convnext_tiny"])
    predictor.model = None
    for look in (overlay, predict_image):
        with pytest.raises(InputError, match="an exported model has no accessible layers"):
            look(predictor, load_sample_images().images[0])
    with pytest.raises(InputError, match="an exported model has no accessible layers"):
        positions(predictor)


def test_a_picture_that_cant_be_written_is_a_line(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(
        RunError,
        match=r"a.png can't be written \(No space left on device\); .*, or choose another -output",
    ):
        _write(tmp_path / "a.png", b"x")
    assert not list(tmp_path.iterdir())


def test_models_without_a_classifier_or_of_many_labels_are_looked_at(tmp_path):
    none = Predictor(saved(tmp_path, "convnext_tiny", (), ["MODEL.NUM_CLASSES", "0"]))
    photograph = load_sample_images().images[0]
    with pytest.raises(
        InputError, match=r"the model has no classifier \(NUM_CLASSES 0\): use attention"
    ):
        overlay(none, photograph)
    assert opened(
        overlay(
            Predictor(saved(tmp_path, "vit_small_patch16_224", (), ["MODEL.NUM_CLASSES", "0"])),
            photograph,
        )
    ).any()
    many = Predictor(saved(tmp_path, "vit_small_patch16_224", ("a", "b"), task="multilabel"))
    seen = predict_image(many, photograph)
    assert seen.prediction.classes == [["a", "b"][int(many.model(seen.image).numpy().argmax())]]
    assert cam_panels(many, seen, MapOptions(method="layercam"))[1].title.startswith(
        f"for {seen.prediction.classes[0]}"
    )
