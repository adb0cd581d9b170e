"""Images in Parquet tables and in saved datasets."""

import itertools
import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from support.dataset_files import dataset_config
from support.table_files import (
    CLASS_LABEL,
    NAMES,
    image_table,
    png,
    write_parquet,
    write_saved,
)

from datasets import get_dataloader, get_dataset, get_datasets
from errors import InputError, RunError, Unreadable
from loading import parquet_pages
from loading.parquet import parquet
from loading.saved_datasets import hf_dataset
from loading.shards import Shards
from loading.sources import Split
from settings.registry import datasets

READERS = {"parquet": parquet, "hf_dataset": hf_dataset}
MOST = 1 << 20
ROOT = Path(__file__).resolve().parent.parent.parent


def read(kind, path, mode="train", alone=False, **keys):
    given = {"image_column": "auto", "label_column": "auto", "label_separator": None} | keys
    return READERS[kind](Split(mode, alone=alone), data_path=str(path), **given)


def write(kind, root, part, *tables, **options):
    if kind == "hf_dataset":
        write_saved(root / part, *tables, **options)
        return
    for number, table in enumerate(tables):
        name = f"{part}-{number:05d}-of-{len(tables):05d}.parquet"
        write_parquet(root / "data" / name, table, **{"row_group_size": 4} | options)


def contents(rows):
    return [rows.read(index, MOST) for index in range(len(rows))]


@pytest.mark.smoke
@pytest.mark.parametrize("kind", READERS)
def test_images_and_labels_are_those_that_were_written(kind, tmp_path):
    write(kind, tmp_path, "train", image_table(6), image_table(5, first=6))
    write(kind, tmp_path, "validation", image_table(3, first=20, label=[2, 0, 1]))
    train = read(kind, tmp_path)
    val = read(kind, tmp_path, "val")
    assert contents(train) == [png(seed) for seed in range(11)]
    assert contents(val) == [png(seed) for seed in range(20, 23)]
    assert train.labels.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1]
    assert (val.labels.tolist(), train.classes, val.classes) == ([2, 0, 1], NAMES, NAMES)
    name = {
        "parquet": b"data/train-00001-of-00002.parquet/4/10.png",
        "hf_dataset": b"train/data-00001-of-00002.arrow/4/10.png",
    }[kind]
    assert train.names[10] == name
    some = train.at_places(np.array([10, 3]))
    assert contents(some) == [png(10), png(3)]
    assert some.labels.tolist() == [1, 0]
    assert some.where() != train.where()


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "none"},
        {"compression": "zstd", "use_dictionary": False},
        {"compression": "gzip", "data_page_version": "2.0"},
        {"compression": "brotli", "data_page_size": 300, "write_batch_size": 1},
        {"compression": "lz4", "data_page_version": "2.0", "dictionary_pagesize_limit": 300},
        {"use_content_defined_chunking": True},
        {"row_group_size": 1},
    ],
    ids=str,
)
def test_pages_of_every_form_hold_the_same(options, tmp_path):
    rows = [None, [1], [], [0, 2], [2]] * 8
    table = image_table(
        40,
        text=["a", "b", "a", "ccc"] * 10,
        several=pa.array(rows, pa.list_(pa.int64())),
        flag=pa.array([i % 5 == 0 for i in range(40)]),
    )
    write_parquet(tmp_path / "train.parquet", table, **{"row_group_size": 16} | options)
    whole = read("parquet", tmp_path)
    assert contents(whole) == [png(seed) for seed in range(40)]
    texts = read("parquet", tmp_path, label_column="text")
    assert (texts.labels.tolist(), texts.classes) == ([0, 1, 0, 2] * 10, ["a", "b", "ccc"])
    several = read("parquet", tmp_path, label_column="several")
    expected = [sorted(row or []) for row in rows]
    assert [several.labels.of(index).tolist() for index in range(40)] == expected
    flags = read("parquet", tmp_path, label_column="flag")
    assert flags.labels.tolist() == [int(i % 5 == 0) for i in range(40)]


