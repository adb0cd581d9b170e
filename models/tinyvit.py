"""TinyViT (Wu et al. 2022, arXiv:2207.10666): a stage of convolutions, then stages of attention
within windows.

Parameter names, the order of operations and the initialisation are those of timm's ``TinyVit``.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import paddle
from paddle import nn
from paddle.nn.initializer import Constant

from errors import InputError
from models.base import ImageModel, register
from models.layers import DropPath, LayerNorm, Linear, Mlp, init_linear
from models.layers.activations import gelu
from models.layers.attention import attend_heads
from models.layers.batch_norm import Act, BatchNorm2D
from models.layers.conv import Conv2D
from models.layers.init import init_as_torch
from models.layers.layout import channels_first, channels_last, mean_of_places
from models.layers.linear import in_float32
from models.layers.mlp import hidden_width
from models.layers.relative import gather_columns, offset_index
from models.layers.stages import check_stages, drop_path_rates, feature_info, groups_by_block
from models.layers.windows import in_windows
from settings.keys import Depth, Factor, InTraining, OfClassifier, Positive, Rate, Size
from weights.names import tinyvit as names


class ConvNorm(nn.Layer):
    """A convolution without a bias, batch norm, and the activation ``act`` if one is given.

    Shape: [B, in_dim, H, W] -> [B, dim, H / stride, W / stride], rounded up.
    """

    def __init__(
        self, in_dim: int, dim: int, kernel_size: int = 1, stride: int = 1, groups: int = 1
    ) -> None:
        super().__init__()
        padding = kernel_size // 2
        self.conv = Conv2D(
            in_dim, dim, kernel_size, stride, padding, groups=groups, bias_attr=False
        )
        self.bn = BatchNorm2D(dim)

    def forward(self, x: paddle.Tensor, act: Act | None = None) -> paddle.Tensor:
        return self.bn(self.conv(x), act)


class PatchEmbed(nn.Layer):
    """Two 3 x 3 convolutions with stride 2, and GELU between them.

    Shape: [B, in_dim, H, W] -> [B, dim, H / 4, W / 4], rounded up.
    """

    def __init__(self, in_dim: int, dim: int) -> None:
        super().__init__()
        self.conv1 = ConvNorm(in_dim, dim // 2, 3, stride=2)
        self.conv2 = ConvNorm(dim // 2, dim, 3, stride=2)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.conv2(self.conv1(x, gelu))


class Convolutions(nn.Layer):
    """The convolutions of MobileNetV2: a depthwise one of 3 x 3 places between two of 1 x 1.

    Shape: [B, in_dim, H, W] -> [B, dim, H / stride, W / stride], rounded up.
    """

    def __init__(self, in_dim: int, mid_dim: int, dim: int, stride: int) -> None:
        super().__init__()
        self.conv1 = ConvNorm(in_dim, mid_dim)
        self.conv2 = ConvNorm(mid_dim, mid_dim, 3, stride, groups=mid_dim)
        self.conv3 = ConvNorm(mid_dim, dim)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.conv3(self.conv2(self.conv1(x, gelu), gelu))


class MBConv(Convolutions):
    """gelu(x + convolutions(x)), the branch with drop path.

    Shape: [B, D, H, W] -> the same.
    """

    def __init__(self, dim: int, mid_dim: int, drop_path: float) -> None:
        super().__init__(dim, mid_dim, dim, stride=1)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        # Not super(), which Paddle 2.6 can't trace.
        return gelu(self.drop_path(Convolutions.forward(self, x), onto=x))


class Attention(nn.Layer):
    """A layer norm, then multi-head self-attention within a window.

    There is a learnt bias for each distance between query and key.

    Args:
        dim: channels D of the tokens.
        num_heads: heads H.
        window_size: tokens along a window's side.

    Shape: [B * windows, N, D] -> the same, N = window_size ** 2.
    """

    def __init__(self, dim: int, num_heads: int, window_size: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.window_size = (window_size, window_size)
        self.norm = LayerNorm(dim)
        self.qkv = Linear(dim, 3 * dim)
        self.proj = Linear(dim, dim)
        biases = [num_heads, window_size**2]
        self.attention_biases = self.create_parameter(biases, default_initializer=Constant(0.0))
        index = paddle.to_tensor(offset_index(self.window_size))
        self.register_buffer("attention_bias_idxs", index, persistable=False)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = attend_heads(
            [self.qkv(self.norm(x))],
            self.num_heads,
            self.head_dim,
            self.head_dim**-0.5,
            bias=gather_columns(self.attention_biases, self.attention_bias_idxs),
            by_head=True,
        )
        return self.proj(x)


class NormMlp(Mlp):
    """A layer norm, then ``Mlp``."""

    def __init__(self, dim: int, hidden_dim: int, drop: float) -> None:
        super().__init__(dim, hidden_dim, drop)
        self.norm = LayerNorm(dim)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return Mlp.forward(self, self.norm(x))


class Block(nn.Layer):
    """x + attn(x) within windows, then local_conv(x), then x + mlp(x). Branches have drop path.

    A map that isn't a multiple of the windows is padded by zeros. As in timm, tokens attend to
    these, too.

    Args:
        dim: channels D.
        num_heads: number of attention heads.
        window_size: side of a window, in tokens.
        mlp_ratio: hidden width of the MLP over D.
        drop: dropout in the MLP.
        drop_path: rate of stochastic depth.

    Shape: [B, H, W, D] -> the same.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        window_size: int,
        mlp_ratio: float,
        drop: float,
        drop_path: float,
    ) -> None:
        super().__init__()
        self.attn = Attention(dim, num_heads, window_size)
        self.drop_path1 = DropPath(drop_path)
        self.mlp = NormMlp(dim, hidden_width(dim, mlp_ratio), drop)
        self.drop_path2 = DropPath(drop_path)
        self.local_conv = ConvNorm(dim, dim, 3, groups=dim)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.drop_path1(in_windows(x, self.attn.window_size, self.attn), onto=x)
        x = in_float32(channels_last(self.local_conv(channels_first(x))))
        return self.drop_path2(self.mlp(x), onto=x)


