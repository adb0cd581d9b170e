"""Masks beside images: one geometry for both, in files and in a cache, and what is wrong with them."""

import io
import os
import shutil
import struct
import sys
import tarfile
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from scipy.ndimage import maximum_filter, minimum_filter
from support.task_columns import need

from config import get_config
from datasets import FileDataset, get_dataloader, get_dataset
from errors import InputError, RunError
from loading.files import Paths
from loading.mask_tables import index_table
from loading.sources import Files, Masks
from loading.subsets import read_split
from loading.transforms.auto import TrivialAugmentWide
from loading.transforms.masks import Mask, mask_image
from loading.transforms.ops import Augment
from settings.registry import operations
from tools.make_shards import main
from training.equal_ranks import _content

# Indices that lie apart: a blend of two isn't one of them.
INDICES = np.array([1, 3, 5], np.uint8)
# A pixel of class c has c times this value.
STEP = 40


def blocks(width, height, side, seed=0):
    """The mask of a picture of square blocks, each of one index."""
    rng = np.random.default_rng(seed)
    rows, columns = -(-height // side), -(-width // side)
    drawn = rng.choice(INDICES, (rows, columns))
    return drawn.repeat(side, 0).repeat(side, 1)[:height, :width]


def write_pairs(root, sizes, side=32):
    """Pictures whose mask follows from their pixels; returns Files."""
    root.mkdir(exist_ok=True)
    for number, (width, height) in enumerate(sizes):
        indices = blocks(width, height, side, number)
        Image.fromarray(np.stack([indices * STEP] * 3, 2)).save(root / f"{number}.png")
        Image.fromarray(indices).save(root / f"{number}.mask.png")
    count = range(len(sizes))
    masks = Masks([f"{number}.mask.png" for number in count])
    labels = np.zeros(len(sizes), np.int64)
    return Files(root, [f"{number}.png" for number in count], labels, ["a"], {"mask": masks})


def configured(*options, size=(48, 64)):
    words = ["DATA.IMAGE_SIZE", str(list(size)), "DATA.NUM_WORKERS", "0"]
    words += ["DATA.BATCH_SIZE", "4", "TRAIN.WARMUP_EPOCHS", "0", "TRAIN.NUM_EPOCHS", "3"]
    return get_config(None, [*words, *map(str, options)])


def with_masks(config, mode, files):
    """The dataset of a task that needs the column "mask"."""
    dataset = FileDataset(config, mode, files.root, files.paths, files.labels, files.classes)
    dataset.add_columns(files.columns)
    dataset.own_columns += files.columns
    return dataset


def assert_follows(pixels, mask):
    """Away from borders, which the filters blend, the mask says what the pixels are."""
    assert np.isin(mask, [*INDICES, 255]).all()
    # What lies beyond the result's edges isn't known.
    how = {"size": 9, "mode": "constant", "cval": 254}
    inside = minimum_filter(mask, **how) == maximum_filter(mask, **how)
    expected = np.where(mask == 255, 0, mask * STEP)
    apart = np.abs(pixels[:, :, 0].astype(int) - expected)[inside]
    assert apart.max(initial=0) < STEP / 3
    return inside.mean()


# ------------------------------------------------------------------- geometry

MOVED = ["TRAIN.AFFINE", "[25.0,0.2,0.3]", "TRAIN.VFLIP", "0.5"]
PHOTOMETRIC = ["TRAIN.INTERPOLATION", "random"]


@pytest.mark.parametrize("moved", [[], MOVED])
@pytest.mark.parametrize(
    "crop", ["random_resized", "random_resized_once", "simple", "short_side", "squash"]
)
def test_a_mask_is_moved_as_its_pixels_are(tmp_path, crop, moved):
    files = write_pairs(tmp_path, [(192, 128), (128, 200), (160, 160)])
    options = ["TRAIN.CROP", crop, *moved, *PHOTOMETRIC]
    dataset = with_masks(configured(*options), "train", files)
    shares = []
    for index in range(3):
        for epoch in range(12):
            sample = dataset.sample((epoch, index, 0))
            assert sample["mask"].shape == (48, 64)
            assert sample["mask"].dtype == np.uint8
            shares.append(assert_follows(sample["pixels"], sample["mask"]))
    assert np.mean(shares) > 0.1
    # The pixels are those of a dataset without masks.
    alone = FileDataset(configured(*options), "train", *files[:4])
    np.testing.assert_array_equal(alone[3, 1, 0][0], dataset[3, 1, 0][0])


def test_what_lies_outside_is_ignored(tmp_path):
    files = write_pairs(tmp_path, [(96, 96)])
    columns = {"mask": files.columns["mask"]._replace(ignored=17)}
    config = configured("TRAIN.AFFINE", "[0.0,0.5,0.0]", size=(64, 64))
    dataset = with_masks(config, "train", files._replace(columns=columns))
    outside = []
    for epoch in range(5):
        sample = dataset.sample((epoch, 0, 0))
        black = sample["pixels"][:, :, 0] == 0
        outside.append((sample["mask"] == 17).mean())
        assert np.mean(black == (sample["mask"] == 17)) > 0.95
    assert max(outside) > 0.2


@pytest.mark.parametrize("mode", ["center", "squash"])
@pytest.mark.parametrize("sides", [(48, 64), (64, 64)])
def test_an_evaluation_moves_both(tmp_path, mode, sides):
    files = write_pairs(tmp_path, [(192, 128), (128, 200)])
    config = configured("DATA.CROP_MODE", mode, "DATA.CROP_PCT", "0.875", size=sides)
    dataset = with_masks(config, "val", files)
    for index in range(2):
        sample = dataset.sample(index)
        assert sample["mask"].shape == sides
        assert assert_follows(sample["pixels"], sample["mask"]) > 0.1


def test_several_sizes_and_photometric_steps(tmp_path):
    files = write_pairs(tmp_path, [(192, 128)])
    options = ["TRAIN.AUTO_AUGMENT", "3a", "TRAIN.COLOR_JITTER", "0.4"]
    changed = with_masks(configured(*options), "train", files)
    plain = with_masks(configured(), "train", files)
    for size in ((48, 64), (32, 32), (80, 56)):
        sample = changed.sample((1, 0, 0, size))
        assert sample["mask"].shape == size
        assert (sample["mask"] == plain.sample((1, 0, 0, size))["mask"]).all()
        assert (sample["pixels"] != plain.sample((1, 0, 0, size))["pixels"]).any()


NEAREST = (Image.Resampling.NEAREST,)
DTYPES = pytest.mark.parametrize("dtype", ["uint8", "int32"])


def assert_same_regions(pixels, mask):
    """Within the regions of a class, away from their borders, pixels have one colour."""
    how = {"size": 15, "mode": "constant", "cval": 254}
    inside = minimum_filter(mask, **how) == maximum_filter(mask, **how)
    for index in np.intersect1d(mask[inside], INDICES):
        assert len(np.unique(pixels[inside & (mask == index)], axis=0)) == 1, index
    return inside.mean()


@DTYPES
@pytest.mark.parametrize("level", [3, 10])
@pytest.mark.parametrize("name", sorted(operations.names()))
def test_each_operation_moves_a_mask_as_its_image(name, level, dtype):
    indices = blocks(150, 130, 50)
    coloured = Image.fromarray(np.stack([indices * STEP] * 3, 2))
    mask = Mask(Image.fromarray(indices.astype(dtype)), 7)
    augment = Augment(name, 1.0, level, 0.0, 10.0, NEAREST, 7, 0.45)
    moves = operations.load(name)[1].get("moves", False)
    for seed in range(4):
        found = augment(mask, np.random.default_rng(seed))
        assert found.ignored == 7
        values = np.asarray(found.image)
        assert values.dtype == dtype
        # A picture of the indices, of which the operation takes the nearest pixels, too.
        if moves:
            shown = augment(Image.fromarray(indices), np.random.default_rng(seed))
            np.testing.assert_array_equal(values, shown)
            assert (values == 7).any()
        else:
            np.testing.assert_array_equal(values, indices)
            # It moves nothing in a picture.
            shown = augment(coloured, np.random.default_rng(seed))
            assert assert_same_regions(np.asarray(shown), indices) > 0.2


@DTYPES
@pytest.mark.parametrize("step", [0, 1, 7, 15, 30])
@pytest.mark.parametrize("name", TrivialAugmentWide._SPACE)
def test_each_step_of_trivial_augment_moves_a_mask_as_its_image(name, step, dtype):
    indices = blocks(96, 80, 32)
    mask = Mask(Image.fromarray(indices.astype(dtype)), 7)
    moves = name in TrivialAugmentWide._MOVES
    for sign in (1, -1):
        found = TrivialAugmentWide().apply(mask, name, step, sign)
        shown = TrivialAugmentWide().apply(Image.fromarray(indices), name, step, sign, fill=7)
        expected = shown if moves else indices
        np.testing.assert_array_equal(found.image, expected)
        assert np.asarray(found.image).dtype == dtype


POLICIES = [
    "rand-m9-mstd0.5-inc1", "rand-m9-n3-p1.0-tweights", "rand-m9-n4-p1.0-t3aw", "rand-m5-n2-tRotate+Invert",
    "original", "originalr-mstd0.5", "v0", "v0r", "3a", "trivial",
]  # fmt: skip


@pytest.mark.parametrize("interpolation", ["nearest", "random"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_moves_a_mask_as_its_image(tmp_path, policy, interpolation):
    files = write_pairs(tmp_path, [(192, 160)], side=64)
    options = ["TRAIN.INTERPOLATION", interpolation, *MOVED]
    config = configured("TRAIN.AUTO_AUGMENT", policy, *options, size=(96, 112))
    dataset = with_masks(config, "train", files)
    alone = FileDataset(config, "train", *files[:4])
    plain = with_masks(configured(*options, size=(96, 112)), "train", files)
    shares = []
    changed = 0
    for epoch in range(25):
        sample = dataset.sample((epoch, 0, 0))
        shares.append(assert_same_regions(sample["pixels"], sample["mask"]))
        np.testing.assert_array_equal(sample["pixels"], alone[epoch, 0, 0][0])
        changed += (sample["mask"] != plain.sample((epoch, 0, 0))["mask"]).any()
    assert np.mean(shares) > 0.05
    assert (changed > 0) == (policy != "3a")


def test_augmix_has_no_mask(tmp_path):
    files = write_pairs(tmp_path, [(96, 64)] * 4)
    config = configured("TRAIN.AUTO_AUGMENT", "augmix-m3")
    message = (
        "^TRAIN.AUTO_AUGMENT 'augmix-m3' blends shifted copies .* column 'mask'; use another policy"
    )
    with pytest.raises(InputError, match=message):
        get_dataloader(config, with_masks(config, "train", files), "train")
    get_dataloader(config, FileDataset(config, "train", *files[:4]), "train")


def test_what_is_erased_keeps_its_mask(tmp_path):
    files = write_pairs(tmp_path, [(96, 64)])
    erasing = with_masks(configured("TRAIN.RANDOM_ERASE_PROB", "1.0"), "train", files)
    plain = with_masks(configured("TRAIN.RANDOM_ERASE_PROB", "0.0"), "train", files)
    for epoch in range(4):
        sample = erasing.sample((epoch, 0, 0))
        assert sample["erased"].any()
        np.testing.assert_array_equal(sample["mask"], plain.sample((epoch, 0, 0))["mask"])


@pytest.mark.parametrize("dtype", ["auto", "float32"])
@pytest.mark.parametrize("mode", ["train", "val"])
def test_grey_images_and_floats_have_masks(tmp_path, dtype, mode):
    files = write_pairs(tmp_path, [(192, 128)])
    options = ["DATA.IMAGE_CHANNELS", 1, "DATA.IMAGE_DTYPE", dtype]
    options += ["DATA.IMAGENET_MEAN", "0.5", "DATA.IMAGENET_STD", "0.5", *MOVED]
    Image.open(tmp_path / "0.png").convert("L").save(tmp_path / "0.png")
    dataset = with_masks(configured(*options), mode, files)
    (batch,) = get_dataloader(configured(*options, "DATA.BATCH_SIZE", 1), dataset, mode)
    pixels = batch["pixels"].numpy()[0]
    assert pixels.shape == (48, 64, 1)
    scale = 1 if pixels.dtype == np.uint8 else 255
    assert assert_follows(pixels * scale, batch["mask"].numpy()[0]) > 0.05


def test_a_corruption_that_moves_pixels_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "imagecorruptions", SimpleNamespace(corrupt=lambda p, *_: p))
    files = write_pairs(tmp_path, [(96, 64)])
    for name in ("fog", "elastic_transform"):
        options = ["EVAL", "True", "DATA.CORRUPTION", name]
        config = get_config(None, ["DATA.IMAGE_SIZE", "48", "DATA.NUM_WORKERS", "0", *options])
        dataset = with_masks(config, "val", files)
        if name == "fog":
            (batch,) = get_dataloader(config, dataset, "val")
            assert_follows(batch["pixels"].numpy()[0], batch["mask"].numpy()[0])
        else:
            with pytest.raises(
                InputError, match="^DATA.CORRUPTION elastic_transform moves pixels, "
            ):
                get_dataloader(config, dataset, "val")


# -------------------------------------------------------------------- loaders


def taken(config, files, mode, ranks=1, epoch=2):
    """The pixels and masks of all samples of a pass over all ranks, by the label."""
    files = files._replace(labels=np.arange(len(files.paths)), classes=list(files.paths))
    samples = {}
    for rank in range(ranks):
        dataset = with_masks(config, mode, files)
        loader = get_dataloader(config, dataset, mode, rank=rank, ranks=ranks)
        if mode == "train":
            loader.batch_sampler.set_epoch(epoch)
        for batch in loader:
            assert list(batch) == ["pixels", "labels", "mask"]
            for label, pixels, mask in zip(
                *(batch[name].numpy() for name in ("labels", "pixels", "mask")), strict=True
            ):
                samples[int(label)] = (pixels.tobytes(), mask.tobytes())
        loader.close()
    return samples


@pytest.mark.parametrize("mode", ["train", "val"])
def test_workers_and_ranks_give_the_same_masks(tmp_path, mode):
    files = write_pairs(tmp_path, [(96, 64)] * 8)
    here = taken(configured(*MOVED), files, mode)
    assert len(here) == 8
    for workers, ranks in ((2, 1), (0, 2), (2, 2)):
        options = [*MOVED, "DATA.NUM_WORKERS", workers, "DATA.BATCH_SIZE", 4 // ranks]
        assert taken(configured(*options), files, mode, ranks) == here


def test_slots_hold_the_masks_and_memory_counts_them(tmp_path, monkeypatch):
    files = write_pairs(tmp_path, [(96, 64)] * 8)
    config = configured("DATA.NUM_WORKERS", 2)
    dataset = with_masks(config, "train", files)
    with_mask = get_dataloader(config, dataset, "train")
    dataset.own_columns.remove("mask")
    without = get_dataloader(config, dataset, "train")
    assert without.room == 4 * 48 * 64 * 3
    assert with_mask.room == 4 * 48 * 64 * 4
    monkeypatch.setattr("loading.workers.free_memory", lambda: 5 * without.room)
    get_dataloader(config, dataset, "train")
    dataset.own_columns.append("mask")
    with pytest.raises(InputError, match="lower DATA.PREFETCH, DATA.NUM_WORKERS or the batch size"):
        get_dataloader(config, dataset, "train")


class Crops(FileDataset):
    """Beside the pixels, n smaller crops of another type: [n, h, w, c]."""

    def shapes(self, size):
        return super().shapes(size) | {"crops": ((3, 8, 8, 3), np.dtype(np.float32))}

    def sample(self, key):
        sample = super().sample(key)
        corner = sample["pixels"][:8, :8].astype(np.float32)
        return sample | {"crops": np.stack([corner + place for place in range(3)])}


def test_a_column_may_have_a_size_of_its_own(tmp_path):
    files = write_pairs(tmp_path, [(96, 64)] * 8)
    dataset = Crops(configured(), "val", *files[:4])
    dataset.own_columns.append("crops")
    for workers in (0, 2):
        config = configured("DATA.NUM_WORKERS", workers, "DATA.BATCH_SIZE_EVAL", 3)
        batches = list(get_dataloader(config, dataset, "val"))
        assert [batch["crops"].shape for batch in batches] == [[3, 3, 8, 8, 3]] * 2 + [
            [2, 3, 8, 8, 3]
        ]
        for batch in batches:
            corner = batch["pixels"].numpy()[:, None, :8, :8]
            expected = corner + np.arange(3)[:, None, None, None].astype(np.float32)
            np.testing.assert_array_equal(batch["crops"].numpy(), expected)


def test_numbers_come_beside_the_images(tmp_path):
    files = write_pairs(tmp_path, [(96, 64)] * 4)
    depth = np.arange(8, dtype=np.float32).reshape(4, 2)
    dataset = with_masks(configured(), "val", files._replace(columns={"depth": depth}))
    (batch,) = get_dataloader(configured(), dataset, "val")
    assert list(batch) == ["pixels", "labels", "depth"]
    np.testing.assert_array_equal(batch["depth"].numpy(), depth)


def test_a_task_without_masks_reads_none(tmp_path):
    files = write_pairs(tmp_path, [(96, 64)] * 4)
    dataset = FileDataset(configured(), "val", *files[:4])
    dataset.add_columns(files.columns)
    for file in tmp_path.glob("*.mask.png"):
        file.write_bytes(b"")
    assert dataset.columns == ("pixels", "labels")
    assert len(dataset[3]) == 2


SIZES = [(96, 64), (50, 70), (33, 40), (96, 64), (40, 120)]


# The (width, height) that an image of SIZES is resized to, of IMAGE_SIZE 48 x 64.
WHOLE = {
    "short": [(72, 48), (64, 90), (64, 78), (72, 48), (64, 192)],
    "squash": [(64, 48)] * 5,
    "own": SIZES,
}


@pytest.mark.parametrize("mode", WHOLE)
@pytest.mark.parametrize(("workers", "ranks"), [(0, 1), (2, 1), (0, 2)])
def test_an_evaluation_may_have_whole_images_and_stored_masks(tmp_path, workers, ranks, mode):
    files = write_pairs(tmp_path, SIZES)
    options = ["DATA.NUM_WORKERS", workers, "DATA.BATCH_SIZE_EVAL", 3]
    options += ["TASK", "segmentation", "HEAD.NAME", "linear", "DATA.CROP_MODE", mode]
    if mode == "squash":
        options += ["DATA.CROP_PCT", "1.0"]
    config = configured(*options)
    dataset = FileDataset(config, "val", *files[:4])
    dataset.add_columns(files.columns | {"number": np.arange(5)})
    dataset.own_columns.append("number")
    dataset.keep_sizes()
    seen = []
    for rank in range(ranks):
        for batch in get_dataloader(config, dataset, "val", rank=rank, ranks=ranks):
            (number,) = batch["number"].tolist()
            indices = blocks(*SIZES[number], 32, number)
            np.testing.assert_array_equal(batch["mask"].numpy(), indices[None])
            image = Image.fromarray(np.stack([indices * STEP] * 3, 2))
            resized = image.resize(WHOLE[mode][number], Image.Resampling.BICUBIC)
            np.testing.assert_array_equal(batch["pixels"].numpy(), np.asarray(resized)[None])
            seen.append(number)
    assert sorted(seen) == [0, 1, 2, 3, 4]
    with pytest.raises(TypeError):
        with_masks(config, "train", files).keep_sizes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["DATA.CROP_MODE", "own"],
            "DATA.CROP_MODE is 'own', expected center or squash with TASK c",
        ),
        (
            ["DATA.CROP_MODE", "short", "TASK", "mae"],
            "DATA.CROP_MODE is 'short', expected center or",
        ),
        (
            ["TASK", "segmentation", "HEAD.NAME", "linear"],
            "DATA.CROP_MODE is 'center', expected short, squash or own with",
        ),
        (
            ["TASK", "segmentation", "HEAD.NAME", "linear", "DATA.CROP_MODE", "squash"],
            "DATA.CROP_PCT is 0.875, expected 1.0 with TASK segmentation, which doesn't crop",
        ),
        (
            [
                "TASK",
                "segmentation",
                "HEAD.NAME",
                "linear",
                "DATA.CROP_MODE",
                "own",
                "DATA.CROP_PCT",
                "1.0",
            ],
            "command line: DATA.CROP_PCT has no effect with DATA.CROP_MODE short or own; leave it out",
        ),
    ],
)
def test_a_task_has_whole_images_or_images_of_one_size(options, message):
    with pytest.raises(InputError, match=f"^{message}"):
        configured(*options)