@pytest.mark.parametrize("kind", READERS)
def test_texts_are_classes_in_the_training_images_order(kind, tmp_path):
    features = {"image": {"_type": "Image"}, "label": {"_type": "Value", "dtype": "string"}}
    write(kind, tmp_path, "train", image_table(4, label=["b", "c", "a", "b"], features=features))
    write(kind, tmp_path, "validation", image_table(2, label=["c", "b"], features=features))
    assert read(kind, tmp_path).classes == ["a", "b", "c"]
    val = read(kind, tmp_path, "val")
    assert (val.labels.tolist(), val.classes) == ([2, 1], ["a", "b", "c"])
    write(kind, tmp_path, "validation", image_table(2, label=["c", "B"], features=features))
    with pytest.raises(
        InputError, match="those of the training images: 'B'; 'B' and 'b' differ only in upper"
    ):
        read(kind, tmp_path, "val")


@pytest.mark.parametrize("kind", READERS)
def test_several_labels_are_lists_columns_or_separated_texts(kind, tmp_path):
    features = {"image": {"_type": "Image"}, "label": {"_type": "List", "feature": CLASS_LABEL}}
    table = image_table(
        3,
        label=pa.array([[2, 0, 2], [], [1]], pa.list_(pa.int64())),
        features=features,
        cat=[1, 0, 1],
        dog=[0, 0, 1],
        tags=["x y", "", "y"],
        word=["x", "y", "x"],
    )
    write(kind, tmp_path, "train", table)

    def sets(**keys):
        rows = read(kind, tmp_path, **keys)
        return [rows.labels.of(index).tolist() for index in range(3)], rows.classes

    assert sets() == ([[0, 2], [], [1]], NAMES)
    assert sets(label_column=["cat", "dog"]) == ([[0], [], [0, 1]], ["cat", "dog"])
    assert sets(label_column="tags", label_separator="space") == ([[0, 1], [], [1]], ["x", "y"])
    assert read(kind, tmp_path, label_column=None).labels is None
    with pytest.raises(InputError, match="'word' doesn't hold 0 and 1"):
        sets(label_column=["cat", "word"])


@pytest.mark.parametrize("kind", READERS)
def test_paths_are_read_in_place_of_bytes(kind, tmp_path):
    base = {"parquet": tmp_path / "data", "hf_dataset": tmp_path / "train"}[kind]
    base.mkdir()
    (base / "one.png").write_bytes(png(1))
    (tmp_path / "two.png").write_bytes(png(2))
    table = pa.table({"file": ["one.png", str(tmp_path / "two.png")], "label": [0, 1]})
    write(
        kind,
        tmp_path,
        "train",
        table.replace_schema_metadata(
            {"huggingface": "{}"} if kind == "parquet" else {"huggingface": '{"info": {}}'}
        ),
    )
    rows = read(kind, tmp_path)
    assert contents(rows) == [png(1), png(2)]
    assert str(tmp_path / "two.png") in rows.files
    (base / "one.png").unlink()
    with pytest.raises(FileNotFoundError):
        rows.read(0, MOST)


@pytest.mark.parametrize("kind", READERS)
def test_an_image_without_bytes_is_read_by_its_path(kind, tmp_path):
    """datasets' to_parquet leaves local images where they are."""
    (tmp_path / "two.png").write_bytes(png(2))
    table = image_table(1)
    other = pa.array([{"bytes": None, "path": str(tmp_path / "two.png")}], table["image"].type)
    write(kind, tmp_path, "train", table, table.set_column(0, "image", other))
    rows = read(kind, tmp_path)
    assert contents(rows) == [png(0), png(2)]
    assert contents(rows.at_places(np.array([1]))) == [png(2)]


