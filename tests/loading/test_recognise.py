"""What a dataset's folder is recognised as: every format, near misses, and what is no dataset."""

import json
import os
from pathlib import Path

import pytest
from conftest import write_images
from support.table_files import image_table, write_parquet, write_saved

from errors import InputError
from loading.layout import validation_files
from loading.recognise import Layout, count_training_images, recognise
from settings.registry import datasets

LIST = "a/b c.jpg 3\n\na/d.jpg 0\n"


def make(folder, entries):
    """Creates files (with their text) and, for names that end in "/", folders."""
    for name, text in entries.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("/"):
            path.mkdir(exist_ok=True)
        else:
            path.write_text(text)


def empty(*names):
    return dict.fromkeys(names, "")


@pytest.mark.parametrize(
    ("entries", "dataset"),
    [
        (empty("train/cat/1.jpg", "train/dog/1.JPG", "val/cat/1.jpg"), "folder"),
        (empty("training/cat/1.jpg", "validation/cat/1.jpg"), "folder"),
        (empty("train/cat/1.jpg", "train/dog/1.jpg", "valid/cat/1.jpg"), "folder"),
        (empty("val/cat/deep/1.png", "val/dog/1.png"), "folder"),
        (empty("cat/1.jpg", "dog/1.jpg", "Thumbs.db"), "folder"),
        (empty("valid/1.jpg", "invalid/1.jpg"), "folder"),
        (empty("train/cat/1.jpg"), "folder"),
        (empty("1.jpg", "2.png"), "images"),
        (empty("train/1.jpg", "val/2.jpg"), "images"),
        (empty("train/1.jpg"), "images"),
        (empty("images/1.jpg", "masks/1.png"), "masks"),
        (empty("images/train/1.jpg", "annotations/train/1.png"), "masks"),
        (empty("train/images/1.jpg", "train/masks/1.png"), "masks"),
        (empty("images/training/ADE_1.jpg", "annotations/training/ADE_1.png"), "ade20k"),
        (empty("leftImg8bit/train/a/1.png", "gtFine/train/a/1.png"), "cityscapes"),
        (empty("JPEGImages/1.jpg", "SegmentationClassContext/1.png"), "pascal_context"),
        (empty("images/train2017/1.jpg", "annotations/train2017/1.png"), "coco_stuff"),
        (
            empty("images/training/1.tif", "annotations/training/1_noBoundary.png"),
            "vaihingen",
        ),
        (empty("train/images/1.jpg", "train/masks_12/1_mask.png"), "trans10k"),
        (empty("cifar-10-python.tar.gz"), "cifar10"),
        (empty("cifar-10-batches-py/data_batch_1"), "cifar10"),
        (empty("cifar-100-python/train"), "cifar100"),
        (empty("train-0000.tar", "val-0000.tar"), "shards"),
        ({"train_list.txt": LIST}, "imagenet2012"),
        ({"val_list.txt": LIST}, "imagenet2012"),
        ({"train_list.txt": "a.jpg\t3\nb.jpg\t4"}, "imagenet2012"),
        ({"train_list.txt": "a.jpg\t3\nb.jpg\t4,17\n"}, "multilabel_list"),
        ({"train_list.txt": "a.jpg\t3\nb.jpg\t\n"}, "multilabel_list"),
        ({"train_list.txt": "a.jpg\t0,1\nb.jpg\t1,1\n"}, "multilabel_list"),
        ({"train_list.txt": "a b.jpg\nc.PNG\n"}, "images_list"),
        ({"train_list.txt": "a.jpg b.png\nc.jpg d.png\n"}, "masks_list"),
        ({"train_list.txt": "a b.jpg\tb.png\nc.jpg\td.png\n"}, "masks_list"),
        ({"train.csv": "image,cat,dog\na.jpg,1,0\n"}, "multilabel_csv"),
        ({"train.csv": "image,cat\na.jpg,1\n"}, "multilabel_csv"),
        ({"train.csv": "image,label\na.jpg,1\n"}, "csv"),
        ({"train.csv": "image,cat,dog\na.jpg,1,3\n"}, "csv"),
        ({"valid.tsv": "id\tlabel\n7\tcat\n"}, "csv"),
        ({"table.csv": "Image Path;label\na.jpg;cat\n", "a.jpg": ""}, "csv"),
        (empty("train/metadata.csv"), "csv"),
        # A table that names no images is none of the dataset.
        ({"notes.csv": "day,weather\n1,2\n", "1.jpg": ""}, "images"),
        (empty("train-00000-of-00001.parquet"), "parquet"),
        (empty("data/train-00000-of-00001.parquet", "README.md"), "parquet"),
        (empty("state.json", "dataset_info.json"), "hf_dataset"),
        (empty("train/state.json", "dataset_dict.json"), "hf_dataset"),
        (empty("annotations/instances_train2017.json", "train2017/1.jpg"), "coco_multilabel"),
        (
            empty("Annotations/1.xml", "ImageSets/Main/train.txt", "JPEGImages/1.jpg"),
            "voc_multilabel",
        ),
        # A list comes before folders: it says which of their images count.
        ({"train_list.txt": LIST, "cat/1.jpg": "", "dog/1.jpg": ""}, "imagenet2012"),
    ],
)
def test_each_format_is_recognised(tmp_path, entries, dataset):
    make(tmp_path, entries)
    layout = recognise(str(tmp_path))
    assert (layout.dataset, layout.path) == (dataset, str(tmp_path))
    assert dataset in datasets.components
    assert layout.reason


