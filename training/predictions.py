"""What an evaluation says of each sample: kept on the device, gathered once at a run's end, written
as a table.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from datasets import ImageDataset
from loading.tables import csv_line
from training.run import Run
from utils import all_gather, rank, writing_whole

FILE = "predictions.csv"  # of the model's weights; of the averaged ones predictions_ema.csv
SINGLE_LABEL_COLUMNS = ("image", "label", "predicted", "probability")
# of an image of several classes
MULTILABEL_COLUMNS = ("image", "labels", "predicted", "worst", "worst_probability")


def file_name(split: str) -> str:
    """Returns the name of a split's table: of "val" and "ema"."""
    return FILE if split == "val" else f"predictions_{split}.csv"


class Predictions:
    """This rank's samples of an evaluation, in the order in which its loader gave them.

    A classifier keeps 20 bytes of each, as tensors: no batch waits for the device. Of an image of
    several classes, K in all, it is K / 4 + 16.
    """

    def __init__(self) -> None:
        self.columns: dict[str, list[Any]] = {}

    def add(self, **columns: Any) -> None:
        """Takes in some samples: tensors or arrays [B, ...] by name, the same names each time."""
        for name, values in columns.items():
            self.columns.setdefault(name, []).append(values)

    def gather(self) -> dict[str, np.ndarray]:
        """Returns all ranks' samples, each once, in the dataset's order; nothing where nothing was
        kept.

        Every rank calls it. Rank r of R has every R-th sample from the r-th on
        (``EvalBatchSampler``).
        """
        parts = all_gather({name: _join(values) for name, values in self.columns.items()})
        found = {}
        # there is no evaluation without a sample, and rank 0 has the first
        for name, first in parts[0].items():
            count = sum(len(part.get(name, ())) for part in parts)
            found[name] = np.empty((count, *first.shape[1:]), first.dtype)
            for place, part in enumerate(parts):
                if name in part:
                    found[name][place :: len(parts)] = part[name]
        return found


def _join(values: list[Any]) -> np.ndarray:
    return (
        paddle.concat(values).numpy()
        if isinstance(values[0], paddle.Tensor)
        else np.concatenate(values)
    )


def write_tables(run: Run, dataset: ImageDataset, kept: Mapping[str, Predictions]) -> None:
    """Writes the table of each split into the run's folder; every rank calls it. A failure is
    logged, and ends no run.

    Args:
        dataset: whose samples they are.
    """
    for split, own in kept.items():
        found = own.gather()
        if found and rank() == 0:
            with run.logging_failure(file_name(split)):
                write(run.directory / file_name(split), found, dataset, run.config.DATA.DATA_PATH)


def write(file: Path, found: Mapping[str, np.ndarray], dataset: ImageDataset, root: str) -> None:
    """Writes a table with a row for each sample, in the dataset's order.

    Of one class per image: ``SINGLE_LABEL_COLUMNS``, and where classes have names these two, too. Of several:
    ``MULTILABEL_COLUMNS``: labels and predicted ones are numbers with spaces between, the worst is the class
    whose probability is farthest from the truth.

    Args:
        found: ``Predictions.gather``'s.
        root: the folder to which images' names are relative.

    Raises:
        OSError: it can't be written.
    """
    classes = dataset.classes
    several = "truth" in found
    with writing_whole(file) as out:
        head = MULTILABEL_COLUMNS if several else SINGLE_LABEL_COLUMNS
        if classes and not several:
            head = (*SINGLE_LABEL_COLUMNS, "class", "predicted_class")
        out.write(",".join(head) + "\n")
        columns = (
            found.values()
            if several
            else (found[name].tolist() for name in SINGLE_LABEL_COLUMNS[1:])
        )
        prefix = _prefix(root)
        for index, (first, second, *rest) in enumerate(zip(*columns, strict=True)):
            name = dataset.name(index).removeprefix(prefix)
            if several:
                out.write(
                    csv_line(
                        name, _numbers(first), _numbers(second), rest[0], round(float(rest[1]), 6)
                    )
                )
            else:
                names = [
                    classes[label] if label < len(classes) else label
                    for label in (first, second)
                    if classes
                ]
                out.write(csv_line(name, first, second, round(rest[0], 6), *names))


def name_of(dataset: ImageDataset, index: int, root: str) -> str:
    """Returns an image's name as a table has it."""
    return dataset.name(index).removeprefix(_prefix(root))


def _prefix(root: str) -> str:
    return f"{Path(root)}/"


def _numbers(packed: np.ndarray) -> str:
    """The places of the bits that are set, with spaces between."""
    return " ".join(map(str, np.flatnonzero(np.unpackbits(packed)).tolist()))