@pytest.mark.parametrize("kind", READERS)
def test_columns_that_arent_clear_are_named(kind, tmp_path):
    features = {"image": {"_type": "Image"}, "fine": CLASS_LABEL, "coarse": CLASS_LABEL}
    write(kind, tmp_path, "train", image_table(2, features=features, fine=[0, 1], coarse=[1, 1]))
    with pytest.raises(
        InputError, match="several columns may hold the labels: fine, coarse; set D"
    ):
        read(kind, tmp_path)
    assert read(kind, tmp_path, label_column="fine").labels.tolist() == [0, 1]
    with pytest.raises(InputError, match="no column 'fines' .*; did you mean fine"):
        read(kind, tmp_path, label_column="fines")
    with pytest.raises(InputError, match="'fine' holds neither images nor paths"):
        read(kind, tmp_path, image_column="fine")
    with pytest.raises(InputError, match=r"its label 3 is outside 0\.\.2"):
        write(kind, tmp_path, "train", image_table(2, label=[0, 3]))
        read(kind, tmp_path)


@pytest.mark.parametrize("kind", READERS)
def test_parts_are_found_or_named(kind, tmp_path):
    write(kind, tmp_path, "train", image_table(3))
    with pytest.raises(InputError, match="without them, DATA.VAL_SPLIT splits the training images"):
        read(kind, tmp_path, "val")
    write(kind, tmp_path, "test", image_table(2))
    val = read(kind, tmp_path, "val")
    assert len(val) == 2
    note = "the test images validate, because there are no validation images"
    assert val.note == note
    assert note in get_datasets(dataset_config(kind, tmp_path))[0].notes
    write(kind, tmp_path, "validation", image_table(3))
    assert read(kind, tmp_path, "val").note == ""
    with pytest.raises(InputError, match="it holds nothing"):
        read(kind, tmp_path / "none")


@pytest.mark.parametrize("kind", READERS)
def test_one_part_is_evaluated_or_split(kind, tmp_path):
    path = tmp_path / "some.parquet"
    if kind == "parquet":
        write_parquet(path, image_table(12))
    else:
        path = tmp_path
        write_saved(tmp_path, image_table(12))
    with pytest.raises(InputError, match="no validation images; DATA.VAL_SPLIT 0.1 takes a tenth"):
        read(kind, path)
    assert len(read(kind, path, "val")) == len(read(kind, path, alone=True)) == 12
    config = dataset_config(kind, path, "DATA.VAL_SPLIT", "0.25")
    _, train, val = get_datasets(config)
    assert (len(train), len(val), train.classes) == (9, 3, NAMES)
    assert sorted([*train.relative_names(), *val.relative_names()]) == sorted(
        read(kind, path, "val").names
    )


@pytest.mark.parametrize("kind", READERS)
def test_a_cache_and_a_dataset_have_the_pixels_of_the_files(kind, tmp_path):
    write(kind, tmp_path, "train", image_table(5))
    direct = get_dataset(dataset_config(kind, tmp_path), "train")
    cached = get_dataset(
        dataset_config(kind, tmp_path, "DATA.CACHE", str(tmp_path / "cache")), "train"
    )
    for index in range(5):
        assert (np.asarray(direct.image(index)) == np.asarray(cached.image(index))).all()
    assert (direct[2][0] == cached[2][0]).all()
    assert cached.labels.tolist() == direct.labels.tolist()


def test_a_table_takes_the_place_of_shards():
    """The loader, the samplers and the ranks' comparison know the methods of ``Shards``."""
    from loading.rows import Rows

    names = {name for name in vars(Shards) if not name.startswith("_")}
    assert names <= {name for name in vars(Rows) if not name.startswith("_")}
    for name in ("parquet", "hf_dataset"):
        assert datasets.components[name].returns == "Rows"


# ------------------------------------------------------------------- memory


