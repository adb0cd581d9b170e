"""Test-time augmentation: the probabilities are averaged over several views of an image.

The views of "flip" are the image and its mirror image, as in timm and PaddleClas. Those of "five"
are the centre and the four corners of the resized image, and those of "ten" are these five and
their mirror images (Krizhevsky et al. 2012). The latter two are torchvision's FiveCrop and TenCrop.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import paddle

from errors import InputError
from inference.pictures import Batch, Picture, Pictures
from loading.files import Paths
from loading.transforms import EvalTransform, Size
from loading.transforms import Picture as Opened
from loading.workers import Shapes
from settings.configuration import Configuration

Views = Literal["", "flip", "five", "ten"]
WAYS = ("flip", "five", "ten")


class FiveCrops(EvalTransform):
    """The transform of an evaluation, but with five crops: [5, H, W, C], the central one first.

    Raises:
        InputError: images are resized to the crop's size or less, so that all crops are the same.
    """

    def __init__(self, config: Configuration) -> None:
        super().__init__(config)
        if config.DATA.NUM_TOKENS is not None:
            raise InputError(
                f"-tta: with DATA.NUM_TOKENS {config.DATA.NUM_TOKENS} images aren't cropped;"
                " use -tta flip"
            )
        if config.DATA.CROP_PCT > 1:
            raise InputError(
                f"-tta: with DATA.CROP_PCT {config.DATA.CROP_PCT} images are smaller than the crop,"
                " which can't be moved; use -tta flip, or -o DATA.CROP_PCT 0.9"
            )
        if config.DATA.CROP_MODE == "squash" and self.resize_to == self.size:
            raise InputError(
                "-tta: an image that is squashed to the size of the crop has only one crop; use"
                " -tta flip,"
                " or -o DATA.CROP_PCT 0.9"
            )

    def __call__(self, image: Opened, rng: np.random.Generator | None = None) -> np.ndarray:
        pixels = self.resized(image, self.resize_to, self.resample, self.most)
        height, width = self.size
        if pixels.ndim == 2:
            pixels = pixels[:, :, None]
        bottom = pixels.shape[0] - height
        right = pixels.shape[1] - width
        centre = round(bottom / 2), round(right / 2)
        places = (centre, (0, 0), (0, right), (bottom, 0), (bottom, right))
        return np.stack([pixels[top : top + height, left : left + width] for top, left in places])


class CroppedPictures(Pictures):
    """``Pictures`` with one more column, the crops at the corners [4, H, W, C]."""

    def __init__(self, config: Configuration, images: Sequence[Picture] | Paths) -> None:
        super().__init__(config, images)
        self.transform = FiveCrops(config)
        self.own_columns.append("corners")

    def shapes(self, size: Size) -> Shapes:
        pixels = super().shapes(size)["pixels"]
        return {"pixels": pixels, "corners": ((4, *pixels[0]), pixels[1])}

    def __getitem__(self, key: int) -> tuple:  # pyright: ignore[reportIncompatibleMethodOverride]: no epochs here
        crops, place, problem = super().__getitem__(key)
        # An image that can't be read is a single blank one.
        if problem.any():
            crops = np.stack([crops] * 5)
        return crops[0], place, problem, crops[1:]


def pictures(config: Configuration, images: Sequence[Picture] | Paths, tta: Views = "") -> Pictures:
    """Returns the dataset of the images, with the crops that ``tta`` needs."""
    if tta in ("five", "ten"):
        return CroppedPictures(config, images)
    return Pictures(config, images)


def views(batch: Batch, tta: Views = "") -> Iterator[paddle.Tensor]:
    """Yields the views of a batch, each [B, H, W, C]."""
    crops = [batch.pixels]
    if tta in ("five", "ten"):
        crops += [batch.corners[:, place] for place in range(4)]
    for pixels in crops:
        yield pixels
        if tta in ("flip", "ten"):
            yield paddle.to_tensor(np.ascontiguousarray(pixels.numpy()[:, :, ::-1]))
