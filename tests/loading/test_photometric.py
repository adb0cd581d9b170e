"""TRAIN.PHOTOMETRIC against formulas of HSV, its distribution, and which pixels it takes."""

import numpy as np
import pytest
from PIL import Image

from config import get_config
from loading.transforms import TrainTransform
from loading.transforms.photometric import distort
from ops import images

RNG = np.random.default_rng
STEPS = ("brightness", "contrast", "saturation", "hue", "last")


def picture():
    """Every kind of colour: grey, pale, dark and pure ones of all hues."""
    rng = RNG(3)
    pixels = rng.integers(0, 256, (40, 50, 3)).astype(np.uint8)
    pixels[:5] = rng.integers(0, 256, (5, 50, 1))
    pixels[5:10] = 128 + pixels[5:10] // 8
    pixels[10:15] //= 8
    pixels[15:20, :, 0] = 0
    return pixels


def seeds_of(*steps):
    """Seeds that draw these steps and no others, with what they draw."""
    for seed in range(2000):
        rng = RNG(seed)
        values = rng.uniform([-32, 0.5, 0.5, -0.1], [32, 1.5, 1.5, 0.1])
        drawn = {step for step, on in zip(STEPS, rng.random(5) < 0.5, strict=True) if on}
        if drawn == set(steps):
            yield seed, *values


def hsv(pixels):
    """Hue in shares of the circle, saturation and value in 0..1, by the definition of HSV."""
    red, green, blue = np.moveaxis(pixels.astype(float), 2, 0)
    value = pixels.max(2).astype(float)
    chroma = value - pixels.min(2)
    some = np.maximum(chroma, 1)
    sector = np.select(
        [value == red, value == green],
        [(green - blue) / some % 6, (blue - red) / some + 2],
        (red - green) / some + 4,
    )
    return sector / 6, chroma / np.maximum(value, 1), value / 255


def rgb(hue, saturation, value):
    """Pixels of HSV, not rounded: f(n) = V - V S max(0, min(k, 4 - k, 1)), k = (n + 6 H) mod 6."""
    channels = []
    for place in (5, 3, 1):
        k = (place + 6 * hue) % 6
        falls = np.clip(np.minimum(k, 4 - k), 0, 1)
        channels.append(255 * value * (1 - saturation * falls))
    return np.stack(channels, 2)


def levels(pixels):
    return np.rint(pixels).clip(0, 255).astype(np.uint8)


def test_brightness_is_added_and_contrast_multiplied():
    pixels = picture()
    for steps in (
        (),
        ("brightness",),
        ("contrast",),
        ("contrast", "last"),
        ("brightness", "contrast"),
    ):
        for (seed, delta, factor, *_), _ in zip(seeds_of(*steps), range(8), strict=False):
            expected = pixels
            if "brightness" in steps:
                expected = levels(expected + delta)
            if "contrast" in steps:
                expected = levels(expected * factor)
            np.testing.assert_array_equal(distort(pixels, RNG(seed)), expected)


def test_saturation_is_that_of_hsv():
    pixels = picture()
    hue, saturation, value = hsv(pixels)
    np.testing.assert_array_equal(levels(rgb(hue, saturation, value)), pixels)
    factors = []
    for (seed, _, _, factor, _), _ in zip(seeds_of("saturation"), range(10), strict=False):
        expected = rgb(hue, np.minimum(1, saturation * factor), value)
        found = distort(pixels, RNG(seed))
        assert np.abs(found - expected).max() <= 0.501
        factors.append(factor)
    assert min(factors) < 1 < max(factors)


def test_hues_move_along_the_circle():
    pixels = picture()
    hue, saturation, value = hsv(pixels)
    for (seed, *_, shift), _ in zip(seeds_of("hue"), range(10), strict=False):
        # In Pillow's steps of hues, of which one is 6 levels of a pure colour. It cuts off hues to
        # whole steps, and one more where they pass the end of the circle.
        steps = int(shift * 255) / 255
        found = distort(pixels, RNG(seed))
        apart = np.abs(found - rgb(hue + steps, saturation, value))
        assert apart.max() <= 12
        assert apart.mean() < 0.6
        assert (found[saturation == 0] == pixels[saturation == 0]).all()


