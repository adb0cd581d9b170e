"""Evaluation sets beyond a validation folder: each figure by NumPy, on any number of processes."""

import json
import os

import numpy as np
import paddle
import pytest
from conftest import without
from PIL import Image
from support.ranks import run_ranks
from support.training_runs import work

from config import get_config
from datasets import get_datasets
from errors import InputError
from loading.label_spaces import imagenet_synsets
from models import build_model
from settings.corruptions import BENCHMARK
from tools import robustness
from training.classification import any_of
from training.robustness import ALEXNET, format_table, summarize
from utils import rank
from weights import load_weights, save_weights

SYNSETS = imagenet_synsets()
COUNT = 23  # of images; no multiple of a batch or of ranks


@pytest.fixture
def options(tiny, tmp_path):
    """A tiny ViT of 1,000 outputs with weights that tell images apart, and COUNT pictures in three
    classes' folders.
    """
    data = [
        "DATA.DATASET",
        "folder",
        "DATA.DATA_PATH",
        str(tmp_path / "data"),
        "DATA.IMAGE_CHANNELS",
        "3",
    ]
    kept = without(tiny, "TRAIN.", "DATA.DATASET", "DATA.IMAGE_CHANNELS", "MODEL.NUM_CLASSES")
    options = [*kept, *data, "EVAL", "True", "DATA.BATCH_SIZE_EVAL", "4"]
    rng = np.random.default_rng(0)
    for index in range(COUNT):
        folder = tmp_path / "data" / "val" / SYNSETS[(3, 500, 998)[index % 3]]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.uint8(rng.integers(0, 200, 3) + rng.integers(0, 56, (8, 8, 3)))
        Image.fromarray(pixels).save(folder / f"ILSVRC2012_val_{index + 1:08}.PNG", "PNG")
    model = build_model(get_config(None, options))
    for parameter in model.parameters():
        parameter.set_value(paddle.to_tensor(rng.normal(0, 0.7, parameter.shape).astype("float32")))
    save_weights(model, tmp_path / "w.safetensors")
    return [*options, "MODEL.PRETRAINED", str(tmp_path / "w.safetensors")]


def evaluated(options, output):
    config, _, val = get_datasets(get_config(None, [*options, "OUTPUT", str(output)]))
    work(config, None, val)
    return json.loads((output / "result.json").read_text()) if rank() == 0 else None


def logits_of(options, path):
    """[COUNT, 1000] float64, in the order of the images' numbers."""
    model = build_model(get_config(None, options))
    load_weights(model, path / "w.safetensors")
    model.eval()
    files = sorted((path / "data" / "val").rglob("*.PNG"), key=lambda file: file.name)
    pixels = np.stack([np.asarray(Image.open(file)) for file in files]).astype("float32")
    found = (
        model(paddle.to_tensor(pixels.transpose(0, 3, 1, 2) / 127.5 - 1)).numpy().astype(np.float64)
    )
    assert found.std(0).mean() > 0.1  # they depend on the image
    return found


def expected(logits, sets, compared=None):
    """What of images of any labels each comes by the formula: an image counts for each of its
    labels.
    """
    low = np.full(1000, -np.inf)
    low[slice(None) if compared is None else list(compared)] = 0
    logits = logits + low
    kept = [index for index, own in enumerate(sets) if own]
    order = np.argsort(-logits, 1, kind="stable")
    chances = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    first, five = ({i for i in kept if set(order[i, :k]) & set(sets[i])} for k in (1, 5))
    by_class = {
        label: [i in first for i in kept if label in sets[i]] for own in sets for label in own
    }
    return {
        "loss": -np.mean([np.log(chances[i, list(sets[i])].sum()) for i in kept]),
        "acc1": 100 * len(first) / len(kept),
        "acc5": 100 * len(five) / len(kept),
        "mean_class_acc": 100 * np.mean([np.mean(hits) for hits in by_class.values()]),
        "num_samples": len(kept),
    }


