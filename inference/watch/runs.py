"""The runs of a folder and their states, as their files show them.

Nothing in the files is trusted. What hasn't changed isn't read again.
"""

import contextlib
import hashlib
import os
import platform
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from errors import InputError, Unreadable, printable
from inference.watch.curves import FILE, Curves
from inference.watch.files import Files, Parts
from settings.documents import RUN_CONFIG, read_yaml
from settings.plain import parsed_json
from training.results import METRIC_TITLES, is_number

# Seconds without a new line from which on a running process counts as silent.
SILENT = 600.0
# Seconds that reading may take before a request is answered, and between two such readings.
_PATIENCE = 1.0
_INTERVAL = 1.0
# The share of the time that may be spent looking for runs: a tree of images takes seconds.
_SHARE_OF_SEARCH = 0.1
# Bytes of the end of log.txt, and of its beginning, that are read, and of the largest result.json.
_TAIL = 1 << 13
_HEAD = 1 << 8
_LARGEST_RESULT = 4 << 20
# Letters of the longest name that is shown.
_LONGEST = 80
# The TAG of a run that was given none.
_NO_TAG = "default"
_FILES = (RUN_CONFIG, "log.txt", FILE, "result.json", "report.html", "curves.png", ".lock")
_TIME = re.compile(r"(\d\d)(\d\d) (\d\d):(\d\d):(\d\d) ")
_ENDED = re.compile(r"^\d{4} [\d:]{8} ((?:stopped by|error:).*)")
_LEFT = re.compile(r", left: ([\dhmins ]{1,20})$")


class WatchedRun:
    """A run, and what is remembered of its files.

    Args:
        parts: the names in its folder's path below the shown folder.
        name: that path, or the shown folder's own name.
    """

    def __init__(self, parts: Parts, name: str) -> None:
        self.parts = parts
        self.name = printable(name, 2 * _LONGEST)
        # It names the run in addresses. So no path is ever taken from one.
        self.key = hashlib.sha256(os.fsencode("/".join(parts))).hexdigest()[:16]
        self.curves = Curves()
        self.status: dict[str, os.stat_result] = {}
        self.about: dict[str, Any] = {}
        self.result: dict[str, Any] = {}
        self.log: list[str] = []
        self.began = ""
        self.is_locked = False
        self.elsewhere = False
        # Of each file that was read, the status that it had.
        self._seen: dict[str, tuple[int, int, int]] = {}

    def renew(self, files: Files, until: float) -> bool:
        """Reads what has changed; returns whether all of it was read before ``until``."""
        self.status = files.status(self.parts, _FILES)
        self.is_locked = files.is_locked(self.parts, ".lock")
        for name, read in (
            (RUN_CONFIG, self._read_config),
            ("log.txt", self._read_log),
            ("result.json", self._read_result),
            (".lock", self._read_lock),
        ):
            if time.monotonic() > until:
                return False
            status = self.status.get(name)
            seen = (status.st_ino, status.st_size, status.st_mtime_ns) if status else (0, 0, 0)
            if self._seen.get(name, (0, 0, 0)) == seen:
                continue
            # If it isn't what a run writes, or is gone, the row is shown without it.
            with contextlib.suppress(OSError, InputError, ValueError, RecursionError):
                read(files)
            self._seen[name] = seen
        self.curves.follow(files, self.parts, until)
        return not self.curves.unread

    def _read_config(self, files: Files) -> None:
        self.about = {}
        config = read_yaml(files.root.joinpath(*self.parts, RUN_CONFIG))

        def value(key: str, kind: type) -> Any:
            section, _, name = key.rpartition(".")
            entries = config.get(section) if section else config
            found = entries.get(name) if type(entries) is dict else None
            return found if type(found) is kind else None

        self.about = {
            "model": value("MODEL.NAME", str),
            "data": value("DATA.DATASET", str),
            "task": value("TASK", str),
            "tag": None if value("TAG", str) == _NO_TAG else value("TAG", str),
            "epochs": value("TRAIN.NUM_EPOCHS", int),
            "evaluates": value("EVAL", bool),
        }

    def _read_log(self, files: Files) -> None:
        with files.opened(self.parts, "log.txt") as file:
            head = file.read(_HEAD)
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            tail = file.read(_TAIL)
        self.log = tail.decode(errors="replace").splitlines()[-20:]
        self.began = head.decode(errors="replace")

    def _read_result(self, files: Files) -> None:
        self.result = {}
        with files.opened(self.parts, "result.json") as file:
            # The end of a larger file would be missing, so it isn't JSON.
            result = parsed_json(file.read(_LARGEST_RESULT))
        if type(result) is dict:
            self.result = {key: result[key] for key in METRIC_TITLES if is_number(result.get(key))}

    def _read_lock(self, files: Files) -> None:
        self.elsewhere = False
        with files.opened(self.parts, ".lock") as file:
            owner = re.fullmatch(r"process \d+ on (.*)", file.read(400).decode())
        self.elsewhere = owner is not None and owner[1] != platform.node()

    # ------------------------------------------------------------ the row

    def row(self, now: float) -> dict[str, Any]:
        """Returns the run's row of the table.

        Args:
            now: the time, in seconds since 1970.
        """
        train = self.curves.last.get("train", {})
        evaluated = self.curves.last.get("val", {})
        newest = max((train, evaluated), key=lambda values: values.get("step", 0))
        state, detail = self.state(now)
        metric = next((key for key in METRIC_TITLES if key in self.curves.best), None)
        best = self.curves.best.get(metric) if metric else None
        if best is None:
            # An evaluation has no records.
            metric = next(iter(self.result), None)
            best = (self.result[metric], None) if metric else None
        left = ""
        if state == "training" and self.log and (match := _LEFT.search(self.log[-1])):
            left = match[1]
        return {
            "key": self.key,
            "name": self.name,
            "state": state,
            "detail": detail,
            **{name: _shown(self.about.get(name)) for name in ("model", "data", "task", "tag")},
            "epoch": newest.get("epoch"),
            "epochs": self.about.get("epochs"),
            "left": left,
            "metric": metric,
            "best": best and best[0],
            "best_epoch": best and best[1],
            "lr": train.get("lr"),
            "images_per_s": train.get("images_per_s"),
            "started": self._started(),
            "news": self._news(),
            "unread": self.curves.unread,
            "report": "report.html" in self.status,
            "picture": "curves.png" in self.status,
        }

    def state(self, now: float) -> tuple[str, str]:
        """Returns the run's state and what explains it.

        A run holds a lock on its folder as long as its process lives. Whether one of another machine
        holds it can't be seen on every file system, so its newest line counts.
        """
        news = self._news()
        silent = now - news > SILENT
        evaluates = self.about.get("evaluates")
        if self.is_locked:
            if silent:
                return "silent", f"no news for {(now - news) / 60:.0f} min; its process is alive"
            return "evaluating" if evaluates else "training", ""
        if self._has_result():
            return "finished", ""
        if ending := self._ending():
            return "stopped" if ending.startswith("stopped by") else "failed", ending
        if self.elsewhere:
            if silent:
                return "silent", f"no news for {(now - news) / 60:.0f} min, from another machine"
            return "evaluating" if evaluates else "training", "on another machine"
        return "failed", "its log gives no reason; the process may have been killed"

    def _has_result(self) -> bool:
        """Returns whether result.json is there, and not older than what a resumed run has added."""
        result = self.status.get("result.json")
        records = self.status.get(FILE)
        if result is None:
            return False
        return records is None or result.st_mtime >= records.st_mtime - 1

    def _ending(self) -> str:
        """Returns the line of the log that says why the run ended; "" if there is none."""
        for line in reversed(self.log):
            if match := _ENDED.match(line):
                return printable(match[1], 400)
            # A resumed run logs its configuration, then its epochs.
            if " epoch " in line or " configuration" in line:
                break
        return ""

    def _news(self) -> float:
        """Returns the time of the run's newest line."""
        names = (FILE, "log.txt", "result.json")
        times = [self.status[name].st_mtime for name in names if name in self.status]
        return max(times, default=0.0)

    def _started(self) -> float | None:
        """Returns the time of the log's first line, which has no year."""
        match = _TIME.match(self.began)
        if match is None:
            return None
        month, day, hour, minute, second = map(int, match.groups())
        year = time.localtime(self._news()).tm_year
        try:
            fields = (year, month, day, hour, minute, second, 0, 0, -1)
            started = time.mktime(fields)
            # The log's last line is from the year after.
            if started > self._news() + 1:
                started = time.mktime((year - 1, *fields[1:]))
        except (OverflowError, ValueError):
            return None
        return started


