"""UPerNet (Xiao et al. 2018, arXiv:1807.10221): pyramid pooling over the last map, then a feature
pyramid over all.
"""

from collections.abc import Sequence

import paddle
from paddle import nn

from errors import InputError
from models.heads.base import Head, Maps, initialise, resized
from models.layers.activations import gelu, relu
from models.layers.batch_norm import BatchNorm2D
from models.layers.conv import Conv2D, MaxPool2D, adaptive_mean
from models.layers.conv_norm import ConvNorm
from models.layers.drop import ChannelDropout
from models.layers.linear import ChannelNorm
from models.layers.scale import add_branch
from settings.keys import Epsilon, Rate, Size
from settings.registry import heads


class PooledMeans(nn.Layer):
    """The means of a map over a grid of regions, projected, and resized to the map.

    Args:
        in_dim: channels of the map.
        dim: channels of the output.
        side: regions along each side.

    Shape: [B, in_dim, H, W] -> [B, dim, H, W].
    """

    def __init__(self, in_dim: int, dim: int, side: int) -> None:
        super().__init__()
        self.side = side
        self.conv = ConvNorm(in_dim, dim, 1, relu)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        means = adaptive_mean(x, self.side)
        return resized(self.conv(means), x.shape[2:])


class Pyramid(nn.Layer):
    """Makes the four sizes of a feature pyramid from a plain ViT's maps, as BEiT does
    (arXiv:2106.08254): four times, twice, once and half the rows and columns.

    Args:
        dim: channels D of each map.

    Shape: four maps [B, D, H, W] -> [B, D, 4 H, 4 W], [B, D, 2 H, 2 W], [B, D, H, W], [B, D, H / 2,
    W / 2].
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.enlarge4 = nn.Conv2DTranspose(dim, dim, 2, stride=2)
        self.norm = BatchNorm2D(dim)
        self.enlarge2 = nn.Conv2DTranspose(dim, dim, 2, stride=2)
        self.enlarge = nn.Conv2DTranspose(dim, dim, 2, stride=2)
        self.reduce = MaxPool2D(2, stride=2)

    def forward(self, maps: Sequence[paddle.Tensor]) -> list[paddle.Tensor]:
        first = self.enlarge2(self.norm(self.enlarge4(maps[0]), gelu))
        return [first, self.enlarge(maps[1]), maps[2], self.reduce(maps[3])]


class FCNHead(nn.Layer):
    """A small fully convolutional head over one map, for an auxiliary loss (Long et al. 2015,
    arXiv:1411.4038).

    Args:
        in_dim: channels of the map.
        dim: channels before the classifier.
        num_classes: K.
        dropout: the rate at which training leaves out channels before the classifier.

    Shape: [B, in_dim, H, W] -> [B, K, H, W].
    """

    def __init__(self, in_dim: int, dim: int, num_classes: int, dropout: float) -> None:
        super().__init__()
        self.conv = ConvNorm(in_dim, dim, 3, relu)
        self.dropout = ChannelDropout(dropout)
        self.classifier = Conv2D(dim, num_classes, 1)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.classifier(self.dropout(self.conv(x)))


@heads.register("upernet")
class UPerNet(Head):
    """UPerNet, with a fully convolutional auxiliary head on the last map but one.

    Its logits have the size of the first map. If all maps have one size, as those of a plain ViT,
    there have to be four, and ``Pyramid`` gives them the sizes of stages.

    Args:
        pyramid_channels: channels of the feature pyramid's maps.
        pool_scales: the grids of the pyramid pooling: for each number n, the last map is averaged
            over n x n regions.
        map_norms: whether each map is first normalised by a layer norm of its own, as Swin's and
            ConvNeXt's need.
        map_norm_eps: epsilon of the layer norms that MAP_NORMS adds.
        auxiliary: whether the head has auxiliary heads for training. METHOD.AUX_WEIGHT is the
            weight of their losses.
        auxiliary_channels: number of channels of the auxiliary head.
        dropout: dropout rate of whole channels before the linear layer.

    Raises:
        InputError: maps of one size that aren't four.
    """

    indices = None

    def __init__(
        self,
        maps: Maps,
        num_classes: int,
        *,
        pyramid_channels: Size = 512,
        pool_scales: Sequence[Size] = (1, 2, 3, 6),
        map_norms: bool = True,
        map_norm_eps: Epsilon = 1e-5,
        auxiliary: bool = True,
        auxiliary_channels: Size = 256,
        dropout: Rate = 0.1,
    ) -> None:
        super().__init__()
        dim = pyramid_channels
        self.norms = nn.LayerList(
            ChannelNorm(channels, epsilon=map_norm_eps) if map_norms else nn.Identity()
            for channels in maps.channels
        )
        self.pyramid = None
        if len(set(maps.reductions)) == 1 and len(maps.reductions) > 1:
            self.pyramid = _pyramid_of(maps)
        *others, last = maps.channels
        self.pooled = nn.LayerList(PooledMeans(last, dim, side) for side in pool_scales)
        self.bottleneck = ConvNorm(last + len(pool_scales) * dim, dim, 3, relu)
        self.lateral_convs = nn.LayerList(ConvNorm(channels, dim, 1, relu) for channels in others)
        self.fpn_convs = nn.LayerList(ConvNorm(dim, dim, 3, relu) for _ in others)
        self.fpn_bottleneck = ConvNorm(len(maps.channels) * dim, dim, 3, relu)
        self.dropout = ChannelDropout(dropout)
        self.classifier = Conv2D(dim, num_classes, 1)
        self.auxiliary = None
        if auxiliary:
            in_dim = maps.channels[-2:][0]
            self.auxiliary = FCNHead(in_dim, auxiliary_channels, num_classes, dropout)
        initialise(self)

    def forward(self, features: list[paddle.Tensor]) -> paddle.Tensor | list[paddle.Tensor]:
        maps = self._normed(features)
        if self.pyramid is not None:
            maps = self.pyramid(maps)
        logits = self.classifier(self.dropout(self._fused(maps)))
        if self.training and self.auxiliary is not None:
            return [logits, self.auxiliary(maps[-2:][0])]
        return logits

    def _normed(self, features: list[paddle.Tensor]) -> list[paddle.Tensor]:
        # Paddle can't trace this as a comprehension.
        maps = []
        for i in range(len(features)):
            maps.append(self.norms[i](features[i]))
        return maps

    def _fused(self, maps: list[paddle.Tensor]) -> paddle.Tensor:
        """Returns the pyramid's maps, joined: [B, pyramid_channels, H, W] of the first map."""
        *others, last = maps
        pooled = [last]
        for layer in self.pooled:
            pooled.append(layer(last))
        x = self.bottleneck(paddle.concat(pooled, axis=1))
        # From the last map upwards: each map is added to what the next one became.
        outputs = [x]
        for i in reversed(range(len(others))):
            x = add_branch(self.lateral_convs[i](others[i]), resized(x, others[i].shape[2:]))
            outputs.append(self.fpn_convs[i](x))
        size = outputs[-1].shape[2:]
        joined = [resized(output, size) for output in outputs[::-1]]
        return self.fpn_bottleneck(paddle.concat(joined, axis=1))

    def classifier_names(self) -> tuple[str, ...]:
        if self.auxiliary is None:
            return ("classifier",)
        return ("classifier", "auxiliary.classifier")


def _pyramid_of(maps: Maps) -> Pyramid:
    if len(maps.channels) != 4:
        raise InputError(
            f"HEAD.INDICES names {len(maps.channels)} maps of one size, but HEAD.NAME upernet needs"
            " four of them; give four numbers"
        )
    return Pyramid(maps.channels[0])
