"""Vision Transformer (Dosovitskiy et al. 2020, arXiv:2010.11929), and what DeiT (arXiv:2012.12877) and DeiT-III
(arXiv:2204.07118) add: a distillation token, layer scale, a position embedding of the patches alone.

Parameter names, order of operations and initialisation are those of timm's ``VisionTransformer`` and
``VisionTransformerDistilled``; a Linear's weight is [in, out] here and [out, in] there.
"""

import paddle
from paddle import nn
from paddle.nn.initializer import Constant, Normal
from yacs.config import CfgNode

from errors import InputError
from models.layers import Attention, DropPath, LayerScale, Mlp, PatchDropout, PatchEmbed
from utils import recompute


class Block(nn.Layer):
    """A pre-norm transformer block: x + ls1(attn(norm1(x))), then x + ls2(mlp(norm2(x))), each branch with drop path.

    Shape: [B, N, D] -> [B, N, D].
    """

    def __init__(
        self, dim: int, mlp_ratio: float, init_values: float | None, drop: float, drop_path: float, **attention: object
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, epsilon=1e-6)
        self.attn = Attention(dim, proj_drop=drop, **attention)
        self.ls1 = LayerScale(dim, init_values) if init_values else nn.Identity()
        self.drop_path1 = DropPath(drop_path)
        self.norm2 = nn.LayerNorm(dim, epsilon=1e-6)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), drop)
        self.ls2 = LayerScale(dim, init_values) if init_values else nn.Identity()
        self.drop_path2 = DropPath(drop_path)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class VisionTransformer(nn.Layer):
    """A classifier of images [B, C, S, S] (normalised) into logits [B, num_classes].

    Args:
        image_size: S in pixels, a multiple of patch_size.
        patch_size: pixels.
        in_channels: C.
        num_classes: classes; 0: no head, the pooled features [B, embed_dim] are returned.
        embed_dim, depth, num_heads: width, blocks, heads per block.
        head_dim: channels of a head; None: embed_dim / num_heads.
        mlp_ratio: hidden width of the MLP over embed_dim.
        qkv_bias: whether the query, key and value projection has a bias.
        init_values: layer scale's initial value; None: no layer scale.
        global_pool: "token": the head reads the normalised class token; "avg": the patch tokens' mean, then fc_norm.
        no_embed_class: the position embedding has patches only.
        distilled: a distillation token with a head of its own; the output is the mean of both heads.
        drop, attn_drop, patch_drop: dropout rates; patch_drop is of whole patch tokens.
        drop_path: rate of stochastic depth at the last block; linear from 0 at the first.
        head_init_scale: factor on a fresh head's weight and bias.
        recompute: training computes each block's activations again in the backward pass instead of keeping them.

    Attributes:
        num_prefix_tokens: tokens before the patches.
        pos_embed_prefix: how many of them ``pos_embed`` has.
        distilled_training: of a distilled model; True: train mode returns (logits, distillation logits).

    Raises:
        InputError: sizes or options that don't fit together.
    """

    def __init__(
        self,
        image_size: int = 224,
        patch_size: int = 16,
        in_channels: int = 3,
        num_classes: int = 1000,
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        head_dim: int | None = None,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        init_values: float | None = None,
        global_pool: str = "token",
        no_embed_class: bool = False,
        distilled: bool = False,
        drop: float = 0.0,
        attn_drop: float = 0.0,
        patch_drop: float = 0.0,
        drop_path: float = 0.0,
        head_init_scale: float = 1.0,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        if head_dim is None and embed_dim % num_heads:
            raise InputError(f"EMBED_DIM {embed_dim} is not a multiple of NUM_HEADS {num_heads}; or set ATTN_HEAD_SIZE")
        if distilled and global_pool != "token":
            raise InputError(f"GLOBAL_POOL is {global_pool!r}, expected 'token': DISTILLED heads read their tokens")
        self.image_size, self.in_channels, self.embed_dim = image_size, in_channels, embed_dim
        self.global_pool, self.no_embed_class, self.distilled = global_pool, no_embed_class, distilled
        self.head_init_scale, self.recompute = head_init_scale, recompute
        self.distilled_training = False
        self.num_prefix_tokens = 2 if distilled else 1
        self.pos_embed_prefix = 0 if no_embed_class else self.num_prefix_tokens
        self.patch_embed = PatchEmbed(image_size, patch_size, in_channels, embed_dim)
        positions = self.patch_embed.num_patches + self.pos_embed_prefix
        self.cls_token = self.create_parameter([1, 1, embed_dim], default_initializer=Normal(std=1e-6))
        if distilled:
            self.dist_token = self.create_parameter([1, 1, embed_dim], default_initializer=Normal(std=0.02))
        self.pos_embed = self.create_parameter([1, positions, embed_dim], default_initializer=Normal(std=0.02))
        self.pos_drop = nn.Dropout(drop)
        self.patch_drop = PatchDropout(patch_drop, self.num_prefix_tokens)
        shared = {"mlp_ratio": mlp_ratio, "init_values": init_values, "drop": drop, "attn_drop": attn_drop}
        shared |= {"num_heads": num_heads, "head_dim": head_dim, "qkv_bias": qkv_bias}
        rates = [drop_path * i / max(1, depth - 1) for i in range(depth)]
        self.blocks = nn.LayerList(Block(embed_dim, drop_path=rate, **shared) for rate in rates)
        self.norm = nn.LayerNorm(embed_dim, epsilon=1e-6) if global_pool == "token" else nn.Identity()
        self.fc_norm = nn.LayerNorm(embed_dim, epsilon=1e-6) if global_pool == "avg" else nn.Identity()
        self._add_classifiers(num_classes)
        self.apply(_init_weights)
        self._scale_classifiers()

    def forward_features(self, x: paddle.Tensor) -> paddle.Tensor:
        """Returns all tokens [B, prefix + patches, embed_dim], normalised but for GLOBAL_POOL "avg"."""
        x = self.patch_embed(x)
        if self.no_embed_class:
            x = x + self.pos_embed
        prefix = [self.cls_token, self.dist_token] if self.distilled else [self.cls_token]
        x = paddle.concat([*(token.expand([x.shape[0], -1, -1]) for token in prefix), x], axis=1)
        if not self.no_embed_class:
            x = x + self.pos_embed
        x = self.patch_drop(self.pos_drop(x))
        for block in self.blocks:
            x = recompute(block, x) if self.recompute and self.training else block(x)
        return self.norm(x)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor | tuple[paddle.Tensor, paddle.Tensor]:
        x = self.forward_features(x)
        if self.distilled:
            logits, distilled = self.head(x[:, 0]), self.head_dist(x[:, 1])
            return (logits, distilled) if self.distilled_training and self.training else (logits + distilled) / 2
        x = x[:, 0] if self.global_pool == "token" else x[:, self.num_prefix_tokens :].mean(axis=1)
        return self.head(self.fc_norm(x))

    def reset_classifier(self, num_classes: int) -> None:
        """Replaces every head by a new one of ``num_classes`` outputs (0: none)."""
        self._add_classifiers(num_classes)
        for name in self.classifier_names():
            getattr(self, name).apply(_init_weights)
        self._scale_classifiers()

    def classifier_names(self) -> tuple[str, ...]:
        """Names of the layers that depend on the number of classes."""
        return ("head", "head_dist") if self.distilled else ("head",)

    def layer_groups(self) -> list[tuple[str, ...]]:
        """Prefixes of parameter names, from the input to the output: one group per step of a layer-wise decay.

        A name belongs to a prefix that it equals, or starts with followed by a dot; every name belongs to one group.
        """
        blocks = [(f"blocks.{i}",) for i in range(len(self.blocks))]
        embedding = ("cls_token", "dist_token", "pos_embed", "patch_embed")
        return [embedding, *blocks, ("norm", "fc_norm", "head", "head_dist")]

    def no_weight_decay(self) -> set[str]:
        """Names of parameters that weight decay leaves alone, besides biases and norms."""
        return {"pos_embed", "cls_token", "dist_token"}

    def _add_classifiers(self, num_classes: int) -> None:
        self.num_classes = num_classes
        for name in self.classifier_names():
            setattr(self, name, nn.Linear(self.embed_dim, num_classes) if num_classes else nn.Identity())

    @paddle.no_grad()
    def _scale_classifiers(self) -> None:
        for name in self.classifier_names():
            for parameter in getattr(self, name).parameters():
                parameter.set_value(parameter * self.head_init_scale)


def _init_weights(layer: nn.Layer) -> None:
    # timm truncates at +-2, a hundred standard deviations away: the plain normal is the same distribution.
    if isinstance(layer, nn.Linear):
        Normal(std=0.02)(layer.weight)
        if layer.bias is not None:
            Constant(0.0)(layer.bias)


def build_vit(config: CfgNode) -> VisionTransformer:
    """Builds the model that DATA and MODEL of a configuration describe."""
    model = config.MODEL
    return VisionTransformer(
        image_size=config.DATA.IMAGE_SIZE,
        patch_size=model.PATCH_SIZE,
        in_channels=config.DATA.IMAGE_CHANNELS,
        num_classes=model.NUM_CLASSES,
        embed_dim=model.EMBED_DIM,
        depth=model.DEPTH,
        num_heads=model.NUM_HEADS,
        head_dim=model.ATTN_HEAD_SIZE,
        mlp_ratio=model.MLP_RATIO,
        qkv_bias=model.QKV_BIAS,
        init_values=model.INIT_VALUES,
        global_pool=model.GLOBAL_POOL,
        no_embed_class=model.NO_EMBED_CLASS,
        distilled=model.DISTILLED,
        drop=model.DROPOUT,
        attn_drop=model.ATTENTION_DROPOUT,
        patch_drop=model.PATCH_DROP,
        drop_path=model.DROPPATH,
        head_init_scale=model.HEAD_INIT_SCALE,
        recompute=model.RECOMPUTE,
    )
