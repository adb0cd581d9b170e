"""Folders as people have them: leftovers of systems, a level too many, what is missing, lists of
other toolkits.
"""

import io
import os
import re
import subprocess
import tarfile

import numpy as np
import pytest
from conftest import write_images

from config import get_config
from datasets import get_dataset, get_datasets
from errors import InputError
from inference.inputs import paths_of
from loading.layout import describe_folder, is_leftover, named_as_splits
from loading.sources import Split
from tools import check_dataset, make_shards

# What Jupyter, macOS, Windows, NAS boxes and disks leave behind.
LEFTOVERS = [
    ".ipynb_checkpoints", ".DS_Store", "._cat", ".Trash-1000", ".git", ".nomedia", ".AppleDouble", "__MACOSX",
    "Thumbs.db", "THUMBS.DB", "desktop.ini", "$RECYCLE.BIN", "System Volume Information", "@eaDir", "#recycle",
    "#snapshot", "@SynoResource", "@Recycle", "lost+found", "Network Trash Folder", "Temporary Items", "FOUND.000",
    "__pycache__",
]  # fmt: skip
DATA = [
    "cat",
    "n01440764",
    "_cat",
    "@cat",
    "#1",
    "trash",
    "lost",
    "found",
    "Thumbs",
    "0",
    "macosx",
    "recycled",
]


def folder_config(root, *options):
    return get_config(
        None,
        [
            "DATA.DATASET",
            "folder",
            "DATA.DATA_PATH",
            str(root),
            "MODEL.NUM_CLASSES",
            "auto",
            *options,
        ],
    )


def listed_config(root, *options, dataset="imagenet2012"):
    named = ["DATA.DATASET", dataset, "DATA.DATA_PATH", str(root), "MODEL.NUM_CLASSES", "auto"]
    return get_config(
        None, [*named, *(("TASK", "multilabel") if "multi" in dataset else ()), *options]
    )


@pytest.mark.smoke
def test_what_systems_leave_is_no_data():
    assert [name for name in LEFTOVERS if not is_leftover(name)] == []
    assert [name for name in (*DATA, ".", "..") if is_leftover(name)] == []


@pytest.fixture
def littered(tmp_path):
    """20 training and 4 validation images of two classes, and SKIPPED entries that aren't data."""
    write_images(tmp_path / "train", {"cat": 10, "dog/deep": 4, "dog": 6})
    write_images(tmp_path / "val", {"cat": 2, "dog": 2})
    for mode in ("train", "val"):
        for name in LEFTOVERS:
            write_images(tmp_path / mode, {name: 1, f"cat/{name}": 1})  # a folder with an image
    (tmp_path / "train/dog/deep/._0.png").write_bytes(b"\0\5\26\7")
    return tmp_path


KINDS = "(hidden or system files, files of runs, links)"
SKIPPED = 4 * len(LEFTOVERS) + 1


def test_hidden_entries_are_no_classes_and_no_images(littered):
    config, train, val = get_datasets(folder_config(littered))
    assert (train.classes, len(train), len(val), config.MODEL.NUM_CLASSES) == (
        ["cat", "dog"],
        20,
        4,
        2,
    )
    assert config.notes == [
        f"skipped {SKIPPED} entries that aren't data {KINDS}, such as train/#recycle"
    ]
    config, _, val = get_datasets(folder_config(littered, "EVAL", "True"))
    assert (len(val), len(config.notes)) == (4, 1)
    config, train, val = get_datasets(folder_config(littered / "train", "DATA.VAL_SPLIT", "0.2"))
    assert (train.classes, len(train), len(val)) == (["cat", "dog"], 16, 4)
    assert config.notes == [
        f"skipped {2 * len(LEFTOVERS) + 1} entries that aren't data {KINDS}, such as #recycle"
    ]


def test_the_same_images_are_found_with_and_without_leftovers(littered, tmp_path_factory):
    clean = tmp_path_factory.mktemp("clean")
    write_images(clean / "train", {"cat": 10, "dog/deep": 4, "dog": 6})
    write_images(clean / "val", {"cat": 2, "dog": 2})
    for mode in ("train", "val"):
        one, other = (get_dataset(folder_config(root), mode) for root in (littered, clean))
        assert list(one.paths) == list(other.paths)
        assert one.labels.tolist() == other.labels.tolist()


