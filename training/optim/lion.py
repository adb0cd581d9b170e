"""Lion."""

from collections.abc import Callable, Sequence

import paddle

from settings.registry import optimizers
from training.optim.optimizer_base import Trained, WithMomentum


@optimizers.register("Lion")
def lion(trained: Trained, *, betas: Sequence[float]) -> paddle.optimizer.Optimizer:
    """Updates as timm.optim.Lion; its paper has betas of 0.9 and 0.99."""
    return Lion(**trained.with_decoupled_decay(), beta1=betas[0], beta2=betas[1])


class Lion(WithMomentum):
    """Lion (Chen et al. 2023, arXiv:2302.06675, algorithm 2), with timm.optim.Lion's behaviour.

    Args:
        learning_rate: rate; a parameter's ``optimize_attr["learning_rate"]`` is a factor on it.
        parameters: what it updates.
        beta1: share of the momentum in the update's direction.
        beta2: share of the old momentum in the new one.
        weight_decay: decoupled; times the rate.
        apply_decay_param_fun: whether the parameter of a name (Paddle's) decays.
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
        # Tensors: a number would become one for each parameter.
        self._new_in_update, self._new_in_momentum = (
            paddle.full([], 1 - beta1),
            paddle.full([], 1 - beta2),
        )
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
        parameter.subtract_(
            paddle.sign(paddle.lerp(momentum, gradient, self._new_in_update)) * rate
        )
        momentum.lerp_(gradient, self._new_in_momentum)
