"""Vision Permutator (ViP; Hou et al. 2021, arXiv:2106.12368), an MLP over rows, columns and channels.

Parameter names, the order of operations and the initialisation are those of the authors' code
(houqb/VisionPermutator), which PaddleViT's follows.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import paddle
from paddle import nn

from errors import InputError
from models.base import ImageModel, register
from models.layers import LayerNorm, Linear, PatchEmbed, init_linear
from models.layers.block import Block
from models.layers.conv import Conv2D
from models.layers.init import init_as_torch
from models.layers.linear import in_float32
from models.layers.reweight import Reweight
from models.layers.sizes import check_multiples
from models.layers.stages import check_counts, drop_path_rates, feature_info
from models.layers.windows import in_windows
from settings.keys import Depth, Factor, InTraining, OfClassifier, Positive, Rate, Size


class PermuteMlp(nn.Layer):
    """Linears along the height, the width and the channels, whose outputs are summed with weights
    that depend on the image.

    The channels are cut into as many segments as a column has places. The Linear along the height
    reads one segment of all places of a column. That along the width does the same with rows. The
    weights of the three outputs are a softmax for each image and channel.

    Args:
        dim: channels D, a multiple of H and of W.
        bias: whether the three Linears have a bias.

    Shape: [B, H, W, D] -> the same.
    """

    def __init__(self, dim: int, bias: bool) -> None:
        super().__init__()
        bias_attr = None if bias else False
        self.mlp_c = Linear(dim, dim, bias_attr=bias_attr)
        self.mlp_h = Linear(dim, dim, bias_attr=bias_attr)
        self.mlp_w = Linear(dim, dim, bias_attr=bias_attr)
        self.reweight = Reweight(dim)
        self.proj = Linear(dim, dim)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        _, height, width, dim = x.shape
        # Windows of one column, over all segments: [B, H, W * segments, channels of a segment].
        columns = x.reshape([-1, height, width * height, dim // height])
        h = in_windows(columns, (height, 1), lambda column: _joined(self.mlp_h, column))
        h = h.reshape([-1, height * width, dim])
        rows = x.reshape([-1, width, width, dim // width])
        w = in_windows(rows, (width, 1), lambda row: _joined(self.mlp_w, row))
        w = w.reshape([-1, height * width, dim])
        c = self.mlp_c(x).reshape([-1, height * width, dim])
        x = self.reweight(h, w, c)
        return self.proj(x).reshape([-1, height, width, dim])


def _joined(layer: nn.Layer, x: paddle.Tensor) -> paddle.Tensor:
    """Returns the output of a layer that reads all channels of all places of a window at once.

    Shape of x: [B, places, D]; the layer takes and returns [B, places * D].
    """
    return layer(x.flatten(1)).reshape([-1, *x.shape[1:]])


class Downsample(nn.Layer):
    """A convolution whose stride is the side of its kernel.

    Shape: [B, H, W, in_dim] -> [B, H / stride, W / stride, dim].
    """

    def __init__(self, in_dim: int, dim: int, stride: int) -> None:
        super().__init__()
        self.proj = Conv2D(in_dim, dim, stride, stride=stride)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.proj(x, last=True)


@register("vip")
class VisionPermutator(ImageModel):
    """Vision Permutator. It takes images of image_size only.

    Its features are the normalised output of the last stage: [B, H / patch_size / 2, W / patch_size
    / 2, embed_dims[-1]] for one transition.

    Args:
        patch_size: side of a patch, in pixels.
        stage_depths: number of blocks in each stage.
        embed_dims: number of channels of each stage: multiples of the rows and columns of its map.
        transitions: for each stage except the last, whether the next stage halves rows and columns.
            If it doesn't and has the same number of channels, it follows directly.
        mlp_ratio: ratio of the MLPs' hidden width to their input width, for each stage.
        qkv_bias: whether the Linears along the height, the width and the channels have a bias.
        droppath: stochastic depth rate of the last block; the rates grow linearly from 0 at the
            first.

    Raises:
        InputError: sizes that don't fit together.
    """

    layout = "NHWC"

    def __init__(
        self,
        image_size: int | Sequence[int] = 224,
        patch_size: Size = 7,
        in_channels: int = 3,
        num_classes: int = 1000,
        stage_depths: Sequence[Depth] = (4, 3, 8, 3),
        embed_dims: Sequence[Size] = (192, 384, 384, 384),
        transitions: Sequence[bool] = (True, False, False),
        mlp_ratio: Sequence[Positive] = (3, 3, 3, 3),
        qkv_bias: bool = False,
        droppath: InTraining[Rate] = 0.0,
        head_init_scale: InTraining[OfClassifier[Factor]] = 1.0,
        recompute: InTraining[bool] = False,
    ) -> None:
        super().__init__(image_size, in_channels, num_classes, head_init_scale, recompute)
        stages = len(stage_depths)
        check_counts(stages, EMBED_DIMS=embed_dims, MLP_RATIO=mlp_ratio)
        if len(transitions) != stages - 1:
            raise InputError(
                f"TRANSITIONS is {list(transitions)}, expected {stages - 1}: one per stage of"
                " STAGE_DEPTHS but the last"
            )
        reductions = [patch_size * 2 ** sum(transitions[:stage]) for stage in range(stages)]
        check_multiples(self.image_size, reductions[-1], f"{reductions[-1]}, a place's pixels")
        self._check_dims(embed_dims, reductions)
        self.patch_embed = PatchEmbed(self.image_size, patch_size, in_channels, embed_dims[0])
        # Stages, and what comes before some of them.
        self.network: Any = nn.LayerList()
        self.stage_indices = []
        for i, rates in enumerate(drop_path_rates(droppath, stage_depths)):
            dim = embed_dims[i]
            if i and (transitions[i - 1] or dim != embed_dims[i - 1]):
                stride = reductions[i] // reductions[i - 1]
                self.network.append(Downsample(embed_dims[i - 1], dim, stride))
            self.stage_indices.append(len(self.network))
            self.network.append(
                nn.LayerList(
                    Block(
                        dim,
                        PermuteMlp(dim, qkv_bias),
                        mlp_ratio[i],
                        init_values=None,
                        drop=0.0,
                        drop_path=rate,
                        epsilon=1e-5,
                    )
                    for rate in rates
                )
            )
        self.num_features = embed_dims[-1]
        modules = [f"network.{index}" for index in self.stage_indices]
        self.feature_info = feature_info(modules, embed_dims, reductions)
        self.norm = LayerNorm(self.num_features)
        self._finish()

    def _check_dims(self, dims: Sequence[int], reductions: Sequence[int]) -> None:
        for dim, reduction in zip(dims, reductions, strict=True):
            for side in self.image_size:
                if dim % (side // reduction):
                    raise InputError(
                        f"EMBED_DIMS has {dim} where maps have {side // reduction} positions"
                        " along a"
                        " side; expected a multiple of that, or another IMAGE_SIZE"
                    )

    def _embed(self, x: paddle.Tensor) -> paddle.Tensor:
        x = in_float32(self.patch_embed(x))
        return x.reshape([-1, *self.patch_embed.grid_size, x.shape[2]])

    def _stages(self) -> Iterable[Any]:
        return self.stage_indices

    def _stage(self, stage: Any, x: paddle.Tensor, shared: Any) -> paddle.Tensor:
        if stage and stage - 1 not in self.stage_indices:
            x = self.network[stage - 1](x)
        return self._run_all(self.network[stage], x)

    def forward_head(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.head(x.flatten(1, 2).mean(axis=1))

    def layer_groups(self) -> list[tuple[str, ...]]:
        """Returns the groups: the patches, each block, the classifier with its norm. The first block
        of a stage has the downsampling before it.
        """
        groups: list[tuple[str, ...]] = [("patch_embed",)]
        for index in self.stage_indices:
            blocks: list[tuple[str, ...]] = [
                (f"network.{index}.{i}",) for i in range(len(self.network[index]))
            ]
            if index and index - 1 not in self.stage_indices:
                blocks[0] += (f"network.{index - 1}",)
            groups += blocks
        return [*groups, ("norm", "head")]

    def _init_weights(self, layer: nn.Layer) -> None:
        init_linear(layer)
        if isinstance(layer, nn.Conv2D):
            init_as_torch(layer)
