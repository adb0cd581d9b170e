"""Activation recomputation: activations are computed again in the backward pass instead of kept.

Paddle's own is in ``paddle.distributed``, though nothing is sent.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import paddle
from paddle.distributed.fleet.utils import recompute as paddle_recompute

import ops


def recompute(
    function: Callable[..., Any],
    *args: Any,
    again: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> Any:
    """Returns ``function(*args)`` without keeping its activations.

    The backward pass computes them again, with the same random numbers. They are kept if
    none of the tensors needs a gradient, because everything before is frozen.

    Args:
        function: computes the output of tensors.
        args: the tensors, and other arguments.
        again: makes the context in which the backward pass calls the function.
    """
    if all(arg.stop_gradient for arg in args if isinstance(arg, paddle.Tensor)):
        # Paddle would warn at each step.
        return function(*args)
    # The state of the random generators at the first call.
    first: list[Any] = []
    bfloat16 = ops.bfloat16_products_enabled()

    def replayed(*args: Any) -> Any:
        state = paddle.get_rng_state()
        if not first:
            first.extend(state)
            return function(*args)
        paddle.set_rng_state(first)
        try:
            with again(), ops.bfloat16_products(bfloat16):
                return function(*args)
        finally:
            paddle.set_rng_state(state)

    # Not reentrant, which would hide the parameters from DataParallel and make it fail. The random
    # state is kept above, because Paddle 2.6 doesn't keep that of a CPU.
    return paddle_recompute(replayed, *args, use_reentrant=False, preserve_rng_state=False)
