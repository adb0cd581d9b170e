"""CvT (Wu et al. 2021, arXiv:2103.15808): transformers whose embeddings and projections are
convolutions.

Parameter names, the order of operations and the initialisation are those of microsoft/CvT
(f851e68).
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import paddle
from paddle import nn
from paddle.nn.initializer import Normal

from errors import InputError
from models.base import ImageModel, register
from models.layers import DropPath, LayerNorm, Linear, Mlp, init_linear
from models.layers.attention import attend_heads
from models.layers.batch_norm import BatchNorm2D
from models.layers.conv import Conv2D
from models.layers.folding import fill, fold, scale_and_shift
from models.layers.init import init_as_torch
from models.layers.layout import channels_first, channels_last, concat
from models.layers.mlp import hidden_width
from models.layers.stages import check_counts, drop_path_rates, feature_info
from settings.keys import Count, Depth, Factor, InTraining, OfClassifier, Positive, Rate, Size
from weights.names import cvt as names


class ConvEmbed(nn.Layer):
    """Projects overlapping patches by a strided convolution, then normalises the tokens.

    Shape: [B, in_dim, H, W] -> [B, H', W', dim].
    """

    def __init__(self, in_dim: int, dim: int, patch_size: int, stride: int, padding: int) -> None:
        super().__init__()
        self.proj = Conv2D(in_dim, dim, patch_size, stride=stride, padding=padding)
        self.norm = LayerNorm(dim)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.norm(channels_last(self.proj(x)))


class ConvProjection(nn.Layer):
    """A depthwise 3 x 3 convolution with batch norm, before a Linear of queries, keys or values.

    Shape: [B, dim, H, W] -> [B, dim, H / stride, W / stride], rounded up.
    """

    def __init__(self, dim: int, stride: int) -> None:
        super().__init__()
        self.conv = Conv2D(dim, dim, 3, stride=stride, padding=1, groups=dim, bias_attr=False)
        self.bn = BatchNorm2D(dim)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.bn(self.conv(x))

    @paddle.no_grad()
    def fold(self) -> nn.Layer:
        """Returns the convolution with the norm in its weights."""
        scale, shift = scale_and_shift(self.bn)
        dim = self.conv.weight.shape[0]
        conv = Conv2D(dim, dim, 3, stride=self.conv._stride, padding=1, groups=dim)
        return fill(conv, self.conv.weight * scale.reshape([-1, 1, 1, 1]), shift)


class Attention(nn.Layer):
    """Multi-head attention whose queries, keys and values each have a convolution of their own.

    Those of keys and values halve the map. The scores are divided by sqrt(D), not by the root of a
    head's channels.

    Args:
        dim: channels D of the tokens.
        num_heads: number of attention heads.
        qkv_bias: whether the Linears of queries, keys and values have a bias.
        attn_drop: dropout rate of the attention weights.
        proj_drop: dropout of the output.

    Shape: [B, H, W, D] -> the same. With a class token [B, 1, D], tokens [B, 1 + H * W, D] are
    returned, the class token's first.
    """

    def __init__(
        self, dim: int, num_heads: int, qkv_bias: bool, attn_drop: float, proj_drop: float
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.scale = dim**-0.5
        self.conv_proj_q = ConvProjection(dim, stride=1)
        self.conv_proj_k = ConvProjection(dim, stride=2)
        self.conv_proj_v = ConvProjection(dim, stride=2)
        bias = None if qkv_bias else False
        self.proj_q = Linear(dim, dim, bias_attr=bias)
        self.proj_k = Linear(dim, dim, bias_attr=bias)
        self.proj_v = Linear(dim, dim, bias_attr=bias)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: paddle.Tensor, token: paddle.Tensor | None = None) -> paddle.Tensor:
        maps = channels_first(x)
        q = self.proj_q(self._tokens(self.conv_proj_q(maps), token))
        k = self.proj_k(self._tokens(self.conv_proj_k(maps), token))
        v = self.proj_v(self._tokens(self.conv_proj_v(maps), token))
        out = attend_heads([q, k, v], self.num_heads, self.head_dim, self.scale, self.attn_drop)
        out = self.proj_drop(self.proj(out))
        return out.reshape([-1, *x.shape[1:]]) if token is None else out

    def _tokens(self, maps: paddle.Tensor, token: paddle.Tensor | None) -> paddle.Tensor:
        """Returns the places of maps [B, D, h, w] as tokens, behind the class token."""
        places = channels_last(maps).flatten(1, 2)
        return places if token is None else concat([token, places], axis=1)


class Block(nn.Layer):
    """x + attn(norm1(x)), then x + mlp(norm2(x)), each branch with drop path.

    Args:
        dim: channels D of the tokens.
        num_heads: number of attention heads.
        qkv_bias: whether the queries, keys and values have a bias.
        mlp_ratio: hidden width of the MLP over D.
        act: activation of the MLP.
        drop: dropout after the attention's projection and in the MLP.
        attn_drop: dropout rate of the attention weights.
        drop_path: rate of stochastic depth.

    Shape: [B, H, W, D] -> the same; with ``grid`` (H, W) [B, 1 + H * W, D] -> the same, the class
    token first.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        qkv_bias: bool,
        mlp_ratio: float,
        act: str,
        drop: float,
        attn_drop: float,
        drop_path: float,
    ) -> None:
        super().__init__()
        self.norm1 = LayerNorm(dim)
        self.attn = Attention(dim, num_heads, qkv_bias, attn_drop, proj_drop=drop)
        self.drop_path1 = DropPath(drop_path)
        self.norm2 = LayerNorm(dim)
        self.mlp = Mlp(dim, hidden_width(dim, mlp_ratio), drop, act)
        self.drop_path2 = DropPath(drop_path)

    def forward(self, x: paddle.Tensor, grid: Sequence[Any] | None = None) -> paddle.Tensor:
        normed = self.norm1(x)
        if grid is None:
            branch = self.attn(normed)
        else:
            places = normed[:, 1:].reshape([-1, *grid, x.shape[2]])
            branch = self.attn(places, normed[:, :1])
        x = self.drop_path1(branch, onto=x)
        return self.drop_path2(self.mlp(self.norm2(x)), onto=x)


