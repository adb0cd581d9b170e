"""The report of a run that still trains: a process of its own renews it, and changes no result."""

import contextlib
import errno
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import paddle
import pytest
from conftest import without
from support.programs import ROOT
from support.ranks import run_ranks
from support.training_runs import assert_same_run

import main_multi_gpu
import utils
from config import asked_config, default_values, get_config
from datasets import ArrayDataset, get_datasets
from loading.tables import csv_rows
from loading.transforms import Mixup
from settings.configuration import Option
from settings.parser import pairs
from settings.registry import tasks
from training import engine, live_report, parallel
from training.batch_panels import batch_rows, first_images
from training.live_report import LiveReport
from training.optim import freeze
from training.pages import page
from training.run import Run
from training.setup import share_batch


def run(options, output, images=64):
    """Trains as main_worker does, and writes the report of the run's end."""
    given = [Option(key, value) for key, value in pairs(options, default_values())]
    config, train, val = get_datasets(asked_config(None, [*given, Option("OUTPUT", str(output))]))
    train = ArrayDataset(
        config, "train", train.images[:images], train.labels[:images], train.classes
    )
    val = ArrayDataset(config, "val", val.images[:91], val.labels[:91], val.classes)
    config = share_batch(config, utils.world_size())
    current = Run(config, val.classes)
    utils.seed_everything(config.SEED)
    task = tasks.choose(config)(config, val.classes)
    live = LiveReport(current, task, val) if config.REPORT else None
    with live or contextlib.nullcontext():
        network = task.build_network()
        freeze(config, network)
        engine.fit(task, parallel.wrap_model(config, network), train, val, current, live)
    if utils.rank() == 0:
        main_multi_gpu.leave_report(current, val)


@pytest.fixture
def waiting(monkeypatch):
    """Each evaluation waits until the report of the one before it is written; what was renewed."""
    renewed = []
    renew = LiveReport.renew

    def renew_and_wait(self, progress, metrics, predictions):
        renew(self, progress, metrics, predictions)
        if self.process and self.busy:
            assert self.connection.poll(60)
            assert self._is_free()
            assert not self.failed, (self.run.directory / "log.txt").read_text()
            folder = self.run.directory
            table = folder / "predictions.csv"
            table = table.read_text() if table.exists() else ""
            renewed.append(((folder / "report.html").read_text(), table, metrics))

    monkeypatch.setattr(LiveReport, "renew", renew_and_wait)
    return renewed


@pytest.fixture
def options(tiny):
    return [*without(tiny, "REPORT"), "DATA.BATCH_SIZE", "32", "TRAIN.NUM_EPOCHS", "3"]


def test_each_evaluation_but_the_last_renews_the_page(tmp_path, options, waiting):
    run([*options, "TRAIN.MODEL_EMA", "True"], tmp_path / "run")
    assert len(waiting) == 2
    for epoch, (text, table, metrics) in enumerate(waiting, 1):
        assert f"Training: epoch {epoch} of 3 is evaluated." in text
        assert page.script_hash(page.RELOAD) in text
        assert f'<td class="n">{metrics["val"]["acc1"]:.2f}</td>' in text
        # The table is that of this evaluation.
        rows = list(csv_rows(iter(table.splitlines(keepends=True))))[1:]
        assert len(rows) == 91
        right = 100 * np.mean([row[1] == row[2] for row in rows])
        assert right == pytest.approx(metrics["val"]["acc1"])
        for title in ("loss", "learning rate", "Confusion matrix", "Training images, augmented"):
            assert f'alt="{title}"' in text
        assert "The most confident mistakes" in text
    last = (tmp_path / "run" / "report.html").read_text()
    assert "<script" not in last
    assert "Training:" not in last
    assert 'alt="Training images, augmented"' in last
    assert not [name for name in os.listdir(tmp_path / "run") if name.startswith(".report")]


def test_the_page_names_the_weights_that_were_evaluated(tmp_path, options, waiting):
    # At this rate no answer changes, so the first evaluation remains the best.
    run([*options, "TRAIN.BASE_LR", "1e-12"], tmp_path / "run")
    for epoch, (text, _, _) in enumerate(waiting, 1):
        assert f"Weights: those after epoch {epoch}." in text
        assert "after epoch 1, in checkpoints/epoch_0001: " in text


@pytest.mark.smoke
def test_a_report_changes_no_bit(tmp_path, options, waiting):
    run([*options, "TRAIN.MIXUP_ALPHA", "0.8"], tmp_path / "with")
    run([*options, "TRAIN.MIXUP_ALPHA", "0.8", "REPORT", "False"], tmp_path / "none")
    assert len(waiting) == 2
    assert_same_run(tmp_path / "with", tmp_path / "none")
    names = set(os.listdir(tmp_path / "none"))
    assert names.isdisjoint({"report.html", "predictions.csv", "training_batch.png"})


def as_rank(options, output):
    # A process of ``run_ranks`` is a daemon, which may start no process. A rank of a run isn't one.
    multiprocessing.current_process()._config["daemon"] = False
    run(options, output)


@pytest.mark.long
def test_of_two_ranks_one_writes_and_the_bits_are_those_without_a_report(tmp_path, options):
    for name, more in (("with", []), ("none", ["REPORT", "False"])):
        run_ranks(as_rank, [*options, *more], tmp_path / name)
    assert_same_run(tmp_path / "with", tmp_path / "none")
    assert "<script" not in (tmp_path / "with" / "report.html").read_text()


