"""The process that follows a run's metrics.jsonl for its trackers (TRACKERS), and rank 0's hold on
it.

Nothing of a tracker comes into the run's own processes: no import, thread, signal handler, network,
crash or wait. A tracker shows what metrics.jsonl has. A run that goes on removes from it what came
after its checkpoint. Then every tracker's folder is written anew, so its curves have no step twice.

A pipe reports the run's end: a word, where there is a result; or its closing, however the run
ended.
"""

import contextlib
import fcntl
import importlib.util
import os
import re
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from errors import RunError, install, one_line, open_file, reading
from launch.files import open_lock, open_to_append, remove
from launch.verdict import how_it_ended
from settings.documents import read_yaml
from settings.plain import is_whole, parsed_json
from settings.registry import ROOT, trackers
from training.results import read_result
from training.trackers import OFFLINE, Tracker, final_numbers

# in a run's folder: what trackers print, and the tracebacks of what they raise
LOG = "log_trackers.txt"
LOCK = ".lock_trackers"  # it names the newest such process
MADE = ".trackers"  # it has a line for each tracker whose folder the run has made
EVERY = 1.0  # seconds between two looks at the records
PATIENCE = 60  # seconds that trackers have to end
_DONE = b"done\n"


class Tracking:
    """Rank 0's hold on the process that follows a run's records.

    Args:
        names: of the trackers; none: nothing is done.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.process: subprocess.Popen[bytes] | None = None

    def missing_packages(self) -> str:
        """Returns the line that says which tracker's package isn't installed, or nothing."""
        lacking = []
        commands = []
        for name in self.names:
            given = trackers.components[name].given
            if not _is_installed(given["package"]):
                lacking.append(f"{name} needs {given['package']}")
                commands.append(
                    install(given["extra"])
                    if "extra" in given
                    else f"pip install {given['package']}"
                )
        if not lacking:
            return ""
        advice = f"{' and '.join(dict.fromkeys(commands))}, or leave it out of TRACKERS"
        return f"TRACKERS: {', '.join(lacking)}, which isn't installed; {advice}"

    def begin(self, folder: Path) -> str:
        """Starts it, once metrics.jsonl is as the run goes on with it; returns why it couldn't, or
        nothing.
        """
        if not self.names:
            return ""
        turn = str(time.time_ns())
        command = [
            sys.executable,
            "-m",
            "training.tracking",
            str(folder.absolute()),
            turn,
            *self.names,
        ]
        quiet = {**os.environ, **OFFLINE, "CUDA_VISIBLE_DEVICES": ""}
        # a session of its own: what is sent to the run's group isn't for it, which sees the run's
        # end
        try:
            if not (folder / MADE).exists():
                # Earlier releases made no such file, and a copy may lack hidden ones.
                before = (folder / LOCK).exists() or (folder / LOG).exists()
                made = [name for name in self.names if before and (folder / name).is_dir()]
                with open_to_append(folder / MADE) as file:
                    file.writelines(f"{name}\n" for name in made)
            with open(open_lock(folder / LOCK, b"[0-9]+"), "r+") as lock:
                lock.truncate()
                lock.write(turn)
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=quiet,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            return f"TRACKERS: not started ({error.strerror}); the run goes on without"
        return ""

    def end(self) -> str:
        """Tells it that there is a result, and waits; returns what it didn't do, or nothing."""
        if self.process is None:
            return ""
        try:
            self.process.communicate(_DONE, PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            return (
                f"TRACKERS: not done {PATIENCE} s after the run's end, and ended; {LOG} may say why"
            )
        status = self.process.returncode
        return (
            f"TRACKERS: their process {how_it_ended(status)}; {LOG} may say why" if status else ""
        )


def _is_installed(package: str) -> bool:
    """Whether it is installed; a folder of that name, which a tracker leaves where it works, is no
    package.
    """
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None


# --------------------------------------------------------- the process itself


class Follower:
    """Trackers that follow the records of a run, each as long as it raises nothing.

    Args:
        say: takes the line that one is off.
    """

    def __init__(self, folder: Path, names: Sequence[str], say: Callable[[str], None]) -> None:
        self.folder = folder
        self.say = say
        self.read = 0
        self.live: dict[str, Tracker] = {}
        config = read_yaml(folder / "config.yaml")
        config.pop("GIVEN", None)  # where its values came from
        for name in names:
            self._guard(name, lambda name=name: self._make(name, config))

    def _make(self, name: str, config: dict[str, Any]) -> None:
        folder = self.folder / name
        tracker = trackers.load(name)[0]
        if not os.path.lexists(folder):
            folder.mkdir()
            with open_to_append(self.folder / MADE) as made:
                made.write(f"{name}\n")
        elif folder.is_symlink() or name not in _made(self.folder / MADE):
            raise RunError(f"{folder} isn't of this run's trackers; move it away")
        # What it wrote before the run went on.
        for entry in os.listdir(folder):
            if re.fullmatch(tracker.written, entry):
                remove(folder / entry)
        self.live[name] = tracker(folder, config)

    def follow(self) -> None:
        """Hands on the records that were written since the last time."""
        for record in self._new():
            split = record.pop("split")
            step = record.pop("step")
            values = {key: value for key, value in record.items() if type(value) in (int, float)}
            for name, tracker in list(self.live.items()):
                self._guard(name, lambda tracker=tracker: tracker.add(split, step, values))  # noqa: B023

    def end(self, done: bool) -> None:
        """Hands on what is left and, if the run is done, its result."""
        self.follow()
        final = {}
        if done:
            final = final_numbers(read_result(self.folder, ""))
        for name, tracker in list(self.live.items()):
            self._guard(name, lambda tracker=tracker: tracker.end(final))

    def _new(self) -> Iterator[dict[str, Any]]:
        """Yields the records of whole lines after those that were read."""
        file = self.folder / "metrics.jsonl"
        if not file.exists():
            return
        with reading(file, "a run's records"), open_file(file) as lines:
            lines.seek(self.read)
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                self.read += len(line)
                with contextlib.suppress(ValueError, RecursionError):  # half a line, of a crash
                    record = parsed_json(line, finite=False)
                    if (
                        type(record) is dict
                        and type(record.get("split")) is str
                        and is_whole(record.get("step"))
                    ):
                        yield record

    def _guard(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            traceback.print_exc()
            self.live.pop(name, None)
            self.say(
                one_line(
                    f"TRACKERS: {name} is off ({type(error).__name__}: {error}); the run goes on"
                )
            )


def _made(file: Path) -> list[str]:
    """Returns the lines of MADE; none, if it isn't there."""
    with contextlib.suppress(FileNotFoundError), open_file(file) as lines:
        return lines.read(1 << 16).decode(errors="replace").splitlines()
    return []


def main(folder: Path, turn: str, names: Sequence[str]) -> None:
    """Follows the records of the run in ``folder`` until its end, which standard input tells.

    Args:
        turn: what the lock's file has as long as no newer process was started.
    """
    console = os.dup(2)
    with open_to_append(folder / LOG) as file:
        printed = os.dup(file.fileno())
    os.truncate(printed, 0)
    for stream in (1, 2):
        os.dup2(printed, stream)

    def say(line: str) -> None:
        with contextlib.suppress(OSError):
            os.write(console, f"{line}\n".encode())
        with contextlib.suppress(OSError), open_to_append(folder / "log.txt") as log:
            log.write(f"{time.strftime('%m%d %H:%M:%S')} {line}\n")

    with open(open_lock(folder / LOCK, b"[0-9]+"), "r+") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)  # the one of before the run went on may be about to end
        if lock.read() != turn:  # or it begins only now: this one, which has nothing to add
            return
        follower = Follower(folder, names, say)
        told = None
        while told is None:
            follower.follow()
            told = os.read(0, len(_DONE)) if select.select([0], [], [], EVERY)[0] else None
        signal.alarm(2 * PATIENCE)  # nobody may be left to end it
        follower.end(told == _DONE)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
