"""The losses of DINO (arXiv:2104.14294), iBOT (arXiv:2111.07832) and DINOv2 (arXiv:2304.07193).

A teacher's outputs become distributions over prototypes, which a student predicts. Without
balancing, all images would soon have the same distribution: either the teacher's mean output is
subtracted, or Sinkhorn-Knopp makes the prototypes equally frequent in a batch.
"""

import paddle
from paddle.nn import functional as F

from training.losses.softmax import log_softmax
from utils import all_gather_tensor, all_reduce_sum, rank, world_size

# DINO's temperature of the student.
STUDENT_TEMP = 0.1
# As in DINOv2.
_SINKHORN_STEPS = 3
# The smallest normal float32: a divisor that is never 0.
TINY = 1.2e-38
_TINY_FLOAT64 = 2.3e-308
# KoLeo's, in DINOv2.
_EPSILON = 1e-8


def centred(logits: paddle.Tensor, center: paddle.Tensor, temperature: float) -> paddle.Tensor:
    """Returns the teacher's distributions, softmax((logits - center) / temperature): [..., K]."""
    return F.softmax((logits - center) / temperature, axis=-1)


@paddle.no_grad()
def sinkhorn_knopp(
    logits: paddle.Tensor, temperature: float, counted: paddle.Tensor | None = None
) -> paddle.Tensor:
    """Returns the teacher's distributions with equally frequent prototypes (Cuturi 2013,
    arXiv:1306.0895; Caron et al. 2020, arXiv:2006.09882).

    exp(logits / temperature) is divided by turns: for each prototype by its sum over the samples of
    all processes, and for each sample by its sum over the prototypes.

    Args:
        logits: this process's, [N, K] float32.
        temperature: of the softmax.
        counted: [N], 1 for samples that count, 0 for others, whose distributions are 0. None: all
            count.
    """
    # The highest logit of all processes is subtracted, so that the exponential is finite. It
    # cancels out. In float32, others would become 0 with temperatures of 0.01 and less.
    highest = all_gather_tensor(logits.max().reshape([1])).max()
    assigned = ((logits.astype("float64") - highest.astype("float64")) / temperature).exp()
    if counted is not None:
        assigned = assigned * counted.astype("float64").unsqueeze(1)
    for _ in range(_SINKHORN_STEPS):
        assigned = assigned / all_reduce_sum(assigned.sum(0, keepdim=True)).clip(min=_TINY_FLOAT64)
        assigned = assigned / assigned.sum(1, keepdim=True).clip(min=_TINY_FLOAT64)
    return assigned.astype("float32")


def view_loss(student: paddle.Tensor, targets: paddle.Tensor) -> paddle.Tensor:
    """Returns the cross-entropy of each image: [B].

    It is the mean over all pairs of a teacher's view and another view of the student.

    Args:
        student: logits [B, 2 + L, K]; the first two views are the teacher's.
        targets: the teacher's distributions, [B, 2, K].
    """
    logarithms = log_softmax(student / STUDENT_TEMP)
    views = student.shape[1]
    total = -(targets.flip([1]) * logarithms[:, :2]).sum([1, 2])
    if views > 2:
        # Each local view is compared with both targets.
        total = total - (targets.sum(1) * logarithms[:, 2:].sum(1)).sum(1)
    return total / (2 * views - 2)


def patch_loss(
    student: paddle.Tensor, targets: paddle.Tensor, counted: paddle.Tensor
) -> paddle.Tensor:
    """Returns the mean cross-entropy of each image's patches: [B].

    Args:
        student: logits [B, M, K].
        targets: the teacher's distributions, [B, M, K].
        counted: [B, M], 1 for patches that count, else 0.
    """
    losses = -(targets * log_softmax(student / STUDENT_TEMP)).sum(-1)
    return (losses * counted).sum(1) / counted.sum(1).clip(min=1)


def koleo(features: paddle.Tensor) -> paddle.Tensor:
    """Returns the KoLeo regularizer of each image (Sablayrolles et al. 2018, arXiv:1806.03198): [B].

    It is -log of the distance between a feature and the nearest other one of all processes, both of
    length 1. Its gradient spreads the features over the sphere.

    The values are those of this process's images, and their gradients those of the mean over all
    processes: an image may be the nearest one of another process's image.

    Args:
        features: this process's, [B, D].
    """
    if len(features) * world_size() == 1:
        # There is no other feature.
        return paddle.zeros([1])
    own = F.normalize(features.astype("float32"), axis=-1, epsilon=_EPSILON)
    count = len(own)
    first = rank() * count
    everywhere = all_gather_tensor(own.detach())
    # This process's features have gradients among the others, which haven't.
    everywhere = paddle.concat([everywhere[:first], own, everywhere[first + count :]])
    with paddle.no_grad():
        similarities = paddle.matmul(everywhere, everywhere, transpose_y=True)
        # Less than -1, so that the opposite feature is nearer than the feature itself.
        similarities = similarities - 3 * paddle.eye(len(everywhere))
        nearest = similarities.argmax(1)
    # As torch's pairwise distance, which adds the epsilon to the difference.
    differences = everywhere - everywhere[nearest] + _EPSILON
    distances = differences.square().sum(1).sqrt()
    losses = -(distances + _EPSILON).log()
    values = losses[first : first + count]
    others = losses.sum() - values.sum()
    # Adds the gradients of the others' losses, and 0 to the values.
    return values + (others - others.detach()) / count
