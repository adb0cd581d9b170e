"""ConvNeXt (Liu et al. 2022, arXiv:2201.03545) and ConvNeXt V2 (Woo et al. 2023, arXiv:2301.00808).

Parameter names, order of operations and initialisation are those of timm's ``ConvNeXt``.
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
from settings.keys import Depth, Epsilon, Factor, InTraining, Rate, Size
from weights.names import convnext as names


class Block(nn.Layer):
    """x + gamma * mlp(norm(conv_dw(x))) with drop path; conv_dw mixes 7 x 7 places, mlp channels.

    Shape: [B, H, W, C] -> the same, or, with ``conv_mlp``, [B, C, H, W] -> the same.
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
        self.norm = (ChannelNorm if conv_mlp else LayerNorm)(dim, epsilon=1e-6)
        self.mlp = Mlp(dim, 4 * dim, conv=conv_mlp, grn=use_grn)
        self.gamma = None
        self.conv_mlp = conv_mlp
        if init_values:
            self.gamma = self.create_parameter([dim], default_initializer=Constant(init_values))
        self.drop_path = DropPath(drop_path)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        branch = self.mlp(self.norm(self.conv_dw(x, last=not self.conv_mlp)))
        if self.gamma is not None:
            if self.conv_mlp:
                branch = scale_planes(branch, self.gamma.reshape([-1, 1, 1]))
            else:
                branch = scale_channels(branch, self.gamma)
        return self.drop_path(branch, onto=x)


class Stage(nn.Layer):
    """Blocks of one width. But for the first stage, ``downsample`` halves height and width before
    them.

    Args:
        in_dim: channels of the stage before; 0: this is the first stage.
        rates: each block's rate of stochastic depth.
        options: ``conv_mlp`` and ``use_grn`` of the blocks.
    """

    def __init__(
        self,
        in_dim: int,
        dim: int,
        init_values: float | None,
        rates: Sequence[float],
        **options: bool,
    ) -> None:
        super().__init__()
        self.downsample = nn.Identity()
        if in_dim:
            self.downsample = nn.Sequential(
                ChannelNorm(in_dim, epsilon=1e-6), Conv2D(in_dim, dim, 2, stride=2)
            )
        self.blocks = nn.LayerList(Block(dim, init_values, rate, **options) for rate in rates)


