"""LabelMe's annotations: a JSON file for each image, with outlines and their labels."""

import functools
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from errors import Allowance, InputError, Unreadable, printable, reading
from loading.annotations import find_image
from loading.class_names import check_name
from loading.layout import describe_folder, is_leftover
from tools.annotations.pictures import (
    Indices,
    Picture,
    annotation_json,
    checked_points,
    checked_size,
)

# A filled outline takes time for each of its points in each row of the image.
_MOST_WORK = 1_000_000_000
_ADVICE = "; repair it, or annotate the image again"


class LabelMe:
    """The annotations of a folder and the folders below it.

    Args:
        folder: of the JSON files. Each names its image, relative to itself.

    Raises:
        InputError: there are none, or one can't be read.
    """

    # LabelMe shows pictures as their EXIF turns them.
    as_shown = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = [
            file
            for file in sorted(folder.rglob("*.json"))
            if not any(map(is_leftover, file.relative_to(folder).parts))
        ]
        if not self.files:
            raise InputError(
                f"{folder}: no JSON file of LabelMe's in it or below it; it contains"
                f" {describe_folder(folder)}"
            )

    @functools.cached_property
    def _read(self) -> tuple[list[str], list[Picture]]:
        """The labels that there are, sorted, and the pictures."""
        labels: set[str] = set()
        pictures = []
        for file in self.files:
            with reading(file, "an annotation of LabelMe's", _ADVICE):
                content = _content(file)
                labels.update(shape["label"] for shape in content["shapes"])
            image = _image_of(file, content)
            name = os.path.splitext(file.relative_to(self.folder))[0]
            pictures.append(Picture(name, image, "", file))
        return sorted(labels), pictures

    def labels(self) -> Sequence[str]:
        return self._read[0]

    def pictures(self) -> Sequence[Picture]:
        return self._read[1]

    def mask(self, picture: Picture, size: tuple[int, int], indices: Indices) -> np.ndarray:
        """Returns the outlines drawn over each other in their order, as LabelMe draws them."""
        with reading(picture.source, "an annotation of LabelMe's", _ADVICE):
            content = _content(picture.source)
            size = checked_size(content.get("imageWidth"), content.get("imageHeight"), size)
            # Pillow has no integers of 16 bits to draw with.
            image = Image.new("I", size, indices.unlabelled)
            draw = ImageDraw.Draw(image)
            allowance = Allowance(picture.source.stat().st_size)
            for shape in content["shapes"]:
                index = indices.index(shape["label"], str(picture.source))
                _draw(draw, shape, size, index)
                # There may be many, each of which takes the time of the whole image.
                allowance.take(0)
            return np.asarray(image)


def _content(file: Path) -> dict[str, Any]:
    """Returns the content of a file; raises Unreadable where it is of another form."""
    content = annotation_json(file)
    if type(content) is not dict or type(content.get("shapes")) is not list:
        raise Unreadable('it has no list of "shapes"; LabelMe writes such files')
    for shape in content["shapes"]:
        if type(shape) is not dict or type(shape.get("label")) is not str or not shape["label"]:
            raise Unreadable("one of its shapes has no label")
        check_name(shape["label"], "label")
    return content


def _image_of(file: Path, content: dict[str, Any]) -> Path:
    """Returns the file of an annotation's image; raises InputError where it isn't there."""
    path = content.get("imagePath")
    if type(path) is str and path and "\0" not in path:
        image = file.parent / path.replace("\\", "/")
        if image.is_file():
            return image
    beside = find_image(file.parent, file.stem)
    if beside is None:
        raise InputError(
            f"{file}: its image '{printable(str(path), 80)}' doesn't exist; put it next to the"
            " annotation"
        )
    return beside


def _draw(draw: ImageDraw.ImageDraw, shape: dict[str, Any], size: Any, index: int) -> None:
    """Draws one of a file's shapes; raises Unreadable where it has no area."""
    kind = shape.get("shape_type") or "polygon"
    if kind == "polygon":
        points = checked_points(shape.get("points"), size, least=3)
        if len(points) * size[1] > _MOST_WORK:
            raise Unreadable(
                f"it has an outline of {len(points)} points, too many for an image of {size[1]} rows"
            )
        draw.polygon(points, fill=index, outline=index)
    elif kind == "rectangle":
        (left, top), (right, bottom) = _two_points(shape, size)
        box = (min(left, right), min(top, bottom), max(left, right), max(top, bottom))
        draw.rectangle(box, fill=index, outline=index)
    elif kind == "circle":
        (x, y), edge = _two_points(shape, size)
        radius = math.dist((x, y), edge)
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=index, outline=index)
    else:
        raise Unreadable(
            f"it has a shape of the type '{printable(str(kind), 40)}', expected polygon, rectangle or"
            " circle"
        )


def _two_points(shape: dict[str, Any], size: Any) -> list[tuple[float, float]]:
    points = checked_points(shape.get("points"), size, least=2)
    if len(points) > 2:
        raise Unreadable(f"it has a {shape['shape_type']} of {len(points)} points, expected 2")
    return points
