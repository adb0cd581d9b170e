"""The records of a run's probes (PROBE.FREQ). Paddle isn't imported here."""

from collections.abc import Mapping
from typing import Any

# What curves.png draws over the steps, with the labels of the axes.
CURVES = {"knn": "k-NN of features (%)", "rankme": "RankMe"}
_FORMATS = {"knn": "{:.2f}", "rankme": "{:.2f}", "feature_std": "{:.4f}"}


def probed_text(metrics: Mapping[str, Any]) -> str:
    """Returns the metrics of a probe as the end of a line; "" if there are none."""
    return "".join(
        f", {name}: {form.format(metrics[name])}"
        for name, form in _FORMATS.items()
        if name in metrics
    )
