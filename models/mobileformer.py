"""Mobile-Former (Chen et al. 2021, arXiv:2108.05895): convolutions and a few tokens side by side.

Parameter names, the order of operations and the initialisation are those of PaddleViT's own
implementation. The authors' code (AAboys/MobileFormer) has other layers, and its weights don't fit.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import paddle
from paddle import nn
from paddle.nn.initializer import Constant, TruncatedNormal, XavierUniform

from errors import InputError
from models.base import ImageModel, register
from models.layers import DropPath, LayerNorm, Linear, Mlp
from models.layers.activations import Hardswish, ReLU, dynamic_relu
from models.layers.attention import attend_heads
from models.layers.batch_norm import BatchNorm2D
from models.layers.conv import Conv2D
from models.layers.layout import concat, mean_of_places, swap_axes
from models.layers.mlp import hidden_width
from models.layers.stages import feature_info
from settings.keys import Depth, Factor, InTraining, OfClassifier, Positive, Rate, Size


class DynamicReLU(nn.Layer):
    """max(a1 x + b1, a2 x + b2), with coefficients that a token computes for each channel (Chen et
    al. 2020, arXiv:2003.10027).

    Args:
        dim: channels C of the maps.
        token_dim: channels D of the token.
        reduction: D over the hidden width of the MLP that computes the coefficients.

    Shape: [B, C, H, W], [B, D] -> [B, C, H, W].
    """

    def __init__(self, dim: int, token_dim: int, reduction: float) -> None:
        super().__init__()
        # PaddleViT multiplies by the ratio: 128 * (1 / 6) and 128 / 6 may differ in the last bit.
        hidden_dim = int(1 / reduction * token_dim)
        if not hidden_dim:
            raise InputError(
                f"RELU_REDUCTION is {reduction:g}, too high for {token_dim} channels; lower it"
            )
        mlp = Mlp(token_dim, hidden_dim, out_dim=4 * dim)
        self.project = nn.Sequential(mlp, LayerNorm(4 * dim))

    def forward(self, x: paddle.Tensor, token: paddle.Tensor) -> paddle.Tensor:
        # For each channel: a1 - 1, a2, 2 b1, 2 b2.
        offsets = self.project(token).reshape([-1, x.shape[1], 4])
        a1 = 1 + offsets[:, :, :1]
        a2 = offsets[:, :, 1:2]
        b1_b2 = 0.5 * offsets[:, :, 2:]
        return dynamic_relu(x, concat([a1, a2, b1_b2], axis=2))


class DepthwiseConv(nn.Layer):
    """A depthwise 3 x 3 convolution; ``lite``: one over columns, batch norm, and one over rows.

    Shape: [B, C, H, W] -> [B, C, H / stride, W / stride], rounded up.
    """

    def __init__(self, dim: int, stride: int, lite: bool = False) -> None:
        super().__init__()
        if lite:
            columns = Conv2D(dim, dim, (3, 1), stride=(stride, 1), padding=(1, 0), groups=dim)
            rows = Conv2D(dim, dim, (1, 3), stride=(1, stride), padding=(0, 1), groups=dim)
            self.conv = nn.Sequential(columns, BatchNorm2D(dim), rows)
        else:
            self.conv = Conv2D(dim, dim, 3, stride=stride, padding=1, groups=dim)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.conv(x)


class Bottleneck(nn.Layer):
    """1 x 1 convolution, depthwise convolution, 1 x 1 convolution, each with batch norm.

    Args:
        in_dim: channels of the input.
        hidden_dim: channels of the depthwise convolution.
        dim: channels of the output.
        groups: number of groups of the 1 x 1 convolutions.
        act: the dynamic ReLU after the first and after the second batch norm; None: there is no
            activation.
        stride: of the depthwise convolution.
        lite: whether the depthwise convolution is two (``DepthwiseConv``).

    Shape: [B, in_dim, H, W] -> [B, dim, H / stride, W / stride], rounded up.
    """

    def __init__(
        self,
        in_dim: int,
        hidden_dim: int,
        dim: int,
        groups: int,
        act: DynamicReLU | None,
        stride: int = 1,
        lite: bool = False,
    ) -> None:
        super().__init__()
        self.in_pw = _pointwise(in_dim, hidden_dim, groups)
        self.in_pw_bn = BatchNorm2D(hidden_dim)
        self.dw = DepthwiseConv(hidden_dim, stride, lite)
        self.dw_bn = BatchNorm2D(hidden_dim)
        self.out_pw = _pointwise(hidden_dim, dim, groups)
        self.out_pw_bn = BatchNorm2D(dim)
        self.act = act

    def forward(self, x: paddle.Tensor, token: paddle.Tensor | None = None) -> paddle.Tensor:
        x = self.in_pw_bn(self.in_pw(x))
        if self.act is not None:
            x = self.act(x, token)
        x = self.dw_bn(self.dw(x))
        if self.act is not None:
            x = self.act(x, token)
        return self.out_pw_bn(self.out_pw(x))


def _pointwise(in_dim: int, dim: int, groups: int) -> nn.Layer:
    return nn.Sequential(("conv", Conv2D(in_dim, dim, 1, groups=groups)))


class Mobile(nn.Layer):
    """A bottleneck, after a depthwise convolution of stride 2 where it halves maps.

    Shape: [B, in_dim, H, W], [B, token_dim] -> [B, dim, H / stride, W / stride], rounded up.
    """

    def __init__(self, in_dim: int, stride: int, bneck: Bottleneck) -> None:
        super().__init__()
        self.downsample_dw: nn.Layer = nn.Identity()
        if stride == 2:
            conv = DepthwiseConv(in_dim, stride)
            self.downsample_dw = nn.Sequential(conv, BatchNorm2D(in_dim), ReLU())
        self.bneck = bneck

    def forward(self, x: paddle.Tensor, token: paddle.Tensor) -> paddle.Tensor:
        return self.bneck(self.downsample_dw(x), token)


class Former(nn.Layer):
    """A transformer block of the tokens: x + attn(attn_ln(x)), then x + mlp(mlp_ln(x)), each branch
    with drop path.

    Shape: [B, M, D] -> the same.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float,
        qkv_bias: bool,
        attn_drop: float,
        mlp_drop: float,
        drop_path: float,
    ) -> None:
        super().__init__()
        self.attn = TokenAttention(dim, num_heads, qkv_bias, attn_drop)
        self.attn_ln = LayerNorm(dim)
        self.mlp = Mlp(dim, hidden_width(dim, mlp_ratio), mlp_drop)
        self.mlp_ln = LayerNorm(dim)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.drop_path(self.attn(self.attn_ln(x)), onto=x)
        return self.drop_path(self.mlp(self.mlp_ln(x)), onto=x)


