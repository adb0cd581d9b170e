"""Trains once for each combination of keys and values in a YAML file, in parallel on several devices.

    python tools/sweep.py FILE [-n]

For example, a FILE with four runs:

    command: main_single_gpu.py -cfg=vit_digits -o TRAIN.NUM_EPOCHS 20
    keys:
      TRAIN.BASE_LR: [3e-4, 1e-3, 3e-3, 1e-2]

docs/guides/sweep.md lists its other keys: random draws, Optuna, seeds, parallel runs. The
configurations of all points are checked before the first run starts. The same command resumes the
sweep: finished runs aren't repeated, and killed or failed runs resume from their checkpoints. The
sweep's folder contains sweep.csv, sweep.png, and for each run a folder and a file of its output. -n
(--dry-run) prints the commands and runs none.

Exit status: 0 if all runs are done; 1 if one failed; 2 for a wrong file; 130 or 143 after SIGINT or
SIGTERM. The runs get this signal, too, and save.
"""

import functools
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run by its path, Python would look in tools/ alone

import launch.startup  # noqa: E402, F401  (signals and streams)
from errors import InputError, RunError, remedy, reporting  # noqa: E402

# isort: split
from config import FromFile  # noqa: E402
from launch import side_by_side  # noqa: E402
from launch.side_by_side import Command  # noqa: E402
from settings.parser import Parser  # noqa: E402
from training.sweeps import results  # noqa: E402
from training.sweeps.points import (  # noqa: E402
    Point,
    Suggestions,
    Sweep,
    check,
    edges,
    plan_points,
    read_sweep,
)

# The seconds between two lines of Progress.
_INTERVAL = 2.0


class Progress:
    """Prints on stderr, every few seconds, how much of a slow piece of work is done."""

    def __init__(self, total: int, what: str) -> None:
        self.done = 0
        self.total = total
        self.what = what
        self.printed = time.monotonic()

    def __call__(self) -> None:
        """Counts one more piece as done."""
        self.done += 1
        if time.monotonic() > self.printed + _INTERVAL:
            self.printed = time.monotonic()
            print(f"{self.done:,} of {self.total:,} {self.what}", file=sys.stderr, flush=True)


