"""Readers of images with masks: two folders, lists of pairs, what is wrong with them."""

import os
import shutil
import sys

import numpy as np
import pytest
from PIL import Image

from config import get_config
from datasets import get_dataset, get_datasets
from errors import InputError, RunError
from loading.mask_folders import masks, masks_list, read_colors
from loading.sources import Split
from tools import make_shards

SIZE = (24, 16)
COLOURS = np.array([[0, 0, 0], [200, 0, 0], [0, 200, 0], [9, 9, 9]], np.uint8)


def drawn(number, high=3, size=SIZE):
    """The class indices of a mask; its last row is ignored."""
    values = np.random.default_rng(number).integers(0, high, size[::-1]).astype(np.uint8)
    values[-1] = 255
    return values


def save(file, values):
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values).save(file)


def write_image(file, number):
    rng = np.random.default_rng(number)
    save(file, rng.integers(0, 256, (*SIZE[::-1], 3)).astype(np.uint8))


def write_pairs(root, images="images/{}", its_masks="masks/{}", parts=("train", "val"), count=4):
    for part in parts:
        for number in range(count):
            write_image(root / images.format(part) / f"deep/{number}.jpg", number)
            save(root / its_masks.format(part) / f"deep/{number}.png", drawn(number))


@pytest.fixture
def root(tmp_path):
    write_pairs(tmp_path)
    (tmp_path / "classes.txt").write_text("sky\ntree\nroad\n")
    return tmp_path


def read(root, mode="train", reader=masks, num_classes="auto", problems=None, **given):
    split = Split(mode, num_classes, problems, alone=given.pop("alone", False))
    return reader(split, data_path=str(root), **given)


def configured(root, *options):
    words = ["TASK", "segmentation", "DATA.DATASET", "masks", "DATA.DATA_PATH", str(root)]
    words += ["DATA.IMAGE_SIZE", "[16,24]", "DATA.NUM_WORKERS", "0", "MODEL.NUM_CLASSES", "auto"]
    words += ["HEAD.NAME", "linear", "DATA.CROP_MODE", "own"]
    return get_config(None, [*words, *map(str, options)])


def decoded(dataset):
    """All masks of a dataset, as they are stored: [n, H, W]."""
    return np.stack([np.asarray(dataset.mask("mask", index)) for index in range(len(dataset))])


EXPECTED = np.stack([drawn(number) for number in range(4)])


@pytest.mark.parametrize(
    ("images", "its_masks", "parts"),
    [
        ("images/{}", "masks/{}", ("train", "val")),
        ("images/{}", "annotations/{}", ("training", "validation")),
        ("img_dir/{}", "ann_dir/{}", ("train", "val")),
        ("{}/images", "{}/masks", ("train", "val")),
        ("{}/images", "{}/labels", ("training", "validation")),
    ],
)
def test_each_layout_gives_the_same_pairs(tmp_path, images, its_masks, parts):
    write_pairs(tmp_path, images, its_masks, parts)
    (tmp_path / "classes.txt").write_text("sky\ntree\nroad\n")
    (tmp_path / images.format(parts[0]) / ".hidden.jpg").write_bytes(b"")
    for mode, part in zip(("train", "val"), parts, strict=True):
        found = read(tmp_path, mode)
        assert list(found.paths) == [f"{images.format(part)}/deep/{n}.jpg" for n in range(4)]
        column = found.columns["mask"]
        assert list(column.paths) == [f"{its_masks.format(part)}/deep/{n}.png" for n in range(4)]
        assert (found.labels, found.classes) == (None, ["sky", "tree", "road"])
        assert (column.ignored, column.dtype, column.classes) == (255, "uint8", 3)
    # It has a validation set of its own.
    with pytest.raises(InputError, match=r"exists, but DATA.VAL_SPLIT 0.5 makes another val"):
        get_dataset(configured(tmp_path, "DATA.VAL_SPLIT", 0.5), "train")


def test_a_task_gets_the_masks(root):
    config, train, val = get_datasets(configured(root))
    assert config.MODEL.NUM_CLASSES == 3
    assert train.classes == val.classes == ["sky", "tree", "road"]
    np.testing.assert_array_equal(decoded(val), EXPECTED)
    sample = train.sample((1, 0, 0))
    assert sample["mask"].shape == (16, 24)
    assert np.isin(sample["mask"], [0, 1, 2, 255]).all()


