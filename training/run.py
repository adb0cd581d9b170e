"""What a run leaves behind: its folder with config.yaml, classes.json, logs, metrics.jsonl,
result.json and more.
"""

import contextlib
import errno
import fcntl
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from config import differences, resolved_yaml, with_values
from errors import InputError, RunError, Unreadable, one_line, open_file, remedy
from launch.files import leftovers, obstacle, open_lock, open_to_append, remove
from launch.progress import keep_native_errors
from settings.options import Configuration, notes, value_sources
from training.command_line import CHECKPOINT
from training.curves import records
from training.tracking import Tracking
from training.versions import commit, device, versions
from utils import all_gather, get_loggers, num_cores, open_logs, rank, writing_whole

LOCK = ".lock"  # in a run's folder
CHECKPOINTS = "checkpoints"
# What a run's last line names.
FILES = (
    "config.yaml",
    "result.json",
    "metrics.jsonl",
    "curves.png",
    "predictions.csv",
    "confusion.csv",
    "report.html",
)
FILES += ("checkpoints/best", "checkpoints/best_ema.safetensors", "checkpoints/last")
_REPLACED = {*FILES, "classes.json", "confusion.png"}
# Names of what a run changes where it lies.
_KEPT = re.compile(r"\.lock(_trackers)?|\.trackers|log(_[0-9]+|_trackers)?\.txt")
_SIGNATURE = rb"process [0-9]+ on [^\n]{0,255}"  # what a lock holds, once its run has begun
INPUT_BOUND = 0.2  # share of the training time that waits for data, from which on a run says so


def is_own(name: str) -> bool:
    """Returns whether a run writes a file of this name into its folder."""
    return name in _REPLACED or _KEPT.fullmatch(name) is not None


