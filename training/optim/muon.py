"""Muon."""

from collections.abc import Callable, Sequence
from typing import Any

import paddle

from settings.registry import optimizers
from training.optim.optimizer_base import Trained


@optimizers.register("Muon")
def muon(
    trained: Trained, *, betas: Sequence[float], eps: float, momentum: float, nesterov: bool
) -> paddle.optimizer.Optimizer:
    """Updates as torch.optim.Muon with ``adjust_lr_fn="match_rms_adamw"``; torch.optim.AdamW for
    what is no matrix.
    """
    adamw = {**trained.with_decoupled_decay(), "beta1": betas[0], "beta2": betas[1], "epsilon": eps}
    return Muon(momentum, nesterov, **adamw)


class Muon(paddle.optimizer.AdamW):
    """Momentum made orthogonal for matrices (every 2-D parameter), AdamW for all others.

    Jordan et al. 2024 (kellerjordan.github.io/posts/muon); the update's scale is that of Liu et al.
    2025 (arXiv:2502.16982), so AdamW's rate and decay serve both kinds. The behaviour is that of
    torch.optim.Muon with ``adjust_lr_fn="match_rms_adamw"``, but in float32, where torch rounds to
    bfloat16.

    Args:
        momentum: share of the old momentum in the new one.
        nesterov: whether the gradient is mixed in once more.
        adamw: as for ``paddle.optimizer.AdamW``; the matrices share rate, decay and
            ``apply_decay_param_fun``.
    """

    _apply_decay_param_fun: Callable[[str], bool]  # the base's stub: or None

    def __init__(self, momentum: float, nesterov: bool, **adamw: Any) -> None:
        super().__init__(**adamw)
        self._nesterov = nesterov
        # Tensors: a number would become one for each matrix.
        self._old, self._new = paddle.full([], momentum), paddle.full([], 1 - momentum)

    def _create_accumulators(self, block: Any, parameters: list[paddle.Tensor]) -> None:
        super()._create_accumulators(
            block, [parameter for parameter in parameters if parameter.ndim != 2]
        )
        for parameter in parameters:
            if parameter.ndim == 2:
                self._add_accumulator("momentum", parameter)

    def _append_optimize_op(
        self, block: Any, param_and_grad: tuple[paddle.Tensor, paddle.Tensor]
    ) -> None:
        parameter, gradient = param_and_grad
        if parameter.ndim != 2:
            super()._append_optimize_op(block, param_and_grad)
            return
        momentum = self._get_accumulator("momentum", parameter)
        momentum.lerp_(gradient, self._new)
        direction = paddle.lerp(gradient, momentum, self._old) if self._nesterov else momentum
        rate = self.get_lr() * parameter.optimize_attr["learning_rate"]
        if self._apply_decay_param_fun(parameter.name):
            parameter.scale_(1 - rate * self._weight_decay)
        parameter.subtract_(orthogonalize(direction) * (rate * 0.2 * max(parameter.shape) ** 0.5))


def orthogonalize(matrix: paddle.Tensor) -> paddle.Tensor:
    """Returns U S V' for the matrix U D V' [m, n]: five Newton-Schulz steps bring singular values
    to about 0.7 to 1.2.

    Coefficients and their number are Jordan's: steep at 0, not converging at 1.
    """
    a = 3.4445
    b = -4.7750
    c = 2.0315
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix if wide else matrix.t()  # the products below are of the short side
    x = x / x.square().sum().sqrt().clip(min=1e-7)
    for _ in range(5):
        gram = paddle.matmul(x, x, transpose_y=True)
        x = a * x + paddle.matmul(b * gram + c * paddle.matmul(gram, gram), x)
    return x if wide else x.t()
