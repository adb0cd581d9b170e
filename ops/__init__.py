"""Compiled operators of the transformer for CPUs: products by oneDNN, memory-bound work in fused passes, float32.

They are optional: ``make ops`` compiles *.cc for the Paddle at hand (``ops.build``), ``load`` finds the result, and
where ``usable`` says no, layers compute the same with Paddle's own operators, to rounding. On other devices they aren't
loaded. docs/performance.md has what they bring.
"""

import ctypes
import functools
import hashlib
import sys
from pathlib import Path
from typing import Any

import paddle
from paddle import _C_ops
from paddle.autograd import PyLayer
from paddle.base import core

_HERE = Path(__file__).resolve().parent
_REGISTERED = "_vit_ops"  # an attribute of Paddle's: all copies of this module find it
_loaded = False
_enabled = True
_signal_stack = ctypes.create_string_buffer(1 << 16)
# Paddle 2.6 has it in another place.
_run = getattr(_C_ops, "_run_custom_op", None) or core.eager._run_custom_op


def sources_and_headers() -> list[Path]:
    """Returns the operators' C++ files, in order of their names; those of ``ops.images`` are a library of their own."""
    return sorted(path for path in (*_HERE.glob("*.cc"), *_HERE.glob("*.h")) if path.stem != "images")


def library() -> Path:
    """Returns where the compiled operators of these sources and this Paddle are, or would be."""
    sources = b"".join(path.read_bytes() for path in (_HERE / "build.py", *sources_and_headers()))
    return _HERE / "built" / f"{paddle.__version__}-{hashlib.sha256(sources).hexdigest()[:12]}" / "vit_ops.so"


def load() -> bool:
    """Loads the compiled operators into this process; returns whether there are any.

    Paddle ends a process that registers a name twice. Of two copies of the toolkit in one (hubconf.py) the first does;
    the second uses them, if they are made of the same sources.
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


class _Stack(ctypes.Structure):
    """stack_t of sigaltstack(2)."""

    _fields_ = (("memory", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


def give_signals_a_stack() -> None:
    """Gives this thread, the main one, a stack for its signal handlers; Python's run there where there is one.

    Some products of oneDNN (sgemm's, until uxlfoundation/oneDNN#4855) keep another pointer in the stack's register: a
    signal that comes meanwhile would overwrite what lies before it in the heap.
    """
    if sys.platform == "linux":
        stack = _Stack(ctypes.addressof(_signal_stack), 0, len(_signal_stack))
        ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None)


def enable(enabled: bool) -> None:
    """Lets layers use the compiled operators, or not."""
    global _enabled
    _enabled = enabled


@paddle.jit.not_to_static
def usable(x: paddle.Tensor) -> bool:
    """Returns whether the operators below can compute with ``x``: loaded, enabled, float32, not in a traced graph."""
    return _loaded and _enabled and paddle.in_dynamic_mode() and x.dtype == paddle.float32


@paddle.jit.not_to_static
def flash_attention_takes(qkv: paddle.Tensor) -> bool:
    """Returns whether ``F.scaled_dot_product_attention`` is flash attention for heads [..., d] of this type and device.

    Not run on a GPU. Paddle 2.6 doesn't look at the device itself: before compute capability 8.0 its kernel fails.
    Wider heads than 256 would go to another kernel, which 2.6 hands them in any type.
    """
    half = qkv.dtype in (paddle.float16, paddle.bfloat16)
    return half and qkv.shape[-1] % 8 == 0 and qkv.shape[-1] <= 256 and _capability() >= 8


@functools.cache
def _capability() -> int:
    """The major compute capability of this process's device; 0: it isn't a GPU."""
    on_gpu = paddle.get_device().startswith("gpu")  # a traced graph's tensors have no place
    return paddle.device.cuda.get_device_capability()[0] if on_gpu else 0


def linear(x: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor | None) -> paddle.Tensor:
    """x [..., K] weight [K, N] + bias [N] -> [..., N]."""
    return _run("vit_linear", x, weight, paddle.zeros([weight.shape[1]]) if bias is None else bias)[0]


class _FrozenLinear(PyLayer):
    """``linear`` by a weight and a bias that need no gradients: x isn't kept, and the weight's isn't computed."""

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor | None) -> paddle.Tensor:
        ctx.weight = weight
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: paddle.Tensor) -> Any:
        return linear(grad, ctx.weight.t().contiguous(), None), None, None


def frozen_linear(x: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor | None) -> paddle.Tensor:
    """``linear``, of which x alone needs a gradient."""
    return _FrozenLinear.apply(x, weight, bias)


def mlp(
    x: paddle.Tensor, weight1: paddle.Tensor, bias1: paddle.Tensor, weight2: paddle.Tensor, bias2: paddle.Tensor
) -> paddle.Tensor:
    """gelu(x [..., K] weight1 [K, M] + bias1) weight2 [M, N] + bias2 -> [..., N], by the exact GELU, to 2e-7."""
    return _run("vit_mlp", x, weight1, bias1, weight2, bias2)[0]


def layer_norm(x: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor | None, epsilon: float) -> paddle.Tensor:
    """x [..., N], normalised over its last axis, times weight [N], plus bias [N]."""
    return _run("vit_layer_norm", x, weight, paddle.zeros(weight.shape) if bias is None else bias, epsilon)[0]


def attention(qkv: paddle.Tensor, scale: float) -> paddle.Tensor:
    """softmax(q k^T scale) v of each head: [B, N, 3, H, d] -> [B, N, H d]; its weights [N, N] aren't kept."""
    return _run("vit_attention", qkv, scale)[0]
