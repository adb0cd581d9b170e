"""Image files for Hypothesis that are built piece by piece, with wrong lengths, offsets and counts,
and with shared pieces.

``forged_images`` damages whole files. In these files, each piece is valid, but together they are
out
of proportion: a thousand strips share one stream, run lengths skip rows, a million bytes are
filling. Most of them can be read.
"""

import lzma
import math
import re
import struct
import zlib

import numpy as np
from hypothesis import strategies as st
from PIL import Image

from support import forged_images

# Some exceed the limits: a side of 1,000,001, or an image of more than a million pixels.
SIDES = st.sampled_from(
    [1, 2, 3, 8, 15, 16, 17, 255, 256, 1000, 4097, 65_535, 1_000_000, 1_000_001, 8_000_000]
)
_SIZES = [
    (1, 1), (16, 16), (300, 200), (1000, 1000), (4097, 240), (65_535, 15), (15, 65_535), (1_000_000, 1), (1, 1_000_000),
]  # fmt: skip
COUNTS = st.sampled_from([0, 1, 2, 3, 10, 255, 256, 1000, 5000, 20_000, 100_000])
LIES = st.sampled_from([0, 1, 255, 65_535, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1])


def _either(draw, honest, lies=LIES):
    """Returns mostly the right number, and sometimes a wrong one."""
    is_wrong = draw(st.integers(0, 7)) == 0
    return draw(lies) if is_wrong else honest


def _size(draw):
    """Returns a width and a height, mostly of an image within the limits."""
    if draw(st.integers(0, 5)) == 0:
        return draw(st.tuples(SIDES, SIDES))
    return draw(st.sampled_from(_SIZES))


