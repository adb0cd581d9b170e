"""XCiT, the cross-covariance image transformer (El-Nouby et al. 2021, arXiv:2106.09681).

In its blocks channels attend to each other instead of tokens. In the last blocks a class token
attends to the patches. Parameter names, the order of operations and the initialisation are those of
timm's ``Xcit``. The weight of a Linear is [in, out] here and [out, in] there.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import paddle
from paddle import nn
from paddle.nn import functional as F
from paddle.nn.initializer import Constant, Normal

import ops
from errors import InputError
from models.base import ImageModel, register
from models.layers import DropPath, LayerNorm, Linear, Mlp, init_linear
from models.layers.activations import GELU, gelu
from models.layers.attention import can_fuse, l2_normalize
from models.layers.batch_norm import BatchNorm2D
from models.layers.class_attention import ClassAttention
from models.layers.conv import Conv2D
from models.layers.init import init_as_torch
from models.layers.layout import channels_first, channels_last
from models.layers.linear import in_float32
from models.layers.mlp import hidden_width
from models.layers.scale import scale_channels
from models.layers.stages import feature_info
from settings.keys import Depth, Factor, InTraining, OfClassifier, Positive, Rate, Size
from weights.names import xcit as names

# Number of convolutions in the stem by patch size. Each of them halves the image.
_STEM_CONVOLUTIONS = {8: 3, 16: 4}


class PatchEmbed(nn.Layer):
    """Convolutions of stride 2 with batch norm, and GELU between them.

    Each convolution has twice the channels of the one before.

    Shape: [B, in_channels, H, W] -> [B, dim, H / patch_size, W / patch_size], rounded up.

    Attributes:
        grid_size: rows and columns of the last output.
    """

    def __init__(
        self, image_size: Sequence[int], in_channels: int, dim: int, patch_size: int
    ) -> None:
        super().__init__()
        height, width = image_size
        self.grid_size = (math.ceil(height / patch_size), math.ceil(width / patch_size))
        layers: list[nn.Layer] = []
        channels = in_channels
        for i in reversed(range(_STEM_CONVOLUTIONS[patch_size])):
            if layers:
                layers.append(GELU())
            out_channels = dim // 2**i
            conv = Conv2D(channels, out_channels, 3, stride=2, padding=1, bias_attr=False)
            layers.append(nn.Sequential(conv, BatchNorm2D(out_channels)))
            channels = out_channels
        self.proj = nn.Sequential(*layers)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.proj(x)
        self.grid_size = (x.shape[2], x.shape[3])
        return x


class FourierPositions(nn.Layer):
    """A position embedding for grids of any size: sines and cosines of a place's row and column,
    mixed by a 1 x 1 convolution.

    The angles of row i of n are 2 pi i / n times frequencies, which fall geometrically from 1 to
    about 1 / temperature; so are those of a column.

    Args:
        dim: channels of the embedding.
        channels: sines and cosines of a row, and of a column.
        temperature: the frequencies are powers of it.

    Shape: rows, columns (numbers) -> [1, dim, rows, columns].
    """

    def __init__(self, dim: int, channels: int = 32, temperature: float = 10_000.0) -> None:
        super().__init__()
        self.channels = channels
        self.temperature = temperature
        self.token_projection = Conv2D(2 * channels, dim, 1)

    def forward(self, rows: int, columns: int) -> paddle.Tensor:
        row_waves = self._waves(rows).unsqueeze(1).expand([rows, columns, self.channels])
        column_waves = self._waves(columns).unsqueeze(0).expand([rows, columns, self.channels])
        waves = paddle.concat([row_waves, column_waves], axis=-1).transpose([2, 0, 1])
        return self.token_projection(waves.unsqueeze(0))

    def _waves(self, count: int) -> paddle.Tensor:
        """Returns the sine and the cosine of each frequency, side by side: [count, channels]."""
        places = paddle.arange(1, count + 1, dtype="float32") / (count + 1e-6) * (2 * math.pi)
        periods = self.temperature ** (
            paddle.arange(0, self.channels, 2, dtype="float32") / self.channels
        )
        # Expanded by hand, because Paddle Inference 2.6 divides [n, 1] by [m] wrongly.
        angles = places.unsqueeze(1).expand([count, self.channels // 2]) / periods
        return paddle.stack([angles.sin(), angles.cos()], axis=2).flatten(1)


class CrossCovarianceAttention(nn.Layer):
    """Cross-covariance attention: the channels of a head attend to each other (timm's ``XCA``).

    The score of two channels is their cosine over all tokens times a learnt temperature of the
    head.

    Args:
        dim: channels D of the tokens.
        num_heads: number of attention heads.
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
        self.temperature = self.create_parameter(
            [num_heads, 1, 1], default_initializer=Constant(1.0)
        )
        self.qkv = Linear(dim, 3 * dim, bias_attr=None if qkv_bias else False)
        # Not called ``attn_drop``, by which ``attention_layers`` finds attention maps: these
        # weights are of channels, not of places.
        self.weight_drop = nn.Dropout(attn_drop)
        self.proj = Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        _, length, dim = x.shape
        qkv = self.qkv(x)
        if can_fuse(qkv, self.weight_drop):
            x = ops.attention([qkv], self.num_heads, self.head_dim, self.temperature, across=True)
            return self.proj_drop(self.proj(x))
        qkv = qkv.reshape([-1, length, 3, self.num_heads, self.head_dim])
        # Each [B, H, N, head_dim].
        q, k, v = qkv.transpose([2, 0, 3, 1, 4]).unbind(0)
        cosines = paddle.matmul(l2_normalize(q, axis=2), l2_normalize(k, axis=2), transpose_x=True)
        # [B, H, head_dim, head_dim]
        weights = self.weight_drop(F.softmax(cosines * self.temperature, axis=-1))
        x = paddle.matmul(v, weights, transpose_y=True).transpose([0, 2, 1, 3])
        return self.proj_drop(self.proj(x.reshape([-1, length, dim])))


class LocalPatchInteraction(nn.Layer):
    """Two depthwise 3 x 3 convolutions, with GELU and batch norm between them.

    Shape: [B, H, W, D] -> the same.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv1 = Conv2D(dim, dim, 3, padding=1, groups=dim)
        self.bn = BatchNorm2D(dim)
        self.conv2 = Conv2D(dim, dim, 3, padding=1, groups=dim)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.bn(gelu(self.conv1(channels_first(x))))
        return channels_last(self.conv2(x))


class _BlockBase(nn.Layer):
    """The layers of both kinds of blocks: attention and an MLP, their norms and layer scale."""

    def __init__(
        self, dim: int, attn: nn.Layer, mlp_ratio: float, init_values: float, drop: float
    ) -> None:
        super().__init__()
        self.norm1 = LayerNorm(dim, epsilon=1e-6)
        self.attn = attn
        self.norm2 = LayerNorm(dim, epsilon=1e-6)
        self.mlp = Mlp(dim, hidden_width(dim, mlp_ratio), drop)
        self.gamma1 = self.create_parameter([dim], default_initializer=Constant(init_values))
        self.gamma2 = self.create_parameter([dim], default_initializer=Constant(init_values))


class Block(_BlockBase):
    """x + gamma1 * attn(norm1(x)), then x + gamma3 * local_mp(norm3(x)), then x + gamma2 *
    mlp(norm2(x)), each branch with drop path.

    Args:
        dim: channels D.
        attn: the attention layer, of tokens [B, N, D].
        mlp_ratio: hidden width of the MLP over D.
        init_values: initial value of layer scale.
        drop: dropout in the MLP.
        drop_path: rate of stochastic depth.

    Shape: [B, H, W, D] -> the same.
    """

    def __init__(
        self,
        dim: int,
        attn: nn.Layer,
        mlp_ratio: float,
        init_values: float,
        drop: float,
        drop_path: float,
    ) -> None:
        super().__init__(dim, attn, mlp_ratio, init_values, drop)
        self.norm3 = LayerNorm(dim, epsilon=1e-6)
        self.local_mp = LocalPatchInteraction(dim)
        self.gamma3 = self.create_parameter([dim], default_initializer=Constant(init_values))
        self.drop_path = DropPath(drop_path)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        _, rows, columns, dim = x.shape
        attended = self.attn(self.norm1(x).flatten(1, 2)).reshape([-1, rows, columns, dim])
        x = self.drop_path(scale_channels(attended, self.gamma1), onto=x)
        x = self.drop_path(scale_channels(self.local_mp(self.norm3(x)), self.gamma3), onto=x)
        return self.drop_path(scale_channels(self.mlp(self.norm2(x)), self.gamma2), onto=x)


class ClassBlock(_BlockBase):
    """A block of the class token: attention to itself and the patches, then an MLP.

    The patches change, too, as the authors' weights expect. Their norm times gamma1 is added to
    them, and in the end they are doubled.

    Args:
        tokens_norm: whether ``norm2`` normalises the patches as well. The others are those of
            ``Block``.

    Shape: [B, 1 + N, D], the class token first -> the same.
    """

    def __init__(
        self,
        dim: int,
        attn: nn.Layer,
        mlp_ratio: float,
        init_values: float,
        drop: float,
        tokens_norm: bool,
    ) -> None:
        super().__init__(dim, attn, mlp_ratio, init_values, drop)
        self.tokens_norm = tokens_norm

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        normed = self.norm1(x)
        token = self.norm2(x[:, :1] + scale_channels(self.attn(normed), self.gamma1))
        patches = x[:, 1:] + scale_channels(normed[:, 1:], self.gamma1)
        if self.tokens_norm:
            patches = self.norm2(patches)
        token = token + scale_channels(self.mlp(token), self.gamma2)
        # The residual connection of the patches, whose branch is the patches themselves.
        return paddle.concat([token, 2 * patches], axis=1)


@register("xcit")
class XCiT(ImageModel):
    """XCiT. It takes images of any size from one patch on.

    Its features are the class token and the patches, normalised: [B, 1 + patches, embed_dim].

    Args:
        patch_size: side of a patch in pixels: 8 or 16.
        embed_dim: number of channels of a token.
        depth: number of blocks of the patch tokens, in which there isn't a class token yet.
        num_heads: number of attention heads in each block.
        mlp_ratio: ratio of the MLP's hidden width to embed_dim.
        qkv_bias: whether the queries, keys and values have a bias.
        init_values: initial value of layer scale. The authors use 1 with a depth of 12, and 1e-5
            with 24.
        tokens_norm: whether the second norm in the class token's blocks also normalises the patch
            tokens.
        depth_token_only: number of blocks of the class token, after those of the patch tokens.
        global_pool: the pooled features that the head reads. "token": the class token; "avg": the
            mean of the patches.
        dropout: dropout rate after the position embedding, after each attention's projection and in
            the MLPs.
        attention_dropout: dropout rate of the attention weights.
        droppath: stochastic depth rate of each block of the patches.

    Raises:
        InputError: sizes that don't fit together.
    """

    weight_names = names
    layout = "NHWC"
    pos_embed_layout = "NCHW"
    first_conv = "patch_embed.proj.0.0"
    # The constructor sets it to the patch size.
    min_image_size = 8

    def __init__(
        self,
        image_size: int | Sequence[int] = 224,
        patch_size: Size = 16,
        in_channels: int = 3,
        num_classes: int = 1000,
        embed_dim: Size = 384,
        depth: Depth = 12,
        num_heads: Size = 8,
        mlp_ratio: Positive = 4.0,
        qkv_bias: bool = True,
        init_values: Positive = 1.0,
        tokens_norm: bool = True,
        depth_token_only: Depth = 2,
        global_pool: Literal["token", "avg"] = "token",
        dropout: InTraining[Rate] = 0.0,
        attention_dropout: InTraining[Rate] = 0.0,
        droppath: InTraining[Rate] = 0.0,
        head_init_scale: InTraining[OfClassifier[Factor]] = 1.0,
        recompute: InTraining[bool] = False,
    ) -> None:
        # ImageModel's constructor compares image_size with it.
        self.min_image_size = patch_size
        super().__init__(image_size, in_channels, num_classes, head_init_scale, recompute)
        _check_sizes(patch_size, embed_dim, num_heads)
        self.num_features = embed_dim
        self.global_pool = global_pool
        self.patch_embed = PatchEmbed(self.image_size, in_channels, embed_dim, patch_size)
        self.cls_token = self.create_parameter(
            [1, 1, embed_dim], default_initializer=Normal(std=0.02)
        )
        self.pos_embed = FourierPositions(embed_dim)
        self.pos_drop = nn.Dropout(dropout)
        attention_options: dict[str, Any] = {
            "qkv_bias": qkv_bias,
            "attn_drop": attention_dropout,
            "proj_drop": dropout,
        }
        block_options: dict[str, Any] = {
            "mlp_ratio": mlp_ratio,
            "init_values": init_values,
            "drop": dropout,
        }
        self.blocks = nn.LayerList()
        for _ in range(depth):
            attn = CrossCovarianceAttention(embed_dim, num_heads, **attention_options)
            self.blocks.append(Block(embed_dim, attn, **block_options, drop_path=droppath))
        self.cls_attn_blocks = nn.LayerList()
        for _ in range(depth_token_only):
            attn = ClassAttention(embed_dim, num_heads, **attention_options)
            self.cls_attn_blocks.append(
                ClassBlock(embed_dim, attn, **block_options, tokens_norm=tokens_norm)
            )
        self.feature_info = feature_info(
            [f"blocks.{i}" for i in range(depth)], embed_dim, patch_size
        )
        self.norm = LayerNorm(embed_dim, epsilon=1e-6)
        self._finish()

    def _embed(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.patch_embed(x)
        x = in_float32(x + self.pos_embed(x.shape[2], x.shape[3]))
        return self.pos_drop(channels_last(x))

    def _head_input(self, x: paddle.Tensor, last: bool) -> paddle.Tensor:
        # ``last`` isn't needed: it is always True, since all intermediates have one shape.
        token = self.cls_token.expand([x.shape[0], -1, -1])
        x = self._run_all(self.cls_attn_blocks, paddle.concat([token, x.flatten(1, 2)], axis=1))
        return self.norm(x)

    def grid(self, places: int) -> tuple[int, int]:
        return self.patch_embed.grid_size

    def forward_head(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.head(x[:, 0] if self.global_pool == "token" else x[:, 1:].mean(axis=1))

    def cam_layer(self) -> nn.Layer | None:
        return self.cls_attn_blocks[-1].norm1 if self.global_pool == "token" else None

    def layer_groups(self) -> list[tuple[str, ...]]:
        """Returns the groups: the embedding, each block of the patches, each block of the class
        token, and the classifier with its norm.
        """
        blocks = [(f"blocks.{i}",) for i in range(len(self.blocks))]
        class_blocks = [(f"cls_attn_blocks.{i}",) for i in range(len(self.cls_attn_blocks))]
        embedding = ("cls_token", "pos_embed", "patch_embed")
        return [embedding, *blocks, *class_blocks, ("norm", "head")]

    def no_weight_decay(self) -> set[str]:
        """Returns the authors' choice; timm adds the convolution of the positions."""
        return {"cls_token"}

    def _init_weights(self, layer: nn.Layer) -> None:
        init_linear(layer)
        if isinstance(layer, nn.Conv2D):
            init_as_torch(layer)


def _check_sizes(patch_size: int, embed_dim: int, num_heads: int) -> None:
    if patch_size not in _STEM_CONVOLUTIONS:
        raise InputError(f"PATCH_SIZE is {patch_size}, expected 8 or 16")
    if embed_dim % num_heads:
        raise InputError(f"EMBED_DIM {embed_dim} is not a multiple of NUM_HEADS {num_heads}")
    if embed_dim * 2 < patch_size:
        raise InputError(f"EMBED_DIM is {embed_dim}, too low for the first convolution; raise it")
