"""Compares runs: their results, curves and settings, and whether they differ by more than chance."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from errors import InputError
from settings.configuration import leaves
from settings.tasks import answers_of
from training.pages import page
from training.pages.names import shorten
from training.report import interval, number, plots
from training.report.pixels import PixelTable
from training.report.run_files import FinishedRun, PredictionTable, read_run
from training.report.statistics import mcnemar, welch, wilcoxon
from training.results import METRIC_TITLES

# Letters of a name, and of a value on a screen.
_CELL = 60
# A difference is called larger than chance if its probability is below this over the number of
# comparisons (Bonferroni).
LEVEL = 0.05
# Keys that don't change how a run trains, or that differ between repetitions of a run.
_IGNORED = ("BASE", "OUTPUT", "SAVE", "TAG", "MODEL.RESUME", "NGPUS")
_SEEDS = ("SEED", "DATA.FOLD")
# Keys of DATA that choose the evaluated images and their labels. Names of images, such as
# "sample 3", don't always show whether they are the same.
_IMAGE_KEYS = ("VAL_SPLIT", "FOLDS", "FOLD", "SPLIT_SEED", "SPLIT_GROUPS", "LABELS", "CLASSES")


class Kind(NamedTuple):
    """Runs that differ in their seeds or folds alone.

    Attributes:
        name: that of the first run, with the number of others.
        runs: their names.
    """

    name: str
    runs: list[str]


class Compared(NamedTuple):
    """Runs and their differences.

    Attributes:
        runs: by name, in the order in which they were given.
        kinds: of the runs. The others are compared with the first.
        differences: the keys whose values differ, each with a value for each run.
        verdicts: a line for each comparison.
    """

    runs: dict[str, FinishedRun]
    kinds: list[Kind]
    differences: list[tuple[str, list[str]]]
    verdicts: list[str]

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Returns heads and rows of a table of results.

        It has a row for each run, and one for a run's averaged weights.
        """
        keys = [
            key for key in METRIC_TITLES if any(key in run.result for run in self.runs.values())
        ]
        rows = []
        for name, run in self.runs.items():
            for split, evaluation in run.evaluated.items():
                right_interval = ""
                if split in run.predictions:
                    right = run.predictions[split].right
                    right_interval = interval(int(right.sum()), len(right))
                row = [name if split == "val" else f"{name} (EMA)"]
                row += [number(evaluation.get(key), key) for key in keys]
                row += [right_interval, f"{evaluation['num_samples']}"]
                row += [str(evaluation.get("best", {}).get("epoch", "")), f"{run.config.SEED}"]
                rows.append(row)
        return ["run", *keys, "95 % interval", "images", "best epoch", "SEED"], rows

    def spreads(self) -> list[str]:
        """Returns the mean and standard deviation of each kind's score, a line for each kind.

        Kinds of one run have none.
        """
        lines = []
        for kind in self.kinds:
            if len(kind.runs) > 1:
                key, values = self.scores(kind)
                mean = f"{np.mean(values):.2f} +- {np.std(values, ddof=1):.2f}"
                lines.append(
                    f"{kind.name}: {key} {mean} (mean and standard deviation)"
                    f" of {', '.join(kind.runs)}"
                )
        return lines

    def scores(self, kind: Kind) -> tuple[str, list[float]]:
        """Returns the key by which the runs of a kind are compared, and its values."""
        results = [self.runs[name].result for name in kind.runs]
        key = next(
            key
            for key in ("acc1", "mAP", "mIoU", "loss")
            if all(key in result for result in results)
        )
        return key, [float(result[key]) for result in results]

    def folds(self, kind: Kind) -> list[int]:
        """Returns the folds of a kind's runs, sorted; none unless each run has a different fold."""
        data = [self.runs[name].config.DATA for name in kind.runs]
        folds = {keys.FOLD for keys in data if keys.FOLDS}
        return sorted(folds) if len(folds) == len(data) else []

    def by_fold(self, kind: Kind) -> list[str]:
        """Returns a kind's runs in the order of their folds."""
        return sorted(kind.runs, key=lambda name: self.runs[name].config.DATA.FOLD)

    def same_images(self, one: str, other: str) -> bool:
        """Returns whether two runs were evaluated on the same images, with the same labels."""
        data = self.runs[one].config.DATA
        other_data = self.runs[other].config.DATA
        is_of_pixels = bool(self.runs[one].pixel_tables)
        table, other_table = (
            run.pixel_tables["val"] if is_of_pixels else run.predictions["val"]
            for run in (self.runs[one], self.runs[other])
        )
        if any(data[key] != other_data[key] for key in _IMAGE_KEYS):
            return False
        if table.digest != other_table.digest:
            return False
        # With several classes, the digest is of the labels, too. With LABELS or CLASSES, a table
        # has the predicted class as the label of a right prediction, since several labels may be
        # right.
        # Masks aren't in a table.
        if is_of_pixels or self.runs[one].multilabel or data.LABELS or data.CLASSES:
            return True
        return np.array_equal(table.label, other_table.label)


