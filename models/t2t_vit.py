"""Tokens-to-Token ViT (T2T-ViT; Yuan et al. 2021, arXiv:2101.11986): overlapping windows of pixels
become tokens in three steps, with attention between them, before a plain Vision Transformer.

Parameter names and the order of operations are those of the authors' code
(yitu-opensource/T2T-ViT, 0f63dc9). The weight of a Linear is [in, out] here and [out, in] there.
"""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F
from paddle.nn.initializer import Assign, Constant, Normal, Orthogonal

from errors import InputError
from models.base import ImageModel, register
from models.layers import Attention, LayerNorm, Linear, Mlp, init_linear, set_norm_eps
from models.layers.activations import GELU
from models.layers.attention import attend_heads
from models.layers.block import Block
from models.layers.layout import concat, split, swap_axes
from models.layers.linear import in_float32
from models.layers.scale import add_to_all
from models.layers.sizes import check_multiples
from models.layers.stages import drop_path_rates, feature_info
from settings.keys import Depth, Epsilon, Factor, InTraining, OfClassifier, Positive, Rate, Size
from weights.names import t2t_vit as names

# The sides, strides and paddings of the three steps' windows, in pixels and then in tokens.
_WINDOWS = ((7, 4, 2), (3, 2, 1), (3, 2, 1))
# Pixels along the side of a last token.
_STRIDE = 16


def windows(x: paddle.Tensor, step: int) -> paddle.Tensor:
    """Returns the values of each window of a step, channel by channel.

    Shape: [B, C, H, W] -> [B, H / stride * W / stride, C * side^2].
    """
    side, stride, padding = _WINDOWS[step]
    return swap_axes(F.unfold(x, side, strides=stride, paddings=padding))


class TokenPerformer(nn.Layer):
    """A block of the Performer (Choromanski et al. 2020, arXiv:2009.14794), whose attention costs
    as much as there are tokens, not as their pairs.

    exp(q k^T) is approximated by products of positive random features of q and of k. The block
    narrows its tokens, so the values take the place of the input in the residual connection.

    Args:
        dim: channels of the input.
        token_dim: channels D of the output.
        drop: dropout of both branches.
        fixed: whether the random features are a buffer, and aren't trained.

    Shape: [B, N, dim] -> [B, N, D].
    """

    def __init__(self, dim: int, token_dim: int, drop: float, fixed: bool) -> None:
        super().__init__()
        self.token_dim = token_dim
        self.features = token_dim // 2
        self.norm1 = LayerNorm(dim)
        self.kqv = Linear(dim, 3 * token_dim)
        self.proj = Linear(token_dim, token_dim)
        self.dp = nn.Dropout(drop)
        self.norm2 = LayerNorm(token_dim)
        self.mlp = nn.Sequential(
            Linear(token_dim, token_dim), GELU(), Linear(token_dim, token_dim), nn.Dropout(drop)
        )
        self.w = self.create_parameter(
            [self.features, token_dim],
            default_initializer=Orthogonal(gain=math.sqrt(self.features)),
        )
        if fixed:
            self.register_buffer("w", self._parameters.pop("w").detach())

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        kqv = in_float32(self.kqv(self.norm1(x)))
        k, q, v = split(kqv, [self.token_dim] * 3, axis=2)
        # Exponentials of squares overflow half precision.
        with paddle.amp.auto_cast(enable=False):
            attended = self._attend(q, k, v)
        x = v + self.dp(self.proj(attended))
        return x + self.mlp(self.norm2(x))

    def _attend(self, q: paddle.Tensor, k: paddle.Tensor, v: paddle.Tensor) -> paddle.Tensor:
        q = self._random_features(q)
        k = self._random_features(k)
        values = paddle.matmul(k, v, transpose_x=True)
        total = paddle.matmul(q, k.sum(axis=1).unsqueeze(2))
        # As a tensor: a number as small as this gets lost in Paddle 2.6's exports to ONNX.
        return paddle.matmul(q, values) / (total + paddle.full([1], 1e-8))

    def _random_features(self, x: paddle.Tensor) -> paddle.Tensor:
        """Returns exp(w x - |x|^2 / 2) / sqrt(m) for the m rows of w: [B, N, D] -> [B, N, m]."""
        half_square = (x * x).sum(axis=-1, keepdim=True) / 2
        products = paddle.matmul(x, self.w, transpose_y=True)
        return paddle.exp(products - half_square) / math.sqrt(self.features)