def stem(in_channels: int, dim: int, kind: str) -> nn.Sequential:
    """Returns the convolutions that make one place of 4 x 4 pixels, and their norm.

    Shape: [B, in_channels, H, W] -> [B, dim, H / 4, W / 4].
    """
    if kind == "patch":
        convolution = Conv2D(in_channels, dim, 4, stride=4)
        return nn.Sequential(convolution, ChannelNorm(dim, epsilon=1e-6))
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
    """ConvNeXt and ConvNeXt V2: images of any size from 32 x 32.

    Features: the last stage's channels [B, embed_dims[3], H / 32, W / 32], not normalised but with
    ``head_norm_first``.

    Args:
        stage_depths: blocks of each of four stages.
        embed_dims: channels of each of four stages.
        init_values: layer scale's initial value; 0 or None: no layer scale.
        use_grn: whether the MLPs have a global response norm: ConvNeXt V2, which has no layer
            scale.
        conv_mlp: whether the MLPs are 1 x 1 convolutions, as in timm's small models, or Linears.
            Both compute the same, and weights of one are loaded into the other.
        stem_type: what reads the image. "patch": 4 x 4 pixels by themselves; "overlap": two 3 x 3
            convolutions of stride 2; "overlap_tiered": the first of half the channels.
        norm_eps: epsilon of all norms but the last.
        head_norm_eps: of the last norm. transformers has 1e-12 there.
        head_norm_first: the last norm comes before the pooling, as ``norm_pre``.
        head_hidden_size: channels of a layer with GELU before the classifier; None: there is none.
        dropout: before the classifier.
        droppath: rate of stochastic depth at the last block; linear from 0 at the first.

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
        head_hidden_size: Size | None = None,
        dropout: InTraining[Rate] = 0.0,
        droppath: InTraining[Rate] = 0.0,
        head_init_scale: InTraining[Factor] = 1.0,
        recompute: InTraining[bool] = False,
    ) -> None:
        super().__init__(image_size, in_channels, num_classes, head_init_scale, recompute)
        check_stages(stage_depths, embed_dims)
        self.use_grn = use_grn
        self.head_norm_eps = head_norm_eps
        self.conv_mlp = conv_mlp
        self.num_features = head_hidden_size or embed_dims[-1]
        self.stem = stem(in_channels, embed_dims[0], stem_type)
        sizes = zip(
            (0, *embed_dims[:-1]), embed_dims, drop_path_rates(droppath, stage_depths), strict=True
        )
        self.stages = nn.LayerList(
            Stage(in_dim, dim, init_values, rates, conv_mlp=conv_mlp, use_grn=use_grn)
            for in_dim, dim, rates in sizes
        )
        self.feature_info = feature_info(
            [f"stages.{i}" for i in range(4)], embed_dims, (4, 8, 16, 32)
        )
        set_norm_eps(self, norm_eps)
        self.norm_pre = (
            ChannelNorm(embed_dims[-1], epsilon=head_norm_eps) if head_norm_first else nn.Identity()
        )
        norm = (
            nn.Identity() if head_norm_first else LayerNorm(embed_dims[-1], epsilon=head_norm_eps)
        )
        hidden: nn.Layer = nn.Identity()
        if head_hidden_size:
            hidden = nn.Sequential(
                ("fc", Linear(embed_dims[-1], head_hidden_size)), ("act", GELU())
            )
        layers = (
            ("norm", norm),
            ("pre_logits", hidden),
            ("drop", nn.Dropout(dropout)),
            ("fc", nn.Identity()),
        )
        self.head = nn.Sequential(*layers)
        self._finish()

    def _embed(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.stem(x)

    def _last_norm(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.norm_pre(x)

    def _stages(self) -> Iterable[Any]:
        return self.stages

    def _stage(self, stage: Any, x: paddle.Tensor, shared: Any) -> paddle.Tensor:
        x = in_float32(stage.downsample(x))
        if self.conv_mlp:
            return self._run_all(stage.blocks, x)
        return channels_first(self._run_all(stage.blocks, channels_last(x)))

    def forward_head(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.head(mean_of_places(x))

    def classifier_names(self) -> tuple[str, ...]:
        return ("head.fc",)

    def layer_groups(self) -> list[tuple[str, ...]]:
        """Returns the authors' groups: the stem, every three blocks of a stage, the head. A stage's
        first group has what downsamples before it. For [3, 3, 27, 3] blocks there are 12 between
        stem and head (appendix A and optim_factory.py in facebookresearch/ConvNeXt). ConvNeXt V2's
        models with fewer blocks have their authors' groups, too: single blocks, the first with the
        stem (``layer_decay_type`` in TRAINING.md and optim_factory.py of
        facebookresearch/ConvNeXt-V2).
        """
        single = self.use_grn and len(self.stages[2].blocks) < 27
        groups: list[tuple[str, ...]] = [("stem",)]
        for i, stage in enumerate(self.stages):
            for first in range(0, len(stage.blocks), 1 if single else 3):
                last = min(first + (1 if single else 3), len(stage.blocks))
                blocks = tuple(f"stages.{i}.blocks.{j}" for j in range(first, last))
                groups.append(blocks if first else (f"stages.{i}.downsample", *blocks))
        if single:
            groups[:2] = [groups[0] + groups[1]]
        return [*groups, ("norm_pre", "head")]

    def timm_layer_groups(self) -> list[tuple[str, ...]]:
        """Returns the groups: the stem, each block (the first of a stage with what downsamples
        before it), the head with its norm.
        """
        return [*groups_by_block("stem", "stages", self.stages), ("norm_pre", "head")]

    def _init_weights(self, layer: nn.Layer) -> None:
        init_linear(layer)
        if isinstance(layer, nn.Conv2D):
            Normal(std=0.02)(layer.weight)
