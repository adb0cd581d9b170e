"""Formats of images that the server takes, as the HTTP process knows them, which imports no
decoder.
"""

from collections.abc import Sequence

from loading.signatures import kind_of

ALWAYS = ("GIF", "JPEG", "PNG", "WebP")
OTHERS = ("bmp", "npy", "ppm", "tiff")  # whose decoders are rarely needed: -formats


def listed(others: Sequence[str]) -> str:
    """Returns the names of the formats that are taken: "GIF, JPEG, PNG, WebP, TIFF"."""
    return ", ".join([*ALWAYS, *map(str.upper, others)])


def problem(data: bytes, others: Sequence[str]) -> str | None:
    """Returns why a file isn't taken, in one line, or None where it is.

    Args:
        others: of OTHERS, those that are taken besides ALWAYS.
    """
    kind = kind_of(data)
    if kind is None:
        return f"it is of no known format; this server takes {listed(others)}"
    if kind.lower() in (*map(str.lower, ALWAYS), *others):
        return None
    return f"its format is {kind}; this server takes {listed(others)} (to take it: -formats {kind.lower()})"
