"""The loss of a set of answers, each of which is a class and a mask (Mask2Former).

Cheng et al. 2022, arXiv:2112.01527, section 3.3, with the points of PointRend (arXiv:1912.08193).
Each class of an image has one mask. Masks are matched to answers one to one, at the least cost. The
answer is to have the class and the mask then. Answers without a mask are to have "no class".

Other than in the authors' program, nothing of an image's loss depends on the other images of the
batch: its masks' losses are divided by the number of its own masks, and its classes' losses by its
own queries' weights. For a batch of one image both are the same. Pixels without a class count
nowhere; there they are outside of all masks.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import paddle
from paddle.nn import functional as F
from scipy.optimize import linear_sum_assignment

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

    The assignments are computed on the host, so the costs are copied to it: once, for all layers.

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
    with paddle.no_grad():
        present = _present_classes(mask, count)
        costs = paddle.stack([_costs(answers, mask, points) for answers in outputs])
    costs_on_host = costs.numpy()
    present_on_host = present.numpy()
    loss = paddle.zeros([mask.shape[0]])
    for answers, costs_of_layer in zip(outputs, costs_on_host, strict=True):
        pairs = _assigned(costs_of_layer, present_on_host)
        loss = loss + CLASS_FACTOR * _class_losses(answers.classes, pairs)
        loss = loss + _mask_losses(answers.masks, pairs, mask, count, points)
    return loss * present.any(1).astype("float32")


def _present_classes(mask: paddle.Tensor, count: int) -> paddle.Tensor:
    """Returns which classes an image's pixels have: [B, K] bool."""
    batch = mask.shape[0]
    offsets = paddle.arange(batch).reshape([-1, 1, 1]) * (count + 1)
    numbers = paddle.bincount((mask + offsets).flatten(), minlength=batch * (count + 1))
    return numbers.reshape([batch, count + 1])[:, :count] > 0


def _costs(answers: Answers, mask: paddle.Tensor, points: int) -> paddle.Tensor:
    """Returns the costs of giving each class's mask to each query: [B, Q, K].

    Args:
        mask: [B, H, W], with the index K for pixels without a class.
        points: at so many random points of each image, masks are compared.
    """
    batch, _, width = answers.classes.shape
    places = paddle.rand([batch, points, 2])
    logits = _values_at(answers.masks, places)
    labels, shares = _labels_at(mask, np.arange(batch), places)
    inside = (F.one_hot(labels, width) * shares.unsqueeze(-1)).sum(2)
    targets = inside[:, :, :-1]
    known = _known_shares(labels, shares, width - 1).unsqueeze(1)
    entropy = (F.softplus(logits) * known).sum(2, keepdim=True) - paddle.matmul(logits, targets)
    entropy = entropy / known.sum(2, keepdim=True).clip(min=1)
    found = F.sigmoid(logits) * known
    dice = _dice(
        paddle.matmul(found, targets), found.sum(2, keepdim=True), targets.sum(1, keepdim=True)
    )
    likely = F.softmax(answers.classes, axis=-1)[:, :, :-1]
    return MASK_FACTOR * entropy + DICE_FACTOR * dice - CLASS_FACTOR * likely


