"""MetaFormer baselines (Yu et al. 2022, arXiv:2210.13452): CAFormer, ConvFormer and PoolFormer V2.

Their stages mix tokens by separable convolutions, by pooling or by attention. Parameter names, the
order of operations and the initialisation are those of timm's ``MetaFormer``. timm builds the first
PoolFormers with the same class; here they are in ``models.poolformer``.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import paddle
from paddle import nn
from paddle.nn.initializer import Constant, Normal

from errors import InputError
from models.base import ImageModel, register
from models.layers import Attention, DropPath, LayerNorm, Linear, Mlp, init_linear
from models.layers.activations import relu
from models.layers.conv import Conv2D
from models.layers.group_norm import GroupNorm
from models.layers.layout import mean_of_places
from models.layers.linear import ChannelNorm, in_float32
from models.layers.mlp import StarReLU
from models.layers.scale import scale_channels, scale_planes
from models.layers.stages import (
    check_stages,
    drop_path_rates,
    feature_info,
    groups_by_block,
    groups_of_twelve,
)
from models.poolformer import Pooling
from settings.keys import Blocks, Depth, Epsilon, Factor, InTraining, OfClassifier, Rate, Size
from weights.names import metaformer as names

# Channels of an attention head.
HEAD_DIM = 32


def scale_norm(dim: int, channels_first: bool) -> LayerNorm:
    """Returns a layer norm without a bias, for [B, dim, H, W] or for [B, N, dim]."""
    norm = ChannelNorm if channels_first else LayerNorm
    return norm(dim, epsilon=1e-6, bias_attr=False)


class SepConv(nn.Layer):
    """A separable convolution, as in MobileNetV2: a depthwise 7 x 7 convolution of 2 * dim channels
    between two 1 x 1 convolutions.

    Shape: [B, dim, H, W] -> the same.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.pwconv1 = Conv2D(dim, 2 * dim, 1, bias_attr=False)
        self.act1 = StarReLU()
        self.dwconv = Conv2D(2 * dim, 2 * dim, 7, padding=3, groups=2 * dim, bias_attr=False)
        self.pwconv2 = Conv2D(2 * dim, dim, 1, bias_attr=False)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.pwconv2(self.dwconv(self.act1(self.pwconv1(x))))


class Scale(nn.Layer):
    """Multiplies each channel of a shortcut by a learnt factor, which starts at 1 (Shleifer et al.
    2021, arXiv:2110.09456).

    Shape: [B, dim, H, W] with ``channels_first``, else [B, N, dim] -> the same.
    """

    def __init__(self, dim: int, channels_first: bool) -> None:
        super().__init__()
        self.channels_first = channels_first
        self.scale = self.create_parameter([dim], default_initializer=Constant(1.0))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        if self.channels_first:
            return scale_planes(x, self.scale.reshape([-1, 1, 1]))
        return scale_channels(x, self.scale)