def test_kept_pages_are_bounded_and_hold_neighbours(tmp_path, monkeypatch):
    write_parquet(tmp_path / "train.parquet", image_table(40), row_group_size=10)
    rows = read("parquet", tmp_path)
    unpacked = []
    original = parquet_pages._content
    monkeypatch.setattr(
        parquet_pages, "_content", lambda *given: unpacked.append(given) or original(*given)
    )
    parquet_pages.forget_pages()
    contents(rows)
    # A dictionary and a page of values for each row group.
    assert len(unpacked) == 8
    contents(rows)
    assert len(unpacked) == 8
    monkeypatch.setattr(parquet_pages, "KEPT", 1)
    parquet_pages.forget_pages()
    unpacked.clear()
    for index in itertools.islice(itertools.cycle([0, 10, 20]), 9):
        assert rows.read(index, MOST) == png(index)
    assert len(unpacked) == 18
    assert len(parquet_pages._kept) == 1


def test_a_row_group_of_many_pages_isnt_kept_whole(tmp_path, monkeypatch):
    options = {"use_dictionary": False, "data_page_size": 1, "write_batch_size": 1}
    write_parquet(tmp_path / "train.parquet", image_table(40), row_group_size=40, **options)
    rows = read("parquet", tmp_path)
    parquet_pages.forget_pages()
    contents(rows)
    [kept] = parquet_pages._kept.values()
    assert len(kept.pages) == 40
    whole = kept.size
    monkeypatch.setattr(parquet_pages, "KEPT", whole // 4)
    parquet_pages.forget_pages()
    assert contents(rows) == [png(seed) for seed in range(40)]
    [kept] = parquet_pages._kept.values()
    assert 0 < kept.size <= whole // 4
    assert len(kept.pages) <= 10


def test_a_note_says_that_random_order_is_slow(tmp_path):
    write_parquet(tmp_path / "train.parquet", image_table(40))
    write_parquet(tmp_path / "validation.parquet", image_table(3))
    config, *_ = get_datasets(dataset_config("parquet", tmp_path))
    [note] = [note for note in config.notes if "random order" in note]
    assert note.startswith(
        "to read one image in random order, 40 are unpacked; -o DATA.SHARD_SHUFFLE 16 reads 16 row"
    )
    for more in (("DATA.SHARD_SHUFFLE", "8"), ("DATA.CACHE", str(tmp_path / "cache"))):
        config, *_ = get_datasets(dataset_config("parquet", tmp_path, *more))
        assert not [note for note in config.notes if "random order" in note]


# ------------------------------------------------------------------ refused


def test_the_note_names_as_many_row_groups_as_are_kept(tmp_path, monkeypatch):
    write_parquet(tmp_path / "train.parquet", image_table(80), row_group_size=40)
    write_parquet(tmp_path / "validation.parquet", image_table(3))
    size = read("parquet", tmp_path).chunks[0].size
    for kept, groups in ((3.5 * size, 3), (size // 2, 1)):
        monkeypatch.setattr("loading.rows.KEPT", int(kept))
        more = ("DATA.SHARD_SHUFFLE", str(groups + 1))
        config, *_ = get_datasets(dataset_config("parquet", tmp_path, *more))
        assert any(f"-o DATA.SHARD_SHUFFLE {groups} reads" in note for note in config.notes)
        more = ("DATA.SHARD_SHUFFLE", str(groups))
        config, *_ = get_datasets(dataset_config("parquet", tmp_path, *more))
        assert not [note for note in config.notes if "random order" in note]


def test_an_image_that_cant_be_is_refused(tmp_path):
    write_saved(tmp_path / "train", image_table(3))
    rows = read("hf_dataset", tmp_path)
    with pytest.raises(Unreadable, match="bytes, at most 10 are allowed"):
        rows.read(0, 10)
    [file] = (tmp_path / "train").glob("*.arrow")
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(RunError, match="the table ends early; restore"):
        contents(rows)
    table = image_table(2)
    empty = pa.array([{"bytes": png(0), "path": None}, None], table["image"].type)
    write_parquet(tmp_path / "train.parquet", table.set_column(0, "image", empty))
    with pytest.raises(Unreadable, match="its row is empty"):
        read("parquet", tmp_path).read(1, MOST)


@pytest.mark.parametrize(
    ("table", "options", "message"),
    [
        (image_table(2), {"compression": "zstd"}, "its record batches are compressed; save"),
        (image_table(2, label=[0.5, 1.5]), {}, "'label' holds double, expected whole numbers"),
        (image_table(2, label=pa.array([1, None])), {}, "row 1 has no label"),
        (image_table(2, label=["a", None]), {}, "row 1 has no label"),
        (image_table(2, label=[[1], [None]]), {}, "a list of its column 'label' has a null"),
        (
            image_table(2, label=pa.array(["a", "b"]).dictionary_encode()),
            {},
            "it holds a dictionary, expected record batches",
        ),
    ],
    ids=["compressed", "floats", "null", "no text", "null in a list", "dictionary"],
)
def test_a_saved_dataset_of_another_kind_is_one_line(table, options, message, tmp_path):
    write_saved(tmp_path / "train", table, **options)
    with pytest.raises(InputError, match=message) as caught:
        read("hf_dataset", tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_indices_files": [{"filename": "i.arrow"}]}, r"call flatten_indices\(\) before save_to"),
        ({"_data_files": []}, "it names no files next to it"),
        ({"_data_files": 3}, "it names no files next to it"),
        ({"_data_files": [{"filename": "../x.arrow"}]}, "it names no files next to it"),
        ({"_data_files": [{"filename": "x.arrow"}]}, "x.arrow: can't be read as an Arrow file"),
    ],
)
def test_a_wrong_state_is_one_line(change, message, tmp_path):
    write_saved(tmp_path / "train", image_table(2))
    state = tmp_path / "train" / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | change))
    with pytest.raises(InputError, match=message):
        read("hf_dataset", tmp_path)


