"""ConvNeXt (Liu et al. 2022, arXiv:2201.03545) and ConvNeXt V2 (Woo et al. 2023, arXiv:2301.00808).

Parameter names, the order of operations and the initialisation are those of timm's ``ConvNeXt``.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import paddle
from paddle import nn
from paddle.nn.initializer import Constant, Normal

from models.base import ImageModel, register
from models.layers import DropPath, LayerNorm, Linear, Mlp, init_linear
from models.layers.activations import GELU
from models.layers.conv import Conv2D
from models.layers.layout import channels_first, channels_last, mean_of_places
from models.layers.linear import ChannelNorm, in_float32, set_norm_eps
from models.layers.scale import scale_channels, scale_planes
from models.layers.stages import check_stages, drop_path_rates, feature_info, groups_by_block
from settings.keys import Depth, Epsilon, Factor, InTraining, OfClassifier, Rate, Size
from weights.names import convnext as names


class Block(nn.Layer):
    """x + gamma * mlp(norm(conv_dw(x))), the branch with drop path.

    Args:
        dim: channels D.
        init_values: initial value of gamma; 0 or None: there is no gamma.
        drop_path: rate of stochastic depth.
        conv_mlp: whether the MLP is of 1 x 1 convolutions.
        use_grn: whether the MLP has a global response norm.

    Shape: [B, H, W, D] -> the same; with ``conv_mlp`` [B, D, H, W] -> the same.
    """

    def __init__(
        self,
        dim: int,
        init_values: float | None,
        drop_path: float,
        conv_mlp: bool = False,
        use_grn: bool = False,
    ) -> None:
        super().__init__()
        self.conv_dw = Conv2D(dim, dim, 7, padding=3, groups=dim)
        norm_layer = ChannelNorm if conv_mlp else LayerNorm
        self.norm = norm_layer(dim, epsilon=1e-6)
        self.mlp = Mlp(dim, 4 * dim, conv=conv_mlp, grn=use_grn)
        self.gamma = None
        self.conv_mlp = conv_mlp
        if init_values:
            self.gamma = self.create_parameter([dim], default_initializer=Constant(init_values))
        self.drop_path = DropPath(drop_path)

    def forward(self, x: paddle.Tensor, seen: paddle.Tensor | None = None) -> paddle.Tensor:
        """Returns the output for x.

        Args:
            seen: 1.0 at places that the image has, 0.0 at masked ones, [B, H, W, 1]; with
                ``conv_mlp`` [B, 1, H, W]. No place sees anything of the masked ones, as in a sparse
                convolution. The output at these isn't defined. None: there are all places.
        """
        if seen is not None:
            x = x * seen
        branch = self.mlp(self.norm(self.conv_dw(x, last=not self.conv_mlp)), seen)
        if self.gamma is not None:
            if self.conv_mlp:
                branch = scale_planes(branch, self.gamma.reshape([-1, 1, 1]))
            else:
                branch = scale_channels(branch, self.gamma)
        return self.drop_path(branch, onto=x)


class Stage(nn.Layer):
    """``downsample`` (not in the first stage), then blocks of one width."""

    def __init__(self, downsample: nn.Layer, blocks: Iterable[Block]) -> None:
        super().__init__()
        self.downsample = downsample
        self.blocks = nn.LayerList(blocks)


def stem(in_channels: int, dim: int, kind: str) -> nn.Sequential:
    """Returns the convolutions that make one place of 4 x 4 pixels, and their norm.

    Args:
        kind: the architecture's ``stem_type``.

    Shape: [B, in_channels, H, W] -> [B, dim, H / 4, W / 4].
    """
    if kind == "patch":
        conv = Conv2D(in_channels, dim, 4, stride=4)
        return nn.Sequential(conv, ChannelNorm(dim, epsilon=1e-6))
    hidden_dim = dim
    if kind == "overlap_tiered":
        # Half the channels, rounded to a multiple of 8, but not down by more than 10 %.
        hidden_dim = max(8, (dim // 2 + 4) // 8 * 8)
        if hidden_dim < 0.9 * (dim // 2):
            hidden_dim += 8
    return nn.Sequential(
        Conv2D(in_channels, hidden_dim, 3, stride=2, padding=1),
        Conv2D(hidden_dim, dim, 3, stride=2, padding=1),
        ChannelNorm(dim, epsilon=1e-6),
    )


@register("convnext")
class ConvNeXt(ImageModel):
    """ConvNeXt and ConvNeXt V2. They take images of any size from 32 x 32 on.

    Their features are the last stage's output: [B, embed_dims[3], H / 32, W / 32]. They are
    normalised only with ``head_norm_first``.

    Args:
        stage_depths: number of blocks in each of the four stages.
        embed_dims: number of channels of each of the four stages.
        init_values: initial value of layer scale. 0 or None: no layer scale.
        use_grn: whether the MLPs have a global response norm, as in ConvNeXt V2, which doesn't have
            layer scale.
        conv_mlp: whether MLPs are made of 1 x 1 convolutions, as in timm's small models, instead of
            Linears. Both compute the same, and each can load the other's weights.
        stem_type: the first layers. "patch": a 4 x 4 convolution of stride 4; "overlap": two 3 x 3
            convolutions of stride 2; "overlap_tiered": the same, but the first has half the
            channels.
        norm_eps: epsilon of all norms except the final one.
        head_norm_eps: epsilon of the final norm. transformers uses 1e-12.
        head_norm_first: whether the final norm comes before the pooling, as ``norm_pre``.
        head_hidden_size: hidden width of a Linear with GELU before the classifier. None: the
            classifier is a single layer.
        dropout: dropout rate before the classifier.
        droppath: stochastic depth rate of the last block; the rates grow linearly from 0 at the
            first.

    Raises:
        InputError: not four stages.
    """

    weight_names = names
    first_conv = "stem.0"
    min_image_size = 32

    def __init__(
        self,
        image_size: int | Sequence[int] = 224,
        in_channels: int = 3,
        num_classes: int = 1000,
        stage_depths: Sequence[Depth] = (3, 3, 9, 3),
        embed_dims: Sequence[Size] = (96, 192, 384, 768),
        init_values: Factor | None = 1e-6,
        use_grn: bool = False,
        conv_mlp: bool = False,
        stem_type: Literal["patch", "overlap", "overlap_tiered"] = "patch",
        norm_eps: Epsilon = 1e-6,
        head_norm_eps: Epsilon = 1e-6,
        head_norm_first: bool = False,
        head_hidden_size: OfClassifier[Size | None] = None,
        dropout: InTraining[OfClassifier[Rate]] = 0.0,
        droppath: InTraining[Rate] = 0.0,
        head_init_scale: InTraining[OfClassifier[Factor]] = 1.0,
        recompute: InTraining[bool] = False,
    ) -> None:
        super().__init__(image_size, in_channels, num_classes, head_init_scale, recompute)
        check_stages(stage_depths, embed_dims)
        self.use_grn = use_grn
        self.head_norm_eps = head_norm_eps
        self.conv_mlp = conv_mlp
        self.num_features = head_hidden_size or embed_dims[-1]
        self.stem = stem(in_channels, embed_dims[0], stem_type)
        self.stages = nn.LayerList()
        for i, rates in enumerate(drop_path_rates(droppath, stage_depths)):
            dim = embed_dims[i]
            downsample: nn.Layer = nn.Identity()
            if i:
                in_dim = embed_dims[i - 1]
                downsample = nn.Sequential(
                    ChannelNorm(in_dim, epsilon=1e-6), Conv2D(in_dim, dim, 2, stride=2)
                )
            blocks = [Block(dim, init_values, rate, conv_mlp, use_grn) for rate in rates]
            self.stages.append(Stage(downsample, blocks))
        modules = [f"stages.{i}" for i in range(4)]
        self.feature_info = feature_info(modules, embed_dims, (4, 8, 16, 32))
        set_norm_eps(self, norm_eps)

        # The last norm stands before the pooling or after it.
        last_dim = embed_dims[-1]
        self.norm_pre = nn.Identity()
        head_norm: nn.Layer = nn.Identity()
        if head_norm_first:
            self.norm_pre = ChannelNorm(last_dim, epsilon=head_norm_eps)
        else:
            head_norm = LayerNorm(last_dim, epsilon=head_norm_eps)
        hidden: nn.Layer = nn.Identity()
        if head_hidden_size:
            hidden = nn.Sequential(("fc", Linear(last_dim, head_hidden_size)), ("act", GELU()))
        self.head = nn.Sequential(
            ("norm", head_norm),
            ("pre_logits", hidden),
            ("drop", nn.Dropout(dropout)),
            ("fc", nn.Identity()),
        )
        self._finish()

    def _embed(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.stem(x)

    def _last_norm(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.norm_pre(x)

    def _stages(self) -> Iterable[Any]:
        return self.stages

    def _stage(self, stage: Any, x: paddle.Tensor, shared: Any) -> paddle.Tensor:
        """Returns the output of a stage.

        Args:
            shared: the places of the stage's map that aren't masked (``Block``), [B, 1, H, W];
                None: all of them.
        """
        x = in_float32(stage.downsample(x))
        if not self.conv_mlp:
            x = channels_last(x)
            shared = None if shared is None else channels_last(shared)
        for block in stage.blocks:
            x = self._run(block, x) if shared is None else self._run(block, x, shared)
        return x if self.conv_mlp else channels_first(x)

    def forward_head(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.head(mean_of_places(x))

    def classifier_names(self) -> tuple[str, ...]:
        return ("head.fc",)

    def layer_groups(self) -> list[tuple[str, ...]]:
        """Returns the authors' groups.

        They are the stem, every three blocks of a stage, and the head. The first group of a stage
        has the downsampling before it. With [3, 3, 27, 3] blocks there are 12 groups between stem
        and head (appendix A, and optim_factory.py in facebookresearch/ConvNeXt).

        In ConvNeXt V2's models with fewer blocks, each block is a group, the first with the stem
        (``layer_decay_type`` in TRAINING.md, and optim_factory.py in facebookresearch/ConvNeXt-V2).
        """
        single_blocks = self.use_grn and len(self.stages[2].blocks) < 27
        group_size = 1 if single_blocks else 3
        groups: list[tuple[str, ...]] = [("stem",)]
        for i, stage in enumerate(self.stages):
            depth = len(stage.blocks)
            for start in range(0, depth, group_size):
                end = min(start + group_size, depth)
                group = tuple(f"stages.{i}.blocks.{j}" for j in range(start, end))
                if start == 0:
                    group = (f"stages.{i}.downsample", *group)
                groups.append(group)
        if single_blocks:
            groups[:2] = [groups[0] + groups[1]]
        return [*groups, ("norm_pre", "head")]

    def timm_layer_groups(self) -> list[tuple[str, ...]]:
        """Returns timm's groups: the stem, each block, and the head with its norm. The first block
        of a stage has the downsampling before it.
        """
        return [*groups_by_block("stem", "stages", self.stages), ("norm_pre", "head")]

    def _init_weights(self, layer: nn.Layer) -> None:
        init_linear(layer)
        if isinstance(layer, nn.Conv2D):
            Normal(std=0.02)(layer.weight)
