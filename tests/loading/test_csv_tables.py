"""CSV tables with columns of any names."""

import numpy as np
import pytest
from PIL import Image
from support.dataset_files import dataset_config

from datasets import get_datasets
from errors import InputError
from loading.csv_tables import csv_tables
from loading.label_sets import LabelSets
from loading.sources import Split


@pytest.fixture
def root(tmp_path):
    for folder in ("a", "b c"):
        (tmp_path / folder).mkdir()
        for name in range(4):
            Image.new("L", (4, 4), 40 * name).save(tmp_path / folder / f"{name}.png")
    return tmp_path


def read(path, mode="train", alone=False, **keys):
    given = {
        "image_column": "auto",
        "label_column": "auto",
        "label_separator": None,
        "split_column": "auto",
    }
    return csv_tables(Split(mode, alone=alone), data_path=str(path), **given | keys)


def labels(files):
    if isinstance(files.labels, LabelSets):
        return [files.labels.of(index).tolist() for index in range(len(files.labels))]
    return files.labels.tolist()


@pytest.mark.smoke
@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_columns_are_recognised_by_their_names(root, separator):
    train = ["No,Image Path,size,Class", "1,a/0.png,4,dog", '2,"b c/1.png",4,"cat"', ""]
    val = ["Class,Image Path", "dog,a/2.png", "cat, a/3.png"]
    for name, lines in (("train.csv", train), ("val.csv", val)):
        text = "\r\n".join(lines).replace(",", separator)
        (root / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
    train = read(root)
    val = read(root, "val")
    assert (list(train.paths), labels(train)) == (["a/0.png", "b c/1.png"], [1, 0])
    assert (list(val.paths), labels(val)) == (["a/2.png", "a/3.png"], [1, 0])
    assert train.classes == val.classes == ["cat", "dog"]
    assert train.root == root


@pytest.mark.parametrize(
    ("text", "keys", "paths", "found", "classes"),
    [
        # Numbers are labels.
        ("file,label\na/0.png,3\na/1.png,0\n", {}, ["a/0.png", "a/1.png"], [3, 0], []),
        # Two columns of known names, one of which holds files.
        ("id,image,path\n1,x,a/0.png\n", {"label_column": "id"}, ["a/0.png"], [1], []),
        # No known name, but one column holds files; the only other one is the label's.
        ("what,where\nred,a/0.png\n", {}, ["a/0.png"], [0], ["red"]),
        ("x,y,z\n5,a/0.png,blue\n", {"label_column": "z"}, ["a/0.png"], [0], ["blue"]),
        # One column of paths alone.
        ("file\na/0.png\n", {}, ["a/0.png"], None, []),
        ("file,label\na/0.png,1\n", {"label_column": None}, ["a/0.png"], None, []),
        # Several labels.
        (
            "file,cat,dog,note\na/0.png,1,0,x\na/1.png,0,0,x\na/2.png,1.0,1,x\n",
            {"label_column": ["dog", "cat"]},
            ["a/0.png", "a/1.png", "a/2.png"],
            [[1], [], [0, 1]],
            ["dog", "cat"],
        ),
        (
            "file,tags\na/0.png,b  a b\na/1.png,\n",
            {"label_separator": "space"},
            ["a/0.png", "a/1.png"],
            [[0, 1], []],
            ["a", "b"],
        ),
        (
            'file,tags\na/0.png,"fat cat, dog"\n',
            {"label_separator": "comma"},
            ["a/0.png"],
            [[0, 1]],
            ["dog", "fat cat"],
        ),
        ("file,tags\na/0.png,7|2\n", {"label_separator": "bar"}, ["a/0.png"], [[2, 7]], []),
    ],
)
def test_cells_are_labels_names_or_several_of_them(root, text, keys, paths, found, classes):
    (root / "train.csv").write_text(text)
    files = read(root, **keys)
    if classes == ["dog", "fat cat"]:
        assert labels(files) == [[0, 1]]
    assert (list(files.paths), files.classes) == (paths, classes)
    assert files.labels is None if found is None else labels(files) == found


def test_names_of_classes_txt_have_its_order(root):
    (root / "train.csv").write_text("file,label\na/0.png,dog\na/1.png,cat\n")
    (root / "classes.txt").write_text("dog\nemu\ncat\n")
    files = read(root)
    assert (labels(files), files.classes) == ([0, 2], ["dog", "emu", "cat"])
    (root / "train.csv").write_text("file,label\na/0.png,2\n")
    assert labels(read(root)) == [2]
    (root / "train.csv").write_text("file,label\na/0.png,3\n")
    with pytest.raises(InputError, match=r"its label 3 is outside 0\.\.2"):
        read(root)
    # Names that are digits are names.
    (root / "classes.txt").write_text("3\n1\n2\n")
    assert labels(read(root)) == [0]


def test_a_split_column_has_the_parts(root):
    rows = ["a/0.png,z,train", "a/1.png,y,Validation", "a/2.png,x,test", "a/3.png,y,training"]
    (root / "all.csv").write_text("\n".join(["path,label,Split", *rows]))
    for path in (root, root / "all.csv"):
        train = read(path)
        assert (list(train.paths), train.classes) == (["a/0.png", "a/3.png"], ["y", "z"])
        val = read(path, "val")
        assert (list(val.paths), labels(val), val.classes) == (["a/1.png"], [0], ["y", "z"])
    assert len(read(root, "val", split_column=None, label_column="label").paths) == 4
    text = (root / "all.csv").read_text()
    (root / "all.csv").write_text(text.replace("Split", "part").replace("Validation", "other"))
    with pytest.raises(InputError, match="no row is an image for validation"):
        read(root, "val", split_column="part")


def test_one_table_is_evaluated_or_split(root):
    (root / "all.csv").write_text(
        "path,label\n"
        + "".join(f"{folder}/{i}.png,{folder}\n" for folder in ("a", "b c") for i in range(4))
    )
    with pytest.raises(InputError, match="DATA.VAL_SPLIT 0.1 takes a tenth"):
        read(root)
    assert len(read(root, "val").paths) == len(read(root, alone=True).paths) == 8
    for path in (root, root / "all.csv"):
        config = dataset_config("csv", path, "DATA.VAL_SPLIT", "0.25")
        _, train, val = get_datasets(config)
        assert (len(train), len(val), train.classes) == (6, 2, ["a", "b c"])
        assert sorted(np.concatenate([train.labels, val.labels])) == [0] * 4 + [1] * 4
    (root / "all.csv").rename(root / "train.csv")
    with pytest.raises(InputError, match="or add val.csv"):
        read(root, "val")


def test_metadata_of_imagefolder_is_relative_to_its_folder(root):
    for part, folder in (("train", "a"), ("validation", "b c")):
        (root / folder).rename(root / part)
        (root / part / "metadata.csv").write_text("file_name,label\n0.png,u\n1.png,v\n")
    config, train, val = get_datasets(dataset_config("csv", root))
    assert [train.path(1), val.path(0)] == [f"{root}/train/1.png", f"{root}/validation/0.png"]
    assert (train.classes, val.labels.tolist()) == (["u", "v"], [0, 1])
    assert config.MODEL.NUM_CLASSES == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a/0.png,cat\n", "its first line is an image, not a header; add a header such as"),
        ("", "it is empty; expected a header such as image,label"),
        ("file,split\na/0.png,x\n", "no row .* for training; expected train or training in its"),
        ("file,label\na/0.png,0\na/1.png,-1\n", r"its label -1 is outside 0\.\.9999999; for im"),
        ("file,label\na/0.png,0.0\na/1.png,10.\n", "label 0.0 is a decimal number, expected"),
        ("file,label\na/0.png\n", "line 2: expected 2 cells, as in the header; found 1"),
        ("file,label\na/0.png,1\n\n,1\n", "line 4: its column 'file' is empty"),
        ("file,label\na/0.png,\n", "line 2: its label is '', expected a class's name"),
        ("file,label\na/9.png,1\n", "1 of 1 files are missing, the first is .*a/9.png"),
        ("file,label\n", "no row is an image for training"),
        ("file,file\na/0.png,1\n", "it has the column 'file' twice"),
        ("file,class,target\na/0.png,1,2\n", "several columns may hold the labels: class, target"),
        (
            "file,x,y\na/0.png,1,2\n",
            "no column is known to hold the labels; set DATA.LABEL_COLUMN to",
        ),
        (
            "a,b\n1,2\n",
            "no column is known to hold the images; set DATA.IMAGE_COLUMN to one of a, b",
        ),
        ("file,label\na\0.png,1\n", "line 2: its path contains a NUL character"),
        ('file,label\n"a/0.png,1\n', "line 2: unexpected end of data"),
        ("file,label\na/0.png,\udcff\n", "line 2: its label is"),
    ],
)
def test_a_wrong_table_is_one_line(root, text, message):
    (root / "train.csv").write_text(text, errors="surrogateescape")
    with pytest.raises(InputError, match=message) as caught:
        read(root)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(root / "train.csv"))


