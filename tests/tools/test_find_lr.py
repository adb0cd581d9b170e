"""The sweep of rates: what it tells of a curve, and that it trains as a run does and leaves
nothing.
"""

import csv
import io
import json

import numpy as np
import pytest
from conftest import write_images
from PIL import Image
from safetensors.numpy import save_file
from support.training_runs import records, train

from config import get_config
from datasets import get_datasets
from errors import InputError, RunError
from tools.find_lr import arguments_of, main
from training.batch_size import Found
from training.rate_range import find_rates, range_test, write

RATES = np.geomspace(1e-6, 1, 301)


def test_the_steepest_and_the_lowest_place_of_a_curve_are_told():
    """A fall of the logistic kind, steepest at 1e-3, and a rise from 1e-2 on."""
    x = np.log10(RATES)
    curve = 2 - 1.5 / (1 + np.exp(-4 * (x + 3))) + 3 * np.maximum(0, x + 1.5) ** 2
    found = find_rates(RATES, curve, 301)
    assert found.steepest == pytest.approx(1e-3, rel=0.1)
    assert RATES[curve.argmin()] / 2 < found.lowest < RATES[curve.argmin()] * 2  # it is flat there
    noisy = find_rates(RATES, curve + np.random.default_rng(0).normal(0, 0.05, 301), 301)
    assert 3e-4 < noisy.steepest < 3e-3
    assert np.abs(noisy.smooth - curve).mean() < 0.03
    rising = find_rates(RATES, np.linspace(1, 2, 301), 301)  # nothing is learned
    assert rising.lowest == RATES[0]


def test_too_few_updates_are_an_error():
    with pytest.raises(RunError, match="the loss diverged after 3 of 200 updates; lower -low"):
        find_rates(RATES[:3], RATES[:3], 200)


def test_a_sweep_trains_by_rising_rates_and_leaves_a_curve_alone(
    tmp_path, tiny, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    options = [
        *tiny,
        "DATA.BATCH_SIZE",
        "32",
        "TRAIN.ACCUM_ITER",
        "2",
        "TRAIN.MODEL_EMA",
        "True",
        "SAVE_STEPS",
        "1",
    ]
    options += ["TRAIN.CROP_SCALE", "[1.0,1.0]", "TRAIN.HFLIP", "0"]
    config, dataset, _ = get_datasets(get_config(None, options))
    found = range_test(config, dataset, 60, 1e-4, 10)
    # 44 steps make 22 updates an epoch; at such rates the loss goes out of bounds
    assert 30 < len(found.rates) < 60
    np.testing.assert_allclose(
        found.rates, np.geomspace(1e-4, 10, 60)[: len(found.rates)], rtol=1e-6
    )
    assert found.losses[0] == pytest.approx(2.33, abs=0.15)
    assert found.smooth.min() < 2.2
    assert 1e-3 < found.steepest < found.lowest < 1
    assert not list(tmp_path.iterdir())
    write(found, tmp_path / "swept" / "lr.csv", tmp_path / "swept" / "lr.png")
    assert sorted(file.name for file in (tmp_path / "swept").iterdir()) == ["lr.csv", "lr.png"]
    rows = list(csv.DictReader(io.StringIO((tmp_path / "swept" / "lr.csv").read_text())))
    np.testing.assert_allclose([float(row["rate"]) for row in rows], found.rates, rtol=1e-8)
    np.testing.assert_allclose([float(row["loss"]) for row in rows], found.losses, rtol=1e-8)
    with Image.open(tmp_path / "swept" / "lr.png") as picture:
        assert picture.size == (960, 480)


def test_a_sweep_makes_the_updates_of_a_run(tmp_path, tiny):
    options = [
        *tiny,
        "DATA.BATCH_SIZE",
        "32",
        "TRAIN.MIXUP_ALPHA",
        "0.8",
        "MODEL.DROPOUT",
        "0.1",
        "REPORT_FREQ",
        "1",
    ]
    config, dataset, _ = get_datasets(get_config(None, options))
    found = range_test(config, dataset, 43, 0.003, 0.003 * (1 + 1e-12))
    train([*options, "TRAIN.BASE_LR", "0.003", "TRAIN.LR_SCHEDULER.NAME", "constant"], tmp_path)
    losses = [record["loss"] for record in records(tmp_path) if record["split"] == "train"]
    np.testing.assert_allclose(found.losses, losses[1:], atol=2e-6)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-updates=5"], "-updates is 5, expected 20 to 100000"),
        (["-low=1", "-high=0.1"], "-low is 1 and -high 0.1, expected 0 < low < high"),
        (["-low=nan"], "-low is nan"),
    ],
)
def test_flags_out_of_range_are_named(words, message):
    with pytest.raises(InputError, match=message):
        arguments_of(words)


