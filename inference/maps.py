"""Predicts a class for each pixel of images (TASK segmentation)."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import paddle

from errors import RunError, Unreadable, printable, reporting_memory
from inference.pictures import Picture, Pictures
from loading.files import Paths
from loading.transforms import Broken
from models.heads.windows import Forward, Way, pixel_logits
from settings.configuration import Configuration
from utils import within_memory


class PixelMap(NamedTuple):
    """The classes of an image's pixels.

    Attributes:
        name: the image's path, or its number.
        outputs: [H, W], at the image's own size: the numbers of the model's outputs. uint8, or int32
            for more than 256 outputs.
    """

    name: str
    outputs: np.ndarray


class Areas(NamedTuple):
    """The classes in an image, the largest first.

    Attributes:
        name: the image's path, or its number.
        outputs: the numbers of the model's outputs.
        classes: their names; if the model's classes aren't known, the numbers as texts.
        percents: of the image's pixels.
    """

    name: str
    outputs: list[int]
    classes: list[str]
    percents: list[float]


class WholePictures(Pictures):
    """``Pictures`` that aren't cropped, one in a batch, with the column "sizes": (height, width) of
    the image before it was resized.
    """

    def __init__(self, config: Configuration, images: Sequence[Picture] | Paths) -> None:
        super().__init__(config, images)
        self.keep_sizes()
        self.own_columns.append("sizes")

    def __getitem__(self, key: int) -> tuple:  # pyright: ignore[reportIncompatibleMethodOverride]: no epochs here
        try:
            sample = self.sample(key)
        except RunError as error:
            return self.blank, self.labels[key], self.as_bytes(error), np.ones(2, np.int64)
        return sample["pixels"], sample["labels"], self.as_bytes(), sample["sizes"]

    def _transformed(
        self, index: int, drawn_by: tuple[int, int, int], rng: np.random.Generator, *size: int
    ) -> dict[str, Any]:
        try:
            picture = self.picture(index)
            width, height = picture.size
            return {"pixels": self.transform(picture, rng), "sizes": np.array([height, width])}
        except Unreadable as error:
            raise Broken(f"{self.name(index)}: {error}; crop or remove it") from None


def pixel_map(
    forward: Forward,
    normalize: Callable[[paddle.Tensor], paddle.Tensor],
    pixels: paddle.Tensor,
    name: str,
    size: tuple[int, int],
    way: Way,
) -> PixelMap:
    """Returns the map of an image.

    Args:
        forward, size, way: see ``models.heads.windows.pixel_logits``.
        normalize: makes images [1, C, H, W] for ``forward`` of pixels.
        pixels: [1, H, W, C].
        name: of the image, for errors.

    Raises:
        RunError: its logits aren't finite, or take more memory than there is.
    """
    answers = []
    advice: Callable[[], str] = functools.partial(_memory_advice, name, size, way)
    with paddle.no_grad(), within_memory(), reporting_memory(advice):
        for logits in pixel_logits(forward, normalize(pixels), size, way):
            best = logits.argmax(-1)
            if not np.isfinite(logits.sum().item()):
                raise RunError(f"{printable(name)}: the weights yield non-finite logits for it")
            answers.append(
                best[0].numpy().astype(np.uint8 if logits.shape[-1] <= 256 else np.int32)
            )
    return PixelMap(name, np.concatenate(answers))


def _memory_advice(name: str, size: tuple[int, int], way: Way) -> str:
    advice = "use a smaller image, or -o DATA.CROP_MODE short with a lower DATA.IMAGE_SIZE"
    if way.stride is None:
        advice = "set -o HEAD.STRIDE to compute it in windows"
    return f"{printable(name)} has {size[1]} x {size[0]} pixels: {advice}"


def areas(one: PixelMap, classes: Sequence[str]) -> Areas:
    """Returns the areas of the classes in an image, the largest first; equal ones by their output.

    Args:
        classes: the names of the outputs; empty: they aren't known.
    """
    pixels = np.zeros(int(one.outputs.max()) + 1, np.int64)
    # Row by row: NumPy makes a copy of what it counts, of 8 bytes a pixel.
    for row in one.outputs:
        pixels += np.bincount(row, minlength=len(pixels))
    order = np.argsort(-pixels, kind="stable")[: np.count_nonzero(pixels)].tolist()
    names = list(map(str, order))
    if classes:
        names = [classes[int(output)] for output in order]
    percents = [100 * float(pixels[output]) / one.outputs.size for output in order]
    return Areas(one.name, order, names, percents)


def maps_in_batches(
    dataset: WholePictures,
    config: Configuration,
    predict: Callable[[paddle.Tensor, str, tuple[int, int]], PixelMap],
    rank: int,
    ranks: int,
) -> Iterator[tuple[int, str, PixelMap | str]]:
    """Yields (place, name, map or error) of each of this rank's images.

    Args:
        predict: makes the map of pixels [1, H, W, C], a name and a size.
    """
    for batch in dataset.batches(config, rank, ranks):
        [place] = batch.places
        name = dataset.name(place)
        outcome: PixelMap | str = batch.problems[0]
        if not outcome:
            height, width = batch.sizes[0]
            try:
                outcome = predict(batch.pixels, name, (height, width))
            except RunError as error:
                outcome = str(error)
        yield place, name, outcome
