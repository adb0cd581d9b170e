"""Compares our models with the golden files that golden/record.py writes, and reads what
tools/check_parity.py printed of the models at full size (golden/parity).
"""

import contextlib
import csv
from pathlib import Path

import numpy as np
import paddle
from conftest import ROOT
from golden.formula import array, places
from safetensors.numpy import save_file

from weights import load_weights
from weights.layout import file_name, linear_weights


def assert_same_bits(found, expected):
    """Asserts that two computations of the same batch give the same bits.

    On a CPU without AVX-512 they needn't: on an AMD EPYC with AVX2 and two threads, some answers
    differ in their last bit. There they are equal to 1e-6 of their range.
    """
    found = np.asarray(found)
    expected = np.asarray(expected)
    if "avx512f" in Path("/proc/cpuinfo").read_text():
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_allclose(found, expected, atol=1e-6 * np.ptp(expected), rtol=0)


def load_formula(model, folder, array=array):
    """Loads the formula's weights from a file in timm's names and layout.

    Returns the model in evaluation mode.
    """
    transposed = linear_weights(model)
    shapes = {
        file_name(name): tuple(t.shape)[::-1] if name in transposed else tuple(t.shape)
        for name, t in model.state_dict().items()
    }
    save_file(
        {name: array(name, shape) for name, shape in shapes.items()}, folder / "timm.safetensors"
    )
    load_weights(model, folder / "timm.safetensors")
    model.eval()
    return model


@contextlib.contextmanager
def in_float64():
    """Within it, new models are float64.

    Gradients are then the same on each CPU: rounding to float32 moves values of ReLUs past 0.
    """
    paddle.set_default_dtype("float64")
    try:
        yield
    finally:
        paddle.set_default_dtype("float32")


def assert_parity(model, name, folder, array=array, within=1e-5):
    """Asserts that logits, features, intermediates and gradients are those of the golden file.

    The tolerance is ``within`` times the range of each, and 1e-5 times for gradients. The logits of
    the two images have to differ.
    """
    golden = np.load(ROOT / "tests" / "golden" / f"{name}.npz")
    images = paddle.to_tensor(array("images", (2, model.in_channels, *model.image_size)))
    logits = _logits(model, golden, images, folder, array, within)
    features = model.forward_features(images).numpy()
    np.testing.assert_allclose(
        features, golden["features"], atol=within * np.ptp(golden["features"]), rtol=0
    )
    assert_intermediates(model, name, images, within)
    _assert_gradients(model, golden, logits, array)


def assert_as_the_authors(model, name, folder, array=array):
    """Asserts that logits and gradients are those of the golden file, which ``golden/authors.py``
    writes.
    """
    golden = dict(np.load(ROOT / "tests" / "golden" / f"{name}.npz"))
    images = array("images", (2, model.in_channels, *model.image_size))
    images = paddle.to_tensor(images, dtype=next(iter(model.parameters())).dtype)
    logits = _logits(model, golden, images, folder, array, within=1e-5)
    assert any(key.startswith("grad/") for key in golden)
    _assert_gradients(model, golden, logits, array)


def _logits(model, golden, images, folder, array, within):
    """Returns the logits with the formula's weights, after comparing them."""
    logits = load_formula(model, folder, array)(images)
    span = np.ptp(golden["logits"])
    # The images have an effect.
    assert np.abs(np.diff(golden["logits"], axis=0)).max() > 1e-4 * span
    np.testing.assert_allclose(logits.numpy(), golden["logits"], atol=within * span, rtol=0)
    return logits


def _assert_gradients(model, golden, logits, array):
    """Asserts that the gradients of sum(logits * array("loss")) are those of the golden file, if it
    has any.
    """
    expected = {key.removeprefix("grad/"): golden[key] for key in golden if key.startswith("grad/")}
    if expected:
        weights = paddle.to_tensor(array("loss", tuple(logits.shape)), dtype=logits.dtype)
        (logits * weights).sum().backward()
        found = {
            key: parameter.grad.numpy()
            for key, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        assert found.keys() == expected.keys()
        for key in linear_weights(model):
            found[key] = found[key].T
        # A gradient whose terms cancel out is only rounding.
        least = 2e-2 * max(np.ptp(value) for value in expected.values())
        for key, value in expected.items():
            np.testing.assert_allclose(
                found[key], value, atol=1e-5 * max(np.ptp(value), least), rtol=0, err_msg=key
            )


@paddle.no_grad()
def assert_intermediates(model, name, images, within=1e-5):
    """Asserts shapes, channels and reductions of the intermediates. It also asserts the values with
    and without the last norm, of prefix tokens, and of an early stop.
    """
    stored = np.load(ROOT / "tests" / "golden" / "intermediates.npz")
    golden = {key.partition("/")[2]: stored[key] for key in stored if key.partition("/")[0] == name}
    plain = model.forward_intermediates(images, intermediates_only=True)
    assert [one.shape for one in plain] == golden["shapes"].tolist()
    assert [[one["num_chs"], one["reduction"]] for one in model.feature_info] == golden[
        "info"
    ].tolist()
    found = {
        "plain": plain,
        "normed": model.forward_intermediates(images, norm=True, intermediates_only=True),
    }
    found["early"] = [
        model.forward_intermediates(images, [min(1, len(plain) - 1)], stop_early=True)[0]
    ]
    if "prefix" in golden:
        pairs = model.forward_intermediates(
            images, return_prefix_tokens=True, intermediates_only=True
        )
        found["prefix"] = [prefix for _, prefix in pairs]
    assert found.keys() == golden.keys() - {"shapes", "info"}
    for key, tensors in found.items():
        assert len(tensors) == len(golden[key])
        for tensor, expected in zip(tensors, golden[key], strict=True):
            values = tensor.numpy()
            np.testing.assert_allclose(
                places(values), expected, atol=within * np.ptp(values), rtol=0, err_msg=key
            )


def compared():
    """Returns the rows of the models that were compared at full size or in part, by their heads:
    model, reference (timm's name, or "PaddleViT"), parameters, difference, change.
    """
    rows = []
    for name in ("full", "part"):
        file = ROOT / "tests" / "golden" / "parity" / f"{name}.tsv"
        rows += csv.DictReader(file.read_text(encoding="utf-8").splitlines(), delimiter="\t")
    return rows
