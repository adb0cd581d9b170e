"""Draws images with their predicted classes below them: a file for each image, or one sheet."""

import functools
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from errors import InputError, RunError, printable
from inference.pictures import Pictures
from inference.prediction_writers import reason, writing
from inference.predictor import Failure, Prediction
from loading.files import Paths
from loading.transforms import Bands
from settings.configuration import Configuration
from training.pages.fonts import file_for

# The endings of a sheet, the largest number of its images, and the pixels along a tile's side.
SUFFIXES = (".png", ".jpg", ".jpeg")
MOST = 400
SHEET_SIDE = 224
# The pixels along the side of an image in a file of its own.
_SIDE = 384
# The pixels between tiles, of a font, and of a line of text.
_GAP = 8
_FONT = 14
_LINE = _FONT + 5
# The pixels from the top of a line to the baseline of its letters.
_BASELINE = _FONT - 1
# The most letters of an image's name in the name of its file.
_NAME = 40
_PAPER = "white"
_INK = "black"
_FAINT = "#666666"
_WRONG = "#b00020"


class Captioned:
    """Draws images with their predictions, rotated by EXIF if the model sees them so.

    Args:
        side: the pixels of an image's longer side.
        top: the most classes below an image.
    """

    def __init__(self, config: Configuration, images: Paths, side: int, top: int) -> None:
        self.pictures = Pictures(config, images)
        self.side = side
        self.top = top
        self.place = 0

    def draw_next(self, outcome: Prediction | Failure) -> Image.Image:
        """Returns the next image with its name, and its classes or its error."""
        place = self.place
        self.place += 1
        if isinstance(outcome, Failure):
            return tile(reason(outcome), self.side, outcome.name, [], self.top)
        ranked = zip(outcome.classes, outcome.probabilities, strict=True)
        rows = [(f"{100 * probability:.1f} %", name) for name, probability in ranked]
        if len(rows) > self.top:
            # A set of classes may have more than there is room for.
            rest = len(rows) - self.top + 1
            rows = [*rows[: self.top - 1], ("", f"and {rest} more")]
        if outcome.unknown:
            rows = [("", "unknown: none of the classes")]
        return tile(small(self.pictures, place, self.side), self.side, outcome.name, rows, self.top)


class Folder:
    """Writes a file for each image into a folder, named by the image's number and name.

    Args:
        folder: the folder to make and to write into.
        path: its name in errors.
        top: the most classes below an image.
    """

    def __init__(
        self, config: Configuration, images: Paths, folder: Path, path: Path, top: int
    ) -> None:
        self.captioned = Captioned(config, images, _SIDE, top)
        self.folder = folder
        self.path = path
        self.digits = len(str(len(images)))
        with writing(str(path)):
            folder.mkdir()

    def write(self, outcome: Prediction | Failure) -> None:
        paper = self.captioned.draw_next(outcome)
        stem = re.sub(r"[^\w.-]", "_", printable(Path(os.path.basename(outcome.name)).stem, _NAME))
        number = f"{self.captioned.place:0{self.digits}}"
        with writing(str(self.path)):
            paper.save(self.folder / f"{number}-{stem}.jpg", quality=90)


class Sheet:
    """Draws all images on one sheet.

    Raises:
        InputError: there are more than MOST.
    """

    def __init__(self, config: Configuration, images: Paths, top: int) -> None:
        if len(images) > MOST:
            raise InputError(
                f"-output: one picture shows at most {MOST} images, found {len(images)}; use a"
                " folder"
            )
        self.captioned = Captioned(config, images, SHEET_SIDE, top)
        self.papers = []
        self.count = len(images)

    def write(self, outcome: Prediction | Failure) -> None:
        self.papers.append(self.captioned.draw_next(outcome))

    def save(self, file: Path, path: Path) -> None:
        """Writes the sheet to ``file``, in the format that ``path`` names."""
        # A sheet is about a third wider than high, so a row has sqrt(4 / 3 * count) images.
        across = min(self.count, math.ceil(math.sqrt(self.count * 4 / 3)))
        sheet = side_by_side(self.papers, across)
        with writing(str(path)), open(file, "xb") as out:
            sheet.save(out, "PNG" if path.suffix.lower() == ".png" else "JPEG", quality=90)
            out.flush()
            os.fsync(out.fileno())


