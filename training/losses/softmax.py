"""Cross-entropies: of labels, of distributions, and of patches as well."""

from collections.abc import Sequence

import paddle
from paddle import nn
from paddle.nn import functional as F

import ops
from loading.transforms import smooth_one_hot
from settings.keys import Factor
from settings.registry import losses
from training.losses.targets import Targets, factors


@losses.register("cross_entropy", takes="labels")
def cross_entropy(targets: Targets) -> nn.Layer:
    return CrossEntropy(targets.smoothing, targets.weight)


@losses.register("soft_target", takes="distributions")
def soft_target(targets: Targets) -> nn.Layer:
    return SoftTargetCrossEntropy(targets.weight)


@losses.register("token_label", takes="both")
def token_label(
    targets: Targets, *, token_label_weight: Factor = 0.5, token_label_mix: bool = True
) -> "TokenLabelCrossEntropy":
    """Gives the cross-entropy of the image and of each of its patches; for VOLO.

    Args:
        token_label_weight: of the patches' loss, beside the image's.
        token_label_mix: rectangles of patches are swapped between images
            (``models.volo.VOLO.mix_token``).
    """
    return TokenLabelCrossEntropy(
        targets.smoothing, token_label_weight, token_label_mix, targets.weight
    )


def log_softmax(logits: paddle.Tensor) -> paddle.Tensor:
    """Returns ``F.log_softmax`` of logits [..., K] in float32, also where Paddle's own ends at -64."""
    logits = logits.astype("float32")
    if ops.usable(logits):
        return ops.activation(logits, "log_softmax")
    found = F.log_softmax(logits)
    return paddle.where(found > -64, found, _exact(logits)) if _is_cut_off(found) else found


def label_losses(logits: paddle.Tensor, labels: paddle.Tensor) -> paddle.Tensor:
    """Returns the cross-entropy of each: logits [B, K], labels [B] int64 -> [B]."""
    logits = logits.astype("float32")
    # a label that is no class is an error; none is ignored, as -100 is by default
    if ops.usable(logits):
        return F.nll_loss(log_softmax(logits), labels, ignore_index=-(1 << 62), reduction="none")
    found = F.cross_entropy(logits, labels, reduction="none").reshape([-1])
    if not _is_cut_off(found):
        return found
    return paddle.where(
        found < 64, found, -_exact(logits).take_along_axis(labels.unsqueeze(1), axis=1).flatten()
    )


def _is_cut_off(found: paddle.Tensor) -> bool:
    """Whether these are of Paddle's kernels for CPUs: no logarithm is below -64 there, and no loss
    above 64.
    """
    return paddle.in_dynamic_mode() and found.place.is_cpu_place()


def _exact(logits: paddle.Tensor) -> paddle.Tensor:
    shifted = logits - logits.max(axis=-1, keepdim=True).detach()
    return shifted - shifted.logsumexp(axis=-1, keepdim=True)


class CrossEntropy(nn.Layer):
    """Cross-entropy of labels, with label smoothing s: the target is 1 - s on the label plus s / K
    everywhere.

    Szegedy et al. 2015 (arXiv:1512.00567), section 7; timm's ``LabelSmoothingCrossEntropy``, and
    with weights torch's ``cross_entropy``.

    Args:
        smoothing: s.
        weight: a factor per class.
    """

    def __init__(self, smoothing: float = 0.0, weight: Sequence[float] | None = None) -> None:
        super().__init__()
        self.smoothing, self.weight = smoothing, factors(weight)

    def forward(self, logits: paddle.Tensor, labels: paddle.Tensor) -> paddle.Tensor:
        """Logits [B, K], labels [B] int64 -> [B]."""
        loss = label_losses(logits, labels)
        if self.weight is not None:
            loss = loss * paddle.gather(self.weight, labels)
        if self.smoothing:
            each = -log_softmax(logits)
            uniform = (each if self.weight is None else each * self.weight).mean(axis=-1)
            loss = (1 - self.smoothing) * loss + self.smoothing * uniform
        return loss


class SoftTargetCrossEntropy(nn.Layer):
    """Cross-entropy of distributions: the sum over classes of w_k t_k (-log p_k); timm's of the
    same name.

    Args:
        weight: w, a factor per class.
    """

    def __init__(self, weight: Sequence[float] | None = None) -> None:
        super().__init__()
        self.weight = factors(weight)

    def forward(self, logits: paddle.Tensor, targets: paddle.Tensor) -> paddle.Tensor:
        """Logits [B, K], targets [B, K] -> [B]."""
        return self.of_logarithms(log_softmax(logits), targets)

    def of_logarithms(self, logarithms: paddle.Tensor, targets: paddle.Tensor) -> paddle.Tensor:
        """Logarithms of probabilities [B, K], targets [B, K] -> [B]."""
        if self.weight is not None:
            targets = targets * self.weight
        return -(targets * logarithms).sum(axis=-1)


class TokenLabelCrossEntropy(nn.Layer):
    """Cross-entropy of the image plus ``weight`` times the patches' mean (Jiang et al. 2021,
    arXiv:2104.10858).

    Each patch is taught its image's own target, as sail-sg/volo's ``TokenLabelCrossEntropy`` does
    where there are no labels of patches by another network. The image's is mixed with that of the
    other end of the batch by the share of patches that came from there.

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
        self.smoothing = smoothing
        self.token_weight = token_weight
        self.mix = mix
        self.each = SoftTargetCrossEntropy(weight)

    def forward(self, outputs: Sequence[paddle.Tensor], targets: paddle.Tensor) -> paddle.Tensor:
        """(Logits [B, K], the patches' [B, N, K], the share that was swapped []), targets [B] or
        [B, K] -> [B].
        """
        logits, dense, mixed = outputs
        if targets.ndim == 1:
            targets = smooth_one_hot(targets, logits.shape[-1], self.smoothing)
        whole = targets + (targets.flip([0]) - targets) * mixed
        patches = self.each.of_logarithms(log_softmax(dense).mean(axis=1), targets)
        return self.each(logits, whole) + self.token_weight * patches
