"""What says which labels an evaluation set has, as a stranger wrote it."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.hostile_files import a_share, attempt

from config import get_config
from loading.label_spaces import check_evaluation
from loading.real_labels import relabel
from loading.sources import Files

NAMES = st.sampled_from(
    [b"cat", b"dog", b"tench", b"n01440764", b"crane", b"7", b"1000", b"-1", b"", b" ", b"\xff"]
)
NAMES |= st.sampled_from(
    [b"\xd9\xa1", b"9" * 5000, b"\x1b[2J", "\u2028".encode(), b"\xef\xbb\xbf", b"\xff\xfe"]
)
MAPS = st.lists(
    st.tuples(NAMES, st.sampled_from([b"\t", b"\n", b"\r\n", b"\t\t"])), max_size=8
).map(
    lambda parts: b"cat\t1\ndog\t2\n" * (len(parts) % 2)
    + b"".join(b"".join(part) for part in parts)
)
LISTS = st.lists(
    st.sampled_from([b"[", b"]", b",", b"[3]", b"[]", b"1", b"1e3", b"NaN", b"{}", b"1000", b'"a"'])
)


def of_map(file):
    val = SimpleNamespace(classes=["cat", "dog"], labels=np.array([0, 1, 1]), compared=None)
    check_evaluation(get_config(None, ["EVAL", "True", "DATA.CLASSES", str(file)]), val, None)
    assert len(val.labels) == 3
    assert 0 <= val.compared.min() <= val.compared.max() < 1000


def of_list(file):
    config = get_config(None, ["EVAL", "True", "DATA.DATASET", "folder", "DATA.LABELS", str(file)])
    source = Files(
        file.parent,
        ["ILSVRC2012_val_00000001.JPEG", "ILSVRC2012_val_00000002.JPEG"],
        np.array([0, 0]),
        ["a"],
    )
    found = relabel(source, config)
    assert len(found.paths) == len(found.labels) > 0
    assert found.labels[0].sum() > 0


@a_share(16)
@given(data=MAPS | st.binary(max_size=60))
def test_class_maps_are_read_or_refused(tmp_path_factory, data):
    file = tmp_path_factory.getbasetemp() / "map.txt"
    file.write_bytes(data)
    attempt("class maps", len(data), functools.partial(of_map, file))


@a_share(16)
@given(data=LISTS.map(lambda parts: b"[" + b",".join(parts) + b"]") | st.binary(max_size=60))
def test_lists_of_labels_are_read_or_refused(tmp_path_factory, data):
    file = tmp_path_factory.getbasetemp() / "real.json"
    file.write_bytes(data)
    attempt("lists of labels", len(data), functools.partial(of_list, file))


@pytest.mark.parametrize(
    ("read", "data", "message"),
    [
        (of_map, b"cat\t1\ndog" + b"\t12" * 2_000_000, "its line 2 has more than 524288 bytes"),
        (
            of_map,
            b"cat\t1\ndog" + b"\t12" * 150_000 + b"\n" + b"cow" + b"\t12" * 150_000,
            "more than 64 MiB",
        ),
        (
            of_map,
            b"".join(b"%d\t1\n" % number for number in range(500_000)),
            "would take more than 64 MiB",
        ),
        (
            of_map,
            b"".join(b"%d\t1\n" % number for number in range(100_000)),
            "it lacks classes of the data: cat",
        ),
        (of_list, b"[" + b"[]," * 3_000_000 + b"[]]", "would take more than 64 MiB"),
        (of_list, b"[[" + b"1," * 50_000 + b"1],[2]]", ""),
    ],
    ids=map(str, range(6)),
)
def test_long_files_cost_little(tmp_path, read, data, message):
    (tmp_path / "file").write_bytes(data)
    said = attempt(
        "class maps" if read is of_map else "lists of labels",
        len(data),
        functools.partial(read, tmp_path / "file"),
    )
    assert message in said if message else said == ""
