"""Swin Transformer V2 (Liu et al. 2022, arXiv:2111.09883).

Parameter names, order of operations and initialisation are those of timm's ``SwinTransformerV2``.
Windows, their shift and the stages are the first version's (``models.swin``).
"""

import math
from collections.abc import Sequence

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F
from paddle.nn.initializer import Constant

from errors import InputError
from models import swin
from models.base import register
from models.layers import LayerNorm, Linear, init_linear
from models.layers.activations import ReLU
from models.layers.folding import fold
from models.layers.linear import in_float32
from models.swin import SwinTransformer, neighbours
from settings.keys import Count, Depth, Factor, InTraining, Positive, Rate, Size
from weights.names import swinv2 as names


class OffsetMlp(nn.Sequential):
    """Gives the bias of each offset, between 0 and 16: [rows, num_heads] float32."""

    offsets: paddle.Tensor  # [rows, 2]

    def __init__(self, num_heads: int) -> None:
        super().__init__(Linear(2, 512), ReLU(), Linear(512, num_heads, bias_attr=False))

    def forward(self) -> paddle.Tensor:
        return 16 * F.sigmoid(in_float32(super().forward(self.offsets)))

    @paddle.no_grad()
    def fold(self) -> nn.Layer:
        return OffsetBias(self())


class OffsetBias(nn.Layer):
    """What an ``OffsetMlp`` gives, computed once. (Paddle Inference 2.6 crashes as it fuses an MLP
    of constants.)
    """

    bias: paddle.Tensor

    def __init__(self, bias: paddle.Tensor) -> None:
        super().__init__()
        self.register_buffer("bias", bias, persistable=False)

    def forward(self) -> paddle.Tensor:
        return self.bias


class WindowAttention(swin.WindowAttention):
    """Attention within a window by the cosine of query and key; an MLP gives the bias of each
    offset.

    The cosine is multiplied by a learnt factor of each head, 100 at most. The MLP reads the
    offset's logarithm, so that it can be asked about larger windows, too. Keys have no bias.

    Args and shape: as ``swin.WindowAttention``.
    """

    window_size: tuple[int, int]

    def __init__(
        self,
        dim: int,
        num_heads: int,
        window_size: tuple[int, int],
        qkv_bias: bool,
        attn_drop: float,
        proj_drop: float,
    ) -> None:
        super().__init__(dim, num_heads, window_size, False, attn_drop, proj_drop)
        tenfold = Constant(math.log(10))
        zero = Constant(0.0)
        self.logit_scale = self.create_parameter([num_heads, 1, 1], default_initializer=tenfold)
        self.q_bias = self.v_bias = None
        if qkv_bias:
            self.q_bias = self.create_parameter([dim], default_initializer=zero)
            self.v_bias = self.create_parameter([dim], default_initializer=zero)

    def _add_table(self, rows: int, num_heads: int, std: float) -> None:
        self.cpb_mlp = OffsetMlp(num_heads)
        self.measure_by(0)

    def measure_by(self, pretrained_window: int) -> tuple[int, int]:
        """Sets the unit of offsets: the side of the windows that the MLP learnt with; 0: of these.
        Returns the unit.
        """
        height, width = unit = (
            (pretrained_window, pretrained_window) if pretrained_window else self.window_size
        )
        offsets = relative_coords_table(self.window_size, (height, width))
        self.cpb_mlp.register_buffer("offsets", paddle.to_tensor(offsets), persistable=False)
        return unit

    def table(self) -> paddle.Tensor:
        return self.cpb_mlp()

    def _project(self, x: paddle.Tensor) -> paddle.Tensor:
        if self.q_bias is None or self.v_bias is None:
            return self.qkv(x)
        bias = paddle.concat([self.q_bias, paddle.zeros_like(self.v_bias), self.v_bias])
        return self.qkv(x, bias)

    def _scale(self) -> paddle.Tensor:
        # In Paddle 2.6, clip has no gradient at the limit itself: the factor would stay there.
        most = paddle.full_like(self.logit_scale, math.log(100))
        return paddle.where(self.logit_scale > most, most, self.logit_scale).exp()


