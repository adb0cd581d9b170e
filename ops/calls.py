"""A call of a compiled operator."""

from typing import Any

import paddle
from paddle import _C_ops
from paddle.base import core

# Paddle 2.6 has it in another place.
_run = getattr(_C_ops, "_run_custom_op", None) or core.eager._run_custom_op


def run(name: str, *operands: Any) -> list[paddle.Tensor]:
    """Returns the outputs of the operator ``name``.

    Paddle records a custom operator for a backward pass under ``no_grad``, too (2.6.2 and 3.3.1, if an operand needs a
    gradient). An evaluation would then keep what every layer computes until its end: so operands are detached there.
    """
    if not paddle.is_grad_enabled():
        operands = tuple(one.detach() if isinstance(one, paddle.Tensor) else one for one in operands)
    return _run(name, *operands)
