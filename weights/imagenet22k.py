"""ImageNet-1k's rows of a classifier that was trained on ImageNet-22k.

The orders are those of MODEL.PRETRAINED_CLASSES. "imagenet22k" are the sorted synsets of the
release of fall 2011, which a folder of them has. "imagenet22k_swin" is the order of the weights of
Swin Transformer (Liu et al. 2021, arXiv:2103.14030), whose fine-tuning keeps these rows.
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
    """Returns the row of each of ImageNet-1k's classes, by its place; one that has no row is left
    out.
    """
    lines = (
        Path(__file__).with_name("imagenet22k_rows.txt").read_text(encoding="utf-8").splitlines()
    )
    rows = [line.split()[_COLUMNS[order]] for line in lines if not line.startswith("#")]
    return {place: int(row) for place, row in enumerate(rows) if row != _ABSENT}


def keep_imagenet1k(
    model: Target,
    state: dict[str, paddle.Tensor],
    arrays: dict[str, np.ndarray],
    order: str,
    file: Path,
) -> list[str]:
    """Leaves ImageNet-1k's classes in the classifiers of ``arrays`` (of ``file``, in the model's
    layout).

    Returns:
        what it did, in words.

    A class that the order hasn't got keeps the model's fresh row. A file without a classifier, or
    with one of 1,000 classes, is left as it is; so is any for a model of other classes.

    Raises:
        InputError: a classifier of another number of classes.
    """
    names = [
        name
        for name in state
        if name.rpartition(".")[0] in model.classifier_names() and name in arrays
    ]
    found = {arrays[name].shape[-1:] for name in names}
    if not found or found == {(KEPT,)} or model.num_classes != KEPT:
        return []
    if found != {(CLASSES,)}:
        counts = " and ".join(str(shape[0]) if shape else "no" for shape in sorted(found))
        raise InputError(
            f"{file}: its classifier has {counts} classes, expected {CLASSES} (MODEL.PRETRAINED_CLASSES {order}) or"
            f" {KEPT}; set that to null for a fresh classifier"
        )
    rows = imagenet1k_rows(order)
    places = list(rows)
    for name in names:
        kept = state[name].numpy().copy()
        kept[..., places] = arrays[name][..., list(rows.values())]
        arrays[name] = kept
    fresh = f", {KEPT - len(rows)} fresh" if len(rows) < KEPT else ""
    return [
        f"classifier: {len(rows):,} of its {CLASSES:,} classes kept ({order}), those of ImageNet-1k{fresh}"
    ]
