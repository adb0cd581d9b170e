"""The compiled operators give what Paddle's own do: values, gradients, NaN; whatever threads
compute them.
"""

import subprocess
import sys
from unittest import mock

import numpy as np
import paddle
import pytest
from conftest import ROOT
from paddle.nn import functional as F
from threadpoolctl import threadpool_limits

import ops
from models import create_model
from models.layers import Attention, DropPath, LayerNorm, Linear, Mlp
from models.layers.activations import dynamic_relu
from models.layers.mlp import StarReLU
from models.layers.scale import weighted_sum

pytestmark = pytest.mark.usefixtures("compiled_operators")


def normal(*shape, scale=1.0):
    return scale * np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def mlp(x, w1, b1, w2, b2):
    return F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2)


CASES = {
    "linear": (ops.linear, F.linear, [normal(3, 7, 20), normal(20, 33), normal(33)]),
    "linear, no bias": (
        lambda x, w: ops.linear(x, w, None),
        F.linear,
        [normal(3, 7, 20), normal(20, 33)],
    ),
    "linear, rows in parts": (
        ops.linear,
        F.linear,
        [normal(700, 512), normal(512, 520, scale=0.05), normal(520)],
    ),
    "linear, rows of 2,048 bytes": (
        ops.linear,
        F.linear,
        [normal(70, 512), normal(512, 512, scale=0.05), normal(512)],
    ),
    "linear, rows of 4,096 bytes": (
        ops.linear,
        F.linear,
        [normal(3, 21, 64), normal(64, 1024), normal(1024)],
    ),
    "one row": (ops.linear, F.linear, [normal(1, 5), normal(5, 1), normal(1)]),
    "mlp": (
        ops.mlp,
        mlp,
        [normal(2, 5, 12), normal(12, 49), normal(49), normal(49, 12), normal(12)],
    ),
    "mlp, large": (
        ops.mlp,
        mlp,
        [normal(4, 6, scale=30.0), normal(6, 9), normal(9), normal(9, 3), normal(3)],
    ),
    "layer_norm": (
        lambda *a: ops.layer_norm(*a, 1e-6),
        lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b, 1e-6),
        [normal(2, 9, 37), normal(37), normal(37)],
    ),
    "matmul": (ops.matmul, paddle.matmul, [normal(2, 3, 4, 5), normal(2, 3, 5, 7)]),
    "matmul, transposed": (
        lambda x, y: ops.matmul(x, y, True, True),
        lambda x, y: paddle.matmul(x, y, True, True),
        [normal(6, 5, 4), normal(6, 7, 5)],
    ),
    "matmul, transposed, in parts": (
        lambda x, y: ops.matmul(x, y, True, True),
        lambda x, y: paddle.matmul(x, y, True, True),
        [normal(700, 512), normal(520, 700, scale=0.05)],
    ),
    "matmul, one with many": (
        lambda x, y: ops.matmul(x, y, True),
        lambda x, y: paddle.matmul(x, y, True),
        [normal(5, 4), normal(6, 5, 7)],
    ),
    "matmul, y transposed": (
        lambda x, y: ops.matmul(x, y, False, True),
        lambda x, y: paddle.matmul(x, y, False, True),
        [normal(4, 5), normal(1, 5)],
    ),
    "matmul, scaled": (
        lambda x, y: ops.matmul(x, y, True, True, scale=0.3),
        lambda x, y: 0.3 * paddle.matmul(x, y, True, True),
        [normal(6, 5, 4), normal(6, 7, 5)],
    ),
    "matmul, scaled, one with many, with a bias": (
        lambda x, y, b: ops.matmul(x, y, True, scale=-2.0, bias=b),
        lambda x, y, b: -2.0 * paddle.matmul(x, y, True) + b.unsqueeze(1),
        [normal(5, 4), normal(6, 5, 7), normal(4)],
    ),
    "matmul, many with many, with a bias": (
        lambda x, y, b: ops.matmul(x, y, bias=b),
        lambda x, y, b: paddle.matmul(x, y) + b.unsqueeze(1),
        [normal(2, 3, 4, 5), normal(2, 3, 5, 7), normal(4)],
    ),
    "scaled and shifted": (
        ops.scale_channels,
        lambda x, f, s: x * f + s,
        [normal(2, 9, 19), normal(19), normal(20)[:19]],
    ),
    "a factor of each channel": (
        ops.scale_planes,
        paddle.multiply,
        [normal(2, 9, 4, 5), normal(9, 1, 1)],
    ),
    "a factor of each image's channel": (
        ops.scale_planes,
        paddle.multiply,
        [normal(2, 9, 4, 5), normal(2, 9, 1, 1)],
    ),
    # The layers' functions compute float64 by Paddle's operators.
    "dynamic relu": (
        ops.dynamic_relu,
        dynamic_relu,
        [normal(2, 9, 4, 5), normal(2, 9, 4)],
    ),
    "weighted sum": (
        lambda *a: ops.weighted_sum(a[:3], a[3]),
        lambda *a: weighted_sum(a[:3], a[3]),
        [*(normal(2, 9, 19, scale=scale) for scale in (1.0, -2.0, 3.0)), normal(3, 2, 19)],
    ),
    "weighted sum of one row": (
        lambda *a: ops.weighted_sum(a[:3], a[3]),
        lambda *a: weighted_sum(a[:3], a[3]),
        [*(normal(1, 1, 5, scale=scale) for scale in (1.0, -2.0, 3.0)), normal(3, 1, 5)],
    ),
    "residual": (
        ops.residual,
        paddle.add,
        [normal(2, 9, 1019), normal(2, 1019, 9).reshape(2, 9, 1019)],
    ),
    "residual, by sample": (
        lambda x, y: ops.residual(x, y, paddle.to_tensor([0.0, 1.25])),
        lambda x, y: x + y * paddle.to_tensor([[0.0], [1.25]], y.dtype),
        [normal(2, 18), normal(18, 2).reshape(2, 18)],
    ),
    "scaled": (ops.scale_channels, lambda x, f: x * f, [normal(2, 9, 19), normal(19)]),
    "gated": (
        ops.swiglu,
        lambda g, x: F.silu(g) * x,
        [normal(3, 5, 21, scale=20.0), normal(3, 5, 21)],
    ),
    "gated, in one": (
        ops.swiglu,
        lambda x: F.silu(x[..., :9]) * x[..., 9:],
        [normal(3, 5, 18, scale=3.0)],
    ),
}


