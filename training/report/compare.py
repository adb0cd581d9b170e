"""Several runs side by side: their figures, their curves, their settings, and whether they differ
by chance.
"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from errors import InputError
from settings.options import leaves
from training.pages import page
from training.pages.figures import shorten
from training.report import drawings, interval, number
from training.report.measures import mcnemar, welch
from training.report.reading import Finished, read_run
from training.results import METRIC_TITLES

_CELL = 60  # letters of a name, and of a value on a screen
# a difference is called larger than chance below it, over the number of comparisons (Bonferroni)
LEVEL = 0.05
# What says nothing of how a run trains, or differs between runs of one kind.
_OWN = ("BASE", "OUTPUT", "SAVE", "TAG", "MODEL.RESUME", "NGPUS")
_SEEDS = ("SEED", "DATA.FOLD")
# Whose images and labels they are: a name such as "sample 3" doesn't tell.
_PARTS = ("VAL_SPLIT", "FOLDS", "FOLD", "SPLIT_SEED", "SPLIT_GROUPS", "LABELS", "CLASSES")


class Kind(NamedTuple):
    """Runs that differ in their seeds or folds alone. ``name``: of the first one, with their
    number.
    """

    name: str
    runs: list[str]


class Compared(NamedTuple):
    """Runs and what tells them apart.

    Attributes:
        runs: by name, in the order given.
        kinds: of them; the first is what the others are compared with.
        differences: (key, a value for each run) where they differ.
        verdicts: a line for each comparison.
    """

    runs: dict[str, Finished]
    kinds: list[Kind]
    differences: list[tuple[str, list[str]]]
    verdicts: list[str]

    def figures(self) -> tuple[list[str], list[list[str]]]:
        """Returns the heads and rows of a table: a row for each run, and one for its averaged
        weights.
        """
        keys = [
            key for key in METRIC_TITLES if any(key in run.result for run in self.runs.values())
        ]
        rows = []
        for name, run in self.runs.items():
            for split, found in run.evaluated.items():
                values = [number(found.get(key), key) for key in keys]
                right = run.told[split].right if split in run.told else None
                share = interval(int(right.sum()), len(right)) if right is not None else ""
                best = found.get("best", {}).get("epoch", "")
                own = name if split == "val" else f"{name} (EMA)"
                rows.append(
                    [
                        own,
                        *values,
                        share,
                        f"{found['num_samples']}",
                        str(best),
                        f"{run.config.SEED}",
                    ]
                )
        return ["run", *keys, "95 % interval", "images", "best epoch", "SEED"], rows

    def spreads(self) -> list[str]:
        """Returns a line for each kind of several runs: the mean of its score, and the standard
        deviation.
        """
        lines = []
        for kind in self.kinds:
            if len(kind.runs) > 1:
                key, values = self.scores(kind)
                told = f"{np.mean(values):.2f} +- {np.std(values, ddof=1):.2f} (mean and standard deviation)"
                lines.append(f"{kind.name}: {key} {told} of {', '.join(kind.runs)}")
        return lines

    def scores(self, kind: Kind) -> tuple[str, list[float]]:
        """Returns what the runs of a kind are compared by, and its values."""
        results = [self.runs[name].result for name in kind.runs]
        key = next(
            key for key in ("acc1", "mAP", "loss") if all(key in result for result in results)
        )
        return key, [float(result[key]) for result in results]

    def folds(self, kind: Kind) -> list[int]:
        """Returns the folds of a kind's runs, sorted, where each run is of another one; else
        nothing.
        """
        data = [self.runs[name].config.DATA for name in kind.runs]
        folds = {own.FOLD for own in data if own.FOLDS}
        return sorted(folds) if len(folds) == len(data) else []

    def by_fold(self, kind: Kind) -> list[str]:
        """Returns a kind's runs in the order of their folds."""
        return sorted(kind.runs, key=lambda name: self.runs[name].config.DATA.FOLD)

    def same_images(self, one: str, other: str) -> bool:
        """Returns whether two runs were evaluated on the same images, with the same labels."""
        first = self.runs[one]
        second = self.runs[other]
        own, others = ([run.config.DATA[key] for key in _PARTS] for run in (first, second))
        data = first.config.DATA
        table = first.told["val"]
        other_table = second.told["val"]
        # of labels that are right, a table has the predicted one
        free = first.several or data.LABELS or data.CLASSES
        same = bool(free) or np.array_equal(table.label, other_table.label)
        return own == others and table.same == other_table.same and same


def compare(folders: Sequence[Path]) -> Compared:
    """Returns what sets runs apart, whose folders these are: two or more.

    Raises:
        InputError: one isn't a run's that is over, is given twice, or two are of different tasks.
    """
    runs = {name: read_run(folder) for name, folder in _folders_by_name(folders).items()}
    first = next(iter(runs.values()))
    for name, run in runs.items():
        if run.config.TASK != first.config.TASK:
            other = f"{next(iter(runs))} of {first.config.TASK}"
            raise InputError(
                f"{name} is of TASK {run.config.TASK}, {other}; compare runs of one TASK"
            )
    found = Compared(runs, _kinds(runs), _differences(runs), [])
    pairs = [(found.kinds[0], other) for other in found.kinds[1:]]
    if not pairs and all(len(kind.runs) == 2 for kind in found.kinds):  # two seeds
        pairs = [
            (Kind(name, [name]), Kind(other, [other])) for name, other in itertools.pairwise(runs)
        ]
    found.verdicts.extend(_verdict(found, one, other, len(pairs)) for one, other in pairs)
    return found


