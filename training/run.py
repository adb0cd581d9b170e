"""A run's folder: config.yaml, classes.json, logs, metrics.jsonl, result.json, checkpoints and more.

``Run`` writes these files and logs what happens. ``RunFolder`` chooses the folder, checks it and
locks it.
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
from launch import signals
from launch.files import leftovers, obstacle, open_lock, open_to_append, remove
from launch.progress import keep_native_errors
from settings.configuration import Configuration, value_sources
from training import bad_steps
from training.command_line import CHECKPOINT
from training.curves import records
from training.tracking import TrackerProcess
from training.versions import commit, device, versions
from utils import (
    all_gather,
    get_loggers,
    num_cores,
    open_logs,
    rank,
    world_size,
    writing_whole,
)

# The files' names within a run's folder.
LOCK = ".lock"
CHECKPOINTS = "checkpoints"
# The files that a run's last line names.
FILES = (
    "config.yaml",
    "result.json",
    "metrics.jsonl",
    "curves.png",
    "reconstructions.png",
    "predictions.csv",
    "confusion.csv",
    "report.html",
    "checkpoints/best",
    "checkpoints/best_ema.safetensors",
    "checkpoints/last",
)
# The names of files that a run replaces as a whole.
_REPLACED = {*FILES, "classes.json", "confusion.png", "training_batch.png", bad_steps.FILE}
# The names of files that a run opens and changes where they are.
_CHANGED = re.compile(r"\.lock(_trackers)?|\.trackers|log(_[0-9]+|_trackers)?\.txt")
# The names of traces of profiled steps.
_TRACES = re.compile(r"trace_rank[0-9]+\.json")
# The content of a lock whose run has begun.
_SIGNATURE = rb"process [0-9]+ on [^\n]{0,255}"
# The share of the training time spent waiting for data from which on a run calls itself input-bound.
INPUT_BOUND = 0.2


def is_own(name: str) -> bool:
    """Returns whether a run writes a file of this name into its folder."""
    return any((name in _REPLACED, _CHANGED.fullmatch(name), _TRACES.fullmatch(name)))


def trace_name(number: int) -> str:
    """Returns the name of the trace of a rank's profiled steps (PROFILE)."""
    return f"trace_rank{number}.json"


