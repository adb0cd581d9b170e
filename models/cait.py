"""CaiT (Touvron et al. 2021, arXiv:2103.17239): blocks of patches, then blocks of a class token.

Parameter names, the order of operations and the initialisation are those of timm's ``Cait``. The
weight of a Linear is [in, out] here and [out, in] there.
"""

from collections.abc import Sequence
from typing import Literal

import paddle
from paddle import nn
from paddle.nn.initializer import Constant, Normal

from errors import InputError
from models.base import ImageModel, register
from models.layers import DropPath, LayerNorm, Linear, Mlp, PatchEmbed, init_linear
from models.layers.activations import softmax
from models.layers.class_attention import ClassAttention
from models.layers.layout import concat, split, swap_axes
from models.layers.linear import matmul
from models.layers.mlp import hidden_width
from models.layers.scale import add_branch, add_to_all, scale_channels
from models.layers.stages import feature_info
from settings.keys import Count, Depth, Factor, InTraining, OfClassifier, Positive, Rate, Size
from weights.names import cait as names


class HeadMix(Linear):
    """A Linear over the heads of attention weights.

    Shape: [B, H, N, N] -> the same.
    """

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        _, heads, length, _ = x.shape
        # One product without transposed copies of x. The gradient of weight.t() would be strided,
        # which DataParallel doesn't average.
        x = x.reshape([-1, heads, length * length])
        mixed = matmul(self.weight, x, transpose_x=True, bias=self.bias)
        return mixed.reshape([-1, heads, length, length])


