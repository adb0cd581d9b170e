"""A classifier whose logits are cosines, for losses of angles between images and classes."""

import paddle
from paddle import nn
from paddle.nn.initializer import Normal

from models.layers.attention import l2_normalize
from models.layers.linear import float32_matmul


class CosineClassifier(nn.Layer):
    """Compares features with a vector of each class, as NormFace (Wang et al. 2017,
    arXiv:1704.06369).

    A logit is ``scale`` times the cosine of the angle between both. Their lengths have no effect,
    and there is no bias. The logits are float32 under autocast, too: half precision would round
    angles of some degrees away.

    Args:
        in_features: channels of the features.
        num_classes: number of classes.
        scale: factor of the cosines.

    Shape: [B, in_features] -> [B, num_classes].
    """

    def __init__(self, in_features: int, num_classes: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.weight = self.create_parameter(
            [in_features, num_classes], default_initializer=Normal(std=in_features**-0.5)
        )

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.scale * float32_matmul(l2_normalize(x), l2_normalize(self.weight, axis=0))