def test_what_is_there_is_not_written_over(tmp_path, monkeypatch):
    (tmp_path / "lr.csv").write_text("mine")
    for words, message in (
        (["-output", str(tmp_path)], "lr.csv already exists; choose another -output"),
        ([], "pass -output=DIR"),
        (["-output", str(tmp_path / "new"), "-eval"], "leave out -eval and -resume"),
        (["-output", str(tmp_path / "new"), "-profile=3"], r"leave out -profile \(PROFILE\)"),
    ):
        monkeypatch.setattr("sys.argv", ["find_lr.py", "-cfg=vit_digits", *words])
        with pytest.raises(InputError, match=message):
            main()
    assert [file.name for file in tmp_path.iterdir()] == ["lr.csv"]


def test_a_loss_that_tells_nothing_of_a_rate_is_refused(tmp_path, monkeypatch):
    output = tmp_path / "rates"
    monkeypatch.setattr("sys.argv", ["find_lr.py", "-cfg=dino_digits", f"-output={output}"])
    with pytest.raises(
        InputError,
        match=r"a lower loss of TASK dino doesn't mean a better model, .* with metric: knn$",
    ):
        main()
    assert not output.exists()


@pytest.fixture
def tested(monkeypatch):
    """Replaces the range test; the configurations that it was called with."""
    configs = []
    swept = find_rates(RATES, 2 + np.log10(RATES) ** 2, 301)

    def test(config, *_):
        configs.append(config)
        return swept

    monkeypatch.setattr("training.rate_range.range_test", test)
    return configs


def test_the_batch_that_auto_finds_is_accumulated_for_all_processes(
    tmp_path, monkeypatch, capsys, tested
):
    asked = []

    def find(config, dataset, classes, ranks):
        asked.append((len(dataset), len(classes), ranks))
        return Found(16, "which fits")

    monkeypatch.setattr("training.batch_size._find", find)
    words = ["find_lr.py", "-cfg=vit_digits", f"-output={tmp_path}/lr", "-ngpus=2"]
    monkeypatch.setattr("sys.argv", [*words, "-batch_size=auto"])
    main()
    assert asked == [(1433, 10, 2)]
    [config] = tested
    assert (config.DATA.BATCH_SIZE, config.TRAIN.ACCUM_ITER) == (16, 2)
    said = capsys.readouterr().out
    assert said.startswith("batch size: 16 per device, which fits; -batch_size sets another, ")
    assert "suggested for the effective batch of 32: -o TRAIN.BASE_LR " in said


def test_the_images_are_prepared_as_the_weights_say(tmp_path, monkeypatch, tested):
    """As in the run: pretrained weights bring their normalisation."""
    weights = tmp_path / "weights"
    weights.mkdir()
    images = {"mean": [0.1, 0.2, 0.3], "std": [0.25, 0.5, 0.75]}
    stored = {"architecture": "own", "pretrained_cfg": images}
    (weights / "config.json").write_text(json.dumps(stored))
    save_file({"head.bias": np.zeros(2, np.float32)}, weights / "model.safetensors")
    write_images(tmp_path / "data" / "train", {"ant": 6, "bee": 6}, size=20)
    write_images(tmp_path / "data" / "val", {"ant": 3, "bee": 3}, size=20)
    # A file that sets the normalisation takes precedence. This one sets none.
    (tmp_path / "own.yaml").write_text("BASE: ''\nMODEL: {TYPE: ViT, NAME: own}\n")
    words = ["find_lr.py", f"-cfg={tmp_path}/own.yaml", f"-pretrained={weights}", "-ngpus=1"]
    words += ["-dataset=folder", f"-data_path={tmp_path}/data", f"-output={tmp_path}/lr"]
    monkeypatch.setattr("sys.argv", [*words, "-o", "MODEL.NUM_CLASSES", "2"])
    main()
    [config] = tested
    assert config.DATA.IMAGENET_MEAN == [0.1, 0.2, 0.3]
    assert config.DATA.IMAGENET_STD == [0.25, 0.5, 0.75]


def test_a_picture_is_written_where_it_is_asked_for(tmp_path, monkeypatch, capsys, tested):
    monkeypatch.chdir(tmp_path)
    for output, files in (
        ("x.png", ["x.csv", "x.png"]),
        ("new/Y.PNG", ["Y.PNG", "Y.csv"]),
        ("f", ["lr.csv", "lr.png"]),
    ):
        before = set(tmp_path.rglob("*.*"))
        monkeypatch.setattr(
            "sys.argv", ["find_lr.py", "-cfg=vit_digits", f"-output={output}", "-ngpus=1"]
        )
        main()
        assert sorted(file.name for file in set(tmp_path.rglob("*.*")) - before) == files
        with pytest.raises(InputError, match="already exists; choose another -output"):
            main()
    with Image.open("x.png") as picture:
        assert picture.format == "PNG"
    assert "; x.png, x.csv\n" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["find_lr.py", "-cfg=vit_digits", "-output=x.jpg"])
    with pytest.raises(
        InputError, match=r"^-output is x.jpg; expected a folder, or a file that ends in .png$"
    ):
        main()
