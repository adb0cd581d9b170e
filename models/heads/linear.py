"""The linear head of DINOv2 (Oquab et al. 2023, arXiv:2304.07193), which shows how good features
are.
"""

import paddle
from paddle import nn

from models.heads.base import Head, Maps, resized
from models.layers.batch_norm import BatchNorm2D
from models.layers.conv import Conv2D
from models.layers.drop import ChannelDropout
from settings.keys import Rate
from settings.registry import heads


@heads.register("linear")
class LinearHead(Head):
    """One linear layer for each place.

    Maps of several intermediates are resized to the first one's size, and concatenated.

    Args:
        batch_norm: whether batch norm is applied to the features before the linear layer.
        dropout: dropout rate of whole channels before the linear layer.
    """

    last_norm = True

    def __init__(
        self, maps: Maps, num_classes: int, *, batch_norm: bool = True, dropout: Rate = 0.1
    ) -> None:
        super().__init__()
        channels = sum(maps.channels)
        self.norm = BatchNorm2D(channels) if batch_norm else nn.Identity()
        self.dropout = ChannelDropout(dropout)
        self.classifier = Conv2D(channels, num_classes, 1)

    def forward(self, features: list[paddle.Tensor]) -> paddle.Tensor:
        size = features[0].shape[2:]
        x = paddle.concat([resized(feature, size) for feature in features], axis=1)
        return self.classifier(self.dropout(self.norm(x)))
