"""Image to tokens."""

from collections.abc import Sequence

import paddle
from paddle import nn
from paddle.nn.initializer import Uniform

from errors import InputError
from models.layers.linear import linear


class PatchEmbed(nn.Layer):
    """Cuts an image into patches and projects each, by the weights of a strided convolution (timm's ``PatchEmbed``).

    Shape: [B, C, H, W] -> [B, (H / patch_size) * (W / patch_size), embed_dim].

    Attributes:
        grid_size: (H / patch_size, W / patch_size).

    Raises:
        InputError: an image size that isn't a multiple of the patch size, or isn't the model's.
    """

    def __init__(
        self, image_size: Sequence[int], patch_size: int, in_channels: int, embed_dim: int, bias: bool = True
    ) -> None:
        super().__init__()
        height, width = self.image_size = tuple(image_size)
        if height % patch_size or width % patch_size:
            found = height if height == width else f"{height} x {width}"
            raise InputError(f"IMAGE_SIZE {found} is not a multiple of PATCH_SIZE {patch_size}; choose one that is")
        self.patch_size = patch_size
        self.grid_size = (height // patch_size, width // patch_size)
        self.num_patches = self.grid_size[0] * self.grid_size[1]
        bound = (in_channels * patch_size**2) ** -0.5  # PyTorch's default for a convolution, which timm leaves as it is
        uniform = paddle.ParamAttr(initializer=Uniform(-bound, bound))
        self.proj = nn.Conv2D(
            in_channels,
            embed_dim,
            patch_size,
            stride=patch_size,
            weight_attr=uniform,
            bias_attr=uniform if bias else False,
        )

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        if tuple(x.shape[2:]) != self.image_size:
            height, width = self.image_size
            raise InputError(f"the model takes images of {height} x {width}, found {x.shape[2]} x {x.shape[3]}")
        (rows, columns), size = self.grid_size, self.patch_size
        patches = x.reshape([x.shape[0], -1, rows, size, columns, size]).transpose([0, 2, 4, 1, 3, 5])
        weight = self.proj.weight.flatten(1).t()
        return linear(patches.reshape([x.shape[0], rows * columns, -1]), weight, self.proj.bias)
