"""The corruption errors of ImageNet-C (Hendrycks and Dietterich 2019, arXiv:1903.12261)."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from settings.corruptions import BENCHMARK, SEVERITIES

# AlexNet's errors on ImageNet-C in percent, in BENCHMARK's order, each the mean over the five
# severities of a corruption. They are those of google-research/augmix (imagenet.py, ALEXNET_ERR).
# Rounded, they are those of the paper's table 1, which also has the error on ImageNet's validation
# images.
_ALEXNET = (
    88.6428, 89.4468, 92.2640, 81.9880, 82.6268, 78.5948, 79.8360, 86.6816,
    82.6572, 81.9324, 56.4592, 85.3204, 64.6056, 71.7840, 60.6500,
)  # fmt: skip
ALEXNET: dict[str, float] = dict(zip(BENCHMARK, _ALEXNET, strict=True))
ALEXNET_CLEAN = 43.5
# AlexNet's errors can only be compared with those of models of ImageNet's 1,000 classes.
IMAGENET_CLASSES = 1000

# By corruption and severity, in percent.
Errors = Mapping[str, Mapping[int, float]]


def summarize(errors: Errors, clean: float, classes: int) -> dict[str, Any]:
    """Returns mean errors and corruption errors, in percent.

    - ``mean`` is the mean error of each corruption, and ``mean_error`` the mean of these.
    - ``CE`` is a corruption's mean error over AlexNet's, and ``relative_CE`` the same ratio of the
      increases over the clean errors. They are computed for models of 1,000 classes, for the
      corruptions of which all five severities were measured.
    - ``mCE`` and ``relative_mCE`` are their means, or None unless there are all 15 corruptions.

    Args:
        errors: by corruption and severity, in percent.
        clean: the error without a corruption.
        classes: number of classes of the model.
    """
    mean = {name: float(np.mean(list(severities.values()))) for name, severities in errors.items()}
    complete = [
        name
        for name in BENCHMARK
        if classes == IMAGENET_CLASSES and set(errors.get(name, ())) == set(SEVERITIES)
    ]
    ce = {name: 100 * mean[name] / ALEXNET[name] for name in complete}
    relative = {
        name: 100 * (mean[name] - clean) / (ALEXNET[name] - ALEXNET_CLEAN) for name in complete
    }
    all_complete = len(complete) == len(BENCHMARK)
    return {
        "clean_error": clean,
        "mean": mean,
        "mean_error": float(np.mean(list(mean.values()))),
        "CE": ce,
        "relative_CE": relative,
        "mCE": float(np.mean(list(ce.values()))) if all_complete else None,
        "relative_mCE": float(np.mean(list(relative.values()))) if all_complete else None,
    }


def format_table(errors: Errors, summary: Mapping[str, Any]) -> str:
    """Returns the errors as text: a line for each corruption, then the means.

    Args:
        errors: by corruption and severity, in percent.
        summary: as ``summarize`` returns it.
    """
    severities = sorted({severity for by_severity in errors.values() for severity in by_severity})
    heads = [*map(str, severities), "mean"]
    if summary["CE"]:
        heads += ["CE", "relative CE"]
    widths = [max(8, len(head) + 2) for head in heads]

    def line(first: str, cells: list[str]) -> str:
        aligned = (f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        return f"{first:<18}" + "".join(aligned)

    lines = [line("error, %", heads)]
    for name, by_severity in errors.items():
        values = [by_severity.get(severity) for severity in severities]
        values.append(summary["mean"][name])
        if summary["CE"]:
            values += [summary["CE"].get(name), summary["relative_CE"].get(name)]
        lines.append(line(name, ["-" if value is None else f"{value:.2f}" for value in values]))
    lines.append(
        f"clean: {summary['clean_error']:.2f}, mean over corruptions: {summary['mean_error']:.2f}"
    )
    if summary["mCE"] is not None:
        lines.append(f"mCE: {summary['mCE']:.2f}, relative mCE: {summary['relative_mCE']:.2f}")
    return "\n".join(lines)