# ----------------------------------------------------------------- wrong masks


def png(pixels, **options):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, options.pop("format", "PNG"), **options)
    return file.getvalue()


def grey_png(values, bits):
    """A grey PNG of 1, 2, 4, 8 or 16 bits a value; width times bits is a multiple of 8."""
    height, width = values.shape
    rows = b""
    for row in values.tolist():
        number = 0
        for value in row:
            number = number << bits | value
        rows += b"\0" + number.to_bytes(width * bits // 8, "big")

    def chunk(kind, data):
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", width, height, bits, 0, 0, 0, 0)
    parts = (chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def read_mask(data, dtype=np.uint8, most=10**6):
    return np.asarray(mask_image(data, "m.png", most, np.dtype(dtype)))


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("dtype", [np.uint8, np.int32])
def test_indices_are_read_as_they_are_stored(bits, dtype):
    values = np.random.default_rng(bits).integers(0, min(256, 2**bits), (8, 16))
    found = read_mask(grey_png(values, bits), dtype)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, values)
    if bits <= 8:
        palette = Image.fromarray(values.astype(np.uint8), "L").convert("P")
        palette = Image.fromarray(values.astype(np.uint8))
        palette.putpalette(
            np.random.default_rng(1).integers(0, 256, 768).astype(np.uint8).tobytes()
        )
        file = io.BytesIO()
        palette.save(file, "PNG", bits=bits)
        np.testing.assert_array_equal(read_mask(file.getvalue(), dtype), values)


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
def test_a_table_maps_indices_of_any_bits(bits):
    values = np.random.default_rng(bits).integers(0, min(200, 2**bits), (8, 16))
    table = index_table({index: 200 - index for index in range(200)})
    found = mask_image(grey_png(values, bits), "m.png", 10**6, np.dtype(np.uint8), table=table)
    np.testing.assert_array_equal(np.asarray(found), 200 - values)


def test_indices_of_16_bits_need_a_column_that_holds_them(tmp_path):
    values = np.array([[0, 300], [40000, 65535]])
    np.testing.assert_array_equal(read_mask(grey_png(values, 16), np.int32), values)
    with pytest.raises(
        RunError, match=r"^m.png: it contains the index 65535, its column has values of 0..255"
    ):
        read_mask(grey_png(values, 16))
    files = write_pairs(tmp_path, [(96, 64)])
    indices = blocks(96, 64, 32).astype(np.int64) * 1000
    (tmp_path / "0.mask.png").write_bytes(grey_png(indices, 16))
    columns = {"mask": Masks(["0.mask.png"], ignored=65535, dtype="int32")}
    config = configured(*MOVED, "DATA.NUM_WORKERS", 1, "DATA.BATCH_SIZE", 1)
    wide = with_masks(config, "train", files._replace(columns=columns))
    narrow = with_masks(config, "train", write_pairs(tmp_path / "b", [(96, 64)]))
    (batch,) = get_dataloader(config, wide, "train")
    (expected,) = get_dataloader(config, narrow, "train")
    expected = expected["mask"].numpy().astype(np.int32)
    expected = np.where(expected == 255, 65535, expected * 1000)
    np.testing.assert_array_equal(batch["mask"].numpy(), expected)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (png(np.zeros((8, 8, 3), np.uint8)), "it has 3 channels, expected a PNG of one channel"),
        (png(np.zeros((8, 8, 2), np.uint8)), "it has 2 channels, expected a PNG of one channel"),
        (png(np.zeros((8, 8), np.uint8), format="JPEG"), "its format is JPEG, expected a PNG"),
        (b"", "its format is unknown"),
        (png(np.zeros((8, 8), np.uint8))[:45], r"can't be read as an image \("),
        (png(np.zeros((2000, 2000), np.uint8)), "it has 2000 x 2000 pixels, DATA.MAX_PIXELS is"),
    ],
)
def test_a_wrong_mask_is_named(data, message):
    with pytest.raises(RunError, match=f"^m.png: {message}.*; repair or remove it$"):
        read_mask(data)