def small(pictures: Pictures, place: int, side: int) -> Image.Image | str:
    """Returns an image at a tile's size, or the error of an image that can't be read."""
    try:
        image: Any = pictures.image(place)
        if isinstance(image, Bands):
            image = image.picture()
    except RunError as error:
        return str(error)
    # It is resized in place, because a copy may take 400 MB.
    image.thumbnail((side, side))
    # Small images, such as digits of 8 x 8 pixels, are enlarged.
    times = side // max(image.size)
    return image.resize((times * image.width, times * image.height), Image.Resampling.NEAREST)


def tile(
    image: Image.Image | str, side: int, name: str, rows: Sequence[tuple[str, str]], room: int
) -> Image.Image:
    """Returns a picture of an image with its name and rows of text below it.

    Args:
        image: what ``small`` returned.
        side: the picture's width in pixels, and the height of the image.
        rows: pairs of a number and a text.
        room: the number of rows for which there is room.
    """
    paper = Image.new("RGB", (side, side + _LINE * (1 + room) + _GAP), _PAPER)
    draw = ImageDraw.Draw(paper)
    if isinstance(image, Image.Image):
        paper.paste(image, ((side - image.width) // 2, side - image.height))
    else:
        draw.rectangle((0, 0, side - 1, side - 1), fill="#eeeeee")
        for row, line in enumerate(_wrapped_lines(draw, image, side - 2 * _GAP)):
            write_text(draw, _GAP, _GAP + row * _LINE, line, _WRONG)
    name = fitting_text(draw, printable(os.path.basename(name), 4000), side, from_left=True)
    write_text(draw, 0, side + 2, name, _FAINT)
    # Numbers are aligned at their right, texts at their left.
    text_left = _length(draw, "100.0 %  ")
    for row, (number, text) in enumerate(rows, 1):
        top = side + 2 + row * _LINE
        text = fitting_text(draw, printable(text, 4000), side - text_left)
        write_text(draw, text_left - _length(draw, f"{number}  "), top, number, _INK)
        write_text(draw, text_left, top, text, _INK)
    return paper


def side_by_side(tiles: Sequence[Image.Image], across: int) -> Image.Image:
    """Returns a picture of pictures of the same size, ``across`` of them in a row."""
    width, height = (side + _GAP for side in tiles[0].size)
    down = math.ceil(len(tiles) / across)
    sheet = Image.new("RGB", (across * width + _GAP, down * height + _GAP), _PAPER)
    for place, paper in enumerate(tiles):
        row, column = divmod(place, across)
        sheet.paste(paper, (_GAP + column * width, _GAP + row * height))
    return sheet


@functools.cache
def _font(file: str) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(file, _FONT)


def write_text(draw: ImageDraw.ImageDraw, left: float, top: float, text: str, colour: str) -> None:
    """Writes a line of text whose top left corner is at a place."""
    draw.text((left, top + _BASELINE), text, colour, _font(file_for(text)), "ls")


def _length(draw: ImageDraw.ImageDraw, text: str) -> float:
    return draw.textlength(text, _font(file_for(text)))


def fitting_text(draw: ImageDraw.ImageDraw, text: str, room: float, from_left: bool = False) -> str:
    """Returns the text, cut to the width ``room`` in pixels, with "..." at the end that is cut."""
    text = text[-200:] if from_left else text[:200]
    if _length(draw, text) <= room:
        return text
    while text and _length(draw, f"{text}...") > room:
        text = text[1:] if from_left else text[:-1]
    return f"...{text}" if from_left else f"{text}..."


def _wrapped_lines(draw: ImageDraw.ImageDraw, text: str, room: float) -> list[str]:
    lines = [""]
    for word in text.split():
        if _length(draw, f"{lines[-1]} {word}") > room and lines[-1]:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return [fitting_text(draw, line, room) for line in lines]
