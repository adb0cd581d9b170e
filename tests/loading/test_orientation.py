"""EXIF's orientation: held to Pillow's own turning, and one answer wherever a photograph is read."""

import io
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps
from sklearn.datasets import load_sample_image

from config import get_config
from datasets import get_dataset
from errors import InputError
from inference.pictures import Pictures
from loading.transforms import EncodedImage, TrainTransform
from loading.transforms.decode import resized_crop
from loading.transforms.orientation import TURNS, orientation_in, orientation_of
from tools import make_shards
from training.checkpoint import describe

PHOTOGRAPH = Image.fromarray(load_sample_image("china.jpg")).resize((96, 64))
BICUBIC = Image.Resampling.BICUBIC
ALL = list(TURNS)


def file_of(image, kind, orientation=None):
    exif = Image.Exif()
    file = io.BytesIO()
    exif[0x010F] = "a camera"
    if orientation:
        exif[274] = orientation
    image.save(file, kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {"quality": 95}))
    return file.getvalue()


def held(orientation):
    """The photograph as a camera stores it that was held so: shown by Pillow, it is the photograph."""
    pixels = np.asarray(PHOTOGRAPH)
    turned = TURNS[orientation]
    if turned.across:
        pixels = pixels[:, ::-1]
    if turned.down:
        pixels = pixels[::-1]
    return Image.fromarray(
        np.ascontiguousarray(pixels.swapaxes(0, 1) if turned.swapped else pixels)
    )


def distance(one, other):
    return np.abs(np.asarray(one, float) - np.asarray(other, float)).mean()


@pytest.mark.smoke
@pytest.mark.parametrize("orientation", ALL)
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_photograph_is_turned_as_pillow_turns_it(kind, orientation):
    data = file_of(PHOTOGRAPH, kind, orientation)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    image = EncodedImage(data, "RGB", "", 10**6, oriented=True)
    assert image.size == expected.size
    assert (np.asarray(image.decode()) == np.asarray(expected)).all()
    box = (5, 9, 50, 60)
    found = resized_crop(
        EncodedImage(data, "RGB", "", 10**6, oriented=True), box, (24, 20), BICUBIC
    )
    wanted = np.asarray(expected.crop(box).resize((24, 20), BICUBIC))
    assert found.shape == (20, 24, 3)
    assert distance(found, wanted) < (0.6 if kind == "JPEG" else 1e-9)
    stored = np.asarray(EncodedImage(data, "RGB", "", 10**6).decode())
    assert (stored == np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))).all()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_what_is_damaged_says_nothing_and_raises_nothing(kind):
    data = file_of(PHOTOGRAPH, kind, 6)
    plain = file_of(PHOTOGRAPH, kind)
    assert (orientation_of(data), orientation_of(plain)) == (6, 1)
    assert {orientation_of(data[:end]) for end in range(0, len(data), 7)} == {1, 6}
    rng = np.random.default_rng(0)
    for _ in range(300):
        spoilt = bytearray(data[:2000])
        for place in rng.integers(len(spoilt), size=3):
            spoilt[place] = rng.integers(256)
        assert orientation_of(bytes(spoilt)) in ALL
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0%c\0\0\0\0\0\0"
    assert [orientation_in(exif % number) for number in (0, 1, 8, 9, 255)] == [1, 1, 8, 1, 1]
    assert {orientation_in((exif % 8)[:end]) for end in range(25)} == {1}


def written(tmp_path, kind, suffix):
    """A class for each orientation; shown, all the photographs are one."""
    for part in ("train", "val"):
        for orientation in ALL:
            folder = tmp_path / part / str(orientation)
            folder.mkdir(parents=True)
            (folder / f"a{suffix}").write_bytes(file_of(held(orientation), kind, orientation))
    return tmp_path


def configured(path, *options, dataset="folder"):
    data = [
        "DATA.DATASET",
        dataset,
        "DATA.DATA_PATH",
        str(path),
        "DATA.IMAGE_SIZE",
        "32",
        "DATA.NUM_WORKERS",
        "0",
    ]
    return get_config(None, [*data, "MODEL.NUM_CLASSES", "auto", *options])


