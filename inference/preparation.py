"""The preparation of images as a graph: from pixels of any size to a model's input.

A resize is two products with matrices of Pillow's weights, which the graph computes from the
image's size. So every format runs the same few operations, and the result doesn't depend on how a
runtime implements "bicubic". Like Pillow, the graph rounds to whole grey levels after each of the
two passes. Neither rounds float images (DATA.IMAGE_DTYPE).
"""

import numpy as np
import paddle
from paddle import nn

from loading.transforms import Normalize, pixel_dtype
from loading.transforms.image import evaluation_size
from models.layers.graph_sizes import bicubic
from settings.configuration import Configuration, pair


class Preparation(nn.Layer):
    """``EvalTransform`` and ``Normalize`` in one graph.

    The pixels differ from Pillow's by at most one grey level: if a value is half way between two
    levels, the last bits of a float decide. With "nearest", they differ at a few edges, because
    Pillow adds up its step from pixel to pixel.

    Shape: [B, H, W, C] uint8 or float32 -> [B, C, h, w] float32. With DATA.CROP_MODE "short" and
    "own", h and w follow from H and W.
    """

    def __init__(self, config: Configuration) -> None:
        super().__init__()
        data = config.DATA
        self.size = pair(data.EVAL_SIZE or data.IMAGE_SIZE)
        self.resized_to = evaluation_size(config)
        self.mode = data.CROP_MODE
        self.kernel = data.INTERPOLATION
        normalize = Normalize(data.IMAGENET_MEAN, data.IMAGENET_STD)
        self.has_grey_levels = pixel_dtype(config) is np.uint8
        scale = normalize.scale if self.has_grey_levels else normalize.scale_of_floats
        self.register_buffer("scale", scale)
        self.register_buffer("shift", normalize.shift)

    def forward(self, pixels: paddle.Tensor) -> paddle.Tensor:
        return self.crop_pixels(pixels) * self.scale + self.shift

    def crop_pixels(self, pixels: paddle.Tensor) -> paddle.Tensor:
        """Returns the pixels that the model sees, [B, C, h, w] float32. Those of uint8 images are
        whole numbers.
        """
        x = pixels.astype("float32")
        if self.mode == "own":
            return x.transpose([0, 3, 1, 2])
        # paddle.shape of Paddle 2.6 doesn't take uint8.
        sides = paddle.shape(x).astype("int64")
        height = sides[1:2]
        width = sides[2:3]
        resized_height, resized_width = self._resized_size(height, width)
        rows, columns = self.size
        if self.mode == "short":
            rows = resized_height
            columns = resized_width
        x = x.transpose([0, 3, 1, 2])
        # Like Pillow, it resizes the width first.
        x = paddle.matmul(x, self._weights(width, resized_width, columns))
        x = self._to_grey_levels(x)
        x = paddle.matmul(self._weights(height, resized_height, rows), x, transpose_x=True)
        return self._to_grey_levels(x)

    def _to_grey_levels(self, x: paddle.Tensor) -> paddle.Tensor:
        if not self.has_grey_levels:
            return x
        return paddle.floor(x + 0.5).clip(0, 255)

    def _resized_size(self, height: paddle.Tensor, width: paddle.Tensor) -> list[paddle.Tensor]:
        """Returns the height and the width of the resized image, as ``covering`` does."""
        rows, columns = self.resized_to
        if self.mode == "squash":
            return [paddle.full([1], side, "int64") for side in self.resized_to]
        if rows == columns:
            shorter = paddle.minimum(height, width)
            return [rows * side // shorter for side in (height, width)]
        height = height.astype("float64")
        width = width.astype("float64")
        ratio = paddle.minimum(height / rows, width / columns)
        return [_rounded(side / ratio) for side in (height, width)]

    def _weights(
        self, side: paddle.Tensor, to: paddle.Tensor, size: int | paddle.Tensor
    ) -> paddle.Tensor:
        """Returns the weight of each of the image's pixels for each pixel of the crop, along one
        axis: [side, size].

        Not [size, side]: with AVX-512, Paddle Inference 3.3.1 returns uninitialised memory for a
        product by a transposed matrix of one column, which an image one pixel wide has.

        Args:
            side: the pixels of the image.
            to: the pixels of the resized image.
            size: the pixels of the crop.
        """
        out = (paddle.arange(size, dtype="int64") + crop_begin(to - size)).unsqueeze(0)
        # Beyond the resized image the crop is black.
        is_inside = ((out >= 0) & (out < to)).astype("float32")
        source = paddle.arange(side, dtype="int64").unsqueeze(1)
        if self.kernel == "nearest":
            return (source == (2 * out + 1) * side // (2 * to)).astype("float32") * is_inside
        # The distance between the centres of two pixels, in pixels of the image or of the resized
        # image, whichever are larger. It is computed in whole numbers, which are exact.
        offset = ((2 * source + 1) * to - (2 * out + 1) * side).astype("float32")
        scale = (2 * paddle.maximum(side, to)).astype("float32")
        distance = (offset / scale).abs()
        if self.kernel == "bicubic":
            weights = bicubic(distance)
        else:
            weights = (1 - distance).clip(min=0)
        weights = weights * is_inside
        return weights / (weights.sum(0, keepdim=True) + (1 - is_inside))


def crop_begin(spare: paddle.Tensor) -> paddle.Tensor:
    """Returns where a central crop begins, at half of the spare pixels: int64.

    Halves are rounded to the even neighbour, as in Python. Where pixels are missing, the crop
    begins before the image, by half of them rounded down.
    """
    missing = (-spare).clip(min=0)
    spare = spare.clip(min=0)
    half = spare // 2
    return half + (spare - 2 * half) * (half - half // 2 * 2) - missing // 2


def _rounded(x: paddle.Tensor) -> paddle.Tensor:
    """Returns the nearest whole numbers, int64. Halves become even, as by Python's ``round``."""
    up = (x + 0.5).floor()
    odd = up - 2 * (up / 2).floor()
    return (up - odd * (up - x == 0.5).astype(x.dtype)).astype("int64")
