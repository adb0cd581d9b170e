"""The masked autoencoder of Hiera (Ryali et al. 2023, arXiv:2306.00989).

As in MAE, an encoder sees a part of an image, and a small decoder reconstructs the pixels of the
rest. What is left out are whole mask units, so that the encoder's first stages attend to whole
units alone. The decoder reads the outputs of several stages, which fusion heads bring to one size.

Names of the parameters are the authors', apart from the encoder's prefix and their
``encoder_norm``, which is ``encoder.head.norm``: a classifier starts from it.
"""

import math
from typing import Any

import paddle
from paddle import nn
from paddle.nn.initializer import Normal

from models.hiera import STRIDE, Hiera
from models.layers.conv import Conv2D
from models.layers.init import init_as_torch
from models.layers.layout import channels_first, channels_last, concat
from models.layers.linear import in_float32
from models.layers.patch_embed import cut_patches, join_patches
from models.layers.units import to_units, unit_maps
from models.pretraining.mae import add_decoder, take, visible_count
from models.pretraining.network import PretrainingNetwork, patch_statistics
from weights.names import mae_hiera as names


class MaskedAutoencoderHiera(PretrainingNetwork):
    """A Hiera of visible mask units, and a decoder of all places of its last map.

    Args:
        encoder: a Hiera without a classifier.
        mask_ratio: the share of mask units that the encoder doesn't see.
        decoder_width: channels of the decoder's tokens.
        decoder_depth: blocks of the decoder.
        decoder_heads: attention heads of each of them.
        norm_target: whether the pixels of a place are normalised to mean 0 and variance 1 before
            they are compared.

    Attributes:
        units: rows and columns of mask units.
        num_visible: number of visible mask units of an image.

    Raises:
        InputError: an encoder that leaves out units by itself, a mask_ratio that leaves no unit or
            all units visible, or sizes of the decoder that don't fit together.
    """

    weight_names = names

    def __init__(
        self,
        encoder: Hiera,
        mask_ratio: float = 0.6,
        decoder_width: int = 512,
        decoder_depth: int = 8,
        decoder_heads: int = 16,
        norm_target: bool = True,
    ) -> None:
        super().__init__(encoder)
        self.units = encoder.units
        self.num_visible = visible_count(math.prod(self.units), mask_ratio, "mask units")
        self.norm_target = norm_target
        self.unit_pixels = STRIDE * encoder.unit_side
        last = encoder.feature_info[-1]
        # Pixels along the side of a place of the last map, and places along the side of a mask unit.
        self.place_pixels = last["reduction"]
        self.unit_side = self.unit_pixels // self.place_pixels

        # Stages after the last pooling have maps of equal size. Of these only the last one is read.
        self.multi_scale_fusion_heads = nn.LayerList()
        for info in encoder.feature_info:
            size = self.place_pixels // info["reduction"]
            if size > 1:
                head = Conv2D(info["num_chs"], last["num_chs"], size, size)
                self.multi_scale_fusion_heads.append(head)
        self.multi_scale_fusion_heads.apply(init_as_torch)
        pixels = self.in_channels * self.place_pixels**2
        add_decoder(self, decoder_width, decoder_depth, decoder_heads, pixels)
        rows, columns = (side // self.place_pixels for side in self.image_size)
        self.decoder_pos_embed = self.create_parameter(
            [1, rows * columns, decoder_width], default_initializer=Normal(std=0.02)
        )

    def forward(self, images: paddle.Tensor, order: paddle.Tensor) -> paddle.Tensor:
        """Returns the loss of each image, [B] float32: the mean squared error of the pixels of its
        masked units.

        Args:
            images: [B, C, H, W], normalised.
            order: [B, mask units] int64, a permutation of each image's units (``patch_order``). The
                first ``num_visible`` are visible.
        """
        targets = self._places(take(self._cut(images), order[:, self.num_visible :]))
        if self.norm_target:
            mean, deviation = patch_statistics(targets)
            targets = (targets - mean) / deviation
        errors = self._predict(images, order) - targets
        return (errors * errors).flatten(1).mean(axis=1)

    @paddle.no_grad()
    def reconstruct(
        self, images: paddle.Tensor, order: paddle.Tensor
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Returns the input of the encoder and the output of the decoder, both [B, C, H, W],
        normalised; as ``MaskedAutoencoder.reconstruct``.
        """
        units = self._cut(images)
        visible = take(units, order[:, : self.num_visible])
        predicted = self._predict(images, order)
        if self.norm_target:
            targets = self._places(take(units, order[:, self.num_visible :]))
            mean, deviation = patch_statistics(targets)
            predicted = predicted * deviation + mean
        # The places of a unit make an image of their own.
        batch, length, pixels = predicted.shape
        predicted = predicted.reshape([-1, self.unit_side**2, pixels])
        predicted = join_patches(predicted, self.place_pixels, (self.unit_side, self.unit_side))
        predicted = predicted.reshape([batch, length // self.unit_side**2, -1])
        places = order.argsort(axis=1)
        masked, reconstructed = [
            join_patches(
                take(paddle.concat([visible, part], axis=1), places), self.unit_pixels, self.units
            )
            for part in (predicted * 0, predicted)
        ]
        return masked, reconstructed

    def _cut(self, images: paddle.Tensor) -> paddle.Tensor:
        """Returns the pixels of each mask unit, [B, units, C * unit_pixels^2]."""
        return cut_patches(images, self.unit_pixels)

    def _places(self, units: paddle.Tensor) -> paddle.Tensor:
        """Returns the pixels of each place of units that ``_cut`` returned: [B, N, ...] -> [B, N *
        unit_side^2, C * place_pixels^2].
        """
        batch, count, _ = units.shape
        images = units.reshape([batch * count, -1, self.unit_pixels, self.unit_pixels])
        places = cut_patches(images, self.place_pixels)
        return places.reshape([batch, count * self.unit_side**2, -1])

    def _predict(self, images: paddle.Tensor, order: paddle.Tensor) -> paddle.Tensor:
        """Returns the pixels of the places of masked units, in the order of ``order``, as
        ``_places`` returns them; float32.
        """
        x = in_float32(self.decoder_embed(self._encode(images, order[:, : self.num_visible])))
        places = self.unit_side**2
        num_visible = x.shape[1]
        # Attention doesn't depend on the order of the tokens, as each has its position.
        positions = take(self._positions_by_unit(), order)
        batch, units, _ = positions.shape
        positions = positions.reshape([batch, units * places, -1])
        visible = x + positions[:, :num_visible]
        masked = self.mask_token + positions[:, num_visible:]
        x = concat([visible, masked], axis=1)
        for block in self.decoder_blocks:
            x = self.encoder._run(block, x)
        predicted = self.decoder_pred(self.decoder_norm(x[:, num_visible:]))
        return predicted.astype("float32")

    def _encode(self, images: paddle.Tensor, visible: paddle.Tensor) -> paddle.Tensor:
        """Returns the normalised sum of the stages' outputs at the places of visible units: [B,
        visible * unit_side^2, D].
        """
        encoder: Any = self.encoder
        _, stages = encoder.forward_features(images, visible, return_intermediates=True)
        x = stages[-1].flatten(1, 3)
        # Paddle's tracing (TO_STATIC) takes no keywords of zip.
        for index, head in enumerate(self.multi_scale_fusion_heads):
            stage = stages[index]
            maps = channels_last(in_float32(head(channels_first(stage.flatten(0, 1)))))
            x = x + maps.reshape(x.shape)
        return encoder.head.norm(x)

    def _positions_by_unit(self) -> paddle.Tensor:
        """Returns the position embedding of the places of each unit, [1, units, unit_side^2 *
        width].
        """
        rows, columns = (side // self.place_pixels for side in self.image_size)
        positions = self.decoder_pos_embed.reshape([1, rows, columns, -1])
        return unit_maps(to_units(positions, self.unit_side), self.unit_side).flatten(2)
