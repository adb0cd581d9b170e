"""Which images to label next: the rules by hand, near duplicates, ties, and memory."""

import csv
import shutil
import tracemalloc

import numpy as np
import pytest
from conftest import TINY
from PIL import Image
from scipy.spatial.distance import cdist
from support.training_runs import train

from inference import Predictor, selection
from inference.acquisition import (
    RULES,
    alike,
    distances_to,
    farthest,
    margins,
    unlike,
)
from inference.feature_store import FeatureExtractor
from inference.label_errors import all_images
from inference.selection import choose, read_pool, write
from loading.files import Paths
from loading.sources import _digits

# Hashes of which no two are alike: the bits of each are those of its number, eight times.
HASHES = np.array([int(f"{number:02x}" * 8, 16) for number in range(256)], np.uint64)
FAR = HASHES[[0, 1, 2, 4, 8, 16, 32, 64, 128, 3, 5, 6]]


@pytest.mark.smoke
def test_margins():
    shares = np.array([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [0.4, 0.4, 0.2]])
    np.testing.assert_allclose(margins(shares), [0.2, 0.7, 0.0], atol=1e-15)
    several = np.array([[0.9, 0.45], [0.5, 0.0], [1.0, 0.0]])
    np.testing.assert_allclose(margins(several, True), [0.1, 0.0, 1.0], atol=1e-15)
    assert margins(np.ones((2, 1))).tolist() == [1, 1]


@pytest.mark.smoke
def test_of_images_that_look_alike_the_first_is_taken():
    assert unlike(FAR).tolist() == list(range(12))
    # Four bits differ: the images look alike. Five bits differ: they don't.
    near = np.array(
        [FAR[3], FAR[1], FAR[3] ^ np.uint64(0b1111), FAR[3] ^ np.uint64(0b11111), FAR[1], FAR[2]],
        np.uint64,
    )
    assert unlike(near).tolist() == [0, 1, 3, 5]
    # The third is near the second alone, which isn't taken.
    chain = np.array(
        [FAR[3], FAR[3] ^ np.uint64(0b1111), FAR[3] ^ np.uint64(0b11111111), FAR[3]], np.uint64
    )
    assert unlike(chain).tolist() == [0, 2]
    assert unlike(FAR[:0]).tolist() == []


@pytest.mark.smoke
def test_the_core_set_is_the_greedy_one():
    rng = np.random.default_rng(0)
    features = rng.normal(size=(200, 6)).astype(np.float32)
    centres = rng.normal(size=(7, 6)).astype(np.float32)
    chosen, distances = farthest(features, distances_to(features, centres), 12)
    # The same, from the table of all distances.
    between = cdist(features.astype(np.float64), features.astype(np.float64))
    nearest = cdist(features.astype(np.float64), centres.astype(np.float64)).min(1)
    expected = []
    for _ in range(12):
        place = int(nearest.argmax())
        expected.append((place, nearest[place]))
        nearest = np.minimum(nearest, between[place])
    assert chosen == [place for place, _ in expected]
    np.testing.assert_allclose(distances, [distance for _, distance in expected], rtol=1e-6)
    assert distances == sorted(distances, reverse=True)


def test_equal_distances_are_in_order():
    features = np.float32([[0, 0], [2, 0], [0, 2], [2, 0], [-2, 0]])
    centre = np.zeros((1, 2), np.float32)
    chosen, distances = farthest(features, distances_to(features, centre), 9)
    assert chosen == [1, 2, 4, 0, 3]
    assert distances == [2, 2, 2, 0, 0]
    # Without a centre, the first image comes first.
    none = distances_to(features, np.zeros((0, 2)))
    assert np.isinf(none).all()
    assert farthest(features, none, 1) == ([0], [np.inf])
    assert farthest(features[:0], none[:0], 3) == ([], [])


def test_memory_grows_with_the_images_alone():
    count = 20_000
    features = np.zeros((count, 4), np.float32)
    features[:, 0] = np.arange(count)
    tracemalloc.start()
    try:
        distances = distances_to(features, features[:5000])
        chosen, _ = farthest(features, distances, 5)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert chosen[0] == count - 1
    # A table of all distances would take 800 MB.
    assert peak < 40 << 20


