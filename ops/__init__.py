"""Compiled operators of the transformer for CPUs, in float32.

Matrix products and convolutions are oneDNN's. What is bound by memory is computed in fused passes.
The operators are optional: ``make ops`` compiles the .cc files for the installed Paddle
(``ops.build``), and ``load`` finds the result. Where ``usable`` returns False, layers compute the
same with Paddle's own operators, up to rounding. On other devices than CPUs they aren't loaded.
docs/evidence/performance.md shows what they gain.

Every function of a tensor below expects that ``usable`` returned True for its operands.
"""

import contextlib
import ctypes
import functools
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import errors  # noqa: F401  (first: it silences a warning of Paddle's import)

# isort: split
import paddle
from paddle import _C_ops
from paddle.autograd import PyLayer
from paddle.base import core

from ops.paths import is_built, library, mark_as_used

# Where Paddle's module ``core`` remembers which build of the operators was registered. All copies
# of this module in a process read it there.
_REGISTERED = "_vit_ops"
# The variable that ``decide`` sets.
_WITHOUT = "PADDLE_VIT_WITHOUT_OPERATORS"
_loaded = False
_enabled = True
_bfloat16 = ContextVar("_bfloat16", default=False)
_signal_stack = ctypes.create_string_buffer(1 << 16)
# Paddle 2.6 has it in another place.
_run_custom_op = getattr(_C_ops, "_run_custom_op", None) or core.eager._run_custom_op


def load() -> bool:
    """Loads the compiled operators into this process; returns whether they can be used.

    Paddle ends a process that registers an operator's name twice. If a process has two copies of
    the toolkit (hubconf.py), the first one registers them. The second uses the same operators if
    its own were built from the same sources.
    """
    global _loaded
    if not _loaded and _WITHOUT not in os.environ and is_built(compiled := library()):
        install_signal_stack()
        build_name = compiled.parent.name
        if not hasattr(core, _REGISTERED):
            paddle.utils.cpp_extension.load_op_meta_info_and_register_op(str(compiled))
            setattr(core, _REGISTERED, build_name)
            mark_as_used(compiled)
        _loaded = getattr(core, _REGISTERED) == build_name
    return _loaded


def decide() -> None:
    """Has the processes that this one starts compute without the compiled operators if there are none
    now. They may be compiled meanwhile, and all ranks have to compute by the same ones.
    """
    if not is_built(library()):
        os.environ[_WITHOUT] = "1"


