"""Images that haven't the channels, or the kind of values, that a configuration asks for."""

import io

import numpy as np
import pytest
from PIL import Image
from support.multiband_images import FIVE, MOST, bands, npy, saved, tiff
from support.picture_files import WIDE, png

from config import get_config
from datasets import get_dataset
from errors import InputError, RunError, Unreadable
from loading.transforms import Bands, EvalTransform, bands_of, image_of
from settings.needs import float_pixels


def object_array():
    np.lib.format.write_array(file := io.BytesIO(), np.array([[{}]]), allow_pickle=True)
    return file.getvalue()


def npy_of(header):
    """A .npy file of this header, without values."""
    return b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header


REFUSED = {
    "channels": (lambda: tiff(bands()), 4, "it has 5 channels, but DATA.IMAGE_CHANNELS is 4"),
    "first axis": (lambda: npy(np.moveaxis(bands(), 2, 0)), 5, "it has 80 channels, but DATA.IMAGE_CHANNELS is 5"),
    "alpha": (lambda: saved(Image.new("RGBA", (4, 4)), "PNG"), 3, "it has 4 channels, but DATA.IMAGE_CHANNELS is 3"),
    "grey": (lambda: saved(Image.new("L", (4, 4)), "JPEG"), 3, "it has 1 channel, but DATA.IMAGE_CHANNELS is 3"),
    "inks": (lambda: saved(Image.new("CMYK", (4, 4)), "JPEG"), 4, "its pixels are Pillow's CMYK"),
    "deep colours": (lambda: png(WIDE, 2), 3, "Pillow only keeps 8 bits per channel; save it as TIFF"),
    "doubles": (lambda: npy(bands().astype(float)), 5, "its values are float64, expected uint8, uint16 or float32"),
    "objects": (object_array, 1, "its values are object, expected"),
    "integers": (lambda: tiff(bands().astype(np.int32)), 5, "it has channels of 32 bits and the photometric interp"),
    "one axis": (lambda: npy(np.zeros(4, np.uint8)), 1, r"it is an array \[4\], expected \[H, W\] or \[H, W, C\]"),
    "nothing": (lambda: npy(np.zeros((0, 4), np.uint8)), 1, r"it is an array \[0, 4\], expected"),
    "cut short": (lambda: npy(bands())[:-1], 5, r"it has the shape \[60, 80, 5\], which doesn't match its size"),
    "a header of spaces": (lambda: npy_of(b"1" + b" " * 9000 + b"$"), 5, "its header isn't one that NumPy writes"),
    "a header that Python warns of": (
        lambda: npy_of(b"{'descr': '<f4', 'fortran_order': False, 'shape': (0x1for 2, 2), }"),
        5,
        "its header isn't one that NumPy writes",
    ),
    "a header without an end": (lambda: npy(bands())[:8] + b"\xff\xff{}", 5, "its header isn't one that NumPy writes"),
    "not numbers": (lambda: npy(bands("float32") / 0), 5, "some of its values are infinite or NaN"),
    "pixels": (lambda: npy(np.zeros((1001, 1000), np.uint8)), 1, "it has 1000 x 1001 pixels, DATA.MAX_PIXELS is"),
    "bytes": (lambda: npy(np.zeros((500, 500, 64), np.uint8)), 64, "500 pixels of 64 bytes: more than 8 of DATA.MAX"),
    "a tile": (lambda: tiff(bands(), tile=(1024, 1024)), 5, "it has 1024 x 1024 pixels, DATA.MAX_PIXELS is 1000000"),
    "a format": (lambda: b"GRIB" + bytes(99), 5, "its format is unknown"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_what_is_no_such_image_is_refused_by_its_name(name):
    make, channels, said = REFUSED[name]
    with pytest.raises(RunError, match=f"^x.file: .*{said}.*; repair or remove it$"):
        bands_of(make(), channels, "x.file", MOST)


NO_COLOURS = {
    "five bands": (
        tiff(bands("uint8")),
        "its 5 channels aren't colours; set DATA.IMAGE_CHANNELS 5 to read them",
    ),
    "near infrared": (
        tiff(bands("uint8", 4), photometric="rgb", extrasamples=["unspecified"]),
        "1 of its 4 channels would be lost; set DATA.IMAGE_CHANNELS 4 to read them, or convert it",
    ),
    "two more": (
        tiff(bands("uint8"), photometric="rgb", extrasamples=["unassalpha", "unspecified"]),
        "2 of its 5 channels would be lost",
    ),
    "an array": (
        npy(bands("uint8", 3)),
        "it is a NumPy array, which needs DATA.IMAGE_DTYPE float32",
    ),
}


@pytest.mark.parametrize("name", NO_COLOURS)
def test_colours_and_grey_lose_no_band(tmp_path, name):
    data, said = NO_COLOURS[name]
    (tmp_path / "val/a").mkdir(parents=True)
    (tmp_path / "val/a/0.tif").write_bytes(data)
    options = [
        "DATA.DATASET",
        "folder",
        "DATA.DATA_PATH",
        str(tmp_path),
        "MODEL.NUM_CLASSES",
        "auto",
    ]
    with pytest.raises(RunError, match=f"val/a/0.tif: {said}"):
        get_dataset(get_config(None, options), "val")[0]


def test_alpha_is_dropped_from_colours_as_before(tmp_path):
    (tmp_path / "val/a").mkdir(parents=True)
    colours = bands("uint8", 4)
    (tmp_path / "val/a/0.tif").write_bytes(
        tiff(colours, photometric="rgb", extrasamples=["unassalpha"])
    )
    (tmp_path / "val/a/1.png").write_bytes(saved(Image.fromarray(colours), "PNG"))
    options = [
        "DATA.DATASET",
        "folder",
        "DATA.DATA_PATH",
        str(tmp_path),
        "MODEL.NUM_CLASSES",
        "auto",
    ]
    config = get_config(None, [*options, "DATA.IMAGE_SIZE", "16"])
    expected = EvalTransform(config)(Image.fromarray(np.ascontiguousarray(colours[..., :3])))
    dataset = get_dataset(config, "val")
    for found in (dataset[0][0], dataset[1][0]):
        np.testing.assert_array_equal(found, expected)


def test_a_narrow_image_is_refused_before_it_is_enlarged():
    """Floats of many channels take more than Pillow's pixels: the bound is on their bytes."""
    config = get_config(
        None,
        [*FIVE, "DATA.IMAGE_SIZE", "100", "DATA.MAX_PIXELS", "1000000", "DATA.CROP_PCT", "1.0"],
    )
    transform = EvalTransform(config)
    assert transform(Bands(np.ones((40, 1, 5), np.uint8))).shape == (100, 100, 5)  # 100 x 4000
    with pytest.raises(
        Unreadable, match="resized 100 x 4100: more than DATA.MAX_PIXELS leaves floats, 400000"
    ):
        transform(Bands(np.ones((41, 1, 5), np.uint8)))


def test_a_cache_that_holds_no_colours_is_refused():
    for values in (np.zeros((4, 4), np.uint16), np.zeros((4, 4, 2), np.uint8)):
        with pytest.raises(Unreadable, match="which isn't an 8-bit image"):
            image_of(values, "RGB")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["DATA.IMAGE_CHANNELS", "0"], "DATA.IMAGE_CHANNELS is 0, expected 1 to 64"),
        (["DATA.IMAGE_CHANNELS", "65"], "DATA.IMAGE_CHANNELS is 65, expected 1 to 64"),
        (
            ["DATA.IMAGE_DTYPE", "float16"],
            "DATA.IMAGE_DTYPE is 'float16', expected one of auto, float32",
        ),
        (["DATA.IMAGENET_MEAN", "[0.5,0.5,0.5]"], "expected 1 or 5 values, as IMAGE_CHANNELS"),
        (
            ["TRAIN.AUTO_AUGMENT", "3a"],
            "TRAIN.AUTO_AUGMENT is '3a', expected None with IMAGE_CHANNELS 5 of float32: it supports 8-bit colour and grey",
        ),
        (
            ["TRAIN.COLOR_JITTER", "0.4"],
            "TRAIN.COLOR_JITTER is 0.4, expected 0.0 with IMAGE_CHANNELS 5 of float32",
        ),
        (
            ["TRAIN.PHOTOMETRIC", "True"],
            "TRAIN.PHOTOMETRIC is True, expected False with IMAGE_CHANNELS 5 of float32: it supports 8-bit co",
        ),
        (
            ["DATA.LOADER", "dali"],
            "DATA.LOADER is 'dali', expected paddle with IMAGE_CHANNELS 5 of float32",
        ),
        (
            ["DATA.DATASET", "folder", "DATA.FAST_EVAL", "True"],
            "DATA.FAST_EVAL .*with float32 pixels",
        ),
    ],
)
def test_what_is_for_8_bit_colours_alone_is_refused_at_the_start(options, message):
    with pytest.raises(InputError, match=message):
        get_config(None, [*FIVE, *options])


def test_which_images_are_floats():
    for channels, dtype, expected in (
        (1, "auto", False),
        (3, "auto", False),
        (2, "auto", True),
        (3, "float32", True),
    ):
        assert float_pixels({"IMAGE_CHANNELS": channels, "IMAGE_DTYPE": dtype}) == expected
