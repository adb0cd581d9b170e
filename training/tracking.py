"""The process that passes a run's metrics.jsonl to its trackers (TRACKERS).

Trackers run in a process of their own. So nothing of theirs reaches the run: no import, thread,
signal handler, network access, crash or wait. ``TrackerProcess`` starts that process on rank 0, and
``main`` is what it runs.

A tracker shows what metrics.jsonl holds. A resumed run removes the records after its checkpoint
from that file. Then each tracker's folder is written again, so that its curves have no step twice.

The process learns of the run's end by its standard input, a pipe. The run writes a word to it if
there is a result; if the pipe closes without one, the run ended otherwise.
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

# Files of a run's folder. LOG has the output of trackers, and the tracebacks of their errors.
LOG = "log_trackers.txt"
# The lock that the process holds. The file has the turn of the newest process.
LOCK = ".lock_trackers"
# A line for each tracker whose folder the run has made.
MADE = ".trackers"
# Seconds between two reads of the records.
INTERVAL = 1.0
# Seconds that trackers have to finish after the run's end.
PATIENCE = 60
_DONE = b"done\n"


class TrackerProcess:
    """Starts and ends the process that follows a run's records, on rank 0.

    Args:
        names: of the trackers. If there are none, nothing is started.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.process: subprocess.Popen[bytes] | None = None

    def missing_packages(self) -> str:
        """Returns the line that names packages which aren't installed, or an empty string."""
        missing = []
        commands = []
        for name in self.names:
            requirement = trackers.components[name].given
            package = requirement["package"]
            if _is_installed(package):
                continue
            missing.append(f"{name} needs {package}")
            if "extra" in requirement:
                commands.append(install(requirement["extra"]))
            else:
                commands.append(f"pip install {package}")
        if not missing:
            return ""
        advice = f"{' and '.join(dict.fromkeys(commands))}, or leave it out of TRACKERS"
        return f"TRACKERS: {', '.join(missing)}, which isn't installed; {advice}"

    def begin(self, folder: Path) -> str:
        """Starts the process; returns a line that says why it couldn't be started, or "".

        Call it after records that the run doesn't continue from are removed from metrics.jsonl.
        """
        if not self.names:
            return ""
        # The process compares this with the lock's file, to find whether a newer one was started.
        turn = str(time.time_ns())
        arguments = ["-m", "training.tracking", str(folder.absolute()), turn]
        try:
            if not (folder / MADE).exists():
                # Earlier releases made no such file, and a copy may lack hidden files. The run had
                # trackers if it has one of these.
                had_trackers = (folder / LOCK).exists() or (folder / LOG).exists()
                made = [name for name in self.names if had_trackers and (folder / name).is_dir()]
                with open_to_append(folder / MADE) as file:
                    file.writelines(f"{name}\n" for name in made)
            with open(open_lock(folder / LOCK, b"[0-9]+"), "r+") as lock:
                lock.truncate()
                lock.write(turn)
            self.process = subprocess.Popen(
                [sys.executable, *arguments, *self.names],
                cwd=ROOT,
                env={**os.environ, **OFFLINE, "CUDA_VISIBLE_DEVICES": ""},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                # Signals to the run's process group don't reach it: it learns of the run's end.
                start_new_session=True,
            )
        except OSError as error:
            return (
                f"TRACKERS: couldn't be started ({error.strerror}); the run continues without them"
            )
        return ""

    def end(self) -> str:
        """Tells the process that there is a result, and waits for its end.

        Returns:
            A line that says what went wrong, or "".
        """
        if self.process is None:
            return ""
        try:
            self.process.communicate(_DONE, PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            return f"TRACKERS: ended because they didn't finish within {PATIENCE} s of the run's end; see {LOG}"
        status = self.process.returncode
        if status == 0:
            return ""
        return f"TRACKERS: their process {how_it_ended(status)}; see {LOG}"


def _is_installed(package: str) -> bool:
    """Returns whether a package is installed.

    A folder of that name, such as a tracker leaves in the current folder, has no origin and isn't
    a package.
    """
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


# --------------------------------------------------------- the process itself


class Follower:
    """Passes the records of a run to trackers. One that raises an error gets no more of them.

    Args:
        folder: the run's.
        names: of the trackers.
        say: is called with a line that says that a tracker is off.
    """

    def __init__(self, folder: Path, names: Sequence[str], say: Callable[[str], None]) -> None:
        self.folder = folder
        self.say = say
        # Bytes of metrics.jsonl that were read.
        self.position = 0
        # The trackers that haven't failed.
        self.live: dict[str, Tracker] = {}
        config = read_yaml(folder / "config.yaml")
        # It says where the values came from, and isn't part of the configuration.
        config.pop("GIVEN", None)
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
            raise RunError(f"{folder} doesn't belong to the trackers of this run; move it away")
        # Remove what the tracker wrote before the run was resumed.
        for entry in os.listdir(folder):
            if re.fullmatch(tracker.written, entry):
                remove(folder / entry)
        self.live[name] = tracker(folder, config)

    def follow(self) -> None:
        """Passes the records that were written since the last call to the trackers."""
        for record in self._new_records():
            split = record.pop("split")
            step = record.pop("step")
            values = {key: value for key, value in record.items() if type(value) in (int, float)}
            for name, tracker in list(self.live.items()):
                self._guard(name, lambda tracker=tracker: tracker.add(split, step, values))  # noqa: B023

    def end(self, done: bool) -> None:
        """Passes the remaining records, and the result if the run is done, to the trackers."""
        self.follow()
        final = final_numbers(read_result(self.folder, "")) if done else {}
        for name, tracker in list(self.live.items()):
            self._guard(name, lambda tracker=tracker: tracker.end(final))

    def _new_records(self) -> Iterator[dict[str, Any]]:
        """Yields the records of complete lines after those that were read."""
        file = self.folder / "metrics.jsonl"
        if not file.exists():
            return
        with reading(file, "a run's records"), open_file(file) as lines:
            lines.seek(self.position)
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                self.position += len(line)
                # A crash may have left half a record.
                with contextlib.suppress(ValueError, RecursionError):
                    record = parsed_json(line, finite=False)
                    if (
                        type(record) is dict
                        and type(record.get("split")) is str
                        and is_whole(record.get("step"))
                    ):
                        yield record

    def _guard(self, name: str, action: Callable[[], None]) -> None:
        """Calls ``action``. If it raises an error, the tracker ``name`` is off from now on."""
        try:
            action()
        except Exception as error:
            traceback.print_exc()
            self.live.pop(name, None)
            problem = f"{type(error).__name__}: {error}"
            self.say(one_line(f"TRACKERS: {name} is turned off ({problem}); the run continues"))


def _made(file: Path) -> list[str]:
    """Returns the lines of the file MADE, or none if it doesn't exist."""
    with contextlib.suppress(FileNotFoundError), open_file(file) as lines:
        return lines.read(1 << 16).decode(errors="replace").splitlines()
    return []


def main(folder: Path, turn: str, names: Sequence[str]) -> None:
    """Follows the records of the run in ``folder`` until standard input reports the run's end.

    Args:
        turn: the content of the lock's file as long as no newer process was started.
    """
    # The output of trackers goes to LOG. ``say`` still writes to the run's console and log.
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
        # After a resume, the process of the run before may not have ended yet.
        fcntl.lockf(lock, fcntl.LOCK_EX)
        # If a newer process was started before this one got the lock, the newer one does it all.
        if lock.read() != turn:
            return
        follower = Follower(folder, names, say)
        message = None
        while message is None:
            follower.follow()
            if select.select([0], [], [], INTERVAL)[0]:
                message = os.read(0, len(_DONE))
        # The run may be gone, and nobody else ends a tracker that hangs.
        signal.alarm(2 * PATIENCE)
        follower.end(done=message == _DONE)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
