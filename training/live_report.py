"""The report of a run while it trains: report.html is renewed after each evaluation.

A process of its own writes it, with predictions.csv and all else that the page shows. So the
training doesn't wait for it, and its random states and its memory stay as they are. The process is
a fork of rank 0, which shares the datasets. It is made before the network, because a later fork
would double the memory of the weights as soon as they are updated.

An evaluation that ends while the page is still being written is left out, so nothing queues up. At
the run's end, the process ends before rank 0 writes the last report: there are never two writers.
"""

import contextlib
import multiprocessing
import os
import pickle
import signal
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import paddle

from datasets import ImageDataset
from errors import one_line, open_file
from launch.files import leftovers, obstacle, remove
from launch.signals import catch_signals, die_with_parent
from loading.workers import one_thread
from settings.configuration import Configuration
from settings.tasks import answers_of
from training.batch_panels import FILE as BATCH
from training.batch_panels import batch_rows, draw_batch, first_images
from training.checkpoint.progress import Progress
from training.pages import page
from training.pages.panels import Panel
from training.predictions import Gathered, Predictions, gather_splits, write_split
from training.run import Run, is_own
from training.task import Batch, Metrics, Task
from utils import rank, writing_whole


class Evaluation(NamedTuple):
    """What the process needs to write the report of an evaluation.

    Attributes:
        folder: the run's, which may have been moved.
        words: how far the run is, for the reader.
        epoch: the one that was evaluated.
        metrics: of each split, with its best evaluation.
        predictions: by split.
        panels: a training batch, in rows; empty: there is none.
    """

    folder: Path
    words: str
    epoch: int
    metrics: dict[str, dict[str, Any]]
    predictions: dict[str, Gathered]
    panels: list[list[Panel]]


