"""Images that a stranger wrote, as an evaluation and a training load them."""

import zlib

import numpy as np
import pytest
from hypothesis import given
from support import forged_images
from support.hostile_files import attempt
from support.structured_images import bmp, tiff

from config import get_config
from loading.transforms import EncodedImage, EvalTransform, TrainTransform, readable

CONFIG = get_config(None, ["DATA.IMAGE_SIZE", "16", "DATA.MAX_PIXELS", "1000000"])
PIXELS = CONFIG.DATA.MAX_PIXELS
EVALUATED = EvalTransform(CONFIG)
TRAINED = TrainTransform(CONFIG)


def load(data):
    """As an evaluation and as a training load it."""
    with readable("file"):
        EVALUATED(EncodedImage(data, "RGB", "file", PIXELS).decode())
        TRAINED(EncodedImage(data, "RGB", "file", PIXELS), np.random.default_rng(0))


# a TIFF's of one pixel
GREY = [(256, 4, 1, 1), (257, 4, 1, 1), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1)]
# what each took before it was mended; the file, and what is said of it now ("": it is read)
FOUND = {
    "EXIF of tags that overlap: 12.7 GB, 49 s": (
        lambda: forged_images.with_exif(forged_images.tags_that_overlap(400_000)),
        "",
    ),
    "TIFF of tags that overlap: 13.6 GB, 34 s": (
        lambda: forged_images.tags_that_overlap(300_000),
        "",
    ),
    "texts of 68 kB: 263 MB": (lambda: forged_images.text_bombs(64), ""),
    "3,000 scans": (
        lambda: forged_images.with_scans(990, 990, 3000),
        "it has 990 x 990 pixels in more than 10 scans",
    ),
    "a comment: 8 s": (lambda: forged_images.with_comment(8 << 20), ""),
    "a narrow image: 13.6 GB": (
        lambda: forged_images.png(1, 50_000, pixels=forged_images.black(1, 50_000)),
        "it has 1 x 50000 pixels, resized 18 x 900000: more than DATA.MAX_PIXELS 1000000",
    ),
    "Ghostscript": (
        lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\nshowpage\n",
        "its format is unknown",
    ),
    "100,000 segments": (
        lambda: b"\xff\xd8"
        + forged_images.segment(0xFE) * 100_000
        + forged_images.saved("JPEG")[2:],
        "it has too many parts; save it again",
    ),
    "run lengths of BMP that skip rows: 4 GB": (
        lambda: bmp(8_000_000, 1, b"\0\2\xff\xff"),
        "it has 8000000 x 1 pixels, DATA.MAX_PIXELS is 1000000",
    ),
    "run lengths of BMP that skip 255 rows of a million": (
        lambda: bmp(1_000_000, 1, b"\0\2\xff\xff"),
        "decoding it takes more than 94 MiB",
    ),
    "tiles of TIFF that are wider than their image, of one stream: 18 s": (
        lambda: of_one_stream(188, (1, 3008), (3_000_000, 16)),
        "its 188 tiles of 3000000 x 16 pixels are too many for 1 x 3008 pixels",
    ),
    "strips of one stream": (
        lambda: of_one_stream(1000, (1000, 1000), (1000, 1), tiled=False),
        "its 1000 strips share bytes of the file",
    ),
    "strips that are named a thousand times": (
        lambda: of_one_stream(100_000, (1000, 999), (1000, 500), tiled=False),
        "its 100000 strips of 1000 x 500 pixels are too many",
    ),
    "a PPM of comments: 40 s": (
        lambda: b"P3\n1 1 255\n" + b"#\n" * (1 << 20) + b"1 2 3",
        "it is a PPM with 1048576 comments",
    ),
    "a JPEG of fill before its header: 18 s": (lambda: filled(2), ""),
    "a JPEG of fill before its end: 13 s": (lambda: filled(-2), ""),
    "arithmetic coding, for data that isn't there: 55 s": (
        lambda: forged_images.saved("JPEG", progressive=True).replace(b"\xff\xc2", b"\xff\xca"),
        "it is a JPEG with arithmetic or lossless coding",
    ),
    "300 frames of 21,838 channels that a JPEG doesn't have: 590 MB": (
        lambda: forged_images.saved("JPEG").replace(
            b"\xff\xc0", forged_images.segment(0xC0, bytes(65_520)) * 300 + b"\xff\xc0"
        ),
        "its JPEG header is damaged",
    ),
    "strips whose places are bytes: 223 MB": (
        lambda: b"II*\0\x08\0\0\0"
        + forged_images.directory([*GREY, (273, 6, 12_000_000, 200)])
        + bytes(12_000_200),
        "its tags have more than 500000 values",
    ),
    "strips whose lengths are signed": (
        lambda: b"II*\0\x08\0\0\0"
        + forged_images.directory([*GREY, (273, 4, 1, 8), (279, 9, 1, 1)]),
        "its tag 279 isn't of whole numbers",
    ),
    "BigTIFF for us, and another for Pillow: 315 MB": (
        lambda: b"MM\0+\0\x08\0\0" + bytes(200),
        "its format is unknown",
    ),
    "a narrow PNG: 20 bytes a pixel": (
        lambda: forged_images.png(1, 49_000_000, pixels=forged_images.black(1, 1)),
        "it has 1 x 49000000 pixels, DATA.MAX_PIXELS is 1000000",
    ),
}


def of_one_stream(count, size, part, tiled=True):
    """A TIFF whose strips or tiles are all the same zeros."""
    stream = zlib.compress(bytes(part[0] * part[1]), 9 if tiled else 0)
    tags = [
        (256, 4, 1, size[0]),
        (257, 4, 1, size[1]),
        (258, 3, 1, 8),
        (259, 3, 1, 8),
        (262, 3, 1, 1),
        (277, 3, 1, 1),
    ]
    tags += [(322, 4, 1, part[0]), (323, 4, 1, part[1])] if tiled else [(278, 4, 1, part[1])]
    places = np.zeros(count, np.uint64)
    return tiff(False, tags, tiled, places, places + np.uint64(len(stream)), stream)


def filled(place):
    whole = forged_images.saved("JPEG")
    return whole[:place] + b"\xff" * 31_000_000 + whole[place:]


@pytest.mark.parametrize("what", FOUND)
def test_what_was_found_costs_little(what):
    make, said = FOUND[what]
    data = make()
    line = attempt("image", len(data), lambda: load(data))
    assert line.startswith(f"file: {said}") if said else line == ""


@pytest.mark.parametrize("kind", forged_images.WHOLE)
def test_a_whole_image_is_read(kind):
    assert (
        attempt("image", len(forged_images.WHOLE[kind]), lambda: load(forged_images.WHOLE[kind]))
        == ""
    )


@given(forged_images.ANY)
def test_an_image_is_read_or_refused(data):
    attempt("image", len(data), lambda: load(data))
