"""ResT (Zhang and Yang 2021, arXiv:2105.13677) and ResTv2 (Zhang and Yang 2022, arXiv:2204.07366):
pyramids whose attention reads a map that depthwise convolutions have made smaller.

Parameter names, the order of operations and the initialisation are those of the authors' code
(wofmanaf/ResT, b9245d3). The weight of a Linear is [in, out] here and [out, in] there.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import paddle
from paddle import nn
from paddle.nn import functional as F
from paddle.nn.initializer import Normal

from errors import InputError
from models.base import ImageModel, register
from models.layers import LayerNorm, Linear, init_linear, set_norm_eps
from models.layers.activations import ReLU, relu, softmax
from models.layers.attention import attend_heads
from models.layers.batch_norm import BatchNorm2D
from models.layers.block import Block
from models.layers.conv import Conv2D
from models.layers.graph_sizes import as_tensor, is_known, places, taken
from models.layers.init import init_as_torch
from models.layers.layout import channels_first, channels_last, mean_of_places
from models.layers.linear import in_float32, matmul
from models.layers.scale import multiply, scale_planes
from models.layers.stages import check_counts, check_stages, drop_path_rates, feature_info
from settings.keys import Depth, Factor, InTraining, OfClassifier, Positive, Rate, Size
from weights.names import rest as names


class PixelAttention(nn.Layer):
    """Multiplies each value by a factor in 0..1, which a depthwise 3 x 3 convolution computes.

    Shape: [B, dim, H, W] -> the same.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.pa_conv = Conv2D(dim, dim, 3, padding=1, groups=dim)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return multiply(x, F.sigmoid(self.pa_conv(x)))


