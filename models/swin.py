"""Swin Transformer (Liu et al. 2021, arXiv:2103.14030).

Parameter names, the order of operations and the initialisation are those of timm's
``SwinTransformer``. The weight of a Linear is [in, out] here and [out, in] there.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import paddle
from paddle import nn

from errors import InputError
from models.base import ImageModel, register
from models.layers import DropPath, LayerNorm, Linear, Mlp, PatchEmbed, init_linear
from models.layers.attention import attend_heads
from models.layers.constants import Constants
from models.layers.graph_sizes import as_tensor, extended, is_known, places, rounded_up
from models.layers.linear import in_float32
from models.layers.mlp import hidden_width
from models.layers.relative import RelativePositionBias
from models.layers.stages import drop_path_rates, feature_info, groups_by_block
from models.layers.windows import in_windows, pad_maps
from settings.keys import Depth, Factor, InTraining, OfClassifier, Positive, Rate, Size
from weights.names import swin as names


class WindowAttention(RelativePositionBias):
    """Multi-head self-attention within each window, with a bias by relative position.

    Args:
        dim: channels D of the tokens.
        num_heads: heads H.
        window_size: (height, width) of a window.
        qkv_bias: whether the fused projection has a bias.
        attn_drop: dropout rate of the attention weights.
        proj_drop: dropout of the output.

    Shape: [B * windows, N, D] -> the same, N = height * width. ``mask`` is [windows, N, N] and
    added to the scores.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        window_size: tuple[int, int],
        qkv_bias: bool,
        attn_drop: float,
        proj_drop: float,
    ) -> None:
        super().__init__(window_size, num_heads, std=0.02)
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.qkv = Linear(dim, 3 * dim, bias_attr=None if qkv_bias else False)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: paddle.Tensor, mask: paddle.Tensor | None) -> paddle.Tensor:
        x = attend_heads(
            [self._project(x)],
            self.num_heads,
            self.head_dim,
            self._scale(),
            drop=self.attn_drop,
            bias=self.position_bias(),
            mask=mask,
        )
        return self.proj_drop(self.proj(x))

    def _project(self, x: paddle.Tensor) -> paddle.Tensor:
        """Returns queries, keys and values: [..., D] -> [..., 3 D]."""
        return self.qkv(x)

    def _scale(self) -> float | paddle.Tensor:
        """Returns the factor of the products of queries and keys, in the form that
        ``attend_heads`` takes.
        """
        return self.head_dim**-0.5