def test_a_mask_of_another_size_names_both(tmp_path):
    files = write_pairs(tmp_path, [(96, 64)] * 2)
    Image.fromarray(blocks(64, 96, 32)).save(tmp_path / "1.mask.png")
    dataset = with_masks(configured(), "val", files)
    message = (
        rf"^{tmp_path}/1.mask.png: the mask has 64 x 96 pixels, its image {tmp_path}/1.png 96 x 64;"
        " make them of one size, or change DATA.EXIF_ORIENTATION"
    )
    with pytest.raises(RunError, match=message):
        dataset[1]
    # A training may leave it out, as it may leave out a broken image.
    config = configured("DATA.SKIP_BROKEN", "True")
    skipping = with_masks(config, "train", files).sample((1, 1, 0))
    assert skipping["skipped"] == 1
    assert_follows(skipping["pixels"], skipping["mask"])
    (tmp_path / "1.mask.png").write_bytes(b"")
    assert with_masks(config, "train", files).sample((1, 1, 0))["skipped"] == 1


def test_exif_turns_each_file_by_its_own(tmp_path):
    files = write_pairs(tmp_path, [(96, 64)])
    indices = blocks(96, 64, 32)
    exif = Image.Exif()
    exif[274] = 6
    picture = Image.open(tmp_path / "0.png")
    picture.load()
    picture.save(tmp_path / "0.png", exif=exif)
    # The mask was drawn on the picture as it is shown.
    Image.fromarray(np.rot90(indices, -1)).save(tmp_path / "0.mask.png")
    config = configured("DATA.EXIF_ORIENTATION", "True", size=(96, 64))
    sample = with_masks(config, "val", files).sample(0)
    assert_follows(sample["pixels"], sample["mask"])
    # It carries the photograph's own EXIF.
    Image.fromarray(indices).save(tmp_path / "0.mask.png", exif=exif)
    turned = with_masks(config, "val", files).sample(0)
    np.testing.assert_array_equal(turned["mask"], sample["mask"])
    plain = with_masks(configured("DATA.EXIF_ORIENTATION", "False"), "val", files).sample(0)
    assert_follows(plain["pixels"], plain["mask"])


