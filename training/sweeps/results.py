"""A sweep's folder, and what its runs gave: sweep.json, a folder for each run, sweep.csv,
sweep.png.

Optuna's points are kept in points.jsonl, a line each, which is added to while the sweep runs.
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
LEFT = 60.0  # seconds that runs have to save which a killed sweep left
_LONGEST = 64 << 20  # bytes of sweep.json, and of points.jsonl
_MOST_LABELS = 40  # below an axis of sweep.png
_LONGEST_LINE = 2 << 20  # bytes of a point: a sweep's file, which has its words, has 1 MiB at most
_WRITTEN = r"[0-9]{4,}(_seed[0-9]+)?(\.txt)?|sweep\.(json|csv|png)|points\.jsonl|\.lock"
_ANEW = "; remove it to begin anew"
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
    """What a run gave at its best evaluation."""

    value: float
    epoch: int


def lock(output: Path) -> int:
    """Locks the folder, which it makes, and returns the lock's descriptor; runs that keep it open
    hold it, too.

    Raises:
        InputError: another sweep writes there, the folder holds something else, or nothing can be
            written there.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        if not (output / FILE).exists() and (
            other := [name for name in os.listdir(output) if name != LOCK]
        ):
            raise InputError(
                f"{output} holds {printable(other[0])} and no sweep; give another output"
            )
        refuse_links(output, _WRITTEN)
        descriptor = open_lock(output / LOCK, rb"[0-9]+")
    except OSError as error:
        where = error.filename or output
        raise InputError(
            f"{where}: can't be a sweep's ({error.strerror}); give another output"
        ) from None
    until = time.monotonic() + LEFT
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            owner = os.pread(descriptor, 20, 0).decode(errors="replace")
            owner = owner if owner.isascii() and owner.isdigit() else ""
            if time.monotonic() > until or os.path.exists(f"/proc/{owner or 'self'}"):
                found = f"another sweep writes there (process {owner or 'that has just begun'})"
                raise InputError(
                    f"{output}: {found}; wait for it, or give another output"
                ) from None
            time.sleep(0.2)
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return descriptor


def read_points(sweep: Sweep, planned: Sequence[Point]) -> list[Point]:
    """Returns the points that the folder's sweep has begun with.

    Args:
        planned: what the file means now; none, of Optuna's.

    Raises:
        InputError: the folder's sweep is of another file.
    """
    file = sweep.output / FILE
    if not file.exists():
        return []
    with reading(file, "a sweep's points", _ANEW):
        found = parsed_json(whole_file(file, _LONGEST))
        check_form(found, _FORM, tuple(_FORM))
        points = found["points"]
        told = found["of"]
    changed = [key for key, value in _sweep_record(sweep).items() if told.get(key) != value]
    if changed or (planned and points != list(planned[: len(points)])):
        what = changed[0] if changed else "keys"
        raise InputError(
            f"{file} is of a sweep with other {what}; give another output, or put the file back as it was"
        )
    if not planned:  # Optuna's, which nothing but these files tell
        _check_points(sweep, points, file)
        points += _added_points(sweep, len(points))
    return points


def _added_points(sweep: Sweep, known: int) -> list[Point]:
    file = sweep.output / ADDED
    if not file.exists():
        return []
    with reading(file, "a sweep's points", _ANEW):
        # What follows the last end of a line is half a point, which no run has begun with.
        lines = whole_file(file, _LONGEST).split(b"\n")[:-1]
        if known + len(lines) > MOST:
            raise Unreadable(
                f"it has {len(lines)} points, and {FILE} {known}: more than the {MOST} that a sweep has"
            )
        points = [parsed_json(line) for line in lines]
    _check_points(sweep, points, file)
    return points


def _check_points(sweep: Sweep, points: list[Point], file: Path) -> None:
    """Raises InputError unless the words are such as Optuna may have drawn."""
    form = {
        key: Rule("a value that the sweep's file gives", drawn.holds)
        for key, drawn in sweep.keys.items()
    }
    with reading(file, "a sweep's points", _ANEW):
        for index, point in enumerate(points):
            check_form(point, form, tuple(form), f"points[{index}].")
            if strange := sorted(point.keys() - form.keys()):
                found = f"its points[{index}] has {printable(strange[0], 60)}"
                raise Unreadable(f"{found}, which is no key of the sweep")


def record(sweep: Sweep, points: Sequence[Point]) -> None:
    """Keeps the points, before their runs start."""
    with writing_whole(sweep.output / FILE) as file:
        file.write(
            json.dumps({"of": _sweep_record(sweep), "points": list(points)}, indent=1) + "\n"
        )


def add(sweep: Sweep, points: Sequence[Point]) -> None:
    """Keeps points that come after those that are kept, before their runs start; the others aren't
    written again.
    """
    with open_to_append(sweep.output / ADDED) as file:
        # A sweep that was killed may have left half a line.
        size = os.fstat(file.fileno()).st_size
        first = max(0, size - _LONGEST_LINE)
        os.ftruncate(
            file.fileno(), first + os.pread(file.fileno(), _LONGEST_LINE, first).rfind(b"\n") + 1
        )
        file.write("".join(f"{json.dumps(point)}\n" for point in points))
        file.flush()
        os.fsync(file.fileno())


def _sweep_record(sweep: Sweep) -> dict[str, Any]:
    keys = {
        key: drawn.choices or [drawn.low, drawn.high, drawn.log]
        for key, drawn in sweep.keys.items()
    }
    own = {"keys": keys} if sweep.method != "grid" else {}  # a grid may become longer
    return {
        "command": [sweep.program, *sweep.words],
        "method": sweep.method,
        "seed": sweep.seed,
        **own,
    }


