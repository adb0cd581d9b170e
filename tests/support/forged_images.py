"""Image files that contradict themselves: parts of intact files are combined with other parts."""

import io
import struct
import zlib

import numpy as np
from hypothesis import strategies as st
from PIL import Image

from support.hostile_files import damaged

NUMBERS = st.sampled_from(
    [0, 1, 7, 255, 256, 16383, 65535, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]
)
SIDES = st.sampled_from([0, 1, 2, 16, 4000, 12000, 65535])
PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 32, 3), np.uint8))


def saved(kind, image=PICTURE, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def chunk(kind, data=b"", length=None):
    """A chunk of PNG."""
    count = len(data) if length is None else length
    return struct.pack(">I", count) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height, *between, depth=8, colour=2, pixels=b""):
    """A PNG file of ``between`` and ``pixels``, which zlib has compressed."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return (
        b"\x89PNG\r\n\x1a\n" + header + b"".join(between) + chunk(b"IDAT", pixels) + chunk(b"IEND")
    )


def black(width, height):
    """PNG's compressed pixels of a black image in colour."""
    return zlib.compress(bytes(height * (1 + 3 * width)))


def segment(marker, data=b"", length=None):
    """A segment of JPEG."""
    return (
        struct.pack(">BBH", 0xFF, marker, (len(data) if length is None else length) + 2 & 0xFFFF)
        + data
    )


def directory(entries, order="<", following=0):
    """A directory of TIFF: (tag, type, count, value)."""
    packed = b"".join(struct.pack(f"{order}HHII", *entry) for entry in entries)
    return struct.pack(f"{order}H", len(entries)) + packed + struct.pack(f"{order}I", following)


def tags_that_overlap(size):
    """Returns a TIFF file, or EXIF data, of ``size`` bytes. The value of each of its tags is the
    whole file.
    """
    wanted = [(256, 3, 1, 8), (257, 3, 1, 8), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1), (273, 4, 1, 8),
              (277, 3, 1, 1), (278, 3, 1, 8), (279, 4, 1, 64)]  # fmt: skip
    count = min(60_000, (size - 400) // 12) - len(wanted)
    wanted += [(1000 + number, 7, size - 1, 0) for number in range(count)]
    return (b"II*\0\x08\0\0\0" + directory(wanted)).ljust(size, b"\0")


def with_exif(data):
    """A JPEG file whose notes are ``data``, in pieces."""
    parts = [
        segment(0xE1, b"Exif\0\0" + data[at : at + 65_000]) for at in range(0, len(data), 65_000)
    ]
    # without JFIF's segment, which would tell the density
    return b"\xff\xd8" + b"".join(parts) + saved("JPEG")[20:]


def with_scans(width, height, count):
    """A progressive JPEG whose last scan comes ``count`` times more."""
    whole = saved("JPEG", Image.new("RGB", (width, height)), progressive=True)
    last = whole[whole.rfind(b"\xff\xda") : -2]
    return whole[:-2] + last * count + whole[-2:]


def with_comment(size):
    """A GIF file with a comment of ``size`` bytes."""
    whole = saved("GIF", PICTURE.quantize(256))
    start = 13 + 3 * 256
    return whole[:start] + b"!\xfe" + (b"\xff" + bytes(255)) * (size // 256) + b"\0" + whole[start:]


def text_bombs(count):
    """A PNG file of ``count`` texts of 1 MiB, of characters that take four bytes each."""
    text = zlib.compress(("\U0001f600" + "a" * 1_048_000).encode(), 9)
    texts = (chunk(b"iTXt", b"k%d\0\1\0\0\0" % number + text) for number in range(count))
    return png(8, 8, *texts, pixels=black(8, 8))


@st.composite
def pngs(draw):
    kinds = st.sampled_from([b"tRNS", b"PLTE", b"iCCP", b"zTXt", b"iTXt", b"eXIf", b"acTL", b"fcTL", b"fdAT", b"IDAT",
                             b"gAMA", b"sBIT", b"ABCD", b"IEND", b"\0\0\0\0"])  # fmt: skip
    parts = st.builds(chunk, kinds, st.binary(max_size=40), st.none() | NUMBERS)
    pixels = draw(
        st.sampled_from(
            [zlib.compress(bytes(1 << 16)), zlib.compress(bytes(1 << 24), 9), b"", b"x\x9c"]
        )
    )
    depth = draw(st.sampled_from([1, 2, 4, 8, 16, 3]))
    colour = draw(st.sampled_from([0, 2, 3, 4, 6, 1]))
    between = draw(st.lists(parts, max_size=4))
    return png(draw(SIDES), draw(SIDES), *between, depth=depth, colour=colour, pixels=pixels)


@st.composite
def jpegs(draw):
    whole = saved("JPEG", progressive=draw(st.booleans()))
    markers = st.sampled_from([0xC0, 0xC1, 0xC2, 0xC4, 0xC9, 0xCC, 0xD0, 0xD8, 0xD9, 0xDA, 0xDB, 0xDD, 0xE0, 0xE1,
                               0xE2, 0xEE, 0xFE, 0x01, 0xFF, 0x00])  # fmt: skip
    parts = draw(
        st.lists(
            st.builds(segment, markers, st.binary(max_size=30), st.none() | NUMBERS), max_size=4
        )
    )
    place = whole.index(draw(st.sampled_from([b"\xff\xdb", b"\xff\xc4", b"\xff\xda"])))
    whole = bytearray(whole[:place] + b"".join(parts) + whole[place:])
    frame = max(whole.find(b"\xff\xc0"), whole.find(b"\xff\xc2"), 0)
    if draw(st.booleans()):
        whole[frame + 5 : frame + 9] = struct.pack(">HH", draw(SIDES), draw(SIDES))
    return bytes(whole)


@st.composite
def tiffs(draw):
    order = draw(st.sampled_from("<>"))
    kinds = st.sampled_from([1, 2, 3, 4, 5, 7, 11, 12, 13, 16, 99])
    tags = st.sampled_from([254, 258, 259, 262, 266, 273, 274, 277, 278, 279, 284, 317, 320, 322, 323, 324, 325, 330,
                            338, 339, 347, 513, 529, 530, 700, 34665, 34853])  # fmt: skip
    lies = draw(st.lists(st.tuples(tags, kinds, NUMBERS, NUMBERS), max_size=6))
    shift = 16 if order == ">" else 0
    told = [(256, 3, 1, draw(SIDES) << shift), (257, 3, 1, draw(SIDES) << shift), (258, 3, 1, 8 << shift),
            (259, 3, 1, draw(st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 32773, 50000])) << shift), (273, 4, 1, 8),
            (277, 3, 1, draw(st.sampled_from([1, 3, 4, 65535])) << shift), (279, 4, 1, draw(NUMBERS))]  # fmt: skip
    told = [entry for entry in told if entry[0] not in {lie[0] for lie in lies}] + lies
    start = b"II*\0" if order == "<" else b"MM\0*"
    return (
        start
        + struct.pack(f"{order}I", 8)
        + directory(sorted(told), order, draw(NUMBERS))
        + draw(st.binary())
    )


