"""The compiled operators on maps give what Paddle's give in float64: activations, norms, means of
neighbours, axes.
"""

from functools import partial

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.nn import functional as F
from threadpoolctl import threadpool_limits

import ops
from models.layers import activations, layout
from models.layers.batch_norm import BatchNorm2D
from models.layers.grn import GlobalResponseNorm
from models.layers.group_norm import GroupNorm

pytestmark = pytest.mark.usefixtures("compiled_operators")


def normal(*shape, scale=1.0):
    return scale * np.random.default_rng(sum(shape)).standard_normal(shape)


def quick_gelu(x):
    return x * F.sigmoid(1.702 * x)


def group_norm(groups):  # Paddle 2.6 has no function of that name
    def plain(x, w, b):
        sets = x.reshape([x.shape[0], groups, -1])
        off = sets - sets.mean(axis=-1, keepdim=True)
        normed = (off / ((off * off).mean(axis=-1, keepdim=True) + 1e-5).sqrt()).reshape(x.shape)
        return normed * w.reshape([-1, 1, 1]) + b.reshape([-1, 1, 1])

    return plain


def response_norm(x, w, b):
    lengths = (x * x).sum(axis=[1, 2], keepdim=True).clip(min=1e-30).sqrt()
    return x * (1 + w * lengths / (lengths.mean(axis=-1, keepdim=True) + 1e-6)) + b


X = normal(3, 6, 5, 37)
W = normal(6)
B = normal(7)[:6]
MEAN = normal(8)[:6]
VARIANCE = normal(9)[:6] ** 2 + 0.1
CASES = {
    "relu": (lambda x: ops.activation(x, "relu"), F.relu, [X]),
    "gelu": (lambda x: ops.activation(x, "gelu"), F.gelu, [normal(3, 70, scale=3)]),
    "gelu_tanh": (
        lambda x: ops.activation(x, "gelu_tanh"),
        lambda x: F.gelu(x, True),
        [normal(3, 70, scale=3)],
    ),
    "quick_gelu": (lambda x: ops.activation(x, "quick_gelu"), quick_gelu, [normal(3, 70, scale=3)]),
    "silu": (lambda x: ops.activation(x, "silu"), F.silu, [normal(3, 9000, scale=9)]),
    "hardswish": (lambda x: ops.activation(x, "hardswish"), F.hardswish, [normal(3, 70, scale=3)]),
    "softmax": (lambda x: ops.activation(x, "softmax"), F.softmax, [normal(3, 6, 70, scale=9)]),
    "log_softmax": (
        lambda x: ops.activation(x, "log_softmax"),
        F.log_softmax,
        [normal(3, 6, 70, scale=9)],
    ),
    "star_relu": (
        ops.star_relu,
        lambda x, s, b: s * F.relu(x).square() + b,
        [normal(3, 700), normal(1), normal(2)[:1]],
    ),
    "response norm": (
        ops.response_norm,
        response_norm,
        [normal(3, 5, 4, 21), normal(21), normal(22)[:21]],
    ),
    "response norm, a channel of zeros": (
        ops.response_norm,
        response_norm,
        [normal(3, 5, 4, 21) * (np.arange(21) != 3), normal(21), normal(22)[:21]],
    ),
    "lengths of rows": (
        ops.row_lengths,
        lambda x: x.square().sum(1).sqrt(),
        [normal(70, 21, scale=9)],
    ),
    "batch norm, training": (
        lambda *a: ops.batch_norm(*a, True, 0.9, 1e-5)[0],
        lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b, True, 0.9, 1e-5),
        [X, W, B, MEAN, VARIANCE],
    ),
    "batch norm, evaluation": (
        lambda *a: ops.batch_norm(*a, False, 0.9, 1e-5)[0],
        lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b, False, 0.9, 1e-5),
        [X, W, B, MEAN, VARIANCE],
    ),
    "batch norm, far from 0": (
        lambda *a: ops.batch_norm(*a, True, 0.9, 1e-5)[0],
        lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b, True, 0.9, 1e-5),
        [(X + 100).astype(np.float32), W, B, MEAN, VARIANCE],
    ),
    "batch norm of rows": (
        lambda *a: ops.batch_norm(*a, True, 0.9, 1e-5)[0],
        lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b, True, 0.9, 1e-5),
        [normal(70, 6), W, B, MEAN, VARIANCE],
    ),
    "batch norm of rows, evaluation": (
        lambda *a: ops.batch_norm(*a, False, 0.9, 1e-5)[0],
        lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b, False, 0.9, 1e-5),
        [normal(70, 6), W, B, MEAN, VARIANCE],
    ),
    **{
        f"batch norm of {kind}, {act.__name__}{'' if training else ', evaluation'}": (
            lambda *a, act=act, training=training: ops.batch_norm(
                *a, training, 0.9, 1e-5, act.__name__
            )[0],
            lambda x, w, b, m, v, act=act, training=training: act(
                F.batch_norm(x, m, v, w, b, training, 0.9, 1e-5)
            ),
            [x, W, B, MEAN, VARIANCE],
        )
        for kind, x in {"maps": X, "rows": normal(70, 6)}.items()
        for act in (activations.relu, activations.gelu, activations.silu)
        for training in (True, False)
    },
    "group norm": (
        lambda *a: ops.group_norm(a[0], 3, *a[1:], 1e-5),
        group_norm(3),
        [X, W, B],
    ),
    "group norm of all": (
        lambda *a: ops.group_norm(a[0], 1, *a[1:], 1e-5),
        group_norm(1),
        [X, W, B],
    ),
    "means": (lambda x: ops.neighbour_means(x, 1), lambda x: F.avg_pool2d(x, 3, 1, 1), [X]),
    "means, far": (
        lambda x: ops.neighbour_means(x, 4),
        lambda x: F.avg_pool2d(x, 9, 1, 4),
        [normal(2, 3, 5, 6)],
    ),
    "means of one place": (
        lambda x: ops.neighbour_means(x, 1),
        lambda x: F.avg_pool2d(x, 3, 1, 1),
        [normal(2, 3, 1, 1)],
    ),
    "swapped": (layout.swap_axes, lambda x: x.transpose([0, 2, 1]), [normal(3, 7, 33)]),
    "channels last": (layout.channels_last, lambda x: x.transpose([0, 2, 3, 1]), [X]),
    "channels first": (layout.channels_first, lambda x: x.transpose([0, 3, 1, 2]), [X]),
}


