"""Lists and tables of images with several classes, as a stranger wrote them."""

import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import forged_images
from support.hostile_files import a_share, attempt

from loading.multilabel import multilabel_csv, multilabel_list
from loading.sources import Split

PATHS = st.sampled_from(
    [b"a/1.jpg", b"a/x y.jpg", b"../../x", b"/etc/passwd", b"", b"a\0b", b"\xff\xfe", b'"a/1.jpg"']
)
FIELDS = st.sampled_from(
    [
        b"0",
        b"1",
        b"3,17",
        b"1,1",
        b",",
        b"0,1,0",
        b"-1",
        b"9" * 30,
        b"",
        b"1.0",
        b"\xd9\xa1",
        b'"1"',
        b'"',
        b"cat,dog",
    ]
)
BETWEEN = st.sampled_from([b"\t", b",", b" ", b""])
ENDS = st.sampled_from([b"\n", b"\r\n", b"\r", b""])
STARTS = st.sampled_from(
    [
        b"",
        b"\xef\xbb\xbf",
        b"\xff\xfe",
        b"\0",
        b"image,cat,dog\n",
        b"image,cat,cat\n",
        b"image,\x1b\n",
    ]
)
TEXTS = st.builds(
    lambda start, lines: start + b"".join(b"".join(line) for line in lines),
    STARTS,
    st.lists(st.tuples(PATHS, BETWEEN, FIELDS, ENDS), max_size=6),
)
SOUND = st.sampled_from(
    [
        b"image,cat,dog\n",
        b"a/1.jpg,0,1\r\n",
        b"a/x y.jpg,1,1\n",
        b"a/1.jpg\t0,5\n",
        b"a/x y.jpg\t\n",
    ]
)
READERS = {"train_list.txt": multilabel_list, "train.csv": multilabel_csv}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with the two images that some lines name."""
    root = tmp_path_factory.mktemp("sets")
    (root / "a").mkdir()
    for name in ("1.jpg", "x y.jpg"):
        (root / "a" / name).write_bytes(forged_images.WHOLE["JPEG"])
    return root


def read(reader, root):
    found = reader(Split("train", 20), data_path=str(root))
    assert len(found.paths) == len(found.labels) > 0
    assert all((root / path).exists() for path in found.paths)
    assert all(
        found.labels[index].shape == (found.labels.outputs,) for index in range(len(found.labels))
    )


@pytest.mark.parametrize("name", READERS)
@a_share(4)
@given(data=TEXTS | st.lists(SOUND, max_size=4).map(b"".join) | st.binary(max_size=100))
def test_label_sets_are_read_or_refused(root, name, data):
    (root / name).write_bytes(data)
    attempt("label sets", len(data), functools.partial(read, READERS[name], root))


def header(classes):
    return b"x," + b",".join(b"%x" % number for number in range(classes)) + b"\n"


@pytest.mark.parametrize(
    ("name", "line", "count", "message"),
    [
        ("train_list.txt", b"a/1.jpg\t" + b"2," * 200_000 + b"2\n", 1, "it has a label twice"),
        ("train_list.txt", b"a/1.jpg\t0,1,2,3,4,5,6,7,8,9\n", 200_000, ""),
        ("train_list.txt", b"%d/a\t1\n", 200_000, "at least 10000 of 200000 files are missing"),
        ("train_list.txt", b"," * 4_000_000, 1, "its line 1 has more than 524288 bytes"),
        ("train.csv", b"," * 500_000 + b"\n", 1, "its header's field 2 is ''"),
        ("train.csv", header(100_000), 1, "its line 1 has more than 524288"),
        (
            "train.csv",
            header(80_000) + b"none" + b",1" * 80_000 + b"\n",
            1,
            "1 of 1 files are missing",
        ),
        ("train.csv", b"image,a\n" + b"," * 4_000_000, 1, "its line 2 has more than 524288 bytes"),
    ],
    ids=map(str, range(8)),
)
def test_long_label_sets_cost_little(root, name, line, count, message):
    lines = b"".join(line % number for number in range(count)) if b"%d" in line else line * count
    (root / name).write_bytes(lines)
    said = attempt("label sets", len(lines), functools.partial(_listed, READERS[name], root))
    assert message in said if message else said == ""


def _listed(reader, root):
    found = reader(Split("train"), data_path=str(root))
    assert np.all(found.labels[0][:10] == 1)
