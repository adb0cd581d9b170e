"""Activations that are computed again instead of kept. Paddle has that in ``paddle.distributed``;
nothing is sent.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import paddle
from paddle.distributed.fleet.utils import recompute as paddle_recompute

import ops


def recompute(
    function: Callable[..., Any],
    *args: paddle.Tensor,
    again: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> Any:
    """Returns ``function(*args)``, whose activations aren't kept: the backward pass computes them
    again within ``again()``, drawing the same random numbers. Where no argument needs a gradient
    (what came before is frozen) they are kept.
    """
    if all(tensor.stop_gradient for tensor in args):  # Paddle would warn at each step
        return function(*args)
    first: list[Any] = []  # the generators' state at the first call
    bfloat16 = ops.bfloat16_products_enabled()

    def replayed(*args: paddle.Tensor) -> Any:
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

    # Reentrant, parameters would be hidden from DataParallel, which fails; and Paddle 2.6 keeps no
    # state on a CPU.
    return paddle_recompute(replayed, *args, use_reentrant=False, preserve_rng_state=False)
