"""Encoded images against Pillow's full decode and its antialiased resize, over scikit-learn's
photographs.
"""

import io

import numpy as np
import pytest
import simplejpeg
from PIL import Image
from sklearn.datasets import load_sample_images
from support.structured_images import tiff

from config import get_config, with_values
from datasets import get_dataset
from errors import RunError
from loading.transforms import EncodedImage, EvalTransform, TrainTransform
from loading.transforms.decode import _cut_jpeg, resized_crop
from ops import images

RNG = np.random.default_rng
BICUBIC = Image.Resampling.BICUBIC
# china.jpg, flower.jpg: 640 x 427
PHOTOGRAPHS = [Image.fromarray(pixels) for pixels in load_sample_images().images]


def encoded(image, kind="JPEG", **options):
    file = io.BytesIO()
    image.save(file, kind, **({"quality": 90} if kind == "JPEG" else {}), **options)
    return file.getvalue()


def pillows(data, mode="RGB"):
    return Image.open(io.BytesIO(data)).convert(mode)


def large(image):
    """2400 pixels wide, with a sensor's noise, without which it would hold nothing fine."""
    pixels = np.asarray(image.resize((2400, 1600), BICUBIC), np.float32)
    return Image.fromarray(
        (pixels + RNG(0).normal(0, 4, (1600, 2400, 1))).clip(0, 255).astype(np.uint8)
    )


def boxes(width, height, count):
    transform = TrainTransform(get_config(None, ["TRAIN.CROP_SCALE", "[0.08,1.0]"]))
    return [transform._crop_box(width, height, RNG(seed)) for seed in range(count)]


def distance(first, second):
    assert first.shape == second.shape
    return np.abs(first.astype(np.int16) - second).mean()


@pytest.fixture
def decoded_sizes(monkeypatch):
    """The (height, width) of each array that libjpeg-turbo decodes into."""
    sizes = []
    decode = simplejpeg.decode_jpeg

    def spy(data, *args, buffer, **options):
        sizes.append(buffer.shape[:2])
        return decode(data, *args, buffer=buffer, **options)

    monkeypatch.setattr(simplejpeg, "decode_jpeg", spy)
    return sizes


# ------------------------------------------------------------------- pixels

WAYS = [{}, {"progressive": True}, {"subsampling": 0}, {"restart_marker_rows": 1}]


@pytest.mark.smoke
@pytest.mark.parametrize("photograph", PHOTOGRAPHS, ids=["china", "flower"])
def test_crops_agree_with_pillows(photograph, decoded_sizes):
    for way in WAYS:
        data = encoded(photograph, **way)
        for box in boxes(*photograph.size, 6):
            found = resized_crop(EncodedImage(data, "RGB", "", 10**8), box, (224, 224), BICUBIC)
            assert distance(found, resized_crop(pillows(data), box, (224, 224), BICUBIC)) < 0.3
    assert decoded_sizes[0] == (boxes(*photograph.size, 1)[0][3] + 16, 640)


@pytest.mark.parametrize("photograph", PHOTOGRAPHS, ids=["china", "flower"])
def test_large_crops_are_scaled_while_decoding(photograph, decoded_sizes):
    image = large(photograph)
    data = encoded(image)
    decoded = pillows(data)
    scales = set()
    for size in (64, 96, 224):
        for box in ((0, 0, 2400, 1600), *boxes(*image.size, 5)):
            found = resized_crop(EncodedImage(data, "RGB", "", 10**8), box, (size, size), BICUBIC)
            assert distance(found, resized_crop(decoded, box, (size, size), BICUBIC)) < 1.0
            scale = 2400 // decoded_sizes[-1][1]
            room = min(box[2] - box[0], box[3] - box[1]) / size
            assert scale == max(k for k in (1, 2, 4, 8) if k == 1 or room >= 2.5 * k)
            scales.add(scale)
    assert scales == {1, 2, 4, 8}


