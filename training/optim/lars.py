"""LARS."""

import paddle

from settings.keys import Positive
from settings.registry import optimizers
from training.optim.optimizer_base import Trained, WithMomentum


@optimizers.register("LARS")
def lars(
    trained: Trained, *, momentum: float, trust_coefficient: Positive = 0.001
) -> paddle.optimizer.Optimizer:
    """Updates as MAE's LARS.

    Args:
        trust_coefficient: ratio of the norm of a matrix's update to the norm of the matrix.
    """
    return Lars(
        **trained.with_coupled_decay(), momentum=momentum, trust_coefficient=trust_coefficient
    )


class Lars(WithMomentum):
    """LARS (You et al. 2017, arXiv:1708.03888) as MoCo v3 and MAE implement it.

    The gradient of a matrix, its weight decay included, is scaled to a norm of
    ``trust_coefficient`` times the matrix's norm. Momentum then accumulates these gradients.
    The gradients of biases and norms aren't scaled, nor is one where either norm is 0.

    Paddle's ``lars_momentum`` differs: it adds the norms of gradient and decay, scales every
    parameter, and multiplies by the rate before the momentum.

    Args:
        learning_rate: a parameter's ``optimize_attr["learning_rate"]`` multiplies it.
        parameters: the parameters to update. A parameter's ``regularizer`` is its weight decay.
        momentum: share of the old momentum that is kept in the new one.
        trust_coefficient: norm of a scaled gradient over the norm of its matrix.
    """

    def __init__(
        self,
        learning_rate: float,
        parameters: list[paddle.Tensor],
        momentum: float,
        trust_coefficient: float,
    ) -> None:
        super().__init__(learning_rate, parameters)
        self._momentum = momentum
        self._trust_coefficient = trust_coefficient

    def update(
        self,
        parameter: paddle.Tensor,
        gradient: paddle.Tensor,
        momentum: paddle.Tensor,
        rate: float,
    ) -> None:
        if parameter.ndim > 1:
            norm = parameter.square().sum().sqrt()
            gradient_norm = gradient.square().sum().sqrt()
            # On the device, so that no step waits for the norms.
            positive = paddle.logical_and(norm > 0, gradient_norm > 0)
            divisor = paddle.where(positive, gradient_norm, paddle.ones_like(gradient_norm))
            ratio = self._trust_coefficient * norm / divisor
            gradient = gradient * paddle.where(positive, ratio, paddle.ones_like(ratio))
        momentum.scale_(self._momentum)
        momentum.add_(gradient)
        parameter.subtract_(momentum * rate)