def relative_coords_table(window_size: Sequence[int], unit: Sequence[int]) -> np.ndarray:
    """Returns offsets (rows, columns) between a window's tokens, by row of
    ``relative_position_index``: [rows, 2].

    An offset d is sign(d) log8(1 + 8 |d| / (unit - 1)): 1.06 for the largest within windows of
    ``unit``.
    """
    sides = [
        np.arange(1 - side, side) / max(one - 1, 1)
        for side, one in zip(window_size, unit, strict=True)
    ]
    offsets = 8 * np.stack(np.meshgrid(*sides, indexing="ij"), axis=-1).reshape(-1, 2)
    return (np.sign(offsets) * np.log2(np.abs(offsets) + 1) / np.log2(8)).astype(np.float32)


class Block(swin.Block):
    """x + norm1(attention(x)) within windows, then x + norm2(mlp(x)), each branch with drop path.

    Args and shape: as ``swin.Block``.
    """

    attention = WindowAttention

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.drop_path1(self.norm1(self._attend(x)), onto=x)
        return self.drop_path2(self.norm2(self.mlp(x)), onto=x)


class PatchMerging(nn.Layer):
    """Joins 2 x 2 neighbours to one token of twice the channels, normalised; an odd side is padded
    by zeros.

    Shape: [B, H, W, D] -> [B, ceil(H / 2), ceil(W / 2), 2 D].
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.reduction = Linear(4 * dim, 2 * dim, bias_attr=False)
        self.norm = LayerNorm(2 * dim)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.norm(self.reduction(neighbours(x)))


@register("swinv2")
class SwinTransformerV2(SwinTransformer):
    """Swin Transformer V2; images of other sizes than image_size aren't taken.

    Features: the last stage's tokens, normalised: [B, height, width, num_features].

    Args:
        pretrained_window_sizes: windows' sides, one per stage, with which the weights were
            pre-trained; offsets between tokens are measured by them. 0, or None for all: the
            model's own.

    Raises:
        InputError: sizes that don't fit together.
    """

    weight_names = names
    block = Block
    merging = PatchMerging

    def __init__(
        self,
        image_size: int | Sequence[int] = 256,
        patch_size: Size = 4,
        in_channels: int = 3,
        num_classes: int = 1000,
        embed_dim: Size = 96,
        stage_depths: Sequence[Depth] = (2, 2, 6, 2),
        num_heads: Sequence[Size] = (3, 6, 12, 24),
        window_size: Size | Sequence[Size] = 8,
        pretrained_window_sizes: Sequence[Count] | None = None,
        mlp_ratio: Positive | Sequence[Positive] = 4.0,
        qkv_bias: bool = True,
        dropout: InTraining[Rate] = 0.0,
        attention_dropout: InTraining[Rate] = 0.0,
        droppath: InTraining[Rate] = 0.0,
        head_init_scale: InTraining[Factor] = 1.0,
        recompute: InTraining[bool] = False,
    ) -> None:
        sizes = pretrained_window_sizes or [0] * len(stage_depths)
        if len(sizes) != len(stage_depths):
            expected = f"expected {len(stage_depths)} numbers: one per stage, as in STAGE_DEPTHS"
            raise InputError(f"PRETRAINED_WINDOW_SIZES is {list(sizes)}, {expected}")
        super().__init__(
            image_size,
            patch_size,
            in_channels,
            num_classes,
            embed_dim,
            stage_depths,
            num_heads,
            window_size,
            mlp_ratio,
            qkv_bias,
            dropout,
            attention_dropout,
            droppath,
            head_init_scale,
            recompute,
        )
        self.pretrained_window_sizes = []
        for stage, size in zip(self.layers, sizes, strict=True):
            for block in stage.blocks:
                height, width = block.attn.measure_by(size)
            self.pretrained_window_sizes.append(max(height, width))

    def inference_model(self) -> SwinTransformer:
        """Returns an equal model for inference, which doesn't compute the biases of offsets anew
        each time.
        """
        return fold(self)

    def no_weight_decay(self) -> set[str]:
        return {
            name
            for name, _ in self.named_parameters()
            if "cpb_mlp" in name or "logit_scale" in name
        }

    def _init_weights(self, layer: nn.Layer) -> None:
        init_linear(layer)
        if isinstance(layer, Block):  # blocks are the identity at first
            for norm in (layer.norm1, layer.norm2):
                Constant(0.0)(norm.weight)
