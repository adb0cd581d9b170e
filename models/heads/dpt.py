"""DPT (Ranftl et al. 2021, arXiv:2103.13413): a plain ViT's tokens become maps of four sizes, which
are fused from the smallest to the largest.
"""

from typing import Any, Literal

import paddle
from paddle import nn

from errors import InputError
from models.heads.base import Head, Maps, initialise, resized
from models.layers.activations import gelu, relu
from models.layers.batch_norm import BatchNorm2D
from models.layers.conv import Conv2D
from models.layers.conv_norm import ConvNorm
from models.layers.drop import ChannelDropout
from models.layers.layout import channels_first, channels_last
from models.layers.linear import Linear
from settings.keys import Rate, Size
from settings.registry import heads


def doubled(maps: paddle.Tensor) -> paddle.Tensor:
    """Returns maps of twice the rows and columns: [B, D, H, W] -> [B, D, 2 H, 2 W].

    The middles of the corners' places coincide with those of the new ones.
    """
    height, width = maps.shape[2:]
    return resized(maps, [2 * height, 2 * width], align_corners=True)


class Reassemble(nn.Layer):
    """Makes a map of another size from a plain ViT's map and its class token.

    Args:
        in_dim: channels C of the tokens.
        dim: channels D of the output.
        scale: the output's rows over the input's: 4, 2, 1 or 0.5.
        readout: how the class token is used (``DPT``).

    Shape: ([B, C, H, W], [B, prefix, C]) -> [B, D, scale H, scale W], rounded up.
    """

    def __init__(self, in_dim: int, dim: int, scale: float, readout: str) -> None:
        super().__init__()
        self.readout = readout
        self.token = Linear(2 * in_dim, in_dim) if readout == "project" else None
        self.project = Conv2D(in_dim, dim, 1)
        self.resize: nn.Layer = nn.Identity()
        if scale > 1:
            side = int(scale)
            self.resize = nn.Conv2DTranspose(dim, dim, side, stride=side)
        elif scale < 1:
            self.resize = Conv2D(dim, dim, 3, stride=int(1 / scale), padding=1)

    def forward(self, x: paddle.Tensor, prefix: paddle.Tensor | None) -> paddle.Tensor:
        if self.readout != "ignore" and prefix is not None:
            # A distilled model has two tokens, whose sum is read.
            token = prefix.sum(axis=1)
            if self.token is None:
                x = x + token.unsqueeze([-1, -2])
            else:
                x = channels_first(gelu(self.token(_beside(channels_last(x), token))))
        return self.resize(self.project(x))


def _beside(x: paddle.Tensor, token: paddle.Tensor) -> paddle.Tensor:
    """Returns a token [B, C] beside each place of maps [B, H, W, C]: [B, H, W, 2 C]."""
    height, width = x.shape[1:3]
    return paddle.concat([x, token.unsqueeze([1, 2]).expand([-1, height, width, -1])], axis=-1)


class Residual(nn.Layer):
    """x + two convolutions of 3 x 3, each after a ReLU.

    Args:
        dim: channels D.
        batch_norm: whether a batch norm follows each convolution, which has no bias then.

    Shape: [B, D, H, W] -> the same.
    """

    def __init__(self, dim: int, batch_norm: bool) -> None:
        super().__init__()
        bias = False if batch_norm else None
        self.conv1 = Conv2D(dim, dim, 3, padding=1, bias_attr=bias)
        self.conv2 = Conv2D(dim, dim, 3, padding=1, bias_attr=bias)
        self.bn1 = BatchNorm2D(dim) if batch_norm else nn.Identity()
        self.bn2 = BatchNorm2D(dim) if batch_norm else nn.Identity()

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        branch = self.bn1(self.conv1(relu(x)))
        return x + self.bn2(self.conv2(relu(branch)))


