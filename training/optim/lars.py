"""LARS."""

import paddle

from settings.registry import optimizers
from settings.signatures import Positive
from training.optim.optimizer_base import Trained, WithMomentum


@optimizers.register("LARS")
def lars(
    trained: Trained, *, momentum: float, trust_coefficient: Positive = 0.001
) -> paddle.optimizer.Optimizer:
    """Updates as MAE's LARS.

    Args:
        trust_coefficient: the norm of a matrix's update over the matrix's own.
    """
    return Lars(
        **trained.with_coupled_decay(), momentum=momentum, trust_coefficient=trust_coefficient
    )


class Lars(WithMomentum):
    """LARS (You et al. 2017, arXiv:1708.03888) as MoCo v3 and MAE have it: momentum over gradients
    that were scaled.

    A matrix's gradient, its weight decay included, gets a norm of ``trust_coefficient`` times the
    matrix's own. Biases and norms keep theirs. Where one of the two norms is 0, the gradient stays
    as it is.

    Paddle's ``lars_momentum`` isn't this: it adds the two norms of gradient and decay, scales every
    parameter, and has the rate within its momentum.

    Args:
        learning_rate: rate; a parameter's ``optimize_attr["learning_rate"]`` is a factor on it.
        parameters: what it updates; a parameter's ``regularizer`` is its weight decay.
        momentum: share of the old momentum that stays in the new one.
        trust_coefficient: a scaled gradient's norm over its matrix's.
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
            size = gradient.square().sum().sqrt()
            known = paddle.logical_and(norm > 0, size > 0)
            ratio = (
                self._trust_coefficient * norm / paddle.where(known, size, paddle.ones_like(size))
            )
            gradient = gradient * paddle.where(known, ratio, paddle.ones_like(ratio))
        momentum.scale_(self._momentum)
        momentum.add_(gradient)
        parameter.subtract_(momentum * rate)
