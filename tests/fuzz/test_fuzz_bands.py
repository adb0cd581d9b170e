"""Images of many channels that a stranger wrote: TIFF and NumPy's arrays."""

import io
import struct
import zlib

import numpy as np
import pytest
import tifffile
from hypothesis import given, settings
from hypothesis import strategies as st
from support import forged_images
from support.hostile_files import attempt, damaged

from config import get_config
from loading.transforms import EvalTransform, TrainTransform, bands_of

CONFIG = get_config(None, ["DATA.IMAGE_SIZE", "16", "DATA.IMAGE_CHANNELS", "5", "DATA.MAX_PIXELS", "1000000",
                           "DATA.IMAGENET_MEAN", "0.5", "DATA.IMAGENET_STD", "0.5"])  # fmt: skip
EVALUATED = EvalTransform(CONFIG)
TRAINED = TrainTransform(CONFIG)
VALUES = np.random.default_rng(0).integers(0, 65536, (24, 32, 5), np.uint16)


def load(data):
    """As an evaluation and as a training load it."""
    image = bands_of(data, 5, "file", CONFIG.DATA.MAX_PIXELS)
    EVALUATED(image)
    TRAINED(image, np.random.default_rng(0))


def try_image(data):
    return attempt("bands", len(data), lambda: load(data))


def tiff(values=VALUES, **options):
    tifffile.imwrite(
        file := io.BytesIO(), values, photometric="minisblack", metadata=None, **options
    )
    return file.getvalue()


def npy(shape, descr="<u2", body=None, text=None):
    """A .npy file whose header says what it says."""
    head = (text or str({"descr": descr, "fortran_order": False, "shape": shape})).encode()
    return (
        b"\x93NUMPY\2\0"
        + struct.pack("<I", len(head) + 1)
        + head
        + b"\n"
        + (VALUES.tobytes() if body is None else body)
    )


