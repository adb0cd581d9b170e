"""The fully convolutional masked autoencoder FCMAE of ConvNeXt V2 (Woo et al. 2023,
arXiv:2301.00808).

The encoder computes what sparse convolutions would: its layers see nothing of the masked squares.
A small decoder predicts the squares' pixels. The names of its layers are those in the
authors' files.
"""

import paddle
from paddle import nn
from paddle.nn.initializer import Normal

from errors import InputError
from models.base import ImageModel
from models.convnext import Block, ConvNeXt
from models.layers.conv import Conv2D
from models.layers.layout import channels_first, channels_last
from models.layers.patch_embed import cut_patches, join_patches
from models.pretraining.network import (
    PretrainingNetwork,
    enlarged,
    patch_statistics,
    replace_masked,
)


class ConvolutionalMaskedAutoencoder(PretrainingNetwork):
    """A ConvNeXt of the squares that are seen, and a decoder of all squares.

    A mask covers places of the encoder's last map, which are squares of 32 x 32 pixels. The targets
    are their pixels, normalised for each square.

    Args:
        encoder: a ConvNeXt or ConvNeXt V2 whose stem cuts images into patches.
        decoder_width: channels of the decoder.
        decoder_depth: blocks of the decoder.

    Attributes:
        units: rows and columns of squares.
        mask_patch: pixels along a square's side.

    Raises:
        InputError: another encoder, or images that don't consist of whole squares.
    """

    def __init__(
        self, encoder: ImageModel, decoder_width: int = 512, decoder_depth: int = 1
    ) -> None:
        super().__init__(encoder)
        if not isinstance(encoder, ConvNeXt) or len(encoder.stem) != 2:
            raise InputError(
                f"FCMAE can't train this {type(encoder).__name__}: it needs a ConvNeXt with"
                " MODEL.STEM_TYPE patch"
            )
        self.strides = [info["reduction"] for info in encoder.feature_info]
        side = self.mask_patch = self.strides[-1]
        height, width = encoder.image_size
        if height % side or width % side:
            raise InputError(
                f"FCMAE masks squares of {side} x {side} pixels, which don't divide images of"
                f" {height} x {width}; choose another DATA.IMAGE_SIZE"
            )
        self.units = (height // side, width // side)
        # The pooled features aren't trained.
        for parameter in encoder.head.parameters():
            parameter.stop_gradient = True

        dim = encoder.feature_info[-1]["num_chs"]
        self.proj = Conv2D(dim, decoder_width, 1)
        self.mask_token = self.create_parameter(
            [1, decoder_width, 1, 1], default_initializer=Normal(std=0.02)
        )
        blocks = [
            Block(decoder_width, init_values=None, drop_path=0.0, use_grn=encoder.use_grn)
            for _ in range(decoder_depth)
        ]
        self.decoder = nn.Sequential(*blocks)
        self.pred = Conv2D(decoder_width, self.in_channels * side**2, 1)
        for layer in (self.proj, self.decoder, self.pred):
            layer.apply(encoder._init_weights)

    def forward(self, images: paddle.Tensor, masked: paddle.Tensor) -> paddle.Tensor:
        """Returns the loss of each image, [B] float32: the mean squared error of the normalised
        pixels of its masked squares.

        Args:
            images: [B, C, H, W], normalised.
            masked: [B, rows, columns] of ``units``, 1 where a square is masked, else 0.
        """
        squares = cut_patches(images, self.mask_patch)
        mean, deviation = patch_statistics(squares)
        errors = self._predict(images, masked) - (squares - mean) / deviation
        of_squares = (errors * errors).mean(axis=-1)
        masked = masked.astype("float32").flatten(1)
        return (of_squares * masked).sum(axis=1) / masked.sum(axis=1)

    def reconstruct(self, images: paddle.Tensor, masked: paddle.Tensor) -> paddle.Tensor:
        """Returns the prediction of all pixels, [B, C, H, W], with the mean and the deviation of
        the true squares, which the decoder doesn't predict; for the arguments of ``forward``.
        """
        mean, deviation = patch_statistics(cut_patches(images, self.mask_patch))
        squares = self._predict(images, masked) * deviation + mean
        return join_patches(squares, self.mask_patch, self.units)

    def mask_of_pixels(self, masked: paddle.Tensor) -> paddle.Tensor:
        """Returns 1.0 where a pixel is masked, else 0.0: [B, rows, columns] -> [B, 1, H, W]."""
        return self._map_of(masked, stride=1)

    def encode(self, images: paddle.Tensor, masked: paddle.Tensor) -> paddle.Tensor:
        """Returns the encoder's last map, [B, D, rows, columns]. Its masked places aren't defined."""
        encoder = self.encoder
        x = encoder._embed(images)
        # Paddle's tracing (TO_STATIC) takes no keywords of zip.
        for index, stage in enumerate(encoder._stages()):
            x = encoder._stage(stage, x, 1 - self._map_of(masked, self.strides[index]))
        return encoder._last_norm(x)

    def no_weight_decay(self) -> set[str]:
        return {*super().no_weight_decay(), "mask_token"}

    def _predict(self, images: paddle.Tensor, masked: paddle.Tensor) -> paddle.Tensor:
        """Returns the normalised pixels of all squares, as ``cut_patches`` does, float32."""
        x = self.proj(self.encode(images, masked))
        x = replace_masked(x, masked.astype(x.dtype).unsqueeze(1), self.mask_token)
        x = channels_first(self.decoder(channels_last(x)))
        return self.pred(x).flatten(2).transpose([0, 2, 1]).astype("float32")

    def _map_of(self, masked: paddle.Tensor, stride: int) -> paddle.Tensor:
        """Returns the mask of a map whose places have ``stride`` pixels along a side: [B, rows,
        columns] -> [B, 1, H / stride, W / stride] float32.
        """
        return enlarged(masked.astype("float32"), self.mask_patch // stride).unsqueeze(1)
