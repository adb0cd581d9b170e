"""Small exported models, for tests that write and read exports."""

import hashlib
import json

import paddle
import pytest
from golden.formula import array

from config import get_config
from inference import Predictor
from inference.exporting import write_export
from models import build_model
from support.small_models import SMALL_MODELS, small_swin
from weights import save_weights
from weights.layout import sublayer

# The last two pad their maps.
EXPORTED_KINDS = [*SMALL_MODELS, "swin_padded", "swin_odd"]


def small_model(kind):
    """Returns the model of one of ``EXPORTED_KINDS``, in evaluation mode."""
    paddle.seed(0)
    model = SMALL_MODELS[kind]() if kind in SMALL_MODELS else small_swin(kind)
    # Some classifiers begin at zero.
    for name in model.classifier_names():
        weight = sublayer(model, name).weight
        weight.set_value(array(name, tuple(weight.shape)))
    model.eval()
    return model


def images_for(model):
    """Returns three images [3, channels, height, width] of the model's size."""
    return paddle.to_tensor(30 * array("images", (3, model.in_channels, *model.image_size)))


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """Makes temporary files in the test's own folder."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Returns the weights of a small ViT for colour images of 32 x 32, and the options that build
    it.
    """
    options = [
        "DATA.IMAGE_SIZE", "32", "DATA.CROP_PCT", "0.9", "MODEL.PATCH_SIZE", "8", "MODEL.EMBED_DIM", "16",
        "MODEL.DEPTH", "2", "MODEL.NUM_HEADS", "2", "MODEL.NUM_CLASSES", "5",
    ]  # fmt: skip
    paddle.seed(3)
    model = build_model(get_config(None, options))
    model.head.weight.set_value(array("head", (16, 5)))
    folder = tmp_path_factory.mktemp("weights")
    save_weights(model, folder / "model.safetensors")
    return folder / "model.safetensors", options


def exported(weights, target, kind="paddle", precision="float32", **how):
    """Exports the model of ``weights`` into a folder; returns its Predictor and the comparison."""
    file, options = weights
    (target.parent / "small.yaml").write_text("TAG: of a test\n")
    trained = Predictor(file, str(target.parent / "small.yaml"), options)
    names = [f"class {number}" for number in range(5)]
    comparison = write_export(trained.config, trained.model, target, names, kind, precision, **how)
    return trained, comparison


def replace_file(folder, name, content):
    """Replaces a file of an export and its checksum."""
    (folder / name).write_bytes(content)
    manifest = json.loads((folder / "preprocess.json").read_text())
    manifest["files"][name] = hashlib.sha256(content).hexdigest()
    (folder / "preprocess.json").write_text(json.dumps(manifest))
