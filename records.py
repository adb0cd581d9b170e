"""What a run leaves behind: its folder with config.yaml, classes.json, logs, metrics.jsonl, result.json, curves.png."""

import contextlib
import fcntl
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm
from yacs.config import CfgNode

from config import differences, notes, resolved, with_values
from errors import InputError, remedy
from utils import all_gather, get_loggers, num_cores, rank, written_whole

INPUT_BOUND = 0.2  # share of the training time that waits for data, from which on a run says so


class Run:
    """A run's folder and voice. Every process makes one; rank 0 alone writes shared files and speaks on the console.

    Args:
        config: the resolved configuration; OUTPUT is the folder, or SAVE/<train|eval>-<model>-<time>.
        classes: class names to keep with the run; empty: none are known.

    Raises:
        InputError: on every rank, when the folder can't be written, already holds a training run, or another run
            writes there.
    """

    def __init__(self, config: CfgNode, classes: list[str]) -> None:
        # One process chooses, so that the clocks of several machines can't disagree about the name.
        directory, problem = None, None
        if rank() == 0:
            directory, problem = _make_directory(config)
            if not problem:
                problem = _lock(Path(directory))
        directory, problem = all_gather((directory, problem))[0]
        if problem:
            raise InputError(problem)
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)  # on another machine, whose disk isn't shared
        self.checkpoints = self.directory / "checkpoints"
        self.started, self.on_error = time.time(), config.SAVE_ON_ERROR
        self.local, self.main = get_loggers(self.directory)
        self.bar = tqdm(disable=True)
        self.workers = config.DATA.NUM_WORKERS
        self.awaited: tuple[int, float, float] | None = None  # epoch, its seconds of waiting, its seconds
        self.told_input_bound = False
        if rank() == 0:
            # The file serves other runs, by itself: where this one lies and what it went on from are its command's.
            with written_whole(self.directory / "config.yaml") as file:
                own = with_values(config, BASE=[""], OUTPUT=None, MODEL__RESUME=None, DIST__MAX_RESTART=0)
                file.write(resolved(own))
            if classes:
                self._write_json("classes.json", classes)
        self.info(f"run: {self.directory}")
        changed = differences(config)
        self.info("configuration, where it isn't the default:" + "".join(f"\n  {line}" for line in changed))
        for note in notes(config):
            self.info(note)

    def info(self, message: str) -> None:
        """Tells the console and log.txt (rank 0)."""
        self.main.info(message)

    def start_bar(self, total: int, done: int) -> None:
        """Shows a progress bar over ``total`` steps, on rank 0 and only on a terminal."""
        hidden = rank() != 0 or not sys.stderr.isatty()
        self.bar = tqdm(total=total, initial=done, unit="step", dynamic_ncols=True, disable=hidden, smoothing=0.1)

    def report(self, split: str, **values: Any) -> None:
        """Adds a line to metrics.jsonl and shows it; ``split`` is "train", "val", or "ema": the averaged weights."""
        if rank() != 0:
            return
        record = {
            "split": split,
            **{k: round(v, 6) if isinstance(v, float) and k != "lr" else v for k, v in values.items()},
        }
        self._append(json.dumps(record) + "\n")
        shown = [f"loss: {values['loss']:.4f}", f"acc1: {values['acc1']:.2f}"]
        if split == "train":
            self.bar.set_postfix_str(f"epoch {values['epoch']}, {', '.join(shown)}")
            shown += [f"grad_norm: {values['grad_norm']:.3g}"] if "grad_norm" in values else []
            shown += [f"loss_scale: {values['loss_scale']:g}"] if "loss_scale" in values else []
            shown += [
                f"lr: {values['lr']:.3g}",
                f"images/s: {values['images_per_s']:.0f}",
                f"wait: {values['data_wait']:.0%}",
            ]
            self.info(f"epoch {values['epoch']} step {values['step']}: {', '.join(shown)}")
            self._tell_input_bound(values)
        else:
            kind = "validation" if split == "val" else "validation of the average"
            self.info(f"epoch {values['epoch']} {kind}: {', '.join(shown)}, acc5: {values['acc5']:.2f}")

    def _tell_input_bound(self, values: dict[str, Any]) -> None:
        """Says once in a run that an epoch waits for its data; the run's first report, in which workers start and
        compilers and caches warm up, doesn't count.
        """
        if self.awaited is None:
            self.awaited = (values["epoch"], 0.0, 0.0)
            return
        epoch, waited, elapsed = self.awaited
        if epoch != values["epoch"]:
            waited = elapsed = 0.0
        seconds = values["samples"] / values["images_per_s"]
        self.awaited = values["epoch"], waited + values["data_wait"] * seconds, elapsed + seconds
        share = self.awaited[1] / self.awaited[2]
        if share > INPUT_BOUND and not self.told_input_bound:
            self.told_input_bound = True
            self.info(
                f"input-bound: {share:.0%} of the time in epoch {values['epoch']} so far is spent waiting for data;"
                f" DATA.NUM_WORKERS is {self.workers} per process on {num_cores()} cores: more of them,"
                " or smaller images, make training faster"
            )

    def _append(self, line: str) -> None:
        file = self.directory / "metrics.jsonl"
        size = file.stat().st_size if file.exists() else 0
        try:
            with open(file, "a", encoding="utf-8") as metrics:
                metrics.write(line)
        except OSError as error:  # a full disk
            with contextlib.suppress(OSError):
                os.truncate(file, size)  # no half line
            if self.on_error == "stop":
                error.filename = str(file)
                raise
            self.info(f"{file}: a line is lost ({error.strerror}); the run goes on (SAVE_ON_ERROR)")

    def rewind(self, epoch: int, step: int) -> None:
        """Takes out of metrics.jsonl what came after ``epoch``, but for the next one's training up to ``step``.

        Steps of other epochs aren't compared: they may have been of another batch size.
        """
        file = self.directory / "metrics.jsonl"
        if not file.exists():
            return
        kept = []
        for line in file.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):  # the last one, of a machine that went down
                record = json.loads(line)
                going_on = record["split"] == "train" and record["epoch"] == epoch + 1 and record["step"] <= step
                if record["epoch"] <= epoch or going_on:
                    kept.append(line + "\n")
        with written_whole(file) as rewound:
            rewound.writelines(kept)

    def result(self, result: dict[str, Any]) -> None:
        """Writes result.json, the last evaluation, and prints the summary."""
        self.bar.close()
        self.bar = tqdm(disable=True)
        if rank() != 0:
            return
        result["seconds"] = round(time.time() - self.started, 1)
        self._write_json("result.json", result)
        lines = [f"{key}: {result[key]:.2f}" for key in ("acc1", "acc5", "mean_class_acc")] + [
            f"loss: {result['loss']:.4f}"
        ]
        lines += [f"samples: {result['num_samples']}", f"time: {result['seconds']} s", f"run: {self.directory}"]
        self.info("summary: " + ", ".join(lines))

    def _write_json(self, name: str, content: Any) -> None:
        with written_whole(self.directory / name) as file:
            file.write(json.dumps(content, indent=2) + "\n")


