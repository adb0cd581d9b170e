"""The table of wrong labels that a person edits, and what applying it does to a dataset."""

import io
import os

import numpy as np
import pytest
from PIL import Image

from errors import InputError
from loading.label_edits import COLUMNS, SEVERAL_COLUMNS, apply_table, read_table, write_table
from loading.label_sets import LabelSets
from loading.multilabel import multilabel_csv
from loading.sources import Files, Split, class_folders, imagenet2012

HEAD = ",".join(COLUMNS)
SEVERAL_HEAD = ",".join(SEVERAL_COLUMNS)


@pytest.fixture
def data(tmp_path):
    """Class folders: two cats and two dogs to train on, one dog for validation."""
    for name in (
        "train/cat/1.png",
        "train/cat/2.png",
        "train/dog/3.png",
        "train/dog/4,5.png",
        "val/dog/6.png",
    ):
        file = tmp_path / "data" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (4, 4)).save(file)
    return tmp_path / "data"


def parts_of(data):
    return {mode: class_folders(Split(mode), data_path=str(data)) for mode in ("train", "val")}


def edited(data, *lines, head=HEAD, parts=None):
    table = data.parent / "edits.csv"
    text = "\n".join([head, *lines]) + "\n"
    table.write_bytes(os.fsencode(text))
    return apply_table(table, parts or parts_of(data), str(data))


@pytest.mark.smoke
def test_labels_are_changed_and_images_removed(data):
    parts, counts = edited(
        data,
        "train/cat/1.png,cat,dog,0.1,relabel",
        "train/cat/2.png,cat,dog,0.2,keep",
        '"train/dog/4,5.png","dog","cat",0.3, Remove ',
        "",
        "val/dog/6.png,dog,cat,0.4,relabel",
    )
    assert counts == {"keep": 1, "relabel": 2, "remove": 1}
    assert list(parts["train"].paths) == ["train/cat/1.png", "train/cat/2.png", "train/dog/3.png"]
    assert parts["train"].labels.tolist() == [1, 0, 1]
    assert list(parts["val"].paths) == ["val/dog/6.png"]
    assert parts["val"].labels.tolist() == [0]
    # The reader's own result stays as it is.
    assert parts_of(data)["train"].labels.tolist() == [0, 0, 1, 1]


def test_a_table_without_rows_changes_nothing_and_columns_may_be_moved(data):
    parts, counts = edited(data)
    assert counts == {"keep": 0, "relabel": 0, "remove": 0}
    assert parts["train"].labels.tolist() == [0, 0, 1, 1]
    parts, _ = edited(
        data,
        "mine,relabel,0.1,dog,cat,train/cat/1.png",
        head="\ufeffNote,Action,score,suggested_label,label,image",
    )
    assert parts["train"].labels.tolist() == [1, 0, 1, 1]


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["train/cat/9.png,cat,dog,0,keep"], "its line 2 names the image 'train/cat/9.png', which the dataset lacks"),
        (["", "train/cat/1.png,cat,bird,0,relabel"], "its line 3 names the class 'bird', which the dataset lacks"),
        (["train/cat/1.png,cat,Dog,0,relabel"], "'Dog' and 'dog' differ only in upper and lower case"),
        (["train/cat/1.png,cat,,0,relabel"], "its line 2 names the class ''"),
        (["train/cat/1.png,dog,cat,0,keep"], "isn't about the image's current label 'cat'"),
        (["train/cat/1.png,cat,dog,0,delete"], "has the action 'delete', expected one of keep, relabel, remove"),
        (["train/cat/1.png,cat,dog,0,"], "has the action ''"),
        (["train/cat/1.png,cat,dog,0,keep", "train/cat/1.png,cat,dog,0,remove"], "its lines 2 and 3 name the same image"),
        (["train/cat/1.png,cat,dog,0"], "its line 2 has 4 cells, the header has 5"),
        (['train/cat/1.png,"cat,dog,0,keep'], "isn't a valid row of CSV"),
        (["train/cat/" + "x" * 30_000], "its line 2 has more than 20000 bytes"),
        (["train/cat/\udcff\udce9.png,cat,dog,0,keep"], "its line 2 isn't UTF-8"),
        (["val/dog/6.png,dog,dog,0,remove"], "it removes all 1 val images"),
    ],
    ids=map(str, range(13)),
)  # fmt: skip
def test_a_wrong_row_is_one_line(data, lines, message):
    with pytest.raises(InputError) as caught:
        edited(data, *lines)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "edits.csv" in str(caught.value)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ("image,label,score", "its header lacks suggested_label, action"),
        ("", "its header lacks image, label"),
        (HEAD.replace(",", ";"), "it has semicolons instead of commas"),
        (HEAD + ",action", "it has the column action twice"),
        (SEVERAL_HEAD, "it is a table of images with several labels each"),
    ],
)
def test_a_wrong_header_is_one_line(data, head, message):
    with pytest.raises(InputError) as caught:
        edited(data, head=head)
    assert message in str(caught.value)