@st.composite
def others(draw):
    """GIF, BMP, PPM and WebP files, which have their sides in the first bytes."""
    kind = draw(st.sampled_from(["GIF", "BMP", "PPM", "WEBP"]))
    data = bytearray(saved(kind, PICTURE.quantize(16) if kind == "GIF" else PICTURE))
    place, form = {"GIF": (6, "<H"), "BMP": (18, "<i"), "PPM": (3, "<H"), "WEBP": (26, "<H")}[kind]
    for at in (place, place + struct.calcsize(form)):
        if draw(st.booleans()):
            side = draw(SIDES | st.just(-1)) % (1 << 15)
            data[at : at + struct.calcsize(form)] = struct.pack(form, side)
    if kind == "BMP":
        data[30:34] = struct.pack("<I", draw(st.sampled_from([0, 1, 2, 3, 4, 5, 6])))
    if kind == "PPM":
        data[:15] = b"P%c\n%d %d\n%d\n" % (
            draw(st.sampled_from(b"123456f")),
            draw(SIDES),
            draw(SIDES),
            draw(NUMBERS),
        )
    return bytes(data)


WHOLE = {
    "JPEG": saved("JPEG"), "progressive": saved("JPEG", progressive=True), "PNG": saved("PNG"), "BMP": saved("BMP"),
    "CMYK": saved("JPEG", PICTURE.convert("CMYK")), "TIFF": saved("TIFF"), "WebP": saved("WEBP"),
    "LZW": saved("TIFF", compression="tiff_lzw"), "JPEG in TIFF": saved("TIFF", compression="jpeg"),
    "GIF": saved("GIF", PICTURE.quantize(16)), "PPM": saved("PPM"), "lossless": saved("WEBP", lossless=True),
    "animated": saved("WEBP", save_all=True, append_images=[PICTURE]),
}  # fmt: skip
ANY = (
    pngs() | jpegs() | tiffs() | others() | st.sampled_from(sorted(WHOLE.values())).flatmap(damaged)
)