def test_a_check_names_what_was_skipped(littered):
    result = check_dataset.check_images(folder_config(littered), workers=1)
    [said] = [one for one in result.findings if "entries that aren't data" in one.text]
    assert (said.text, said.is_error) == (
        f"skipped entries that aren't data {KINDS}: {SKIPPED}",
        False,
    )
    assert said.examples[0] == "train/#recycle"
    assert [len(part.records) for part in result.parts.values()] == [20, 4]


def test_shards_are_packed_without_leftovers_and_read_without_them(
    littered, tmp_path, monkeypatch, capsys
):
    words = [
        "make_shards",
        "-dataset=folder",
        f"-data_path={littered}",
        f"-output={tmp_path}/shards",
        "-workers=1",
    ]
    monkeypatch.setattr("sys.argv", words)
    make_shards.main()
    told = capsys.readouterr()
    assert "20 train images and 4 val images" in told.out
    assert f"skipped {SKIPPED} entries that aren't data {KINDS}" in told.err


def test_members_of_a_shard_that_macos_added_are_skipped(tmp_path, capsys):
    write_images(tmp_path / "images", {"cat": 1})
    image = (tmp_path / "images/cat/0.png").read_bytes()
    for mode in ("train", "val"):
        with tarfile.open(tmp_path / f"{mode}-000000.tar", "w") as tar:
            for name, data in (
                ("./._000.png", b"\0\5\26\7"),
                ("./000.png", image),
                ("./000.cls", b"1"),
                ("__MACOSX/000.png", image),
                (".DS_Store", b"x"),
                ("a/.ipynb_checkpoints/001.png", image),
                ("a/001.png", image),
                ("a/001.cls", b"0"),
            ):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    config, train, _ = get_datasets(listed_config(tmp_path, dataset="shards"))
    assert sorted(train.labels.tolist()) == [0, 1]
    assert config.notes == [
        f"skipped 8 entries that aren't data {KINDS}, such as {tmp_path}/train-000000.tar: ./._000.png"
    ]


def test_predictions_skip_what_a_folder_or_a_pattern_finds_and_take_what_is_named(
    littered, monkeypatch, capsys
):
    monkeypatch.chdir(littered)
    assert len(paths_of(["train"])) == 20
    assert (
        f"skipped {2 * len(LEFTOVERS) + 1} entries that aren't data {KINDS}, such as train/"
        in capsys.readouterr().err
    )
    assert len(paths_of(["train/*"])) == 20
    assert len(paths_of(["train/**/*.png"])) == 20
    assert len(paths_of(["train/cat/*"])) == 10
    capsys.readouterr()
    for named in (
        ["train/@eaDir"],
        ["train/@eaDir/*"],
        ["train/.ipynb_checkpoints/0.png"],
        ["train//@eaDir//*.png"],
    ):
        assert len(paths_of(named)) == 1
    (littered / "some.txt").write_text("train/.ipynb_checkpoints/0.png\n")
    assert list(paths_of(["some.txt"])) == ["train/.ipynb_checkpoints/0.png"]
    assert capsys.readouterr().err == ""
    with pytest.raises(
        InputError,
        match=re.escape(
            f"no matching files; skipped 1 entry that isn't data {KINDS}, such as train/@eaD"
        ),
    ):
        paths_of(["train/@e*"])


def test_a_list_that_names_a_hidden_file_means_it(littered):
    for mode in ("train", "val"):
        lines = f"{mode}/.ipynb_checkpoints/0.png 0\n{mode}/dog/0.png 1\n"
        (littered / f"{mode}_list.txt").write_text(lines)
    config, train, val = get_datasets(listed_config(littered))
    assert (len(train), len(val), config.notes) == (2, 2, [])


# -------------------------------------------------------- a level too deep


SPLIT = ["DATA.VAL_SPLIT", "0.5"]
DEEP = [
    (
        ["photos/cat", "photos/dog"],
        SPLIT,
        r"one class, photos; .* the folders cat, dog: pass -data_path=.*/photos$",
    ),
    (
        ["train/photos/cat", "train/photos/dog", "val/photos/cat", "val/photos/dog"],
        [],
        r"one class, photos; expected two or more; one level below, .* cat, dog: move them to .*/train$",
    ),
    (
        ["flowers/train/cat", "flowers/val/cat"],
        SPLIT,
        r"flowers holds train/ and val/; pass -data_path=.*/flowers$",
    ),
    (["cat"], SPLIT, r"one class, cat; expected two or more; .*/cat holds 4 images$"),
    (
        ["train/cat", "val/cat"],
        [],
        r"one class, cat; expected two or more; .*train/cat holds 4 images$",
    ),
    (["Train/cat", "TEST/cat"], SPLIT, "TEST, Train look like the parts of a dataset"),
    (
        ["train/cat", "train/dog", "test/cat"],
        [],
        "val: no class folders; .* holds the folders test, train",
    ),
    (["."], SPLIT, "needs <class>/<image> .* holds 4 images; pass the folder above it"),
    (
        ["cat", "dog"],
        [],
        "needs train/<class>/<image> .*; without a val/, DATA.VAL_SPLIT .* the folders cat, dog",
    ),
]


