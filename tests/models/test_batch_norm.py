"""Batch norm's statistics, against PyTorch's."""

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.trained import BOTTLENECK, CASES, MOMENTUM, MOST, RATE, array, array_of, batches
from paddle import nn
from paddle.nn import functional as F
from support.parity import load_formula
from support.small_models import (
    small_convmixer,
    small_halonet,
    small_levit,
    small_mobileone,
    small_mobilevit,
    small_regnet,
    small_tinyvit,
    small_xcit,
)

import ops
from errors import InputError
from models import resnet
from models.layers import batch_norm
from models.layers.batch_norm import (
    BatchNorm2D,
    SyncBatchNorm,
    hold_frozen_statistics,
    keeping_statistics,
)
from models.resnet import ResNet
from weights.layout import file_name


def build(name, monkeypatch):
    """The model of golden/trained.py's case NAME."""
    if name.startswith("regnet"):
        return small_regnet(name)
    if name.startswith("mobileone"):
        return small_mobileone(name)
    if name.startswith("halonet"):
        return small_halonet(name)
    if name == "mobilevit":
        return small_mobilevit()
    if name == "convmixer":
        return small_convmixer()
    if name == "levit":
        return small_levit()
    if name == "tinyvit":
        return small_tinyvit()
    if name == "xcit":
        return small_xcit()
    monkeypatch.setitem(resnet.SIZES, 14, (resnet.Bottleneck, BOTTLENECK))
    return ResNet(CASES[name], depth=18 if name == "resnet18" else 14, num_classes=5)


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_training_leaves_timms_statistics_and_logits(tmp_path, name, monkeypatch):
    golden = np.load(ROOT / "tests" / "golden" / "trained.npz")
    model = load_formula(build(name, monkeypatch), tmp_path, array_of(name))
    model.train()
    optimizer = paddle.optimizer.Momentum(RATE, MOMENTUM, parameters=model.parameters())
    *training, (images, _) = batches(name)
    for batch, labels in training:
        F.cross_entropy(model(paddle.to_tensor(batch)), paddle.to_tensor(labels)).backward()
        optimizer.step()
        optimizer.clear_grad()
    model.eval()
    found = {"logits": model(paddle.to_tensor(images)).numpy()}
    stored = model.state_dict()
    found |= {
        file_name(key): buffer.numpy()[:MOST]
        for key, buffer in model.named_buffers()
        if key in stored
    }
    expected = {
        key.removeprefix(f"{name}/"): golden[key] for key in golden if key.startswith(f"{name}/")
    }
    assert found.keys() == expected.keys()
    # the images matter
    assert np.abs(np.diff(expected["logits"], axis=0)).max() > 1e-2 * np.ptp(expected["logits"])
    for key, value in expected.items():
        np.testing.assert_allclose(
            found[key], value, atol=1e-5 * np.ptp(value), rtol=0, err_msg=key
        )