@pytest.mark.smoke
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_float64(case, threads):
    compiled, plain, arrays = CASES[case]
    found = []
    expected = []
    with threadpool_limits(threads):
        for results, function, dtype in (
            (found, compiled, "float32"),
            (expected, plain, "float64"),
        ):
            inputs = [
                paddle.to_tensor(array.astype(dtype), stop_gradient=False) for array in arrays
            ]
            output = function(*inputs)
            cotangent = paddle.to_tensor(normal(*output.shape).astype(dtype))
            results += [output, *paddle.grad([output], inputs, [cotangent])]
    for own, exact in zip(found, expected, strict=True):
        assert own.shape == exact.shape
        assert np.abs(own.numpy() - exact.numpy()).max() < 3e-6 * max(
            1, np.abs(exact.numpy()).max()
        )


def test_the_same_bits_each_time():
    arrays = [paddle.to_tensor(array) for array in CASES["mlp"][2]]
    assert len({ops.mlp(*arrays).numpy().tobytes() for _ in range(5)}) == 1


def test_gelu_of_what_is_far_out_and_not_a_number_passes_through():
    one = paddle.ones([1, 1])
    zero = paddle.zeros([1])
    values = paddle.to_tensor(
        [[-1e4], [-20.0], [0.0], [20.0], [1e4], [float("nan")], [float("inf")]]
    )
    found = ops.mlp(values, one, zero, one, zero).flatten().numpy()
    np.testing.assert_allclose(found[:5], [0, 0, 0, 20, 1e4], rtol=0, atol=1e-30)
    assert np.isnan(found[5])
    assert found[6] == np.inf