def the_sets(options, folder):
    """The results of an evaluation each: all outputs, the present ones, a map, ReaL's labels."""
    given = {
        "all": [],
        "present": ["DATA.CLASSES", "present"],
        "mapped": ["DATA.CLASSES", str(folder / "map.txt")],
        "real": ["DATA.LABELS", str(folder / "real.json")],
    }
    return {name: evaluated([*options, *more], folder / name) for name, more in given.items()}


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.smoke)])
def test_each_sets_figures_are_the_formulas(tmp_path, options, ranks):
    logits = logits_of(options, tmp_path)
    labels = [(3, 500, 998)[index % 3] for index in range(COUNT)]
    mapped = {3: [3, 7], 500: [41], 998: [998]}
    (tmp_path / "map.txt").write_text(
        f"{SYNSETS[3]}\t{SYNSETS[3]}\t7\n{SYNSETS[500]}\t41\n{SYNSETS[998]}\n"
        + "\t".join(["more", *map(str, range(100, 140))])
    )
    best = np.argsort(-logits, 1)
    real = [
        [int(best[i, 0])] * (i % 4 == 0) + [int(best[i, 3]), 5] * (i % 5 != 1) for i in range(COUNT)
    ]
    assert 0 < sum(not own for own in real) < COUNT
    (tmp_path / "real.json").write_text(json.dumps(real))
    compared = [3, 7, 41, 998, *range(100, 140)]
    wanted = {
        "all": expected(logits, [[label] for label in labels]),
        "present": expected(logits, [[label] for label in labels], (3, 500, 998)),
        "mapped": expected(logits, [mapped[label] for label in labels], compared),
        "real": expected(logits, [sorted(set(own)) for own in real]),
    }
    found = run_ranks(the_sets, options, tmp_path, ranks=ranks)[0]
    for name, own in wanted.items():
        for key, value in own.items():
            assert found[name][key] == pytest.approx(value, rel=1e-4), (name, key)
    assert wanted["present"]["acc5"] == 100  # of three outputs
    assert wanted["all"]["acc1"] < 20 < wanted["present"]["acc1"] < 100
    assert 20 < wanted["real"]["acc1"] < wanted["real"]["acc5"]


def test_of_one_label_each_figure_is_the_usual_one():
    logits = paddle.to_tensor(np.random.default_rng(0).normal(size=(50, 6)).astype("float32"))
    labels = paddle.arange(50) % 6
    found = any_of(logits, paddle.nn.functional.one_hot(labels, 6).astype("uint8"))
    loss = paddle.nn.functional.cross_entropy(logits, labels, reduction="none")
    np.testing.assert_allclose(found["loss"].numpy(), loss.numpy(), rtol=1e-5)
    right = logits.numpy().argmax(1) == labels.numpy()
    np.testing.assert_array_equal(found["acc1"].numpy(), 100 * right)
    assert 50 < found["acc5"].mean() < 100
    two = any_of(logits, paddle.to_tensor([[1, 0, 1, 0, 0, 0]] * 50).astype("uint8"))
    np.testing.assert_array_equal(
        two["acc1"].numpy(), 100 * np.isin(logits.numpy().argmax(1), (0, 2))
    )


# ---------------------------------------------------------------- robustness


