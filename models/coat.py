"""CoaT, co-scale conv-attentional image transformers (Xu et al. 2021, arXiv:2104.06399).

Parameter names, the order of operations and the initialisation are those of timm's ``CoaT``. The
blocks of a scale share layers. timm stores these under several names; here a tensor has the first
of them only (``weights.names.coat``).
"""

from collections.abc import Iterable, Sequence
from typing import Any

import paddle
from paddle import nn
from paddle.nn.initializer import Normal, Uniform

from errors import InputError
from models.base import ImageModel, register
from models.layers import DropPath, LayerNorm, Mlp, PatchEmbed, init_linear
from models.layers.factorized import (
    ConvPosEnc,
    ConvRelPosEnc,
    FactorizedAttention,
    as_map,
    as_tokens,
)
from models.layers.init import init_as_torch
from models.layers.layout import concat
from models.layers.linear import add_bias
from models.layers.mlp import hidden_width
from models.layers.resize import resize_evenly
from models.layers.sizes import check_multiples
from models.layers.stages import check_stages, feature_info
from settings.keys import (
    Blocks,
    Depth,
    Factor,
    InTraining,
    Kernel,
    OfClassifier,
    Positive,
    Rate,
    Size,
)
from weights.names import coat as names


class NormedPatches(PatchEmbed):
    """``PatchEmbed``, then a layer norm of the tokens."""

    def __init__(
        self, image_size: Sequence[int], patch_size: int, in_channels: int, dim: int
    ) -> None:
        super().__init__(image_size, patch_size, in_channels, dim)
        self.norm = LayerNorm(dim)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.norm(PatchEmbed.forward(self, x))


class SerialBlock(nn.Layer):
    """x = cpe(x), then x + attention(norm1(x)), then x + mlp(norm2(x)), each branch with drop path.

    Args:
        encodings: the ``ConvPosEnc`` and the ``ConvRelPosEnc`` of the scale, which all its blocks
            share. They are sublayers of the model; in a tuple they don't become the block's.
        dim: channels D of the tokens.
        hidden_dim: channels within the MLP.
        num_heads: number of attention heads.
        qkv_bias: whether the queries, keys and values have a bias.
        drop: dropout after the attention's projection and in the MLP.
        drop_path: rate of stochastic depth.

    Shape: [B, N, D] -> the same.
    """

    def __init__(
        self,
        encodings: tuple[ConvPosEnc, ConvRelPosEnc],
        dim: int,
        hidden_dim: int,
        num_heads: int,
        qkv_bias: bool,
        drop: float,
        drop_path: float,
    ) -> None:
        super().__init__()
        self.encodings = encodings
        self.norm1 = LayerNorm(dim, epsilon=1e-6)
        self.factoratt_crpe = FactorizedAttention(dim, num_heads, qkv_bias, drop)
        self.norm2 = LayerNorm(dim, epsilon=1e-6)
        self.mlp = Mlp(dim, hidden_dim, drop)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        cpe, crpe = self.encodings
        x = cpe(x)
        x = self.drop_path(self.factoratt_crpe(self.norm1(x), crpe), onto=x)
        return self.drop_path(self.mlp(self.norm2(x)), onto=x)