def test_a_cell_has_several_lines_and_a_column_no_name(root):
    """As spreadsheets write texts, and columns beyond the last one."""
    rows = ["file,label,note,,", 'a/0.png,u,"one', "", 'two ""three""",,', 'a/1.png,v,"",,']
    (root / "train.csv").write_bytes("\r\n".join(rows).encode())
    files = read(root)
    assert (list(files.paths), labels(files)) == (["a/0.png", "a/1.png"], [0, 1])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"image_column": "fil"}, "no column 'fil' .* did you mean file"),
        ({"label_column": ["cat", "dag"]}, "no column 'dag' .* did you mean dog"),
        ({"label_column": ["cat", "cat"]}, "it has the column 'cat' twice"),
        (
            {"label_column": ["cat", "note"]},
            "line 2: expected 0 or 1 in the column 'note'; found 'x'",
        ),
        ({"split_column": "part"}, "no column 'part'"),
    ],
)
def test_keys_that_name_no_column_are_one_line(root, keys, message):
    (root / "train.csv").write_text("file,cat,dog,note\na/0.png,1,0,x\n")
    with pytest.raises(InputError, match=message):
        read(root, **keys)


def test_validation_labels_are_of_the_training_tables_kind(root):
    (root / "train.csv").write_text("file,label\na/0.png,1\na/1.png,0\n")
    (root / "val.csv").write_text("file,label\na/2.png,cat\n")
    with pytest.raises(InputError, match="'cat' isn't a number, but the training labels are"):
        read(root, "val")
    (root / "train.csv").write_text("file,label\na/0.png,1\na/1.png,b\n")
    (root / "val.csv").write_text("file,label\na/2.png,1\n")
    assert (labels(read(root, "val")), read(root, "val").classes) == ([0], ["1", "b"])


def test_several_labels_need_their_task(root):
    (root / "train.csv").write_text("file,tags\na/0.png,x y\na/1.png,y\n")
    (root / "val.csv").write_text("file,tags\na/2.png,x\n")
    separated = ("DATA.LABEL_SEPARATOR", "space")
    with pytest.raises(
        InputError, match="TASK is classification, but the images of 'csv' have sev"
    ):
        get_datasets(dataset_config("csv", root, *separated))
    _, train, val = get_datasets(dataset_config("csv", root, *separated, "TASK", "multilabel"))
    assert [train.labels[0].tolist(), val.labels[0].tolist()] == [[1, 1], [1, 0]]


def test_a_file_of_another_kind_is_refused_as_a_folder(root):
    (root / "all.txt").write_text("file,label\n")
    with pytest.raises(InputError, match="which is a file; give the folder that holds the dataset"):
        get_datasets(dataset_config("csv", root / "all.txt"))
    with pytest.raises(InputError, match="which is a file; give the folder that holds the dataset"):
        get_datasets(dataset_config("folder", root / "a" / "0.png"))
