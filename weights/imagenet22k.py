"""Selects the rows of ImageNet-1k's classes in a classifier that was trained on ImageNet-22k.

MODEL.PRETRAINED_CLASSES names the order of the rows. "imagenet22k" is the order of the sorted
synsets of the release of fall 2011, as folders have it. "imagenet22k_swin" is the order in the
weights of Swin Transformer (Liu et al. 2021, arXiv:2103.14030), whose fine-tuning selects the rows
in the same way.
"""

from pathlib import Path

import numpy as np
import paddle

from errors import InputError
from weights.layout import Target

CLASSES = 21_841
KEPT = 1000
_COLUMNS = {"imagenet22k": 1, "imagenet22k_swin": 2}
_ABSENT = "-"


def imagenet1k_rows(order: str) -> dict[int, int]:
    """Returns the row by class of ImageNet-1k (0 to 999), without the classes that have no row."""
    lines = (
        Path(__file__).with_name("imagenet22k_rows.txt").read_text(encoding="utf-8").splitlines()
    )
    rows = [line.split()[_COLUMNS[order]] for line in lines if not line.startswith("#")]
    return {label: int(row) for label, row in enumerate(rows) if row != _ABSENT}


def keep_imagenet1k(
    model: Target,
    state: dict[str, paddle.Tensor],
    arrays: dict[str, np.ndarray],
    order: str,
    file: Path,
) -> list[str]:
    """Reduces the classifiers of ``arrays`` to the classes of ImageNet-1k.

    A class that has no row in the file keeps the model's fresh one. Nothing is changed if the file
    has no classifier, or one of 1,000 classes, or if the model has other classes.

    Args:
        arrays: the arrays of ``file``, in the model's layout.
        order: the value of MODEL.PRETRAINED_CLASSES.

    Returns:
        a line that says what was kept, if anything was changed.

    Raises:
        InputError: the classifier has another number of classes.
    """
    names = [
        name
        for name in state
        if name.rpartition(".")[0] in model.classifier_names() and name in arrays
    ]
    sizes = {arrays[name].shape[-1:] for name in names}
    if not sizes or sizes == {(KEPT,)} or model.num_classes != KEPT:
        return []
    if sizes != {(CLASSES,)}:
        counts = " and ".join(str(shape[0]) if shape else "no" for shape in sorted(sizes))
        raise InputError(
            f"{file}: its classifier has {counts} classes, expected {CLASSES} (MODEL.PRETRAINED_CLASSES {order}) or"
            f" {KEPT}; set it to null for a new classifier"
        )
    rows = imagenet1k_rows(order)
    labels = list(rows)
    for name in names:
        kept = state[name].numpy().copy()
        kept[..., labels] = arrays[name][..., list(rows.values())]
        arrays[name] = kept
    fresh = f", {KEPT - len(rows)} fresh" if len(rows) < KEPT else ""
    return [
        f"classifier: {len(rows):,} of its {CLASSES:,} classes kept ({order}), those of ImageNet-1k{fresh}"
    ]
