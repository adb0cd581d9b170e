"""tools/probe.py as people run it: its table and probe.json, several processes, and bad input."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import warm
from conftest import write_images
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from support.programs import ROOT
from support.servers import write_checkpoint

from errors import InputError
from inference.exporting import write_export
from inference.feature_store import FeatureExtractor
from inference.predictor import Predictor
from inference.probes import Probes
from inference.probing import Model, measure, read_sets, table
from settings.registry import datasets
from tools.make_shards import main as make_shards
from training.probing import linear

PROBE = str(ROOT / "tools" / "probe.py")
DIGITS = [("DATA.DATASET", "digits")]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with w.safetensors, of random weights for digits."""
    root = tmp_path_factory.mktemp("place")
    write_checkpoint(root / "w.safetensors", classes=[str(digit) for digit in range(10)])
    return root


def probe(place, *words, command=None, **how):
    """(exit status, standard output, standard error)."""
    command = command or [warm.python(), PROBE]
    done = subprocess.run(
        [*command, *map(str, words)], cwd=place, capture_output=True, text=True, timeout=120, **how
    )
    return done.returncode, done.stdout, done.stderr


def written(place, name):
    record = json.loads((place / name).read_text())
    del record["command"]
    return record


def test_the_table_and_the_record(place):
    words = ["w.safetensors", "-dataset=digits", "-probes=knn,sgd,few_shot"]
    words += ["-draws=2", "-shots=1,5", "-seed=5"]
    status, out, err = probe(place, *words, "-workers=0", "-output=one.json")
    assert (status, err) == (0, ""), err
    record = json.loads((place / "one.json").read_text())
    assert record["command"].endswith(
        "tools/probe.py " + " ".join([*words, "-workers=0", "-output=one.json"])
    )
    counts = [
        record[name] for name in ("train_images", "val_images", "classes", "channels", "seed")
    ]
    assert counts == [1433, 364, 10, 16, 5]
    assert record["features"]["layer"] is None
    assert len(record["features"]["sha256"]) == 64
    assert record["knn"].keys() == {"10", "20"}
    assert record["few_shot"].keys() == {"1", "5"}
    assert len(record["few_shot"]["5"]["accuracies"]) == 2
    assert out.splitlines()[0].split() == ["k-NN,", "k", "10", f"{record['knn']['10']:.2f}"]
    assert f"{record['few_shot']['5']['mean']:.2f} +- " in out
    assert "5 labels a class" in out
    assert "RankMe, of 16" in out
    assert out.endswith("one.json: 1433 training images, 364 others\n")
    # Another batch size, workers and two processes: the same numbers.
    status, _, err = probe(place, *words, "-batch_size=7", "-ngpus=2", "-output=two.json")
    assert (status, err) == (0, "")
    assert_same_numbers(written(place, "two.json"), written(place, "one.json"))


def assert_same_numbers(two, one):
    assert two.keys() == one.keys()
    for name, value in one.items():
        if isinstance(value, dict):
            assert_same_numbers(two[name], value)
        elif isinstance(value, float):
            # One of the 364 images may be decided by the last bit of a product.
            assert two[name] == pytest.approx(value, abs=0.3, rel=1e-4), name
        elif name != "accuracies":
            assert two[name] == value


@pytest.mark.slow
def test_a_launchers_processes_give_the_same(place):
    words = ["w.safetensors", "-dataset=digits", "-probes=knn,few_shot", "-draws=1"]
    assert probe(place, *words, "-output=alone.json")[0] == 0
    launcher = [
        sys.executable,
        "-m",
        "paddle.distributed.launch",
        "--devices=0,1",
        "--log_dir=logs",
        PROBE,
    ]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "0,1"}
    status, *said = probe(place, *words, "-output=launched.json", command=launcher, env=environment)
    assert status == 0, said
    assert_same_numbers(written(place, "launched.json"), written(place, "alone.json"))


def measured(model, probes, data=DIGITS):
    config, train, val = read_sets(model, data, workers=0)
    return measure(model, config, train, val, probes.checked(train.labels, train.classes))


def features_of(path, **how):
    """The features of the digits by ``FeatureExtractor``, without a loader."""
    extractor = FeatureExtractor(path, **how)
    found = []
    for dataset in read_sets(Model(path), DIGITS, workers=0)[1:]:
        pixels = np.stack([dataset[index][0] for index in range(len(dataset))])
        found.append((extractor.logits(pixels), dataset.labels))
    return found


