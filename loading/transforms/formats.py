"""Checks image files of unknown origin before a decoder sees them.

Their format and their size are checked, and their metadata is removed. Pillow parses a file's
metadata (EXIF, ICC, XMP, comments, text) before the pixels can be counted. 400 kB of EXIF take 12
GB, and a comment of 8 MB takes seconds. No pixel depends on metadata. Only formats that are used
for training are opened. An EPS file, for example, would be run by Ghostscript.
"""

import io
import itertools
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

from PIL import Image, UnidentifiedImageError

from errors import Unreadable, printable
from loading import magic_numbers
from loading.transforms.isolated import decode_isolated
from loading.transforms.tiff import SAMPLES, Directory, check_parts

# DATA.MAX_PIXELS is the limit here. Pillow's own would warn at 89 million pixels, and refuse twice
# as many whatever the key says.
Image.MAX_IMAGE_PIXELS = None
# An error says in one line why a file can't be read, so what Pillow logs about it isn't needed.
logging.getLogger("PIL").setLevel(logging.CRITICAL)

# The most pixels along a side. Besides its pixels, Pillow takes 12 bytes for each row.
LONGEST_SIDE = 1_000_000
# The scans that a JPEG of MAX_PIXELS may have. Each scan passes over all blocks of 8 x 8 pixels, so
# a smaller image may have more, up to MOST_SCANS.
SCANS = 10
MOST_SCANS = 1000
# The bytes that a file may have for each pixel: four channels of 16 bits, not compressed.
BYTES_PER_PIXEL = 8
NPY = "NPY"
# The bytes that it may have besides, such as metadata.
_METADATA = 64 << 20
# The bytes that a chunk of a PNG may have, other than the pixels (IDAT): a palette of 256 colours.
_LONGEST_PNG_CHUNK = 768
# WebP's chunks of an image. A frame of an animation has those of one image.
_WEBP_IMAGE = (b"ALPH", b"VP8 ", b"VP8L")
_WEBP_NEEDED = (*_WEBP_IMAGE, b"VP8X", b"ANIM", b"ANMF")
# The flag of a graphic control extension that has a transparent colour.
_GIF_TRANSPARENT = 1
# The first byte of an extension, of an image and of the end.
_GIF_BLOCK = re.compile(rb"[!,;]")
# JPEG's markers that have no length.
_ALONE = frozenset((0x00, 0x01, *range(0xD0, 0xD8)))
# Its markers of another image's beginning, and of the end.
_END = (0xD8, 0xD9)
_SCAN = 0xDA
_FRAMES = frozenset(marker for marker in range(0xC0, 0xD0) if marker not in (0xC4, 0xC8, 0xCC))
# The markers that pixels depend on: frames, tables, the colours of JFIF and of Adobe.
_JPEG_NEEDED = frozenset((*_FRAMES, 0xC4, 0xCC, 0xDB, 0xDD, 0xE0, 0xEE))
# The frames that are coded in one scan, if that has all channels.
_SEQUENTIAL = (0xC0, 0xC1)
# The frames that are coded by Huffman. libjpeg's arithmetic decoder continues after the end of the
# data, which takes time.
_HUFFMAN = (0xC0, 0xC1, 0xC2)
# The start of a scan, with the lengths that libjpeg accepts. Phones append videos to images. In the
# bytes of these, few such places occur by chance.
_SCANS = re.compile(rb"\xff\xda\x00[\x08\x0a\x0c\x0e]")
# A JPEG's marker begins with one such byte, and more may precede it.
_MARKER = re.compile(rb"\xff+")
# The most comments of a PPM.
_COMMENTS = 1000
# Pillow's decoders that have no limit of their own; those of BMP and PPM are written in Python.
_UNLIMITED = ("libtiff", "bmp_rle", "ppm", "ppm_plain")
# Each read counts as so many bytes more, because Pillow reads a PPM's header byte by byte.
_READ = 200
# A PNG of more bytes is decoded in another process. zlib takes 0.1 s for each MB of empty blocks.
_LARGE_PNG = 32 << 20
# The most segments, chunks or blocks of a file. JPEG and PNG may have one more for each KiB.
_MOST_SEGMENTS = 10_000
_TOO_MANY = "it has too many parts; save it again"


