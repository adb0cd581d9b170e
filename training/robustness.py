"""What corruptions cost: the figures of ImageNet-C (Hendrycks and Dietterich 2019,
arXiv:1903.12261).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from settings.ranges import BENCHMARK, SEVERITIES

# AlexNet's errors in percent, on ImageNet-C as it is published: the mean over the five severities
# of each corruption, in BENCHMARK's order (google-research/augmix, imagenet.py, ALEXNET_ERR;
# rounded, they are the paper's table 1), and on ImageNet's validation images (the same table).
_ALEXNET = (
    88.6428, 89.4468, 92.2640, 81.9880, 82.6268, 78.5948, 79.8360, 86.6816,
    82.6572, 81.9324, 56.4592, 85.3204, 64.6056, 71.7840, 60.6500,
)  # fmt: skip
ALEXNET: dict[str, float] = dict(zip(BENCHMARK, _ALEXNET, strict=True))
ALEXNET_CLEAN = 43.5
IMAGENET = 1000  # classes, for which AlexNet's errors mean something

Errors = Mapping[str, Mapping[int, float]]


def summarize(errors: Errors, clean: float, classes: int) -> dict[str, Any]:
    """Returns what the errors come to, in percent: ``mean`` by corruption and ``mean_error``, their
    mean.

    With ImageNet's 1,000 classes a corruption whose five severities are there also has ``CE``: its
    mean over AlexNet's. ``relative_CE`` is the same of what is added to the clean error. ``mCE``
    and ``relative_mCE`` are their means, once all fifteen corruptions are there; None until then.

    Args:
        errors: by corruption and severity, in percent.
        clean: the error without a corruption.
        classes: of the model.
    """
    mean = {name: float(np.mean(list(own.values()))) for name, own in errors.items()}
    whole = [
        name
        for name in BENCHMARK
        if classes == IMAGENET and set(errors.get(name, ())) == set(SEVERITIES)
    ]
    ce = {name: 100 * mean[name] / ALEXNET[name] for name in whole}
    relative = {
        name: 100 * (mean[name] - clean) / (ALEXNET[name] - ALEXNET_CLEAN) for name in whole
    }
    every = len(whole) == len(BENCHMARK)
    return {
        "clean_error": clean,
        "mean": mean,
        "mean_error": float(np.mean(list(mean.values()))),
        "CE": ce,
        "relative_CE": relative,
        "mCE": float(np.mean(list(ce.values()))) if every else None,
        "relative_mCE": float(np.mean(list(relative.values()))) if every else None,
    }


def format_table(errors: Errors, found: Mapping[str, Any]) -> str:
    """Returns the errors as lines: a row for each corruption, then what they come to (``summarize``)."""
    severities = sorted({severity for own in errors.values() for severity in own})
    heads = (*map(str, severities), "mean", *(("CE", "relative CE") if found["CE"] else ()))
    rows = [f"{'error, %':<18}" + "".join(f"{head:>{max(8, len(head) + 2)}}" for head in heads)]
    for name, own in errors.items():
        values = [own.get(severity) for severity in severities]
        values += [found["mean"][name], found["CE"].get(name), found["relative_CE"].get(name)]
        cells = ("-" if value is None else f"{value:.2f}" for value in values)
        rows.append(
            f"{name:<18}"
            + "".join(f"{c:>{max(8, len(h) + 2)}}" for c, h in zip(cells, heads, strict=False))
        )
    rows.append(
        f"clean: {found['clean_error']:.2f}, mean of the corruptions: {found['mean_error']:.2f}"
    )
    if found["mCE"] is not None:
        rows.append(f"mCE: {found['mCE']:.2f}, relative mCE: {found['relative_mCE']:.2f}")
    return "\n".join(rows)
