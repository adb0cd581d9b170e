"""Binary losses: a yes or no for each class, for images of one class, of several, or of none."""

from collections.abc import Sequence

import paddle
from paddle import nn
from paddle.nn import functional as F

from loading.transforms import smooth_one_hot
from settings.keys import Factor, Share
from settings.registry import losses
from training.losses.targets import Targets, factors

# The smallest probability whose logarithm is taken, as in timm.
_MIN_PROBABILITY = 1e-8


@losses.register("bce", takes="any")
def bce(
    targets: Targets, *, bce_target_thresh: Share | None = None, bce_sum: bool = False
) -> nn.Layer:
    """Returns the binary cross-entropy of each class.

    Args:
        bce_target_thresh: targets above this become 1 and all others 0. None: targets stay as they
            are.
        bce_sum: whether to sum losses over the classes. False: they are averaged.
    """
    return BinaryCrossEntropy(
        targets.smoothing, bce_target_thresh, bce_sum, targets.weight, targets.pos_weight
    )


@losses.register("focal", takes="any")
def focal(
    targets: Targets, *, focal_gamma: Factor = 2.0, focal_alpha: Share | None = 0.25
) -> nn.Layer:
    """Returns a binary loss of each class that weighs right answers less.

    Args:
        focal_gamma: the focusing exponent, of 1 minus the probability of the correct answer. 0: the
            same as bce.
        focal_alpha: weight of classes that the image has; other classes have 1 minus it. None: both
            weights are 1.
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
    """Returns a binary loss that weighs the many classes less that an image doesn't have.

    Args:
        asl_gamma_neg: the focusing exponent of negatives, which are classes that the image doesn't
            have.
        asl_gamma_pos: the focusing exponent of positives, which are classes that the image has.
        asl_clip: probabilities below this cost nothing for classes that the image doesn't have.
    """
    return Asymmetric(targets.smoothing, asl_gamma_neg, asl_gamma_pos, asl_clip, targets.weight)


def binary_cross_entropy(
    logits: paddle.Tensor, targets: paddle.Tensor, pos_weight: paddle.Tensor | None = None
) -> paddle.Tensor:
    """Returns -w t log(sigmoid(x)) - (1 - t) log(1 - sigmoid(x)) of each logit x.

    This is what PyTorch's ``binary_cross_entropy_with_logits`` computes. Without w, the gradient is
    sigmoid(x) - t at every logit; that of Paddle 3.3's own function is 1 less at 0. Paddle's
    ``pos_weight`` means something else for targets between 0 and 1.

    Args:
        logits: x, [B, K] float32.
        targets: t, [B, K] float32, from 0 to 1.
        pos_weight: w, [K] or [1]; None: 1.
    """
    # The softplus is that of the nearer answer. For a target of 0 or 1 it is the whole loss, so
    # that no large terms cancel each other.
    is_yes = (targets > 0.5).astype("float32")
    loss = F.softplus(logits * (1 - 2 * is_yes))
    if pos_weight is None:
        return loss + (is_yes - targets) * logits
    yes_weight = pos_weight * targets
    weight = yes_weight + 1 - targets
    return loss * weight + (is_yes * weight - yes_weight) * logits


class Binary(nn.Layer):
    """Base class of binary losses: targets, class weights, the mean or sum over the classes.

    Args:
        smoothing: label smoothing. Targets [B, K] aren't smoothed.
        sum_classes: whether to sum losses over the classes. False: they are averaged.
        weight: a factor per class.
    """

    def __init__(self, smoothing: float, sum_classes: bool, weight: Sequence[float] | None) -> None:
        super().__init__()
        self.smoothing = smoothing
        self.sum_classes = sum_classes
        self.weight = factors(weight)

    def forward(self, logits: paddle.Tensor, targets: paddle.Tensor) -> paddle.Tensor:
        """Returns losses [B] of logits [B, K] and targets [B] int64 or [B, K]."""
        if targets.ndim == 1:
            targets = smooth_one_hot(targets, logits.shape[-1], self.smoothing)
        losses = self.class_losses(logits.astype("float32"), targets)
        if self.weight is not None:
            losses = losses * self.weight
        return losses.sum(axis=-1) if self.sum_classes else losses.mean(axis=-1)

    def class_losses(self, logits: paddle.Tensor, targets: paddle.Tensor) -> paddle.Tensor:
        """Returns the loss of each class [B, K] of logits and targets [B, K] float32."""
        raise NotImplementedError


class BinaryCrossEntropy(Binary):
    """Binary cross-entropy (Wightman et al. 2021, arXiv:2110.00476), as timm's class of this name.

    Args:
        smoothing: label smoothing. Targets [B, K] aren't smoothed.
        target_threshold: targets above this become 1 and all others 0. None: targets stay as they
            are.
        sum_classes: whether to sum losses over the classes. False: they are averaged.
        weight: a factor per class.
        pos_weight: a factor per class, or one for all, on the term of the target; torch's.
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
        self.target_threshold = target_threshold
        self.pos_weight = factors(pos_weight)

    def class_losses(self, logits: paddle.Tensor, targets: paddle.Tensor) -> paddle.Tensor:
        if self.target_threshold is not None:
            targets = (targets > self.target_threshold).astype("float32")
        return binary_cross_entropy(logits, targets, self.pos_weight)


class Focal(Binary):
    """Focal loss (Lin et al. 2017, arXiv:1708.02002), averaged over the classes.

    It is torchvision's ``sigmoid_focal_loss``.

    Args:
        smoothing, weight: as for ``BinaryCrossEntropy``.
        gamma: exponent of 1 minus the right answer's probability.
        alpha: weight of a target of 1, and 1 - alpha that of a target of 0; None: both are 1.
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

    def class_losses(self, logits: paddle.Tensor, targets: paddle.Tensor) -> paddle.Tensor:
        yes = F.sigmoid(logits)
        entropy = binary_cross_entropy(logits, targets)
        loss = entropy * _power(1 - yes * targets - (1 - yes) * (1 - targets), self.gamma)
        if self.alpha is None:
            return loss
        return loss * (self.alpha * targets + (1 - self.alpha) * (1 - targets))


class Asymmetric(Binary):
    """Asymmetric loss (Ridnik et al. 2021, arXiv:2009.14119), summed over the classes.

    It is timm's ``AsymmetricLossMultiLabel``.

    Args:
        smoothing, weight: as for ``BinaryCrossEntropy``.
        gamma_neg, gamma_pos: focal's exponents for targets of 0 and of 1.
        clip: added to the probability of a no, which stays at most 1.
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

    def class_losses(self, logits: paddle.Tensor, targets: paddle.Tensor) -> paddle.Tensor:
        yes = F.sigmoid(logits)
        no = (1 - yes + self.clip).clip(max=1.0)
        log_yes = yes.clip(min=_MIN_PROBABILITY).log()
        log_no = no.clip(min=_MIN_PROBABILITY).log()
        entropy = -targets * log_yes - (1 - targets) * log_no
        gamma = self.gamma_pos * targets + self.gamma_neg * (1 - targets)
        return entropy * _power(1 - yes * targets - no * (1 - targets), gamma)


def _power(base: paddle.Tensor, gamma: float | paddle.Tensor) -> paddle.Tensor:
    """Returns a power whose gradient is finite at 0, too, where that of an exponent below 1 isn't."""
    return base.clip(min=_MIN_PROBABILITY) ** gamma
