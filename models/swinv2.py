"""Swin Transformer V2 (Liu et al. 2022, arXiv:2111.09883).

Parameter names, the order of operations and the initialisation are those of timm's
``SwinTransformerV2``. Windows, their shift and the stages are the first version's
(``models.swin``).
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
from settings.keys import Count, Depth, Factor, InTraining, OfClassifier, Positive, Rate, Size
from weights.names import swinv2 as names


class OffsetMlp(nn.Sequential):
    """Computes the bias of each offset between two tokens, a number between 0 and 16.

    It is called without an input and returns [rows, num_heads], float32.

    Attributes:
        offsets: [rows, 2], the output of ``relative_coords_table``.
    """

    offsets: paddle.Tensor

    def __init__(self, num_heads: int) -> None:
        super().__init__(Linear(2, 512), ReLU(), Linear(512, num_heads, bias_attr=False))

    def forward(self) -> paddle.Tensor:
        return 16 * F.sigmoid(in_float32(super().forward(self.offsets)))

    @paddle.no_grad()
    def fold(self) -> nn.Layer:
        return OffsetBias(self())


class OffsetBias(nn.Layer):
    """The output of an ``OffsetMlp``, computed once for inference.

    Paddle Inference 2.6 would crash while it fuses an MLP with a constant input.
    """

    bias: paddle.Tensor

    def __init__(self, bias: paddle.Tensor) -> None:
        super().__init__()
        self.register_buffer("bias", bias, persistable=False)

    def forward(self) -> paddle.Tensor:
        return self.bias


class WindowAttention(swin.WindowAttention):
    """Scaled cosine attention within each window, with a bias that an MLP computes from the offset.

    The cosine of a query and a key is multiplied by a learnt factor of the head, at most 100. The
    MLP reads the logarithm of the offset between both tokens, so that it extrapolates to larger
    windows. Keys have no bias.

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
        super().__init__(
            dim, num_heads, window_size, qkv_bias=False, attn_drop=attn_drop, proj_drop=proj_drop
        )
        # A fresh head multiplies cosines by 10.
        self.logit_scale = self.create_parameter(
            [num_heads, 1, 1], default_initializer=Constant(math.log(10))
        )
        self.q_bias = None
        self.v_bias = None
        if qkv_bias:
            self.q_bias = self.create_parameter([dim], default_initializer=Constant(0.0))
            self.v_bias = self.create_parameter([dim], default_initializer=Constant(0.0))

    def _add_table(self, rows: int, num_heads: int, std: float) -> None:
        self.cpb_mlp = OffsetMlp(num_heads)
        self.set_pretrained_window(self.window_size)

    def set_pretrained_window(self, window_size: tuple[int, int]) -> None:
        """Sets the (height, width) of the windows with which the MLP was trained. Offsets are
        measured in units of it.
        """
        offsets = relative_coords_table(self.window_size, window_size)
        self.cpb_mlp.register_buffer("offsets", paddle.to_tensor(offsets), persistable=False)

    def table(self) -> paddle.Tensor:
        return self.cpb_mlp()

    def _project(self, x: paddle.Tensor) -> paddle.Tensor:
        if self.q_bias is None or self.v_bias is None:
            return self.qkv(x)
        bias = paddle.concat([self.q_bias, paddle.zeros_like(self.v_bias), self.v_bias])
        return self.qkv(x, bias)

    def _scale(self) -> paddle.Tensor:
        # Not clip: in Paddle 2.6 it has no gradient at the limit itself, so the factor would stay
        # there.
        limit = paddle.full_like(self.logit_scale, math.log(100))
        return paddle.where(self.logit_scale > limit, limit, self.logit_scale).exp()


def relative_coords_table(
    window_size: Sequence[int], pretrained_window_size: Sequence[int]
) -> np.ndarray:
    """Returns the offsets between a window's tokens that the MLP reads: [rows, 2], float32.

    Row ``relative_position_index`` of two tokens has their offset in rows and in columns. An offset
    of d places is sign(d) log8(1 + 8 |d| / (s - 1)), where s is the side of the window in
    pre-training. Within such a window it is at most log8(9), which is 1.06.

    Args:
        window_size: (height, width) of the windows.
        pretrained_window_size: (height, width) of the windows in pre-training.
    """
    axes = [
        np.arange(1 - side, side) / max(pretrained_side - 1, 1)
        for side, pretrained_side in zip(window_size, pretrained_window_size, strict=True)
    ]
    offsets = 8 * np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, 2)
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
    """Merges 2 x 2 neighbours into one token of twice the channels, then normalises it. An odd side
    is padded by zeros.

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
    """Swin Transformer V2. It takes images of image_size only (``take_other_sizes``: of other
    sizes, too).

    Its features are the last stage's tokens, normalised: [B, height, width, num_features].

    Args:
        pretrained_window_sizes: for each stage, the side of the windows in pre-training, which is
            the unit of offsets between tokens. 0: the window size of the model; None: 0 for all
            stages.

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
        head_init_scale: InTraining[OfClassifier[Factor]] = 1.0,
        recompute: InTraining[bool] = False,
    ) -> None:
        pretrained_sides = pretrained_window_sizes or [0] * len(stage_depths)
        if len(pretrained_sides) != len(stage_depths):
            expected = f"expected {len(stage_depths)} numbers: one per stage, as in STAGE_DEPTHS"
            raise InputError(f"PRETRAINED_WINDOW_SIZES is {list(pretrained_sides)}, {expected}")
        super().__init__(
            image_size=image_size,
            patch_size=patch_size,
            in_channels=in_channels,
            num_classes=num_classes,
            embed_dim=embed_dim,
            stage_depths=stage_depths,
            num_heads=num_heads,
            window_size=window_size,
            mlp_ratio=mlp_ratio,
            qkv_bias=qkv_bias,
            dropout=dropout,
            attention_dropout=attention_dropout,
            droppath=droppath,
            head_init_scale=head_init_scale,
            recompute=recompute,
        )
        self.pretrained_window_sizes = []
        for stage, side in zip(self.layers, pretrained_sides, strict=True):
            if side:
                for block in stage.blocks:
                    block.attn.set_pretrained_window((side, side))
            else:
                side = max(stage.blocks[0].window_size)
            self.pretrained_window_sizes.append(side)

    def inference_model(self) -> SwinTransformer:
        """Returns an equivalent model for inference, in which the biases of offsets are computed
        once.
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
        if isinstance(layer, Block):
            # A fresh block is the identity.
            for norm in (layer.norm1, layer.norm2):
                Constant(0.0)(norm.weight)
