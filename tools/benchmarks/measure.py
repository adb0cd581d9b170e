"""Functions that all benchmarks share. They make runs in turn, compute medians and ratios, print
the table, write the JSON file, and start programs as processes.

Figures are {kind: {what: values}}. A kind is a side of the comparison, such as "ours" or "timm".
Each of its runs adds a value or more to each list.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from config import get_config, named_keys
from errors import InputError, RunError
from launch.startup import end_with_parent

ROOT = Path(__file__).resolve().parent.parent.parent
HERE = Path(__file__).resolve().parent
# of a whole process, in MB
MEMORY = "peak memory"
# The variables as the user set them: Paddle's import may set OMP_NUM_THREADS to 1.
ENVIRONMENT = dict(os.environ)

Figures = dict[str, dict[str, list[float]]]
# A function that makes one run, and returns {what: one value or more}.
Run = Callable[[], dict[str, list[float]]]


@dataclass
class Ratio:
    """A ratio between two kinds: ``factor`` times the values of ``of``, over the values of
    ``over``.

    Args:
        what: the figure that is compared.
        of, over: the kinds.
        name: the name in the table; "": ``what``.
        base: the figure of ``over``; "": ``what``, too.
    """

    what: str
    of: str
    over: str
    factor: float = 1.0
    name: str = ""
    base: str = ""

    def values(self, figures: Figures) -> list[float]:
        """Returns the ratios, run by run."""
        values = figures[self.of][self.what]
        base_values = figures[self.over][self.base or self.what]
        return [self.factor * value / base for value, base in zip(values, base_values, strict=True)]


@dataclass
class Benchmark:
    """A benchmark.

    Args:
        title: describes the runs, for the head of the table.
        kinds: the function that makes one run, for each side of the comparison.
        units: the units of the figures; that of "" is for all that aren't named.
        compared: the ratios at the end of the table.
        peers: the versions of the other side's packages.
        rows: returns the lines of the table for a report; None: ``rows_of_all``.
        more: returns further entries of the report for the figures.
    """

    title: str
    kinds: dict[str, Run]
    units: dict[str, str]
    compared: Sequence[Ratio] = ()
    peers: dict[str, str] = field(default_factory=dict)
    rows: Callable[[dict[str, Any]], list[str]] | None = None
    more: Callable[[Figures], dict[str, Any]] | None = None

    def unit(self, what: str) -> str:
        return self.units.get(what, self.units.get("", ""))


def alternate(kinds: dict[str, Run], repeats: int) -> Figures:
    """Returns the figures of ``repeats`` runs of each kind. The kinds take turns, so that a change
    of the machine's speed affects all of them.
    """
    figures: Figures = {kind: {} for kind in kinds}
    for turn in range(repeats):
        for kind, run in kinds.items():
            if sys.stderr.isatty():
                print(f"run {turn + 1} of {repeats}: {kind}", file=sys.stderr, flush=True)
            for what, values in run().items():
                figures[kind].setdefault(what, []).extend(values)
    return figures


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Returns ``median``, ``min``, ``max`` and the ``values`` themselves."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "values": list(values),
    }


def machine() -> dict[str, Any]:
    """Returns ``cpu`` (the model), ``cores`` (that this process may use) and ``load`` (the last
    minute's average).
    """
    cpu = platform.processor() or platform.machine()
    # Linux has this file, unless a sandbox hides it.
    description = Path("/proc/cpuinfo")
    if description.is_file():
        model = re.search(r"model name\s*: (.*)", description.read_text())
        if model:
            cpu = model[1]
    return {"cpu": cpu, "cores": len(os.sched_getaffinity(0)), "load": round(os.getloadavg()[0], 2)}


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that our side computes with."""
    found = {"python": platform.python_version()}
    for package in ("paddlepaddle", "paddlepaddle-gpu", "numpy", "pillow"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # one of the two Paddles
            continue
    return found


def measure(benchmark: Benchmark, arguments: argparse.Namespace) -> None:
    """Makes the runs, prints the table and writes the file of --json.

    Raises:
        InputError: -repeats is below 1.
    """
    positive(arguments, "repeats")
    report = {
        "benchmark": arguments.what,
        "command": sys.argv[1:],
        "title": benchmark.title,
        "machine": machine(),
    }
    report |= {"versions": versions(), "peer_versions": benchmark.peers}
    figures = alternate(benchmark.kinds, arguments.repeats)
    report["figures"] = {
        kind: {
            what: {"unit": benchmark.unit(what), **summary(values)}
            for what, values in found.items()
        }
        for kind, found in figures.items()
    }
    report["ratios"] = [
        {
            "what": ratio.name or ratio.what,
            "of": ratio.of,
            "over": ratio.over,
            **summary(ratio.values(figures)),
        }
        for ratio in benchmark.compared
    ]
    if benchmark.more:
        report |= benchmark.more(figures)
    print("\n".join([*head(report), *(benchmark.rows or rows_of_all)(report)]))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def head(report: dict[str, Any]) -> list[str]:
    """Returns the lines that say what was run where."""
    on = report["machine"]
    known = report["versions"] | {
        f"their {name}": version for name, version in report["peer_versions"].items()
    }
    return [
        f"{report['benchmark']}: {report['title']}",
        f"{on['cpu']}, {on['cores']} cores, load {on['load']} at the start",
        ", ".join(f"{name} {version}" for name, version in known.items()),
        "",
    ]


def rows_of_all(report: dict[str, Any]) -> list[str]:
    """Returns a table's lines: every figure and ratio that ``measure`` puts into the file of
    --json.
    """
    rows = [("", "", "median", "min", "max", "of")]
    for kind, found in report["figures"].items():
        rows += [
            _row(kind, f"{what} ({s['unit']})" if s["unit"] else what, s)
            for what, s in found.items()
        ]
    rows += [_row(f"{s['of']} / {s['over']}", s["what"], s) for s in report["ratios"]]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        left = [cell.ljust(width) for cell, width in zip(row[:2], widths, strict=False)]
        right = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
        lines.append("  ".join(left + right).rstrip())
    return lines


def _row(kind: str, what: str, found: dict[str, Any]) -> tuple[str, ...]:
    return (
        kind,
        what,
        *(format_number(found[key]) for key in ("median", "min", "max")),
        str(len(found["values"])),
    )


def format_number(value: float) -> str:
    """Returns a number with about four digits and no exponent."""
    size = abs(value)
    if size >= 1000:
        digits = 0
    elif size >= 100:
        digits = 1
    elif size >= 10:
        digits = 2
    else:
        digits = 3
    return f"{value:.{digits}f}"


# ---------------------------------------------------------------- programs


def words(options: dict[str, Any]) -> list[str]:
    """Returns ``options`` as the words of ``-o``."""
    return [str(word) for pair in options.items() for word in pair]


def option_words(
    arguments: argparse.Namespace, fixed: dict[str, Any], defaults: dict[str, Any] | None = None
) -> list[str]:
    """Returns the words of ``-o`` for a run: ``defaults``, then the user's, then ``fixed``. So an
    error in them is raised before anything is measured.

    Raises:
        InputError: -o names a key that the benchmark sets itself, or one that ``get_config``
            refuses.
    """
    if taken := (fixed.keys() | {"OUTPUT"}) & named_keys(arguments.o):
        raise InputError(
            f"-o {' '.join(sorted(taken))}: this benchmark sets it itself; leave it out"
        )
    options = [*words(defaults or {}), *arguments.o, *words(fixed)]
    get_config(arguments.cfg, options)
    return options


def positive(arguments: argparse.Namespace, *names: str) -> None:
    """Raises InputError for a flag below 1."""
    for name in names:
        value = getattr(arguments, name)
        values = value if isinstance(value, list) else [value]
        if any(value is not None and value < 1 for value in values):
            raise InputError(f"-{name} {' '.join(map(str, values))}: expected at least 1")


def environment(threads: int | None) -> dict[str, str]:
    """Returns the user's environment with OMP_NUM_THREADS set to ``threads``, or unset (None)."""
    unset = {key: value for key, value in ENVIRONMENT.items() if key != "OMP_NUM_THREADS"}
    return unset if threads is None else unset | {"OMP_NUM_THREADS": str(threads)}


def run(command: Sequence[str | Path], threads: int | None, **variables: str) -> str:
    """Runs a program to its end and returns what it printed.

    Raises:
        InputError: it failed with status 2. The message is its last line.
        RunError: it failed with another status.
    """
    environ = environment(threads) | variables
    done = subprocess.run(
        [str(word) for word in command],
        env=environ,
        capture_output=True,
        text=True,
        preexec_fn=end_with_parent,
    )
    if done.returncode:
        last_line = (done.stderr.strip() or "nothing on stderr").splitlines()[-1]
        if done.returncode == 2:
            raise InputError(last_line.removeprefix("error: "))
        print(done.stderr, file=sys.stderr)
        raise RunError(f"{Path(command[1]).name} ended with status {done.returncode}: {last_line}")
    return done.stdout


def ask(
    script: str, request: dict[str, Any], threads: int | None, python: str = sys.executable
) -> Any:
    """Runs a script of this folder in a process of its own, and returns its answer.

    The request is its argument, and the answer is its last line that is JSON: libraries may print
    other lines, even at the end of the process.

    Raises:
        RunError: it gave no answer.
    """
    printed = run([python, str(HERE / script), json.dumps(request)], threads)
    for line in reversed(printed.splitlines()):
        with contextlib.suppress(ValueError):
            return json.loads(line)
    raise RunError(f"{script} gave no answer; its output ends in {printed[-200:]!r}")


def train_records(folder: Path) -> list[dict[str, Any]]:
    """Returns the training reports of the run in ``folder``."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [record for record in records if record["split"] == "train"]


def timm_versions(python: str) -> dict[str, str]:
    """Returns the versions of torch and timm that the interpreter ``python`` has.

    Raises:
        InputError: it isn't there, or they can't be imported.
    """
    try:
        return ask("timm_peer.py", {"measure": "versions"}, None, python)
    except (RunError, OSError, ValueError, IndexError) as error:
        raise InputError(
            f"--against timm: {python} gave no torch and timm ({error});"
            " name an interpreter that has them with --timm_python PATH"
            " (tools/check_parity.py -h says how to make one)"
        ) from None


def each(what: str, ours: Sequence[str], theirs: Sequence[str]) -> list[Ratio]:
    """Returns the ratios of each of our kinds over each of theirs."""
    return [Ratio(what, of, over) for of in ours for over in theirs]