class Run:
    """A run's folder and its log. Every process makes one.

    Rank 0 alone writes the shared files and the console; every rank has a log of its own. Nothing
    is written before ``begin``, not even the folder. So a start that fails leaves no folder, and
    changes none.

    Args:
        config: the resolved configuration. OUTPUT is the folder, or else
            SAVE/<train|eval>-<model>-<time>.
        classes: class names to keep with the run; empty: none are known.

    Attributes:
        problem: on rank 0, why metrics.jsonl can't be written: the run has to end, saved.

    Raises:
        InputError: on every rank, when the folder can't be written, already holds a training run,
            or another run writes there.
    """

    def __init__(self, config: Configuration, classes: list[str]) -> None:
        self.config = config
        self.classes = classes
        self.local, self.main = get_loggers()
        # Rank 0 chooses the folder, because clocks of several machines may differ by a second.
        self.folder = RunFolder(config) if rank() == 0 else None
        # The folder's path as it was last known, and a descriptor that stays open when it is moved.
        self._known_path = Path()
        self._descriptor = -1
        self._on_rank_0(self.folder.check if self.folder else None)
        self.problem = ""
        self.tracking = TrackerProcess([] if config.EVAL else config.TRACKERS or [])
        self._on_rank_0(self.tracking.missing_packages if self.folder else None)
        self.devices = all_gather(device())
        self.started = time.time()
        self.on_error = config.SAVE_ON_ERROR
        self.bar = tqdm(disable=True)
        # The run's steps, those made when training began or was resumed, and the time of that.
        self.total = 0
        self.first = 0
        self.clock = 0.0
        self.workers = config.DATA.NUM_WORKERS
        self.epochs = config.TRAIN.NUM_EPOCHS
        # An epoch, the seconds in it so far, and how many of these it waited for data.
        self.waiting: tuple[int, float, float] | None = None
        self.logged_input_bound = False
        self.bad_steps: list[dict[str, Any]] = []
        for note in config.notes:
            self.info(note)
        lines = "".join(f"\n  {line}" for line in differences(config))
        self.info(f"configuration, where it isn't the default:{lines}")

    def _on_rank_0(self, action: Callable[[], str | None] | None) -> None:
        """Lets rank 0 do ``action``; then all ranks know the folder, or raise what went wrong.

        Args:
            action: returns what went wrong, or None; it is None on the other ranks.
        """
        problem = action() if action else None
        path = str(self.folder.path) if self.folder else ""
        problem, path = all_gather((problem, path))[0]
        if problem:
            raise InputError(problem)
        self._known_path = Path(path)

    @property
    def directory(self) -> Path:
        """Returns the run's folder: where it is now, if it was moved while the run is active."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                folder = os.fstat(self._descriptor)
                path = Path(os.readlink(f"/proc/self/fd/{self._descriptor}"))
                if not _is_at(folder, self._known_path) and _is_at(folder, path):
                    self._known_path = path
                    self.info(f"the run's folder was moved; continuing in {path}")
        return self._known_path

    @property
    def checkpoints(self) -> Path:
        """Returns the folder of the run's checkpoints."""
        return self.directory / CHECKPOINTS

    def begin(self) -> None:
        """Makes the folder and writes the lines that were logged so far.

        Every rank calls it once everything that can be checked was checked. From here on there is
        something to save: a signal asks the run to stop (``Requests``), and no longer ends the
        process at once.

        Raises:
            InputError: on every rank, when the folder can't be made, or another run has taken it
                meanwhile.
        """
        signals.begin()
        # Unless every rank comes this far, there is no run and no folder.
        all_gather(None)
        self._on_rank_0(self.folder.make if self.folder else None)
        # Rank 0 has made the folder, but other machines may have disks of their own.
        self._known_path.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self._known_path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        if self.folder:
            # What a run that was killed had begun to write.
            for path, name in leftovers(self.directory):
                if is_own(name) and obstacle(path) is None:
                    remove(path)
            # A run that had failed in its first steps may have recorded one of them.
            if not self.folder.resumes:
                remove(self.directory / bad_steps.FILE)
        open_logs(self.directory)
        keep_native_errors(self.directory / f"log_{rank()}.txt")
        if rank() == 0:
            with writing_whole(self.directory / "config.yaml") as file:
                file.write(resolved_yaml(for_others(self.config)))
            if self.classes:
                self._write_json("classes.json", self.classes)
        self.info(f"run: {self.directory}")

    def info(self, message: str) -> None:
        """Logs a message to the console and log.txt, on rank 0."""
        self.main.info(message)

    def start_steps(self, epochs: int, steps: int, done: int) -> None:
        """Starts the trackers and, on a terminal, the progress bar: training is to begin.

        Args:
            epochs: the number of the run's epochs.
            steps: the number of its steps.
            done: the number of steps that were made before, which are in metrics.jsonl already.
        """
        self.epochs = epochs
        self.total = steps
        self.first = done
        # The trackers follow metrics.jsonl, which has no lines after ``done`` now.
        if rank() == 0 and (problem := self.tracking.begin(self.directory)):
            self.info(problem)
        self.clock = time.monotonic()
        self.bar = tqdm(
            total=steps,
            initial=done,
            unit="step",
            dynamic_ncols=True,
            disable=rank() != 0 or not sys.stderr.isatty(),
            smoothing=0.1,
        )

    def set_length(self, epochs: int, steps: int) -> None:
        """Sets the number of the run's epochs and steps, when a budget of time shortens it."""
        self.epochs = epochs
        self.total = steps
        self.bar.total = steps

    def report(self, split: str, shown: str, **values: Any) -> None:
        """Adds a line to metrics.jsonl and logs the metrics.

        Args:
            split: "train", "val", or "ema": the averaged weights.
            shown: the metrics in the task's words.
            values: the line's entries; "train" has ``lr``, ``images_per_s`` and more
                (``Window.report``).
        """
        if rank() != 0:
            return
        record: dict[str, Any] = {"split": split}
        for name, value in values.items():
            # A learning rate may have no digits but those after the sixth.
            record[name] = round(value, 6) if isinstance(value, float) and name != "lr" else value
        self._append(json.dumps(record) + "\n")
        place = f"epoch {values['epoch']}/{self.epochs}"
        if split != "train":
            kind = "validation" if split == "val" else "validation of the average"
            self.info(f"{place} {kind}: {shown}")
            return

        self.bar.set_postfix_str(f"epoch {values['epoch']}, {shown}")
        entries = [shown]
        if "grad_norm" in values:
            entries.append(f"grad_norm: {values['grad_norm']:.3g}")
        if "loss_scale" in values:
            entries.append(f"loss_scale: {values['loss_scale']:g}")
        entries.append(f"lr: {values['lr']:.3g}")
        entries.append(f"images/s: {values['images_per_s']:.0f}")
        entries.append(f"wait: {values['data_wait']:.0%}")
        if left := self.time_left(values["step"]):
            entries.append(f"left: {left}")
        self.info(f"{place} step {values['step']}: {', '.join(entries)}")
        self._warn_input_bound(values)

    def time_left(self, step: int) -> str:
        """Returns the time that is left, in words; "": it isn't known.

        Each step, with its share of evaluations and saves, is expected to take as long as so far.
        """
        if not self.first < step < self.total:
            return ""
        seconds = (time.monotonic() - self.clock) / (step - self.first) * (self.total - step)
        hours, minutes = divmod(round(seconds / 60), 60)
        if hours:
            return f"{hours} h {minutes} min"
        if minutes:
            return f"{minutes} min"
        return f"{seconds:.0f} s"

    def _warn_input_bound(self, values: dict[str, Any]) -> None:
        """Logs once in a run that an epoch waits for its data.

        The run's first report doesn't count: workers start in it, and caches warm up.
        """
        if self.waiting is None:
            self.waiting = values["epoch"], 0.0, 0.0
            return
        epoch, elapsed, waited = self.waiting
        if epoch != values["epoch"]:
            elapsed = 0.0
            waited = 0.0
        seconds = values["samples"] / values["images_per_s"]
        elapsed += seconds
        waited += values["data_wait"] * seconds
        self.waiting = values["epoch"], elapsed, waited
        share = waited / elapsed
        if share > INPUT_BOUND and not self.logged_input_bound:
            self.logged_input_bound = True
            self.info(
                f"input-bound: {share:.0%} of the time in epoch {values['epoch']} so far is spent"
                f" waiting for data; DATA.NUM_WORKERS is {self.workers} per process on"
                f" {num_cores()} cores: more workers or smaller images make training faster"
            )

    def record_bad_step(self, step: int, epoch: int, kind: str) -> bool:
        """Logs a step to replay, and records the first ones in bad_steps.json, on rank 0.

        Args:
            step: its number in the run, from 1.
            epoch: from 1.
            kind: "not finite": its loss isn't; "outlier": it is out of all proportion to those
                before.

        Returns:
            Whether it was recorded: it never is on another rank.
        """
        if rank() != 0 or len(self.bad_steps) >= bad_steps.MOST:
            return False
        what = "isn't finite"
        if kind == "outlier":
            factor = bad_steps.LossHistory.OUTLYING
            what = f"is more than {factor:g} times the median of the steps before it"
        self.info(
            f"warning: the loss of step {step} {what};"
            f" python tools/replay.py {self.directory} -step={step} repeats it, layer by layer"
        )
        record = {
            "step": step,
            "epoch": epoch,
            "ranks": world_size(),
            "seed": self.config.SEED,
            "kind": kind,
        }
        self.bad_steps.append(record)
        with self.logging_failure(bad_steps.FILE):
            self._write_json(bad_steps.FILE, self.bad_steps)
            (self.directory / bad_steps.FOLDER).mkdir(exist_ok=True)
        return True

    def _append(self, line: str) -> None:
        """Adds a line to metrics.jsonl. On a full disk no half line is left there."""
        file = self.directory / "metrics.jsonl"
        size = None
        try:
            with open_to_append(file) as metrics:
                size = os.fstat(metrics.fileno()).st_size
                metrics.write(line)
        except OSError as error:
            with contextlib.suppress(OSError):
                if size is not None:
                    os.truncate(file, size)
            if self.on_error != "stop":
                self.info(
                    f"{file}: a line couldn't be written ({error.strerror}); the run continues"
                    " (SAVE_ON_ERROR)"
                )
            elif not self.problem:
                self.problem = f"{file} can't be written ({error.strerror}): {remedy(error)}"

    def rewind(self, epoch: int, step: int) -> None:
        """Removes the records after a checkpoint from metrics.jsonl and bad_steps.json.

        Steps of earlier epochs aren't compared, because they may have been of another batch size.

        Args:
            epoch: the epochs that the checkpoint's run had done.
            step: the last step that is kept of the epoch after them.
        """

        def is_kept(record: dict[str, Any], trained: bool) -> bool:
            last_epoch = epoch + 1 if trained and record["step"] <= step else epoch
            return record["epoch"] <= last_epoch

        file = self.directory / "metrics.jsonl"
        if file.exists():
            with writing_whole(file) as rewound:
                for line, record in records(file):
                    if is_kept(record, record["split"] == "train"):
                        rewound.write(line)
        try:
            recorded = bad_steps.read_bad_steps(self.directory)
        except InputError as error:
            self.info(f"{error}, or leave it to be replaced")
            return
        self.bad_steps = [record for record in recorded if is_kept(record, trained=True)]
        if recorded and not self.bad_steps:
            remove(self.directory / bad_steps.FILE)
        elif self.bad_steps != recorded:
            with self.logging_failure(bad_steps.FILE):
                self._write_json(bad_steps.FILE, self.bad_steps)

    def result(self, result: dict[str, Any], shown: str) -> None:
        """Writes result.json and logs the summary.

        Args:
            result: the last evaluation; where and how long it was computed is added.
            shown: the metrics in the task's words.

        Raises:
            RunError: the file can't be written.
        """
        self.bar.close()
        self.bar = tqdm(disable=True)
        if rank() != 0:
            return
        result |= self.surroundings()
        self.info(
            f"summary: {shown}; samples: {result['num_samples']}, time: {result['seconds']} s,"
            f" run: {self.directory}"
        )
        try:
            self._write_json("result.json", result)
        except OSError as error:
            problem = f"{error.filename} can't be written ({error.strerror}: {remedy(error)})"
            raise RunError(f"{problem}; {self._same_again()} writes it again") from None
        if problem := self.tracking.end():
            self.info(problem)

    def surroundings(self) -> dict[str, Any]:
        """Returns where, with what and how long the run has trained, as result.json holds it."""
        return {
            "seconds": round(time.time() - self.started, 1),
            "versions": versions(),
            "environment": {
                "devices": self.devices,
                "cores": num_cores(),
                "system": platform.platform(),
                "commit": commit(),
            },
        }

    def log_files(self) -> None:
        """Logs the names of the files that the run has left."""
        names = []
        for name in FILES:
            path = self.directory / name
            # A checkpoint is a folder. A folder in the place of another file isn't the run's.
            if path.is_file() or (name.startswith(f"{CHECKPOINTS}/") and path.exists()):
                names.append(name)
        self.info("files: " + ", ".join(names))

    def _same_again(self) -> str:
        """Returns the flags, or the words, for a command that does this run's end again."""
        return "the same command" if self.config.EVAL else f"-resume=auto -output={self.directory}"

    @contextlib.contextmanager
    def logging_failure(self, what: str, command: str = "") -> Iterator[None]:
        """Logs a failure within instead of raising it: the run can do without what is written.

        Args:
            what: the file that is written.
            command: what writes it again; "": a start with -resume=auto, or the evaluation's own.
        """
        try:
            yield
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            if isinstance(error, OSError) and error.strerror:
                why = f"{error.strerror}: {remedy(error)}"
                what = os.path.basename(os.fsdecode(error.filename)) if error.filename else what
            again = command or self._same_again()
            self.info(one_line(f"{what} can't be written ({why}); {again} writes it again"))

    @contextlib.contextmanager
    def logging_end(self) -> Iterator[None]:
        """Adds a line to log.txt if an error ends the run within, such as a signal to stop.

        The console gets that line from ``errors.reporting``.
        """
        try:
            yield
        except BaseException as error:
            words = f"error: {type(error).__name__}: {error}"
            if isinstance(error, RunError):
                words = f"{error.prefix}{error}"
            # Before ``begin``, the folder isn't this run's.
            if rank() == 0 and self._descriptor >= 0:
                with (
                    contextlib.suppress(OSError),
                    open_to_append(self.directory / "log.txt") as log,
                ):
                    log.write(f"{time.strftime('%m%d %H:%M:%S')} {one_line(words)}\n")
            raise

    def _write_json(self, name: str, content: Any) -> None:
        with writing_whole(self.directory / name) as file:
            file.write(json.dumps(content, indent=2) + "\n")


