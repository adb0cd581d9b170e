"""Prepares images for prediction as for an evaluation: paths, files, Pillow images or arrays."""

import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import paddle
from PIL import Image

from datasets import EncodedDataset
from errors import IMAGE, LONGEST_LINE, InputError, RunError, reading
from loading.files import Paths, contents
from loading.remote import fetched, is_url
from loading.samplers import EvalBatchSampler
from loading.transforms import (
    Broken,
    convert,
    image_of,
    largest_file,
    pixel_dtype,
    scaling_problem,
    video,
)
from loading.transforms import Picture as Opened
from loading.transforms.decode import readable
from loading.transforms.orientation import TURNS, orientation_in
from loading.workers import ProcessLoader
from settings.configuration import Configuration

Picture = str | os.PathLike | bytes | Image.Image | np.ndarray
# The bytes of an error's line in UTF-8, at most.
_PROBLEM_BYTES = 4 * LONGEST_LINE


class Batch(NamedTuple):
    """A batch of prepared images.

    Attributes:
        places: the images' indices in the sequence of all images.
        pixels: [B, H, W, C], uint8 or float32 (DATA.IMAGE_DTYPE); zeros if an image can't be read.
        problems: the error of each image, in one line; "": none.
        corners: [B, 4, H, W, C], for ``inference.tta`` alone.
        sizes: the (height, width) of the images' files, for ``inference.maps`` alone.
    """

    places: list[int]
    pixels: paddle.Tensor
    problems: list[str]
    corners: Any = None
    sizes: Sequence[list[int]] = ()


class Pictures(EncodedDataset):
    """A dataset of images without labels.

    An item is (pixels [H, W, C], the image's place, its error as bytes that are filled with 0).

    Args:
        images: paths, URLs, names of frames ("clip.mp4#12.0"), the bytes of files, Pillow images,
            or arrays [H, W] or [H, W, 3] uint8. For a model of other images (DATA.IMAGE_DTYPE):
            arrays [H, W] or [H, W, C] of uint8, uint16 or float32.
    """

    def __init__(self, config: Configuration, images: Sequence[Picture] | Paths) -> None:
        check_several(images)
        super().__init__(config, "val", np.arange(len(images)), [])
        self.images = images
        self.own_columns = ["pixels", "places", "problems"]
        self.blank = np.zeros(
            (*self.transform.size, config.DATA.IMAGE_CHANNELS), pixel_dtype(config)
        )

    def __getitem__(self, key: int) -> tuple:  # pyright: ignore[reportIncompatibleMethodOverride]: no epochs here
        try:
            sample = self.sample(key)
            return sample["pixels"], sample["labels"], self.as_bytes()
        except RunError as error:
            return self.blank, self.labels[key], self.as_bytes(error)

    @staticmethod
    def as_bytes(error: RunError | str = "") -> np.ndarray:
        """Returns an item's error, as bytes of one length."""
        problem = str(error).encode()[:_PROBLEM_BYTES].ljust(_PROBLEM_BYTES, b"\0")
        return np.frombuffer(problem, np.uint8)

    def name(self, index: int) -> str:
        """Returns the path as it was given; for another kind of image "image" and its index."""
        image = self.images[index]
        return os.fspath(image) if isinstance(image, str | os.PathLike) else f"image {index}"

    def data(self, index: int) -> bytes:
        image = self.images[index]
        if isinstance(image, bytes):
            return image
        if not isinstance(image, str | os.PathLike):
            raise Broken(
                f"{self.name(index)}: found an object of type {type(image).__name__},"
                " expected a path, the bytes of a file, a Pillow image or an array"
            )
        name = self.name(index)
        if is_url(name):
            with reading(name, IMAGE, "; check the address", Broken):
                return fetched(name, largest_file(self.most))
        return contents(name, largest_file(self.most))

    def picture(self, index: int) -> Opened:
        image = self._unencoded(index)
        if image is None:
            return super().picture(index)
        # Pillow may decode the image only now, and can't convert every mode.
        with readable(self.name(index)):
            return self._opened(image, self.name(index))

    def image(self, index: int) -> Opened:
        picture = self.picture(index)
        return picture if isinstance(picture, Image.Image) else picture.decode()

    def _unencoded(self, index: int) -> Image.Image | np.ndarray | None:
        """Returns an image that isn't in a file of its own; None if it is."""
        image = self.images[index]
        if isinstance(image, Image.Image | np.ndarray):
            return image
        if not isinstance(image, str | os.PathLike):
            return None
        frame = video.frame_of(os.fspath(image))
        if frame is None:
            return None
        with readable(self.name(index)):
            return video.frame(*frame, self.most)

    def _opened(self, image: Image.Image | np.ndarray, name: str) -> Opened:
        sides = image.shape if isinstance(image, np.ndarray) else image.size
        if 0 in sides:
            raise Broken(f"{name}: it has no pixels")
        if isinstance(image, np.ndarray):
            if isinstance(self.mode, int):
                return image_of(image, self.mode)
            image = _from_array(image, name)
        if isinstance(self.mode, str) and (reason := scaling_problem(image)):
            raise Broken(f"{name}: {reason}")
        turn = TURNS[orientation_in(image.info.get("exif") or b"") if self.oriented else 1]
        if isinstance(self.mode, int):
            return image_of(np.asarray(turn.image(image)), self.mode)
        # A copy is converted, because ``convert`` removes entries from the image's info.
        return turn.image(convert(image.copy(), self.mode))

    def batches(self, config: Configuration, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
        """Yields this rank's images in batches of DATA.BATCH_SIZE_EVAL, in their order.

        Images that differ in size are alone in their batches.
        """
        batch_size = 1 if self.keeps_sizes else config.DATA.BATCH_SIZE_EVAL
        sampler = EvalBatchSampler(self, batch_size, rank, ranks)
        for batch in ProcessLoader(config, self, sampler, ranks):
            problems = [
                bytes(line).rstrip(b"\0").decode(errors="ignore")
                for line in batch["problems"].numpy()
            ]
            places = list(map(int, batch["places"].numpy()))
            sizes = batch["sizes"].numpy().tolist() if "sizes" in batch else ()
            yield Batch(places, batch["pixels"], problems, batch.get("corners"), sizes)


def check_several(images: Any) -> None:
    """Raises InputError for a single image instead of a sequence of images.

    Otherwise the letters of a path, or the rows of an array, would be taken for images.
    """
    is_single = isinstance(images, str | os.PathLike | bytes | Image.Image)
    if isinstance(images, np.ndarray):
        is_single = images.ndim < 3 or (images.ndim == 3 and images.shape[2] in (1, 3, 4))
    if is_single:
        raise InputError(
            f"found one image ({type(images).__name__}), expected a list of images: predictor([image])"
        )


def _from_array(array: np.ndarray, name: str) -> Image.Image:
    """Returns the image of an array [H, W] or [H, W, 1, 3 or 4] of uint8."""
    is_image = array.ndim in (2, 3) and array.shape[2:] in ((), (1,), (3,), (4,))
    if array.dtype != np.uint8 or not is_image:
        raise InputError(
            f"{name}: found an array {list(array.shape)} of {array.dtype},"
            " expected [H, W] or [H, W, 3] of uint8"
        )
    if array.shape[2:] == (1,):
        array = array[:, :, 0]
    return Image.fromarray(array)
