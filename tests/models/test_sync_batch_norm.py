"""Batch norm of features over all processes, against plain operators on the whole batch."""

import numpy as np
import paddle
import pytest
from golden.make_moco import random
from support.ranks import run_ranks

import utils
from errors import InputError
from models.layers.batch_norm import hold_frozen_statistics, keeping_statistics
from models.layers.sync_batch_norm import SyncBatchNorm1D

IMAGES = 12
CHANNELS = 5


def features(views):
    # The mean is large beside the deviation, and differs from channel to channel.
    shape = (views, IMAGES, CHANNELS)
    return random("features", shape) + 30 * random("offset", (1, 1, CHANNELS)).astype(np.float32)


def plain(x, weight, bias):
    """Returns the norm of [V, B, C] float64 by its formula, with its gradients by autograd."""
    mean = x.mean(axis=1, keepdim=True)
    variance = ((x - mean) ** 2).mean(axis=1, keepdim=True)
    return (x - mean) / (variance + 1e-5).sqrt() * weight + bias


def computed(x, factor, weight, bias):
    """Returns a rank's outputs, gradients of sum(out * factor), and running statistics."""
    images = x.shape[1] // utils.world_size()
    share = slice(utils.rank() * images, (utils.rank() + 1) * images)
    layer = SyncBatchNorm1D(CHANNELS)
    layer.weight.set_value(weight)
    layer.bias.set_value(bias)
    own = paddle.to_tensor(x[:, share], stop_gradient=False)
    out = layer(own)
    (out * paddle.to_tensor(factor[:, share])).sum().backward()
    grads = [utils.all_reduce_sum(parameter.grad).numpy() for parameter in layer.parameters()]
    running = [layer._mean.numpy(), layer._variance.numpy()]
    return out.numpy(), own.grad.numpy(), grads, running


@pytest.mark.smoke
@pytest.mark.parametrize("views", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2])
def test_it_is_the_norm_of_the_whole_batch(views, ranks):
    x = features(views)
    factor = random("factor", x.shape)
    weight = random("weight", (CHANNELS,))
    bias = random("bias", (CHANNELS,))
    leaves = [
        paddle.to_tensor(array.astype(np.float64), stop_gradient=False)
        for array in (x, weight, bias)
    ]
    expected = plain(*leaves)
    (expected * paddle.to_tensor(factor.astype(np.float64))).sum().backward()

    found = run_ranks(computed, x, factor, weight, bias, ranks=ranks)
    outs, grads, of_parameters, running = zip(*found, strict=True)
    np.testing.assert_allclose(np.concatenate(outs, axis=1), expected.numpy(), atol=2e-5)
    grad = np.concatenate(grads, axis=1)
    np.testing.assert_allclose(grad, leaves[0].grad.numpy(), atol=2e-5)
    for of_rank in of_parameters:
        for value, leaf in zip(of_rank, leaves[1:], strict=True):
            np.testing.assert_allclose(value, leaf.grad.numpy(), atol=1e-4)

    # torch's running statistics, of one view after the other
    mean = np.zeros(CHANNELS)
    variance = np.ones(CHANNELS)
    for view in x.astype(np.float64):
        mean = 0.9 * mean + 0.1 * view.mean(axis=0)
        variance = 0.9 * variance + 0.1 * view.var(axis=0, ddof=1)
    for of_rank in running:
        np.testing.assert_allclose(of_rank[0], mean, atol=1e-5)
        np.testing.assert_allclose(of_rank[1], variance, atol=1e-5)


def test_an_evaluation_normalises_by_the_running_statistics():
    layer = SyncBatchNorm1D(CHANNELS, affine=False)
    assert [name for name, _ in layer.named_parameters()] == []
    layer._mean.set_value(random("mean", (CHANNELS,)))
    layer._variance.set_value(np.abs(random("variance", (CHANNELS,))))
    layer.eval()
    x = features(1)[0]
    expected = (x - layer._mean.numpy()) / np.sqrt(layer._variance.numpy() + 1e-5)
    np.testing.assert_allclose(layer(paddle.to_tensor(x)).numpy(), expected, rtol=1e-5)
    # one image is enough
    np.testing.assert_allclose(layer(paddle.to_tensor(x[:1])).numpy(), expected[:1], rtol=1e-5)


def test_the_engine_may_hold_its_statistics():
    layer = SyncBatchNorm1D(CHANNELS)
    x = paddle.to_tensor(features(1))
    with keeping_statistics(layer):
        kept = layer(x)
    assert not layer._mean.any()
    np.testing.assert_array_equal(layer(x).numpy(), kept.numpy())
    assert layer._mean.all()
    for parameter in layer.parameters():
        parameter.stop_gradient = True
    hold_frozen_statistics(paddle.nn.Sequential(layer))
    assert not layer.training


def test_a_batch_of_one_image_is_refused():
    with pytest.raises(InputError, match=r"batch norm got 1 image in training, .*DROP_LAST True"):
        SyncBatchNorm1D(CHANNELS)(paddle.ones([1, CHANNELS]))


def two_of_one():
    layer = SyncBatchNorm1D(CHANNELS)
    return layer(paddle.full([1, CHANNELS], utils.rank() * 2.0)).numpy()


def test_one_image_on_each_of_two_ranks_is_a_batch_of_two():
    one, two = run_ranks(two_of_one)
    np.testing.assert_allclose(one, -1, atol=1e-5)
    np.testing.assert_allclose(two, 1, atol=1e-5)


def test_half_precision_is_normalised_in_float32():
    layer = SyncBatchNorm1D(CHANNELS, affine=False)
    x = paddle.to_tensor(random("features", (IMAGES, CHANNELS))).astype("bfloat16")
    x.stop_gradient = False
    out = layer(x)
    assert out.dtype == paddle.float32
    (out * out).sum().backward()
    assert x.grad.dtype == paddle.bfloat16
