"""The layers for segmentation of TopFormer (Zhang et al. 2022, arXiv:2204.05525)."""

import paddle
from paddle import nn
from paddle.nn import functional as F
from paddle.nn.initializer import Normal

from errors import InputError
from models.heads.base import Head, Maps, resized
from models.layers.activations import relu
from models.layers.conv import Conv2D
from models.layers.conv_norm import ConvNorm
from models.layers.init import init_convolution
from settings.keys import Rate, Size
from settings.registry import heads


class Injection(nn.Layer):
    """Injects the semantics from the attention into a map of the pyramid.

    The map is multiplied by a gate that the semantics give, and the semantics are added.

    Args:
        in_dim: channels of the map and of its part of the semantics.
        dim: channels of the output.
        gated_twice: see ``TopFormerHead``.

    Shape: maps [B, in_dim, H, W] and [B, in_dim, h, w] -> [B, dim, H, W].
    """

    def __init__(self, in_dim: int, dim: int, gated_twice: bool) -> None:
        super().__init__()
        self.gated_twice = gated_twice
        self.local_embedding = ConvNorm(in_dim, dim, 1)
        self.global_embedding = ConvNorm(in_dim, dim, 1)
        self.global_act = ConvNorm(in_dim, dim, 1)

    def forward(self, x: paddle.Tensor, semantics: paddle.Tensor) -> paddle.Tensor:
        size = x.shape[2:]
        gate = resized(F.hardsigmoid(self.global_act(semantics)), size)
        if self.gated_twice:
            gate = F.hardsigmoid(gate)
        return self.local_embedding(x) * gate + resized(self.global_embedding(semantics), size)


@heads.register("topformer")
class TopFormerHead(Head):
    """Injects the semantics into the maps of the pyramid, adds these up, and classifies the sum.

    The largest map isn't read, but its share of the semantics is there: the last intermediate of
    TopFormer has the channels of all maps.

    Args:
        injected_channels: number of channels of the maps after the injection.
        depthwise_fusion: whether the convolution before the classifier is depthwise, as in
            PaddleViT's tiny models.
        gated_twice: whether the hard sigmoid of the gate is applied twice. PaddleViT does so,
            unlike the paper and the authors' code, and its weights need it.
        dropout: dropout rate of whole channels before the linear layer.

    Raises:
        InputError: the encoder isn't a TopFormer.
    """

    indices = (-5, -4, -3, -2, -1)

    def __init__(
        self,
        maps: Maps,
        num_classes: int,
        *,
        injected_channels: Size = 256,
        depthwise_fusion: bool = False,
        gated_twice: bool = False,
        dropout: Rate = 0.1,
    ) -> None:
        super().__init__()
        *channels, last = maps.channels
        if sum(channels) != last:
            raise InputError(
                f"HEAD.NAME topformer found maps of {maps.channels} channels, expected the last one to"
                " have as many as all others together; use a MODEL.TYPE TopFormer with all its maps"
            )
        self.channels = channels
        self.injections = nn.LayerList(
            Injection(dim, injected_channels, gated_twice) for dim in channels[1:]
        )
        groups = injected_channels if depthwise_fusion else 1
        self.fuse = ConvNorm(injected_channels, injected_channels, 1, relu, groups=groups)
        self.dropout = nn.Dropout2D(dropout)
        self.classifier = Conv2D(injected_channels, num_classes, 1)
        self.apply(init_convolution)
        Normal(std=0.01)(self.classifier.weight)

    def forward(self, features: list[paddle.Tensor]) -> paddle.Tensor:
        _, *maps, semantics = features
        _, *parts = semantics.split(self.channels, axis=1)
        # Paddle's tracing takes no keywords of zip.
        first, *others = [inject(maps[i], parts[i]) for i, inject in enumerate(self.injections)]
        for x in others:
            first = first + resized(x, first.shape[2:])
        return self.classifier(self.dropout(self.fuse(first)))
