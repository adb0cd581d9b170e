"""What every benchmark shares: runs in turn, medians and ratios, the table, the JSON file, programs
as processes.

Figures are {kind: {what: values}}: a kind is a side of the comparison, and each of its runs adds to
each list.
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
MEMORY = "peak memory"  # of a whole process, in MB
ENVIRONMENT = dict(os.environ)  # as the user set it: Paddle's import would set OMP_NUM_THREADS to 1

Figures = dict[str, dict[str, list[float]]]
Run = Callable[[], dict[str, list[float]]]  # makes one run: {what: one value or more}


@dataclass
class Ratio:
    """What is compared: ``factor`` times the values of ``what`` by the kind ``of``, over those by
    ``over``.
    """

    what: str
    of: str
    over: str
    factor: float = 1.0
    name: str = ""  # instead of ``what``
    base: str = ""  # what of ``over``, if not ``what``

    def values(self, figures: Figures) -> list[float]:
        """Returns the ratios, run by run."""
        pairs = zip(
            figures[self.of][self.what], figures[self.over][self.base or self.what], strict=True
        )
        return [self.factor * one / other for one, other in pairs]


@dataclass
class Benchmark:
    """What one benchmark measures.

    Args:
        title: what was run, for the table's head.
        kinds: what makes one run of each side.
        units: of what was measured, by ``what``; "" stands for all others.
        compared: the ratios that the table ends with.
        peers: versions of the other side, by package.
        rows: makes the table's lines of the report, if not ``rows_of_all``.
        more: makes what else the report holds, of the figures.
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
    """Returns what ``repeats`` runs of each kind gave. The kinds take turns, so that a machine
    whose speed drifts drifts for all of them.
    """
    found: Figures = {kind: {} for kind in kinds}
    for turn in range(repeats):
        for kind, run in kinds.items():
            if sys.stderr.isatty():
                print(f"run {turn + 1} of {repeats}: {kind}", file=sys.stderr, flush=True)
            for what, values in run().items():
                found[kind].setdefault(what, []).extend(values)
    return found


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
    described = Path("/proc/cpuinfo")  # Linux has it, where a sandbox hides nothing
    model = (
        re.search(r"model name\s*: (.*)", described.read_text()) if described.is_file() else None
    )
    cpu = model[1] if model else platform.processor() or platform.machine()
    return {"cpu": cpu, "cores": len(os.sched_getaffinity(0)), "load": round(os.getloadavg()[0], 2)}


def versions() -> dict[str, str]:
    """Returns the versions of Python and of what this side stands on."""
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
    """Returns the lines that tell what was run where."""
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
    return f"{value:.{0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 10 else 3}f}"


# ---------------------------------------------------------------- programs


def words(options: dict[str, Any]) -> list[str]:
    """Returns ``options`` as the words of ``-o``."""
    return [str(word) for pair in options.items() for word in pair]


def option_words(
    arguments: argparse.Namespace, fixed: dict[str, Any], defaults: dict[str, Any] | None = None
) -> list[str]:
    """Returns the words of ``-o`` for a run: ``defaults``, the user's own, then what is ``fixed``;
    an error in them is told before anything is measured.

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
        found = getattr(arguments, name)
        values = found if isinstance(found, list) else [found]
        if any(value is not None and value < 1 for value in values):
            raise InputError(f"-{name} {' '.join(map(str, values))}: expected at least 1")


def environment(threads: int | None) -> dict[str, str]:
    """Returns the user's environment with OMP_NUM_THREADS set to ``threads``, or unset (None)."""
    unset = {key: value for key, value in ENVIRONMENT.items() if key != "OMP_NUM_THREADS"}
    return unset if threads is None else unset | {"OMP_NUM_THREADS": str(threads)}


def run(command: Sequence[str | Path], threads: int | None, **variables: str) -> str:
    """Runs a program to its end and returns what it printed.

    Raises:
        InputError, RunError: it failed, with status 2 or another; the message is its last line.
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
        told = (done.stderr.strip() or "nothing on stderr").splitlines()
        if done.returncode == 2:
            raise InputError(told[-1].removeprefix("error: "))
        print(done.stderr, file=sys.stderr)
        raise RunError(f"{Path(command[1]).name} ended with status {done.returncode}: {told[-1]}")
    return done.stdout


def ask(
    script: str, request: dict[str, Any], threads: int | None, python: str = sys.executable
) -> Any:
    """Runs a script of this folder in a process of its own: a request in JSON, an answer in the
    last line of JSON.

    (Libraries print words of their own, at the process's end, too.)

    Raises:
        RunError: it gave no answer.
    """
    said = run([python, str(HERE / script), json.dumps(request)], threads)
    for line in reversed(said.splitlines()):
        with contextlib.suppress(ValueError):
            return json.loads(line)
    raise RunError(f"{script} gave no answer; its output ends in {said[-200:]!r}")


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
            f"--against timm: {python} gave no torch and timm ({error}); name an interpreter that has them with"
            " --timm_python PATH (tools/check_parity.py -h says how to make one)"
        ) from None


def each(what: str, ours: Sequence[str], theirs: Sequence[str]) -> list[Ratio]:
    """Returns the ratios of every one of ours over every one of theirs."""
    return [Ratio(what, one, other) for one in ours for other in theirs]