def results(function, arrays, dtype):
    """Returns the output and the gradients, which running statistics have none of."""
    tensors = [
        paddle.to_tensor(array, dtype, stop_gradient=i > 2) for i, array in enumerate(arrays)
    ]
    output = function(*tensors)
    cotangent = paddle.to_tensor(np.random.default_rng(1).standard_normal(output.shape), dtype)
    return [output, *paddle.grad([output], tensors[:3], [cotangent])]


@pytest.mark.smoke
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_float64(case, threads):
    compiled, plain, arrays = CASES[case]
    with threadpool_limits(threads):
        found = results(compiled, arrays, "float32")
    tolerance = 1e-4 if "far from 0" in case else 3e-6
    for own, exact in zip(found, results(plain, arrays, "float64"), strict=True):
        assert own.shape == exact.shape
        assert np.abs(own.numpy() - exact.numpy()).max() < tolerance * max(
            1, np.abs(exact.numpy()).max()
        )


@pytest.mark.parametrize("name", ["relu", "gelu", "gelu_tanh", "quick_gelu", "silu", "hardswish"])
def test_what_is_far_out_and_not_a_number_passes_through(name):
    values = np.float32([-1e4, -100, 100, 1e4, np.inf, np.nan])
    x = paddle.to_tensor(values, stop_gradient=False)
    out = ops.activation(x, name)
    np.testing.assert_allclose(out.numpy(), [0, 0, 100, 1e4, np.inf, np.nan], rtol=1e-6, atol=1e-6)
    out[:4].sum().backward()
    np.testing.assert_allclose(x.grad.numpy()[:4], [0, 0, 1, 1], rtol=0, atol=1e-6)


