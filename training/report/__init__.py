"""The report of a run: report.html, confusion.csv and confusion.png.

It is written after each evaluation (``training.live_report``), and at the run's end.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from config import differences
from datasets import ImageDataset
from errors import Unreadable, reading
from launch.files import obstacle
from loading.tables import csv_line
from settings.plain import whole_file
from training.batch_panels import FILE as BATCH
from training.batch_panels import TITLE as BATCH_TITLE
from training.pages import page
from training.report import mistakes, pixels, plots
from training.report.run_files import ADVICE, SPEED, FinishedRun, PredictionTable, read_run
from training.report.statistics import BINS, Confusions, calibration, confusions, scores, wilson
from training.results import METRIC_TITLES
from training.worst_pictures import FILE as WORST_PICTURES
from utils import writing_whole

PAGE = "report.html"
TABLE = "confusion.csv"
PICTURE = "confusion.png"
# What a task of masked images draws (``Task.draw``).
RECONSTRUCTIONS = "reconstructions.png"
_PNG = b"\x89PNG\r\n\x1a\n"
_LARGEST_PICTURE = 32 << 20
# A picture of all confusions of more classes can't be read.
_MOST_IN_PICTURE = 30
# Pairs of classes that are listed, of those that are confused most often. The picture has the
# classes of half of them.
_LISTED_PAIRS = 20
# With more classes confusion.csv lists the pairs that occur, instead of being a square.
_MOST_IN_SQUARE = 1000
# Rows of a table of classes.
_MOST_ROWS = 1000
SPLITS = {"val": "weights", "ema": "average (EMA)"}


class State(NamedTuple):
    """How far a run that still trains is.

    Attributes:
        words: a line for the reader.
        time: in seconds since 1970.
        evaluated: as of ``FinishedRun``.
    """

    words: str
    time: float
    evaluated: dict[str, dict[str, Any]]


def write_report(folder: Path, dataset: ImageDataset | None, state: State | None = None) -> Path:
    """Writes the report of a run into its folder; returns the path of report.html.

    Args:
        folder: the run's.
        dataset: the dataset that was evaluated, for pictures of the mistakes; None: without them.
        state: of a run that still trains, whose page reloads itself; None: the run has ended.

    Raises:
        InputError: the folder isn't one of a run that has ended.
        OSError: a file can't be written.
    """
    run = read_run(folder, state.evaluated if state else None)
    # All files are checked before the first of them is written.
    for name in (PAGE, TABLE, PICTURE):
        if problem := obstacle(folder / name):
            raise problem
    title = f"{run.config.MODEL.NAME} on {run.config.DATA.DATASET}: {folder.absolute().name}"
    sections = list(_sections(run, dataset))
    if state:
        sections.insert(0, page.renewal(state.words, state.time))
    with writing_whole(folder / PAGE) as file:
        file.write(page.page(title, *sections, reloads=state is not None))
    return folder / PAGE


def _sections(run: FinishedRun, dataset: ImageDataset | None) -> Iterator[str]:
    """Yields the parts of the page: the accuracy first, the speed last."""
    predictions = run.predictions.get("val")
    yield _summary(run)
    learning = {key: label for key, label in run.labels.items() if key not in SPEED}
    yield _curves(run, "Curves", learning)
    yield _drawn("Reconstructions", run.folder / RECONSTRUCTIONS)
    if run.confusion is not None:
        yield pixels.classes(run, run.confusion)
        yield _pixel_confusions(run, run.confusion)
    if "val" in run.pixel_tables:
        table = run.pixel_tables["val"]
        yield page.section("The worst pictures", pixels.pictures(run, table))
        # Without a wrong pixel none is drawn. A file would be an earlier evaluation's.
        if len(table.worst(1)):
            yield _drawn("Some of the worst pictures", run.folder / WORST_PICTURES)
    if predictions and not run.multilabel:
        yield _confusions(run, predictions)
    if run.multilabel:
        yield _multilabel_classes(run)
    elif predictions:
        yield _classes(run, predictions)
    if predictions:
        tiles = mistakes.tiles(run, predictions, dataset)
        nothing = page.paragraph("There are none.")
        yield page.section("The most confident mistakes", tiles or nothing)
    yield _drawn(BATCH_TITLE, run.folder / BATCH)
    if predictions and not run.multilabel:
        yield _calibration(predictions)
    yield _configuration(run)
    yield _machine(run)
    yield _curves(run, "Speed", SPEED)


def interval(right: int, count: int) -> str:
    """Returns the 95 % interval of a share in percent: "96.2 to 98.9"."""
    low, high = wilson(right, count)
    return f"{100 * low:.2f} to {100 * high:.2f}"


def number(value: float | None, key: str = "") -> str:
    """Returns a percentage or a loss as text, and "" for None."""
    if value is None:
        return ""
    digits = 4 if key in ("loss", "feature_std") else 2
    return f"{value:.{digits}f}"


def _summary(run: FinishedRun) -> str:
    """Returns a table of the last evaluation, of the weights and of their average."""
    evaluations = run.evaluated.values()
    best = [evaluation.get("best", {}) for evaluation in evaluations]
    rows: list[list[Any]] = []
    for key, label in METRIC_TITLES.items():
        if key in run.result:
            rows.append([label, *(number(one.get(key), key) for one in evaluations)])
            if run.predictions and key in ("acc1", "mAP"):
                rows += _shares_of_right_images(run, list(run.evaluated))
    if run.predictions and not run.multilabel:
        errors = [_calibration_error(run.predictions.get(split)) for split in run.evaluated]
        rows.append([f"expected calibration error, {BINS} bins (%)", *errors])
    rows.append(["images", *(f"{one['num_samples']:,}" for one in evaluations)])
    if any(best):
        rows.append(["best evaluation", *map(_best_text, best)])
        sentences = ["These figures are from the last evaluation."]
    else:
        sentences = ["These figures are from an evaluation run."]
    sentences.append(f"Weights: {run.result.get('weights', 'unknown')}.")
    if "ended" in run.result:
        sentences.append(f"The run ended early: {run.result['ended']}.")
    # A single column needs no head.
    heads = []
    if len(evaluations) > 1:
        heads = ["", *(SPLITS[split] for split in run.evaluated)]
    return page.paragraph(" ".join(sentences)) + page.table(heads, rows)


def _best_text(best: Mapping[str, Any]) -> str:
    """Returns a run's best evaluation in words, with its checkpoint; "" if there is none."""
    if not best:
        return ""
    values = ", ".join(
        f"{label} {number(best[key], key)}" for key, label in METRIC_TITLES.items() if key in best
    )
    where = f", in checkpoints/{best['checkpoint']}" if "checkpoint" in best else ""
    return f"after epoch {best['epoch']}{where}: {values}"


