"""Arguments that all optimizers share, and a base class for optimizers that are written here."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import paddle
from paddle.regularizer import L2Decay


@dataclass(frozen=True)
class Trained:
    """The parameters that an optimizer trains, with their learning rate and weight decay.

    Args:
        rate: learning rate. A parameter's ``optimize_attr["learning_rate"]`` multiplies it.
        parameters: the parameters to update.
        weight_decay: of the parameters that decay.
        decays: returns whether the parameter of a name (Paddle's name) decays.
    """

    rate: float
    parameters: list[paddle.Tensor]
    weight_decay: float
    decays: Callable[[str], bool]

    def without_decay(self) -> dict[str, Any]:
        """Returns rate and parameters as keyword arguments of Paddle's optimizers."""
        return {"learning_rate": self.rate, "parameters": self.parameters}

    def with_decoupled_decay(self) -> dict[str, Any]:
        """Returns keyword arguments for a decay of the weights themselves, as AdamW takes them."""
        return self.without_decay() | {
            "weight_decay": self.weight_decay,
            "apply_decay_param_fun": self.decays,
        }

    def with_coupled_decay(self) -> dict[str, Any]:
        """Returns keyword arguments for a decay that is an L2 term of the gradients.

        Sets each parameter's ``regularizer``, which is where Paddle's optimizers look for it.
        """
        for parameter in self.parameters:
            if self.decays(parameter.name):
                parameter.regularizer = L2Decay(self.weight_decay)
            else:
                parameter.regularizer = None
        return self.without_decay()


class WithMomentum(paddle.optimizer.Optimizer):
    """Base class of optimizers that keep tensors of each parameter's shape between updates.

    A subclass implements ``update``. It names its tensors in ``accumulators`` if it needs others
    than one momentum. They start as zeros, and checkpoints hold them under these names.
    """

    accumulators: tuple[str, ...] = ("momentum",)

    def update(
        self, parameter: paddle.Tensor, gradient: paddle.Tensor, *args: Any, **kwargs: Any
    ) -> None:
        """Changes a parameter and its accumulators in place.

        Subclasses declare ``rate`` and the names of ``accumulators`` as further arguments, which
        are passed by keyword: ``update(self, parameter, gradient, momentum, rate)``.

        Args:
            parameter: [...], as its gradient and accumulators.
            gradient: with the L2 term of a coupled weight decay.
            momentum: an accumulator of this name; there is one argument for each accumulator.
            rate: learning rate of this parameter at this update.
        """
        raise NotImplementedError

    def _create_accumulators(self, block: Any, parameters: list[paddle.Tensor]) -> None:
        for parameter in parameters:
            for name in self.accumulators:
                self._add_accumulator(name, parameter)

    def _append_optimize_op(
        self, block: Any, param_and_grad: tuple[paddle.Tensor, paddle.Tensor]
    ) -> None:
        parameter, gradient = param_and_grad
        rate = self.get_lr() * parameter.optimize_attr["learning_rate"]
        tensors = {name: self._get_accumulator(name, parameter) for name in self.accumulators}
        self.update(parameter, gradient, rate=rate, **tensors)
