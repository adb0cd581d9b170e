"""Patch embedding: images to tokens."""

from collections.abc import Sequence

import numpy as np
import paddle
from paddle import nn
from paddle.nn.initializer import Uniform

from errors import InputError
from models.layers.constants import Constants
from models.layers.conv import Conv2D
from models.layers.graph_sizes import is_known
from models.layers.linear import linear
from models.layers.sizes import check_multiples
from weights.resize import patch_matrix


class PatchEmbed(nn.Layer):
    """Cuts images into patches and projects each to a token, as timm's ``PatchEmbed``.

    The weights are those of a strided convolution.

    Shape: [B, C, H, W] -> [B, (H / patch_size) * (W / patch_size), embed_dim].

    Args:
        image_size: (H, W).
        patch_size: side of a patch, in pixels.
        in_channels: channels of the image.
        embed_dim: number of channels of a token.
        bias: whether the projection has a bias.
        cut: whether H and W may be no multiples of patch_size; the pixels after the last patch are
            ignored.
        sizes: the sizes of patches of which each training step uses one. The kernel is resized to it
            by the pseudo-inverse of bicubic resizing (FlexiViT, Beyer et al. 2022,
            arXiv:2212.08013). (): all steps use patch_size.

    Attributes:
        step_size: the size of the next training step's patches, which the training sets
            (``training.step_settings``). An evaluation uses patch_size.
        any_size: whether images of other sizes than ``image_size`` are taken.
        grid_size: (H / patch_size, W / patch_size) of ``image_size``.
        last_grid: that of the last images; another one only with ``any_size``.

    Raises:
        InputError: an image size that isn't a multiple of the patch size, or isn't the model's.
    """

    def __init__(
        self,
        image_size: Sequence[int],
        patch_size: int,
        in_channels: int,
        embed_dim: int,
        bias: bool = True,
        cut: bool = False,
        sizes: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.any_size = False
        height, width = self.image_size = tuple(image_size)
        self.may_cut = cut
        if not cut:
            check_multiples(image_size, patch_size, f"PATCH_SIZE {patch_size}")
        self.patch_size = patch_size
        self.sizes = tuple(sizes)
        self.step_size = patch_size
        self.kernels = Constants(self._matrices)
        self.grid_size = (height // patch_size, width // patch_size)
        self.last_grid = self.grid_size
        self.num_patches = self.grid_size[0] * self.grid_size[1]
        # PyTorch's default initialisation of a convolution, which timm keeps.
        bound = (in_channels * patch_size**2) ** -0.5
        uniform = paddle.ParamAttr(initializer=Uniform(-bound, bound))
        self.proj = Conv2D(
            in_channels,
            embed_dim,
            patch_size,
            stride=patch_size,
            weight_attr=uniform,
            bias_attr=uniform if bias else False,
        )

    @property
    def size(self) -> int:
        """The pixels along the side of the patches that are cut now."""
        return self.step_size if self.training else self.patch_size

    @property
    def input_sizes(self) -> str:
        """The sizes of images that are taken, in words."""
        if not self.any_size:
            return "images of {} x {}".format(*self.image_size)
        if self.may_cut:
            return f"images of at least {self.patch_size} x {self.patch_size}"
        return f"images of multiples of {self.patch_size} pixels"

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.project(self.cut(x))

    def cut(self, x: paddle.Tensor) -> paddle.Tensor:
        """Returns the pixels of each patch, channel by channel: [B, patches, C * size^2]."""
        height, width = x.shape[2:]
        size = self.size
        if self.any_size:
            if is_known(height, width):
                self._check_size(height, width)
        elif (height, width) != self.image_size:
            raise InputError(f"the model takes {self.input_sizes}, found {height} x {width}")
        self.last_grid = (height // size, width // size)
        rows, columns = self.last_grid
        if is_known(height, width) and (rows * size, columns * size) != (height, width):
            x = x[:, :, : rows * size, : columns * size]
        return cut_patches(x, size)

    def _check_size(self, height: int, width: int) -> None:
        size = self.size
        fits = self.may_cut or not (height % size or width % size)
        if min(height, width) < size or not fits:
            raise InputError(
                f"the model takes {self.input_sizes}, found {height} x {width}; crop or resize"
                " the images"
            )

    def project(self, patches: paddle.Tensor) -> paddle.Tensor:
        """Returns the tokens of any number of patches that ``cut`` returned."""
        # A matrix product with the pixels of each patch equals the strided convolution.
        return linear(patches, self._kernel().flatten(1).t(), self.proj.bias)

    def _kernel(self) -> paddle.Tensor:
        """Returns the kernel [D, C, h, w] for patches of ``size`` pixels."""
        kernel = self.proj.weight
        if self.size == self.patch_size:
            return kernel
        dim, channels, old, _ = kernel.shape
        [matrix] = self.kernels.at(self.size)
        # Autocast would round the products to half precision.
        with paddle.amp.auto_cast(enable=False):
            kernel = paddle.matmul(kernel.reshape([-1, old]), matrix)
            kernel = kernel.reshape([-1, old, self.size]).transpose([0, 2, 1])
            kernel = paddle.matmul(kernel.reshape([-1, old]), matrix)
        kernel = kernel.reshape([dim, channels, self.size, self.size])
        return kernel.transpose([0, 1, 3, 2])

    def _matrices(self, size: int) -> list[np.ndarray]:
        """Returns the matrix [patch_size, size] that resizes a side of the kernel, float32."""
        return [patch_matrix(self.patch_size, size).T.astype(np.float32)]


def cut_patches(images: paddle.Tensor, size: int) -> paddle.Tensor:
    """Returns the pixels of each patch, channel by channel: [B, C, H, W] -> [B, patches, C *
    size^2]. Patches are row by row.

    Args:
        size: pixels along a patch's side; H and W are multiples of it.
    """
    batch, channels, height, width = images.shape
    rows = height // size
    columns = width // size
    patches = images.reshape([batch, channels, rows, size, columns, size])
    patches = patches.transpose([0, 2, 4, 1, 3, 5])
    return patches.reshape([batch, rows * columns, channels * size**2])


def join_patches(patches: paddle.Tensor, size: int, grid: tuple[int, int]) -> paddle.Tensor:
    """Returns the images that ``cut_patches`` cut: [B, patches, C * size^2] -> [B, C, H, W].

    Args:
        grid: rows and columns of patches.
    """
    rows, columns = grid
    batch, _, pixels = patches.shape
    channels = pixels // size**2
    images = patches.reshape([batch, rows, columns, channels, size, size])
    images = images.transpose([0, 3, 1, 4, 2, 5])
    return images.reshape([batch, channels, rows * size, columns * size])