def test_hashes_near_another_set():
    others = FAR[:3]
    hashes = np.array([FAR[1], FAR[2] ^ np.uint64(0b1111), FAR[2] ^ np.uint64(0b11111), FAR[7]])
    assert alike(hashes, others).tolist() == [True, True, False, False]
    assert alike(hashes, others[:0]).tolist() == [False] * 4


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A run on 30 digits, and a pool of 40 others with a copy of a labelled one, a copy of one of
    the pool's, a blank and a broken image.
    """
    root = tmp_path_factory.mktemp("next")
    images, labels, _ = _digits("train")
    for index in range(70):
        folder = root / "pool" / "deep"
        if index < 30:
            folder = root / "data" / "train" / str(labels[index])
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images[index]).save(folder / f"{index:02}.png")
    pool = root / "pool"
    labelled = next((root / "data").glob("train/*/00.png"))
    shutil.copy(labelled, pool / "labelled.png")
    shutil.copy(pool / "deep" / "40.png", pool / "twin.png")
    Image.new("L", (8, 8), 200).save(pool / "blank.png")
    (pool / "broken.png").write_bytes(labelled.read_bytes()[:60])
    keys = [*TINY, "DATA.DATASET", "folder", "DATA.DATA_PATH", str(root / "data")]
    train([*keys, "DATA.VAL_SPLIT", "0.3", "DATA.BATCH_SIZE", "7"], root / "run")
    return root


@pytest.fixture(scope="module")
def read(place):
    labelled = all_images(str(place / "run"), workers=0)
    assert len(labelled.dataset) == 30
    paths = Paths(sorted(str(file) for file in (place / "pool").rglob("*.png"))[::-1])
    return labelled, read_pool(paths, labelled, 1)


def test_the_pool_leaves_out_what_has_a_label_or_shows_nothing(read):
    _, pool = read
    assert len(pool.paths) == 44
    assert pool.blank == 1
    assert pool.known >= 1
    assert pool.twins >= 1
    assert [("broken.png" in problem) for problem in pool.problems] == [True]
    paths = [pool.paths[row] for row in pool.usable.tolist()]
    assert len(paths) == 44 - 2 - pool.known - pool.twins
    names = [path.rpartition("/")[2] for path in paths]
    assert {"broken.png", "blank.png", "labelled.png", "twin.png"}.isdisjoint(names)
    assert "40.png" in names
    assert paths == sorted(paths)


@pytest.mark.smoke
@pytest.mark.parametrize("rule", RULES)
def test_each_rule_on_a_run(read, place, rule, tmp_path):
    labelled, pool = read
    chosen = choose(pool, labelled, 6, rule, workers=0)
    assert len(chosen.rows) == len(set(chosen.rows)) == 6
    assert set(chosen.rows) <= set(pool.usable.tolist())
    paths = [pool.paths[row] for row in pool.usable.tolist()]
    predictor = Predictor(place / "run")
    logits = np.concatenate([predictor.logits(predictor.pixels(path)[None]) for path in paths])
    by_margin = margins(predictor.probabilities(logits))
    rows = FeatureExtractor(place / "run")
    features = np.concatenate([rows.logits(rows.pixels(path)[None]) for path in paths])
    known = labelled.dataset
    centres = np.concatenate(
        [rows.logits(rows.pixels(known.name(index))[None]) for index in range(len(known))]
    )
    distances = distances_to(features, centres)
    # 60 of them are taken by their margin, more than there are. So "mixed" covers all.
    expected = {
        "margin": np.argsort(by_margin, kind="stable")[:6],
        "energy": np.argsort(np.log(np.exp(np.float64(logits)).sum(1)), kind="stable")[:6],
        "coverage": farthest(features, distances, 6)[0],
        "mixed": farthest(features, distances, 6)[0],
    }
    assert chosen.rows == pool.usable[expected[rule]].tolist()
    again = choose(pool, labelled, 6, rule, workers=0)
    assert (again.rows, again.values) == (chosen.rows, chosen.values)
    names = write(tmp_path / "out", pool, chosen, rule, labelled)
    assert names == ["chosen.csv", "chosen.txt", "sheet_1.png"]
    listed = (tmp_path / "out" / "chosen.txt").read_text().splitlines()
    assert listed == [pool.paths[row] for row in chosen.rows]
    with open(tmp_path / "out" / "chosen.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["image"] for row in table] == listed
    value = {"margin": "margin", "energy": "energy"}.get(rule, "distance")
    assert list(table[0]) == ["image", value, "class", "probability"]
    assert float(table[0][value]) == pytest.approx(chosen.values[0], abs=1e-6)
    assert (table[0]["class"] != "") == (rule != "coverage")


def test_more_than_there_are(read):
    labelled, pool = read
    for rule in ("margin", "coverage"):
        chosen = choose(pool, labelled, 500, rule, workers=0)
        assert sorted(chosen.rows) == sorted(pool.usable.tolist())


def test_several_labels_have_margins_and_energies(read):
    labelled, pool = read
    one = choose(pool, labelled, 40, "energy", workers=0)
    several = choose(pool, labelled._replace(task="multilabel"), 40, "energy", workers=0)
    # The sum of the classes' energies, -log(1 + exp(logit)).
    assert sorted(several.rows) == sorted(one.rows)
    assert several.values != one.values
    assert several.values == sorted(several.values, reverse=True)
    margin = choose(pool, labelled._replace(task="multilabel"), 40, "margin", workers=0)
    assert margin.values == sorted(margin.values)


def test_shortlist_is_ten_for_one(read, monkeypatch):
    labelled, pool = read
    monkeypatch.setattr(selection, "SHORTLIST", 1)
    mixed = choose(pool, labelled, 5, "mixed", workers=0)
    margin = choose(pool, labelled, 5, "margin", workers=0)
    assert sorted(mixed.rows) == sorted(margin.rows)
