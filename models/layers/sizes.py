"""Checks of the image sizes that a model takes."""

from collections.abc import Callable, Sequence

from errors import InputError
from settings.configuration import size_text

# The largest side in pixels that DATA.IMAGE_SIZE can have.
_LARGEST = 10_000


def check_multiples(image_size: Sequence[int], unit: int, of: str) -> None:
    """Raises InputError unless both sides of an image are multiples of ``unit`` pixels.

    The message names the nearest sizes that fit.

    Args:
        image_size: (height, width).
        unit: pixels.
        of: what the unit is, in words, for the message.
    """
    check_sides(image_size, lambda side: side % unit == 0, f"is not a multiple of {of}")


def check_sides(image_size: Sequence[int], fits: Callable[[int], bool], problem: str) -> None:
    """Raises InputError unless both sides of an image fit.

    The message names the nearest sizes that fit.

    Args:
        image_size: (height, width).
        fits: whether a side of so many pixels fits.
        problem: what is wrong with sides that don't fit, in words, for the message.
    """
    if all(map(fits, image_size)):
        return
    # 0 where no side below or above fits.
    smaller = [next(filter(fits, range(side, 0, -1)), 0) for side in image_size]
    larger = [next(filter(fits, range(side, _LARGEST + 1)), 0) for side in image_size]
    nearest = [size_text(size) for size in (smaller, larger) if min(size)]
    advice = "choose one that is"
    if nearest:
        advice += f": {' or '.join(nearest)}"
    raise InputError(f"IMAGE_SIZE {size_text(image_size)} {problem}; {advice}")
