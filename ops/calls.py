"""Calls of compiled operators."""

import functools
from typing import Any

import paddle
from paddle import _C_ops
from paddle.base import core

# Paddle 2.6 has it in another place.
_run = getattr(_C_ops, "_run_custom_op", None) or core.eager._run_custom_op


def run(name: str, *operands: Any) -> list[paddle.Tensor]:
    """Returns the outputs of the operator ``name``.

    Paddle 3.3.1 records a custom operator for a backward pass under ``no_grad``, too, if an operand
    needs a gradient. A forward pass would keep what every layer computes until its end. Operands
    are therefore detached there.
    """
    if not paddle.is_grad_enabled():
        operands = tuple(
            one.detach() if isinstance(one, paddle.Tensor) else one for one in operands
        )
    return _run(name, *operands)


@functools.cache
def absent(axes: int = 1) -> paddle.Tensor:
    """Returns what stands for an operand that there is not: the operators know it by the number of
    its axes.
    """
    return paddle.zeros([1] * axes)
