"""The compiled attention gives what Paddle's operators do in float64: every form of it that a model
has.
"""

import numpy as np
import paddle
import pytest
from paddle import nn
from threadpoolctl import threadpool_limits

import ops
from models.cait import TalkingHeadAttention
from models.halonet import HaloAttention
from models.layers.attention import attend_heads
from models.layers.attention_pool import AttentionPool
from models.layers.block import Block
from models.layers.class_attention import ClassAttention
from models.layers.swiglu import PackedSwiGLU, SwiGLU
from models.layers.units import MaskUnitAttention
from models.volo import VOLO, OutlookAttention
from models.xcit import CrossCovarianceAttention

pytestmark = pytest.mark.usefixtures("compiled_operators")


def normal(*shape, seed=0):
    return np.random.default_rng(seed + sum(shape)).standard_normal(shape).astype(np.float32)


# Shapes of the parts, heads, width; of a bias, of a mask; "cosine": a scale per head; and
# attended's words.
FORMS = {
    "one tensor": ([[2, 17, 3 * 24]], 3, 8, {}),
    "two": ([[2, 17, 24], [2, 5, 48]], 3, 8, {}),
    "three, wider values": ([[2, 17, 24], [2, 5, 24], [2, 5, 33]], 3, 8, {}),
    "one of everything": ([[1, 1, 3]], 1, 1, {}),
    "one query": ([[3, 1, 48], [3, 50, 48], [3, 50, 48]], 2, 24, {}),
    "many queries at a time": ([[1, 700, 20], [1, 33, 40]], 1, 20, {}),
    "many keys": ([[1, 9, 16], [1, 1100, 32]], 1, 16, {}),
    "head by head, a bias": ([[3, 12, 4 * 64]], 4, 16, {"by_head": True, "bias": [4, 12, 12]}),
    "head by head, two": (
        [[3, 12, 64], [3, 49, 4 * 48]],
        4,
        16,
        {"by_head": True, "bias": [4, 12, 49]},
    ),
    "each item's bias": ([[6, 16, 8], [6, 100, 16]], 1, 8, {"bias": [6, 1, 16, 100]}),
    "a bias for many items": ([[70, 5, 3 * 8]], 2, 4, {"bias": [2, 5, 5]}),
    "windows": ([[12, 49, 3 * 96]], 3, 32, {"bias": [3, 49, 49], "mask": [4, 49, 49]}),
    "windows' cosines": (
        [[12, 16, 3 * 12]],
        3,
        4,
        {"bias": [3, 16, 16], "mask": [4, 16, 16], "scale": [3, 1, 1]},
    ),
    "a mask alone": ([[6, 9, 3 * 8]], 2, 4, {"mask": [3, 9, 9]}),
    "turned halves": ([[2, 20, 3 * 48]], 3, 16, {"turns": [20, 1, 8], "halves": True}),
    "turned neighbours": ([[2, 20, 48]] * 3, 3, 16, {"turns": [20, 1, 8]}),
}


def results(form, dtype):
    """The output of ``attend_heads``, and the gradients of all that has one."""
    shapes, heads, width, words = form
    inputs = [
        paddle.to_tensor(normal(*shape, seed=i).astype(dtype)) for i, shape in enumerate(shapes)
    ]
    words = dict(words)
    count = len(inputs)
    for name in ("bias", "scale"):
        if name in words:
            words[name] = paddle.to_tensor(normal(*words[name]).astype(dtype))
            inputs.append(words[name])
    for one in inputs:
        one.stop_gradient = False
    if "mask" in words:
        words["mask"] = paddle.to_tensor(
            np.where(normal(*words["mask"]) > 1, -100.0, 0.0).astype(dtype)
        )
    if "turns" in words:
        angles = normal(*words["turns"])
        words["turns"] = [
            paddle.to_tensor(one.astype(dtype)) for one in (np.cos(angles), np.sin(angles))
        ]
    output = attend_heads(inputs[:count], heads, width, words.pop("scale", 0.3), **words)
    cotangent = paddle.to_tensor(normal(*output.shape).astype(dtype))
    return [output, *paddle.grad([output], inputs, [cotangent])]


@pytest.mark.smoke
@pytest.mark.parametrize("form", FORMS)
def test_values_and_gradients_are_those_of_float64_for_any_number_of_threads(form):
    bits = set()
    for threads in (1, 3):
        with threadpool_limits(threads):
            found = results(FORMS[form], "float32")
        bits.add(b"".join(one.numpy().tobytes() for one in found))
    assert len(bits) == 1
    for own, exact in zip(found, results(FORMS[form], "float64"), strict=True):
        assert own.shape == exact.shape
        assert np.abs(own.numpy() - exact.numpy()).max() < 3e-6 * max(
            1, np.abs(exact.numpy()).max()
        )


