"""Lists and tables of images that have any number of classes."""

import argparse
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from errors import InputError
from loading.label_sets import LabelSets
from loading.shards import make_index, scan_shard, shards
from loading.sources import Split
from settings.registry import datasets
from tools.make_shards import pack, write_shard

CSV = "image,cat,dog,emu\na.png,1,0,1\nsub/b c.png,0,0,0\n"


@pytest.fixture
def root(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("a.png", "sub/b c.png"):
        Image.new("L", (4, 4)).save(tmp_path / name)
    return tmp_path


def read(kind, root, mode="train", classes="auto"):
    component, _ = datasets.load(f"multilabel_{kind}")
    return component(Split(mode, classes), data_path=str(root))


def sets(files):
    return [np.flatnonzero(files.labels[index]).tolist() for index in range(len(files.labels))]


@pytest.mark.smoke
def test_a_list_says_labels_and_a_file_beside_it_names(root):
    (root / "train_list.txt").write_bytes(b"\xef\xbb\xbfa.png\t3, 17\r\n\n sub/b c.png \t\n")
    found = read("list", root)
    assert (list(found.paths), found.classes, found.root) == (["a.png", "sub/b c.png"], [], root)
    assert (sets(found), found.labels.outputs, len(found.labels)) == ([[3, 17], []], 18, 2)
    (root / "classes.txt").write_text("".join(f"class {number}\n" for number in range(20)))
    assert read("list", root).classes == [f"class {number}" for number in range(20)]
    assert found.labels.map_labels(np.arange(20)[::-1])[0].nonzero()[0].tolist() == [2, 16]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            "a.png 3,17\n",
            "line 1: expected a path, a TAB, then labels such as 3,17 .*; found 'a.png 3,17'",
        ),
        ("a.png\t3;17\n", "line 1: expected a path, a TAB, then labels"),
        ("\n\t3\n", "line 2: expected a path, a TAB"),
        ("a.png\t3,,1\n", "line 1: expected a path, a TAB"),
        ("a.png\t-1\n", "line 1: expected a path, a TAB"),
        ("a.png\t0,20\n", r"line 1: label 20 is outside 0..19"),
        (
            "a.png\t0,99999999999999999999999\n",
            r"line 1: label 99999999999999999999999 is outside 0..19",
        ),
        ("a.png\t1,2,1\n", "line 1: it has a label twice"),
        ("a\0.png\t1\n", "line 1: its path contains a NUL character"),
        ("a.png\t\n", "none of its 1 images has a class"),
        ("", "it lists no images"),
        ("a.png\t1\nb.png\t\n", "1 of 2 files are missing, the first is .*b.png"),
        ("a" * (1 << 19), "its line 1 has more than 524288 bytes"),
        (
            "a.png\t1\n".encode("utf-16"),
            "it is UTF-16; save it as UTF-8; DATASET multilabel_list needs it under",
        ),
    ],
    ids=lambda text: repr(text[:20]),
)
def test_a_wrong_list_is_one_line(root, lines, message):
    (root / "train_list.txt").write_bytes(lines if isinstance(lines, bytes) else lines.encode())
    with pytest.raises(InputError, match=message) as caught:
        read("list", root, classes=20)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("cat\ndog\ncat\n", "it has the class 'cat' twice"),
        ("cat\n\x1b\n", r"its line 2 is '\\x1b', expected a class's name"),
    ],
)
def test_wrong_names_are_one_line(root, names, message):
    (root / "train_list.txt").write_text("a.png\t1\n")
    (root / "classes.txt").write_text(names)
    with pytest.raises(InputError, match=message):
        read("list", root)


@pytest.mark.smoke
def test_a_table_names_its_classes_and_validation_has_the_training_ones(root):
    (root / "train.csv").write_text(CSV)
    (root / "val.csv").write_text(
        '\ufeffImage,emu,"cat",dog\r\n"sub/b c.png",1,0,0\r\n\r\na.png,0,1,1\r\n', newline=""
    )
    train = read("csv", root)
    val = read("csv", root, "val")
    assert train.classes == val.classes == ["cat", "dog", "emu"]
    assert (sets(train), sets(val)) == ([[0, 2], []], [[2], [0, 1]])
    assert list(val.paths) == ["sub/b c.png", "a.png"]
    (root / "train.csv").unlink()
    assert read("csv", root, "val").classes == ["emu", "cat", "dog"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            CSV.replace("1,0,1", "1,0"),
            "train.csv, line 2: expected a path, then 0 or 1 for each of 3 classes; found 2 values",
        ),
        (
            CSV.replace("1,0,1", "1,0,-1"),
            "line 2: expected a path, then 0 or 1 for each of 3 classes; found '-1'",
        ),
        (CSV.replace("a.png", ""), "line 2: expected a path, .*; found no path"),
        (CSV.replace("dog", "cat"), "it has the class 'cat' twice"),
        (CSV.replace("dog", ""), "its header's field 3 is '', expected a class's name"),
        (CSV.replace("dog", "d\x07"), r"its header's field 3 is 'd\\x07', expected a class's name"),
        ("image\na.png\n", "its header names no classes; expected image,cat,dog and so on"),
        ("", "its header names no classes"),
        ("image,cat\n", "it lists no images"),
        (CSV.replace("a.png", '"a.png'), "can't be read as a table"),
        ("image," + "x" * (1 << 19), "its line 1 has more than 524288 bytes"),
        (
            "image,cat\n" + "x" * 200_000 + ",1\n",
            "can't be read as a table .*field larger than field limit",
        ),
        (CSV.replace("a.png", "c.png"), "1 of 2 files are missing, the first is .*c.png"),
    ],
    ids=lambda text: repr(text[:20]),
)
def test_a_wrong_table_is_one_line(root, text, message):
    (root / "train.csv").write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        read("csv", root)
    assert "\n" not in str(caught.value)