class TokenAttention(nn.Layer):
    """Multi-head self-attention of the tokens, with dropout of the weights and of the output.

    Shape: [B, M, D] -> the same.
    """

    def __init__(self, dim: int, num_heads: int, qkv_bias: bool, attn_drop: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.qkv_proj = Linear(dim, 3 * dim, bias_attr=None if qkv_bias else False)
        self.output = Linear(dim, dim)
        self.attn_dropout = nn.Dropout(attn_drop)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        qkv = [self.qkv_proj(x)]
        scale = self.head_dim**-0.5
        x = attend_heads(qkv, self.num_heads, self.head_dim, scale, self.attn_dropout)
        return self.attn_dropout(self.output(x))


class HeadLinears(nn.LayerList):
    """A Linear for each head, from its part of a token to its part of a map's channels.

    Shape: [B, M, token_dim] -> [B, M, dim].
    """

    def __init__(self, token_dim: int, dim: int, num_heads: int, bias: bool) -> None:
        widths = token_dim // num_heads, dim // num_heads
        bias_attr = None if bias else False
        super().__init__(Linear(*widths, bias_attr=bias_attr) for _ in range(num_heads))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        heads = list(self.children())
        weights = paddle.stack([head.weight for head in heads])
        tokens = x.shape[1]
        # [heads, B * M, channels of a head]
        x = x.reshape([-1, len(heads), weights.shape[1]]).transpose([1, 0, 2])
        x = paddle.matmul(x, weights)
        if heads[0].bias is not None:
            x = x + paddle.stack([head.bias for head in heads]).unsqueeze(1).astype(x.dtype)
        return x.transpose([1, 0, 2]).reshape([-1, tokens, len(heads) * weights.shape[2]])


class Bridge(nn.Layer):
    """Multi-head attention between tokens and maps: the common part of both directions.

    Args:
        dim: channels C of the maps.
        num_heads: number of attention heads.
        drop: dropout of the output.
        attn_drop: dropout rate of the attention weights.
        drop_path: rate of stochastic depth.
    """

    def __init__(
        self, dim: int, num_heads: int, drop: float, attn_drop: float, drop_path: float
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.drop = nn.Dropout(drop)
        self.drop_path = DropPath(drop_path)
        self.attn_dropout = nn.Dropout(attn_drop)

    def attend(self, *qkv: paddle.Tensor) -> paddle.Tensor:
        """Returns the outputs of queries [B, N, C], for keys and values [B, M, C]."""
        scale = self.head_dim**-0.5
        return attend_heads(qkv, self.num_heads, self.head_dim, scale, self.attn_dropout)


class ToFormer(Bridge):
    """The bridge from maps to tokens: each token plus its attention to all places.

    The maps themselves are keys and values. Shape: [B, dim, H, W], [B, M, D] -> [B, M, D].
    """

    def __init__(
        self, token_dim: int, dim: int, num_heads: int, qkv_bias: bool, **rates: float
    ) -> None:
        super().__init__(dim, num_heads, **rates)
        self.input_norm = LayerNorm(token_dim)
        self.heads_q_proj = HeadLinears(token_dim, dim, num_heads, qkv_bias)
        self.output = Linear(dim, token_dim)

    def forward(self, x: paddle.Tensor, tokens: paddle.Tensor) -> paddle.Tensor:
        places = swap_axes(x.flatten(2))
        z = self.attend(self.heads_q_proj(self.input_norm(tokens)), places, places)
        return self.drop_path(self.drop(self.output(z)), onto=tokens)


class ToMobile(Bridge):
    """The bridge from tokens to maps: each place plus its attention to all tokens.

    The maps themselves are queries. Shape: [B, dim, H, W], [B, M, D] -> [B, dim, H, W].
    """

    def __init__(
        self, token_dim: int, dim: int, num_heads: int, qkv_bias: bool, **rates: float
    ) -> None:
        super().__init__(dim, num_heads, **rates)
        self.input_token_norm = LayerNorm(token_dim)
        self.heads_k_proj = HeadLinears(token_dim, dim, num_heads, qkv_bias)
        self.heads_v_proj = HeadLinears(token_dim, dim, num_heads, qkv_bias)

    def forward(self, x: paddle.Tensor, tokens: paddle.Tensor) -> paddle.Tensor:
        tokens = self.input_token_norm(tokens)
        places = swap_axes(x.flatten(2))
        z = self.attend(places, self.heads_k_proj(tokens), self.heads_v_proj(tokens))
        z = swap_axes(z).reshape([0, x.shape[1], *x.shape[2:]])
        return self.drop_path(self.drop(z), onto=x)


class Block(nn.Layer):
    """Mobile and Former, and the bridges between them.

    Shape: [B, in_dim, H, W], [B, M, D] -> [B, dim, H / stride, W / stride], [B, M, D].
    """

    def __init__(
        self, mobile: Mobile, former: Former, to_former: ToFormer, to_mobile: ToMobile
    ) -> None:
        super().__init__()
        self.mobile = mobile
        self.toformer_bridge = to_former
        self.former = former
        self.tomobile_bridge = to_mobile

    def forward(
        self, x: paddle.Tensor, tokens: paddle.Tensor
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        tokens = self.former(self.toformer_bridge(x, tokens))
        x = self.mobile(x, tokens[:, 0])
        return self.tomobile_bridge(x, tokens), tokens


@register("mobileformer")
class MobileFormer(ImageModel):
    """Mobile-Former. It takes images of any size.

    Its intermediates are the maps before each halving, and its features: the last map after a 1 x 1
    convolution, with the channels of the first token at every place: [B, last_dim + token_dim,
    H / 32, W / 32], rounded up.

    Args:
        stem_dim: number of channels of the stem, which has stride 2.
        lite_dims: number of channels within and after the first bottleneck, which has no
            activation.
        lite_stride: stride of the first bottleneck.
        embed_dims: number of channels of each block's output.
        hidden_dims: number of channels within each block's bottleneck.
        strides: stride of each block, 1 or 2.
        conv_groups: number of groups of the 1 x 1 convolutions.
        num_tokens: number of tokens M.
        token_dim: channels D of a token.
        num_heads: number of attention heads everywhere.
        mlp_ratio: ratio of the hidden width of the tokens' MLPs to token_dim.
        qkv_bias: whether the queries, keys and values have a bias.
        dynamic_relu: whether the bottlenecks have a dynamic ReLU. Otherwise they have no
            activation.
        relu_reduction: ratio of token_dim to the hidden width of the MLPs that compute the
            coefficients of the dynamic ReLU.
        last_dim: number of channels of the last convolution.
        head_dim: number of channels of the Linear before the classifier.
        dropout: dropout rate in the bridges and before the last Linear.
        attention_dropout: dropout rate of the attention weights.
        mlp_dropout: dropout rate in the tokens' MLPs.
        droppath: stochastic depth rate of all blocks.

    Raises:
        InputError: numbers that don't fit together.
    """

    first_conv = "stem.conv"
    min_image_size = 1

    def __init__(
        self,
        image_size: int | Sequence[int] = 224,
        in_channels: int = 3,
        num_classes: int = 1000,
        stem_dim: Size = 8,
        lite_dims: Sequence[Size] = (24, 12),
        lite_stride: Size = 2,
        embed_dims: Sequence[Size] = (12, 24, 24, 48, 48, 64, 96, 96),
        hidden_dims: Sequence[Size] = (36, 72, 72, 144, 192, 288, 384, 576),
        strides: Sequence[Size] = (1, 2, 1, 2, 1, 1, 2, 1),
        conv_groups: Size = 4,
        num_tokens: Depth = 3,
        token_dim: Size = 128,
        num_heads: Size = 4,
        mlp_ratio: Positive = 2.0,
        qkv_bias: bool = True,
        dynamic_relu: bool = True,
        relu_reduction: Positive = 6.0,
        last_dim: Size = 576,
        head_dim: OfClassifier[Size] = 1024,
        dropout: InTraining[Rate] = 0.0,
        attention_dropout: InTraining[Rate] = 0.0,
        mlp_dropout: InTraining[Rate] = 0.0,
        droppath: InTraining[Rate] = 0.0,
        head_init_scale: InTraining[OfClassifier[Factor]] = 1.0,
        recompute: InTraining[bool] = False,
    ) -> None:
        super().__init__(image_size, in_channels, num_classes, head_init_scale, recompute)
        _check_blocks(embed_dims, hidden_dims, strides)
        if len(lite_dims) != 2:
            raise InputError(f"LITE_DIMS is {list(lite_dims)}, expected two numbers")
        _check_divisors(num_heads, token_dim, (lite_dims[1], *embed_dims))
        _check_groups(conv_groups, (stem_dim, *lite_dims, *embed_dims, *hidden_dims, last_dim))
        self.num_features = head_dim
        self.tokens = self.create_parameter(
            [1, num_tokens, token_dim], default_initializer=XavierUniform()
        )
        stem_conv = Conv2D(in_channels, stem_dim, 3, stride=2, padding=1)
        self.stem = nn.Sequential(
            ("conv", stem_conv), ("bn", BatchNorm2D(stem_dim)), ("act", Hardswish())
        )
        lite_hidden, in_dim = lite_dims
        self.bneck_lite = Bottleneck(
            stem_dim, lite_hidden, in_dim, conv_groups, act=None, stride=lite_stride, lite=True
        )
        rates = {"drop": dropout, "attn_drop": attention_dropout, "drop_path": droppath}
        self.blocks = nn.LayerList()
        for dim, hidden_dim, stride in zip(embed_dims, hidden_dims, strides, strict=True):
            act = DynamicReLU(hidden_dim, token_dim, relu_reduction) if dynamic_relu else None
            bneck = Bottleneck(in_dim, hidden_dim, dim, conv_groups, act)
            former = Former(
                token_dim,
                num_heads,
                mlp_ratio,
                qkv_bias,
                attention_dropout,
                mlp_dropout,
                droppath,
            )
            self.blocks.append(
                Block(
                    Mobile(in_dim, stride, bneck),
                    former,
                    ToFormer(token_dim, in_dim, num_heads, qkv_bias, **rates),
                    ToMobile(token_dim, dim, num_heads, qkv_bias, **rates),
                )
            )
            in_dim = dim
        self.end_toformer_bridge = ToFormer(token_dim, in_dim, num_heads, qkv_bias=True, **rates)
        conv = _pointwise(in_dim, last_dim, conv_groups)
        self.channel_conv = nn.Sequential(conv, BatchNorm2D(last_dim), ReLU())
        self.head = nn.Sequential(
            ("fc1", Linear(last_dim + token_dim, head_dim)),
            ("act", Hardswish()),
            ("drop", nn.Dropout(dropout)),
            ("fc2", nn.Identity()),
        )
        self.stage_blocks = _stage_blocks(strides)
        reduction = 2 * lite_stride
        reductions = []
        for blocks in self.stage_blocks:
            reduction *= strides[blocks[0]]
            reductions.append(reduction)
        ends = [blocks[-1] for blocks in self.stage_blocks]
        modules = [*(f"blocks.{end}" for end in ends), "channel_conv"]
        channels = [*(embed_dims[end] for end in ends), last_dim + token_dim]
        self.feature_info = feature_info(modules, channels, [*reductions, reduction])
        self._finish()

    def _embed(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.bneck_lite(self.stem(x))

    def _stages(self) -> Iterable[Any]:
        return [*self.stage_blocks, None]

    def _shared(self) -> dict[str, paddle.Tensor]:
        """Returns the dictionary in which ``_stage`` keeps the tokens."""
        return {}

    def _stage(self, stage: Any, x: paddle.Tensor, shared: Any) -> paddle.Tensor:
        if "tokens" not in shared:
            shared["tokens"] = self.tokens.expand([x.shape[0], -1, -1])
        if stage is None:
            token = self.end_toformer_bridge(x, shared["tokens"])[:, 0]
            x = self.channel_conv(x)
            token = token.unsqueeze(2).unsqueeze(3).expand([-1, -1, *x.shape[2:]])
            return paddle.concat([x, token.astype(x.dtype)], axis=1)
        for i in stage:
            x, shared["tokens"] = self._run(self.blocks[i], x, shared["tokens"])
        return x

    def forward_head(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.head(mean_of_places(x))

    def classifier_names(self) -> tuple[str, ...]:
        return ("head.fc2",)

    def layer_groups(self) -> list[tuple[str, ...]]:
        """Returns the groups: the stem with the tokens, each block, the last convolution with the
        last bridge, the classifier.
        """
        blocks = [(f"blocks.{i}",) for i in range(len(self.blocks))]
        last = ("end_toformer_bridge", "channel_conv")
        return [("stem", "bneck_lite", "tokens"), *blocks, last, ("head",)]

    def no_weight_decay(self) -> set[str]:
        return {"tokens"}

    def _init_weights(self, layer: nn.Layer) -> None:
        if isinstance(layer, (nn.Conv2D, nn.Linear)):
            TruncatedNormal(std=0.02)(layer.weight)
            if layer.bias is not None:
                Constant(0.0)(layer.bias)


def _stage_blocks(strides: Sequence[int]) -> list[list[int]]:
    """Returns the numbers of each stage's blocks. A block of stride 2 begins a stage."""
    stages: list[list[int]] = []
    for i, stride in enumerate(strides):
        if stride == 2 or not stages:
            stages.append([])
        stages[-1].append(i)
    return stages


def _check_blocks(dims: Sequence[int], hidden_dims: Sequence[int], strides: Sequence[int]) -> None:
    for key, values in (("HIDDEN_DIMS", hidden_dims), ("STRIDES", strides)):
        if len(values) != len(dims):
            raise InputError(
                f"{key} is {list(values)}, expected {len(dims)} numbers: one per block of EMBED_DIMS"
            )
    if any(stride > 2 for stride in strides):
        raise InputError(f"STRIDES is {list(strides)}, expected 1 or 2 for each block")


def _check_divisors(num_heads: int, token_dim: int, dims: Sequence[int]) -> None:
    """Raises InputError unless all channels can be cut into heads."""
    for dim in (token_dim, *dims):
        if dim % num_heads:
            raise InputError(f"NUM_HEADS is {num_heads}, expected a divisor of {dim} channels")


def _check_groups(groups: int, dims: Sequence[int]) -> None:
    for dim in dims:
        if dim % groups:
            raise InputError(f"CONV_GROUPS is {groups}, expected a divisor of {dim} channels")
