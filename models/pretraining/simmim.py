"""SimMIM (Xie et al. 2022, arXiv:2111.09886): masked patches become a learnt token, and a linear
decoder predicts their pixels.
"""

import paddle
from paddle import nn
from paddle.nn.initializer import Normal

from errors import InputError
from models.base import ImageModel
from models.beit import Beit
from models.eva import Eva
from models.layers import PatchEmbed
from models.layers.conv import Conv2D
from models.layers.init import init_as_torch
from models.mixer import MlpMixer
from models.pretraining.network import (
    PretrainingNetwork,
    enlarged,
    masked_patches,
)
from models.swin import SwinTransformer
from models.vit import VisionTransformer
from weights.layout import sublayer
from weights.names import simmim as names

# The architectures that cut images into patches that don't overlap, and whose features are maps of
# these. gMLP and ResMLP are Mixers, and SwinV2 is a Swin.
ENCODERS = (Beit, Eva, MlpMixer, SwinTransformer, VisionTransformer)


class SimMIM(PretrainingNetwork):
    """An encoder that sees a mask token in place of each masked patch, and a decoder of one layer.

    The mask covers squares of ``mask_patch`` pixels, the mask units. The decoder is a 1 x 1
    convolution and a pixel shuffle: each place of the encoder's last map predicts the pixels that
    it stands for. Names of its parameters are the authors', apart from ``mask_token``, which is
    their ``encoder.mask_token``.

    Args:
        encoder: a model that cuts images into patches that don't overlap, without a classifier.
        mask_patch: pixels along a mask unit's side, a multiple of the patch's that divides the
            image's height and width.

    Attributes:
        units: rows and columns of mask units.

    Raises:
        InputError: an encoder that can't do this, or sizes that don't fit together.
    """

    weight_names = names
    input_tokens = ("mask_token",)

    def __init__(self, encoder: ImageModel, mask_patch: int = 32) -> None:
        if not isinstance(encoder, ENCODERS):
            raise InputError(
                "SimMIM needs patches that don't overlap, unlike those of"
                f" {type(encoder).__name__};"
                " MODEL.TYPE can be BEiT, EVA, gMLP, Mixer, ResMLP, Swin, SwinV2 or ViT"
            )
        super().__init__(encoder)
        patches = _patch_embed(encoder)
        _check_sizes(encoder, patches.patch_size, mask_patch)
        height, width = encoder.image_size
        self.units = (height // mask_patch, width // mask_patch)
        self.unit_side = mask_patch // patches.patch_size
        self.mask_patch = mask_patch
        self.mask_token = self.create_parameter(
            [1, 1, patches.proj.weight.shape[0]], default_initializer=Normal(std=0.02)
        )
        last = encoder.feature_info[-1]
        pixels = self.in_channels * last["reduction"] ** 2
        self.decoder = nn.Sequential(
            Conv2D(last["num_chs"], pixels, 1), nn.PixelShuffle(last["reduction"])
        )
        self.decoder.apply(init_as_torch)

    def forward(self, images: paddle.Tensor, masked: paddle.Tensor) -> paddle.Tensor:
        """Returns the loss of each image, [B] float32: the mean absolute difference between its
        masked pixels and their prediction.

        Args:
            images: [B, C, H, W], normalised.
            masked: [B, rows, columns] of ``units``, 1 where a unit is masked, else 0.
        """
        difference = (self.reconstruct(images, masked).astype("float32") - images).abs()
        pixels = self.mask_of_pixels(masked)
        total = (difference * pixels).flatten(1).sum(axis=1)
        return total / (pixels.flatten(1).sum(axis=1) * self.in_channels)

    def mask_of_pixels(self, masked: paddle.Tensor) -> paddle.Tensor:
        """Returns 1.0 where a pixel is masked, else 0.0: [B, rows, columns] -> [B, 1, H, W]."""
        return enlarged(masked.astype("float32"), self.mask_patch).unsqueeze(1)

    def reconstruct(self, images: paddle.Tensor, masked: paddle.Tensor) -> paddle.Tensor:
        """Returns the prediction of all pixels, [B, C, H, W]; for the arguments of ``forward``."""
        # Paddle 2.6 flattens no bool on a CPU, and a graph of it expands no uint8.
        by_patch = enlarged(masked.astype("float32"), self.unit_side).flatten(1)
        # Swin normalises its patches.
        patch_embed = _patch_embed(self.encoder)
        last = getattr(patch_embed, "norm", patch_embed)
        with masked_patches(last, by_patch, self.mask_token):
            features = self.encoder.forward_features(images)
        # The norm after the pooling of a classifier's features; others have theirs before it.
        if hasattr(self.encoder, "fc_norm"):
            features = self.encoder.fc_norm(features)
        return self.decoder(self.encoder._as_map(features, "NCHW"))

    def no_weight_decay(self) -> set[str]:
        return {*super().no_weight_decay(), "mask_token"}


def _patch_embed(encoder: ImageModel) -> PatchEmbed:
    """Returns the layer of the encoder that makes patches of images."""
    return sublayer(encoder, encoder.first_conv.rpartition(".")[0])


def _check_sizes(encoder: ImageModel, patch_size: int, mask_patch: int) -> None:
    height, width = encoder.image_size
    if mask_patch % patch_size:
        raise InputError(
            f"METHOD.MASK_PATCH is {mask_patch}, not a multiple of MODEL.PATCH_SIZE {patch_size}"
        )
    if height % mask_patch or width % mask_patch:
        raise InputError(
            f"METHOD.MASK_PATCH is {mask_patch}, which doesn't divide images of {height} x {width};"
            " choose another, or another DATA.IMAGE_SIZE"
        )
    side = encoder.feature_info[-1]["reduction"]
    if height % side or width % side:
        raise InputError(
            f"a position of the encoder's last map covers {side} x {side} pixels, which don't"
            " divide images"
            f" of {height} x {width}; choose another DATA.IMAGE_SIZE"
        )
