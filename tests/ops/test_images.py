"""The compiled operations on images give Pillow's bits, whatever the size, the mode, the filter and
the CPU's level.
"""

import ctypes
import io
import itertools
import shutil

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageFilter, ImageStat

from config import get_config
from errors import RunError
from loading.transforms import EncodedImage, EvalTransform, TrainTransform
from loading.transforms import ops as augmentations
from loading.transforms.auto import TrivialAugmentWide, build_auto_augment
from ops import build, images
from settings.registry import operations

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")
# (height, width)
SIZES = [(1, 1), (2, 1), (1, 5), (3, 3), (28, 28), (33, 50), (224, 224), (31, 200)]
FILL = (124, 116, 3)
RNG = np.random.default_rng


@pytest.fixture(autouse=True)
def _compiled():
    build.build_images()
    images.load.cache_clear()
    if images.load() is None:
        pytest.skip("this CPU hasn't AVX2")


@pytest.fixture(params=["v3", "v4"])
def level(request, monkeypatch):
    """Each level that this CPU has computes in turn."""
    library = ctypes.CDLL(str(images.library()))
    library.images_level.restype = ctypes.c_char_p
    if request.param > library.images_level().decode():
        pytest.skip("not on this CPU")
    monkeypatch.setattr(
        images, "load", lambda: lambda name: getattr(library, f"{name}_{request.param}")
    )


