"""The process that follows a run's metrics.jsonl for its trackers (TRACKERS), and rank 0's hold on it.

Nothing of a tracker comes into the run's own processes: no import, thread, signal handler, network, crash or wait. A
tracker shows what metrics.jsonl has. A run that goes on removes from it what came after its checkpoint. Then every
tracker's folder is written anew, so its curves have no step twice.

A pipe reports the run's end: a word, where there is a result; or its closing, however the run ended.
"""

import contextlib
import fcntl
import importlib.util
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from configs.documents import read_yaml
from configs.registry import ROOT, trackers
from errors import install, one_line, open_file, reading
from launch.verdict import how_it_ended
from training.records import OFFLINE, Tracker, final_numbers

LOG = "log_trackers.txt"  # in a run's folder: what trackers print, and the tracebacks of what they raise
LOCK = ".lock_trackers"  # it names the newest such process
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
                commands.append(install(given["extra"]) if "extra" in given else f"pip install {given['package']}")
        if not lacking:
            return ""
        advice = f"{' and '.join(dict.fromkeys(commands))}, or leave it out of TRACKERS"
        return f"TRACKERS: {', '.join(lacking)}, which isn't installed; {advice}"

    def begin(self, folder: Path) -> str:
        """Starts it, once metrics.jsonl is as the run goes on with it; returns why it couldn't, or nothing."""
        if not self.names:
            return ""
        turn = str(time.time_ns())
        command = [sys.executable, "-m", "training.tracking", str(folder.absolute()), turn, *self.names]
        quiet = {**os.environ, **OFFLINE, "CUDA_VISIBLE_DEVICES": ""}
        try:  # a session of its own: what is sent to the run's group isn't for it, which sees the run's end
            (folder / LOCK).write_text(turn)
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=quiet, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
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
            return f"TRACKERS: not done {PATIENCE} s after the run's end, and ended; {LOG} may say why"
        status = self.process.returncode
        return f"TRACKERS: their process {how_it_ended(status)}; {LOG} may say why" if status else ""


def _is_installed(package: str) -> bool:
    """Whether it is installed; a folder of that name, which a tracker leaves where it works, is no package."""
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None


# --------------------------------------------------------- the process itself


class Follower:
    """Trackers that follow the records of a run, each as long as it raises nothing.

    Args:
        say: takes the line that one is off.
    """

    def __init__(self, folder: Path, names: Sequence[str], say: Callable[[str], None]) -> None:
        self.folder, self.say, self.read = folder, say, 0
        self.live: dict[str, Tracker] = {}
        config = read_yaml(folder / "config.yaml")
        config.pop("GIVEN", None)  # where its values came from
        for name in names:
            self._guard(name, lambda name=name: self._make(name, config))

    def _make(self, name: str, config: dict[str, Any]) -> None:
        shutil.rmtree(self.folder / name, ignore_errors=True)  # of before the run went on
        (self.folder / name).mkdir()
        self.live[name] = trackers.load(name)[0](self.folder / name, config)

    def follow(self) -> None:
        """Hands on the records that were written since the last time."""
        for record in self._new():
            split, step = record.pop("split"), record.pop("step")
            values = {key: value for key, value in record.items() if type(value) in (int, float)}
            for name, tracker in list(self.live.items()):
                self._guard(name, lambda tracker=tracker: tracker.add(split, step, values))  # noqa: B023

    def end(self, done: bool) -> None:
        """Hands on what is left and, if the run is done, its result."""
        self.follow()
        final = {}
        if done:
            with reading("result.json", "a result"), open_file(self.folder / "result.json") as file:
                final = final_numbers(json.loads(file.read()))
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
                    record = json.loads(line)
                    if isinstance(record, dict) and {"split", "step"} <= record.keys():
                        yield record

    def _guard(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            traceback.print_exc()
            self.live.pop(name, None)
            self.say(one_line(f"TRACKERS: {name} is off ({type(error).__name__}: {error}); the run goes on"))


def main(folder: Path, turn: str, names: Sequence[str]) -> None:
    """Follows the records of the run in ``folder`` until its end, which standard input tells.

    Args:
        turn: what the lock's file has as long as no newer process was started.
    """
    console = os.dup(2)
    printed = os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    for stream in (1, 2):
        os.dup2(printed, stream)

    def say(line: str) -> None:
        with contextlib.suppress(OSError):
            os.write(console, f"{line}\n".encode())
        with contextlib.suppress(OSError), open(folder / "log.txt", "a", encoding="utf-8") as log:
            log.write(f"{time.strftime('%m%d %H:%M:%S')} {line}\n")

    with open(folder / LOCK, "r+") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)  # the one of before the run went on may be about to end
        if lock.read() != turn:  # or it begins only now: this one, which has nothing to add
            return
        follower, told = Follower(folder, names, say), None
        while told is None:
            follower.follow()
            told = os.read(0, len(_DONE)) if select.select([0], [], [], EVERY)[0] else None
        signal.alarm(2 * PATIENCE)  # nobody may be left to end it
        follower.end(told == _DONE)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
