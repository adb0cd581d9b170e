"""Images that a stranger wrote, as an evaluation and a training load them."""

import forged
import numpy as np
import pytest
from hostile import attempt
from hypothesis import given

from config import get_config
from loading.transforms import EncodedImage, EvalTransform, TrainTransform, readable

CONFIG = get_config(None, ["DATA.IMAGE_SIZE", "16", "DATA.MAX_PIXELS", "1000000"])
PIXELS = CONFIG.DATA.MAX_PIXELS
EVALUATED, TRAINED = EvalTransform(CONFIG), TrainTransform(CONFIG)


def load(data):
    """As an evaluation and as a training load it."""
    with readable("file"):
        EVALUATED(EncodedImage(data, "RGB", "file", PIXELS).decode())
        TRAINED(EncodedImage(data, "RGB", "file", PIXELS), np.random.default_rng(0))


FOUND = {  # what each took before it was mended; the file, and what is said of it now ("": it is read)
    "EXIF of tags that overlap: 12.7 GB, 49 s": (lambda: forged.with_exif(forged.tags_that_overlap(400_000)), ""),
    "TIFF of tags that overlap: 13.6 GB, 34 s": (lambda: forged.tags_that_overlap(300_000), ""),
    "texts of 68 kB: 263 MB": (lambda: forged.text_bombs(64), ""),
    "3,000 scans": (lambda: forged.with_scans(990, 990, 3000), "decoding its 3010 scans of 990 x 990 pixels takes too"),
    "a comment: 8 s": (lambda: forged.with_comment(8 << 20), ""),
    "a narrow image: 13.6 GB": (
        lambda: forged.png(1, 50_000, pixels=forged.black(1, 50_000)),
        "it has 1 x 50000 pixels, resized 18 x 900000: more than DATA.MAX_PIXELS 1000000",
    ),
    "Ghostscript": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\nshowpage\n", "it is of no known format"),
    "100,000 segments": (
        lambda: b"\xff\xd8" + forged.segment(0xFE) * 100_000 + forged.saved("JPEG")[2:],
        "it is in too many parts; save it again",
    ),
}


@pytest.mark.parametrize("what", FOUND)
def test_what_was_found_costs_little(what):
    make, said = FOUND[what]
    data = make()
    line = attempt("image", len(data), lambda: load(data))
    assert line.startswith(f"file: {said}") if said else line == ""


@pytest.mark.parametrize("kind", forged.WHOLE)
def test_a_whole_image_is_read(kind):
    assert attempt("image", len(forged.WHOLE[kind]), lambda: load(forged.WHOLE[kind])) == ""


@given(forged.ANY)
def test_an_image_is_read_or_refused(data):
    attempt("image", len(data), lambda: load(data))
