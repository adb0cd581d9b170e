"""The head of SegFormer (Xie et al. 2021, arXiv:2105.15203)."""

import paddle
from paddle import nn
from paddle.nn.initializer import Normal

from models.heads.base import Head, Maps, resized
from models.layers.activations import relu
from models.layers.batch_norm import BatchNorm2D
from models.layers.conv import Conv2D
from models.layers.conv_norm import ConvNorm
from models.layers.drop import ChannelDropout
from models.layers.init import init_as_torch, init_convolution
from models.layers.scale import add_branch
from settings.keys import Rate, Size
from settings.registry import heads


@heads.register("segformer")
class SegFormerHead(Head):
    """A linear layer for each map, one for all of them, and the classifier.

    The second one reads all maps together, resized to the largest one's size. Resizing is linear,
    too, so each map passes its share of that layer first: this computes the same at a map's own
    size. Only the sum of the results has the largest size.

    Args:
        fused_channels: output channels of the linear layers before the classifier.
        map_batch_norms: whether batch norm and ReLU follow the first linear layers, which then have
            no bias. PaddleViT's and mmsegmentation's heads have them; the authors' head doesn't.
        dropout: dropout rate of whole channels before the linear layer.
    """

    indices = (-4, -3, -2, -1)

    def __init__(
        self,
        maps: Maps,
        num_classes: int,
        *,
        fused_channels: Size = 256,
        map_batch_norms: bool = False,
        dropout: Rate = 0.1,
    ) -> None:
        super().__init__()
        self.projections = nn.LayerList()
        self.fuse = nn.LayerList()
        for channels in maps.channels:
            if map_batch_norms:
                projection = ConvNorm(channels, fused_channels, 1, relu)
            else:
                projection = Conv2D(channels, fused_channels, 1)
            self.projections.append(projection)
            self.fuse.append(Conv2D(fused_channels, fused_channels, 1, bias_attr=False))
        self.norm = BatchNorm2D(fused_channels)
        self.dropout = ChannelDropout(dropout)
        self.classifier = Conv2D(fused_channels, num_classes, 1)
        self.projections.apply(init_convolution if map_batch_norms else init_as_torch)
        self.fuse.apply(init_convolution)
        Normal(std=0.01)(self.classifier.weight)

    def forward(self, features: list[paddle.Tensor]) -> paddle.Tensor:
        # Paddle's tracing takes no keywords of zip.
        fused = [self.fuse[i](self.projections[i](x)) for i, x in enumerate(features)]
        x = fused[0]
        for each in fused[1:]:
            x = add_branch(x, resized(each, x.shape[2:]))
        return self.classifier(self.dropout(self.norm(x, relu)))
