"""What readers of data sets accept that a stranger wrote, and what they refuse, in which words."""

import io
import os

import forged
import numpy as np
import pytest
from conftest import write_images
from PIL import Image
from test_datasets import configured

from datasets import get_dataset, get_datasets
from errors import InputError, RunError
from loading.transforms import EncodedImage

MOST = 10**8


def opened(data, most=MOST):
    return EncodedImage(data, "RGB", "x.jpg", most)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            lambda: forged.png(12000, 12000),
            r"it has 12000 x 12000 pixels, DATA.MAX_PIXELS is 100000000; repair",
        ),
        (lambda: forged.with_scans(4000, 3000, 200), r"its 210 scans of 4000 x 3000 pixels takes too long"),
        (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n", r"no known format; BMP, GIF, JPEG, PNG, PPM, TIFF and WebP are read"),
        (lambda: b"DDS " + bytes(200), r"it is of no known format"),
        (
            lambda: forged.png(1, 49_000_000, pixels=forged.black(1, 100)),
            "it has 1 x 49000000 pixels, a side may have 1000000",
        ),
        (lambda: b"\xff\xd8" + forged.segment(0xE1) * 20_000 + forged.saved("JPEG")[2:], "it is in too many parts"),
    ],
)
def test_an_image_that_costs_too_much_is_refused_by_its_header(data, message):
    with pytest.raises(RunError, match=f"^x.jpg: .*{message}"):
        opened(data())


def test_the_key_bounds_pixels_whatever_pillows_limit_is():
    whole = forged.saved("PNG")  # of 32 x 24
    assert opened(whole, 768).decode().size == (32, 24)
    with pytest.raises(RunError, match="it has 32 x 24 pixels, DATA.MAX_PIXELS is 767;"):
        opened(whole, 767)
    assert opened(forged.png(20000, 10000), 200_000_000).size == (20000, 10000)  # Pillow alone refuses it


@pytest.mark.parametrize("kind", sorted(forged.WHOLE))
def test_without_its_notes_a_file_has_the_same_pixels(kind):
    data = forged.WHOLE[kind]
    with Image.open(io.BytesIO(data)) as image:
        expected = image.convert("RGB")
    assert opened(data).decode().tobytes() == expected.tobytes()


def test_notes_are_left_out(monkeypatch):
    exif, text = Image.Exif(), "notes " * 1000
    exif[0x010E] = text
    monkeypatch.setattr(Image.Exif, "load", None)  # what Pillow would take them apart by
    for kind in ("JPEG", "PNG", "TIFF"):
        data = forged.saved(kind, exif=exif)
        image = opened(data)
        assert len(data) > 6000
        assert kind == "TIFF" or text.encode() not in image._data
        assert "exif" not in image._image.info
        if kind != "TIFF":
            assert image.decode().size == (32, 24)


def test_a_narrow_image_is_refused_before_it_is_enlarged(tmp_path):
    write_images(tmp_path / "train", {"a": 2})
    (tmp_path / "train/a/1.png").write_bytes(forged.saved("PNG", Image.new("L", (1, 20_000))))
    os.rename(tmp_path / "train", tmp_path / "val")
    data = get_dataset(configured("folder", tmp_path, "DATA.IMAGE_SIZE", "100", "DATA.MAX_PIXELS", "1000000"), "val")
    with pytest.raises(RunError, match=r"val/a/1.png: it has 1 x 20000 pixels, resized 100 x 2000000: more than .*it$"):
        data[1]


def test_what_cannot_be_decoded_is_tried_once(tmp_path, monkeypatch):
    write_images(tmp_path / "train", {"a": 4})
    (tmp_path / "train/a/1.png").write_bytes(b"broken")
    (tmp_path / "train/a/2.png").unlink()
    (tmp_path / "train/a/2.png").mkdir()  # of which a disk could be the reason
    data = get_dataset(configured("folder", tmp_path, "DATA.SKIP_BROKEN", "True"), "train")
    data.paths = type(data.paths)([f"train/a/{number}.png" for number in range(4)])
    data.labels, read = np.zeros(4, np.int64), []
    whole = data.data
    monkeypatch.setattr(data, "data", lambda index: (read.append(index), whole(index))[1])
    assert [data[1][-1], data[1][-1], data[3][-1]] == [1, 1, -1]
    assert read == [1, 2, 3, 2, 3, 3]


@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"])
def test_a_list_may_have_tabs_a_bom_and_windows_line_ends(tmp_path, start):
    write_images(tmp_path / "train", {"a b": 2})
    lines = start + b"train/a b/0.png\t0\r\n\r\n  train/a b/1.png  1  \r\n"
    for mode in ("train", "val"):
        (tmp_path / f"{mode}_list.txt").write_bytes(lines)
    _, train, _ = get_datasets(configured("imagenet2012", tmp_path))
    assert [train.paths[0], train.paths[1]] == ["train/a b/0.png", "train/a b/1.png"]
    assert train.labels.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"a.jpg " + b"9" * 30, r"line 1: label 9{30} is outside 0\.\.9999999"),
        (b"a.jpg 10000000", r"line 1: label 10000000 is outside 0\.\.9999999"),
        (b"a\0b.jpg 1", "line 1: its path holds a NUL character"),
        (b"\xff\xfea\0 \0001\0", "it is in UTF-16; save it in UTF-8"),
        (b"a.jpg,1", "line 1: expected a path, then a label, which is a whole number; found 'a.jpg,1'"),
        (b"a.jpg \xd9\xa1", "line 1: expected a path, then a label"),
        (b"caf\xe9.jpg 1", r"1 of 1 files are missing, the first is .*caf\\udce9.jpg"),
    ],
)
def test_a_list_that_is_none_says_why(tmp_path, line, message):
    (tmp_path / "train_list.txt").write_bytes(line)
    with pytest.raises(InputError, match=f"train_list.txt[:,] .*{message}"):
        get_dataset(configured("imagenet2012", tmp_path), "train")


def test_a_folder_that_cannot_be_listed_is_no_empty_one(tmp_path, monkeypatch):
    write_images(tmp_path / "train", {"a": 1, "a/deep": 1})
    whole = os.scandir

    def scandir(path):
        if str(path).endswith("deep"):
            raise PermissionError(13, "Permission denied", str(path))
        return whole(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(InputError, match=r"train: its folder '.*/train/a/deep' can't be listed \(Permission denied\);"):
        get_dataset(configured("folder", tmp_path), "train")


def test_a_film_behind_a_progressive_photograph_counts_as_no_scans():
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (600, 800, 3), np.uint8)).save(
        file, "JPEG", progressive=True
    )
    film = np.random.default_rng(1).bytes(4_000_000)
    assert film.count(b"\xff\xda") > 40
    assert opened(file.getvalue() + film, 1_000_000).decode().size == (800, 600)
