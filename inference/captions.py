"""Pictures of images with their classes below them, in files or on one sheet."""

import functools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from errors import InputError, RunError, printable
from inference.pictures import Pictures
from inference.prediction_writers import Outcome, reason, writing
from inference.predictor import Failure
from loading.files import Paths
from loading.transforms import Bands
from settings.options import Configuration
from training.pages.fonts import file_for

SUFFIXES = (".png", ".jpg", ".jpeg")  # of a sheet
MOST = 400  # images on a sheet
SHEET_SIDE = 224  # pixels of a tile on a sheet
# pixels
_SIDE = 384
_GAP = 8
_FONT = 14
_LINE = _FONT + 5
_RISE = _FONT - 1  # from a line's top to where its letters stand
_NAME = 40  # letters of a file's name
_PAPER = "white"
_INK = "black"
_FAINT = "#666666"
_WRONG = "#b00020"


class Captioned:
    """Draws answers. EXIF turns an image where it does for the model, by DATA.EXIF_ORIENTATION: it
    is what that saw.

    Args:
        side: pixels of the image's longer side.
        top: classes below it, at most.
    """

    def __init__(self, config: Configuration, images: Paths, side: int, top: int) -> None:
        self.pictures = Pictures(config, images)
        self.side = side
        self.top = top
        self.place = 0

    def draw_next(self, outcome: Outcome) -> Image.Image:
        """Returns the next image with its name, and its classes or its error."""
        place = self.place
        self.place += 1
        if isinstance(outcome, Failure):
            return tile(reason(outcome), self.side, outcome.name, [], self.top)
        found = list(zip(outcome.classes, outcome.probabilities, strict=True))[: self.top]
        rows = [(f"{100 * share:.1f} %", name) for name, share in found]
        return tile(small(self.pictures, place, self.side), self.side, outcome.name, rows, self.top)


class Folder:
    """A file for each image in ``folder``: its place from 1, and its name."""

    def __init__(
        self, config: Configuration, images: Paths, folder: Path, path: Path, top: int
    ) -> None:
        self.captioned = Captioned(config, images, _SIDE, top)
        self.folder = folder
        self.path = path
        self.digits = len(str(len(images)))
        with writing(str(path)):
            folder.mkdir()

    def write(self, outcome: Outcome) -> None:
        paper = self.captioned.draw_next(outcome)
        stem = re.sub(r"[^\w.-]", "_", printable(Path(os.path.basename(outcome.name)).stem, _NAME))
        with writing(str(self.path)):
            paper.save(
                self.folder / f"{self.captioned.place:0{self.digits}}-{stem}.jpg", quality=90
            )


class Sheet:
    """All images side by side, in one picture.

    Raises:
        InputError: there are too many.
    """

    def __init__(self, config: Configuration, images: Paths, top: int) -> None:
        if len(images) > MOST:
            raise InputError(
                f"-output: one picture holds up to {MOST} images, found {len(images)}; give a folder"
            )
        self.captioned = Captioned(config, images, SHEET_SIDE, top)
        self.papers = []
        self.count = len(images)

    def write(self, outcome: Outcome) -> None:
        self.papers.append(self.captioned.draw_next(outcome))

    def save(self, file: Path, path: Path) -> None:
        """Writes the sheet to ``file``, in the format that ``path`` names."""
        across = next(n for n in range(1, MOST) if n * n * 3 >= self.count * 4 or n == self.count)
        sheet = side_by_side(self.papers, across)
        with writing(str(path)), open(file, "xb") as out:
            sheet.save(out, "PNG" if path.suffix.lower() == ".png" else "JPEG", quality=90)
            out.flush()
            os.fsync(out.fileno())


def small(pictures: Pictures, place: int, side: int) -> Image.Image | str:
    """Returns an image at a tile's size, or what is wrong with it."""
    try:
        image: Any = pictures.image(place)
        image = image.picture() if isinstance(image, Bands) else image
    except RunError as error:
        return str(error)
    image.thumbnail((side, side))  # in its place: a copy of it may take 400 MB
    times = side // max(image.size)  # so that one sees something of a digit of 8 x 8
    return image.resize((times * image.width, times * image.height), Image.Resampling.NEAREST)


def tile(
    image: Image.Image | str, side: int, name: str, rows: Sequence[tuple[str, str]], room: int
) -> Image.Image:
    """Returns a picture, [side + caption] x side pixels, of an image, its name, and rows of a
    figure and a text.

    Args:
        image: what ``small`` returned.
        room: rows that there is room for.
    """
    paper = Image.new("RGB", (side, side + _LINE * (1 + room) + _GAP), _PAPER)
    draw = ImageDraw.Draw(paper)
    if isinstance(image, Image.Image):
        paper.paste(image, ((side - image.width) // 2, side - image.height))
    else:
        draw.rectangle((0, 0, side - 1, side - 1), fill="#eeeeee")
        for row, line in enumerate(_wrapped_lines(draw, image, side - 2 * _GAP)):
            _write(draw, _GAP, _GAP + row * _LINE, line, _WRONG)
    name = _fitting_text(draw, printable(os.path.basename(name), 4000), side, from_left=True)
    _write(draw, 0, side + 2, name, _FAINT)
    figures = _length(draw, "100.0 %  ")
    for row, (figure, text) in enumerate(rows, 1):
        top = side + 2 + row * _LINE
        _write(draw, figures - _length(draw, f"{figure}  "), top, figure, _INK)
        _write(draw, figures, top, _fitting_text(draw, printable(text, 4000), side - figures), _INK)
    return paper


def side_by_side(tiles: Sequence[Image.Image], across: int) -> Image.Image:
    """Returns pictures of one size side by side, ``across`` in a row."""
    width, height = (side + _GAP for side in tiles[0].size)
    sheet = Image.new(
        "RGB", (across * width + _GAP, -(-len(tiles) // across) * height + _GAP), _PAPER
    )
    for place, paper in enumerate(tiles):
        sheet.paste(paper, (_GAP + place % across * width, _GAP + place // across * height))
    return sheet


@functools.cache
def _font(file: str) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(file, _FONT)


def _write(draw: ImageDraw.ImageDraw, left: float, top: float, text: str, colour: str) -> None:
    draw.text((left, top + _RISE), text, colour, _font(file_for(text)), "ls")


def _length(draw: ImageDraw.ImageDraw, text: str) -> float:
    return draw.textlength(text, _font(file_for(text)))


def _fitting_text(
    draw: ImageDraw.ImageDraw, text: str, room: float, from_left: bool = False
) -> str:
    """The text, or as much of it as there is room for: its end where it is cut from the left."""
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
    return [_fitting_text(draw, line, room) for line in lines]
