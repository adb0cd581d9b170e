"""The pictures of an evaluation whose pixels are answered worst, drawn beside their masks.

An evaluation keeps the answers to a few images, reduced to tiles, on the device. So it waits for no
image, and neither many images nor large ones take more memory.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paddle
from PIL import Image

from datasets import ImageDataset
from errors import RunError
from loading.class_names import class_name
from loading.mask_tables import class_colors
from loading.transforms import Bands
from utils import all_gather, rank, world_size, writing_whole

FILE = "worst_pictures.png"
# Pictures that are kept, the pixels along a side of each, and the classes that a legend names.
MOST = 8
_SIDE = 224
_LEGEND = 24
_HEADS = ("image", "label", "answer")


class Answer(NamedTuple):
    """The answer to an image.

    Attributes:
        score: the image's mIoU in percent.
        index: of the image in the dataset.
        tile: [_SIDE, _SIDE], the classes; -1 below and at the right of the picture.
        size: (height, width) of the picture in the tile.
    """

    score: float
    index: int
    tile: np.ndarray
    size: tuple[int, int]


class WorstPictures:
    """The answers to the images of the lowest mIoU, MOST of them at most.

    Images of which no pixel is wrong, or none has a class, aren't among them.

    Args:
        column: the dataset's column of masks.
    """

    def __init__(self, column: str) -> None:
        self.column = column
        self.scores = paddle.full([MOST], float("inf"), "float64")
        self.places = paddle.zeros([MOST], "int64")
        self.tiles = paddle.full([MOST, _SIDE, _SIDE], -1, "int32")
        # Of every image of this rank, (height, width) of its picture in a tile.
        self.sizes: list[tuple[int, int]] = []

    def add(self, answers: paddle.Tensor, score: paddle.Tensor, wrong: paddle.Tensor) -> None:
        """Adds the next image of this rank. No value is copied to the host.

        Args:
            answers: [H, W] int64, the classes.
            score: [1] float64, its mIoU.
            wrong: [1], how many pixels are of the pair that is confused most.
        """
        height, width = answers.shape
        scale = min(1.0, _SIDE / max(height, width))
        size = max(1, round(scale * height)), max(1, round(scale * width))
        self.sizes.append(size)
        rows, columns = (
            paddle.to_tensor(((np.arange(n) + 0.5) * side / n).astype(np.int64))
            for n, side in zip(size, (height, width), strict=True)
        )
        reduced = answers.gather(rows, axis=0).gather(columns, axis=1).astype("int32")
        tile = paddle.full([1, _SIDE, _SIDE], -1, "int32")
        tile[:, : size[0], : size[1]] = reduced
        # The best of those that are kept gives its place to a worse one.
        best = self.scores.argmax().reshape([1])
        is_worse = (score < self.scores.gather(best)) & (wrong > 0)
        place = paddle.full([1], len(self.sizes) - 1, "int64")
        self.scores = _replaced(self.scores, best, score, is_worse)
        self.places = _replaced(self.places, best, place, is_worse)
        self.tiles = _replaced(self.tiles, best, tile, is_worse)

    def gather(self) -> list[Answer]:
        """Returns the worst answers of all ranks, the worst first. Every rank has to call it."""
        scores = self.scores.numpy()
        places = self.places.numpy()
        tiles = self.tiles.numpy()
        own = []
        for slot in np.flatnonzero(np.isfinite(scores)).tolist():
            place = int(places[slot])
            # Rank r of R has every R-th image from the r-th on (``EvalBatchSampler``).
            index = rank() + place * world_size()
            own.append((float(scores[slot]), index, tiles[slot], self.sizes[place]))
        answers = [Answer(*one) for of_rank in all_gather(own) for one in of_rank]
        return sorted(answers, key=lambda answer: answer[:2])[:MOST]


def _replaced(
    values: paddle.Tensor, place: paddle.Tensor, value: paddle.Tensor, condition: paddle.Tensor
) -> paddle.Tensor:
    """Returns values [n, ...] with ``value`` [1, ...] at a place [1], if a condition [1] holds."""
    kept = values.gather(place)
    holds = condition.reshape([1] * kept.ndim).expand_as(kept)
    return values.scatter(place, paddle.where(holds, value, kept))


def draw_answers(
    file: Path, answers: list[Answer], names: list[str], dataset: ImageDataset, column: str
) -> None:
    """Draws a row for each answer: the image, its mask and the answer, under the image's name.

    Args:
        file: the PNG that is written.
        names: of the answers' images.
        column: the dataset's column of masks.

    Raises:
        OSError: the file can't be written.
    """
    # Matplotlib's import takes a third of a second, and is needed once, at a run's end.
    from training.pages.names import shorten
    from training.pages.plotting import figure, figure_png

    ignored = dataset.masks[column].ignored
    rows = []
    pixels: dict[int, int] = {}
    for answer in answers:
        pictures = _pictures(dataset, column, answer)
        for indices in pictures[1:]:
            for index, count in zip(*np.unique(indices, return_counts=True), strict=True):
                pixels[int(index)] = pixels.get(int(index), 0) + int(count)
        rows.append(pictures)
    drawn = figure(7.5, 2.5 * len(rows) + 0.6)
    for row, (answer, (image, label, found)) in enumerate(zip(answers, rows, strict=True)):
        colored = (image, _colored(label, ignored), _colored(found, ignored))
        for place, (head, shown) in enumerate(zip(_HEADS, colored, strict=True)):
            axis = drawn.add_subplot(len(rows), 3, 3 * row + place + 1)
            axis.imshow(shown, interpolation="nearest")
            axis.set(xticks=[], yticks=[])
            if place == 0:
                axis.set_title(shorten(names[row], 40), fontsize=8, loc="left")
            elif place == 2:
                axis.set_title(f"mIoU {answer.score:.2f} %", fontsize=8, loc="right")
            axis.set_xlabel(head, fontsize=8)
    order = sorted(pixels, key=lambda index: -pixels[index])
    handles = _legend(
        drawn.axes[0], [index for index in order if index >= 0], ignored, dataset.classes
    )
    if handles:
        drawn.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8)
    with writing_whole(file, "wb") as out:
        out.write(figure_png(drawn))


def _pictures(
    dataset: ImageDataset, column: str, answer: Answer
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns an image [h, w, 3], and its mask and the answer [h, w], of the answer's size.

    What can't be read any more is white, or ignored.
    """
    height, width = answer.size
    found = answer.tile[:height, :width]
    picture: Any = Image.new("RGB", (width, height), "white")
    label = np.full((height, width), dataset.masks[column].ignored)
    try:
        image = dataset.image(answer.index)
        picture = image.picture() if isinstance(image, Bands) else image
        mask = dataset.mask(column, answer.index)
        label = np.asarray(mask.resize((width, height), Image.Resampling.NEAREST)).astype(int)
    except RunError:
        pass
    resized = picture.convert("RGB").resize((width, height), Image.Resampling.BOX)
    return np.asarray(resized), label, found


def _colored(indices: np.ndarray, ignored: int) -> np.ndarray:
    """Returns the colours [h, w, 3] of indices [h, w]; ignored ones are white."""
    colors = class_colors(max(int(indices.max()), ignored) + 1)
    colors[ignored] = 255
    return colors[indices]


def _legend(axis: Any, order: list[int], ignored: int, classes: Any) -> list[Any]:
    """Returns what a legend shows: a square for each class, of those that have most pixels."""
    from training.pages.names import shorten

    handles = []
    for index in order[:_LEGEND]:
        name = "ignored" if index == ignored else class_name(classes, index)
        color = _colored(np.array([index]), ignored)[0] / 255
        handles += axis.plot([], [], "s", color=color, label=shorten(name, 20), mec="#888888")
    return handles
