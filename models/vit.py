"""Vision Transformer (Dosovitskiy et al. 2020, arXiv:2010.11929).

Parameter names, order of operations and initialisation are those of timm's ``VisionTransformer``; a Linear's weight is
[in, out] here and [out, in] there.
"""

import paddle
from paddle import nn
from paddle.nn.initializer import Constant, Normal
from yacs.config import CfgNode

from errors import InputError
from models.layers import Attention, DropPath, Mlp, PatchEmbed


class Block(nn.Layer):
    """A pre-norm transformer block: x + attn(norm1(x)), then x + mlp(norm2(x)). Shape: [B, N, D] -> [B, N, D]."""

    def __init__(self, dim: int, mlp_ratio: float, drop: float, drop_path: float, **attention: object) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, epsilon=1e-6)
        self.attn = Attention(dim, proj_drop=drop, **attention)
        self.drop_path1 = DropPath(drop_path)
        self.norm2 = nn.LayerNorm(dim, epsilon=1e-6)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), drop)
        self.drop_path2 = DropPath(drop_path)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = x + self.drop_path1(self.attn(self.norm1(x)))
        return x + self.drop_path2(self.mlp(self.norm2(x)))


class VisionTransformer(nn.Layer):
    """A classifier of images [B, C, S, S] (normalised) into logits [B, num_classes].

    Args:
        image_size: S in pixels, a multiple of patch_size.
        patch_size: pixels.
        in_channels: C.
        num_classes: classes; 0: no head, the class token's features [B, embed_dim] are returned.
        embed_dim, depth, num_heads: width, blocks, heads per block.
        head_dim: channels of a head; None: embed_dim / num_heads.
        mlp_ratio: hidden width of the MLP over embed_dim.
        qkv_bias: whether the query, key and value projection has a bias.
        drop, attn_drop: dropout rates.
        drop_path: rate of stochastic depth at the last block; linear from 0 at the first.
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
        drop: float = 0.0,
        attn_drop: float = 0.0,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        if head_dim is None and embed_dim % num_heads:
            raise InputError(f"EMBED_DIM {embed_dim} is not a multiple of NUM_HEADS {num_heads}; or set ATTN_HEAD_SIZE")
        self.image_size, self.in_channels = image_size, in_channels
        self.embed_dim, self.num_classes = embed_dim, num_classes
        self.patch_embed = PatchEmbed(image_size, patch_size, in_channels, embed_dim)
        tokens = self.patch_embed.num_patches + 1
        self.cls_token = self.create_parameter([1, 1, embed_dim], default_initializer=Normal(std=1e-6))
        self.pos_embed = self.create_parameter([1, tokens, embed_dim], default_initializer=Normal(std=0.02))
        self.pos_drop = nn.Dropout(drop)
        attention = {"num_heads": num_heads, "head_dim": head_dim, "qkv_bias": qkv_bias, "attn_drop": attn_drop}
        self.blocks = nn.LayerList(
            Block(embed_dim, mlp_ratio, drop, drop_path * i / max(1, depth - 1), **attention) for i in range(depth)
        )
        self.norm = nn.LayerNorm(embed_dim, epsilon=1e-6)
        self.head = nn.Linear(embed_dim, num_classes) if num_classes else nn.Identity()
        self.apply(_init_weights)

    def forward_features(self, x: paddle.Tensor) -> paddle.Tensor:
        """Returns all normalised tokens [B, 1 + patches, embed_dim], the class token first."""
        x = self.patch_embed(x)
        x = paddle.concat([self.cls_token.expand([x.shape[0], -1, -1]), x], axis=1)
        x = self.pos_drop(x + self.pos_embed)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.head(self.forward_features(x)[:, 0])

    def reset_classifier(self, num_classes: int) -> None:
        """Replaces the head by a new one of ``num_classes`` outputs (0: none)."""
        self.num_classes = num_classes
        self.head = nn.Linear(self.embed_dim, num_classes) if num_classes else nn.Identity()
        self.head.apply(_init_weights)

    def no_weight_decay(self) -> set[str]:
        """Names of parameters that weight decay leaves alone, besides biases and norms."""
        return {"pos_embed", "cls_token"}


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
        drop=model.DROPOUT,
        attn_drop=model.ATTENTION_DROPOUT,
        drop_path=model.DROPPATH,
    )
