"""SETR's three heads (Zheng et al. 2021, arXiv:2012.15840), on the maps of a plain ViT.

Their layers follow PaddleViT, which has the sizes of mmsegmentation's.
"""

import paddle
from paddle import nn

from errors import InputError
from models.heads.base import Head, Maps, initialise, resized
from models.layers.activations import relu
from models.layers.conv import Conv2D
from models.layers.conv_norm import ConvNorm
from models.layers.linear import ChannelNorm
from settings.keys import Size
from settings.registry import heads


class UpHead(nn.Layer):
    """A layer norm, convolutions with batch norm and ReLU, and a linear layer for each place.

    Args:
        in_dim: channels of the map.
        dim: number of channels of the convolutions.
        num_classes: K.
        kernel_size: side of the convolutions' kernels.
        factors: for each convolution, how many times as many rows and columns its output gets.

    Shape: [B, in_dim, H, W] -> [B, K, f H, f W]; f is the product of all factors.
    """

    def __init__(
        self, in_dim: int, dim: int, num_classes: int, kernel_size: int, factors: tuple[int, ...]
    ) -> None:
        super().__init__()
        self.factors = factors
        self.norm = ChannelNorm(in_dim, epsilon=1e-6)
        widths = [in_dim] + [dim] * (len(factors) - 1)
        self.convs = nn.LayerList(ConvNorm(width, dim, kernel_size, relu) for width in widths)
        self.classifier = Conv2D(dim, num_classes, 1)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.norm(x)
        # Paddle's tracing takes no keywords of zip.
        for i, factor in enumerate(self.factors):
            x = enlarged(self.convs[i](x), factor)
        return self.classifier(x)


def enlarged(x: paddle.Tensor, factor: int) -> paddle.Tensor:
    """Returns maps of so many times as many rows and columns: [B, D, H, W] -> [B, D, f H, f W]."""
    height, width = x.shape[2:]
    return resized(x, [factor * height, factor * width])


class _Up(Head):
    """An ``UpHead`` on the last map, and auxiliary ones on others.

    Args:
        maps, num_classes: see ``Head``.
        dim, kernel_size, factors: those of the head on the last map.
        auxiliary_factors: those of the auxiliary heads.
        auxiliary_maps: on how many of the maps these are, from the first on.
    """

    indices = None

    def __init__(
        self,
        maps: Maps,
        num_classes: int,
        dim: int,
        kernel_size: int,
        factors: tuple[int, ...],
        auxiliary_factors: tuple[int, ...],
        auxiliary_maps: int,
    ) -> None:
        super().__init__()
        self.main = UpHead(maps.channels[-1], dim, num_classes, kernel_size, factors)
        self.auxiliary = nn.LayerList(
            UpHead(in_dim, dim, num_classes, kernel_size, auxiliary_factors)
            for in_dim in maps.channels[:auxiliary_maps]
        )
        initialise(self)

    def forward(self, features: list[paddle.Tensor]) -> paddle.Tensor | list[paddle.Tensor]:
        logits = self.main(features[-1])
        if not self.training:
            return logits
        # There may be fewer auxiliary heads than maps.
        return [logits, *[head(features[i]) for i, head in enumerate(self.auxiliary)]]

    def classifier_names(self) -> tuple[str, ...]:
        others = [f"auxiliary.{i}.classifier" for i in range(len(self.auxiliary))]
        return ("main.classifier", *others)


@heads.register("setr_naive")
class SETRNaive(_Up):
    """SETR-Naïve: a convolution of 1 x 1 and a linear layer on the last map. Each of the other maps
    has an auxiliary head of the same kind.

    Args:
        decoder_channels: number of channels of the convolutions.
        auxiliary: whether the head has auxiliary heads for training. METHOD.AUX_WEIGHT is the
            weight of their losses.
    """

    def __init__(
        self,
        maps: Maps,
        num_classes: int,
        *,
        decoder_channels: Size = 256,
        auxiliary: bool = True,
    ) -> None:
        auxiliary_maps = len(maps.channels) - 1 if auxiliary else 0
        super().__init__(maps, num_classes, decoder_channels, 1, (1,), (1,), auxiliary_maps)


