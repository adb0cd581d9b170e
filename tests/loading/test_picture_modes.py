"""Pictures of every mode give 8-bit colours, or grey, by value, whichever way they are read."""

import io
import warnings

import numpy as np
import pytest
from PIL import Image
from support.picture_files import COLOURS, GREY, PICTURES, UNSCALED, WIDE, png, saved

from config import get_config
from datasets import get_dataloader, get_dataset
from errors import InputError, RunError
from loading.transforms import EncodedImage
from tools.make_shards import encode, inspect

SAME = ["TRAIN.CROP_SCALE", "[1.0,1.0]", "TRAIN.CROP_RATIO", "[1.0,1.0]", "TRAIN.HFLIP", "0"]
WAYS = {
    "evaluation": ("val", []),
    "fast evaluation": ("val", ["DATA.FAST_EVAL", "True"]),
    "training": ("train", SAME),
    "cached": ("val", ["DATA.CACHE", "cache"]),
}


def configured(root, channels, *options):
    grey = ["DATA.IMAGE_CHANNELS", "1", "DATA.IMAGENET_MEAN", "0.5", "DATA.IMAGENET_STD", "0.5"] * (
        channels == 1
    )
    words = ["DATA.DATASET", "folder", "DATA.DATA_PATH", str(root), "MODEL.NUM_CLASSES", "auto"]
    return get_config(
        None, [*words, "DATA.IMAGE_SIZE", "32", "DATA.CROP_PCT", "1.0", *grey, *options]
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All pictures, in the order of their table, as both sets."""
    root = tmp_path_factory.mktemp("pictures")
    for mode in ("train", "val"):
        (root / mode / "a").mkdir(parents=True)
        for number, picture in enumerate(PICTURES.values()):
            (root / mode / "a" / f"{number:02}{picture.suffix}").write_bytes(picture.data)
    return root


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("way", WAYS)
def test_every_mode_has_the_pixels_that_it_stands_for(folder, tmp_path, monkeypatch, way, channels):
    monkeypatch.chdir(tmp_path)
    mode, options = WAYS[way]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # none is printed into a run's log
        dataset = get_dataset(configured(folder, channels, *options), mode)
        found = {name: dataset[number][0] for number, name in enumerate(PICTURES)}
    for name, picture in PICTURES.items():
        expected = picture.colours if channels == 3 else picture.grey[..., None]
        np.testing.assert_array_equal(found[name], expected, err_msg=name)


@pytest.mark.parametrize(
    "name", [name for name in PICTURES if not name.startswith(("12", "16-bit", "10"))]
)
def test_but_for_grey_of_more_bits_they_are_pillows(name):
    """And timm's, which calls convert("RGB")."""
    for mode in ("RGB", "L"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = Image.open(io.BytesIO(PICTURES[name].data)).convert(mode)
        found = EncodedImage(PICTURES[name].data, mode, "", 10**8).decode()
        assert found.mode == mode
        assert (np.asarray(found) == np.asarray(expected)).all()


def test_one_picture_is_the_same_as_8_bits_as_16_and_as_48():
    eight = EncodedImage(saved(Image.fromarray(GREY), "PNG"), "RGB", "", 10**8).decode()
    for times in (256, 257):
        wide = GREY.astype(np.uint16) * times
        for data in (saved(Image.fromarray(wide), "PNG"), png(np.repeat(wide[..., None], 3, 2), 2)):
            assert EncodedImage(data, "RGB", "", 10**8).decode().tobytes() == eight.tobytes()
    assert (np.asarray(EncodedImage(png(WIDE, 2), "RGB", "", 10**8).decode()) == COLOURS).all()


def adobe(data: bytes, transform: int | None) -> bytes:
    """Returns a JPEG with another transform in Adobe's marker (0: CMYK, 2: YCCK), or without the
    marker.
    """
    place = data.index(b"\xff\xee\x00\x0eAdobe")
    marker = b"" if transform is None else data[place : place + 15] + bytes([transform])
    return data[:place] + marker + data[place + 16 :]


@pytest.mark.parametrize("transform", [0, 2, None])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_a_jpeg_of_inks_is_pillows_to_the_bit(transform, mode):
    data = adobe(saved(Image.fromarray(COLOURS).convert("CMYK"), "JPEG", quality=95), transform)
    expected = Image.open(io.BytesIO(data)).convert(mode)
    found = EncodedImage(data, mode, "", 10**8).resized_crop(
        (0, 0, 32, 32), (32, 32), Image.Resampling.BICUBIC
    )
    assert (found == np.asarray(expected)).all()
    if transform != 2:  # the picture, not its negative
        shown = Image.fromarray(COLOURS).convert(mode)
        assert np.abs(found.astype(int) - np.asarray(shown)).mean() < 8


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("options", [{"keep_rgb": True}, {"subsampling": 0}, {}])
def test_other_jpegs_are_pillows_within_the_tolerance(options, mode):
    data = saved(Image.fromarray(COLOURS), "JPEG", quality=95, **options)
    expected = np.asarray(Image.open(io.BytesIO(data)).convert(mode)).astype(int)
    found = EncodedImage(data, mode, "", 10**8).resized_crop(
        (0, 0, 32, 32), (32, 32), Image.Resampling.BICUBIC
    )
    assert np.abs(found - expected).mean() < 0.5


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize("name", UNSCALED)
@pytest.mark.parametrize("way", WAYS)
def test_what_has_no_white_is_refused_by_name(tmp_path, monkeypatch, name, way):
    monkeypatch.chdir(tmp_path)
    suffix, data, kind = UNSCALED[name]
    (mode, options), advised, other = WAYS[way], way == "training", next(iter(PICTURES.values()))
    for split in ("train", "val"):
        (tmp_path / "in" / split / "a").mkdir(parents=True)
        (tmp_path / "in" / split / "a" / f"0{suffix}").write_bytes(data)
        (tmp_path / "in" / split / "a" / f"1{other.suffix}").write_bytes(other.data)
    with pytest.raises(RunError) as caught:
        get_dataset(configured("in", 3, *options), mode)[0]
    assert str(caught.value) == (
        f"in/{mode}/a/0{suffix}: its pixels are {kind}, and their white value is unknown; convert it to 8 or 16"
        " bits, or remove it" + ", or train with DATA.SKIP_BROKEN True" * advised
    )
    skipping = get_dataset(configured("in", 3, *SAME, "DATA.SKIP_BROKEN", "True"), "train")
    pixels, _, skipped = skipping[0]
    assert (pixels == other.colours).all()
    assert skipped == 0


# ------------------------------------------------------------- tar shards


@pytest.mark.parametrize("name", PICTURES)
def test_shards_hold_the_same_pixels_reduced_or_not(tmp_path, name):
    picture = PICTURES[name]
    path = tmp_path / f"0{PICTURES[name].suffix}"
    path.write_bytes(picture.data)
    assert encode(str(path), None, 95, 10**8) == (picture.data, picture.suffix)
    data, suffix = encode(str(path), 16, 95, 10**8)
    assert suffix == ".png"
    for mode in ("RGB", "L"):
        source = Image.fromarray(picture.colours)
        if (picture.colours == picture.grey[..., None]).all():
            source = Image.fromarray(picture.grey)
        expected = source.resize((16, 16), Image.Resampling.BICUBIC).convert(mode)
        assert EncodedImage(data, mode, "", 10**8).decode().tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", UNSCALED)
def test_what_has_no_white_is_not_packed(tmp_path, name):
    suffix, data, kind = UNSCALED[name]
    path = tmp_path / f"0{suffix}"
    path.write_bytes(data)
    with pytest.raises(
        InputError,
        match=rf"0{suffix}: its pixels are {kind}, and their white value is unknown.*, or remove it$",
    ):
        inspect(str(path), 10**8)


# ------------------------------------------------------------------- DALI


@pytest.mark.parametrize("channels", [3, 1])
def test_dali_gets_the_same_pixels(folder, channels):
    pytest.importorskip("nvidia.dali")
    count = len(PICTURES)
    options = [*SAME, "DATA.LOADER", "dali", "DATA.BATCH_SIZE", str(count), "DATA.NUM_WORKERS", "1"]
    config = configured(folder, channels, *options)
    dataset = get_dataset(config, "train")
    dataset.labels = np.arange(count)  # which of them it is
    (batch,) = get_dataloader(config, dataset, "train")
    for index, number in enumerate(batch["labels"].tolist()):
        name, picture = list(PICTURES.items())[number]
        expected = picture.colours if channels == 3 else picture.grey[..., None]
        assert np.abs(batch["pixels"][index].numpy().astype(int) - expected).max() <= 1, name


def test_dali_refuses_what_has_no_white(tmp_path):
    pytest.importorskip("nvidia.dali")
    (tmp_path / "train" / "a").mkdir(parents=True)
    for name, (suffix, data, _) in UNSCALED.items():
        (tmp_path / "train" / "a" / f"{name}{suffix}").write_bytes(data)
    config = configured(
        tmp_path, 3, "DATA.LOADER", "dali", "DATA.BATCH_SIZE", "2", "DATA.NUM_WORKERS", "1"
    )
    with pytest.raises(
        RunError, match=r"train/a/.*: its pixels are .*, and their white value is unknown"
    ):
        list(get_dataloader(config, get_dataset(config, "train"), "train"))


def _decoded(data):
    return np.asarray(EncodedImage(data, "RGB", "picture", 10**6).decode())


def _noise(mode="RGB"):
    return Image.fromarray(
        np.random.default_rng(0).integers(0, 256, (24, 32, 3), np.uint8)
    ).convert(mode)


@pytest.mark.parametrize("missing", [1, 40, 700])
def test_a_tiff_that_is_cut_short_is_refused(missing):
    """Its directory stands before its pixels, and nothing of it may be read as the rest of them."""
    data = saved(_noise(), "TIFF")
    with pytest.raises(RunError, match="^picture: can't be read as an image .*truncated"):
        _decoded(data[:-missing])


@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize("big", [False, True])
def test_a_tiff_is_turned_as_its_xmp_says_like_pillows(turn, big):
    xmp = f'<rdf:Description tiff:Orientation="{turn}"/>'.encode()
    data = saved(_noise(), "TIFF", tiffinfo={700: xmp}, big_tiff=big)
    image = EncodedImage(data, "RGB", "picture", 10**6)
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    np.testing.assert_array_equal(np.asarray(image.decode()), expected)
    assert image.size == expected.shape[1::-1] == ((32, 24) if turn < 5 else (24, 32))


def test_what_stands_between_a_gifs_blocks_is_skipped_as_pillow_does():
    data = saved(_noise("P"), "GIF")
    place = data.index(b",", 13 + 768)
    odd = data[:place] + b"\0\0" + data[place:]
    np.testing.assert_array_equal(_decoded(odd), _decoded(data))
