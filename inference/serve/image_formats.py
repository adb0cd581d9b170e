"""The formats of images that the server accepts.

The HTTP process knows them by their first bytes: it imports no decoder.
"""

from collections.abc import Sequence

from loading.magic_numbers import kind_of

ALWAYS = ("GIF", "JPEG", "PNG", "WebP")
# Rarely needed formats, which are accepted if -formats names them.
OTHERS = ("bmp", "npy", "ppm", "tiff")


def listed(others: Sequence[str]) -> str:
    """Returns the names of the accepted formats: "GIF, JPEG, PNG, WebP, TIFF"."""
    return ", ".join([*ALWAYS, *map(str.upper, others)])


def problem(data: bytes, others: Sequence[str]) -> str | None:
    """Returns a line that says why a file isn't accepted, or None if it is.

    Args:
        data: the file's content.
        others: the formats of OTHERS that are accepted.
    """
    kind = kind_of(data)
    if kind is None:
        return f"its format is unknown; this server takes {listed(others)}"
    if kind.lower() in (*map(str.lower, ALWAYS), *others):
        return None
    return (
        f"its format is {kind}; this server takes {listed(others)}"
        f" (to take it: -formats {kind.lower()})"
    )
