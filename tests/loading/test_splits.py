"""Which images become the validation part: by a formula, by groups, and the same wherever it is
asked for.
"""

import io
import tarfile

import numpy as np
import pytest
from conftest import write_images

from config import get_config
from datasets import get_datasets
from errors import InputError
from loading.label_sets import LabelSets, rarest
from loading.splits import groups_of, validation

LABELS = np.repeat([0, 1, 2, 3], [1, 2, 40, 103])
PATHS = [f"train/{label}/{place}.jpg" for place, label in enumerate(LABELS)]


@pytest.mark.smoke
def test_each_class_gives_its_share_rounded_and_keeps_an_image():
    for share in (0.01, 0.2, 0.5, 0.99):
        chosen = validation(PATHS, LABELS, share, 0)
        wanted = [0, *(min(max(int(share * total + 0.5), 1), total - 1) for total in (2, 40, 103))]
        assert np.bincount(LABELS[chosen], minlength=4).tolist() == wanted


def test_it_depends_on_paths_and_seed_alone():
    chosen = {
        path for path, own in zip(PATHS, validation(PATHS, LABELS, 0.2, 0), strict=True) if own
    }
    order = np.random.default_rng(1).permutation(len(PATHS))
    shuffled = [PATHS[place] for place in order]
    assert {
        path
        for path, own in zip(shuffled, validation(shuffled, LABELS[order], 0.2, 0), strict=True)
        if own
    } == chosen
    more = [*PATHS, *(f"train/3/new{n}.jpg" for n in range(10))]
    labels = np.append(LABELS, [3] * 10)
    later = {path for path, own in zip(more, validation(more, labels, 0.2, 0), strict=True) if own}
    # a new one takes a place, or there is one place more
    assert len(chosen - later) <= 2 <= len(later - chosen) <= 4
    other = validation(PATHS, LABELS, 0.2, 1)
    assert 0.1 < (other & validation(PATHS, LABELS, 0.2, 0)).sum() / other.sum() < 0.5


def test_groups_stay_together_and_meet_the_share():
    rng = np.random.default_rng(0)
    labels = rng.integers(3, size=600)
    people = rng.integers(60, size=600)
    paths = [
        f"{label}/person{person:02}_{place}.jpg"
        for place, (label, person) in enumerate(zip(labels, people, strict=True))
    ]
    chosen = validation(paths, labels, 0.25, 0, groups_of(paths, r"person(\d+)"))
    assert not set(people[chosen]) & set(people[~chosen])
    assert abs(np.bincount(labels[chosen]) / np.bincount(labels) - 0.25).max() < 0.03
    assert groups_of(paths[:2], r"person\d+") == [f"person{person:02}" for person in people[:2]]


def test_a_class_of_few_large_groups_still_has_validation_images():
    labels = np.repeat([0, 1], [30, 30])
    paths = [f"g{n % 3}/{n}" if n < 30 else f"h{n}/{n}" for n in range(60)]
    chosen = validation(paths, labels, 0.1, 0, groups_of(paths, "^(.*)/"))
    assert np.bincount(labels[chosen]).tolist() == [10, 3]


def test_groups_may_be_listed_in_a_file(tmp_path):
    file = tmp_path / "groups.tsv"
    file.write_text("a/1.jpg\tx\r\nb/2 2.jpg\ty z\n")
    assert groups_of(["b/2 2.jpg", "a/1.jpg"], str(file)) == ["y z", "x"]
    file.write_text("\ufeffa/1.jpg\tx\r\n")
    assert groups_of(["a/1.jpg"], str(file)) == ["x"]
    file.write_bytes("a/1.jpg\tx\r\n".encode("utf-16"))
    with pytest.raises(InputError, match="groups.tsv: it is UTF-16; save it as UTF-8"):
        groups_of(["a/1.jpg"], str(file))
    file.write_text("a/1.jpg\tx\r\nb/2 2.jpg\ty z\n")
    with pytest.raises(
        InputError,
        match=r"1 of 2 images have no group that .*groups.tsv names, the first is a/3.jpg",
    ):
        groups_of(["a/1.jpg", "a/3.jpg"], str(file))
    file.write_text("a/1.jpg x\n")
    with pytest.raises(
        InputError,
        match=r"groups.tsv: line 1: expected a path, a tab and a group; found 'a/1.jpg x'",
    ):
        groups_of(["a/1.jpg"], str(file))
    with pytest.raises(
        InputError,
        match=r"1 of 1 images have no group that no_groups.tsv matches \(it isn't a file",
    ):
        groups_of(["a/1.jpg"], "no_groups.tsv")
    with pytest.raises(
        InputError,
        match=r"DATA.SPLIT_GROUPS is '\(', which is neither a file nor a pattern \(missing \)",
    ):
        groups_of(["a/1.jpg"], "(")