def test_mce_is_the_papers():
    """ResNet-50's errors of the paper's table 1, mean by mean: mCE 76.7, and its corruption errors
    to a percent.
    """
    ce = [80, 82, 83, 75, 89, 78, 80, 78, 75, 66, 57, 71, 85, 77, 77]
    errors = {
        name: dict.fromkeys(range(1, 6), share * ALEXNET[name] / 100)
        for name, share in zip(BENCHMARK, ce, strict=True)
    }
    found = summarize(errors, 23.9, 1000)
    assert found["mCE"] == pytest.approx(np.mean(ce)) == pytest.approx(76.7, abs=0.2)
    assert found["relative_mCE"] == pytest.approx(105.0, abs=1)
    assert found["CE"]["fog"] == pytest.approx(66)
    assert found["relative_CE"]["fog"] == pytest.approx(
        100 * (0.66 * ALEXNET["fog"] - 23.9) / (ALEXNET["fog"] - 43.5)
    )
    assert found["mean_error"] == pytest.approx(np.mean([own[1] for own in errors.values()]))
    assert (
        format_table(errors, found).splitlines()[-1]
        == f"mCE: {found['mCE']:.2f}, relative mCE: {found['relative_mCE']:.2f}"
    )
    errors["fog"] = {1: 10.0, 3: 40.0}
    some = summarize(errors, 23.9, 1000)
    assert (some["mean"]["fog"], some["mCE"], "fog" in some["CE"], len(some["CE"])) == (
        25,
        None,
        False,
        14,
    )
    [row] = [
        line.split() for line in format_table(errors, some).splitlines() if line.startswith("fog")
    ]
    assert row == ["fog", "10.00", "-", "40.00", "-", "-", "25.00", "-", "-"]
    assert summarize(errors, 23.9, 10)["CE"] == {}  # AlexNet's errors are ImageNet's


def test_the_tool_evaluates_each_cell_once_and_goes_on(tmp_path, monkeypatch, capsys):
    asked = []

    class Evaluation:
        """Stands for main_multi_gpu.py: fog is an error of 10 at each severity, or a failure where
        one is ordered.
        """

        def __init__(self, command, **_):
            asked.append(command[2:])

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def wait(self):
            folder = tmp_path / asked[-1][-1].partition("out/")[2]
            if folder.name == fails:
                return 3
            severity = int(folder.name[-1]) if folder.name[-1].isdigit() else 0
            (tmp_path / "out" / folder.name).mkdir()
            result = {
                "acc1": 90 - 10 * severity,
                "loss": 1.0,
                "num_samples": 4,
                "config": {"MODEL": {"NUM_CLASSES": 10}},
            }
            (tmp_path / "out" / folder.name / "result.json").write_text(json.dumps(result))
            return 0

    def run(*flags):
        words = [
            f"-output={tmp_path}/out",
            "-cfg=vit_digits",
            "-corruptions=fog,snow",
            "-severities=1,3",
            *flags,
        ]
        words += ["-o", "DATA.IMAGE_SIZE", "32", "DATA.IMAGE_CHANNELS", "3"]
        monkeypatch.setattr("sys.argv", ["robustness.py", *words])
        robustness.main()

    monkeypatch.setattr(robustness.subprocess, "Popen", Evaluation)
    monkeypatch.setattr(robustness, "find_spec", lambda _: None)
    with pytest.raises(
        InputError,
        match="^corruptions need imagecorruptions-imaug; pip install imagecorruptions-imaug==.* scikit-image==",
    ):
        run()
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(robustness, "find_spec", lambda _: "there")
    fails = "clean"
    with pytest.raises(SystemExit):
        run()
    assert not list(tmp_path.iterdir())
    asked.clear()
    fails = "snow-1"
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 3
    fails = ""
    run("-ngpus=2")
    done = [command[-1].rpartition("/")[2] for command in asked]
    assert done == ["clean", "fog-1", "fog-3", "snow-1", "snow-1", "snow-3"]
    assert asked[2][-6:-1] == ["DATA.CORRUPTION", "fog", "DATA.SEVERITY", "3", "-eval"]
    found = json.loads((tmp_path / "out" / "robustness.json").read_text())
    assert found["errors"] == {"fog": {"1": 20, "3": 40}, "snow": {"1": 20, "3": 40}}
    assert (found["clean_error"], found["mean_error"], found["mCE"]) == (10, 30, None)
    assert "clean: 10.00, mean over corruptions: 30.00" in capsys.readouterr().out
    with pytest.raises(
        InputError, match="out has evaluations of SEED 0, not 4; choose another -output"
    ):
        run("-o", "SEED", "4")
    with pytest.raises(
        InputError, match="DATA.CORRUPTION has no effect here; leave it out, and use -corruptions"
    ):
        run("-o", "DATA.CORRUPTION", "fog")