def test_one_part_is_split(tmp_path):
    write_pairs(tmp_path, "images", "masks", parts=("",), count=8)
    (tmp_path / "classes.txt").write_text("sky\ntree\nroad\n")
    names = []
    for mode, count in (("train", 6), ("val", 2)):
        dataset = get_dataset(configured(tmp_path, "DATA.VAL_SPLIT", 0.25), mode)
        assert len(dataset) == count
        for index in range(count):
            number = int(dataset.paths[index].split("/")[-1][0])
            np.testing.assert_array_equal(dataset.mask("mask", index), drawn(number))
            names.append(number)
    assert sorted(names) == list(range(8))
    folds = [
        get_dataset(configured(tmp_path, "DATA.FOLDS", 2, "DATA.FOLD", fold), "val")
        for fold in range(2)
    ]
    assert [len(fold) for fold in folds] == [4, 4]
    assert set(folds[0].paths).isdisjoint(folds[1].paths)
    # It is evaluated as it is, and not trained on without a validation set.
    assert len(read(tmp_path, "val").paths) == 8
    with pytest.raises(
        InputError, match=r"images: there is no val/ in it; DATA.VAL_SPLIT 0.1 puts"
    ):
        read(tmp_path, "train")


def test_what_says_how_many_classes_there_are(root, tmp_path):
    os.remove(root / "classes.txt")
    message = r": the classes of the masks are unknown; write their names to .*classes.txt"
    with pytest.raises(InputError, match=message):
        read(root)
    found = read(root, num_classes=4)
    assert (found.classes, found.columns["mask"].classes) == ([], 4)
    with pytest.raises(InputError, match="masks of 65536 classes, expected up to 65535; check cla"):
        read(root, num_classes=65536)
    (root / "classes.txt").write_text("".join(f"c{number}\n" for number in range(300)))
    column = read(root).columns["mask"]
    assert (column.ignored, column.dtype, column.classes) == (65535, "int32", 300)
    # A check goes on with any indices.
    os.remove(root / "classes.txt")
    problems = []
    column = read(root, problems=problems).columns["mask"]
    assert (column.table, column.dtype, len(problems)) == (None, "int32", 1)


def test_the_ignored_index_is_a_key(root):
    for mode in ("train", "val"):
        for number in range(4):
            values = drawn(number)
            save(root / f"masks/{mode}/deep/{number}.png", np.where(values == 255, 100, values))
    with pytest.raises(
        InputError, match=r"0.png: it contains the index 100 at x 0, y 15, and 24 pixel"
    ):
        get_dataset(configured(root), "val")
    dataset = get_dataset(configured(root, "DATA.IGNORE_INDEX", 100), "val")
    np.testing.assert_array_equal(decoded(dataset), EXPECTED)
    assert dataset.masks["mask"].ignored == 255
    # A class may be left out, too.
    dataset = get_dataset(
        configured(root, "DATA.IGNORE_INDEX", 1, "DATA.SKIP_BROKEN", True), "train"
    )
    with pytest.raises(
        RunError, match="expected 0..2; add its class to .*classes.txt, or change D"
    ):
        dataset.mask("mask", 0)


def test_partners_that_are_missing_are_named(root):
    os.rename(root / "masks/train/deep/1.png", root / "masks/train/deep/1_mask.png")
    write_image(root / "images/train/deep/x.jpg", 0)
    message = (
        rf"^2 of 5 images have no mask of their name in {root}/masks/train, the first is"
        r" images/train/deep/1.jpg; masks/train/deep/1_mask.png may belong to it: give both the"
    )
    with pytest.raises(InputError, match=message):
        read(root)
    problems = []
    assert len(read(root, problems=problems).paths) == 3
    assert problems[1] == (
        f"1 of 4 masks have no image of their name in {root}/images/train, the first is"
        " masks/train/deep/1_mask.png; add or remove files"
    )
    save(root / "masks/val/deep/9.png", drawn(9))
    with pytest.raises(InputError, match=r"^1 of 5 masks have no image of their name in"):
        read(root, "val")
    write_image(root / "images/val/deep/0.png", 0)
    with pytest.raises(InputError, match=r"0.jpg and .*0.png only differ in their suff"):
        read(root, "val")


def test_folders_that_are_missing_are_named(root, tmp_path):
    shutil.rmtree(root / "masks/val")
    message = r"masks/val: there is no such folder of masks; .*masks contains the folder train$"
    with pytest.raises(InputError, match=message):
        read(root, "val")
    shutil.rmtree(root / "images/val")
    with pytest.raises(
        InputError, match=r"images: there is no val/ in it; DATA.VAL_SPLIT 0.1 puts"
    ):
        read(root, "val")
    shutil.rmtree(root / "masks/train")
    (root / "masks/train").mkdir()
    with pytest.raises(InputError, match=r"masks/train: no masks in it or below it; they end in"):
        read(root)
    shutil.rmtree(root / "images")
    with pytest.raises(
        InputError, match=r": no images/; DATASET masks needs images/ and masks/ un"
    ):
        read(root)