@pytest.mark.parametrize(
    ("table", "options", "message"),
    [
        (image_table(2, label=[0.5, 1.5]), {}, "its column 'label' holds values of DOUBLE"),
        (image_table(2, label=pa.array([1, None])), {}, "row 1 has no label$"),
        (image_table(2, label=["a", None]), {}, "row 1 has no label$"),
        (image_table(2, label=[[[1]], [[2]]]), {}, "'label' holds lists of lists"),
        (image_table(2, label=[{"a": 1, "b": 2}] * 2), {}, "'label' holds structures"),
        (image_table(2, label=[-1, -1]), {}, "label -1 is outside 0..2; for images without labels"),
        (
            pa.Table.from_arrays([image_table(1)["image"], [0], [1]], ["image", "label", "label"]),
            {},
            "it has the column 'label' twice",
        ),
        (image_table(0), {}, "it has no rows"),
        (
            image_table(9),
            {"use_dictionary": False, "column_encoding": {"label": "DELTA_BINARY_PACKED"}},
            "encoding number 5 isn't supported",
        ),
    ],
    ids=["floats", "null", "no text", "nested", "structure", "-1", "twice", "empty", "encoding"],
)
def test_a_table_of_another_kind_is_one_line(table, options, message, tmp_path):
    write_parquet(tmp_path / "train.parquet", table, **options)
    with pytest.raises(InputError, match=message) as caught:
        read("parquet", tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", READERS)
def test_tables_and_row_groups_without_rows_are_passed_over(kind, tmp_path):
    table = image_table(6)
    write(kind, tmp_path, "train", table[:0], table, table[:0])
    rows = read(kind, tmp_path)
    assert (contents(rows), rows.labels.tolist()) == ([*map(png, range(6))], [0, 1, 2, 0, 1, 2])
    if kind == "parquet":
        with pa.parquet.ParquetWriter(tmp_path / "one.parquet", table.schema) as writer:
            for part in (table[:0], table[:4], table[4:4], table[4:]):
                writer.write_table(part)
        assert pa.parquet.read_metadata(tmp_path / "one.parquet").num_row_groups == 4
        rows = read(kind, tmp_path / "one.parquet", alone=True)
        assert (contents(rows), rows.labels.tolist()) == ([*map(png, range(6))], [0, 1, 2, 0, 1, 2])


@pytest.mark.parametrize("kind", READERS)
def test_lists_of_a_fixed_length_and_null_lists_are_sets(kind, tmp_path):
    lists = pa.array([[2, 0], None, [1, 1]], pa.list_(pa.int64(), 2))
    write(kind, tmp_path, "train", image_table(3, label=lists))
    labels = read(kind, tmp_path).labels
    assert [labels.of(index).tolist() for index in range(3)] == [[0, 2], [], [1]]
    # A null in the middle may have values, which don't count.
    mask = pa.array([False, True, False])
    lists = pa.ListArray.from_arrays([0, 1, 3, 4], pa.array([0, 1, 1, 2]), mask=mask)
    write(kind, tmp_path, "train", image_table(3, label=lists))
    labels = read(kind, tmp_path).labels
    assert [labels.of(index).tolist() for index in range(3)] == [[0], [], [2]]


@pytest.mark.parametrize(
    ("second", "parquet_message", "saved_message"),
    [
        (
            image_table(2, features={"image": {"_type": "Image"}, "label": {
                "_type": "ClassLabel", "names": NAMES[::-1]}}),
            r"its classes are tulip, aster, rose \(3\), those of .*00000-of-00002.parquet are rose",
            None,
        ),
        (image_table(2, label=["rose", "aster"]), "has another type than in", "aren't those of"),
        (image_table(2, label=[[0], [1]]), "has another type than in", "aren't those of"),
        (image_table(2).drop(["label"]), "'label' is missing, unlike in the first table", "aren't those of"),
        (
            image_table(2).set_column(0, "image", pa.array([1, 2])),
            "'image' isn't that of the first table",
            "aren't those of",
        ),
    ],
    ids=["classes", "texts", "lists", "no labels", "numbers as images"],
)  # fmt: skip
def test_tables_that_differ_are_one_line(second, parquet_message, saved_message, tmp_path):
    """Otherwise, labels would be those of other images or classes."""
    for kind, message in (("parquet", parquet_message), ("hf_dataset", saved_message)):
        if message:
            write(kind, tmp_path / kind, "train", image_table(2), second)
            with pytest.raises(InputError, match=message):
                read(kind, tmp_path / kind)


@pytest.mark.parametrize("kind", READERS)
def test_classes_in_another_order_are_refused(kind, tmp_path):
    other = {"_type": "ClassLabel", "names": NAMES[::-1]}
    write(kind, tmp_path, "train", image_table(3))
    features = {"image": {"_type": "Image"}, "label": other}
    write(kind, tmp_path, "validation", image_table(3, features=features))
    with pytest.raises(InputError, match=r"rose, aster, tulip \(3\), the validation images tulip,"):
        get_datasets(dataset_config(kind, tmp_path))


def test_one_image_without_bytes_isnt_taken_for_a_file(tmp_path):
    table = image_table(3)
    images = pa.array([{"bytes": None, "path": "0.png"}, *table["image"].to_pylist()[1:]])
    images = images.cast(table["image"].type)
    write_parquet(tmp_path / "train.parquet", table.set_column(0, "image", images))
    rows = read("parquet", tmp_path)
    assert [rows.read(index, MOST) for index in (1, 2)] == [png(1), png(2)]
    with pytest.raises(Unreadable, match="its row is empty"):
        rows.read(0, MOST)


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path):
    """Zeros become a thousandth."""
    table = pa.table({"image": pa.array([bytes(65 << 20)], pa.binary()), "label": [0]})
    write_parquet(tmp_path / "train.parquet", table, compression="zstd")
    rows = read("parquet", tmp_path)
    with pytest.raises(Unreadable, match="would take more than 64 MiB and more than three times"):
        rows.read(0, 1 << 30)


