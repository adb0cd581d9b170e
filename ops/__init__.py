"""Compiled operators of the transformer for CPUs: products by oneDNN, memory-bound work in fused
passes, float32.

They are optional: ``make ops`` compiles *.cc for the Paddle at hand (``ops.build``) and ``load``
finds the result. Where ``usable`` says no, layers compute the same with Paddle's own operators, to
rounding. On other devices they aren't loaded. docs/performance.md has what they bring.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import paddle
from paddle.autograd import PyLayer
from paddle.base import core

from ops.calls import absent
from ops.calls import run as _run
from ops.paths import library
from ops.stack import give_signals_a_stack

_REGISTERED = "_vit_ops"  # an attribute of Paddle's: all copies of this module find it
_loaded = False
_enabled = True
_half = ContextVar("_half", default=False)  # products by bfloat16


def load() -> bool:
    """Loads the compiled operators into this process; returns whether there are any.

    Paddle ends a process that registers a name twice. Of two copies of the toolkit in one
    (hubconf.py) the first does; the second uses them, if they are made of the same sources.
    """
    global _loaded
    if not _loaded and library().is_file():
        give_signals_a_stack()
        here = library().parent.name
        if not hasattr(core, _REGISTERED):
            paddle.utils.cpp_extension.load_op_meta_info_and_register_op(str(library()))
            setattr(core, _REGISTERED, here)
        _loaded = getattr(core, _REGISTERED) == here
    return _loaded


def enable(enabled: bool) -> None:
    """Lets layers use the compiled operators, or not."""
    global _enabled
    _enabled = enabled


def bfloat16_lacks() -> str:
    """Returns why there are no bfloat16 products on this CPU, in words; "": there are.

    Paddle's autocast does nothing on a CPU. oneDNN multiplies in bfloat16 without such
    instructions, too, but slower than in float32.
    """
    if not (_loaded and _enabled):
        return "a CPU's are the compiled operators', which aren't there"
    return (
        "" if core.supports_bfloat16_fast_performance() else "this CPU has none (avx512_bf16, AMX)"
    )


@contextlib.contextmanager
def multiplying(half: bool) -> Iterator[None]:
    """Within it the operators round what they multiply to bfloat16, or not; a gradient goes by its
    forward pass.

    What they read and return, sums, norms and softmax stay float32.
    """
    before = _half.set(half)
    try:
        yield
    finally:
        _half.reset(before)


def multiplies_half() -> bool:
    """Returns whether the operators round what they multiply to bfloat16 here."""
    return _half.get()


@paddle.jit.not_to_static
def usable(x: paddle.Tensor) -> bool:
    """Returns whether the operators below can compute with ``x``: loaded, enabled, float32, not in
    a traced graph.
    """
    return _loaded and _enabled and paddle.in_dynamic_mode() and x.dtype == paddle.float32


@paddle.jit.not_to_static
def flash_attention_takes(x: paddle.Tensor, width: int) -> bool:
    """Returns whether ``F.scaled_dot_product_attention`` is flash attention for heads of this type,
    width and device.

    Not run on a GPU. Paddle 2.6 doesn't look at the device itself: before compute capability 8.0
    its kernel fails. Wider heads than 256 would go to another kernel, which 2.6 hands them in any
    type.
    """
    half = x.dtype in (paddle.float16, paddle.bfloat16)
    return half and width % 8 == 0 and width <= 256 and _capability() >= 8


@functools.cache
def _capability() -> int:
    """The major compute capability of this process's device; 0: it isn't a GPU."""
    on_gpu = paddle.get_device().startswith("gpu")  # a traced graph's tensors have no place
    return paddle.device.cuda.get_device_capability()[0] if on_gpu else 0


def linear(x: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor | None) -> paddle.Tensor:
    """x [..., K] weight [K, N] + bias [N] -> [..., N]."""
    return _run(
        "vit_linear_bf16" if _half.get() else "vit_linear",
        x,
        weight,
        absent(2) if bias is None else bias,
    )[0]


def matmul(
    x: paddle.Tensor,
    y: paddle.Tensor,
    transpose_x: bool = False,
    transpose_y: bool = False,
    scale: float = 1.0,
    bias: paddle.Tensor | None = None,
) -> paddle.Tensor:
    """Products of matrices, as ``paddle.matmul``: of [..., M, K] and [..., K, N], or of one [M, K]
    with all of y.

    They are multiplied by ``scale``. The bias [M] is added to their rows.
    """
    return _run(
        "vit_matmul", x, y, absent(2) if bias is None else bias, transpose_x, transpose_y, scale
    )[0]


def scale_channels(
    x: paddle.Tensor, factors: paddle.Tensor, shift: paddle.Tensor | None = None
) -> paddle.Tensor:
    """x [..., N] times factors [N], plus shift [N]."""
    return _run("vit_scaled", x, factors, absent(2) if shift is None else shift)[0]


def scale_planes(x: paddle.Tensor, factors: paddle.Tensor) -> paddle.Tensor:
    """x [B, C, H, W] times a factor of each channel, or of each image's channels: of [C] or [B, C]
    elements.
    """
    return _run("vit_scaled_planes", x, factors)[0]


def residual(
    x: paddle.Tensor, branch: paddle.Tensor, factors: paddle.Tensor | None = None
) -> paddle.Tensor:
    """x + branch, both [B, ...], or branch times a factor of each sample [B], which gets no
    gradient.
    """
    return _run("vit_residual", x, branch, absent(2) if factors is None else factors)[0]


def add_to_all(x: paddle.Tensor, one: paddle.Tensor) -> paddle.Tensor:
    """x [B, ...] + one [1, ...]."""
    return _run("vit_shared", x, one)[0]


def multiply(x: paddle.Tensor, y: paddle.Tensor) -> paddle.Tensor:
    """x * y, element by element, of one shape."""
    return _run("vit_times", x, y)[0]


def swiglu(gate: paddle.Tensor, x: paddle.Tensor | None = None) -> paddle.Tensor:
    """silu(gate) * x, both [..., N]; without x, gate [..., 2 N] has both, the gate first."""
    return _run("vit_gated", gate, absent() if x is None else x)[0]


class _FrozenLinear(PyLayer):
    """``linear`` by a weight and a bias that need no gradients: x isn't kept, and the weight's
    isn't computed.
    """

    @staticmethod
    def forward(
        ctx: Any, x: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor
    ) -> paddle.Tensor:
        ctx.weight, ctx.half = weight, _half.get()
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: paddle.Tensor) -> Any:
        with multiplying(ctx.half):
            return linear(grad, ctx.weight.t().contiguous(), None), None, None


def frozen_linear(
    x: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor | None
) -> paddle.Tensor:
    """``linear``, of which x alone needs a gradient."""
    # A tensor in any case: Paddle counts the tensors that it is given, and expects as many
    # gradients.
    return _FrozenLinear.apply(x, weight, absent(2) if bias is None else bias)


def mlp(
    x: paddle.Tensor,
    weight1: paddle.Tensor,
    bias1: paddle.Tensor,
    weight2: paddle.Tensor,
    bias2: paddle.Tensor,
) -> paddle.Tensor:
    """gelu(x [..., K] weight1 [K, M] + bias1) weight2 [M, N] + bias2 -> [..., N], by the exact
    GELU, to 2e-7.
    """
    return _run("vit_mlp_bf16" if _half.get() else "vit_mlp", x, weight1, bias1, weight2, bias2)[0]


def layer_norm(
    x: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor | None, epsilon: float
) -> paddle.Tensor:
    """x [..., N], normalised over its last axis, times weight [N], plus bias [N]."""
    return _run(
        "vit_layer_norm", x, weight, paddle.zeros(weight.shape) if bias is None else bias, epsilon
    )[0]


def attention(
    parts: Sequence[paddle.Tensor],
    heads: int,
    width: int,
    scale: float | paddle.Tensor,
    bias: paddle.Tensor | None = None,
    mask: paddle.Tensor | None = None,
    by_head: bool = False,
    across: bool = False,
    turns: tuple[paddle.Tensor, paddle.Tensor] | None = None,
    halves: bool = False,
) -> paddle.Tensor:
    """softmax(q k^T scale + bias + mask) v of each head; the weights [B, heads, N, M] aren't kept.

    Args:
        parts: [q, k, v in one tensor], [q, k and v], or [q, k, v]: each [B, tokens, channels], read
            where it lies.
        heads, width: heads H; channels of a head's queries and keys. Its values have what is left.
        scale: a number; or one for each head [H], and queries and keys are made vectors of length 1
            before.
        bias: [G, H, N, M]; item b of the batch has that of b mod G.
        mask: [G, N, M], likewise, for all heads; it gets no gradient.
        by_head: a tensor has its parts head by head, instead of part by part all heads.
        across: channels attend to each other, by what they have over the tokens.
        turns: cosines and sines [N, ..., width / 2] by which pairs of queries' and keys' channels
            are turned before.
        halves: a pair is of both halves of the channels, not neighbours.

    Returns:
        [B, N, H * channels of a value].
    """
    none = absent()
    q, k, v = (*parts, *[none] * (3 - len(parts)))
    factor = scale.reshape([-1, 1]) if isinstance(scale, paddle.Tensor) else none
    scale = 1.0 if isinstance(scale, paddle.Tensor) else scale
    extra = (bias, mask, factor, *(turns or (None, None)))
    operands = [none if one is None else one for one in extra]
    return _run(
        "vit_attention",
        q,
        k,
        v,
        *operands,
        heads,
        width,
        scale,
        by_head,
        across,
        halves,
        _half.get(),
    )[0]


def outlook(
    values: paddle.Tensor, scores: paddle.Tensor, heads: int, scale: float
) -> paddle.Tensor:
    """What VOLO's outlook attention adds up at each place: values [B, 2 h, 2 w, D] -> the same.

    Each 2 x 2 places weigh the 3 x 3 around them by the softmax of ``scores`` [B, h, w, heads x 9 x
    9] times ``scale``.
    """
    return _run("vit_outlook", values, scores, heads, scale)[0]


def convolution(
    x: paddle.Tensor,
    weight: paddle.Tensor,
    bias: paddle.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    channels_last: bool = False,
) -> paddle.Tensor:
    """``F.conv2d`` of x [B, C, H, W] by weight [D, C / groups, h, w] + bias [D]: [B, D, H', W'].

    With ``channels_last`` x is [B, H, W, C], and the output [B, H', W', D]. Sequences have an item
    for height and one for width. Gradients that nobody wants aren't computed.
    """
    wanted = (
        not x.stop_gradient,
        not weight.stop_gradient or (bias is not None and not bias.stop_gradient),
    )
    form = stride, padding, dilation, groups, channels_last
    return _run(
        "vit_convolution",
        x,
        weight,
        absent() if bias is None else bias,
        *form,
        bias is not None,
        *wanted,
    )[0]


def activation(x: paddle.Tensor, name: str) -> paddle.Tensor:
    """x by relu, gelu (exact, to 2e-7), gelu_tanh, quick_gelu, silu, hardswish; by (log_)softmax
    over its last axis.
    """
    own = name in ("relu", "softmax", "log_softmax")
    return _run(f"vit_{name}", x)[0] if own else _run("vit_activation", x, name)[0]


def star_relu(x: paddle.Tensor, scale: paddle.Tensor, bias: paddle.Tensor) -> paddle.Tensor:
    """scale [1] * relu(x) ** 2 + bias [1]."""
    return _run("vit_star_relu", x, scale, bias)[0]


def batch_norm(
    x: paddle.Tensor,
    weight: paddle.Tensor,
    bias: paddle.Tensor,
    mean: paddle.Tensor,
    variance: paddle.Tensor,
    training: bool,
    share: float,
    epsilon: float,
    act: str = "",
) -> tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor]:
    """Batch norm of x [B, C, ...] by channel, as PyTorch's; returns it, and the running mean and
    variance [C] after it.

    In training x is normalised by its own statistics. The running ones keep ``share`` of what they
    were; the variance that they take in is that of n - 1. ``act`` names the activation that
    follows; "": none does. What it reads isn't kept for the gradient, but computed again.
    """
    options = training, share, epsilon, act
    out, _, _, mean, variance = _run("vit_batch_norm", x, weight, bias, mean, variance, *options)
    return out, mean, variance


def group_norm(
    x: paddle.Tensor, groups: int, weight: paddle.Tensor, bias: paddle.Tensor, epsilon: float
) -> paddle.Tensor:
    """x [B, C, ...], each group of an image's channels normalised, times weight [C], plus bias [C]."""
    return _run("vit_group_norm", x, weight, bias, groups, epsilon)[0]