class Stage(nn.Layer):
    """An embedding, then blocks of one width.

    Args:
        embed: the embedding.
        blocks: the blocks.
        dim: channels D of the tokens.
        class_token: whether a class token joins before the blocks.
        drop: dropout of the blocks' input.
    """

    def __init__(
        self, embed: nn.Layer, blocks: Iterable[Block], dim: int, class_token: bool, drop: float
    ) -> None:
        super().__init__()
        self.patch_embed = embed
        self.cls_token: Any = None
        if class_token:
            self.cls_token = self.create_parameter(
                [1, 1, dim], default_initializer=Normal(std=0.02)
            )
        self.pos_drop = nn.Dropout(drop)
        self.blocks = nn.LayerList(blocks)


@register("cvt")
class CvT(ImageModel):
    """CvT. It takes images of at least 3 x 3 pixels.

    Its features are the class token, normalised: [B, 1, embed_dims[-1]]. Without a class token they
    are the last stage's places, normalised: [B, H', W', embed_dims[-1]].

    Args:
        stage_depths: number of blocks in each stage.
        embed_dims: number of channels of each stage.
        num_heads: number of attention heads in each stage.
        patch_size: for each stage the side of a patch, in pixels or in positions of the map.
        patch_stride: for each stage the distance between neighbouring patches, in pixels or in
            positions of the map.
        patch_padding: for each stage the zero padding around the map before it is divided into
            patches.
        class_token: whether the last stage has a class token, which the head reads. Otherwise it
            reads the mean of all tokens.
        mlp_ratio: ratio of the MLP's hidden width to its input width.
        qkv_bias: whether the queries, keys and values have a bias.
        act: activation of the MLPs: "gelu" in transformers, "quick_gelu" in the authors' code.
        dropout: dropout rate of each stage's input, after the attention's projection and in the
            MLP.
        attention_dropout: dropout rate of the attention weights.
        droppath: stochastic depth rate of the last block; the rates grow linearly from 0 at the
            first block of the last stage. Other stages have none, as in all of the authors' models.

    Attributes:
        last_grid: rows and columns of the last images' places behind the class token.

    Raises:
        InputError: sizes that don't fit together.
    """

    weight_names = names
    first_conv = "stage0.patch_embed.proj"
    layout = "NHWC"
    min_image_size = 3
    last_grid: Any = (0, 0)

    def __init__(
        self,
        image_size: int | Sequence[int] = 224,
        in_channels: int = 3,
        num_classes: int = 1000,
        stage_depths: Sequence[Depth] = (1, 2, 10),
        embed_dims: Sequence[Size] = (64, 192, 384),
        num_heads: Sequence[Size] = (1, 3, 6),
        patch_size: Sequence[Size] = (7, 3, 3),
        patch_stride: Sequence[Size] = (4, 2, 2),
        patch_padding: Sequence[Count] = (2, 1, 1),
        class_token: bool = True,
        mlp_ratio: Positive = 4.0,
        qkv_bias: bool = True,
        act: Literal["quick_gelu", "gelu"] = "quick_gelu",
        dropout: InTraining[Rate] = 0.0,
        attention_dropout: InTraining[Rate] = 0.0,
        droppath: InTraining[Rate] = 0.0,
        head_init_scale: InTraining[OfClassifier[Factor]] = 1.0,
        recompute: InTraining[bool] = False,
    ) -> None:
        super().__init__(image_size, in_channels, num_classes, head_init_scale, recompute)
        check_counts(
            len(stage_depths),
            EMBED_DIMS=embed_dims,
            NUM_HEADS=num_heads,
            PATCH_SIZE=patch_size,
            PATCH_STRIDE=patch_stride,
            PATCH_PADDING=patch_padding,
        )
        for dim, heads in zip(embed_dims, num_heads, strict=True):
            if dim % heads:
                raise InputError(
                    f"NUM_HEADS has {heads}, expected a divisor of the {dim} channels in EMBED_DIMS"
                )
        self.class_token = class_token
        self.num_features = embed_dims[-1]
        self.stage_names = [f"stage{i}" for i in range(len(stage_depths))]
        in_dim = in_channels
        reductions: list[int] = []
        for i, (depth, dim) in enumerate(zip(stage_depths, embed_dims, strict=True)):
            is_last = i == len(stage_depths) - 1
            rates = [0.0] * depth
            if is_last:
                [rates] = drop_path_rates(droppath, [depth])
            blocks = [
                Block(
                    dim,
                    num_heads[i],
                    qkv_bias=qkv_bias,
                    mlp_ratio=mlp_ratio,
                    act=act,
                    drop=dropout,
                    attn_drop=attention_dropout,
                    drop_path=rate,
                )
                for rate in rates
            ]
            embed = ConvEmbed(in_dim, dim, patch_size[i], patch_stride[i], patch_padding[i])
            stage = Stage(embed, blocks, dim, class_token and is_last, dropout)
            setattr(self, self.stage_names[i], stage)
            reductions.append(patch_stride[i] * (reductions[-1] if i else 1))
            in_dim = dim
        self.feature_info = feature_info(self.stage_names, embed_dims, reductions)
        self.norm = LayerNorm(self.num_features)
        self._finish()

    def _embed(self, x: paddle.Tensor) -> paddle.Tensor:
        return x

    def _stages(self) -> Iterable[Any]:
        return [getattr(self, name) for name in self.stage_names]

    def _stage(self, stage: Any, x: Any, shared: Any) -> Any:
        """Returns the stage's map [B, H', W', D]; with a class token [B, 1, D] a tuple of both."""
        if stage is not self.stage0:
            x = channels_first(x)
        x = stage.patch_embed(x)
        if stage.cls_token is None:
            return self._run_all(stage.blocks, stage.pos_drop(x))
        grid = x.shape[1:3]
        dim = x.shape[3]
        self.last_grid = grid
        token = stage.cls_token.expand([x.shape[0], -1, -1])
        x = stage.pos_drop(concat([token, x.flatten(1, 2)], axis=1))
        for block in stage.blocks:
            x = self._run(block, x, grid)
        return x[:, 1:].reshape([-1, *grid, dim]), x[:, :1]

    def _last_norm(self, x: Any) -> Any:
        # With a class token, the norm is for it alone.
        return x if self.class_token else self.norm(x)

    def _head_input(self, x: Any, last: bool) -> paddle.Tensor:
        if isinstance(x, tuple):
            return self.norm(x[1])
        return self._last_norm(x) if last else x

    def _as_map(self, x: Any, output_format: str) -> paddle.Tensor:
        places = x[0] if isinstance(x, tuple) else x
        return ImageModel._as_map(self, places, output_format)

    def cam_layer(self) -> Any:
        # After this norm, places no longer reach the class token.
        last = getattr(self, self.stage_names[-1])
        return last.blocks[-1].norm1 if self.class_token else None

    def grid(self, places: int) -> tuple[int, int]:
        return self.last_grid

    def forward_head(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.head(x[:, 0] if self.class_token else x.flatten(1, 2).mean(axis=1))

    def inference_model(self) -> "CvT":
        """Returns a copy whose batch norms are folded into the convolutions."""
        return fold(self)

    def layer_groups(self) -> list[tuple[str, ...]]:
        """Returns the groups: the embedding, each block, and the classifier with the last norm. The
        first block of a stage has its embedding, and the class token.
        """
        groups: list[tuple[str, ...]] = [("stage0.patch_embed",)]
        for i, stage in enumerate(self._stages()):
            blocks: list[tuple[str, ...]] = [
                (f"stage{i}.blocks.{j}",) for j in range(len(stage.blocks))
            ]
            if i:
                blocks[0] += (f"stage{i}.patch_embed",)
            if stage.cls_token is not None:
                blocks[0] += (f"stage{i}.cls_token",)
            groups += blocks
        return [*groups, ("norm", "head")]

    def no_weight_decay(self) -> set[str]:
        return {f"{self.stage_names[-1]}.cls_token"} if self.class_token else set()

    def _init_weights(self, layer: nn.Layer) -> None:
        if isinstance(layer, nn.Conv2D):
            init_as_torch(layer)
        elif isinstance(layer, nn.Linear) and layer is getattr(self, "head", None):
            # The authors draw its weight again and leave PyTorch's bias.
            init_as_torch(layer)
            Normal(std=0.02)(layer.weight)
        else:
            init_linear(layer)
