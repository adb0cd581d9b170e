"""FILE.names: the names of stored features, read once, known as out of date, and a stranger's."""

import json
import os
import shutil
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.hostile_files import a_share, attempt, damaged

from errors import InputError
from inference import feature_store, name_index
from inference.feature_store import array_header, open_features
from inference.name_index import open_names
from inference.search import nearest, nearest_in

NAMES = [
    "a.jpg",
    "sub/b.jpg",
    '=c,"1"\n.jpg',
    "/data/d.jpg",
    "./e.jpg",
    "sub/../f.jpg",
    "\udcff.jpg",
    "猫.jpg",
    "a.jpg",
]


@pytest.fixture(autouse=True)
def _few_are_many(monkeypatch):
    monkeypatch.setattr(name_index, "LEAST", 5)


def write(folder, names=NAMES, values=None, index="csv"):
    """Writes features as tools/features.py does; returns their path."""
    values = (
        np.random.default_rng(0).normal(size=(len(names), 4)).astype("<f4")
        if values is None
        else values
    )
    made = {
        "checkpoint": "/run",
        "sha256": "0" * 64,
        "folder": "/home/me",
        "cfg": None,
        "options": [],
        "layer": None,
    }
    made |= {"pool": "avg", "norm": False, "index": index, "shape": list(values.shape)}
    with open(folder / "x.npy", "wb") as file:
        made["offset"] = file.write(array_header(".npy", made["shape"]))
        file.write(values.data)
    (folder / "x.json").write_text(json.dumps(made))
    with open(folder / f"x.{index}", "wb") as file:
        if index == "csv":
            file.write(feature_store._line(index, *feature_store.COLUMNS))
        for row, name in enumerate(names):
            file.write(feature_store._line(index, row, name, ""))
    return folder / "x.npy"


@pytest.mark.parametrize("index", ["csv", "jsonl"])
def test_names_are_those_of_the_index_and_are_read_once(tmp_path, monkeypatch, index):
    stored = open_features(write(tmp_path, index=index))
    told = []
    expected = [os.path.join("/home/me", name) for name in NAMES]
    assert [os.path.join(stored.made["folder"], name) for name in stored.files()] == expected
    first = open_names(stored, told.append)
    assert told == [f"{tmp_path}/x.{index}: reading its 9 names once, into x.names"]
    monkeypatch.setattr(feature_store.StoredFeatures, "files", None)
    again = open_names(stored, told.append)
    assert len(told) == 1
    for names in (first, again):
        assert [names.name(row) for row in range(9)] == expected
        for path, rows in (
            ("a.jpg", {0, 8}),
            ("e.jpg", {4}),
            ("f.jpg", {5}),
            ("sub/b.jpg", {1}),
            ("b.jpg", set()),
        ):
            assert names.rows_of(f"/home/me/{path}") == rows
        assert names.rows_of("/data/d.jpg") == {3}
        assert names.rows_of("/home/me/\udcff.jpg") == {6}


def test_two_paths_of_one_checksum_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(name_index.zlib, "crc32", lambda text: 7)
    names = open_names(open_features(write(tmp_path)))
    assert [names.rows_of(f"/home/me/{name}") for name in ("a.jpg", "猫.jpg", "none.jpg")] == [
        {0, 8},
        {7},
        set(),
    ]


def test_few_names_leave_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(name_index, "LEAST", 10)
    names = open_names(open_features(write(tmp_path)), pytest.fail)
    assert names.name(7) == "/home/me/猫.jpg"
    assert not (tmp_path / "x.names").exists()


def other_names(folder):
    write(folder, [*NAMES[:-1], "b.jpg"])


def another_time(folder):
    os.utime(folder / "x.csv", ns=(0, 5))


def same_size_and_time(folder):
    found = os.stat(folder / "x.csv")
    other_names(folder)
    os.utime(folder / "x.csv", ns=(0, found.st_mtime_ns))