class Stage(nn.Layer):
    """``downsample`` (not in the first stage), then blocks of one width."""

    def __init__(self, downsample: nn.Layer, blocks: Iterable[nn.Layer]) -> None:
        super().__init__()
        self.downsample = downsample
        self.blocks = nn.LayerList(blocks)


@register("tinyvit")
class TinyViT(ImageModel):
    """TinyViT. It takes images of any size from 32 x 32 on.

    Its features are the last stage's output, not normalised: [B, embed_dims[3], H / 32, W / 32],
    rounded up.

    Args:
        stage_depths: number of blocks in each of the four stages. Those of the first are
            convolutions.
        embed_dims: number of channels of each of the four stages.
        num_heads: number of attention heads in each stage. The first number is ignored, because the
            first stage doesn't have attention.
        window_sizes: for each stage the side of a window, in tokens. The first number is ignored.
        mlp_ratio: ratio of the MLP's hidden width to its input width.
        dropout: dropout rate in the MLPs.
        droppath: stochastic depth rate of the last block; the rates grow linearly from 0 at the
            first.

    Raises:
        InputError: not four stages, or sizes that don't fit together.
    """

    weight_names = names
    first_conv = "patch_embed.conv1.conv"
    min_image_size = 32

    def __init__(
        self,
        image_size: int | Sequence[int] = 224,
        in_channels: int = 3,
        num_classes: int = 1000,
        stage_depths: Sequence[Depth] = (2, 2, 6, 2),
        embed_dims: Sequence[Size] = (96, 192, 384, 576),
        num_heads: Sequence[Size] = (3, 6, 12, 18),
        window_sizes: Sequence[Size] = (7, 7, 14, 7),
        mlp_ratio: Positive = 4.0,
        dropout: InTraining[Rate] = 0.0,
        droppath: InTraining[Rate] = 0.0,
        head_init_scale: InTraining[OfClassifier[Factor]] = 1.0,
        recompute: InTraining[bool] = False,
    ) -> None:
        super().__init__(image_size, in_channels, num_classes, head_init_scale, recompute)
        check_stages(stage_depths, embed_dims)
        for key, numbers in (("NUM_HEADS", num_heads), ("WINDOW_SIZES", window_sizes)):
            if len(numbers) != 4:
                raise InputError(f"{key} is {list(numbers)}, expected four numbers: one per stage")
        for dim, heads in zip(embed_dims[1:], num_heads[1:], strict=True):
            if dim % heads:
                raise InputError(
                    f"NUM_HEADS has {heads}, expected a divisor of the {dim} channels of its stage"
                )
        self.num_features = embed_dims[-1]
        self.patch_embed = PatchEmbed(in_channels, embed_dims[0])
        rates = drop_path_rates(droppath, stage_depths)
        dim = embed_dims[0]
        convolutions = [MBConv(dim, 4 * dim, rate) for rate in rates[0]]
        self.stages = nn.LayerList([Stage(nn.Identity(), convolutions)])
        for i in (1, 2, 3):
            dim = embed_dims[i]
            downsample = Convolutions(embed_dims[i - 1], dim, dim, stride=2)
            blocks = [
                Block(
                    dim,
                    num_heads[i],
                    window_size=window_sizes[i],
                    mlp_ratio=mlp_ratio,
                    drop=dropout,
                    drop_path=rate,
                )
                for rate in rates[i]
            ]
            self.stages.append(Stage(downsample, blocks))
        modules = [f"stages.{i}" for i in range(4)]
        self.feature_info = feature_info(modules, embed_dims, (4, 8, 16, 32))
        self.head = nn.Sequential(("norm", LayerNorm(self.num_features)), ("fc", nn.Identity()))
        self._finish()

    def _embed(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.patch_embed(x)

    def _stages(self) -> Iterable[Any]:
        return self.stages

    def _stage(self, stage: Any, x: paddle.Tensor, shared: Any) -> paddle.Tensor:
        x = stage.downsample(x)
        if stage is self.stages[0]:
            return self._run_all(stage.blocks, x)
        x = self._run_all(stage.blocks, in_float32(channels_last(x)))
        return channels_first(x)

    def forward_head(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.head(mean_of_places(x))

    def classifier_names(self) -> tuple[str, ...]:
        return ("head.fc",)

    def layer_groups(self) -> list[tuple[str, ...]]:
        """Returns the authors' groups (models/tiny_vit.py in microsoft/Cream), one for each block.

        The first block has the stem. The last block of a stage has the downsampling after it, the
        last of all has the head.
        """
        groups: list[tuple[str, ...]] = []
        for i, stage in enumerate(self.stages):
            if i:
                groups[-1] += (f"stages.{i}.downsample",)
            groups += [(f"stages.{i}.blocks.{j}",) for j in range(len(stage.blocks))]
        groups[0] += ("patch_embed",)
        groups[-1] += ("head",)
        return groups

    def timm_layer_groups(self) -> list[tuple[str, ...]]:
        """Returns timm's groups: the stem, each block, and the head with its norm. The first block
        of a stage has the downsampling before it.
        """
        return [*groups_by_block("patch_embed", "stages", self.stages), ("head",)]

    def no_weight_decay(self) -> set[str]:
        return {name for name, _ in self.named_parameters() if name.endswith("attention_biases")}

    def _init_weights(self, layer: nn.Layer) -> None:
        init_linear(layer)
        if isinstance(layer, nn.Conv2D):
            init_as_torch(layer)
        elif isinstance(layer, MBConv):
            # A fresh block is gelu(x).
            Constant(0.0)(layer.conv3.bn.weight)
