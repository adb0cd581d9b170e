"""What reports say of the steps since the last one, of memory, and of waiting for data."""

import hashlib
import json
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from support.training_runs import assert_same_run, train

import utils
from config import get_config
from errors import RunError
from training import window
from training.bad_steps import LossHistory
from training.run import Run
from training.task import Task

# ---------------------------------------------------------------- a record

# Of releases that knew no names: the loss, hits in the first and in the first five, samples, by
# rank.
BEFORE = [
    {"sums": [7.0, 1.0, 3.0, 4.0], "skips": 1, "norm_sum": 3.0, "finite": 2, "updates": 3},
    {"sums": [5.0, 2.0, 4.0, 4.0], "skips": 0, "norm_sum": 3.0, "finite": 2, "updates": 3},
]
NAMED = [
    {
        "means": {"loss": (7.0, 4), "acc1": (100.0, 4), "acc5": (300.0, 4), "grad_norm": (3.0, 2)},
        "totals": {"samples": 4, "skipped": 1, "skipped_updates": 1},
    },
    {
        "means": {"loss": (5.0, 4), "acc1": (200.0, 4), "acc5": (400.0, 4), "grad_norm": (0.0, 0)},
        "totals": {"samples": 4, "skipped": 0, "skipped_updates": 0},
    },
]
WHOLE = {
    "means": {"loss": (12.0, 8), "acc1": (300.0, 8), "acc5": (700.0, 8), "grad_norm": (3.0, 2)},
    "totals": {"samples": 8, "skipped": 1, "skipped_updates": 1},
}


def of_ranks(monkeypatch, states, ranks):
    monkeypatch.setattr(window, "world_size", lambda: ranks)
    found = []
    for own in range(ranks):
        monkeypatch.setattr(window, "rank", lambda own=own: own)
        found.append(window.Record.of_rank(states).state())
    return found


@pytest.mark.parametrize("states", [BEFORE, NAMED])
def test_each_rank_goes_on_with_its_own_record_or_the_first_with_all(monkeypatch, states):
    nothing = {
        "means": dict.fromkeys(WHOLE["means"], (0.0, 0)),
        "totals": dict.fromkeys(WHOLE["totals"], 0),
    }
    assert of_ranks(monkeypatch, states, 2) == NAMED
    assert of_ranks(monkeypatch, states, 1) == [WHOLE]
    assert of_ranks(monkeypatch, states, 3) == [WHOLE, nothing, nothing]


def test_a_record_is_what_was_read_from_json(monkeypatch):
    assert of_ranks(monkeypatch, json.loads(json.dumps(NAMED)), 2) == NAMED


def test_ranks_records_come_to_means_totals_and_the_highest(monkeypatch):
    records = [window.Record(state) for state in NAMED]
    sent = []
    monkeypatch.setattr(window, "world_size", lambda: 2)
    monkeypatch.setattr(window, "all_reduce_sum", lambda tensor: sent.append(tensor) or tensor)
    for own, record in enumerate(records):
        monkeypatch.setattr(window, "rank", lambda own=own: own)
        record.over_ranks({"peak": 3.0 + own, "low": -1.0 - own})
    monkeypatch.setattr(window, "all_reduce_sum", lambda tensor: sent[0] + sent[1])
    expected = {"loss": 1.5, "acc1": 37.5, "acc5": 87.5, "grad_norm": 1.5}
    expected |= {"samples": 8, "skipped": 1, "skipped_updates": 1}
    assert records[0].over_ranks({"peak": 3.0, "low": -1.0}) == {
        **expected,
        "peak": 4.0,
        "low": -1.0,
    }


