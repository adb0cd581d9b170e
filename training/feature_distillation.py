"""Feature distillation: a student's last map learns to be its teacher's (Wei et al. 2022,
arXiv:2205.14141, "FD").

The teacher's features are whitened: a layer norm without weights. So their scale, which differs
from model to model, plays no part. A Linear takes the student's channels to the teacher's. Their
distance is a smooth L1 with beta 2.
"""

from typing import Any

import paddle
from paddle import nn
from paddle.nn import functional as F

from errors import InputError
from models.base import ImageModel
from models.layers import Linear
from weights.adapters import PROJECTION

FEATURE = "feature"  # of TRAIN.DISTILLATION_TYPE
BETA = 2.0  # from this difference on the loss is linear


class LastMap(nn.Layer):
    """Images -> the last intermediate of a model, [B, C, h, w]."""

    def __init__(self, model: ImageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: paddle.Tensor) -> paddle.Tensor:
        [last] = self.model.forward_intermediates(images, 1, intermediates_only=True)
        return last


class _Student:
    """An ``ImageModel`` that in training gives (logits [B, K], its last map, projected: [B, h, w,
    channels]).
    """

    def forward(self: Any, x: paddle.Tensor) -> Any:
        if not self.training:
            return ImageModel.forward(self, x)  # (Paddle 2.6 traces no super())
        features, [last] = self.forward_intermediates(x, 1)
        return self.forward_head(features), getattr(self, PROJECTION)(last.transpose([0, 2, 3, 1]))


def make_student(model: ImageModel, channels: int) -> None:
    """Lets training project the last map of ``model`` to the teacher's channels, in place; no
    weight file holds the projection. It comes before ``paddle.DataParallel``.
    """
    kind = type(model)
    setattr(model, PROJECTION, Linear(model.feature_info[-1]["num_chs"], channels))
    model.__class__ = type(kind.__name__, (_Student, kind), {})


def feature_distance(found: paddle.Tensor, wanted: paddle.Tensor) -> paddle.Tensor:
    """Returns the mean smooth L1 distance of each sample, [B] float32.

    Args:
        found: the student's, projected: [B, h, w, C].
        wanted: the teacher's: [B, C, H, W]; resized to h x w (bilinear), then whitened.
    """
    wanted = wanted.astype("float32")
    size = found.shape[1:3]
    if wanted.shape[2:] != size:
        wanted = F.interpolate(wanted, size=size, mode="bilinear")
    wanted = wanted.transpose([0, 2, 3, 1])
    white = F.layer_norm(wanted, wanted.shape[-1:])
    each = F.smooth_l1_loss(found.astype("float32"), white, reduction="none", delta=BETA)
    return each.mean(axis=[1, 2, 3]) / BETA  # Paddle's loss is beta times PyTorch's


@paddle.no_grad()
def check_alignment(student: ImageModel, teacher: ImageModel) -> None:
    """Raises InputError where one model's map is a single place and the other's isn't; both are in
    eval mode then.
    """
    images: Any = paddle.zeros([1, student.in_channels, *student.image_size])
    for model in (student, teacher):
        model.eval()  # no statistics change
    sizes = [list(LastMap(model)(images).shape[2:]) for model in (student, teacher)]
    if [1, 1] in sizes and sizes[0] != sizes[1]:
        raise InputError(
            f"DISTILLATION_TYPE is feature, but the student's last map is {sizes[0]}, the teacher's {sizes[1]}: one"
            " place can't be aligned with many; take hard or soft"
        )
