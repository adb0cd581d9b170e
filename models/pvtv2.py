"""Pyramid Vision Transformer v2 (Wang et al. 2021, arXiv:2106.13797), and with other sizes the Mix
Transformer of SegFormer (MiT; Xie et al. 2021, arXiv:2105.15203).

Parameter names, the order of operations and the initialisation are those of timm's
``PyramidVisionTransformerV2``. The weight of a Linear is [in, out] here and [out, in] there.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import paddle
from paddle import nn

from errors import InputError
from models.base import ImageModel, register
from models.layers import DropPath, LayerNorm, Linear, init_linear, set_norm_eps
from models.layers.activations import GELU, ReLU
from models.layers.attention import attend_heads
from models.layers.conv import Conv2D, adaptive_mean
from models.layers.init import init_convolution
from models.layers.layout import channels_first, channels_last, mean_of_places
from models.layers.mlp import hidden_width
from models.layers.stages import check_stages, drop_path_rates, feature_info
from settings.keys import Depth, Epsilon, Factor, InTraining, OfClassifier, Positive, Rate, Size
from weights.names import pvtv2 as names


class OverlapPatchEmbed(nn.Layer):
    """Projects overlapping patches by a strided convolution, then normalises the tokens.

    Shape: [B, in_channels, H, W] -> [B, ceil(H / stride), ceil(W / stride), dim].
    """

    def __init__(self, in_channels: int, dim: int, patch_size: int, stride: int) -> None:
        super().__init__()
        self.proj = Conv2D(in_channels, dim, patch_size, stride=stride, padding=patch_size // 2)
        self.norm = LayerNorm(dim)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.norm(channels_last(self.proj(x)))


class Attention(nn.Layer):
    """Spatial-reduction attention: multi-head attention of all tokens to a smaller map of keys and
    values.

    Args:
        dim: channels D of the tokens.
        num_heads: number of attention heads.
        sr_ratio: a convolution makes one key and value of each sr_ratio x sr_ratio tokens; 1: there
            is no convolution. Tokens beyond the last whole patch are ignored.
        linear: whether maps of any size are averaged to 7 x 7 keys and values instead.
        qkv_bias: whether the queries, keys and values have a bias.
        attn_drop: dropout rate of the attention weights.
        proj_drop: dropout of the output.

    Shape: [B, H, W, D] -> the same.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        sr_ratio: int,
        linear: bool,
        qkv_bias: bool,
        attn_drop: float,
        proj_drop: float,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.scale = self.head_dim**-0.5
        self.q = Linear(dim, dim, bias_attr=None if qkv_bias else False)
        self.kv = Linear(dim, 2 * dim, bias_attr=None if qkv_bias else False)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)
        self.linear = linear
        self.reduces = linear or sr_ratio > 1
        if self.reduces:
            side = 1 if linear else sr_ratio
            self.sr = Conv2D(dim, dim, side, stride=side)
            self.norm = LayerNorm(dim)
            self.act = GELU() if linear else nn.Identity()

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        shape = x.shape
        q = self.q(x).flatten(1, 2)
        if self.reduces:
            if self.linear:
                x = channels_last(adaptive_mean(channels_first(x), 7))
            x = self.act(self.norm(self.sr(x, last=True)))
        kv = self.kv(x).flatten(1, 2)
        x = attend_heads([q, kv], self.num_heads, self.head_dim, self.scale, self.attn_drop)
        return self.proj_drop(self.proj(x.reshape([-1, *shape[1:]])))


class ConvMlp(nn.Layer):
    """Linear, depthwise 3 x 3 convolution, GELU, Linear.

    Args:
        dim: channels of input and output.
        hidden_dim: channels between both Linears.
        relu: whether there is a ReLU before the convolution.
        drop: dropout before the last Linear and at the end.

    Shape: [B, H, W, dim] -> the same.
    """

    def __init__(self, dim: int, hidden_dim: int, relu: bool, drop: float) -> None:
        super().__init__()
        self.fc1 = Linear(dim, hidden_dim)
        self.relu = ReLU() if relu else nn.Identity()
        self.dwconv = Conv2D(hidden_dim, hidden_dim, 3, padding=1, groups=hidden_dim)
        self.act = GELU()
        self.drop = nn.Dropout(drop)
        self.fc2 = Linear(hidden_dim, dim)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.dwconv(self.relu(self.fc1(x)), last=True)
        return self.drop(self.fc2(self.drop(self.act(x))))