def response_norm(x: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor) -> paddle.Tensor:
    """Global response norm of x [B, ..., C]: see ``models.layers.grn``."""
    return _run("vit_response_norm", x, weight, bias)[0]


def neighbour_means(x: paddle.Tensor, reach: int) -> paddle.Tensor:
    """The mean of each place of x [B, C, H, W] and of those within ``reach`` of it that are inside:
    [B, C, H, W].
    """
    return _run("vit_neighbour_means", x, reach)[0]


def windows(x: paddle.Tensor, size: int, halo: int) -> paddle.Tensor:
    """The blocks of size x size places of maps [B, C, H, W], each with a halo around it, of zeros
    beyond the map.

    Returns [B, blocks, (size + 2 halo) ** 2, C].
    """
    return _run("vit_windows", x, size, halo, x.shape)[0]


def distances(products: paddle.Tensor, side: int, window: int) -> paddle.Tensor:
    """What HaloNet's relative positions add to the scores: [items, side ** 2, window ** 2].

    ``products`` [items, side ** 2, 2 (2 window - 1)]: of each query with the vectors of all
    distances of rows, then of columns. Query i and key j of an axis have distance j - i + window -
    1.
    """
    return _run("vit_distances", products, side, window)[0]


def swap(x: paddle.Tensor, m: int, shape: Sequence[int]) -> paddle.Tensor:
    """x [B, ...], read as [B, m, n], as [B, n, m] in ``shape``."""
    return _run("vit_swap", x, m, x.size // x.shape[0] // m, x.shape, shape)[0]


def look_up(pixels: paddle.Tensor, table: paddle.Tensor) -> paddle.Tensor:
    """What table [C, 256], or [1, 256], has of pixels [B, H, W, C] uint8, channel by channel: [B,
    C, H, W].
    """
    return _run("vit_looked_up", pixels, table)[0]
