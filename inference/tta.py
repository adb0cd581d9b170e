"""Test-time augmentation: a model's probabilities, averaged over several views of an image.

"flip" is the image and its mirror image, as timm and PaddleClas do it. "five" are the centre and
the four corners of the resized image. "ten" are these and their mirror images (Krizhevsky et al.
2012). They are torchvision's FiveCrop and TenCrop.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import paddle

from errors import InputError
from inference.pictures import Batch, Picture, Pictures
from loading.files import Paths
from loading.transforms import EvalTransform
from loading.transforms import Picture as Opened
from settings.options import Configuration

Views = Literal["", "flip", "five", "ten"]
WAYS = ("flip", "five", "ten")


class FiveCrops(EvalTransform):
    """As an evaluation prepares an image, but with the corners: [5, H, W, C], the centre first."""

    def __init__(self, config: Configuration) -> None:
        super().__init__(config)
        if config.DATA.CROP_MODE == "squash" and self.resize_to == self.size:
            raise InputError(
                "-tta: an image that is squashed to the crop's size has one crop; take -tta flip,"
                " or -o DATA.CROP_PCT 0.9"
            )

    def __call__(self, image: Opened, rng: np.random.Generator | None = None) -> np.ndarray:
        pixels = self.resized(image, self.resize_to, self.resample, self.most)
        height, width = self.size
        bottom = pixels.shape[0] - height
        right = pixels.shape[1] - width
        centre = round(bottom / 2), round(right / 2)
        places = (centre, (0, 0), (0, right), (bottom, 0), (bottom, right))
        crops = [pixels[top : top + height, left : left + width] for top, left in places]
        return np.stack([crop if crop.ndim == 3 else crop[:, :, None] for crop in crops])


class Cropped(Pictures):
    """``Pictures`` with the crops at the corners [4, H, W, C] as one more column."""

    def __init__(self, config: Configuration, images: Sequence[Picture] | Paths) -> None:
        super().__init__(config, images)
        self.transform = FiveCrops(config)
        self.columns = (*self.columns, "corners")

    def __getitem__(self, key: int) -> tuple:  # pyright: ignore[reportIncompatibleMethodOverride]: no epochs here
        pixels, place, problem = super().__getitem__(key)
        crops = np.stack([pixels] * 5) if problem.any() else pixels
        return crops[0], place, problem, crops[1:]


def pictures(config: Configuration, images: Sequence[Picture] | Paths, tta: Views = "") -> Pictures:
    """Returns the images with the crops that ``tta`` takes."""
    return (Cropped if tta in ("five", "ten") else Pictures)(config, images)


def views(batch: Batch, tta: Views = "") -> Iterator[paddle.Tensor]:
    """Yields the views of a batch, each [B, H, W, C]."""
    crops = [batch.pixels]
    if tta in ("five", "ten"):
        crops += [batch.corners[:, place] for place in range(4)]
    for pixels in crops:
        yield pixels
        if tta in ("flip", "ten"):
            yield paddle.to_tensor(np.ascontiguousarray(pixels.numpy()[:, :, ::-1]))
