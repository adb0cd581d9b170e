"""Images of any number of channels: each is what Pillow makes of it alone, from whichever file it
comes.
"""

import io
import itertools
import tarfile

import numpy as np
import paddle
import pytest
from conftest import TINY
from PIL import Image
from support.forged_images import directory
from support.multiband_images import FIVE, MOST, UNITS, bands, npy, saved, tiff

from config import get_config
from datasets import get_dataloader, get_dataset
from errors import InputError, RunError
from inference.fidelity import crops
from inference.pictures import Pictures
from inference.preparation import Preparation
from loading.shards import shards
from loading.sources import Split
from loading.transforms import (
    Bands,
    BatchTransform,
    EvalTransform,
    Normalize,
    TrainTransform,
    bands_of,
    visible,
)
from loading.transforms.tiff import Directory
from tools.make_shards import encode, inspect


def configured(*options):
    return get_config(None, ["DATA.IMAGE_SIZE", "24", *FIVE, *options])


# ------------------------------------------------------------------- pixels


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize("how", ["bicubic", "bilinear", "nearest"])
@pytest.mark.parametrize("mode", ["center", "squash"])
def test_each_channel_is_resized_as_pillow_resizes_it_alone(dtype, how, mode):
    values = bands(dtype)
    config = configured("DATA.INTERPOLATION", how, "DATA.CROP_MODE", mode)
    height, width = values.shape[:2]
    to = 27  # 24 / 0.875
    size = (
        (to, to)
        if mode == "squash"
        else tuple(to * side // min(width, height) for side in (width, height))
    )
    left, top = (round((side - 24) / 2) for side in size)
    found = EvalTransform(config)(Bands(values))
    assert (found.dtype, found.shape) == (np.float32, (24, 24, 5))
    for channel in range(5):
        alone = Image.fromarray(values[..., channel].astype(np.float32)).resize(
            size, Image.Resampling[how.upper()]
        )
        expected = np.asarray(alone)[top : top + 24, left : left + 24] / np.float32(UNITS[dtype])
        np.testing.assert_array_equal(found[..., channel], expected)
    # and 8 bits are Pillow's own grey levels before they are rounded, twice, and cut off
    if dtype == "uint8":
        grey = Image.fromarray(np.ascontiguousarray(values[..., 3])).resize(
            size, Image.Resampling[how.upper()]
        )
        exact = np.clip(255 * found[..., 3], 0, 255)
        assert np.abs(exact - np.asarray(grey)[top : top + 24, left : left + 24]).max() <= 1.01


def test_a_model_gets_values_in_the_unit_of_its_means():
    config = configured()
    values = np.stack([bands(dtype)[:24, :24] for dtype in ("uint8", "uint8")])
    normalize = Normalize(config.DATA.IMAGENET_MEAN, config.DATA.IMAGENET_STD)
    for dtype, unit in UNITS.items():
        stored = values if dtype == "uint8" else (values / np.float32(255) * unit).astype(dtype)
        pixels = np.stack(
            [EvalTransform(configured("DATA.CROP_PCT", "1.0"))(Bands(one)) for one in stored]
        )
        expected = (stored / np.float64(unit) - np.array([0.1, 0.2, 0.3, 0.4, 0.5])) / 0.2
        found = normalize(paddle.to_tensor(pixels)).numpy().transpose(0, 2, 3, 1)
        np.testing.assert_allclose(found, expected, atol=2e-6)


CROPS = [
    ["TRAIN.CROP", name]
    for name in ("random_resized", "random_resized_once", "simple", "short_side", "squash")
]
AFFINE = ["TRAIN.AFFINE", "[20.0,0.1,0.2]", "TRAIN.VFLIP", "0.5"]


@pytest.mark.parametrize("options", [*CROPS, AFFINE], ids=lambda options: options[1])
def test_geometry_is_that_of_colours(options):
    """The same draws, the same pixels: of three channels, 8-bit colours before they are rounded."""
    image = crops(1, 3)[0].crop((0, 0, 90, 70))
    one, other = (
        TrainTransform(
            get_config(None, ["DATA.IMAGE_SIZE", "16", *options, "DATA.IMAGE_DTYPE", dtype])
        )
        for dtype in ("auto", "float32")
    )
    for seed in range(8):
        expected = one(image, np.random.default_rng(seed)).astype(float)
        found = other(Bands(np.asarray(image)), np.random.default_rng(seed))
        # each of three steps rounds, by half a level
        assert np.abs(255 * found.clip(0, 1) - expected).max() < 2.6


def test_erasing_and_mixing_take_all_channels():
    options = [
        "TRAIN.RANDOM_ERASE_PROB",
        "1.0",
        "TRAIN.RANDOM_ERASE_MODE",
        "rand",
        "TRAIN.CUTMIX_ALPHA",
        "1.0",
    ]
    config = configured(
        *options, "DATA.DATASET", "synthetic", "DATA.BATCH_SIZE", "4", "DATA.NUM_WORKERS", "1"
    )
    batch = next(iter(get_dataloader(config, get_dataset(config, "train"), "train")))
    assert (batch["pixels"].shape, batch["pixels"].dtype) == ([4, 24, 24, 5], paddle.float32)
    plain = Normalize(config.DATA.IMAGENET_MEAN, config.DATA.IMAGENET_STD)(batch["pixels"]).numpy()
    images = BatchTransform(config)(batch, 1)[0].numpy()
    changed = (images != plain).any((0, 2, 3))
    assert images.shape == (4, 5, 24, 24)
    assert changed.all()


def test_a_picture_of_bands_shows_three_each_over_its_range():
    values = bands("float32")
    expected = 255 * (values[..., :3] - values.min((0, 1))[:3]) / np.ptp(values, (0, 1))[:3]
    np.testing.assert_allclose(visible(values), expected, atol=0.51)
    assert visible(values[..., :2]).shape == (60, 80, 1)
    assert visible(np.ones((2, 3, 4))).tolist() == np.zeros((2, 3, 3)).tolist()


# -------------------------------------------------------------------- files


LAYOUTS = [
    {"planarconfig": planes} | tiles | packed | order
    for planes, tiles, packed, order in itertools.product(
        ("contig", "separate"), ({}, {"rowsperstrip": 7}, {"tile": (16, 32)}),
        ({}, {"compression": "zlib"}, {"compression": "zlib", "predictor": True}),
        ({"byteorder": "<"}, {"byteorder": ">"}, {"bigtiff": True}),
    )
]  # fmt: skip


@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5, 13])
def test_tiffs_of_every_layout_are_read_to_the_bit(dtype, channels):
    values = bands(dtype, channels)
    tried = 0
    for options in LAYOUTS:
        if "predictor" in options and dtype == "float32":  # imagecodecs would write it
            continue
        data = tiff(values if channels > 1 else values[..., 0], **options)
        found = bands_of(data, channels, "x", MOST).values
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, values, err_msg=str(options))
        tried += 1
    assert tried == (36 if dtype == "float32" else 54)