@pytest.mark.parametrize("kind", READERS)
def test_without_pyarrow_the_command_that_installs_it_is_named(kind, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(InputError, match=f"DATASET {kind} needs pyarrow; pip install pyarrow=="):
        read(kind, tmp_path)


# ------------------------------------------------------------------ batches


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The same images in each form: (dataset, path)."""
    root = tmp_path_factory.mktemp("sources")
    for kind in READERS:
        write(kind, root / kind, "train", image_table(13), image_table(11, first=13))
        write(kind, root / kind, "validation", image_table(7, first=24))
    command = [
        *(sys.executable, str(ROOT / "tools" / "make_shards.py"), "-dataset=parquet"),
        *("-data_path=parquet", "-output=shards", "--shard_size=5", "--workers=2"),
    ]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("shards: 24 train images and 7 val images in 7 shards, ")
    return {kind: root / kind for kind in (*READERS, "shards")}


def batches(kind, path, *options):
    config, *pair = get_datasets(dataset_config(kind, path, "DATA.BATCH_SIZE", "4", *options))
    found = []
    # As they come to other processes.
    for mode, dataset in zip(("train", "val"), pickle.loads(pickle.dumps(pair)), strict=True):
        for rank in range(2):
            loader = get_dataloader(config, dataset, mode, rank=rank, ranks=2)
            found += [each.numpy().tobytes() for batch in loader for each in batch.values()]
    return found


@pytest.mark.smoke
def test_batches_are_those_of_shards_for_any_number_of_workers(sources):
    options = ("TRAIN.AUTO_AUGMENT", "rand-m9", "DATA.BATCH_SIZE_EVAL", "3")
    expected = batches("shards", sources["shards"], *options)
    # Images and labels: three steps of each rank; 4 + 3 images by threes.
    assert len(expected) == 2 * (2 * 3 + 2 + 1)
    for kind in READERS:
        assert batches(kind, sources[kind], *options) == expected
        assert batches(kind, sources[kind], *options, "DATA.NUM_WORKERS", "2") == expected


def test_shard_shuffle_reads_some_row_groups_at_a_time(sources):
    mixed = ("DATA.SHARD_SHUFFLE", "2")
    config = dataset_config("parquet", sources["parquet"], "DATA.BATCH_SIZE", "4", *mixed)
    _, train, _ = get_datasets(config)
    # Row groups of four images, but for the last of each file.
    assert train.shards.shard.tolist() == np.repeat(range(7), [4, 4, 4, 1, 4, 4, 3]).tolist()
    loader = get_dataloader(config, train)
    order = [index for batch in loader.batch_sampler for _, index, _ in batch]
    assert len(set(train.shards.shard[order[:4]])) <= 2
    assert sorted(order) == list(range(24))


def test_ranks_with_other_tables_differ(sources, tmp_path):
    """What the ranks compare is a hash of the names, the labels and the sizes."""
    from training.equal_ranks import _content

    write("parquet", tmp_path, "train", image_table(13), image_table(11, first=14))
    _, train, _ = get_datasets(dataset_config("parquet", sources["parquet"]))
    other = get_dataset(dataset_config("parquet", tmp_path), "train")
    hashes = []
    for dataset in (train, other):
        content = _content(dataset, dataset.relative_names(), 0, 24)
        hashes.append([np.asarray(part).tobytes() for part in content])
    assert hashes[0] != hashes[1]


@pytest.mark.parametrize("kind", READERS)
def test_the_check_reads_tables(kind, sources, capsys):
    from tools.check_dataset import check_images, screen

    text = " ".join(screen(check_images(dataset_config(kind, sources[kind]), workers=1)).split())
    assert "images 24 7 classes 3 3 images per class 7 to 9" in text
    assert "usable, " in text