@pytest.mark.parametrize(("folders", "options", "message"), DEEP)
def test_data_a_level_too_deep_or_called_otherwise_are_an_error(
    tmp_path, folders, options, message
):
    write_images(tmp_path, dict.fromkeys(folders, 4))
    with pytest.raises(InputError, match=message):
        get_datasets(folder_config(tmp_path, *options))


def test_one_class_is_enough_where_no_class_is_learnt(tmp_path):
    write_images(tmp_path, {"val/cat": 4, "train/cat": 4})
    assert len(get_datasets(folder_config(tmp_path, "EVAL", "True"))[2]) == 4
    distilled = [
        "TRAIN.DISTILLATION_TYPE",
        "soft",
        "TRAIN.TEACHER_MODEL",
        "regnety_160",
        "TRAIN.TEACHER_PATH",
        "x",
    ]
    assert len(get_datasets(folder_config(tmp_path, *distilled))[1]) == 4


NESTED = "the class animals has no images itself, but folders of images, such as cat and cup{}; if these are classes, "


@pytest.mark.parametrize(
    ("folders", "options", "remark"),
    [
        (["animals/cat", "animals/cow", "animals/cup", "dog"], SPLIT, NESTED.format("")),
        (
            ["train/animals/cat", "train/animals/cup", "train/dog", "val/animals", "val/dog"],
            [],
            NESTED.format(""),
        ),
        (
            ["animals/cat", "animals/cup", "dog", "z/a", "z/b"],
            SPLIT,
            NESTED.format(" (2 such classes)"),
        ),
        # Each class has folders of its own, such as one of each camera.
        (["cat/1", "cat/2", "dog/1", "dog/2"], SPLIT, ""),
        (["cat", "cat/2", "cat/3", "dog"], SPLIT, ""),
        (["cat/all", "dog"], SPLIT, ""),
    ],
)
def test_a_part_of_the_classes_a_level_too_deep_is_told(tmp_path, folders, options, remark):
    write_images(tmp_path, dict.fromkeys(folders, 4))
    told = get_datasets(folder_config(tmp_path, *options))[0].notes
    assert [note[: len(remark)] for note in told] == ([remark] if remark else [])
    found = check_dataset.check_images(folder_config(tmp_path, *options), workers=1).findings
    assert [one.text for one in found if not one.is_error and "itself" in one.text] == [
        note for note in told if remark
    ]


@pytest.mark.parametrize(
    ("name", "known", "told"),
    [
        ("cat ", "cat", "'cat '; 'cat ' and 'cat' differ only in spaces"),
        ("big  cat", "big cat", "differ only in spaces"),
        ("Cat", "cat", "'Cat'; 'Cat' and 'cat' differ only in upper and lower case"),
        ("cafe\u0301", "caf\u00e9", "differ only in Unicode's form (NFC and NFD)"),
        ("Cafe\u0301 ", "caf\u00e9", "differ only in spaces, case or Unicode's form"),
        ("cow", "cat", "lack: 'cow'"),
    ],
)
def test_a_class_that_looks_like_a_known_one_is_told(tmp_path, name, known, told):
    write_images(tmp_path, {f"train/{known}": 1, "train/dog": 1, "val/dog": 1, f"val/{name}": 1})
    with pytest.raises(InputError) as caught:
        get_datasets(folder_config(tmp_path))
    assert str(caught.value).endswith(told)
    (tmp_path / "train").rename(tmp_path / "elsewhere")
    how = told.partition("differ in ")[2]
    with pytest.raises(InputError, match=re.escape(f"{how}; name the folders")):
        get_datasets(folder_config(tmp_path, "EVAL", "True"), [known, "dog"])