class Attention(nn.Layer):
    """Efficient multi-head self-attention: all places attend to a smaller map of keys and values.

    Args:
        dim: channels D.
        num_heads: number of attention heads.
        sr_ratio: a depthwise convolution makes one key and value of each sr_ratio x sr_ratio
            places; 1: there is no convolution.
        qkv_bias: whether the queries, keys and values have a bias.
        attn_drop: dropout rate of the attention weights.
        proj_drop: dropout of the output.
        apply_transform: whether a 1 x 1 convolution mixes the scores of several heads, and each
            head's weights are normalised over all queries and keys. ResTv2 has none.

    Shape: [B, H, W, D] -> the same.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        sr_ratio: int,
        qkv_bias: bool,
        attn_drop: float,
        proj_drop: float,
        apply_transform: bool,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.scale = self.head_dim**-0.5
        self.sr_ratio = sr_ratio
        bias_attr = None if qkv_bias else False
        self.q = Linear(dim, dim, bias_attr=bias_attr)
        self.kv = Linear(dim, 2 * dim, bias_attr=bias_attr)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)
        if sr_ratio > 1:
            self.sr = Conv2D(
                dim, dim, sr_ratio + 1, stride=sr_ratio, padding=sr_ratio // 2, groups=dim
            )
            self.sr_norm = LayerNorm(dim)
        self.mixes_heads = apply_transform and num_heads > 1
        if self.mixes_heads:
            self.transform_conv = Conv2D(num_heads, num_heads, 1)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        shape = x.shape
        kv = self.keys_and_values(x)
        x = self.attend(self.q(x).flatten(1, 2), kv.flatten(1, 2))
        return self.proj_drop(self.proj(x.reshape([-1, *shape[1:]])))

    def keys_and_values(self, x: paddle.Tensor) -> paddle.Tensor:
        """Returns keys and values of a map: [B, H, W, D] -> [B, H / sr_ratio, W / sr_ratio, 2 D],
        rounded up.
        """
        if self.sr_ratio > 1:
            x = self.sr_norm(self.sr(x, last=True))
        return self.kv(x)

    def attend(self, q: paddle.Tensor, kv: paddle.Tensor) -> paddle.Tensor:
        """Returns the outputs of all heads, side by side: q [B, N, D], kv [B, M, 2 D] -> [B, N, D]."""
        heads = self.num_heads
        width = self.head_dim
        if not self.mixes_heads:
            return attend_heads([q, kv], heads, width, self.scale, self.attn_drop)
        length = q.shape[1]
        q = q.reshape([-1, length, heads, width]).transpose([0, 2, 1, 3])
        kv = kv.reshape([-1, kv.shape[1], 2, heads, width]).transpose([2, 0, 3, 1, 4])
        k, v = kv.unbind(0)
        scores = matmul(q, k, transpose_y=True, scale=self.scale)
        # The 1 x 1 convolution as a product: Paddle Inference passes a convolution's output in
        # oneDNN's own layout to the product with v, which takes it for a plain one (Paddle 3.3.1).
        mixer = self.transform_conv
        mixed = matmul(mixer.weight.flatten(1), scores.flatten(2), bias=mixer.bias)
        weights = self.attn_drop(_standardised(softmax(mixed.reshape(scores.shape))))
        return matmul(weights, v).transpose([0, 2, 1, 3]).flatten(2)


def _standardised(weights: paddle.Tensor) -> paddle.Tensor:
    """Returns each head's weights with a mean of 0 and a variance of 1 (instance norm).

    Shape: [B, heads, N, M] -> the same.
    """
    weights = in_float32(weights)
    # Each query's weights add up to 1, so that their mean is that of all queries, too. A sum over
    # all of them would be less exact.
    centred = weights - weights.mean(axis=-1, keepdim=True)
    squares = multiply(centred, centred)
    variance = squares.mean(axis=-1, keepdim=True).mean(axis=-2, keepdim=True)
    return scale_planes(centred, paddle.rsqrt(variance + 1e-5))


class UpsampleAttention(Attention):
    """The attention of ResTv2, whose values are also added to its output, enlarged to its places.

    A depthwise convolution and a pixel shuffle enlarge them.

    Shape: [B, H, W, D] -> the same.
    """

    def __init__(self, dim: int, num_heads: int, sr_ratio: int, **options: Any) -> None:
        super().__init__(dim, num_heads, sr_ratio, **options, apply_transform=False)
        self.dim = dim
        self.up = nn.Sequential(
            Conv2D(dim, sr_ratio**2 * dim, 3, padding=1, groups=dim),
            nn.PixelShuffle(sr_ratio) if sr_ratio > 1 else nn.Identity(),
        )
        self.up_norm = LayerNorm(dim)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        shape = x.shape
        kv = self.keys_and_values(x)
        values = self.up(channels_first(kv[:, :, :, self.dim :]))
        values = self.up_norm(_cut(channels_last(values), shape[1], shape[2]))
        x = self.attend(self.q(x).flatten(1, 2), kv.flatten(1, 2)).reshape([-1, *shape[1:]])
        return self.proj_drop(self.proj(x + values))


def _cut(x: paddle.Tensor, height: Any, width: Any) -> paddle.Tensor:
    """Returns the first rows and columns of maps: [B, H, W, D] -> [B, height, width, D].

    The sides of a map in a graph may be tensors.
    """
    if is_known(height, width):
        return x if (height, width) == tuple(x.shape[1:3]) else x[:, :height, :width]
    x = taken(x, 1, places(height), as_tensor(height))
    return taken(x, 2, places(width), as_tensor(width))


class Stem(nn.Layer):
    """ResT's stem: three convolutions, two of which halve the image, and pixel attention.

    Shape: [B, in_channels, H, W] -> [B, H / 4, W / 4, dim], rounded up.
    """

    def __init__(self, in_channels: int, dim: int) -> None:
        super().__init__()
        hidden_dim = dim // 2
        self.conv1 = Conv2D(in_channels, hidden_dim, 3, stride=2, padding=1, bias_attr=False)
        self.norm1 = BatchNorm2D(hidden_dim)
        self.conv2 = Conv2D(hidden_dim, hidden_dim, 3, padding=1, bias_attr=False)
        self.norm2 = BatchNorm2D(hidden_dim)
        self.conv3 = Conv2D(hidden_dim, dim, 3, stride=2, padding=1, bias_attr=False)
        self.pos = PixelAttention(dim)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.norm1(self.conv1(x), relu)
        x = self.norm2(self.conv2(x), relu)
        return channels_last(self.pos(self.conv3(x)))


class StemV2(nn.Layer):
    """ResTv2's stem: three convolutions, two of which halve the image, pixel attention, and a norm.

    Shape: [B, in_channels, H, W] -> [B, H / 4, W / 4, dim], rounded up.
    """

    def __init__(self, in_channels: int, dim: int) -> None:
        super().__init__()
        hidden_dim = dim // 2
        self.proj = nn.Sequential(
            Conv2D(in_channels, hidden_dim, 3, stride=2, padding=1, bias_attr=False),
            BatchNorm2D(hidden_dim),
            ReLU(),
            Conv2D(hidden_dim, 2 * hidden_dim, 3, stride=2, padding=1, bias_attr=False),
            BatchNorm2D(2 * hidden_dim),
            ReLU(),
            Conv2D(2 * hidden_dim, dim, 1),
        )
        self.pos = PixelAttention(dim)
        self.norm = LayerNorm(dim)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.norm(channels_last(self.pos(self.proj(x))))


class PatchEmbed(nn.Layer):
    """ResT's step from stage to stage: a convolution that halves a map, batch norm, pixel attention.

    Shape: [B, H, W, in_dim] -> [B, H / 2, W / 2, dim], rounded up.
    """

    def __init__(self, in_dim: int, dim: int) -> None:
        super().__init__()
        self.conv = Conv2D(in_dim, dim, 3, stride=2, padding=1)
        self.norm = BatchNorm2D(dim)
        self.pos = PixelAttention(dim)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return channels_last(self.pos(self.norm(self.conv(channels_first(x)))))


class PatchEmbedV2(nn.Layer):
    """ResTv2's: a convolution that halves a map, pixel attention, layer norm.

    Shape: [B, H, W, in_dim] -> [B, H / 2, W / 2, dim], rounded up.
    """

    def __init__(self, in_dim: int, dim: int) -> None:
        super().__init__()
        self.proj = Conv2D(in_dim, dim, 3, stride=2, padding=1)
        self.pos = PixelAttention(dim)
        self.norm = LayerNorm(dim)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.norm(channels_last(self.pos(self.proj(channels_first(x)))))


class _Pyramid(ImageModel):
    """The common part of ResT and ResTv2.

    Attributes:
        step_name: the layer before the second stage, without its number.
    """

    weight_names = names
    layout = "NHWC"
    min_image_size = 1
    step_name: str

    def _add_stages(
        self,
        attention: Callable[[int], nn.Layer],
        step: Callable[[int, int], nn.Layer],
        stage_depths: Sequence[int],
        embed_dims: Sequence[int],
        mlp_ratio: float | Sequence[float],
        drop: float,
        drop_path: float,
    ) -> None:
        """Adds the layers after the stem.

        Args:
            attention: makes an attention of a stage, by its index.
            step: makes the layer between two stages, of both numbers of channels.
        """
        ratios = [mlp_ratio] * 4 if isinstance(mlp_ratio, int | float) else mlp_ratio
        check_counts(4, MLP_RATIO=ratios)
        self.num_features = embed_dims[-1]
        for i, rates in enumerate(drop_path_rates(drop_path, stage_depths)):
            if i:
                setattr(self, f"{self.step_name}_{i + 1}", step(embed_dims[i - 1], embed_dims[i]))
            blocks = [
                Block(
                    embed_dims[i],
                    attention(i),
                    mlp_ratio=ratios[i],
                    init_values=None,
                    drop=drop,
                    drop_path=rate,
                )
                for rate in rates
            ]
            setattr(self, f"stage{i + 1}", nn.LayerList(blocks))
        modules = [f"stage{i + 1}" for i in range(4)]
        self.feature_info = feature_info(modules, embed_dims, (4, 8, 16, 32))
        self.norm = LayerNorm(embed_dims[-1])

    def _embed(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.stem(x)

    def _stages(self) -> Iterable[Any]:
        return (1, 2, 3, 4)

    def _stage(self, stage: Any, x: paddle.Tensor, shared: Any) -> paddle.Tensor:
        if stage > 1:
            x = getattr(self, f"{self.step_name}_{stage}")(x)
        return self._run_all(getattr(self, f"stage{stage}"), x)

    def forward_head(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.head(mean_of_places(channels_first(x)))

    def layer_groups(self) -> list[tuple[str, ...]]:
        """Returns the authors' groups: the stem, each block, each step between two stages, and the
        classifier with the last norm.
        """
        groups: list[tuple[str, ...]] = [("stem",)]
        for i in (1, 2, 3, 4):
            if i > 1:
                groups.append((f"{self.step_name}_{i}",))
            groups += [(f"stage{i}.{j}",) for j in range(len(getattr(self, f"stage{i}")))]
        return [*groups, ("norm", "head")]


@register("rest")
class ResT(_Pyramid):
    """ResT. It takes images of any size.

    Its features are the last stage's output, normalised: [B, H / 32, W / 32, embed_dims[3]],
    rounded up.

    Args:
        stage_depths: number of blocks in each of the four stages.
        embed_dims: number of channels of each of the four stages, even numbers.
        num_heads: number of attention heads in each of the four stages.
        sr_ratio: for each stage the side of the patches that are reduced to one key and value.
        mlp_ratio: ratio of the MLPs' hidden width to their input width; one number, or one per
            stage.
        qkv_bias: whether the queries, keys and values have a bias.
        apply_transform: whether a convolution mixes the attention scores of the heads, and each
            head's attention weights are normalised over all queries and keys.
        dropout: dropout rate after the attention's projection and in the MLPs.
        attention_dropout: dropout rate of the attention weights.
        droppath: stochastic depth rate of the last block; the rates grow linearly from 0 at the
            first.

    Raises:
        InputError: sizes that don't fit together.
    """

    first_conv = "stem.conv1"
    step_name = "patch_embed"

    def __init__(
        self,
        image_size: int | Sequence[int] = 224,
        in_channels: int = 3,
        num_classes: int = 1000,
        stage_depths: Sequence[Depth] = (2, 2, 2, 2),
        embed_dims: Sequence[Size] = (64, 128, 256, 512),
        num_heads: Sequence[Size] = (1, 2, 4, 8),
        sr_ratio: Sequence[Size] = (8, 4, 2, 1),
        mlp_ratio: Positive | Sequence[Positive] = 4.0,
        qkv_bias: bool = True,
        apply_transform: bool = True,
        dropout: InTraining[Rate] = 0.0,
        attention_dropout: InTraining[Rate] = 0.0,
        droppath: InTraining[Rate] = 0.0,
        head_init_scale: InTraining[OfClassifier[Factor]] = 1.0,
        recompute: InTraining[bool] = False,
    ) -> None:
        _check_sizes(stage_depths, embed_dims, num_heads, sr_ratio)
        super().__init__(image_size, in_channels, num_classes, head_init_scale, recompute)

        def attention(stage: int) -> Attention:
            return Attention(
                embed_dims[stage],
                num_heads[stage],
                sr_ratio[stage],
                qkv_bias=qkv_bias,
                attn_drop=attention_dropout,
                proj_drop=dropout,
                apply_transform=apply_transform,
            )

        self.stem = Stem(in_channels, embed_dims[0])
        self._add_stages(
            attention, PatchEmbed, stage_depths, embed_dims, mlp_ratio, dropout, droppath
        )
        set_norm_eps(self, 1e-5)
        self._finish()

    def _init_weights(self, layer: nn.Layer) -> None:
        init_linear(layer)
        if isinstance(layer, nn.Conv2D):
            # for the bias
            init_as_torch(layer)
            Normal(std=0.02)(layer.weight)


@register("restv2")
class ResTv2(_Pyramid):
    """ResTv2. It takes images of any size.

    Its features are the last stage's output, normalised: [B, H / 32, W / 32, embed_dims[3]],
    rounded up.

    Args:
        stage_depths: number of blocks in each of the four stages.
        embed_dims: number of channels of each of the four stages, even numbers.
        num_heads: number of attention heads in each of the four stages.
        sr_ratio: for each stage the side of the patches that are reduced to one key and value.
            Where a map isn't a multiple of it, the enlarged values are cropped; the authors' code
            accepts multiples only.
        mlp_ratio: ratio of the MLPs' hidden width to their input width; one number, or one per
            stage.
        qkv_bias: whether the queries, keys and values have a bias.
        dropout: dropout rate after the attention's projection and in the MLPs.
        attention_dropout: dropout rate of the attention weights.
        droppath: stochastic depth rate of the last block; the rates grow linearly from 0 at the
            first.

    Raises:
        InputError: sizes that don't fit together.
    """

    first_conv = "stem.proj.0"
    step_name = "patch"

    def __init__(
        self,
        image_size: int | Sequence[int] = 224,
        in_channels: int = 3,
        num_classes: int = 1000,
        stage_depths: Sequence[Depth] = (1, 2, 6, 2),
        embed_dims: Sequence[Size] = (96, 192, 384, 768),
        num_heads: Sequence[Size] = (1, 2, 4, 8),
        sr_ratio: Sequence[Size] = (8, 4, 2, 1),
        mlp_ratio: Positive | Sequence[Positive] = 4.0,
        qkv_bias: bool = True,
        dropout: InTraining[Rate] = 0.0,
        attention_dropout: InTraining[Rate] = 0.0,
        droppath: InTraining[Rate] = 0.0,
        head_init_scale: InTraining[OfClassifier[Factor]] = 1.0,
        recompute: InTraining[bool] = False,
    ) -> None:
        _check_sizes(stage_depths, embed_dims, num_heads, sr_ratio)
        super().__init__(image_size, in_channels, num_classes, head_init_scale, recompute)

        def attention(stage: int) -> UpsampleAttention:
            return UpsampleAttention(
                embed_dims[stage],
                num_heads[stage],
                sr_ratio[stage],
                qkv_bias=qkv_bias,
                attn_drop=attention_dropout,
                proj_drop=dropout,
            )

        self.stem = StemV2(in_channels, embed_dims[0])
        self._add_stages(
            attention, PatchEmbedV2, stage_depths, embed_dims, mlp_ratio, dropout, droppath
        )
        set_norm_eps(self, 1e-6)
        self._finish()

    def _init_weights(self, layer: nn.Layer) -> None:
        init_linear(layer)
        if isinstance(layer, nn.Conv2D):
            # The bias stays at Paddle's 0.
            Normal(std=0.02)(layer.weight)


def _check_sizes(
    depths: Sequence[int], dims: Sequence[int], num_heads: Sequence[int], ratios: Sequence[int]
) -> None:
    check_stages(depths, dims)
    check_counts(4, NUM_HEADS=num_heads, SR_RATIO=ratios)
    for dim, heads in zip(dims, num_heads, strict=True):
        if dim % heads:
            raise InputError(
                f"NUM_HEADS has {heads}, expected a divisor of the {dim} channels in EMBED_DIMS"
            )
    if dims[0] % 2:
        raise InputError(f"EMBED_DIMS begins with {dims[0]}, expected an even number")
    for ratio in ratios:
        if ratio % 2 and ratio > 1:
            raise InputError(f"SR_RATIO has {ratio}, expected 1 or even numbers")
