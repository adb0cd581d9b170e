"""Knowledge distillation: a loss between a student's and a teacher's outputs."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
from paddle import nn

from errors import InputError
from training.feature_distillation import FEATURE, feature_distance
from training.losses.metric import reads_embeddings
from training.losses.softmax import label_losses, log_softmax


def reads_tokens(criterion: nn.Layer) -> bool:
    """Returns whether a criterion takes a model's outputs for patches, too."""
    return getattr(criterion, "reads_tokens", False)


class Teacher(nn.Layer):
    """A trained model whose logits or feature map a student learns from.

    It is in eval mode and computes no gradients.

    Args:
        model: its parameters are frozen here.
        student_mean, student_std: normalisation of the student's images, one value per channel or
            one for all.
        mean, std: normalisation of the teacher's images.
    """

    def __init__(
        self,
        model: nn.Layer,
        student_mean: Sequence[float],
        student_std: Sequence[float],
        mean: Sequence[float],
        std: Sequence[float],
    ) -> None:
        super().__init__()
        model.eval()
        for parameter in model.parameters():
            parameter.stop_gradient = True
        # In a tuple, because a sublayer would follow the criterion into train mode, and its
        # parameters would be the criterion's.
        self._model = (model,)
        scale = np.divide(student_std, std)
        shift = np.subtract(student_mean, mean) / std
        self.same_normalization = bool((scale == 1).all() and (shift == 0).all())
        self.scale = paddle.to_tensor(scale, dtype="float32").reshape([1, -1, 1, 1])
        self.shift = paddle.to_tensor(shift, dtype="float32").reshape([1, -1, 1, 1])

    @paddle.no_grad()
    def forward(self, images: paddle.Tensor) -> paddle.Tensor:
        """Returns logits [B, K], or a map [B, C, H, W], of the student's images [B, C, S, S]."""
        if not self.same_normalization:
            images = images * self.scale + self.shift
        return self._model[0](images)


class TrainingLoss(nn.Layer):
    """A criterion, with or without distillation (DeiT: Touvron et al. 2021, arXiv:2012.12877).

    The loss is (1 - alpha) * base + alpha * distillation. The distillation is one of these:

    - "hard": the cross-entropy with the class that the teacher predicts.
    - "soft": the divergence KL(teacher || student) at temperature tau, times tau^2, over the number
      of classes. DeiT's code divides by that number; its paper doesn't.
    - "feature": ``feature_distance``.

    Label smoothing and class weights apply to the base alone.

    Args:
        base: the loss of the model's logits and the targets.
        teacher: maps images to logits [B, K] or a map [B, C, H, W]; None: no distillation.
        kind: "hard", "soft" or "feature", with a teacher.
        alpha: weight of the distillation.
        tau: temperature of "soft".
    """

    def __init__(
        self,
        base: nn.Layer,
        teacher: nn.Layer | None = None,
        kind: str | None = None,
        alpha: float = 0.5,
        tau: float = 1.0,
    ) -> None:
        super().__init__()
        self.base = base
        self.teacher = teacher
        self.kind = kind
        self.alpha = alpha
        self.tau = tau

    def forward(
        self,
        images: paddle.Tensor,
        outputs: Any,
        targets: paddle.Tensor,
    ) -> paddle.Tensor:
        """Returns the loss of each sample, [B].

        Args:
            images: the student's, [B, C, S, S].
            outputs: logits [B, K] for both losses, or a pair: logits, and what is distilled (the
                logits of the distillation token, or the projected map). A base that reads tokens
                or embeddings gets all outputs, and the first of them is distilled.
            targets: as ``base`` takes them.

        Raises:
            InputError: the teacher has another number of classes than the student.
        """
        if reads_tokens(self.base) or reads_embeddings(self.base):
            base_outputs = outputs
            distilled = outputs[0]
        elif isinstance(outputs, list | tuple):
            base_outputs, distilled = outputs
        else:
            base_outputs = distilled = outputs
        loss = self.base(base_outputs, targets)
        if self.teacher is None:
            return loss
        distillation = self._distillation_loss(self.teacher(images), distilled)
        return (1 - self.alpha) * loss + self.alpha * distillation

    def _distillation_loss(self, teacher: paddle.Tensor, student: paddle.Tensor) -> paddle.Tensor:
        if self.kind == FEATURE:
            return feature_distance(student, teacher)
        teacher = teacher.astype("float32")
        classes = student.shape[-1]
        if teacher.shape[-1] != classes:
            raise InputError(
                f"the teacher has {teacher.shape[-1]} classes, expected the student's {classes}"
            )
        student = student.astype("float32")
        if self.kind == "hard":
            return label_losses(student, teacher.argmax(axis=-1))
        teacher = log_softmax(teacher / self.tau)
        student = log_softmax(student / self.tau)
        divergence = (teacher.exp() * (teacher - student)).sum(axis=-1)
        return divergence * (self.tau**2 / classes)
