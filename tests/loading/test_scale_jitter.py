"""TRAIN.CROP scale_jitter: a picture of coordinates is its own mask, padding, the limit of a class."""

import numpy as np
import pytest
from PIL import Image

from config import get_config
from datasets import FileDataset, get_dataloader
from errors import InputError
from loading.sources import Files, Masks
from loading.transforms import Bands, Mask, TrainTransform
from loading.transforms.scale_jitter import ScaleJitter

RNG = np.random.default_rng
IGNORED = 65535
# The mean colour as a pixel.
MEAN = (51, 102, 153)


def configured(*options, size=(48, 64), scale=(0.5, 2.0)):
    words = ["TASK", "segmentation", "HEAD.NAME", "linear", "DATA.CROP_MODE", "short"]
    words += [
        "DATA.NUM_WORKERS",
        "0",
        "TRAIN.CROP",
        "scale_jitter",
        "TRAIN.CROP_SCALE",
        str(list(scale)),
    ]
    words += ["DATA.IMAGE_SIZE", str(list(size)), "DATA.IMAGENET_MEAN", "[0.2,0.4,0.6]"]
    return get_config(None, [*words, *map(str, options)])


def coordinates(width, height):
    """A picture whose red is x and whose green is y, and a mask of the number of each pixel."""
    y, x = np.mgrid[:height, :width]
    picture = np.stack([x, y, np.full_like(x, 200)], 2).astype(np.uint8)
    return Image.fromarray(picture), Mask(
        Image.fromarray((y * width + x).astype(np.int32)), IGNORED
    )


