"""Losses that bring embeddings of one class together, for the search of similar images.

``arcface`` and ``proxy_anchor`` compare images with a vector of each class. These vectors are the
weights of a classifier of cosines (MODEL.HEAD_COSINE), so both are losses of logits. ``triplet``
compares images with each other. An image's embedding is the input of the classifier.

``proxy_anchor`` and ``triplet`` depend on the whole batch. On several processes that is the batch of
all of them: each process has the others' values without gradients, computes the loss of all, and
takes the gradient for its own values (``of_all_ranks``). The processes' mean gradient is then that
of one process with the whole batch. With TRAIN.ACCUM_ITER the batch is that of one step.
``TrainBatchSampler`` gives all processes batches of one size, the last ones, too.
"""

import math
from typing import Annotated

import paddle
from paddle import nn
from paddle.nn import functional as F

from models.layers.attention import l2_normalize
from models.layers.linear import float32_matmul
from settings.keys import Factor, Positive, between
from settings.registry import losses
from training.losses.softmax import CrossEntropy
from training.losses.targets import Targets
from utils import all_gather_tensor, rank, world_size


@losses.register("arcface", takes="labels")
def arcface(
    targets: Targets, *, arcface_margin: Annotated[float, between(0, 1.5)] = 0.5
) -> nn.Layer:
    """Returns the cross-entropy of cosines, with a margin on the angle to the image's class.

    Args:
        arcface_margin: the margin that is added to the angle, in radians. MODEL.HEAD_COSINE is
            ArcFace's scale, usually 64.
    """
    assert targets.cosine_scale is not None
    criterion = ArcFace(targets.smoothing, targets.weight)
    criterion.scale = targets.cosine_scale
    criterion.margin = arcface_margin
    return criterion


@losses.register("proxy_anchor", takes="labels")
def proxy_anchor(
    targets: Targets,
    *,
    proxy_margin: Annotated[float, between(0, 1)] = 0.1,
    proxy_alpha: Positive = 32.0,
) -> nn.Layer:
    """Returns a loss of the cosines between each class and all images of a batch.

    Args:
        proxy_margin: the margin of the cosines: those of images of the class should be above it,
            those of other images below minus it.
        proxy_alpha: scale of the cosines. The larger it is, the more the hardest images count.
    """
    assert targets.cosine_scale is not None
    return ProxyAnchor(targets.cosine_scale, proxy_margin, proxy_alpha)


@losses.register("triplet", takes="labels")
def triplet(
    targets: Targets,
    *,
    triplet_margin: Annotated[float, between(0, 2)] | None = 0.2,
    triplet_cross_entropy: Factor = 1.0,
) -> nn.Layer:
    """Returns a loss of the distances to each image's hardest positive and negative in the batch.

    Args:
        triplet_margin: by how much the nearest image of another class should be farther away than
            the farthest image of the same class. Embeddings have length 1, so distances are at most
            2. None: softplus instead of a margin.
        triplet_cross_entropy: weight of the classifier's cross-entropy, which is added. 0: the
            classifier isn't trained, so acc1 is meaningless.
    """
    cross_entropy = CrossEntropy(targets.smoothing, targets.weight)
    return Triplet(triplet_margin, triplet_cross_entropy, cross_entropy)


class ArcFace(CrossEntropy):
    """Cross-entropy in which the label's angle is larger by a margin (Deng et al. 2019,
    arXiv:1801.07698).

    Beyond an angle of pi - margin, where a larger angle would mean a smaller loss, the label's
    cosine is less by margin * sin(margin) instead. So it is in the authors' code and in
    pytorch-metric-learning. Label smoothing and class weights are those of ``CrossEntropy``.

    Attributes:
        scale: of the logits over the cosines.
        margin: in radians.
    """

    scale = 64.0
    margin = 0.5

    def forward(self, logits: paddle.Tensor, labels: paddle.Tensor) -> paddle.Tensor:
        """Returns losses [B] of logits [B, K] and labels [B] int64."""
        logits = logits.astype("float32")
        cosine = logits.take_along_axis(labels.unsqueeze(1), axis=1) / self.scale
        # The sine has no finite derivative at angles of 0 and pi. Its gradient is 0 there.
        square = 1 - cosine * cosine
        is_inside = square > 0
        sine = paddle.where(is_inside, square, paddle.ones_like(square)).sqrt()
        sine = sine * is_inside.astype("float32")
        larger = cosine * math.cos(self.margin) - sine * math.sin(self.margin)
        less = cosine - self.margin * math.sin(self.margin)
        with_margin = paddle.where(cosine >= -math.cos(self.margin), larger, less)
        is_label = F.one_hot(labels, logits.shape[1])
        return super().forward(logits + is_label * (with_margin - cosine) * self.scale, labels)


class ProxyAnchor(nn.Layer):
    """Each class pulls the batch's images of it, and pushes the others (Kim et al. 2020,
    arXiv:2003.13911).

    Of each class that the batch has, and each image x of it with cosine s(x), the loss is the mean
    of log(1 + sum exp(-alpha (s(x) - margin))). To it the mean over all classes of
    log(1 + sum exp(alpha (s(x) + margin))) is added, where x are the images of other classes. It is
    one number for the batch, which stands for each of its images.

    Args:
        scale: of the logits over the cosines.
        margin, alpha: of the formula.
    """

    def __init__(self, scale: float, margin: float = 0.1, alpha: float = 32.0) -> None:
        super().__init__()
        self.scale = scale
        self.margin = margin
        self.alpha = alpha

    def forward(self, logits: paddle.Tensor, labels: paddle.Tensor) -> paddle.Tensor:
        """Returns losses [B], all the same, of logits [B, K] and labels [B] int64."""
        count = logits.shape[0]
        cosines = with_other_ranks(logits.astype("float32") / self.scale)
        is_label = F.one_hot(all_gather_tensor(labels), cosines.shape[1]) > 0
        positive = _log_one_plus_sum(-self.alpha * (cosines - self.margin), is_label)
        negative = _log_one_plus_sum(self.alpha * (cosines + self.margin), ~is_label)
        classes = is_label.any(0).astype("float32").sum()
        loss = positive.sum() / classes + negative.mean()
        return of_all_ranks(loss.expand([count]), loss * cosines.shape[0])