class TalkingHeadAttention(nn.Layer):
    """Multi-head self-attention whose heads are mixed before and after the softmax (Shazeer et al.
    2020, arXiv:2003.02436).

    Args:
        dim: channels D of the tokens.
        num_heads: heads H.
        qkv_bias: whether the queries, keys and values have a bias.
        attn_drop: dropout rate of the attention weights.
        proj_drop: dropout of the output.

    Shape: [B, N, D] -> the same.
    """

    def __init__(
        self, dim: int, num_heads: int, qkv_bias: bool, attn_drop: float, proj_drop: float
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.scale = self.head_dim**-0.5
        self.qkv = Linear(dim, 3 * dim, bias_attr=None if qkv_bias else False)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = Linear(dim, dim)
        self.proj_l = HeadMix(num_heads, num_heads)
        self.proj_w = HeadMix(num_heads, num_heads)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        batch, length, dim = x.shape
        # Queries, keys and values are [B, D, N]: the tokens of a channel lie side by side.
        qkv = split(swap_axes(self.qkv(x)), [dim, dim, dim], axis=1)
        q, k, v = [part.reshape([batch, self.num_heads, self.head_dim, length]) for part in qkv]
        scores = self.proj_l(matmul(q, k, transpose_x=True, scale=self.scale))
        weights = self.attn_drop(self.proj_w(softmax(scores)))
        x = matmul(v, weights, transpose_y=True).reshape([batch, dim, length])
        return self.proj_drop(self.proj(swap_axes(x)))


class Block(nn.Layer):
    """x + gamma_1 * attn(norm1(x)), then x + gamma_2 * mlp(norm2(x)), each branch with drop path.

    Args:
        dim: channels D of the tokens.
        attn: the attention layer.
        mlp_ratio: hidden width of the MLP over D.
        init_values: initial value of gamma_1 and gamma_2.
        drop: dropout in the MLP.
        drop_path: rate of stochastic depth.

    Shape: [B, N, D] -> [B, N, D].
    """

    def __init__(
        self,
        dim: int,
        attn: nn.Layer,
        mlp_ratio: float,
        init_values: float,
        drop: float = 0.0,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        self.norm1 = LayerNorm(dim, epsilon=1e-6)
        self.attn = attn
        self.drop_path = DropPath(drop_path)
        self.norm2 = LayerNorm(dim, epsilon=1e-6)
        self.mlp = Mlp(dim, hidden_width(dim, mlp_ratio), drop)
        self.gamma_1 = self.create_parameter([dim], default_initializer=Constant(init_values))
        self.gamma_2 = self.create_parameter([dim], default_initializer=Constant(init_values))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.drop_path(scale_channels(self.attn(self.norm1(x)), self.gamma_1), onto=x)
        return self.drop_path(scale_channels(self.mlp(self.norm2(x)), self.gamma_2), onto=x)


class ClassBlock(Block):
    """A ``Block`` of the class token, which attends to itself and to the patches.

    Shape: the token [B, 1, D], the patches [B, N, D] -> the token [B, 1, D]. Patches don't change.
    """

    def forward(self, x: paddle.Tensor, patches: paddle.Tensor) -> paddle.Tensor:
        x = x + scale_channels(self.attn(self.norm1(concat([x, patches], axis=1))), self.gamma_1)
        return add_branch(x, scale_channels(self.mlp(self.norm2(x)), self.gamma_2))


@register("cait")
class Cait(ImageModel):
    """CaiT. It takes images of image_size only.

    Its features are the class token and the patches, normalised: [B, 1 + patches, embed_dim].

    Args:
        image_size: pixels, or (height, width): multiples of patch_size.
        patch_size: side of a patch, in pixels.
        embed_dim: number of channels of a token.
        depth: number of blocks of the patch tokens, in which there isn't a class token yet.
        num_heads: number of attention heads in each block.
        mlp_ratio: ratio of the MLP's hidden width to embed_dim.
        qkv_bias: whether the queries, keys and values have a bias.
        init_values: initial value of layer scale.
        depth_token_only: number of blocks of the class token, after those of the patch tokens.
        mlp_ratio_token_only: ratio of the MLP's hidden width to embed_dim in the blocks of the
            class token. None: mlp_ratio.
        global_pool: the pooled features that the head reads. "token": the class token; "avg": the
            mean of the patches.
        dropout: dropout rate after the position embedding; in the blocks of the patch tokens, also
            after the attention's projection and in the MLP.
        attention_dropout: dropout rate of the attention weights in the blocks of the patches.
        droppath: stochastic depth rate of each block of the patches.

    Raises:
        InputError: sizes that don't fit together.
    """

    weight_names = names
    layout = "NLC"
    pos_embed_prefix = 0

    def __init__(
        self,
        image_size: int | Sequence[int] = 224,
        patch_size: Size = 16,
        in_channels: int = 3,
        num_classes: int = 1000,
        embed_dim: Size = 768,
        depth: Depth = 12,
        num_heads: Size = 12,
        mlp_ratio: Positive = 4.0,
        qkv_bias: bool = True,
        init_values: Positive = 1e-4,
        depth_token_only: Count = 2,
        mlp_ratio_token_only: Positive | None = None,
        global_pool: Literal["token", "avg"] = "token",
        dropout: InTraining[Rate] = 0.0,
        attention_dropout: InTraining[Rate] = 0.0,
        droppath: InTraining[Rate] = 0.0,
        head_init_scale: InTraining[OfClassifier[Factor]] = 1.0,
        recompute: InTraining[bool] = False,
    ) -> None:
        super().__init__(image_size, in_channels, num_classes, head_init_scale, recompute)
        if embed_dim % num_heads:
            raise InputError(
                f"EMBED_DIM {embed_dim} is not a multiple of NUM_HEADS {num_heads}; choose one that is"
            )
        self.num_features = embed_dim
        self.global_pool = global_pool
        self.patch_embed = PatchEmbed(self.image_size, patch_size, in_channels, embed_dim)
        self.cls_token = self.create_parameter(
            [1, 1, embed_dim], default_initializer=Normal(std=0.02)
        )
        positions = [1, self.patch_embed.num_patches, embed_dim]
        self.pos_embed = self.create_parameter(positions, default_initializer=Normal(std=0.02))
        self.pos_drop = nn.Dropout(dropout)
        self.blocks = nn.LayerList()
        for _ in range(depth):
            attn = TalkingHeadAttention(
                embed_dim,
                num_heads,
                qkv_bias=qkv_bias,
                attn_drop=attention_dropout,
                proj_drop=dropout,
            )
            block = Block(
                embed_dim,
                attn,
                mlp_ratio=mlp_ratio,
                init_values=init_values,
                drop=dropout,
                drop_path=droppath,
            )
            self.blocks.append(block)
        self.feature_info = feature_info(
            [f"blocks.{i}" for i in range(depth)], embed_dim, patch_size
        )
        self.blocks_token_only = nn.LayerList(
            ClassBlock(
                embed_dim,
                ClassAttention(embed_dim, num_heads, qkv_bias),
                mlp_ratio=mlp_ratio_token_only or mlp_ratio,
                init_values=init_values,
            )
            for _ in range(depth_token_only)
        )
        self.norm = LayerNorm(embed_dim, epsilon=1e-6)
        self._finish()

    def _embed(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.pos_drop(add_to_all(self.patch_embed(x), self.pos_embed))

    def _head_input(self, x: paddle.Tensor, last: bool) -> paddle.Tensor:
        # ``last`` isn't needed: it is always True, since all intermediates have one shape.
        token = self.cls_token.expand([x.shape[0], -1, -1])
        for block in self.blocks_token_only:
            token = self._run(block, token, x)
        return self.norm(concat([token, x], axis=1))

    def forward_head(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.head(x[:, 0] if self.global_pool == "token" else x[:, 1:].mean(axis=1))

    def layer_groups(self) -> list[tuple[str, ...]]:
        """Returns the groups: the embedding, each block of the patches, each block of the class
        token, and the classifier with its norm.
        """
        blocks = [(f"blocks.{i}",) for i in range(len(self.blocks))]
        class_blocks = [(f"blocks_token_only.{i}",) for i in range(len(self.blocks_token_only))]
        embedding = ("cls_token", "pos_embed", "patch_embed")
        return [embedding, *blocks, *class_blocks, ("norm", "head")]

    def timm_layer_groups(self) -> list[tuple[str, ...]]:
        """Returns timm's groups: the embedding, each block, and the classifier. The last blocks of
        the patches share their groups with the blocks of the class token, and the last of all with
        the norm.
        """
        groups: list[tuple[str, ...]] = [("cls_token", "pos_embed", "patch_embed")]
        groups += [(f"blocks.{i}",) for i in range(len(self.blocks))]
        first_shared = len(groups) - len(self.blocks_token_only)
        for i in range(len(self.blocks_token_only)):
            groups[max(0, first_shared + i)] += (f"blocks_token_only.{i}",)
        groups[-1] += ("norm",)
        return [*groups, ("head",)]

    def no_weight_decay(self) -> set[str]:
        return {"pos_embed", "cls_token"}

    def _init_weights(self, layer: nn.Layer) -> None:
        init_linear(layer)
