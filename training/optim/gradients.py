"""Gradient clipping, and loss scaling for float16.

After the backward pass, an update is these three calls::

    scaler.unscale(parameters)
    norm = clip_gradients(config, model)
    scaler.step(optimizer, norm)
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import paddle
from paddle import _C_ops, nn

from errors import RunError
from settings.configuration import Configuration
from training.optim.groups import within
from utils import all_reduce_sum
from weights.layout import linear_weights


@paddle.no_grad()
def clip_gradients(
    config: Configuration, model: nn.Layer, trained: Sequence[paddle.Tensor] | None = None
) -> paddle.Tensor:
    """Clips the gradients of ``model`` in place, and returns their global L2 norm before that.

    TRAIN.GRAD_CLIP_MODE chooses the way:

    - "norm" scales all gradients so that their global norm is GRAD_CLIP at most, as torch's
      ``clip_grad_norm_`` does.
    - "parameter" scales each parameter's gradient so that its own norm is GRAD_CLIP at most, as
      DINO does (Caron et al. 2021, arXiv:2104.14294).
    - "value" clips each element to +-GRAD_CLIP.
    - "agc" limits the norm of each output unit's gradient to GRAD_CLIP times the norm of its
      weights (Brock et al. 2021, arXiv:2102.06171). As in timm, the classifier isn't clipped.

    Where GRAD_CLIP is None, nothing is clipped.

    Args:
        model: not wrapped, after its backward pass and ``parallel.reduce_gradients``.
        trained: the model's parameters that aren't frozen, if the caller knows them. Finding them
            takes time.

    Returns:
        float32 []. It stays on the device, so the call waits for nothing.
    """
    limit = config.TRAIN.GRAD_CLIP
    mode = config.TRAIN.GRAD_CLIP_MODE
    if trained is None:
        trained = [parameter for parameter in model.parameters() if not parameter.stop_gradient]
    gradients = [parameter.grad for parameter in trained]
    # paddle.linalg.norm of Paddle 3.3 is 16 times slower on a CPU, and off by 1e-4 for ViT-S.
    zero = paddle.zeros([1])
    squares = paddle.concat(
        [zero if gradient is None else _C_ops.squared_l2_norm(gradient) for gradient in gradients]
    )
    if config.DIST.ENGINE == "fleet" and config.DIST.STRATEGY.sharding:
        # Only its owner has a parameter's gradient. The others add zeros, which keeps its bits.
        squares = all_reduce_sum(squares)
    norm = squares.sum().sqrt()
    if limit is not None and mode == "parameter":
        divisors = ((squares.sqrt() + 1e-6) / limit).clip(min=1.0).split(len(gradients))
        for gradient, divisor in zip(gradients, divisors, strict=True):
            if gradient is not None:
                _divide([gradient], divisor)
        return norm
    gradients = [gradient for gradient in gradients if gradient is not None]
    if limit is not None and mode == "norm":
        _divide(gradients, ((norm + 1e-6) / limit).clip(min=1.0))
    elif limit is not None and mode == "value":
        for gradient in gradients:
            gradient.clip_(-limit, limit)
    elif limit is not None:
        linear = linear_weights(model)
        for name, parameter in model.named_parameters():
            has_gradient = parameter.grad is not None and not parameter.stop_gradient
            if has_gradient and not within(name, model.classifier_names()):
                _clip_adaptively(parameter, limit, name in linear)
    return norm


def _divide(gradients: list[paddle.Tensor], divisor: paddle.Tensor) -> None:
    """Divides gradients in place by a tensor of one element; dividing by 1 keeps their bits.

    One operator does it for all of them: it multiplies by the reciprocal. A gradient that isn't
    finite stays so, and the others may then become 0.
    """
    # The operator would skip gradients that aren't contiguous.
    views = [gradient for gradient in gradients if not gradient.is_contiguous()]
    for gradient in views:
        gradient.multiply_(1 / divisor)
    if len(views) < len(gradients):
        _C_ops.check_finite_and_unscale_(
            [gradient for gradient in gradients if gradient.is_contiguous()], divisor
        )


def _clip_adaptively(parameter: paddle.Tensor, limit: float, is_linear: bool) -> None:
    # Output units are the columns of a Linear's weight [in, out]. Every other tensor has them in
    # its first dimension.
    axis = 0 if is_linear else list(range(1, parameter.ndim)) or None
    gradient: Any = parameter.grad
    norm = parameter.square().sum(axis, keepdim=True).sqrt()
    gradient_norm = gradient.square().sum(axis, keepdim=True).sqrt()
    bound = norm.clip(min=1e-3) * limit
    factor = bound / gradient_norm.clip(min=1e-6)
    gradient.multiply_(paddle.where(gradient_norm < bound, paddle.ones_like(factor), factor))


class LossScaler:
    """Dynamic loss scaling for float16 (Micikevicius et al. 2018, arXiv:1710.03740).

    It behaves as torch.amp.GradScaler. The loss is scaled up, so that small gradients don't vanish
    in float16. A gradient that overflows costs its update and halves the scale;
    ``growth_interval`` good updates in a row double it. Paddle's own scaler turns itself off on a
    CPU.

    Args:
        enabled: if False, the loss, the gradients and every update pass unchanged, and nothing
            waits for the device.
        scale: the first scale.
        growth_interval: good updates before the scale doubles.
    """

    # fairseq's limit. A model that can be trained doesn't reach it.
    MIN_SCALE = 1e-4

    def __init__(
        self, enabled: bool = True, scale: float = 65536.0, growth_interval: int = 2000
    ) -> None:
        self.enabled = enabled
        self.loss_scale = scale
        self.growth_interval = growth_interval
        # Good updates since the scale last changed.
        self.good_updates = 0

    def scale(self, loss: paddle.Tensor) -> paddle.Tensor:
        """Returns the loss to call ``backward`` on."""
        return loss * self.loss_scale if self.enabled else loss

    @paddle.no_grad()
    def unscale(self, parameters: Iterable[paddle.Tensor]) -> None:
        """Divides the gradients by the scale, in place: once per update, before clipping."""
        if self.enabled:
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            _divide(gradients, paddle.full([], self.loss_scale))

    def step(self, optimizer: paddle.optimizer.Optimizer, norm: paddle.Tensor) -> bool:
        """Updates the parameters unless a gradient overflowed. Returns whether they were updated.

        The scale is adapted, too. If scaling is enabled, the call waits for ``norm``. That is the
        only synchronisation of an update in float16.

        Args:
            norm: of the gradients of all processes, so that all of them decide alike.

        Raises:
            RunError: on every rank, if the gradients aren't finite with the smallest scale.
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
        """Returns the scale and its count, as plain numbers, for a checkpoint."""
        return {"loss_scale": self.loss_scale, "good_updates": self.good_updates}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        """Restores what ``state_dict`` returned."""
        self.loss_scale = float(state["loss_scale"])
        self.good_updates = int(state["good_updates"])

    def _adapt(self, finite: bool) -> None:
        self.good_updates = self.good_updates + 1 if finite else 0
        if not finite:
            self.loss_scale /= 2
        elif self.good_updates == self.growth_interval:
            # float32 ends below 2 ** 128.
            self.loss_scale = min(2 * self.loss_scale, 2.0**127)
            self.good_updates = 0
        if self.loss_scale < self.MIN_SCALE:
            raise RunError(
                f"gradients aren't finite in float16 at a loss scale of {2 * self.loss_scale:.2g};"
                " lower TRAIN.BASE_LR, or train without -amp",
                shared=True,
            )