class _StackT(ctypes.Structure):
    """The C structure stack_t of sigaltstack(2)."""

    _fields_ = (("memory", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


def install_signal_stack() -> None:
    """Gives this thread, the main one, a separate stack on which Python's signal handlers run.

    Some matrix products of oneDNN (sgemm, until uxlfoundation/oneDNN#4855) keep another pointer in
    the stack register. A signal that arrives meanwhile would overwrite what lies before that
    address in the heap.
    """
    if sys.platform == "linux":
        stack = _StackT(ctypes.addressof(_signal_stack), 0, len(_signal_stack))
        ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None)


def enable(enabled: bool) -> None:
    """Switches the compiled operators on or off for all layers of this process."""
    global _enabled
    _enabled = enabled


def are_used() -> bool:
    """Returns whether the compiled operators are loaded and enabled."""
    return _loaded and _enabled


@paddle.jit.not_to_static
def usable(x: paddle.Tensor) -> bool:
    """Returns whether the operators below can compute with ``x``: they are loaded and enabled, x is
    float32, and it isn't part of a traced graph.
    """
    return _loaded and _enabled and paddle.in_dynamic_mode() and x.dtype == paddle.float32


def why_no_bfloat16() -> str:
    """Returns the reason why there are no bfloat16 products on this CPU; "" if there are.

    Paddle's autocast does nothing on a CPU. Without bfloat16 instructions oneDNN could still
    multiply in bfloat16, but slower than in float32.
    """
    if not are_used():
        return "bfloat16 on a CPU needs the compiled operators; run make ops"
    if not core.supports_bfloat16_fast_performance():
        return "this CPU has no bfloat16 instructions (avx512_bf16, AMX)"
    return ""


@contextlib.contextmanager
def bfloat16_products(enabled: bool) -> Iterator[None]:
    """Within this context the operators round the factors of their products to bfloat16, or don't.

    Their inputs and outputs, sums, norms and softmax stay float32. A backward pass follows the
    setting of its forward pass.
    """
    token = _bfloat16.set(enabled)
    try:
        yield
    finally:
        _bfloat16.reset(token)


def bfloat16_products_enabled() -> bool:
    """Returns whether the operators round the factors of their products to bfloat16 here."""
    return _bfloat16.get()


@paddle.jit.not_to_static
def flash_attention_takes(x: paddle.Tensor, width: int) -> bool:
    """Returns whether ``F.scaled_dot_product_attention`` is flash attention for heads of the type of
    ``x`` and of ``width`` channels, on this device.

    Not run on a GPU. Paddle 2.6 doesn't check the device itself: its kernel fails below compute
    capability 8.0. Heads wider than 256 would go to another kernel, which 2.6 calls with any type.
    """
    is_half = x.dtype in (paddle.float16, paddle.bfloat16)
    return is_half and width % 8 == 0 and width <= 256 and _compute_capability() >= 8


@functools.cache
def _compute_capability() -> int:
    """The major compute capability of this process's GPU; 0 if its device isn't a GPU."""
    # The device is asked for, not x.place: tensors of a traced graph have no place.
    if not paddle.get_device().startswith("gpu"):
        return 0
    return paddle.device.cuda.get_device_capability()[0]


def _run(name: str, *operands: Any) -> list[paddle.Tensor]:
    """Runs the operator ``name``; returns its outputs.

    Paddle 3.3.1 records a custom operator for a backward pass under ``no_grad`` as well, if an
    operand needs a gradient. A forward pass would then keep all that its layers compute until its
    end. Operands are therefore detached there.
    """
    if not paddle.is_grad_enabled():
        operands = tuple(
            operand.detach() if isinstance(operand, paddle.Tensor) else operand
            for operand in operands
        )
    return _run_custom_op(name, *operands)


@functools.cache
def _absent(axes: int = 1) -> paddle.Tensor:
    """Returns the placeholder of an operand that isn't given. The operators recognise it by the
    number of its axes, which is another one than the operand's.
    """
    return paddle.zeros([1] * axes)


def linear(x: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor | None) -> paddle.Tensor:
    """x [..., K] @ weight [K, N] + bias [N] -> [..., N]."""
    name = "vit_linear_bf16" if _bfloat16.get() else "vit_linear"
    return _run(name, x, weight, _absent(2) if bias is None else bias)[0]


def matmul(
    x: paddle.Tensor,
    y: paddle.Tensor,
    transpose_x: bool = False,
    transpose_y: bool = False,
    scale: float = 1.0,
    bias: paddle.Tensor | None = None,
) -> paddle.Tensor:
    """Matrix products as ``paddle.matmul``'s: of [..., M, K] and [..., K, N], or of one [M, K] and
    all of y.

    The products are multiplied by ``scale``, then the bias [M] is added to their rows.
    """
    bias = _absent(2) if bias is None else bias
    return _run("vit_matmul", x, y, bias, transpose_x, transpose_y, scale)[0]


def scale_channels(
    x: paddle.Tensor, factors: paddle.Tensor, shift: paddle.Tensor | None = None
) -> paddle.Tensor:
    """x [..., N] times factors [N], plus shift [N]."""
    return _run("vit_scaled", x, factors, _absent(2) if shift is None else shift)[0]


def scale_planes(x: paddle.Tensor, factors: paddle.Tensor) -> paddle.Tensor:
    """x [B, C, H, W] times ``factors`` of C elements, one for each channel, or of B * C, one for
    each channel of each image.
    """
    return _run("vit_scaled_planes", x, factors)[0]


def dynamic_relu(x: paddle.Tensor, lines: paddle.Tensor) -> paddle.Tensor:
    """max(a1 x + b1, a2 x + b2) of x [B, C, H, W], with lines [B, C, 4] of a1, a2, b1 and b2."""
    return _run("vit_dynamic_relu", x, lines)[0]


def weighted_sum(tensors: Sequence[paddle.Tensor], weights: paddle.Tensor) -> paddle.Tensor:
    """The sum of three tensors [B, ..., N], each times its weights of the sample: [3, B, N]."""
    return _run("vit_weighted", *tensors, weights)[0]


def residual(
    x: paddle.Tensor, branch: paddle.Tensor, factors: paddle.Tensor | None = None
) -> paddle.Tensor:
    """x + branch, both [B, ...]. With ``factors`` [B], which get no gradient, each sample's branch
    is multiplied by its factor first.
    """
    return _run("vit_residual", x, branch, _absent(2) if factors is None else factors)[0]


def add_to_all(x: paddle.Tensor, one: paddle.Tensor) -> paddle.Tensor:
    """x [B, ...] + one [1, ...], the same for all of the batch."""
    return _run("vit_shared", x, one)[0]


def multiply(x: paddle.Tensor, y: paddle.Tensor) -> paddle.Tensor:
    """x * y, element by element; both have the same shape."""
    return _run("vit_times", x, y)[0]


def swiglu(gate: paddle.Tensor, x: paddle.Tensor | None = None) -> paddle.Tensor:
    """silu(gate) * x, both [..., N]. Without x, ``gate`` is [..., 2 N] and holds both, the gate
    first.
    """
    return _run("vit_gated", gate, _absent() if x is None else x)[0]


class _FrozenLinear(PyLayer):
    """``linear`` with a weight and a bias that need no gradients. x isn't kept for the backward
    pass, and the weight's gradient isn't computed.
    """

    @staticmethod
    def forward(
        ctx: Any, x: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor
    ) -> paddle.Tensor:
        ctx.weight = weight
        ctx.bfloat16 = _bfloat16.get()
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: paddle.Tensor) -> Any:
        with bfloat16_products(ctx.bfloat16):
            return linear(grad, ctx.weight.t().contiguous(), None), None, None


