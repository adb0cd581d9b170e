"""Annotated pictures, whatever their format is, and the folder of images and masks made of them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from PIL import Image
from tqdm import tqdm

from errors import IMAGE, Allowance, InputError, Unreadable, counted, printable, reading
from launch.files import writing_whole
from loading.class_names import FILE, read_class_names
from loading.files import contents
from loading.mask_tables import MOST_MASK_CLASSES, mask_kind
from loading.splits import validation
from loading.transforms import largest_file, opened_image
from loading.transforms.orientation import TAG, TURNS, orientation_of
from settings.plain import parsed_json, whole_file

# The class of pixels that nothing was drawn on, as it is written and as LabelMe calls it.
BACKGROUND = "background"
_BACKGROUNDS = (BACKGROUND, "_background_")
# LabelMe's name for what counts nowhere.
IGNORED = "__ignore__"
# Memory that JSON may take, in bytes for each of its own. A file of COCO's has mostly coordinates, of
# which one takes 32 bytes for 7.
_JSON_BYTES = 60
_LARGEST_JSON = 4 << 30
# How far outside of its image an outline may reach, in sizes of the image.
_OUTSIDE = 1


class Picture(NamedTuple):
    """An annotated picture.

    Attributes:
        name: its path in the new folders, without a suffix.
        image: the file of the image.
        part: "train" or "val"; "": it is drawn at random.
        source: where its annotation is, in the words of the format's own reader.
    """

    name: str
    image: Path
    part: str
    source: Any


class Indices(NamedTuple):
    """The indices that masks are drawn with.

    Attributes:
        of: that of each class by its label.
        unlabelled: that of pixels that nothing is drawn on.
        ignored: that of pixels that count nowhere.
        dtype: of the masks' files.
    """

    of: Mapping[str, int]
    unlabelled: int
    ignored: int
    dtype: Any

    def index(self, label: str, where: str) -> int:
        """Returns the index of a label; raises InputError with ``where`` for an unknown one."""
        if label not in self.of:
            raise InputError(
                f"{where}: the label '{printable(label, 60)}' isn't in -classes; add it, or use"
                f" {IGNORED} instead"
            )
        return self.of[label]


class Source(Protocol):
    """Annotations of a format.

    Attributes:
        as_shown: annotations are of pictures as their EXIF turns them. False: of either.
    """

    as_shown: bool

    def labels(self) -> Sequence[str]:
        """Returns the labels that there are, in the order of their classes."""
        ...

    def pictures(self) -> Sequence[Picture]:
        """Returns the annotated pictures."""
        ...

    def mask(self, picture: Picture, size: tuple[int, int], indices: Indices) -> np.ndarray:
        """Returns a picture's mask, [H, W].

        Args:
            size: (width, height) of its image, as it is stored.
        """
        ...


def annotation_json(path: Path) -> Any:
    """Returns the content of a JSON file. Call it within ``errors.reading``."""
    text = whole_file(path, _LARGEST_JSON)
    allowance = Allowance(len(text))
    allowance.left += _JSON_BYTES * len(text)
    return parsed_json(text, allowance)


def checked_points(points: Any, size: tuple[int, int], least: int) -> list[tuple[float, float]]:
    """Returns an outline's points (x, y), in pixels.

    Args:
        size: (width, height) of the image.
        least: points that there have to be.

    Raises:
        Unreadable: they aren't points, too few, or far outside of the image.
    """
    if not isinstance(points, list) or len(points) < least:
        raise Unreadable(f"an outline of fewer than {least} points")
    checked = []
    for point in points:
        if not isinstance(point, list | tuple) or len(point) != 2:
            raise Unreadable("an outline whose points aren't pairs of numbers")
        for value, side in zip(point, size, strict=True):
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise Unreadable("an outline whose points aren't pairs of numbers")
            if not -_OUTSIDE * side <= value <= (1 + _OUTSIDE) * side:
                raise Unreadable(
                    f"an outline at {printable(str(value), 40)}, outside the image of"
                    f" {size[0]} x {size[1]} pixels"
                )
        checked.append((float(point[0]), float(point[1])))
    return checked


def checked_size(width: Any, height: Any, size: tuple[int, int]) -> tuple[int, int]:
    """Returns the (width, height) that an annotation gives of its image.

    Args:
        size: (width, height) of the image, as it is stored. Its EXIF may turn it.

    Raises:
        Unreadable: it is another.
    """
    if (width, height) not in (size, size[::-1]):
        given = f"{printable(str(width), 20)} x {printable(str(height), 20)}"
        raise Unreadable(
            f"it is for an image of {given} pixels, but the image has {size[0]} x {size[1]}"
        )
    return width, height


def indices_of(source: Source, file: Path | None) -> tuple[list[str], Indices]:
    """Returns the class names, and the indices that masks are drawn with.

    Args:
        file: the class names, one a line; None: the background and the labels that there are.

    Raises:
        InputError: there are no labels, or too many.
    """
    if file is None:
        others = (*_BACKGROUNDS, IGNORED)
        names = [BACKGROUND, *(label for label in source.labels() if label not in others)]
    else:
        listed = read_class_names(file)
        names = [BACKGROUND if name in _BACKGROUNDS else name for name in listed if name != IGNORED]
    if len(set(names)) < len(names) or not 1 < len(names) <= MOST_MASK_CLASSES:
        raise InputError(
            f"{file or 'the annotations'}: found {len(set(names))} different classes in {len(names)},"
            f" expected 2 to {MOST_MASK_CLASSES}"
        )
    kind = mask_kind(len(names))
    of = {name: index for index, name in enumerate(names)} | {IGNORED: kind.ignored}
    unlabelled = of.get(BACKGROUND, kind.ignored)
    of |= dict.fromkeys(_BACKGROUNDS, unlabelled)
    dtype = np.uint8 if kind.dtype == "uint8" else np.uint16
    return names, Indices(of, unlabelled, kind.ignored, dtype)


def write_folder(
    source: Source, classes: Path | None, output: Path, share: float, seed: int, most: int
) -> str:
    """Writes images, masks and classes.txt to an empty folder. Returns what was written, in words.

    Args:
        classes: as of ``indices_of``.
        share: of the pictures for validation, if the source doesn't say which these are.
        seed: of their choice.
        most: pixels that an image may have.

    Raises:
        InputError: an annotation or an image can't be read.
    """
    names, indices = indices_of(source, classes)
    pictures = source.pictures()
    parts = [picture.part for picture in pictures]
    if not any(parts) and share:
        zeros = np.zeros(len(pictures), np.int64)
        chosen = validation([picture.name for picture in pictures], zeros, share, seed)
        parts = ["val" if is_val else "train" for is_val in chosen]
    pixels = np.zeros(len(names), np.int64)
    unclear = 0
    progress = tqdm(pictures, "masks", disable=None, dynamic_ncols=True)
    for picture, part in zip(progress, parts, strict=True):
        mask, is_clear = _write_pair(source, picture, output, part or "train", indices, most)
        unclear += not is_clear
        pixels += np.bincount(mask.ravel(), minlength=len(names))[: len(names)]
    with writing_whole(output / FILE) as file:
        file.write("".join(f"{name}\n" for name in names))
    counts = [parts.count("val"), len(parts) - parts.count("val")]
    said = f"{counts[1]:,} training and {counts[0]:,} validation images of {len(names)} classes"
    if indices.unlabelled == indices.ignored:
        said += f"; without a class {BACKGROUND}, pixels without an annotation are ignored"
    if empty := [name for name, count in zip(names, pixels, strict=True) if not count]:
        said += f"; {counted(len(empty), 'class has', 'classes have')} no pixel, such as {empty[0]}"
    if unclear:
        said += (
            f"; {counted(unclear, 'image has', 'images have')} an EXIF rotation, and it is"
            " unknown whether"
            " the annotations follow it: set DATA.EXIF_ORIENTATION True if they do,"
            " and check them by tools/show_batch.py"
        )
    return said


def _write_pair(
    source: Source, picture: Picture, output: Path, part: str, indices: Indices, most: int
) -> tuple[np.ndarray, bool]:
    """Writes an image, as it is, and its mask.

    A mask is stored as its image is, with the same note of EXIF. So both fit each other, whether
    DATA.EXIF_ORIENTATION turns them or not. Where it is unknown which way it was annotated, it has
    no note, and the key decides.

    Returns:
        The mask, and whether it is clear which way it was annotated.
    """
    with reading(picture.image, IMAGE, "; repair it, or remove its annotation"):
        data = contents(picture.image, largest_file(most))
        size = opened_image(data, most)[0].size
    mask = source.mask(picture, size, indices)
    annotated = mask.shape[::-1]
    # A picture may be turned by its EXIF, and be annotated as it is shown.
    if annotated not in (size, size[::-1]):
        raise InputError(
            f"{picture.image}: it has {size[0]} x {size[1]} pixels, but its annotation has"
            f" {annotated[0]} x {annotated[1]}; annotate this image"
        )
    orientation = orientation_of(data)
    turn = TURNS[orientation]
    fits_stored = annotated == size
    fits_shown = annotated == turn.size(size)
    is_turned = orientation != 1
    is_clear = not is_turned or source.as_shown or fits_stored != fits_shown
    stored = Image.fromarray(mask.astype(indices.dtype))
    if fits_shown and (source.as_shown or not fits_stored):
        stored = turn.back(stored)
    image = output / "images" / part / f"{picture.name}{picture.image.suffix.lower()}"
    image.parent.mkdir(parents=True, exist_ok=True)
    with writing_whole(image, "wb") as file:
        file.write(data)
    note = b""
    if is_turned and is_clear:
        exif = Image.Exif()
        exif[TAG] = orientation
        note = exif.tobytes()
    png = output / "masks" / part / f"{picture.name}.png"
    png.parent.mkdir(parents=True, exist_ok=True)
    with writing_whole(png, "wb") as file:
        stored.save(file, "PNG", exif=note)
    return mask, is_clear
