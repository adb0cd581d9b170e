"""Lion."""

from collections.abc import Callable, Sequence

import paddle

from settings.registry import optimizers
from training.optim.optimizer_base import Trained, WithMomentum


@optimizers.register("Lion")
def lion(trained: Trained, *, betas: Sequence[float]) -> paddle.optimizer.Optimizer:
    """Updates as timm.optim.Lion. Its paper takes betas of 0.9 and 0.99."""
    return Lion(**trained.with_decoupled_decay(), beta1=betas[0], beta2=betas[1])


class Lion(WithMomentum):
    """Lion (Chen et al. 2023, arXiv:2302.06675, algorithm 2), which behaves as timm.optim.Lion.

    Args:
        learning_rate: a parameter's ``optimize_attr["learning_rate"]`` multiplies it.
        parameters: the parameters to update.
        beta1: share of the momentum in the update's direction.
        beta2: share of the old momentum in the new one.
        weight_decay: decoupled; it is multiplied by the rate.
        apply_decay_param_fun: returns whether the parameter of a name (Paddle's name) decays.
    """

    def __init__(
        self,
        learning_rate: float,
        parameters: list[paddle.Tensor],
        beta1: float,
        beta2: float,
        weight_decay: float,
        apply_decay_param_fun: Callable[[str], bool],
    ) -> None:
        super().__init__(learning_rate, parameters)
        # Tensors, because Paddle would make a tensor of a number for each parameter.
        self._gradient_in_update = paddle.full([], 1 - beta1)
        self._gradient_in_momentum = paddle.full([], 1 - beta2)
        self._weight_decay = weight_decay
        self._decays = apply_decay_param_fun

    def update(
        self,
        parameter: paddle.Tensor,
        gradient: paddle.Tensor,
        momentum: paddle.Tensor,
        rate: float,
    ) -> None:
        if self._decays(parameter.name):
            parameter.scale_(1 - rate * self._weight_decay)
        direction = paddle.sign(paddle.lerp(momentum, gradient, self._gradient_in_update))
        parameter.subtract_(direction * rate)
        momentum.lerp_(gradient, self._gradient_in_momentum)
