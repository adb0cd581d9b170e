"""Damaged and forged tables of images, and annotations: read or refused, within SECURITY.md's
limits.
"""

import functools
import json

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.hostile_files import a_share, attempt, damaged
from support.table_files import image_table, write_parquet, write_saved

from errors import RunError, reading
from loading.annotations import coco_multilabel, voc_multilabel
from loading.csv_tables import csv_tables
from loading.parquet import parquet
from loading.saved_datasets import hf_dataset
from loading.sources import Split

KEYS = {"image_column": "auto", "label_column": "auto", "label_separator": None}
SEVERAL = pa.array([[2, 0], [], [1], None, [1]] * 2, pa.list_(pa.int64()))
TABLE = image_table(10, several=SEVERAL, text=["a", "b"] * 5, flag=[True, False] * 5)


def read_rows(reader, root, label="auto"):
    keys = KEYS | {"label_column": label}
    rows = reader(Split("train", alone=True), data_path=str(root), **keys)
    assert len(rows.names) == len(rows.places) == len(rows.lengths) == len(rows.shard) > 0
    assert rows.labels is None or len(rows.labels) == len(rows.names)
    for index in range(len(rows.names)):
        # As a dataset reads it.
        with reading(rows.name(index), "an image", kind=RunError):
            rows.read(index, 1 << 20)


def stored(tmp_path_factory, write, pattern):
    root = tmp_path_factory.mktemp("tables")
    write(root)
    [file] = root.rglob(pattern)
    return root, file, file.read_bytes()


@pytest.fixture(
    scope="module",
    params=[
        {"row_group_size": 4},
        {"compression": "none", "use_dictionary": False, "data_page_version": "2.0"},
    ],
    ids=["dictionary", "plain"],
)
def parquet_file(request, tmp_path_factory):
    def write(root):
        write_parquet(root / "train.parquet", TABLE, **request.param)

    return stored(tmp_path_factory, write, "*.parquet")


@pytest.fixture(scope="module")
def arrow_file(tmp_path_factory):
    return stored(tmp_path_factory, lambda root: write_saved(root, TABLE), "*.arrow")


@pytest.mark.parametrize("label", ["label", "several", "text"])
@a_share(6)
@given(data=st.data())
def test_a_damaged_parquet_file_is_read_or_refused(parquet_file, label, data):
    root, file, content = parquet_file
    file.write_bytes(data.draw(damaged(content)))
    size = file.stat().st_size
    attempt("Parquet", size, functools.partial(read_rows, parquet, root, label))


@pytest.mark.parametrize("label", ["label", "several", "text"])
@a_share(3)
@given(data=st.data())
def test_a_damaged_arrow_file_is_read_or_refused(arrow_file, label, data):
    root, file, content = arrow_file
    file.write_bytes(data.draw(damaged(content)))
    size = file.stat().st_size
    attempt("Arrow", size, functools.partial(read_rows, hf_dataset, root, label))


def test_many_equal_labels_of_a_small_file_are_refused(tmp_path):
    """A run of one number takes a few bytes, however many rows it is for."""
    count = 20_000_000
    table = pa.table({"file": pa.repeat("a.png", count), "label": pa.repeat(1, count)})
    write_parquet(tmp_path / "train.parquet", table, row_group_size=count)
    size = (tmp_path / "train.parquet").stat().st_size
    line = attempt("Parquet", size, functools.partial(read_rows, parquet, tmp_path))
    assert "would take more than 64 MiB and more than three times its" in line


def test_a_long_path_of_one_row_isnt_taken_for_each(tmp_path):
    paths = ["x" * 200_000, *["y"] * 20_000]
    table = pa.table({"file": paths, "label": [0] * len(paths)})
    write_parquet(tmp_path / "train.parquet", table)
    size = (tmp_path / "train.parquet").stat().st_size
    line = attempt("Parquet", size, functools.partial(read_rows, parquet, tmp_path))
    assert "File name too long" in line


COCO = {
    "info": {},
    "images": [{"id": 1, "file_name": "a.jpg"}],
    "annotations": [{"segmentation": [[1.5, 2]], "image_id": 1, "category_id": 2, "bbox": [1]}],
    "categories": [{"id": 2, "name": "x"}],
}
XML = "<annotation><object><name>dog</name><difficult>0</difficult></object></annotation>"


@pytest.fixture(scope="module")
def annotated(tmp_path_factory):
    root = tmp_path_factory.mktemp("annotated")
    for folder in ("annotations", "Annotations", "ImageSets/Main", "JPEGImages", "train2017"):
        (root / folder).mkdir(parents=True)
    for name in ("train2017/a.jpg", "JPEGImages/a.jpg"):
        (root / name).write_bytes(b"")
    (root / "ImageSets/Main/train.txt").write_text("a\n")
    return root


FORMS = {
    "annotations/instances_train2017.json": (coco_multilabel, json.dumps(COCO)),
    "Annotations/a.xml": (voc_multilabel, XML),
    "train.csv": (
        functools.partial(csv_tables, split_column="auto", **KEYS),
        'path,label\n"train2017/a.jpg",dog\nJPEGImages/a.jpg,cat\n',
    ),
}


def read_files(reader, root):
    files = reader(Split("train"), data_path=str(root))
    assert files.labels is None or len(files.paths) == len(files.labels) > 0


@pytest.mark.parametrize("name", FORMS)
@a_share(3)
@given(data=st.data())
def test_damaged_annotations_are_read_or_refused(annotated, name, data):
    reader, text = FORMS[name]
    (annotated / name).write_bytes(data.draw(damaged(text.encode())))
    size = (annotated / name).stat().st_size
    attempt(name.rpartition(".")[2], size, functools.partial(read_files, reader, annotated))


def test_annotations_of_many_small_values_are_bounded(annotated):
    file = annotated / "annotations" / "instances_train2017.json"
    head, tail = json.dumps(COCO).split('"annotations": [')
    for junk in (
        '{"a": [%s0]},' % ("[]," * 300_000),
        '{"a": 0},' * 400_000,
        '{"b": {"c": 1}},' * 99_999,
    ):
        file.write_text(f'{head}"annotations": [{junk}{tail}')
        size = file.stat().st_size
        line = attempt("json", size, functools.partial(read_files, coco_multilabel, annotated))
        assert line


def test_what_isnt_damaged_is_read(annotated, arrow_file, parquet_file):
    for name, (reader, text) in FORMS.items():
        (annotated / name).write_text(text)
        read_files(reader, annotated)
    for reader, (root, file, content) in ((parquet, parquet_file), (hf_dataset, arrow_file)):
        file.write_bytes(content)
        for label in ("label", "several", "text"):
            read_rows(reader, root, label)
