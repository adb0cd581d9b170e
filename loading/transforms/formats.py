"""Checks image files of unknown origin before a decoder sees them: their format, their size, and
their metadata.

Pillow parses a file's metadata (EXIF, ICC, XMP, comments, text) before the pixels can be counted.
400 kB of EXIF take 12 GB, and a comment of 8 MB takes seconds. No pixel depends on metadata, so it
is removed before Pillow opens the file. Only formats that are used for training are opened. An EPS
file, for example, would be run by Ghostscript.
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

# Pillow's own limit is MAX_PIXELS here: it would warn at 89 million, and refuse twice that whatever
# the key says.
Image.MAX_IMAGE_PIXELS = None
# What Pillow logs about a file is part of the one line that says why it can't be read.
logging.getLogger("PIL").setLevel(logging.CRITICAL)

# Pixels along a side. Pillow takes 12 bytes for each row besides its pixels.
LONGEST_SIDE = 1_000_000
# Scans of a JPEG with MAX_PIXELS. Smaller ones may have more, because each scan passes over all
# blocks of 8 x 8 pixels; but none may have more than MOST_SCANS.
SCANS = 10
MOST_SCANS = 1000
# Bytes of a file for each pixel: four channels of 16 bits, not compressed.
BYTES_PER_PIXEL = 8
NPY = "NPY"
# Bytes that a file may have besides, such as metadata.
_METADATA = 64 << 20
# Bytes of a PNG's chunk that isn't IDAT: a palette of 256 colours.
_PNG_LONGEST = 768
# WebP's chunks of an image. A frame of an animation has those of one image.
_WEBP_IMAGE = (b"ALPH", b"VP8 ", b"VP8L")
_WEBP_NEEDED = (*_WEBP_IMAGE, b"VP8X", b"ANIM", b"ANMF")
# The flag of a graphic control extension that has a transparent colour.
_GIF_TRANSPARENT = 1
# The first byte of an extension, of an image and of the end.
_GIF_BLOCK = re.compile(rb"[!,;]")
# JPEG's markers: those without a length, those that pixels depend on (frames, tables, JFIF's and
# Adobe's colours), and the frames that are coded in one scan where it holds all channels.
_ALONE = frozenset((0x00, 0x01, *range(0xD0, 0xD8)))
_END = (0xD8, 0xD9)
_SCAN = 0xDA
_FRAMES = frozenset(marker for marker in range(0xC0, 0xD0) if marker not in (0xC4, 0xC8, 0xCC))
# The start of a scan, with the lengths that libjpeg accepts. Phones append videos to images, whose
# bytes have few of these.
_SCANS = re.compile(rb"\xff\xda\x00[\x08\x0a\x0c\x0e]")
_JPEG_NEEDED = frozenset((*_FRAMES, 0xC4, 0xCC, 0xDB, 0xDD, 0xE0, 0xEE))
_SEQUENTIAL = (0xC0, 0xC1)
# libjpeg's arithmetic decoder goes on after the end of the data, which takes time.
_HUFFMAN = (0xC0, 0xC1, 0xC2)
# Comments of a PPM.
_COMMENTS = 1000
# A JPEG's marker begins with one such byte, and more may precede it.
_FILL = re.compile(rb"\xff+")
# Pillow's decoders that have no limit of their own; those of BMP and PPM are written in Python.
_UNLIMITED = ("libtiff", "bmp_rle", "ppm", "ppm_plain")
# A read counts as so many bytes more, because Pillow reads a PPM's header byte by byte.
_READ = 200
# Bytes of a PNG that is decoded in another process: zlib takes 0.1 s for each MB of empty blocks.
_LARGE_PNG = 32 << 20
# Segments, chunks or blocks of a file; JPEG and PNG may have one more for each KiB.
_MOST_SEGMENTS = 10_000
_TOO_MANY = "it is in too many parts; save it again"


def check_size(size: tuple[int, int], most: int) -> None:
    """Raises Unreadable where an image (width, height) has more than ``most`` pixels, or a longer
    side than is read.
    """
    if size[0] * size[1] > most:
        raise Unreadable(f"it has {size[0]} x {size[1]} pixels, DATA.MAX_PIXELS is {most}")
    if max(size) > LONGEST_SIDE:
        raise Unreadable(f"it has {size[0]} x {size[1]} pixels, a side may have {LONGEST_SIDE}")


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
        raise Unreadable("it is an array of NumPy's, which DATA.IMAGE_DTYPE float32 reads")
    if kind == "JPEG":
        data, plain = _jpeg(data)
    elif kind in _NEEDED:
        data = _NEEDED[kind](data)
    image = opened_plain(data, kind)
    check_size(image.size, most)
    if not plain:
        _check_scans(data, image.size, most)
    return image, data


def _check_scans(data: bytes, size: tuple[int, int], most: int) -> None:
    """Raises Unreadable where a JPEG (width, height) has more scans than may be decoded."""
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
                f"its {count} channels are no colours; DATA.IMAGE_CHANNELS {count} reads them"
            ) from None
        raise Unreadable(f"its {kind} header is damaged") from None
    opened: Any = image
    if len(opened.tile) == 1:
        # The decoder gets the data in one piece. From smaller ones it may take nothing, and Pillow
        # would copy all that it has read for each.
        opened.decodermaxblock = max(opened.decodermaxblock, len(data))
    return image


def decoded(image: Any) -> Image.Image:
    """Returns an opened image with its pixels.

    A decoder without a limit of its own runs in another process (``isolated``). An image with a
    palette becomes RGB then. Call this within ``errors.reading``.

    Raises:
        Unreadable, Exception: it can't be decoded, or would take too much memory or time.
    """
    file = getattr(image, "fp", None)
    if isinstance(file, _Counted):
        data = file.getvalue()
        codec = image.tile[0].codec_name if image.tile else ""
        # Of lossless pixels and of alpha libwebp makes up to 65,536 sets of Huffman tables, 6 kB
        # each.
        lossless = image.format == "WEBP" and (b"VP8L" in data or b"ALPH" in data)
        large = codec == "zip" and len(data) > _LARGE_PNG
        if lossless or large or codec in _UNLIMITED:
            return decode_isolated(data, image.format, image.size)
    image.load()
    return image


def kind_of(data: bytes) -> str:
    """Returns the format of a file by its first bytes; raises Unreadable if it isn't one that is
    read.
    """
    if kind := magic_numbers.kind_of(data):
        return kind
    raise Unreadable("it is of no known format; BMP, GIF, JPEG, PNG, PPM, TIFF and WebP are read")


class _Counted(io.BytesIO):
    """A file in memory that may be read about three times; reads of single bytes cost more."""

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
    # The pieces that are kept; data[start:] is kept, too, as far as it is known.
    kept = []
    start = 0
    place = 2
    frames = []
    for _ in range(_MOST_SEGMENTS + len(data) // 1024):
        found = _FILL.search(data, place)  # what stands between segments is skipped, as by libjpeg
        if not found or found.end() + 4 > len(data) or data[found.end()] in _END:
            raise Unreadable("it ends before its pixels")
        place = found.end() - 1
        if found.start() < place:  # Pillow would read it byte by byte
            kept.append(data[start : found.start()])
            start = place
        marker = data[place + 1]
        if marker == _SCAN:
            plain = len(frames) == 1 and frames[0] == data[place + 4]
            return (b"".join((*kept, data[start:])) if kept else data), plain
        if marker in _ALONE:
            place += 2
            continue
        end = place + 2 + max(2, (data[place + 2] << 8) + data[place + 3])
        if marker not in _JPEG_NEEDED:
            kept.append(data[start:place])
            start = end
        elif marker in _FRAMES:
            channels = data[place + 9] if place + 9 < len(data) else 0
            if marker not in _HUFFMAN:
                raise Unreadable(
                    "it is a JPEG with arithmetic or lossless coding, which isn't read; save it again"
                )
            if frames or end != place + 10 + 3 * channels:
                raise Unreadable("its JPEG header is damaged")
            # 0: there may be several scans of each
            frames.append(channels if marker in _SEQUENTIAL else 0)
        place = end
    raise Unreadable(_TOO_MANY)


def _png(data: bytes) -> bytes:
    """Returns the chunks that a decoder has to know, and transparency: IDAT's frame alone."""
    kept = [data[:8]]
    place = 8
    for _ in range(_MOST_SEGMENTS + len(data) // 1024):
        length = int.from_bytes(data[place : place + 4], "big")
        kind = data[place + 4 : place + 8]
        end = place + 12 + length
        if not kind[:1].islower() or kind == b"tRNS":
            if kind != b"IDAT" and length > _PNG_LONGEST:
                name = printable(kind.decode("latin-1"))
                found = f"its chunk {name} has {length} bytes"
                raise Unreadable(f"{found}, up to {_PNG_LONGEST} are read")
            kept.append(data[place:end])
        place = end
        if kind == b"IEND" or place >= len(data):
            return b"".join(kept)
    raise Unreadable(_TOO_MANY)


def _gif(data: bytes) -> bytes:
    """Returns the header, the first image and what follows it, without comments."""
    place = _behind_palette(data, 10)
    head = data[:place]
    control = b""
    left = _MOST_SEGMENTS + len(data) // 16  # blocks, and pieces of blocks of up to 255 bytes
    # Pillow skips what stands between blocks
    while (found := _GIF_BLOCK.search(data, place)) and found[0] == b"!":
        start = found.start()
        place = found.start() + 2
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
    if not found or found[0] != b",":
        raise Unreadable("it ends before its pixels, or is damaged")
    return head + control + data[found.start() :]


def _behind_palette(data: bytes, flags: int) -> int:
    """The header ends with ``flags``, a background and a ratio; then the palette follows, if there
    is one.
    """
    bits = int.from_bytes(data[flags : flags + 1], "big")
    return flags + 3 + (3 * (2 << (bits & 7)) if bits & 0x80 else 0)


def _webp(data: bytes) -> bytes:
    """Returns the chunks of the first image: libwebp takes up to 104 bytes for each chunk and
    frame.
    """
    claimed = 8 + int.from_bytes(data[4:8], "little")
    # A file that is cut short goes on claiming its length, so it isn't read.
    missing = max(0, claimed - len(data))
    data = data[:claimed]
    kept = [b"WEBP"]
    for kind, start, end in _webp_chunks(data, 12, len(data)):
        if kind == b"ANMF" and end <= len(data):
            # A frame of an animation: 16 bytes of numbers, then chunks.
            inner = _webp_chunks(data, start + 24, end)
            parts = [data[begin : min(to, end)] for own, begin, to in inner if own in _WEBP_IMAGE]
            length = 16 + sum(map(len, parts))
            kept += [kind, length.to_bytes(4, "little"), data[start + 8 : start + 24], *parts]
        elif kind in _WEBP_NEEDED:
            kept.append(data[start:end])
    return b"RIFF" + (sum(map(len, kept)) + missing).to_bytes(4, "little") + b"".join(kept)


def _webp_chunks(data: bytes, place: int, limit: int) -> Iterator[tuple[bytes, int, int]]:
    """Yields the chunks up to the first image: their kind, where they start and where they should
    end.
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
    """Returns the file with the needed tags of its first image alone in its directory."""
    directory = Directory(data)
    check_parts(directory)
    return directory.to_bytes(directory.tags)


def _ppm(data: bytes) -> bytes:
    """Returns the file; raises Unreadable where it is text with many comments: for each Pillow
    copies a block.
    """
    if data[1:2] in b"123" and (count := data.count(b"#")) > _COMMENTS:
        raise Unreadable(f"it is a PPM with {count} comments; save it in binary form")
    return data


_NEEDED: dict[str, Callable[[bytes], bytes]] = {
    "PNG": _png, "GIF": _gif, "TIFF": _tiff, "PPM": _ppm, "WEBP": _webp,
}  # fmt: skip
