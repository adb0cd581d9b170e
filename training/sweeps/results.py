"""A sweep's folder, and the results of its runs.

The folder holds sweep.json (the points), a folder for each run, and at the end sweep.csv and
sweep.png. Optuna's points are in points.jsonl, to which a line is added for each while the sweep
runs.
"""

import fcntl
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from errors import InputError, Unreadable, open_file, printable, reading
from launch.files import open_lock, open_to_append, refuse_links, writing_whole
from launch.verdict import how_it_ended
from loading.tables import csv_line
from settings.plain import Form, Rule, check_form, is_list, parsed_json, whole_file
from training.results import FILE as RESULT
from training.results import NUMBER, is_number, read_result
from training.sweeps.points import MOST, Point, Sweep

FILE = "sweep.json"
ADDED = "points.jsonl"
LOCK = ".lock"
# Seconds to wait for runs of a killed sweep, which may still be saving.
PATIENCE = 60.0
# Bytes of sweep.json, and of points.jsonl.
_LONGEST = 64 << 20
# Bytes of a point: the sweep's file, which has its words, has 1 MiB at most.
_LONGEST_LINE = 2 << 20
# Labels below an axis of sweep.png.
_MOST_LABELS = 40
# Names of the files and folders that a sweep writes.
_WRITTEN = r"[0-9]{4,}(_seed[0-9]+)?(\.txt)?|sweep\.(json|csv|png)|points\.jsonl|\.lock"
_ANEW = "; remove it to start over"
_REPEAT = "; remove it to repeat the run"


def _is_point(value: Any) -> bool:
    return type(value) is dict and all(type(word) is str for word in value.values())


_FORM: Form = {
    "of": Rule("a dictionary", lambda value: type(value) is dict),
    "points": Rule(
        f"a list of up to {MOST} points, each of texts by key",
        lambda value: is_list(value, _is_point, high=MOST),
    ),
}


class Outcome(NamedTuple):
    """The metric at a run's best evaluation, and the epoch of that evaluation."""

    value: float
    epoch: int


