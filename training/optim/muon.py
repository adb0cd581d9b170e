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
    """Updates matrices as torch.optim.Muon with ``adjust_lr_fn="match_rms_adamw"``.

    Other parameters are updated as by torch.optim.AdamW.
    """
    adamw = {**trained.with_decoupled_decay(), "beta1": betas[0], "beta2": betas[1], "epsilon": eps}
    return Muon(momentum, nesterov, **adamw)


class Muon(paddle.optimizer.AdamW):
    """Muon, an orthogonalized momentum for matrices (all 2-D parameters), and AdamW for the others.

    Jordan et al. 2024 (kellerjordan.github.io/posts/muon). Updates are scaled as by Liu et al. 2025
    (arXiv:2502.16982), so that AdamW's rate and decay suit both kinds of parameters. It behaves as
    torch.optim.Muon with ``adjust_lr_fn="match_rms_adamw"``, but computes in float32, where torch
    rounds to bfloat16.

    Args:
        momentum: share of the old momentum in the new one.
        nesterov: whether the update mixes the gradient with the new momentum once more.
        adamw: arguments of ``paddle.optimizer.AdamW``. Learning rate, weight decay and
            ``apply_decay_param_fun`` apply to matrices, too.
    """

    # The base's type stub also allows None.
    _apply_decay_param_fun: Callable[[str], bool]

    def __init__(self, momentum: float, nesterov: bool, **adamw: Any) -> None:
        super().__init__(**adamw)
        self._nesterov = nesterov
        # Tensors, because Paddle would make a tensor of a number for each matrix.
        self._momentum_share = paddle.full([], momentum)
        self._gradient_share = paddle.full([], 1 - momentum)

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
        momentum.lerp_(gradient, self._gradient_share)
        direction = momentum
        if self._nesterov:
            direction = paddle.lerp(gradient, momentum, self._momentum_share)
        rate = self.get_lr() * parameter.optimize_attr["learning_rate"]
        if self._apply_decay_param_fun(parameter.name):
            parameter.scale_(1 - rate * self._weight_decay)
        # An update has AdamW's usual size, a root mean square of about 0.2 (Liu et al. 2025).
        scale = rate * 0.2 * max(parameter.shape) ** 0.5
        parameter.subtract_(orthogonalize(direction) * scale)


def orthogonalize(matrix: paddle.Tensor) -> paddle.Tensor:
    """Returns U S V' for a matrix U D V' [m, n], whose singular values S are about 0.7 to 1.2.

    It makes five Newton-Schulz steps with Jordan's coefficients. These raise small singular values
    fast, and don't converge to 1.
    """
    a = 3.4445
    b = -4.7750
    c = 2.0315
    # The Gram matrix below is of the short side.
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix if wide else matrix.t()
    x = x / x.square().sum().sqrt().clip(min=1e-7)
    for _ in range(5):
        gram = paddle.matmul(x, x, transpose_y=True)
        x = a * x + paddle.matmul(b * gram + c * paddle.matmul(gram, gram), x)
    return x if wide else x.t()
