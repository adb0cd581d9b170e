"""Cross-entropies of labels, of distributions, and of images together with their patches."""

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
    """Returns the cross-entropy of labels."""
    return CrossEntropy(targets.smoothing, targets.weight)


@losses.register("soft_target", takes="distributions")
def soft_target(targets: Targets) -> nn.Layer:
    """Returns the cross-entropy of distributions."""
    return SoftTargetCrossEntropy(targets.weight)


@losses.register("token_label", takes="both")
def token_label(
    targets: Targets, *, token_label_weight: Factor = 0.5, token_label_mix: bool = True
) -> "TokenLabelCrossEntropy":
    """Returns the cross-entropy of the image and of each of its patches, for VOLO.

    Args:
        token_label_weight: weight of the patches' loss, which is added to the image's loss.
        token_label_mix: whether to swap rectangles of patches between images
            (``models.volo.VOLO.mix_token``).
    """
    return TokenLabelCrossEntropy(
        targets.smoothing, token_label_weight, token_label_mix, targets.weight
    )


def log_softmax(logits: paddle.Tensor) -> paddle.Tensor:
    """Returns the logarithms of softmax of logits [..., K] in float32.

    Paddle's CPU kernel gives none below -64; these are right there, too.
    """
    logits = logits.astype("float32")
    if ops.usable(logits):
        return ops.activation(logits, "log_softmax")
    logarithms = F.log_softmax(logits)
    if not _is_cut_off(logarithms):
        return logarithms
    return paddle.where(logarithms > -64, logarithms, _exact_log_softmax(logits))


def label_losses(logits: paddle.Tensor, labels: paddle.Tensor) -> paddle.Tensor:
    """Returns the cross-entropy of each sample: logits [B, K], labels [B] int64 -> [B]."""
    logits = logits.astype("float32")
    if ops.usable(logits):
        # An unused ignore_index: a label that isn't a class is an error, -100 included.
        return F.nll_loss(log_softmax(logits), labels, ignore_index=-(1 << 62), reduction="none")
    loss = F.cross_entropy(logits, labels, reduction="none").reshape([-1])
    if not _is_cut_off(loss):
        return loss
    exact = -_exact_log_softmax(logits).take_along_axis(labels.unsqueeze(1), axis=1).flatten()
    return paddle.where(loss < 64, loss, exact)


def _is_cut_off(result: paddle.Tensor) -> bool:
    """Returns whether Paddle's CPU kernels computed a result.

    They give no logarithm below -64, and no loss above 64.
    """
    return paddle.in_dynamic_mode() and result.place.is_cpu_place()


def _exact_log_softmax(logits: paddle.Tensor) -> paddle.Tensor:
    shifted = logits - logits.max(axis=-1, keepdim=True).detach()
    return shifted - shifted.logsumexp(axis=-1, keepdim=True)


class CrossEntropy(nn.Layer):
    """Cross-entropy of labels, with label smoothing.

    With smoothing s, the target is s / K for each class, plus 1 - s for the label (Szegedy et al.
    2015, arXiv:1512.00567, section 7). It is timm's ``LabelSmoothingCrossEntropy``, and with
    weights torch's ``cross_entropy``.

    Args:
        smoothing: s.
        weight: a factor per class.
    """

    def __init__(self, smoothing: float = 0.0, weight: Sequence[float] | None = None) -> None:
        super().__init__()
        self.smoothing = smoothing
        self.weight = factors(weight)

    def forward(self, logits: paddle.Tensor, labels: paddle.Tensor) -> paddle.Tensor:
        """Returns losses [B] of logits [B, K] and labels [B] int64."""
        loss = label_losses(logits, labels)
        if self.weight is not None:
            loss = loss * paddle.gather(self.weight, labels)
        if self.smoothing:
            class_losses = -log_softmax(logits)
            if self.weight is not None:
                class_losses = class_losses * self.weight
            loss = (1 - self.smoothing) * loss + self.smoothing * class_losses.mean(axis=-1)
        return loss


class SoftTargetCrossEntropy(nn.Layer):
    """Cross-entropy of distributions, as timm's class of this name.

    It is the sum over the classes k of w_k t_k (-log p_k).

    Args:
        weight: w, a factor per class.
    """

    def __init__(self, weight: Sequence[float] | None = None) -> None:
        super().__init__()
        self.weight = factors(weight)

    def forward(self, logits: paddle.Tensor, targets: paddle.Tensor) -> paddle.Tensor:
        """Returns losses [B] of logits [B, K] and targets [B, K]."""
        return self.of_logarithms(log_softmax(logits), targets)

    def of_logarithms(self, logarithms: paddle.Tensor, targets: paddle.Tensor) -> paddle.Tensor:
        """Returns losses [B] of logarithms of probabilities [B, K] and targets [B, K]."""
        if self.weight is not None:
            targets = targets * self.weight
        return -(targets * logarithms).sum(axis=-1)


class TokenLabelCrossEntropy(nn.Layer):
    """Cross-entropy of the image plus that of its patches (Jiang et al. 2021, arXiv:2104.10858).

    The target of each patch is its image's, as in sail-sg/volo's ``TokenLabelCrossEntropy`` without
    another network's labels of patches. Where rectangles of patches were swapped, image i of B has
    patches of image B - 1 - i. Its target is then a mixture of both, by their numbers of patches.

    Args:
        smoothing: label smoothing. Distributions aren't smoothed.
        token_weight: factor on the mean of the patches' losses.
        mix: whether the model swaps patches: its ``mix_token`` is set to this.
        weight: a factor per class.
    """

    # The model returns the outputs of its ``dense_training``.
    reads_tokens = True

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
        self.cross_entropy = SoftTargetCrossEntropy(weight)

    def forward(self, outputs: Sequence[paddle.Tensor], targets: paddle.Tensor) -> paddle.Tensor:
        """Returns losses [B].

        Args:
            outputs: logits [B, K], the patches' logits [B, N, K], and the share of patches that
                were swapped [].
            targets: labels [B] or distributions [B, K].
        """
        logits, patch_logits, swapped_share = outputs
        if targets.ndim == 1:
            targets = smooth_one_hot(targets, logits.shape[-1], self.smoothing)
        mixed_targets = targets + (targets.flip([0]) - targets) * swapped_share
        # All patches have one target, so their mean loss is that of their mean logarithms.
        patch_logarithms = log_softmax(patch_logits).mean(axis=1)
        patch_loss = self.cross_entropy.of_logarithms(patch_logarithms, targets)
        return self.cross_entropy(logits, mixed_targets) + self.token_weight * patch_loss