PLANES = np.moveaxis(VALUES, 2, 0)
WHOLE = {
    "rows": tiff(planarconfig="contig"),
    "packed": tiff(planarconfig="contig", compression="zlib", predictor=True, byteorder=">"),
    "planes": tiff(PLANES, planarconfig="separate", rowsperstrip=5, compression="zlib"),
    "tiles": tiff(PLANES.astype(np.float32), planarconfig="separate", tile=(16, 16), bigtiff=True),
    "array": npy(VALUES.shape),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_a_whole_image_is_read(kind):
    assert try_image(WHOLE[kind]) == ""


def packed_tiff(width, height, strip, **lies):
    """A TIFF of five 8-bit channels in one strip."""
    tags = {
        256: width,
        257: height,
        258: 8,
        259: 8,
        262: 1,
        273: 8,
        277: 5,
        278: height,
        279: len(strip),
        284: 1,
    }
    tags |= {int(tag): value for tag, value in lies.items()}
    entries = [(tag, 4, 1, value) for tag, value in sorted(tags.items())]
    return b"II*\0" + struct.pack("<I", 8 + len(strip)) + strip + forged_images.directory(entries)


def tiff_of_many_kinds(count):
    """A TIFF whose tags give its five channels ``count`` sizes and as many formats."""
    numbers = struct.pack(f"<{count}H", *range(count))
    entries = [(256, 4, 1, 4), (257, 4, 1, 4), (258, 3, count, 8), (262, 3, 1, 1), (273, 4, 1, 8),
               (277, 3, 1, 5), (278, 4, 1, 4), (279, 4, 1, 10), (339, 3, count, 8)]  # fmt: skip
    return (
        b"II*\0" + struct.pack("<I", 8 + len(numbers)) + numbers + forged_images.directory(entries)
    )


ZEROS = zlib.compress(bytes(1 << 28), 1)  # 256 MiB
COSTLY = {
    "a strip of 256 MiB": (lambda: packed_tiff(100, 100, ZEROS), ""),
    "pixels by the header": (
        lambda: packed_tiff(60_000, 60_000, b"x"),
        "it has 60000 x 60000 pixels, DATA.MAX_PIXELS",
    ),
    "bytes by the header": (
        lambda: packed_tiff(1000, 1000, b"x", **{"258": 32, "339": 3}),
        "it has 1000 x 1000 pixels of 20 bytes: more than 8 of DATA.MAX_PIXELS",
    ),
    "tiles": (
        lambda: packed_tiff(8, 8, b"x", **{"322": 1 << 16, "323": 1 << 16, "324": 8, "325": 1}),
        "its 1 tiles of 65536 x 65536 pixels are too many for 8 x 8 pixels",
    ),
    "tags that overlap": (
        lambda: forged_images.tags_that_overlap(300_000),
        "it has 1 channel, but DATA.IMAGE_CHANNELS is 5",
    ),
    "kinds of values": (
        lambda: tiff_of_many_kinds(20_000),
        "it has channels of 0 and 1 and 10 and 100 bits and the photometric interpretation 1",
    ),
    "a shape beyond numbers": (
        lambda: npy((1 << 70, 1 << 70, 5)),
        "its header isn't one that NumPy writes",
    ),
    "a negative shape": (lambda: npy((-24, -32, 5)), "its header isn't one that NumPy writes"),
    "an object": (
        lambda: npy((1, 1, 5), "|O", b"cos\nsystem\n(S'true'\ntR."),
        "its values are object, expected",
    ),
    "parentheses": (lambda: npy((), text="(" * 9000), "its header isn't one that NumPy writes"),
    "a header of 4 MB": (
        lambda: npy((), text="{" + " " * (4 << 20) + "}"),
        "its header isn't one that NumPy writes",
    ),
    "fields": (lambda: npy((24, 32, 5), [("a", "<u2")]), "its header isn't one that NumPy writes"),
}


@pytest.mark.parametrize("what", COSTLY)
def test_what_claims_much_costs_little(what):
    make, said = COSTLY[what]
    line = try_image(make())
    assert line.startswith("file: ") if said else line == ""
    assert said in line


@st.composite
def lying_tiffs(draw):
    """A whole one with other values of its tags."""
    data = bytearray(WHOLE[draw(st.sampled_from(["rows", "packed", "planes"]))])
    order = "<" if data[:1] == b"I" else ">"
    (start,) = struct.unpack_from(f"{order}I", data, 4)
    (count,) = struct.unpack_from(f"{order}H", data, start)
    for _ in range(draw(st.integers(1, 3))):
        place = start + 2 + 12 * draw(st.integers(0, count - 1))
        form, offset = draw(st.sampled_from([("H", 0), ("H", 2), ("I", 4), ("I", 8), ("H", 8)]))
        number = draw(forged_images.NUMBERS | st.sampled_from([2, 3, 4, 5, 8, 16, 32]))
        struct.pack_into(
            order + form, data, place + offset, number % (1 << (16 if form == "H" else 32))
        )
    return bytes(data)


@st.composite
def npys(draw):
    sides = st.sampled_from([0, 1, 5, 24, 32, -1, 1 << 40, True, None, 2.0])
    shape = draw(st.just(VALUES.shape) | st.lists(sides, max_size=4).map(tuple))
    descr = draw(
        st.sampled_from(
            ["<u2", ">u2", "|u1", "<f4", "<f8", "|O", "|V8", "<U3", "M8[s]", "", "(5,)u1", 7]
        )
    )
    return npy(shape, descr, draw(st.sampled_from([VALUES.tobytes(), b"", b"x" * 5])))


@settings(max_examples=max(5, settings.default.max_examples * 3 // 10))
@given(
    lying_tiffs()
    | npys()
    | forged_images.tiffs()
    | st.sampled_from(sorted(WHOLE.values())).flatmap(damaged)
)
def test_an_image_is_read_or_refused(data):
    try_image(data)
