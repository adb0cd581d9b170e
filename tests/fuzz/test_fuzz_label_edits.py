"""Tables of edited labels, as a person or a stranger wrote them."""

import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.hostile_files import a_share, attempt, damaged

from loading.label_edits import COLUMNS, SEVERAL_COLUMNS, apply_table
from loading.label_sets import LabelSets
from loading.sources import Files

PATHS = [f"train/{name}/{number}.png" for name in ("cat", "dog") for number in range(3)]
SINGLE = Files("data", PATHS, np.array([0, 0, 0, 1, 1, 1]), ["cat", "dog"])  # pyright: ignore
SETS = SINGLE._replace(labels=LabelSets([0, 0, 1, 1], [0, 1, 1, 3, 4, 4, 4]))
HEADS = {"single": ",".join(COLUMNS), "several": ",".join(SEVERAL_COLUMNS)}
CELLS = st.sampled_from(
    ["cat", "dog", "missing", "superfluous", "keep", "relabel", "remove", "0", "", '"', "'=1", "\r", "\0", "é" * 9]
)  # fmt: skip
ROWS = st.lists(
    st.tuples(st.sampled_from([*PATHS, "x", "../x"]), CELLS, CELLS, CELLS, CELLS).map(",".join),
    max_size=6,
)


def apply(part, table):
    parts, counts = apply_table(table, {"train": part}, "data")
    left = parts["train"]
    assert 0 < len(left.paths) == len(left.labels) <= len(PATHS)
    assert set(left.paths) <= set(PATHS)
    assert set(counts) == {"keep", "relabel", "remove"}


@pytest.mark.parametrize("kind", HEADS)
@a_share(2)
@given(data=st.data())
def test_edits_are_applied_or_refused(tmp_path_factory, kind, data):
    text = "\n".join([HEADS[kind], *data.draw(ROWS)]).encode()
    if data.draw(st.booleans()):
        text = data.draw(damaged(text) | st.binary(max_size=100))
    table = tmp_path_factory.getbasetemp() / f"{kind}.csv"
    table.write_bytes(text)
    part = SINGLE if kind == "single" else SETS
    attempt("edits", len(text), functools.partial(apply, part, table))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (HEADS["single"].encode() + b"\n" + b"," * 4_000_000, "more than 20000 bytes"),
        (b"," * 19_000 + b"\n" + (b"," * 19_000 + b"\n") * 50, "its header lacks image"),
        (HEADS["single"].encode() + b"\n" + b"a,b,c,1,keep\n" * 400_000, "name the same image"),
        (b'"' + b"x\n" * 2_000_000, "its line 1 has a cell with unclosed quotes"),
        ((b"," * 9_990 + b'"\n"') * 400, "its line 1 has a cell with unclosed quotes"),
        (b"\n" * 3_000_000, "its header lacks"),
    ],
    ids=map(str, range(6)),
)
def test_long_tables_cost_little(tmp_path, content, message):
    table = tmp_path / "table.csv"
    table.write_bytes(content)
    lines = content.count(b"\n")
    said = attempt("edits", len(content), functools.partial(apply, SINGLE, table), lines)
    assert said
    assert message in said


def test_many_rows_cost_little_or_are_refused(tmp_path):
    table = tmp_path / "table.csv"
    rows = (
        f"train/{number:09}/picture-{number}.png,cat,dog,0.5,keep\n" for number in range(250_000)
    )
    content = (HEADS["single"] + "\n" + "".join(rows)).encode()
    table.write_bytes(content)
    said = attempt("edits", len(content), functools.partial(apply, SINGLE, table), 250_000)
    assert "which the dataset lacks" in said or "more than 64 MiB" in said


def test_many_classes_of_one_image_cost_little_or_are_refused(tmp_path):
    table = tmp_path / "table.csv"
    rows = (f"{PATHS[0]},{number},missing,0.5,keep\n" for number in range(100_000))
    content = (HEADS["several"] + "\n" + "".join(rows)).encode()
    table.write_bytes(content)
    said = attempt("edits", len(content), functools.partial(apply, SETS, table), 100_000)
    assert "names the class '0', which the dataset lacks" in said or "more than 64 MiB" in said
