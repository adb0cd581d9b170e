"""AdamW, with one operator for many parameters."""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import paddle
from paddle import _C_ops

from settings.registry import optimizers
from training.optim.optimizer_base import Trained

# Elements that one block of a GPU's threads updates.
_CHUNK = 65536
# Paddle 2.6 has no AMSGrad, and its operator doesn't have these two arguments.
if "amsgrad" in inspect.signature(paddle.optimizer.AdamW).parameters:
    _MAXIMA = (None,)
    _AMSGRAD = (False,)
else:
    _MAXIMA = ()
    _AMSGRAD = ()


@optimizers.register("AdamW")
def adamw(trained: Trained, *, betas: Sequence[float], eps: float) -> paddle.optimizer.Optimizer:
    """Updates as torch.optim.AdamW."""
    return AdamW(**trained.with_decoupled_decay(), beta1=betas[0], beta2=betas[1], epsilon=eps)


@dataclass
class _Group:
    """Parameters with the same learning rate, weight decay and number of updates.

    Attributes:
        places: their indices among the parameters that have gradients.
        accumulators: a list of one tensor per parameter for each kind of ``AdamW._KINDS``.
    """

    places: list[int]
    parameters: list[paddle.Tensor]
    accumulators: list[list[paddle.Tensor]]
    decays: bool


class AdamW(paddle.optimizer.AdamW):
    """Paddle's AdamW, which updates all parameters of a learning rate and weight decay at once.

    Paddle starts an operator for each parameter. This class starts one for each group of
    parameters. The accumulators, their names and, on a CPU, all bits of the result are Paddle's.

    The operator takes one count of updates for a whole group. So where the parameters that have
    gradients aren't those of the step before, as in the first step, Paddle's own step is used.

    Not run on a GPU, where the operator is one launch for up to 60 tensors.
    """

    _KINDS = ("moment1", "moment2", "beta1_pow_acc", "beta2_pow_acc")
    # The ids of the parameters that the groups hold; None: there are no groups.
    _grouped: list[int] | None = None
    _groups: list[_Group]
    # Attributes of the base class that its type stub lacks, or declares as something wider.
    _parameter_list: list[paddle.Tensor]
    _create_param_lr: Callable[[tuple], paddle.Tensor]
    _apply_decay_param_fun: Callable[[str], bool]
    _beta1: float
    _beta2: float
    _epsilon: float

    @paddle.no_grad()
    def step(self) -> None:
        """Updates every parameter that has a gradient and isn't frozen."""
        pairs = [
            (parameter, parameter.grad)
            for parameter in self._parameter_list
            if not parameter.stop_gradient
        ]
        pairs = [(parameter, gradient) for parameter, gradient in pairs if gradient is not None]
        # A GPU's threads read four elements at a time.
        aligned = all(gradient.data_ptr() % 16 == 0 for _, gradient in pairs)
        if not (aligned and [id(parameter) for parameter, _ in pairs] == self._grouped):
            super().step()
            self._grouped = None
            if pairs and _fused_step_is_right(self._create_param_lr(pairs[0]).dtype):
                self._group(pairs)
            return
        for group in self._groups:
            _fused_step(
                group.parameters,
                [pairs[place][1] for place in group.places],
                self._create_param_lr((group.parameters[0], None)),
                group.accumulators,
                betas=(self._beta1, self._beta2),
                epsilon=self._epsilon,
                weight_decay=self._weight_decay if group.decays else 0.0,
            )

    def set_state_dict(self, state_dict: dict[str, paddle.Tensor]) -> None:
        """Loads accumulators, whose numbers of updates may differ between parameters."""
        self._grouped = None
        super().set_state_dict(state_dict)

    def _group(self, pairs: list[tuple[paddle.Tensor, paddle.Tensor]]) -> None:
        """Groups the parameters of (parameter, gradient) pairs that have just been updated."""
        groups: dict[tuple[float, bool, float, float], list[int]] = {}
        for place, (parameter, _) in enumerate(pairs):
            rate = parameter.optimize_attr["learning_rate"]
            decays = self._apply_decay_param_fun(parameter.name)
            # The operator derives the number of updates from these powers. They are on the CPU.
            power1, power2 = (
                self._get_accumulator(kind, parameter).item() for kind in self._KINDS[2:]
            )
            groups.setdefault((rate, decays, power1, power2), []).append(place)
        self._groups = []
        for (_, decays, *_), places in groups.items():
            parameters = [pairs[place][0] for place in places]
            accumulators = [
                [self._get_accumulator(kind, parameter) for parameter in parameters]
                for kind in self._KINDS
            ]
            self._groups.append(_Group(places, parameters, accumulators, decays))
        self._grouped = [id(parameter) for parameter, _ in pairs]


def _fused_step(
    parameters: list[paddle.Tensor],
    gradients: list[paddle.Tensor],
    rate: paddle.Tensor,
    accumulators: list[list[paddle.Tensor]],
    *,
    betas: tuple[float, float],
    epsilon: float,
    weight_decay: float,
) -> None:
    """Makes one AdamW step for all ``parameters``; ``accumulators`` are those of a ``_Group``."""
    moment1, moment2, *powers = accumulators
    # The two None: there are no weights of another precision, and no update to skip.
    tensors = (parameters, gradients, rate, moment1, moment2, *_MAXIMA, *powers, None, None)
    # The arguments from True on: decoupled decay, no weights of another precision, no global powers.
    options = (*betas, epsilon, _CHUNK, weight_decay, True, False, False, *_AMSGRAD)
    _C_ops.fused_adam_(*tensors, *options)


@functools.cache
def _fused_step_is_right(rate_type: paddle.dtype) -> bool:
    """Returns whether Paddle's internal operator computes AdamW on this device.

    If it doesn't, Paddle's own step is used. The powers of beta are on the CPU, as Paddle's
    optimizers keep them, and the operator has to update them there.
    """
    parameter = paddle.ones([4])
    gradient = paddle.ones([4])
    rate = paddle.full([1], 0.1, rate_type)
    moments = [paddle.zeros([4]), paddle.zeros([4])]
    powers = [paddle.to_tensor([0.5], place=paddle.CPUPlace()) for _ in range(2)]
    accumulators = [[tensor] for tensor in moments + powers]
    try:
        _fused_step(
            [parameter],
            [gradient],
            rate,
            accumulators,
            betas=(0.5, 0.5),
            epsilon=0.0,
            weight_decay=0.5,
        )
    except (TypeError, ValueError, RuntimeError, NotImplementedError):
        # It takes other arguments, or has no kernel for this device.
        return False
    # The decay takes away a twentieth. The first bias-corrected step is as large as the rate.
    expected = 1 * (1 - 0.1 * 0.5) - 0.1
    powers_are_updated = [power.item() for power in powers] == [0.25, 0.25]
    return powers_are_updated and np.allclose(parameter.numpy(), expected)
