"""AdamW."""

from dataclasses import dataclass

import paddle
from paddle import _C_ops


@dataclass
class _Group:
    """Parameters of one rate, decay and number of updates."""

    places: list[int]  # among the parameters that have gradients
    parameters: list[paddle.Tensor]
    accumulators: list[list[paddle.Tensor]]  # by kind
    decays: bool


class AdamW(paddle.optimizer.AdamW):
    """Paddle's AdamW with one operator for all parameters of a rate and a decay, where Paddle has one for each.

    The accumulators, their names and on a CPU all bits are Paddle's. So is the step itself where other parameters have
    gradients than in the step before, as in the first: the operator takes one count of updates for all of a group. Not
    run on a GPU, where it is one launch for up to 60 tensors.
    """

    _CHUNK = 65536  # elements that a block of a GPU's threads updates
    _KINDS = ("moment1", "moment2", "beta1_pow_acc", "beta2_pow_acc")
    _grouped: list[int] | None = None  # the parameters of the groups, by id; None: there are no groups
    _groups: list[_Group]

    @paddle.no_grad()
    def step(self) -> None:
        """Updates every parameter that has a gradient and isn't frozen."""
        found = [(p, p.grad) for p in self._parameter_list if not p.stop_gradient]
        found = [(parameter, gradient) for parameter, gradient in found if gradient is not None]
        # A GPU's threads read four elements at a time.
        aligned = all(gradient.data_ptr() % 16 == 0 for _, gradient in found)
        if not aligned or [id(parameter) for parameter, _ in found] != self._grouped:
            super().step()
            self._group(found)
            return
        maxima, amsgrad = ((None,), (False,)) if hasattr(self, "_amsgrad") else ((), ())  # Paddle 2.6 has no AMSGrad
        for group in self._groups:
            gradients = [found[place][1] for place in group.places]
            moment1, moment2, *powers = group.accumulators
            _C_ops.fused_adam_(
                group.parameters,
                gradients,
                self._create_param_lr((group.parameters[0], None)),
                moment1,
                moment2,
                *maxima,
                *powers,
                None,  # no weights of another precision, and no update to skip
                None,
                self._beta1,
                self._beta2,
                self._epsilon,
                self._CHUNK,
                self._weight_decay,
                group.decays,
                False,
                False,
                *amsgrad,
            )

    def set_state_dict(self, state_dict: dict[str, paddle.Tensor]) -> None:
        """Goes on from a state; the numbers of updates in it may differ by parameter."""
        self._grouped = None
        super().set_state_dict(state_dict)

    def _group(self, found: list[tuple[paddle.Tensor, paddle.Tensor]]) -> None:
        """Groups what was updated just now."""
        groups: dict[tuple[float, bool, float], list[int]] = {}
        for place, (parameter, _) in enumerate(found):
            rate, decays = parameter.optimize_attr["learning_rate"], self._apply_decay_param_fun(parameter.name)
            # By it the operator knows the number of updates; it is on the CPU.
            power = self._get_accumulator("beta2_pow_acc", parameter).item()
            groups.setdefault((rate, decays, power), []).append(place)
        self._groups = []
        for (_, decays, _), places in groups.items():
            parameters = [found[place][0] for place in places]
            accumulators = [[self._get_accumulator(kind, p) for p in parameters] for kind in self._KINDS]
            self._groups.append(_Group(places, parameters, accumulators, decays))
        self._grouped = [id(parameter) for parameter, _ in found]