def _make_directory(config: CfgNode) -> tuple[str, str | None]:
    """Returns (folder, what is wrong with it); made on rank 0."""
    name = f"{'eval' if config.EVAL else 'train'}-{config.MODEL.NAME}-{time.strftime('%Y%m%d-%H-%M-%S')}"
    base = Path(config.OUTPUT) if config.OUTPUT else Path(config.SAVE) / name
    directory, attempt = base, 1
    try:
        while not config.OUTPUT and directory.exists():  # two runs in one second
            directory, attempt = base.with_name(f"{base.name}-{attempt}"), attempt + 1
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return str(
            directory
        ), f"{directory}: can't make the run's folder ({error.strerror}); choose another with -output"
    if not os.access(directory, os.W_OK):
        return str(directory), f"{directory}: not writable; choose another folder with -output"
    if any((directory / name).exists() for name in ("checkpoints", "metrics.jsonl")) and not config.MODEL.RESUME:
        return str(directory), f"{directory} already holds a run; go on from it with -resume, or choose another -output"
    return str(directory), None


def _lock(directory: Path) -> str | None:
    """Locks the folder as long as this process lives; returns what stands against it."""
    try:
        lock = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # which of the two, systems differ
            owner = os.read(lock, 200).decode()
            return f"{directory}: another run writes there ({owner}); wait for it, or choose another -output"
        os.truncate(lock, 0)
        os.write(lock, f"process {os.getpid()} on {platform.node()}".encode())
    except OSError as error:  # a full disk, or one that has no locks
        return (
            f"{directory}: can't lock the run's folder ({error.strerror}); {remedy(error)}, or choose another -output"
        )
    return None


def plot_curves(metrics: Path, picture: Path) -> None:
    """Draws loss, accuracy and learning rate over steps from metrics.jsonl into a PNG."""
    import matplotlib  # takes a second to import, once, at a run's end

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    figure, axes = plt.subplots(3, 1, figsize=(8, 9), sharex=True, layout="constrained")
    for axis, key, label in zip(
        axes, ("loss", "acc1", "lr"), ("loss", "top-1 accuracy (%)", "learning rate"), strict=True
    ):
        for split in ("train", "val", "ema"):
            points = [(r["step"], r[key]) for r in records if r["split"] == split and key in r]
            if points:
                axis.plot(*zip(*points, strict=True), label=split, marker=None if split == "train" else ".")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
        axis.legend()
    axes[-1].set_xlabel("step")
    with written_whole(picture, "wb") as file:
        figure.savefig(file, format="png", dpi=120)
    plt.close(figure)
