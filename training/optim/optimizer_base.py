"""What optimizers are made of: the parameters with their weight decay, and a frame for those that
keep a momentum.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import paddle
from paddle.regularizer import L2Decay


@dataclass(frozen=True)
class Trained:
    """What every optimizer gets.

    Args:
        rate: learning rate; a parameter's ``optimize_attr["learning_rate"]`` is a factor on it.
        parameters: what it updates.
        weight_decay: of those that decay.
        decays: whether the parameter of a name (Paddle's) does.
    """

    rate: float
    parameters: list[paddle.Tensor]
    weight_decay: float
    decays: Callable[[str], bool]

    def without_decay(self) -> dict[str, Any]:
        """Returns rate and parameters as arguments of Paddle's optimizers."""
        return {"learning_rate": self.rate, "parameters": self.parameters}

    def with_decoupled_decay(self) -> dict[str, Any]:
        """Returns them with a decay of the weights themselves, by the rate, as AdamW's arguments."""
        return self.without_decay() | {
            "weight_decay": self.weight_decay,
            "apply_decay_param_fun": self.decays,
        }

    def with_coupled_decay(self) -> dict[str, Any]:
        """Returns them with a decay that is an L2 term of the gradients: a parameter's
        ``regularizer``.
        """
        for parameter in self.parameters:
            parameter.regularizer = (
                L2Decay(self.weight_decay) if self.decays(parameter.name) else None
            )
        return self.without_decay()


class WithMomentum(paddle.optimizer.Optimizer):
    """A frame for optimizers that keep a momentum of each parameter's size; ``update`` is theirs."""

    def update(
        self,
        parameter: paddle.Tensor,
        gradient: paddle.Tensor,
        momentum: paddle.Tensor,
        rate: float,
    ) -> None:
        """Changes the parameter and its momentum in place."""
        raise NotImplementedError

    def _create_accumulators(self, block: Any, parameters: list[paddle.Tensor]) -> None:
        for parameter in parameters:
            self._add_accumulator("momentum", parameter)

    def _append_optimize_op(
        self, block: Any, param_and_grad: tuple[paddle.Tensor, paddle.Tensor]
    ) -> None:
        parameter, gradient = param_and_grad
        rate = self.get_lr() * parameter.optimize_attr["learning_rate"]
        self.update(parameter, gradient, self._get_accumulator("momentum", parameter), rate)