def test_one_class_stops_a_check(tmp_path):
    write_images(tmp_path, {"train/all/cat": 4, "train/all/dog": 4, "val/all/cat": 1})
    result = check_dataset.check_images(folder_config(tmp_path), workers=1)
    assert not result.usable
    assert any(
        "one class, all; expected two or more; one level below" in one.text
        for one in result.findings
    )


def test_a_folder_says_what_it_holds(tmp_path):
    assert describe_folder(tmp_path) == describe_folder(tmp_path / "nowhere") == "nothing"
    for name in ("a.JPG", "b.png", "data.zip", "notes.md", ".DS_Store"):
        (tmp_path / name).touch()
    (tmp_path / "cat").mkdir()
    assert (
        describe_folder(tmp_path)
        == "the folder cat and 2 images and the archive data.zip and the file notes.md"
    )
    for number in range(9):
        (tmp_path / f"c{number}").mkdir()
    assert describe_folder(tmp_path).startswith("the folders c0, c1, c2, c3, c4, ... (10) and")
    assert [named_as_splits(names) for names in (["Train", "test"], ["train", "cat"], [])] == [
        True,
        False,
        False,
    ]


# -------------------------------------------------------------- -data_path


def test_a_data_path_that_is_missing_or_wrong_is_named(tmp_path, monkeypatch):
    def refused(path, dataset="folder"):
        with pytest.raises(InputError) as caught:
            get_dataset(listed_config(path, dataset=dataset), "train")
        return str(caught.value)

    with pytest.raises(InputError, match="-data_path is missing: pass the dataset's folder"):
        get_dataset(get_config(None, []), "train")
    for dataset in (
        "folder",
        "imagenet2012",
        "shards",
        "cifar10",
        "mnist",
        "multilabel_list",
        "multilabel_csv",
    ):
        assert "nowhere, but there is no such folder; " in refused(tmp_path / "nowhere", dataset)
    (tmp_path / "data").mkdir()
    assert f"{tmp_path}/data, an empty folder" in refused(tmp_path / "data", "mnist")
    (tmp_path / "data/.DS_Store").touch()
    assert f"{tmp_path}/data, an empty folder" in refused(tmp_path / "data")
    (tmp_path / "data/train.zip").touch()
    (tmp_path / "data/val.tar.gz").touch()
    assert "only contains the archives train.zip, val.tar.gz; unpack" in refused(tmp_path / "data")
    assert "no train-*.tar" in refused(tmp_path / "data", "shards")
    assert "val.tar.gz, an archive; unpack it, and give the folder" in refused(
        tmp_path / "data/val.tar.gz"
    )
    assert ".DS_Store, which is a file; give the folder" in refused(tmp_path / "data/.DS_Store")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    assert f"link, a link to {tmp_path}/gone, which doesn't exist" in refused(tmp_path / "link")
    assert "the shell doesn't expand ~ there: write $HOME" in refused("~/data")
    monkeypatch.setattr(
        "loading.layout.os.listdir",
        lambda _: (_ for _ in ()).throw(PermissionError(13, "Permission denied")),
    )
    assert "which can't be listed (Permission denied); give this user access to it" in refused(
        tmp_path / "data"
    )


# ------------------------------------------------------------------ labels


def test_gaps_in_labels_are_told_at_the_start_and_by_a_check(tmp_path):
    write_images(tmp_path, {"a": 3})
    (tmp_path / "train_list.txt").write_text("a/0.png 0\na/1.png 1\na/2.png 1262\n")
    (tmp_path / "val_list.txt").write_text("a/0.png 0\na/1.png 1\na/2.png 1262\n")
    config, *_ = get_datasets(listed_config(tmp_path))
    gaps = "of 1,263 classes 1,260 have no training image (2, 3, 4, ...) and 1,260 have no validation image (2, 3, 4, ...)"
    assert (config.MODEL.NUM_CLASSES, config.notes) == (1263, [gaps])
    found = check_dataset.check_images(listed_config(tmp_path), workers=1).findings
    assert ("classes without an image: 1,260", False) in [(one.text, one.is_error) for one in found]
    (tmp_path / "train_list.txt").write_text("a/0.png 1\na/1.png 2\n")
    (tmp_path / "val_list.txt").write_text("a/2.png 1\n")
    config, *_ = get_datasets(listed_config(tmp_path))
    assert config.notes == [
        "of 3 classes 1 have no training image (0) and 2 have no validation image (0, 2)"
    ]
    (tmp_path / "classes.txt").write_text("bird\ncat\ndog\nfish\n")
    config, *_ = get_datasets(listed_config(tmp_path))
    assert config.notes == [
        "of 4 classes 2 have no training image (bird, fish) and 3 have no validation image (bird, dog, fish)"
    ]