@pytest.mark.smoke
def test_a_traced_network_and_one_that_recomputes_leave_the_same_statistics():
    found = []
    for changes in ({}, {"recompute": True}, "traced"):
        paddle.seed(0)
        model = small_regnet(**({} if changes == "traced" else changes))
        if changes == "traced":
            paddle.jit.to_static(model, full_graph=True)
        for step in range(2):
            model(
                paddle.to_tensor(array(f"images {step}", (2, 3, 64, 64)))
            ).square().sum().backward()
        found.append({name: buffer.numpy() for name, buffer in model.named_buffers()})
    eager, again, traced = found
    for name, value in eager.items():
        assert (again[name] == value).all(), name
        np.testing.assert_allclose(traced[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def batch(step, *shape):
    """A batch of different means and deviations by channel."""
    channels = np.arange(shape[1]).reshape([1, -1] + [1] * (len(shape) - 2))
    return (array(f"batch {step}", shape) * (1 + channels) + channels).astype(np.float32)


def taken_in(batches, momentum=0.9):
    """PyTorch's running mean and variance of these batches."""
    mean = 0.0
    variance = 1.0
    for x in batches:
        values = np.moveaxis(x.astype(np.float64), 1, 0).reshape([x.shape[1], -1])
        mean = momentum * mean + (1 - momentum) * values.mean(1)
        variance = momentum * variance + (1 - momentum) * values.var(1, ddof=1)
    return mean, variance


def assert_statistics(norm, batches):
    mean, variance = taken_in(batches)
    np.testing.assert_allclose(norm._mean.numpy(), mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(norm._variance.numpy(), variance, rtol=1e-5)


@pytest.mark.smoke
@pytest.mark.parametrize("traced", [None, "one size", "any size"])
def test_the_running_variance_is_torchs(traced):
    norm = BatchNorm2D(3)
    seen = []
    if traced:
        sizes = [paddle.static.InputSpec([None, 3, None, None])] if traced == "any size" else None
        paddle.jit.to_static(norm, full_graph=True, input_spec=sizes)
    for step in range(10):
        # n = 64; both before the gradient
        passes = [batch(f"{step} {i}", 4, 3, 4, 4) for i in range(2)]
        outputs = [norm(paddle.to_tensor(x)) for x in passes]
        sum(y.square().mean() for y in outputs).backward()
        seen += passes
        for x, y in zip(passes, outputs, strict=True):  # by the batch's own, over n
            own = (x - x.mean((0, 2, 3), keepdims=True)) / np.sqrt(
                x.var((0, 2, 3), keepdims=True) + 1e-5
            )
            np.testing.assert_allclose(y.numpy(), own, atol=1e-5)
    assert_statistics(norm, seen)
    norm.eval()
    held = {name: buffer.numpy() for name, buffer in norm.named_buffers()}
    evaluated = norm(paddle.to_tensor(seen[0])).numpy()
    mean, variance = (held[name].reshape(1, -1, 1, 1) for name in ("_mean", "_variance"))
    np.testing.assert_allclose(evaluated, (seen[0] - mean) / np.sqrt(variance + 1e-5), atol=1e-5)
    assert all((held[name] == buffer.numpy()).all() for name, buffer in norm.named_buffers())


@pytest.mark.smoke
def test_two_values_of_a_channel_are_the_least():
    norm = BatchNorm2D(3)
    pair = batch(0, 2, 3, 1, 1)
    norm(paddle.to_tensor(pair))
    assert_statistics(norm, [pair])
    held = norm._variance.numpy()
    with pytest.raises(
        InputError,
        match=r"batch norm got one value of a channel in training .1 image of 1 x 1., expected",
    ):
        norm(paddle.to_tensor(pair[:1]))
    assert (norm._variance.numpy() == held).all()
    norm.eval()
    assert norm(paddle.to_tensor(pair[:1])).shape == [1, 3, 1, 1]


@pytest.mark.smoke
def test_what_is_kept_or_frozen_does_not_change():
    norm = BatchNorm2D(3)
    x = paddle.to_tensor(batch(0, 4, 3, 2, 2))
    expected = norm(x).numpy()
    held = {name: buffer.numpy() for name, buffer in norm.named_buffers()}
    with keeping_statistics(norm):
        assert (norm(x).numpy() == expected).all()
    model = nn.Sequential(norm)
    for parameter in norm.parameters():
        parameter.stop_gradient = True
    hold_frozen_statistics(model)
    assert np.abs(model(x).numpy() - expected).max() > 0.1
    assert all((held[name] == buffer.numpy()).all() for name, buffer in norm.named_buffers())


@pytest.mark.smoke
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_a_parameter_has_its_gradient_beside_a_frozen_one(frozen, training, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(ops, "usable", lambda _: False)
    norm = BatchNorm2D(3)
    wanted = batch("gradient", 4, 3, 2, 2)
    norm.training = training
    getattr(norm, frozen).stop_gradient = True
    values = batch(0, 4, 3, 2, 2)
    norm(paddle.to_tensor(values)).backward(paddle.to_tensor(wanted))
    mean, variance = (
        (values.mean((0, 2, 3)), values.var((0, 2, 3))) if training else (np.zeros(3), np.ones(3))
    )
    normed = (values - mean.reshape(-1, 1, 1)) / np.sqrt(variance.reshape(-1, 1, 1) + 1e-5)
    expected = {"weight": (wanted * normed).sum((0, 2, 3)), "bias": wanted.sum((0, 2, 3))}
    expected[frozen] = None
    for name, gradient in expected.items():
        found = getattr(norm, name).grad
        if gradient is None:
            assert found is None
        else:
            np.testing.assert_allclose(found.numpy(), gradient, rtol=1e-4, atol=1e-4)


@pytest.mark.smoke
@pytest.mark.parametrize("traced", [False, True])
def test_synchronised_statistics_count_all_processes_images(monkeypatch, traced):
    """Paddle's kernel is for GPUs: here one that gives the same, on two processes with the same
    images.
    """
    ranks = []

    def kernel(self, x):
        ranks.append(2)
        return F.batch_norm(
            x, self._mean, self._variance, self.weight, self.bias, self.training, self._momentum
        )

    monkeypatch.setattr(nn.SyncBatchNorm, "forward", kernel)
    monkeypatch.setattr(batch_norm, "world_size", lambda: 2)
    norm = SyncBatchNorm(3)
    seen = [batch(step, 2, 3, 1, 2) for step in range(3)]
    buffers = dict(norm.named_buffers())
    norm.weight.stop_gradient = True  # as bitfit's
    if traced:
        paddle.jit.to_static(norm, full_graph=True)
    for x in seen:
        norm(paddle.to_tensor(x)).square().sum().backward()
    assert ranks
    assert norm.weight.grad is None
    assert norm.bias.grad is not None
    assert all(buffers[name] is buffer for name, buffer in norm.named_buffers())
    assert_statistics(norm, [np.concatenate([x, x]) for x in seen])
