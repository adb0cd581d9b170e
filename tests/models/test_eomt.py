"""EoMT against transformers' (golden/make_eomt.py), its masks, and what doesn't fit."""

import json
import zlib

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.formula import array
from safetensors.numpy import save_file

from config import get_config
from errors import InputError
from models import build_model
from models.heads import matching
from models.heads.eomt import DoublingConv2D
from models.heads.matching import Answers, matching_loss
from weights import load_weights
from weights.layout import linear_weights
from weights.names import timm_names

GOLDEN = np.load(ROOT / "tests" / "golden" / "eomt.npz")
DESCRIPTION = json.loads((ROOT / "tests" / "golden" / "eomt.json").read_text())
CLASSES = 5
SIDE = 48
POINTS = 64
IGNORED = 255
OPTIONS = [
    "TASK", "segmentation", "MODEL.TYPE", "ViT", "MODEL.NUM_CLASSES", str(CLASSES), "DATA.IMAGE_SIZE", str(SIDE),
    "MODEL.PATCH_SIZE", "8", "MODEL.EMBED_DIM", "16", "MODEL.DEPTH", "4", "MODEL.NUM_HEADS", "2",
    "MODEL.INIT_VALUES", "1.0", "MODEL.REG_TOKENS", "2", "MODEL.NO_EMBED_CLASS", "True",
    "HEAD.NAME", "eomt", "HEAD.NUM_BLOCKS", "2", "HEAD.NUM_QUERIES", "6", "DATA.CROP_MODE", "squash", "DATA.CROP_PCT", "1.0",
]  # fmt: skip


# As in golden/make_eomt.py, which needs torch.
def values(name, shape):
    if name == "attn_mask_probs":
        return np.ones(shape, np.float32)
    if name == "criterion.empty_weight":
        return np.float32([1.0] * (shape[0] - 1) + [0.1])
    normal = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    if len(shape) == 1:
        normal = 0.2 * normal + ("norm" in name and "weight" in name) + ("lambda" in name) * 0.5
    elif "token" in name or "position" in name or name == "query.weight":
        normal = normal * 0.5
    else:
        normal = normal * 1.5 * np.prod(shape[1:]) ** -0.5
    return normal.astype(np.float32)


def points(shape):
    index = np.arange(1, np.prod(shape) + 1, dtype=np.float64)
    return paddle.to_tensor((index * 0.7548776662466927 % 1).reshape(shape).astype(np.float32))


def masks():
    rows, columns = np.mgrid[:SIDE, :SIDE]
    first = np.where(rows < 20, 0, np.where(columns < 30, 3, 4))
    second = np.where((rows - 24) ** 2 + (columns - 20) ** 2 < 200, 1, 3)
    return np.stack([first, second]).astype(np.uint8)


def images():
    return paddle.to_tensor(array("images", (2, 3, SIDE, SIDE)) * 5)


def arrays():
    return {name: values(name, tuple(shape)) for name, shape in DESCRIPTION["shapes"].items()}


@pytest.fixture
def model(tmp_path):
    """The model with transformers' weights, in evaluation mode."""
    save_file(arrays(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(DESCRIPTION["config"]))
    model = build_model(get_config(None, OPTIONS))
    load_weights(model, tmp_path)
    model.eval()
    return model


def answers_of(model, pixels):
    """Returns the head's answers, as it computes them in the model's mode."""
    return model.decode_head.features(model.encoder, pixels, []).answers


def within(found, expected, tolerance=1e-5):
    np.testing.assert_allclose(found, expected, atol=tolerance * np.ptp(expected), rtol=0)


@pytest.mark.smoke
@pytest.mark.parametrize("mode", ["masked", "plain"])
def test_answers_and_scores(model, mode):
    if mode == "plain":
        model.decode_head.attn_mask_probs.set_value(np.zeros(2, np.float32))
    answers = answers_of(model, images())
    assert len(answers) == (3 if mode == "masked" else 1)
    for layer, (mask_logits, class_logits) in enumerate(answers):
        within(mask_logits.numpy(), GOLDEN[f"{mode}/masks/{layer}"])
        within(class_logits.numpy(), GOLDEN[f"{mode}/classes/{layer}"])
    logits = model(images())
    assert list(logits.shape) == [2, CLASSES, SIDE, SIDE]
    within(logits.exp().numpy()[:, :, ::3, ::3], GOLDEN[f"{mode}/scores"])
    # The images have an effect.
    assert np.abs(np.diff(GOLDEN[f"{mode}/scores"], axis=0)).max() > 0.1


@pytest.mark.smoke
def test_loss_and_gradients(model, monkeypatch):
    monkeypatch.setattr(paddle, "rand", points)
    model.train()
    losses = []
    # Points differ by the number of images, so each is a batch of its own, as in the golden file.
    for image, mask in zip(images().split(2), paddle.to_tensor(masks()).split(2), strict=True):
        loss = matching_loss(model(image), mask, IGNORED, POINTS)
        loss.sum().backward()
        losses.append(loss.item())
    np.testing.assert_allclose(losses, GOLDEN["losses"], rtol=1e-5)

    stored = {
        name.removeprefix("grad/"): GOLDEN[name] for name in GOLDEN if name.startswith("grad/")
    }
    expected = timm_names(model.weight_names, stored, "torch", list(model.state_dict()))
    transposed = linear_weights(model)
    parameters = dict(model.named_parameters())
    assert expected.keys() == parameters.keys()
    # A gradient whose terms cancel out is only rounding.
    least = 2e-2 * max(np.ptp(gradient) for gradient in expected.values())
    for name, gradient in expected.items():
        found = parameters[name].grad.numpy()
        found = found.T if name in transposed else found
        atol = 1e-5 * max(np.ptp(gradient), least)
        np.testing.assert_allclose(found, gradient, atol=atol, rtol=0, err_msg=name)


def test_names_of_the_authors(model, tmp_path):
    own = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    transposed = linear_weights(model)
    of_authors = {}
    for name, value in own.items():
        renamed = name.replace("decode_head.", "network.")
        renamed = renamed.replace("encoder.", "network.encoder.backbone.")
        of_authors[renamed] = np.ascontiguousarray(value.T if name in transposed else value)
    of_authors["criterion.empty_weight"] = np.ones(CLASSES + 1, np.float32)
    of_authors["network.encoder.pixel_mean"] = np.ones((1, 3, 1, 1), np.float32)
    save_file(of_authors, tmp_path / "authors.safetensors")
    fresh = build_model(get_config(None, OPTIONS))
    load_weights(fresh, tmp_path / "authors.safetensors")
    for name, tensor in fresh.state_dict().items():
        np.testing.assert_array_equal(tensor.numpy(), own[name], err_msg=name)
