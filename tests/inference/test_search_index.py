"""FILE.index: images are added, removed and found; a stranger's file is read or refused."""

import errno
import json
import os
import shutil
import struct
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from sklearn.neighbors import NearestNeighbors
from support.hostile_files import a_share, attempt, damaged
from support.servers import write_checkpoint

from errors import InputError
from inference import approximate, feature_store, name_index, search_index
from inference.approximate import ApproximateSearch, recall
from inference.feature_store import FeatureExtractor, Rows
from inference.search import Collected, Found, Query, folder_metrics, nearest_of
from inference.search_index import add_images, open_index, remove_images
from loading.files import Paths
from tools import search as search_tool

SHA = "ab" * 32


class Features:
    """In place of a ``FeatureExtractor``: an image's features are told by its name."""

    def __init__(self, told, sha256=SHA):
        self.told = told
        self.weights = "weights"
        self.made = {
            "checkpoint": "/run", "sha256": sha256, "cfg": None, "options": [], "layer": None,
            "pool": "avg", "norm": False, "oriented": False,
        }  # fmt: skip

    def __call__(self, made):
        self.given = made
        return self

    def rows(self, images, workers=2):
        names = list(images)
        for first in range(0, len(names), 2):
            some = names[first : first + 2]
            rows = [self.told.get(os.path.basename(name)) for name in some]
            values = np.array([np.full(3, np.nan) if row is None else row for row in rows])
            errors = [
                "" if row is not None else f"{name}: broken"
                for row, name in zip(rows, some, strict=True)
            ]
            yield Rows(some, errors, values.astype(np.float32))


TOLD = {f"{letter}.jpg": [place, 1, 2] for place, letter in enumerate("abcdefg")}


def make(folder, *names, told=TOLD, **kwargs):
    """Adds images of a folder to its index; returns the index and what was added."""
    file = folder / "x.index"
    paths = [os.path.join(folder, name) for name in names]
    return file, add_images(file, Paths(paths), Features(told, **kwargs), 0)


def listed(file):
    stored, names = open_index(file)
    folder = f"{file.parent}/"
    found = [names.name(row).removeprefix(folder) for row in range(len(stored.values))]
    return dict(zip(found, stored.values.tolist(), strict=True))


@pytest.mark.smoke
def test_images_are_added_once_and_removed(tmp_path):
    file, added = make(tmp_path, "a.jpg", "sub/b.jpg", "broken.jpg", "sub/../a.jpg", "\udcff.jpg")
    assert (added.added, added.known) == (2, 1)
    assert [error.rpartition(": ")[2] for error in added.errors] == ["broken", "broken"]
    assert listed(file) == {"a.jpg": [0, 1, 2], "sub/b.jpg": [1, 1, 2]}
    before = file.read_bytes()
    _, added = make(tmp_path, "a.jpg", "sub/b.jpg")
    assert (added, file.read_bytes()) == ((0, 2, []), before)
    told = TOLD | {"\udcff.jpg": [9, 9, 9]}
    _, added = make(tmp_path, "c.jpg", "a.jpg", "\udcff.jpg", "sub/d.jpg", told=told)
    assert added == (3, 1, [])
    assert list(listed(file)) == ["a.jpg", "sub/b.jpg", "c.jpg", "\udcff.jpg", "sub/d.jpg"]
    assert listed(file)["\udcff.jpg"] == [9, 9, 9]
    # A folder, a pattern and a file; a file's name may begin as a folder's.
    assert remove_images(file, [str(tmp_path / "sub"), str(tmp_path / "[c]*")]) == 3
    assert list(listed(file)) == ["a.jpg", "\udcff.jpg"]
    assert [path.name for path in tmp_path.iterdir()] == ["x.index"]


def test_what_cannot_be_done_changes_nothing(tmp_path, monkeypatch):
    def fail(_):
        raise OSError(errno.ENOSPC, "full")

    file, _ = make(tmp_path, "a.jpg", "b.jpg")
    before = file.read_bytes()
    for call, message in (
        (
            lambda: remove_images(file, [str(tmp_path / "a.jpg"), "z.jpg"]),
            "has no image z.jpg; -list",
        ),
        (lambda: remove_images(file, [str(tmp_path)]), "would have no image left; remove the file"),
        (
            lambda: make(tmp_path, "c.jpg", sha256="cd" * 32),
            "doesn't have the weights of the features of .*",
        ),
        (lambda: add_images(tmp_path / "x.npy", Paths(["a"]), Features(TOLD)), "the ending .index"),
    ):
        with pytest.raises(InputError, match=message):
            call()
    with monkeypatch.context() as patch, pytest.raises(OSError, match="full"):
        patch.setattr("launch.files.os.fsync", fail)
        make(tmp_path, "c.jpg")
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["x.index"]
    other = tmp_path / "y"
    other.mkdir()
    with pytest.raises(InputError, match="none of the images can be read"):
        make(other, "broken.jpg")
    assert not list(other.iterdir())