def test_a_table_may_be_named_itself(tmp_path):
    for name, dataset in (("a.csv", "csv"), ("b.TSV", "csv"), ("c.parquet", "parquet")):
        (tmp_path / name).touch()
        assert recognise(str(tmp_path / name)) == Layout(
            dataset, str(tmp_path / name), "it is a table"
        )


def test_rows_of_tables_are_counted(tmp_path):
    features = {"image": {"_type": "Image"}}
    write_parquet(tmp_path / "p/data/train-0.parquet", image_table(3))
    write_parquet(tmp_path / "p/data/train-1.parquet", image_table(2))
    write_parquet(tmp_path / "p/data/validation-0.parquet", image_table(1))
    write_saved(tmp_path / "s/train", image_table(3, features=features))
    for folder, count in (("p", 5), ("s", 9)):
        layout = recognise(str(tmp_path / folder))
        assert count_training_images(layout, 9) == count
    info = tmp_path / "s/train/dataset_info.json"
    info.write_text(json.dumps({"features": features, "splits": {"train": {"num_examples": 3}}}))
    assert count_training_images(recognise(str(tmp_path / "s")), 9) == 3
    assert count_training_images(recognise(str(tmp_path / "s")), 2) == 2
    (tmp_path / "t.csv").write_text("image,label\na.jpg,x\nb.jpg,y\n")
    assert count_training_images(recognise(str(tmp_path / "t.csv")), 9) == 2