class ParallelBlock(nn.Layer):
    """A block of the last three scales, which exchanges their outputs of attention.

    Each scale has an attention of its own. The outputs of the other two scales, resized, are added
    to that of the scale itself. All three scales share one MLP.

    Args:
        encodings: for each of the three scales, as in ``SerialBlock``; so are the other arguments.

    Shape: three tensors [B, N, D] -> the same.
    """

    def __init__(
        self,
        encodings: Sequence[tuple[ConvPosEnc, ConvRelPosEnc]],
        dim: int,
        hidden_dim: int,
        num_heads: int,
        qkv_bias: bool,
        drop: float,
        drop_path: float,
    ) -> None:
        super().__init__()
        self.encodings = tuple(encodings)
        for i in (2, 3, 4):
            setattr(self, f"norm1{i}", LayerNorm(dim, epsilon=1e-6))
            setattr(self, f"factoratt_crpe{i}", FactorizedAttention(dim, num_heads, qkv_bias, drop))
            setattr(self, f"norm2{i}", LayerNorm(dim, epsilon=1e-6))
        self.mlp2 = Mlp(dim, hidden_dim, drop)
        self.drop_path = DropPath(drop_path)

    def forward(self, *scales: paddle.Tensor) -> tuple[paddle.Tensor, ...]:
        # Plain loops: Paddle can't trace zip with strict, nor the sum of a generator.
        encoded = []
        tokens = []
        maps = []
        for i, x in enumerate(scales):
            cpe, crpe = self.encodings[i]
            encoded.append(cpe(x))
            norm1 = getattr(self, f"norm1{i + 2}")
            attention = getattr(self, f"factoratt_crpe{i + 2}")
            token, places = as_map(attention(norm1(encoded[i]), crpe), crpe.grid)
            tokens.append(token)
            maps.append(places)
        token = tokens[0] + tokens[1] + tokens[2]
        outputs = []
        for i, x in enumerate(encoded):
            grid = self.encodings[i][1].grid
            others = [
                resize_evenly(maps[j], self.encodings[j][1].grid, grid) for j in range(3) if j != i
            ]
            x = self.drop_path(as_tokens(token, maps[i] + others[0] + others[1]), onto=x)
            norm2 = getattr(self, f"norm2{i + 2}")
            outputs.append(self.drop_path(self.mlp2(norm2(x)), onto=x))
        return tuple(outputs)


class Aggregation(nn.Layer):
    """A learnt weighted sum of three class tokens.

    In timm it is a convolution, whose parameter names and shapes it keeps.

    Shape: [B, 3, D] -> [B, D].
    """

    def __init__(self) -> None:
        super().__init__()
        uniform = Uniform(-(3**-0.5), 3**-0.5)
        self.weight = self.create_parameter([1, 3, 1], default_initializer=uniform)
        self.bias = self.create_parameter([1], default_initializer=uniform)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return add_bias(paddle.matmul(self.weight.squeeze(2), x).squeeze(1), self.bias)


