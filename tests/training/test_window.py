"""What reports say of memory and of waiting for data."""

import json
from types import SimpleNamespace

import numpy as np
import paddle
import pytest

import utils
from config import get_config
from training import window
from training.checkpoint import Progress
from training.run import Run


def reported(monkeypatch, gpus, others):
    """The report of rank 1 of 3, to whose sums the other ranks add ``others``: their peaks of memory."""
    found = {}
    run = SimpleNamespace(report=lambda split, **values: found.update(values), info=print)
    training = SimpleNamespace(run=run, scaler=SimpleNamespace(enabled=False))
    monkeypatch.setattr(window, "rank", lambda: 1)
    monkeypatch.setattr(window, "world_size", lambda: 3)
    monkeypatch.setattr(window, "peak_memory", lambda: 250.0)
    monkeypatch.setattr(window, "num_gpus", lambda: gpus)
    monkeypatch.setattr(paddle.device.cuda, "max_memory_allocated", lambda: 7e9)
    collectives = []

    def all_reduce_sum(tensor):
        collectives.append(tensor)
        assert tensor.dtype == paddle.float64
        return tensor + paddle.to_tensor([0.0] * 7 + others, dtype="float64")

    monkeypatch.setattr(window, "all_reduce_sum", all_reduce_sum)
    own = window.Window(training, 1, Progress())
    own.add(1, paddle.to_tensor([6.0, 1.0, 2.0, 4.0], dtype="float64"))
    own.report(0.1)
    assert len(collectives) == 1
    assert (found["loss"], found["acc1"], found["samples"]) == (1.5, 25.0, 4)
    return {key: value for key, value in found.items() if key.startswith("peak")}


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
    """Returns a function that reports a training window of a run and returns what the run says of input, line by line.

    32 images at ``rate`` images/s, of which the share ``wait`` is spent waiting.
    """
    run = Run(get_config(None, [*tiny, "OUTPUT", str(tmp_path / "run"), "DATA.NUM_WORKERS", "3"]), [])
    run.begin()

    def call(epoch, wait, rate=32.0):
        values = {"step": 1, "samples": 32, "lr": 0.1, "loss": 1.0, "acc1": 0.0, "acc5": 0.0, "images_per_s": rate}
        run.report("train", epoch=epoch, **values, data_wait=wait)
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
        f" {utils.num_cores()} cores: more of them, or smaller images, make training faster"
    ]
    assert len(report.metrics.read_text().splitlines()) == 4
    assert json.loads(report.metrics.read_text().splitlines()[2])["data_wait"] == 0.25


def test_waits_count_within_their_epoch_alone(report):
    report(1, 0.9)
    assert report(1, 0.2) == []  # not more than the bound
    assert report(1, 0.0, rate=1.0) == []
    assert report(2, 0.15) == []
    assert report(2, 0.3)[0].startswith("22% of the time in epoch 2 so far")
