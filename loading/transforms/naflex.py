"""Transforms that keep an image's ratio and fit it into a number of patches (NaFlex), and the
packing of such images.

They are those of timm 1.0.31: ``ResizeToSequence`` in an evaluation and
``RandomResizedCropToSequence`` in a training.
"""

import math
from typing import NamedTuple

import numpy as np
from PIL import Image

from errors import Unreadable
from loading.transforms.decode import Box
from loading.transforms.image import EvalTransform, Picture, Size, TrainTransform, resized_to
from settings.configuration import Configuration

# The search for the largest scale begins with these bounds, and ends at this difference.
_SMALLEST = 1e-6
_LARGEST = 100.0
_STEP = 1e-5


class Packing(NamedTuple):
    """How images become patches.

    Attributes:
        patch_size: pixels P along a patch's side.
        length: the most patches of an image.
    """

    patch_size: int
    length: int

    @property
    def size(self) -> Size:
        """The (height, width) of packed pixels: as many rows as patches, of P * P pixels each."""
        return self.length, self.patch_size**2

    def pack(self, pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns an image's patches, row by row, and its (rows, columns) of patches.

        Shape: [H, W, C] -> [length, P * P, C], with zeros after the last patch, and [2] int32.
        """
        size = self.patch_size
        rows = pixels.shape[0] // size
        columns = pixels.shape[1] // size
        channels = pixels.shape[2]
        packed = np.zeros((*self.size, channels), pixels.dtype)
        patches = pixels.reshape(rows, size, columns, size, channels).swapaxes(1, 2)
        packed[: rows * columns] = patches.reshape(rows * columns, size**2, channels)
        return packed, np.array([rows, columns], np.int32)

    def unpack(self, packed: np.ndarray, grid: np.ndarray) -> np.ndarray:
        """Returns the pixels [H, W, C] of an image's patches, and their ``grid``, as of ``pack``."""
        rows, columns = grid.tolist()
        size = self.patch_size
        patches = packed[: rows * columns].reshape(rows, columns, size, size, -1)
        return patches.swapaxes(1, 2).reshape(rows * size, columns * size, -1)


def packing(config: Configuration) -> Packing:
    """Returns how images become patches, with DATA.NUM_TOKENS set."""
    return Packing(config.MODEL.PATCH_SIZE, config.DATA.NUM_TOKENS)


def fitted_size(height: int, width: int, packing: Packing) -> Size:
    """Returns the (height, width) that an image is resized to.

    It is the image at the largest scale at which it has no more than ``packing.length`` patches,
    with both sides rounded up to whole patches. Small images are enlarged, up to a hundred times.
    The scale is found by bisection, as timm does, whose rounding decides where two sizes are
    possible.

    Raises:
        Unreadable: the image is so long that it would be scaled to less than a hundred-thousandth.
    """
    patch = packing.patch_size

    def sides(scale: float) -> Size:
        rows = max(1, math.ceil(height * scale / patch))
        columns = max(1, math.ceil(width * scale / patch))
        return rows * patch, columns * patch

    low = _SMALLEST
    high = _LARGEST
    while high - low >= _STEP:
        middle = (low + high) / 2.0
        rows, columns = sides(middle)
        if (rows // patch) * (columns // patch) <= packing.length:
            low = middle
        else:
            high = middle
    if low <= _STEP:
        raise Unreadable(
            f"it has {width} x {height} pixels, which don't fit into {packing.length} patches"
        )
    return sides(low)


class PackedTrainTransform(TrainTransform):
    """The training transform of images that keep their ratio.

    TRAIN.CROP_RATIO is the range of the crop's ratio over the image's. The crop is resized as
    ``fitted_size`` says. All else is as in ``TrainTransform``.
    """

    def __init__(self, config: Configuration) -> None:
        super().__init__(config)
        self.packing = packing(config)

    def at(self, size: int | Size) -> "PackedTrainTransform":
        """Returns this transform for another number of patches."""
        other: PackedTrainTransform = super().at(self.size)  # pyright: ignore[reportAssignmentType]: a copy
        length = size if isinstance(size, int) else size[0]
        other.packing = self.packing._replace(length=length)
        return other

    def __call__(
        self, image: Picture, rng: np.random.Generator, size: int | Size | None = None
    ) -> np.ndarray:
        """Returns the pixels [H, W, C] of an image.

        Args:
            size: the most patches; None: NUM_TOKENS.
        """
        if size is not None:
            return self.at(size)(image, rng)
        geometry = self.draw(*image.size, rng)
        pixels = self._recolor(self._moved(image, geometry, geometry.resample), rng)
        return pixels if pixels.ndim == 3 else pixels[:, :, None]

    def _size_of_crop(self, box: Box) -> Size:
        left, top, right, bottom = box
        return fitted_size(bottom - top, right - left, self.packing)

    def _crop_box(self, width: int, height: int, rng: np.random.Generator) -> Box:
        low, high = self.ratio
        for _ in range(10):
            area = width * height * rng.uniform(*self.scale)
            ratio = width / height * math.exp(rng.uniform(math.log(low), math.log(high)))
            w = round(math.sqrt(area * ratio))
            h = round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                left = int(rng.integers(width - w + 1))
                top = int(rng.integers(height - h + 1))
                return left, top, left + w, top + h
        # The largest central crop of a permitted ratio: of the image's own, if that is one.
        ratio = width / height * min(max(1.0, low), high)
        w = min(width, max(1, round(height * ratio)))
        h = min(height, max(1, round(width / ratio)))
        left = (width - w) // 2
        top = (height - h) // 2
        return left, top, left + w, top + h


class PackedEvalTransform(EvalTransform):
    """The evaluation transform of images that keep their ratio: they are resized as ``fitted_size``
    says, and nothing is cropped.
    """

    def __init__(self, config: Configuration) -> None:
        super().__init__(config)
        self.packing = packing(config)

    def _moved(self, image: Picture, resample: Image.Resampling) -> np.ndarray:
        width, height = image.size
        rows, columns = fitted_size(height, width, self.packing)
        return resized_to(image, (columns, rows), resample, None)


def train_transform(config: Configuration) -> TrainTransform:
    """Returns the transform of training images."""
    return (
        TrainTransform(config) if config.DATA.NUM_TOKENS is None else PackedTrainTransform(config)
    )


def eval_transform(config: Configuration) -> EvalTransform:
    """Returns the transform of evaluated images."""
    return EvalTransform(config) if config.DATA.NUM_TOKENS is None else PackedEvalTransform(config)