def _folders_by_name(folders: Sequence[Path]) -> dict[str, Path]:
    """The folders by the shortest ends of their paths that tell them apart."""
    paths = [folder.resolve() for folder in folders]
    if len(set(paths)) < len(paths):
        raise InputError("a run is given twice; give different runs")
    ends = range(1, 1 + max(len(path.parts) for path in paths))
    endings = ([str(Path(*path.parts[-end:])) for path in paths] for end in ends)
    names = [
        shorten(name, _CELL) for name in next(own for own in endings if len(set(own)) == len(own))
    ]
    if len(set(names)) < len(names):  # what tells them apart was cut
        names = [f"{name} ({place})" for place, name in enumerate(names, 1)]
    return dict(zip(names, folders, strict=True))


def _kinds(runs: Mapping[str, Finished]) -> list[Kind]:
    """The runs by their settings without seed and fold."""
    found: dict[str, list[str]] = {}
    for name, run in runs.items():
        told = sorted(
            (key, str(value)) for key, value in leaves(run.config) if key not in (*_OWN, *_SEEDS)
        )
        found.setdefault(str(told), []).append(name)
    more = {
        own[0]: f" and {len(own) - 1} more (seeds, folds)" * (len(own) > 1)
        for own in found.values()
    }
    return [Kind(own[0] + more[own[0]], own) for own in found.values()]


def _differences(runs: Mapping[str, Finished]) -> list[tuple[str, list[str]]]:
    told = [dict(leaves(run.config)) for run in runs.values()]
    keys = dict.fromkeys(key for own in told for key in own if key not in _OWN)
    rows = [(key, [str(own.get(key, "")) for own in told]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _verdict(found: Compared, one: Kind, other: Kind, comparisons: int) -> str:
    """Says whether two kinds differ by more than chance: of several seeds each by their scores,
    else by the images.
    """
    names = f"{one.name} against {other.name}"
    (key, own), (other_key, others) = found.scores(one), found.scores(other)
    folds = found.folds(one)
    if (
        len(own) > 1
        and len(others) > 1
        and key == other_key
        and not (folds and folds == found.folds(other))
    ):
        probability = welch(own, others)
        words = f"mean {key} {np.mean(own):.2f} of {len(own)} runs, {np.mean(others):.2f} of {len(others)}"
        words += ", Welch's t-test"
    else:
        pairs = list(
            zip(
                *(found.by_fold(kind) if folds else kind.runs[:1] for kind in (one, other)),
                strict=False,
            )
        )
        told = [
            [found.runs[name].told.get("val") for name in side] for side in zip(*pairs, strict=True)
        ]
        if any(table is None for tables in told for table in tables):
            return f"{names}: not tested: a run without predictions.csv (REPORT) has no images to compare"
        if not all(found.same_images(*pair) for pair in pairs):
            return f"{names}: not tested: they were evaluated on different images, or on other labels of them"
        first, second = (
            np.concatenate([table.right for table in tables if table]) for tables in told
        )
        alone, there, probability = mcnemar(first, second)
        names = names if len(pairs) > 1 else " against ".join(pairs[0])
        words = f"of {len(first):,} images {alone} are right in the first alone, {there} in the second alone"
        words += ", McNemar's exact test"
    level = LEVEL / comparisons
    told_level = f"{level:.2g}" + f", {LEVEL} over {comparisons} comparisons" * (comparisons > 1)
    verdict = "larger than chance" if probability < level else "no larger than chance may make it"
    return (
        f"{names}: {words}: p = {probability:.3g}; the difference is {verdict} (level {told_level})"
    )


def screen(found: Compared) -> str:
    """Returns what a comparison prints."""
    heads, rows = found.figures()
    lines = _align([heads, *rows])
    lines += found.spreads()
    lines += ["", "configuration, where they differ:"]
    rows = [[f"  {key}", *values] for key, values in found.differences]
    lines += _align([["  key", *found.runs], *rows]) if rows else ["  nowhere"]
    return "\n".join([*lines, "", *found.verdicts])


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    rows = [[shorten(value, _CELL) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(value.ljust(width) for value, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def page_of(found: Compared) -> str:
    """Returns a comparison as a page, with the curves of all runs over each other."""
    heads, rows = found.figures()
    curves = {name: run.curves for name, run in found.runs.items()}
    labels: dict[str, Any] = {
        key: label for run in found.runs.values() for key, label in run.labels.items()
    }
    drawn = ((label, drawings.curve(curves, key, label)) for key, label in labels.items())
    differences = page.table(
        ["key", *found.runs], [(key, *values) for key, values in found.differences], numbers=False
    )
    return page.page(
        f"{len(found.runs)} runs: {', '.join(found.runs)}",
        page.scroll_box(page.table(heads, rows)),
        *map(page.paragraph, [*found.spreads(), *found.verdicts]),
        page.section(
            "Curves", page.grid(page.picture(label, data) for label, data in drawn if data)
        ),
        page.section(
            "Configuration, where they differ",
            page.scroll_box(differences) or page.paragraph("nowhere"),
        ),
    )