TURNED = ("DATA.EXIF_ORIENTATION", "True")


def evaluated(config):
    dataset = get_dataset(config, "val")
    return [dataset[index][0] for index in range(len(dataset))]


def most_apart(samples):
    return max(distance(sample, samples[0]) for sample in samples)


def test_training_evaluation_cache_and_prediction_see_one_picture(tmp_path):
    root = written(tmp_path / "in", "PNG", ".png")
    plain = configured(root)
    turned = configured(root, *TURNED)
    stored = evaluated(plain)
    shown = evaluated(turned)
    assert most_apart(shown) == 0
    assert most_apart(stored) > 5
    assert (stored[0] == shown[0]).all()
    train = get_dataset(turned, "train")
    assert (
        most_apart(
            [train.transform(train.picture(index), np.random.default_rng(3)) for index in range(8)]
        )
        == 0
    )
    cache = ["DATA.CACHE", str(tmp_path / "cache")]
    cached = evaluated(configured(root, *TURNED, *cache))
    assert (np.stack(cached) == np.stack(shown)).all()
    # as they are stored; another cache
    with pytest.raises(InputError, match="DATA.CACHE needs images of one size"):
        get_dataset(configured(root, *cache), "val")
    paths = [str(root / "val" / str(number) / "a.png") for number in ALL]
    for asked in (
        paths,
        [Path(path).read_bytes() for path in paths],
        [Image.open(path) for path in paths],
    ):
        assert (
            np.stack([item[0] for item in (Pictures(turned, asked)[i] for i in range(8))])
            == np.stack(shown)
        ).all()
        assert (
            np.stack([item[0] for item in (Pictures(plain, asked)[i] for i in range(8))])
            == np.stack(stored)
        ).all()


def test_the_fast_decoder_turns_what_it_cut_out(tmp_path):
    train = get_dataset(configured(written(tmp_path, "JPEG", ".jpg"), *TURNED), "train")
    assert all(isinstance(train.picture(index), EncodedImage) for index in range(8))
    samples = [
        TrainTransform(configured(tmp_path))(train.picture(i), np.random.default_rng(3))
        for i in range(8)
    ]
    assert most_apart(samples) < 3  # JPEG codes a turned picture otherwise


def test_shards_keep_the_orientation_of_what_they_resize(tmp_path, monkeypatch):
    root = written(tmp_path / "in", "JPEG", ".jpg")
    monkeypatch.setattr(
        sys, "argv", ["x", f"-data_path={root}", f"-output={tmp_path / 'out'}", "-dataset=folder"]
    )
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--resize=48", "--workers=1"])
    make_shards.main()
    shown = evaluated(configured(tmp_path / "out", *TURNED, dataset="shards"))
    stored = evaluated(configured(tmp_path / "out", dataset="shards"))
    assert most_apart(shown) < 3 < most_apart(stored)


def test_the_key_travels_with_the_model_and_is_refused_where_it_does_nothing(tmp_path):
    assert describe(configured(tmp_path, *TURNED), []).values["DATA.EXIF_ORIENTATION"] is True
    with pytest.raises(InputError, match="EXIF_ORIENTATION has no effect with.* DATA.DATASET"):
        get_config(None, ["DATA.DATASET", "digits", *TURNED])
    with pytest.raises(
        InputError, match="DATA.EXIF_ORIENTATION is True, expected False with DATA.LOADER dali"
    ):
        configured(tmp_path, *TURNED, "DATA.LOADER", "dali")


def test_bytes_that_pad_a_jpegs_markers_hide_no_orientation():
    """Any number of 0xff may stand before a marker (ITU T.81, B.1.1.2)."""
    data = file_of(PHOTOGRAPH, "JPEG", 6)
    assert orientation_of(data) == orientation_of(data[:2] + b"\xff\xff" + data[2:]) == 6