def test_not_a_number_stays_within_its_query():
    qkv = paddle.to_tensor(normal(1, 4, 6))
    qkv[0, 1, 0] = float("nan")
    out = ops.attention([qkv], 1, 2, 1.0).numpy()
    assert np.isnan(out[0, 1]).all()
    assert np.isfinite(out[0, [0, 2, 3]]).all()


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([[2, 3, 8]], {}),
        ([[2, 3, 4], [2, 3, 4]], {}),
        ([[2, 3, 4], [1, 3, 8]], {}),
        ([[2, 3, 4], [2, 5, 4], [2, 6, 4]], {}),
        ([[2, 3, 12]], {"bias": [1, 2, 3, 4]}),
        ([[2, 3, 12]], {"bias": [3, 2, 3, 3]}),
        ([[2, 3, 12]], {"mask": [2, 3, 4]}),
        ([[2, 3, 12]], {"turns": [4, 1, 1]}),
        ([[2, 3, 12]], {"scale": [3, 1, 1]}),
    ],
)
def test_shapes_that_do_not_fit_are_refused(parts, words):
    words = {name: paddle.ones(shape) for name, shape in words.items()}
    if "turns" in words:
        words["turns"] = (words["turns"], words["turns"])
    with pytest.raises(Exception, match="shapes don't fit"):
        ops.attention(
            [paddle.ones(shape) for shape in parts], 2, 2, words.pop("scale", 1.0), **words
        )


LAYERS = {
    "xcit": (lambda: CrossCovarianceAttention(24, 2, True, 0.0, 0.0), [2, 35, 24]),
    "xcit, dropped": (lambda: CrossCovarianceAttention(24, 2, True, 0.3, 0.0), [2, 35, 24]),
    "outlook": (lambda: OutlookAttention(12, 3, False, 0.0), [2, 6, 4, 12]),
    "outlook of one window": (lambda: OutlookAttention(4, 1, True, 0.0), [1, 2, 2, 4]),
    "outlook, dropped": (lambda: OutlookAttention(12, 3, False, 0.3), [2, 6, 4, 12]),
    "halo": (lambda: HaloAttention(16, 2, 4, 1, 1), [2, 16, 8, 8]),
    "halo, stride 2": (lambda: HaloAttention(16, 2, 4, 1, 2), [2, 16, 8, 8]),
    "units": (lambda: MaskUnitAttention(8, 8, 2, 16, True, True), [2, 64, 8]),
    "talking heads": (lambda: TalkingHeadAttention(8, 2, True, 0.0, 0.0), [2, 7, 8]),
    "class": (lambda: ClassAttention(8, 2, attn_drop=0.3), [2, 7, 8]),
    "pool": (lambda: AttentionPool(8, 2, 2.0, 1e-6, "gelu"), [2, 7, 8]),
    "layer scale": (lambda: Block(8, nn.Identity(), 2.0, 0.3, 0.0, 0.0, act="swiglu"), [2, 7, 8]),
    "swiglu": (lambda: SwiGLU(8, 12, 1e-6), [2, 7, 8]),
    "swiglu in one": (lambda: PackedSwiGLU(8, 12), [2, 7, 8]),
    "maximum": (lambda: VOLO(32, 8, num_classes=7, stage_depths=(1, 1, 1, 1), embed_dims=(8,) * 4, num_heads=(2,) * 4),
                [2, 3, 32, 32]),
}  # fmt: skip


@pytest.mark.smoke
@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_the_same_with_and_without(name):
    """Dropout, too: where it drops some, the weights are there to be dropped."""
    make, shape = LAYERS[name]
    paddle.seed(1)
    layer = make()
    found = []
    for enabled in (True, False):
        ops.enable(enabled)
        paddle.seed(3)
        x = paddle.to_tensor(normal(*shape), stop_gradient=False)
        output = layer(x)
        found.append(
            [output, *paddle.grad([(output**2).sum()], [x, *layer.parameters()], allow_unused=True)]
        )
    for own, other in zip(*found, strict=True):
        assert (own is None) == (other is None)
        if own is not None:
            scale = max(1, np.abs(other.numpy()).max())
            np.testing.assert_allclose(own.numpy(), other.numpy(), rtol=0, atol=2e-5 * scale)