class Block(nn.Layer):
    """res_scale1(x) + token_mixer(norm1(x)), then res_scale2(x) + mlp(norm2(x)), each branch with
    drop path.

    Args:
        dim: channels.
        token_mixer: "attention", "conv" (``SepConv``) or "pool" (``Pooling``).
        scaled: whether the shortcuts have learnt factors; otherwise res_scale1 and res_scale2 are
            the identity.
        attn_drop: dropout rate of the attention weights.
        drop_path: rate of stochastic depth.

    Shape: [B, N, dim] -> the same with "attention", else [B, dim, H, W] -> the same.
    """

    def __init__(
        self, dim: int, token_mixer: str, scaled: bool, attn_drop: float, drop_path: float
    ) -> None:
        super().__init__()
        channels_first = token_mixer != "attention"
        if token_mixer == "pool":
            norm = functools.partial(GroupNorm, 1, dim, 1e-6, bias_attr=False)
        else:
            norm = functools.partial(scale_norm, dim, channels_first)
        self.norm1 = norm()
        if token_mixer == "pool":
            self.token_mixer = Pooling()
        else:
            # With "attention" it is replaced below. It is still built, so that a seed gives the
            # same fresh weights as before.
            self.token_mixer = SepConv(dim)
        if token_mixer == "attention":
            heads = max(1, dim // HEAD_DIM)
            self.token_mixer = Attention(
                dim, heads, HEAD_DIM, qkv_bias=False, attn_drop=attn_drop, proj_bias=False
            )
        self.drop_path1 = DropPath(drop_path)
        self.res_scale1 = Scale(dim, channels_first) if scaled else nn.Identity()
        self.norm2 = norm()
        self.mlp = Mlp(dim, 4 * dim, act="star_relu", conv=channels_first, bias=False)
        self.drop_path2 = DropPath(drop_path)
        self.res_scale2 = Scale(dim, channels_first) if scaled else nn.Identity()

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.drop_path1(self.token_mixer(self.norm1(x)), onto=self.res_scale1(x))
        return self.drop_path2(self.mlp(self.norm2(x)), onto=self.res_scale2(x))


class Stem(nn.Layer):
    """A 7 x 7 convolution with stride 4, then a norm.

    Shape: [B, in_channels, H, W] -> [B, dim, about H / 4, about W / 4].
    """

    def __init__(self, in_channels: int, dim: int) -> None:
        super().__init__()
        self.conv = Conv2D(in_channels, dim, 7, stride=4, padding=2)
        self.norm = scale_norm(dim, channels_first=True)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.norm(self.conv(x))


class Downsampling(nn.Layer):
    """A norm, then a 3 x 3 convolution with stride 2.

    Shape: [B, in_dim, H, W] -> [B, dim, H / 2, W / 2], rounded up.
    """

    def __init__(self, in_dim: int, dim: int) -> None:
        super().__init__()
        self.norm = scale_norm(in_dim, channels_first=True)
        self.conv = Conv2D(in_dim, dim, 3, stride=2, padding=1)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.conv(self.norm(x))


class Stage(nn.Layer):
    """``downsample`` (not in the first stage), then blocks of one kind and width.

    Args:
        downsample: the layer before the blocks.
        blocks: the blocks.
        attention: whether the blocks attend, and so take tokens instead of maps.
    """

    def __init__(self, downsample: nn.Layer, blocks: Sequence[nn.Layer], attention: bool) -> None:
        super().__init__()
        self.attention = attention
        self.downsample = downsample
        self.blocks = nn.LayerList(blocks)


class MlpHead(nn.Layer):
    """A classifier: fc2(norm(relu(fc1(x)) ** 2)), with dropout before fc2.

    Shape: [B, dim] -> [B, classes].
    """

    def __init__(self, dim: int, classes: int, epsilon: float, dropout: float) -> None:
        super().__init__()
        self.fc1 = Linear(dim, 4 * dim)
        self.norm = LayerNorm(4 * dim, epsilon=epsilon)
        self.head_drop = nn.Dropout(dropout)
        self.fc2 = Linear(4 * dim, classes)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.fc2(self.head_drop(self.norm(relu(self.fc1(x)).square())))


@register("metaformer")
class MetaFormer(ImageModel):
    """CAFormer, ConvFormer and PoolFormer V2. They take images of any size from 3 x 3 on.

    Their features are the last stage's output, not normalised: [B, embed_dims[3], about H / 32,
    about W / 32].

    Args:
        stage_depths: number of blocks in each of the four stages.
        embed_dims: number of channels of each of the four stages.
        attention_stages: number of last stages with attention, whose heads have 32 channels: 2 in
            CAFormer, 0 in ConvFormer.
        token_mixer: the token mixer of the stages without attention. "conv": separable
            convolutions; "pool": 3 x 3 average pooling (PoolFormer V2).
        res_scale_stages: number of last stages whose shortcuts are multiplied by a learnt factor
            per channel.
        mlp_head: whether the classifier is an MLP. Otherwise it is a single layer (PoolFormer V2).
        head_norm_eps: epsilon of the norm within the MLP of the classifier. The default is timm's;
            the authors use 1e-5. All other norms have 1e-6.
        dropout: dropout rate before the last layer of the classifier, as in the authors' code. timm
            applies it before the first layer.
        attention_dropout: dropout rate of the attention weights.
        droppath: stochastic depth rate of the last block; the rates grow linearly from 0 at the
            first.

    Raises:
        InputError: not four stages, or more than four of them that attend or have factors.
    """

    weight_names = names
    first_conv = "stem.conv"
    min_image_size = 3

    def __init__(
        self,
        image_size: int | Sequence[int] = 224,
        in_channels: int = 3,
        num_classes: int = 1000,
        stage_depths: Sequence[Depth] = (3, 3, 9, 3),
        embed_dims: Sequence[Size] = (64, 128, 320, 512),
        attention_stages: Blocks = 2,
        token_mixer: Literal["conv", "pool"] = "conv",
        res_scale_stages: Blocks = 2,
        mlp_head: OfClassifier[bool] = True,
        head_norm_eps: OfClassifier[Epsilon] = 1e-6,
        dropout: InTraining[OfClassifier[Rate]] = 0.0,
        attention_dropout: InTraining[Rate] = 0.0,
        droppath: InTraining[Rate] = 0.0,
        head_init_scale: InTraining[OfClassifier[Factor]] = 1.0,
        recompute: InTraining[bool] = False,
    ) -> None:
        super().__init__(image_size, in_channels, num_classes, head_init_scale, recompute)
        check_stages(stage_depths, embed_dims)
        for key, count in (
            ("ATTENTION_STAGES", attention_stages),
            ("RES_SCALE_STAGES", res_scale_stages),
        ):
            if count > 4:
                raise InputError(f"{key} is {count}, expected a number of stages: 0 to 4")
        self.num_features = embed_dims[-1]
        self.head_norm_eps = head_norm_eps
        self.dropout = dropout
        self.stem = Stem(in_channels, embed_dims[0])
        self.stages = nn.LayerList()
        for i, rates in enumerate(drop_path_rates(droppath, stage_depths)):
            dim = embed_dims[i]
            attention = i >= 4 - attention_stages
            blocks = [
                Block(
                    dim,
                    "attention" if attention else token_mixer,
                    scaled=i >= 4 - res_scale_stages,
                    attn_drop=attention_dropout,
                    drop_path=rate,
                )
                for rate in rates
            ]
            downsample = Downsampling(embed_dims[i - 1], dim) if i else nn.Identity()
            self.stages.append(Stage(downsample, blocks, attention))
        modules = [f"stages.{i}" for i in range(4)]
        self.feature_info = feature_info(modules, embed_dims, (4, 8, 16, 32))
        self.mlp_head = mlp_head
        norm = LayerNorm(self.num_features, epsilon=1e-6)
        # An MLP has its own dropout.
        drop = nn.Identity() if mlp_head else nn.Dropout(dropout)
        self.head = nn.Sequential(("norm", norm), ("drop", drop), ("fc", nn.Identity()))
        self._finish()

    def grid(self, places: int) -> tuple[int, int]:
        """Returns the rows and columns of the stage that has so many places."""
        # The output of the stem's convolution, which each further stage halves, rounded up.
        rows, columns = ((side - 3) // 4 + 1 for side in self.image_size)
        while rows * columns > places:
            rows = (rows + 1) // 2
            columns = (columns + 1) // 2
        return rows, columns

    def _embed(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.stem(x)

    def _stages(self) -> Iterable[Any]:
        return self.stages

    def _stage(self, stage: Any, x: paddle.Tensor, shared: Any) -> paddle.Tensor:
        x = in_float32(stage.downsample(x))
        if not stage.attention:
            return self._run_all(stage.blocks, x)
        _, dim, height, width = x.shape
        x = self._run_all(stage.blocks, x.flatten(2).transpose([0, 2, 1]))
        return x.transpose([0, 2, 1]).reshape([-1, dim, height, width])

    def forward_head(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.head(mean_of_places(x))

    def classifier_names(self) -> tuple[str, ...]:
        """Returns the classifier's last layer. For another number of classes, the layers before it
        are loaded from a weight file, as in timm.
        """
        return ("head.fc.fc2",) if isinstance(self.head.fc, MlpHead) else ("head.fc",)

    def _add_classifiers(self) -> None:
        # Replaces the whole MLP, as timm's ``reset_classifier`` does.
        if not self.mlp_head:
            super()._add_classifiers()
            return
        self.head.fc = nn.Identity()
        if self.num_classes:
            self.head.fc = MlpHead(
                self.num_features, self.num_classes, self.head_norm_eps, self.dropout
            )
            self.head.fc.apply(self._init_weights)

    def layer_groups(self) -> list[tuple[str, ...]]:
        """Returns the groups: the stem, each block, and the head with its norms. The first block of
        a stage has the downsampling before it.
        """
        return [*groups_by_block("stem", "stages", self.stages), ("head",)]

    def timm_layer_groups(self) -> list[tuple[str, ...]]:
        return groups_of_twelve(self, *self.classifier_names())

    def _init_weights(self, layer: nn.Layer) -> None:
        init_linear(layer)
        if isinstance(layer, nn.Conv2D):
            Normal(std=0.02)(layer.weight)
            if layer.bias is not None:
                Constant(0.0)(layer.bias)