def pictures(*sizes):
    """Noise, steep ramps, one colour, black and white, in both modes."""
    for (height, width), channels in itertools.product(sizes, (1, 3)):
        rng = RNG(height * width + channels)
        shape = (height, width, channels)[: 2 if channels == 1 else 3]
        yield rng.integers(0, 256, shape, np.uint8)
        yield (np.arange(height * width * channels) * 7 // 3 % 256).astype(np.uint8).reshape(shape)
        yield np.full(shape, 77, np.uint8)
        yield rng.integers(0, 2, shape, np.uint8) * np.uint8(255)


def check(compiled, pillow, *sizes):
    for pixels in pictures(*(sizes or SIZES)):
        before = pixels.copy()
        np.testing.assert_array_equal(compiled(pixels), np.asarray(pillow(Image.fromarray(pixels))))
        assert (pixels == before).all()


@pytest.mark.smoke
@pytest.mark.parametrize("resample", images.FILTERS)
def test_affine_maps(level, resample):
    rng = RNG(0)
    rows = [
        (1, 0, 0),
        (1, 0, 0.25),
        (1, 0.3, 0),
        (1, -0.27, 2.5),
        (0.94, 0.34, -3.1),
        (-1, 0, 20),
        (0, 1, 0),
        (3.7, 1, -9),
    ]
    rows += [tuple(rng.normal(0, (1, 1, 10))) for _ in range(3)]
    for one, (c, d, f) in zip(rows, [(0, 1, -0.75), (0.3, 1, 0), (0, 1, 0), *rows], strict=False):
        matrix = (*one, c, d, f)

        def pillow(image, matrix=matrix):
            fill = FILL if image.mode == "RGB" else FILL[0]
            return image.transform(
                image.size, Image.Transform.AFFINE, matrix, resample, fillcolor=fill
            )

        def compiled(pixels, matrix=matrix):
            return images.affine(pixels, matrix, resample, FILL if pixels.ndim == 3 else FILL[0])

        check(compiled, pillow)


@pytest.mark.smoke
@pytest.mark.parametrize("resample", images.FILTERS)
def test_resizing_and_any_window_of_it(level, resample):
    for to in ((1, 1), (7, 40), (64, 64), (50, 33)):  # (width, height)
        check(
            lambda p, to=to: images.resize(p, to, resample), lambda i, to=to: i.resize(to, resample)
        )
    window = (5, 2, 41, 60)
    check(
        lambda pixels: images.resize(pixels, (48, 64), resample, window),
        lambda image: image.resize((48, 64), resample).crop(window),
    )


@pytest.mark.parametrize("deviation", [0.0, 0.1, 0.5, 1.0, 1.7, 2.0, 9.5])
def test_gaussian_blur(level, deviation):
    blur = ImageFilter.GaussianBlur(deviation)
    check(lambda pixels: images.blur(pixels, deviation), lambda image: image.filter(blur))


@pytest.mark.smoke
@pytest.mark.parametrize("steps", [0, 1, -25, 25, 127, -128])
def test_hues_move_as_in_pillows_mode_hsv(level, steps):
    def pillow(image):
        if image.mode == "L":
            return image
        hues, saturation, value = image.convert("HSV").split()
        hues = Image.fromarray(np.asarray(hues) + np.uint8(steps % 256))
        return Image.merge("HSV", (hues, saturation, value)).convert("RGB")

    check(lambda pixels: images.shift_hue(pixels, steps), pillow)
    # Every second value of each channel, in all combinations.
    values = np.arange(0, 256, 2, dtype=np.uint8) + np.uint8(steps % 2)
    colours = np.stack(np.meshgrid(values, values, values), -1).reshape(1024, -1, 3)
    expected = np.asarray(pillow(Image.fromarray(colours)))
    np.testing.assert_array_equal(images.shift_hue(colours, steps), expected)


@pytest.mark.parametrize("factor", [0.0, 0.1, 0.7, 1.0, 1.3, 1.9])
def test_enhancements(level, factor):
    check(
        lambda pixels: images.sharpen(pixels, factor),
        lambda image: ImageEnhance.Sharpness(image).enhance(factor),
    )
    check(
        lambda pixels: images.adjust_color(pixels, factor),
        lambda image: ImageEnhance.Color(image).enhance(factor),
    )
    for (_, one), other in zip(enumerate(pictures(*SIZES)), pictures(*SIZES), strict=True):
        expected = Image.blend(Image.fromarray(one), Image.fromarray(other[::-1].copy()), factor)
        np.testing.assert_array_equal(images.blend(one, other[::-1], factor), np.asarray(expected))


def test_tables_counts_and_mirror_images(level):
    tables = RNG(0).integers(0, 256, (3, 256), np.uint8)
    for pixels in pictures(*SIZES):
        image = Image.fromarray(pixels)
        own = tables[: pixels[0, 0].size]
        assert (
            images.apply_tables(pixels, own) == np.asarray(image.point(own.ravel().tolist()))
        ).all()
        assert images.histogram(pixels).ravel().tolist() == image.histogram()
        assert images.mean_grey(pixels) == ImageStat.Stat(image.convert("L")).mean[0]
        if pixels.ndim == 3:
            assert (images.mirror(pixels) == pixels[:, ::-1]).all()


@pytest.mark.parametrize("name", sorted(operations.names()))
def test_each_operation_of_a_policy_gives_an_array_what_it_gives_an_image(name):
    _, given = operations.load(name)
    assert given["arrays"]
    for pixels, resample in itertools.product(pictures((28, 28), (30, 47)), (0, *images.FILTERS)):
        for level, seed in itertools.product((0.0, 0.3, 1.0, 30.0), range(2)):
            value = given["scale"](level, RNG(seed), 0.45) if "scale" in given else 0.0
            fill = FILL if pixels.ndim == 3 else FILL[0]
            expected = augmentations.apply(
                name, Image.fromarray(pixels), value, Image.Resampling(resample), fill
            )
            found = augmentations.apply(name, pixels, value, Image.Resampling(resample), fill)
            np.testing.assert_array_equal(found, np.asarray(expected))


def test_trivial_augment_at_every_step():
    augment, [pixels, *_] = TrivialAugmentWide(), [p for p in pictures((32, 32)) if p.ndim == 3]
    for name, step, sign in itertools.product(augment._SPACE, range(31), (1, -1)):
        expected = augment.apply(Image.fromarray(pixels), name, step, sign)
        np.testing.assert_array_equal(augment.apply(pixels, name, step, sign), np.asarray(expected))


POLICIES = [
    "rand-m9-mstd0.5-inc1",
    "rand-m9-n3-p1.0-t3a",
    "original",
    "3a",
    "trivial",
    "augmix-m5",
    "augmix-m5-b1",
]


@pytest.mark.smoke
@pytest.mark.parametrize("text", POLICIES)
def test_a_training_image_is_the_same_bits_without_the_library(text, monkeypatch):
    """So a run's results are the same with it and without it: no experiment has to tell."""
    options = [
        "TRAIN.AUTO_AUGMENT",
        text,
        "TRAIN.COLOR_JITTER",
        "0.4",
        "TRAIN.INTERPOLATION",
        "random",
    ]
    transform = TrainTransform(get_config(None, [*options, "DATA.IMAGE_SIZE", "40"]))
    photograph = Image.fromarray(RNG(1).integers(0, 256, (60, 70, 3), np.uint8)).filter(
        ImageFilter.GaussianBlur(2)
    )
    found = [transform(photograph, RNG(seed)) for seed in range(25)]
    one = RNG(7)
    transform(photograph, one)
    monkeypatch.setattr(images, "load", lambda: None)
    np.testing.assert_array_equal(found, [transform(photograph, RNG(seed)) for seed in range(25)])
    other = RNG(7)
    transform(photograph, other)
    assert one.bit_generator.state == other.bit_generator.state


def test_an_operation_of_ones_own_gets_pillows_image(monkeypatch):
    monkeypatch.setitem(
        operations.registered, "Fog", (lambda image, value, *_: image.point(lambda v: v // 2), {})
    )
    augment = build_auto_augment(get_config(None, ["TRAIN.AUTO_AUGMENT", "trivial"]))
    assert isinstance(augment, TrivialAugmentWide)
    pixels = RNG(0).integers(0, 256, (8, 8, 3), np.uint8)
    assert (
        augmentations.apply("Fog", pixels, 1.0, Image.Resampling.BICUBIC, 0) == pixels // 2
    ).all()


def encoded(image, **options):
    file = io.BytesIO()
    image.save(file, "JPEG", **options)
    return file.getvalue()


@pytest.mark.smoke
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_an_evaluation_has_pillows_bits(mode, monkeypatch):
    """Over sizes, subsamplings, orders of coding, qualities, crops and turns; as without the
    library, too.
    """
    grey = ["DATA.IMAGE_CHANNELS", "1", "DATA.IMAGENET_MEAN", "0.5", "DATA.IMAGENET_STD", "0.5"] * (
        mode == "L"
    )
    exif = Image.Exif()
    exif[0x0112] = 6
    ways = [{"subsampling": way} for way in (0, 1, 2)] + [
        {"progressive": True},
        {"quality": 20},
        {"exif": exif},
    ]
    sizes = [(57, 70), (64, 64), (41, 200), (300, 33), (500, 375), (640, 427)]
    for resampling, crop in (("bicubic", "center"), ("bilinear", "squash"), ("nearest", "center")):
        options = [
            "DATA.INTERPOLATION",
            resampling,
            "DATA.CROP_MODE",
            crop,
            "DATA.IMAGE_SIZE",
            "56",
        ]
        transform = EvalTransform(get_config(None, [*options, *grey]))
        for (size, way), stored in itertools.product(zip(sizes, ways, strict=True), ("RGB", "L")):
            photograph = Image.effect_noise(size, 60).resize(size).convert("RGB")
            photograph = Image.merge(
                "RGB", (photograph.getchannel(0), *photograph.rotate(9).split()[:2])
            ).convert(stored)
            data = encoded(photograph, **way)
            image = EncodedImage(data, mode, "", 10**8, oriented=True, exact=True)
            expected = transform(image.decode())
            np.testing.assert_array_equal(transform(image), expected)
            with monkeypatch.context() as without:
                without.setattr(images, "load", lambda: None)
                np.testing.assert_array_equal(transform(image), expected)


def test_a_strip_is_resized_in_two_steps_as_by_pillow():
    strip = Image.effect_noise((6, 900), 90).convert("RGB")
    image = EncodedImage(encoded(strip), "RGB", "", 10**8, exact=True)
    found = image.resized_crop((0, 0, 6, 900), (20, 30), Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(
        found, np.asarray(image.decode().resize((20, 30), Image.Resampling.BICUBIC))
    )


def test_where_it_is_missing_or_cannot_be_built(monkeypatch, tmp_path):
    monkeypatch.setattr(images, "library", lambda: tmp_path / "built" / "images.so")
    images.load.cache_clear()
    assert images.load() is None
    images.load.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(
        RunError, match=r"can't be compiled \(g\+\+ wasn't found\); Pillow computes them"
    ):
        build.build_images()
    assert not (tmp_path / "built").exists()