class Session:
    """The runs of a sweep: those that earlier calls of the tool have done, and those that this call
    runs.

    Each result is read once, and each run's result when the run ends. So the time for a point
    doesn't grow with the number of points before it.

    Args:
        plan: all points of the sweep; none with Optuna.
        points: the points that earlier calls have begun.
        metric: the metric by which runs are compared.
        environments: the environment variables of each command that runs at the same time.
    """

    def __init__(
        self,
        sweep: Sweep,
        plan: list[Point],
        points: list[Point],
        metric: str,
        environments: list[dict[str, str]],
    ) -> None:
        self.sweep = sweep
        self.plan = plan
        self.metric = metric
        self.environments = environments
        self.points: list[Point] = []
        self.rows: list[results.Row] = []
        self.row_of: dict[str, int] = {}
        # the file of the command, for the checks of points
        self.read: dict[Any, FromFile] = {}
        # how many of the first rows have been started
        self.started = 0
        # The scores of the points, the higher the better; None: all of its runs failed.
        self.scores: list[float | None] = []
        self.add(points)

    def add(self, points: Sequence[Point]) -> None:
        """Adds the next points, and the results that earlier calls of the tool have of them."""
        progress = Progress(len(points), "results are read")
        rows = results.rows(self.sweep, points, self.metric, len(self.points), progress)
        self.points += points
        self.row_of.update({row.name: place for place, row in enumerate(rows, len(self.rows))})
        self.rows += rows

    def commands(self) -> list[Command]:
        """Returns the commands of the runs that aren't done, each once."""
        todo = [row for row in self.rows[self.started :] if not row.outcome]
        self.started = len(self.rows)
        return [
            Command(
                row.name,
                self.sweep.command(row.name, row.point, row.seed),
                self.sweep.output / f"{row.name}.txt",
            )
            for row in todo
        ]

    def next_points(self) -> list[Point]:
        """Returns the next points: all that are left, or as many of Optuna's as run at the same
        time.
        """
        if self.sweep.method != "optuna":
            return self.plan[len(self.points) :]
        sign = -1 if self.metric.endswith("loss") else 1
        first = len(self.scores) * max(1, len(self.sweep.seeds))
        for runs in results.by_point(self.rows[first:], self.sweep):
            mean = results.mean(runs)
            self.scores.append(None if mean is None else sign * mean)
        count = min(len(self.environments), self.sweep.runs - len(self.points))
        return self.suggestions.next(self.points, self.scores, count)

    @functools.cached_property
    def suggestions(self) -> Suggestions:
        return Suggestions(self.sweep)

    def print_result(self, name: str, status: int) -> None:
        """Stores a run's result and prints it."""
        place = self.row_of[name]
        outcome = results.outcome(self.sweep, name, self.metric)
        self.rows[place] = row = self.rows[place]._replace(outcome=outcome, status=status)
        values = " ".join(f"{key}={value}" for key, value in row.point.items())
        if row.outcome:
            text = f"{self.metric}: {row.outcome.value:.4f}"
        else:
            text = f"{row.status_text()}: {results.last_line(self.sweep.output / f'{name}.txt')}"
        print(f"{name} {values}: {text}", flush=True)

    def run(self, lock: int) -> int:
        """Runs the remaining points; returns the signal that stopped it, or 0.

        Args:
            lock: a file descriptor that the runs inherit: it locks the sweep until they end.
        """
        optuna = self.sweep.method == "optuna"
        if optuna and not self.points:
            results.record(self.sweep, [])
        while True:
            if commands := self.commands():
                if stop := side_by_side.run(commands, self.environments, self.print_result, [lock]):
                    return stop
            elif new := self.next_points():
                if optuna:
                    # The points of other methods were checked at the start.
                    check(self.sweep, new, read=self.read)
                    results.add(self.sweep, new)
                else:
                    results.record(self.sweep, [*self.points, *new])
                self.add(new)
            else:
                return 0


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("file", metavar="FILE", type=Path, help="a YAML file: see above")
    parser.add_argument(
        "-n", "-dry-run", "--dry-run", dest="dry", action="store_true", help="print the commands"
    )
    arguments = parser.parse_args()
    sweep = read_sweep(arguments.file)
    plan = [] if sweep.method == "optuna" else plan_points(sweep)
    tried = plan or edges(sweep)
    metric = check(sweep, tried, Progress(len(tried), "configurations are checked"))
    environments = side_by_side.environments(sweep.processes, sweep.side_by_side)
    if not environments:
        raise InputError(
            f"{arguments.file}: devices is {sweep.processes}, but fewer GPUs are visible"
        )
    lock = None if arguments.dry else results.lock(sweep.output)
    session = Session(sweep, plan, results.read_points(sweep, plan), metric, environments)
    if lock is None:
        session.add(session.next_points())
        variables = [f"{name}={value}" for name, value in environments[0].items()]
        for command in session.commands():
            print(shlex.join([*variables, *command.words]))
        return 0
    done = sum(row.outcome is not None for row in session.rows)
    shared = ", ".join(f"{name}={value}" for name, value in environments[0].items())
    print(
        f"{sweep.output}: {done} runs are done; {len(environments)} side by side ({shared} ...)",
        flush=True,
    )
    try:
        stop = session.run(lock)
        rows = session.rows
        results.write(rows, sweep, metric)
    except OSError as error:
        # The disk is full, for example. The running commands get SIGTERM, and save.
        problem = f"{error.filename or sweep.output} can't be written ({error.strerror})"
        raise RunError(f"{problem}; {remedy(error)}, then the same command continues") from None
    print(results.table(rows, sweep, metric))
    if best := results.best(rows, sweep, metric):
        print(f"best {metric}: {best[0].name}; {sweep.output}/sweep.csv, sweep.png")
    if stop:
        print(
            f"stopped by {signal.Signals(stop).name}; the same command continues",
            file=sys.stderr,
            flush=True,
        )
        return 128 + stop
    return int(any(row.outcome is None for row in rows))


if __name__ == "__main__":
    with reporting():
        sys.exit(main())