def test_contrast_comes_first_or_last():
    """Before the saturation is multiplied, or after."""
    pixels = picture()
    found = {}
    for last in ((), ("last",)):
        for (seed, _, factor, saturation, _), _ in zip(
            seeds_of("contrast", "saturation", *last), range(5), strict=False
        ):
            first = pixels if last else levels(pixels * factor)
            hue, share, value = hsv(first)
            expected = levels(rgb(hue, np.minimum(1, share * saturation), value))
            if last:
                expected = levels(expected * factor)
            found = distort(pixels, RNG(seed)).astype(int)
            # Half levels are rounded either way before they are multiplied by up to 1.5.
            assert np.abs(found - expected).max() <= 2
            assert (found == expected).mean() > 0.98


def test_each_step_has_probability_one_half():
    drawn = [
        distort(np.full((1, 1, 3), (120, 100, 80), np.uint8), RNG(seed))[0, 0]
        for seed in range(2000)
    ]
    same = np.mean([tuple(pixel) == (120, 100, 80) for pixel in drawn])
    # None of four, and a few whose value changes nothing.
    assert 1 / 16 - 0.015 < same < 1 / 16 + 0.03
    # Of grey, brightness and contrast alone: a quarter keeps its level.
    grey = np.array(
        [distort(np.full((1, 1), 100, np.uint8), RNG(seed))[0, 0] for seed in range(2000)]
    )
    assert abs(np.mean(grey == 100) - 0.25) < 0.03
    assert grey.min() in range(34, 40)
    assert grey.max() in range(190, 199)
    # Brightness alone is uniform in its range.
    shifts = [
        distort(np.full((1, 1, 3), 100, np.uint8), RNG(seed))[0, 0, 0]
        for seed, *_ in seeds_of("brightness")
    ]
    np.testing.assert_allclose(
        np.quantile(shifts, np.linspace(0, 1, 5)), np.linspace(68, 132, 5), atol=10
    )


def test_grey_images_change_in_brightness_and_contrast():
    grey = picture()[:, :, 0]
    for seed in range(30):
        found = distort(grey, RNG(seed))
        assert found.shape == grey.shape
        rng = RNG(seed)
        delta, factor, *_ = rng.uniform([-32, 0.5, 0.5, -0.1], [32, 1.5, 1.5, 0.1])
        is_brighter, has_contrast, *_ = rng.random(5) < 0.5
        expected = levels(grey + delta) if is_brighter else grey
        expected = levels(expected * factor) if has_contrast else expected
        np.testing.assert_array_equal(found, expected)


@pytest.mark.skipif(not images.load(), reason="the compiled operations aren't there")
def test_pillow_computes_the_same_bits(monkeypatch):
    pixels = picture()
    compiled = [distort(pixels, RNG(seed)) for seed in range(40)]
    monkeypatch.setattr("loading.transforms.photometric.images.load", lambda: None)
    for seed, expected in enumerate(compiled):
        np.testing.assert_array_equal(distort(Image.fromarray(pixels), RNG(seed)), expected)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_training_distorts_its_crops(channels):
    words = ["DATA.IMAGE_SIZE", "32", "DATA.IMAGE_CHANNELS", str(channels)]
    words += ["DATA.IMAGENET_MEAN", "0.5", "DATA.IMAGENET_STD", "0.5"]
    plain = TrainTransform(get_config(None, words))
    transform = TrainTransform(get_config(None, [*words, "TRAIN.PHOTOMETRIC", "True"]))
    image = Image.fromarray(picture()).convert("RGB" if channels == 3 else "L")
    changed = 0
    for seed in range(20):
        rng = RNG(seed)
        cropped = plain(image, rng)
        # The colours are drawn after the geometry.
        expected = distort(cropped if channels == 3 else cropped[:, :, 0], rng)
        found = transform(image, RNG(seed))
        np.testing.assert_array_equal(found, expected.reshape(32, 32, channels))
        changed += (found != cropped).any()
    assert changed > 10