def test_classes_without_a_validation_image_are_told(tmp_path):
    write_images(tmp_path, {"train/cat": 2, "train/dog": 2, "val/cat": 1})
    assert get_datasets(folder_config(tmp_path))[0].notes == [
        "of 2 classes 1 have no validation image (dog)"
    ]
    write_images(tmp_path, {"val/dog": 1})
    assert get_datasets(folder_config(tmp_path))[0].notes == []


# -------------------------------------------------------- lists of others


VECTORS = ["1,0,0", "0,1,1", "0,0,0"]


@pytest.mark.parametrize("between", ["\t", " "])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("vectors", [VECTORS, ["0,0,1"] * 3, ["1,0", "0,1", "1,1"]])
def test_paddleclas_lists_of_several_labels_name_the_command_that_makes_a_table(
    tmp_path, between, end, vectors
):
    write_images(tmp_path, {"my cats": 3})
    for mode in ("train", "val"):
        text = "".join(f"my cats/{n}.png{between}{vector}{end}" for n, vector in enumerate(vectors))
        (tmp_path / f"{mode}_list.txt").write_bytes(text.encode())
    with pytest.raises(
        InputError, match=r"found 0 or 1 for each of \d classes, as in PaddleClas's lists"
    ) as caught:
        get_dataset(listed_config(tmp_path, dataset="multilabel_list"), "train")
    command = str(caught.value).partition("multilabel_csv: ")[2]
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    read = get_dataset(listed_config(tmp_path, dataset="multilabel_csv"), "train")
    expected = [[int(value) for value in vector.split(",")] for vector in vectors]
    assert [read.labels[index].tolist() for index in range(3)] == expected


def test_two_classes_of_a_paddleclas_list_are_not_taken_for_two_numbers(tmp_path):
    write_images(tmp_path, {"a": 2})
    (tmp_path / "train_list.txt").write_text("a/0.png\t1,0\na/1.png\t0,1\n")
    with pytest.raises(InputError, match="each line: found 0 or 1 for each of 2 classes"):
        get_dataset(listed_config(tmp_path, dataset="multilabel_list"), "train")
    (tmp_path / "train_list.txt").write_text("a/0.png\t1,0\na/1.png\t1\n")  # numbers
    assert get_dataset(listed_config(tmp_path, dataset="multilabel_list"), "train").labels.of(
        1
    ).tolist() == [1]


def test_several_labels_in_a_list_of_one_name_the_dataset_for_them(tmp_path):
    write_images(tmp_path, {"a": 1})
    (tmp_path / "train_list.txt").write_text("a/0.png 1,0,0\n")
    with pytest.raises(
        InputError,
        match=r"found 'a/0.png 1,0,0'; for several labels per image pass -dataset=multilabel_list",
    ):
        get_dataset(listed_config(tmp_path), "train")


LISTS = {
    "imagenet2012": ("train_list.txt", "{} 0\n"),
    "multilabel_list": ("train_list.txt", "{}\t0\n"),
    "multilabel_csv": ("train.csv", "image,cat\n{},1\n"),
}


