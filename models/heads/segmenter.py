"""Segmenter (Strudel et al. 2021, arXiv:2105.05633): a transformer over a map's places and an
embedding of each class.
"""

import paddle
from paddle import nn
from paddle.nn.initializer import Normal, TruncatedNormal

from models.heads.base import Head, Maps
from models.layers import Attention, LayerNorm, Linear, init_linear
from models.layers.attention import l2_normalize
from models.layers.block import Block
from models.layers.layout import swap_axes
from models.layers.linear import linear
from settings.keys import Depth, InTraining, Rate
from settings.registry import heads


@heads.register("segmenter")
class Segmenter(Head):
    """Segmenter's mask transformer on one map.

    A place's logit of a class is the cosine of the angle between both, after a layer norm over the
    classes. Parameter names are the authors'.

    Args:
        mask_layers: number of transformer blocks of the mask transformer.
        mask_dropout: dropout rate in the blocks of the mask transformer.
        mask_droppath: stochastic depth rate of the last block of the mask transformer; the rates
            grow linearly from 0 at the first.
    """

    last_norm = True

    def __init__(
        self,
        maps: Maps,
        num_classes: int,
        *,
        mask_layers: Depth = 2,
        mask_dropout: InTraining[Rate] = 0.1,
        mask_droppath: InTraining[Rate] = 0.0,
    ) -> None:
        super().__init__()
        dim = maps.channels[-1]
        self.num_classes = num_classes
        self.proj_dec = Linear(dim, dim)
        self.cls_emb = self.create_parameter(
            [1, num_classes, dim], default_initializer=TruncatedNormal(std=0.02)
        )
        # A head has 64 channels, as in all of the paper's models.
        num_heads = max(1, dim // 64)
        self.blocks = nn.LayerList(
            Block(
                dim,
                Attention(dim, num_heads, proj_drop=mask_dropout),
                mlp_ratio=4.0,
                init_values=None,
                drop=mask_dropout,
                drop_path=mask_droppath * i / max(1, mask_layers - 1),
            )
            for i in range(mask_layers)
        )
        self.decoder_norm = LayerNorm(dim)
        self.proj_patch = self.create_parameter([dim, dim])
        self.proj_classes = self.create_parameter([dim, dim])
        self.mask_norm = LayerNorm(num_classes)
        self.apply(init_linear)
        for projection in (self.proj_patch, self.proj_classes):
            Normal(std=dim**-0.5)(projection)

    def forward(self, features: list[paddle.Tensor]) -> paddle.Tensor:
        height, width = features[-1].shape[2:]
        x = self.proj_dec(swap_axes(features[-1].flatten(2)))
        classes = self.cls_emb.astype(x.dtype).expand([x.shape[0], -1, -1])
        x = paddle.concat([x, classes], axis=1)
        for block in self.blocks:
            x = block(x)
        x = self.decoder_norm(x)
        places = l2_normalize(linear(x[:, : -self.num_classes], self.proj_patch, None))
        classes = l2_normalize(linear(x[:, -self.num_classes :], self.proj_classes, None))
        cosines = paddle.matmul(places, classes, transpose_y=True)
        # Paddle 2.6 doesn't know the last side in a graph.
        cosines = cosines.reshape([x.shape[0], -1, self.num_classes])
        logits = swap_axes(self.mask_norm(cosines))
        return logits.reshape([-1, self.num_classes, height, width])

    def classifier_names(self) -> tuple[str, ...]:
        return ("cls_emb", "mask_norm")

    def no_weight_decay(self) -> set[str]:
        return {"cls_emb"}
