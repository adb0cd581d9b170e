"""Lists and tables are read block by block: the lines are those of the whole text."""

import csv
import io
import sys

import numpy as np
import pytest

from errors import Allowance, InputError, Unreadable
from loading.class_names import read_class_map, read_class_names
from loading.files import LONGEST_LINE, count_lines, text_lines
from loading.lists import line_allowance
from loading.multilabel import multilabel_csv, multilabel_list
from loading.sources import Split, imagenet2012
from loading.splits import groups_of


@pytest.mark.parametrize("seed", range(4))
def test_lines_are_those_of_the_whole_text(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.choice([0, 0, 1, 3, 1000, 65535, 65536, 200_000], 60)
    lines = [bytes(rng.integers(97, 123, length, np.uint8)) for length in lengths] + [b"last"]
    for end in (b"\n", b"\0"):
        data = end.join(lines)
        assert list(text_lines(io.BytesIO(data), end=end)) == lines
        assert list(text_lines(io.BytesIO(b"\xef\xbb\xbf" + data + end), end=end)) == lines
    assert count_lines(io.BytesIO(b"\n".join(lines))) == len(lines) == 61
    assert count_lines(io.BytesIO(b"\n".join(lines) + b"\n")) == 61
    assert [count_lines(io.BytesIO(data)) for data in (b"", b"\n", b"a", b"a\n\n")] == [0, 1, 1, 2]


def test_a_long_line_is_refused_by_its_number():
    data = b"a\n" * 50_000 + b"x" * (LONGEST_LINE - 1) + b"\n" + b"x" * LONGEST_LINE
    with pytest.raises(Unreadable, match=r"^its line 50002 has more than 524288 bytes$"):
        list(text_lines(io.BytesIO(data)))
    with pytest.raises(Unreadable, match=r"^it is UTF-16; save it as UTF-8$"):
        list(text_lines(io.BytesIO("a 1\n".encode("utf-16"))))


@pytest.mark.parametrize("reader", [imagenet2012, multilabel_list])
def test_the_first_missing_file_is_the_lists_first(reader, tmp_path):
    for folder in ("b", "a", "c/d"):
        (tmp_path / folder).mkdir(parents=True)
        for name in ("1", "2"):
            (tmp_path / folder / name).touch()
    paths = ["b/1", "a/1", "top", "b/2", "c/d/1", "a/2", "c/d/2", "b/1"]
    (tmp_path / "top").touch()
    for broken, first in (
        ({}, ""),
        ({5: "a/9", 7: "b/9"}, "a/9"),
        ({2: "gone/1", 4: "c/e/1", 0: "b/7"}, "b/7"),
    ):
        named = [broken.get(place, path) for place, path in enumerate(paths)]
        (tmp_path / "train_list.txt").write_text(
            "".join(f"{path}\t{place}\n" for place, path in enumerate(named))
        )
        if not broken:
            assert list(reader(Split("train"), data_path=str(tmp_path)).paths) == paths
            continue
        with pytest.raises(InputError) as caught:
            reader(Split("train"), data_path=str(tmp_path))
        told = f"{len(broken)} of 8 files are missing, the first is {tmp_path}/{first}"
        assert str(caught.value) == f"{tmp_path}/train_list.txt: {told}"


def test_what_a_list_takes_is_known_from_its_lines(tmp_path):
    file = tmp_path / "list"
    file.write_bytes(b"a 1\n" * 1000)
    with open(file, "rb") as lines:
        assert line_allowance(lines, 8).left == Allowance(4000).left - 4000 - 40 * 1000
        assert lines.tell() == 0
    file.write_bytes(b"\n" * 3_000_000)
    with (
        open(file, "rb") as lines,
        pytest.raises(
            Unreadable, match="would take more than 64 MiB and more than three times its"
        ),
    ):
        line_allowance(lines)


CELLS = ["0", "1", '"1"', "2", "", " 1", "10"]
NAMES = [
    "1.png",
    ' "1.png"',
    '"1.png"',
    "é.png",
    "1.png ",
    "\u30002.png",
    "",
    '"a,b.png"',
    "a\rb.png",
    '1"2.png',
]
NAMES += ["x" * 5000, "x" * 200_000]


def test_a_table_is_read_as_pythons_own_reader_does(tmp_path):
    rng = np.random.default_rng(0)
    for name in ("1.png", "é.png", "2.png", "a,b.png"):
        (tmp_path / name).touch()
    read = 0
    for _ in range(400):
        cells = [
            str(rng.choice(CELLS[: rng.choice([2, 7])])) for _ in range(rng.choice([2, 3, 3, 3]))
        ]
        line = ",".join([NAMES[rng.integers(len(NAMES))], *cells])
        (tmp_path / "train.csv").write_bytes(f"image,a,b,c\n1.png,1,0,1\n{line}\r\n".encode())
        try:
            [row] = csv.reader([line], strict=True)
            expected = row[0].strip(), [place for place, cell in enumerate(row[1:]) if cell == "1"]
            assert len(row) == 4
            assert set(row[1:]) <= {"0", "1"}
            assert (tmp_path / row[0].strip()).is_file()
        except (csv.Error, AssertionError, OSError):
            with pytest.raises(InputError):
                multilabel_csv(Split("train"), data_path=str(tmp_path))
            continue
        found = multilabel_csv(Split("train"), data_path=str(tmp_path))
        assert (found.paths[1], found.labels.of(1).tolist()) == expected
        read += 1
    assert read > 50


def test_names_of_classes_are_counted_as_they_are(tmp_path):
    file = tmp_path / "classes.txt"
    file.write_bytes("\ufeffcat\r\nchien é\n狗\n\r\n\n".encode())
    assert read_class_names(file) == ["cat", "chien é", "狗"]
    file.write_bytes(b"cat\n\ndog\n")
    with pytest.raises(InputError, match="its line 2 is '', expected a class's name"):
        read_class_names(file)
    file.write_bytes(b"cat\nd\xffg\n")
    with pytest.raises(InputError, match="its line 2 isn't UTF-8; save it as UTF-8"):
        read_class_names(file)
    file.write_bytes(b"")
    with pytest.raises(InputError, match="its line 1 is '', expected a class's name"):
        read_class_names(file)
    file.write_bytes(b"%d\n" * 1_000_001)
    with pytest.raises(InputError, match="it has 1000001 lines, at most 1000000 are allowed"):
        read_class_names(file)
    file.write_text("cat\t1\t2\ndog\n")
    assert read_class_map(file) == {"cat": ["1", "2"], "dog": ["dog"]}
    assert sys.getsizeof("x" * 400 + "狗") > 800  # why each name is asked


def test_groups_of_a_list_are_one_text_for_all(tmp_path):
    file = tmp_path / "groups.txt"
    file.write_bytes("\ufeffa b.png\tone\r\n\né.png\ttwo\nc.png\tone".encode())
    groups = groups_of(["c.png", "é.png", "a b.png"], str(file))
    assert groups == ["one", "two", "one"]
    assert groups[0] is groups[2]