def compare(folders: Sequence[Path]) -> Compared:
    """Compares the runs of two folders or more.

    Raises:
        InputError: a folder isn't one of a run that has ended, is given twice, or two runs have
            different tasks.
    """
    runs = {name: read_run(folder) for name, folder in _folders_by_name(folders).items()}
    first_name, first = next(iter(runs.items()))
    for name, run in runs.items():
        if run.config.TASK != first.config.TASK:
            raise InputError(
                f"{name} has TASK {run.config.TASK}, {first_name} has {first.config.TASK};"
                " compare runs of the same TASK"
            )
    compared = Compared(runs, _kinds(runs), _differences(runs), verdicts=[])
    pairs = [(compared.kinds[0], other) for other in compared.kinds[1:]]
    if len(runs) == 2 and not pairs:
        # Two runs of one kind, such as two seeds, are compared with each other.
        one, other = runs
        pairs = [(Kind(one, [one]), Kind(other, [other]))]
    compared.verdicts.extend(_verdict(compared, one, other, len(pairs)) for one, other in pairs)
    return compared


def _folders_by_name(folders: Sequence[Path]) -> dict[str, Path]:
    """Returns the folders by the shortest ends of their paths that differ."""
    paths = [folder.resolve() for folder in folders]
    if len(set(paths)) < len(paths):
        raise InputError("a run is given twice; compare different runs")
    names: list[str] = []
    for length in range(1, 1 + max(len(path.parts) for path in paths)):
        names = [str(Path(*path.parts[-length:])) for path in paths]
        if len(set(names)) == len(names):
            break
    names = [shorten(name, _CELL) for name in names]
    # Shortening may have cut the difference.
    if len(set(names)) < len(names):
        names = [f"{name} ({place})" for place, name in enumerate(names, 1)]
    return dict(zip(names, folders, strict=True))


def _kinds(runs: Mapping[str, FinishedRun]) -> list[Kind]:
    """Returns the runs, grouped by their settings without seed and fold."""
    names_by_settings: dict[str, list[str]] = {}
    for name, run in runs.items():
        settings = sorted(
            (key, str(value))
            for key, value in leaves(run.config)
            if key not in (*_IGNORED, *_SEEDS)
        )
        names_by_settings.setdefault(str(settings), []).append(name)
    kinds = []
    for first, *others in names_by_settings.values():
        name = f"{first} and {len(others)} more (seeds, folds)" if others else first
        kinds.append(Kind(name, [first, *others]))
    return kinds


