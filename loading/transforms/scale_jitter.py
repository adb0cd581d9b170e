"""TRAIN.CROP "scale_jitter", the crop of semantic segmentation.

An image is resized by a random factor, and a crop of IMAGE_SIZE is taken at a random place. Of an
image that is smaller than that, the crop is what there is of it, and is padded at the right and at
the bottom. As in mmsegmentation, padding comes last: its colour stays the mean.
"""

from collections.abc import Sequence

import numpy as np

from loading.transforms.bands import pixel_dtype
from loading.transforms.decode import resized_crop
from loading.transforms.masks import NEAREST, Mask
from loading.transforms.orientation import Box
from settings.configuration import Configuration

# How often a crop in which one class has too many pixels is drawn again. The last one is taken.
_REDRAWN = 10


class ScaleJitter:
    """Draws which box of an image is resized to the crop.

    The factor is uniform in TRAIN.CROP_SCALE. The place is drawn again, up to ten times, where one
    class has more than CROP_MAX_CLASS of the crop's labelled pixels, or where none is labelled.

    Only the box is resized, and not the whole image. Its edges are whole pixels of the image.

    Attributes:
        own_size: the factor multiplies the image's own size (TRAIN.CROP_BASE).
        padding: the colour of padding, a pixel [C].
    """

    def __init__(self, config: Configuration) -> None:
        self.scale = config.TRAIN.CROP_SCALE
        self.own_size = config.TRAIN.CROP_BASE == "own"
        self.largest_share = config.TRAIN.CROP_MAX_CLASS
        self.padding = _mean_color(config)

    def draw(
        self,
        image: tuple[int, int],
        base: tuple[int, int],
        size: tuple[int, int],
        masks: Sequence[Mask],
        rng: np.random.Generator,
    ) -> tuple[Box, tuple[int, int]]:
        """Returns the box, and the (height, width) that it is resized to.

        Args:
            image: its (width, height).
            base: the (width, height) that the factor multiplies.
            size: (height, width) of the crop. A side of the result is smaller where padding follows.
            masks: of the image. Each of them has to keep to CROP_MAX_CLASS.
        """
        factor = rng.uniform(*self.scale)
        box_width, width = _span(image[0], base[0] * factor, size[1])
        box_height, height = _span(image[1], base[1] * factor, size[0])
        for _ in range(1 + _REDRAWN):
            top = int(rng.integers(image[1] - box_height + 1))
            left = int(rng.integers(image[0] - box_width + 1))
            box = left, top, left + box_width, top + box_height
            if all(self._is_mixed(mask, box, (width, height)) for mask in masks):
                break
        return box, (height, width)

    def _is_mixed(self, mask: Mask, box: Box, size: tuple[int, int]) -> bool:
        """Returns whether no class has more than its share of a mask's crop."""
        if self.largest_share == 1:
            return True
        counts = np.bincount(resized_crop(mask.image, box, size, NEAREST).ravel())
        counts[mask.ignored : mask.ignored + 1] = 0
        labelled = counts.sum()
        return labelled > 0 and counts.max() / labelled <= self.largest_share


def padded(pixels: np.ndarray, size: tuple[int, int], value: np.ndarray | int) -> np.ndarray:
    """Returns pixels [h, w] or [h, w, C] with ``value`` at the right and at the bottom.

    Args:
        size: the (height, width) of the result.
    """
    height, width = pixels.shape[:2]
    if (height, width) == size:
        return pixels
    result = np.empty((*size, *pixels.shape[2:]), pixels.dtype)
    result[:height, width:] = value
    result[height:] = value
    result[:height, :width] = pixels
    return result


def _span(side: int, scaled: float, crop: int) -> tuple[int, int]:
    """Returns how many of an image's pixels a crop shows along one axis, and as how many.

    Args:
        side: the image's pixels.
        scaled: its pixels after it is resized, not rounded.
        crop: the crop's pixels.
    """
    resized = max(1, round(scaled))
    if resized <= crop:
        return side, resized
    return max(1, round(side * crop / resized)), crop


def _mean_color(config: Configuration) -> np.ndarray:
    """Returns IMAGENET_MEAN as a pixel [C], of the pixels' type."""
    mean = np.broadcast_to(config.DATA.IMAGENET_MEAN, [config.DATA.IMAGE_CHANNELS])
    if pixel_dtype(config) is np.uint8:
        return np.rint(255 * mean).clip(0, 255).astype(np.uint8)
    return mean.astype(np.float32)
