"""Folds: held to scikit-learn's; each sample is validated on once."""

import io
import tarfile

import numpy as np
import pytest
from conftest import write_images

from config import get_config
from datasets import get_datasets
from errors import InputError
from loading.folds import folds

RNG = np.random.default_rng(0)
LABELS = RNG.permutation(np.repeat(np.arange(7), [40, 3, 17, 101, 5, 2, 29]))


def table(labels, parts):
    """Samples by class and part."""
    found = np.zeros((labels.max() + 1, parts.max() + 1), int)
    np.add.at(found, (labels, parts), 1)
    return found


@pytest.mark.smoke
@pytest.mark.filterwarnings("ignore:The least populated class")
def test_folds_are_as_even_as_scikit_learns():
    from sklearn.model_selection import StratifiedKFold

    theirs = np.empty(len(LABELS), int)
    for number, (_, test) in enumerate(
        StratifiedKFold(5, shuffle=True, random_state=0).split(LABELS, LABELS)
    ):
        theirs[test] = number
    tables = [table(LABELS, parts) for parts in (folds(LABELS, 5, 0), theirs)]
    np.testing.assert_array_equal(*(np.sort(found, axis=1) for found in tables))
    np.testing.assert_array_equal(*(np.sort(found.sum(0)) for found in tables))


def test_a_fold_is_a_function_of_the_seed():
    one = folds(LABELS, 5, 1)
    np.testing.assert_array_equal(folds(LABELS, 5, 1), one)
    assert (one != folds(LABELS, 5, 2)).mean() > 0.6
    # as long as this holds, no release trains on what another one validated on
    assert folds(np.arange(20) % 3, 5, 1).tolist() == [
        0,
        1,
        2,
        4,
        2,
        3,
        1,
        2,
        0,
        3,
        0,
        1,
        2,
        4,
        4,
        0,
        3,
        4,
        1,
        3,
    ]


def test_groups_stay_together_and_folds_are_near_their_shares():
    groups = RNG.integers(0, 400, 3000)
    labels = (groups % 10 + (RNG.random(3000) < 0.1)) % 10  # most of a group are of one class
    parts = folds(labels, 4, 0, list(map(str, groups)))
    assert all(len(np.unique(parts[groups == group])) == 1 for group in np.unique(groups))
    found = table(labels, parts)
    assert found.sum(0).max() - found.sum(0).min() <= np.bincount(groups).max()
    np.testing.assert_allclose(found / found.sum(1, keepdims=True), 0.25, atol=0.03)


def test_a_class_has_to_be_in_two_folds():
    labels = np.array([0] * 20 + [1] * 2 + [2])
    with pytest.raises(
        InputError,
        match="the class owl is in only one fold, expected two images of it or more \\(1",
    ):
        folds(labels, 5, 0, classes=["cat", "dog", "owl"])
    with pytest.raises(
        InputError, match="the class 1 is in only one fold, expected two groups of it"
    ):
        folds(labels[:22], 2, 0, [*map(str, range(20)), "a", "a"])
    with pytest.raises(
        InputError, match="DATA.FOLDS is 6: 2 folds of 4 images would be empty; use fewer"
    ):
        folds(np.zeros(4, int), 6, 0)


# ------------------------------------------------------------------ as keys


def parts(options):
    """The training and the validation set, by fold."""
    found = []
    for fold in range(3):
        config = get_config(
            None, [*options, "DATA.FOLDS", "3", "DATA.FOLD", str(fold), "MODEL.NUM_CLASSES", "auto"]
        )
        _, train, val = get_datasets(config)
        found.append((train, val))
    return found