def _times(draw, pieces, most=1 << 20):
    """Returns pieces, each repeated many times: up to ``most`` bytes."""
    result = b""
    for _ in range(draw(st.integers(1, 4))):
        piece = draw(pieces)
        result += piece * min(draw(COUNTS), (most - len(result)) // max(1, len(piece)))
    return result


def bmp(width, height, content, bits=8, compression=1, colours=0, length=40):
    """A BMP of these numbers; of 8 bits with a black palette."""
    palette = bytes(4 * min(colours or 1 << min(bits, 8), 256)) if bits <= 8 else b""
    header = struct.pack(
        "<IiiHHIIiiII", length, width, height, 1, bits, compression, len(content), 0, 0, colours, 0
    )
    body = header.ljust(length, b"\0") + palette + content
    return b"BM" + struct.pack("<IHHI", 14 + len(body), 0, 0, 14 + length + len(palette)) + body


@st.composite
def bmps(draw):
    """Run lengths with deltas, plain rows, palettes, headers of all lengths."""
    width, height = _size(draw)
    height *= draw(st.sampled_from([1, 1, 1, -1]))
    bits = draw(st.sampled_from([1, 4, 8, 16, 24, 32]))
    compression = draw(st.sampled_from([0, 1, 1, 1, 2, 2, 3]))
    if compression in (1, 2):
        bits = 8 // compression
    tokens = st.sampled_from([
        b"\0\2\xff\xff", b"\0\2\0\xff", b"\0\2\xff\0", b"\0\2\0\0", b"\xff\1", b"\1\2", b"\0\0", b"\0\1",
        b"\0\3\1\2\3\4", b"\0\xff" + bytes(256),
    ])  # fmt: skip
    content = _times(draw, tokens)
    if draw(st.booleans()):  # all of it
        row = (width * bits + 31) // 32 * 4 if compression in (0, 3) else width // 128 + 2
        content += b"\x81\0" * min(row * abs(height), 1 << 20)
    colours = draw(st.sampled_from([0, 1, 2, 16, 256, 65_536, 65_537]))
    length = draw(st.sampled_from([40, 40, 52, 56, 64, 108, 124]))
    data = bytearray(bmp(width, height, content, bits, compression, colours, length))
    if draw(st.integers(0, 7)) == 0:
        data[10:14] = struct.pack("<I", draw(LIES))  # where the pixels begin
    return bytes(data)


def _gif_blocks(content):
    """Content in GIF's blocks of up to 255 bytes."""
    parts = (content[place : place + 255] for place in range(0, len(content), 255))
    return b"".join(bytes([len(part)]) + part for part in parts) + b"\0"


@st.composite
def gifs(draw):
    """Screens and frames of other sizes, extensions in number, LZW of repeated codes."""
    sides = st.sampled_from([1, 2, 16, 255, 1000, 4097, 65_535])
    screen = [min(side, 65_535) for side in _size(draw)]
    palette = draw(st.booleans())
    data = (
        b"GIF89a"
        + struct.pack("<HHBBB", *screen, 0xF7 if palette else 0, 0, 0)
        + bytes(768 if palette else 0)
    )
    extensions = st.sampled_from([
        b"!\xf9\4\1\0\0\0\0", b"!\xf9\4\x09\0\0\0\0", b"!\xf9\4\x0d\0\0\0\0",
        b"!\xfe" + _gif_blocks(b"a" * 40), b"!\xff\x0bNETSCAPE2.0\3\1\0\0\0",
        b"!\xff\0", b"!\1\0", b"\0",
    ])  # fmt: skip
    data += _times(draw, extensions, 1 << 19)
    for _ in range(draw(st.integers(1, 3))):
        frame = [_either(draw, side, sides) for side in screen]
        place = _either(draw, 0, st.sampled_from([1, 255, 65_535]))
        flags = draw(st.sampled_from([0, 0x40, 0x87]))
        data += struct.pack("<BHHHHB", 0x2C, place, place, *frame, flags) + bytes(
            768 if flags & 0x80 else 0
        )
        codes = st.sampled_from([b"\0", b"\xff", b"\x80", bytes(range(256)), b"\0\1", b"\x55\xaa"])
        lzw = _times(draw, codes, 1 << 19)
        if draw(st.booleans()):
            lzw += forged_images.saved("GIF", Image.new("P", (1000, 1000)))[-4000:]
        data += bytes([draw(st.sampled_from([1, 2, 4, 8, 8, 8, 8, 11, 12, 13]))]) + _gif_blocks(lzw)
    return data + b";"


@st.composite
def jpegs(draw):
    """Fill, segments in number, scans and restarts in number, sampling factors, sides."""
    mode = draw(st.sampled_from(["RGB", "L", "CMYK"]))
    side = draw(st.sampled_from([1, 16, 100]))
    options = {"progressive": draw(st.booleans()), "quality": draw(st.sampled_from([1, 75, 100]))}
    if draw(st.booleans()):
        options["restart_marker_blocks"] = 1
    whole = forged_images.saved("JPEG", Image.new(mode, (side, side)), **options)
    pieces = st.sampled_from([
        b"\xff", b"\xff\x01", b"\xff\xd0", forged_images.segment(0xFE, b"a"), forged_images.segment(0xE1, bytes(60_000)),
        forged_images.segment(0xDD, b"\0\1"), forged_images.segment(0xDB, bytes([0, *range(1, 65)])), b"\0", b"\xff\0",
        forged_images.segment(0xE2, b"MPF\0" + bytes(40)), forged_images.segment(0xE2, b"ICC_PROFILE\0\1\1" + bytes(40)),
    ])  # fmt: skip
    scan = whole.index(b"\xff\xda")
    places = [2, scan, scan + 4, len(whole) - 2, len(whole)]
    place = draw(st.sampled_from(places))
    frame = next(
        place
        for place in range(2, scan)
        if whole[place] == 0xFF and whole[place + 1] in (0xC0, 0xC2)
    )
    told = bytearray(whole)
    if draw(st.booleans()):
        told[frame + 5 : frame + 9] = struct.pack(
            ">HH", *(min(65_535, side) for side in _size(draw))
        )
    if draw(st.booleans()):
        told[frame + 11] = draw(st.sampled_from([0x11, 0x22, 0x44, 0x41, 0x14, 0x33, 0x00]))
    last = bytes(told[told.rindex(b"\xff\xda") : -2])
    told[place:place] = _times(draw, pieces)
    more = last * draw(st.sampled_from([0, 0, 1, 10, 1000]))
    return bytes(told[:-2]) + more[: 1 << 20] + b"\xff\xd9"


@st.composite
def pngs(draw):
    """Every depth and colour, interlacing, streams of any ratio in pieces of any size, chunks in
    number.
    """
    width, height = _size(draw)
    colour = draw(st.sampled_from([0, 2, 3, 4, 6]))
    depths = {0: [1, 2, 4, 8, 16], 3: [1, 2, 4, 8]}.get(colour, [8, 16])
    depth = _either(draw, draw(st.sampled_from(depths)), st.integers(0, 32))
    content = draw(
        st.sampled_from([bytes(1 << 16), bytes(1 << 22), b"\4" * (1 << 20), bytes(range(256)) * 64])
    )
    if draw(st.booleans()):
        content = bytes(min(9 * (width + 1) * (height + 1), 1 << 24))
    stream = draw(
        st.sampled_from([zlib.compress(content, 9), zlib.compress(content, 0)[: 1 << 20]])
    )
    if draw(st.booleans()):
        stream = b"\x78\x01" + b"\0\0\0\xff\xff" * draw(COUNTS) + stream[2:]
    piece = draw(st.sampled_from([1, 10, 8192, 1 << 30]))
    piece = max(piece, len(stream) // 5000)
    parts = (stream[place : place + piece] for place in range(0, len(stream), piece))
    chunks = b"".join(forged_images.chunk(b"IDAT", part) for part in parts)
    between = st.sampled_from([
        forged_images.chunk(b"IDAT"), forged_images.chunk(b"PLTE", bytes(768)), forged_images.chunk(b"tRNS", bytes(256)),
        forged_images.chunk(b"tRNS", b"\0\1"), forged_images.chunk(b"ABCD", b"a"), forged_images.chunk(b"fdAT", bytes(100)),
        forged_images.chunk(b"acTL", struct.pack(">II", 1 << 30, 0)), forged_images.chunk(b"iCCP", b"k\0\0" + stream[:9999]),
        forged_images.chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(1 << 22), 9)),
        *(forged_images.chunk(kind, bytes(1 << 18)) for kind in (b"PLTE", b"tRNS", b"ABCD", b"IHDR", b"IEND")),
    ])  # fmt: skip
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, draw(st.integers(0, 1)))
    palette = forged_images.chunk(b"PLTE", bytes(3 * draw(st.sampled_from([1, 16, 256, 257]))))
    data = b"\x89PNG\r\n\x1a\n" + forged_images.chunk(b"IHDR", header) + palette * (colour == 3)
    return data + _times(draw, between, 1 << 19) + chunks + forged_images.chunk(b"IEND")


