"""A second task, of batches without labels, goes through the same ``fit``: nothing of it is known
to the engine.
"""

import json
import re
from unittest import mock

import numpy as np
import paddle
import pytest
from conftest import without
from paddle import nn
from support.ranks import run_ranks
from support.training_runs import assert_same_run, records, weights

import utils
from config import get_config
from datasets import ArrayDataset, get_dataloader, get_datasets
from errors import RunError
from models import build_model
from training import engine, parallel
from training.classification import Classification
from training.report import write_report
from training.run import Run
from training.task import Task, check_names, check_values


class Pixels(ArrayDataset):
    """Images alone."""

    def __init__(self, *args):
        super().__init__(*args)
        self.own_columns = ["pixels"]


class Narrow(nn.Layer):
    """64 pixels through 4 numbers and back."""

    weight_names = None
    first_conv = "none"
    beside_first_conv = ()
    window_side = None

    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(64, 4), nn.Linear(4, 64)

    def forward(self, x):
        return self.decode(self.encode(x))

    def classifier_names(self):
        return ()

    def head_names(self):
        return ()

    def no_weight_decay(self):
        return set()


class Reconstruction(Task):
    """The pixels from themselves, with some of them hidden."""

    note = "pixels are hidden"

    def step(self, network, batch, epoch):
        seen = flat(batch["pixels"])
        return {
            "loss": errors(network(seen * (paddle.rand(seen.shape) > 0.25).astype("float32")), seen)
        }

    def evaluate(self, forward, batches):
        total = paddle.zeros([2], "float64")
        for batch in batches:
            seen = flat(batch["pixels"])
            losses = errors(forward(seen), seen)
            total += paddle.stack([losses, paddle.ones_like(losses)]).astype("float64").sum(1)
        loss, count = utils.all_reduce_sum(total).tolist()
        return {"loss": loss / count, "num_samples": int(count)}


def flat(pixels):
    return pixels.flatten(1).astype("float32") / 255


def errors(found, wanted):
    return (found - wanted).square().mean(1)


def train(options, output):
    config, train, val = get_datasets(get_config(None, [*options, "OUTPUT", str(output)]))
    data = [
        Pixels(config, mode, own.images[:count], own.labels[:count], [])
        for mode, own, count in (("train", train, 64), ("val", val, 37))
    ]
    utils.seed_everything(0)
    network = parallel.wrap_model(config, Narrow())
    run = Run(config, [])
    engine.fit(Reconstruction(config), network, *data, run)
    return [np.stack([own[i][0] for i in range(len(own))]) for own in data][1]