def rewrite_as_format_1(checkpoint):
    """Gives a checkpoint of one rank the state of releases that knew no names.

    Returns the names of values that have come since: such a state lacks them.
    """
    state = json.loads((checkpoint / "state.json").read_text())
    [own] = state["window"]
    (loss, samples), (first, _), (five, _), (norm, finite) = (
        own["means"][name] for name in ("loss", "acc1", "acc5", "grad_norm")
    )
    updates = own["totals"]["skipped_updates"] + finite
    skips = own["totals"]["skipped"]
    sums = {
        "sums": [loss, first / 100, five / 100, float(samples)],
        "skips": skips,
        "norm_sum": norm,
    }
    state |= {"format": 1, "window": [{**sums, "finite": finite, "updates": updates}]}
    (checkpoint / "state.json").write_text(json.dumps(state))
    lines = (checkpoint / "SHA256SUMS").read_text().splitlines(keepends=True)
    digest = hashlib.sha256((checkpoint / "state.json").read_bytes()).hexdigest()
    lines = [f"{digest}  state.json\n" if "state.json" in line else line for line in lines]
    (checkpoint / "SHA256SUMS").write_text("".join(lines))
    return own["means"].keys() - {"loss", "acc1", "acc5", "grad_norm"}


@pytest.mark.smoke
def test_a_checkpoint_without_names_goes_on_in_the_same_bits(tmp_path, tiny):
    options = [
        *tiny,
        "DATA.BATCH_SIZE",
        "8",
        "TRAIN.ACCUM_ITER",
        "2",
        "SAVE_STEPS",
        "1",
        "KEEP_LAST",
        "99",
    ]
    train(options, tmp_path / "whole", 64)
    middle = tmp_path / "whole" / "checkpoints" / "epoch_0001_sample_000000032"
    new_values = rewrite_as_format_1(middle)
    train([*options, "MODEL.RESUME", str(middle)], tmp_path / "resumed", 64)
    assert_same_run(tmp_path / "whole", tmp_path / "resumed", without=new_values)


# ---------------------------------------------------------------- a window


def opened(states=(), scaler=False):
    """A window, and what it reports."""
    found = {}
    run = SimpleNamespace(
        report=lambda split, line, **values: found.update(values),
        info=print,
        record_bad_step=lambda *step: found.setdefault("bad_steps", []).append(step),
    )
    scaler = SimpleNamespace(enabled=scaler, loss_scale=8.0)
    training = SimpleNamespace(
        run=run, scaler=scaler, task=Task(get_config()), losses=LossHistory()
    )
    return window.Window(training, 1, 0, list(states)), found


def values(**by_name):
    return {name: paddle.to_tensor(each, dtype="float32") for name, each in by_name.items()}


def reported(monkeypatch, gpus, others):
    """The report of rank 1 of 3, to whose sums the other ranks add ``others``: their peaks of
    memory.
    """
    monkeypatch.setattr(window, "rank", lambda: 1)
    monkeypatch.setattr(window, "world_size", lambda: 3)
    monkeypatch.setattr(window, "peak_memory", lambda: 250.0)
    monkeypatch.setattr(window, "num_gpus", lambda: gpus)
    monkeypatch.setattr(paddle.device.cuda, "max_memory_allocated", lambda: 7e9)
    collectives = []

    def all_reduce_sum(tensor):
        collectives.append(tensor)
        assert tensor.dtype == paddle.float64
        # The peaks of memory, three for each kind, are the last.
        sums = [0.0] * (tensor.size - len(others))
        return tensor + paddle.to_tensor(sums + others, dtype="float64")

    monkeypatch.setattr(window, "all_reduce_sum", all_reduce_sum)
    own, found = opened()
    own.add(1, values(loss=[1.0, 2.0, 0.0, 3.0], acc1=[100.0, 0.0, 0.0, 0.0]))
    own.report(0.1)
    assert len(collectives) == 1
    assert (found["loss"], found["acc1"], found["samples"]) == (1.5, 25.0, 4)
    return {key: value for key, value in found.items() if key.startswith("peak")}