class Block(nn.Layer):
    """x + attention(norm1(x)) within windows, then x + mlp(norm2(x)), each branch with drop path.

    Windows are no larger than the feature map of image_size. They are shifted by half their side
    where it has more than one; both stay so for maps of other sizes. With ``always_partition`` the
    map of image_size plays no part. A map that isn't a multiple of the windows is padded by zeros.
    As in timm and the original, tokens attend to these, too. timm shifts the windows before it pads.

    Args:
        dim: channels D of the tokens.
        num_heads: number of attention heads.
        resolution: (height, width) of the feature map.
        window_size: tokens along a window's side.
        shift: whether windows are shifted.
        mlp_ratio: hidden width of the MLP over D.
        drop: dropout after the attention's projection and in the MLP.
        drop_path: rate of stochastic depth.
        qkv_bias: whether the queries, keys and values have a bias.
        attn_drop: dropout rate of the attention weights.
        pad_first: whether maps are padded before the windows are shifted.
        always_partition: whether windows keep their size, and are shifted, on maps of any size.

    Attributes:
        attention: the class of the attention layer, which a subclass may replace.

    Shape: [B, height, width, D] -> the same.
    """

    attention: type[WindowAttention] = WindowAttention

    def __init__(
        self,
        dim: int,
        num_heads: int,
        resolution: tuple[int, int],
        window_size: int,
        shift: bool,
        mlp_ratio: float,
        drop: float,
        drop_path: float,
        qkv_bias: bool,
        attn_drop: float,
        pad_first: bool = False,
        always_partition: bool = False,
    ) -> None:
        super().__init__()
        self.pad_first = pad_first
        self.resolution = resolution
        self.window_size = (window_size, window_size)
        if not always_partition:
            self.window_size = (min(resolution[0], window_size), min(resolution[1], window_size))
        self.shift_size = tuple(
            window_size // 2 if shift and (always_partition or side > window_size) else 0
            for side in resolution
        )
        self.norm1 = LayerNorm(dim)
        self.attn = self.attention(
            dim, num_heads, self.window_size, qkv_bias, attn_drop, proj_drop=drop
        )
        self.drop_path1 = DropPath(drop_path)
        self.norm2 = LayerNorm(dim)
        self.mlp = Mlp(dim, hidden_width(dim, mlp_ratio), drop)
        self.drop_path2 = DropPath(drop_path)
        mask: Any = None
        if any(self.shift_size):
            mask = paddle.to_tensor(self._masks(resolution)[0])
        self.register_buffer("attn_mask", mask, persistable=False)
        self.masks_of_other_maps = Constants(self._masks)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.drop_path1(self._attend(self.norm1(x)), onto=x)
        return self.drop_path2(self.mlp(self.norm2(x)), onto=x)

    def _attend(self, x: paddle.Tensor) -> paddle.Tensor:
        mask = self._mask_of(x)
        return in_windows(
            x,
            self.window_size,
            # Not partial, which Paddle's tracing doesn't look into.
            lambda windows: self.attn(windows, mask),
            self.shift_size,
            self.pad_first,
        )

    def _mask_of(self, x: paddle.Tensor) -> paddle.Tensor | None:
        """Returns the mask of shifted windows for maps x; None: windows aren't shifted."""
        size = (x.shape[1], x.shape[2])
        if self.attn_mask is None:
            return None
        if not is_known(*size):
            return shift_mask_in_graph(size, self.window_size, self.shift_size)
        if size == self.resolution:
            return self.attn_mask
        [mask] = self.masks_of_other_maps.at(size)
        return mask

    def _masks(self, size: tuple[int, int]) -> list[np.ndarray]:
        return [shift_mask(size, self.window_size, self.shift_size)]


