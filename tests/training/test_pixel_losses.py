"""The losses of pixels against torch and their definitions (golden/make_pixel_losses.py)."""

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.formula import array

from training.losses.pixels import PixelLoss, pixel_cross_entropy

GOLDEN = np.load(ROOT / "tests" / "golden" / "pixel_losses.npz")
CLASSES = 5
SIZE = (7, 9)
IGNORED = 255
WEIGHT = paddle.to_tensor([0.5, 1.0, 1.5, 2.0, 2.5])
LOSSES = {
    "cross_entropy": PixelLoss(),
    "weighted": PixelLoss(weight=WEIGHT),
    "ohem": PixelLoss("ohem", ohem_threshold=0.3, ohem_keep=5),
    "ohem_keep": PixelLoss("ohem", ohem_threshold=0.0, ohem_keep=11),
    "focal": PixelLoss("focal", focal_gamma=2.0),
    "focal_half": PixelLoss("focal", focal_gamma=0.5),
    "dice": PixelLoss(dice=0.7),
}


def masks():
    """Returns the masks of golden/make_pixel_losses.py, which needs torch."""
    values = (array("mask", (3, *SIZE)) * 1e4).astype(int) % CLASSES
    values[0, :2] = IGNORED
    values[0, :, 4] = IGNORED
    values[2] = 3
    return values.astype(np.uint8)


def logits_of(values):
    logits = paddle.to_tensor(np.asarray(values, np.float32))
    logits.stop_gradient = False
    return logits


@pytest.mark.parametrize("name", LOSSES)
def test_values_and_gradients(name):
    logits = logits_of(array("logits", (3, CLASSES, *SIZE)) * 20)
    losses = LOSSES[name](logits, paddle.to_tensor(masks()), IGNORED)
    np.testing.assert_allclose(losses.numpy(), GOLDEN[name], rtol=1e-5)
    losses.sum().backward()
    expected = GOLDEN[f"grad/{name}"]
    np.testing.assert_allclose(logits.grad.numpy(), expected, atol=1e-5 * np.ptp(expected), rtol=0)
    # Images differ, and ignored pixels count nowhere.
    assert len(set(losses.numpy().round(4).tolist())) == 3
    assert not logits.grad.numpy()[0, :, :2].any()


@pytest.mark.parametrize("name", LOSSES)
def test_no_pixel_with_a_class(name):
    logits = logits_of(array("logits", (2, CLASSES, *SIZE)) * 20)
    mask = np.full((2, *SIZE), IGNORED, np.uint8)
    mask[1, 0, 0] = 2
    losses = LOSSES[name](logits, paddle.to_tensor(mask), IGNORED)
    losses.sum().backward()
    assert losses[0].item() == 0
    assert losses[1].item() > 0
    gradient = logits.grad.numpy()
    assert not gradient[0].any()
    assert gradient[1, :, 0, 0].all()
    gradient[1, :, 0, 0] = 0
    assert not gradient.any()


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_reads_its_image_alone(name):
    logits = array("logits", (3, CLASSES, *SIZE)) * 20
    whole = LOSSES[name](paddle.to_tensor(logits), paddle.to_tensor(masks()), IGNORED).numpy()
    for index in range(3):
        one = slice(index, index + 1)
        alone = LOSSES[name](paddle.to_tensor(logits[one]), paddle.to_tensor(masks()[one]), IGNORED)
        np.testing.assert_allclose(alone.numpy(), whole[one], rtol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_large_logits(name):
    """The first pixel is as right as can be, the second as wrong."""
    values = np.full((1, CLASSES, 1, 2), -1e4)
    values[0, 1] = 1e4
    logits = logits_of(values)
    losses = LOSSES[name](logits, paddle.to_tensor(np.uint8([[[1, 3]]])), IGNORED)
    losses.sum().backward()
    assert np.isfinite(logits.grad.numpy()).all()
    weights = [1.0, 2.0] if name == "weighted" else [1.0, 1.0]
    # OHEM keeps both.
    expected = 2e4 * weights[1] / sum(weights)
    if name == "dice":
        # Classes 0, 2 and 4 are neither there nor found.
        expected += 0.7 * ((1 - 3 / 4) + (1 - 1 / 2)) / CLASSES
    assert losses.item() == pytest.approx(expected, rel=1e-6)


def test_ohem_keeps_what_is_equally_hard():
    """All pixels are alike, so they are all kept: the loss is finite, and that of any of them."""
    logits = logits_of(np.tile(np.float32([3, 0, 0, 0, 0])[None, :, None, None], (1, 1, 4, 4)))
    mask = paddle.zeros([1, 4, 4], "uint8")
    losses = PixelLoss("ohem", ohem_threshold=0.5, ohem_keep=3)(logits, mask, IGNORED)
    assert losses.item() == pytest.approx(np.log(1 + 4 * np.exp(-3)), rel=1e-5)
    losses.sum().backward()
    gradient = logits.grad.numpy()
    np.testing.assert_array_equal(gradient, np.broadcast_to(gradient[:, :, :1, :1], gradient.shape))


def test_ohem_of_all_pixels_is_cross_entropy():
    logits = paddle.to_tensor(array("logits", (3, CLASSES, *SIZE)) * 20)
    mask = paddle.to_tensor(masks())
    every = PixelLoss("ohem", ohem_threshold=0.0, ohem_keep=1000)(logits, mask, IGNORED)
    np.testing.assert_allclose(
        every.numpy(), pixel_cross_entropy(logits, mask, IGNORED).numpy(), rtol=1e-6
    )


def test_masks_of_sixteen_bits():
    logits = paddle.to_tensor(array("logits", (3, CLASSES, *SIZE)) * 20)
    mask = masks().astype(np.int32)
    expected = pixel_cross_entropy(logits, paddle.to_tensor(masks()), IGNORED)
    mask[mask == IGNORED] = 65535
    found = pixel_cross_entropy(logits, paddle.to_tensor(mask), 65535)
    np.testing.assert_array_equal(found.numpy(), expected.numpy())