def test_columns_that_dont_fit_are_refused(tmp_path):
    files = write_pairs(tmp_path, [(96, 64)] * 2)
    for columns, message in (
        ({"mask": Masks(["0.mask.png"])}, "^the column 'mask' has 1 entries for 2 images$"),
        ({"labels": np.zeros(2)}, "^the column 'labels' needs another name"),
        ({"No mask": np.zeros(2)}, "^the column 'No mask' needs another name"),
        ({"boxes": [[1, 2], [3]]}, "^the values of the column 'boxes' differ in shape"),
        (
            {"names": np.array(["a", "b"])},
            "^the column 'names' has values of <U1, expected numbers",
        ),
    ):
        with pytest.raises(InputError, match=message):
            with_masks(configured(), "val", files._replace(columns=columns))


# ------------------------------------------------------- caches, shards, readers


def read_with(monkeypatch, columns):
    """Adds columns to the files of datasets, and makes them those of the task.

    Args:
        columns: Files -> their columns by name, with those that are there.
    """

    def with_columns(data, split, reader):
        def read(split):
            files = reader(split)
            return files._replace(columns=columns(files)) if isinstance(files, Files) else files

        return read_split(data, split, read)

    monkeypatch.setattr("datasets._check_task", lambda *_: None)
    monkeypatch.setattr("datasets.read_split", with_columns)
    monkeypatch.setattr("loading.subsets.read_split", with_columns)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of two classes, whose masks are in masks/ under the same paths."""
    for mode, count in (("train", 6), ("val", 3)):
        for number in range(2 * count):
            path = f"{mode}/{'ab'[number % 2]}/{number}.png"
            indices = blocks(96, 64, 29, number)
            for place, pixels in (
                ("", np.stack([indices * STEP] * 3, 2)),
                ("masks/", indices),
            ):
                file = tmp_path / "data" / f"{place}{path}"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(file)

    def columns(files):
        return {"mask": Masks([f"masks/{path}" for path in files.paths], ignored=9)}

    # Of a task and a dataset that have masks.
    need(monkeypatch, "labels", "mask")
    read_with(monkeypatch, columns)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "data"


def from_folder(kind, path, mode, *options):
    words = ["DATA.DATASET", kind, "DATA.DATA_PATH", path, "MODEL.NUM_CLASSES", "auto"]
    return get_dataset(configured(*words, *options), mode)


def assert_same(dataset, expected):
    assert len(dataset) == len(expected)
    for index in range(len(expected)):
        found = dataset.sample((2, index, 0))
        wanted = expected.sample((2, index, 0))
        assert_follows(found["pixels"], found["mask"])
        for name in ("pixels", "labels", "mask"):
            np.testing.assert_array_equal(found[name], wanted[name])


def test_a_cache_holds_the_masks(folder, capfd):
    files = from_folder("folder", folder, "val")
    for decoded in ("decoding", ""):
        cached = from_folder("folder", folder, "val", "DATA.CACHE", "cache")
        assert capfd.readouterr().out.count("decoding") == (2 if decoded else 0)
        assert_same(cached, files)
    # Another mask makes another cache of the masks alone.
    Image.fromarray(blocks(96, 64, 16)).save(folder / "masks/val/a/0.png")
    cached = from_folder("folder", folder, "val", "DATA.CACHE", "cache")
    assert capfd.readouterr().out.count("decoding") == 1
    np.testing.assert_array_equal(cached.cached_masks["mask"][0], blocks(96, 64, 16))


def test_a_split_takes_the_masks_of_its_images(folder):
    shutil.rmtree(folder / "val")
    for mode, count in (("train", 8), ("val", 4)):
        dataset = from_folder("folder", folder, mode, "DATA.VAL_SPLIT", "0.3")
        assert len(dataset) == count
        for index in range(count):
            image = dataset.path(index)
            assert dataset.mask_path("mask", index) == image.replace("data/", "data/masks/")


def test_a_missing_mask_is_named_at_the_start(folder):
    for number in (0, 2):
        (folder / f"masks/val/a/{number}.png").unlink()
    with pytest.raises(
        InputError,
        match=rf"^2 of 6 files of the column 'mask' are missing, the first is {folder}/masks/val/a/0.png$",
    ):
        from_folder("folder", folder, "val")


@pytest.fixture
def pack(monkeypatch):
    def run(*arguments):
        words = ["make_shards.py", "-dataset=folder", "-data_path=data", *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", words)
        main()

    return run


@pytest.mark.parametrize("mode", ["train", "val"])
def test_shards_hold_the_masks(folder, pack, mode):
    pack("-output=out", "-shard_size=5", "-workers=1")
    files = from_folder("folder", folder, mode)
    packed = from_folder("shards", "out", mode)
    assert_same(packed, files)
    assert packed.masks["mask"].ignored == 9
    # Another reader of such shards finds the masks without an index, too.
    (folder.parent / f"out/{mode}.index.npz").unlink()
    for _ in range(2):
        scanned = from_folder("shards", "out", mode)
        assert_same(scanned, files)
        assert scanned.masks["mask"].ignored == 255
    halves = from_folder("shards", "out", "train", "DATA.FOLDS", "2", "DATA.FOLD", "0")
    for index in range(len(halves)):
        sample = halves.sample((0, index, 0))
        assert_follows(sample["pixels"], sample["mask"])


def test_jittered_crops_of_shards_and_a_cache_are_those_of_files(folder, pack):
    pack("-output=out", "-shard_size=5", "-workers=1")
    options = ["TRAIN.CROP", "scale_jitter", "TRAIN.CROP_SCALE", "[0.5,2.0]"]
    files = from_folder("folder", folder, "train", *options)
    for kind, path, *more in (("shards", "out"), ("folder", folder, "DATA.CACHE", "cache")):
        dataset = from_folder(kind, path, "train", *options, *more)
        for index in range(len(files)):
            found = dataset.sample((2, index, 0))
            wanted = files.sample((2, index, 0))
            for name in ("pixels", "mask"):
                np.testing.assert_array_equal(found[name], wanted[name])


def numbers_of(files):
    """Columns of numbers that follow from the names of images, as arrays and as nested lists."""
    stems = [int(path.rpartition("/")[2].partition(".")[0]) for path in files.paths]
    boxes = [[stem, stem + 1, stem + 2, stem + 3] for stem in stems]
    return {
        "depth": np.array(stems, ">f4") / 8,
        "boxes": boxes,
        "crops": np.array(boxes, np.int16).reshape(-1, 2, 2),
        "is_odd": np.array(stems) % 2 == 1,
    }


TASK_COLUMNS = ("labels", "classes", "instance", "depth", "boxes", "crops", "is_odd")


@pytest.fixture
def with_numbers(folder, monkeypatch):
    """The folder, with two columns of masks of other names, and four of numbers."""

    def columns(files):
        paths = [f"masks/{path}" for path in files.paths]
        masks = {"classes": Masks(paths, ignored=9), "instance": Masks(paths, 65535, "int32")}
        return masks | numbers_of(files)

    need(monkeypatch, *TASK_COLUMNS)
    read_with(monkeypatch, columns)
    return folder


@pytest.mark.parametrize("options", [[], ["DATA.CACHE", "cache"]])
@pytest.mark.parametrize("mode", ["train", "val"])
def test_shards_hold_every_column(with_numbers, pack, mode, options):
    pack("-output=out", "-shard_size=5", "-workers=2")
    files = from_folder("folder", with_numbers, mode)
    packed = from_folder("shards", "out", mode, *options)
    assert packed.columns == files.columns == ("pixels", *TASK_COLUMNS)
    found = get_dataloader(configured("DATA.NUM_WORKERS", 2), packed, mode)
    wanted = get_dataloader(configured(), files, mode)
    rows = 0
    for batch, expected in zip(found, wanted, strict=True):
        for name in files.columns:
            assert batch[name].dtype == expected[name].dtype
            np.testing.assert_array_equal(batch[name].numpy(), expected[name].numpy())
        rows += len(batch["boxes"])
    found.close()
    assert rows == (12 if mode == "train" else 6)
    name = os.fsdecode(files.relative_names()[3])
    number = int(name.rpartition("/")[2].partition(".")[0])
    sample = packed.sample((0, 3, 0))
    assert sample["boxes"].tolist() == [number, number + 1, number + 2, number + 3]
    assert (sample["depth"], sample["depth"].dtype) == (number / 8, np.float32)
    assert (sample["crops"].dtype, sample["is_odd"]) == (np.int16, number % 2 == 1)
    assert_follows(sample["pixels"], sample["classes"])
    np.testing.assert_array_equal(sample["classes"], sample["instance"])
    assert (packed.masks["instance"].ignored, sample["instance"].dtype) == (65535, np.int32)


def test_a_part_of_shards_has_its_numbers(with_numbers, pack):
    pack("-output=out", "-workers=1", "-modes", "train")
    seen = set()
    for fold in range(2):
        for mode in ("train", "val"):
            options = ["DATA.FOLDS", 2, "DATA.FOLD", fold]
            files = from_folder("folder", with_numbers, mode, *options)
            assert len(files) == 6
            for index in range(6):
                number = int(files.relative_names()[index].rpartition("/")[2].partition(".")[0])
                assert files.sample((0, index, 0))["boxes"][0] == number
            packed = from_folder("shards", "out", mode, *options)
            firsts = [int(packed.sample((0, index, 0))["boxes"][0]) for index in range(6)]
            listed = (with_numbers.parent / "out/train.txt").read_text().splitlines()
            members = [int(os.fsdecode(name)[:9]) for name in packed.relative_names()]
            names = [listed[member] for member in members]
            assert [int(name.rpartition("/")[2].partition(".")[0]) for name in names] == firsts
            if mode == "val":
                seen |= set(firsts)
    assert seen == set(range(12))


def test_ranks_compare_their_numbers(with_numbers, pack):
    pack("-output=out", "-workers=1", "-modes", "val")
    own = from_folder("shards", "out", "val")
    other = from_folder("shards", "out", "val")
    first, second = (_content(each, each.relative_names(), 0, 6) for each in (own, other))
    assert list(map(bytes, first)) == list(map(bytes, second))
    other.values["boxes"] = own.values["boxes"] + 1
    changed = _content(other, other.relative_names(), 0, 6)
    assert list(map(bytes, first)) != list(map(bytes, changed))


def test_a_lost_index_loses_the_numbers_alone(with_numbers, pack, monkeypatch):
    pack("-output=out", "-workers=1", "-modes", "val")
    (with_numbers.parent / "out/val.index.npz").unlink()
    for _ in range(2):
        with pytest.raises(InputError, match="has no column 'depth', which TASK classification ne"):
            from_folder("shards", "out", "val")
    need(monkeypatch, "labels", "classes", "instance")
    sample = from_folder("shards", "out", "val").sample((0, 3, 0))
    assert_follows(sample["pixels"], sample["classes"])


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"boxes": [[1, 2]] * 11 + [[1]]},
            "the values of the column 'boxes' differ in shape; they",
        ),
        ({"boxes": np.zeros(3)}, "the column 'boxes' has 3 entries for 12 images"),
        ({"mask": Masks(["a.png"])}, "the column 'mask' has 1 entries for 12 images"),
        (
            {"ids": np.zeros(12, np.uint16)},
            "the column 'ids' has values of uint16, which Paddle can",
        ),
        (
            {"ids": np.zeros(12, np.uint64)},
            "the column 'ids' has values of uint64, which Paddle can",
        ),
        ({"ids": np.zeros(12, np.longdouble)}, "the column 'ids' has values of "),
        ({"names": ["a"] * 12}, "the column 'names' has values of <U1, expected numbers"),
        ({"pixels": np.zeros(12)}, "the column 'pixels' needs another name"),
    ],
)
@pytest.mark.parametrize("options", [[], ["-o", "DATA.FOLDS", "2"]])
def test_columns_that_cant_be_packed_are_one_line(
    folder, pack, monkeypatch, columns, message, options
):
    read_with(monkeypatch, lambda files: columns)
    with pytest.raises(InputError, match=f"^{message}"):
        pack("-output=out", "-workers=1", "-modes", "train", *options)
    assert not (folder.parent / "out").exists()


def test_an_index_with_wrong_numbers_is_named(with_numbers, pack):
    pack("-output=out", "-workers=1", "-modes", "val")
    path = with_numbers.parent / "out/val.index.npz"
    with np.load(path) as stored:
        index = dict(stored)
    assert index["format"] == 31
    for changes, message in (
        ({"numbers/boxes": index["numbers/boxes"][1:]}, "its arrays differ in length"),
        (
            {"numbers/boxes": np.array(3)},
            "its numbers/boxes are 0 dimensions of int64; expected 1 or",
        ),
        (
            {"numbers/boxes": np.array(["a"] * 6)},
            "its numbers/boxes are 1 dimensions of <U1; exp",
        ),
        ({"numbers/boxes": np.array([None] * 6)}, "its numbers/boxes are 1 dimensions of object"),
        ({"numbers": np.array(["other"])}, "its numbers/other is missing"),
        ({"numbers": np.array(["../a"])}, "its column '../a' has no such name"),
        ({"numbers": np.array(["boxes", "boxes"])}, "two of its columns have the same name"),
        ({"numbers": np.array(["classes"])}, "two of its columns have the same name"),
        ({"format": np.array(34)}, "it has another format"),
        ({"format": np.array(20)}, "it has another format"),
    ):
        np.savez(path, **index | changes)
        with pytest.raises(InputError, match=rf"val.index.npz: {message}"):
            from_folder("shards", "out", "val")
    np.savez(path, **index | {"numbers/boxes": np.zeros(6, np.uint16)})
    with pytest.raises(InputError, match="^the column 'boxes' has values of uint16, which Paddle"):
        from_folder("shards", "out", "val")


def test_the_files_of_shards_say_which_columns_there_are(folder, pack, monkeypatch):
    """Nothing but what is there decides whether a task can read shards."""
    pack("-output=out", "-workers=1", "-modes", "val")
    monkeypatch.undo()
    monkeypatch.chdir(folder.parent)
    for needed, missing in (
        (("labels", "mask"), None),
        (("labels", "boxes"), "the val set of 'shards' at out has no column 'boxes', which TASK"),
    ):
        need(monkeypatch, *needed)
        if missing is None:
            assert from_folder("shards", "out", "val").columns == ("pixels", "labels", "mask")
        else:
            with pytest.raises(InputError, match=f"^{missing}"):
                from_folder("shards", "out", "val")
        with pytest.raises(
            InputError, match=f"^DATA.DATASET 'folder' has no {needed[1]}, which TASK cl"
        ):
            from_folder("folder", folder, "val")


def test_reduced_shards_have_reduced_masks(folder, pack):
    pack("-output=out", "-resize=40", "-workers=1", "-modes", "val")
    dataset = from_folder("shards", "out", "val")
    assert dataset.mask("mask", 0).size == dataset.image(0).size == (60, 40)
    expected = Image.fromarray(blocks(96, 64, 29)).resize((60, 40), Image.Resampling.NEAREST)
    np.testing.assert_array_equal(dataset.mask("mask", 0), expected)


def test_damaged_masks_in_shards_are_named(folder, pack):
    pack("-output=out", "-workers=1", "-modes", "val")
    shard = folder.parent / "out/val-000000.tar"
    data = shard.read_bytes()
    place = data.index(b"000000001.mask.png")
    shard.write_bytes(data[:place] + b"x" + data[place + 1 :])
    dataset = from_folder("shards", "out", "val")
    with pytest.raises(
        RunError, match=r"out/val-000000.tar: 000000001.mask.png: not where the ind"
    ):
        dataset[1]
    with np.load(folder.parent / "out/val.index.npz") as stored:
        index = dict(stored)
    for changes, message in (
        (
            {"mask.offsets": index["mask.offsets"] + 10**6},
            "it places an image outside of its shard",
        ),
        ({"mask.lengths": index["mask.lengths"][1:]}, "its arrays differ in length"),
        ({"columns": np.array(["../a"])}, "its column '../a' has no such name"),
        ({"columns": np.array(["mask", "mask"])}, "its arrays of columns differ in length"),
        (
            {name: np.repeat(index[name], 2) for name in ("columns", "ignored", "dtypes")},
            "two of its columns have the same name",
        ),
        ({"dtypes": np.array(["object"])}, "it contains masks of object"),
        ({"ignored": np.array([-1])}, "it contains masks of uint8, in which -1 is ignored"),
        ({"format": np.array(5)}, "it has another format"),
    ):
        np.savez(folder.parent / "out/val.index.npz", **index | changes)
        with pytest.raises(InputError, match=rf"val.index.npz: {message}"):
            from_folder("shards", "out", "val")


def test_a_column_that_some_samples_lack_is_no_mask(folder, pack, monkeypatch):
    pack("-output=out", "-workers=1", "-modes", "val", "-shard_size=3")
    (folder.parent / "out/val.index.npz").unlink()
    shard = folder.parent / "out/val-000000.tar"
    with tarfile.open(shard) as old:
        members = [(member, old.extractfile(member).read()) for member in old]
    with tarfile.open(shard, "w", format=tarfile.USTAR_FORMAT) as new:
        for member, data in members:
            if member.name != "000000001.mask.png":
                new.addfile(member, io.BytesIO(data))
    with pytest.raises(InputError, match="has no column 'mask', which TASK classification needs"):
        from_folder("shards", "out", "val")
    need(monkeypatch, "labels")
    assert not from_folder("shards", "out", "val").masks


def test_only_a_task_that_needs_masks_reads_them(folder, monkeypatch):
    assert from_folder("folder", folder, "val").columns == ("pixels", "labels", "mask")
    shutil.rmtree(folder / "masks")
    need(monkeypatch, "labels")
    for options in ((), ("DATA.CACHE", "cache")):
        assert len(from_folder("folder", folder, "val", *options)[0]) == 2
    need(monkeypatch, "labels", "depth")
    with pytest.raises(InputError, match="has no column 'depth', which TASK classification needs"):
        from_folder("folder", folder, "val")


def test_ranks_compare_their_masks(folder, pack):
    pack("-output=out", "-workers=1", "-modes", "val")
    for kind, path, *options in (
        ("folder", folder),
        ("folder", folder, "DATA.CACHE", "cache"),
        ("shards", "out"),
    ):
        own = from_folder(kind, path, "val", *options)
        other = from_folder(kind, path, "val", *options)
        first, second = (_content(each, each.relative_names(), 0, 6) for each in (own, other))
        assert list(map(bytes, first)) == list(map(bytes, second))
        if kind == "shards":
            other.shards.places_of_masks["mask.lengths"] = np.arange(6)
        elif options:
            other.cached_masks["mask"].crcs = np.arange(6)
        else:
            paths = Paths(reversed(own.masks["mask"].paths))
            other.masks["mask"] = own.masks["mask"]._replace(paths=paths)
        changed = _content(other, other.relative_names(), 0, 6)
        assert list(map(bytes, first)) != list(map(bytes, changed))


def test_loaders_that_read_no_further_columns_say_so(tmp_path):
    files = write_pairs(tmp_path, [(96, 64)] * 4)
    config = configured("DATA.LOADER", "dali")
    for columns in (files.columns, {"boxes": np.zeros((4, 4))}):
        (name,) = columns
        dataset = with_masks(config, "train", files._replace(columns=columns))
        with pytest.raises(
            InputError, match=f"^DATA.LOADER is 'dali', which reads no column '{name}'; set it to"
        ):
            get_dataloader(config, dataset, "train")


def test_paddlevits_loader_says_that_it_has_no_masks(tmp_path):
    files = write_pairs(tmp_path, [(96, 64)] * 4)
    message = (
        "^PaddleViT's loader yields images and labels, but no column 'mask'; call get_dataload"
    )
    with pytest.raises(InputError, match=message):
        get_dataloader(configured(), with_masks(configured(), "train", files), True)