def check_size(size: tuple[int, int], most: int) -> None:
    """Raises Unreadable if an image has more than ``most`` pixels, or a side is too long.

    Args:
        size: (width, height) in pixels.
    """
    if size[0] * size[1] > most:
        raise Unreadable(f"it has {size[0]} x {size[1]} pixels, DATA.MAX_PIXELS is {most}")
    if max(size) > LONGEST_SIDE:
        raise Unreadable(
            f"it has {size[0]} x {size[1]} pixels, at most {LONGEST_SIDE} per side are allowed"
        )


def largest_file(most: int) -> int:
    """Returns how many bytes the file of an image of ``most`` pixels may have."""
    return BYTES_PER_PIXEL * most + _METADATA


def opened_image(data: bytes, most: int) -> tuple[Image.Image, bytes]:
    """Opens an image file; reads only its header.

    Call this within ``errors.reading``.

    Args:
        data: the file.
        most: pixels that it may have (DATA.MAX_PIXELS).

    Returns:
        (the image, the file without its metadata).

    Raises:
        Unreadable, Exception: the file can't be read, or would take too much memory or time.
    """
    kind = kind_of(data)
    plain = True
    if kind == NPY:
        raise Unreadable("it is a NumPy array, which needs DATA.IMAGE_DTYPE float32")
    if kind == "JPEG":
        data, plain = _jpeg(data)
    elif kind in _CLEAN:
        data = _CLEAN[kind](data)
    image = opened_plain(data, kind)
    check_size(image.size, most)
    if not plain:
        _check_scans(data, image.size, most)
    return image, data


