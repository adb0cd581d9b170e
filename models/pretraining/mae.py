"""The masked autoencoder MAE (He et al. 2021, arXiv:2111.06377).

An encoder sees a quarter of an image's patches. A small decoder reconstructs the pixels of the
others, and the loss is computed on these alone. After the training the decoder isn't needed.

Names of the decoder's parameters are those of the authors.
"""

from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.nn.initializer import Normal

from errors import InputError
from models.base import ImageModel
from models.beit import Beit
from models.layers import Attention, LayerNorm, Linear
from models.layers.block import Block
from models.layers.init import init_as_mae
from models.layers.layout import concat
from models.layers.linear import in_float32
from models.layers.patch_embed import join_patches
from models.layers.positions import sincos_2d
from models.pretraining.network import (
    PretrainingNetwork,
    check_heads,
    fix_positions,
    patch_statistics,
)
from models.vit import VisionTransformer
from weights.names import mae as names


class MaskedAutoencoder(PretrainingNetwork):
    """An encoder of visible patches and a decoder of all patches.

    The encoder's ``pos_embed``, if it is a parameter, becomes the fixed sine-cosine embedding of
    the paper. Tokens before the patches have the position 0, and the decoder gets them, too.

    Args:
        encoder: a ViT, or a BEiT that adds its positions to the patches.
        mask_ratio: the share of patches that the encoder doesn't see.
        decoder_width: channels of the decoder's tokens.
        decoder_depth: blocks of the decoder.
        decoder_heads: attention heads of each of them.
        norm_target: whether a patch's pixels are normalised to mean 0 and variance 1 before they
            are compared.

    Attributes:
        units: rows and columns of patches.
        num_visible: number of visible patches of an image.

    Raises:
        InputError: an encoder that can't leave out patches, a mask_ratio that leaves no patch or
            all patches visible, or sizes of the decoder that don't fit together.
    """

    weight_names = names

    def __init__(
        self,
        encoder: ImageModel,
        mask_ratio: float = 0.75,
        decoder_width: int = 512,
        decoder_depth: int = 8,
        decoder_heads: int = 16,
        norm_target: bool = True,
    ) -> None:
        _check_positions(encoder)
        super().__init__(encoder)
        patches: Any = encoder.patch_embed
        pixels = patches.patch_size**2 * encoder.in_channels
        if norm_target and pixels == 1:
            raise InputError(
                "METHOD.NORM_TARGET is True, but a patch has a single value, and so no variance;"
                " set it"
                " to False, or use larger patches"
            )
        self.norm_target = norm_target
        self.units = patches.grid_size
        self.num_visible = visible_count(patches.num_patches, mask_ratio, "patches")
        fix_positions(encoder, endpoint=False)
        add_decoder(self, decoder_width, decoder_depth, decoder_heads, pixels)
        rows, columns = self.units
        table = sincos_2d(rows, columns, decoder_width, endpoint=False, key="METHOD.DECODER_WIDTH")
        self.register_buffer("decoder_pos_embed", paddle.to_tensor(table), persistable=False)

    def forward(self, images: paddle.Tensor, order: paddle.Tensor) -> paddle.Tensor:
        """Returns the loss of each image, [B] float32: the mean squared error of the pixels of its
        masked patches.

        Args:
            images: [B, C, H, W], normalised.
            order: [B, patches] int64, a permutation of each image's patches (``patch_order``). The
                first ``num_visible`` are visible.
        """
        patches = self.encoder.patch_embed.cut(images)
        predicted = self._predict(patches, order)
        errors = predicted - self._targets(take(patches, order[:, self.num_visible :]))
        return (errors * errors).flatten(1).mean(axis=1)

    @paddle.no_grad()
    def reconstruct(
        self, images: paddle.Tensor, order: paddle.Tensor
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Returns the input and the output of the decoder, both [B, C, H, W], normalised.

        The masked patches are 0 in the first, which is the mean colour, and the decoder's in the
        second. With ``norm_target`` they are given the mean and the deviation of the true patch,
        which the decoder doesn't predict.

        Args:
            images, order: as in ``forward``.
        """
        patches = self.encoder.patch_embed.cut(images)
        predicted = self._predict(patches, order)
        if self.norm_target:
            mean, deviation = patch_statistics(take(patches, order[:, self.num_visible :]))
            predicted = predicted * deviation + mean
        visible = take(patches, order[:, : self.num_visible])
        predicted = self._channels_first(predicted)
        both = [paddle.concat([visible, part], axis=1) for part in (predicted * 0, predicted)]
        places = order.argsort(axis=1)
        masked, reconstructed = [
            self._join(take(shuffled, places), images.shape) for shuffled in both
        ]
        return masked, reconstructed

    def no_weight_decay(self) -> set[str]:
        return {*super().no_weight_decay(), "mask_token"}

    def _predict(self, patches: paddle.Tensor, order: paddle.Tensor) -> paddle.Tensor:
        """Returns the pixels of the masked patches, [B, masked, patch_size^2 * C] float32.

        Args:
            patches: as ``PatchEmbed.cut`` returns them.
        """
        tokens = self._encode(patches, order[:, : self.num_visible])
        return self._decode(tokens, order)

    def _encode(self, patches: paddle.Tensor, visible: paddle.Tensor) -> paddle.Tensor:
        """Returns the encoder's normalised tokens [B, prefix + visible, D]."""
        encoder: Any = self.encoder
        # Only visible patches are embedded.
        x = encoder.patch_embed.project(take(patches, visible))
        x = x + take(encoder.pos_embed, visible + encoder.pos_embed_prefix)
        tokens_before = ("cls_token", "dist_token", "reg_token")
        prefix = [getattr(encoder, name) for name in tokens_before if name in encoder._parameters]
        if prefix:
            tokens = paddle.concat(prefix, axis=1)
            if encoder.pos_embed_prefix:
                tokens = tokens + encoder.pos_embed[:, : encoder.pos_embed_prefix]
            x = concat([tokens.expand([x.shape[0], -1, -1]), x], axis=1)
        x = encoder.pos_drop(x)
        # BEiT has no norm here.
        x = encoder.norm_pre(x) if "norm_pre" in encoder._sub_layers else x
        for stage in encoder._stages():
            x = encoder._stage(stage, x, None)
        # The last norm is one of these. The other does nothing.
        return encoder.fc_norm(encoder.norm(x))

    def _decode(self, tokens: paddle.Tensor, order: paddle.Tensor) -> paddle.Tensor:
        """``_predict`` for the tokens of ``_encode``.

        The decoder's tokens stay in the order of ``order``: attention doesn't depend on it, as each
        token has its position.
        """
        x = in_float32(self.decoder_embed(tokens))
        length = x.shape[1]
        prefix = length - self.num_visible
        positions = take(self.decoder_pos_embed, order)
        visible = x[:, prefix:] + positions[:, : self.num_visible]
        masked = self.mask_token + positions[:, self.num_visible :]
        x = concat([x[:, :prefix], visible, masked] if prefix else [visible, masked], axis=1)
        for block in self.decoder_blocks:
            x = self.encoder._run(block, x)
        predicted = self.decoder_pred(self.decoder_norm(x[:, length:]))
        return predicted.astype("float32")

    def _targets(self, patches: paddle.Tensor) -> paddle.Tensor:
        """Returns the pixels that the decoder has to predict, in the authors' order: pixel by pixel
        with the channels last.

        Shape: [B, masked, C * patch_size^2], as ``PatchEmbed.cut`` returns them -> the same.
        """
        if self.norm_target:
            mean, deviation = patch_statistics(patches)
            patches = (patches - mean) / deviation
        batch, masked, _ = patches.shape
        patches = patches.reshape([batch, masked, self.in_channels, -1])
        return patches.transpose([0, 1, 3, 2]).flatten(2)

    def _channels_first(self, predicted: paddle.Tensor) -> paddle.Tensor:
        """Does the inverse of the change of order in ``_targets``."""
        batch, masked, _ = predicted.shape
        predicted = predicted.reshape([batch, masked, -1, self.in_channels])
        return predicted.transpose([0, 1, 3, 2]).flatten(2)

    def _join(self, patches: paddle.Tensor, shape: list[int]) -> paddle.Tensor:
        """Returns images of a shape [B, C, H, W] made of all patches; pixels after the last patch
        are 0.
        """
        images = join_patches(patches, self.encoder.patch_embed.patch_size, self.units)
        missing_rows = shape[2] - images.shape[2]
        missing_columns = shape[3] - images.shape[3]
        return nn.functional.pad(images, [0, missing_columns, 0, missing_rows])


def patch_order(noise: np.ndarray) -> np.ndarray:
    """Returns the places of patches in the order of their noise, as the paper masks: [..., patches]
    -> the same, int64.

    Patches of equal noise stay in their order.
    """
    return np.argsort(noise, axis=-1, kind="stable")


def visible_count(count: int, mask_ratio: float, parts: str) -> int:
    """Returns how many of an image's patches or mask units the encoder sees, rounded down.

    Args:
        count: of the whole image.
        parts: what is counted.

    Raises:
        InputError: all or none are visible.
    """
    if count == 1:
        raise InputError(
            f"an image has 1 of MAE's {parts}, but masking needs several; use larger images, or a"
            " model with smaller patches"
        )
    # As transformers computes it: in floats, 0.9 of 100 patches leave 9 visible.
    visible = int(count * (1 - mask_ratio))
    if not 0 < visible < count:
        raise InputError(
            f"METHOD.MASK_RATIO {mask_ratio} leaves {visible} of {count} {parts} visible, expected"
            f" 1 to {count - 1}; choose another ratio, or larger images"
        )
    return visible


def add_decoder(
    network: PretrainingNetwork, width: int, depth: int, heads: int, outputs: int
) -> None:
    """Adds the layers of a decoder to a network: ``decoder_embed``, ``mask_token``,
    ``decoder_blocks``, ``decoder_norm`` and ``decoder_pred``.

    Args:
        width: channels of the decoder's tokens.
        depth: number of blocks.
        heads: attention heads of each of them.
        outputs: numbers that are predicted for each token.

    Raises:
        InputError: width isn't a multiple of heads.
    """
    check_heads(width, heads)
    network.decoder_embed = Linear(network.encoder.num_features, width)
    network.mask_token = network.create_parameter(
        [1, 1, width], default_initializer=Normal(std=0.02)
    )
    network.decoder_blocks = nn.LayerList()
    for _ in range(depth):
        attn = Attention(width, heads)
        block = Block(width, attn, mlp_ratio=4.0, init_values=None, drop=0.0, drop_path=0.0)
        network.decoder_blocks.append(block)
    network.decoder_norm = LayerNorm(width, epsilon=1e-6)
    network.decoder_pred = Linear(width, outputs)
    for layer in (network.decoder_embed, network.decoder_blocks, network.decoder_pred):
        layer.apply(init_as_mae)


def _check_positions(encoder: Any) -> None:
    """Refuses an encoder that needs more than the visible patches with their positions added."""
    name = type(encoder).__name__
    if not isinstance(encoder, VisionTransformer | Beit) or encoder.pos_embed is None:
        raise InputError(
            f"MAE can't train {name}: it needs a Hiera, or an encoder that adds positions to its"
            " patches: ViT, DeiT, or BEiT with USE_ABS_POS_EMB True"
        )
    if any(hasattr(layer, "relative_position_bias_table") for layer in encoder.sublayers()):
        raise InputError(
            f"MAE can't train {name} with biases by relative position;"
            " set USE_REL_POS_BIAS and USE_SHARED_REL_POS_BIAS False"
        )
    if getattr(encoder, "num_prompts", 0):
        raise InputError("MAE doesn't train prompts; set MODEL.PROMPT_TOKENS 0")


def take(x: paddle.Tensor, places: paddle.Tensor) -> paddle.Tensor:
    """Returns the rows of x [B, L, D] at ``places`` [B, N], or of one table x [1, L, D] for all
    images: [B, N, D].
    """
    images, length, width = x.shape
    batch, count = places.shape
    if images > 1:
        places = places + length * paddle.arange(batch).unsqueeze(1)
    # Gathers whole rows of all images at once.
    return paddle.gather(x.reshape([-1, width]), places.flatten()).reshape([batch, count, width])
