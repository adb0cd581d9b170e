"""tools/check_dataset.py for datasets with masks."""

import base64
import io
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from errors import InputError
from loading.sources import Files, Masks
from loading.subsets import read_split
from settings.registry import datasets
from tools import check_dataset, make_shards

SIZES = [(40, 30), (30, 40), (32, 32), (48, 20), (25, 60)]


def write_mask(file, values, **options):
    Image.fromarray(values).save(file, **options)


def indices_of(number, size):
    """Half of a mask is index 3, the rest 0; the last row is ignored."""
    values = np.zeros(size[::-1], np.uint8)
    values[: size[1] // 2] = 3
    values[-1] = 255
    return values


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Images and masks of two parts, read as a dataset with the columns "mask" and "depth"."""
    rng = np.random.default_rng(0)
    for mode in ("train", "val"):
        for number, size in enumerate(SIZES):
            path = tmp_path / "data" / mode / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (*size[::-1], 3), np.uint8)).save(path)
            masks = tmp_path / "data/masks" / mode
            masks.mkdir(parents=True, exist_ok=True)
            write_mask(masks / f"{number}.png", indices_of(number, size))

    def with_columns(data, split, reader):
        def read(split):
            files = reader(split)
            if not isinstance(files, Files):
                return files
            columns = {"mask": Masks([f"masks/{path}" for path in files.paths])}
            return files._replace(columns=columns | {"depth": np.zeros(len(files.paths))})

        return read_split(data, split, read)

    monkeypatch.setattr("loading.subsets.read_split", with_columns)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "data"


@pytest.fixture
def check(monkeypatch, capsys):
    """Returns a function that runs the check: (its exit status, the lines that it prints)."""

    def run(*words):
        given = words or ("-dataset=images", "-data_path=data")
        monkeypatch.setattr(sys, "argv", ["check_dataset.py", "--workers=2", *map(str, given)])
        status = 0
        try:
            check_dataset.main()
        except SystemExit as end:
            status = end.code
        return status, capsys.readouterr().out.splitlines()

    return run


def row(lines, name):
    (found,) = [line for line in lines if line.startswith(f"  {name}")]
    return found[len(name) + 2 :].strip()


def test_masks_that_fit_are_described(folder, check):
    status, lines = check()
    assert (status, lines[-2]) == (0, "usable, 0 remarks")
    everything = [indices_of(number, size).ravel() for number, size in enumerate(SIZES)]
    counts = np.bincount(np.concatenate(everything))
    share = counts / counts.sum()
    expected = f"3 {share[3]:.1%}, 0 {share[0]:.1%}, 255 (ignored) {share[255]:.1%}"
    assert row(lines, "mask: pixels") == f"{expected}   {expected}"
    assert row(lines, "mask: indices in a mask").split() == ["3", "to", "3"] * 2


def test_what_is_wrong_with_masks_is_a_line_each(folder, check):
    train = folder / "masks/train"
    (train / "0.png").unlink()
    (train / "1.png").write_bytes(b"no image")
    write_mask(train / "2.png", np.zeros((31, 32), np.uint8))
    write_mask(train / "3.png", indices_of(3, SIZES[3]).T.copy())
    val = folder / "masks/val"
    write_mask(val / "0.png", np.full((30, 40), 7, np.uint8))
    write_mask(val / "1.png", np.zeros((40, 30, 3), np.uint8))
    write_mask(val / "2.png", np.full((32, 32), 300, np.uint16))
    write_mask(val / "3.png", indices_of(3, SIZES[3]), format="JPEG")
    status, lines = check()
    assert status == 1
    errors = [line for line in lines if line.startswith(("error", "remark"))]
    expected = [
        "error: training masks of the column 'mask' that can't be read: 2, such as"
        " data/masks/train/0.png: can't be read",
        "error: training masks of the column 'mask' whose size isn't that of their images: 2, such"
        " as data/masks/train/2.png: the mask has 32 x 31 pixels, its image data/train/2.png 32 x 32",
        "remark: training masks of the column 'mask' with a single index: 1, such as"
        " data/masks/train/2.png",
        "error: validation masks of the column 'mask' that can't be read: 3, such as"
        " data/masks/val/1.png: it has 3 channels, expected a PNG of one channel",
        "remark: validation masks of the column 'mask' with a single index: 1, such as"
        " data/masks/val/0.png",
        "remark: indices that occur only in validation masks of the column 'mask': 1, such as 7",
    ]
    assert len(errors) == len(expected)
    for line, start in zip(errors, expected, strict=True):
        assert line.startswith(start)
    assert lines[-2] == "not usable: 3 of the findings stop a run"
    # A training may leave out what is broken, and lists name images alone.
    status, lines = check("-dataset=images", "-data_path=data", "-o", "DATA.SKIP_BROKEN", "True")
    assert [line for line in lines if line.startswith("error")] == [
        line for line in lines if "validation masks of the column 'mask' that can't be re" in line
    ]


def test_a_turned_image_has_a_mask_of_the_shown_size(folder, check):
    exif = Image.Exif()
    exif[274] = 6
    for number, size in ((0, SIZES[0]), (1, SIZES[1][::-1])):
        image = Image.new("RGB", size)
        image.putpixel((3, 4 + number), (255, 0, 0))
        image.save(folder / f"train/{number}.jpg", exif=exif)
        (folder / f"train/{number}.png").unlink()
        write_mask(folder / f"masks/train/{number}.jpg", indices_of(number, size), format="PNG")
    shown = ["-dataset=images", "-data_path=data", "-o", "DATA.EXIF_ORIENTATION"]
    assert check(*shown, "False")[0] == 0
    status, lines = check(*shown, "True")
    assert status == 1
    (error,) = [line for line in lines if line.startswith("error")]
    assert (
        "whose size isn't that of their images: 2, such as data/masks/train/0.jpg: the mask"
        in error
    )
    assert "40 x 30 pixels, its image data/train/0.jpg 30 x 40; make them of one size, or" in error


def test_shards_are_checked_as_their_files_are(folder, check, monkeypatch):
    write_mask(folder / "masks/val/4.png", np.full((60, 25), 9, np.uint8))
    write_mask(folder / "masks/val/3.png", np.zeros((5, 5), np.uint8))
    _, expected = check()
    words = ["-dataset=images", "-data_path=data", "-output=out", "-workers=1"]
    monkeypatch.setattr(sys, "argv", ["make_shards.py", *words])
    make_shards.main()
    status, lines = check("-dataset=shards", "-data_path=out")
    assert status == 1
    for name in ("mask: pixels", "mask: indices in a mask"):
        assert row(lines[1:], name) == row(expected, name)
    findings = [
        [line for line in each if line.startswith(("error", "rem"))] for each in (lines, expected)
    ]
    assert len(findings[0]) == len(findings[1])
    for line, other in zip(*findings, strict=True):
        assert line.partition(", such")[0] == other.partition(", such")[0]
    assert "val-000000.tar: 000000003.mask.png: the mask has 5 x 5 pixels" in "\n".join(lines)


def test_data_of_another_task_may_be_of_one_class(folder, check, monkeypatch):
    for mode in ("train", "val"):
        (folder / mode).rename(folder / "images")
        (folder / mode).mkdir()
        (folder / "images").rename(folder / mode / "all")
        (folder / "masks" / mode).rename(folder / "masks/images")
        (folder / "masks" / mode).mkdir()
        (folder / "masks/images").rename(folder / "masks" / mode / "all")
    words = ["-dataset=folder", "-data_path=data"]
    status, lines = check(*words)
    assert status == 1
    assert any(line.startswith("error: all images have one class, all") for line in lines)
    given = datasets.components["folder"].given
    monkeypatch.setitem(given, "task", "segmentation")
    status, lines = check(*words)
    assert (status, lines[-2]) == (0, "usable, 0 remarks")


def test_more_indices_than_are_shown_are_counted(folder, check):
    values = np.arange(40 * 30, dtype=np.uint16).reshape(30, 40) % 20
    write_mask(folder / "masks/val/0.png", values.astype(np.uint8))
    _, lines = check()
    assert row(lines, "mask: pixels").endswith(", 17 more")
    assert row(lines, "mask: indices in a mask").split() == ["3", "to", "3", "3", "to", "20"]


def test_a_list_of_masks_that_isnt_as_long_is_one_line(folder, check, monkeypatch):
    files = Files(Path("data"), ["train/0.png"], None, [], {"mask": Masks(["a", "b"])})
    monkeypatch.setattr(
        "loading.subsets.read_split",
        lambda data, split, _: read_split(data, split, lambda _: files),
    )
    with pytest.raises(Exception, match="^the column 'mask' has 2 entries for 1 images$"):
        check()


# ------------------------------------------------------------ masks of classes

DATA = ("-dataset=masks", "-data_path=pairs")
CLASSES = ("sky", "tree", "road", "car")


@pytest.fixture
def pairs(tmp_path, monkeypatch):
    """A folder of four images and masks a part, of four classes; no training mask has a car."""
    for mode, held in (("train", 3), ("val", 4)):
        for number in range(4):
            rng = np.random.default_rng([number, held])
            for folder, shape, high in (("images", (30, 40, 3), 256), ("masks", (30, 40), held)):
                file = tmp_path / "pairs" / folder / mode / f"{number}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                write_mask(file, rng.integers(0, high, shape, np.uint8))
    (tmp_path / "pairs/classes.txt").write_text("".join(f"{name}\n" for name in CLASSES))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "pairs"


def found(lines):
    return [line for line in lines if line.startswith(("error", "remark"))]


def held(lines):
    """The names or indices that the table says masks hold."""
    return set(re.findall(r"(\w+) [\d.]+%", row(lines, "mask: pixels")))


def test_masks_of_classes_are_described_by_name(pairs, check):
    status, lines = check(*DATA)
    assert status == 0
    assert found(lines) == [
        "remark: classes without a pixel in the training masks of the column 'mask': 1, such as car"
    ]
    assert held(lines) == set(CLASSES)


def test_what_is_wrong_with_masks_of_classes_is_a_line_each(pairs, check):
    values = np.zeros((30, 40), np.uint8)
    values[7, 5:9] = 9
    write_mask(pairs / "masks/train/1.png", values)
    write_mask(pairs / "masks/train/2.png", np.full((30, 40), 255, np.uint8))
    write_mask(pairs / "masks/val/0.png", np.zeros((30, 40, 3), np.uint8))
    (pairs / "masks/val/3.png").rename(pairs / "masks/val/x.png")
    status, lines = check(*DATA)
    assert status == 1
    expected = [
        "error: 1 of 4 images have no mask of their name in pairs/masks/val, the first is"
        " images/val/3.png; add or remove files (and 1 more)",
        "error: training masks of the column 'mask' with values that aren't classes: 1, such as"
        " pairs/masks/train/1.png: it contains the index 9 at x 5, y 7, and 4 pixels of unknown values in"
        " total; expected 0..3 or 255; add its class to",
        "remark: training masks of the column 'mask' in which all pixels are ignored: 1, such as"
        " pairs/masks/train/2.png",
        "error: validation masks of the column 'mask' that can't be read: 1, such as"
        " pairs/masks/val/0.png: it has 3 channels",
        "remark: classes without a pixel in the training masks",
    ]
    assert len(found(lines)) == len(expected)
    for line, start in zip(found(lines), expected, strict=True):
        assert line.startswith(start)


def test_masks_of_which_all_is_ignored_stop_a_run(pairs, check):
    for number in range(4):
        write_mask(pairs / f"masks/train/{number}.png", np.full((30, 40), 255, np.uint8))
    status, lines = check(*DATA)
    assert status == 1
    assert found(lines)[0].startswith(
        "error: training masks of the column 'mask' in which all pixels are ignored: 4, such as"
    )


def test_without_names_of_classes_the_indices_are_shown(pairs, check):
    (pairs / "classes.txt").unlink()
    status, lines = check(*DATA)
    assert status == 1
    assert found(lines)[0].startswith("error: pairs: the classes of the masks are unknown; wri")
    assert held(lines) == {"0", "1", "2", "3"}
    status, lines = check(*DATA, "-o", "MODEL.NUM_CLASSES", "4")
    assert status == 0
    assert found(lines)[0].endswith("the training masks of the column 'mask': 1, such as class 3")


@pytest.mark.parametrize("of_colours", [False, True])
def test_a_split_lists_pairs(pairs, check, tmp_path, of_colours):
    for name in ("images", "masks"):
        for file in (pairs / name / "val").iterdir():
            file.rename(pairs / name / f"train/v{file.name}")
        (pairs / name / "val").rmdir()
    write_mask(pairs / "masks/train/3.png", np.full((30, 40), 9, np.uint8))
    colours = np.array([[0, 0, 0], [9, 0, 0], [0, 9, 0], [0, 0, 9], [7, 7, 7]], np.uint8)
    if of_colours:
        for file in (pairs / "masks/train").iterdir():
            values = np.asarray(Image.open(file))
            if values.max() < 4:
                write_mask(file, colours[values])
        lines = [f"{r} {g} {b} {name}" for (r, g, b), name in zip(colours, CLASSES, strict=False)]
        (pairs / "colors.txt").write_text("\n".join([*lines, "7 7 7"]) + "\n")
        (pairs / "classes.txt").unlink()
    status, lines = check(*DATA, "--split=0.25", "-output=lists")
    assert status == 0, lines
    assert lines[-1] == (
        "lists: 5 in train_list.txt and 2 in val_list.txt;"
        " train with -dataset=masks_list -data_path=lists"
    )
    # The mask of no class isn't listed.
    listed = (tmp_path / "lists/train_list.txt").read_text().split("\n")
    listed += (tmp_path / "lists/val_list.txt").read_text().split("\n")
    names = {line.rpartition("/")[2] for line in listed if line}
    assert names == {f"{place}{number}.png" for place in ("", "v") for number in range(4)} - {
        "3.png"
    }
    status, lines = check("-dataset=masks_list", "-data_path=lists")
    assert status == 0
    assert held(lines) == set(CLASSES)
    for file in ("colors.txt", "classes.txt"):
        kept = (pairs / file).exists()
        assert (tmp_path / "lists" / file).exists() == kept
        if kept:
            assert (tmp_path / "lists" / file).read_text() == (pairs / file).read_text()


def test_lists_of_other_indices_are_refused(pairs, check):
    with pytest.raises(
        InputError, match="but the indices that DATASET ade20k stores aren't those of its"
    ):
        check("-dataset=ade20k", "-data_path=pairs", "--split=0.2", "-output=lists")


def test_a_report_shows_images_under_their_masks(pairs, check, tmp_path):
    values = np.full((30, 40), 1, np.uint8)
    values[:, 20:] = 255
    for number in range(4):
        write_mask(pairs / f"images/train/{number}.png", np.full((30, 40, 3), 200, np.uint8))
        write_mask(pairs / f"masks/train/{number}.png", values)
    check(*DATA, "--report=out.html")
    page = (tmp_path / "out.html").read_text()
    place = page.index("Some of the images under their masks (mask)")
    data = base64.b64decode(re.search(r"base64,([\w+/=]+)", page[place:])[1])
    drawn = np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).reshape(-1, 3)
    shown = {tuple(colour) for colour in drawn.tolist()}
    # Class 1 is Pascal VOC's dark red, over the grey picture; what is ignored stays as it is.
    assert {(156, 80, 80), (200, 200, 200)} <= shown