@register("coat")
class CoaT(ImageModel):
    """CoaT and CoaT-Lite. They take images of image_size only.

    The features of CoaT-Lite are the last scale's tokens, normalised: [B, 1 + H / 32 * W / 32,
    embed_dims[3]]. Those of CoaT are a list of the tokens of the last three scales. The classifier
    reads the class token, or a learnt sum of three class tokens.

    Args:
        stage_depths: number of serial blocks of each of the four scales.
        parallel_depth: number of parallel blocks after the serial ones. In them, the last three
            scales exchange their outputs. 0: CoaT-Lite.
        embed_dims: number of channels of each of the four scales. With parallel blocks, the last
            three must be equal.
        num_heads: number of attention heads, the same for all scales.
        crpe_window: for each head the window size of its relative positions. Heads with the same
            size must follow each other.
        mlp_ratio: ratio of the MLP's hidden width to its input width; one number, or one per scale.
        qkv_bias: whether the queries, keys and values have a bias.
        dropout: dropout rate after the attention's projection and in the MLP.
        droppath: stochastic depth rate of every block.

    Raises:
        InputError: sizes that don't fit together.
    """

    weight_names = names
    first_conv = "patch_embed1.proj"
    layout = "NLC"
    num_prefix_tokens = 1

    def __init__(
        self,
        image_size: int | Sequence[int] = 224,
        in_channels: int = 3,
        num_classes: int = 1000,
        stage_depths: Sequence[Depth] = (2, 2, 2, 2),
        parallel_depth: Blocks = 0,
        embed_dims: Sequence[Size] = (64, 128, 256, 320),
        num_heads: Size = 8,
        crpe_window: Sequence[Kernel] = (3, 3, 5, 5, 5, 7, 7, 7),
        mlp_ratio: Positive | Sequence[Positive] = (8, 8, 4, 4),
        qkv_bias: bool = True,
        dropout: InTraining[Rate] = 0.0,
        droppath: InTraining[Rate] = 0.0,
        head_init_scale: InTraining[OfClassifier[Factor]] = 1.0,
        recompute: InTraining[bool] = False,
    ) -> None:
        super().__init__(image_size, in_channels, num_classes, head_init_scale, recompute)
        ratios = [mlp_ratio] * 4 if isinstance(mlp_ratio, int | float) else list(mlp_ratio)
        check_stages(stage_depths, embed_dims)
        _check_sizes(
            self.image_size,
            embed_dims,
            num_heads,
            crpe_window,
            ratios,
            parallel=bool(parallel_depth),
        )
        self.num_features = embed_dims[-1]
        hidden = [hidden_width(dim, ratio) for dim, ratio in zip(embed_dims, ratios, strict=True)]
        block_options: dict[str, Any] = {
            "num_heads": num_heads,
            "qkv_bias": qkv_bias,
            "drop": dropout,
            "drop_path": droppath,
        }
        encodings: list[tuple[ConvPosEnc, ConvRelPosEnc]] = []
        for i, (depth, dim) in enumerate(zip(stage_depths, embed_dims, strict=True)):
            if i == 0:
                size = list(self.image_size)
                embed = NormedPatches(size, 4, in_channels, dim)
            else:
                # The patches are 2 x 2 places of the scale before.
                size = [pixels // 2 ** (i + 1) for pixels in self.image_size]
                embed = NormedPatches(size, 2, embed_dims[i - 1], dim)
            token = self.create_parameter([1, 1, dim], default_initializer=Normal(std=0.02))
            encodings.append(
                (ConvPosEnc(dim, embed.grid_size), ConvRelPosEnc(dim, crpe_window, embed.grid_size))
            )
            blocks = nn.LayerList(
                SerialBlock(encodings[i], dim, hidden[i], **block_options) for _ in range(depth)
            )
            setattr(self, f"patch_embed{i + 1}", embed)
            setattr(self, f"cls_token{i + 1}", token)
            setattr(self, f"cpe{i + 1}", encodings[i][0])
            setattr(self, f"crpe{i + 1}", encodings[i][1])
            setattr(self, f"serial_blocks{i + 1}", blocks)
        self.parallel_blocks = nn.LayerList(
            ParallelBlock(encodings[1:], embed_dims[-1], hidden[-1], **block_options)
            for _ in range(parallel_depth)
        )
        for i in (2, 3, 4) if parallel_depth else (4,):
            setattr(self, f"norm{i}", LayerNorm(self.num_features, epsilon=1e-6))
        if parallel_depth:
            self.aggregate = Aggregation()
        modules = ["serial_blocks1", "serial_blocks2", "serial_blocks3", "serial_blocks4"]
        if parallel_depth:
            modules[1:] = ["parallel_blocks"] * 3
        self.feature_info = feature_info(modules, embed_dims, (4, 8, 16, 32))
        self._finish()

    @property
    def cls_token(self) -> paddle.Tensor:
        """The class token of the last scale."""
        return self.cls_token4

    def _embed(self, x: paddle.Tensor) -> paddle.Tensor:
        return x

    def _stages(self) -> Iterable[Any]:
        return (1, 2, 3, 4)

    def _stage(self, stage: Any, x: paddle.Tensor, shared: Any) -> paddle.Tensor:
        if stage > 1:
            _, x = as_map(x, getattr(self, f"cpe{stage - 1}").grid)
        x = getattr(self, f"patch_embed{stage}")(x)
        # Not expand, which would be exported with a batch of 1.
        token = getattr(self, f"cls_token{stage}") + paddle.zeros_like(x[:, :1])
        return self._run_all(getattr(self, f"serial_blocks{stage}"), concat([token, x], axis=1))

    def _last_norm(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.norm4(x)

    def _parallel(self, images: paddle.Tensor) -> list[paddle.Tensor]:
        """Returns the tokens of the four scales after the parallel blocks."""
        scales = [images]
        for stage in self._stages():
            scales.append(self._stage(stage, scales[-1], None))
        first, *rest = scales[1:]
        for block in self.parallel_blocks:
            rest = self._run(block, *rest)
        return [first, *rest]

    def _norm_scales(self, scales: Sequence[paddle.Tensor]) -> list[paddle.Tensor]:
        return [getattr(self, f"norm{i}")(x) for i, x in enumerate(scales[1:], 2)]

    def forward_features(self, x: paddle.Tensor) -> Any:
        if not self.parallel_blocks:
            return ImageModel.forward_features(self, x)
        return self._norm_scales(self._parallel(x))

    def _collect(
        self, images: paddle.Tensor, taken: Sequence[int], norm: bool, stop_early: bool
    ) -> Any:
        # The parallel blocks need all scales, so stopping early saves nothing after the first.
        if not self.parallel_blocks or (stop_early and taken[-1] == 0):
            return ImageModel._collect(self, images, taken, norm, stop_early)
        scales = self._parallel(images)
        features = self._norm_scales(scales)
        intermediates = [scales[0], *features] if norm else scales
        return features, [intermediates[i] for i in taken]

    def grid(self, places: int) -> tuple[int, int]:
        grids = (getattr(self, f"cpe{i}").grid for i in self._stages())
        return next(grid for grid in grids if grid[0] * grid[1] == places)

    def cam_layer(self) -> nn.Layer:
        if self.parallel_blocks:
            return self.parallel_blocks[-1].norm14
        return self.serial_blocks4[-1].norm1

    def forward_head(self, x: Any) -> paddle.Tensor:
        if not self.parallel_blocks:
            return self.head(x[:, 0])
        class_tokens = paddle.stack([scale[:, 0] for scale in x], axis=1)
        return self.head(self.aggregate(class_tokens))

    def no_weight_decay(self) -> set[str]:
        return {f"cls_token{i}" for i in (1, 2, 3, 4)}

    def layer_groups(self) -> list[tuple[str, ...]]:
        """Returns the groups of parameters from the input to the classifier.

        The first is the embedding of the first scale with its class token and positions. Then comes
        each serial block; the first one of a later scale has the embedding of that scale. Each
        parallel block follows, and last the classifier with the norms.
        """
        *groups, head = self.timm_layer_groups()
        # Joins the embedding of each later scale with the block after it.
        for i in (2, 3, 4):
            [place] = [index for index, group in enumerate(groups) if f"cls_token{i}" in group]
            groups[place : place + 2] = [groups[place] + groups[place + 1]]
        norms = [name for name in groups[-1] if name.startswith(("norm", "aggregate"))]
        groups[-1] = tuple(name for name in groups[-1] if name not in norms)
        return [*groups, (*norms, *head)]

    def timm_layer_groups(self) -> list[tuple[str, ...]]:
        """Returns timm's groups.

        For each scale, they are the embedding with its class token and positions, then each serial
        block. Then comes each parallel block. The last block has the norms. The classifier is the
        last group.
        """
        groups: list[tuple[str, ...]] = []
        for i in (1, 2, 3, 4):
            groups.append((f"cls_token{i}", f"patch_embed{i}", f"cpe{i}", f"crpe{i}"))
            groups += [
                (f"serial_blocks{i}.{j}",) for j in range(len(getattr(self, f"serial_blocks{i}")))
            ]
        groups += [(f"parallel_blocks.{j}",) for j in range(len(self.parallel_blocks))]
        if self.parallel_blocks:
            groups[-1] += ("norm2", "norm3", "norm4", "aggregate")
        else:
            groups[-1] += ("norm4",)
        return [*groups, ("head",)]

    def _init_weights(self, layer: nn.Layer) -> None:
        init_linear(layer)
        if isinstance(layer, nn.Conv2D):
            init_as_torch(layer)


def _check_sizes(
    image_size: Sequence[int],
    dims: Sequence[int],
    heads: int,
    windows: Sequence[int],
    ratios: Sequence[float],
    parallel: bool,
) -> None:
    check_multiples(image_size, 32, "32")
    if len(ratios) != 4:
        raise InputError(f"MLP_RATIO is {ratios}, expected four numbers: one per scale")
    if parallel and (len(set(dims[1:])) > 1 or len(set(ratios[1:])) > 1):
        values = f"EMBED_DIMS is {list(dims)}, MLP_RATIO {ratios}"
        raise InputError(f"{values}: with PARALLEL_DEPTH the last three scales need equal values")
    if any(dim % heads for dim in dims):
        raise InputError(f"EMBED_DIMS is {list(dims)}, expected multiples of NUM_HEADS {heads}")
    # The heads of a window share a convolution, and their channels have to lie side by side.
    windows = list(windows)
    grouped = sorted(windows, key=windows.index)
    if len(windows) != heads or windows != grouped or not all(side % 2 for side in windows):
        expected = f"an odd side for each of {heads} heads, with equal ones next to each other"
        raise InputError(f"CRPE_WINDOW is {windows}, expected {expected}")