class Run:
    """A run's folder and voice. Every process makes one; rank 0 alone writes shared files and
    speaks on the console.

    Nothing is written before ``begin``, not even the folder: a start that fails leaves none, and
    changes none.

    Args:
        config: the resolved configuration; OUTPUT is the folder, or
            SAVE/<train|eval>-<model>-<time>.
        classes: class names to keep with the run; empty: none are known.

    Raises:
        InputError: on every rank, when the folder can't be written, already holds a training run,
            or another run writes there.
    """

    def __init__(self, config: Configuration, classes: list[str]) -> None:
        self.config = config
        self.classes = classes
        self.local, self.main = get_loggers()
        # One process chooses, so that the clocks of several machines can't disagree about the name.
        self.folder = RunFolder(config) if rank() == 0 else None
        self._named = Path()
        self._descriptor = -1
        self._agree(self.folder.check if self.folder else None)
        # why metrics.jsonl can't be written, on rank 0: the run has to end, saved
        self.problem = ""
        self.tracking = Tracking([] if config.EVAL else config.TRACKERS or [])
        self._agree(self.tracking.missing_packages if self.folder else None)
        self.devices = all_gather(device())
        self.started = time.time()
        self.on_error = config.SAVE_ON_ERROR
        self.bar = tqdm(disable=True)
        # steps in all, done at the beginning, and when that was
        self.total = 0
        self.first = 0
        self.clock = 0.0
        self.workers = config.DATA.NUM_WORKERS
        self.epochs = config.TRAIN.NUM_EPOCHS
        # epoch, its seconds of waiting, its seconds
        self.awaited: tuple[int, float, float] | None = None
        self.told_input_bound = False
        for note in notes(config):
            self.info(note)
        changed = differences(config)
        self.info(
            "configuration, where it isn't the default:"
            + "".join(f"\n  {line}" for line in changed)
        )

    def _agree(self, action: Callable[[], str | None] | None) -> None:
        """Lets rank 0 do ``action``, which returns what stands against it; all ranks learn of that,
        and the folder.
        """
        problem = action() if action else None
        problem, directory = all_gather((problem, self.folder and str(self.folder.path)))[0]
        if problem:
            raise InputError(problem)
        self._named = Path(directory)

    @property
    def directory(self) -> Path:
        """Returns the run's folder: where it is now, if it was moved while the run goes on."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                folder = os.fstat(self._descriptor)
                moved = os.readlink(f"/proc/self/fd/{self._descriptor}")
                if not _is_at(folder, self._named) and _is_at(folder, Path(moved)):
                    self._named = Path(moved)
                    self.info(f"the run's folder was moved; the run goes on in {moved}")
        return self._named

    @property
    def checkpoints(self) -> Path:
        """Returns the folder of the run's checkpoints."""
        return self.directory / CHECKPOINTS

    def begin(self) -> None:
        """Makes the folder, with the lines so far; every rank calls it, once all that can be
        checked was checked.

        Raises:
            InputError: on every rank, when the folder can't be made, or another run has taken it
                meanwhile.
        """
        all_gather(None)  # unless every rank came this far, there is no run
        self._agree(self.folder.make if self.folder else None)
        # on another machine, whose disk isn't shared
        self._named.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self._named, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        if rank() == 0:
            for path, name in leftovers(self.directory):
                if is_own(name) and obstacle(path) is None:
                    remove(path)
        open_logs(self.directory)
        keep_native_errors(self.directory / f"log_{rank()}.txt")
        if rank() == 0:
            with writing_whole(self.directory / "config.yaml") as file:
                file.write(resolved_yaml(for_others(self.config)))
            if self.classes:
                self._write_json("classes.json", self.classes)
        self.info(f"run: {self.directory}")

    def info(self, message: str) -> None:
        """Tells the console and log.txt (rank 0)."""
        self.main.info(message)

    def start_bar(self, total: int, done: int) -> None:
        """Begins the steps, or goes on after those in metrics.jsonl. From now on, on rank 0,
        trackers follow that file, and a terminal shows a progress bar over ``total`` steps.
        """
        if rank() == 0 and (problem := self.tracking.begin(self.directory)):
            self.info(problem)
        self.total, self.first, self.clock = total, done, time.monotonic()
        hidden = rank() != 0 or not sys.stderr.isatty()
        self.bar = tqdm(
            total=total,
            initial=done,
            unit="step",
            dynamic_ncols=True,
            disable=hidden,
            smoothing=0.1,
        )

    def set_length(self, epochs: int, steps: int) -> None:
        """Notes how many epochs and steps the run has."""
        self.epochs, self.total, self.bar.total = epochs, steps, steps

    def report(self, split: str, shown: str, **values: Any) -> None:
        """Adds a line to metrics.jsonl and shows the metrics, which are ``shown`` in the task's
        words.

        Args:
            split: "train", "val", or "ema": the averaged weights.
        """
        if rank() != 0:
            return
        record = {
            "split": split,
            **{
                k: round(v, 6) if isinstance(v, float) and k != "lr" else v
                for k, v in values.items()
            },
        }
        self._append(json.dumps(record) + "\n")
        if split == "train":
            self.bar.set_postfix_str(f"epoch {values['epoch']}, {shown}")
            parts = [shown]
            parts += [f"grad_norm: {values['grad_norm']:.3g}"] if "grad_norm" in values else []
            parts += [f"loss_scale: {values['loss_scale']:g}"] if "loss_scale" in values else []
            parts += [
                f"lr: {values['lr']:.3g}",
                f"images/s: {values['images_per_s']:.0f}",
                f"wait: {values['data_wait']:.0%}",
            ]
            parts += self._time_left(values["step"])
            self.info(
                f"epoch {values['epoch']}/{self.epochs} step {values['step']}: {', '.join(parts)}"
            )
            self._tell_input_bound(values)
        else:
            kind = "validation" if split == "val" else "validation of the average"
            self.info(f"epoch {values['epoch']}/{self.epochs} {kind}: {shown}")

    def _time_left(self, step: int) -> list[str]:
        """The time that is left, as if each step, with its share of evaluations and saves, took as
        long as so far.
        """
        if not self.first < step < self.total:
            return []
        seconds = (time.monotonic() - self.clock) / (step - self.first) * (self.total - step)
        hours, minutes = divmod(round(seconds / 60), 60)
        return [
            f"left: {f'{hours} h {minutes} min' if hours else f'{minutes} min' if minutes else f'{seconds:.0f} s'}"
        ]

    def _tell_input_bound(self, values: dict[str, Any]) -> None:
        """Says once in a run that an epoch waits for its data; the run's first report, in which
        workers start and compilers and caches warm up, doesn't count.
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
        size = None
        try:
            with open_to_append(file) as metrics:
                size = os.fstat(metrics.fileno()).st_size
                metrics.write(line)
        except OSError as error:  # a full disk
            with contextlib.suppress(OSError):
                if size is not None:  # no half line
                    os.truncate(file, size)
            if self.on_error == "stop":
                self.problem = (
                    self.problem or f"{file} can't be written ({error.strerror}): {remedy(error)}"
                )
                return
            self.info(f"{file}: a line is lost ({error.strerror}); the run goes on (SAVE_ON_ERROR)")

    def rewind(self, epoch: int, step: int) -> None:
        """Takes out of metrics.jsonl what came after ``epoch``, but for the next one's training up
        to ``step``. Steps of other epochs aren't compared: they may have been of another batch
        size.
        """
        file = self.directory / "metrics.jsonl"
        if file.exists():
            with writing_whole(file) as rewound:
                for line, record in records(file):
                    over = (
                        epoch if record["split"] != "train" or record["step"] > step else epoch + 1
                    )
                    if record["epoch"] <= over:
                        rewound.write(line)

    def result(self, result: dict[str, Any], shown: str) -> None:
        """Writes result.json, the last evaluation, and prints the summary, with its metrics as
        ``shown``.
        """
        self.bar.close()
        self.bar = tqdm(disable=True)
        if rank() != 0:
            return
        environment = {
            "devices": self.devices,
            "cores": num_cores(),
            "system": platform.platform(),
            "commit": commit(),
        }
        result |= {
            "seconds": round(time.time() - self.started, 1),
            "versions": versions(),
            "environment": environment,
        }
        told = (
            f"samples: {result['num_samples']}, time: {result['seconds']} s, run: {self.directory}"
        )
        self.info(f"summary: {shown}; {told}")
        try:
            self._write_json("result.json", result)
        except OSError as error:
            again = (
                "the same command" if self.config.EVAL else f"-resume=auto -output={self.directory}"
            )
            problem = f"{error.filename} isn't written ({error.strerror}: {remedy(error)})"
            raise RunError(f"{problem}; {again} writes it again") from None
        if problem := self.tracking.end():
            self.info(problem)

    def tell_files(self) -> None:
        """Names the files that the run has left."""
        # A folder in the place of a file isn't one that the run has left; checkpoints are folders.
        found = [name for name in FILES if (self.directory / name).is_file() or "/" in name]
        self.info("files: " + ", ".join(name for name in found if (self.directory / name).exists()))

    @contextlib.contextmanager
    def logging_failure(self, what: str, command: str = "") -> Iterator[None]:
        """Writes ``what`` within, which a run can do without: a failure becomes a line of the log.

        Args:
            command: makes it again; "": a start with -resume=auto does, or that of an evaluation.
        """
        try:
            yield
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            if isinstance(error, OSError) and error.strerror:
                why = f"{error.strerror}: {remedy(error)}"
                what = os.path.basename(os.fsdecode(error.filename)) if error.filename else what
            resume = f"-resume=auto -output={self.directory}"
            again = command or ("the same command" if self.config.EVAL else resume)
            self.info(one_line(f"{what} isn't written ({why}); {again} makes it again"))

    def _write_json(self, name: str, content: Any) -> None:
        with writing_whole(self.directory / name) as file:
            file.write(json.dumps(content, indent=2) + "\n")


def _is_at(folder: os.stat_result, path: Path) -> bool:
    """Returns whether ``path`` leads to a folder."""
    with contextlib.suppress(OSError):
        return os.path.samestat(folder, os.stat(path))
    return False


def for_others(config: Configuration) -> Configuration:
    """Returns what a run's file says, by itself: where the run lies and what it went on from are
    its command's.
    """
    config = with_values(config, BASE=[""], OUTPUT=None, MODEL__RESUME=None, DIST__MAX_RESTART=0)
    found = config.origins.get("MODEL.PRETRAINED", ())
    if len(found) > 1 and found[-1].first == CHECKPOINT:
        config = with_values(config, found[-2].origin(), MODEL__PRETRAINED=found[-2].value)
    for key in ("DATA_PATH", "CACHE"):  # found from another folder, too
        if config.DATA[key] and not os.path.isabs(config.DATA[key]):
            where = value_sources(config).get(f"DATA.{key}")
            path = {f"DATA__{key}": os.path.abspath(config.DATA[key])}
            config = with_values(config, where.origin() if where else "", **path)
    return config


class RunFolder:
    """The folder of a run on rank 0: chosen and looked at by ``check``, made and locked by
    ``make``.

    Attributes:
        path: the folder.
    """

    def __init__(self, config: Configuration) -> None:
        # which a stranger's config.yaml may have chosen
        model = re.sub(r"[^\w.-]", "_", config.MODEL.NAME)
        name = f"{'eval' if config.EVAL else 'train'}-{model}-{time.strftime('%Y%m%d-%H-%M-%S')}"
        self.named, self.resumes = bool(config.OUTPUT), bool(config.MODEL.RESUME)
        self.path = self.base = Path(config.OUTPUT) if config.OUTPUT else Path(config.SAVE) / name
        self.lock: int | None = None
        self.new = False

    def check(self) -> str | None:
        """Returns what stands against a run here; changes nothing. A run's folder is locked from
        now on.
        """
        try:
            there = next(
                place for place in (self.path, *self.path.absolute().parents) if place.exists()
            )
            if not there.is_dir():
                return self._cannot("make", f"{there} is a file")
            if self.path.is_symlink() and not self.path.exists():
                return self._cannot("make", "it is a link to what isn't there")
            if not os.access(there, os.W_OK) and there == self.path:
                return f"{self.path}: not writable; choose another folder with -output"
            if not os.access(there, os.W_OK):
                read_only = os.statvfs(there).f_flag & os.ST_RDONLY
                return self._cannot("make", os.strerror(errno.EROFS if read_only else errno.EACCES))
            problem = self._check_content() if self.path.is_dir() else None
            if problem is None and os.path.lexists(self.path / LOCK):
                problem = self._take_lock()
            return problem or self._check_free()
        except OSError as error:
            return self._cannot("read", error.strerror)

    def make(self) -> str | None:
        """Makes the folder, if there is none, and locks it; returns what stands against it."""
        attempt = 1
        self.new = not (self.named and self.path.exists())
        try:
            while not self.named and self.path.exists():  # two runs in one second
                self.path = self.base.with_name(f"{self.base.name}-{attempt}")
                attempt = attempt + 1
            self.path.mkdir(parents=True, exist_ok=self.named)
        except OSError as error:
            return self._cannot("make", error.strerror)
        if self.lock is None:
            locked = (self.path / LOCK).exists()
            if problem := self._take_lock() or self._check_free():
                return problem
            if locked:  # not when the checkpoints were looked at
                return f"{self.path}: another run was there meanwhile; give the command again"
        return self._sign()

    def _check_content(self) -> str | None:
        """Returns what of the folder's content a run can't write, or would replace though no run
        made it.
        """
        names = os.listdir(self.path)
        own = sorted(filter(is_own, names))
        for name in own:
            problem = obstacle(self.path / name)
            if (
                problem is None
                and _KEPT.fullmatch(name)
                and not os.access(self.path / name, os.W_OK)
            ):
                problem = OSError(errno.EACCES, os.strerror(errno.EACCES))
            if problem:
                return f"{self.path / name}: {problem.strerror}; {remedy(problem)}, or choose another -output"
        checkpoints = self.path / CHECKPOINTS
        if checkpoints.is_symlink():
            return f"{checkpoints} is a link, expected a folder; move what it leads to here, or make -output the link"
        if os.path.lexists(checkpoints) and not checkpoints.is_dir():
            return f"{checkpoints} is a file, expected a folder; move it away, or choose another -output"
        replaced = [name for name in own if name in _REPLACED]
        if replaced and not self._is_runs():
            return f"{self.path} holds {replaced[0]}, which no run made; move it away, or choose another -output"
        return None

    def _is_runs(self) -> bool:
        """Whether a run made what the folder holds: it signed the lock, or left checkpoints or
        records.
        """
        if any((self.path / CHECKPOINTS).glob("epoch_*")):
            return True
        with (
            contextlib.suppress(FileNotFoundError, Unreadable),
            open_file(self.path / LOCK) as lock,
        ):
            if re.fullmatch(_SIGNATURE, lock.read(1000)):
                return True
        with contextlib.suppress(InputError):
            return any(True for _ in records(self.path / "metrics.jsonl"))
        return False

    def _check_free(self) -> str | None:
        if self.resumes or not any(
            (self.path / name).exists() for name in ("checkpoints", "metrics.jsonl")
        ):
            return None
        return f"{self.path} already holds a run; go on from it with -resume, or choose another -output"

    def _cannot(self, what: str, why: str | None) -> str:
        return f"{self.path}: can't {what} the run's folder ({why}); choose another with -output"

    def _take_lock(self) -> str | None:
        """Locks the folder as long as this process lives; returns what stands against it."""
        try:
            lock = open_lock(self.path / LOCK, _SIGNATURE)
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):  # which of the two, systems differ
                owner = os.read(lock, 200).decode(errors="replace")
                return f"{self.path}: another run writes there ({owner}); wait for it, or choose another -output"
        except OSError as error:  # a full disk, or one that has no locks
            return self._cannot_lock(error)
        self.lock = lock
        return None

    def _sign(self) -> str | None:
        """Writes into the lock whose it is."""
        assert self.lock is not None
        try:
            os.truncate(self.lock, 0)
            os.pwrite(self.lock, f"process {os.getpid()} on {platform.node()}".encode(), 0)
        except OSError as error:
            return self._cannot_lock(error)
        return None

    def _cannot_lock(self, error: OSError) -> str:
        if self.new:
            with contextlib.suppress(OSError):
                (self.path / LOCK).unlink(missing_ok=True)
                self.path.rmdir()
        why = f"({error.strerror}); {remedy(error)}, or choose another -output"
        return f"{self.path}: can't lock the run's folder {why}"
