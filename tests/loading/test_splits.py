"""Which images become the validation part: by a formula, by groups, and the same wherever it is asked for."""

import numpy as np
import pytest
from conftest import write_images

from config import get_config
from datasets import get_datasets
from errors import InputError
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
    chosen = {path for path, own in zip(PATHS, validation(PATHS, LABELS, 0.2, 0), strict=True) if own}
    order = np.random.default_rng(1).permutation(len(PATHS))
    shuffled = [PATHS[place] for place in order]
    assert {
        path for path, own in zip(shuffled, validation(shuffled, LABELS[order], 0.2, 0), strict=True) if own
    } == chosen
    more, labels = [*PATHS, *(f"train/3/new{n}.jpg" for n in range(10))], np.append(LABELS, [3] * 10)
    later = {path for path, own in zip(more, validation(more, labels, 0.2, 0), strict=True) if own}
    assert len(chosen - later) <= 2 <= len(later - chosen) <= 4  # a new one takes a place, or there is one place more
    other = validation(PATHS, LABELS, 0.2, 1)
    assert 0.1 < (other & validation(PATHS, LABELS, 0.2, 0)).sum() / other.sum() < 0.5


def test_groups_stay_together_and_meet_the_share():
    rng = np.random.default_rng(0)
    labels, people = rng.integers(3, size=600), rng.integers(60, size=600)
    paths = [
        f"{label}/person{person:02}_{place}.jpg"
        for place, (label, person) in enumerate(zip(labels, people, strict=True))
    ]
    chosen = validation(paths, labels, 0.25, 0, r"person(\d+)")
    assert not set(people[chosen]) & set(people[~chosen])
    assert abs(np.bincount(labels[chosen]) / np.bincount(labels) - 0.25).max() < 0.03
    assert groups_of(paths[:2], r"person\d+") == [f"person{person:02}" for person in people[:2]]


def test_a_class_of_few_large_groups_still_has_validation_images():
    labels, paths = np.repeat([0, 1], [30, 30]), [f"g{n % 3}/{n}" if n < 30 else f"h{n}/{n}" for n in range(60)]
    chosen = validation(paths, labels, 0.1, 0, "^(.*)/")
    assert np.bincount(labels[chosen]).tolist() == [10, 3]


def test_groups_may_be_listed_in_a_file(tmp_path):
    file = tmp_path / "groups.tsv"
    file.write_text("a/1.jpg\tx\r\nb/2 2.jpg\ty z\n")
    assert groups_of(["b/2 2.jpg", "a/1.jpg"], str(file)) == ["y z", "x"]
    with pytest.raises(InputError, match=r"1 of 2 images have no group that .*groups.tsv names, the first is a/3.jpg"):
        groups_of(["a/1.jpg", "a/3.jpg"], str(file))
    file.write_text("a/1.jpg x\n")
    with pytest.raises(InputError, match=r"groups.tsv: line 1: expected a path, a tab and a group; found 'a/1.jpg x'"):
        groups_of(["a/1.jpg"], str(file))
    with pytest.raises(InputError, match=r"1 of 1 images have no group that no_groups.tsv finds \(it is no file"):
        groups_of(["a/1.jpg"], "no_groups.tsv")
    with pytest.raises(InputError, match=r"VAL_SPLIT_GROUPS is '\(': no file, and no pattern \(missing \)"):
        groups_of(["a/1.jpg"], "(")


def test_one_group_alone_cannot_be_split():
    with pytest.raises(InputError, match=r"VAL_SPLIT 0.2: the groups of \^a leave no image for validation"):
        validation(["a/1", "a/2"], [0, 0], 0.2, 0, "^a")
    with pytest.raises(InputError, match=r"VAL_SPLIT 0.2: 1 images leave no image for validation"):
        validation(["a/1"], [0], 0.2, 0)


# ---------------------------------------------------------------- in a run