def outcome(sweep: Sweep, name: str, metric: str) -> Outcome | None:
    """Returns what a run gave; None: it isn't done.

    Raises:
        InputError: its result.json isn't a run's.
    """
    file = sweep.output / name / RESULT
    if not file.exists():
        return None
    result = read_result(file.parent, _REPEAT)
    split, _, figure = metric.rpartition("/")
    with reading(file, "a run's result", _REPEAT):
        found = result.get(split, {}) if split else result
        best = found.get("best", {})
        where = f"{split}.best." if split else "best."
        check_form(best, {figure: NUMBER}, (figure,), where)
        return Outcome(float(best[figure]), best["epoch"])


def last_line(file: Path) -> str:
    """Returns the last line of what a run printed, as a line may show it."""
    try:
        with open_file(file) as text:
            text.seek(max(0, os.fstat(text.fileno()).st_size - 2000))
            lines = text.read(2000).decode(errors="replace").split("\n")
    except (OSError, Unreadable) as error:
        return f"what it printed can't be read ({error})"
    return next(
        (printable(line, 300) for line in reversed(lines) if line.strip()), "it printed nothing"
    )


class Row(NamedTuple):
    """A run of a point; no outcome: what its status was, if it ended."""

    name: str
    point: Point
    seed: int | None
    outcome: Outcome | None
    status: int | None

    def status_text(self) -> str:
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
    """Returns a row for each run of the points, whose results are read.

    Args:
        first: the first point's number.
        tell: is called after each point.
    """
    found = []
    for index, point in enumerate(points, first):
        for name, seed in sweep.names(index).items():
            found.append(Row(name, point, seed, outcome(sweep, name, metric), None))
        tell()
    return found


def mean(found: Sequence[Row]) -> float | None:
    """Returns the mean of the runs of a point that are done; None: none is."""
    values = [row.outcome.value for row in found if row.outcome]
    return statistics.mean(values) if values else None


def by_point(found: Sequence[Row], sweep: Sweep) -> list[Sequence[Row]]:
    """Returns the rows of each point."""
    each = max(1, len(sweep.seeds))
    return [found[first : first + each] for first in range(0, len(found), each)]


def table(found: Sequence[Row], sweep: Sweep, metric: str) -> str:
    """Returns the table of a console: a line for each point, with mean and standard deviation over
    its seeds.
    """
    lines = [["run", *sweep.keys, metric, "epoch", "status"]]
    for runs in by_point(found, sweep):
        values = [row.outcome.value for row in runs if row.outcome]
        value = f"{statistics.mean(values):.4f}" if values else ""
        value += f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
        epochs = ",".join(str(row.outcome.epoch) for row in runs if row.outcome)
        odd = [
            f"{row.name} {row.status_text()}" if sweep.seeds else row.status_text()
            for row in runs
            if not row.outcome
        ]
        name = runs[0].name.partition("_")[0]
        words = [printable(word, 40) for word in runs[0].point.values()]
        lines.append([name, *words, value, epochs, "; ".join(odd) or "done"])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def best(found: Sequence[Row], sweep: Sweep, metric: str) -> Sequence[Row]:
    """Returns the runs of the best point; none, if no run is done."""
    done = [(value, runs) for runs in by_point(found, sweep) if (value := mean(runs)) is not None]
    choose = min if metric.endswith("loss") else max
    return choose(done, key=lambda pair: pair[0])[1] if done else ()


def write(found: Sequence[Row], sweep: Sweep, metric: str) -> None:
    """Writes sweep.csv, a line for each run, and sweep.png, which draws the metric over each key."""
    with writing_whole(sweep.output / "sweep.csv") as file:
        file.write(csv_line("run", *sweep.keys, "SEED", metric, "epoch", "status"))
        for row in found:
            outcome = row.outcome or (None, None)
            file.write(
                csv_line(row.name, *row.point.values(), row.seed, *outcome, row.status_text())
            )
    done = [row for row in found if row.outcome]
    if not done:
        return
    # takes a third of a second to import
    from training.pages.plotting import figure, figure_png, set_log_scale, shorten

    drawn = figure(4 * len(sweep.keys), 3.2)
    axes = drawn.subplots(1, len(sweep.keys), sharey=True, squeeze=False)
    values = [row.outcome.value for row in done if row.outcome]
    for axis, (key, own) in zip(axes[0], sweep.keys.items(), strict=True):
        words = [row.point[key] for row in done]
        numbers = _numbers(words)
        places = {word: place for place, word in enumerate(dict.fromkeys(words))}
        axis.plot(numbers or [places[word] for word in words], values, "o")
        if not numbers:
            # Where labels would cover each other, some stand for all.
            shown = list(places)[:: -(-len(places) // _MOST_LABELS)]
            axis.set_xticks([places[word] for word in shown], [shorten(word, 12) for word in shown])
        if numbers and min(numbers) > 0 and (own.log or max(numbers) >= 10 * min(numbers)):
            set_log_scale(axis)
        axis.set_xlabel(key)
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel(metric)
    with writing_whole(sweep.output / "sweep.png", "wb") as file:
        file.write(figure_png(drawn, dpi=120))


def _numbers(words: Sequence[str]) -> list[float]:
    """The numbers that the words are; none, if one isn't, or can't be drawn."""
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        return []
    return numbers if all(map(is_number, numbers)) else []
