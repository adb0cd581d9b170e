"""Evaluates a calibration on images that weren't used for it: figures, a page, and log lines."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from inference.calibration import conformal, rejection, scaling
from inference.calibration.calibrate import Answers, Outcome, probabilities_of
from training.pages import page
from training.report import plots
from training.report.statistics import BINS, Calibration, calibration, wilson

_SCALINGS = {
    "none": "no scaling",
    "temperature": "one temperature",
    "class": "a temperature for each class",
    "vector": "a temperature and a shift for each class",
}


def figures_of(outcome: Outcome, classes: Sequence[str]) -> dict[str, Any]:
    """Returns the figures of a calibration, as they are written in JSON.

    Args:
        classes: the names of the outputs.
    """
    stored = outcome.calibration
    parts = outcome.parts
    figures: dict[str, Any] = {
        "scaling": stored.scaling,
        "scale": stored.scale,
        "shift": stored.shift,
        "images": {
            "fitting": len(parts.fitting),
            "choosing": len(parts.choosing),
            "reported": len(parts.reported),
        },
        "cross_validated_nll": outcome.losses,
        "fitting": {
            "before": {"nll": _nll(parts.fitting)},
            "after": {"nll": _nll(outcome.scaled.fitting)},
        },
        "reported": {
            "before": _quality(parts.reported),
            "after": _quality(outcome.scaled.reported),
        },
        "sets": [_coverage(outcome, place, classes) for place in range(len(stored.sets))],
        "rejection": {},
    }
    for name, known in outcome.known.items():
        levels = [one for one in stored.rejections if one.score == name]
        figures["rejection"][name] = {
            "thresholds": {f"{one.false_alarm:g}": one.threshold for one in levels},
            "false_alarms": {f"{one.false_alarm:g}": _share_rejected(known, one) for one in levels},
            "outside": {
                folder: {
                    "images": len(scores[name]),
                    "auroc": 100 * rejection.auroc(known, scores[name]),
                    "fpr95": 100 * rejection.fpr95(known, scores[name]),
                    "rejected": {
                        f"{one.false_alarm:g}": _share_rejected(scores[name], one) for one in levels
                    },
                }
                for folder, scores in outcome.outside.items()
            },
        }
    return figures


def _nll(answers: Answers) -> float:
    return float(scaling.losses_of(answers.logits, answers.labels).mean())


def _quality(answers: Answers) -> dict[str, float]:
    """Returns the negative log-likelihood, the calibration error and the accuracy of answers.

    Of images of several classes each, the accuracy is the share of right answers, yes or no.
    """
    diagram = _diagram(answers)
    probabilities = probabilities_of(answers)
    truth = answers.labels
    if truth.ndim == 1:
        truth = np.eye(probabilities.shape[1])[truth]
    accuracy = scaling.are_right(answers.logits, answers.labels).mean()
    return {
        "nll": _nll(answers),
        "ece": 100 * diagram.error,
        "brier": float(((probabilities - truth) ** 2).sum(1).mean()),
        "accuracy": 100 * float(accuracy),
    }


def _diagram(answers: Answers) -> Calibration:
    """Returns the calibration of the best class, or of all classes of a multi-label model."""
    probabilities = probabilities_of(answers)
    if answers.labels.ndim == 2:
        return calibration(probabilities.reshape(-1), answers.labels.reshape(-1) > 0)
    predicted = answers.logits.argmax(1)
    return calibration(probabilities.max(1), predicted == answers.labels)


def _coverage(outcome: Outcome, place: int, classes: Sequence[str]) -> dict[str, Any]:
    """Returns how often the reported images' sets contain the right class, and how large they are."""
    chosen = outcome.calibration.sets[place]
    reported = outcome.scaled.reported
    thresholds = [np.inf if one is None else one for one in chosen.thresholds]
    found = conformal.sets(probabilities_of(reported), thresholds, chosen.penalty, chosen.rank)
    covered = found[np.arange(len(reported)), reported.labels]
    sizes = found.sum(1)
    by_class = {}
    for label in range(found.shape[1]):
        rows = reported.labels == label
        if rows.any():
            name = classes[label] if classes else str(label)
            by_class[name] = {
                "images": int(rows.sum()),
                "coverage": 100 * float(covered[rows].mean()),
                "size": float(sizes[rows].mean()),
            }
    return {
        "coverage": chosen.coverage,
        "penalty": chosen.penalty,
        "rank": chosen.rank,
        "thresholds": chosen.thresholds,
        "found": 100 * float(covered.mean()),
        "size": float(sizes.mean()),
        "single": 100 * float((sizes == 1).mean()),
        "by_class": by_class,
    }


def _share_rejected(scores: np.ndarray, one: Any) -> float:
    if one.threshold is None:
        return 0.0
    return 100 * float((scores > one.threshold).mean())


def page_of(outcome: Outcome, figures: dict[str, Any], title: str) -> str:
    """Returns the page of a calibration.

    Args:
        figures: what ``figures_of`` returned.
    """
    return page.page(title, *_sections(outcome, figures))


def _sections(outcome: Outcome, figures: dict[str, Any]) -> Iterator[str]:
    images = figures["images"]
    yield page.paragraph(
        f"All figures are for {images['reported']:,} images that weren't used for the calibration."
        f" {images['fitting']:,} others were used to fit the scaling, and {images['choosing']:,}"
        " to choose the"
        " thresholds."
    )
    yield page.section("Probabilities", _probabilities(figures), _diagrams(outcome))
    if figures["sets"]:
        yield page.section("Sets of classes", _sets(figures))
    yield page.section("Pictures of something else", _rejections(figures))


