"""Formats of images by their first bytes, as the HTTP process knows them, which imports no decoder.

``loading.transforms.formats.kind_of`` knows the same ones.
"""

import re
from collections.abc import Sequence

ALWAYS = ("GIF", "JPEG", "PNG", "WebP")
OTHERS = ("bmp", "npy", "ppm", "tiff")  # whose decoders are rarely needed: -formats
_HEADS = {
    "GIF": rb"GIF8[79]a",
    "JPEG": rb"\xff\xd8\xff",
    "PNG": rb"\x89PNG\r\n\x1a\n",
    "WebP": rb"RIFF.{4}WEBP",
    "BMP": rb"BM",
    "NPY": rb"\x93NUMPY",
    "PPM": rb"P[1-6f]",
    "TIFF": rb"II[*+]\0|MM\0\*",
}
_PATTERNS = {kind: re.compile(head, re.S) for kind, head in _HEADS.items()}


def kind_of(data: bytes) -> str | None:
    """Returns the format of a file, or None where it is of no known one."""
    return next((kind for kind, pattern in _PATTERNS.items() if pattern.match(data)), None)


def listed(others: Sequence[str]) -> str:
    """Returns the names of the formats that are taken: "GIF, JPEG, PNG, WebP, TIFF"."""
    return ", ".join([*ALWAYS, *map(str.upper, others)])


def problem(data: bytes, others: Sequence[str]) -> str | None:
    """Returns why a file isn't taken, in one line, or None where it is.

    Args:
        others: of OTHERS, those that are taken besides ALWAYS.
    """
    kind = kind_of(data)
    if kind in ALWAYS or (kind and kind.lower() in others):
        return None
    if kind is None:
        return f"it is of no known format; this server takes {listed(others)}"
    return f"its format is {kind}; this server takes {listed(others)} (to take it: -formats {kind.lower()})"