class TokenAttention(nn.Layer):
    """Self-attention of one head that narrows its tokens. Its values are added to its output.

    Scores are divided by the square root of the input's channels, as in the authors' code.

    Shape: [B, N, dim] -> [B, N, token_dim].
    """

    def __init__(self, dim: int, token_dim: int) -> None:
        super().__init__()
        self.token_dim = token_dim
        # Flash attention divides scores by the square root of the queries' own channels.
        self.scale = token_dim**-0.5
        self.query_factor = (token_dim / dim) ** 0.5
        self.qkv = Linear(dim, 3 * token_dim, bias_attr=False)
        self.proj = Linear(token_dim, token_dim)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        q, k, v = split(self.qkv(x), [self.token_dim] * 3, axis=2)
        q = q * self.query_factor
        x = attend_heads([q, k, v], 1, self.token_dim, self.scale, flash=True)
        return in_float32(v) + self.proj(x)


class TokenTransformer(nn.Layer):
    """A transformer block that narrows its tokens: attn(norm1(x)), then x + mlp(norm2(x)).

    Shape: [B, N, dim] -> [B, N, token_dim].
    """

    def __init__(self, dim: int, token_dim: int) -> None:
        super().__init__()
        self.norm1 = LayerNorm(dim)
        self.attn = TokenAttention(dim, token_dim)
        self.norm2 = LayerNorm(token_dim)
        self.mlp = Mlp(token_dim, token_dim)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TokensToToken(nn.Layer):
    """Images to tokens, in three steps: windows of 7 x 7 pixels, then twice windows of 3 x 3 tokens,
    with a block of attention after each of the first two.

    Shape: [B, in_channels, H, W] -> [B, H / 16 * W / 16, dim].

    Args:
        image_size: (H, W).
        in_channels: channels of the image.
        dim: channels of the last tokens.
        token_dim: channels of the tokens before.
        token_type: the blocks of attention.
        drop: dropout of a performer's branches.
        fixed: whether a performer's random features aren't trained.
    """

    def __init__(
        self,
        image_size: Sequence[int],
        in_channels: int,
        dim: int,
        token_dim: int,
        token_type: str,
        drop: float,
        fixed: bool,
    ) -> None:
        super().__init__()
        self.image_size = tuple(image_size)
        rows, columns = (side // _STRIDE for side in image_size)
        self.grid_size = (rows, columns)
        self.num_patches = rows * columns
        blocks = []
        for (side, _, _), channels in zip(_WINDOWS, (in_channels, token_dim), strict=False):
            if token_type == "performer":
                blocks.append(TokenPerformer(channels * side**2, token_dim, drop, fixed))
            else:
                blocks.append(TokenTransformer(channels * side**2, token_dim))
        self.attention1, self.attention2 = blocks
        self.project = Linear(token_dim * _WINDOWS[2][0] ** 2, dim)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        if tuple(x.shape[2:]) != self.image_size:
            height, width = self.image_size
            raise InputError(
                f"the model takes images of {height} x {width}, found {x.shape[2]} x {x.shape[3]}"
            )
        x = self._as_map(self.attention1(windows(x, 0)), 4)
        x = self._as_map(self.attention2(windows(x, 1)), 2)
        return self.project(windows(x, 2))

    def _as_map(self, x: paddle.Tensor, factor: int) -> paddle.Tensor:
        """Returns tokens as a map, whose sides are those of the last tokens times ``factor``."""
        rows, columns = self.grid_size
        return swap_axes(x).reshape([0, x.shape[2], rows * factor, columns * factor])


@register("t2t_vit")
class T2TViT(ImageModel):
    """T2T-ViT. It takes images of image_size only.

    Its features are the class token, then the patches, normalised: [B, 1 + patches, embed_dim].

    Args:
        image_size: pixels, or (height, width): multiples of 16.
        token_type: the attention in the first two steps of making tokens. "performer": a linear
            approximation; "transformer": full self-attention.
        token_dim: number of channels of a token in the first two steps, an even number.
        token_dropout: dropout rate of both branches of each performer.
        embed_dim: number of channels of a token in the blocks.
        depth: number of blocks.
        num_heads: number of attention heads.
        mlp_ratio: ratio of the MLPs' hidden width to embed_dim.
        qkv_bias: whether the blocks' queries, keys and values have a bias.
        dropout: dropout rate after the position embedding, after the attention's projection and in
            the MLPs.
        attention_dropout: dropout rate of the blocks' attention weights.
        droppath: stochastic depth rate of the last block; the rates grow linearly from 0 at the
            first.
        norm_eps: epsilon of all layer norms. PaddleViT uses 1e-6.
        fixed_tables: whether the position embedding is a fixed table of sines and cosines, and the
            random features of the performers aren't trained. False: both are trained, the positions
            from zero, as in PaddleViT.

    Raises:
        InputError: sizes that don't fit together.
    """

    weight_names = names
    layout = "NLC"
    num_prefix_tokens = 1
    pos_embed_prefix = 1
    global_pool = "token"
    window_side = _WINDOWS[0][0]

    def __init__(
        self,
        image_size: int | Sequence[int] = 224,
        in_channels: int = 3,
        num_classes: int = 1000,
        token_type: Literal["performer", "transformer"] = "performer",
        token_dim: Size = 64,
        token_dropout: InTraining[Rate] = 0.1,
        embed_dim: Size = 384,
        depth: Depth = 14,
        num_heads: Size = 6,
        mlp_ratio: Positive = 3.0,
        qkv_bias: bool = False,
        dropout: InTraining[Rate] = 0.0,
        attention_dropout: InTraining[Rate] = 0.0,
        droppath: InTraining[Rate] = 0.0,
        norm_eps: Epsilon = 1e-5,
        fixed_tables: bool = True,
        head_init_scale: InTraining[OfClassifier[Factor]] = 1.0,
        recompute: InTraining[bool] = False,
    ) -> None:
        super().__init__(image_size, in_channels, num_classes, head_init_scale, recompute)
        check_multiples(self.image_size, _STRIDE, f"{_STRIDE}, the side of a token")
        if embed_dim % num_heads:
            raise InputError(f"EMBED_DIM is {embed_dim}, not a multiple of NUM_HEADS {num_heads}")
        if token_dim % 2:
            raise InputError(f"TOKEN_DIM is {token_dim}, expected an even number")
        self.num_features = embed_dim
        self.norm_eps = norm_eps
        self.tokens_to_token = TokensToToken(
            self.image_size,
            in_channels,
            embed_dim,
            token_dim,
            token_type,
            token_dropout,
            fixed_tables,
        )
        reader = "kqv" if token_type == "performer" else "attn.qkv"
        self.first_conv = f"tokens_to_token.attention1.{reader}"
        self.beside_first_conv = ("tokens_to_token.attention1.norm1",)

        self.cls_token = self.create_parameter(
            [1, 1, embed_dim], default_initializer=Normal(std=0.02)
        )
        positions = 1 + self.tokens_to_token.num_patches
        initial = Assign(_sines(positions, embed_dim)) if fixed_tables else Constant(0.0)
        self.pos_embed = self.create_parameter(
            [1, positions, embed_dim], default_initializer=initial
        )
        if fixed_tables:
            self.register_buffer("pos_embed", self._parameters.pop("pos_embed").detach())
        self.pos_drop = nn.Dropout(dropout)
        self.blocks = nn.LayerList()
        [drop_paths] = drop_path_rates(droppath, [depth])
        for drop_path in drop_paths:
            attn = Attention(
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
                init_values=None,
                drop=dropout,
                drop_path=drop_path,
            )
            self.blocks.append(block)
        self.feature_info = feature_info([f"blocks.{i}" for i in range(depth)], embed_dim, _STRIDE)
        self.norm = LayerNorm(embed_dim)
        set_norm_eps(self, norm_eps)
        self._finish()

    @property
    def patch_embed(self) -> TokensToToken:
        """Returns the layer whose ``grid_size`` is that of the position embedding."""
        return self.tokens_to_token

    def grid(self, places: int) -> tuple[int, int]:
        return self.tokens_to_token.grid_size

    def _embed(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.tokens_to_token(x)
        x = concat([self.cls_token.expand([x.shape[0], -1, -1]), x], axis=1)
        return self.pos_drop(add_to_all(x, self.pos_embed))

    def forward_head(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.head(x[:, 0])

    def layer_groups(self) -> list[tuple[str, ...]]:
        """Returns the groups: the tokens with their positions, each block, and the classifier with
        the last norm.
        """
        blocks = [(f"blocks.{i}",) for i in range(len(self.blocks))]
        return [("tokens_to_token", "cls_token", "pos_embed"), *blocks, ("norm", "head")]

    def no_weight_decay(self) -> set[str]:
        return {"cls_token", "pos_embed"}

    def _init_weights(self, layer: nn.Layer) -> None:
        init_linear(layer)


def _sines(positions: int, dim: int) -> np.ndarray:
    """Returns the sines and cosines in turn of each position times frequencies that fall from 1 to
    1 / 10,000: [1, positions, dim], float32 (Vaswani et al. 2017, arXiv:1706.03762).
    """
    angles = np.arange(positions)[:, None] / 10_000 ** (2 * (np.arange(dim) // 2) / dim)
    table = np.where(np.arange(dim) % 2, np.cos(angles), np.sin(angles))
    return table[None].astype(np.float32)