def _check_scans(data: bytes, size: tuple[int, int], most: int) -> None:
    """Raises Unreadable if a JPEG of the size (width, height) has too many scans."""
    width, height = (-(-side // 8) * 8 for side in size)
    allowed = min(MOST_SCANS, SCANS * most // (width * height))
    # A list of all of them would take twelve times the memory of the file.
    scans = sum(1 for _ in itertools.islice(_SCANS.finditer(data), allowed + 1))
    if scans > allowed:
        raise Unreadable(
            f"it has {size[0]} x {size[1]} pixels in more than {allowed} scans: decoding them takes too long"
            f" (DATA.MAX_PIXELS {most})"
        )


def opened_plain(data: bytes, kind: str) -> Image.Image:
    """Opens a file whose metadata was removed; reads only its header.

    Raises:
        Unreadable: the header is damaged, or a TIFF's channels aren't colours.
    """
    try:
        image = Image.open(io.BytesIO(data) if kind == "JPEG" else _Counted(data), formats=[kind])
    except UnidentifiedImageError:
        # The text of this error has an address in memory, so it isn't quoted.
        if kind == "TIFF" and (count := Directory(data).numbers(SAMPLES, 1)[0]) > 1:
            raise Unreadable(
                f"its {count} channels aren't colours; set DATA.IMAGE_CHANNELS {count} to read them"
            ) from None
        raise Unreadable(f"its {kind} header is damaged") from None
    opened: Any = image
    if len(opened.tile) == 1:
        # The decoder gets the data in one piece. It might take nothing of smaller ones, and for
        # each Pillow would copy all that it has read.
        opened.decodermaxblock = max(opened.decodermaxblock, len(data))
    return image


def decoded(image: Any) -> Image.Image:
    """Returns an opened image with its pixels.

    A decoder without a limit of its own runs in another process (``isolated``). There, an image
    with a palette becomes RGB. Call this within ``errors.reading``.

    Raises:
        Unreadable, Exception: it can't be decoded, or would take too much memory or time.
    """
    file = getattr(image, "fp", None)
    if isinstance(file, _Counted):
        data = file.getvalue()
        codec = image.tile[0].codec_name if image.tile else ""
        # For lossless pixels and for alpha, libwebp makes up to 65,536 sets of Huffman tables of
        # 6 kB.
        is_lossless = image.format == "WEBP" and (b"VP8L" in data or b"ALPH" in data)
        is_large = codec == "zip" and len(data) > _LARGE_PNG
        if is_lossless or is_large or codec in _UNLIMITED:
            return decode_isolated(data, image.format, image.size)
    image.load()
    return image


def kind_of(data: bytes) -> str:
    """Returns the format of a file by its first bytes; raises Unreadable if it isn't read here."""
    if kind := magic_numbers.kind_of(data):
        return kind
    raise Unreadable("its format is unknown; BMP, GIF, JPEG, PNG, PPM, TIFF and WebP are supported")


class _Counted(io.BytesIO):
    """A file in memory that may be read about three times. Reads of single bytes cost more."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.left = _METADATA + 3 * len(data)

    def read(self, size: int | None = -1, /) -> bytes:
        part = super().read(size)
        self.left -= len(part) + _READ
        if self.left < 0:
            raise Unreadable("reading it takes too long; save it again, in a common format")
        return part


def _jpeg(data: bytes) -> tuple[bytes, bool]:
    """Returns (the file without its metadata, whether its pixels are certainly in one scan)."""
    # The pieces that are kept of data[:start]. What follows is kept, too, until metadata is met.
    kept = []
    start = 0
    place = 2
    # The channels of each frame that is coded in one scan; 0 of others.
    frames = []
    for _ in range(_MOST_SEGMENTS + len(data) // 1024):
        # As libjpeg does, this skips what stands between segments.
        match = _MARKER.search(data, place)
        if not match or match.end() + 4 > len(data) or data[match.end()] in _END:
            raise Unreadable("it is truncated")
        place = match.end() - 1
        if match.start() < place:
            # Pillow would read the padding byte by byte.
            kept.append(data[start : match.start()])
            start = place
        marker = data[place + 1]
        if marker == _SCAN:
            channels = data[place + 4]
            in_one_scan = len(frames) == 1 and frames[0] == channels
            if not kept:
                return data, in_one_scan
            return b"".join((*kept, data[start:])), in_one_scan
        if marker in _ALONE:
            place += 2
            continue
        length = max(2, int.from_bytes(data[place + 2 : place + 4], "big"))
        end = place + 2 + length
        if marker not in _JPEG_NEEDED:
            kept.append(data[start:place])
            start = end
        elif marker in _FRAMES:
            channels = data[place + 9] if place + 9 < len(data) else 0
            if marker not in _HUFFMAN:
                raise Unreadable(
                    "it is a JPEG with arithmetic or lossless coding, which isn't supported;"
                    " save it again"
                )
            if frames or end != place + 10 + 3 * channels:
                raise Unreadable("its JPEG header is damaged")
            frames.append(channels if marker in _SEQUENTIAL else 0)
        place = end
    raise Unreadable(_TOO_MANY)


def _png(data: bytes) -> bytes:
    """Returns the file with only the chunks that its pixels or their transparency depend on.

    Of an animation, only the first image is kept.
    """
    kept = [data[:8]]
    place = 8
    for _ in range(_MOST_SEGMENTS + len(data) // 1024):
        length = int.from_bytes(data[place : place + 4], "big")
        kind = data[place + 4 : place + 8]
        end = place + 12 + length
        # A decoder has to know the chunks whose name begins with a capital.
        if not kind[:1].islower() or kind == b"tRNS":
            if kind != b"IDAT" and length > _LONGEST_PNG_CHUNK:
                name = printable(kind.decode("latin-1"))
                raise Unreadable(
                    f"its chunk {name} has {length} bytes, at most {_LONGEST_PNG_CHUNK} are allowed"
                )
            kept.append(data[place:end])
        place = end
        if kind == b"IEND" or place >= len(data):
            return b"".join(kept)
    raise Unreadable(_TOO_MANY)


def _gif(data: bytes) -> bytes:
    """Returns the file without the extensions before its first image.

    Of these, only a transparent colour is kept.
    """
    place = _behind_palette(data, 10)
    header = data[:place]
    control = b""
    # Blocks, and their pieces of up to 255 bytes, that may still come.
    left = _MOST_SEGMENTS + len(data) // 16
    # As Pillow does, this skips what stands between blocks.
    while (match := _GIF_BLOCK.search(data, place)) and match[0] == b"!":
        start = match.start()
        place = start + 2
        left -= 1
        while place < len(data) and data[place] and left > 0:
            place += 1 + data[place]
            left -= 1
        if left <= 0:
            raise Unreadable(_TOO_MANY)
        place += 1
        if data[start + 1 : start + 2] == b"\xf9":
            # How a frame is disposed of concerns the next one. Pillow would fill an image of its
            # size at once.
            flags = bytes(flag & _GIF_TRANSPARENT for flag in data[start + 3 : start + 4])
            control = data[start : start + 3] + flags + data[start + 4 : place]
    if not match or match[0] != b",":
        raise Unreadable("it is truncated or damaged")
    return header + control + data[match.start() :]


def _behind_palette(data: bytes, flags: int) -> int:
    """Returns the place behind a GIF's header, and behind its palette if there is one.

    Args:
        flags: the place of the header's flags. A background and a ratio follow, then the palette.
    """
    bits = int.from_bytes(data[flags : flags + 1], "big")
    colours = 2 << (bits & 7) if bits & 0x80 else 0
    return flags + 3 + 3 * colours


def _webp(data: bytes) -> bytes:
    """Returns the file with the chunks of its first image alone.

    libwebp takes up to 104 bytes for each chunk and frame.
    """
    claimed = 8 + int.from_bytes(data[4:8], "little")
    # A file that is cut short keeps on claiming its length, so that it isn't read.
    missing = max(0, claimed - len(data))
    data = data[:claimed]
    kept = [b"WEBP"]
    for kind, start, end in _webp_chunks(data, 12, len(data)):
        if kind == b"ANMF" and end <= len(data):
            # A frame of an animation: 16 bytes of numbers, then chunks.
            numbers = data[start + 8 : start + 24]
            chunks = [
                data[first : min(last, end)]
                for inner, first, last in _webp_chunks(data, start + 24, end)
                if inner in _WEBP_IMAGE
            ]
            length = 16 + sum(map(len, chunks))
            kept += [kind, length.to_bytes(4, "little"), numbers, *chunks]
        elif kind in _WEBP_NEEDED:
            kept.append(data[start:end])
    size = sum(map(len, kept)) + missing
    return b"RIFF" + size.to_bytes(4, "little") + b"".join(kept)


def _webp_chunks(data: bytes, place: int, limit: int) -> Iterator[tuple[bytes, int, int]]:
    """Yields (kind, start, claimed end) of the chunks up to the first image.

    Args:
        place: where the first chunk begins.
        limit: where the last one ends.
    """
    for _ in range(_MOST_SEGMENTS):
        if place + 8 > limit:
            return
        kind = data[place : place + 4]
        length = int.from_bytes(data[place + 4 : place + 8], "little")
        end = place + 8 + length + length % 2
        yield kind, place, end
        if kind in (b"VP8 ", b"VP8L", b"ANMF"):
            return
        place = end
    raise Unreadable(_TOO_MANY)


def _tiff(data: bytes) -> bytes:
    """Returns the file with only those tags that the pixels of its first image depend on."""
    directory = Directory(data)
    check_parts(directory)
    return directory.to_bytes(directory.tags)


def _ppm(data: bytes) -> bytes:
    """Returns the file; raises Unreadable if it is text with many comments.

    Pillow copies a block for each comment.
    """
    is_text = data[1:2] in b"123"
    if is_text and (count := data.count(b"#")) > _COMMENTS:
        raise Unreadable(f"it is a PPM with {count} comments; save it in binary form")
    return data


# By format: a function that returns a file without its metadata.
_CLEAN: dict[str, Callable[[bytes], bytes]] = {
    "PNG": _png, "GIF": _gif, "TIFF": _tiff, "PPM": _ppm, "WEBP": _webp,
}  # fmt: skip
