"""Feature distillation ("FD", Wei et al. 2022, arXiv:2205.14141).

A student's last feature map learns to be its teacher's. The teacher's features are whitened by a
layer norm without weights, so that their scale, which differs between models, has no effect. A
Linear projects the student's channels to the teacher's. The distance is a smooth L1 with beta 2.
"""

from typing import Any

import paddle
from paddle import nn
from paddle.nn import functional as F

from errors import InputError
from models.base import ImageModel
from models.layers import Linear
from models.layers.resize import interpolate
from weights.adapters import PROJECTION

# The value of TRAIN.DISTILLATION_TYPE that means this distillation.
FEATURE = "feature"
# The smooth L1 loss is linear from this difference on.
BETA = 2.0


class LastMap(nn.Layer):
    """Maps images to the last feature map of a model, [B, C, h, w]."""

    def __init__(self, model: ImageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: paddle.Tensor) -> paddle.Tensor:
        [last] = self.model.forward_intermediates(images, 1, intermediates_only=True)
        return last


class _Student:
    """An ``ImageModel`` that returns its last map besides the logits, in training.

    The outputs are logits [B, K] and the projected map [B, h, w, channels].
    """

    def forward(self: Any, x: paddle.Tensor) -> Any:
        if not self.training:
            # Not super(), which Paddle 2.6 can't trace.
            return ImageModel.forward(self, x)
        features, [last] = self.forward_intermediates(x, 1)
        return self.forward_head(features), getattr(self, PROJECTION)(last.transpose([0, 2, 3, 1]))


def make_student(model: ImageModel, channels: int) -> None:
    """Adds the projection to the teacher's ``channels`` to a model, in place.

    Call it before ``paddle.DataParallel``. Weight files don't hold the projection.
    """
    kind = type(model)
    setattr(model, PROJECTION, Linear(model.feature_info[-1]["num_chs"], channels))
    model.__class__ = type(kind.__name__, (_Student, kind), {})


def feature_distance(student: paddle.Tensor, teacher: paddle.Tensor) -> paddle.Tensor:
    """Returns the mean smooth L1 distance of each sample, [B] float32.

    Args:
        student: the projected map, [B, h, w, C].
        teacher: a map [B, C, H, W]. It is resized to h x w (bilinear), then whitened.
    """
    teacher = teacher.astype("float32")
    size = student.shape[1:3]
    if teacher.shape[2:] != size:
        teacher = interpolate(teacher, size)
    teacher = teacher.transpose([0, 2, 3, 1])
    whitened = F.layer_norm(teacher, teacher.shape[-1:])
    distances = F.smooth_l1_loss(student.astype("float32"), whitened, reduction="none", delta=BETA)
    # Paddle's loss is beta times PyTorch's.
    return distances.mean(axis=[1, 2, 3]) / BETA


@paddle.no_grad()
def check_alignment(student: ImageModel, teacher: ImageModel) -> None:
    """Checks that both maps have more than one place, or that neither has.

    Both models are in eval mode afterwards, so that no statistics change.

    Raises:
        InputError: one map is 1 x 1 and the other isn't.
    """
    images: Any = paddle.zeros([1, student.in_channels, *student.image_size])
    for model in (student, teacher):
        model.eval()
    sizes = [list(LastMap(model)(images).shape[2:]) for model in (student, teacher)]
    if [1, 1] in sizes and sizes[0] != sizes[1]:
        raise InputError(
            f"DISTILLATION_TYPE is feature, but the student's last map is {sizes[0]}, the teacher's"
            f" {sizes[1]}: their positions can't be aligned; use hard or soft"
        )
