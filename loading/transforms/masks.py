"""Masks: images that hold an index for each pixel, such as that of a class.

An index is never blended, so a mask is resampled by its nearest pixel. Its colours, if its file has
a palette, have no meaning.
"""

from typing import NamedTuple

import numpy as np
from PIL import Image

from errors import Unreadable
from loading.mask_tables import MaskTable
from loading.transforms.decode import Broken, readable
from loading.transforms.formats import decoded, opened_image
from loading.transforms.orientation import TURNS, orientation_of

# How a mask is resampled.
NEAREST = Image.Resampling.NEAREST
# The place of a PNG's bits per value, in its header.
_BITS = 24
# Pillow stretches grey of 2 and 4 bits to 0..255.
_STRETCHED = {2: 85, 4: 17}
_MODES = ("1", "L", "P", "I", "I;16")
# Those that Pillow makes colours of without loss.
_COLOUR_MODES = ("1", "L", "P", "RGB", "RGBA")
_EXPECTED = "expected a PNG of one channel, grey or with a palette, whose values are indices"
_EXPECTED_COLOURS = "expected a PNG of 8-bit colours"


class UnknownValues(Broken):
    """Raised if a mask contains values that aren't in the table of its dataset."""


class Mask(NamedTuple):
    """A mask as transforms take it.

    Attributes:
        image: of Pillow's mode L or I.
        ignored: the index of pixels that lie outside of the picture.
    """

    image: Image.Image
    ignored: int


def check_mask_size(mask: Image.Image, name: str, size: tuple[int, int], image: str) -> None:
    """Raises Broken where a mask hasn't the size of its image.

    Args:
        name, image: of the mask and of its image, for the message.
        size: (width, height) of the image.
    """
    if mask.size == size:
        return
    advice = "make them of one size"
    # The EXIF of a photograph may turn it, and that of its mask is mostly missing.
    if mask.size == size[::-1]:
        advice += ", or change DATA.EXIF_ORIENTATION if the image has an EXIF rotation"
    raise Broken(
        f"{name}: the mask has {mask.size[0]} x {mask.size[1]} pixels, its image"
        f" {image} {size[0]} x {size[1]}; {advice}"
    )


def mask_image(
    data: bytes,
    name: str,
    most: int,
    dtype: np.dtype,
    oriented: bool = False,
    table: MaskTable | None = None,
) -> Image.Image:
    """Returns the indices in a mask's file, as an image of Pillow's mode L (uint8) or I (int32).

    Args:
        data: the file, a PNG with a palette or of grey, of up to 16 bits. With a table of colours,
            a PNG of colours.
        name: for messages.
        most: pixels that it may have (DATA.MAX_PIXELS).
        dtype: of the column, uint8 or int32.
        oriented: turn it as its own EXIF says (DATA.EXIF_ORIENTATION).
        table: makes class indices of what the file holds; None: they are taken as they are.

    Raises:
        Broken: it can't be read, has several channels, or an index that ``dtype`` doesn't hold.
        UnknownValues: it holds a value that ``table`` lacks.
    """
    with readable(name):
        image, _ = opened_image(data, most)
        if image.format != "PNG":
            raise Unreadable(f"its format is {image.format}, {_EXPECTED}")
        if table is not None and table.of_colours:
            values = _colours(image)
        else:
            values = _indices(image, data, has_table=table is not None)
        if table is not None:
            values, problem = table.classes_of(values, dtype)
            if problem:
                raise UnknownValues(f"{name}: {problem}")
        elif dtype == np.uint8 and (largest := values.max()) > 255:
            raise Unreadable(
                f"it contains the index {largest}, its column has values of 0..255; declare it"
                " as int32"
            )
        turn = TURNS[orientation_of(data) if oriented else 1]
        return turn.image(Image.fromarray(values.astype(dtype, copy=False)))


def _indices(image: Image.Image, data: bytes, has_table: bool) -> np.ndarray:
    """Returns the indices in an opened PNG, [H, W].

    Args:
        data: its file.
        has_table: a dataset says which classes there are.
    """
    if image.mode not in _MODES:
        problem = f"it has {len(image.getbands())} channels, {_EXPECTED}"
        if has_table:
            problem += " (a colors.txt maps colours to classes, on lines R G B NAME)"
        raise Unreadable(problem)
    is_grey = image.mode == "L"
    values = np.asarray(decoded(image))
    # A palette is lost where the decoder runs in another process.
    if values.ndim > 2:
        raise Unreadable(f"its file is too large ({len(data)} bytes); save it again as grey")
    if is_grey and data[_BITS] in _STRETCHED:
        values = values // _STRETCHED[data[_BITS]]
    # NumPy would take the booleans of 1 bit for a choice of pixels.
    if values.dtype == bool:
        values = values.astype(np.uint8)
    return values


def _colours(image: Image.Image) -> np.ndarray:
    """Returns the colours in an opened PNG, [H, W, 3] uint8. Its alpha is dropped."""
    if image.mode not in _COLOUR_MODES:
        raise Unreadable(f"its mode is {image.mode}, {_EXPECTED_COLOURS}")
    return np.asarray(decoded(image).convert("RGB"))