def _shown(value: Any) -> str:
    return printable(value, _LONGEST) if type(value) is str else ""


class Runs:
    """The runs of a folder. Threads may call its methods.

    Args:
        root: the folder. It may be a run's own.
    """

    def __init__(self, root: Path) -> None:
        self.files = Files(root)
        self._lock = threading.Lock()
        self._runs: dict[Parts, WatchedRun] = {}
        self._by_key: dict[str, WatchedRun] = {}
        self._read_at = -_INTERVAL
        # When runs may be looked for again.
        self._search_at = 0.0

    def rows(self) -> list[dict[str, Any]]:
        """Returns the rows of the table, the run with the newest line first."""
        with self._lock:
            self._renew()
            now = time.time()
            rows = [run.row(now) for run in self._runs.values()]
        return sorted(rows, key=lambda row: -row["news"])

    def curves(self, keys: Sequence[str]) -> dict[str, Any]:
        """Returns the curves of the runs with these keys."""
        with self._lock:
            return {key: self._by_key[key].curves.points() for key in keys if key in self._by_key}

    def content(self, key: str, name: str, most: int) -> bytes:
        """Returns a file of a run.

        Raises:
            KeyError: there is no such run.
            OSError: there is no such file, or it is a link.
            Unreadable: it has more than ``most`` bytes.
        """
        with self._lock:
            parts = self._by_key[key].parts
        with self.files.opened(parts, name) as file:
            data = file.read(most + 1)
        if len(data) > most:
            raise Unreadable(f"it has more than {most} bytes")
        return data

    def _renew(self) -> None:
        """Looks for runs, and reads what they have added, at most once in _INTERVAL.

        What takes too long is read at the next call, which begins where this one ended.
        """
        if time.monotonic() - self._read_at < _INTERVAL:
            return
        if time.monotonic() >= self._search_at:
            self._search()
        until = time.monotonic() + _PATIENCE
        # Those that weren't reached the last time come first.
        waiting = sorted(self._runs.values(), key=lambda run: bool(run.status))
        for run in waiting:
            if not run.renew(self.files, until) and time.monotonic() > until:
                break
        self._read_at = time.monotonic()

    def _search(self) -> None:
        """Looks for runs, and for those that are gone."""
        start = time.monotonic()
        own = self.files.root.absolute().name
        before = self._runs
        self._runs = {}
        for parts in self.files.runs():
            run = before.get(parts)
            self._runs[parts] = run or WatchedRun(parts, "/".join(parts) or own)
        self._by_key = {run.key: run for run in self._runs.values()}
        end = time.monotonic()
        self._search_at = end + (end - start) / _SHARE_OF_SEARCH