def _shares_of_right_images(run: FinishedRun, splits: list[str]) -> list[list[str]]:
    """Returns rows: with several classes the share of right images, and always its 95 % interval."""
    tables = [run.predictions.get(split) for split in splits]
    intervals = [
        interval(int(table.right.sum()), len(table.right)) if table else "" for table in tables
    ]
    rows = [["its 95 % interval (Wilson)", *intervals]]
    if run.multilabel:
        shares = [number(100 * float(table.right.mean())) if table else "" for table in tables]
        rows.insert(0, ["images with all classes right (%)", *shares])
    return rows


def _calibration_error(predictions: PredictionTable | None) -> str:
    if predictions is None:
        return ""
    return number(100 * calibration(predictions.probability, predictions.right).error)


def _curves(run: FinishedRun, title: str, labels: Mapping[str, str]) -> str:
    pictures = []
    for key, label in labels.items():
        if data := plots.curve({"": run.curves}, key, label):
            pictures.append(page.plot(label, data))
    return page.section(title, page.grid(pictures))


def _drawn(title: str, file: Path) -> str:
    """Returns the section of a picture that the run drew; "" if there is none.

    Raises:
        InputError: the file isn't a PNG.
    """
    if not file.exists():
        return ""
    with reading(file, "a picture", ADVICE):
        data = whole_file(file, _LARGEST_PICTURE)
        # A link may lead to any file, which must not get into the page.
        if not data.startswith(_PNG):
            raise Unreadable("it isn't a PNG")
    return page.section(title, page.picture(title, data))


def _confusions(run: FinishedRun, predictions: PredictionTable) -> str:
    """Writes confusion.csv and confusion.png; returns their section of the page."""
    pairs = confusions(predictions.label, predictions.predicted)
    names = [run.name_of(label) for label in range(_number_of_classes(run, predictions))]
    with writing_whole(run.folder / TABLE) as file:
        _write_confusions(file, pairs, names)
    return _most_confused(run, pairs, names, "images")


def _pixel_confusions(run: FinishedRun, confusion: np.ndarray) -> str:
    """Writes confusion.png of an evaluation of pixels; returns its section of the page."""
    names = [run.name_of(label) for label in range(len(confusion))]
    return _most_confused(run, pixels.pairs_of(confusion), names, "pixels")


