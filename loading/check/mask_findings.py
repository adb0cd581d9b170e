"""The findings of a check about masks, in words."""

from collections.abc import Mapping

import numpy as np

from errors import printable
from loading.check.finding import EXAMPLES, NAMES, Finding, stops_a_run, with_messages
from loading.check.images import CheckedImages
from loading.check.masks import CheckedMasks
from loading.class_names import class_name
from settings.configuration import Configuration


def mask_findings(
    config: Configuration, mode: str, split: CheckedImages, listed: bool
) -> list[Finding]:
    """Returns findings about masks that don't fit their images, or hold a single index."""
    result = []
    for column, masks in split.masks.items():
        what = f"{NAMES[mode]} masks of the column '{column}'"
        unreadable = ~masks.records["readable"]
        unknown = masks.records["unknown"]
        unfit = ~masks.records["fits"]
        for flagged, problem in (
            (unreadable, "that can't be read"),
            (unknown, "with values that aren't classes"),
            (unfit, "whose size isn't that of their images"),
        ):
            if flagged.any():
                is_error = stops_a_run(config, mode, ~usable_masks(masks), listed)
                text = f"{what} {problem}"
                result.append(with_messages(masks.messages, flagged, text, is_error))
        ignored = masks.records["readable"] & ~masks.records["labelled"]
        single = (masks.records["indices"] == 1) & ~ignored
        for flagged, problem in (
            (ignored, "in which all pixels are ignored"),
            (single, "with a single index"),
        ):
            if flagged.any():
                places = np.flatnonzero(flagged)[:EXAMPLES].tolist()
                names = [printable(split.source.masks[column].name(place)) for place in places]
                is_error = bool(flagged.all()) and flagged is ignored and not listed
                result.append(Finding(f"{what} {problem}: {flagged.sum():,}", names, is_error))
    return result


def usable_masks(masks: CheckedMasks) -> np.ndarray:
    """Returns which masks a run can read, [n] bool."""
    records = masks.records
    return records["readable"] & ~records["unknown"] & records["fits"]


def index_findings(splits: Mapping[str, CheckedImages]) -> list[Finding]:
    """Returns findings about indices of masks that nothing is trained on, or nothing evaluates."""
    result = []
    for column, kind in splits["train"].masks.items():
        if kind.kind.classes:
            result += _empty_classes(splits, column)
    if not splits.keys() >= {"train", "val"}:
        return result
    train = splits["train"].masks
    for column, masks in splits["val"].masks.items():
        if column not in train or train[column].kind.classes:
            continue
        untrained = (masks.pixels > 0) & (train[column].pixels == 0)
        if untrained.any():
            indices = np.flatnonzero(untrained)[:EXAMPLES].tolist()
            text = f"indices that occur only in validation masks of the column '{column}'"
            result.append(Finding(f"{text}: {untrained.sum():,}", list(map(str, indices)), False))
    return result


def _empty_classes(splits: Mapping[str, CheckedImages], column: str) -> list[Finding]:
    """Returns findings about the classes of a column of masks that have no pixel in a part."""
    result = []
    classes = splits["train"].source.classes
    count = splits["train"].masks[column].kind.classes
    for mode, split in splits.items():
        if column not in split.masks:
            continue
        empty = np.flatnonzero(split.masks[column].pixels[:count] == 0)
        if len(empty):
            names = [class_name(classes, index) for index in empty[:EXAMPLES].tolist()]
            text = f"classes without a pixel in the {NAMES[mode]} masks of the column '{column}'"
            result.append(Finding(f"{text}: {len(empty):,}", names, False))
    return result