def configured(dataset, path, *options):
    data = ["DATA.DATASET", dataset, "DATA.DATA_PATH", str(path), "DATA.IMAGE_SIZE", "8", "DATA.NUM_WORKERS", "0"]
    return get_config(None, [*data, "MODEL.NUM_CLASSES", "auto", *options])


SPLIT = ("DATA.VAL_SPLIT", "0.25")


def paths_of(dataset):
    return [dataset.paths[index] for index in range(len(dataset))]


@pytest.mark.parametrize("where", ["train/", ""])
def test_a_folder_without_validation_is_split(tmp_path, where):
    write_images(tmp_path / where, {"a": 8, "b": 12})
    _, train, val = get_datasets(configured("folder", tmp_path, *SPLIT))
    assert (np.bincount(train.labels).tolist(), np.bincount(val.labels).tolist()) == ([6, 9], [2, 3])
    assert train.classes == val.classes == ["a", "b"]
    every = sorted(f"{where}{name}/{n}.png" for name, count in (("a", 8), ("b", 12)) for n in range(count))
    assert sorted(paths_of(train) + paths_of(val)) == every
    evaluated = get_datasets(configured("folder", tmp_path, *SPLIT, "EVAL", "True", "SEED", "7", "NGPUS", "2"))[2]
    assert paths_of(evaluated) == paths_of(val)
    assert (evaluated[1][0] == val[1][0]).all()
    other = get_datasets(configured("folder", tmp_path, *SPLIT, "DATA.VAL_SPLIT_SEED", "1"))[2]
    assert paths_of(other) != paths_of(val)
    grouped = get_datasets(configured("folder", tmp_path, *SPLIT, "DATA.VAL_SPLIT_GROUPS", r"([0-9])\.png"))
    ends = [{path[-5] for path in paths_of(part)} for part in grouped[1:]]
    assert not ends[0] & ends[1]
    (tmp_path / "val").mkdir()
    with pytest.raises(InputError, match=r"/val is there, and DATA.VAL_SPLIT 0.25 would make another; leave out one"):
        get_datasets(configured("folder", tmp_path, *SPLIT))


def test_a_list_without_validation_is_split(tmp_path):
    write_images(tmp_path, {"a": 8, "b": 12})
    rows = [
        f"{name}/{n}.png {label}" for label, (name, count) in enumerate((("a", 8), ("b", 12))) for n in range(count)
    ]
    (tmp_path / "train_list.txt").write_text("\n".join(rows))
    _, train, val = get_datasets(configured("imagenet2012", tmp_path, *SPLIT))
    folder = get_datasets(configured("folder", tmp_path, *SPLIT))[2]
    assert sorted(paths_of(val)) == sorted(paths_of(folder))
    assert len(train) + len(val) == 20
    (tmp_path / "val_list.txt").write_text(rows[0])
    with pytest.raises(InputError, match=r"val_list.txt is there, and DATA.VAL_SPLIT 0.25 would make another"):
        get_datasets(configured("imagenet2012", tmp_path, *SPLIT))


def test_what_does_nothing_is_refused(tmp_path):
    with pytest.raises(InputError, match="VAL_SPLIT does nothing without DATA.DATASET imagenet2012 or folder"):
        get_config(None, ["DATA.DATASET", "digits", *SPLIT])
    with pytest.raises(InputError, match="VAL_SPLIT_SEED does nothing without DATA.VAL_SPLIT; leave it out"):
        configured("folder", tmp_path, "DATA.VAL_SPLIT_SEED", "3")
    with pytest.raises(InputError, match="DATA.VAL_SPLIT is 1.0, expected 0 < value < 1"):
        configured("folder", tmp_path, "DATA.VAL_SPLIT", "1.0")
    write_images(tmp_path, {"a": 2})
    with pytest.raises(InputError, match=r"/train: no class folders; .*; without a val/, DATA.VAL_SPLIT splits what"):
        get_datasets(configured("folder", tmp_path))