@st.composite
def ppms(draw):
    """Text and bytes, comments and spaces in number, numbers of any length, every highest value."""
    kind = draw(st.sampled_from("123456f"))
    fillers = st.sampled_from([b"#\n", b"# a\r", b" ", b"\n", b"#" + b"a" * 100 + b"\n", b"#"])
    filler = b"\n" + (_times(draw, fillers, 1 << 18) + b"\n" if draw(st.booleans()) else b"")
    numbers = [*_size(draw), draw(st.sampled_from([1, 254, 255, 256, 4095, 65_535, 65_536, -1]))]
    head = f"P{kind}".encode() + filler + b" ".join(b"%d" % number for number in numbers) + b"\n"
    content = st.sampled_from(
        [b"1 ", b"0", b"255 255\n", b"#\n", b"9" * 100, b"\0", bytes(range(256)), b"#a\n1 ", b"-1 "]
    )
    if draw(st.booleans()):
        pixels = min(numbers[0] * numbers[1] * 3, 1 << 20)
        return head + (b"1 " * pixels if kind in "123" else b"\1" * min(4 * pixels, 1 << 20))
    return head + _times(draw, content)


def _zeros(compression, count):
    """``count`` zero bytes in a TIFF's compression."""
    if compression in (8, 32946):
        return zlib.compress(bytes(count), 9)
    if compression == 34925:
        return lzma.compress(bytes(count))
    if compression == 32773:
        return b"\x81\0" * (count // 128 + 1)
    if compression == 5:
        return forged_images.saved(
            "TIFF", Image.new("L", (max(1, count), 1)), compression="tiff_lzw"
        )[8:]
    if compression == 7:
        return forged_images.saved("JPEG", Image.new("L", (16, 16)))
    if compression == 50001:
        return forged_images.saved("WEBP", Image.new("RGB", (16, 16)), lossless=True)
    return bytes(count)


def tiff(big, tags, tiled, places, lengths, content):
    """A TIFF of these tags and of strips or tiles, whose places are counted from where ``content``
    begins.
    """
    entry, number, kind, before = ("<HHQQ", "<Q", 16, 16) if big else ("<HHII", "<I", 4, 8)
    form = np.dtype(number)
    count = len(places)
    lists = before + (8 if big else 2) + (len(tags) + 2) * struct.calcsize(entry) + form.itemsize
    start = lists + 2 * count * form.itemsize
    places = ((places + np.uint64(start)) % np.uint64((1 << 8 * form.itemsize) - 1)).astype(form)
    lengths = lengths.astype(form)
    codes = (324, 325) if tiled else (273, 279)
    for code, values, place in zip(
        codes, (places, lengths), (lists, lists + count * form.itemsize), strict=True
    ):
        tags = [*tags, (code, kind, count, int(values[0]) if count == 1 else place)]
    packed = b"".join(struct.pack(entry, *tag) for tag in sorted(tags))
    directory = struct.pack("<Q" if big else "<H", len(tags)) + packed + struct.pack(number, 0)
    begin = b"II+\0\x08\0\0\0" + struct.pack("<Q", 16) if big else b"II*\0" + struct.pack("<I", 8)
    return begin + directory + places.tobytes() + lengths.tobytes() + content


@st.composite
def tiffs(draw):
    """Strips and tiles whose streams are shared, overlap, repeat or lie beyond the end; every
    compression.
    """
    width, height = _size(draw)
    compression = draw(
        st.sampled_from(
            [1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 32773, 32946, 34925, 50000, 50001, 34676, 32809]
        )
    )
    forms = [
        (1, 1, 0),
        (8, 1, 1),
        (8, 1, 0),
        (8, 3, 2),
        (8, 4, 5),
        (8, 3, 6),
        (16, 1, 1),
        (16, 3, 2),
    ]
    bits, samples, meaning = draw(st.sampled_from(forms))
    if draw(st.integers(0, 7)) == 0:
        bits, samples, meaning = (draw(st.integers(0, 40)) for _ in range(3))
    tiled = draw(st.booleans())
    across = (
        _either(draw, draw(st.sampled_from([16, 64, 256])), st.sampled_from([4096, 3_000_000]))
        if tiled
        else width
    )
    down = _either(
        draw,
        draw(st.sampled_from([16, 64, 256])),
        st.sampled_from([1, 4096, 1 << 30, (1 << 32) - 1]),
    )
    count = max(1, draw(COUNTS))
    if draw(st.integers(0, 3)):  # as many as are needed
        count = min(100_000, -(-width // across) * -(-height // down))
    held = min(across * min(down, 1 << 20 if tiled else height) * samples * bits // 8 + 1, 1 << 23)
    stream = _zeros(compression, held)[: 1 << 19]
    if draw(st.integers(0, 3)) == 0:  # deflate's blocks of nothing
        stream = stream[: len(stream) // 2] + b"\0\0\0\xff\xff" * min(draw(COUNTS), 50_000)
    tags = [
        (254, 4, 1, 0), (256, 4, 1, width), (257, 4, 1, height), (258, 3, 1, bits), (259, 3, 1, compression),
        (262, 3, 1, meaning), (277, 3, 1, samples), (284, 3, 1, draw(st.sampled_from([1, 1, 2]))),
        (317, 3, 1, draw(st.sampled_from([1, 1, 2, 3]))),
    ]  # fmt: skip
    tags += [(322, 4, 1, across), (323, 4, 1, min(down, 1 << 30))] if tiled else [(278, 4, 1, down)]
    if draw(st.integers(0, 3)) == 0:
        tags.append(
            (530, 3, 2, draw(st.sampled_from([0x00010001, 0x00020002, 0x00040004, 0x00040001])))
        )
    if draw(st.integers(0, 3)) == 0:  # XMP in number, each all of the file
        tags += [(700, 1, 1 << 24, 0)] * min(draw(COUNTS), 50_000)
    if draw(st.integers(0, 3)) == 0:  # a list of rational numbers
        tags.append((draw(st.sampled_from([282, 283, 529, 532])), 5, draw(COUNTS), 8))
    layout = draw(st.sampled_from(["shared", "in a row", "in a row", "overlapping", "beyond"]))
    step = {"shared": 0, "in a row": len(stream), "overlapping": 1, "beyond": 1 << 20}[layout]
    places = np.arange(count, dtype=np.uint64) * np.uint64(step)
    lengths = np.full(count, _either(draw, len(stream)), np.uint64)
    if layout == "in a row":
        stream *= max(1, min(count, (1 << 20) // max(1, len(stream))))
    return tiff(draw(st.booleans()), tags, tiled, places, lengths, stream)


def _riff(*chunks):
    parts = (
        kind + struct.pack("<I", len(data)) + data + bytes(len(data) % 2) for kind, data in chunks
    )
    body = b"WEBP" + b"".join(parts)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def vp8l(side, groups):
    """A lossless WebP's stream: ``side`` x ``side`` pixels of one colour.

    Args:
        groups: sets of Huffman codes, up to 65,536. Blocks of 4 x 4 pixels name one set after the
            other.
    """
    one_symbol = [(1, 1), (0, 1), (0, 1), (0, 1)]  # a code of symbol 0 alone, which takes no bits
    # Codes of 8 bits for 256 symbols: 256 lengths, whose own code has one symbol, the length 8.
    all_symbols = [(0, 1), (8, 4), *[(0, 3)] * 11, (1, 3), (1, 1), (3, 3), (254, 8)]
    bits = [(0x2F, 8), (side - 1, 14), (side - 1, 14), (0, 4)]
    # no transform, no cache; sets of codes, of blocks of 4 x 4
    bits += [(0, 1), (0, 1), (1, 1), (0, 3)]
    # The image of sets: green is a number's low byte, red its high byte.
    bits += [(0, 1), *all_symbols * 2, *one_symbol * 3]
    # Codes begin with their highest bit.
    packed = [int(f"{value:08b}"[::-1], 2) for value in range(256)]
    for block in range((-(-side // 4)) ** 2):
        high, low = divmod(block % groups, 256)
        bits += [(packed[low], 8), (packed[high], 8)]
    bits += one_symbol * 5 * groups
    values, widths = np.array(bits, np.uint32).T[:, :, None]
    places = np.arange(14, dtype=np.uint32)
    stream = (values >> places & 1)[places < widths]
    return np.packbits(stream, bitorder="little").tobytes()


def webp_of_sets(side, groups, alpha=False):
    """A WebP of ``vp8l``'s pixels, or of plain pixels and its alpha."""
    stream = vp8l(side, groups)
    if not alpha:
        return _riff((b"VP8L", stream))
    canvas = b"\x10\0\0\0" + (side - 1).to_bytes(3, "little") * 2
    plain = forged_images.saved("WEBP", Image.new("RGB", (side, side)))
    # Of alpha the stream has no header: its 5 bytes are left out, and a byte tells that it is
    # compressed.
    return _riff((b"VP8X", canvas), (b"ALPH", b"\1" + stream[5:]), (plain[12:16], plain[20:]))


@st.composite
def webps(draw):
    """Canvases and frames of other sizes, frames and chunks in number, a set of codes for each
    block.
    """
    if draw(st.integers(0, 7)) == 0:
        side = draw(st.sampled_from([4, 100, 1000]))
        blocks = (side // 4) ** 2
        groups = draw(st.sampled_from([1, blocks // 2 + 1, blocks]))
        return webp_of_sets(side, groups, draw(st.booleans()))
    side = draw(st.sampled_from([1, 16, 1000]))
    inner = forged_images.saved(
        "WEBP", Image.new("RGB", (side, side)), lossless=draw(st.booleans())
    )
    image = (inner[12:16], inner[20:])
    sides = st.sampled_from([1, 2, 16, 1000, 1001, 16_383, 16_384, 1 << 24])
    width = _either(draw, draw(st.sampled_from([side, 1000])), sides)
    height = _either(draw, draw(st.sampled_from([side, 1000])), sides)
    animated = draw(st.booleans())
    flags = draw(st.sampled_from([0x00, 0x10, 0x3C])) | (2 if animated else 0)
    canvas = (
        bytes([flags, 0, 0, 0])
        + (width - 1).to_bytes(3, "little")
        + (height - 1).to_bytes(3, "little")
    )
    frame = _either(draw, side - 1, st.sampled_from([0, 15, 16_382, (1 << 24) - 1]))
    corner = _either(draw, 0, st.sampled_from([1, 1000, (1 << 24) - 1]))
    shown = corner.to_bytes(3, "little") * 2 + frame.to_bytes(3, "little") * 2 + b"\x64\0\0\0"
    nested = (
        image[0]
        + struct.pack("<I", _either(draw, len(image[1])))
        + image[1]
        + bytes(len(image[1]) % 2)
    )
    frames = (
        [[(b"ANMF", shown + nested)]]
        if animated
        else [[image], [(b"ALPH", b"\1" + bytes(30)), image]]
    )
    frames += [[(b"ANMF", shown + nested + b"ABCD\0\0\0\0" * draw(COUNTS))]] * animated
    others = [[(kind, bytes(1000))] for kind in (b"EXIF", b"ABCD", b"ICCP", b"XMP ")]
    others += [[(b"ABCD", b"")]]
    pieces = st.sampled_from(frames * 4 + others + [[image]])
    chunks = [(b"VP8X", canvas), *([(b"ANIM", bytes(6))] if animated else [])]
    chunks += frames[0] if draw(st.integers(0, 3)) else []
    for _ in range(draw(st.integers(0, 3))):
        piece = draw(pieces)
        size = sum(8 + len(data) for _, data in piece)
        chunks += piece * max(1, min(draw(COUNTS), (1 << 19) // size))
    return _riff(*chunks)


@st.composite
def npys(draw):
    """Arrays whose header and content differ."""
    shape = [*reversed(_size(draw)), *draw(st.sampled_from([[], [1], [1], [3]]))]
    if draw(st.integers(0, 3)) == 0:
        shape = draw(st.lists(st.sampled_from([0, 1, 3, 16, 1000, 1_000_001, 1 << 62]), max_size=5))
    kind = draw(
        st.sampled_from(["|u1", "|u1", "<u2", ">u2", "<f4", "<f8", "|O", "<c16", "<U9", "|V0"])
    )
    head = repr(
        {"descr": kind, "fortran_order": draw(st.booleans()), "shape": tuple(shape)}
    ).encode()
    if draw(st.integers(0, 7)) == 0:
        head = re.sub(rb"(\d)([,)])", rb"\1L\2", head)  # numbers as Python 2 wrote them
    head = (
        _either(
            draw, head, st.sampled_from([b"(" * 9000, b"{" + b"'a':1," * 9000 + b"}", b"9" * 9999])
        )
        + b"\n"
    )
    content = _times(draw, st.sampled_from([b"\0", b"\xff", bytes(48)]))
    if draw(st.booleans()):
        content = bytes(min(math.prod(shape) * {"|u1": 1, "<f4": 4}.get(kind, 2), 1 << 20))
    return b"\x93NUMPY\1\0" + struct.pack("<H", _either(draw, len(head)) & 0xFFFF) + head + content


ALL = {
    "BMP": bmps(), "GIF": gifs(), "JPEG": jpegs(), "PNG": pngs(), "PPM": ppms(), "TIFF": tiffs(), "WebP": webps(),
    "NumPy": npys(),
}  # fmt: skip