def test_a_missing_table_a_folder_and_utf16_are_one_line(data):
    for path, message in ((data / "none.csv", "No such file"), (data, "it isn't a regular file")):
        with pytest.raises(InputError, match=message):
            apply_table(path, parts_of(data), str(data))
    wide = data.parent / "wide.csv"
    wide.write_text(HEAD, encoding="utf-16")
    with pytest.raises(InputError, match="it is UTF-16; save it as UTF-8"):
        apply_table(wide, parts_of(data), str(data))


def test_names_that_are_not_utf8_come_back_as_they_are(data):
    odd = os.fsdecode(b"train/cat/\xff.png")
    Image.new("L", (4, 4)).save(data / "train" / "cat" / "1.tmp.png")
    os.rename(data / "train/cat/1.tmp.png", os.path.join(os.fsencode(data), os.fsencode(odd)))
    file = io.BytesIO()
    rows = [(odd, "cat", "dog", 0.5, "relabel"), ("=1.png", "-a", "b", 0.25, "keep")]
    write_table(file, rows, several=False)
    table = data.parent / "table.csv"
    table.write_bytes(file.getvalue())
    read = read_table(table, several=False)
    assert list(read) == [odd, "=1.png"]
    assert read["=1.png"][0].label == "-a"
    table.write_bytes(b"\n".join(file.getvalue().splitlines()[:2]))
    parts, _ = apply_table(table, parts_of(data), str(data))
    assert parts["train"].labels[list(parts["train"].paths).index(odd)] == 1


def test_classes_without_names_are_numbers(data):
    (data / "train_list.txt").write_text("train/cat/1.png 0\ntrain/dog/3.png 2\n")
    part = imagenet2012(Split("train"), data_path=str(data))
    assert not part.classes
    parts, _ = edited(data, "train/cat/1.png,0,2,0,relabel", parts={"train": part})
    assert parts["train"].labels.tolist() == [2, 2]
    with pytest.raises(
        InputError, match="names the class '3', which the dataset lacks; its classes"
    ):
        edited(data, "train/cat/1.png,0,3,0,relabel", parts={"train": part})


def test_absolute_paths_of_a_list_are_relative_in_the_table(data):
    part = Files(data, [str(data / "train/cat/1.png")], np.array([0]), ["cat", "dog"])
    parts, _ = edited(data, "train/cat/1.png,cat,dog,0,relabel", parts={"train": part})
    assert parts["train"].labels.tolist() == [1]


@pytest.mark.smoke
def test_several_labels_get_and_lose_classes(data):
    (data / "train.csv").write_text(
        "image,fur,tail,wet\ntrain/cat/1.png,1,0,0\ntrain/cat/2.png,0,1,1\ntrain/dog/3.png,0,0,0\n"
    )
    part = multilabel_csv(Split("train"), data_path=str(data))
    parts, counts = edited(
        data,
        "train/cat/1.png,tail,missing,0.1,relabel",
        "train/cat/1.png,fur,superfluous,0.2,relabel",
        "train/cat/2.png,wet,superfluous,0.3,keep",
        "train/dog/3.png,wet,missing,0.4,remove",
        head=SEVERAL_HEAD,
        parts={"train": part},
    )
    assert counts == {"keep": 1, "relabel": 2, "remove": 1}
    labels = parts["train"].labels
    assert isinstance(labels, LabelSets)
    assert [labels.of(place).tolist() for place in range(2)] == [[1], [1, 2]]
    assert len(labels) == 2
    for row, message in {
        "train/cat/1.png,fur,missing,0,relabel": "current labels: it has the class 'fur'",
        "train/cat/1.png,tail,superfluous,0,keep": "current labels: it hasn't the class 'tail'",
        "train/cat/1.png,tail,wrong,0,keep": "the problem 'wrong', expected missing or superfluous",
        "train/cat/1.png,ears,missing,0,keep": "names the class 'ears'",
    }.items():
        with pytest.raises(InputError, match=message):
            edited(data, row, head=SEVERAL_HEAD, parts={"train": part})
    twice = ["train/cat/1.png,tail,missing,0,keep"] * 2
    with pytest.raises(InputError, match="name the same image .* with the class 'tail'"):
        edited(data, *twice, head=SEVERAL_HEAD, parts={"train": part})
    with pytest.raises(InputError, match="a table of images with one label each"):
        edited(data, parts={"train": part})
