"""CrossViT (Chen et al. 2021, arXiv:2103.14899): a branch of fine and a branch of coarse patches.

The class token of each branch attends to the patches of the other. Parameter names, the order of
operations and the initialisation are those of timm's ``CrossVit``.
"""

from collections.abc import Sequence
from typing import Any, Literal

import paddle
from paddle import nn
from paddle.nn import functional as F
from paddle.nn.initializer import Normal

from errors import InputError
from models.base import ImageModel, register
from models.layers import Attention, DropPath, LayerNorm, Linear, PatchEmbed, init_linear
from models.layers.activations import GELU, ReLU
from models.layers.block import Block
from models.layers.class_attention import ClassAttention
from models.layers.conv import Conv2D
from models.layers.init import init_as_torch
from models.layers.layout import concat, split, swap_axes
from models.layers.scale import add_to_all
from models.layers.sizes import check_sides
from models.layers.stages import drop_path_rates, feature_info
from settings.keys import Depth, Factor, InTraining, OfClassifier, Positive, Rate, Size
from weights.names import crossvit as names


class ConvPatches(PatchEmbed):
    """A ``PatchEmbed`` of three convolutions, for patches of 12 or 16 pixels.

    It belongs to the models that the paper marks with a dagger.
    """

    def __init__(
        self, image_size: Sequence[int], patch_size: int, in_channels: int, dim: int
    ) -> None:
        super().__init__(image_size, patch_size, in_channels, dim)
        if patch_size not in (12, 16) or dim % 4:
            raise InputError(
                f"MULTI_CONV supports PATCH_SIZE 12 and 16 with EMBED_DIMS that are multiples of 4,"
                f" found {patch_size} with {dim}"
            )
        # The strides multiply to the patch size: 4 * 3 * 1 or 4 * 2 * 2.
        first = Conv2D(in_channels, dim // 4, 7, stride=4, padding=3)
        if patch_size == 12:
            second = Conv2D(dim // 4, dim // 2, 3, stride=3, padding=0)
            third = Conv2D(dim // 2, dim, 3, stride=1, padding=1)
        else:
            second = Conv2D(dim // 4, dim // 2, 3, stride=2, padding=1)
            third = Conv2D(dim // 2, dim, 3, stride=2, padding=1)
        self.proj = nn.Sequential(first, ReLU(), second, ReLU(), third)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return swap_axes(self.proj(x).flatten(2))


class CrossAttention(ClassAttention):
    """``ClassAttention`` with the parameter names that timm has in CrossViT."""

    projections = ("wq", "wk", "wv")


class CrossAttentionBlock(nn.Layer):
    """token + attn(norm1(tokens)), the branch with drop path.

    Shape: [B, 1 + N, D], the class token first -> [B, 1, D].
    """

    def __init__(self, dim: int, attn: CrossAttention, drop_path: float) -> None:
        super().__init__()
        self.norm1 = LayerNorm(dim, epsilon=1e-6)
        self.attn = attn
        self.drop_path = DropPath(drop_path)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.drop_path(self.attn(self.norm1(x)), onto=x[:, :1])


class Projection(nn.Sequential):
    """Layer norm, GELU and a Linear, which takes a class token to the width of the other branch.

    Shape: [..., in_dim] -> [..., dim].
    """

    def __init__(self, in_dim: int, dim: int) -> None:
        super().__init__(LayerNorm(in_dim, epsilon=1e-6), GELU(), Linear(in_dim, dim))


class MultiScaleBlock(nn.Layer):
    """Blocks of each branch, then attention of each class token to the patches of the other branch.

    Args:
        dims: channels of both branches.
        blocks: the blocks of both branches.
        fusion: for each branch the block in which its class token attends, of the other branch's
            width.

    Shape: two tensors [B, 1 + N, D] -> the same.
    """

    def __init__(
        self,
        dims: Sequence[int],
        blocks: Sequence[Sequence[nn.Layer]],
        fusion: Sequence[CrossAttentionBlock],
    ) -> None:
        super().__init__()
        self.blocks = nn.LayerList(nn.Sequential(*branch) for branch in blocks)
        self.projs = nn.LayerList([Projection(dims[0], dims[1]), Projection(dims[1], dims[0])])
        self.fusion = nn.LayerList(fusion)
        self.revert_projs = nn.LayerList(
            [Projection(dims[1], dims[0]), Projection(dims[0], dims[1])]
        )

    def forward(self, *branches: paddle.Tensor) -> list[paddle.Tensor]:
        tokens = [self.blocks[i](branches[i]) for i in (0, 1)]
        # For each branch its class token and its patches.
        split_branches = [split(x, [1, x.shape[1] - 1], axis=1) for x in tokens]
        outputs = []
        for i in (0, 1):
            token, patches = split_branches[i]
            _, other_patches = split_branches[1 - i]
            token = self.fusion[i](concat([self.projs[i](token), other_patches], axis=1))
            outputs.append(concat([self.revert_projs[i](token), patches], axis=1))
        return outputs


@register("crossvit")
class CrossViT(ImageModel):
    """CrossViT. It takes images of image_size only.

    Its features are a list of both branches' tokens, normalised: [B, 1 + patches, embed_dims[i]],
    the class token first. Each branch has a classifier, and the logits are their mean.

    Args:
        image_size: pixels, or (height, width).
        image_scales: for each branch, the factor by which images are resized. The rounded size must
            be a multiple of the patch size of the branch.
        crop_scale: whether a branch with a smaller image size crops the middle of the image,
            instead of resizing it.
        patch_size: side of a patch in pixels, for each branch.
        embed_dims: number of channels of a token, for each branch.
        depth: number of multi-scale blocks, each of which ends with an exchange between the
            branches.
        branch_depths: number of blocks of each branch within a multi-scale block.
        num_heads: number of attention heads of each branch.
        mlp_ratio: ratio of the MLP's hidden width to embed_dims, for each branch.
        qkv_bias: whether the queries, keys and values have a bias.
        multi_conv: whether the patch embedding has three convolutions instead of one.
        global_pool: the pooled features that the head reads. "token": the class tokens; "avg": the
            means of the patches.
        dropout: dropout rate after the position embedding, after the attention's projection and in
            the MLP.
        attention_dropout: dropout rate of the attention weights.
        droppath: stochastic depth rate of the last block; the rates grow linearly from 0 at the
            first.

    Raises:
        InputError: sizes that don't fit together.
    """

    weight_names = names
    layout = "NLC"
    num_prefix_tokens = 1
    pos_embed_prefix = 1

    def __init__(
        self,
        image_size: int | Sequence[int] = 240,
        image_scales: Sequence[Positive] = (1.0, 0.9333333333),
        crop_scale: bool = False,
        patch_size: Sequence[Size] = (12, 16),
        in_channels: int = 3,
        num_classes: int = 1000,
        embed_dims: Sequence[Size] = (192, 384),
        depth: Depth = 3,
        branch_depths: Sequence[Depth] = (1, 4),
        num_heads: Sequence[Size] = (6, 6),
        mlp_ratio: Sequence[Positive] = (4.0, 4.0),
        qkv_bias: bool = True,
        multi_conv: bool = False,
        global_pool: Literal["token", "avg"] = "token",
        dropout: InTraining[Rate] = 0.0,
        attention_dropout: InTraining[Rate] = 0.0,
        droppath: InTraining[Rate] = 0.0,
        head_init_scale: InTraining[OfClassifier[Factor]] = 1.0,
        recompute: InTraining[bool] = False,
    ) -> None:
        super().__init__(image_size, in_channels, num_classes, head_init_scale, recompute)
        _check_pairs(
            IMAGE_SCALES=image_scales,
            PATCH_SIZE=patch_size,
            EMBED_DIMS=embed_dims,
            NUM_HEADS=num_heads,
            BRANCH_DEPTHS=branch_depths,
            MLP_RATIO=mlp_ratio,
        )
        for dim, heads in zip(embed_dims, num_heads, strict=True):
            if dim % heads:
                raise InputError(f"EMBED_DIMS has {dim}, not a multiple of its NUM_HEADS {heads}")
        self.crop_scale = crop_scale
        self.global_pool = global_pool
        self.num_features = sum(embed_dims)
        self.head_widths = {f"head.{i}": dim for i, dim in enumerate(embed_dims)}
        _check_images(self.image_size, image_scales, patch_size)
        self.patch_embed = nn.LayerList()
        patch_layer = ConvPatches if multi_conv else PatchEmbed
        for scale, side, dim in zip(image_scales, patch_size, embed_dims, strict=True):
            size = [round(pixels * scale) for pixels in self.image_size]
            self._add_embedding(patch_layer(size, side, in_channels, dim), dim)
        first_conv = "proj.0" if multi_conv else "proj"
        self.first_conv = f"patch_embed.0.{first_conv}"
        self.beside_first_conv = (f"patch_embed.1.{first_conv}",)
        self.pos_drop = nn.Dropout(dropout)
        attention_options: dict[str, Any] = {
            "qkv_bias": qkv_bias,
            "attn_drop": attention_dropout,
            "proj_drop": dropout,
        }
        self.blocks = nn.LayerList()
        for rates in drop_path_rates(droppath, [max(branch_depths)] * depth):
            blocks: list[list[nn.Layer]] = [[], []]
            for i, dim in enumerate(embed_dims):
                for rate in rates[: branch_depths[i]]:
                    attn = Attention(dim, num_heads[i], **attention_options)
                    block = Block(
                        dim,
                        attn,
                        mlp_ratio=mlp_ratio[i],
                        init_values=None,
                        drop=dropout,
                        drop_path=rate,
                    )
                    blocks[i].append(block)
            # The class token of a branch attends in the width of the other branch.
            fusion = [
                CrossAttentionBlock(dim, CrossAttention(dim, heads, **attention_options), rates[-1])
                for dim, heads in zip(embed_dims[::-1], num_heads[::-1], strict=True)
            ]
            self.blocks.append(MultiScaleBlock(embed_dims, blocks, fusion))
        self.norm = nn.LayerList(LayerNorm(dim, epsilon=1e-6) for dim in embed_dims)
        modules = [f"blocks.{i}" for i in range(depth)]
        self.feature_info = []
        for dim, side, scale in zip(embed_dims, patch_size, image_scales, strict=True):
            self.feature_info += feature_info(modules, dim, round(side / scale))
        self.head = nn.LayerList([nn.Identity(), nn.Identity()])
        self._finish()

    def _add_embedding(self, patches: PatchEmbed, dim: int) -> None:
        if not patches.num_patches:
            height, width = patches.image_size
            raise InputError(f"IMAGE_SCALES reduces images to {height} x {width} pixels; raise it")
        branch = len(self.patch_embed)
        for name, tokens in (("cls_token", 1), ("pos_embed", 1 + patches.num_patches)):
            parameter = self.create_parameter(
                [1, tokens, dim], default_initializer=Normal(std=0.02)
            )
            self.add_parameter(f"{name}_{branch}", parameter)
        self.patch_embed.append(patches)

    @property
    def cls_token(self) -> paddle.Tensor:
        """The class token of the fine patches."""
        return self.cls_token_0

    @property
    def pos_embed(self) -> paddle.Tensor:
        """The position embedding of the fine patches."""
        return self.pos_embed_0

    def _embed(self, x: paddle.Tensor) -> Any:
        if tuple(x.shape[2:]) != self.image_size:
            raise InputError(
                f"the model takes {self.input_sizes}, found {x.shape[2]} x {x.shape[3]}"
            )
        branches = []
        for i, embed in enumerate(self.patch_embed):
            patches = embed(self._resize_image(x, embed.image_size))
            token = getattr(self, f"cls_token_{i}").expand([x.shape[0], -1, -1])
            tokens = add_to_all(concat([token, patches], axis=1), getattr(self, f"pos_embed_{i}"))
            branches.append(self.pos_drop(tokens))
        return branches

    def _resize_image(self, x: paddle.Tensor, size: tuple[int, int]) -> paddle.Tensor:
        if self.image_size == size:
            return x
        height, width = self.image_size
        rows, columns = size
        if self.crop_scale and rows <= height and columns <= width:
            above = round((height - rows) / 2)
            left = round((width - columns) / 2)
            return x[:, :, above : above + rows, left : left + columns]
        return F.interpolate(x, size=size, mode="bicubic", align_corners=False)

    def _stage(self, stage: Any, x: Any, shared: Any) -> Any:
        return self._run(stage, *x)

    def _head_input(self, x: Any, last: bool) -> Any:
        return [self.norm[i](x[i]) for i in (0, 1)]

    def _collect(
        self, images: paddle.Tensor, taken: Sequence[int], norm: bool, stop_early: bool
    ) -> Any:
        # As the base class's. The intermediates are those of the fine branch, block by block, then
        # those of the coarse branch. That is timm's order.
        count = len(self.blocks)
        x = self._embed(images)
        deepest = max(index % count for index in taken)
        intermediates: dict[int, paddle.Tensor] = {}
        for i, block in enumerate(list(self.blocks)[: deepest + 1 if stop_early else None]):
            x = self._stage(block, x, None)
            for branch in (0, 1):
                index = branch * count + i
                if index in taken:
                    intermediates[index] = self.norm[branch](x[branch]) if norm else x[branch]
        return self._head_input(x, last=True), [intermediates[index] for index in taken]

    def grid(self, places: int) -> tuple[int, int]:
        return next(embed.grid_size for embed in self.patch_embed if embed.num_patches == places)

    def cam_layer(self) -> Any:
        """Returns the norm before the fine branch's class token attends to the coarse patches for
        the last time. Without class tokens it is the last norm.
        """
        return self.blocks[-1].fusion[0].norm1 if self.global_pool == "token" else self.norm[1]

    def forward_head(self, x: Any) -> paddle.Tensor:
        outputs = []
        for i in (0, 1):
            pooled = x[i][:, 0] if self.global_pool == "token" else x[i][:, 1:].mean(axis=1)
            outputs.append(self.head[i](pooled))
        if self.num_classes:
            return (outputs[0] + outputs[1]) / 2
        return paddle.concat(outputs, axis=1)

    def classifier_names(self) -> tuple[str, ...]:
        return ("head.0", "head.1")

    def layer_groups(self) -> list[tuple[str, ...]]:
        """Returns the groups: both embeddings, each multi-scale block, the classifiers with their
        norms.
        """
        embedding = ("cls_token_0", "cls_token_1", "pos_embed_0", "pos_embed_1", "patch_embed")
        blocks = [(f"blocks.{i}",) for i in range(len(self.blocks))]
        return [embedding, *blocks, ("norm", "head")]

    def no_weight_decay(self) -> set[str]:
        return {"cls_token_0", "cls_token_1", "pos_embed_0", "pos_embed_1"}

    def _init_weights(self, layer: nn.Layer) -> None:
        init_linear(layer)
        if isinstance(layer, nn.Conv2D):
            init_as_torch(layer)


def _check_pairs(**numbers: Sequence[float]) -> None:
    """Raises InputError unless each of the keys has two numbers."""
    for key, values in numbers.items():
        if len(values) != 2:
            raise InputError(
                f"{key} is {list(values)}, expected two numbers: of the fine and of the coarse patches"
            )


def _check_images(
    image_size: Sequence[int], scales: Sequence[float], patch_size: Sequence[int]
) -> None:
    """Raises InputError unless the images of each branch are multiples of its patch size."""

    def fits(pixels: int) -> bool:
        return all(
            round(pixels * scale) % side == 0
            for scale, side in zip(scales, patch_size, strict=True)
        )

    fine, coarse = patch_size
    problem = f"times IMAGE_SCALES is not a multiple of PATCH_SIZE {fine} and {coarse}"
    check_sides(image_size, fits, problem)