def frozen_linear(
    x: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor | None
) -> paddle.Tensor:
    """``linear`` where only x needs a gradient."""
    # A missing bias is a tensor, too: ``backward`` has to return as many gradients as ``forward``
    # gets tensors.
    return _FrozenLinear.apply(x, weight, _absent(2) if bias is None else bias)


def mlp(
    x: paddle.Tensor,
    weight1: paddle.Tensor,
    bias1: paddle.Tensor,
    weight2: paddle.Tensor,
    bias2: paddle.Tensor,
) -> paddle.Tensor:
    """gelu(x [..., K] @ weight1 [K, M] + bias1) @ weight2 [M, N] + bias2 -> [..., N], with the exact
    GELU (to 2e-7).
    """
    name = "vit_mlp_bf16" if _bfloat16.get() else "vit_mlp"
    return _run(name, x, weight1, bias1, weight2, bias2)[0]


def layer_norm(
    x: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor | None, epsilon: float
) -> paddle.Tensor:
    """x [..., N], normalised over its last axis, times weight [N], plus bias [N]."""
    bias = paddle.zeros(weight.shape) if bias is None else bias
    return _run("vit_layer_norm", x, weight, bias, epsilon)[0]


def attention(
    qkv: Sequence[paddle.Tensor],
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
    """softmax(q k^T scale + bias + mask) v of each head. The weights [B, heads, N, M] aren't kept.

    Args:
        qkv: one tensor of q, k and v; or q, and one tensor of k and v; or q, k and v: each [B,
            tokens, channels]. They are read where they lie, without copies.
        heads: the number of heads H.
        width: channels of a head's queries and keys. Its values have the channels that are left.
        scale: a number; or one for each head [H], in which case queries and keys are normalised to
            length 1 first.
        bias: [G, H, N, M]; item b of the batch has that of b mod G.
        mask: [G, N, M], likewise, the same for all heads, or [G, 1, M], the same for all queries,
            too; it gets no gradient.
        by_head: a tensor of several parts holds all parts of the first head, then those of the
            second one, and so on. Otherwise it holds the queries of all heads, then all keys.
        across: channels attend to each other instead of tokens, by their values over the tokens.
        turns: cosines and sines [N, ..., width / 2], by which pairs of channels of queries and keys
            are rotated first.
        halves: a pair takes one channel of each half. Otherwise it is two neighbours.

    Returns:
        [B, N, H * channels of a value].
    """
    placeholder = _absent()
    q, k, v = (*qkv, *[placeholder] * (3 - len(qkv)))
    cosines, sines = turns or (None, None)
    head_scales = None
    if isinstance(scale, paddle.Tensor):
        head_scales = scale.reshape([-1, 1])
        scale = 1.0
    optional = [
        placeholder if operand is None else operand
        for operand in (bias, mask, head_scales, cosines, sines)
    ]
    options = [heads, width, scale, by_head, across, halves, _bfloat16.get()]
    return _run("vit_attention", q, k, v, *optional, *options)[0]


def match_tokens(
    keys: paddle.Tensor,
    sizes: paddle.Tensor | None,
    offset: int,
    heads: int,
    width: int,
    prefix: int,
    merged: int,
) -> tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor]:
    """The tokens into which token merging brings each token: ``models.layers.merging.match_tokens``,
    without gradients.

    Args:
        keys: [B, N, channels]. The keys of all heads are the heads * width channels from
            ``offset`` on.
        sizes: [B, N]; None: ones.

    Returns:
        targets [B, N] int32, weights [B, N] and sizes [B, N - merged].
    """
    sizes = _absent() if sizes is None else sizes
    options = [offset, heads, width, prefix, merged]
    targets, weights, sizes = _run("vit_match_tokens", keys.detach(), sizes, *options)
    return targets, weights, sizes


