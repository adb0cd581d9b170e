"""Images against Pillow's own operations, batches against NumPy."""

import pickle
from collections import Counter
from itertools import permutations

import numpy as np
import paddle
import pytest
from PIL import Image

from config import get_config
from loading.transforms import EvalTransform, Normalize, TrainTransform

RNG = np.random.default_rng


def picture(width, height):
    return Image.fromarray(RNG(0).integers(0, 256, (height, width, 3), np.uint8))


def configured(*options):
    return get_config(None, ["DATA.IMAGE_SIZE", "32", *options])


def test_normalize_is_numpys():
    pixels = RNG(0).integers(0, 256, (2, 4, 4, 3), np.uint8)
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    expected = ((pixels / 255 - mean) / std).transpose(0, 3, 1, 2)
    found = Normalize(mean, std)(paddle.to_tensor(pixels)).numpy()
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=2e-6)


@pytest.mark.parametrize(("width", "height"), [(60, 40), (40, 61), (37, 37), (20, 30)])
def test_evaluation_resizes_the_short_side_and_cuts_the_centre(width, height):
    image = picture(width, height)
    found = EvalTransform(configured("DATA.CROP_PCT", "0.875"))(image)
    short = 36  # floor(32 / 0.875)
    w, h = (short, short * height // width) if width <= height else (short * width // height, short)
    resized = (
        image.resize((w, h), Image.Resampling.BICUBIC) if min(width, height) != short else image
    )
    left, top = round((w - 32) / 2), round((h - 32) / 2)
    assert (found == np.asarray(resized.crop((left, top, left + 32, top + 32)))).all()


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize(("width", "height"), [(60, 40), (40, 61), (37, 37), (34, 33)])
def test_a_crop_that_is_larger_than_the_image_is_padded_with_black(width, height, mode):
    """As by torchvision's CenterCrop, which timm uses for VOLO-D5 at 512 x 512."""
    image = picture(width, height).convert(mode)
    words = ["DATA.CROP_PCT", "1.15"]
    if mode == "L":
        words += [
            "DATA.IMAGE_CHANNELS",
            "1",
            "DATA.IMAGENET_MEAN",
            "[0.5]",
            "DATA.IMAGENET_STD",
            "[0.5]",
        ]
    found = EvalTransform(configured(*words))(image)
    short = 27  # floor(32 / 1.15)
    w, h = (short, short * height // width) if width <= height else (short * width // height, short)
    resized = image.resize((w, h), Image.Resampling.BICUBIC)
    black = Image.new(mode, (max(w, 32), max(h, 32)))
    # Of five missing pixels, two are before the image.
    black.paste(resized, ((black.width - w) // 2, (black.height - h) // 2))
    left, top = round((black.width - 32) / 2), round((black.height - 32) / 2)
    expected = np.asarray(black.crop((left, top, left + 32, top + 32)))
    assert (found == expected.reshape(found.shape)).all()
    assert not found[:2].any() or not found[:, :2].any()


def test_a_squashed_image_is_padded_on_all_sides():
    words = ["DATA.CROP_PCT", "1.15", "DATA.CROP_MODE", "squash"]
    found = EvalTransform(configured(*words))(picture(60, 40))
    expected = np.zeros((32, 32, 3), np.uint8)
    expected[2:29, 2:29] = np.asarray(picture(60, 40).resize((27, 27), Image.Resampling.BICUBIC))
    assert (found == expected).all()


@pytest.mark.parametrize(("width", "height"), [(60, 40), (40, 61), (37, 37), (20, 30)])
@pytest.mark.parametrize(("share", "side"), [("1.0", 32), ("0.875", 36), ("0.9", 35)])
def test_squashed_evaluation_resizes_both_sides(width, height, share, side):
    """As timm's crop_mode squash: torchvision's Resize((side, side)), which is Pillow's, then
    CenterCrop.
    """
    image = picture(width, height)
    found = EvalTransform(configured("DATA.CROP_PCT", share, "DATA.CROP_MODE", "squash"))(image)
    cut = round((side - 32) / 2)
    expected = np.asarray(image.resize((side, side), Image.Resampling.BICUBIC))[
        cut : cut + 32, cut : cut + 32
    ]
    assert (found == expected).all()
    grey = EvalTransform(configured("DATA.CROP_MODE", "squash", "DATA.INTERPOLATION", "bilinear"))(
        image.convert("L")
    )
    expected = np.asarray(image.convert("L").resize((36, 36), Image.Resampling.BILINEAR))[
        2:34, 2:34, None
    ]
    assert (grey == expected).all()


def test_the_random_crop_keeps_to_its_scale_and_ratio():
    transform = TrainTransform(
        configured("TRAIN.CROP_SCALE", "[0.2,0.5]", "TRAIN.CROP_RATIO", "[0.8,1.25]")
    )
    boxes = [transform._crop_box(200, 100, RNG(i)) for i in range(300)]
    areas = np.array([(r - x) * (b - t) / 20000 for x, t, r, b in boxes])
    ratios = np.array([(r - x) / (b - t) for x, t, r, b in boxes])
    assert areas.min() > 0.19
    assert areas.max() < 0.51
    assert ratios.min() > 0.77
    assert ratios.max() < 1.3
    assert abs(areas.mean() - 0.35) < 0.02
    assert abs(np.log(ratios).mean()) < 0.03
    assert all(0 <= x < r <= 200 and 0 <= t < b <= 100 for x, t, r, b in boxes)


def test_a_crop_that_never_fits_falls_back_to_the_centre():
    transform = TrainTransform(
        configured("TRAIN.CROP_SCALE", "[1.0,1.0]", "TRAIN.CROP_RATIO", "[1.0,1.0]")
    )
    assert transform._crop_box(100, 40, RNG(0)) == (30, 0, 70, 40)
    assert transform._crop_box(40, 100, RNG(0)) == (0, 30, 40, 70)


def test_without_randomness_training_is_a_resize_and_the_flip_is_exact():
    fixed = ["TRAIN.CROP_SCALE", "[1.0,1.0]", "TRAIN.CROP_RATIO", "[1.0,1.0]"]
    image = picture(40, 40)
    plain = TrainTransform(configured(*fixed, "TRAIN.HFLIP", "0"))(image, RNG(0))
    assert (plain == np.asarray(image.resize((32, 32), Image.Resampling.BICUBIC))).all()
    flipped = TrainTransform(configured(*fixed, "TRAIN.HFLIP", "1"))(image, RNG(0))
    assert (flipped == plain[:, ::-1]).all()


def test_affine_jitter_moves_by_what_it_says():
    fixed = ["TRAIN.CROP_SCALE", "[1.0,1.0]", "TRAIN.CROP_RATIO", "[1.0,1.0]", "TRAIN.HFLIP", "0"]
    disc = np.zeros((32, 32, 3), np.uint8)
    disc[12:20, 12:20] = 255
    rows, columns = np.mgrid[:32, :32]

    def moments(options, seed):
        found = TrainTransform(configured(*fixed, "TRAIN.AFFINE", options))(
            Image.fromarray(disc), RNG(seed)
        )[..., 0]
        mass = found.sum(dtype=float)
        return (columns * found).sum() / mass - 15.5, (rows * found).sum() / mass - 15.5, mass

    shifts = np.array([moments("[0.0,0.25,0.0]", seed)[:2] for seed in range(100)])
    assert 7 < np.abs(shifts).max() <= 8.1  # a quarter of 32 pixels
    assert np.abs(shifts.mean(0)).max() < 1.2
    masses = np.array([moments("[0.0,0.0,0.2]", seed)[2] for seed in range(100)]) / (64 * 255)
    assert 0.6 < masses.min() < 0.75  # 0.8 squared
    assert 1.3 < masses.max() < 1.5  # 1.2 squared
    turned = [moments("[30.0,0.0,0.0]", seed) for seed in range(20)]
    assert np.abs([t[:2] for t in turned]).max() < 0.2  # about the centre


FIXED = ["TRAIN.CROP_SCALE", "[1.0,1.0]", "TRAIN.CROP_RATIO", "[1.0,1.0]", "TRAIN.HFLIP", "0"]


def test_the_vertical_flip_is_exact_and_as_frequent_as_asked():
    image = picture(40, 40)
    plain = TrainTransform(configured(*FIXED))(image, RNG(0))
    flipped = [
        TrainTransform(configured(*FIXED, "TRAIN.VFLIP", "0.3"))(image, RNG(seed))
        for seed in range(200)
    ]
    assert all((f == plain).all() or (f == plain[::-1]).all() for f in flipped)
    assert 0.2 < np.mean([(f == plain[::-1]).all() for f in flipped]) < 0.4


def test_the_simple_crop_resizes_the_short_side_and_shifts_over_a_mirrored_border():
    image = picture(64, 48)
    resized = np.asarray(image.resize((42, 32), Image.Resampling.BICUBIC))
    padded = np.pad(resized, ((4, 4), (4, 4), (0, 0)), "reflect")
    places = {
        padded[top : top + 32, left : left + 32].tobytes(): (top, left)
        for top in range(9)
        for left in range(19)
    }
    transform = TrainTransform(configured("TRAIN.CROP", "simple", "TRAIN.HFLIP", "0"))
    found = [places[transform(image, RNG(seed)).tobytes()] for seed in range(300)]
    assert {top for top, _ in found} == set(range(9))
    assert {left for _, left in found} == set(range(19))


@pytest.mark.parametrize(("crop", "sides"), [("squash", (40, 40)), ("short_side", (53, 40))])
def test_a_resized_image_is_cropped_at_every_place(crop, sides):
    """big_vision's resize_crop and resmall_crop (configs/transfer.py): 448, of which 384 x 384 are
    cut.
    """
    image = picture(64, 48)
    resized = np.asarray(image.resize(sides, Image.Resampling.BICUBIC))
    rows, columns = sides[1] - 31, sides[0] - 31
    places = {
        resized[y : y + 32, x : x + 32].tobytes(): (y, x)
        for y in range(rows)
        for x in range(columns)
    }
    transform = TrainTransform(
        configured("TRAIN.CROP", crop, "TRAIN.CROP_PCT", "0.8", "TRAIN.HFLIP", "0")
    )
    found = [places[transform(image, RNG(seed)).tobytes()] for seed in range(300)]
    assert {top for top, _ in found} == set(range(rows))
    assert {left for _, left in found} == set(range(columns))
    large = get_config(
        None, ["DATA.IMAGE_SIZE", "384", "TRAIN.CROP", crop, "TRAIN.CROP_PCT", "0.857"]
    )
    assert TrainTransform(large).resize_to == (448, 448)


def test_a_crop_that_is_drawn_once_is_clipped_to_the_image():
    once, often = (
        TrainTransform(configured("TRAIN.CROP", crop))
        for crop in ("random_resized_once", "random_resized")
    )
    clipped = 0
    for seed in range(400):
        rng = RNG(seed)
        area = 500 * 375 * rng.uniform(0.08, 1)
        ratio = np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
        sides = [round(np.sqrt(area * ratio)), round(np.sqrt(area / ratio))]
        left, top, right, bottom = once._crop_box(500, 375, RNG(seed))
        assert [right - left, bottom - top] == [min(sides[0], 500), min(sides[1], 375)]
        assert 0 <= left < right <= 500
        assert 0 <= top < bottom <= 375
        if sides[0] <= 500 and sides[1] <= 375:
            assert often._crop_box(500, 375, RNG(seed)) == (left, top, right, bottom)
        else:
            clipped += 1
    assert 80 < clipped < 125  # a quarter, at ImageNet's usual shape


def test_random_interpolation_is_bilinear_or_bicubic():
    image = picture(40, 40)
    ways = (Image.Resampling.BILINEAR, Image.Resampling.BICUBIC)
    expected = [np.asarray(image.resize((32, 32), way)) for way in ways]
    transform = TrainTransform(configured(*FIXED, "TRAIN.INTERPOLATION", "random"))
    found = [[(transform(image, RNG(seed)) == e).all() for e in expected] for seed in range(60)]
    assert all(sum(row) == 1 for row in found)
    assert 15 < sum(row[0] for row in found) < 45
    nearest = TrainTransform(configured(*FIXED, "TRAIN.INTERPOLATION", "nearest"))(image, RNG(0))
    assert (nearest == np.asarray(image.resize((32, 32), Image.Resampling.NEAREST))).all()


def test_colour_jitter_keeps_to_its_strength_in_every_order():
    image = Image.fromarray(np.full((40, 40, 3), (100, 50, 50), np.uint8))
    transform = TrainTransform(configured(*FIXED, "TRAIN.COLOR_JITTER", "0.2"))
    found = np.array([transform(image, RNG(seed))[0, 0] for seed in range(400)], float)
    luma = found @ [0.299, 0.587, 0.114]
    assert 64.9 * 0.8 - 2 < luma.min() < 55  # of one colour, only the brightness changes the luma
    assert 75 < luma.max() < 64.9 * 1.2 + 2
    spread = (found[:, 0] - found[:, 1]) / luma
    assert 0.6 < spread.min() / (50 / 64.9) < 0.72  # saturation and contrast, 0.8 each
    assert 1.3 < spread.max() / (50 / 64.9) < 1.5
    assert (found[:, 1] == found[:, 2]).all()
    grey = TrainTransform(configured(*FIXED, "TRAIN.COLOR_JITTER", "0.2"))(
        image.convert("L"), RNG(1)
    )
    assert grey.shape == (32, 32, 1)


def test_colour_jitter_draws_its_order_and_its_factors_evenly(monkeypatch):
    image = picture(40, 40)
    seen = []
    names = ("brightness", "contrast", "saturation")

    def kind(name):
        return lambda image, factor: seen.append((name, factor)) or image

    monkeypatch.setattr("loading.transforms.image._JITTERED", [kind(name) for name in names])
    transform = TrainTransform(configured(*FIXED, "TRAIN.COLOR_JITTER", "1.5"))
    rng = RNG(0)
    for _ in range(1200):
        transform(image, rng)
    orders = Counter(
        tuple(name for name, _ in seen[first : first + 3]) for first in range(0, len(seen), 3)
    )
    assert set(orders) == set(permutations(names))
    assert 150 < min(orders.values()) <= max(orders.values()) < 250
    for name in names:
        factors = [factor for found, factor in seen if found == name]
        np.testing.assert_allclose(
            np.quantile(factors, [0, 0.25, 0.5, 0.75, 1]), np.linspace(0, 2.5, 5), atol=0.12
        )


@pytest.mark.parametrize(
    "text", ["None", "rand-m9-mstd0.5-inc1", "original", "3a", "trivial", "augmix-m3"]
)
def test_a_transform_travels_to_loader_workers(text):
    transform = TrainTransform(configured("TRAIN.AUTO_AUGMENT", text, "TRAIN.COLOR_JITTER", "0.3"))
    image = picture(60, 40)
    sent = pickle.loads(pickle.dumps(transform))
    for seed in range(5):
        assert (sent(image, RNG(seed)) == transform(image, RNG(seed))).all()


def test_later_draws_leave_the_earlier_ones_as_they_were(monkeypatch):
    image = picture(60, 40)
    base = ["TRAIN.AFFINE", "[10.0,0.1,0.1]", "TRAIN.HFLIP", "0.5"]
    plain = TrainTransform(configured(*base))
    flipping = TrainTransform(configured(*base, "TRAIN.VFLIP", "1.0"))
    more = ["TRAIN.VFLIP", "1.0", "TRAIN.AUTO_AUGMENT", "rand-m9-p1.0", "TRAIN.COLOR_JITTER", "0.4"]
    whole = TrainTransform(configured(*base, *more))
    given = []
    augment = whole.augment
    monkeypatch.setattr(
        whole, "augment", lambda image, rng: given.append(np.asarray(image)) or augment(image, rng)
    )
    for seed in range(20):
        flipped = flipping(image, RNG(seed))
        assert (flipped[::-1] == plain(image, RNG(seed))).all()
        first, second = (whole(image, RNG(seed)) for _ in range(2))
        assert (first == second).all()
        assert (given[-1] == flipped).all()
    assert (np.asarray(image) == np.asarray(picture(60, 40))).all()


def test_what_is_off_draws_nothing():
    image = picture(60, 40)
    transform = TrainTransform(configured())
    for seed in range(10):
        rng = RNG(seed)
        alone = RNG(seed)
        replayed = RNG(seed)
        box = transform._crop_box(60, 40, replayed)
        expected = np.asarray(image.crop(box).resize((32, 32), Image.Resampling.BICUBIC))
        flipped = replayed.random() < 0.5
        assert (transform(image, rng) == (expected[:, ::-1] if flipped else expected)).all()
        drawn = transform.draw(60, 40, alone)
        assert (drawn.box, drawn.matrix, drawn.hflip, drawn.vflip) == (box, None, flipped, False)
        assert rng.bit_generator.state == alone.bit_generator.state == replayed.bit_generator.state