def _assigned(costs: np.ndarray, present: np.ndarray) -> Pairs:
    """Returns the pairs with the least sum of costs in each image.

    Args:
        costs: [B, Q, K]. What isn't finite comes last.
        present: [B, K], which classes have a mask.
    """
    worst = np.finfo(np.float32).max
    images = []
    queries = []
    classes = []
    for image, own in enumerate(present):
        [numbers] = own.nonzero()
        table = np.nan_to_num(costs[image][:, numbers], nan=worst, posinf=worst, neginf=worst)
        rows, columns = linear_sum_assignment(table)
        images.append(np.full(len(rows), image))
        queries.append(rows)
        classes.append(numbers[columns])
    return Pairs(
        *(np.concatenate(column).astype(np.int64) for column in (images, queries, classes))
    )


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
        labels, shares = _labels_at(mask, pairs.images, places)
        own = paddle.to_tensor(pairs.classes).reshape([-1, 1, 1])
        targets = ((labels == own).astype("float32") * shares).sum(2)
        known = _known_shares(labels, shares, count)
    logits = _values_at(chosen, places).squeeze(1)
    entropy = (F.softplus(logits) * known - logits * targets).sum(1) / known.sum(1).clip(min=1)
    found = F.sigmoid(logits) * known
    dice = _dice((found * targets).sum(1), found.sum(1), targets.sum(1))
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

    Args:
        chosen: logits of the masks [M, 1, h, w].
        images: [M], the mask's image.
        mask: [B, H, W], with the index ``count`` for pixels without a class.
    """
    masks = chosen.shape[0]
    uncertain = int(UNCERTAIN_SHARE * points)
    candidates = paddle.rand([masks, points * OVERSAMPLING, 2])
    doubt = -_values_at(chosen, candidates).squeeze(1).abs()
    labels, shares = _labels_at(mask, images, candidates)
    # Not 0, of which the sum of four shares falls short.
    unknown = _known_shares(labels, shares, count) < 1e-3
    doubt = paddle.where(unknown, paddle.full_like(doubt, -1e30), doubt)
    _, best = doubt.topk(uncertain, axis=1)
    taken = paddle.take_along_axis(candidates, best.unsqueeze(-1).expand([-1, -1, 2]), axis=1)
    return paddle.concat([taken, paddle.rand([masks, points - uncertain, 2])], axis=1)


def _values_at(maps: paddle.Tensor, places: paddle.Tensor) -> paddle.Tensor:
    """Returns maps at points between their pixels, bilinearly: [N, C, h, w] -> [N, C, P].

    Outside of the map there are zeros.

    Args:
        places: [N, P, 2], the share of the width and of the height.
    """
    grid = (2 * places - 1).unsqueeze(2)
    return F.grid_sample(maps, grid, align_corners=False).squeeze(3)


def _labels_at(
    mask: paddle.Tensor, images: np.ndarray, places: paddle.Tensor
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Returns the labels of the four pixels around each point, and their shares of it.

    So a class's mask needs not to be made: its value at a point is the sum of the shares of pixels
    with the class, as ``_values_at`` would return it.

    Args:
        mask: [B, H, W] int64.
        images: [N], whose mask is read.
        places: [N, P, 2], the share of the width and of the height.

    Returns:
        [N, P, 4] int64, and [N, P, 4]; outside of the image the share is 0.
    """
    height, width = mask.shape[1:]
    left = places[:, :, 0] * width - 0.5
    top = places[:, :, 1] * height - 0.5
    first_column = left.floor()
    first_row = top.floor()
    offsets = paddle.to_tensor(images * (height * width)).unsqueeze(1)
    indices = []
    shares = []
    for down in (0, 1):
        for right in (0, 1):
            row = first_row + down
            column = first_column + right
            share = (1 - (top - row).abs()) * (1 - (left - column).abs())
            within = (row >= 0) & (row < height) & (column >= 0) & (column < width)
            shares.append(share * within.astype("float32"))
            row = row.clip(0, height - 1).astype("int64")
            column = column.clip(0, width - 1).astype("int64")
            indices.append(row * width + column + offsets)
    index = paddle.stack(indices, axis=2)
    labels = paddle.gather(mask.flatten(), index.flatten()).reshape(index.shape)
    return labels, paddle.stack(shares, axis=2)


def _known_shares(labels: paddle.Tensor, shares: paddle.Tensor, count: int) -> paddle.Tensor:
    """Returns how much of each point belongs to pixels with a class: [N, P], from 0 to 1.

    Args:
        labels, shares: what ``_labels_at`` returned.
        count: the index of pixels without a class.
    """
    unknown = ((labels == count).astype("float32") * shares).sum(2)
    return 1 - unknown / shares.sum(2)


def _dice(both: paddle.Tensor, found: paddle.Tensor, targets: paddle.Tensor) -> paddle.Tensor:
    """Returns the Dice loss of the sums of a mask, of the target, and of their product."""
    return 1 - (2 * both + 1) / (found + targets + 1)
