"""A yes or no for each class: of one class an image, of several or of none."""

from collections.abc import Sequence

import paddle
from paddle import nn
from paddle.nn import functional as F

from loading.transforms import smooth_one_hot
from settings.keys import Factor, Share
from settings.registry import losses
from training.losses.targets import Targets, factors

_LEAST = 1e-8  # of a probability whose logarithm is taken, as timm's


@losses.register("bce", takes="any")
def bce(
    targets: Targets, *, bce_target_thresh: Share | None = None, bce_sum: bool = False
) -> nn.Layer:
    """Gives a yes-or-no loss of each class.

    Args:
        bce_target_thresh: targets above it are 1, others 0; None: they stay as they are.
        bce_sum: sum over the classes; False: mean.
    """
    return BinaryCrossEntropy(
        targets.smoothing, bce_target_thresh, bce_sum, targets.weight, targets.pos_weight
    )


@losses.register("focal", takes="any")
def focal(
    targets: Targets, *, focal_gamma: Factor = 2.0, focal_alpha: Share | None = 0.25
) -> nn.Layer:
    """Gives a yes-or-no loss of each class, less where the answer is right already.

    Args:
        focal_gamma: exponent of what the right answer's probability lacks; 0: bce.
        focal_alpha: weight of a yes, beside 1 - it of a no; None: both are 1.
    """
    return Focal(targets.smoothing, focal_gamma, focal_alpha, targets.weight)


@losses.register("asymmetric", takes="any")
def asymmetric(
    targets: Targets,
    *,
    asl_gamma_neg: Factor = 4.0,
    asl_gamma_pos: Factor = 1.0,
    asl_clip: Share = 0.05,
) -> nn.Layer:
    """Gives a yes-or-no loss of each class, far less for the many that are no.

    Args:
        asl_gamma_neg: focal's exponent where the answer is no.
        asl_gamma_pos: where it is yes.
        asl_clip: a no below this probability loses nothing.
    """
    return Asymmetric(targets.smoothing, asl_gamma_neg, asl_gamma_pos, asl_clip, targets.weight)


def binary_cross_entropy(
    logits: paddle.Tensor, targets: paddle.Tensor, pos_weight: paddle.Tensor | None = None
) -> paddle.Tensor:
    """Returns -w t log(sigmoid(x)) - (1 - t) log(1 - sigmoid(x)) of each logit x, as PyTorch's
    function does.

    Without w, its gradient is sigmoid(x) - t at every logit. That of Paddle 3.3's own function is 1
    less at 0. Paddle's ``pos_weight`` means something else if targets lie between 0 and 1.

    Args:
        logits: x, [B, K] float32.
        targets: t, [B, K] float32, from 0 to 1.
        pos_weight: w, [K] or [1]; None: 1.
    """
    # The softplus has the sign of the nearer answer, so that nothing cancels out: for a target of 1
    # or 0 it is all.
    is_yes = (targets > 0.5).astype("float32")
    each = F.softplus(logits * (1 - 2 * is_yes))
    if pos_weight is None:
        return each + (is_yes - targets) * logits
    yes = pos_weight * targets
    both = yes + 1 - targets
    return each * both + (is_yes * both - yes) * logits


class Binary(nn.Layer):
    """What these losses share: targets, class weights, the mean or sum over the classes.

    Args:
        smoothing: of labels; targets [B, K] are taken as they come.
        sum_classes: sum over the classes; False: mean.
        weight: a factor per class.
    """

    def __init__(self, smoothing: float, sum_classes: bool, weight: Sequence[float] | None) -> None:
        super().__init__()
        self.smoothing, self.sum_classes, self.weight = smoothing, sum_classes, factors(weight)

    def forward(self, logits: paddle.Tensor, targets: paddle.Tensor) -> paddle.Tensor:
        """Returns losses [B] of logits [B, K] and targets [B] int64 or [B, K]."""
        if targets.ndim == 1:
            targets = smooth_one_hot(targets, logits.shape[-1], self.smoothing)
        each = self.each(logits.astype("float32"), targets)
        if self.weight is not None:
            each = each * self.weight
        return each.sum(axis=-1) if self.sum_classes else each.mean(axis=-1)

    def each(self, logits: paddle.Tensor, targets: paddle.Tensor) -> paddle.Tensor:
        """Returns the loss of each class [B, K], of logits and targets [B, K] float32."""
        raise NotImplementedError


