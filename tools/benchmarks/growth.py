"""``growth`` measures how the cost of work grows with its size. The result is an exponent: it is 1
if twice the size costs twice as much.

Each size of a subject is measured in a process of its own (our_growth.py). The sizes take turns,
``-repeats`` times. The exponent is the slope of the cost's logarithm over that of the size, by
least squares. Only the larger half of the sizes counts, but three sizes at least. The cost of a
size is that of its cheapest run, which other programs disturbed least. Times below a hundredth of a
second count as a hundredth, and memory below 8 MB counts as 8 MB, because such figures show no
growth. "grows faster" marks an exponent that is above the expected one by more than 0.2.
"""

import argparse
import functools
import importlib.util
import math
from collections.abc import Sequence
from typing import Any

from errors import InputError, counted
from tools.benchmarks import growth_data, growth_runs, growth_tools, growth_weights
from tools.benchmarks.growth_measure import Growth
from tools.benchmarks.measure import Benchmark, ask, format_number, measure, positive

MODULES = (growth_data, growth_runs, growth_tools, growth_weights)
MEASURES: dict[str, Growth] = {
    name: found for module in MODULES for name, found in module.MEASURES.items()
}

SECONDS = "time"
CPU = "CPU time"
PEAK = "peak memory"
RISE = "memory added"
# Smaller figures count as these: they are the noise of a start.
_FLOORS = {SECONDS: 0.01, CPU: 0.01, RISE: 8.0}
_TOLERANCE = 0.2
_LEAST_SIZES = 3


def growth(arguments: argparse.Namespace) -> None:
    """Measures the subjects that were named, or all whose packages are installed.

    Raises:
        InputError: -repeats or --threads is below 1; a subject's package isn't installed.
    """
    positive(arguments, "repeats", "threads")
    available = [
        name
        for name, subject in MEASURES.items()
        if not subject.needs or importlib.util.find_spec(subject.needs)
    ]
    names = list(dict.fromkeys(arguments.subjects)) or available
    if missing := sorted(set(names) - set(available)):
        raise InputError(
            f"{missing[0]} needs {MEASURES[missing[0]].needs}, which isn't installed; leave it out"
        )
    sizes = {}
    kinds = {}
    for name in names:
        subject = MEASURES[name]
        sizes[name] = subject.quick if arguments.quick else subject.sizes
        for size in sizes[name]:
            request = {"subject": name, "size": size}
            kinds[f"{name}, {size}"] = functools.partial(
                ask, "our_growth.py", request, arguments.threads
            )
    title = f"a process for each size, {counted(arguments.threads, 'thread')}"
    units = {SECONDS: "s", CPU: "CPU s", PEAK: "MB", RISE: "MB"}
    more = functools.partial(_exponents, sizes=sizes)
    measure(Benchmark(title, kinds, units, rows=_rows, more=more), arguments)


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """Returns the slope of log cost over log size, by least squares over the larger half of the
    sizes, but over three sizes at least.
    """
    first = min(len(sizes) // 2, max(0, len(sizes) - _LEAST_SIZES))
    x = [math.log(size) for size in sizes[first:]]
    y = [math.log(cost) for cost in costs[first:]]
    mean_x = sum(x) / len(x)
    mean_y = sum(y) / len(y)
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return covariance / sum((a - mean_x) ** 2 for a in x)


def _exponents(figures: dict[str, Any], sizes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """Returns the further entries of the report: the sizes and the exponents of each subject."""
    found = {}
    for name, subject_sizes in sizes.items():
        subject = MEASURES[name]
        expected: dict[str, float] = dict.fromkeys((SECONDS, CPU), subject.expected)
        expected[RISE] = subject.expected if subject.memory is None else subject.memory
        slopes = {}
        for what, floor in _FLOORS.items():
            costs = [max(floor, min(figures[f"{name}, {size}"][what])) for size in subject_sizes]
            slopes[what] = exponent(subject_sizes, costs)
        faster = [what for what, slope in slopes.items() if slope > expected[what] + _TOLERANCE]
        found[name] = {
            "unit": subject.unit,
            "sizes": subject_sizes,
            "exponents": slopes,
            "expected": expected,
            "faster": faster,
        }
    return {"growth": found}


def _rows(report: dict[str, Any]) -> list[str]:
    """Returns a table for each subject: a line for each size, then the exponents."""
    lines = []
    for name, found in report["growth"].items():
        rows = [[found["unit"], "seconds", "min", "max", "CPU seconds", "peak MB", "added MB"]]
        for size in found["sizes"]:
            figures = report["figures"][f"{name}, {size}"]
            seconds = [format_number(figures[SECONDS][key]) for key in ("median", "min", "max")]
            others = [format_number(figures[what]["median"]) for what in (CPU, PEAK, RISE)]
            rows.append([f"{size:,}", *seconds, *others])
        for title, key in (("exponent", "exponents"), ("expected", "expected")):
            seconds, cpu, rise = (f"{found[key][what]:.2f}" for what in (SECONDS, CPU, RISE))
            rows.append([title, seconds, "", "", cpu, "", rise])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += [name, *("  ".join(map(str.rjust, row, widths)).rstrip() for row in rows)]
        if found["faster"]:
            lines.append(f"grows faster than expected: {', '.join(found['faster'])}")
        lines.append("")
    return lines[:-1]