def _is_at(folder: os.stat_result, path: Path) -> bool:
    """Returns whether ``path`` leads to a folder."""
    with contextlib.suppress(OSError):
        return os.path.samestat(folder, os.stat(path))
    return False


def for_others(config: Configuration) -> Configuration:
    """Returns the configuration that config.yaml holds, which means the same in another place.

    Where the run lies, what it was resumed from and which steps are profiled belong to its command,
    and are left out.
    """
    config = with_values(
        config, BASE=[""], OUTPUT=None, MODEL__RESUME=None, DIST__MAX_RESTART=0, PROFILE=0
    )
    # A resumed run takes its weights from the checkpoint. The file keeps those it began with.
    origins = config.origins.get("MODEL.PRETRAINED", ())
    if len(origins) > 1 and origins[-1].first == CHECKPOINT:
        before = origins[-2]
        config = with_values(config, before.origin(), MODEL__PRETRAINED=before.value)
    # Relative paths are made absolute, to be found from another folder, too.
    for key in ("DATA_PATH", "CACHE"):
        path = config.DATA[key]
        if path and not os.path.isabs(path):
            source = value_sources(config).get(f"DATA.{key}")
            origin = source.origin() if source else ""
            config = with_values(config, origin, **{f"DATA__{key}": os.path.abspath(path)})
    return config


