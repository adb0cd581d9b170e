"""The page of a run that is over: report.html, and its confusions as confusion.csv and
confusion.png.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from config import differences
from datasets import ImageDataset
from launch.files import obstacle
from loading.tables import csv_line
from training.pages import page
from training.report import drawings, mistakes
from training.report.measures import BINS, Confusions, calibration, confusions, scores, wilson
from training.report.reading import SPEED, Finished, Told, read_run
from training.results import METRIC_TITLES
from utils import writing_whole

PAGE = "report.html"
TABLE = "confusion.csv"
PICTURE = "confusion.png"
_WHOLE = 30  # classes, above which a picture of all confusions can't be read
_FEW = 20  # of the pairs that are confused most often; a picture has the classes of half of them
_SQUARE = 1000  # classes, above which confusion.csv lists what there is
_ROWS = 1000  # of a table of classes
SPLITS = {"val": "weights", "ema": "average (EMA)"}


def write_report(folder: Path, dataset: ImageDataset | None) -> Path:
    """Writes report.html of the run that left its files in ``folder``, and what belongs to it;
    returns the page's path.

    Args:
        dataset: what was evaluated, for pictures of the mistakes; None: it isn't at hand.

    Raises:
        InputError: the folder isn't one of a run that is over.
        OSError: they can't be written.
    """
    run = read_run(folder)
    for name in (PAGE, TABLE, PICTURE):  # before the first of them is written
        if problem := obstacle(folder / name):
            raise problem
    told = run.told.get("val")
    # What a reader looks for first comes first; how fast the run was comes last.
    parts = [_summary(run)]
    if told and not run.several:
        parts.append(_confusions(run, told))
    parts.append(_classes(run, told))
    if told:
        shown = mistakes.tiles(run, told, dataset)
        parts.append(
            page.section("The most confident mistakes", shown or page.paragraph("There are none."))
        )
    if told and not run.several:
        parts.append(_calibration(told))
    learning = {key: label for key, label in run.labels.items() if key not in SPEED}
    parts.append(_curves(run, "Curves", learning))
    parts.append(_configuration(run))
    parts.append(_environment(run))
    parts.append(_curves(run, "Speed", SPEED))
    title = f"{run.config.MODEL.NAME} on {run.config.DATA.DATASET}: {folder.absolute().name}"
    with writing_whole(folder / PAGE) as file:
        file.write(page.page(title, *parts))
    return folder / PAGE


def interval(right: int, count: int) -> str:
    """Returns a share's 95 % interval in percent: "96.2 to 98.9"."""
    low, high = wilson(right, count)
    return f"{100 * low:.2f} to {100 * high:.2f}"


def _summary(run: Finished) -> str:
    """The last evaluation, of the weights and of their average."""
    evaluated = run.evaluated
    rows: list[list[Any]] = []
    for key, label in METRIC_TITLES.items():
        if key in run.result:
            rows.append([label, *(number(found.get(key), key) for found in evaluated.values())])
            rows += (
                _shares_right(run, list(evaluated)) if run.told and key in ("acc1", "mAP") else []
            )
    if run.told and not run.several:
        errors = [_error(run.told.get(split)) for split in evaluated]
        rows.append([f"expected calibration error, {BINS} bins (%)", *errors])
    rows.append(["images", *(f"{found['num_samples']:,}" for found in evaluated.values())])
    best = [found.get("best", {}) for found in evaluated.values()]
    rows.append(["best evaluation", *map(_best, best)] if any(best) else [])
    words = (
        ["The figures are of the last evaluation."]
        if any(best)
        else ["The figures are of an evaluation alone."]
    )
    words += [f"Weights: {run.result.get('weights', 'unknown')}."]
    words += [f"The run ended early: {run.result['ended']}."] if "ended" in run.result else []
    heads = ["", *(SPLITS[split] for split in evaluated)] if len(evaluated) > 1 else []
    return page.paragraph(" ".join(words)) + page.table(heads, filter(None, rows))


def _best(found: Mapping[str, Any]) -> str:
    """Returns a run's best evaluation in words, with the checkpoint that has its weights; "" if
    there is none.
    """
    if not found:
        return ""
    figures = ", ".join(
        f"{label} {number(found[key], key)}" for key, label in METRIC_TITLES.items() if key in found
    )
    where = f", in checkpoints/{found['checkpoint']}" if "checkpoint" in found else ""
    return f"after epoch {found['epoch']}{where}: {figures}"


def _shares_right(run: Finished, splits: list[str]) -> list[list[str]]:
    """The 95 % interval of the images that are right, and of several classes how many are."""
    right = [run.told[split].right if split in run.told else np.zeros(0, bool) for split in splits]
    rows = [
        [
            "its 95 % interval (Wilson)",
            *(interval(int(own.sum()), len(own)) if len(own) else "" for own in right),
        ]
    ]
    if run.several:
        shares = ((number(100 * float(own.mean())) if len(own) else "") for own in right)
        rows.insert(0, ["images with all classes right (%)", *shares])
    return rows


def number(value: float | None, key: str = "") -> str:
    """Returns a percentage, or the loss, as text; nothing of None."""
    return "" if value is None else f"{value:.{4 if key == 'loss' else 2}f}"


def _error(told: Told | None) -> str:
    return number(100 * calibration(told.probability, told.right).error) if told else ""