@pytest.mark.parametrize("way", ["tiff_lzw", "tiff_adobe_deflate", "zstd", "lzma", "packbits"])
def test_tiffs_that_libtiff_packed_are_read_to_the_bit(way):
    floats = Image.fromarray(bands("float32", 1)[..., 0])
    colours = Image.fromarray(bands("uint8", 4))
    for image, predictor in ((colours, 1), (colours, 2), (floats, 1), (floats, 3)):
        if way == "packbits" and predictor > 1:
            continue
        image.save(file := io.BytesIO(), "TIFF", compression=way, tiffinfo={317: predictor})
        found = bands_of(file.getvalue(), len(image.getbands()), "x", MOST).values
        np.testing.assert_array_equal(found.squeeze(), np.asarray(image))


def test_a_tiff_is_turned_as_its_tag_says():
    values = bands()
    data = tiff(values, extratags=[(274, "H", 1, 6, False)])
    np.testing.assert_array_equal(bands_of(data, 5, "x", MOST).values, np.rot90(values, -1))


def test_white_may_be_zero():
    values = bands("uint16", 1)
    found = bands_of(tiff(values[..., 0], photometric="miniswhite"), 1, "x", MOST).values
    np.testing.assert_array_equal(found, 65535 - values)


@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_arrays_are_read_to_the_bit(dtype, version):
    values = bands(dtype)
    for array in (values, values.astype(values.dtype.newbyteorder(">")), np.asfortranarray(values)):
        found = bands_of(npy(array, version), 5, "x", MOST).values
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, values)
    np.testing.assert_array_equal(
        bands_of(npy(values[..., 0]), 1, "x", MOST).values, values[..., :1]
    )