def test_equal_lines_of_a_dynamic_relu_share_the_gradient():
    x = paddle.to_tensor([[[[-1.0, 2.0]]]], stop_gradient=False)
    # Both lines are -1 at x = -1, and 3 x + 2 is larger at 2.
    lines = paddle.to_tensor([[[1.0, 3.0, 0.0, 2.0]]], stop_gradient=False)
    y = ops.dynamic_relu(x, lines)
    y.backward(paddle.to_tensor([[[[4.0, 10.0]]]]))
    assert y.tolist() == [[[[-1.0, 8.0]]]]
    assert x.grad.tolist() == [[[[8.0, 30.0]]]]
    assert lines.grad.tolist() == [[[-2.0, 18.0, 2.0, 12.0]]]


@pytest.mark.parametrize("place", range(5))
def test_what_is_not_a_number_passes_through_a_dynamic_relu(place):
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    values[place] = float("nan")
    y = ops.dynamic_relu(paddle.full([1, 1, 2, 2], values[0]), paddle.to_tensor([[values[1:]]]))
    assert np.isnan(y.numpy()).all()


@pytest.mark.smoke
@pytest.mark.parametrize("bias", [False, None])
def test_a_frozen_linear_hands_on_its_gradient(bias):
    layer = Linear(5, 3, bias_attr=bias)
    x = paddle.to_tensor(normal(2, 5), stop_gradient=False)
    for parameter in layer.parameters():
        parameter.stop_gradient = True
    layer(x).backward(paddle.to_tensor(normal(2, 3)))
    np.testing.assert_allclose(
        x.grad.numpy(), normal(2, 3) @ layer.weight.numpy().T, rtol=1e-5, atol=1e-6
    )
    assert all(parameter.grad is None for parameter in layer.parameters())


def test_a_view_is_read_as_it_looks():
    flag = "FLAGS_use_stride_kernel"
    before = paddle.get_flags(flag)
    paddle.set_flags({flag: True})
    try:
        x = normal(20, 6)
        w = normal(20, 4)
        b = normal(4)
        found = ops.linear(paddle.to_tensor(x).t(), paddle.to_tensor(w), paddle.to_tensor(b))
    finally:
        paddle.set_flags(before)
    np.testing.assert_allclose(found.numpy(), x.T @ w + b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "call",
    [
        lambda: ops.linear(paddle.ones([2, 3]), paddle.ones([4, 5]), None),
        lambda: ops.linear(paddle.ones([2, 3]), paddle.ones([3, 5]), paddle.ones([4])),
        lambda: ops.mlp(*(paddle.ones(s) for s in ([2, 3], [3, 5], [4], [5, 2], [2]))),
        lambda: ops.layer_norm(paddle.ones([2, 3]), paddle.ones([4]), paddle.ones([3]), 1e-6),
        lambda: ops.matmul(paddle.ones([2, 3]), paddle.ones([4, 5])),
        lambda: ops.matmul(paddle.ones([2, 3]), paddle.ones([3, 5]), bias=paddle.ones([3])),
        lambda: ops.scale_channels(paddle.ones([2, 3]), paddle.ones([4])),
        lambda: ops.scale_channels(paddle.ones([2, 3]), paddle.ones([3]), paddle.ones([4])),
        lambda: ops.scale_planes(paddle.ones([2, 3, 4, 4]), paddle.ones([4])),
        lambda: ops.dynamic_relu(paddle.ones([2, 3, 4, 4]), paddle.ones([2, 4, 3])),
        lambda: ops.weighted_sum([paddle.ones([2, 4, 3])] * 3, paddle.ones([3, 3, 2])),
        lambda: ops.weighted_sum(
            [paddle.ones([2, 4, 3])] * 2 + [paddle.ones([2, 3, 4])], paddle.ones([3, 2, 3])
        ),
        lambda: ops.residual(paddle.ones([2, 3]), paddle.ones([3, 2])),
        lambda: ops.residual(paddle.ones([2, 3]), paddle.ones([2, 3]), paddle.ones([3])),
        lambda: ops.swiglu(paddle.ones([2, 3])),
        lambda: ops.swiglu(paddle.ones([2, 3]), paddle.ones([3, 2])),
    ],
)
def test_shapes_that_do_not_fit_are_refused(call):
    with pytest.raises(Exception, match="shapes don't fit"):
        call()


