"""Which images a model takes."""

from collections.abc import Callable, Sequence

from errors import InputError
from settings.options import size_text

_LARGEST = 10_000  # pixels along a side: DATA.IMAGE_SIZE's range


def check_multiples(image_size: Sequence[int], unit: int, of: str) -> None:
    """Raises InputError, naming the nearest sizes that fit, unless (height, width) are multiples of
    ``unit`` pixels.

    Args:
        of: what the unit is, in words.
    """
    check_sides(image_size, lambda side: side % unit == 0, f"is not a multiple of {of}")


def check_sides(image_size: Sequence[int], fits: Callable[[int], bool], found: str) -> None:
    """Raises InputError, naming the nearest sizes that fit, unless both of (height, width) do.

    Args:
        found: what is wrong with them, in words.
    """
    if all(map(fits, image_size)):
        return
    nearest = [
        [next(filter(fits, sides), 0) for sides in (range(side, 0, -1), range(side, _LARGEST + 1))]
        for side in image_size
    ]
    known = " or ".join(
        dict.fromkeys(size_text(size) for size in zip(*nearest, strict=True) if min(size))
    )
    raise InputError(
        f"IMAGE_SIZE {size_text(image_size)} {found}; choose one that is{known and f': {known}'}"
    )
