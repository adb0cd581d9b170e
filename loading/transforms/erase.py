"""Random erasing.

Boxes are drawn on the host with each sample, and filled on the device for a whole batch.
"""

import copy
import functools
import math
from collections.abc import Sequence

import numpy as np
import paddle

from settings.configuration import Configuration, pair

# The area to erase, as a share of the image, which all boxes of an image share.
AREA = (0.02, 1 / 3)
# Height / width of a box.
RATIO = (0.3, 1 / 0.3)
# Values of the table of normals that the noise is read from: 16 MB.
_TABLE = 1 << 22
# Part of the table's seed, so that it differs from the samples'.
_TABLE_TAG = 0x6E6F697365


class RandomErasing:
    """Erases boxes of an image at random, in the manner of timm's ``RandomErasing``.

    The method is that of Zhong et al. 2017 (arXiv:1708.04896). An image is erased with probability
    RANDOM_ERASE_PROB.

    An erased image gets 1 to RANDOM_ERASE_COUNT boxes, each number equally likely. The boxes share
    the erased area. Ten attempts are made at a box that is smaller than the image in both
    directions; if all fail, it is left out.

    RANDOM_ERASE_MODE says what a box is filled with. "const" is 0, the mean colour. "rand" is a
    standard normal for each channel, and "pixel" one for each pixel and channel. The noise of
    "pixel" is read from a fixed table (drawn from SEED), at a place that is drawn with the box. So
    the erasing is a function of the sample's generator alone.
    """

    def __init__(self, config: Configuration) -> None:
        train = config.TRAIN
        self.probability = train.RANDOM_ERASE_PROB
        self.mode = train.RANDOM_ERASE_MODE
        self.max_count = train.RANDOM_ERASE_COUNT
        self.channels = config.DATA.IMAGE_CHANNELS
        self.seed = config.SEED
        self.size = pair(config.DATA.IMAGE_SIZE)
        self.table_rows = _TABLE // self.size[1]
        self._others: dict[tuple[int, int], RandomErasing] = {}

    def at(self, size: int | Sequence[int]) -> "RandomErasing":
        """Returns this transform for another size of images."""
        size = pair(size)
        if size == self.size:
            return self
        if size not in self._others:
            other = copy.copy(self)
            other.__dict__.pop("_table", None)
            other.size = size
            other.table_rows = _TABLE // size[1]
            self._others[size] = other
        return self._others[size]

    def draw(self, rng: np.random.Generator, size: int | Sequence[int] | None = None) -> np.ndarray:
        """Draws what to erase of one image, as float32 [RANDOM_ERASE_COUNT, K].

        A row begins with a box (top, left, bottom, right), which is empty where nothing is erased.
        In mode "rand", the value of each channel follows. In mode "pixel", the row of the table
        follows where the noise begins.

        Args:
            size: of the image; None: IMAGE_SIZE.
        """
        if size is not None and pair(size) != self.size:
            return self.at(size).draw(rng)
        fill_size = {"const": 0, "rand": self.channels, "pixel": 1}[self.mode]
        drawn = np.zeros((self.max_count, 4 + fill_size), np.float32)
        if rng.random() >= self.probability:
            return drawn
        count = int(rng.integers(1, self.max_count + 1))
        for row in drawn[:count]:
            row[:4] = self._box(rng, count)
            if self.mode == "rand":
                row[4:] = rng.standard_normal(self.channels)
            elif self.mode == "pixel":
                row[4] = rng.integers(self.table_rows)
        return drawn

    def _box(self, rng: np.random.Generator, count: int) -> tuple[int, int, int, int]:
        rows, columns = self.size
        for _ in range(10):
            area = rng.uniform(*AREA) * rows * columns / count
            ratio = math.exp(rng.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
            height = round(math.sqrt(area * ratio))
            width = round(math.sqrt(area / ratio))
            if height < rows and width < columns:
                top = int(rng.integers(rows - height + 1))
                left = int(rng.integers(columns - width + 1))
                return top, left, top + height, left + width
        return 0, 0, 0, 0

    def __call__(self, images: paddle.Tensor, drawn: paddle.Tensor) -> paddle.Tensor:
        """Returns the images, erased.

        Args:
            images: [B, C, H, W] float32, normalised.
            drawn: [B, RANDOM_ERASE_COUNT, K] float32: ``draw`` of each image.
        """
        for number in range(self.max_count):
            inside = box_mask(drawn[:, number, :4], self.size)
            images = paddle.where(inside, self._fill(drawn[:, number, 4:]), images)
        return images

    def _fill(self, drawn: paddle.Tensor) -> paddle.Tensor:
        if self.mode == "const":
            return paddle.zeros([1])
        if self.mode == "rand":
            return drawn.unsqueeze([2, 3])
        # An image's noise is a block of consecutive rows, which continues at the table's beginning.
        first_row = drawn.astype("int64")
        rows = (first_row + paddle.arange(self.channels * self.size[0])) % self.table_rows
        return paddle.gather(self._table, rows.flatten()).reshape([-1, self.channels, *self.size])

    @functools.cached_property
    def _table(self) -> paddle.Tensor:
        # The table is made at the first batch, and not in the loader's workers, which only draw.
        rng = np.random.default_rng([self.seed, _TABLE_TAG])
        return paddle.to_tensor(rng.standard_normal((self.table_rows, self.size[1]), np.float32))


def box_mask(boxes: paddle.Tensor, size: Sequence[int]) -> paddle.Tensor:
    """Returns a mask that is True inside of the boxes, bool [B, 1, H, W].

    Args:
        boxes: [B, 4] (top, left, bottom, right); bottom and right are outside.
        size: (H, W).
    """
    y, x = (paddle.arange(side, dtype=boxes.dtype) for side in size)
    top, left, bottom, right = boxes.unsqueeze(2).unbind(1)
    rows = (top <= y) & (y < bottom)
    columns = (left <= x) & (x < right)
    # Both are expanded: on a CPU, unequal shapes take thirty times as long.
    shape = [len(boxes), 1, *size]
    return rows.unsqueeze([1, 3]).expand(shape) & columns.unsqueeze([1, 2]).expand(shape)
