"""Features of images in files, and the images nearest to one."""

import csv
import json
import os
import shutil
import subprocess

import numpy as np
import paddle
import pytest
import warm
from conftest import ROOT
from PIL import Image
from safetensors.numpy import load_file, save_file
from sklearn.datasets import load_sample_images

from config import get_config
from errors import InputError
from inference import Predictor
from inference.feature_store import FeatureExtractor, open_features, write_features
from inference.inputs import paths_of
from inference.search import Neighbour, in_images, nearest, nearest_in, of_image, write_grid
from models import build_model
from training.checkpoint import describe
from training.checkpoint.description import METADATA
from weights import file_arrays
from weights.formats import read_metadata

SIZES = [
    "DATA.IMAGE_SIZE",
    "32",
    "MODEL.PATCH_SIZE",
    "8",
    "MODEL.EMBED_DIM",
    "16",
    "MODEL.DEPTH",
    "3",
]
SIZES += ["MODEL.NUM_HEADS", "2", "MODEL.NUM_CLASSES", "3", "DATA.IMAGE_CHANNELS", "3"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The file of a small ViT with two prefix tokens, whose classifier isn't zero."""
    paddle.seed(0)
    config = get_config(
        "vit_digits", [*SIZES, "MODEL.REG_TOKENS", "1", "MODEL.GLOBAL_POOL", "token"]
    )
    model = build_model(config)
    for parameter in model.parameters():
        parameter.set_value(parameter + 0.2 * paddle.randn(parameter.shape))
    file = tmp_path_factory.mktemp("weights") / "model.safetensors"
    save_file(file_arrays(model), file, {METADATA: describe(config, ["a", "b", "c"]).to_json()})
    return file


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Crops of two photographs: china's, a broken one, flower's in a subfolder; one name that is no
    UTF-8.
    """
    root = tmp_path_factory.mktemp("pictures")
    (root / "sub").mkdir()
    for photograph, name in zip(load_sample_images().images, ("china", "sub/flower"), strict=True):
        for place in range(4):
            Image.fromarray(photograph[10 * place : 300, 5 * place : 400]).save(
                root / f"{name}{place}.jpg"
            )
    (root / "china9.jpg").write_bytes((root / "china0.jpg").read_bytes()[:300])
    shutil.copy(root / "china0.jpg", str(root).encode() + b'/a\xff,"b".jpg')
    return root


@pytest.fixture(scope="module")
def written(checkpoint, folder, tmp_path_factory):
    """(the images' paths, FILE.npy, what ``write_features`` returned)."""
    output = tmp_path_factory.mktemp("written") / "features.npy"
    images = paths_of([str(folder)])
    return (
        images,
        output,
        write_features(FeatureExtractor(checkpoint, batch_size=4), images, output, workers=2),
    )


@pytest.mark.smoke
def test_features_are_what_the_classifier_reads(checkpoint, written):
    images, output, made = written
    found = np.load(output)
    assert (found.shape, found.dtype, made["shape"], made["failures"]) == (
        (10, 16),
        np.float32,
        [10, 16],
        1,
    )
    features = FeatureExtractor(checkpoint)
    weights = load_file(checkpoint)
    logits = found @ weights["head.weight"].T + weights["head.bias"]
    predictor = Predictor(checkpoint)
    for place, path in enumerate(images):
        if "china9" not in path:
            expected = predictor.logits(predictor.pixels(path)[None])[0]
            np.testing.assert_allclose(logits[place], expected, atol=1e-5)
            np.testing.assert_allclose(of_image(features, path), found[place], atol=1e-5)
    assert np.abs(np.diff(found[[0, 2]], axis=0)).max() > 0.01


def test_the_index_has_a_row_for_each_image_in_order(written):
    images, output, _ = written
    with open(output.with_suffix(".csv"), newline="", errors="surrogateescape") as file:
        rows = list(csv.DictReader(file))
    assert [row["file"] for row in rows] == list(images)
    assert [int(row["row"]) for row in rows] == list(range(10))
    broken = [row for row in rows if row["error"]]
    assert len(broken) == 1
    assert broken[0]["error"].startswith(f"{broken[0]['file']}: ")
    assert broken[0]["file"].endswith("china9.jpg")
    unread = np.isnan(np.load(output)).all(axis=1)
    assert unread.tolist() == [bool(row["error"]) for row in rows]
    assert np.isnan(np.load(output)).any(axis=1).tolist() == unread.tolist()


def test_safetensors_and_json_lines_hold_the_same(checkpoint, written, tmp_path):
    images, output, _ = written
    file = tmp_path / "same.safetensors"
    write_features(FeatureExtractor(checkpoint, batch_size=3), images, file, "jsonl", workers=0)
    np.testing.assert_allclose(load_file(file)["features"], np.load(output), atol=1e-6)
    rows = [json.loads(line) for line in (tmp_path / "same.jsonl").read_text().splitlines()]
    assert [row["file"] for row in rows] == list(images)
    assert [row["row"] for row in rows] == list(range(10))
    assert [bool(row["error"]) for row in rows] == ["china9" in path for path in images]
    stored = open_features(file)
    assert [os.path.join(stored.made["folder"], file) for file in stored.files()] == list(images)
    np.testing.assert_array_equal(stored.values, load_file(file)["features"])


@pytest.mark.parametrize("norm", [False, True])
def test_a_layer_is_pooled_or_whole(checkpoint, folder, norm):
    path = str(folder / "china0.jpg")
    maps, mean, token = (
        FeatureExtractor(checkpoint, layer=-2, pool=pool, norm=norm)
        for pool in ("map", "avg", "token")
    )
    images = maps._normalize(paddle.to_tensor(maps.pixels(path)[None]))
    model = maps.model.model
    options = {"norm": norm, "return_prefix_tokens": True, "intermediates_only": True}
    [(one, prefix)] = model.forward_intermediates(images, [1], **options)
    assert one.shape == [1, 16, 4, 4]
    [rows] = maps.rows([path], workers=0)
    np.testing.assert_allclose(rows.values, one.numpy(), atol=1e-6)
    np.testing.assert_allclose(of_image(mean, path), one.numpy()[0].mean(axis=(1, 2)), atol=1e-6)
    np.testing.assert_allclose(of_image(token, path), prefix.numpy()[0, 0], atol=1e-6)
    with pytest.raises(InputError, match="-pool is map, but a search needs pooled features"):
        of_image(maps, path)


def test_layers_that_arent_there_are_refused(checkpoint):
    with pytest.raises(InputError, match="-layer is 3, but vit_digits has the layers -3 to 2"):
        FeatureExtractor(checkpoint, layer=3)


def test_what_cant_be_written_is_said_before_anything_is_computed(
    checkpoint, folder, tmp_path, monkeypatch
):
    features = FeatureExtractor(checkpoint)
    monkeypatch.setattr(features, "rows", lambda *_: pytest.fail("computed"))
    (tmp_path / "there.json").touch()
    for name, message in (
        ("features.txt", r"unknown file ending; expected \.npy or \.safetensors"),
        ("there.npy", r"there\.json exists; choose another -output, or remove it"),
        ("nowhere/a.npy", "there is no folder .*nowhere; create it, or choose another -output"),
    ):
        with pytest.raises(InputError, match=message):
            write_features(features, paths_of([str(folder)]), tmp_path / name)
    assert [file.name for file in tmp_path.iterdir()] == ["there.json"]


def test_features_that_stop_half_way_leave_no_file(checkpoint, folder, tmp_path):
    def stop(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        images = paths_of([str(folder)])
        write_features(
            FeatureExtractor(checkpoint, batch_size=4),
            images,
            tmp_path / "a.npy",
            workers=0,
            tell=stop,
        )
    assert list(tmp_path.iterdir()) == []


def test_the_nearest_are_by_cosine():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(50, 6)).astype(np.float32)
    values[7], values[9], values[30] = np.nan, 0, 3 * values[20]
    query = values[20]
    cosines = values @ query / (np.linalg.norm(values, axis=1) * np.linalg.norm(query) + 1e-30)
    cosines[[7, 9]] = -2
    expected = np.argsort(-cosines, kind="stable")
    for size in (1, 7, 50):
        found = nearest(query, (values[first : first + size] for first in range(0, 50, size)), 12)
        assert {row for row, _ in found[:2]} == {20, 30}
        assert [row for row, _ in found[2:]] == expected[2:12].tolist()
        np.testing.assert_allclose(
            [cosine for _, cosine in found], cosines[expected[:12]], atol=1e-6
        )
    assert len(nearest(query, [values], 100)) == 48
    assert [row for row, _ in nearest(query, [values], 1, {20})] == [30]


def ranked(neighbours):
    """Their names by similarity; images that are equally similar but for rounding by name."""
    return sorted((-round(one.similarity, 5), one.name) for one in neighbours)


def test_a_folder_and_its_stored_features_give_the_same_neighbours(
    checkpoint, folder, written, tmp_path
):
    images, output, _ = written
    query = str(folder / "china1.jpg")
    stored = open_features(output)
    found = nearest_in(stored, query, 4)
    again, errors = in_images(FeatureExtractor(checkpoint), query, images, 4)
    assert ranked(found) == ranked(again)
    np.testing.assert_allclose(
        [one.similarity for one in found], [one.similarity for one in again], atol=1e-6
    )
    assert query not in [one.name for one in found]
    assert [one.similarity for one in found] == sorted(
        (one.similarity for one in found), reverse=True
    )
    assert len(errors) == 1
    # An image that isn't among them is computed as they were.
    other = shutil.copy(query, tmp_path / "other.jpg")
    first, *_ = nearest_in(stored, str(other), 1)
    assert first.name == query
    assert first.similarity == pytest.approx(1, abs=1e-6)


def test_stored_features_that_arent_whole_are_refused(written, tmp_path):
    _, output, _ = written
    for file in output.parent.iterdir():
        shutil.copy(file, tmp_path)
    file = tmp_path / "features.npy"
    record = tmp_path / "features.json"
    file.write_bytes(output.read_bytes()[:-4])
    with pytest.raises(
        InputError,
        match=r"features\.npy.*it doesn't match features\.json: expected \[10, 16\] of float32",
    ):
        open_features(file)
    file.write_bytes(output.read_bytes())
    whole = json.loads(record.read_text())
    for change, message in (
        (
            {"shape": [10, 16, 2, 2]},
            r"its features are maps \[10, 16, 2, 2\]; a search needs them pooled",
        ),
        ({"offset": -1}, "offset"),
        ({"pool": "max"}, "pool"),
        ({"shape": "x"}, "shape"),
    ):
        record.write_text(json.dumps(whole | change))
        with pytest.raises(InputError, match=message):
            open_features(file)
    record.write_text(json.dumps(whole))
    lines = (tmp_path / "features.csv").read_bytes().splitlines(keepends=True)
    rows = lines[1:]
    moved = "its row 3 has the number '4': rows were removed, added or moved"
    gone = "it has 3 rows, the features have 10"
    for kept, message in (
        (rows[:3], f"{gone}; restore it, or make the features again"),
        (rows[:3] + rows[4:], moved),
        ([*rows[:3], rows[4], rows[3], *rows[5:]], moved),
        ([*rows, b"10,/a.jpg,\n"], "it has 11 rows, the features have 10"),
        ([*rows[:3], b"3\n", *rows[4:]], "can't be read as an index of features"),
    ):
        (tmp_path / "features.csv").write_bytes(b"".join([lines[0], *kept]))
        with pytest.raises(InputError, match=rf"features\.csv: {message}"):
            nearest_in(open_features(file), str(tmp_path / "other.jpg"), 9)
    (tmp_path / "features.csv").write_bytes(b"".join(rows))
    with pytest.raises(
        InputError,
        match=r"features\.csv: can't be read as an index of features \(KeyError: 'row'\)",
    ):
        list(open_features(file).files())


def test_features_of_other_weights_arent_compared(checkpoint, folder, tmp_path):
    weights = tmp_path / "model.safetensors"
    query = shutil.copy(folder / "china1.jpg", tmp_path / "query.jpg")
    shutil.copy(checkpoint, weights)
    images = paths_of([str(folder / "sub")])
    file = tmp_path / "features.npy"
    write_features(FeatureExtractor(weights), images, file, workers=0)
    expected = nearest_in(open_features(file), query, 2)
    other = load_file(weights)
    save_file(other | {"cls_token": other["cls_token"] + 1}, weights, read_metadata(weights))
    message = r"model\.safetensors doesn't have the weights of the stored features \(its SHA-256 differs\); pass those weights by"
    with pytest.raises(InputError, match=message):
        nearest_in(open_features(file), query, 2)
    with pytest.raises(InputError, match=message):
        nearest_in(open_features(file), images[0], 2, str(weights))
    assert nearest_in(open_features(file), query, 2, str(checkpoint)) == expected
    # its features are there: no weights are needed
    assert len(nearest_in(open_features(file), images[0], 9)) == 3


def test_relative_paths_count_from_where_the_features_were_made(
    checkpoint, folder, tmp_path, monkeypatch
):
    monkeypatch.chdir(folder)
    file = tmp_path / "features.npy"
    write_features(
        FeatureExtractor(os.path.relpath(checkpoint)), paths_of(["sub"]), file, "jsonl", workers=0
    )
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    query = os.path.relpath(folder / "sub" / "flower1.jpg")
    for checkpoint_now in (None, str(checkpoint)):
        found = nearest_in(open_features(file), query, 9, checkpoint_now)
        assert sorted(one.name for one in found) == [
            str(folder / "sub" / f"flower{i}.jpg") for i in (0, 2, 3)
        ]
        assert write_grid(query, found, tmp_path / "grid.png") == []
    assert len(nearest_in(open_features(file), str(folder / "china0.jpg"), 9)) == 4


def test_a_grid_shows_the_query_and_its_neighbours(folder, tmp_path):
    names = [str(folder / "sub" / f"flower{i}.jpg") for i in range(3)] + [
        str(folder / "china9.jpg")
    ]
    problems = write_grid(
        str(folder / "china0.jpg"), [Neighbour(name, 0.5) for name in names], tmp_path / "grid.png"
    )
    [problem] = problems
    assert problem.startswith(f"{names[3]}: ")
    with Image.open(tmp_path / "grid.png") as grid:
        assert grid.size == (5 * (224 + 8) + 8, 8 + 224 + 2 * 19 + 8 + 8)
        centre = np.asarray(grid)[100:200]
    assert len({centre[:, 8 + 232 * i : 232 + 232 * i].tobytes() for i in range(5)}) == 5
    assert (centre[0, 8 + 928 + 5] == 0xEE).all()  # the broken one is an empty tile
    with pytest.raises(InputError, match=r"the grid is a PNG; use the ending \.png"):
        write_grid(names[0], [], tmp_path / "grid.jpg")


def run(tool, folder, *words):
    command = [warm.python(), str(ROOT / "tools" / tool), *map(str, words)]
    done = subprocess.run(command, cwd=folder, capture_output=True, timeout=100)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_the_tools(checkpoint, folder, tmp_path):
    status, printed, errors = run(
        "features.py", tmp_path, checkpoint, folder, "-output", "f.npy", "-layer", 1
    )
    assert (status, printed, errors) == (1, "f.npy: 10 x 16 float32; 1 image can't be read\n", "")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["f.csv", "f.json", "f.npy"]
    query = folder / "china1.jpg"
    status, printed, errors = run(
        "search.py", tmp_path, query, "f.npy", "-top", 2, "-grid", "grid.png"
    )
    assert (status, errors) == (0, "")
    assert printed.splitlines()[0] == "similarity  file"
    assert len(printed.splitlines()) == 3
    status, again, errors = run(
        "search.py",
        tmp_path,
        query,
        folder,
        "-top",
        2,
        "-checkpoint",
        checkpoint,
        "-layer",
        1,
        "-workers",
        0,
    )
    assert (status, again) == (1, printed)
    assert errors.count("\n") == 1
    assert "china9.jpg" in errors
    index = tmp_path / "f.csv"
    index.write_bytes(index.read_bytes().replace(b"sub/", b"gone/"))
    status, printed, errors = run("search.py", tmp_path, query, "f.npy", "-grid", "lost.png")
    assert (status, printed.count("gone")) == (0, 4)
    said = f"lost.png: 4 of its 9 images can't be read, the first: {folder / 'gone' / 'flower'}"
    assert (errors.startswith(said), errors.count("\n")) == (True, 1)


@pytest.mark.parametrize(
    ("tool", "words", "message"),
    [
        (
            "features.py",
            ["run", ".", "-output", "a.npy", "-pool", "map"],
            "error: -pool and -norm need -layer N",
        ),
        (
            "search.py",
            ["a.jpg", "."],
            "error: the features of a folder are computed by a model; pass -checkpoint",
        ),
        (
            "search.py",
            ["a.jpg", "b.npy", "-top", "0"],
            "error: -top is 0, expected a number of at least 1",
        ),
        (
            "search.py",
            ["a.jpg", "b.npy", "-grid", "g.jpg"],
            "error: g.jpg: the grid is a PNG; use the ending .png",
        ),
        (
            "search.py",
            ["a.jpg", "b.npy", "-layer", "1"],
            "error: a file of features determines the model and layer",
        ),
        (
            "search.py",
            ["a.jpg", "b.npy"],
            "error: b.json: can't be read as the record of tools/features.py",
        ),
    ],
)
def test_a_wrong_command_line_is_a_line(tool, words, message, tmp_path):
    status, printed, errors = run(tool, tmp_path, *words)
    assert (status, printed, errors.count("\n")) == (2, "", 1)
    assert errors.startswith(message)
    assert list(tmp_path.iterdir()) == []


def test_an_image_to_look_for_that_cannot_be_read_is_named(checkpoint, folder):
    with pytest.raises(InputError, match=f"^{folder}/china9.jpg: it is truncated"):
        of_image(FeatureExtractor(checkpoint), str(folder / "china9.jpg"))


def test_both_is_the_token_and_the_mean(checkpoint, folder):
    images = paths_of([str(folder / "sub")])
    token, mean, both = (
        np.concatenate([rows.values for rows in extractor.rows(images, workers=0)])
        for extractor in (
            FeatureExtractor(checkpoint, layer=-1, pool=pool) for pool in ("token", "avg", "both")
        )
    )
    np.testing.assert_array_equal(both, np.concatenate([token, mean], axis=1))
    # The classifier of these weights reads the token.
    default = FeatureExtractor(checkpoint, layer=-1, pool=None)
    assert default.made["pool"] == "token"


def test_a_class_token_that_comes_after_the_layers_is_refused(tmp_path):
    sizes = [*SIZES[:-2], "DATA.IMAGE_CHANNELS", "3"]
    config = get_config("cait_xxs24_224", sizes)
    model = build_model(config)
    file = tmp_path / "model.safetensors"
    save_file(file_arrays(model), file, {METADATA: describe(config, ["a", "b", "c"]).to_json()})
    with pytest.raises(
        InputError, match="-pool is token, but the layers of cait_xxs24_224 have no class"
    ):
        FeatureExtractor(file, layer=-1, pool="token")
    assert FeatureExtractor(file, layer=-1, pool=None).made["pool"] == "avg"