# Paddle's tracing takes no keywords of zip.
@paddle.jit.not_to_static
def shift_mask(
    resolution: Sequence[int], window_size: Sequence[int], shift_size: Sequence[int]
) -> np.ndarray:
    """Returns the mask that is added to the scores of shifted windows: [windows, N, N].

    It is -100 between tokens that come from different borders of the (padded) map and meet only
    because of the shift, and 0 elsewhere.
    """
    labels = []
    for side, window, shift in zip(resolution, window_size, shift_size, strict=True):
        place = np.arange(side + -side % window)
        labels.append((place >= len(place) - window).astype(int) + (place >= len(place) - shift))
    label = 3 * labels[0][:, None] + labels[1]
    (height, width), (rows, columns) = window_size, label.shape
    label = (
        label.reshape(rows // height, height, columns // width, width)
        .swapaxes(1, 2)
        .reshape(-1, height * width)
    )
    return np.where(label[:, :, None] == label[:, None, :], 0.0, -100.0).astype(np.float32)


def shift_mask_in_graph(
    resolution: Sequence[Any], window_size: Sequence[int], shift_size: Sequence[int]
) -> paddle.Tensor:
    """Returns ``shift_mask`` for sides that are known only when a graph is run."""
    height, width = window_size
    labels = []
    counts = []
    for axis in (0, 1):
        length = rounded_up(as_tensor(resolution[axis]), window_size[axis])
        place = places(length)
        in_last = (place >= length - window_size[axis]).astype("float32")
        labels.append(in_last + (place >= length - shift_size[axis]).astype("float32"))
        counts.append(length // window_size[axis])
    label = 3 * labels[0].unsqueeze(1) + labels[1].unsqueeze(0)
    label = label.reshape([counts[0], height, counts[1], width]).transpose([0, 2, 1, 3])
    label = label.reshape([-1, height * width])
    return (label.unsqueeze(2) != label.unsqueeze(1)).astype("float32") * -100.0


class PatchMerging(nn.Layer):
    """Merges 2 x 2 neighbours into one token of twice the channels; an odd side is padded by zeros.

    Shape: [B, H, W, D] -> [B, ceil(H / 2), ceil(W / 2), 2 D].
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = LayerNorm(4 * dim)
        self.reduction = Linear(4 * dim, 2 * dim, bias_attr=False)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return in_float32(self.reduction(self.norm(neighbours(x))))


def neighbours(x: paddle.Tensor) -> paddle.Tensor:
    """Concatenates the channels of 2 x 2 places of maps, column by column: [B, H, W, D] -> [B,
    ceil(H / 2), ceil(W / 2), 4 D]. An odd side is padded by zeros.
    """
    height, width, dim = x.shape[1:]
    if is_known(height, width):
        x = pad_maps(x, height % 2, width % 2)
    else:
        x = extended(x, 1, rounded_up(height, 2))
        x = extended(x, 2, rounded_up(width, 2))
    height, width = (height + 1) // 2, (width + 1) // 2
    x = x.reshape([-1, height, 2, width, 2, dim]).transpose([0, 1, 3, 4, 2, 5])
    return x.reshape([-1, height, width, 4 * dim])


class Stage(nn.Layer):
    """``downsample``, then blocks of one resolution, every second one with shifted windows."""

    def __init__(
        self, dim: int, rates: Sequence[float], downsample: nn.Layer, block: Callable[..., Block]
    ) -> None:
        super().__init__()
        self.downsample = downsample
        self.blocks = nn.LayerList(
            block(dim, shift=i % 2 == 1, drop_path=rate) for i, rate in enumerate(rates)
        )


@register("swin")
class SwinTransformer(ImageModel):
    """Swin Transformer. It takes images of image_size only (``take_other_sizes``: of other sizes,
    too).

    Its features are the last stage's tokens, normalised: [B, height, width, num_features].

    Args:
        image_size: pixels, or (height, width): multiples of patch_size.
        patch_size: side of a patch, in pixels.
        embed_dim: number of channels of the first stage. Each further stage has twice as many as
            the one before.
        stage_depths: number of blocks in each stage.
        num_heads: number of attention heads in each stage.
        window_size: side of a window, in patches; one number, or one per stage.
        mlp_ratio: ratio of the MLP's hidden width to its input width; one number, or one per stage.
        qkv_bias: whether the queries, keys and values have a bias.
        pad_first: whether maps are padded to a multiple of the windows before they are shifted, as
            in the authors' segmentation, transformers and PaddleViT. Otherwise they are padded
            afterwards, as in timm.
        always_partition: whether windows keep their size and every second block shifts them on maps
            of any size, as in the authors' segmentation and in transformers' backbones. Otherwise
            the windows of a stage are at most as large as its map for image_size, and are shifted
            only if there are several.
        dropout: dropout rate after the attention's projection and in the MLP.
        attention_dropout: dropout rate of the attention weights.
        droppath: stochastic depth rate of the last block; the rates grow linearly from 0 at the
            first.

    Attributes:
        block: the class of the blocks.
        merging: the class of the layers that merge neighbours between stages.

    Raises:
        InputError: sizes that don't fit together.
    """

    weight_names = names
    layout = "NHWC"
    resizable = True
    block: type[Block] = Block
    merging: type[nn.Layer] = PatchMerging

    def __init__(
        self,
        image_size: int | Sequence[int] = 224,
        patch_size: Size = 4,
        in_channels: int = 3,
        num_classes: int = 1000,
        embed_dim: Size = 96,
        stage_depths: Sequence[Depth] = (2, 2, 6, 2),
        num_heads: Sequence[Size] = (3, 6, 12, 24),
        window_size: Size | Sequence[Size] = 7,
        mlp_ratio: Positive | Sequence[Positive] = 4.0,
        qkv_bias: bool = True,
        pad_first: bool = False,
        always_partition: bool = False,
        dropout: InTraining[Rate] = 0.0,
        attention_dropout: InTraining[Rate] = 0.0,
        droppath: InTraining[Rate] = 0.0,
        head_init_scale: InTraining[OfClassifier[Factor]] = 1.0,
        recompute: InTraining[bool] = False,
    ) -> None:
        super().__init__(image_size, in_channels, num_classes, head_init_scale, recompute)
        stages = len(stage_depths)
        mlp_ratio = [mlp_ratio] * stages if isinstance(mlp_ratio, int | float) else mlp_ratio
        windows = [window_size] * stages if isinstance(window_size, int) else window_size
        for key, values in (
            ("NUM_HEADS", num_heads),
            ("MLP_RATIO", mlp_ratio),
            ("WINDOW_SIZE", windows),
        ):
            if isinstance(values, int) or len(values) != stages:
                raise InputError(
                    f"{key} is {values}, expected {stages} numbers: one per stage, as in STAGE_DEPTHS"
                )
        dims = [embed_dim * 2**i for i in range(stages)]
        for dim, heads in zip(dims, num_heads, strict=True):
            if dim % heads:
                raise InputError(
                    f"NUM_HEADS has {heads}, expected a divisor of the {dim} channels of its stage"
                )
        self.num_features = dims[-1]
        self.patch_embed = PatchEmbed(self.image_size, patch_size, in_channels, embed_dim)
        self.patch_embed.norm = LayerNorm(embed_dim)
        block = partial(
            self.block,
            qkv_bias=qkv_bias,
            drop=dropout,
            attn_drop=attention_dropout,
            pad_first=pad_first,
            always_partition=always_partition,
        )
        resolution = self.patch_embed.grid_size
        self.layers = nn.LayerList()
        for i, rates in enumerate(drop_path_rates(droppath, stage_depths)):
            if i:
                height, width = resolution
                resolution = ((height + 1) // 2, (width + 1) // 2)
            stage_block = partial(
                block,
                num_heads=num_heads[i],
                resolution=resolution,
                window_size=windows[i],
                mlp_ratio=mlp_ratio[i],
            )
            downsample = self.merging(dims[i - 1]) if i else nn.Identity()
            self.layers.append(Stage(dims[i], rates, downsample, stage_block))
        modules = [f"layers.{i}" for i in range(stages)]
        self.feature_info = feature_info(modules, dims, [patch_size * 2**i for i in range(stages)])
        self.norm = LayerNorm(self.num_features)
        self.head = nn.Sequential(("fc", nn.Identity()))
        self._finish()

    def _embed(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.patch_embed.norm(self.patch_embed(x))
        return x.reshape([-1, *self.patch_embed.last_grid, x.shape[-1]])

    def _stages(self) -> Iterable[Any]:
        return self.layers

    def _stage(self, stage: Any, x: paddle.Tensor, shared: Any) -> paddle.Tensor:
        return self._run_all(stage.blocks, stage.downsample(x))

    def forward_head(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.head(x.mean(axis=[1, 2]))

    def classifier_names(self) -> tuple[str, ...]:
        return ("head.fc",)

    def layer_groups(self) -> list[tuple[str, ...]]:
        """Returns the groups of SimMIM (arXiv:2111.09886), by Swin's authors: the embedding, each
        block, and the head with its norm. The last block of a stage has the merging after it.
        """
        groups: list[tuple[str, ...]] = [("patch_embed",)]
        for i, stage in enumerate(self.layers):
            if i:
                groups[-1] += (f"layers.{i}.downsample",)
            groups += [(f"layers.{i}.blocks.{j}",) for j in range(len(stage.blocks))]
        return [*groups, ("norm", "head")]

    def timm_layer_groups(self) -> list[tuple[str, ...]]:
        """Returns timm's groups: the embedding, each block, the head. The first block of a stage
        has the merging before it, the last block of all has the last norm.
        """
        groups = groups_by_block("patch_embed", "layers", self.layers)
        groups[-1] += ("norm",)
        return [*groups, ("head",)]

    def no_weight_decay(self) -> set[str]:
        return {
            name
            for name, _ in self.named_parameters()
            if name.endswith("relative_position_bias_table")
        }

    def _init_weights(self, layer: nn.Layer) -> None:
        init_linear(layer)