@pytest.mark.parametrize("photograph", PHOTOGRAPHS, ids=["china", "flower"])
@pytest.mark.parametrize("name", ["bicubic", "bilinear", "nearest"])
def test_grey_crops_agree_too(photograph, name):
    way = Image.Resampling[name.upper()]
    for source, mode in (
        (photograph, "L"),
        (photograph.convert("L"), "L"),
        (photograph.convert("L"), "RGB"),
    ):
        data = encoded(source)
        for box in boxes(*source.size, 4):
            found = resized_crop(EncodedImage(data, mode, "", 10**8), box, (96, 64), way)
            assert distance(found, resized_crop(pillows(data, mode), box, (96, 64), way)) < 0.5


def test_rows_are_written_into_a_baseline_frame_alone():
    app = b"\xff\xd8\xff\xe0\x00\x04ab"
    frame = b"\xff\xc0\x00\x0b\x08\x00\x10\x00\x20"
    assert _cut_jpeg(app + frame, 3) == app + frame[:5] + b"\x00\x03" + frame[7:]
    for others in (
        app + b"X" + frame[1:],
        app + b"\xff\xda" + frame[2:] + frame,
        app + frame[:6],
        b"\xff\xd8\xff",
    ):
        assert _cut_jpeg(others, 3) == others


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scale", [1, 2, 8])
def test_the_rows_that_are_left_out_change_no_other(way, scale):
    data = encoded(PHOTOGRAPHS[0], **way)
    whole = EncodedImage(data, "RGB", "", 10**8)._jpeg(427, scale)
    assert whole.shape == (-(-427 // scale), 640 // scale, 3)
    if scale == 1:
        assert (whole == np.asarray(pillows(data))).all()
    for rows in (1, 15, 16, 17, 200, 410, 411, 412, 426):
        part = EncodedImage(data, "RGB", "", 10**8)._jpeg(rows, scale)
        needed = -(-rows // scale)
        assert (part[:needed] == whole[:needed]).all()


# ---------------------------------------------------------------- transforms


CROPS = [["TRAIN.CROP", crop] for crop in ("random_resized_once", "simple", "short_side", "squash")]


@pytest.mark.parametrize("options", [[], *CROPS, ["TRAIN.AFFINE", "[10.0,0.1,0.1]"]])
def test_training_draws_the_same_for_an_encoded_image_and_a_decoded_one(options):
    data = encoded(PHOTOGRAPHS[0])
    transform = TrainTransform(
        get_config(None, ["DATA.IMAGE_SIZE", "128", "TRAIN.HFLIP", "0.5", *options])
    )
    for seed in range(8):
        one = RNG(seed)
        other = RNG(seed)
        assert (
            distance(
                transform(EncodedImage(data, "RGB", "", 10**8), one),
                transform(pillows(data), other),
            )
            < 0.5
        )
        assert one.bit_generator.state == other.bit_generator.state


def folder(tmp_path, files, *options, channels=3):
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        for name, data in files.items():
            (tmp_path / split / "a" / name).write_bytes(data)
    options = [
        "DATA.DATASET",
        "folder",
        "DATA.DATA_PATH",
        str(tmp_path),
        "MODEL.NUM_CLASSES",
        "auto",
        *options,
    ]
    grey = ["DATA.IMAGE_CHANNELS", "1", "DATA.IMAGENET_MEAN", "0.5", "DATA.IMAGENET_STD", "0.5"] * (
        channels == 1
    )
    return get_config(None, [*options, *grey])


# What libjpeg-turbo decodes of an exact evaluation's photographs: where it can resize them, too; of
# colours Pillow's grey is another.
WHOLE = {1: [], 3: [(427, 640), (427, 640), (1600, 2400)] if images.load() else []}


@pytest.mark.smoke
@pytest.mark.parametrize("channels", [1, 3])
def test_evaluation_is_pillows_to_the_bit_unless_it_may_be_fast(tmp_path, channels, decoded_sizes):
    files = {
        f"{number}.jpg": encoded(image)
        for number, image in enumerate((*PHOTOGRAPHS, large(PHOTOGRAPHS[0])))
    }
    config = folder(tmp_path, files, channels=channels)
    mode = "RGB" if channels == 3 else "L"
    exact = get_dataset(config, "val")
    expected = []
    for index, data in enumerate(files.values()):
        image = pillows(data, mode)
        image = image.resize([256 * side // min(image.size) for side in image.size], BICUBIC)
        left, top = round((image.width - 224) / 2), round((image.height - 224) / 2)
        expected.append(
            np.asarray(image.crop((left, top, left + 224, top + 224))).reshape(224, 224, channels)
        )
        assert (exact[index][0] == expected[-1]).all()
    assert decoded_sizes == WHOLE[channels]
    decoded_sizes.clear()
    config = config.clone()
    config.defrost()
    config.DATA.FAST_EVAL = True
    fast = get_dataset(config, "val")
    assert all(0 < distance(fast[index][0], expected[index]) < 1.0 for index in range(3))
    assert decoded_sizes == [(427, 640), (427, 640), (800, 1200)]


@pytest.mark.parametrize("channels", [1, 3])
def test_squashed_evaluation_too_is_pillows_to_the_bit_unless_it_may_be_fast(
    tmp_path, channels, decoded_sizes
):
    files = {
        f"{number}.jpg": encoded(image)
        for number, image in enumerate((*PHOTOGRAPHS, large(PHOTOGRAPHS[0])))
    }
    squash = ["DATA.CROP_MODE", "squash", "DATA.CROP_PCT", "1.0"]
    config = folder(tmp_path, files, *squash, channels=channels)
    mode = "RGB" if channels == 3 else "L"
    exact = get_dataset(config, "val")
    expected = [
        np.asarray(pillows(data, mode).resize((224, 224), BICUBIC)) for data in files.values()
    ]
    expected = [pixels.reshape(224, 224, channels) for pixels in expected]
    assert all((exact[index][0] == expected[index]).all() for index in range(3))
    assert decoded_sizes == WHOLE[channels]
    decoded_sizes.clear()
    fast = get_dataset(with_values(config, DATA__FAST_EVAL=True), "val")
    assert all(0 < distance(fast[index][0], expected[index]) < 1.0 for index in range(3))
    assert decoded_sizes == [(427, 640), (427, 640), (800, 1200)]


# ----------------------------------------------------------------- fallbacks


def turned():
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown rotated by 90 degrees
    return encoded(PHOTOGRAPHS[0], exif=exif)


OTHERS = {
    "png": lambda: encoded(PHOTOGRAPHS[0], "PNG"),
    "palette": lambda: encoded(PHOTOGRAPHS[0].quantize(32), "PNG", transparency=3),
    "alpha": lambda: encoded(PHOTOGRAPHS[0].convert("RGBA"), "PNG"),
    "cmyk": lambda: encoded(PHOTOGRAPHS[0].convert("CMYK")),
    "webp": lambda: encoded(PHOTOGRAPHS[0], "WEBP"),
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_what_is_no_plain_jpeg_is_pillows(kind, mode, decoded_sizes):
    data = OTHERS[kind]()
    image = EncodedImage(data, mode, "", 10**8)
    width, height = image.size
    for box in ((0, 0, width, height), (3, 5, width // 2, height - 7)):
        expected = pillows(data, mode).crop(box).resize((48, 32), BICUBIC)
        assert (resized_crop(image, box, (48, 32), BICUBIC) == np.asarray(expected)).all()
    assert decoded_sizes == []


def test_an_orientation_is_left_as_pillow_leaves_it():
    data = turned()
    image = EncodedImage(data, "RGB", "", 10**8)
    box = (0, 0, 640, 427)
    assert image.size == (640, 427)
    found = resized_crop(image, box, (90, 60), BICUBIC)
    assert distance(found, np.asarray(pillows(data).resize((90, 60), BICUBIC))) < 0.5


def damaged():
    data = encoded(PHOTOGRAPHS[0])
    marker = bytearray(data)
    marker[-5000:-4998] = b"\xff\xc0"  # a second frame, below the crop
    return {
        "cut in the header": data[:300],
        "cut in the pixels": data[: len(data) // 2],
        "cut in the last rows": data[:-500],
        "a marker below": bytes(marker),
        "not an image": b"\xff\xd8 and no more",
    }


@pytest.mark.parametrize("what", damaged())
def test_what_pillow_refuses_is_refused_in_the_same_words(tmp_path, what, capfd):
    data = damaged()[what]
    config = folder(tmp_path, {"0.jpg": data, "1.jpg": encoded(PHOTOGRAPHS[1])})
    train = get_dataset(config, "train")
    val = get_dataset(config, "val")
    train.transform._crop_box = lambda *_: (0, 0, 100, 50)  # above the damage
    with pytest.raises(
        RunError,
        match=r"train/a/0.jpg: (can't be read as an image \(\w+: .*\)|it is truncated.*|its format is unknown.*); repair",
    ) as found:
        train[0]
    with pytest.raises(RunError) as expected:
        val[0]
    advice = ", or train with DATA.SKIP_BROKEN True"  # which an evaluation doesn't heed
    assert str(found.value) == str(expected.value).replace("/val/", "/train/") + advice
    tolerant = get_dataset(folder(tmp_path / "again", {"0.jpg": data, "1.jpg": encoded(PHOTOGRAPHS[1])},
                                  "DATA.SKIP_BROKEN", "True"), "train")  # fmt: skip
    sample = tolerant[0]
    assert (sample[-1], tolerant[1][-1]) == (0, -1)
    image = EncodedImage(encoded(PHOTOGRAPHS[1]), "RGB", "", 10**8)
    assert (sample[0] == tolerant.transform(image, RNG([tolerant.seed, 0, 0]))).all()
    assert capfd.readouterr().err == ""


def test_what_pillow_takes_with_a_flaw_is_its_own_decode():
    data = bytearray(encoded(PHOTOGRAPHS[0]))
    del data[20_000:20_500]
    for flawed in (bytes(data), encoded(PHOTOGRAPHS[0]) + b"trailing bytes"):
        for box in ((0, 0, 640, 427), (0, 0, 640, 250)):
            expected = resized_crop(pillows(flawed), box, (160, 160), BICUBIC)
            assert (
                distance(
                    resized_crop(EncodedImage(flawed, "RGB", "", 10**8), box, (160, 160), BICUBIC),
                    expected,
                )
                < 0.3
            )


def test_evaluation_of_a_decoded_image_is_as_it_was():
    image = PHOTOGRAPHS[1].resize((300, 256))
    cut = np.asarray(image.crop((38, 16, 262, 240)))
    assert (EvalTransform(get_config())(image) == cut).all()


def test_a_plain_tiff_whose_rows_stand_from_below_is_read():
    """Pillow reads a block for each strip, which may not be the whole file."""
    rows = np.random.default_rng(0).integers(0, 256, (2000, 1000), np.uint8)
    tags = [
        (256, 4, 1, 1000),
        (257, 4, 1, 2000),
        (258, 3, 1, 8),
        (259, 3, 1, 1),
        (262, 3, 1, 1),
        (277, 3, 1, 1),
    ]
    places = np.arange(2000, dtype=np.uint64)[::-1] * np.uint64(1000)
    data = tiff(
        False,
        [*tags, (278, 4, 1, 1)],
        False,
        places,
        np.full(2000, 1000, np.uint64),
        rows.tobytes(),
    )
    assert (np.asarray(EncodedImage(data, "L", "file", 10**7).decode()) == rows[::-1]).all()
