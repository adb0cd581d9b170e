"""LeViT (Graham et al. 2021, arXiv:2104.01136): a convolutional stem, then stages of attention.

Parameter names, the order of operations and the initialisation are those of timm's
``LevitDistilled`` and ``Levit``, with Linears. timm's ``levit_conv_*`` compute the same by 1 x 1
convolutions; their weights can be loaded, too.
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
from models.layers.stages import feature_info, groups_by_block
from settings.keys import Depth, Factor, InTraining, OfClassifier, Positive, Rate, Size
from weights.names import levit as names

# Each convolution of a stem has stride 2. Its channels are embed_dims[0] divided by these numbers.
STEM_DIVISORS = {"s16": (8, 4, 2, 1), "s8": (4, 2, 1)}
ACTIVATIONS = {"hardswish": Hardswish, "silu": SiLU}
# attn_ratio and mlp_ratio of the downsampling between two stages. All models of the paper have
# these.
DOWN_ATTN_RATIO = 4.0
DOWN_MLP_RATIO = 2.0


class Attention(nn.Layer):
    """Multi-head attention with a learnt bias for each distance between query and key.

    A distance is a number of rows and a number of columns, both without a sign.

    Args:
        dim: channels D of the tokens.
        key_dim: number of channels of a head's queries and keys.
        num_heads: number of attention heads.
        attn_ratio: ratio of the channels of a head's values to key_dim.
        grid: (rows, columns) of the tokens.
        act: the activation before the output's projection.

    Attributes:
        stride: the queries are the tokens of every ``stride``-th row and column.

    Shape: [B, N, D] -> [B, N, D].
    """

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
        index = distance_index(grid, self.stride)
        self.attention_biases = self.create_parameter(
            [num_heads, grid[0] * grid[1]], default_initializer=Constant(0.0)
        )
        self.register_buffer("attention_bias_idxs", paddle.to_tensor(index), persistable=False)

    def _add_projections(self, dim: int) -> None:
        self.qkv = LinearNorm(dim, self.num_heads * (2 * self.key_dim + self.value_dim))
        # A fresh branch outputs 0.
        self._add_output(dim, norm_weight=0.0)

    def _add_output(self, dim: int, norm_weight: float) -> None:
        last = LinearNorm(self.num_heads * self.value_dim, dim, norm_weight)
        self.proj = nn.Sequential(("act", ACTIVATIONS[self.act]()), ("ln", last))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self._attend([self.qkv(x)])

    def _attend(self, qkv: list[paddle.Tensor]) -> paddle.Tensor:
        """Returns the output for one tensor of queries, keys and values, or for the queries and one
        tensor of keys and values.
        """
        bias = gather_columns(self.attention_biases, self.attention_bias_idxs)
        x = attend_heads(qkv, self.num_heads, self.key_dim, self.scale, bias=bias, by_head=True)
        return self.proj(x)


class AttentionDownsample(Attention):
    """Attention whose queries are the tokens of every second row and column.

    Shape: [B, rows * columns, dim] -> [B, about a quarter of them, out_dim].
    """

    stride = 2

    def __init__(
        self, dim: int, out_dim: int, key_dim: int, grid: tuple[int, int], act: str
    ) -> None:
        # The base class's constructor calls ``_add_projections``, which reads this.
        self.out_dim = out_dim
        super().__init__(dim, key_dim, dim // key_dim, DOWN_ATTN_RATIO, grid, act)

    def _add_projections(self, dim: int) -> None:
        self.kv = LinearNorm(dim, self.num_heads * (self.key_dim + self.value_dim))
        self.q = nn.Sequential(("ln", LinearNorm(dim, self.num_heads * self.key_dim)))
        self._add_output(self.out_dim, norm_weight=1.0)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        maps = x.reshape([-1, *self.grid, x.shape[2]])
        subsampled = maps[:, :: self.stride, :: self.stride].flatten(1, 2)
        return self._attend([self.q(subsampled), self.kv(x)])


def distance_index(grid: tuple[int, int], stride: int) -> np.ndarray:
    """Returns the column of ``attention_biases`` for each query and key: [queries, keys], int64.

    It is |rows between them| * columns of the grid + |columns between them|.

    Args:
        grid: (rows, columns) of the keys.
        stride: the queries are in every ``stride``-th row and column.
    """
    rows, columns = grid
    keys = np.stack(np.divmod(np.arange(rows * columns), columns))
    queries = keys[:, (keys % stride == 0).all(0)]
    row_distance, column_distance = np.abs(queries[:, :, None] - keys[:, None])
    return row_distance * columns + column_distance


class LevitMlp(nn.Layer):
    """LinearNorm, activation, LinearNorm. A fresh one outputs 0.

    Shape: [B, N, dim] -> [B, N, dim].
    """

    def __init__(self, dim: int, mlp_ratio: float, act: str) -> None:
        super().__init__()
        hidden_dim = hidden_width(dim, mlp_ratio)
        self.ln1 = LinearNorm(dim, hidden_dim)
        self.act = ACTIVATIONS[act]()
        self.ln2 = LinearNorm(hidden_dim, dim, norm_weight=0.0)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.ln2(self.act(self.ln1(x)))


class Block(nn.Layer):
    """x + attn(x), then x + mlp(x), each branch with drop path.

    Shape: [B, N, dim] -> [B, N, dim].
    """

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
    """attn_downsample(x), then x + mlp(x), the branch with drop path.

    Shape: [B, N, in_dim] -> [B, about N / 4, dim].
    """

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
    """``downsample`` (not in the first stage), then blocks of one width."""

    def __init__(self, downsample: nn.Layer, blocks: Iterable[Block]) -> None:
        super().__init__()
        self.downsample = downsample
        self.blocks = nn.LayerList(blocks)


@register("levit")
class LeViT(ImageModel):
    """LeViT. It takes images of image_size only.

    Its features are the last stage's tokens: [B, N, embed_dims[-1]], row by row.

    Args:
        image_size: pixels, or (height, width): multiples of 16, or of 8 with stem_type "s8".
        stage_depths: number of blocks in each stage.
        embed_dims: number of channels of each stage. All but the last must be multiples of key_dim.
        num_heads: number of attention heads in each stage. The attention between two stages has
            embed_dims / key_dim heads, with embed_dims of the first of them.
        key_dim: number of channels of a head's queries and keys.
        attn_ratio: ratio of the channels of a head's values to key_dim, within stages; between
            stages it is 4.
        mlp_ratio: ratio of the MLPs' hidden width to their input width, within stages; between
            stages it is 2.
        stem_type: the first layers. "s16": four convolutions, which make tokens of 16 x 16 pixels;
            "s8": three convolutions, 8 x 8 pixels.
        act: activation function of all layers.
        distilled: whether there is a second classifier, for distillation. The output is the mean of
            both.
        dropout: dropout rate before the classifiers.
        droppath: stochastic depth rate of all blocks.

    Attributes:
        distilled_training: for a distilled model. True: train mode returns (logits, distillation
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
        distilled: OfClassifier[bool] = True,
        dropout: InTraining[OfClassifier[Rate]] = 0.0,
        droppath: InTraining[Rate] = 0.0,
        head_init_scale: InTraining[OfClassifier[Factor]] = 1.0,
        recompute: InTraining[bool] = False,
    ) -> None:
        super().__init__(image_size, in_channels, num_classes, head_init_scale, recompute)
        stem_divisors = STEM_DIVISORS[stem_type]
        stride = 2 ** len(stem_divisors)
        self._check_sizes(stride, stage_depths, embed_dims, num_heads, key_dim)
        self.num_features = embed_dims[-1]
        self.distilled = distilled
        self.dropout = dropout
        self.stem = nn.Sequential()
        in_dim = in_channels
        for i, divisor in enumerate(stem_divisors):
            if i:
                self.stem.add_sublayer(f"act{i}", ACTIVATIONS[act]())
            dim = embed_dims[0] // divisor
            self.stem.add_sublayer(f"conv{i + 1}", ConvNorm(in_dim, dim))
            in_dim = dim
        height, width = self.image_size
        grid = (height // stride, width // stride)
        # (rows, columns) by their product.
        self.grids = {grid[0] * grid[1]: grid}
        self.stages = nn.LayerList()
        for dim, depth, heads in zip(embed_dims, stage_depths, num_heads, strict=True):
            downsample: nn.Layer = nn.Identity()
            if len(self.stages):
                downsample = Downsample(in_dim, dim, key_dim, grid, droppath, act)
                grid = ((grid[0] + 1) // 2, (grid[1] + 1) // 2)
                self.grids[grid[0] * grid[1]] = grid
            attentions = [
                Attention(dim, key_dim, heads, attn_ratio, grid, act) for _ in range(depth)
            ]
            blocks = [Block(dim, attn, mlp_ratio, droppath, act) for attn in attentions]
            self.stages.append(Stage(downsample, blocks))
            in_dim = dim
        modules = [f"stages.{i}" for i in range(len(self.stages))]
        reductions = [stride * 2**i for i in range(len(self.stages))]
        self.feature_info = feature_info(modules, embed_dims, reductions)
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
                expected = f"expected {len(embed_dims)} numbers: one per stage, as in EMBED_DIMS"
                raise InputError(f"{key} is {list(values)}, {expected}")
        if embed_dims[0] % 8:
            raise InputError(
                f"EMBED_DIMS begins with {embed_dims[0]}, not a multiple of 8, which the stem needs"
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
        if stage is not self.stages[0]:
            x = self._run(stage.downsample, x)
        return self._run_all(stage.blocks, x)

    def forward_head(self, x: paddle.Tensor) -> paddle.Tensor | tuple[paddle.Tensor, paddle.Tensor]:
        x = x.mean(axis=1)
        if not self.distilled:
            return self.head(x)
        logits = self.head(x)
        distilled_logits = self.head_dist(x)
        if self.distilled_training and self.training:
            return logits, distilled_logits
        return (logits + distilled_logits) / 2

    def inference_model(self) -> ImageModel:
        """Returns a copy with every batch norm folded into the convolution or Linear next to it, as
        the authors' ``fuse`` does.
        """
        return fold(self)

    def _heads(self) -> tuple[str, ...]:
        return ("head", "head_dist") if self.distilled else ("head",)

    def classifier_names(self) -> tuple[str, ...]:
        # A head without classes, and one whose norm is folded, has no ``linear``.
        suffix = ".linear" if isinstance(self.head, NormLinear) else ""
        return tuple(f"{name}{suffix}" for name in self._heads())

    def _add_classifiers(self) -> None:
        for name in self._heads():
            if self.num_classes:
                classifier = NormLinear(self.num_features, self.num_classes, self.dropout)
            else:
                classifier = nn.Identity()
            setattr(self, name, classifier)

    def layer_groups(self) -> list[tuple[str, ...]]:
        """Returns timm's groups, since the authors have none: the stem, each block, and the
        classifiers with their norms. The first block of a stage has the downsampling before it.
        """
        return [*groups_by_block("stem", "stages", self.stages), ("head", "head_dist")]

    def no_weight_decay(self) -> set[str]:
        return {name for name, _ in self.named_parameters() if name.endswith("attention_biases")}

    def _init_weights(self, layer: nn.Layer) -> None:
        # ``apply`` visits a layer's sublayers before itself. So the Linears of a LinearNorm are
        # drawn by init_linear first, and then again as PyTorch does; the classifiers stay at
        # N(0, 0.02).
        init_linear(layer)
        if isinstance(layer, ConvNorm | LinearNorm):
            init_as_torch(layer.linear)
        if isinstance(layer, LinearNorm):
            Constant(layer.norm_weight)(layer.bn.weight)
