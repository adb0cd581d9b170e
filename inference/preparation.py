"""The preparation of images as a graph: pixels [B, H, W, C] of any size -> a model's input
[B, C, h, w] float32.

A resize is two products with matrices of Pillow's weights, made in the graph from the image's size.
So every format runs the same few operations, and the result doesn't depend on how a runtime
implements "bicubic". Pillow rounds to whole grey levels after each of its two passes; so does this
graph. Float images (DATA.IMAGE_DTYPE) are rounded by neither.
"""

import numpy as np
import paddle
from paddle import nn

from loading.transforms import Normalize, pixel_dtype
from loading.transforms.image import before_crop
from settings.options import Configuration, pair


class Preparation(nn.Layer):
    """``EvalTransform`` and ``Normalize`` in one graph. Shape: [B, H, W, C] uint8 or float32 -> [B,
    C, h, w] float32.

    Within a grey level of Pillow's pixels: where a value lies half way between two, the last bits
    of a float decide. "nearest" differs at a few edges, for Pillow adds its step up from pixel to
    pixel.
    """

    def __init__(self, config: Configuration) -> None:
        super().__init__()
        data = config.DATA
        self.size = pair(data.IMAGE_SIZE)
        self.resized_to = before_crop(self.size, data.CROP_PCT)
        self.squash = data.CROP_MODE == "squash"
        self.kernel = data.INTERPOLATION
        normalize = Normalize(data.IMAGENET_MEAN, data.IMAGENET_STD)
        self.whole = pixel_dtype(config) is np.uint8
        self.register_buffer("scale", normalize.scale if self.whole else normalize.scale_of_floats)
        self.register_buffer("shift", normalize.shift)

    def forward(self, pixels: paddle.Tensor) -> paddle.Tensor:
        return self.crop_pixels(pixels) * self.scale + self.shift

    def crop_pixels(self, pixels: paddle.Tensor) -> paddle.Tensor:
        """Returns the pixels that the model sees, [B, C, h, w] float32; of uint8 whole numbers."""
        x = pixels.astype("float32")
        sides = paddle.shape(x).astype("int64")  # Paddle 2.6's takes no uint8
        height, width = sides[1:2], sides[2:3]
        to = self._resized_size(height, width)
        x = x.transpose([0, 3, 1, 2])
        x = self._grey_levels(
            paddle.matmul(x, self._weights(width, to[1], self.size[1]), transpose_y=True)
        )
        return self._grey_levels(paddle.matmul(self._weights(height, to[0], self.size[0]), x))

    def _grey_levels(self, x: paddle.Tensor) -> paddle.Tensor:
        return paddle.floor(x + 0.5).clip(0, 255) if self.whole else x

    def _resized_size(self, height: paddle.Tensor, width: paddle.Tensor) -> list[paddle.Tensor]:
        """Returns the height and the width of a resized image: ``covering``, in the graph."""
        rows, columns = self.resized_to
        if self.squash:
            return [paddle.full([1], side, "int64") for side in self.resized_to]
        if rows == columns:
            short = paddle.minimum(height, width)
            return [rows * side // short for side in (height, width)]
        height, width = height.astype("float64"), width.astype("float64")
        ratio = paddle.minimum(height / rows, width / columns)
        return [_rounded(side / ratio) for side in (height, width)]

    def _weights(self, side: paddle.Tensor, to: paddle.Tensor, size: int) -> paddle.Tensor:
        """Returns the matrix [size, side] of what each pixel of the crop takes of each pixel along
        one axis.

        Args:
            side: pixels of the image.
            to: pixels of the resized image.
            size: pixels of the crop.
        """
        out = (paddle.arange(size, dtype="int64") + crop_begin(to - size)).unsqueeze(1)
        source = paddle.arange(side, dtype="int64").unsqueeze(0)
        if self.kernel == "nearest":
            return (source == (2 * out + 1) * side // (2 * to)).astype("float32")
        # In whole numbers, so that nothing is lost: between the pixels' centres, in pixels of the
        # coarser of both.
        offset = (2 * source + 1) * to - (2 * out + 1) * side
        distance = (
            offset.astype("float32") / (2 * paddle.maximum(side, to)).astype("float32")
        ).abs()
        weights = _bicubic(distance) if self.kernel == "bicubic" else (1 - distance).clip(min=0)
        return weights / weights.sum(1, keepdim=True)


def crop_begin(spare: paddle.Tensor) -> paddle.Tensor:
    """Returns where a central crop begins: at half of the spare pixels, int64. A half goes to the
    even neighbour, as Python rounds.
    """
    half = spare // 2
    return half + (spare - 2 * half) * (half - half // 2 * 2)


def _bicubic(x: paddle.Tensor) -> paddle.Tensor:
    """Keys 1981 with a = -0.5, Pillow's. x: distances, not negative."""
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return paddle.where(x < 1, near, paddle.where(x < 2, far, paddle.zeros_like(x)))


def _rounded(x: paddle.Tensor) -> paddle.Tensor:
    """The nearest whole number, int64; of two, the even one, as Python's ``round``."""
    up = (x + 0.5).floor()
    odd = up - 2 * (up / 2).floor()
    return (up - odd * (up - x == 0.5).astype(x.dtype)).astype("int64")