def test_one_group_alone_cannot_be_split():
    with pytest.raises(
        InputError, match=r"VAL_SPLIT 0.2: 1 groups of images leave no images for validation"
    ):
        validation(["a/1", "a/2"], [0, 0], 0.2, 0, ["a", "a"])
    with pytest.raises(InputError, match=r"VAL_SPLIT 0.2: 1 images leave no images for validation"):
        validation(["a/1"], [0], 0.2, 0)


# ---------------------------------------------------------------- in a run


def configured(dataset, path, *options):
    data = [
        "DATA.DATASET",
        dataset,
        "DATA.DATA_PATH",
        str(path),
        "DATA.IMAGE_SIZE",
        "8",
        "DATA.NUM_WORKERS",
        "0",
    ]
    return get_config(None, [*data, "MODEL.NUM_CLASSES", "auto", *options])


SPLIT = ("DATA.VAL_SPLIT", "0.25")


def paths_of(dataset):
    return [dataset.paths[index] for index in range(len(dataset))]


@pytest.mark.parametrize("where", ["train/", ""])
def test_a_folder_without_validation_is_split(tmp_path, where):
    write_images(tmp_path / where, {"a": 8, "b": 12})
    _, train, val = get_datasets(configured("folder", tmp_path, *SPLIT))
    assert (np.bincount(train.labels).tolist(), np.bincount(val.labels).tolist()) == (
        [6, 9],
        [2, 3],
    )
    assert train.classes == val.classes == ["a", "b"]
    every = sorted(
        f"{where}{name}/{n}.png" for name, count in (("a", 8), ("b", 12)) for n in range(count)
    )
    assert sorted(paths_of(train) + paths_of(val)) == every
    evaluated = get_datasets(
        configured("folder", tmp_path, *SPLIT, "EVAL", "True", "SEED", "7", "NGPUS", "2")
    )[2]
    assert paths_of(evaluated) == paths_of(val)
    assert (evaluated[1][0] == val[1][0]).all()
    other = get_datasets(configured("folder", tmp_path, *SPLIT, "DATA.SPLIT_SEED", "1"))[2]
    assert paths_of(other) != paths_of(val)
    grouped = get_datasets(
        configured("folder", tmp_path, *SPLIT, "DATA.SPLIT_GROUPS", r"([0-9])\.png")
    )
    ends = [{path[-5] for path in paths_of(part)} for part in grouped[1:]]
    assert not ends[0] & ends[1]
    (tmp_path / "val").mkdir()
    with pytest.raises(
        InputError,
        match=r"/val exists, but DATA.VAL_SPLIT 0.25 makes another validation set",
    ):
        get_datasets(configured("folder", tmp_path, *SPLIT))


def test_a_list_without_validation_is_split(tmp_path):
    write_images(tmp_path, {"a": 8, "b": 12})
    rows = [
        f"{name}/{n}.png {label}"
        for label, (name, count) in enumerate((("a", 8), ("b", 12)))
        for n in range(count)
    ]
    (tmp_path / "train_list.txt").write_text("\n".join(rows))
    _, train, val = get_datasets(configured("imagenet2012", tmp_path, *SPLIT))
    folder = get_datasets(configured("folder", tmp_path, *SPLIT))[2]
    assert sorted(paths_of(val)) == sorted(paths_of(folder))
    assert len(train) + len(val) == 20
    (tmp_path / "val_list.txt").write_text(rows[0])
    with pytest.raises(
        InputError,
        match=r"val_list.txt exists, but DATA.VAL_SPLIT 0.25 makes another validation set",
    ):
        get_datasets(configured("imagenet2012", tmp_path, *SPLIT))


def write_table(root, count=60):
    """Images of up to three classes: every second, every third, every tenth one; some have none."""
    write_images(root, {"images": count})
    rows = [f"images/{n}.png,{n % 2 == 0:d},{n % 3 == 0:d},{n % 10 == 0:d}" for n in range(count)]
    (root / "train.csv").write_text("\n".join(["image,two,three,ten", *rows]))