def merge_tokens(
    x: paddle.Tensor, targets: paddle.Tensor, weights: paddle.Tensor, count: int
) -> paddle.Tensor:
    """The sums [B, count, D] of the tokens x [B, N, D] that have the same target, each times its
    weight. Targets [B, N] int32 and weights [B, N] get no gradient.
    """
    return _run("vit_merge_tokens", x, targets, weights, count)[0]


def outlook(
    values: paddle.Tensor, scores: paddle.Tensor, heads: int, scale: float
) -> paddle.Tensor:
    """The sums of VOLO's outlook attention at each place: values [B, 2 h, 2 w, D] -> the same shape.

    Every 2 x 2 places weigh the 3 x 3 places around them by the softmax of ``scores`` [B, h, w,
    heads * 9 * 9] times ``scale``.
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
    """``F.conv2d`` of x [B, C, H, W] with weight [D, C / groups, h, w] and bias [D]: [B, D, H', W'].

    With ``channels_last`` x is [B, H, W, C] and the output [B, H', W', D]. Stride, padding and
    dilation have an item for the height and one for the width. Gradients that aren't needed aren't
    computed.
    """
    has_bias = bias is not None
    x_grad = not x.stop_gradient
    weight_grad = not weight.stop_gradient or (bias is not None and not bias.stop_gradient)
    options = [stride, padding, dilation, groups, channels_last, has_bias, x_grad, weight_grad]
    return _run("vit_convolution", x, weight, _absent() if bias is None else bias, *options)[0]


def activation(x: paddle.Tensor, name: str) -> paddle.Tensor:
    """The activation ``name`` of x: relu, gelu (exact, to 2e-7), gelu_tanh, quick_gelu, silu or
    hardswish; or softmax or log_softmax over its last axis.
    """
    # These three are operators of their own.
    if name in ("relu", "softmax", "log_softmax"):
        return _run(f"vit_{name}", x)[0]
    return _run("vit_activation", x, name)[0]


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
    """Batch norm of x [B, C, ...] by channel, as PyTorch's; returns the output, and the running mean
    and variance [C] after it.

    In training x is normalised by its own statistics. The running statistics keep ``share`` of
    their values and take in the batch's, whose variance is divided by n - 1. ``act`` names the
    activation that follows; "" stands for none. The activation's input isn't kept for the gradient,
    but computed again.
    """
    operands = [x, weight, bias, mean, variance, training, share, epsilon, act]
    out, _, _, mean, variance = _run("vit_batch_norm", *operands)
    return out, mean, variance


def group_norm(
    x: paddle.Tensor, groups: int, weight: paddle.Tensor, bias: paddle.Tensor, epsilon: float
) -> paddle.Tensor:
    """Group norm of x [B, C, ...]: each group of an image's channels is normalised, then multiplied
    by weight [C], and bias [C] is added.
    """
    return _run("vit_group_norm", x, weight, bias, groups, epsilon)[0]


def response_norm(x: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor) -> paddle.Tensor:
    """Global response norm of x [B, ..., C] (``models.layers.grn``)."""
    return _run("vit_response_norm", x, weight, bias)[0]


def row_lengths(x: paddle.Tensor) -> paddle.Tensor:
    """The Euclidean length of each row: [K, n] -> [K]. Rows of zeros have no gradient (NaN)."""
    return _run("vit_row_lengths", x)[0]


def neighbour_means(x: paddle.Tensor, reach: int) -> paddle.Tensor:
    """The mean of each place and its neighbours up to ``reach`` rows and columns away: [B, C, H, W]
    -> the same shape. Places outside the map aren't counted.
    """
    return _run("vit_neighbour_means", x, reach)[0]


def halo_windows(x: paddle.Tensor, size: int, halo: int) -> paddle.Tensor:
    """The blocks of size x size places of maps [B, C, H, W]. Each has ``halo`` more places on every
    side; those beyond the map are zeros.

    Returns [B, blocks, (size + 2 halo) ** 2, C].
    """
    return _run("vit_windows", x, size, halo, x.shape)[0]


def relative_bias(products: paddle.Tensor, side: int, window: int) -> paddle.Tensor:
    """The bias that HaloNet's relative positions add to the scores: [items, side ** 2, window ** 2].

    ``products`` [items, side ** 2, 2 (2 window - 1)] are those of each query with the vectors of
    all distances of rows, then of columns. Query i and key j of an axis have the distance j - i +
    window - 1.
    """
    return _run("vit_distances", products, side, window)[0]


def transpose(x: paddle.Tensor, rows: int, shape: Sequence[int]) -> paddle.Tensor:
    """Transposes x [B, ...], read as [B, rows, columns]; returns it in ``shape``."""
    # Not x.size, which is a function where Paddle 2.6 has traced the caller.
    columns = math.prod(x.shape) // x.shape[0] // rows
    return _run("vit_swap", x, rows, columns, x.shape, shape)[0]


def look_up(pixels: paddle.Tensor, table: paddle.Tensor) -> paddle.Tensor:
    """The values that table [C, 256], or [1, 256] for all channels, has for pixels [B, H, W, C]
    uint8: [B, C, H, W].
    """
    return _run("vit_looked_up", pixels, table)[0]


def split(x: paddle.Tensor, sizes: Sequence[int], axis: int) -> list[paddle.Tensor]:
    """Splits x along an axis into two or three parts of these sizes."""
    return _run("vit_parts", x, axis % x.ndim, sizes)[: len(sizes)]


def concat(tensors: Sequence[paddle.Tensor], axis: int) -> paddle.Tensor:
    """Concatenates two or three tensors along an axis."""
    placeholders = [_absent()] * (3 - len(tensors))
    return _run("vit_joined", *tensors, *placeholders, axis % tensors[0].ndim)[0]


def amax(x: paddle.Tensor) -> paddle.Tensor:
    """The maximum over the second axis: [B, N, ...] -> [B, ...]. Equal values share the gradient."""
    return _run("vit_largest", x)[0]


def into_windows(x: paddle.Tensor, window: Sequence[int], shift: Sequence[int]) -> paddle.Tensor:
    """The windows (height, width) of maps [B, H, W, C]: [B * windows, height * width, C].

    The maps are rolled up and to the left by ``shift`` rows and columns first. H and W are
    multiples of the window's sides.
    """
    return _run("vit_blocks", x, x.shape, window, shift, False)[0]


def from_windows(
    x: paddle.Tensor, shape: Sequence[int], window: Sequence[int], shift: Sequence[int]
) -> paddle.Tensor:
    """The inverse of ``into_windows``, for maps of ``shape``."""
    return _run("vit_blocks", x, shape, window, shift, True)[0]


def resize(x: paddle.Tensor, size: Sequence[int], align_corners: bool) -> paddle.Tensor:
    """Maps x [B, C, h, w] resized bilinearly: [B, C, *size].

    With ``align_corners``, the middles of the corners' places coincide, instead of their corners.
    """
    height, width = size
    return _run("vit_resize", x, x.shape[2:], int(height), int(width), align_corners)[0]


def pixel_loss(
    logits: paddle.Tensor,
    mask: paddle.Tensor,
    ignored: int,
    weight: paddle.Tensor | None = None,
    align_corners: bool = False,
) -> paddle.Tensor:
    """The cross-entropy of each image, [B], of logits [B, K, h, w] that are resized bilinearly to
    the size of a mask [B, H, W], which is uint8 or int32.

    It is the mean over the pixels whose class isn't ``ignored``, weighted by their classes' ``weight``
    [K]. The resized logits are never stored. The gradient is computed together with the loss.
    """
    with_gradient = paddle.is_grad_enabled() and not logits.stop_gradient
    weight = _absent(2) if weight is None else weight
    options = [ignored, align_corners, with_gradient]
    return _run("vit_pixel_loss", logits, mask, weight, *options)[0]


def pixel_answers(
    logits: paddle.Tensor, mask: paddle.Tensor, ignored: int, align_corners: bool = False
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """``pixel_loss``, without weights and a gradient, and the classes of the largest resized logits:
    [B], [B, H, W] int32. Of equal logits, the lowest class is chosen.
    """
    loss, answers = _run("vit_pixel_answers", logits.detach(), mask, ignored, align_corners)
    return loss, answers