# ------------------------------------------------------------------- colours


def write_colours(root):
    """Writes the masks as pictures of colours; the last colour is ignored."""
    for mode in ("train", "val"):
        for number in range(4):
            values = drawn(number)
            picture = COLOURS[np.where(values == 255, 3, values)]
            save(root / f"masks/{mode}/deep/{number}.png", picture)
    os.remove(root / "classes.txt")
    lines = ["0 0 0 sky", "200 0 0\t\ttree", "0 200 0 an old  road", "9 9 9"]
    (root / "colors.txt").write_text("\n".join(lines) + "\n")


def test_masks_of_colours(root):
    with pytest.raises(InputError, match="are unknown") as _:
        os.rename(root / "classes.txt", root / "other.txt")
        read(root)
    os.rename(root / "other.txt", root / "classes.txt")
    write_colours(root)
    config, _, val = get_datasets(configured(root))
    assert val.classes == ["sky", "tree", "an old  road"]
    assert config.MODEL.NUM_CLASSES == 3
    np.testing.assert_array_equal(decoded(val), EXPECTED)
    with pytest.raises(InputError, match=r"DATA.IGNORE_INDEX is 0, but masks have the colours in"):
        read(root, ignore_index=0)
    (root / "classes.txt").write_text("sky\n")
    with pytest.raises(
        InputError, match=r"both classes.txt and colors.txt exist, but colors.txt, for"
    ):
        read(root)
    os.remove(root / "colors.txt")
    message = r"0.png: it has 3 channels, expected .* \(a colors.txt maps colours to classes"
    with pytest.raises(InputError, match=message):
        get_dataset(configured(root), "train")


def test_colours_of_one_name_are_one_class(tmp_path):
    file = tmp_path / "colors.txt"
    file.write_bytes(b"\xef\xbb\xbf1 2 3 house\r\n4 5 6 tree\r\n\r\n7 8 9 house\r\n")
    names, column = read_colors(file)
    assert names == ["house", "tree"]
    assert column.table.stored.tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert column.table.indices.tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"1 2 300 a\n", "line 1: expected three numbers up to 255 and a name; found '1 2 300 a'"),
        (b"1 2 3 a\nsky 1 2 3\n", "line 2: expected three numbers up to 255"),
        (b"1 2 3 a\n1 2 3 b\n", "line 2: the colour already has another name"),
        (b"1 2 3\n", "it has 0 classes in 1 colours, expected at least 1"),
        (b"", "it has 0 classes in 0 colours"),
        (b"1 2 3 \xff\n", "its line 1 isn't UTF-8"),
        (b"1 2 3 a\x1bb\n", "its line 1 is"),
    ],
)
def test_a_wrong_line_of_colours_is_named(tmp_path, text, message):
    (tmp_path / "colors.txt").write_bytes(text)
    with pytest.raises(InputError, match=f"colors.txt: {message}.*; each line is R G B NAME$"):
        read_colors(tmp_path / "colors.txt")


# --------------------------------------------------------------------- lists


def test_a_list_of_pairs(root):
    lines = [f"images/train/deep/{n}.jpg masks/train/deep/{n}.png" for n in range(3)]
    lines.append("images/train/deep/3.jpg\tmasks/train/a b.png")
    os.rename(root / "masks/train/deep/3.png", root / "masks/train/a b.png")
    (root / "train_list.txt").write_text("\n".join(lines) + "\n\n")
    found = read(root, reader=masks_list)
    assert list(found.paths) == [f"images/train/deep/{n}.jpg" for n in range(4)]
    assert list(found.columns["mask"].paths)[2:] == [
        "masks/train/deep/2.png",
        "masks/train/a b.png",
    ]
    options = ["DATA.DATASET", "masks_list", "DATA.VAL_SPLIT", 0.25]
    assert len(get_dataset(configured(root, *options), "val")) == 1
    dataset = get_dataset(configured(root, "DATA.DATASET", "masks_list"), "train")
    np.testing.assert_array_equal(decoded(dataset), EXPECTED)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "images/a.jpg",
            "line 2: expected the path of an image, a TAB, the path of its mask; found",
        ),
        ("a b c", "line 2: expected the path of an image, a TAB"),
        ("a\t", "line 2: expected the path of an image, a TAB"),
        ("a\0 b", "line 2: its path contains a NUL"),
        ("images/none.jpg b", "1 of 2 files are missing, the first is .*images/none.jpg"),
    ],
)
def test_a_wrong_line_of_pairs_is_named(root, line, message):
    good = "images/train/deep/0.jpg masks/train/deep/0.png\n"
    (root / "train_list.txt").write_text(f"{good}{line}\n")
    with pytest.raises(InputError, match=f"train_list.txt[:,] {message}"):
        read(root, reader=masks_list)
    problems = []
    read(root, reader=masks_list, problems=problems)
    # A check opens each file itself.
    assert len(problems) == (0 if "none" in line else 1)