class BinaryCrossEntropy(Binary):
    """Wightman et al. 2021 (arXiv:2110.00476); timm's of the same name.

    Args:
        smoothing: of labels; targets [B, K] are taken as they come.
        target_threshold: targets above it are 1, others 0; None: as they are.
        sum_classes: sum over the classes; False: mean.
        weight: a factor per class.
        pos_weight: a factor per class, or one, on the part that a target of 1 has; torch's.
    """

    def __init__(
        self,
        smoothing: float = 0.0,
        target_threshold: float | None = None,
        sum_classes: bool = False,
        weight: Sequence[float] | None = None,
        pos_weight: Sequence[float] | None = None,
    ) -> None:
        super().__init__(smoothing, sum_classes, weight)
        self.target_threshold, self.pos_weight = target_threshold, factors(pos_weight)

    def each(self, logits: paddle.Tensor, targets: paddle.Tensor) -> paddle.Tensor:
        if self.target_threshold is not None:
            targets = (targets > self.target_threshold).astype("float32")
        return binary_cross_entropy(logits, targets, self.pos_weight)


class Focal(Binary):
    """Lin et al. 2017 (arXiv:1708.02002); torchvision's ``sigmoid_focal_loss``, the mean over the
    classes.

    Args:
        smoothing, weight: as of ``BinaryCrossEntropy``.
        gamma: exponent of what the right answer's probability lacks.
        alpha: weight of a yes, beside 1 - alpha of a no; None: both are 1.
    """

    def __init__(
        self,
        smoothing: float = 0.0,
        gamma: float = 2.0,
        alpha: float | None = 0.25,
        weight: Sequence[float] | None = None,
    ) -> None:
        super().__init__(smoothing, False, weight)
        self.gamma = gamma
        self.alpha = alpha

    def each(self, logits: paddle.Tensor, targets: paddle.Tensor) -> paddle.Tensor:
        yes = F.sigmoid(logits)
        entropy = binary_cross_entropy(logits, targets)
        loss = entropy * _power(1 - yes * targets - (1 - yes) * (1 - targets), self.gamma)
        return (
            loss
            if self.alpha is None
            else loss * (self.alpha * targets + (1 - self.alpha) * (1 - targets))
        )


class Asymmetric(Binary):
    """Ridnik et al. 2021 (arXiv:2009.14119); timm's ``AsymmetricLossMultiLabel``, summed over the
    classes.

    Args:
        smoothing, weight: as of ``BinaryCrossEntropy``.
        gamma_neg, gamma_pos: focal's exponent where the answer is no, and where it is yes.
        clip: what a no's probability gains, up to 1.
    """

    def __init__(
        self,
        smoothing: float = 0.0,
        gamma_neg: float = 4.0,
        gamma_pos: float = 1.0,
        clip: float = 0.05,
        weight: Sequence[float] | None = None,
    ) -> None:
        super().__init__(smoothing, True, weight)
        self.gamma_neg = gamma_neg
        self.gamma_pos = gamma_pos
        self.clip = clip

    def each(self, logits: paddle.Tensor, targets: paddle.Tensor) -> paddle.Tensor:
        yes = F.sigmoid(logits)
        no = (1 - yes + self.clip).clip(max=1.0)
        entropy = -targets * yes.clip(min=_LEAST).log() - (1 - targets) * no.clip(min=_LEAST).log()
        gamma = self.gamma_pos * targets + self.gamma_neg * (1 - targets)
        return entropy * _power(1 - yes * targets - no * (1 - targets), gamma)


def _power(lacking: paddle.Tensor, gamma: float | paddle.Tensor) -> paddle.Tensor:
    """A power whose gradient is finite at 0, too, where an exponent below 1 has none."""
    return lacking.clip(min=_LEAST) ** gamma