@pytest.mark.parametrize(
    ("layer", "pool", "channels", "how"),
    [
        (None, None, 16, {}),
        (0, None, 16, {"layer": 0, "pool": "token", "norm": True}),
        (None, "both", 32, {"layer": -1, "pool": "both", "norm": True}),
        (-2, "avg", 16, {"layer": -2, "pool": "avg", "norm": True}),
    ],
)
def test_layers_and_pooling_equal_scikit_learn_on_the_same_features(
    place, monkeypatch, layer, pool, channels, how
):
    monkeypatch.setattr(linear, "CS", (0.01,))
    path = str(place / "w.safetensors")
    model = Model(path, layer=layer, pool=pool, batch_size=64)
    result = measured(model, Probes(("knn", "logistic")))
    train, val = features_of(path, **how)
    assert result["channels"] == train[0].shape[1] == channels
    neighbours = KNeighborsClassifier(
        20, metric="cosine", algorithm="brute", weights=lambda far: np.exp((1 - far) / 0.07)
    )
    expected = 100 * neighbours.fit(*train).score(*val)
    assert result["knn"]["20"] == pytest.approx(expected, abs=0.3)
    mean, deviation = train[0].mean(0), train[0].std(0)
    rows = [(values - mean) / deviation for values in (train[0], val[0])]
    fitted = LogisticRegression(C=result["logistic"]["C"], max_iter=1000).fit(rows[0], train[1])
    assert result["logistic"]["accuracy"] == pytest.approx(
        100 * fitted.score(rows[1], val[1]), abs=0.6
    )


def test_an_export_of_features_is_probed_and_one_of_logits_refused(place, tmp_path):
    predictor = Predictor(place / "w.safetensors")
    with pytest.raises(
        InputError, match="is an export, which gives logits but no features; use the"
    ):
        write_export(predictor.config, predictor.model, tmp_path / "logits", predictor.classes)
        Model(str(tmp_path / "logits")).extractor()
    # Ten outputs that aren't classes.
    write_export(predictor.config, predictor.model, tmp_path / "features", [], features=True)
    result = measured(Model(str(tmp_path / "features")), Probes(("knn",)))
    assert result["channels"] == 10
    assert result["features"] is None
    with pytest.raises(
        InputError, match="an export, which only gives its features; leave out -layer"
    ):
        Model(str(tmp_path / "features"), layer=1).extractor()


def test_few_labels_are_those_that_each_class_has():
    labels = np.repeat([0, 1, 2], [30, 7, 9])
    assert Probes().checked(labels, ["a", "b", "c"]).shots == (1, 5)
    assert Probes(shots=(7,)).checked(labels, []).shots == (7,)
    # Numbers that no image has aren't classes.
    assert Probes().checked(labels * 2, []).shots == (1, 5)


@pytest.mark.parametrize(
    ("probes", "labels", "classes", "message"),
    [
        (
            Probes(),
            [0, 1],
            "abc",
            "the training set has 2 labels for 3 classes; a probe needs at least one",
        ),
        (
            Probes(),
            [0, 0, 1, 1],
            "abc",
            "no training image has the class c (1); a probe needs at least one",
        ),
        (
            Probes(ks=(3, 9)),
            [0, 0, 1, 1],
            "ab",
            "-k is 9, but the training set has 4 images; lower -k",
        ),
        (
            Probes(ks=(1,), shots=(1, 3)),
            [0, 0, 1, 1],
            "ab",
            "-shots is 3, but class 'a' has only 2 training",
        ),
        (
            Probes(("few_shot",), shots=(5,)),
            [0, 0, 0, 0, 0, 1],
            "ab",
            "-shots is 5, but class 'b' has only 1 training image; lower -shots",
        ),
        (Probes(("sgd",)), [0, 0, 1, 1], "ab", "4 training images are too few to hold out a part"),
        (Probes(("logistic",)), [0, 1], "ab", "2 training images are too few to hold out a part"),
    ],
)
def test_too_few_images_are_one_line(probes, labels, classes, message):
    with pytest.raises(InputError) as caught:
        probes.checked(np.array(labels), list(classes))
    assert str(caught.value).startswith(message)


REFUSED = {
    ("-layer=9",): "-layer is 9, but vit_base_patch16_224 has the layers -2 to 1",
    ("-k=2000",): "-k is 2000, but the training set has 1433 images; lower -k",
    ("-shots=500",): "-shots is 500, but class ",
    ("-probes=knn,svm",): "'svm' isn't one of knn, logistic, sgd, few_shot",
    ("-k=0",): "'0' isn't a number of at least 1",
    ("-probes=sgd", "-k=3"): "-k has no effect without the probe knn; leave it out, or add knn to",
    ("-probes=knn", "-shots=5"): "-shots has no effect without the probe few_shot; leave it out",
    ("-probes=knn,sgd", "-draws=2"): "-draws has no effect without the probe few_shot; leave it",
    ("-ngpus=99",): "NGPUS asks for 99 processes, found ",
    ("-output=w.safetensors",): "w.safetensors exists; choose another -output, or remove it",
    ("-output=none/probe.json",): "-output none/probe.json: none isn't a writable folder",
}