def places(mask, width):
    """The (x, y) that each pixel of a mask came from."""
    return np.stack([mask % width, mask // width], 2)


# ------------------------------------------------------------------- geometry

SIZES = [(192, 128), (30, 20), (100, 250), (1, 77), (77, 1), (1, 1)]
SIDES = pytest.mark.parametrize("sides", [(48, 64), (64, 40), (32, 32)])


@SIDES
@pytest.mark.parametrize("base", ["short", "own"])
@pytest.mark.parametrize("size", SIZES)
def test_a_picture_of_coordinates_agrees_with_its_mask(size, base, sides):
    options = ["TRAIN.CROP_BASE", base, "TRAIN.VFLIP", 0.5]
    nearest = TrainTransform(configured(*options, "TRAIN.INTERPOLATION", "nearest", size=sides))
    smooth = TrainTransform(configured(*options, "TRAIN.INTERPOLATION", "bilinear", size=sides))
    image, mask = coordinates(*size)
    padded = []
    for seed in range(20):
        pixels, [indices] = nearest.with_masks(image, [mask], RNG(seed))
        assert pixels.shape == (*sides, 3)
        assert indices.shape == sides
        assert indices.dtype == np.int32
        labelled = indices != IGNORED
        np.testing.assert_array_equal(pixels[labelled][:, :2], places(indices, size[0])[labelled])
        # Padding is all that lies right of a column and below a row, after the flips, too.
        rows, columns = labelled.any(1).sum(), labelled.any(0).sum()
        assert labelled[:rows, :columns].all()
        assert labelled.sum() == rows * columns
        assert (pixels[~labelled] == MEAN).all()
        padded.append(1 - labelled.mean())
        # A filter gives the place of the middle of what it blends, rounded.
        blended, [same] = smooth.with_masks(image, [mask], RNG(seed))
        np.testing.assert_array_equal(same, indices)
        apart = np.abs(blended[:, :, :2].astype(int) - places(indices, size[0]))[labelled]
        assert apart.max() <= 1
    assert min(padded) < max(padded) or size in ((30, 20), (192, 128), (100, 250))


def test_what_moves_a_crop_moves_its_mask_and_padding_stays_the_mean():
    """A sample of colours and moves after the crop: the padding comes last."""
    options = [
        "TRAIN.AFFINE",
        "[20.0,0.1,0.2]",
        "TRAIN.PHOTOMETRIC",
        True,
        "TRAIN.CROP_BASE",
        "own",
    ]
    options += ["TRAIN.AUTO_AUGMENT", "rand-m9-n2-tRotate+TranslateXRel", "TRAIN.COLOR_JITTER", 0.4]
    transform = TrainTransform(configured(*options, scale=(0.3, 0.6)))
    plain = TrainTransform(configured("TRAIN.CROP_BASE", "own", scale=(0.3, 0.6)))
    image = Image.fromarray(np.full((50, 90, 3), (90, 140, 210), np.uint8))
    mask = Mask(Image.fromarray(np.full((50, 90), 7, np.uint8)), 255)
    moved = 0
    for seed in range(20):
        pixels, [indices] = transform.with_masks(image, [mask], RNG(seed))
        _, [still] = plain.with_masks(image, [mask], RNG(seed))
        outside = still == 255
        assert 0.3 < outside.mean() < 0.95
        assert (pixels[outside] == MEAN).all()
        assert (indices[outside] == 255).all()
        moved += (indices[~outside] == 255).mean()
    assert moved > 0.5


@pytest.mark.parametrize(("base", "factors"), [("own", (0.5, 2.0)), ("short", (0.8, 1.6))])
def test_factors_are_uniform(base, factors):
    """At a factor of 1, the image has its own size, or covers IMAGE_SIZE."""
    config = configured("TRAIN.CROP_BASE", base, size=(400, 500), scale=factors)
    transform = TrainTransform(config)
    found = []
    for seed in range(2000):
        geometry = transform.draw(200, 100, RNG(seed))
        shown = np.array(geometry.size) / (
            geometry.box[3] - geometry.box[1],
            geometry.box[2] - geometry.box[0],
        )
        np.testing.assert_allclose(shown[0], shown[1], rtol=0.02)
        found.append(shown[0] / (1 if base == "own" else 4))
    low, high = factors
    expected = np.linspace(low, high, 11)
    np.testing.assert_allclose(np.quantile(found, np.linspace(0, 1, 11)), expected, atol=0.05)


def test_places_are_uniform():
    transform = TrainTransform(configured("TRAIN.CROP_BASE", "own", size=(8, 12), scale=(1.0, 1.0)))
    corners = [transform.draw(16, 11, RNG(seed)).box[:2] for seed in range(4000)]
    found, counts = np.unique(corners, axis=0, return_counts=True)
    np.testing.assert_array_equal(found, [(x, y) for x in range(5) for y in range(4)])
    assert np.abs(counts - 200).max() < 5 * np.sqrt(200)


def test_a_box_fills_the_crop_or_is_the_whole_side():
    transform = TrainTransform(
        configured("TRAIN.CROP_BASE", "own", size=(40, 30), scale=(2.0, 2.0))
    )
    for width, height, box, size in (
        (100, 100, (15, 20), (40, 30)),
        (10, 100, (10, 20), (40, 20)),
        (100, 10, (15, 10), (20, 30)),
        (3, 4, (3, 4), (8, 6)),
    ):
        geometry = transform.draw(width, height, RNG(0))
        left, top, right, bottom = geometry.box
        assert (right - left, bottom - top) == box
        assert geometry.size == size


@pytest.mark.parametrize("size", [(96, 40), (32, 32)])
def test_a_call_may_give_another_size(size):
    transform = TrainTransform(configured())
    same = TrainTransform(configured(size=size))
    image, mask = coordinates(60, 40)
    for seed in range(4):
        pixels, [indices] = transform.with_masks(image, [mask], RNG(seed), size)
        expected, [wanted] = same.with_masks(image, [mask], RNG(seed))
        np.testing.assert_array_equal(pixels, expected)
        np.testing.assert_array_equal(indices, wanted)


# --------------------------------------------------------------- other pixels


@pytest.mark.parametrize("channels", [1, 3, 5])
def test_bands_and_grey_are_padded_with_their_mean(channels):
    mean = np.linspace(-0.5, 1.5, channels)
    options = ["DATA.IMAGE_CHANNELS", channels, "DATA.IMAGENET_MEAN", str(mean.tolist())]
    options += ["DATA.IMAGENET_STD", "1.0", "DATA.IMAGE_DTYPE", "float32", "TRAIN.CROP_BASE", "own"]
    transform = TrainTransform(configured(*options, scale=(0.5, 0.5)))
    y, x = np.mgrid[:30, :40]
    values = np.stack([x + channel for channel in range(channels)], 2).astype(np.float32)
    mask = Mask(Image.fromarray((y * 40 + x).astype(np.int32)), IGNORED)
    pixels, [indices] = transform.with_masks(Bands(values), [mask], RNG(0))
    assert pixels.shape == (48, 64, channels)
    assert pixels.dtype == np.float32
    labelled = indices != IGNORED
    assert labelled[:15, :20].all()
    assert labelled.sum() == 15 * 20
    np.testing.assert_array_equal(
        pixels[~labelled], np.broadcast_to(mean.astype(np.float32), (48 * 64 - 300, channels))
    )
    apart = pixels[labelled] - (indices[labelled] % 40)[:, None] - np.arange(channels)
    assert np.abs(apart).max() <= 1


def test_grey_of_8_bits_has_one_channel():
    options = ["DATA.IMAGE_CHANNELS", 1, "DATA.IMAGENET_MEAN", "0.2", "DATA.IMAGENET_STD", "1.0"]
    transform = TrainTransform(configured(*options, "TRAIN.CROP_BASE", "own", scale=(0.5, 0.5)))
    pixels = transform(Image.fromarray(np.full((30, 40), 9, np.uint8)), RNG(0))
    assert pixels.shape == (48, 64, 1)
    assert (pixels[:15, :20] == 9).all()
    assert (pixels[15:] == 51).all()
    assert (pixels[:, 20:] == 51).all()


# --------------------------------------------------------- the limit of a class


def halves(width, height, share, dtype=np.uint8, ignored=255):
    """A mask in rows, of which ``share`` is class 3 and the rest class 1, and ``ignored`` pixels."""
    values = np.ones(width * height, dtype)
    values[: round(share * values.size)] = 3
    return Mask(Image.fromarray(values.reshape(height, width)), ignored)


@pytest.fixture
def draws(monkeypatch):
    """Counts how often a place was judged."""
    judged = []
    own = ScaleJitter._is_mixed

    def counted(self, mask, box, size):
        judged.append(box)
        return own(self, mask, box, size)

    monkeypatch.setattr(ScaleJitter, "_is_mixed", counted)
    return judged


def limited(share, *options, size=(20, 20), scale=(1.0, 1.0)):
    options = ["TRAIN.CROP_BASE", "own", "TRAIN.CROP_MAX_CLASS", share, *options]
    return TrainTransform(configured(*options, size=size, scale=scale))


@pytest.mark.parametrize("dtype", [np.uint8, np.int32])
@pytest.mark.parametrize(
    ("share", "limit", "count"),
    [
        (0.75, 0.75, 1),
        (0.7525, 0.75, 11),
        (0.57, 0.57, 1),
        (0.2, 0.75, 11),
        (0.25, 0.75, 1),
        (1.0, 0.75, 11),
    ],
)
def test_a_share_up_to_the_limit_is_taken(draws, share, limit, count, dtype):
    """The crop is the whole image, so that each draw gives the same one."""
    image = Image.new("RGB", (20, 20))
    mask = halves(20, 20, share, dtype)
    _, [indices] = limited(limit).with_masks(image, [mask], RNG(0))
    assert (indices == 3).sum() == round(share * 400)
    assert len(draws) == count


def test_ignored_pixels_and_padding_count_nowhere(draws):
    image = Image.new("RGB", (20, 20))
    # Of 100 labelled pixels, 75 are of one class, and the rest of the crop is padding.
    values = np.full((20, 20), 200, np.uint8)
    values[0] = 1
    values[1:4] = 3
    values[4] = 1
    mask = Mask(Image.fromarray(values), 200)
    limited(0.6, size=(30, 40)).with_masks(image, [mask], RNG(0))
    assert len(draws) == 1
    limited(0.59, size=(30, 40)).with_masks(image, [mask], RNG(0))
    assert len(draws) == 12
    # Nothing is labelled at all: the eleventh is taken.
    empty = Mask(Image.fromarray(np.full((20, 20), 200, np.uint8)), 200)
    _, [indices] = limited(0.9).with_masks(image, [empty], RNG(0))
    assert (indices == 200).all()
    assert len(draws) == 23


def test_no_crop_is_above_the_limit_where_most_places_keep_to_it():
    """In stripes of 18 pixels, a crop of 20 has up to 0.9 of one class."""
    values = np.broadcast_to(np.arange(60) // 18 % 2, (60, 60)).astype(np.uint8)
    mask = Mask(Image.fromarray(values), 255)
    image = Image.new("RGB", (60, 60))
    for limit, most in ((0.75, 0.75), (1.0, 0.9)):
        shares = []
        for seed in range(200):
            _, [indices] = limited(limit).with_masks(image, [mask], RNG(seed))
            share = indices.mean()
            shares.append(max(share, 1 - share))
        assert max(shares) == most


def test_without_a_limit_the_first_place_is_taken():
    """A limit that every crop keeps to draws no more than none at all."""
    image, mask = coordinates(60, 40)
    free = TrainTransform(configured("TRAIN.CROP_MAX_CLASS", "1.0"))
    kept = TrainTransform(configured("TRAIN.CROP_MAX_CLASS", "0.9"))
    for seed in range(5):
        for found, expected in zip(
            kept.with_masks(image, [mask], RNG(seed)),
            free.with_masks(image, [mask], RNG(seed)),
            strict=True,
        ):
            np.testing.assert_array_equal(found, expected)


# -------------------------------------------------------------------- samples


def write_pairs(root, count):
    rng = RNG(5)
    for number in range(count):
        small = rng.integers(0, 3, (6, 8)).astype(np.uint8)
        mask = np.kron(small, np.ones((12, 12), np.uint8))
        Image.fromarray(np.stack([mask * 70] * 3, 2)).save(root / f"{number}.png")
        Image.fromarray(mask).save(root / f"{number}.mask.png")
    masks = Masks([f"{number}.mask.png" for number in range(count)])
    paths = [f"{number}.png" for number in range(count)]
    return Files(root, paths, None, list("abc"), {"mask": masks})


def epoch_of(files, *options, ranks=1, epoch=2):
    config = configured(
        "DATA.BATCH_SIZE",
        4 // ranks,
        "TRAIN.CROP_MAX_CLASS",
        0.5,
        "TRAIN.PHOTOMETRIC",
        True,
        *options,
    )
    samples = []
    for rank in range(ranks):
        dataset = FileDataset(config, "train", *files[:4])
        dataset.add_columns(files.columns)
        loader = get_dataloader(config, dataset, "train", rank=rank, ranks=ranks)
        loader.batch_sampler.set_epoch(epoch)
        for batch in loader:
            assert list(batch) == ["pixels", "mask"]
            assert batch["mask"].shape == [4 // ranks, 48, 64]
            samples += zip(batch["pixels"].numpy(), batch["mask"].numpy(), strict=True)
        loader.close()
    return sorted((pixels.tobytes(), mask.tobytes()) for pixels, mask in samples)


def test_workers_and_ranks_give_the_same_samples(tmp_path):
    files = write_pairs(tmp_path, 8)
    here = epoch_of(files)
    assert len(set(here)) == 8
    assert epoch_of(files, "DATA.NUM_WORKERS", 2) == here
    assert epoch_of(files, ranks=2) == here
    assert set(epoch_of(files, epoch=3)).isdisjoint(here)


# -------------------------------------------------------------- configurations


def test_wrong_values_are_one_line():
    base = ["TASK", "segmentation", "HEAD.NAME", "linear", "DATA.CROP_MODE", "short"]
    jitter = ["TRAIN.CROP", "scale_jitter"]
    needs = "has no effect without TRAIN.CROP scale_jitter; leave it out, or set what it needs"
    for words, message in (
        (
            [*base, *jitter, "TRAIN.CROP_SCALE", "[0.5,200]"],
            "TRAIN.CROP_SCALE is [0.5, 200.0], expected 0 < low <= high, from 0.01 to 100, with CROP scale_jitter",
        ),
        (
            [*base, *jitter, "TRAIN.CROP_SCALE", "[2.0,0.5]"],
            "TRAIN.CROP_SCALE is [2.0, 0.5], expected 0 < low",
        ),
        (
            [*base, "TRAIN.CROP_SCALE", "[0.5,2.0]"],
            "TRAIN.CROP_SCALE is [0.5, 2.0], expected 0 < low <= high <= 1, from 1e-6 on",
        ),
        ([*base, "TRAIN.CROP_MAX_CLASS", "0.75"], f"command line: TRAIN.CROP_MAX_CLASS {needs}"),
        ([*base, "TRAIN.CROP_BASE", "own"], f"command line: TRAIN.CROP_BASE {needs}"),
        (
            [*jitter, "TRAIN.CROP_MAX_CLASS", "0.75"],
            "command line: TRAIN.CROP_MAX_CLASS has no effect without TASK segmentation; leave it out, or set what it needs",
        ),
        ([*base, *jitter, "TRAIN.CROP_MAX_CLASS", "0"], "TRAIN.CROP_MAX_CLASS is 0.0, expected"),
    ):
        with pytest.raises(InputError) as raised:
            get_config(None, words)
        assert str(raised.value).startswith(message)
        assert "\n" not in str(raised.value)