def test_a_link_is_not_written_through(tmp_path):
    file, _ = make(tmp_path, "a.jpg")
    link = tmp_path / "y.index"
    link.symlink_to(file)
    before = file.read_bytes()
    with pytest.raises(OSError, match="link"):
        add_images(link, Paths([str(tmp_path / "b.jpg")]), Features(TOLD), 0)
    assert file.read_bytes() == before


def random_index(folder, images=200, width=8, seed=0):
    """An index of random features, some of which are equal."""
    generator = np.random.default_rng(seed)
    values = generator.normal(size=(images, width)).astype(np.float32)
    values[images // 2 : images // 2 + 9] = values[:9]
    told = {f"{place:04d}.jpg": row for place, row in enumerate(values)}
    file, _ = make(folder, *told, told=told)
    return Collected(file), values


@pytest.mark.smoke
def test_one_query_and_many_find_scikit_learns_neighbours(tmp_path, monkeypatch):
    collected, values = random_index(tmp_path)
    monkeypatch.setattr(feature_store, "_BLOCK", 4 * 8 * 7)
    queries = np.random.default_rng(1).normal(size=(20, 8)).astype(np.float32)
    # A stored image, of which there is a second one, and a query that isn't a unit vector.
    queries[3] = 7 * values[4]
    search = NearestNeighbors(n_neighbors=30, metric="cosine", algorithm="brute")
    distances, rows = search.fit(values.astype(np.float64)).kneighbors(queries.astype(np.float64))
    found = collected.rows([Query(query) for query in queries], 12)
    for place, own in enumerate(found):
        similarities = (1 - distances[place]).round(12)
        # Of equal ones the first comes first; scikit-learn gives those in any order.
        order = np.lexsort((rows[place], -similarities))[:12]
        assert [each.row for each in own] == rows[place][order].tolist()
        expected = similarities[order]
        np.testing.assert_allclose([each.similarity for each in own], expected, atol=2e-12)
        assert collected.rows([Query(queries[place])], 12) == [own]
    assert [each.row for each in found[3][:2]] == [4, 104]
    left_out = collected.rows([Query(queries[3], {4}), Query(queries[3])], 3)
    assert [each.row for each in left_out[0]] == [each.row for each in found[3]][1:4]
    assert left_out[1] == found[3][:3]
    with pytest.raises(InputError, match="the query has 5 features, the stored ones 8"):
        collected.rows([Query(np.ones(5))], 2)


@pytest.mark.smoke
@pytest.mark.parametrize("kind", approximate.KINDS)
def test_faiss_finds_the_exact_neighbours_in_their_order(tmp_path, kind):
    collected, values = random_index(tmp_path, 1000)
    queries = [Query(row, {place}) for place, row in enumerate(values[:50])]
    exact = collected.rows(queries, 10)
    search = ApproximateSearch(collected.stored, kind)
    found = collected.rows(queries, 10, search)
    share = recall(found, exact)
    assert share == 1 if kind == "flat" else share > 0.6
    for query, own, wanted in zip(queries, found, exact, strict=True):
        assert not {each.row for each in own} & set(query.rows)
        # What is found has the exact numbers and the exact order.
        both = [each for each in wanted if each in own]
        assert [each for each in own if each in wanted] == both
    if kind == "flat":
        assert found == exact
    many = collected.rows(queries[:2], 5000, ApproximateSearch(collected.stored, "flat"))
    assert [len(own) for own in many] == [999, 999]


def test_recall_counts_neighbours_of_all_queries():
    exact = [[Found(1, 0.9), Found(2, 0.8)], [Found(3, 0.7)]]
    assert recall(exact, exact) == 1
    assert recall([[Found(2, 0.8)], []], exact) == pytest.approx(1 / 3)
    assert recall([], []) == 0


def test_features_that_cannot_be_found_are_skipped_by_faiss_too(tmp_path):
    _, values = random_index(tmp_path, 60)
    values[[0, 7, 59]] = [[np.nan] * 8, [0] * 8, [np.inf] * 8]
    file = tmp_path / "x.index"
    content = bytearray(file.read_bytes())
    content[1 << 16 : (1 << 16) + values.nbytes] = values.tobytes()
    file.write_bytes(content)
    collected = Collected(file)
    for kind in (None, *approximate.KINDS):
        search = kind and ApproximateSearch(collected.stored, kind)
        [found] = collected.rows([Query(values[3])], 100, search)
        assert {each.row for each in found} == set(range(60)) - {0, 7, 59}
    values[:] = 0
    content[1 << 16 : (1 << 16) + values.nbytes] = values.tobytes()
    file.write_bytes(content)
    with pytest.raises(InputError, match="no features to search"):
        ApproximateSearch(Collected(file).stored, "flat")


def test_without_faiss_a_line_says_how_to_install_it(tmp_path, monkeypatch):
    collected, _ = random_index(tmp_path, 20)
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(
        InputError, match="isn't installed: pip install faiss-cpu==.*, or leave it out"
    ):
        ApproximateSearch(collected.stored, "hnsw")


def test_the_class_of_an_image_is_its_folder(tmp_path):
    told = {
        "a.jpg": [1, 0, 0],
        "b.jpg": [1, 0.1, 0],
        "c.jpg": [0, 1, 0],
        "d.jpg": [0.1, 1, 0],
        "e.jpg": [1, 1, 0],
    }
    file, _ = make(tmp_path, "x/a.jpg", "x/b.jpg", "y/c.jpg", "y/d.jpg", "z/e.jpg", told=told)
    metrics, images, queries = folder_metrics(Collected(file), (1, 2))
    assert (images, queries) == (5, 4)
    assert metrics == {"recall_1": 100, "recall_2": 100, "mAP": 100, "mAP_R": 100}
    other = tmp_path / "other"
    other.mkdir()
    file, _ = make(other, "x/a.jpg", "y/b.jpg")
    with pytest.raises(InputError, match="has no folder with two images"):
        folder_metrics(Collected(file), (1,))


def test_a_strangers_index_is_read_or_refused(tmp_path):
    file, _ = make(tmp_path, *TOLD)
    whole = file.read_bytes()
    told = json.loads(whole[: 1 << 16])
    arrays = whole[1 << 16 :]

    def show():
        stored, names = open_index(file)
        assert all(len(names.name(row)) < 20_000 for row in range(len(stored.values)))
        nearest_of(np.ones([1, stored.values.shape[1]]), stored.blocks(), 3)

    def attempted(content):
        file.write_bytes(content)
        return attempt("index of images", len(content), show)

    def with_head(**changed):
        return json.dumps(told | changed).encode().ljust((1 << 16) - 1) + b"\n" + arrays

    assert attempted(whole) == ""
    for content, message in (
        (b"", "it isn't an index of tools/search.py -index"),
        (b"\x80\x04pickle", "it isn't an index of tools/search.py"),
        (whole[:-1], "doesn't match 7 images of 3 features"),
        (with_head(rows=6), "doesn't match 6 images"),
        (with_head(rows=0), "its rows is 0, expected a number of images from 1 on"),
        (with_head(rows=1 << 47, width=1 << 31), "which doesn't match"),
        (with_head(width=-3), "its width is -3, expected"),
        (with_head(kind="index of images, 9"), "its kind is 'index of images, 9', expected"),
        (with_head(sha256=None), "its sha256 is None, expected a SHA-256"),
        (with_head(options="rm -rf"), "its options is 'rm -rf', expected a list of words"),
        (
            with_head(checkpoint=["x"]),
            "its checkpoint is ['x'], expected a path",
        ),
        (
            whole[: 1 << 16] + arrays[:88] + struct.pack("<7Q", 5, *6 * [3]) + arrays[144:],
            "row 1 is at 5 to 3",
        ),
    ):
        assert message in attempted(content), message

    @a_share(6)
    @given(damaged(whole))
    def any_damage(content):
        attempted(content)

    @a_share(6)
    @given(st.dictionaries(st.sampled_from([*told]), st.integers(-2, 1 << 50) | st.none()))
    def any_head(changed):
        attempted(with_head(**changed))

    any_damage()
    any_head()


def run(*arguments, folder):
    command = [sys.executable, ROOT / "tools/search.py", *arguments]
    done = subprocess.run(list(map(str, command)), cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_the_tool(tmp_path):
    write_checkpoint(tmp_path / "w.safetensors")
    generator = np.random.default_rng(0)
    for name in ("a/0", "a/1", "b/0", "b/1", "b/2"):
        (tmp_path / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(0, 255, (32, 32, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"images/{name}.png")
    (tmp_path / "images/b/broken.png").write_bytes(b"x")
    status, printed, errors = run(
        "-index", "x.index", "images/a", "-checkpoint", "w.safetensors", folder=tmp_path
    )
    assert (status, printed) == (0, "x.index: 2 images added, 0 known, 0 can't be read\n"), errors
    status, printed, errors = run("-index", "x.index", "images", folder=tmp_path)
    assert (status, printed) == (1, "x.index: 3 images added, 2 known, 1 can't be read\n")
    assert "broken.png" in errors
    status, printed, _ = run("-index=x.index", "-list", folder=tmp_path)
    assert [line.rpartition("images/")[2] for line in printed.split()] == [
        "a/0.png", "a/1.png", "b/0.png", "b/1.png", "b/2.png",
    ]  # fmt: skip
    # The folder gives what the index does.
    query = "images/a/0.png"
    _, expected, _ = run(query, "images", "-checkpoint=w.safetensors", folder=tmp_path)
    status, printed, errors = run(query, "x.index", folder=tmp_path)
    assert (status, errors) == (0, "")
    for line, other in zip(printed.splitlines()[1:], expected.splitlines()[1:], strict=True):
        assert line.endswith(other.split()[1])
        assert float(line.split()[0]) == pytest.approx(float(other.split()[0]), abs=2e-4)
    status, both, _ = run(query, "images/b/1.png", "x.index", folder=tmp_path)
    assert both.startswith(f"{query}\n{printed}images/b/1.png\nsimilarity  file\n")
    status, by_faiss, errors = run(query, "x.index", "-faiss=hnsw", folder=tmp_path)
    assert (status, by_faiss) == (0, printed)
    assert errors.startswith("faiss hnsw: recall 100.00 % of the exact 10 of 1 query; built in ")
    status, printed, errors = run("-metrics", "x.index", folder=tmp_path)
    assert printed.startswith("recall_1: ")
    assert printed.endswith("\n5 images, of which 5 have another one in their folder\n")
    status, printed, _ = run(
        "-index=x.index", "-remove", "images/a", "images/b/2.png", folder=tmp_path
    )
    assert (status, printed) == (0, "x.index: 3 images removed\n")
    # An index that was moved, with weights that were moved.
    shutil.move(tmp_path / "w.safetensors", tmp_path / "moved.safetensors")
    status, _, errors = run(query, "x.index", folder=tmp_path)
    assert status == 2
    status, printed, errors = run(
        query, "x.index", "-checkpoint=moved.safetensors", folder=tmp_path
    )
    assert (status, len(printed.splitlines()), errors) == (0, 3, "")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["x.index"], "error: expected a query and where to search it, found 1 path; see -h"),
        (["-list"], "error: -remove and -list need the index; add -index FILE.index"),
        (
            ["-index=x.index"],
            "error: -index takes either images to add, or -remove PATH ..., or -list",
        ),
        (
            ["-index=x.index", "a", "-list"],
            "error: -index takes either images to add, or -remove PATH",
        ),
        (["-index=x.npy", "-list"], "error: x.npy: an index needs the ending .index"),
        (["-index=x.index", "-list"], "error: x.index: can't be read as an index of images"),
        (["-metrics"], "error: -metrics takes an index or a file of features, found 0 paths"),
        (["a", ".", "-faiss=ivf"], "error: -faiss searches an index or a file of features; make"),
        (
            ["a", "b", "x.index", "-grid=y.png"],
            "error: -grid draws the neighbours of one query, found 2",
        ),
        (
            ["-index=x.index", "a", "-faiss=ivf"],
            "error: -grid and -faiss are for a search; leave out",
        ),
    ],
)
def test_a_wrong_command_line_is_a_line(tmp_path, words, line):
    status, printed, errors = run(*words, folder=tmp_path)
    assert (status, printed) == (2, "")
    assert errors.startswith(line)
    assert errors.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_the_extractor_is_that_of_the_index(tmp_path):
    """Pool, layer and norm are those that the index was made by."""
    write_checkpoint(tmp_path / "w.safetensors")
    Image.new("RGB", (32, 32), "red").save(tmp_path / "a.png")
    file = tmp_path / "x.index"

    def extractor(made):
        assert made is None
        return FeatureExtractor(tmp_path / "w.safetensors", layer=-1, pool="avg", norm=True)

    add_images(file, Paths([str(tmp_path / "a.png")]), extractor, 0)
    collected = Collected(file)
    assert collected.extractor.made == {
        name: collected.stored.made[name] for name in search_index._MADE
    }


def test_a_url_is_an_image_and_other_words_may_be_texts():
    for query in ("https://a/b", "photo.jpg", "a red flower.PNG"):
        assert not search_tool._is_text(query)
    assert search_tool._is_text("a red flower")


def test_the_folder_of_an_index_cannot_make_its_names_urls():
    for form in (feature_store.FORM, name_index._FORM):
        assert form["folder"].holds("/data/photos")
        assert not form["folder"].holds("http://a")
        assert not form["folder"].holds("")
