"""Metrics of a class for each pixel, counted in confusion matrices and along boundaries.

A confusion matrix is [K, K] int64; its rows are the classes of masks, its columns the answers. Sums
of such counts are exact, whatever the order of images, batches and processes.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import paddle

from training.losses.softmax import label_losses
from training.task import Batch

# The boundary of a class reaches inwards by this share of the image's diagonal.
_BOUNDARY = 0.02


def answers_of_strips(
    strips: Iterable[paddle.Tensor], mask: paddle.Tensor, ignored: int
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Returns the answers [B, H, W] int64, and the cross-entropy of each image, [B] float32.

    That is the mean over the pixels that have a class, 0 without any.

    Args:
        strips: logits, as ``models.heads.windows.pixel_logits`` yields them.
        mask: [B, H, W] int64, the classes.
        ignored: the index of pixels without a class.
    """
    known = mask != ignored
    labels = paddle.where(known, mask, paddle.zeros_like(mask))
    answers = []
    losses = []
    top = 0
    for logits in strips:
        bottom = top + logits.shape[1]
        # On a GPU argmax is -1 where all logits are NaN.
        answers.append(logits.argmax(-1).clip(min=0))
        of_pixels = label_losses(logits.flatten(0, 2), labels[:, top:bottom].flatten())
        losses.append(of_pixels.reshape(answers[-1].shape))
        top = bottom
    factors = known.astype("float32")
    sums = (paddle.concat(losses, axis=1) * factors).sum([1, 2])
    return paddle.concat(answers, axis=1), sums / factors.sum([1, 2]).clip(min=1)


def count_pairs(
    predicted: paddle.Tensor, mask: paddle.Tensor, classes: int, ignored: int
) -> paddle.Tensor:
    """Returns how many pixels have each (class, answer): a confusion matrix, flat.

    Args:
        predicted: int64 of any shape, the answers.
        mask: int64 of the same shape, the classes.
        ignored: the index of pixels that aren't counted.
    """
    mask = mask.flatten()
    pairs = mask * classes + predicted.flatten()
    # Pixels that aren't counted get a place of their own at the end.
    pairs = paddle.where(mask != ignored, pairs, paddle.full_like(pairs, classes * classes))
    return paddle.bincount(pairs, minlength=classes * classes + 1)[:-1]


def image_outcome(pairs: paddle.Tensor, classes: int) -> Batch:
    """Returns the row of an image in predictions.csv, each [1].

    ``pixel_acc`` and ``mIoU`` are percentages, 0 for an image without a pixel that has a class.
    ``label`` and ``predicted`` are the pair of a class and another answer that most pixels have (the
    first of equal ones), ``pixels`` says how many.

    Args:
        pairs: of the image, as ``count_pairs`` returns them.
    """
    matrix = pairs.reshape([classes, classes])
    right = paddle.diagonal(matrix)
    union = matrix.sum(0) + matrix.sum(1) - right
    shares = right.astype("float64") / union.clip(min=1).astype("float64")
    present = (union > 0).astype("float64").sum()
    wrong = (matrix - paddle.diag(right)).flatten()
    worst = wrong.argmax().reshape([1])
    return {
        "pixel_acc": _percent(right.astype("float64").sum(), matrix.astype("float64").sum()),
        "mIoU": _percent(shares.sum(), present),
        "label": worst // classes,
        "predicted": worst % classes,
        "pixels": paddle.gather(wrong, worst),
    }


def _percent(part: paddle.Tensor, whole: paddle.Tensor) -> paddle.Tensor:
    return (100 * part / whole.clip(min=1)).reshape([1])


def metrics_of(confusion: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    """Returns the metrics of ``Segmentation.evaluate`` for a confusion matrix.

    Without any pixel all means are 0.
    """
    right = np.diag(confusion)
    of_class = confusion.sum(1)
    iou = _shares(right, of_class + confusion.sum(0) - right)
    acc = _shares(right, of_class)
    return {
        "mIoU": _mean(iou),
        "mean_acc": _mean(acc),
        "pixel_acc": 100 * int(right.sum()) / max(1, int(confusion.sum())),
        "class_iou": dict(zip(names, iou, strict=True)),
        "class_acc": dict(zip(names, acc, strict=True)),
    }


def _shares(parts: np.ndarray, wholes: np.ndarray) -> list[float | None]:
    """Returns percentages; None where there is nothing."""
    return [
        100 * int(part) / int(whole) if whole else None
        for part, whole in zip(parts, wholes, strict=True)
    ]


def _mean(values: list[float | None]) -> float:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else 0.0


# --------------------------------------------------------------- boundaries


def count_boundaries(
    predicted: paddle.Tensor, mask: paddle.Tensor, classes: int, ignored: int
) -> paddle.Tensor:
    """Returns how many pixels of each class belong to the boundary of masks, to that of answers, and
    to both: [3, classes] int64 (Cheng et al. 2021, arXiv:2103.16562).

    A pixel belongs to its class's boundary if it is at most 2 % of the image's diagonal away from a
    pixel of another class or from the image's border. The distance is the larger one of rows and
    columns, as by repeated erosion. Pixels that aren't counted have no class, in answers, too.

    Args:
        predicted, mask: of one image, [H, W] int64.
        ignored: the index of pixels that aren't counted.
    """
    known = mask != ignored
    predicted = paddle.where(known, predicted, mask)
    height, width = mask.shape
    distance = max(1, round(_BOUNDARY * float(np.hypot(height, width))))
    of_mask = _is_boundary(mask, distance) & known
    of_answer = _is_boundary(predicted, distance) & known
    both = of_mask & of_answer & (mask == predicted)
    counts = []
    for places, values in ((of_mask, mask), (of_answer, predicted), (both, mask)):
        values = paddle.where(places, values, paddle.full_like(values, classes)).flatten()
        counts.append(paddle.bincount(values, minlength=classes + 1)[:classes])
    return paddle.stack(counts)


def _is_boundary(values: paddle.Tensor, distance: int) -> paddle.Tensor:
    """Returns which pixels [H, W] have another value, or the image's end, within a distance.

    The square around a pixel has one value if no two neighbours in it differ. These are counted for
    all squares at once, by sums over the rectangles from the first pixel on.
    """
    height, width = values.shape
    side = 2 * distance + 1
    inner = paddle.zeros([height, width], "int32")
    if min(height, width) >= side:
        changes = _sums(values[1:] != values[:-1], side - 1, side)
        changes += _sums(values[:, 1:] != values[:, :-1], side, side - 1)
        inner[distance : height - distance, distance : width - distance] = (changes == 0).astype(
            "int32"
        )
    return inner == 0


def _sums(values: paddle.Tensor, height: int, width: int) -> paddle.Tensor:
    """Returns the sums over all rectangles of ``height`` x ``width`` in values [H, W]."""
    sums = paddle.zeros([values.shape[0] + 1, values.shape[1] + 1], "int32")
    sums[1:, 1:] = values.astype("int32").cumsum(0).cumsum(1)
    strips = sums[height:] - sums[:-height]
    return strips[:, width:] - strips[:, :-width]


def boundary_metrics(counts: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    """Returns ``boundary_iou``, the mean in percent, and ``class_boundary_iou`` by name.

    Args:
        counts: [3, K], the sum of what ``count_boundaries`` returns.
    """
    of_mask, of_answer, both = counts
    iou = _shares(both, of_mask + of_answer - both)
    return {"boundary_iou": _mean(iou), "class_boundary_iou": dict(zip(names, iou, strict=True))}
