"""Losses of a class for each pixel. Each is of one image, and reads its pixels that have a class.

So a loss depends on neither the other images of a batch nor the number of processes. An image
without such pixels has the loss 0.
"""

import math
from typing import Literal

import paddle

import ops
from models.heads.base import resized
from training.losses.softmax import log_softmax

# Added to both sums of the Dice coefficient (``_dice_losses``).
_SMOOTH = 1.0
# The smallest base of focal's power. The gradient of a power below 1 is infinite at 0.
_MIN_BASE = 1e-8

Kind = Literal["cross_entropy", "ohem", "focal"]


class PixelLoss:
    """A loss of pixels, with Dice in addition.

    Args:
        kind: "cross_entropy": the mean over the pixels. "ohem": the mean over the hardest ones
            (Shrivastava et al. 2016, arXiv:1604.03540). "focal": the mean of cross-entropies times
            (1 - p) ** focal_gamma, where p is the probability of the pixel's class (Lin et al.
            2017, arXiv:1708.02002).
        weight: a factor per class, [K]; the means are weighted then. It isn't Dice's.
        ohem_threshold: pixels whose class has a lower probability are hard.
        ohem_keep: the least number of pixels of an image that are kept, if it has as many.
        focal_gamma: see ``kind``.
        dice: factor on the Dice loss, which is added (Milletari et al. 2016, arXiv:1606.04797).
    """

    def __init__(
        self,
        kind: Kind = "cross_entropy",
        weight: paddle.Tensor | None = None,
        ohem_threshold: float = 0.7,
        ohem_keep: int = 100_000,
        focal_gamma: float = 2.0,
        dice: float = 0.0,
    ) -> None:
        self.kind = kind
        self.weight = weight
        self.ohem_threshold = ohem_threshold
        self.ohem_keep = ohem_keep
        self.focal_gamma = focal_gamma
        self.dice = dice

    def __call__(self, logits: paddle.Tensor, mask: paddle.Tensor, ignored: int) -> paddle.Tensor:
        """Returns the loss of each image: [B] float32.

        Args:
            logits: [B, K, rows, columns], which are resized bilinearly to the mask's size.
            mask: [B, H, W], the pixels' classes.
            ignored: the index of pixels without a class.
        """
        if self.kind == "cross_entropy" and not self.dice and ops.usable(logits):
            return ops.pixel_loss(logits, mask, ignored, self.weight)
        logits = resized(logits, mask.shape[1:])
        labels = mask.astype("int64")
        known = labels != ignored
        labels = paddle.where(known, labels, paddle.zeros_like(labels))
        logarithms = log_softmax(logits.transpose([0, 2, 3, 1]))
        losses = -paddle.take_along_axis(logarithms, labels.unsqueeze(-1), axis=-1).squeeze(-1)
        factors = known.astype("float32")
        if self.kind == "ohem":
            hard = _hard_pixels(losses.detach(), known, self.ohem_threshold, self.ohem_keep)
            factors = factors * hard.astype("float32")
        elif self.kind == "focal":
            other = -paddle.expm1(-losses)
            losses = losses * other.clip(min=_MIN_BASE) ** self.focal_gamma
        if self.weight is not None:
            factors = factors * paddle.gather(self.weight, labels.flatten()).reshape(labels.shape)
        loss = (losses * factors).sum([1, 2]) / factors.sum([1, 2]).clip(min=1e-12)
        if self.dice:
            loss = loss + self.dice * _dice_losses(logarithms, labels, known)
        return loss


def pixel_cross_entropy(logits: paddle.Tensor, mask: paddle.Tensor, ignored: int) -> paddle.Tensor:
    """Returns the mean cross-entropy of each image's pixels: [B] (``PixelLoss``)."""
    return PixelLoss()(logits, mask, ignored)


def _hard_pixels(
    losses: paddle.Tensor, known: paddle.Tensor, threshold: float, keep: int
) -> paddle.Tensor:
    """Returns which pixels count in online hard example mining: [B, H, W] bool.

    They are those whose class has a probability below ``threshold``. If these are fewer than
    ``keep``, they are the ``keep`` hardest ones, and all that are as hard as the last of these.

    Args:
        losses: [B, H, W], the cross-entropies: minus the logarithms of the probabilities.
        known: [B, H, W], which pixels have a class.
    """
    # Cross-entropies are at least 0, so pixels without a class come last.
    losses = paddle.where(known, losses, paddle.full_like(losses, -1.0))
    flat = losses.flatten(1)
    last = known.flatten(1).astype("int64").sum(1, keepdim=True).clip(min=1, max=keep) - 1
    least_kept = paddle.take_along_axis(flat.sort(axis=1, descending=True), last, axis=1)
    limit = -math.log(threshold) if threshold else math.inf
    return (losses > limit) | (losses >= least_kept.unsqueeze(-1))


def _dice_losses(
    logarithms: paddle.Tensor, labels: paddle.Tensor, known: paddle.Tensor
) -> paddle.Tensor:
    """Returns the Dice loss of each image: [B].

    For a class, it is 1 - (2 sum(p t) + 1) / (sum(p^2) + sum(t) + 1). The sums are over the image's
    pixels that have a class, p is the class's probability, and t is 1 where a pixel has the class.
    The image's loss is the mean over all classes.

    Args:
        logarithms: [B, H, W, K], of the probabilities.
        labels: [B, H, W] int64.
        known: [B, H, W], which pixels have a class.
    """
    classes = logarithms.shape[-1]
    counts = known.astype("float32").unsqueeze(-1).expand_as(logarithms)
    probabilities = logarithms.exp() * counts
    targets = paddle.nn.functional.one_hot(labels, classes) * counts
    both = (probabilities * targets).sum([1, 2])
    either = probabilities.square().sum([1, 2]) + targets.sum([1, 2])
    return (1 - (2 * both + _SMOOTH) / (either + _SMOOTH)).mean(1)
