"""Image to tokens."""

import paddle
from paddle import nn
from paddle.nn.initializer import Uniform

from errors import InputError


class PatchEmbed(nn.Layer):
    """Cuts an image into patches and projects each, as a strided convolution (timm's ``PatchEmbed``).

    Shape: [B, C, S, S] -> [B, (S / patch_size) ** 2, embed_dim].

    Raises:
        InputError: an image size that isn't a multiple of the patch size, or isn't the model's.
    """

    def __init__(self, image_size: int, patch_size: int, in_channels: int, embed_dim: int) -> None:
        super().__init__()
        if image_size % patch_size:
            raise InputError(
                f"IMAGE_SIZE {image_size} is not a multiple of PATCH_SIZE {patch_size}; choose one that is"
            )
        self.image_size = image_size
        self.num_patches = (image_size // patch_size) ** 2
        bound = (in_channels * patch_size**2) ** -0.5  # PyTorch's default for a convolution, which timm leaves as it is
        self.proj = nn.Conv2D(
            in_channels,
            embed_dim,
            patch_size,
            stride=patch_size,
            weight_attr=paddle.ParamAttr(initializer=Uniform(-bound, bound)),
            bias_attr=paddle.ParamAttr(initializer=Uniform(-bound, bound)),
        )

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        if list(x.shape[2:]) != [self.image_size] * 2:
            raise InputError(
                f"the model takes images of {self.image_size} x {self.image_size}, found {x.shape[2]} x {x.shape[3]}"
            )
        return self.proj(x).flatten(2).transpose([0, 2, 1])