def _most_confused(run: FinishedRun, pairs: Confusions, names: Sequence[str], unit: str) -> str:
    """Writes confusion.png; returns the section of the page with it and the worst pairs.

    Args:
        unit: what is counted, "images" or "pixels".
    """
    worst = pairs.worst(_LISTED_PAIRS)
    whole = len(names) <= _MOST_IN_PICTURE
    if whole:
        classes = list(range(len(names)))
    else:
        # The classes of the first pairs, each once.
        both = np.stack([worst.label, worst.predicted], 1)[: _LISTED_PAIRS // 2]
        classes = list(dict.fromkeys(both.flatten().tolist()))
    shown = ""
    if classes:
        matrix = pairs.matrix(classes)
        picture = plots.confusion(
            matrix, [names[label] for label in classes], whole, in_percent=unit == "pixels"
        )
        with writing_whole(run.folder / PICTURE, "wb") as file:
            file.write(picture)
        shown = page.plot("Confusion matrix", picture)
    rows = [
        (names[label], names[predicted], f"{count:,}") for label, predicted, count in worst.rows()
    ]
    table = page.table(["label", "predicted most often", unit], rows, numbers=False)
    end = "." if whole else ", of the classes shown."
    explanation = (
        f"Rows are labels. A colour is the share of a label's {unit}{end} All are in {TABLE}."
    )
    return page.section("Confusions", page.paragraph(explanation), page.grid([shown, table]))


def _number_of_classes(run: FinishedRun, predictions: PredictionTable) -> int:
    """Returns the model's number of classes, or the table's if that has more: it isn't trusted."""
    highest = max(int(predictions.label.max()), int(predictions.predicted.max()))
    return max(len(run.classes), highest + 1)


def _write_confusions(file: Any, pairs: Confusions, names: Sequence[str]) -> None:
    """Writes a square whose rows are labels, or, of very many classes, a row for each pair."""
    if len(names) <= _MOST_IN_SQUARE:
        file.write(csv_line("label", *names))
        for name, row in zip(names, pairs.matrix(range(len(names))).tolist(), strict=True):
            file.write(csv_line(name, *row))
        return
    file.write("label,predicted,images\n")
    for label, predicted, count in pairs.rows():
        file.write(csv_line(names[label], names[predicted], count))


def _classes(run: FinishedRun, predictions: PredictionTable) -> str:
    """Returns a table of the classes, the lowest F1 first."""
    classes = _number_of_classes(run, predictions)
    by_class, predicted = scores(predictions.label, predictions.predicted, classes)
    # A class that is neither a label nor a prediction isn't in the means either: it has no scores.
    occurs = by_class.images + predicted > 0
    order = np.argsort(np.where(occurs, by_class.f1, 2), kind="stable")[:_MOST_ROWS].tolist()
    means = [f"{100 * mean:.2f}" for mean in by_class.means(predicted)]
    rows: list[list[Any]] = [["mean of the classes", *means, f"{by_class.images.sum():,}"]]
    for label in order:
        cells = ["", "", ""]
        if occurs[label]:
            values = (by_class.precision[label], by_class.recall[label], by_class.f1[label])
            cells = [f"{100 * value:.2f}" for value in values]
        rows.append([run.name_of(label), *cells, f"{by_class.images[label]:,}"])
    heads = ["class, the lowest F1 first", "precision (%)", "recall (%)", "F1 (%)", "images"]
    content = page.table(heads, rows)
    if classes > _MOST_ROWS:
        content += page.paragraph(f"and {classes - _MOST_ROWS:,} more")
    return page.section("Classes", page.scroll_box(content))


def _multilabel_classes(run: FinishedRun) -> str:
    """Returns a table of the classes, the lowest average precision first."""
    f1 = run.result.get("class_f1", {})
    thresholds = run.result.get("thresholds", [])
    rows = []
    for place, (name, precision) in enumerate(run.result.get("class_ap", {}).items()):
        threshold = f"{thresholds[place]:.3g}" if place < len(thresholds) else ""
        rows.append((name, number(precision), number(f1.get(name)), threshold))
    # A class that no image has has no precision, and comes last.
    rows.sort(key=lambda row: float(row[1] or 200))
    heads = ["class, the lowest precision first", "average precision (%)", "F1 (%)", "threshold"]
    return page.section("Classes", page.scroll_box(page.table(heads, rows[:_MOST_ROWS])))


def _calibration(predictions: PredictionTable) -> str:
    result = calibration(predictions.probability, predictions.right)
    explanation = (
        f"The expected calibration error is {100 * result.error:.2f} %, of {BINS} bins of equal"
        " width."
    )
    picture = page.plot("Reliability diagram", plots.reliability(result))
    return page.section("Calibration", page.paragraph(explanation), picture)


def _configuration(run: FinishedRun) -> str:
    rows = []
    for line in differences(run.config):
        key, _, values = line.partition(": ")
        rows.append((key, *values.split(" -> ", 1)))
    table = page.table(["key", "default", "here"], rows, numbers=False)
    return page.section("Configuration: changed keys", page.scroll_box(table))


def _machine(run: FinishedRun) -> str:
    """Returns the devices, the machine and the versions of a run."""
    environment = run.result.get("environment", {})
    rows: list[tuple[str, Any]] = []
    devices = environment.get("devices")
    if type(devices) is list:
        rows.append(("processes", len(devices)))
        rows.append(("devices", ", ".join(map(str, devices))))
    for name in ("cores", "system", "commit"):
        if environment.get(name) is not None:
            rows.append((name, environment[name]))
    rows += run.result.get("versions", {}).items()
    if "seconds" in run.result:
        rows.append(("seconds", run.result["seconds"]))
    return page.section("Environment", page.table([], rows, numbers=False))