@pytest.mark.parametrize("dataset", LISTS)
@pytest.mark.parametrize(
    ("written", "encoding", "message"),
    [
        (
            r"猫\0.png",
            "utf-8",
            r"it has the backslashes of Windows: write / in the list \(sed -i 's.\\\\.\/.g'\)",
        ),
        ("猫/0.png", "gb18030", "the list is in GBK: iconv -f GB18030 -t UTF-8 OLD > NEW"),
        (r"猫\0.png", "gb18030", "the list is in GBK"),
        ("café/0.png", "latin-1", "the list isn't UTF-8"),
        ("cafe\u0301/0.png", "utf-8", r"another Unicode form \(NFC\)"),
        (
            "狗/0.png",
            "utf-8",
            r"the name of the file on the disk is GBK: rename the files \(convmv",
        ),
        ("猫/0.png", "utf-16", "it is UTF-16; save it as UTF-8"),
        ("cat/0.png", "utf-16-le", "it is UTF-16; save it as UTF-8"),
        ("cat/0.png", "utf-16-be", "it is UTF-16; save it as UTF-8"),
        ("猫/1.png", "utf-8", "0.png$|1.png$"),
        (
            "C:/data/猫/0.png",
            "utf-8",
            "it is a Windows path: write paths relative to -data_path, with / between",
        ),
        (
            "C:\\data\\猫\\0.png",
            "utf-8",
            "it is a Windows path: write paths relative to -data_path, with / b",
        ),
        ("'猫/0.png'", "utf-8", "its paths are quoted: remove the quotes"),
    ],
)
def test_lists_of_windows_name_the_way(tmp_path, dataset, written, encoding, message):
    write_images(tmp_path, {"猫": 1, "caf\u00e9": 1})
    os.makedirs(os.path.join(os.fsencode(tmp_path), "狗".encode("gb18030")))
    open(os.path.join(os.fsencode(tmp_path), "狗/0.png".encode("gb18030")), "w").close()
    name, line = LISTS[dataset]
    (tmp_path / name).write_bytes(line.format(written).encode(encoding))
    with pytest.raises(InputError, match=message):
        get_dataset(listed_config(tmp_path, dataset=dataset), "train")


@pytest.mark.parametrize(
    ("dataset", "content", "message"),
    [
        (
            "imagenet2012",
            "a/0.png, 0\n",
            "the list has ',' after the path: write only a space or a TAB",
        ),
        ("imagenet2012", '"a/0.png" 0\n', "its paths are quoted: remove the quotes"),
        (
            "imagenet2012",
            "a/0.png 3.0\n",
            "line 1: expected a path, then a label, which is a whole number; found",
        ),
        (
            "imagenet2012",
            "a/0.png cat\n",
            "line 1: expected a path, then a label, which is a whole number; found",
        ),
        (
            "imagenet2012",
            "path label\na/0.png 0\n",
            "line 1: expected a path, then a label, which is a whole number",
        ),
        ("multilabel_list", '"a/0.png"\t0\n', "its paths are quoted: remove the quotes"),
        (
            "multilabel_csv",
            "a/0.png,1,0\na/1.png,0,1\n",
            "its first line is an image, not a header; expected a header such as image",
        ),
        (
            "multilabel_csv",
            "a/0.png,1,0,0\na/1.png,0,1,0\n",
            "its first line is an image, not a header",
        ),
        (
            "multilabel_csv",
            "image;cat;dog\na/0.png;1;0\n",
            "names no classes; .*; it has semicolons instead of commas",
        ),
        (
            "multilabel_csv",
            "image\tcat\na/0.png\t1\n",
            "names no classes; .*; it has TABs instead of commas",
        ),
    ],
)
def test_lists_that_are_written_in_another_way_name_what_is_expected(
    tmp_path, dataset, content, message
):
    write_images(tmp_path, {"a": 2})
    (tmp_path / LISTS[dataset][0]).write_text(content)
    with pytest.raises(InputError, match=message):
        get_dataset(listed_config(tmp_path, dataset=dataset), "train")


def test_a_list_with_a_mark_and_its_own_line_ends_is_read(tmp_path):
    write_images(tmp_path, {"猫": 2})
    (tmp_path / "train_list.txt").write_bytes("\ufeff猫/0.png 0\r\n猫/1.png 1\r\n".encode())
    assert np.asarray(get_dataset(listed_config(tmp_path), "train").labels).tolist() == [0, 1]


def test_names_of_classes_in_gbk_name_the_way(tmp_path):
    write_images(tmp_path, {"a": 1})
    (tmp_path / "train_list.txt").write_text("a/0.png 0\n")
    (tmp_path / "classes.txt").write_bytes("狗\n猫\n".encode("gbk"))
    with pytest.raises(
        InputError, match=r"classes.txt: its line 1 isn't UTF-8; save it as UTF-8 \(from GBK: iconv"
    ):
        get_dataset(listed_config(tmp_path), "train")
    (tmp_path / "train.csv").write_bytes("图,狗\na/0.png,1\n".encode("gbk"))
    with pytest.raises(InputError, match="train.csv: its line 1 isn't UTF-8"):
        get_dataset(listed_config(tmp_path, dataset="multilabel_csv"), "train")


def test_a_split_notes_what_was_skipped_if_somebody_asks():
    asked: list[str] = []
    Split("train", skipped=asked).skip(["a"])
    unasked = Split("train")
    unasked.skip(["a"])
    assert asked == ["a"]
    assert unasked.skipped is None