def test_other_formats_are_read_in_full_depth():
    deep = bands("uint16", 1)[..., 0]
    colours = bands("uint8", 4)
    for kind, image, expected in (
        ("PNG", Image.fromarray(deep), deep),
        ("PPM", Image.fromarray(deep), deep),
        ("PNG", Image.fromarray(colours), colours),
        ("WEBP", Image.fromarray(colours[..., :3]), colours[..., :3]),
        ("PNG", Image.fromarray(colours[..., 0]), colours[..., 0]),
    ):
        image.save(file := io.BytesIO(), kind, **({"lossless": True} if kind == "WEBP" else {}))
        found = bands_of(
            file.getvalue(), expected.shape[2] if expected.ndim == 3 else 1, "x", MOST
        ).values
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found.squeeze(), expected)


# ----------------------------------------------------------------- datasets


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of two classes, TIFF and .npy, of one size: both sets alike."""
    root = tmp_path_factory.mktemp("bands")
    for mode, index in itertools.product(("train", "val"), range(6)):
        file = root / mode / "ab"[index % 2] / f"{index}{'.npy' if index % 3 else '.tif'}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes((npy if index % 3 else tiff)(bands(seed=index)))
    return root


def samples(config, mode="val"):
    dataset = get_dataset(config, mode)
    return np.stack([pixels for pixels, *_ in (dataset[index] for index in range(len(dataset)))])


def test_folders_lists_tables_shards_and_caches_give_the_same_pixels(folder, tmp_path):
    def of(kind, root, *options):
        words = ["DATA.DATASET", kind, "DATA.DATA_PATH", str(root), "MODEL.NUM_CLASSES", "auto"]
        return samples(configured(*words, *options))

    expected = of("folder", folder)
    order = [0, 2, 4, 1, 3, 5]
    np.testing.assert_array_equal(expected[0], EvalTransform(configured())(Bands(bands(seed=0))))
    paths = [f"val/{'ab'[index % 2]}/{index}{'.npy' if index % 3 else '.tif'}" for index in order]
    (folder / "val_list.txt").write_text("".join(f"{path} 0\n" for path in paths))
    np.testing.assert_array_equal(of("imagenet2012", folder), expected)
    (folder / "val.csv").write_text("image,a,b\n" + "".join(f"{path},1,0\n" for path in paths))
    np.testing.assert_array_equal(of("multilabel_csv", folder, "TASK", "multilabel"), expected)
    same = np.stack([values := bands(), values[::-1], values[:, ::-1]])
    (tmp_path / "val/a").mkdir(parents=True)
    for index, one in enumerate(same):
        np.save(tmp_path / f"val/a/{index}.npy", one)
    cached = ["DATA.CACHE", str(tmp_path / "cache")]
    for _ in range(2):  # made, then read
        np.testing.assert_array_equal(of("folder", tmp_path, *cached), of("folder", tmp_path))
    assert np.load(next((tmp_path / "cache").glob("*.npy")), mmap_mode="r").dtype == np.uint16


def test_a_cache_is_of_one_type_and_one_way_to_read(tmp_path):
    (tmp_path / "val/a").mkdir(parents=True)
    np.save(tmp_path / "val/a/0.npy", bands("uint8"))
    np.save(tmp_path / "val/a/1.npy", bands("uint16"))
    words = ["DATA.DATASET", "folder", "DATA.DATA_PATH", str(tmp_path), "MODEL.NUM_CLASSES", "auto"]
    words += ["DATA.CACHE", str(tmp_path / "cache")]
    with pytest.raises(
        InputError,
        match="DATA.CACHE needs images of one type, but found uint16 after uint8; set it to",
    ):
        get_dataset(configured(*words), "val")
    for file in (tmp_path / "val/a").iterdir():
        file.unlink()
    (tmp_path / "val/a/0.png").write_bytes(saved(Image.fromarray(bands("uint8", 3)), "PNG"))
    found = [get_dataset(get_config(None, [*words, "DATA.IMAGE_DTYPE", kind]), "val")[0][0].dtype for kind in
             ("auto", "float32", "auto")]  # fmt: skip
    assert found == [np.uint8, np.float32, np.uint8]
    assert len(list((tmp_path / "cache").glob("*.npz"))) == 2


def test_planes_are_found_by_tags_that_hold_their_values():
    tags = [(273, 3, 2, 0x00090008), (277, 3, 1, 2), (279, 3, 2, 0x00010001)]
    found = Directory(b"II*\0\x0a\0\0\0\x05\x06" + directory(tags))
    assert [found.part(273, plane, 1) for plane in (0, 1)] == [found.short(8), found.short(9)]


def test_shards_hold_bands_as_they_are(folder, tmp_path):
    file = folder / "train/a/0.tif"
    assert (
        inspect(str(file), MOST, 5)
        == len(encode(str(file), None, 95, MOST, 5)[0])
        == file.stat().st_size
    )
    with pytest.raises(
        InputError, match=r"0.tif: it has 5 channels, but DATA.IMAGE_CHANNELS is 4; repair"
    ):
        inspect(str(file), MOST, 4)
    with pytest.raises(
        InputError,
        match=r"0.tif: its 5 channels aren't colours; set DATA.IMAGE_CHANNELS 5 to read them",
    ):
        inspect(str(file), MOST)


@pytest.mark.parametrize("order", [("jpg", "npy"), ("npy", "jpg")])
def test_an_array_beside_an_image_in_a_shard_is_none(tmp_path, order):
    contents = {"jpg": saved(Image.new("RGB", (4, 4)), "JPEG"), "npy": npy(bands())}
    with tarfile.open(tmp_path / "val-0.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in (*((f"a.{kind}", contents[kind]) for kind in order), ("a.cls", b"0")):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    found = shards(Split("val"), data_path=str(tmp_path))
    assert found.read(0, MOST) == contents["jpg"]


def test_arrays_in_memory_serve_where_their_channels_do():
    grey = [
        "DATA.DATASET",
        "digits",
        "DATA.IMAGE_DTYPE",
        "float32",
        "DATA.IMAGE_SIZE",
        "8",
        "DATA.CROP_PCT",
        "1.0",
    ]
    one = ["DATA.IMAGE_CHANNELS", "1", "DATA.IMAGENET_MEAN", "0.5", "DATA.IMAGENET_STD", "0.5"]
    found = get_dataset(get_config(None, [*TINY, *grey, *one]), "val")[3][0]
    plain = get_dataset(get_config(None, [*TINY, *grey, *one, "DATA.IMAGE_DTYPE", "auto"]), "val")[
        3
    ][0]
    np.testing.assert_array_equal(found, plain / np.float32(255))
    with pytest.raises(RunError, match=r"sample 3: it has 1 channel, but DATA.IMAGE_CHANNELS is 5"):
        get_dataset(configured(*grey), "val")[3]


def test_what_is_asked_about_is_read_alike(folder):
    file = folder / "val/a/0.tif"
    values = bands(seed=0)
    pictures = Pictures(
        configured(), [str(file), file.read_bytes(), values, Image.new("RGB", (4, 4))]
    )
    expected = EvalTransform(configured())(Bands(values))
    for index in range(3):
        np.testing.assert_array_equal(pictures[index][0], expected)
    blank, _, said = pictures[3]
    assert (blank.shape, blank.dtype, blank.any()) == ((24, 24, 5), np.float32, False)
    assert bytes(said).startswith(b"image 3: it has 3 channels, but DATA.IMAGE_CHANNELS is 5")


@pytest.mark.parametrize("mode", ["center", "squash"])
def test_an_exports_graph_prepares_bands_as_an_evaluation_does(mode):
    config = configured("DATA.CROP_MODE", mode)
    values = bands("float32")
    found = Preparation(config)(paddle.to_tensor(values[None])).numpy()
    pixels = EvalTransform(config)(Bands(values))
    expected = Normalize(config.DATA.IMAGENET_MEAN, config.DATA.IMAGENET_STD)(
        paddle.to_tensor(pixels[None])
    ).numpy()
    np.testing.assert_allclose(found, expected, atol=2e-5)