class Fusion(nn.Layer):
    """Adds a map to what the deeper maps became, and doubles the sides.

    Args:
        dim: channels D.
        batch_norm: that of ``Residual``.
        deepest: whether there is no deeper map.

    Shape: [B, D, H, W], and of deeper maps [B, D, H', W'] -> [B, D, 2 H', 2 W'].
    """

    def __init__(self, dim: int, batch_norm: bool, deepest: bool) -> None:
        super().__init__()
        self.residual1 = None if deepest else Residual(dim, batch_norm)
        self.residual2 = Residual(dim, batch_norm)
        self.project = Conv2D(dim, dim, 1)

    def forward(self, x: paddle.Tensor, deeper: paddle.Tensor | None) -> paddle.Tensor:
        if self.residual1 is not None and deeper is not None:
            # A map with odd sides is smaller than the doubled deeper one.
            x = deeper + self.residual1(resized(x, deeper.shape[2:]))
        return self.project(doubled(self.residual2(x)))


class Classifier(nn.Layer):
    """A convolution of 3 x 3 with batch norm and ReLU, dropout, and a linear layer for each place.

    Shape: [B, dim, H, W] -> [B, num_classes, H, W].
    """

    def __init__(self, dim: int, num_classes: int, dropout: float) -> None:
        super().__init__()
        self.conv = ConvNorm(dim, dim, 3, relu)
        self.dropout = ChannelDropout(dropout)
        self.classifier = Conv2D(dim, num_classes, 1)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.classifier(self.dropout(self.conv(x)))


@heads.register("dpt")
class DPT(Head):
    """DPT's head for segmentation, on four maps of a plain ViT.

    Args:
        readout: how the class token is used. "ignore": not at all; "add": it is added to each patch
            token; "project": it is concatenated with each patch token, and a linear layer projects
            the result.
        neck_channels: channels of each of the four maps after they are resized.
        fusion_channels: number of channels of the fused maps.
        fusion_batch_norm: whether the convolutions of the fusion have batch norm.
        auxiliary: whether the head has auxiliary heads for training. METHOD.AUX_WEIGHT is the
            weight of their losses.
        dropout: dropout rate of whole channels before the linear layer.

    Raises:
        InputError: the encoder has stages or no class token, or there aren't four maps.
    """

    indices = None
    reads_prefix = True

    def __init__(
        self,
        maps: Maps,
        num_classes: int,
        *,
        readout: Literal["ignore", "add", "project"] = "project",
        neck_channels: tuple[Size, Size, Size, Size] = (256, 512, 1024, 1024),
        fusion_channels: Size = 256,
        fusion_batch_norm: bool = True,
        auxiliary: bool = True,
        dropout: Rate = 0.1,
    ) -> None:
        super().__init__()
        _check(maps, readout)
        dim = fusion_channels
        self.reassemble = nn.LayerList(
            Reassemble(in_dim, channels, scale, readout)
            for in_dim, channels, scale in zip(
                maps.channels, neck_channels, (4, 2, 1, 0.5), strict=True
            )
        )
        self.convs = nn.LayerList(
            Conv2D(channels, dim, 3, padding=1, bias_attr=False) for channels in neck_channels
        )
        self.fusion = nn.LayerList(Fusion(dim, fusion_batch_norm, i == 3) for i in range(4))
        self.main = Classifier(dim, num_classes, dropout)
        self.auxiliary = Classifier(dim, num_classes, dropout) if auxiliary else None
        initialise(self)

    def forward(self, features: list[Any]) -> paddle.Tensor | list[paddle.Tensor]:
        fused = None
        for i in (3, 2, 1, 0):
            x, prefix = features[i] if isinstance(features[i], tuple) else (features[i], None)
            x = self.convs[i](self.reassemble[i](x, prefix))
            fused = self.fusion[i](x, fused)
        logits = doubled(self.main(fused))
        if self.training and self.auxiliary is not None:
            return [logits, self.auxiliary(fused)]
        return logits

    def classifier_names(self) -> tuple[str, ...]:
        if self.auxiliary is None:
            return ("main.classifier",)
        return ("main.classifier", "auxiliary.classifier")


def _check(maps: Maps, readout: str) -> None:
    if len(maps.reductions) != 4 or len(set(maps.reductions)) > 1:
        raise InputError(
            f"HEAD.NAME dpt reads four maps of one size, found {len(maps.reductions)} with one"
            " position"
            f" per {maps.reductions} pixels; use a plain ViT, and four numbers as HEAD.INDICES"
        )
    if readout != "ignore" and not maps.prefix_tokens:
        raise InputError(
            f"HEAD.READOUT is {readout}, but the encoder has no class token; set it to ignore"
        )