@pytest.mark.parametrize("words", REFUSED)
def test_bad_input_is_one_line_and_status_2(place, words):
    before = sorted(place.iterdir())
    status, out, err = probe(place, "w.safetensors", "-dataset=digits", *words)
    assert (status, out) == (2, ""), err
    assert REFUSED[words] in err
    assert err.count("\n") == 1 or "usage" in err
    assert sorted(place.iterdir()) == before


def test_data_that_a_probe_cannot_use(place, tmp_path):
    model = Model(str(place / "w.safetensors"))
    with pytest.raises(InputError, match="a probe needs labelled images: pass its -data_path"):
        read_sets(model, [], 0)
    (tmp_path / "train.csv").write_text("file,labels\na.png,x y\n")
    (tmp_path / "val.csv").write_text("file,labels\na.png,x y\n")
    data = [("DATA.DATASET", "multilabel_csv"), ("DATA.DATA_PATH", str(tmp_path))]
    with pytest.raises(
        InputError, match="'multilabel_csv' have several labels, but a probe needs one per image"
    ):
        read_sets(model, data, 0)
    write_images(tmp_path / "f", {"train/a": 3, "train/b": 3, "val/a": 1, "val/c": 1})
    with pytest.raises(InputError, match="classes that the training images lack: 'c'"):
        read_sets(model, [("DATA.DATA_PATH", str(tmp_path / "f"))], 0)


def test_shards_of_several_labels_or_of_none_are_refused(place, tmp_path, monkeypatch):
    write_images(tmp_path / "plain", {"train": 4, "val": 2})
    (tmp_path / "several").mkdir()
    for split in ("train", "val"):
        rows = "".join(f"../plain/{split}/{number}.png,1,1\n" for number in range(2))
        (tmp_path / f"several/{split}.csv").write_text(f"file,x,y\n{rows}")
    for dataset, folder, message in (
        ("images", "plain", "has no labels, which TASK classification needs"),
        ("multilabel_csv", "several", "the images of 'shards' have several labels each"),
    ):
        shards = tmp_path / f"{folder}-shards"
        words = [f"-dataset={dataset}", f"-data_path={tmp_path / folder}", f"-output={shards}"]
        monkeypatch.setattr(sys, "argv", ["make_shards.py", *words])
        make_shards()
        data = [("DATA.DATASET", "shards"), ("DATA.DATA_PATH", str(shards))]
        with pytest.raises(InputError, match=message):
            read_sets(Model(str(place / "w.safetensors")), data, 0)


def test_features_that_are_not_finite_are_one_line(place, tmp_path):
    arrays = load_file(place / "w.safetensors")
    with safe_open(place / "w.safetensors", "np") as file:
        metadata = file.metadata()
    # Its product with any value above 4 is infinite in float32.
    arrays["norm.weight"][:] = 3e38
    save_file(arrays, tmp_path / "infinite.safetensors", metadata)
    status, out, err = probe(tmp_path, "infinite.safetensors", "-dataset=digits", "-ngpus=2")
    assert (status, out) == (1, ""), err
    assert "the features of " in err
    assert err.count("error: ") == 1
    assert not (tmp_path / "probe.json").exists()


def test_images_without_labels_are_refused(place, tmp_path, monkeypatch):
    monkeypatch.setitem(datasets.components["folder"].given, "columns", "")
    with pytest.raises(
        InputError, match="'folder' have no labels, but a probe needs one per image"
    ):
        data = [("DATA.DATASET", "folder"), ("DATA.DATA_PATH", str(tmp_path))]
        read_sets(Model(str(place / "w.safetensors")), data, 0)


def test_an_unreadable_image_ends_a_probe_or_is_left_out(place, tmp_path):
    write_images(tmp_path, {"train/a": 6, "train/b": 6, "val/a": 2, "val/b": 2})
    (tmp_path / "train/a/0.png").write_bytes(b"no image")
    words = ["w.safetensors", f"-data_path={tmp_path}", "-k=3", "-probes=knn,few_shot"]
    words += ["-output=broken.json", "-workers=0"]
    status, _, err = probe(place, *words)
    assert (status, err.count("\n")) == (1, 1)
    assert "train/a/0.png" in err
    assert not (place / "broken.json").exists()
    status, _, err = probe(place, *words, "-o", "DATA.SKIP_BROKEN", "True")
    assert (status, err) == (0, "")
    assert written(place, "broken.json")["train_images"] == 11


def test_a_collapse_is_named(place):
    result = measured(Model(str(place / "w.safetensors")), Probes(("knn",)))
    assert "deviation, healthy 0.2500" in table(result)
    assert result["warning"] == ""
