"""Products by bfloat16: NumPy's of rounded factors, sums in float32; a gradient is of its forward
pass's kind.
"""

import math
import os
import subprocess
import sys

import numpy as np
import paddle
import pytest
from conftest import ROOT
from support.half_attention import attention_with_gradient, normal

import ops
from models import create_model
from models.layers import Linear


@pytest.fixture(autouse=True)
def _compiled(compiled_operators):
    if ops.why_no_bfloat16():
        pytest.skip("this CPU has no bfloat16")


def rounded(x):
    """To 8 bits of mantissa, ties to even, as float64."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.rint(mantissa * 256), exponent - 8)


def times(x, y):
    return rounded(x) @ rounded(y)


def weight_grad(x, grad):
    return times(x.reshape(-1, x.shape[-1]).T, grad.reshape(-1, grad.shape[-1]))


def linear(x, w, b, grad):
    return [times(x, w) + b, times(grad, w.T), weight_grad(x, grad), grad.sum((0, 1))]


def mlp(x, w1, b1, w2, b2, grad):
    def gelu(h):
        cdf = np.vectorize(lambda v: 0.5 * math.erfc(-v / math.sqrt(2)))(h)
        return h * cdf, cdf + h * np.exp(-h * h / 2) / math.sqrt(2 * math.pi)

    h = times(x, w1)
    again, slope = gelu(rounded(h) + b1)  # what is kept of h
    dh = times(grad, w2.T) * slope
    grads = [
        times(dh, w1.T),
        weight_grad(x, dh),
        dh.sum((0, 1)),
        weight_grad(again, grad),
        grad.sum((0, 1)),
    ]
    return [times(gelu(h + b1)[0], w2) + b2, *grads]


def attention(qkv, grad):
    q, k, v = qkv.transpose(2, 0, 3, 1, 4)
    scores = times(q, k.swapaxes(2, 3)) * 0.3
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    weights = powers / powers.sum(-1, keepdims=True)
    dout = grad.reshape(*grad.shape[:2], *qkv.shape[3:]).transpose(0, 2, 1, 3)
    dv = times(weights.swapaxes(2, 3), dout)
    dp = times(dout, v.swapaxes(2, 3))
    ds = weights * (dp - (weights * dp).sum(-1, keepdims=True))
    dq = 0.3 * times(ds, k)
    dk = 0.3 * times(ds.swapaxes(2, 3), q)
    out = (
        (times(powers, v) / powers.sum(-1, keepdims=True)).transpose(0, 2, 1, 3).reshape(grad.shape)
    )
    return [out, np.stack([dq, dk, dv]).transpose(1, 3, 0, 2, 4)]


CASES = {
    "linear": (ops.linear, linear, [normal(3, 7, 20), normal(20, 33), normal(33)]),
    "mlp": (ops.mlp, mlp, [normal(2, 5, 12), normal(12, 49), normal(49), normal(49, 8), normal(8)]),
    "attention": (
        lambda qkv: ops.attention([qkv.flatten(2)], 3, 8, 0.3),
        attention,
        [normal(2, 17, 3, 3, 8)],
    ),
}


@pytest.mark.smoke
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_numpys_of_rounded_factors(case):
    compiled, plain, arrays = CASES[case]
    arrays = [array.astype(np.float32) for array in arrays]
    inputs = [paddle.to_tensor(array, stop_gradient=False) for array in arrays]
    with ops.bfloat16_products(enabled=True):
        output = compiled(*inputs)
    grad = normal(*output.shape).astype(np.float32)
    found = [output, *paddle.grad([output], inputs, [paddle.to_tensor(grad)])]
    expected = plain(*(array.astype(np.float64) for array in [*arrays, grad]))
    for own, exact in zip(found, expected, strict=True):
        assert own.dtype == paddle.float32
        # A factor that float32's own rounding put on the other side of a tie is off by 2^-8 of
        # itself.
        error = np.abs(own.numpy() - exact)
        size = np.abs(exact).max()
        assert np.median(error) < 1e-6 * size
        assert error.max() < (3e-6 if case == "linear" else 1e-3) * size


def test_a_cpu_without_amx_gives_the_same(tmp_path):
    environment = os.environ | {
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
        "PYTHONPATH": f"{ROOT}:{ROOT}/tests",
    }
    file = tmp_path / "found.npy"
    subprocess.run(
        [sys.executable, "-m", "support.half_attention", str(file)],
        env=environment,
        check=True,
        cwd=ROOT,
    )
    with_them = attention_with_gradient()
    found = np.load(file)
    error = np.abs(with_them - found)
    size = np.abs(found).max()
    assert np.median(error) < 1e-6 * size
    assert error.max() < 1e-3 * size  # a sum that is rounded to the other side


@pytest.mark.smoke
def test_ties_go_to_even_and_what_is_no_number_stays():
    cases = {
        1 + 2**-8: 1.0,
        1 + 3 * 2**-8: 1 + 2**-6,
        1 + 2**-8 + 2**-20: 1 + 2**-7,
        -1 - 2**-8: -1.0,
        3.4e38: np.inf,
    }
    cases |= {np.inf: np.inf, -np.inf: -np.inf, np.nan: np.nan}
    x = paddle.to_tensor(np.array(list(cases), np.float32)[:, None])
    with ops.bfloat16_products(enabled=True):
        found = ops.linear(x, paddle.ones([1, 1]), None)
    np.testing.assert_array_equal(found.numpy()[:, 0], np.array(list(cases.values()), np.float32))
    # whose upper half would carry over into -0
    payload = np.array([[0x7FFFFFFF]], np.uint32).view(np.float32)
    with ops.bfloat16_products(enabled=True):
        assert np.isnan(ops.linear(paddle.to_tensor(payload), paddle.ones([1, 1]), None).item())


def test_a_gradient_is_of_its_forward_passs_kind():
    """Whatever is set as it runs, of a frozen weight, too, and where the forward pass is run again."""
    x = paddle.to_tensor(normal(3, 16).astype(np.float32))
    layer = Linear(16, 5)
    for frozen in (False, True):
        layer.weight.stop_gradient = layer.bias.stop_gradient = frozen
        x.stop_gradient = False
        grads = []
        for forward, backward in ((True, True), (True, False), (False, True), (False, False)):
            with ops.bfloat16_products(forward):
                output = layer(x).sum()
            with ops.bfloat16_products(backward):
                grads.append(paddle.grad([output], [x])[0].numpy().tobytes())
        assert grads[0] == grads[1] != grads[2] == grads[3]
    losses = []
    settings = {"num_classes": 7, "image_size": 32, "depth": 2, "head_init_scale": 1.0}
    for recompute in (False, True):
        paddle.seed(0)
        model = create_model("vit_tiny_patch16_224", **settings, recompute=recompute)
        with ops.bfloat16_products(enabled=True):
            loss = model(paddle.ones([2, 3, 32, 32])).square().sum()
        loss.backward()
        losses.append(
            [loss.numpy().tobytes(), *(p.grad.numpy().tobytes() for p in model.parameters())]
        )
    assert losses[0] == losses[1]


def test_what_a_cpu_lacks_is_told(monkeypatch):
    monkeypatch.setattr(ops.core, "supports_bfloat16_fast_performance", lambda: False)
    assert ops.why_no_bfloat16() == "this CPU has no bfloat16 instructions (avx512_bf16, AMX)"
    monkeypatch.setattr(ops, "_enabled", False)
    assert ops.why_no_bfloat16() == "bfloat16 on a CPU needs the compiled operators; run make ops"