def train_and_go_on(options, output):
    pixels = train(options, output / "whole")
    middle = output / "whole" / "checkpoints" / "epoch_0002_sample_000000032"
    train([*options, "MODEL.RESUME", str(middle)], output / "resumed")
    return pixels


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.smoke)])
def test_a_task_without_labels_trains_evaluates_keeps_the_best_and_goes_on(tmp_path, tiny, ranks):
    options = [
        *without(tiny, "TRAIN.NUM_EPOCHS"),
        "TRAIN.NUM_EPOCHS",
        "3",
        "TRAIN.MODEL_EMA",
        "True",
    ]
    options += ["TRAIN.BASE_LR", "0.01", "DATA.BATCH_SIZE", str(16 // ranks), "REPORT_FREQ", "3"]
    options += ["SAVE_STEPS", "1", "KEEP_LAST", "99"]
    pixels, *_ = run_ranks(train_and_go_on, options, tmp_path, ranks=ranks)
    assert_same_run(tmp_path / "whole", tmp_path / "resumed")
    found = {
        split: [r for r in records(tmp_path / "whole") if r["split"] == split]
        for split in ("train", "val")
    }
    assert [(r["step"], r["samples"]) for r in found["train"][:3]] == [(3, 48), (4, 16), (7, 48)]
    # A value that is logged for every task may come in addition. Those of classes may not.
    assert found["train"][0].keys() >= {
        "split",
        "step",
        "epoch",
        "samples",
        "lr",
        "loss",
        "grad_norm",
    }
    assert found["train"][0].keys().isdisjoint({"acc1", "acc5"})
    assert found["val"][0].keys() == {"split", "step", "epoch", "loss", "num_samples"}
    saved = weights(tmp_path / "whole")
    seen = pixels.reshape(37, -1) / 255
    decoded = (seen @ saved["encode.weight"].T + saved["encode.bias"]) @ saved[
        "decode.weight"
    ].T + saved["decode.bias"]
    losses = [r["loss"] for r in found["val"]]
    assert losses[-1] == pytest.approx(((decoded - seen) ** 2).mean(), abs=1e-6)
    result = json.loads((tmp_path / "whole" / "result.json").read_text())
    assert (result["num_samples"], result["best"]["epoch"]) == (37, 1 + int(np.argmin(losses)))
    assert result["best"]["loss"] == pytest.approx(min(losses), abs=1e-6)
    assert result["ema"]["best"]["epoch"] in (1, 2, 3)
    page = write_report(tmp_path / "whole", None).read_text()
    titles = ["loss", "learning rate", "images per second", "waiting for data (share of the time)"]
    assert re.findall('<img alt="([^"]*)"', page) == titles
    log = (tmp_path / "whole" / "log.txt").read_text()
    assert "pixels are hidden\n" in log
    assert f"epoch 3/3 validation: loss: {losses[-1]:.4f}\n" in log
    best = f"loss: {min(losses):.4f} after epoch {result['best']['epoch']}, in checkpoints/best"
    average = (
        f"loss: {result['ema']['best']['loss']:.4f} after epoch {result['ema']['best']['epoch']}"
    )
    average += ", in checkpoints/best_ema.safetensors"
    assert f"best val: {best}\n" in log
    assert f"best ema: {average}\n" in log
    assert (
        f"summary: loss: {losses[-1]:.4f}; best: {best}; best average: {average}; samples: 37, time: "
        in log
    )
    found = result["best"]
    assert (
        f"after epoch {found['epoch']}, in checkpoints/{found['checkpoint']}: loss {found['loss']:.4f}"
        in page
    )
    assert "acc" not in log.partition("run: ")[2]


def test_the_best_of_a_task_is_of_the_lowest_loss_or_of_the_metric_that_is_asked_for():
    low = {"loss": 1.0, "acc1": 0.0}
    high = {"loss": 2.0, "acc1": 100.0}
    for metric, best, worst in (("auto", low, high), ("loss", low, high), ("acc1", high, low)):
        task = Task(get_config(None, ["BEST_METRIC", metric]))
        assert task.score(best) > task.score(worst)
    with pytest.raises(NotImplementedError):
        task.step(None, {}, 1)


def test_an_evaluation_that_lost_a_batch_has_no_accuracy(tiny):
    config, _, val = get_datasets(get_config(None, [*tiny, "DATA.BATCH_SIZE_EVAL", "64"]))
    val.images, val.labels = val.images[:128], val.labels[:128]
    loader = get_dataloader(config, val, "val")
    lossy = mock.MagicMock(dataset=val, batch_sampler=loader.batch_sampler)
    lossy.__iter__.return_value = iter(list(loader)[1:])
    with pytest.raises(
        RunError, match="^the evaluation counted 64 samples, but the dataset has 128$"
    ):
        engine.evaluate(Classification(config), build_model(config), lossy)


# ------------------------------------------- what a task of somebody else may do


PER_SAMPLE = "expected a float tensor [3]: one value per sample"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (3, "a value of type int, expected a dict with the entry loss"),
        (None, "a value of type NoneType, expected a dict with the entry loss"),
        ({}, "a dict of nothing, expected the entry loss in it"),
        ({"los": paddle.ones([3])}, "a dict of los, expected the entry loss in it"),
        ({"loss": 3.0}, f"loss as float, {PER_SAMPLE}"),
        ({"loss": paddle.ones([])}, f"loss as float32 [], {PER_SAMPLE}"),
        ({"loss": paddle.ones([2])}, f"loss as float32 [2], {PER_SAMPLE}"),
        ({"loss": paddle.ones([3, 1])}, f"loss as float32 [3, 1], {PER_SAMPLE}"),
        ({"loss": paddle.ones([3]), "hit": paddle.ones([3]) > 0}, f"hit as bool [3], {PER_SAMPLE}"),
        (
            {"loss": paddle.ones([3]), "n": paddle.ones([3], "int64")},
            f"n as int64 [3], {PER_SAMPLE}",
        ),
        (
            {"loss": paddle.ones([3]), "lr": paddle.ones([3])},
            "an entry lr, a name that reports use",
        ),
    ],
)
def test_a_step_that_returns_something_else_is_one_line(values, message):
    batch = {"pixels": paddle.zeros([3, 8, 8, 1], "uint8")}
    check_values(batch, {"loss": paddle.ones([3]), "acc": paddle.ones([3])})
    with pytest.raises(RunError, match=re.escape(f"the task's step returned {message}")):
        check_values(batch, values)


def test_the_names_of_a_steps_values_stay():
    check_names(["loss", "acc"], ["loss", "acc"])
    with pytest.raises(RunError, match="returned loss after loss, acc, expected the same names at"):
        check_names(["loss"], ["loss", "acc"])


class Wrong(Reconstruction):
    """Does something that a task may not."""

    def __init__(self, config, wrong):
        super().__init__(config)
        self.wrong = wrong

    def prepare_data(self, dataset, mode):
        draws = {
            "shape": lambda rng: rng.random(rng.integers(1, 99)),
            "type": lambda rng: "a word",
        }
        if self.wrong in draws:
            dataset.draws["drawn"] = draws[self.wrong]
        if self.wrong == "name":
            dataset.draws["pixels"] = lambda rng: rng.random(3)

    def step(self, network, batch, epoch):
        values = super().step(network, batch, epoch)
        if self.wrong == "detached":
            values["loss"] = values["loss"].detach()
        if self.wrong == "names of ranks":
            values[f"of_{utils.rank()}"] = values["loss"].detach()
        return values


def train_wrongly(options, output, wrong):
    config, data, val = get_datasets(get_config(None, [*options, "OUTPUT", str(output)]))
    utils.seed_everything(0)
    network = parallel.wrap_model(config, Narrow())
    with pytest.raises(RunError) as caught:
        engine.fit(Wrong(config, wrong), network, data, val, Run(config, []))
    return str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("detached", "returned a loss without gradients; don't detach it"),
        (
            "shape",
            r"column drawn has \[\d+\] after \[\d+\], expected one shape for all",
        ),
        ("type", "column drawn has <U6, expected numbers"),
        ("name", "column pixels has a name of a column of the data"),
    ],
)
def test_a_task_that_can_not_train_is_one_line(tmp_path, tiny, wrong, message):
    assert re.search(message, train_wrongly([*tiny, "DATA.BATCH_SIZE", "16"], tmp_path, wrong))


def test_values_of_other_names_on_another_rank_are_one_line_on_both(tmp_path, tiny):
    options = [*tiny, "DATA.BATCH_SIZE", "16"]
    for message in run_ranks(train_wrongly, options, tmp_path / "run", "names of ranks"):
        assert re.search("returned loss, of_[01] on rank [01] and loss, of_[01] on rank", message)