def test_each_sample_of_a_folder_or_its_shards_is_validated_on_once(tmp_path):
    write_images(tmp_path / "train", {"cat": 7, "dog": 5})  # and no val/
    options = ["DATA.DATASET", "folder", "DATA.DATA_PATH", str(tmp_path)]
    found = parts(options)
    paths = [[list(part.paths) for part in pair] for pair in found]
    everything = sorted(paths[0][0] + paths[0][1])
    assert len(everything) == 12
    assert sorted(path for _, val in paths for path in val) == everything
    for (train, val), (own, held) in zip(found, paths, strict=True):
        assert sorted(own + held) == everything
        assert all(
            path.split("/")[1] == train.classes[label]
            for path, label in zip(own, train.labels, strict=True)
        )
        assert np.bincount(val.labels).tolist() in ([2, 2], [3, 1], [2, 1], [3, 2])
    grouped = parts([*options, "DATA.SPLIT_GROUPS", r"/\d"])  # 0.png of both classes, and so on
    names = [{path.split("/")[-1] for path in val.paths} for _, val in grouped]
    assert sum(map(len, names)) == len(set.union(*names)) == 7
    with tarfile.open(tmp_path / "train-0.tar", "w") as tar:
        for number, path in enumerate(everything):
            tar.add(tmp_path / path, f"{number:02d}.png")
            label = tarfile.TarInfo(f"{number:02d}.cls")
            label.size = 1
            tar.addfile(label, io.BytesIO(b"0" if "cat" in path else b"1"))
    packed = parts(["DATA.DATASET", "shards", "DATA.DATA_PATH", str(tmp_path)])
    for (train, val), (shards, held) in zip(found, packed, strict=True):
        for one, other in ((train, shards), (val, held)):
            assert [one.data(i) for i in range(len(one))] == [
                other.data(i) for i in range(len(other))
            ]
            np.testing.assert_array_equal(one.labels, other.labels)
    cache = ["DATA.CACHE", str(tmp_path / "cache")]  # labels alike don't make parts of shards alike
    kept = parts(["DATA.DATASET", "shards", "DATA.DATA_PATH", str(tmp_path), *cache])
    for mine, theirs in zip(sum(packed, ()), sum(kept, ()), strict=True):
        for index in range(len(mine)):
            np.testing.assert_array_equal(mine.image(index), theirs.image(index))


def test_folds_of_arrays_are_cached_apart(tmp_path):
    options = ["DATA.DATASET", "digits"]
    plain, kept, again = (
        parts([*options, *more]) for more in ([], *[["DATA.CACHE", str(tmp_path)]] * 2)
    )
    assert sum(len(val) for _, val in plain) == len(plain[0][0]) + len(plain[0][1]) == 1433
    for one, two, three in zip(plain, kept, again, strict=True):
        for mine, theirs in zip((*one, *one), (*two, *three), strict=True):
            np.testing.assert_array_equal(mine.labels, theirs.labels)
            np.testing.assert_array_equal(mine.image(5), theirs.image(5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["DATA.FOLDS", "1"], "DATA.FOLDS is 1, expected 2 to 1000"),
        (["DATA.FOLDS", "3", "DATA.FOLD", "3"], "DATA.FOLD is 3, expected 0 to 2, below FOLDS"),
        (
            ["DATA.SPLIT_GROUPS", "x"],
            "DATA.SPLIT_GROUPS has no effect without DATA.VAL_SPLIT or DATA.FOLDS",
        ),
        (["DATA.FOLD", "0"], "DATA.FOLD has no effect without DATA.FOLDS"),
        (
            ["DATA.SPLIT_SEED", "0"],
            "DATA.SPLIT_SEED has no effect without DATA.VAL_SPLIT or DATA.FOLDS",
        ),
        (
            ["DATA.FOLDS", "3", "DATA.DATASET", "synthetic"],
            "DATA.FOLDS has no effect with DATA.DATASET synthetic",
        ),
        (
            ["DATA.FOLDS", "3", "DATA.DATASET", "digits", "DATA.SPLIT_GROUPS", "x"],
            "DATA.SPLIT_GROUPS has no effect wi",
        ),
    ],
)
def test_what_cannot_be_is_named(options, message):
    with pytest.raises(InputError, match=message):
        get_config(None, options)