def _curves(run: Finished, title: str, labels: Mapping[str, str]) -> str:
    drawn = ((label, drawings.curve({"": run.curves}, key, label)) for key, label in labels.items())
    return page.section(
        title, page.grid(page.picture(label, data) for label, data in drawn if data)
    )


def _confusions(run: Finished, told: Told) -> str:
    """Writes confusion.csv and confusion.png; returns what the page shows of them."""
    found = confusions(told.label, told.predicted)
    outputs = _outputs(run, told)
    names = [run.name_of(label) for label in range(outputs)]
    with writing_whole(run.folder / TABLE) as file:
        _write_confusions(file, found, names)
    whole = outputs <= _WHOLE
    worst = found.worst(_FEW)
    classes = (
        range(outputs)
        if whole
        else list(dict.fromkeys(np.stack(worst[:2], 1)[: _FEW // 2].flatten().tolist()))
    )
    pairs = [
        (names[label], names[predicted], f"{count:,}")
        for label, predicted, count in zip(*(column.tolist() for column in worst), strict=True)
    ]
    shown = ""
    if len(classes):
        drawn = drawings.confusion(
            found.matrix(classes), [names[label] for label in classes], whole
        )
        with writing_whole(run.folder / PICTURE, "wb") as file:
            file.write(drawn)
        shown = page.picture("Confusion matrix", drawn)
    what = "Rows are labels. A colour is the share of a label's images" + (
        "." if whole else ", of the classes shown."
    )
    most = page.table(["label", "predicted most often", "images"], pairs, numbers=False)
    return page.section(
        "Confusions", page.paragraph(f"{what} All are in {TABLE}."), page.grid([shown, most])
    )


def _outputs(run: Finished, told: Told) -> int:
    """How many classes there are: of the model, or of the table, if a stranger's has more."""
    return max(len(run.classes), int(told.label.max()) + 1, int(told.predicted.max()) + 1)


def _write_confusions(file: Any, found: Confusions, names: list[str]) -> None:
    """Writes a square, rows are labels; of very many classes a row for each pair that there is."""
    if len(names) <= _SQUARE:
        file.write(csv_line("label", *names))
        for name, row in zip(names, found.matrix(range(len(names))).tolist(), strict=True):
            file.write(csv_line(name, *row))
        return
    file.write("label,predicted,images\n")
    for label, predicted, count in zip(*(column.tolist() for column in found), strict=True):
        file.write(csv_line(names[label], names[predicted], count))


def _classes(run: Finished, told: Told | None) -> str:
    """A table of the classes, the worst first."""
    if run.several:
        return _several_classes(run)
    if not told:
        return ""
    found, answers = scores(told.label, told.predicted, _outputs(run, told))
    there = found.images + answers > 0
    order = np.argsort(np.where(there, found.f1, 2), kind="stable")[:_ROWS].tolist()
    rows: list[list[Any]] = []
    for label in order:
        # A class that is neither a label nor an answer isn't in the means either: it has no scores.
        own = [f"{100 * score[label]:.2f}" if there[label] else "" for score in found[:3]]
        rows.append([run.name_of(label), *own, f"{found.images[label]:,}"])
    means = [f"{100 * mean:.2f}" for mean in found.means(answers)]
    rows.insert(0, ["mean of the classes", *means, f"{found.images.sum():,}"])
    heads = ["class, the lowest F1 first", "precision (%)", "recall (%)", "F1 (%)", "images"]
    more = page.paragraph(f"and {len(found.f1) - _ROWS:,} more") if len(found.f1) > _ROWS else ""
    return page.section("Classes", page.scroll_box(page.table(heads, rows) + more))


def _several_classes(run: Finished) -> str:
    precisions, f1 = (run.result.get(name, {}) for name in ("class_ap", "class_f1"))
    levels = run.result.get("thresholds", [])
    rows = [
        (
            name,
            number(ap),
            number(f1.get(name)),
            f"{levels[place]:.3g}" if place < len(levels) else "",
        )
        for place, (name, ap) in enumerate(precisions.items())
    ]
    rows.sort(key=lambda row: float(row[1] or 200))
    heads = ["class, the lowest precision first", "average precision (%)", "F1 (%)", "threshold"]
    return page.section("Classes", page.scroll_box(page.table(heads, rows[:_ROWS])))


def _calibration(told: Told) -> str:
    found = calibration(told.probability, told.right)
    words = f"The expected calibration error is {100 * found.error:.2f} %, of {BINS} bins of equal width."
    return page.section(
        "Calibration",
        page.paragraph(words),
        page.picture("Reliability diagram", drawings.reliability(found)),
    )


def _configuration(run: Finished) -> str:
    lines = (line.partition(": ") for line in differences(run.config))
    rows = [(key, *values.split(" -> ", 1)) for key, _, values in lines]
    table = page.table(["key", "default", "here"], rows, numbers=False)
    return page.section("Configuration, where it isn't the default", page.scroll_box(table))


def _environment(run: Finished) -> str:
    where, versions = (run.result.get(name, {}) for name in ("environment", "versions"))
    devices = where.get("devices")
    rows = (
        [("processes", len(devices)), ("devices", ", ".join(map(str, devices)))]
        if type(devices) is list
        else []
    )
    rows += [
        (name, where[name]) for name in ("cores", "system", "commit") if where.get(name) is not None
    ]
    rows += versions.items()
    rows += [("seconds", run.result["seconds"])] if "seconds" in run.result else []
    return page.section("Environment", page.table([], rows, numbers=False))