def test_other_classes_in_validation_and_missing_files_are_one_line(root):
    (root / "train.csv").write_text(CSV)
    (root / "val.csv").write_text(CSV.replace("emu", "gnu"))
    with pytest.raises(
        InputError,
        match=r"val.csv: its classes aren't those of train.csv: emu, gnu \(2\); DATASET multil",
    ):
        read("csv", root, "val")
    with pytest.raises(
        InputError, match="train_list.txt: there is no such file; DATASET multilabel_list needs it"
    ):
        read("list", root)


def test_sets_take_little_memory_and_know_their_bytes():
    ends = np.arange(0, 300_001, 3)
    one = LabelSets(np.tile(np.arange(3), 100_000), ends)
    assert (len(one), one.labels.nbytes + one.ends.nbytes) == (100_000, 12 * 100_000 + 8 * 100_001)
    assert one.tobytes() != LabelSets(one.labels, np.r_[0, ends[1:-1] - 1, ends[-1]]).tobytes()


@pytest.fixture
def packed(root):
    """The images of a list, each twice, in shards of two."""
    lines = ["a.png\t3,17", "sub/b c.png\t", "a.png\t0", "sub/b c.png\t5,1,4"]
    (root / "train_list.txt").write_text("\n".join(lines))
    (root / "out").mkdir()
    options = argparse.Namespace(
        seed=0, shard_size=(2, True), resize=None, quality=95, channels=None
    )
    with ThreadPoolExecutor(1) as pool:
        pack("train", read("list", root), root / "out", pool, options, 1000)
    return root / "out"


def test_shards_hold_label_sets_by_their_index_and_without(packed):
    for _ in range(2):
        found = shards(Split("train"), data_path=str(packed))
        assert (len(found.files), len(found.labels), found.labels.outputs) == (2, 4, 18)
        assert [sorted(found.labels.of(index).tolist()) for index in range(4)] == [
            [3, 17],
            [],
            [0],
            [1, 4, 5],
        ]
        (packed / "train.index.npz").unlink(missing_ok=True)


def test_damaged_label_sets_in_shards_are_one_line(packed):
    index = dict(np.load(packed / "train.index.npz"))
    for change, message in (
        ({"counts": index["counts"] + 1}, "the number of its labels doesn't match its counts"),
        ({"counts": index["counts"] * -1}, "the number of its labels doesn't match its counts"),
        ({"counts": index["counts"][:-1]}, "its arrays differ in length"),
        ({"labels": index["labels"] - 5}, "it contains a label below 0"),
        ({"format": np.array(4)}, "it has another format"),
    ):
        np.savez(packed / "train.index.npz", **{**index, **change})
        with pytest.raises(InputError, match=message):
            shards(Split("train"), data_path=str(packed))
    own = packed / "own-0.tar"

    def written(labels):
        return write_shard(own, [(0, str(packed.parent / "a.png"), labels, {})], None, 95, 1000)[1]

    for labels, message in (
        ([1, 1], "expected different numbers from 0 to"),
        ([10**7], "is '10000000', expected"),
    ):
        with pytest.raises(InputError, match=message):
            written(np.array(labels))
    parts = [written(label) for label in (1, 2)]
    parts.append(scan_shard(packed / "train-000000.tar"))
    with pytest.raises(InputError, match=r"some shards hold .cls, others .labels; pack them again"):
        make_index([own] * 3, parts, [])


@pytest.mark.smoke
def test_sets_are_taken_in_any_order():
    sets = LabelSets([3, 17, 0, 5, 1, 4], [0, 2, 2, 3, 6])
    found = sets.at_places(np.array([3, 1, 0, 3]))
    assert [found.of(index).tolist() for index in range(4)] == [[5, 1, 4], [], [3, 17], [5, 1, 4]]
