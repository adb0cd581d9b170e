"""Criteria: logits [B, K] and labels [B] (int) in, one loss per sample [B] (float32) out."""

import paddle
from paddle import nn
from paddle.nn import functional as F
from yacs.config import CfgNode


class CrossEntropy(nn.Layer):
    """Cross-entropy with label smoothing s: the target is 1 - s on the label plus s / K everywhere.

    Szegedy et al. 2015 (arXiv:1512.00567), section 7; timm's ``LabelSmoothingCrossEntropy``.

    Per sample, not averaged: who reports divides once, by the number of samples.
    """

    def __init__(self, smoothing: float = 0.0) -> None:
        super().__init__()
        self.smoothing = smoothing

    def forward(self, logits: paddle.Tensor, labels: paddle.Tensor) -> paddle.Tensor:
        logits = logits.astype("float32")
        loss = F.cross_entropy(logits, labels, reduction="none").reshape([-1])
        if self.smoothing:
            uniform = paddle.logsumexp(logits, axis=-1) - logits.mean(axis=-1)
            loss = (1 - self.smoothing) * loss + self.smoothing * uniform
        return loss


def build_criterion(config: CfgNode) -> CrossEntropy:
    """Returns the training criterion of a configuration."""
    return CrossEntropy(config.TRAIN.SMOOTHING)
