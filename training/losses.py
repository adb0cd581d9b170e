"""Criteria: what a model gives and what it should give in, one loss per sample [B] (float32) out.

Never averaged: the engine divides once, by the true number of samples. Whatever the logits' type, losses are computed
in float32. Class weights are a factor per class on its term of the sum, a label's too (as torch's reduction="none");
nothing is divided by their sum.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F

from configs.registry import losses
from configs.signatures import Factor, Share
from errors import InputError
from loading.transforms import gives_distributions, smooth_one_hot
from options import Configuration
from training.features import FEATURE, feature_distance

# ----------------------------------------------------------------- criteria


class Targets(NamedTuple):
    """What every loss gets.

    Args:
        distributions: targets are distributions [B, K], which are smoothed; else labels [B].
        smoothing: of labels.
        weight: a factor per class, or None.
    """

    distributions: bool
    smoothing: float
    weight: Sequence[float] | None


@losses.register("auto", takes="both")
def auto(targets: Targets) -> nn.Layer:
    """The cross-entropy of what mixup, or its absence, makes of the labels."""
    return soft_target(targets) if targets.distributions else cross_entropy(targets)


@losses.register("cross_entropy", takes="labels")
def cross_entropy(targets: Targets) -> nn.Layer:
    return CrossEntropy(targets.smoothing, targets.weight)


@losses.register("soft_target", takes="distributions")
def soft_target(targets: Targets) -> nn.Layer:
    return SoftTargetCrossEntropy(targets.weight)


@losses.register("bce", takes="both")
def bce(targets: Targets, *, bce_target_thresh: Share | None = None, bce_sum: bool = False) -> nn.Layer:
    """A yes-or-no loss of each class.

    Args:
        bce_target_thresh: targets above it are 1, others 0; None: they stay as they are.
        bce_sum: sum over the classes; False: mean.
    """
    return BinaryCrossEntropy(targets.smoothing, bce_target_thresh, bce_sum, targets.weight)


@losses.register("token_label", takes="both")
def token_label(
    targets: Targets, *, token_label_weight: Factor = 0.5, token_label_mix: bool = True
) -> "TokenLabelCrossEntropy":
    """The cross-entropy of the image and of each of its patches; for VOLO.

    Args:
        token_label_weight: of the patches' loss, beside the image's.
        token_label_mix: rectangles of patches are swapped between images (``models.volo.VOLO.mix_token``).
    """
    return TokenLabelCrossEntropy(targets.smoothing, token_label_weight, token_label_mix, targets.weight)


class CrossEntropy(nn.Layer):
    """Cross-entropy of labels, with label smoothing s: the target is 1 - s on the label plus s / K everywhere.

    Szegedy et al. 2015 (arXiv:1512.00567), section 7; timm's ``LabelSmoothingCrossEntropy``, and with weights torch's
    ``cross_entropy``.

    Args:
        smoothing: s.
        weight: a factor per class.
    """

    def __init__(self, smoothing: float = 0.0, weight: Sequence[float] | None = None) -> None:
        super().__init__()
        self.smoothing, self.weight = smoothing, _factors(weight)

    def forward(self, logits: paddle.Tensor, labels: paddle.Tensor) -> paddle.Tensor:
        """Logits [B, K], labels [B] int64 -> [B]."""
        logits = logits.astype("float32")
        loss = F.cross_entropy(logits, labels, reduction="none").reshape([-1])
        if self.weight is not None:
            loss = loss * paddle.gather(self.weight, labels)
        if self.smoothing:
            each = -F.log_softmax(logits)
            uniform = (each if self.weight is None else each * self.weight).mean(axis=-1)
            loss = (1 - self.smoothing) * loss + self.smoothing * uniform
        return loss


class SoftTargetCrossEntropy(nn.Layer):
    """Cross-entropy of distributions: the sum over classes of w_k t_k (-log p_k); timm's of the same name.

    Args:
        weight: w, a factor per class.
    """

    def __init__(self, weight: Sequence[float] | None = None) -> None:
        super().__init__()
        self.weight = _factors(weight)

    def forward(self, logits: paddle.Tensor, targets: paddle.Tensor) -> paddle.Tensor:
        """Logits [B, K], targets [B, K] -> [B]."""
        if self.weight is not None:
            targets = targets * self.weight
        return -(targets * F.log_softmax(logits.astype("float32"))).sum(axis=-1)


class BinaryCrossEntropy(nn.Layer):
    """A yes-or-no loss of each class (Wightman et al. 2021, arXiv:2110.00476); timm's of the same name.

    Args:
        smoothing: of labels; distributions are taken as they come.
        target_threshold: targets above it are 1, others 0; None: as they are.
        sum_classes: sum over the classes; False: mean.
        weight: a factor per class.
    """

    def __init__(
        self,
        smoothing: float = 0.0,
        target_threshold: float | None = None,
        sum_classes: bool = False,
        weight: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        self.smoothing, self.target_threshold, self.sum_classes = smoothing, target_threshold, sum_classes
        self.weight = _factors(weight)

    def forward(self, logits: paddle.Tensor, targets: paddle.Tensor) -> paddle.Tensor:
        """Logits [B, K], targets [B] int64 or [B, K] -> [B]."""
        if targets.ndim == 1:
            targets = smooth_one_hot(targets, logits.shape[-1], self.smoothing)
        if self.target_threshold is not None:
            targets = (targets > self.target_threshold).astype("float32")
        each = F.binary_cross_entropy_with_logits(logits.astype("float32"), targets, reduction="none")
        if self.weight is not None:
            each = each * self.weight
        return each.sum(axis=-1) if self.sum_classes else each.mean(axis=-1)


class TokenLabelCrossEntropy(nn.Layer):
    """Cross-entropy of the image plus ``weight`` times the patches' mean (Jiang et al. 2021, arXiv:2104.10858).

    Each patch is taught its image's own target, as sail-sg/volo's ``TokenLabelCrossEntropy`` does where there are no
    labels of patches by another network. The image's is mixed with that of the other end of the batch by the share of
    patches that came from there.

    Args:
        smoothing: of labels; distributions are taken as they come.
        token_weight: of the patches' loss.
        mix: what ``mix_token`` of the model is to be.
        weight: a factor per class.
    """

    reads_tokens = True  # the model gives what ``dense_training`` describes

    def __init__(
        self,
        smoothing: float = 0.0,
        token_weight: float = 0.5,
        mix: bool = True,
        weight: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        self.smoothing, self.token_weight, self.mix = smoothing, token_weight, mix
        self.each = SoftTargetCrossEntropy(weight)

    def forward(self, outputs: Sequence[paddle.Tensor], targets: paddle.Tensor) -> paddle.Tensor:
        """(Logits [B, K], the patches' [B, N, K], the share that was swapped []), targets [B] or [B, K] -> [B]."""
        logits, dense, mixed = outputs
        if targets.ndim == 1:
            targets = smooth_one_hot(targets, logits.shape[-1], self.smoothing)
        whole = targets + (targets.flip([0]) - targets) * mixed
        patches = self.each(dense, targets.unsqueeze(1)).mean(axis=1)
        return self.each(logits, whole) + self.token_weight * patches


def _factors(weight: Sequence[float] | None) -> paddle.Tensor | None:
    return None if weight is None else paddle.to_tensor(weight, dtype="float32")


def reads_tokens(criterion: nn.Layer) -> bool:
    """Whether a criterion takes what the model says of its patches, too."""
    return getattr(criterion, "reads_tokens", False)


def class_weights(config: Configuration, labels: np.ndarray | None) -> list[float] | None:
    """Returns a factor per class, or None without TRAIN.CLASS_WEIGHTS.

    "auto" gives n / (number of classes present * images of the class), whose mean over the n training images is 1. A
    class without a training image gets 0: distributions lose what smoothing puts on it.

    Args:
        labels: [n] integers, of the training set.

    Raises:
        InputError: not as many factors as classes, or "auto" without labels.
    """
    given, classes = config.TRAIN.CLASS_WEIGHTS, config.MODEL.NUM_CLASSES
    if given == "auto":
        if labels is None or not len(labels):
            raise InputError("TRAIN.CLASS_WEIGHTS is 'auto' and there are no training labels; give a factor per class")
        counts = np.bincount(labels, minlength=classes)
        factors = len(labels) / (np.count_nonzero(counts) * np.maximum(counts, 1))
        return np.where(counts > 0, factors, 0.0).tolist()
    if given is not None and len(given) != classes:
        raise InputError(
            f"TRAIN.CLASS_WEIGHTS has {len(given)} values, expected {classes}, one per class of MODEL.NUM_CLASSES"
        )
    return given


# ------------------------------------------------------------- distillation


class Teacher(nn.Layer):
    """A trained model whose logits (or map) a student learns from: in eval mode, without gradients.

    Args:
        model: frozen here.
        student_mean, student_std: what the student's images are normalised by; one value per channel, or one for all.
        mean, std: what the teacher's are.
    """

    def __init__(
        self,
        model: nn.Layer,
        student_mean: Sequence[float],
        student_std: Sequence[float],
        mean: Sequence[float],
        std: Sequence[float],
    ) -> None:
        super().__init__()
        model.eval()
        for parameter in model.parameters():
            parameter.stop_gradient = True
        # In a tuple: a sublayer would follow the criterion into train mode, and lend it its parameters.
        self._model = (model,)
        scale, shift = np.divide(student_std, std), np.subtract(student_mean, mean) / std
        self.same = bool((scale == 1).all() and (shift == 0).all())
        self.scale = paddle.to_tensor(scale, dtype="float32").reshape([1, -1, 1, 1])
        self.shift = paddle.to_tensor(shift, dtype="float32").reshape([1, -1, 1, 1])

    @paddle.no_grad()
    def forward(self, images: paddle.Tensor) -> paddle.Tensor:
        """The student's images [B, C, S, S] -> logits [B, K]."""
        return self._model[0](images if self.same else images * self.scale + self.shift)


class TrainingLoss(nn.Layer):
    """A criterion, with or without distillation (DeiT: Touvron et al. 2021, arXiv:2012.12877).

    The loss is (1 - alpha) * base + alpha * distillation. "hard": the cross-entropy with the teacher's choice; "soft":
    the divergence KL(teacher || student) at temperature tau, times tau^2, divided by the number of classes as in DeiT's
    program (its paper doesn't); "feature": ``feature_distance``. Smoothing and class weights are the base's alone.

    Args:
        base: of the model's logits and the targets.
        teacher: images -> logits [B, K], or a map [B, C, H, W].
        kind: "hard", "soft" or "feature", with a teacher.
    """

    def __init__(
        self,
        base: nn.Layer,
        teacher: nn.Layer | None = None,
        kind: str | None = None,
        alpha: float = 0.5,
        tau: float = 1.0,
    ) -> None:
        super().__init__()
        self.base, self.teacher, self.kind, self.alpha, self.tau = base, teacher, kind, alpha, tau

    def forward(self, images: paddle.Tensor, outputs: Any, targets: paddle.Tensor) -> paddle.Tensor:
        """Returns the loss of each sample, [B].

        Args:
            images: [B, C, S, S], what the student saw.
            outputs: logits [B, K] that serve both losses, or (logits, logits of the distillation token, or the
                projected map); for a base that reads tokens, what it takes, of which the first is distilled.
            targets: what ``base`` takes.

        Raises:
            InputError: the teacher has other classes than the student.
        """
        if reads_tokens(self.base):
            logits, distilled = outputs, outputs[0]
        else:
            logits, distilled = outputs if isinstance(outputs, list | tuple) else (outputs, outputs)
        loss = self.base(logits, targets)
        if self.teacher is None:
            return loss
        return (1 - self.alpha) * loss + self.alpha * self._distil(self.teacher(images), distilled)

    def _distil(self, wanted: paddle.Tensor, logits: paddle.Tensor) -> paddle.Tensor:
        if self.kind == FEATURE:
            return feature_distance(logits, wanted)
        wanted = wanted.astype("float32")
        classes = logits.shape[-1]
        if wanted.shape[-1] != classes:
            raise InputError(f"the teacher has {wanted.shape[-1]} classes, expected the student's {classes}")
        logits = logits.astype("float32")
        if self.kind == "hard":
            return F.cross_entropy(logits, wanted.argmax(axis=-1), reduction="none").reshape([-1])
        wanted, found = F.log_softmax(wanted / self.tau), F.log_softmax(logits / self.tau)
        return (wanted.exp() * (wanted - found)).sum(axis=-1) * (self.tau**2 / classes)


# ------------------------------------------------------------------ factory


def build_criterion(
    config: Configuration, labels: np.ndarray | None = None, teacher: nn.Layer | None = None
) -> TrainingLoss:
    """Returns the training loss of a configuration; it takes the targets that ``BatchTransform`` gives.

    Args:
        labels: [n] integers, of the training set; for TRAIN.CLASS_WEIGHTS "auto".
        teacher: where TRAIN.DISTILLATION_TYPE is set.

    Raises:
        InputError: keys that don't fit each other, the classes or the teacher.
    """
    train, kind = config.TRAIN, config.TRAIN.DISTILLATION_TYPE
    if (kind is None) != (teacher is None):
        found = "no teacher; set TRAIN.TEACHER_MODEL" if teacher is None else "a teacher; set it to hard or soft"
        raise InputError(f"TRAIN.DISTILLATION_TYPE is {kind!r} and there is {found}")
    targets = Targets(gives_distributions(config), train.SMOOTHING, class_weights(config, labels))
    return TrainingLoss(losses.chosen(config)(targets), teacher, kind, train.DISTILLATION_ALPHA, train.DISTILLATION_TAU)