@heads.register("setr_pup")
class SETRPUP(_Up):
    """SETR-PUP: four convolutions of 3 x 3 on the last map, with an enlargement between each two.
    Each map has an auxiliary head of one such convolution, whose output is enlarged four times.

    Args:
        decoder_channels: number of channels of the convolutions.
        auxiliary: whether the head has auxiliary heads for training. METHOD.AUX_WEIGHT is the
            weight of their losses.
    """

    def __init__(
        self,
        maps: Maps,
        num_classes: int,
        *,
        decoder_channels: Size = 256,
        auxiliary: bool = True,
    ) -> None:
        auxiliary_maps = len(maps.channels) if auxiliary else 0
        super().__init__(maps, num_classes, decoder_channels, 3, (2, 2, 2, 1), (4,), auxiliary_maps)


@heads.register("setr_mla")
class SETRMLA(Head):
    """SETR-MLA: the maps are added up from the last to the first. Each sum has its own convolutions,
    whose outputs are enlarged four times and joined. An auxiliary head is a linear layer on each sum.

    Args:
        decoder_channels: number of channels of the convolutions.
        mla_channels: number of channels of each map before they are joined.
        auxiliary: whether the head has auxiliary heads for training. METHOD.AUX_WEIGHT is the
            weight of their losses.

    Raises:
        InputError: maps of several sizes.
    """

    indices = None

    def __init__(
        self,
        maps: Maps,
        num_classes: int,
        *,
        decoder_channels: Size = 256,
        mla_channels: Size = 128,
        auxiliary: bool = True,
    ) -> None:
        super().__init__()
        if len(set(maps.reductions)) > 1:
            raise InputError(
                "HEAD.NAME setr_mla adds maps of one size, found one position per"
                f" {maps.reductions} pixels; use a plain ViT"
            )
        dim = decoder_channels
        count = len(maps.channels)
        self.norms = nn.LayerList(ChannelNorm(in_dim, epsilon=1e-6) for in_dim in maps.channels)
        self.lateral_convs = nn.LayerList(
            ConvNorm(in_dim, dim, 1, relu) for in_dim in maps.channels
        )
        self.sum_convs = nn.LayerList(ConvNorm(dim, dim, 3, relu) for _ in range(count))
        self.branches = nn.LayerList(
            nn.Sequential(
                ConvNorm(dim, mla_channels, 3, relu), ConvNorm(mla_channels, mla_channels, 3, relu)
            )
            for _ in range(count)
        )
        self.classifier = Conv2D(count * mla_channels, num_classes, 3, padding=1)
        self.auxiliary = nn.LayerList(
            Conv2D(dim, num_classes, 1, bias_attr=False) for _ in range(count if auxiliary else 0)
        )
        initialise(self)

    def forward(self, features: list[paddle.Tensor]) -> paddle.Tensor | list[paddle.Tensor]:
        sums = self._sums(features)
        height, width = sums[0].shape[2:]
        joined = [
            resized(self.branches[i](x), [4 * height, 4 * width], align_corners=True)
            for i, x in enumerate(sums)
        ]
        logits = self.classifier(paddle.concat(joined, axis=1))
        if not self.training:
            return logits
        return [logits, *[head(sums[i]) for i, head in enumerate(self.auxiliary)]]

    def _sums(self, features: list[paddle.Tensor]) -> list[paddle.Tensor]:
        """Returns for each map what it and all deeper ones add up to, after a convolution."""
        total = None
        sums = []
        for i in reversed(range(len(features))):
            x = self.lateral_convs[i](self.norms[i](features[i]))
            total = x if total is None else total + x
            sums.append(self.sum_convs[i](total))
        return sums[::-1]

    def classifier_names(self) -> tuple[str, ...]:
        return ("classifier", *(f"auxiliary.{i}" for i in range(len(self.auxiliary))))