def test_the_only_folder_in_a_folder_is_taken(tmp_path):
    make(tmp_path, empty("archive/flowers/daisy/1.jpg", "archive/flowers/rose/1.jpg", "__MACOSX/x"))
    assert recognise(str(tmp_path)) == Layout(
        "folder",
        str(tmp_path / "archive/flowers"),
        "there is a folder of images for each class",
    )
    # What describes the data may be beside it, as on the Hub.
    make(tmp_path / "hub", empty("README.md", "LICENSE", "plain_text/train-0.parquet"))
    assert recognise(str(tmp_path / "hub"))[:2] == ("parquet", str(tmp_path / "hub/plain_text"))
    # A single folder of images is no class: there is nothing to tell apart.
    make(tmp_path / "one", empty("photos/1.jpg"))
    assert recognise(str(tmp_path / "one"))[:2] == ("images", str(tmp_path / "one/photos"))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (empty("notes.txt"), "contains the file notes.txt: no dataset was recognised in it;"),
        (empty("a/b/c/d/e/f/1.jpg", "a/b/c/d/e/g/1.jpg"), "no dataset was recognised"),
        (empty("1.jpg", "cat/2.jpg"), "pass -dataset=folder if its folders are classes, or"),
        (empty("train-images-idx3-ubyte.gz"), "pass -dataset=mnist or -dataset=fashion_mnist"),
        ({"train_list.txt": "\n"}, "train_list.txt: the list is empty"),
        ({"train_list.txt": "a.jpg\nb.jpg c.png\n"}, "pass -dataset=masks_list or"),
        (empty("images/1.jpg", "labels/1.txt"), "contains labels/*.txt, the boxes of objects as"),
        (empty("train/images/1.jpg", "train/labels/1.txt"), "contains */labels/*.txt, the boxes"),
        (empty("img/1.jpg", "ann/1.png"), "look like images and their masks; name the folders"),
        (empty("JPEGImages/1.jpg", "SegmentationClass/1.png"), "look like images and their masks"),
        (
            empty("00000.tar", "00001.tar"),
            "shards of WebDataset, name them train-000000.tar and so",
        ),
        # Labels beside a folder may be those of its images.
        (empty("images/cat/1.jpg", "images/dog/1.jpg", "annotations.json"), "no dataset was reco"),
        (empty("flowers.zip"), "which only contains the archive flowers.zip; unpack the dataset"),
        ({}, "an empty folder"),
    ],
)
def test_what_is_no_dataset_or_several_is_one_line(tmp_path, entries, message):
    make(tmp_path, entries)
    with pytest.raises(InputError) as caught:
        recognise(str(tmp_path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_tree_without_images_is_not_walked_to_its_end(tmp_path, monkeypatch):
    """A mistyped path may be that of a whole disk."""
    make(tmp_path, empty(*(f"a/{n}/notes.txt" for n in range(30)), "b/1.jpg", "c/1.jpg"))
    assert recognise(str(tmp_path)).dataset == "folder"
    walked = []
    walk = os.walk
    monkeypatch.setattr(
        os, "walk", lambda top: (walked.append(top) or entry for entry in walk(top))
    )
    monkeypatch.setattr("loading.recognise._MOST_ENTRIES", 10)
    (tmp_path / "b/1.jpg").unlink()
    (tmp_path / "c/1.jpg").unlink()
    with pytest.raises(InputError, match="no dataset was recognised"):
        recognise(str(tmp_path))
    assert walked == [tmp_path / "a", tmp_path / "b", tmp_path / "c"]


def test_runs_beside_the_data_are_no_classes(tmp_path):
    make(tmp_path, empty("cat/1.jpg", "run/config.yaml", "run/metrics.jsonl", "run/curves.png"))
    assert recognise(str(tmp_path))[:2] == ("images", str(tmp_path / "cat"))


@pytest.mark.parametrize(
    ("entries", "most", "count"),
    [
        (empty("train/a/1.jpg", "train/b/2.jpg", "val/a/3.jpg", "train/a/.hidden.jpg"), 9, 2),
        (empty("a/1.jpg", "a/b/2.jpg", "c/3.jpg", "c/notes.txt"), 9, 3),
        (empty("a/1.jpg", "a/b/2.jpg", "c/3.jpg"), 3, 3),
        (empty("a/1.jpg", "a/b/2.jpg", "c/3.jpg"), 2, 2),
        (empty("images/train/1.jpg", "images/train/2.jpg", "masks/train/1.png"), 9, 2),
        (empty("images/1.jpg", "masks/1.png"), 9, 1),
        ({"train_list.txt": LIST}, 9, 2),
        ({"train_list.txt": LIST}, 1, 1),
        ({"train.csv": "image,cat\na.jpg,1\nb.jpg,0\n"}, 9, 2),
        ({"train.csv": "image,cat\n"}, 9, 0),
        (empty("train-0.tar"), 9, 9),
        (empty("cifar-10-python.tar.gz"), 100_000, 50_000),
    ],
)
def test_training_images_are_counted_up_to_a_limit(tmp_path, entries, most, count):
    make(tmp_path, entries)
    assert count_training_images(recognise(str(tmp_path)), most) == count


def test_other_files_beside_a_dataset_change_nothing(tmp_path):
    make(tmp_path / "a", empty("train/x/1.jpg", "train/y/1.jpg", "backup_2020.tar"))
    assert recognise(str(tmp_path / "a")).dataset == "folder"
    make(tmp_path / "b", empty("images/1.jpg", "masks/1.png", "labels/1.txt"))
    assert recognise(str(tmp_path / "b")).dataset == "masks"
    make(tmp_path / "c", empty("images/1.jpg", "labels/1.png", "labels/classes.txt"))
    assert recognise(str(tmp_path / "c")).dataset == "masks"


def test_images_of_classes_that_are_links_are_counted(tmp_path):
    make(tmp_path / "elsewhere", empty("a/1.jpg", "b/2.jpg", "b/3.jpg"))
    (tmp_path / "train").mkdir()
    for name in "ab":
        (tmp_path / "train" / name).symlink_to(tmp_path / "elsewhere" / name)
    layout = Layout("folder", str(tmp_path), "")
    assert count_training_images(layout, 9) == 3
    # A folder that isn't there is left to the reader, whose line says what it expects.
    assert count_training_images(Layout("folder", str(tmp_path / "none"), ""), 9) == 0


@pytest.mark.parametrize(
    ("folders", "expected"),
    [
        (["train", "val"], ["val"]),
        (["train", "valid"], ["valid"]),
        (["training", "validation"], ["validation"]),
        (["valid", "invalid"], []),
        (["train"], []),
        (["val"], ["val"]),
    ],
)
def test_valid_is_a_part_only_beside_a_training_part(tmp_path, folders, expected):
    make(tmp_path, empty(*(f"{folder}/a/1.jpg" for folder in folders)))
    found = validation_files("folder", str(tmp_path))
    assert [file.name for file in found] == expected


def test_parts_of_other_names_are_read_as_train_and_val(tmp_path):
    from support.dataset_files import dataset_config

    from config import get_config
    from datasets import get_datasets

    for names in (("train", "val"), ("training", "validation"), ("train", "valid")):
        folder = tmp_path / "-".join(names)
        write_images(
            folder, {f"{names[0]}/cat": 3, f"{names[0]}/dog": 2, f"{names[1]}/dog": 1}, size=16
        )
        options = ["DATA.DATASET", "images", "DATA.DATA_PATH", str(folder)]
        for config in (
            dataset_config("folder", str(folder)),
            get_config("mae_vit_digits", [*options, "DATA.IMAGE_CHANNELS", "3"]),
        ):
            _, train, val = get_datasets(config)
            assert (len(train), len(val)) == (5, 1)
            assert Path(str(val.relative_names()[0])).parts[:2] == (names[1], "dog")