def test_an_activation_that_there_is_not_is_refused():
    with pytest.raises(Exception, match="there is no activation mish"):
        ops.activation(paddle.ones([2]), "mish")


@pytest.mark.parametrize(
    "call",
    [
        lambda: ops.batch_norm(
            *(paddle.ones(s) for s in ([2, 3, 4], [4], [3], [3], [3])), True, 0.9, 1e-5
        ),
        lambda: ops.batch_norm(
            *(paddle.ones(s) for s in ([2, 3, 4], [3], [3], [4], [3])), True, 0.9, 1e-5
        ),
        lambda: ops.group_norm(paddle.ones([2, 3, 4]), 2, paddle.ones([3]), paddle.ones([3]), 1e-5),
        lambda: ops.response_norm(paddle.ones([2, 3, 4]), paddle.ones([3]), paddle.ones([3])),
        lambda: ops.row_lengths(paddle.ones([2, 3, 4])),
        lambda: ops.star_relu(paddle.ones([2, 3]), paddle.ones([3]), paddle.ones([1])),
        lambda: ops.neighbour_means(paddle.ones([2, 3, 4]), 1),
        lambda: ops.halo_windows(paddle.ones([2, 3, 8, 6]), 4, 1),
        lambda: ops.relative_bias(paddle.ones([2, 4, 9]), 2, 3),
        lambda: ops.transpose(paddle.ones([2, 3, 4]), 5, [2, 4, 3]),
        lambda: ops.transpose(paddle.ones([2, 3, 4]), 3, [2, 4, 4]),
    ],
)
def test_shapes_that_do_not_fit_are_refused(call):
    with pytest.raises(Exception, match="shapes don't fit"):
        call()


def running(norm, x, mode):
    """Returns what a batch norm gives after three steps, and the statistics that it holds then."""
    norm.train() if mode == "train" else norm.eval()
    outputs = [norm(x * step) for step in (1.0, 2.0, 3.0)]
    return [tensor.numpy() for tensor in (*outputs, norm._mean, norm._variance)]


@pytest.mark.smoke
@pytest.mark.parametrize("momentum", [0.9, 1.0])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_batch_norm_holds_the_same_statistics_with_and_without(mode, momentum):
    x = paddle.to_tensor(X, "float32")
    found = []
    for enabled in (True, False):
        ops.enable(enabled)
        norm = BatchNorm2D(6, momentum=momentum)
        norm.weight.set_value(W.astype(np.float32))
        found.append(running(norm, x, mode))
        assert norm._mean.stop_gradient
    for own, plain in zip(*found, strict=True):
        np.testing.assert_allclose(own, plain, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    "layer",
    [
        *(
            activations.ReLU,
            activations.GELU,
            activations.TanhGELU,
            activations.SiLU,
            activations.Hardswish,
        ),
        *(
            activations.QuickGELU,
            lambda: GlobalResponseNorm(37),
            lambda: GroupNorm(1, 6),
            lambda: nn.Sequential(BatchNorm2D(6), GroupNorm(2, 6)),
        ),
    ],
)
def test_a_layer_is_the_same_with_and_without(layer):
    layer = layer()
    x = paddle.to_tensor(X, "float32")
    with_them = layer(x).numpy()
    ops.enable(False)
    np.testing.assert_allclose(with_them, layer(x).numpy(), rtol=0, atol=1e-5)


def kept_maps(function, x):
    """Returns how many tensors of the size of ``x`` are held by what ``function`` returns, and for
    its gradient.
    """
    allocated = partial(paddle.base.core.host_memory_stat_current_value, "Allocated", 0)
    before = allocated()
    output = function(x)
    held = allocated() - before
    assert output.shape == x.shape
    return round(held / (4 * x.size), 1)


def test_what_an_activation_after_a_batch_norm_reads_is_not_kept():
    x = paddle.randn([4, 8, 64, 64])
    norm = BatchNorm2D(8)
    assert kept_maps(lambda x: activations.silu(norm(x)), x) == 2
    assert kept_maps(lambda x: norm(x, activations.silu), x) == 1
    assert kept_maps(lambda x: activations.relu(norm(x)), x) == 1