def test_a_report_goes_on_from_what_was_carried_over():
    """In float16: of four updates one overflowed before the resume, and one after it."""
    before = {
        "means": {"loss": (7.0, 4), "grad_norm": (3.0, 1)},
        "totals": {"samples": 4, "skipped_updates": 1},
    }
    own, found = opened([before], scaler=True)
    assert own.gather()[0]["means"].items() >= before["means"].items()
    own.add(5, values(loss=[1.0, 2.0], new=[4.0, 8.0]), paddle.to_tensor(float("inf")))
    own.add(6, values(loss=[0.5, 1.5], new=[0.0, 0.0]), paddle.to_tensor(2.0))
    own.report(0.1)
    assert {key: found[key] for key in ("step", "samples", "loss", "grad_norm", "skipped_updates", "loss_scale")} == {
        "step": 6, "samples": 8, "loss": 1.5, "grad_norm": 2.5, "skipped_updates": 1 + 1, "loss_scale": 8.0,
    }  # fmt: skip
    assert found["new"] == 3.0  # of its own samples: those before have none
    found.clear()
    own.add(7, values(loss=[3.0]), paddle.to_tensor(4.0))
    own.report(0.1)
    assert (found["loss"], found["samples"], found["grad_norm"], found["skipped_updates"]) == (
        3.0,
        1,
        4.0,
        0,
    )


def test_a_window_without_an_update_has_no_norm():
    own, found = opened()
    own.add(1, values(loss=[1.0]))
    own.report(0.1)
    assert "grad_norm" not in found
    assert "skipped_updates" not in found


def test_what_is_saved_is_the_window_at_the_last_mark():
    own, _ = opened()
    own.add(1, values(loss=[1.0, 2.0]), paddle.to_tensor(5.0))
    own.mark()
    own.add(2, values(loss=[4.0, 4.0]))
    [saved] = own.gather()
    assert saved["means"].items() >= {"loss": (3.0, 2), "grad_norm": (5.0, 1)}.items()
    totals = {"samples": 2, "skipped_updates": 0, "skipped": 0}
    assert saved["totals"].items() >= totals.items()
    own.report(0.1)  # its steps are those after an update: what is saved is from before
    assert own.gather() == [saved]


@pytest.mark.parametrize(
    "ask", [lambda own: own.report(0.1), lambda own: (own.mark(), own.gather())]
)
def test_only_the_loss_is_judged_not_finite_and_its_first_step_is_named(ask):
    own, found = opened()
    own.add(4, values(acc1=[float("nan")], loss=[1.0]), paddle.to_tensor(float("inf")))
    own.report(0.1)
    assert found["loss"] == 1.0
    assert np.isnan(found["acc1"])
    own.add(5, values(acc1=[float("nan")], loss=[1.0]))
    own.mark()
    assert own.gather()[0]["means"]["loss"] == (1.0, 1)
    own.add(6, values(acc1=[0.0], loss=[float("inf")]))
    own.add(7, values(acc1=[0.0], loss=[float("nan")]))
    with pytest.raises(RunError) as raised:
        ask(own)
    assert found["bad_steps"] == [(6, 1, "not finite")]
    assert str(raised.value).startswith(
        "the loss is inf at step 6 (epoch 1, rank 0); lower TRAIN.BASE_LR, or set"
    )


def test_a_loss_out_of_all_proportion_is_recorded_and_reported_as_it_is():
    own, found = opened()
    for step in range(1, 61):
        own.add(step, values(loss=[2.0, 2.0]))
    own.report(0.1)
    assert "bad_steps" not in found
    own.add(61, values(loss=[2.0, 2.0]))
    own.add(62, values(loss=[50.0, 2.0]))
    own.report(0.1)
    assert found["bad_steps"] == [(62, 1, "outlier")]
    assert found["loss"] == 14.0
    assert "outlier" not in found


