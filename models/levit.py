"""LeViT (Graham et al. 2021, arXiv:2104.01136): convolutions, then attention over ever fewer
tokens.

Parameter names, order of operations and initialisation are those of timm's ``LevitDistilled`` and
``Levit``, with Linears. timm's ``levit_conv_*`` compute the same by convolutions of 1 x 1; their
weights are taken, too.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import paddle
from paddle import nn
from paddle.nn.initializer import Constant

from errors import InputError
from models.base import ImageModel, register
from models.layers import DropPath, init_linear
from models.layers.activations import Hardswish, SiLU
from models.layers.attention import attend_heads
from models.layers.folding import ConvNorm, LinearNorm, NormLinear, fold
from models.layers.init import init_as_torch
from models.layers.layout import swap_axes
from models.layers.mlp import hidden_width
from models.layers.relative import gather_columns
from models.layers.sizes import check_multiples
from models.layers.stages import feature_info
from settings.keys import Depth, Factor, InTraining, Positive, Rate, Size
from weights.names import levit as names

# The stem's stride.
STRIDES = {"s16": 16, "s8": 8}
ACTIVATIONS = {"hardswish": Hardswish, "silu": SiLU}
# Ratios of the downsampling between two stages.
DOWN_ATTN_RATIO = 4.0
DOWN_MLP_RATIO = 2.0


class Attention(nn.Layer):
    """Attention with a learnt bias for each distance in rows and columns between query and key.

    Args:
        dim: channels that are read.
        key_dim, num_heads: channels of a head's queries and keys; heads.
        attn_ratio: channels of a head's values over ``key_dim``.
        grid: rows and columns of the tokens.

    Shape: [B, N, dim] -> the same.
    """

    # Only tokens of every stride-th row and column are queries.
    stride = 1

    def __init__(
        self,
        dim: int,
        key_dim: int,
        num_heads: int,
        attn_ratio: float,
        grid: tuple[int, int],
        act: str,
    ) -> None:
        super().__init__()
        self.act = act
        self.key_dim = key_dim
        self.num_heads = num_heads
        self.scale = key_dim**-0.5
        self.value_dim = hidden_width(key_dim, attn_ratio)
        self.grid = grid
        self._add_projections(dim)
        index = distances(grid, self.stride)
        self.attention_biases = self.create_parameter(
            [num_heads, grid[0] * grid[1]], default_initializer=Constant(0.0)
        )
        self.register_buffer("attention_bias_idxs", paddle.to_tensor(index), persistable=False)

    def _add_projections(self, dim: int) -> None:
        self.qkv = LinearNorm(dim, self.num_heads * (2 * self.key_dim + self.value_dim))
        self._add_output(dim, start=0.0)

    def _add_output(self, dim: int, start: float) -> None:
        last = LinearNorm(self.num_heads * self.value_dim, dim, start)
        self.proj = nn.Sequential(("act", ACTIVATIONS[self.act]()), ("ln", last))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self._attend([self.qkv(x)])

    def _attend(self, qkv: list[paddle.Tensor]) -> paddle.Tensor:
        """Attends with queries, keys and values in one tensor, or with queries, and keys and values
        in one.
        """
        bias = gather_columns(self.attention_biases, self.attention_bias_idxs)
        return self.proj(
            attend_heads(qkv, self.num_heads, self.key_dim, self.scale, bias=bias, by_head=True)
        )


class AttentionDownsample(Attention):
    """Attention whose queries are those of every second row and column.

    Shape: [B, rows * columns, dim] -> [B, a quarter of them, out_dim].
    """

    stride = 2

    def __init__(
        self, dim: int, out_dim: int, key_dim: int, grid: tuple[int, int], act: str
    ) -> None:
        # ``_add_projections`` reads it.
        self.out_dim = out_dim
        super().__init__(dim, key_dim, dim // key_dim, DOWN_ATTN_RATIO, grid, act)

    def _add_projections(self, dim: int) -> None:
        self.kv = LinearNorm(dim, self.num_heads * (self.key_dim + self.value_dim))
        self.q = nn.Sequential(("ln", LinearNorm(dim, self.num_heads * self.key_dim)))
        self._add_output(self.out_dim, start=1.0)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        maps = x.reshape([-1, *self.grid, x.shape[2]])
        queried = maps[:, :: self.stride, :: self.stride].flatten(1, 2)
        return self._attend([self.q(queried), self.kv(x)])


def distances(grid: tuple[int, int], stride: int) -> np.ndarray:
    """Returns rows apart x columns of the grid + columns apart, by query and key: [queries, keys]
    int64.

    Args:
        grid: rows and columns of the keys.
        stride: the queries are at every so many of them.
    """
    rows, columns = grid
    keys = np.stack(np.divmod(np.arange(rows * columns), columns))
    queries = keys[:, (keys % stride == 0).all(0)]
    down, across = np.abs(queries[:, :, None] - keys[:, None])
    return down * columns + across


class LevitMlp(nn.Layer):
    """LinearNorm, activation, LinearNorm, whose norm starts at 0. [B, N, dim] -> the same."""

    def __init__(self, dim: int, mlp_ratio: float, act: str) -> None:
        super().__init__()
        hidden_dim = hidden_width(dim, mlp_ratio)
        self.ln1 = LinearNorm(dim, hidden_dim)
        self.act = ACTIVATIONS[act]()
        self.ln2 = LinearNorm(hidden_dim, dim, start=0.0)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.ln2(self.act(self.ln1(x)))


class Block(nn.Layer):
    """x + attn(x), then x + mlp(x), each branch with drop path. [B, N, dim] -> the same."""

    def __init__(
        self, dim: int, attn: nn.Layer, mlp_ratio: float, drop_path: float, act: str
    ) -> None:
        super().__init__()
        self.attn = attn
        self.drop_path1 = DropPath(drop_path)
        self.mlp = LevitMlp(dim, mlp_ratio, act)
        self.drop_path2 = DropPath(drop_path)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.drop_path1(self.attn(x), onto=x)
        return self.drop_path2(self.mlp(x), onto=x)


class Downsample(nn.Layer):
    """attn(x), then x + mlp(x), the branch with drop path. [B, N, in_dim] -> [B, a quarter, dim]."""

    def __init__(
        self, in_dim: int, dim: int, key_dim: int, grid: tuple[int, int], drop_path: float, act: str
    ) -> None:
        super().__init__()
        self.attn_downsample = AttentionDownsample(in_dim, dim, key_dim, grid, act)
        self.mlp = LevitMlp(dim, DOWN_MLP_RATIO, act)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.attn_downsample(x)
        return self.drop_path(self.mlp(x), onto=x)


class Stage(nn.Layer):
    """Blocks of one width. But for the first stage, ``downsample`` quarters the tokens before them."""

    def __init__(self, downsample: nn.Layer, blocks: Iterable[Block]) -> None:
        super().__init__()
        self.downsample = downsample
        self.blocks = nn.LayerList(blocks)


@register("levit")
class LeViT(ImageModel):
    """LeViT; images of other sizes than image_size aren't taken.

    Features: the last stage's tokens [B, N, embed_dims[-1]], row by row.

    Args:
        image_size: pixels, or (height, width): multiples of 16, or of 8 with stem_type "s8".
        stage_depths: blocks of each stage.
        embed_dims: channels of each stage; all but the last are multiples of key_dim.
        num_heads: heads of each stage; between two stages, as many as key_dim is in embed_dims.
        key_dim: channels of a head's queries and keys.
        attn_ratio: channels of a head's values over key_dim, within stages; between them 4.
        mlp_ratio: hidden width of the MLPs over their input's, within stages; between them 2.
        stem_type: "s16": four convolutions, 16 pixels along a token's side; "s8": three, 8 pixels.
        act: the activation function.
        distilled: a second classifier, of distillation; the output is the mean of both.
        dropout: before the classifiers.
        droppath: rate of stochastic depth, at all blocks.

    Attributes:
        distilled_training: of a distilled model; True: train mode returns (logits, distillation
            logits).

    Raises:
        InputError: sizes that don't fit together.
    """

    weight_names = names
    first_conv = "stem.conv1.linear"
    layout = "NLC"
    distilled_training = False

    def __init__(
        self,
        image_size: int | Sequence[int] = 224,
        in_channels: int = 3,
        num_classes: int = 1000,
        stage_depths: Sequence[Depth] = (2, 3, 4),
        embed_dims: Sequence[Size] = (128, 256, 384),
        num_heads: Sequence[Size] = (4, 6, 8),
        key_dim: Size = 16,
        attn_ratio: Positive = 2.0,
        mlp_ratio: Positive = 2.0,
        stem_type: Literal["s16", "s8"] = "s16",
        act: Literal["hardswish", "silu"] = "hardswish",
        distilled: bool = True,
        dropout: InTraining[Rate] = 0.0,
        droppath: InTraining[Rate] = 0.0,
        head_init_scale: InTraining[Factor] = 1.0,
        recompute: InTraining[bool] = False,
    ) -> None:
        super().__init__(image_size, in_channels, num_classes, head_init_scale, recompute)
        stride = STRIDES[stem_type]
        self._check_sizes(stride, stage_depths, embed_dims, num_heads, key_dim)
        self.num_features = embed_dims[-1]
        self.distilled = distilled
        self.dropout = dropout
        self.stem = nn.Sequential()
        in_dim = in_channels
        for i, share in enumerate((8, 4, 2, 1) if stem_type == "s16" else (4, 2, 1)):
            if i:
                self.stem.add_sublayer(f"act{i}", ACTIVATIONS[act]())
            self.stem.add_sublayer(f"conv{i + 1}", ConvNorm(in_dim, embed_dims[0] // share))
            in_dim = embed_dims[0] // share
        grid: tuple[int, int] = (self.image_size[0] // stride, self.image_size[1] // stride)
        self.grids, self.stages = {grid[0] * grid[1]: grid}, nn.LayerList()
        for dim, depth, heads in zip(embed_dims, stage_depths, num_heads, strict=True):
            downsample: nn.Layer = nn.Identity()
            if len(self.stages):
                downsample = Downsample(in_dim, dim, key_dim, grid, droppath, act)
                grid = ((grid[0] + 1) // 2, (grid[1] + 1) // 2)
                self.grids[grid[0] * grid[1]] = grid
            attention = [
                Attention(dim, key_dim, heads, attn_ratio, grid, act) for _ in range(depth)
            ]
            self.stages.append(
                Stage(
                    downsample, [Block(dim, attn, mlp_ratio, droppath, act) for attn in attention]
                )
            )
            in_dim = dim
        stages = range(len(self.stages))
        self.feature_info = feature_info(
            [f"stages.{i}" for i in stages], embed_dims, [stride << i for i in stages]
        )
        self._finish()

    def _check_sizes(
        self,
        stride: int,
        stage_depths: Sequence[int],
        embed_dims: Sequence[int],
        num_heads: Sequence[int],
        key_dim: int,
    ) -> None:
        check_multiples(self.image_size, stride, str(stride))
        for key, values in (("STAGE_DEPTHS", stage_depths), ("NUM_HEADS", num_heads)):
            if len(values) != len(embed_dims):
                told = f"expected {len(embed_dims)} numbers: one per stage, as in EMBED_DIMS"
                raise InputError(f"{key} is {list(values)}, {told}")
        if embed_dims[0] % 8:
            raise InputError(
                f"EMBED_DIMS begins with {embed_dims[0]}, not a multiple of 8, as the stem needs it"
            )
        for dim in embed_dims[:-1]:
            if dim % key_dim:
                raise InputError(
                    f"EMBED_DIMS has {dim} before its last, not a multiple of KEY_DIM {key_dim}"
                )

    def grid(self, places: int) -> tuple[int, int]:
        return self.grids[places]

    def _embed(self, x: paddle.Tensor) -> paddle.Tensor:
        if tuple(x.shape[2:]) != self.image_size:
            raise InputError(
                f"the model takes {self.input_sizes}, found {x.shape[2]} x {x.shape[3]}"
            )
        return swap_axes(self.stem(x).flatten(2))

    def _stages(self) -> Iterable[Any]:
        return self.stages

    def _stage(self, stage: Any, x: paddle.Tensor, shared: Any) -> paddle.Tensor:
        x = x if stage is self.stages[0] else self._run(stage.downsample, x)
        return self._run_all(stage.blocks, x)

    def forward_head(self, x: paddle.Tensor) -> paddle.Tensor | tuple[paddle.Tensor, paddle.Tensor]:
        x = x.mean(axis=1)
        if not self.distilled:
            return self.head(x)
        logits = self.head(x)
        distilled = self.head_dist(x)
        return (
            (logits, distilled)
            if self.distilled_training and self.training
            else (logits + distilled) / 2
        )

    def inference_model(self) -> ImageModel:
        """Folds every batch norm into the convolution or Linear beside it, as the authors' ``fuse``
        does.
        """
        return fold(self)

    def classifier_names(self) -> tuple[str, ...]:
        last = ".linear" if isinstance(self.head, NormLinear) else ""
        return (f"head{last}", f"head_dist{last}") if self.distilled else (f"head{last}",)

    def _add_classifiers(self) -> None:
        for name in ("head", "head_dist")[: 1 + self.distilled]:
            classes = self.num_classes
            setattr(
                self,
                name,
                NormLinear(self.num_features, classes, self.dropout) if classes else nn.Identity(),
            )

    def layer_groups(self) -> list[tuple[str, ...]]:
        """Returns the groups: the stem, each block (the first of a stage with what is between the
        stages), the classifiers with their norms. They are timm's, the authors have none.
        """
        groups: list[tuple[str, ...]] = [("stem",)]
        for i, stage in enumerate(self.stages):
            blocks: list[tuple[str, ...]] = [
                (f"stages.{i}.blocks.{j}",) for j in range(len(stage.blocks))
            ]
            blocks[0] += (f"stages.{i}.downsample",)
            groups += blocks
        return [*groups, ("head", "head_dist")]

    def no_weight_decay(self) -> set[str]:
        return {name for name, _ in self.named_parameters() if name.endswith("attention_biases")}

    def _init_weights(self, layer: nn.Layer) -> None:
        """PyTorch's own; N(0, 0.02) for the classifiers. What is within a layer comes before it."""
        init_linear(layer)
        if isinstance(layer, ConvNorm | LinearNorm):
            init_as_torch(layer.linear)
        if isinstance(layer, LinearNorm):
            Constant(layer.start)(layer.bn.weight)