def _differences(runs: Mapping[str, FinishedRun]) -> list[tuple[str, list[str]]]:
    """Returns the keys whose values differ between runs, with the values."""
    settings = [dict(leaves(run.config)) for run in runs.values()]
    keys = dict.fromkeys(key for values in settings for key in values if key not in _IGNORED)
    rows = [(key, [str(values.get(key, "")) for values in settings]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _verdict(compared: Compared, one: Kind, other: Kind, comparisons: int) -> str:
    """Says whether two kinds of runs differ by more than chance.

    Kinds of several seeds are compared by their scores, others by their images.
    """
    key, scores = compared.scores(one)
    other_key, other_scores = compared.scores(other)
    folds = compared.folds(one)
    same_folds = bool(folds) and folds == compared.folds(other)
    several = len(scores) > 1 and len(other_scores) > 1
    if several and key == other_key and not same_folds:
        names = f"{one.name} against {other.name}"
        probability = welch(scores, other_scores)
        test = (
            f"mean {key} {np.mean(scores):.2f} of {len(scores)} runs,"
            f" {np.mean(other_scores):.2f} of {len(other_scores)}, Welch's t-test"
        )
        return f"{names}: {test}{_conclusion(probability, comparisons)}"
    if folds:
        # The folds of a kind are all images together.
        pairs = list(zip(compared.by_fold(one), compared.by_fold(other), strict=False))
    else:
        pairs = [(one.runs[0], other.runs[0])]
    return _verdict_by_images(compared, one, other, pairs, comparisons)


def _verdict_by_images(
    compared: Compared,
    one: Kind,
    other: Kind,
    pairs: Sequence[tuple[str, str]],
    comparisons: int,
) -> str:
    """Compares kinds by the images that either got right, over pairs of runs on the same images."""
    names = f"{one.name} against {other.name}"
    right: list[np.ndarray] = []
    other_right: list[np.ndarray] = []
    is_of_pixels = answers_of(compared.runs[pairs[0][0]].config.TASK) == "pixels"
    for name, other_name in pairs:
        table, other_table = (
            (run.pixel_tables if is_of_pixels else run.predictions).get("val")
            for run in (compared.runs[name], compared.runs[other_name])
        )
        if table is None or other_table is None:
            task = compared.runs[name].config.TASK
            if not answers_of(task):
                return f"{names}: not tested: TASK {task} doesn't predict classes"
            return (
                f"{names}: not tested: a run has no predictions.csv (REPORT), so its images"
                " can't be"
                " compared"
            )
        right.append(_scores(table))
        other_right.append(_scores(other_table))
    if not all(compared.same_images(*pair) for pair in pairs):
        return f"{names}: not tested: they were evaluated on different images or labels"
    if len(pairs) == 1:
        names = " against ".join(pairs[0])
    first = np.concatenate(right)
    if is_of_pixels:
        better, other_better, probability = wilcoxon(first, np.concatenate(other_right))
        test = (
            f"of {len(first):,} images {better} have a higher mIoU in the first run,"
            f" {other_better} in"
            " the second, Wilcoxon's signed-rank test"
        )
        return f"{names}: {test}{_conclusion(probability, comparisons)}"
    alone, other_alone, probability = mcnemar(first, np.concatenate(other_right))
    test = (
        f"of {len(first):,} images {alone} are right in the first run only, {other_alone} in the"
        " second only, McNemar's exact test"
    )
    return f"{names}: {test}{_conclusion(probability, comparisons)}"


def _scores(table: PredictionTable | PixelTable) -> np.ndarray:
    """Returns by what images are compared, [n]: whether each is right, or its mIoU."""
    return table.mean_iou if isinstance(table, PixelTable) else table.right


def _conclusion(probability: float, comparisons: int) -> str:
    """Returns the end of a verdict: the probability, and what it means."""
    level = LEVEL / comparisons
    level_text = f"{level:.2g}"
    if comparisons > 1:
        level_text += f", {LEVEL} over {comparisons} comparisons"
    larger = probability < level
    verdict = "statistically significant" if larger else "not statistically significant"
    return f": p = {probability:.3g}; the difference is {verdict} (level {level_text})"


def screen(compared: Compared) -> str:
    """Returns a comparison as text for a console."""
    heads, rows = compared.table()
    lines = _align([heads, *rows])
    lines += compared.spreads()
    lines += ["", "keys that differ:"]
    if compared.differences:
        rows = [[f"  {key}", *values] for key, values in compared.differences]
        lines += _align([["  key", *compared.runs], *rows])
    else:
        lines.append("  nowhere")
    return "\n".join([*lines, "", *compared.verdicts])


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns a line for each row, whose cells are aligned at the left."""
    rows = [[shorten(value, _CELL) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(value.ljust(width) for value, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def page_of(compared: Compared) -> str:
    """Returns a comparison as a page of HTML, with plots of the curves of all runs."""
    heads, rows = compared.table()
    curves = {name: run.curves for name, run in compared.runs.items()}
    labels: dict[str, Any] = {}
    for run in compared.runs.values():
        labels |= run.labels
    pictures = []
    for key, label in labels.items():
        if data := plots.curve(curves, key, label):
            pictures.append(page.plot(label, data))
    differences = page.table(
        ["key", *compared.runs],
        [(key, *values) for key, values in compared.differences],
        numbers=False,
    )
    return page.page(
        f"{len(compared.runs)} runs: {', '.join(compared.runs)}",
        page.scroll_box(page.table(heads, rows)),
        *map(page.paragraph, [*compared.spreads(), *compared.verdicts]),
        page.section("Curves", page.grid(pictures)),
        page.section(
            "Configuration: keys that differ",
            page.scroll_box(differences) or page.paragraph("nowhere"),
        ),
    )
