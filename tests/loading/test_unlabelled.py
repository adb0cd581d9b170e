"""Images without labels: folders at any depth, lists of paths, tar shards, and all that labels are
used for elsewhere.
"""

import io
import os
import re
import shutil
import sys
import tarfile

import numpy as np
import pytest
from conftest import write_images
from support.task_columns import need

from config import get_config
from datasets import FileDataset, ShardDataset, get_dataloader, get_dataset, get_datasets
from errors import InputError
from loading.folds import folds
from loading.shards import shards
from loading.sources import Split, class_folders
from loading.unlabelled import images, images_list
from tools import check_dataset, make_shards

SMALL = [
    "DATA.IMAGE_SIZE", "8", "DATA.NUM_WORKERS", "0", "DATA.BATCH_SIZE", "4", "DATA.BATCH_SIZE_EVAL", "4",
]  # fmt: skip
NAMES = {"": 3, "中国 寺庙": 2, "b/c/d": 4, "花朵 (红)/深": 2}
PATHS = [
    *(f"{number}.png" for number in range(3)),
    *(f"b/c/d/{number}.png" for number in range(4)),
    *(f"中国 寺庙/{number}.png" for number in range(2)),
    *(f"花朵 (红)/深/{number}.png" for number in range(2)),
]


@pytest.fixture
def without_labels(monkeypatch):
    """Makes the task one that needs no labels."""
    need(monkeypatch)
    monkeypatch.setattr("datasets.own_classes", lambda task: [])


@pytest.fixture
def nested(tmp_path):
    """A folder ``in`` of 11 images at several depths."""
    write_images(tmp_path / "in", NAMES)
    return tmp_path / "in"


def configured(dataset, path, *options):
    return get_config(
        None, ["DATA.DATASET", dataset, "DATA.DATA_PATH", str(path), *SMALL, *options]
    )


def read(root, mode="val", **given):
    return list(images(Split(mode, **given), data_path=str(root)).paths)


def relative(dataset):
    return [os.fsdecode(name) for name in dataset.relative_names()]


# ------------------------------------------------------------------- folders


def test_a_folder_is_read_at_any_depth_in_sorted_order(nested):
    (nested / "note.txt").touch()
    assert read(nested) == PATHS
    source = images(Split("val"), data_path=str(nested))
    assert (source.labels, source.classes) == (None, [])


def test_with_a_val_folder_the_parts_are_train_and_val(nested):
    root = nested.parent
    nested.rename(root / "train")
    write_images(root / "val", {"": 1, "x": 1})
    write_images(root / "other", {"": 1})
    assert read(root, "train") == [f"train/{path}" for path in PATHS]
    assert read(root, "val") == ["val/0.png", "val/x/0.png"]


def test_train_is_a_part_only_beside_val(tmp_path):
    """Photographs of trains may be in a folder of this name."""
    write_images(tmp_path, {"plane": 1, "train": 1})
    assert read(tmp_path, "train", alone=True) == ["plane/0.png", "train/0.png"]
    assert read(tmp_path / "train", "train", alone=True) == ["0.png"]


def test_without_a_val_folder_a_training_is_told_what_to_set(nested):
    with pytest.raises(InputError) as caught:
        read(nested, "train")
    assert str(caught.value) == (
        f"{nested}: there is no val/ in it;"
        " DATA.VAL_SPLIT 0.1 puts a tenth of the images aside for validation"
    )


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        (["x/"], r"in: no image in it or below it; images end in .*; it contains the folder x \("),
        (["val/1.png"], r"no train/ beside val/; move the training images into it"),
        (
            ["test/1.png", "train/1.png"],
            r"its folders test, train look like the parts of a dataset",
        ),
        (["a/val/1.png", "a/train/1.png"], r"its folder a holds train/ and val/; pass -data_path="),
        (["val/", "train/1.png"], r"in/val: no image in it .* it contains nothing"),
    ],
)
def test_a_folder_that_cant_be_taken_is_one_line(tmp_path, folders, message):
    for name in folders:
        file = tmp_path / "in" / name
        if name.endswith("/"):
            file.mkdir(parents=True)
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
    with pytest.raises(InputError, match=message):
        for mode in ("train", "val"):
            read(tmp_path / "in", mode, alone=mode == "train")