class LiveReport:
    """Renews a run's report.html after its evaluations. Every rank has one, and rank 0 writes.

    Args:
        dataset: the validation set.
    """

    def __init__(self, run: Run, task: Task, dataset: ImageDataset) -> None:
        self.run = run
        self.task = task
        # The first images of a training batch, and its epoch.
        self.images: Batch = {}
        self.epoch = 0
        # Whether the process is writing a report, and whether it has ever written one.
        self.busy = False
        self.used = False
        # The first failure is logged. The others are expected to have the same reason.
        self.failed = False
        self.process: Any = None
        if rank() == 0:
            self._start(dataset)

    def _start(self, dataset: ImageDataset) -> None:
        context = multiprocessing.get_context("fork")
        try:
            self.connection, workers_end = context.Pipe()
            # An evaluation is passed on in memory: a pipe holds 64 kB, and this process would wait.
            self.memory = os.memfd_create("evaluation")
            arguments = (self.run, self.task, dataset, self.memory, workers_end)
            process = context.Process(target=_work, args=arguments, daemon=True)
            with one_thread():
                process.start()
        except Exception as error:
            self._log(f"{type(error).__name__}: {error}")
            return
        workers_end.close()
        self.process = process
        # Called at exit, too: the process ignores the signal by which Python would end it.
        self._kill = weakref.finalize(self, _kill, process)

    def keep_batch(self, batch: Batch, epoch: int) -> None:
        """Keeps the first images of a training batch, for the picture of augmented images.

        No value is copied to the host.
        """
        if self.process is None:
            return
        try:
            self.images = first_images(batch)
            self.epoch = epoch
        except Exception as error:
            self._log(f"{type(error).__name__}: {error}")

    def renew(
        self,
        progress: Progress,
        metrics: Mapping[str, Metrics],
        predictions: Mapping[str, Predictions],
    ) -> None:
        """Has the report of an evaluation written. Every rank calls it.

        Args:
            progress: of the run, after the evaluation.
            metrics, predictions: of the evaluation, by split.
        """
        # A collective: before anything that rank 0 alone does.
        gathered = gather_splits(predictions)
        if self.process is None:
            return
        try:
            if not self._is_free():
                return
            evaluation = Evaluation(
                folder=self.run.directory.absolute(),
                words=self._words(progress),
                epoch=progress.epoch,
                metrics={
                    split: {**values, "best": progress.best[split]}
                    for split, values in metrics.items()
                },
                predictions=gathered,
                panels=self._panels(),
            )
            os.ftruncate(self.memory, 0)
            with open(self.memory, "wb", closefd=False) as file:
                file.seek(0)
                pickle.dump(evaluation, file)
            self.connection.send_bytes(b"renew")
            self.busy = True
            self.used = True
        except Exception as error:
            self._log(f"{type(error).__name__}: {error}")

    def _is_free(self) -> bool:
        """Returns whether the process can write another report, and logs a failure of the last one.

        Raises:
            EOFError, OSError: the process has ended.
        """
        if self.busy and self.connection.poll():
            self.busy = False
            if problem := self.connection.recv_bytes().decode():
                self._log(problem)
        return not self.busy

    def _words(self, progress: Progress) -> str:
        run = self.run
        words = f"Training: epoch {progress.epoch} of {run.epochs} is evaluated."
        if left := run.time_left(progress.step):
            words += f" About {left} left."
        return words

    def _panels(self) -> list[list[Panel]]:
        if not self.images:
            return []
        with paddle.no_grad():
            return batch_rows(self.run.config, self.images, self.epoch, self.task.classes)

    def _log(self, problem: str) -> None:
        if not self.failed:
            self.failed = True
            self.run.info(
                one_line(f"warning: report.html can't be renewed while the run trains ({problem})")
            )

    def close(self) -> None:
        """Ends the process, and removes what it had begun to write."""
        if self.process is None:
            return
        self.process = None
        self._kill()
        self.connection.close()
        os.close(self.memory)
        # Unless it has written something, there may be no folder yet.
        if self.used:
            with contextlib.suppress(OSError):
                for path, name in leftovers(self.run.directory):
                    if is_own(name) and obstacle(path) is None:
                        remove(path)

    def __enter__(self) -> "LiveReport":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Ends the process. If an error has ended the run, its page says so, and reloads no more."""
        self.close()
        file = self.run.directory / "report.html"
        if error is None or not self.used or not file.exists():
            return
        why = str(error) or type(error).__name__
        with self.run.logging_failure(file.name), open_file(file) as stream:
            text = page.ended(stream.read().decode(), f"The training has ended: {why}")
            with writing_whole(file) as renewed:
                renewed.write(text)

    def draw_batch(self) -> None:
        """Draws the last training batch that was kept, for the report at the run's end."""
        with self.run.logging_failure(BATCH):
            if panels := self._panels():
                draw_batch(self.run.directory / BATCH, panels)


def _kill(process: Any) -> None:
    process.kill()
    process.join()


def _work(run: Run, task: Task, dataset: ImageDataset, memory: int, connection: Any) -> None:
    """Writes the report of each evaluation, in the process."""
    die_with_parent()
    # A signal to the whole group of processes is meant for the run.
    catch_signals(signal.SIG_IGN)
    os.nice(10)
    surroundings: dict[str, Any] = {}
    # These errors mean that the process that started this one has ended.
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            connection.recv_bytes()
            problem = ""
            try:
                if not surroundings:
                    surroundings = run.surroundings()
                    # Masks are drawn, for which their values have to be known.
                    if answers_of(run.config.TASK) == "pixels":
                        task.prepare_data(dataset, "val")
                with open(memory, "rb", closefd=False) as file:
                    file.seek(0)
                    evaluation = pickle.load(file)
                _write(evaluation, run.config, dataset, surroundings)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            connection.send_bytes(problem.encode(errors="replace"))


def _write(
    evaluation: Evaluation,
    config: Configuration,
    dataset: ImageDataset,
    surroundings: dict[str, Any],
) -> None:
    """Writes the files that the page shows, then the page."""
    from training.report import State, write_report

    for split, predictions in evaluation.predictions.items():
        write_split(evaluation.folder, split, predictions, dataset, config.DATA.DATA_PATH)
    if evaluation.panels:
        draw_batch(evaluation.folder / BATCH, evaluation.panels)
    weights = f"those after epoch {evaluation.epoch}"
    evaluated = {
        split: {**surroundings, "weights": weights, **values}
        for split, values in evaluation.metrics.items()
    }
    write_report(evaluation.folder, dataset, State(evaluation.words, time.time(), evaluated))