def test_label_sets_are_split_by_their_rarest_label(tmp_path):
    sets = LabelSets([2, 0, 1, 0, 0, 1], [0, 2, 3, 3, 4, 6])
    assert rarest(sets).tolist() == [2, 1, 3, 0, 1]
    write_table(tmp_path)
    own = ("TASK", "multilabel", "DATA.VAL_SPLIT", "0.3")
    _, train, val = get_datasets(configured("multilabel_csv", tmp_path, *own))
    assert sorted(paths_of(train) + paths_of(val)) == sorted(f"images/{n}.png" for n in range(60))
    held = [int(path[7:-4]) for path in paths_of(val)]
    parts = (
        [n % 10 == 0 for n in held],
        [n % 10 and n % 3 == 0 for n in held],
        [n % 2 and n % 3 > 0 for n in held],
    )
    assert [sum(map(bool, part)) for part in parts] == [2, 5, 6]  # of 6, 18 and 20
    assert all(
        (val[place][1] == [n % 2 == 0, n % 3 == 0, n % 10 == 0]).all()
        for place, n in enumerate(held)
    )
    grouped = [*own, "DATA.SPLIT_GROUPS", r"(\d)\.png"]
    _, *found = get_datasets(configured("multilabel_csv", tmp_path, *grouped))
    ends = [{path[-5] for path in paths_of(part)} for part in found]
    assert not ends[0] & ends[1]
    folded = ("TASK", "multilabel", "DATA.FOLDS", "3", "DATA.FOLD")
    found = [
        get_datasets(configured("multilabel_csv", tmp_path, *folded, str(fold)))[2]
        for fold in range(3)
    ]
    assert sorted(path for part in found for path in paths_of(part)) == sorted(
        paths_of(train) + paths_of(val)
    )
    assert [[part[n][1][2] for n in range(20)].count(1) for part in found] == [2, 2, 2]
    (tmp_path / "val.csv").write_text("image,two,three,ten\n")
    with pytest.raises(
        InputError,
        match=r"val.csv exists, but DATA.VAL_SPLIT 0.3 makes another validation set",
    ):
        get_datasets(configured("multilabel_csv", tmp_path, *own))


def test_shards_are_split_and_a_folder_of_classes_alone_has_folds(tmp_path):
    write_images(tmp_path / "in", {"a": 8, "b": 12})
    with tarfile.open(tmp_path / "train-0.tar", "w") as tar:
        for number in range(20):
            tar.add(
                tmp_path / "in" / ("a" if number < 8 else "b") / f"{number % 8}.png",
                f"{number:02d}.png",
            )
            label = tarfile.TarInfo(f"{number:02d}.cls")
            label.size = 1
            tar.addfile(label, io.BytesIO(b"0" if number < 8 else b"1"))
    _, train, val = get_datasets(configured("shards", tmp_path, *SPLIT))
    assert (np.bincount(train.labels).tolist(), np.bincount(val.labels).tolist()) == (
        [6, 9],
        [2, 3],
    )
    (tmp_path / "val-0.tar").write_bytes(b"")
    with pytest.raises(
        InputError,
        match=r"val-0.tar exists, but DATA.VAL_SPLIT 0.25 makes another validation set",
    ):
        get_datasets(configured("shards", tmp_path, *SPLIT))
    folded = ("DATA.FOLDS", "4", "DATA.FOLD")
    folds = [
        get_datasets(configured("folder", tmp_path / "in", *folded, str(fold)))[2]
        for fold in range(4)
    ]
    assert sorted(path for part in folds for path in paths_of(part)) == sorted(
        f"{name}/{n}.png" for name, count in (("a", 8), ("b", 12)) for n in range(count)
    )


def test_an_evaluation_of_a_part_tells_so(tmp_path):
    write_images(tmp_path, {"a": 8, "b": 12})
    for words, found in (
        (
            [*SPLIT],
            [
                "only 5 images of the data are evaluated (DATA.VAL_SPLIT 0.25); set DATA.VAL_SPLIT null for all"
            ],
        ),
        (
            ["DATA.FOLDS", "4"],
            ["only 5 images of the data are evaluated (DATA.FOLDS 4); set DATA.FOLDS null for all"],
        ),
        ([], []),
    ):
        config, _, val = get_datasets(configured("folder", tmp_path, "EVAL", "True", *words))
        assert (config.notes, len(val)) == (found, 5 if found else 20)


def test_what_does_nothing_is_refused(tmp_path):
    with pytest.raises(InputError, match="VAL_SPLIT has no effect with DATA.DATASET .*digits or"):
        get_config(None, ["DATA.DATASET", "digits", *SPLIT])
    with pytest.raises(
        InputError,
        match="SPLIT_SEED has no effect without DATA.VAL_SPLIT or DATA.FOLDS; leave it out",
    ):
        configured("folder", tmp_path, "DATA.SPLIT_SEED", "3")
    with pytest.raises(InputError, match="DATA.VAL_SPLIT is 1.0, expected 0 < value < 1"):
        configured("folder", tmp_path, "DATA.VAL_SPLIT", "1.0")
    write_images(tmp_path, {"a": 2})
    with pytest.raises(
        InputError,
        match=r"/train: no class folders; .*; without a val/, DATA.VAL_SPLIT splits the",
    ):
        get_datasets(configured("folder", tmp_path))