def test_hidden_entries_and_linked_folders_are_skipped_and_named(nested):
    (nested / ".hidden").mkdir()
    (nested / "b/Thumbs.db").touch()
    (nested / "b/._0.png").touch()
    (nested / "b/around").symlink_to("..")
    (nested / "b/elsewhere").symlink_to("/")
    (nested / "b/5.png").symlink_to(nested / "0.png")
    (nested / "itself").symlink_to("itself")
    skipped = []
    assert set(read(nested, skipped=skipped)) == {*PATHS, "b/5.png"}
    assert skipped == [".hidden", "b/._0.png", "b/Thumbs.db", "b/around", "b/elsewhere"]


def make_run(folder):
    """A run's folder with a picture that the run drew."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.yaml", "metrics.jsonl", "curves.png"):
        (folder / name).touch()


def test_the_pictures_of_a_run_are_no_images(nested):
    make_run(nested / "b/run")
    skipped = []
    assert read(nested, skipped=skipped) == PATHS
    assert skipped == ["b/run"]
    make_run(nested)
    message = r"it contains the pictures of a run .* move the run or the images to another"
    with pytest.raises(InputError, match=message):
        read(nested)


def test_a_run_beside_classes_is_no_class(tmp_path):
    for mode in ("train", "val"):
        write_images(tmp_path / mode, {"rose": 2, "tulip": 1})
    make_run(tmp_path / "train/run")
    make_run(tmp_path / "train/rose/run")
    skipped = []
    files = class_folders(Split("train", skipped=skipped), data_path=str(tmp_path))
    assert (len(files.paths), files.classes) == (3, ["rose", "tulip"])
    assert sorted(skipped) == ["train/rose/run", "train/run"]
    make_run(tmp_path / "train")
    with pytest.raises(InputError, match="it contains the pictures of a run"):
        class_folders(Split("train"), data_path=str(tmp_path))


def test_a_folder_that_cant_be_listed_is_named(nested, monkeypatch):
    scandir = os.scandir

    def refusing(path):
        if str(path).endswith("b/c"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(InputError, match=r"its folder '.*/b/c' can't be listed \(Permission den"):
        read(nested)


# --------------------------------------------------------------------- lists


def test_a_list_has_a_path_on_each_line(nested):
    text = f"\ufeff{PATHS[0]}\r\n\n  {PATHS[-1]} \n{nested}/{PATHS[4]}"
    (nested / "train_list.txt").write_text(text, newline="")
    source = images_list(Split("train"), data_path=str(nested))
    assert list(source.paths) == [PATHS[0], PATHS[-1], f"{nested}/{PATHS[4]}"]
    assert (source.labels, source.classes) == (None, [])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (b"\n \n", r"in/train_list.txt: the list is empty"),
        (b"0.png\n1\0.png\n", r"train_list.txt, line 2: its path contains a NUL character"),
        (
            b"0.png\n.\n",
            r"train_list.txt: 1 of 2 files are missing, .*/in; it is a folder, expected ",
        ),
        (
            b"b/c/\n",
            r"train_list.txt: 1 of 1 files are missing, .*/b/c; it is a folder, expected a",
        ),
        (b"0.png\n9.png\n", r"train_list.txt: 1 of 2 files are missing, the first is .*/9.png$"),
        (
            b"0.png 3\n",
            r"; 0.png exists: for lists of paths and one label pass -dataset=imagenet2012",
        ),
        (
            b"0.png\t3\n",
            r"; 0.png exists: for lists of paths and one label pass -dataset=imagenet2",
        ),
        (b"x", r"its line 1 has more than 524288 bytes; DATASET images_list needs it"),
        ("中.png".encode("gb18030"), r"the list isn't UTF-8"),
        (
            None,
            r"train_list.txt: there is no such file; .*images; for folders of images pass -dataset=images$",
        ),
    ],
)
def test_a_list_that_cant_be_taken_is_one_line(nested, lines, message):
    (nested / "train").mkdir()
    if lines is not None:
        (nested / "train_list.txt").write_bytes(lines * (1 << 19 if lines == b"x" else 1))
    with pytest.raises(InputError, match=message):
        images_list(Split("train"), data_path=str(nested))


def test_a_check_goes_on_behind_a_line_that_is_no_path(nested):
    (nested / "train_list.txt").write_bytes(b"0.png\n1\0.png\n2.png\n")
    problems = []
    source = images_list(Split("train", problems=problems), data_path=str(nested))
    assert list(source.paths) == ["0.png", "2.png"]
    assert problems == [f"{nested}/train_list.txt, line 2: its path contains a NUL character"]


# -------------------------------------------------------------------- shards


def tar_of(file, *members):
    file.parent.mkdir(exist_ok=True)
    with tarfile.open(file, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def pack(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["make_shards.py", *map(str, words)])
    make_shards.main()


@pytest.mark.smoke
@pytest.mark.usefixtures("without_labels")
def test_packed_images_have_the_order_and_the_bits_of_the_files(nested, monkeypatch, capsys):
    out = nested.parent / "out"
    options = ["DATA.VAL_SPLIT", "0.3"]
    pack(
        monkeypatch,
        *("-dataset=images", f"-data_path={nested}", f"-output={out}", "-shard_size=3"),
        *("-workers=1", "-o", *options),
    )
    assert "8 train images and 3 val images in 4 shards" in capsys.readouterr().out
    with tarfile.open(out / "val-000000.tar") as tar:
        assert tar.getnames() == ["000000000.png", "000000001.png", "000000002.png"]
    for mode in ("train", "val"):
        files = get_dataset(configured("images", nested, *options), mode)
        packed = get_dataset(configured("shards", out), mode)
        assert isinstance(packed, ShardDataset)
        assert (out / f"{mode}.txt").read_text().splitlines() == relative(files)
        assert packed.labels.tolist() == [-1] * len(files)
        for epoch in (1, 2):
            for index in range(len(files)):
                one, other = (some[epoch, index, 0][0] for some in (files, packed))
                assert np.array_equal(one, other)
        # The same without the index that the tool wrote.
        before = (out / f"{mode}.index.npz").read_bytes()
        (out / f"{mode}.index.npz").unlink()
        assert relative(get_dataset(configured("shards", out), mode)) == relative(packed)
        (out / f"{mode}.index.npz").write_bytes(before)


def test_shards_of_others_may_hold_images_and_texts_alone(tmp_path):
    """As img2dataset writes them."""
    image = ("a.jpg", b"x"), ("a.json", b"{}"), ("a.txt", b"a cat")
    tar_of(tmp_path / "train-0.tar", *image, ("b.jpg", b"y"))
    found = shards(Split("train"), data_path=str(tmp_path))
    assert (found.labels, found.names.tolist(), found.classes) == (None, [b"a.jpg", b"b.jpg"], [])
    # From its index.
    found = shards(Split("train"), data_path=str(tmp_path))
    assert (found.labels, found.at_places(np.array([1])).labels) == (None, None)
    assert found.read(1, 10) == b"y"
    with pytest.raises(InputError, match="no val-.*; without them, DATA.VAL_SPLIT splits the trai"):
        shards(Split("val"), data_path=str(tmp_path))


@pytest.mark.parametrize("other", ["cls", "labels"])
def test_shards_with_and_without_labels_are_refused(tmp_path, other):
    tar_of(tmp_path / "train-0.tar", ("a.jpg", b"x"), (f"a.{other}", b"1"))
    tar_of(tmp_path / "train-1.tar", ("b.jpg", b"y"))
    tar_of(tmp_path / "train-2.tar")
    message = f"some shards hold .{other}, others images without labels; pack them again"
    with pytest.raises(InputError, match=re.escape(message)):
        shards(Split("train"), data_path=str(tmp_path))


# ---------------------------------------------------------- where labels count


@pytest.mark.parametrize("task", ["classification", "multilabel"])
def test_a_task_that_needs_labels_refuses_data_without(nested, task):
    tar_of(nested / "shards/train-0.tar", ("a.jpg", b"x"))
    (nested / "train_list.txt").write_text("0.png")
    options = ["TASK", "multilabel", "TRAIN.LOSS", "bce"] if task == "multilabel" else []
    for dataset, root in (
        ("images", nested),
        ("images_list", nested),
        ("shards", nested / "shards"),
    ):
        config = configured(dataset, root, *options)
        with pytest.raises(InputError) as caught:
            get_dataset(config, "train", alone=True)
        data = f"DATA.DATASET '{dataset}'"
        if dataset == "shards":
            data = f"the train set of 'shards' at {root}"
        message = f"{data} has no labels, which TASK {task} needs; change one of the two"
        assert str(caught.value).startswith(message)


def test_readers_of_labels_name_the_dataset_that_has_none(nested, tmp_path):
    (nested / "train_list.txt").write_text("0.png\n")
    with pytest.raises(
        InputError, match="for lists of paths without labels pass -dataset=images_list$"
    ):
        get_dataset(configured("imagenet2012", nested), "train")
    write_images(tmp_path / "flat", {"": 2})
    with pytest.raises(InputError, match="or -dataset=images for images without labels"):
        get_dataset(configured("folder", tmp_path / "flat"), "train")


@pytest.mark.usefixtures("without_labels")
def test_the_labels_are_minus_one_and_there_are_no_classes(nested):
    config, train, val = get_datasets(configured("images", nested, "DATA.VAL_SPLIT", "0.3"))
    assert isinstance(train, FileDataset)
    assert (train.labels.tolist(), train.labels.dtype) == ([-1] * 8, np.int64)
    assert (train.classes, val.classes, len(val)) == ([], [], 3)
    assert config.notes == []
    config, train, val = get_datasets(configured("images", nested, "EVAL", "True"))
    assert (train, relative(val)) == (None, PATHS)
    for workers in ("0", "2"):
        config = configured("images", nested, "EVAL", "True", "DATA.NUM_WORKERS", workers)
        batches = list(get_dataloader(config, val, "val"))
        assert [batch.keys() for batch in batches] == [{"pixels"}] * 3
        assert sum(len(batch["pixels"]) for batch in batches) == len(PATHS)


@pytest.mark.usefixtures("without_labels")
def test_the_validation_part_is_a_share_of_all_images(nested):
    options = ["DATA.VAL_SPLIT", "0.3"]
    parts = [relative(one) for one in get_datasets(configured("images", nested, *options))[1:]]
    assert [len(part) for part in parts] == [8, 3]
    assert sorted(sum(parts, [])) == sorted(PATHS)
    (nested / "train_list.txt").write_text("\n".join(PATHS))
    listed = get_datasets(configured("images_list", nested, *options))[1:]
    assert [relative(one) for one in listed] == parts
    # Groups stay together.
    options += ["DATA.SPLIT_GROUPS", r"^.*/|^\d"]
    _, train, val = get_datasets(configured("images_list", nested, *options))
    assert not {os.path.dirname(path) for path in relative(train)} & {
        os.path.dirname(path) for path in relative(val)
    }


@pytest.mark.usefixtures("without_labels")
def test_folds_hold_each_image_once(nested):
    for groups in ([], ["DATA.SPLIT_GROUPS", r"(\d).png"]):
        sizes = []
        held = []
        for fold in range(3):
            options = ["DATA.FOLDS", "3", "DATA.FOLD", str(fold), *groups]
            _, train, val = get_datasets(configured("images", nested, *options))
            assert sorted(relative(train) + relative(val)) == sorted(PATHS)
            sizes.append(len(val))
            held += relative(val)
        assert sorted(held) == sorted(PATHS)
        assert max(sizes) - min(sizes) <= 1 or groups


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["DATA.VAL_SPLIT", "0.5"],
            "DATA.VAL_SPLIT 0.5: 1 images leave no images for validation",
        ),
        (["DATA.FOLDS", "3"], "DATA.FOLDS is 3: 2 folds of 1 images would be empty; use fewer"),
    ],
)
@pytest.mark.usefixtures("without_labels")
def test_one_image_is_too_few_to_be_split(tmp_path, options, message):
    write_images(tmp_path, {"": 1})
    with pytest.raises(InputError, match=message):
        get_datasets(configured("images", tmp_path, *options))
    assert len(get_datasets(configured("images", tmp_path, "EVAL", "True"))[2]) == 1


def test_one_group_is_too_few_for_folds():
    with pytest.raises(InputError, match="DATA.FOLDS is 2: 1 folds of 3 images would be empty"):
        folds(np.zeros(3, int), 2, 0, ["a", "a", "a"])


@pytest.mark.usefixtures("without_labels")
def test_paddlevits_loader_needs_labels(nested):
    config, _, val = get_datasets(configured("images", nested, "EVAL", "True"))
    with pytest.raises(
        InputError, match="yields images and labels, but TASK classification has no"
    ):
        get_dataloader(config, val, is_train=False)


@pytest.mark.usefixtures("without_labels")
def test_a_cache_holds_images_without_labels(nested, tmp_path, capsys):
    options = ["DATA.VAL_SPLIT", "0.3", "DATA.CACHE", str(tmp_path / "cache")]
    config = configured("images", nested, *options)
    plain = get_dataset(configured("images", nested, "DATA.VAL_SPLIT", "0.3"), "train")
    for start in range(2):
        cached = get_dataset(config, "train")
        assert ("decoding" in capsys.readouterr().out) == (start == 0)
        assert (cached.labels.tolist(), cached.classes) == ([-1] * 8, [])
        assert relative(cached) == relative(plain)
        assert np.array_equal(cached[1, 3, 0][0], plain[1, 3, 0][0])


# --------------------------------------------------------------------- checks


@pytest.fixture
def check(monkeypatch):
    """Returns a function that runs the check, and returns its exit status."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["check_dataset.py", "--workers=1", *map(str, words)])
        try:
            check_dataset.main()
        except SystemExit as end:
            return end.code
        return 0

    return run


