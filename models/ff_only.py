"""FF-only (Melas-Kyriazi 2021, arXiv:2105.02723), a ViT with an MLP over tokens instead of attention.

Parameter names, the order of operations and the initialisation are those of the author's code
(lukemelas/do-you-even-need-attention), which PaddleViT's follows.
"""

from collections.abc import Sequence

import paddle
from paddle import nn
from paddle.nn.initializer import TruncatedNormal

from models.base import ImageModel, register
from models.layers import DropPath, LayerNorm, Mlp, PatchEmbed, init_linear
from models.layers.layout import swap_axes
from models.layers.linear import in_float32
from models.layers.mlp import hidden_width
from models.layers.scale import add_to_all
from models.layers.stages import drop_path_rates, feature_info
from settings.keys import Depth, Factor, InTraining, OfClassifier, Positive, Rate, Size


class Positions(nn.Layer):
    """Joins a class token and patches, and adds learnt position embeddings to both.

    Args:
        grid: rows and columns of patches.
        dim: channels D.

    Shape: [B, 1, D], [B, rows * columns, D] -> [B, 1 + rows * columns, D].
    """

    def __init__(self, grid: tuple[int, int], dim: int) -> None:
        super().__init__()
        initializer = TruncatedNormal(std=0.02)
        self.pos_embed = self.create_parameter([1, dim, *grid], default_initializer=initializer)
        self.cls_pos_embed = self.create_parameter([1, 1, dim], default_initializer=initializer)

    def forward(self, token: paddle.Tensor, patches: paddle.Tensor) -> paddle.Tensor:
        # Added before they are joined: Paddle Inference 2.6.2 crashes when it loads a program that
        # concatenates parameters alone.
        token = add_to_all(token, self.cls_pos_embed)
        patches = add_to_all(patches, self.pos_embed.flatten(2).transpose([0, 2, 1]))
        return paddle.concat([token, patches], axis=1)


class Block(nn.Layer):
    """x + mlp1(norm1(x)) over channels, then the same with ``mlp2`` and ``norm2`` over tokens, each
    branch with drop path.

    Args:
        dim: channels D.
        num_tokens: tokens N.
        mlp_ratio: hidden widths of both MLPs over D and over N.
        drop: dropout in both MLPs.
        drop_path: rate of stochastic depth.

    Shape: [B, N, D] -> the same.
    """

    def __init__(
        self, dim: int, num_tokens: int, mlp_ratio: float, drop: float, drop_path: float
    ) -> None:
        super().__init__()
        self.norm1 = LayerNorm(dim, epsilon=1e-6)
        self.mlp1 = Mlp(dim, hidden_width(dim, mlp_ratio), drop)
        self.norm2 = LayerNorm(num_tokens, epsilon=1e-6)
        self.mlp2 = Mlp(num_tokens, hidden_width(num_tokens, mlp_ratio), drop)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = swap_axes(self.drop_path(self.mlp1(self.norm1(x)), onto=x))
        return swap_axes(self.drop_path(self.mlp2(self.norm2(x)), onto=x))


@register("ff_only")
class FeedForwardOnly(ImageModel):
    """FF-only. It takes images of image_size only, because the MLPs over tokens have as many inputs
    as there are tokens.

    Its features are the class token, then the patches, normalised: [B, 1 + patches, embed_dim]. The
    classifier reads the token.

    Args:
        patch_size: side of a patch, in pixels.
        embed_dim: number of channels of a token.
        depth: number of blocks.
        mlp_ratio: ratio of the MLPs' hidden widths to embed_dim, and to the number of tokens.
        dropout: dropout rate after the position embedding and in the MLPs.
        droppath: stochastic depth rate of the last block; the rates grow linearly from 0 at the
            first.
    """

    layout = "NLC"
    num_prefix_tokens = 1
    # What the classifier reads, as in ViT.
    global_pool = "token"

    def __init__(
        self,
        image_size: int | Sequence[int] = 224,
        patch_size: Size = 16,
        in_channels: int = 3,
        num_classes: int = 1000,
        embed_dim: Size = 768,
        depth: Depth = 12,
        mlp_ratio: Positive = 4.0,
        dropout: InTraining[Rate] = 0.0,
        droppath: InTraining[Rate] = 0.0,
        head_init_scale: InTraining[OfClassifier[Factor]] = 1.0,
        recompute: InTraining[bool] = False,
    ) -> None:
        super().__init__(image_size, in_channels, num_classes, head_init_scale, recompute)
        self.num_features = embed_dim
        self.patch_embed = PatchEmbed(self.image_size, patch_size, in_channels, embed_dim)
        self.cls_token = self.create_parameter(
            [1, 1, embed_dim], default_initializer=TruncatedNormal(std=0.02)
        )
        self.pos_encoding = Positions(self.patch_embed.grid_size, embed_dim)
        self.pos_drop = nn.Dropout(dropout)
        num_tokens = 1 + self.patch_embed.num_patches
        [rates] = drop_path_rates(droppath, [depth])
        self.blocks = nn.LayerList(
            Block(embed_dim, num_tokens, mlp_ratio, dropout, rate) for rate in rates
        )
        modules = [f"blocks.{i}" for i in range(depth)]
        self.feature_info = feature_info(modules, embed_dim, patch_size)
        self.norm = LayerNorm(embed_dim, epsilon=1e-6)
        self._finish()

    def _embed(self, x: paddle.Tensor) -> paddle.Tensor:
        x = in_float32(self.patch_embed(x))
        token = self.cls_token.expand([x.shape[0], -1, -1])
        return self.pos_drop(self.pos_encoding(token, x))

    def forward_head(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.head(x[:, 0])

    def layer_groups(self) -> list[tuple[str, ...]]:
        """Returns the groups: the embedding, each block, the classifier with its norm."""
        blocks = [(f"blocks.{i}",) for i in range(len(self.blocks))]
        return [("patch_embed", "cls_token", "pos_encoding"), *blocks, ("norm", "head")]

    def no_weight_decay(self) -> set[str]:
        return {"cls_token", "pos_encoding.pos_embed", "pos_encoding.cls_pos_embed"}

    def _init_weights(self, layer: nn.Layer) -> None:
        init_linear(layer)