def _probabilities(figures: dict[str, Any]) -> str:
    kind = figures["scaling"]
    words = f"Logits: {_SCALINGS[kind]}."
    if kind == "temperature":
        words = f"Logits: {_SCALINGS[kind]}, {1 / figures['scale'][0]:.4g}."
    titles = {
        "nll": "negative log-likelihood",
        "ece": f"expected calibration error, {BINS} bins (%)",
        "brier": "Brier score",
        "accuracy": "accuracy (%)",
    }
    rows = []
    for key, title in titles.items():
        digits = 4 if key in ("nll", "brier") else 2
        cells = [f"{figures['reported'][when][key]:.{digits}f}" for when in ("before", "after")]
        rows.append((title, *cells))
    return page.paragraph(words) + page.table(["", "before", "after"], rows)


def _diagrams(outcome: Outcome) -> str:
    pictures = []
    for words, answers in (
        ("before", outcome.parts.reported),
        ("after", outcome.scaled.reported),
    ):
        drawn = plots.reliability(_diagram(answers))
        pictures.append(page.paragraph(words) + page.plot(f"Reliability {words}", drawn))
    return page.grid(pictures)


def _sets(figures: dict[str, Any]) -> str:
    count = figures["images"]["reported"]
    rows = []
    for one in figures["sets"]:
        low, high = wilson(round(count * one["found"] / 100), count)
        found = f"{one['found']:.2f} ({100 * low:.2f} to {100 * high:.2f})"
        if None in one["thresholds"]:
            found += "; based on too few images"
        rows.append((f"{one['coverage']:.1%}", found, f"{one['size']:.2f}", f"{one['single']:.2f}"))
    heads = [
        "asked for",
        "sets with the right class (%)",
        "classes in a set",
        "sets of one class (%)",
    ]
    names = list(figures["sets"][0]["by_class"])
    by_class = []
    for name in names:
        cells = []
        for one in figures["sets"]:
            values = one["by_class"][name]
            cells.append(f"{values['coverage']:.1f} ({values['size']:.2f})")
        by_class.append((name, figures["sets"][0]["by_class"][name]["images"], *cells))
    levels = [f"{one['coverage']:.1%}" for one in figures["sets"]]
    return (
        page.paragraph("With Wilson's 95 % interval of the share.")
        + page.table(heads, rows)
        + page.paragraph("By class: the share of sets with the right class (classes in a set).")
        + page.scroll_box(page.table(["class", "images", *levels], by_class))
    )


def _rejections(figures: dict[str, Any]) -> str:
    rows = []
    separation = []
    for name, found in figures["rejection"].items():
        for level, share in found["false_alarms"].items():
            others = [f"{one['rejected'][level]:.2f}" for one in found["outside"].values()]
            threshold = found["thresholds"][level]
            text = "too few images" if threshold is None else f"{threshold:.4g}"
            rows.append((f"{name}, {float(level):.1%}", text, f"{share:.2f}", *others))
        for folder, one in found["outside"].items():
            separation.append(
                (
                    f"{name}, {folder}",
                    f"{one['images']:,}",
                    f"{one['auroc']:.2f}",
                    f"{one['fpr95']:.2f}",
                )
            )
    folders = list(next(iter(figures["rejection"].values()))["outside"])
    heads = ["score, false alarms", "threshold", "rejected (%)"]
    heads += [f"rejected of {folder} (%)" for folder in folders]
    words = ["score, pictures", "images", "AUROC (%)", "FPR at 95 % (%)"]
    if not separation:
        return page.table(heads, rows)
    return (
        page.table(heads, rows)
        + page.paragraph("How well a score separates them from the model's classes:")
        + page.table(words, separation)
    )


def lines_of(figures: dict[str, Any]) -> Iterator[str]:
    """Yields the printed lines of a calibration."""
    before = figures["reported"]["before"]
    after = figures["reported"]["after"]
    kind = figures["scaling"]
    words = _SCALINGS[kind]
    if kind == "temperature":
        words += f", {1 / figures['scale'][0]:.4g}"
    yield f"scaling: {words}"
    yield f"calibration error: {before['ece']:.2f} % before, {after['ece']:.2f} % after"
    yield f"negative log-likelihood: {before['nll']:.4f} before, {after['nll']:.4f} after"
    for one in figures["sets"]:
        few = "; based on too few images" if None in one["thresholds"] else ""
        yield (
            f"coverage {one['coverage']:g}: the right class is in {one['found']:.2f} % of the sets,"
            f" of {one['size']:.2f} classes on average{few}"
        )
    for name, found in figures["rejection"].items():
        shares = ", ".join(
            f"{share:.2f} % (asked {100 * float(level):g} %)"
            for level, share in found["false_alarms"].items()
        )
        yield f"{name}: false alarms {shares}"
        for folder, one in found["outside"].items():
            yield (
                f"{name}, {folder}: AUROC {one['auroc']:.2f} %, FPR at 95 % {one['fpr95']:.2f} %"
                f" ({one['images']} images)"
            )
    images = figures["images"]
    yield (
        f"fitted on {images['fitting']} images, thresholds from {images['choosing']}, figures for"
        f" {images['reported']} others"
    )