@pytest.mark.parametrize("names", [["a.jpg", "b.jpg"], None])
def test_the_batch_of_a_bad_step_is_saved_unless_it_cannot_be_loaded(tmp_path, names):
    own, _ = opened()
    loader = FewBatches(names)
    own.training.loader = loader
    run = own.training.run
    run.directory = tmp_path
    run.checkpoints = tmp_path / "checkpoints"
    run.record_bad_step = lambda *_: True
    logged = []
    run.local = SimpleNamespace(warning=logged.append)
    (tmp_path / "bad_steps").mkdir()
    own.epoch = 3
    own.add(9, values(loss=[float("nan")]))
    with pytest.raises(RunError, match="the loss is nan at step 9"):
        own.report(0.1)
    # The third epoch of four steps begins with step 9.
    assert loader.asked == [1]
    files = list((tmp_path / "bad_steps").iterdir())
    if names is None:
        assert files == []
        assert logged == ["the batch of step 9 can't be saved: b.jpg is gone"]
        return
    assert files == [tmp_path / "bad_steps" / "step_9_rank0.npz"]
    assert logged == []
    saved = np.load(files[0])
    assert saved["names"].tolist() == names
    assert saved["labels"].tolist() == [1, 2]


class FewBatches:
    """A loader of four batches; without names, a batch can't be loaded once more."""

    def __init__(self, names):
        self.names = names
        self.asked = []

    def __len__(self):
        return 4

    def load_again(self, step):
        self.asked.append(step)
        if self.names is None:
            raise RunError("b.jpg is gone")
        return self.names, {"labels": np.array([1, 2])}


def test_the_largest_peak_of_memory_comes_with_the_sums(monkeypatch):
    assert reported(monkeypatch, 0, [300.0, 0.0, 200.0]) == {"peak_memory": 300.0}
    assert reported(monkeypatch, 0, [100.0, 0.0, 200.0]) == {"peak_memory": 250.0}
    others = [300.0, 0.0, 200.0, 6000.0, 0.0, 6500.0]
    assert reported(monkeypatch, 1, others) == {"peak_memory": 300.0, "peak_memory_gpu": 7000.0}


def test_peak_memory_is_in_megabytes_and_never_falls():
    before = window.peak_memory()
    block = np.ones(int(before * 1e6) + 50_000_000, np.uint8)  # more than all that was held so far
    held = window.peak_memory()
    assert held >= block.nbytes / 1e6
    assert held < before + block.nbytes / 1e6 + 50
    del block
    assert window.peak_memory() >= held


@pytest.fixture
def report(tmp_path, tiny):
    """Returns a function that reports a training window of a run and returns what the run says of
    input, line by line.

    32 images at ``rate`` images/s, of which the share ``wait`` is spent waiting.
    """
    run = Run(
        get_config(None, [*tiny, "OUTPUT", str(tmp_path / "run"), "DATA.NUM_WORKERS", "3"]), []
    )
    run.begin()

    def call(epoch, wait, rate=32.0):
        values = {
            "step": 1,
            "samples": 32,
            "lr": 0.1,
            "loss": 1.0,
            "acc1": 0.0,
            "acc5": 0.0,
            "images_per_s": rate,
        }
        run.report("train", "", epoch=epoch, **values, data_wait=wait)
        lines = (tmp_path / "run" / "log.txt").read_text().splitlines()
        return [line.split("input-bound: ")[1] for line in lines if "input-bound: " in line]

    call.metrics = tmp_path / "run" / "metrics.jsonl"
    return call


def test_a_run_says_once_that_it_waits_for_data(report):
    assert report(1, 0.9) == []  # the first: workers start
    assert report(1, 0.1) == []
    assert report(1, 0.25, rate=4.0) != []  # (0.1 x 1 s + 0.25 x 8 s) of 9 s
    told = report(2, 0.9)
    assert told == [
        "23% of the time in epoch 1 so far is spent waiting for data; DATA.NUM_WORKERS is 3 per process on"
        f" {utils.num_cores()} cores: more workers or smaller images make training faster"
    ]
    assert len(report.metrics.read_text().splitlines()) == 4
    assert json.loads(report.metrics.read_text().splitlines()[2])["data_wait"] == 0.25


def test_waits_count_within_their_epoch_alone(report):
    report(1, 0.9)
    assert report(1, 0.2) == []  # not more than the bound
    assert report(1, 0.0, rate=1.0) == []
    assert report(2, 0.15) == []
    assert report(2, 0.3)[0].startswith("22% of the time in epoch 2 so far")
