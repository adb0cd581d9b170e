"""AdamW."""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import paddle
from paddle import _C_ops

from settings.registry import optimizers
from training.optim.optimizer_base import Trained

_CHUNK = 65536  # elements that a block of a GPU's threads updates
# Paddle 2.6 hasn't
_HAS_AMSGRAD = "amsgrad" in inspect.signature(paddle.optimizer.AdamW).parameters
_MAXIMA, _AMSGRAD = ((None,), (False,)) if _HAS_AMSGRAD else ((), ())


@optimizers.register("AdamW")
def adamw(trained: Trained, *, betas: Sequence[float], eps: float) -> paddle.optimizer.Optimizer:
    """Updates as torch.optim.AdamW."""
    return AdamW(**trained.with_decoupled_decay(), beta1=betas[0], beta2=betas[1], epsilon=eps)


@dataclass
class _Group:
    """Parameters of one rate, decay and number of updates."""

    places: list[int]  # among the parameters that have gradients
    parameters: list[paddle.Tensor]
    accumulators: list[list[paddle.Tensor]]  # by kind
    decays: bool


class AdamW(paddle.optimizer.AdamW):
    """Paddle's AdamW with one operator for all parameters of a rate and a decay, where Paddle has
    one for each.

    The accumulators, their names and on a CPU all bits are Paddle's. The step itself is Paddle's,
    too, if other parameters have gradients than in the step before, as in the first step. The
    operator takes one count of updates for all of a group. Not run on a GPU, where it is one launch
    for up to 60 tensors.
    """

    _KINDS = ("moment1", "moment2", "beta1_pow_acc", "beta2_pow_acc")
    # the parameters of the groups, by id; None: there are no groups
    _grouped: list[int] | None = None
    _groups: list[_Group]
    # What the base has; its stub says less.
    _parameter_list: list[paddle.Tensor]
    _create_param_lr: Callable[[tuple], paddle.Tensor]
    _apply_decay_param_fun: Callable[[str], bool]
    _beta1: float
    _beta2: float
    _epsilon: float

    @paddle.no_grad()
    def step(self) -> None:
        """Updates every parameter that has a gradient and isn't frozen."""
        found = [(p, p.grad) for p in self._parameter_list if not p.stop_gradient]
        found = [(parameter, gradient) for parameter, gradient in found if gradient is not None]
        # A GPU's threads read four elements at a time.
        aligned = all(gradient.data_ptr() % 16 == 0 for _, gradient in found)
        if not (aligned and [id(parameter) for parameter, _ in found] == self._grouped):
            super().step()
            self._grouped = None
            if found and _fused_step_is_right(self._create_param_lr(found[0]).dtype):
                self._group(found)
            return
        for group in self._groups:
            gradients = [found[place][1] for place in group.places]
            rate = self._create_param_lr((group.parameters[0], None))
            decay = self._weight_decay if group.decays else 0.0
            hyper = (self._beta1, self._beta2, self._epsilon)
            _fused_step(group.parameters, gradients, rate, group.accumulators, hyper, decay)

    def set_state_dict(self, state_dict: dict[str, paddle.Tensor]) -> None:
        """Goes on from a state; the numbers of updates in it may differ by parameter."""
        self._grouped = None
        super().set_state_dict(state_dict)

    def _group(self, found: list[tuple[paddle.Tensor, paddle.Tensor]]) -> None:
        """Groups what was updated just now."""
        groups: dict[tuple[float, bool, float, float], list[int]] = {}
        for place, (parameter, _) in enumerate(found):
            rate = parameter.optimize_attr["learning_rate"]
            decays = self._apply_decay_param_fun(parameter.name)
            # By them the operator knows the number of updates; they are on the CPU.
            power1, power2 = (
                self._get_accumulator(kind, parameter).item() for kind in self._KINDS[2:]
            )
            groups.setdefault((rate, decays, power1, power2), []).append(place)
        self._groups = []
        for (_, decays, *_), places in groups.items():
            parameters = [found[place][0] for place in places]
            accumulators = [
                [self._get_accumulator(kind, p) for p in parameters] for kind in self._KINDS
            ]
            self._groups.append(_Group(places, parameters, accumulators, decays))
        self._grouped = [id(parameter) for parameter, _ in found]


def _fused_step(
    parameters: list[paddle.Tensor],
    gradients: list[paddle.Tensor],
    rate: paddle.Tensor,
    accumulators: list[list[paddle.Tensor]],
    hyper: tuple[float, float, float],
    decay: float,
) -> None:
    """One step for all ``parameters``; ``hyper`` is beta1, beta2, epsilon; ``accumulators`` as
    ``AdamW._KINDS``.
    """
    moment1, moment2, *powers = accumulators
    # The two None: no weights of another precision, and no update to skip.
    where = (parameters, gradients, rate, moment1, moment2, *_MAXIMA, *powers, None, None)
    _C_ops.fused_adam_(*where, *hyper, _CHUNK, decay, True, False, False, *_AMSGRAD)


@functools.cache
def _fused_step_is_right(rate_type: paddle.dtype) -> bool:
    """Whether the operator, an internal one of Paddle's, does here what AdamW is; if not, Paddle's
    own step serves.

    Powers of beta that are on the CPU, as Paddle's optimizers have them, have to go on there.
    """
    parameter = paddle.ones([4])
    gradient = paddle.ones([4])
    rate = paddle.full([1], 0.1, rate_type)
    moments = [paddle.zeros([4]), paddle.zeros([4])]
    powers = [paddle.to_tensor([0.5], place=paddle.CPUPlace()) for _ in range(2)]
    try:
        _fused_step(
            [parameter],
            [gradient],
            rate,
            [[tensor] for tensor in moments + powers],
            (0.5, 0.5, 0.0),
            0.5,
        )
    except (TypeError, ValueError, RuntimeError, NotImplementedError):
        # it takes other arguments, or has no kernel
        return False
    return [power.item() for power in powers] == [0.25, 0.25] and np.allclose(
        parameter.numpy(), 1 * (1 - 0.1 * 0.5) - 0.1
    )