def test_a_mask_of_a_list_that_is_missing_is_named(root):
    (root / "train_list.txt").write_text("images/train/deep/0.jpg masks/none.png\n")
    config = configured(root, "DATA.DATASET", "masks_list")
    with pytest.raises(
        InputError, match=r"^1 of 1 files of the column 'mask' are missing, the first"
    ):
        get_dataset(config, "train")
    (root / "train_list.txt").write_text("\n")
    with pytest.raises(InputError, match="the list is empty"):
        get_dataset(config, "train")


# ---------------------------------------------------------- caches and shards


@pytest.mark.parametrize("of_colours", [False, True])
def test_a_cache_holds_class_indices(root, of_colours, capfd):
    if of_colours:
        write_colours(root)
    options = ["DATA.CACHE", str(root / "cache")]
    for decodings in (2, 0):
        dataset = get_dataset(configured(root, *options), "val")
        np.testing.assert_array_equal(decoded(dataset), EXPECTED)
        assert capfd.readouterr().out.count("decoding") == decodings
    # Other meanings of the same files make another cache of the masks alone.
    if of_colours:
        text = (root / "colors.txt").read_text()
        (root / "colors.txt").write_text(text.replace("9 9 9", "0 0 7"))
        with pytest.raises(InputError, match="0.png: it contains the colour 9 9 9"):
            get_dataset(configured(root, *options), "val")
    else:
        dataset = get_dataset(configured(root, *options, "DATA.IGNORE_INDEX", 255), "val")
        assert capfd.readouterr().out.count("decoding") == 0
        os.remove(root / "classes.txt")
        options += ["MODEL.NUM_CLASSES", 4]
        get_dataset(configured(root, *options), "val")
        assert "-mask-" in capfd.readouterr().out


def pack(root, monkeypatch, *options):
    words = ["-dataset=masks", f"-data_path={root}", f"-output={root}/out", "-workers=1", *options]
    monkeypatch.setattr(sys, "argv", ["make_shards.py", *words])
    make_shards.main()
    return root / "out"


@pytest.mark.parametrize("of_colours", [False, True])
def test_shards_hold_class_indices(root, monkeypatch, of_colours):
    if of_colours:
        write_colours(root)
    out = pack(root, monkeypatch)
    options = ["DATA.DATASET", "shards"]
    config, _, val = get_datasets(configured(out, *options))
    assert (val.classes[:2], config.MODEL.NUM_CLASSES) == (["sky", "tree"], 3)
    np.testing.assert_array_equal(decoded(val), EXPECTED)
    column = val.masks["mask"]
    assert (column.classes, column.ignored, column.dtype) == (3, 255, "uint8")
    assert column.table.is_identity
    # The bytes of masks of indices are packed as they are.
    if not of_colours:
        expected = (root / "masks/val/deep/2.png").read_bytes()
        assert val.mask_data("mask", 2) == expected
    for limit, message in (
        (-1, "which are of -1 classes"),
        (256, "of uint8, which are of 256 cla"),
    ):
        with np.load(out / "val.index.npz") as stored:
            np.savez(out / "train.index.npz", **dict(stored) | {"limits": np.array([limit])})
        with pytest.raises(InputError, match=message):
            get_dataset(configured(out, *options), "train")


def test_shards_hold_more_than_255_classes(root, monkeypatch):
    (root / "classes.txt").write_text("".join(f"c{number}\n" for number in range(300)))
    expected = EXPECTED.astype(np.int32) + 40
    expected[:, -1] = 65535
    for mode in ("train", "val"):
        for number in range(4):
            save(root / f"masks/{mode}/deep/{number}.png", expected[number].astype(np.uint16))
    dataset = get_dataset(configured(root), "val")
    np.testing.assert_array_equal(decoded(dataset), expected)
    out = pack(root, monkeypatch, "--resize=8")
    packed = get_dataset(configured(out, "DATA.DATASET", "shards"), "val")
    assert packed.mask("mask", 0).size == (12, 8)
    small = Image.fromarray(expected[0]).resize((12, 8), Image.Resampling.NEAREST)
    np.testing.assert_array_equal(packed.mask("mask", 0), small)
    assert packed.masks["mask"].classes == 300
