"""What happens to the gradients between the backward pass and the update: unscaled, measured,
clipped.

Per update: ``scaler.unscale(parameters)``, ``norm = clip_gradients(config, model)``,
``scaler.step(optimizer, norm)``.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import paddle
from paddle import _C_ops, nn

from errors import RunError
from settings.options import Configuration
from training.optim.groups import within
from utils import all_reduce_sum
from weights.layout import linear_weights


@paddle.no_grad()
def clip_gradients(
    config: Configuration, model: nn.Layer, trained: Sequence[paddle.Tensor] | None = None
) -> paddle.Tensor:
    """Clips the gradients of ``model`` in place by GRAD_CLIP_MODE, and returns the global L2 norm
    they had before.

    "norm": as torch's ``clip_grad_norm_``. "value": each element within +-GRAD_CLIP. "agc": each
    output unit's norm within GRAD_CLIP times its weights' norm (Brock et al. 2021,
    arXiv:2102.06171), except in the classifier, as timm. GRAD_CLIP None: nothing is clipped.

    Args:
        model: not wrapped, after its backward pass and ``parallel.reduce_gradients``.
        trained: its parameters that aren't frozen, if they are known: finding them takes time.

    Returns:
        float32 [], on the device: nothing is waited for.
    """
    limit = config.TRAIN.GRAD_CLIP
    mode = config.TRAIN.GRAD_CLIP_MODE
    if trained is None:
        trained = [parameter for parameter in model.parameters() if not parameter.stop_gradient]
    gradients = [parameter.grad for parameter in trained]
    # Not paddle.linalg.norm: in 3.3 on a CPU it is 16 times slower, and off by 1e-4 for ViT-S.
    nothing = paddle.zeros([1])
    squares = paddle.concat(
        [nothing if g is None else _C_ops.squared_l2_norm(g) for g in gradients]
    )
    if (
        config.DIST.ENGINE == "fleet" and config.DIST.STRATEGY.sharding
    ):  # each parameter's gradient is with its owner; plus zeros, it keeps its bits
        squares = all_reduce_sum(squares)
    norm = squares.sum().sqrt()
    gradients = [gradient for gradient in gradients if gradient is not None]
    if limit is not None and mode == "norm":
        _divide(gradients, ((norm + 1e-6) / limit).clip(min=1.0))
    elif limit is not None and mode == "value":
        for gradient in gradients:
            gradient.clip_(-limit, limit)
    elif limit is not None:
        linear = linear_weights(model)
        for name, parameter in model.named_parameters():
            wanted = parameter.grad is not None and not parameter.stop_gradient
            if wanted and not within(name, model.classifier_names()):
                _clip_adaptively(parameter, limit, name in linear)
    return norm


def _divide(gradients: list[paddle.Tensor], divisor: paddle.Tensor) -> None:
    """Divides gradients in place by a tensor of one element, all in one operator; by 1 they keep
    their bits.

    The operator multiplies by the reciprocal. Where a gradient isn't finite, it stays so, and
    others may become 0.
    """
    # the operator would miss them
    views = [gradient for gradient in gradients if not gradient.is_contiguous()]
    for gradient in views:
        gradient.multiply_(1 / divisor)
    if len(views) < len(gradients):
        _C_ops.check_finite_and_unscale_(
            [gradient for gradient in gradients if gradient.is_contiguous()], divisor
        )


def _clip_adaptively(parameter: paddle.Tensor, limit: float, is_linear: bool) -> None:
    # Output units are the columns of a Linear's [in, out], and the first dimension of any other
    # tensor.
    axis = 0 if is_linear else list(range(1, parameter.ndim)) or None
    gradient: Any = parameter.grad
    norm, gradient_norm = (t.square().sum(axis, keepdim=True).sqrt() for t in (parameter, gradient))
    bound = norm.clip(min=1e-3) * limit
    factor = bound / gradient_norm.clip(min=1e-6)
    gradient.multiply_(paddle.where(gradient_norm < bound, paddle.ones_like(factor), factor))


class LossScaler:
    """Dynamic loss scaling for float16 (Micikevicius et al. 2018, arXiv:1710.03740),
    torch.amp.GradScaler's behaviour.

    The loss is scaled up, so that small gradients don't vanish in float16. A gradient that
    overflows costs its update and halves the scale; 2000 good updates in a row double it. (Paddle's
    own switches itself off on a CPU.)

    Args:
        enabled: False: the loss, the gradients and every update pass as they are, and nothing is
            waited for.
        scale: the first scale.
        growth_interval: good updates before the scale doubles.
    """

    MIN_SCALE = 1e-4  # fairseq's: no model that trains comes here

    def __init__(
        self, enabled: bool = True, scale: float = 65536.0, growth_interval: int = 2000
    ) -> None:
        self.enabled = enabled
        self.loss_scale = scale
        self.growth_interval = growth_interval
        self.good_updates = 0  # since the scale last changed

    def scale(self, loss: paddle.Tensor) -> paddle.Tensor:
        """Returns the loss to call ``backward`` on."""
        return loss * self.loss_scale if self.enabled else loss

    @paddle.no_grad()
    def unscale(self, parameters: Iterable[paddle.Tensor]) -> None:
        """Takes the scale out of the gradients, in place; once per update, before they are clipped."""
        if self.enabled:
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            _divide(gradients, paddle.full([], self.loss_scale))

    def step(self, optimizer: paddle.optimizer.Optimizer, norm: paddle.Tensor) -> bool:
        """Updates the parameters, unless a gradient overflowed; adapts the scale; returns whether
        it updated.

        Enabled, it waits for ``norm``: the one synchronisation of an update in float16.

        Args:
            norm: of the gradients, reduced over all processes, so that all of them decide alike.

        Raises:
            RunError: on every rank, when even a tiny scale doesn't make the gradients finite.
        """
        if not self.enabled:
            optimizer.step()
            return True
        size: Any = norm.item()
        finite = math.isfinite(size)
        if finite:
            optimizer.step()
        self._adapt(finite)
        return finite

    def state_dict(self) -> dict[str, float | int]:
        """Returns what a checkpoint needs, as plain numbers."""
        return {"loss_scale": self.loss_scale, "good_updates": self.good_updates}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        """Goes on from what ``state_dict`` returned."""
        self.loss_scale, self.good_updates = float(state["loss_scale"]), int(state["good_updates"])

    def _adapt(self, finite: bool) -> None:
        self.good_updates = self.good_updates + 1 if finite else 0
        if not finite:
            self.loss_scale /= 2
        elif self.good_updates == self.growth_interval:
            # float32 ends at 2 ** 128
            self.loss_scale = min(2 * self.loss_scale, 2.0**127)
            self.good_updates = 0
        if self.loss_scale < self.MIN_SCALE:
            raise RunError(
                f"gradients aren't finite in float16 at a loss scale of {2 * self.loss_scale:.2g};"
                " lower TRAIN.BASE_LR, or train without -amp",
                shared=True,
            )
