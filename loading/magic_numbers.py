"""The formats of image files, by their first bytes.

No decoder is imported here, because the server's HTTP process needs none.
"""

import re

_HEADS = {
    "JPEG": rb"\xff\xd8\xff",
    "PNG": rb"\x89PNG\r\n\x1a\n",
    "WEBP": rb"RIFF.{4}WEBP",
    "GIF": rb"GIF8[79]a",
    "BMP": rb"BM",
    "PPM": rb"P[1-6f]",
    "TIFF": rb"II[*+]\0|MM\0\*",
    "NPY": rb"\x93NUMPY",
}
_PATTERNS = {kind: re.compile(head, re.DOTALL) for kind, head in _HEADS.items()}


def kind_of(data: bytes) -> str | None:
    """Returns the format of a file, by Pillow's name or "NPY"; None if it isn't one that is read."""
    return next((kind for kind, pattern in _PATTERNS.items() if pattern.match(data)), None)