class RunFolder:
    """The choice of a run's folder, its check and its lock. Rank 0 alone has one.

    ``check`` changes nothing. ``make`` makes the folder and locks it. Both return what is wrong, as
    a line for the user, or None.

    Attributes:
        path: the folder.
    """

    def __init__(self, config: Configuration) -> None:
        # A stranger's config.yaml may have chosen the model's name.
        model = re.sub(r"[^\w.-]", "_", config.MODEL.NAME)
        kind = "eval" if config.EVAL else "train"
        name = f"{kind}-{model}-{time.strftime('%Y%m%d-%H-%M-%S')}"
        self.named = bool(config.OUTPUT)
        self.resumes = bool(config.MODEL.RESUME)
        self.base = Path(config.OUTPUT) if config.OUTPUT else Path(config.SAVE) / name
        self.path = self.base
        # The descriptor of the lock, which is held as long as this process lives.
        self.lock: int | None = None
        # Whether this run made the folder.
        self.new = False

    def check(self) -> str | None:
        """Returns what is wrong with a run here. The folder of another run is locked from now on."""
        try:
            return self._check_path() or self._check_files() or self._check_free()
        except OSError as error:
            return self._cannot("read", error.strerror)

    def _check_path(self) -> str | None:
        """Returns why the folder can't be made, or can't be written if it is there."""
        parents = (self.path, *self.path.absolute().parents)
        existing = next(place for place in parents if place.exists())
        if not existing.is_dir():
            return self._cannot("create", f"{existing} is a file")
        if self.path.is_symlink() and not self.path.exists():
            return self._cannot("create", "it is a broken link")
        if os.access(existing, os.W_OK):
            return None
        if existing == self.path:
            return f"{self.path}: not writable; choose another folder with -output"
        read_only = os.statvfs(existing).f_flag & os.ST_RDONLY
        return self._cannot("create", os.strerror(errno.EROFS if read_only else errno.EACCES))

    def _check_files(self) -> str | None:
        """Returns what is wrong with the files that are there, and locks another run's folder."""
        problem = self._check_content() if self.path.is_dir() else None
        if problem is None and os.path.lexists(self.path / LOCK):
            problem = self._take_lock()
        return problem

    def make(self) -> str | None:
        """Makes the folder, if there is none, and locks it."""
        self.new = not (self.named and self.path.exists())
        attempt = 0
        try:
            # Two runs may begin in one second.
            while not self.named and self.path.exists():
                attempt += 1
                self.path = self.base.with_name(f"{self.base.name}-{attempt}")
            self.path.mkdir(parents=True, exist_ok=self.named)
        except OSError as error:
            return self._cannot("create", error.strerror)
        if self.lock is None:
            locked = (self.path / LOCK).exists()
            if problem := self._take_lock() or self._check_free():
                return problem
            if locked:
                # The lock wasn't there when the checkpoints were read.
                return f"{self.path}: another run used it in the meantime; repeat the command"
        return self._sign()

    def _check_content(self) -> str | None:
        """Returns which file a run couldn't write, or would replace though no run made it."""
        own = sorted(filter(is_own, os.listdir(self.path)))
        for name in own:
            path = self.path / name
            problem = obstacle(path)
            if problem is None and _CHANGED.fullmatch(name) and not os.access(path, os.W_OK):
                problem = OSError(errno.EACCES, os.strerror(errno.EACCES))
            if problem:
                return f"{path}: {problem.strerror}; {remedy(problem)}, or choose another -output"
        for name in (CHECKPOINTS, bad_steps.FOLDER):
            folder = self.path / name
            if folder.is_symlink():
                return (
                    f"{folder} is a link, expected a folder;"
                    " move its target here, or make -output the link"
                )
            if os.path.lexists(folder) and not folder.is_dir():
                return (
                    f"{folder} is a file, expected a folder;"
                    " move it away, or choose another -output"
                )
        replaced = [name for name in own if name in _REPLACED]
        if replaced and not self._is_run():
            return (
                f"{self.path} contains {replaced[0]}, which no run wrote;"
                " move it away, or choose another -output"
            )
        return None

    def _is_run(self) -> bool:
        """Returns whether the folder is a run's.

        A run signs the lock, or has left checkpoints or records if its release had no lock.
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
        """Returns that the folder holds a run already, unless this run resumes it."""
        files = (self.path / CHECKPOINTS, self.path / "metrics.jsonl")
        if self.resumes or not any(file.exists() for file in files):
            return None
        return (
            f"{self.path} already contains a run; resume it with -resume, or choose another -output"
        )

    def _cannot(self, what: str, why: str | None) -> str:
        return f"{self.path}: can't {what} the run's folder ({why}); choose another with -output"

    def _take_lock(self) -> str | None:
        """Locks the folder as long as this process lives."""
        try:
            lock = open_lock(self.path / LOCK, _SIGNATURE)
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Systems differ in which of the two they raise.
            except (BlockingIOError, PermissionError):
                owner = os.read(lock, 200).decode(errors="replace")
                return (
                    f"{self.path}: another run is using it ({owner});"
                    " wait for it, or choose another -output"
                )
        # The disk is full, or has no locks.
        except OSError as error:
            return self._cannot_lock(error)
        self.lock = lock
        return None

    def _sign(self) -> str | None:
        """Writes this process and its machine into the lock."""
        assert self.lock is not None
        try:
            os.truncate(self.lock, 0)
            os.pwrite(self.lock, f"process {os.getpid()} on {platform.node()}".encode(), 0)
        except OSError as error:
            return self._cannot_lock(error)
        return None

    def _cannot_lock(self, error: OSError) -> str:
        """Removes the folder if this run made it; returns why it can't be locked."""
        if self.new:
            with contextlib.suppress(OSError):
                (self.path / LOCK).unlink(missing_ok=True)
                self.path.rmdir()
        why = f"({error.strerror}); {remedy(error)}, or choose another -output"
        return f"{self.path}: can't lock the run's folder {why}"
