"""The loss of a set of answers, each of which is a class and a mask (Mask2Former).

Cheng et al. 2022, arXiv:2112.01527, section 3.3, with the points of PointRend (arXiv:1912.08193).
Each class of an image has one mask. Masks are matched to answers one to one, at the least cost. The
answer is to have the class and the mask then. Answers without a mask are to have "no class".

Other than in the authors' program, nothing of an image's loss depends on the other images of the
batch: its masks' losses are divided by the number of its own masks, and its classes' losses by its
own queries' weights. For a batch of one image both are the same. Pixels without a class count
nowhere; there they are outside of all masks.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle.nn import functional as F
from scipy.optimize import linear_sum_assignment

from models.layers.layout import swap_axes

# Factors on the parts of the loss, and of the cost.
CLASS_FACTOR = 2.0
MASK_FACTOR = 5.0
DICE_FACTOR = 5.0
# The factor on the loss of an answer without a mask.
EMPTY_FACTOR = 0.1
# Masks are compared at so many points. They are chosen from OVERSAMPLING times as many: a share are
# those whose logits are next to 0, the others are random.
POINTS = 12_544
OVERSAMPLING = 3
UNCERTAIN_SHARE = 0.75


class Answers(NamedTuple):
    """The answers of Q queries.

    Attributes:
        masks: logits [B, Q, h, w].
        classes: logits [B, Q, K + 1], the last of no class.
    """

    masks: paddle.Tensor
    classes: paddle.Tensor


class Pairs(NamedTuple):
    """Masks and the answers that they are matched to. Each attribute is [M] int64.

    Attributes:
        images: of the batch.
        queries: of an image's queries.
        classes: of the masks.
    """

    images: np.ndarray
    queries: np.ndarray
    classes: np.ndarray


def matching_loss(
    outputs: Sequence[Answers], mask: paddle.Tensor, ignored: int, points: int = POINTS
) -> paddle.Tensor:
    """Returns the loss of each image: [B] float32, the sum over the answers of several layers.

    It is 0 for an image without a pixel that has a class. Random points come from Paddle's
    generator, which is seeded at each step.

    The assignments are computed on the host. So it waits for the device twice: for the classes that
    the images have, and for the costs of all layers.

    Args:
        outputs: of each layer.
        mask: [B, H, W], the pixels' classes.
        ignored: the index of pixels without a class.
        points: number of points.
    """
    count = outputs[0].classes.shape[2] - 1
    # Pixels without a class get the index K.
    mask = mask.astype("int64")
    mask = paddle.where(mask == ignored, paddle.full_like(mask, count), mask)
    outputs = [
        Answers(one.masks.astype("float32"), one.classes.astype("float32")) for one in outputs
    ]
    classes = _present_classes(mask, count)
    with paddle.no_grad():
        costs = paddle.stack([_costs(answers, classes, mask, points) for answers in outputs])
    costs_on_host = costs.numpy()
    loss = paddle.zeros([mask.shape[0]])
    for answers, costs_of_layer in zip(outputs, costs_on_host, strict=True):
        pairs = _assigned(costs_of_layer, classes)
        loss = loss + CLASS_FACTOR * _class_losses(answers.classes, pairs)
        loss = loss + _mask_losses(answers.masks, pairs, mask, count, points)
    return loss * paddle.to_tensor((classes >= 0).any(1).astype(np.float32))


def _present_classes(mask: paddle.Tensor, count: int) -> np.ndarray:
    """Returns the classes that each image's pixels have, and then -1: [B, C] int64.

    C is the number of an image's classes, at most, and at least 1.
    """
    batch = mask.shape[0]
    offsets = paddle.arange(batch).reshape([-1, 1, 1]) * (count + 1)
    numbers = paddle.bincount((mask + offsets).flatten(), minlength=batch * (count + 1))
    present = numbers.numpy().reshape(batch, count + 1)[:, :count] > 0
    classes = np.full((batch, max(1, present.sum(1).max())), -1)
    for image, own in enumerate(present):
        classes[image, : own.sum()] = own.nonzero()[0]
    return classes


def _costs(
    answers: Answers, classes: np.ndarray, mask: paddle.Tensor, points: int
) -> paddle.Tensor:
    """Returns the costs of giving each class's mask to each query: [B, C, Q].

    Args:
        classes: what ``_present_classes`` returned. The costs of -1 have no meaning.
        mask: [B, H, W], with the index K for pixels without a class.
        points: at so many random points of each image, masks are compared.
    """
    batch, _, width = answers.classes.shape
    places = paddle.rand([batch, points, 2])
    logits = _rows_at(answers.masks, places)
    own = paddle.to_tensor(classes).unsqueeze(2)
    targets, known = _targets_at(mask, np.arange(batch), places, own, width - 1)
    weights = known.unsqueeze(1)
    entropy = paddle.matmul(weights, F.softplus(logits)) - paddle.matmul(targets, logits)
    entropy = entropy / known.sum(1).clip(min=1).reshape([-1, 1, 1])
    found = F.sigmoid(logits)
    # Targets are 0 where pixels have no class.
    both = paddle.matmul(targets, found)
    dice = _dice(both, paddle.matmul(weights, found), targets.sum(2, keepdim=True))
    likely = swap_axes(F.softmax(answers.classes, axis=-1))
    likely = paddle.take_along_axis(
        likely, own.clip(min=0).expand([-1, -1, likely.shape[2]]), axis=1
    )
    return MASK_FACTOR * entropy + DICE_FACTOR * dice - CLASS_FACTOR * likely


def _assigned(costs: np.ndarray, classes: np.ndarray) -> Pairs:
    """Returns the pairs with the least sum of costs in each image, by rising query.

    Args:
        costs: [B, C, Q]. What isn't finite comes last.
        classes: [B, C], the masks' classes; -1: there is no mask.
    """
    worst = float(np.finfo(np.float32).max)
    images = []
    queries = []
    labels = []
    for image, own in enumerate(classes):
        own = own[own >= 0]
        table = np.nan_to_num(costs[image][: len(own)], nan=worst, posinf=worst, neginf=worst)
        rows, columns = linear_sum_assignment(table.T)
        images.append(np.full(len(rows), image))
        queries.append(rows)
        labels.append(own[columns])
    return Pairs(*(np.concatenate(column).astype(np.int64) for column in (images, queries, labels)))


def _class_losses(logits: paddle.Tensor, pairs: Pairs) -> paddle.Tensor:
    """Returns the weighted mean of each image's cross-entropies: [B].

    Args:
        logits: [B, Q, K + 1].
    """
    batch, count, width = logits.shape
    targets = np.full((batch, count), width - 1)
    targets[pairs.images, pairs.queries] = pairs.classes
    weights = np.where(targets == width - 1, EMPTY_FACTOR, 1.0).astype(np.float32)
    weights = weights / weights.sum(1, keepdims=True)
    logarithms = logits - logits.logsumexp(axis=-1, keepdim=True)
    labels = paddle.to_tensor(targets).unsqueeze(-1)
    chosen = paddle.take_along_axis(logarithms, labels, axis=-1).squeeze(-1)
    return -(chosen * paddle.to_tensor(weights)).sum(1)


def _mask_losses(
    masks: paddle.Tensor, pairs: Pairs, mask: paddle.Tensor, count: int, points: int
) -> paddle.Tensor:
    """Returns the mean loss of each image's masks: cross-entropy and Dice, with their factors, [B].

    Args:
        masks: logits [B, Q, h, w].
        mask: [B, H, W], with the index ``count`` for pixels without a class.
    """
    batch, queries = masks.shape[:2]
    if not len(pairs.images):
        # All parameters need a gradient, as those of other ranks have.
        return masks.sum([1, 2, 3]) * 0
    rows = paddle.to_tensor(pairs.images * queries + pairs.queries)
    chosen = paddle.gather(masks.flatten(0, 1), rows).unsqueeze(1)
    with paddle.no_grad():
        places = _uncertain_points(chosen, pairs.images, mask, count, points)
        own = paddle.to_tensor(pairs.classes).reshape([-1, 1, 1])
        targets, known = _targets_at(mask, pairs.images, places, own, count)
        targets = targets.squeeze(1)
    logits = _values_at(chosen, places)
    entropy = (F.softplus(logits) * known - logits * targets).sum(1) / known.sum(1).clip(min=1)
    found = F.sigmoid(logits)
    dice = _dice((found * targets).sum(1), (found * known).sum(1), targets.sum(1))
    # Each row holds 1 / its image's number of masks.
    members = np.zeros((batch, len(pairs.images)), np.float32)
    members[pairs.images, np.arange(len(pairs.images))] = 1
    members /= np.maximum(members.sum(1, keepdims=True), 1)
    losses = MASK_FACTOR * entropy + DICE_FACTOR * dice
    return paddle.mv(paddle.to_tensor(members), losses)


def _uncertain_points(
    chosen: paddle.Tensor, images: np.ndarray, mask: paddle.Tensor, count: int, points: int
) -> paddle.Tensor:
    """Returns the points at which each mask is compared, [M, points, 2], from 0 to 1.

    Points in pixels without a class are the least uncertain ones.

    Args:
        chosen: logits of the masks [M, 1, h, w].
        images: [M], the mask's image.
        mask: [B, H, W], with the index ``count`` for pixels without a class.
    """
    masks = chosen.shape[0]
    height, width = mask.shape[1:]
    uncertain = int(UNCERTAIN_SHARE * points)
    candidates = paddle.rand([masks, points * OVERSAMPLING, 2])
    doubt = -_values_at(chosen, candidates).abs()
    row = (candidates[:, :, 1] * height).astype("int64").clip(max=height - 1)
    column = (candidates[:, :, 0] * width).astype("int64").clip(max=width - 1)
    unknown = _labels_of(mask, images, row * width + column) == count
    doubt = paddle.where(unknown, paddle.full_like(doubt, -1e30), doubt)
    _, best = doubt.topk(uncertain, axis=1)
    taken = paddle.take_along_axis(candidates, best.unsqueeze(-1).expand([-1, -1, 2]), axis=1)
    return paddle.concat([taken, paddle.rand([masks, points - uncertain, 2])], axis=1)


def _values_at(maps: paddle.Tensor, places: paddle.Tensor) -> paddle.Tensor:
    """Returns maps of one channel at points between their pixels: [N, 1, h, w] -> [N, P].

    They are interpolated bilinearly. Outside of the map there are zeros.

    Args:
        places: [N, P, 2], the share of the width and of the height.
    """
    grid = (2 * places - 1).unsqueeze(2)
    return F.grid_sample(maps, grid, align_corners=False).squeeze(3).squeeze(1)


def _rows_at(maps: paddle.Tensor, places: paddle.Tensor) -> paddle.Tensor:
    """Returns what ``_values_at`` does for all channels: [N, C, h, w] -> [N, P, C].

    Whole rows of channels are gathered, which takes an eighth of the time on a CPU.
    """
    batch, channels, height, width = maps.shape
    rows = swap_axes(maps.flatten(2)).flatten(0, 1)
    offsets = paddle.arange(batch).unsqueeze(1) * (height * width)
    total = paddle.zeros([batch * places.shape[1], channels])
    for index, share in _neighbours(places, height, width):
        values = paddle.gather(rows, (index + offsets).flatten())
        total = total + values * share.reshape([-1, 1]).expand_as(values)
    return total.reshape([batch, -1, channels])


def _targets_at(
    mask: paddle.Tensor,
    images: np.ndarray,
    places: paddle.Tensor,
    own: paddle.Tensor,
    count: int,
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Returns the masks of classes at points, as ``_values_at`` would, and how much is known there.

    The masks aren't made: at a point, a class has the sum of the shares of the pixels around it.

    Args:
        mask: [B, H, W], with the index ``count`` for pixels without a class.
        images: [N], which of them is read.
        places: [N, P, 2], the share of the width and of the height.
        own: [N, C, 1], the classes.

    Returns:
        [N, C, P], and the share of pixels with a class [N, P].
    """
    height, width = mask.shape[1:]
    targets: Any = 0
    unknown: Any = 0
    # Next to the image's border it is below 1.
    whole: Any = 0
    for index, share in _neighbours(places, height, width):
        labels = _labels_of(mask, images, index)
        is_own = (labels.unsqueeze(1) == own).astype("float32")
        targets = targets + is_own * share.unsqueeze(1).expand_as(is_own)
        unknown = unknown + (labels == count).astype("float32") * share
        whole = whole + share
    return targets, 1 - unknown / whole