def test_a_failure_is_one_warning(tmp_path, options, monkeypatch):
    def fails(*_):
        raise ValueError("a bad day\nfor all")

    renew = LiveReport.renew

    def renew_and_wait(self, *arguments):
        renew(self, *arguments)
        assert self.connection.poll(60)

    monkeypatch.setattr(LiveReport, "renew", renew_and_wait)
    # The process is a fork, and has it, too.
    monkeypatch.setattr(live_report, "_write", fails)
    run([*options, "TRAIN.NUM_EPOCHS", "5"], tmp_path / "run")
    log = (tmp_path / "run" / "log.txt").read_text()
    said = "report.html can't be renewed while the run trains (ValueError: a bad day for all)"
    assert log.count(f"warning: {said}\n") == 1
    assert "<script" not in (tmp_path / "run" / "report.html").read_text()


def test_a_process_that_cannot_be_started_is_one_warning(tmp_path, options, monkeypatch):
    def refuses(name):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuses)
    run(options, tmp_path / "run")
    log = (tmp_path / "run" / "log.txt").read_text()
    said = "report.html can't be renewed while the run trains (OSError: [Errno 24] Too many open"
    assert log.count(f"warning: {said} files)\n") == 1
    assert "<script" not in (tmp_path / "run" / "report.html").read_text()


def test_a_process_that_was_killed_is_one_warning(tmp_path, options, monkeypatch):
    renew = LiveReport.renew

    def renew_without(self, *arguments):
        self.process.kill()
        self.process.join()
        renew(self, *arguments)

    monkeypatch.setattr(LiveReport, "renew", renew_without)
    run(options, tmp_path / "run")
    log = (tmp_path / "run" / "log.txt").read_text()
    assert log.count("report.html can't be renewed while the run trains") == 1
    assert "<script" not in (tmp_path / "run" / "report.html").read_text()


def test_an_evaluation_is_left_out_while_the_page_is_written(tmp_path, options, monkeypatch):
    """Nothing queues up, and the training doesn't wait."""
    started = []
    took = []
    renew = LiveReport.renew

    def sleeps(*_):
        time.sleep(30)

    def timed(self, *arguments):
        before = time.perf_counter()
        renew(self, *arguments)
        took.append(time.perf_counter() - before)
        started.append(self.busy)

    monkeypatch.setattr(live_report, "_write", sleeps)
    monkeypatch.setattr(LiveReport, "renew", timed)
    before = time.perf_counter()
    run([*options, "TRAIN.NUM_EPOCHS", "4"], tmp_path / "run")
    assert started == [True] * 3
    assert max(took) < 5
    assert time.perf_counter() - before < 25


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_leaves_a_whole_page(tmp_path, number):
    words = [sys.executable, str(ROOT / "main_single_gpu.py"), f"-output={tmp_path}/run"]
    words += [f"-cfg={ROOT}/configs/vit/vit_digits.yaml", "-dataset=digits", "-batch_size=256"]
    words += ["-o", "VALIDATE_FREQ", "1", "TRAIN.NUM_EPOCHS", "10000", "DATA.NUM_WORKERS", "0"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    file = tmp_path / "run" / "report.html"
    until = time.monotonic() + 90
    while not file.exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    text = file.read_text()
    assert text.endswith("</html>\n")
    last = (tmp_path / "run" / "log.txt").read_text().splitlines()[-1]
    if number == signal.SIGKILL:
        assert re.search(r"Training: epoch \d+ of 10000 is evaluated\. About .* left\.", text)
        assert "<script>" in text
        assert " epoch " in last
        return
    assert process.returncode == 143, errors
    assert last[14:] == errors.splitlines()[-1]
    assert last[14:].startswith("stopped by SIGTERM after step ")
    assert f"The training has ended: {page.text(last[14:])} <small>" in text
    assert "<script" not in text
    assert 'http-equiv="refresh' not in text
    assert not [name for name in os.listdir(file.parent) if re.match(r"\..*\.html\.", name)]


@pytest.mark.parametrize("batch", [2, 9])
def test_the_first_images_of_a_batch_are_mixed_as_in_the_whole(tiny, batch):
    config = get_config(None, [*tiny, "TRAIN.MIXUP_ALPHA", "0.8", "TRAIN.CUTMIX_ALPHA", "1.0"])
    rng = np.random.default_rng(0)
    whole = {
        "pixels": paddle.to_tensor(rng.integers(0, 255, (batch, 8, 8, 1), dtype=np.uint8)),
        "labels": paddle.to_tensor(rng.integers(0, 10, batch)),
        "mixed": paddle.to_tensor(Mixup(config).draw(1, 1, batch)),
    }
    state = paddle.get_rng_state()[0].current_seed()
    [shown] = batch_rows(config, first_images(whole), 1, [])
    [expected] = batch_rows(config, whole, 1, [])
    assert paddle.get_rng_state()[0].current_seed() == state
    assert len(shown) == min(8, batch)
    for one, other in zip(shown, expected, strict=True):
        assert one.title == other.title
        np.testing.assert_array_equal(one.image, other.image)


def test_a_task_without_labels_shows_its_reconstructions(tmp_path, options, waiting):
    words = without(options, "DATA.DATASET", "MODEL.NUM_CLASSES", "TRAIN.SMOOTHING")
    run([*words, "TASK", "simmim", "DATA.DATASET", "digits", "METHOD.MASK_PATCH", "4"], tmp_path)
    text, *_ = waiting[0]
    assert 'alt="Reconstructions"' in text
    assert 'alt="Training images, augmented"' in text