def test_a_check_finds_what_matters_without_labels(nested, tmp_path, check, capsys):
    (nested / "b/broken.jpg").write_bytes(b"no image")
    shutil.copy(nested / "0.png", nested / "b/same.png")
    where = ["-dataset=images", f"-data_path={nested}"]
    assert check(*where) == 1
    screen = capsys.readouterr().out
    assert re.search("images +13\n", screen)
    assert "class" not in screen
    assert "label" not in screen
    assert "error: training images that can't be read: 1, such as " in screen
    assert "remark: training images that are the same file as another training image: 2" in screen
    assert f"error: {nested}: there is no val/ in it; DATA.VAL_SPLIT 0.1 puts" in screen
    page = tmp_path / "check.html"
    lists = [f"-output={tmp_path / 'lists'}", f"--report={page}"]
    assert check(*where, "--split=0.25", *lists) == 0
    out = tmp_path / "lists"
    assert f"train with -dataset=images_list -data_path={out}" in capsys.readouterr().out
    assert "Images per class" not in page.read_text()
    assert "<h2>Classes" not in page.read_text()
    assert sorted(file.name for file in out.iterdir()) == ["train_list.txt", "val_list.txt"]
    (nested / "b/broken.jpg").unlink()
    listed = [
        os.path.normpath(out / line)
        for mode in ("train", "val")
        for line in (out / f"{mode}_list.txt").read_text().splitlines()
    ]
    assert sorted(listed) == sorted(f"{nested}/{path}" for path in [*PATHS, "b/same.png"])
    assert check("-dataset=images_list", f"-data_path={out}") == 0


def test_a_check_reads_shards_without_labels(tmp_path, check, capsys):
    write_images(tmp_path / "in", {"": 3})
    image = (tmp_path / "in/0.png").read_bytes()
    tar_of(tmp_path / "train-0.tar", ("a.png", image), ("a.json", b"{}"))
    for val in ([], [("a.cls", b"3")]):
        tar_of(tmp_path / "val-0.tar", ("a.png", image), *val)
        assert check("-dataset=shards", f"-data_path={tmp_path}") == 0
        screen = capsys.readouterr().out
        assert "validation images that are the same file as a training image: 1" in screen
        assert "another label" not in screen
        (tmp_path / "val.index.npz").unlink()