def another_folder(folder):
    made = json.loads((folder / "x.json").read_text())
    (folder / "x.json").write_text(json.dumps(made | {"folder": "/elsewhere"}))


@pytest.mark.parametrize("change", [other_names, another_time, same_size_and_time, another_folder])
def test_an_index_that_was_changed_is_read_again(tmp_path, change):
    open_names(open_features(write(tmp_path)))
    before = (tmp_path / "x.names").read_bytes()
    change(tmp_path)
    stored = open_features(tmp_path / "x.npy")
    told = []
    assert open_names(stored, told.append).name(8) == os.path.join(
        stored.made["folder"], list(stored.files())[8]
    )
    assert len(told) == 1
    assert (tmp_path / "x.names").read_bytes() != before
    open_names(stored, pytest.fail)


def test_a_folder_that_cannot_be_written_is_searched_as_well(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(name_index, "writing_whole", refuse)
    told = []
    names = open_names(open_features(write(tmp_path)), told.append)
    assert names.rows_of("/home/me/a.jpg") == {0, 8}
    assert (
        told[1]
        == f"{tmp_path}/x.names can't be written (Permission denied); the next search reads all names again"
    )


def test_another_programs_file_is_not_replaced(tmp_path):
    stored = open_features(write(tmp_path))
    file = tmp_path / "x.names"
    for content, message in (
        (b"Ada\nGrace\n", r"can't be read as names of stored features \(JSONDecodeError"),
        (b'{"kind": "other"}\n', "its rows is missing, expected"),
        (b"", r"can't be read as names of stored features"),
    ):
        file.write_bytes(content)
        with pytest.raises(
            InputError, match=f"^{file}: {message}.*; remove it so that it is recreated$"
        ):
            open_names(stored)
        assert file.read_bytes() == content
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(
        InputError, match="it isn't a regular file; remove it so that it is recreated"
    ):
        open_names(stored)
    file.unlink()
    (tmp_path / "mine").write_text("mine")
    file.symlink_to(tmp_path / "mine")
    with pytest.raises(InputError, match="can't be read as names"):
        open_names(stored)
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_strangers_file_is_read_or_refused(tmp_path):
    stored = open_features(write(tmp_path))
    file = tmp_path / "x.names"
    open_names(stored)
    whole = file.read_bytes()
    head, _, arrays = whole.partition(b"\n")
    told = json.loads(head)

    def show():
        names = open_names(stored)
        assert all(len(names.name(row)) < 20_000 for row in range(9))
        names.rows_of("/home/me/a.jpg")

    def attempted(content):
        file.write_bytes(content)
        return attempt("names of features", len(content), show)

    def with_head(**changed):
        text = json.dumps(told | changed).encode()
        return text + b" " * (-len(text) % 8 + 7) + b"\n" + arrays

    assert attempted(whole) == ""
    for content, message in (
        (
            whole[:-1],
            f"it has {len(whole) - 1} bytes, which doesn't match 9 names of {told['letters']} bytes",
        ),
        (with_head(rows=8), "which doesn't match 8 names"),
        (with_head(rows=1 << 47, letters=1 << 47), "which doesn't match"),
        (with_head(rows=-1), "its rows is -1, expected a number of rows"),
        (with_head(letters="x"), "its letters is 'x', expected a number of bytes"),
        (head + b"\n" + b"\xff" * len(arrays), "the name of row 0 is at 0 to 18446744073709551615"),
        (
            head + b"\n" + struct.pack("<9Q", 5, *8 * [3]) + arrays[72:],
            "the name of row 1 is at 5 to 3, of",
        ),
        (whole[: len(head) + 1] + whole[len(head) + 1 :][::-1], "the name of row 0 is at"),
    ):
        assert message in attempted(content)

    @a_share(6)
    @given(damaged(whole))
    def any_damage(content):
        attempted(content)

    @a_share(6)
    @given(
        st.dictionaries(
            st.sampled_from([*told]), st.integers(-2, 1 << 50) | st.none() | st.text(max_size=5)
        )
    )
    def any_head(changed):
        attempted(with_head(**changed))

    any_damage()
    any_head()


# ---------------------------------------------------------------- the search


def by_sorting(query, values, top, left_out):
    """(row, cosine) of all rows, sorted: the first of equal ones first."""
    values = values.astype(np.float64)
    query = query.astype(np.float64)
    lengths = np.linalg.norm(values, axis=1)
    cosines = {
        row: float(values[row] @ query / lengths[row] / np.linalg.norm(query))
        for row in range(len(values))
        if lengths[row] > 0 and np.isfinite(lengths[row]) and row not in left_out
    }
    return sorted(cosines.items(), key=lambda item: (-round(item[1], 12), item[0]))[:top]


@pytest.mark.parametrize("top", [1, 5, 60, 1000])
def test_the_nearest_are_those_of_a_sort_ties_included(top):
    random = np.random.default_rng(top)
    values = random.normal(size=(400, 7)).astype(np.float32)
    values[random.integers(0, 400, 200)] = values[3]  # equal rows, wherever blocks begin
    values[random.integers(0, 400, 20)] = 0
    values[11], values[12, 0], values[13, 1] = np.nan, np.nan, np.inf
    left_out = {3, 17, 399}
    expected = by_sorting(values[5], values, top, left_out)
    for size in (1, 3, 64, 399, 400):
        blocks = (values[first : first + size] for first in range(0, 400, size))
        found = nearest(values[5], blocks, top, left_out)
        assert [row for row, _ in found] == [row for row, _ in expected]
        np.testing.assert_allclose(
            [cosine for _, cosine in found], [cosine for _, cosine in expected], atol=1e-12
        )
    tied = [cosine for row, cosine in found if (values[row] == values[3]).all()]
    assert len(set(tied)) <= 1


def test_a_search_with_names_is_one_without(tmp_path, monkeypatch):
    values = np.random.default_rng(1).normal(size=(50, 4)).astype("<f4")
    values[20], values[30] = values[8], values[9]
    names = [f"{row}.jpg" for row in range(50)]
    monkeypatch.setattr(feature_store, "_BLOCK", 4 * 4 * 7)  # seven rows at once
    stored = open_features(write(tmp_path, names, values))
    made = nearest_in(stored, "/home/me/8.jpg", 12)
    again = nearest_in(stored, "/home/me/8.jpg", 12, tell=pytest.fail)
    (tmp_path / "x.names").unlink()
    monkeypatch.setattr(name_index, "LEAST", 100)
    alone = nearest_in(stored, "/home/me/8.jpg", 12)
    assert made == again == alone
    assert alone[0] == ("/home/me/20.jpg", pytest.approx(1))
    expected = by_sorting(values[8], values, 12, {8})
    assert [one.name for one in alone] == [f"/home/me/{row}.jpg" for row, _ in expected]


def test_features_that_become_shorter_meanwhile_are_an_error(tmp_path):
    stored = open_features(write(tmp_path))
    shutil.copy(tmp_path / "x.npy", tmp_path / "whole.npy")
    os.truncate(tmp_path / "x.npy", os.path.getsize(tmp_path / "x.npy") - 4)
    with pytest.raises(
        InputError,
        match=r"x\.npy: it is truncated before row 8; restore it, or make the features again",
    ):
        list(stored.blocks())


def test_a_file_name_that_is_no_text_is_an_error(tmp_path):
    stored = open_features(write(tmp_path, index="jsonl"))
    lines = (tmp_path / "x.jsonl").read_text().splitlines()
    (tmp_path / "x.jsonl").write_text(
        "\n".join([json.dumps({"row": 0, "file": 5, "error": ""}), *lines[1:]]) + "\n"
    )
    with pytest.raises(InputError, match=r"x\.jsonl: its row 0 has the file 5, expected a text"):
        open_names(stored)
