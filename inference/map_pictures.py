"""Writes segmentation maps: PNGs of class indices, or images with coloured classes and a legend."""

import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from errors import RunError, printable
from inference.captions import fitting_text, write_text
from inference.maps import Areas, PixelMap, areas
from inference.pictures import Pictures
from inference.prediction_writers import reason, writing
from inference.predictor import Failure
from loading.files import Paths
from loading.mask_tables import class_colors
from loading.transforms import Bands
from settings.configuration import Configuration
from training.pages.panels import overlay

# Pixels of a legend: its width, its line, the square of a colour.
_LEGEND = 240
_LINE = 20
_SQUARE = 12
_GAP = 8
# Classes in a legend.
_MOST = 30
# The most letters of an image's name in the name of its file.
_NAME = 80


def mask_image(outputs: np.ndarray, classes: int) -> Image.Image:
    """Returns the image of indices [H, W] for a PNG: with the classes' palette, or of more than 256
    classes 16-bit grey.
    """
    if classes > 256:
        return Image.fromarray(outputs.astype(np.uint16))
    image = Image.fromarray(outputs.astype(np.uint8))
    image.putpalette(class_colors(256).tobytes())
    return image


def with_legend(picture: Image.Image, found: Areas) -> Image.Image:
    """Returns a picture with the colours, names and percentages of its classes at its right."""
    shown = min(len(found.outputs), _MOST)
    left = len(found.outputs) - shown
    height = max(picture.height, _GAP + _LINE * (shown + (left > 0)))
    paper = Image.new("RGB", (picture.width + _LEGEND, height), "white")
    paper.paste(picture)
    draw = ImageDraw.Draw(paper)
    column = picture.width + _GAP
    for row in range(shown):
        top = _GAP + row * _LINE
        color = tuple(class_colors(found.outputs[row] + 1)[-1].tolist())
        draw.rectangle(
            (column, top, column + _SQUARE, top + _SQUARE), fill=color, outline="#888888"
        )
        text = f"{found.percents[row]:.1f} %  {printable(found.classes[row], 200)}"
        text = fitting_text(draw, text, _LEGEND - _SQUARE - 3 * _GAP)
        write_text(draw, column + _SQUARE + _GAP, top - 2, text, "black")
    if left:
        write_text(draw, column, _GAP + shown * _LINE - 2, f"and {left} more", "black")
    return paper


class Folder:
    """Writes a file for each image into a folder: masks, or overlays.

    A file has its image's name. Where several images have the same one, numbers are put before them.

    Args:
        kind: "masks" or "overlays".
        folder: the folder to make and to write into.
        path: its name in errors.
        classes: the names of the outputs.
    """

    def __init__(
        self,
        kind: str,
        config: Configuration,
        images: Paths,
        folder: Path,
        path: Path,
        classes: Sequence[str],
    ) -> None:
        self.kind = kind
        self.pictures = Pictures(config, images)
        self.outputs = config.MODEL.NUM_CLASSES
        self.folder = folder
        self.path = path
        self.classes = classes
        self.place = 0
        self.digits = len(str(len(images)))
        stems = Counter(_stem(images[place]).lower() for place in range(len(images)))
        self.are_numbered = len(stems) < len(images)
        with writing(str(path)):
            folder.mkdir()

    def write(self, outcome: PixelMap | Failure) -> None:
        """Writes the file of the next image. One that can't be read has an overlay with its error,
        and no mask.
        """
        place = self.place
        self.place += 1
        stem = _stem(outcome.name)
        if self.are_numbered:
            stem = f"{self.place:0{self.digits}}-{stem}"
        if self.kind == "masks":
            if isinstance(outcome, PixelMap):
                self._save(mask_image(outcome.outputs, self.outputs), f"{stem}.png")
        else:
            self._save(self._overlay(place, outcome), f"{stem}.jpg")

    def _overlay(self, place: int, outcome: PixelMap | Failure) -> Image.Image:
        problem = reason(outcome) if isinstance(outcome, Failure) else ""
        image: Any = None
        if isinstance(outcome, PixelMap):
            try:
                image = self.pictures.image(place)
            except RunError as error:
                problem = str(error)
        if problem:
            paper = Image.new("RGB", (2 * _LEGEND, 3 * _LINE), "#eeeeee")
            draw = ImageDraw.Draw(paper)
            write_text(draw, _GAP, _LINE, fitting_text(draw, problem, 2 * _LEGEND - 16), "#b00020")
            return paper
        assert isinstance(outcome, PixelMap)
        if isinstance(image, Bands):
            image = image.picture()
        picture = overlay(image, outcome.outputs)
        return with_legend(picture, areas(outcome, self.classes))

    def _save(self, picture: Image.Image, name: str) -> None:
        with writing(str(self.path)):
            picture.save(self.folder / name, quality=90)


def _stem(name: str) -> str:
    """Returns an image's name as the stem of a file."""
    return re.sub(r"[^\w.-]", "_", printable(Path(os.path.basename(name)).stem, _NAME))
