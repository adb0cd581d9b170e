"""Distillation: what a student learns from a teacher, beside its targets."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
from paddle import nn

from errors import InputError
from training.feature_distillation import FEATURE, feature_distance
from training.losses.softmax import label_losses, log_softmax


def reads_tokens(criterion: nn.Layer) -> bool:
    """Returns whether a criterion takes what the model says of its patches, too."""
    return getattr(criterion, "reads_tokens", False)


class Teacher(nn.Layer):
    """A trained model whose logits (or map) a student learns from: in eval mode, without gradients.

    Args:
        model: frozen here.
        student_mean, student_std: what the student's images are normalised by; one value per
            channel, or one for all.
        mean, std: what the teacher's are.
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
        # In a tuple: a sublayer would follow the criterion into train mode, and lend it its
        # parameters.
        self._model = (model,)
        scale = np.divide(student_std, std)
        shift = np.subtract(student_mean, mean) / std
        self.same = bool((scale == 1).all() and (shift == 0).all())
        self.scale = paddle.to_tensor(scale, dtype="float32").reshape([1, -1, 1, 1])
        self.shift = paddle.to_tensor(shift, dtype="float32").reshape([1, -1, 1, 1])

    @paddle.no_grad()
    def forward(self, images: paddle.Tensor) -> paddle.Tensor:
        """Returns logits [B, K] of the student's images [B, C, S, S]."""
        return self._model[0](images if self.same else images * self.scale + self.shift)


class TrainingLoss(nn.Layer):
    """A criterion, with or without distillation (DeiT: Touvron et al. 2021, arXiv:2012.12877).

    The loss is (1 - alpha) * base + alpha * distillation. "hard": the cross-entropy with the
    teacher's choice. "soft": the divergence KL(teacher || student) at temperature tau, times tau^2.
    It is divided by the number of classes as in DeiT's program (its paper doesn't). "feature":
    ``feature_distance``. Smoothing and class weights are the base's alone.

    Args:
        base: of the model's logits and the targets.
        teacher: images -> logits [B, K], or a map [B, C, H, W].
        kind: "hard", "soft" or "feature", with a teacher.
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
            images: [B, C, S, S], what the student saw.
            outputs: logits [B, K] that serve both losses, or (logits, logits of the distillation
                token, or the projected map). For a base that reads tokens: what it takes; the first
                of them is distilled.
            targets: what ``base`` takes.

        Raises:
            InputError: the teacher has other classes than the student.
        """
        if reads_tokens(self.base):
            logits = outputs
            distilled = outputs[0]
        else:
            logits, distilled = outputs if isinstance(outputs, list | tuple) else (outputs, outputs)
        loss = self.base(logits, targets)
        if self.teacher is None:
            return loss
        return (1 - self.alpha) * loss + self.alpha * self._distil(self.teacher(images), distilled)

    def _distil(self, wanted: paddle.Tensor, logits: paddle.Tensor) -> paddle.Tensor:
        if self.kind == FEATURE:
            return feature_distance(logits, wanted)
        wanted = wanted.astype("float32")
        classes = logits.shape[-1]
        if wanted.shape[-1] != classes:
            raise InputError(
                f"the teacher has {wanted.shape[-1]} classes, expected the student's {classes}"
            )
        logits = logits.astype("float32")
        if self.kind == "hard":
            return label_losses(logits, wanted.argmax(axis=-1))
        wanted = log_softmax(wanted / self.tau)
        found = log_softmax(logits / self.tau)
        return (wanted.exp() * (wanted - found)).sum(axis=-1) * (self.tau**2 / classes)