def test_what_an_evaluation_would_refuse_is_told_before_the_first(tmp_path, monkeypatch):
    monkeypatch.setattr(robustness, "find_spec", lambda _: "there")
    colours = ["-cfg=vit_digits", "-o", "DATA.IMAGE_SIZE", "32", "DATA.IMAGE_CHANNELS", "3"]
    for words, message in (
        (
            ["-dataset=multilabel_csv", "-o", "TASK", "multilabel"],
            "^TASK is multilabel, expected classification",
        ),
        (
            ["-o", "DATA.IMAGE_DTYPE", "float32"],
            "^DATA.IMAGE_DTYPE is 'float32', expected auto with DATA.CORRUPTION",
        ),
        (
            [f"-published={tmp_path}/C"],
            "^-published: there is no folder .*/C/gaussian_noise/1; expected <corruption>/",
        ),
    ):
        monkeypatch.setattr(
            "sys.argv", ["robustness.py", f"-output={tmp_path}/out", *colours, *words]
        )
        with pytest.raises(InputError, match=message):
            robustness.main()
    assert not list(tmp_path.iterdir())


def test_published_images_are_folders_of_their_own():
    words, rest = robustness.arguments_of(
        ["-published=C", "-corruptions=fog", "-severities=2", "-cfg=x"]
    )
    [_, (name, severity, flags)] = robustness.cells(words)
    assert (name, severity, rest) == ("fog", 2, ["--cfg=x"])
    # not the part that the run kept for validation
    whole = ["DATA.VAL_SPLIT", "null", "DATA.FOLDS", "null"]
    assert flags == ["-dataset=folder", "-data_path=C/fog/2", "-o", "DATA.CROP_PCT", "1.0", *whole]
    for flag in ("-corruptions=fogg", "-severities=6"):
        with pytest.raises(InputError, match=f"^{flag[:11]}.* has '(fogg|6)', expected any of "):
            robustness.arguments_of([flag])


RESULT = {"acc1": 50.0, "loss": 1.0, "num_samples": 4, "config": {"MODEL": {"NUM_CLASSES": 10}}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"can't be read as a run's result \(JSONDecodeError"),
        (json.dumps(RESULT | {"acc1": 101.0}), "its acc1 is 101.0, expected a percentage"),
        (json.dumps(RESULT | {"acc1": float("nan")}), "it contains NaN, which isn't a number"),
        (json.dumps(RESULT | {"config": []}), r"its config is \[\], expected a dictionary"),
        (json.dumps(RESULT | {"config": {}}), "its config.MODEL is None, expected a dictionary"),
        (
            json.dumps(RESULT | {"config": {"MODEL": {"NUM_CLASSES": "10"}}}),
            "its config.MODEL.NUM_CLASSES is '10'",
        ),
        (None, "it isn't a regular file"),
    ],
)
def test_a_cells_result_that_no_evaluation_wrote_is_refused(text, message, tmp_path):
    file = tmp_path / "result.json"
    if text is None:
        os.mkfifo(file)
    else:
        file.write_text(text)
    with pytest.raises(
        InputError, match=f"result.json: {message}.*; remove it to repeat the evaluation"
    ):
        robustness.evaluation_result(tmp_path, [])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"errors": {}}', "its asked is missing, expected a dictionary"),
        ('{"asked": []}', r"its asked is \[\], expected a dictionary"),
        ('{"asked": {"TASK": "' + "9" * 4000 + '"}}', "has evaluations of "),
    ],
)
def test_what_the_tool_wrote_is_held_to_its_form(text, message, tmp_path, monkeypatch):
    words = [f"-output={tmp_path}/out", "-cfg=vit_digits", "-corruptions=fog", "-severities=1"]
    words += ["-o", "DATA.IMAGE_SIZE", "32", "DATA.IMAGE_CHANNELS", "3"]
    monkeypatch.setattr("sys.argv", ["robustness.py", *words])
    monkeypatch.setattr(robustness, "find_spec", lambda _: "there")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "robustness.json").write_text(text)
    with pytest.raises(InputError, match=f"{message}.*; choose another -output"):
        robustness.main()