def _log_one_plus_sum(exponents: paddle.Tensor, counts: paddle.Tensor) -> paddle.Tensor:
    """Returns log(1 + sum of exp) down each column, of the entries that count: [B, K] -> [K]."""
    excluded = paddle.full_like(exponents, -1e30)
    exponents = paddle.where(counts, exponents, excluded)
    one = paddle.zeros([1, exponents.shape[1]])
    return paddle.logsumexp(paddle.concat([exponents, one]), axis=0)


class Triplet(nn.Layer):
    """The hardest triplet of each image in the batch (Hermans et al. 2017, arXiv:1703.07737).

    An image's loss is max(0, margin + p - n). p is the distance to the farthest image of its class
    in the batch, and n the one to the nearest image of another class. Both are Euclidean distances
    of embeddings that are scaled to length 1. Of equally far images the first is chosen, in the
    order of ranks. An image without one of the two has the loss 0 and counts in the mean. Two equal
    embeddings have the distance 0, whose gradient is 0.

    DATA.SAMPLER per_class puts several images of a class into each batch.

    Args:
        margin: of the formula; None: the loss is softplus(p - n).
        weight: factor on ``cross_entropy``, which is added.
        cross_entropy: the loss of the logits.
    """

    # ``forward`` takes the model's embeddings, too.
    reads_embeddings = True

    def __init__(
        self, margin: float | None, weight: float = 0.0, cross_entropy: nn.Layer | None = None
    ) -> None:
        super().__init__()
        self.margin = margin
        self.weight = weight
        self.cross_entropy = cross_entropy or CrossEntropy()

    def forward(
        self, outputs: tuple[paddle.Tensor, paddle.Tensor], labels: paddle.Tensor
    ) -> paddle.Tensor:
        """Returns losses [B].

        Args:
            outputs: logits [B, K] and embeddings [B, D].
            labels: [B] int64.
        """
        logits, embeddings = outputs
        count = embeddings.shape[0]
        first = rank() * count
        values = self.of_batch(
            with_other_ranks(l2_normalize(embeddings)), all_gather_tensor(labels)
        )
        own = of_all_ranks(values[first : first + count], values.sum())
        # With a weight of 0, too: the classifier has a gradient on every rank, which is 0.
        return own + self.weight * self.cross_entropy(logits, labels)

    def of_batch(self, embeddings: paddle.Tensor, labels: paddle.Tensor) -> paddle.Tensor:
        """Returns the losses of all images, [N], of embeddings [N, D] of length 1."""
        count = embeddings.shape[0]
        with paddle.no_grad():
            cosines = float32_matmul(embeddings, embeddings, transpose_y=True)
            same = labels.unsqueeze(1) == labels.unsqueeze(0)
            others = paddle.eye(count) == 0
            positives = same & others
            negatives = ~same
            far = paddle.full_like(cosines, 3.0)
            farthest = paddle.where(positives, cosines, far).argmin(1)
            nearest = paddle.where(negatives, cosines, -far).argmax(1)
            counts = (positives.any(1) & negatives.any(1)).astype("float32")
        # Of the chosen pairs the distances are computed from differences, which are exact where a
        # cosine near 1 isn't.
        difference = _distance(embeddings, embeddings.index_select(farthest))
        difference = difference - _distance(embeddings, embeddings.index_select(nearest))
        if self.margin is None:
            return F.softplus(difference) * counts
        return F.relu(difference + self.margin) * counts


def reads_embeddings(criterion: nn.Layer) -> bool:
    """Returns whether a criterion takes a model's embeddings besides its logits."""
    return getattr(criterion, "reads_embeddings", False)


def _distance(x: paddle.Tensor, y: paddle.Tensor) -> paddle.Tensor:
    """Returns the Euclidean distance of each pair of rows: [N, D] twice -> [N]."""
    square = (x - y).square().sum(1)
    is_apart = square > 0
    return paddle.where(is_apart, square, paddle.ones_like(square)).sqrt() * is_apart.astype(
        "float32"
    )


def with_other_ranks(own: paddle.Tensor) -> paddle.Tensor:
    """Returns the rows of all processes in the order of ranks, of which this process's own have
    gradients: [B, ...] -> [processes * B, ...].
    """
    if world_size() == 1:
        return own
    rows = all_gather_tensor(own)
    first = rank() * own.shape[0]
    return paddle.concat([rows[:first], own, rows[first + own.shape[0] :]])


def of_all_ranks(own: paddle.Tensor, total: paddle.Tensor) -> paddle.Tensor:
    """Returns this process's losses, whose sum has the gradient of the sum over all processes.

    The gradient is that for the process's own values. The mean over processes of
    (sum of losses / B) then has the gradient of the mean loss of all processes' images.

    Args:
        own: the losses of this process's images, [B].
        total: the sum of the losses of all processes' images, a number.
    """
    if world_size() == 1:
        return own
    gradient = (total - total.detach()) / own.shape[0]
    return own.detach() + gradient
