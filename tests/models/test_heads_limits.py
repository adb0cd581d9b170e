"""Heads and encoders at their limits: small images, images of one size, maps that don't fit."""

import numpy as np
import paddle
import pytest

from config import get_config
from errors import InputError
from models import build_model
from models.heads.base import resized

ENCODERS = {
    "PVTv2": [
        "MODEL.STAGE_DEPTHS", "[1,1,1,1]", "MODEL.EMBED_DIMS", "[8,8,8,8]", "MODEL.NUM_HEADS", "[1,1,1,1]",
        "MODEL.MLP_RATIO", "2", "MODEL.SR_RATIO", "[8,4,2,1]",
    ],
    "ConvNeXt": ["MODEL.STAGE_DEPTHS", "[1,1,1,1]", "MODEL.EMBED_DIMS", "[8,8,8,8]"],
    "ViT": ["MODEL.PATCH_SIZE", "8", "MODEL.EMBED_DIM", "8", "MODEL.DEPTH", "4", "MODEL.NUM_HEADS", "2"],
    "Swin": [
        "MODEL.EMBED_DIM", "8", "MODEL.STAGE_DEPTHS", "[1,1,1,1]", "MODEL.NUM_HEADS", "[1,1,1,1]", "MODEL.WINDOW_SIZE", "2",
    ],
    "ResMLP": ["MODEL.PATCH_SIZE", "8", "MODEL.EMBED_DIM", "8", "MODEL.DEPTH", "2"],
}  # fmt: skip


def configured(kind, head, *options):
    words = ["TASK", "segmentation", "MODEL.TYPE", kind, *ENCODERS[kind], "HEAD.NAME", head]
    words += ["MODEL.NUM_CLASSES", "3", "DATA.CROP_MODE", "own", "DATA.IMAGE_SIZE", "64"]
    return get_config(None, [*words, *options])


def evaluated(kind, head, images):
    paddle.seed(0)
    model = build_model(configured(kind, head))
    model.eval()
    with paddle.no_grad():
        return model, model(paddle.to_tensor(images)).numpy()


@pytest.mark.parametrize("size", [(8, 8), (5, 300), (1, 1)])
@pytest.mark.parametrize("kind", ["PVTv2", "ConvNeXt", "ViT", "Swin"])
def test_small_images_are_padded_with_the_mean_colour(kind, size):
    height, width = size
    images = np.random.default_rng(0).normal(size=(2, 3, *size)).astype(np.float32)
    model, found = evaluated(kind, "linear", images)
    assert found.shape == (2, 3, *size)
    assert np.abs(found[0] - found[1]).max() > 1e-4
    least = {"PVTv2": 29, "ConvNeXt": 32}.get(kind)
    if least:
        padded = np.zeros((2, 3, max(least, height), max(least, width)), np.float32)
        padded[:, :, :height, :width] = images
        with paddle.no_grad():
            whole = model(paddle.to_tensor(padded)).numpy()
        np.testing.assert_allclose(found, whole[:, :, :height, :width], atol=1e-6)


def test_maps_of_several_sizes_are_not_added_up():
    for kind in ("PVTv2", "Swin"):
        with pytest.raises(
            InputError, match=r"setr_mla adds maps of one size, .* \[4, 8, 16, 32\]"
        ):
            build_model(configured(kind, "setr_mla"))


def test_a_head_that_reads_what_is_not_there_is_named():
    message = "HEAD.NAME topformer reads intermediate -5, ConvNeXt has .* -4 to 3; set HEAD.INDICES"
    with pytest.raises(InputError, match=message):
        build_model(configured("ConvNeXt", "topformer"))
    with pytest.raises(
        InputError, match="^HEAD.INDICES has 7, ConvNeXt has intermediates -4 to 3$"
    ):
        build_model(configured("ConvNeXt", "linear", "HEAD.INDICES", "[7]"))


@pytest.mark.parametrize(
    ("kind", "head", "name"),
    [("PVTv2", "trans2seg", "HEAD.NAME trans2seg"), ("ResMLP", "linear", "ResMlp")],
)
def test_images_of_one_size_need_windows_or_squash(kind, head, name):
    options = []
    if head == "trans2seg":
        options = ["HEAD.TRANSFORMER_CHANNELS", "8", "HEAD.TRANSFORMER_DEPTH", "2"]
    squash = ["DATA.CROP_MODE", "squash", "DATA.CROP_PCT", "1.0"]
    message = f"^{name} only takes images of 64 x 64; set HEAD.STRIDE to compute maps in"
    for others in ([], [*squash, "DATA.EVAL_SIZE", "96"], [*squash, "METHOD.SCALES", "[1.0,1.5]"]):
        with pytest.raises(InputError, match=message):
            build_model(configured(kind, head, *options, *others))
    for others in (["HEAD.STRIDE", "32"], squash, [*squash, "DATA.EVAL_SIZE", "64"]):
        model = build_model(configured(kind, head, *options, *others))
        model.eval()
        assert model(paddle.rand([1, 3, 64, 64])).shape == [1, 3, 64, 64]


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((1, 1), [9.5]),
        ((1, 3), [7.833333, 9.5, 11.166666]),
        ((3, 1), [2.833333, 9.5, 16.166667]),
        ((1, 5), [7.5, 8.5, 9.5, 10.5, 11.5]),
    ],
)
def test_one_place_is_the_middle_as_in_pytorch(monkeypatch, compiled, size, expected):
    """Torch 2.13's ``interpolate`` of 0 to 19 in four rows gives these values."""
    if not compiled:
        monkeypatch.setattr("ops.usable", lambda _: False)
    maps = paddle.arange(20, dtype="float32").reshape([1, 1, 4, 5])
    maps.stop_gradient = False
    found = resized(maps, size)
    np.testing.assert_allclose(found.numpy().ravel(), expected, atol=1e-5)
    found.sum().backward()
    assert maps.grad.sum().item() == pytest.approx(len(expected), abs=1e-5)