def _neighbours(
    places: paddle.Tensor, height: int, width: int
) -> Iterator[tuple[paddle.Tensor, paddle.Tensor]]:
    """Yields (index, share) of each of the four pixels around points, both [N, P].

    The index counts an image's pixels row by row. Outside of the image the share is 0.

    Args:
        places: [N, P, 2], the share of the width and of the height.
    """
    left = places[:, :, 0] * width - 0.5
    top = places[:, :, 1] * height - 0.5
    first_column = left.floor()
    first_row = top.floor()
    for down in (0, 1):
        row = first_row + down
        vertical = (1 - (top - row).abs()) * ((row >= 0) & (row < height)).astype("float32")
        rows = row.clip(0, height - 1).astype("int64") * width
        for right in (0, 1):
            column = first_column + right
            inside = ((column >= 0) & (column < width)).astype("float32")
            share = (1 - (left - column).abs()) * inside * vertical
            yield rows + column.clip(0, width - 1).astype("int64"), share


def _labels_of(mask: paddle.Tensor, images: np.ndarray, index: paddle.Tensor) -> paddle.Tensor:
    """Returns the labels of pixels: [N, P] int64.

    Args:
        mask: [B, H, W].
        images: [N], which of them is read.
        index: [N, P], the pixels' number in the image, row by row.
    """
    height, width = mask.shape[1:]
    offsets = paddle.to_tensor(images * (height * width)).unsqueeze(1)
    return paddle.gather(mask.flatten(), (index + offsets).flatten()).reshape(index.shape)


def _dice(both: paddle.Tensor, found: paddle.Tensor, targets: paddle.Tensor) -> paddle.Tensor:
    """Returns the Dice loss of the sums of a mask, of the target, and of their product."""
    return 1 - (2 * both + 1) / (found + targets + 1)