@pytest.mark.parametrize(
    "layer",
    [
        lambda: Linear(16, 5),
        lambda: Linear(16, 5, bias_attr=False),
        lambda: LayerNorm(16),
        lambda: Mlp(16, 11),
        lambda: Mlp(16, 11, drop=0.4),
        lambda: Attention(16, 2),
        lambda: Attention(16, 2, qkv_bias=False, attn_drop=0.4),
        lambda: Attention(16, 2, qk_norm=True),
        lambda: StarReLU(),
        lambda: DropPath(0.4),
    ],
)
def test_layers_are_the_same_with_and_without(layer):
    """Dropout, too: it draws the same numbers, in float32 and so in the same places."""
    paddle.seed(1)
    layer = layer()
    results = []
    for enabled in (True, False):
        ops.enable(enabled)
        paddle.seed(3)
        x = paddle.to_tensor(normal(2, 5, 16), stop_gradient=False)
        output = layer(x * x, onto=x) if isinstance(layer, DropPath) else layer(x)
        results.append([output, *paddle.grad([(output**2).sum()], [x, *layer.parameters()])])
    for own, other in zip(*results, strict=True):
        np.testing.assert_allclose(own.numpy(), other.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.smoke
def test_a_model_uses_them_and_trains_alike():
    losses = []
    calls = []
    for enabled in (True, False):
        ops.enable(enabled)
        paddle.seed(0)
        # A classifier that starts at zero would hide the first gradients of the rest.
        head = {"num_classes": 7, "head_init_scale": 1.0}
        model = create_model(
            "vit_tiny_patch16_224", **head, weight_init="timm", image_size=32, depth=2
        )
        optimizer = paddle.optimizer.AdamW(1e-3, parameters=model.parameters())
        images, labels = paddle.to_tensor(normal(4, 3, 32, 32)), paddle.arange(4)
        with mock.patch.object(F, "gelu", wraps=F.gelu) as gelu:
            for _ in range(4):
                loss = F.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                optimizer.clear_grad()
                losses.append(loss.item())
        calls.append(gelu.call_count)
    assert calls == [0, 8]
    assert np.allclose(losses[:4], losses[4:], rtol=1e-4)
    assert losses[3] < 0.8 * losses[0]


@pytest.mark.smoke
def test_without_gradients_nothing_is_kept_for_a_backward_pass():
    x = paddle.to_tensor(normal(2, 5, 12))
    layer = Mlp(12, 24)
    with paddle.no_grad():
        assert ops.mlp(x, *layer.parameters()).stop_gradient
        assert LayerNorm(12)(x).stop_gradient
    assert not ops.mlp(x, *layer.parameters()).stop_gradient


def test_where_they_are_not_used():
    x = paddle.ones([2, 2])
    assert ops.usable(x)
    assert not ops.usable(x.astype("float64"))
    ops.enable(False)
    assert not ops.usable(x)
    ops.enable(True)
    paddle.enable_static()
    try:
        assert not ops.usable(x)
    finally:
        paddle.disable_static()


@pytest.mark.smoke
def test_a_signal_within_a_product_harms_nothing():
    """oneDNN's has the stack's register point into the heap. In a process of its own, which dies or
    hangs if unmet.
    """
    program = """
import signal
import paddle
import ops
assert ops.load()
signal.signal(signal.SIGALRM, lambda *_: None)
x, weight, bias = paddle.randn([272, 96]), paddle.randn([96, 384]), paddle.randn([384])
expected = ops.linear(x, weight, bias).numpy().tobytes()
signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
for _ in range(4000):
    assert ops.linear(x, weight, bias).numpy().tobytes() == expected
signal.setitimer(signal.ITIMER_REAL, 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr[-1000:]