def lock(output: Path) -> int:
    """Makes a sweep's folder and locks it; returns the lock's descriptor.

    Runs inherit the descriptor. Those that a killed sweep has left hold the lock until they end.

    Raises:
        InputError: another sweep writes there, the folder holds something else, or nothing can be
            written there.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        others = [name for name in os.listdir(output) if name != LOCK]
        if others and not (output / FILE).exists():
            raise InputError(
                f"{output} contains {printable(others[0])}, but no sweep; choose another output"
            )
        refuse_links(output, _WRITTEN)
        descriptor = open_lock(output / LOCK, rb"[0-9]+")
    except OSError as error:
        where = error.filename or output
        raise InputError(
            f"{where}: can't be used for a sweep ({error.strerror}); choose another output"
        ) from None
    _wait_for_lock(descriptor, output)
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return descriptor


def _wait_for_lock(descriptor: int, output: Path) -> None:
    """Takes the lock. If a killed sweep's runs hold it, waits for them, PATIENCE seconds at most.

    Raises:
        InputError: another sweep holds the lock.
    """
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            owner = os.pread(descriptor, 20, 0).decode(errors="replace")
            if not (owner.isascii() and owner.isdigit()):
                # A sweep that has taken the lock hasn't written its process id yet.
                owner = ""
            is_alive = not owner or os.path.exists(f"/proc/{owner}")
            if is_alive or time.monotonic() > deadline:
                process = owner or "that has just begun"
                raise InputError(
                    f"{output}: another sweep is using it (process {process}); wait for it, or"
                    " choose another output"
                ) from None
            time.sleep(0.2)


def read_points(sweep: Sweep, planned: Sequence[Point]) -> list[Point]:
    """Returns the points that the folder's sweep has begun so far.

    Args:
        planned: the points of the sweep's file; none for Optuna.

    Raises:
        InputError: the folder is of a sweep with another file.
    """
    file = sweep.output / FILE
    if not file.exists():
        return []
    with reading(file, "a sweep's points", _ANEW):
        content = parsed_json(whole_file(file, _LONGEST))
        check_form(content, _FORM, tuple(_FORM))
        points = content["points"]
        stored = content["of"]
    changed = [key for key, value in _sweep_record(sweep).items() if stored.get(key) != value]
    if planned and points != list(planned[: len(points)]):
        changed.append("keys")
    if changed:
        raise InputError(
            f"{file} is from a sweep with a different {changed[0]}; choose another output, or"
            " restore"
            " the file"
        )
    if not planned:
        # Optuna's points can't be computed again, so they are taken from the files.
        _check_points(sweep, points, file)
        points += _added_points(sweep, len(points))
    return points


def _added_points(sweep: Sweep, known: int) -> list[Point]:
    """Returns the points of points.jsonl, which follow ``known`` points of sweep.json."""
    file = sweep.output / ADDED
    if not file.exists():
        return []
    with reading(file, "a sweep's points", _ANEW):
        # After the last end of a line there may be half a point. No run has begun with it.
        lines = whole_file(file, _LONGEST).split(b"\n")[:-1]
        if known + len(lines) > MOST:
            raise Unreadable(
                f"it has {len(lines)} points, and {FILE} {known}: a sweep has at most {MOST}"
            )
        points = [parsed_json(line) for line in lines]
    _check_points(sweep, points, file)
    return points


def _check_points(sweep: Sweep, points: list[Point], file: Path) -> None:
    """Raises InputError unless Optuna may have suggested the points."""
    form = {
        key: Rule("a value from the sweep's file", distribution.holds)
        for key, distribution in sweep.keys.items()
    }
    with reading(file, "a sweep's points", _ANEW):
        for index, point in enumerate(points):
            check_form(point, form, tuple(form), f"points[{index}].")
            if unknown := sorted(point.keys() - form.keys()):
                raise Unreadable(
                    f"its points[{index}] has {printable(unknown[0], 60)},"
                    " which isn't a key of the sweep"
                )


def record(sweep: Sweep, points: Sequence[Point]) -> None:
    """Writes the points to sweep.json. Call it before their runs start."""
    content = {"of": _sweep_record(sweep), "points": list(points)}
    with writing_whole(sweep.output / FILE) as file:
        file.write(json.dumps(content, indent=1) + "\n")


def add(sweep: Sweep, points: Sequence[Point]) -> None:
    """Adds points to points.jsonl, without writing the others again.

    Call it before their runs start.
    """
    with open_to_append(sweep.output / ADDED) as file:
        # A sweep that was killed may have left half a line at the end.
        descriptor = file.fileno()
        start = max(0, os.fstat(descriptor).st_size - _LONGEST_LINE)
        end_of_line = os.pread(descriptor, _LONGEST_LINE, start).rfind(b"\n")
        os.ftruncate(descriptor, start + end_of_line + 1)
        file.write("".join(f"{json.dumps(point)}\n" for point in points))
        file.flush()
        os.fsync(descriptor)


def _sweep_record(sweep: Sweep) -> dict[str, Any]:
    """Returns the settings of a sweep that may not change as long as it continues."""
    record: dict[str, Any] = {
        "command": [sweep.program, *sweep.words],
        "method": sweep.method,
        "seed": sweep.seed,
    }
    # A grid may get more values.
    if sweep.method != "grid":
        record["keys"] = {
            key: distribution.choices or [distribution.low, distribution.high, distribution.log]
            for key, distribution in sweep.keys.items()
        }
    return record


def outcome(sweep: Sweep, name: str, metric: str) -> Outcome | None:
    """Returns the outcome of a run, or None if it has no result yet.

    Raises:
        InputError: its result.json isn't one that a run writes.
    """
    file = sweep.output / name / RESULT
    if not file.exists():
        return None
    result = read_result(file.parent, _REPEAT)
    # "ema/acc1" is the accuracy of the averaged weights.
    split, _, key = metric.rpartition("/")
    with reading(file, "a run's result", _REPEAT):
        evaluation = result.get(split, {}) if split else result
        best = evaluation.get("best", {})
        where = f"{split}.best." if split else "best."
        check_form(best, {key: NUMBER}, (key,), where)
        return Outcome(float(best[key]), best["epoch"])


def last_line(file: Path) -> str:
    """Returns the last line that a run printed, for use in a message."""
    try:
        with open_file(file) as text:
            text.seek(max(0, os.fstat(text.fileno()).st_size - 2000))
            lines = text.read(2000).decode(errors="replace").split("\n")
    except (OSError, Unreadable) as error:
        return f"its output can't be read ({error})"
    for line in reversed(lines):
        if line.strip():
            return printable(line, 300)
    return "it printed no output"


class Row(NamedTuple):
    """A run of a sweep.

    Attributes:
        name: that of its folder.
        point: its values.
        seed: its SEED; None: the configuration's.
        outcome: None if it has no result.
        status: exit status of a run that ended without a result; None: it hasn't run.
    """

    name: str
    point: Point
    seed: int | None
    outcome: Outcome | None
    status: int | None

    def status_text(self) -> str:
        """Returns how the run ended, in words."""
        if self.outcome:
            return "done"
        return "not run" if self.status is None else how_it_ended(self.status)


def rows(
    sweep: Sweep,
    points: Sequence[Point],
    metric: str,
    first: int = 0,
    tell: Callable[[], Any] = int,
) -> list[Row]:
    """Returns a row for each run of the points; reads the results that exist.

    Args:
        first: the index of the first point.
        tell: is called after each point.
    """
    runs = []
    for index, point in enumerate(points, first):
        for name, seed in sweep.names(index).items():
            runs.append(Row(name, point, seed, outcome(sweep, name, metric), None))
        tell()
    return runs


def mean(runs: Sequence[Row]) -> float | None:
    """Returns the mean outcome of runs, or None if none has one."""
    values = [row.outcome.value for row in runs if row.outcome]
    return statistics.mean(values) if values else None


def by_point(runs: Sequence[Row], sweep: Sweep) -> list[Sequence[Row]]:
    """Returns the runs of each point."""
    each = max(1, len(sweep.seeds))
    return [runs[first : first + each] for first in range(0, len(runs), each)]


def table(runs: Sequence[Row], sweep: Sweep, metric: str) -> str:
    """Returns a table for a console.

    It has a line for each point, with the mean and standard deviation over its seeds.
    """
    lines = [["run", *sweep.keys, metric, "epoch", "status"]]
    for point_runs in by_point(runs, sweep):
        values = [row.outcome.value for row in point_runs if row.outcome]
        value = f"{statistics.mean(values):.4f}" if values else ""
        if len(values) > 1:
            value += f" ± {statistics.stdev(values):.4f}"
        epochs = ",".join(str(row.outcome.epoch) for row in point_runs if row.outcome)
        statuses = [
            f"{row.name} {row.status_text()}" if sweep.seeds else row.status_text()
            for row in point_runs
            if not row.outcome
        ]
        name = point_runs[0].name.partition("_")[0]
        words = [printable(word, 40) for word in point_runs[0].point.values()]
        lines.append([name, *words, value, epochs, "; ".join(statuses) or "done"])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def best(runs: Sequence[Row], sweep: Sweep, metric: str) -> Sequence[Row]:
    """Returns the runs of the point with the best mean, or none if no run has an outcome."""
    scored = []
    for point_runs in by_point(runs, sweep):
        value = mean(point_runs)
        if value is not None:
            scored.append((value, point_runs))
    if not scored:
        return ()
    choose = min if metric.endswith("loss") else max
    return choose(scored, key=lambda pair: pair[0])[1]


def write(runs: Sequence[Row], sweep: Sweep, metric: str) -> None:
    """Writes sweep.csv, a line for each run, and sweep.png, a plot of the metric for each key."""
    with writing_whole(sweep.output / "sweep.csv") as file:
        file.write(csv_line("run", *sweep.keys, "SEED", metric, "epoch", "status"))
        for row in runs:
            value, epoch = row.outcome or (None, None)
            cells = [row.name, *row.point.values(), row.seed, value, epoch, row.status_text()]
            file.write(csv_line(*cells))
    done = [row for row in runs if row.outcome]
    if done:
        _plot(done, sweep, metric)


def _plot(done: Sequence[Row], sweep: Sweep, metric: str) -> None:
    """Writes sweep.png, of runs that have an outcome."""
    # Matplotlib's import takes a third of a second.
    from training.pages.names import shorten
    from training.pages.plotting import figure, figure_png, set_log_scale

    drawn = figure(4 * len(sweep.keys), 3.2)
    axes = drawn.subplots(1, len(sweep.keys), sharey=True, squeeze=False)
    values = [row.outcome.value for row in done if row.outcome]
    for axis, (key, distribution) in zip(axes[0], sweep.keys.items(), strict=True):
        words = [row.point[key] for row in done]
        numbers = _numbers(words)
        if numbers:
            axis.plot(numbers, values, "o")
            wide = max(numbers) >= 10 * min(numbers)
            if min(numbers) > 0 and (distribution.log or wide):
                set_log_scale(axis)
        else:
            places = {word: place for place, word in enumerate(dict.fromkeys(words))}
            axis.plot([places[word] for word in words], values, "o")
            # Of very many words only some have a label: labels would cover each other.
            shown = list(places)[:: -(-len(places) // _MOST_LABELS)]
            axis.set_xticks([places[word] for word in shown], [shorten(word, 12) for word in shown])
        axis.set_xlabel(key)
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel(metric)
    with writing_whole(sweep.output / "sweep.png", "wb") as file:
        file.write(figure_png(drawn, dpi=120))


def _numbers(words: Sequence[str]) -> list[float]:
    """Returns words as numbers, or none if one of them isn't a number that can be drawn."""
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        return []
    return numbers if all(map(is_number, numbers)) else []