class Block(nn.Layer):
    """x + attn(norm1(x)), then x + mlp(norm2(x)), each branch with drop path.

    Args:
        dim: channels D of the tokens.
        num_heads: number of attention heads.
        sr_ratio: side of the patches that each make one key and value.
        linear: whether keys and values are averaged to 7 x 7 instead, and the MLP has a ReLU.
        qkv_bias: whether the queries, keys and values have a bias.
        mlp_ratio: hidden width of the MLP over D.
        drop: dropout after the attention's projection and in the MLP.
        attn_drop: dropout rate of the attention weights.
        drop_path: rate of stochastic depth.

    Shape: [B, H, W, D] -> the same.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        sr_ratio: int,
        linear: bool,
        qkv_bias: bool,
        mlp_ratio: float,
        drop: float,
        attn_drop: float,
        drop_path: float,
    ) -> None:
        super().__init__()
        self.norm1 = LayerNorm(dim, epsilon=1e-6)
        self.attn = Attention(dim, num_heads, sr_ratio, linear, qkv_bias, attn_drop, proj_drop=drop)
        self.drop_path1 = DropPath(drop_path)
        self.norm2 = LayerNorm(dim, epsilon=1e-6)
        self.mlp = ConvMlp(dim, hidden_width(dim, mlp_ratio), linear, drop)
        self.drop_path2 = DropPath(drop_path)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.drop_path1(self.attn(self.norm1(x)), onto=x)
        return self.drop_path2(self.mlp(self.norm2(x)), onto=x)


class Stage(nn.Layer):
    """``downsample`` (not in the first stage), then blocks of one width, then a norm."""

    def __init__(self, dim: int, downsample: nn.Layer, blocks: Iterable[Block]) -> None:
        super().__init__()
        self.downsample = downsample
        self.blocks = nn.LayerList(blocks)
        self.norm = LayerNorm(dim, epsilon=1e-6)


@register("pvtv2")
class PyramidVisionTransformerV2(ImageModel):
    """PVTv2.

    It takes images in which each stage has at least one whole patch of sr_ratio: from 29 x 29 on
    for sr_ratio (8, 4, 2, 1).

    Its features are the last stage's output, normalised: [B, embed_dims[3], H / 32, W / 32],
    rounded up.

    Args:
        stage_depths: number of blocks in each of the four stages.
        embed_dims: number of channels of each of the four stages.
        num_heads: number of attention heads in each of the four stages.
        sr_ratio: for each stage the side of the patches that are reduced to one key and value.
        linear: whether keys and values are averaged to 7 x 7 tokens, and the MLPs have a ReLU (the
            paper's linear attention).
        mlp_ratio: ratio of the MLP's hidden width to its input width; one number, or one per stage.
        qkv_bias: whether the queries, keys and values have a bias.
        dropout: dropout rate after the attention's projection and in the MLP.
        attention_dropout: dropout rate of the attention weights.
        droppath: stochastic depth rate of the last block; the rates grow linearly from 0 at the
            first.
        norm_eps: epsilon of all layer norms. None: timm's and the authors' values, which are 1e-6,
            and 1e-5 in the embeddings and in the attention. transformers' MiT uses 1e-5.

    Raises:
        InputError: sizes that don't fit together.
    """

    weight_names = names

    def __init__(
        self,
        image_size: int | Sequence[int] = 224,
        in_channels: int = 3,
        num_classes: int = 1000,
        stage_depths: Sequence[Depth] = (3, 4, 6, 3),
        embed_dims: Sequence[Size] = (64, 128, 320, 512),
        num_heads: Sequence[Size] = (1, 2, 5, 8),
        sr_ratio: Sequence[Size] = (8, 4, 2, 1),
        linear: bool = False,
        mlp_ratio: Positive | Sequence[Positive] = (8, 8, 4, 4),
        qkv_bias: bool = True,
        dropout: InTraining[Rate] = 0.0,
        attention_dropout: InTraining[Rate] = 0.0,
        droppath: InTraining[Rate] = 0.0,
        head_init_scale: InTraining[OfClassifier[Factor]] = 1.0,
        recompute: InTraining[bool] = False,
        norm_eps: Epsilon | None = None,
    ) -> None:
        check_stages(stage_depths, embed_dims)
        mlp_ratio = [mlp_ratio] * 4 if isinstance(mlp_ratio, int | float) else mlp_ratio
        for key, values in (
            ("NUM_HEADS", num_heads),
            ("SR_RATIO", sr_ratio),
            ("MLP_RATIO", mlp_ratio),
        ):
            if isinstance(values, int) or len(values) != 4:
                raise InputError(f"{key} is {values}, expected four numbers: one per stage")
        for dim, heads in zip(embed_dims, num_heads, strict=True):
            if dim % heads:
                raise InputError(
                    f"NUM_HEADS has {heads}, expected a divisor of the {dim} channels in EMBED_DIMS"
                )
        # The map of stage i has ceil(side / (4 * 2**i)) places along a side, and at least one patch
        # of sr_ratio. ``ImageModel`` reads min_image_size as it checks image_size.
        smallest = max(4 * 2**i * (ratio - 1) + 1 for i, ratio in enumerate(sr_ratio))
        self.min_image_size = 1 if linear else smallest
        super().__init__(image_size, in_channels, num_classes, head_init_scale, recompute)
        self.num_features = embed_dims[-1]
        self.norm_eps = norm_eps
        self.patch_embed = OverlapPatchEmbed(in_channels, embed_dims[0], 7, stride=4)
        modules = [f"stages.{i}" for i in range(4)]
        self.feature_info = feature_info(modules, embed_dims, (4, 8, 16, 32))
        self.stages = nn.LayerList()
        for i, rates in enumerate(drop_path_rates(droppath, stage_depths)):
            dim = embed_dims[i]
            downsample = nn.Identity()
            if i:
                downsample = OverlapPatchEmbed(embed_dims[i - 1], dim, 3, stride=2)
            blocks = [
                Block(
                    dim,
                    num_heads[i],
                    sr_ratio=sr_ratio[i],
                    linear=linear,
                    qkv_bias=qkv_bias,
                    mlp_ratio=mlp_ratio[i],
                    drop=dropout,
                    attn_drop=attention_dropout,
                    drop_path=rate,
                )
                for rate in rates
            ]
            self.stages.append(Stage(dim, downsample, blocks))
        self._add_classifiers()
        set_norm_eps(self, norm_eps)
        self.apply(self._init_weights)
        self._scale_classifiers()

    def _embed(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.patch_embed(x)

    def _stages(self) -> Iterable[Any]:
        return self.stages

    def _stage(self, stage: Any, x: paddle.Tensor, shared: Any) -> paddle.Tensor:
        return channels_first(stage.norm(self._run_all(stage.blocks, stage.downsample(x))))

    def forward_head(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.head(mean_of_places(x))

    def layer_groups(self) -> list[tuple[str, ...]]:
        """Returns the groups: the first embedding, each block, and the classifier with the last
        norm. The first block of a stage has the norm and the embedding before it.
        """
        groups: list[tuple[str, ...]] = [("patch_embed",)]
        for i, stage in enumerate(self.stages):
            blocks: list[tuple[str, ...]] = [
                (f"stages.{i}.blocks.{j}",) for j in range(len(stage.blocks))
            ]
            if i:
                blocks[0] += (f"stages.{i - 1}.norm", f"stages.{i}.downsample")
            groups += blocks
        return [*groups, ("stages.3.norm", "head")]

    def timm_layer_groups(self) -> list[tuple[str, ...]]:
        """Returns timm's groups: the first embedding, each whole stage, and the classifier."""
        stages = [(f"stages.{i}",) for i in range(len(self.stages))]
        return [("patch_embed",), *stages, ("head",)]

    def _init_weights(self, layer: nn.Layer) -> None:
        init_linear(layer)
        init_convolution(layer)
