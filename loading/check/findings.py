"""The findings of a check of data, in words.

An error would end a run with this data. A remark names what makes its numbers doubtful.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from errors import printable
from loading.check.duplicates import count_bits, near_pairs
from loading.check.finding import EXAMPLES, NAMES, Finding, stops_a_run, with_messages
from loading.check.images import CheckedImages
from loading.check.mask_findings import index_findings, mask_findings
from loading.check.masks import held_indices
from loading.class_names import class_name
from loading.label_sets import LabelSets, are_known, every_label, label_groups, take_labels
from loading.layout import nested_classes, one_class
from loading.transforms import most_resized
from loading.transforms.image import covering, evaluation_size
from settings.configuration import Configuration
from settings.registry import datasets

# Examples of pairs of images that look alike.
_PAIRS = 8


class ReadableImages(NamedTuple):
    """The readable images of all splits, one after the other.

    Attributes:
        modes: names of the splits, "train" and "val".
        mode: the index of each image's split in ``modes``, [n].
        place: of each image in its split, [n].
        labels: [n]; equal where images have the same label, or the same set of labels, or where
            the images of a split have none.
        content: a hash of each file's bytes, [n].
        hashes: the perceptual hash of each image, [n].
        blank: whether each image shows nothing, [n].
    """

    modes: list[str]
    mode: np.ndarray
    place: np.ndarray
    labels: np.ndarray
    content: np.ndarray
    hashes: np.ndarray
    blank: np.ndarray


class Duplicates(NamedTuple):
    """Which of the images have a duplicate, [n] bool each.

    Attributes:
        same: there is another one in its split.
        leaked: it is in the validation set, and another one is in the training set.
        relabelled: another one of them has another label.
    """

    same: np.ndarray
    leaked: np.ndarray
    relabelled: np.ndarray


def images_of(splits: Mapping[str, CheckedImages]) -> ReadableImages:
    """Returns the images of all splits that can be read."""
    places = [np.flatnonzero(split.records["readable"]) for split in splits.values()]
    pairs = list(zip(splits.values(), places, strict=True))

    def column(name: str) -> np.ndarray:
        return np.concatenate([split.records[name][readable] for split, readable in pairs])

    if have_labels(splits):
        labels = [label_groups(split.source.labels)[readable] for split, readable in pairs]
    else:
        labels = [np.zeros(len(readable), np.int64) for readable in places]
    return ReadableImages(
        modes=list(splits),
        mode=np.repeat(np.arange(len(splits)), [len(readable) for readable in places]),
        place=np.concatenate(places),
        labels=np.concatenate(labels),
        content=column("content"),
        hashes=column("hash"),
        blank=column("blank"),
    )


def have_labels(splits: Mapping[str, CheckedImages]) -> bool:
    """Returns whether the images of all splits have labels."""
    return all(are_known(split.source.labels) for split in splits.values())


def exact_duplicates(images: ReadableImages) -> Duplicates:
    """Returns which images have the same bytes as another image."""
    _, group = np.unique(images.content, return_inverse=True)
    train, val, low, high = _counts(group, images)
    is_val = _is_val(images)
    in_split = np.where(is_val, val[group], train[group])
    return Duplicates(
        same=in_split > 1,
        leaked=is_val & (train[group] > 0),
        relabelled=low[group] != high[group],
    )


def near_duplicates(images: ReadableImages) -> tuple[Duplicates, int]:
    """Finds the images that look like another one whose file has other bytes.

    Blank images aren't compared. A validation image whose file is also in the training set isn't
    leaked here: ``exact_duplicates`` reports it.

    Returns:
        (the duplicates, how many comparisons were left out).
    """
    # Files of the same bytes are compared once. So there are three levels: images, the files that
    # they are copies of (``group``), and the hashes of these files (``node``).
    first, group = np.unique(images.content, return_index=True, return_inverse=True)[1:]
    train, val, low, high = _counts(group, images)
    compared = np.flatnonzero(~images.blank[first])
    hashes, node = np.unique(images.hashes[first][compared], return_inverse=True)
    # For each hash: how many files of each split have it, and their labels' bounds.
    counts = np.zeros((2, len(hashes)), int)
    np.add.at(counts[0], node, train[compared] > 0)
    np.add.at(counts[1], node, val[compared] > 0)
    lowest, highest = _bounds(node, low[compared], high[compared], len(hashes))
    # The same of the hashes near it: whether a file of each split has one, and the labels' bounds.
    has_near = np.zeros((2, len(hashes)), bool)
    near_lowest = lowest.copy()
    near_highest = highest.copy()

    def meet(one: np.ndarray, other: np.ndarray) -> None:
        for a, b in ((one, other), (other, one)):
            for split in (0, 1):
                np.logical_or.at(has_near[split], a, counts[split][b] > 0)
            np.minimum.at(near_lowest, a, lowest[b])
            np.maximum.at(near_highest, a, highest[b])

    missed = near_pairs(hashes, meet)
    # For each file: whether it looks like a training file, like a validation file, and like a file
    # of another label.
    like_train = np.zeros(len(first), bool)
    like_val = np.zeros(len(first), bool)
    relabelled = np.zeros(len(first), bool)
    like_train[compared] = (counts[0][node] > (train[compared] > 0)) | has_near[0][node]
    like_val[compared] = (counts[1][node] > (val[compared] > 0)) | has_near[1][node]
    relabelled[compared] = (near_lowest[node] < low[compared]) | (
        near_highest[node] > high[compared]
    )
    is_val = _is_val(images)
    duplicates = Duplicates(
        same=np.where(is_val, like_val[group], like_train[group]),
        leaked=is_val & like_train[group] & (train[group] == 0),
        relabelled=relabelled[group],
    )
    return duplicates, missed


def _is_val(images: ReadableImages) -> np.ndarray:
    return np.array([mode == "val" for mode in images.modes])[images.mode]


def _counts(
    group: np.ndarray, images: ReadableImages
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns the numbers and the labels of the images in each group.

    Returns:
        (training images, validation images, the lowest label, the highest label), [groups] each.
    """
    is_val = _is_val(images)
    count = group.max(initial=-1) + 1
    low, high = _bounds(group, images.labels, images.labels, count)
    return (
        np.bincount(group[~is_val], minlength=count),
        np.bincount(group[is_val], minlength=count),
        low,
        high,
    )


def _bounds(
    group: np.ndarray, low: np.ndarray, high: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the lowest ``low`` and the highest ``high`` of each of ``count`` groups."""
    lowest = np.full(count, np.iinfo(np.int64).max)
    highest = np.full(count, -1)
    np.minimum.at(lowest, group, low)
    np.maximum.at(highest, group, high)
    return lowest, highest


def duplicate_pairs(images: ReadableImages, alike: Duplicates) -> list[tuple[int, int]]:
    """Returns examples of images that look alike, as pairs of indices of ``images``.

    Each image comes with the one that is most like it. Pairs of two splits come first.
    """
    is_val = _is_val(images)
    pairs: list[tuple[int, int]] = []
    for flagged in (alike.leaked, alike.relabelled, alike.same):
        for index in np.flatnonzero(flagged)[: _PAIRS - len(pairs)].tolist():
            candidates = images.content != images.content[index]
            if flagged is alike.leaked:
                candidates &= is_val != is_val[index]
            else:
                candidates &= ~images.blank
            if flagged is alike.relabelled:
                candidates &= images.labels != images.labels[index]
            is_shown = any(index in pair for pair in pairs)
            if candidates.any() and not is_shown:
                distances = count_bits(images.hashes ^ images.hashes[index]).astype(int)
                # No distance is 65.
                pairs.append((index, int(np.where(candidates, distances, 65).argmin())))
    return pairs


def findings(
    config: Configuration,
    splits: Mapping[str, CheckedImages],
    problems: Mapping[str, Sequence[str]],
    skipped: Sequence[str] = (),
    listed: bool = False,
) -> tuple[list[Finding], ReadableImages, Duplicates]:
    """Returns (the findings, the images that can be read, which of them look alike).

    Args:
        problems: what the readers left out, by mode.
        skipped: paths of entries that aren't data.
        listed: lists of the readable images are written, so images that can't be read aren't
            errors.
    """
    result = _reader_findings(splits, problems, skipped, listed)
    for mode, split in splits.items():
        result += _image_findings(config, mode, split, listed)
        result += mask_findings(config, mode, split, listed)
    result += index_findings(splits)
    result += _label_findings(config, splits, listed)
    images = images_of(splits)
    same = exact_duplicates(images)
    alike, missed = near_duplicates(images)
    result += _duplicate_findings(splits, images, same, "are the same file as")
    result += _duplicate_findings(splits, images, alike, "look like")
    if missed:
        text = f"comparisons of possibly similar images that were skipped: {missed:,}"
        result.append(Finding(text, [], False))
    result += _remarks(splits, images, images.blank, "images of one colour")
    turned = sum(int((split.records["turn"] > 1).sum()) for split in splits.values())
    if turned:
        oriented = config.DATA.EXIF_ORIENTATION
        what = "they are" if oriented else "they are read as they are stored"
        text = (
            f"images with an EXIF rotation: {turned:,};"
            f" with DATA.EXIF_ORIENTATION {oriented} {what}"
        )
        result.append(Finding(text, [], False))
    return result, images, alike


def _reader_findings(
    splits: Mapping[str, CheckedImages],
    problems: Mapping[str, Sequence[str]],
    skipped: Sequence[str],
    listed: bool,
) -> list[Finding]:
    """Returns findings about the entries that a dataset's reader skipped."""
    result = []
    for mode, messages in problems.items():
        if not messages:
            continue
        text = messages[0]
        if len(messages) > 1:
            text += f" (and {len(messages) - 1} more)"
        is_error = not listed or mode not in splits
        result.append(Finding(text, messages[1:EXAMPLES], is_error))
    if skipped:
        text = f"skipped entries that aren't data (hidden or system files, files of runs, links): {len(skipped):,}"
        result.append(Finding(text, skipped[:EXAMPLES], False))
    return result


def _image_findings(
    config: Configuration, mode: str, split: CheckedImages, listed: bool
) -> list[Finding]:
    """Returns findings about images that can't be read, or not as they should be."""
    result = []
    broken = ~split.records["readable"]
    if broken.any():
        is_error = stops_a_run(config, mode, broken, listed)
        text = f"{NAMES[mode]} images that can't be read"
        result.append(with_messages(split.messages, broken, text, is_error))
    flawed = split.records["flawed"]
    if flawed.any():
        text = f"{NAMES[mode]} images that are damaged, but decoded"
        result.append(with_messages(split.messages, flawed, text, False))
    if mode == "val":
        narrow = too_narrow(config, split.records)
        if narrow.any():
            text = f"{NAMES[mode]} images too narrow to be resized: {narrow.sum():,}"
            places = np.flatnonzero(narrow)[:EXAMPLES].tolist()
            result.append(Finding(text, [split.source.name(place) for place in places], True))
    return result


def too_narrow(config: Configuration, records: np.ndarray) -> np.ndarray:
    """Returns which images have more than MAX_PIXELS after ``EvalTransform`` resizes them, [n]."""
    widths = np.maximum(records["width"], 1).tolist()
    heights = np.maximum(records["height"], 1).tolist()
    to = evaluation_size(config)
    sizes = zip(widths, heights, strict=True)
    pixels = np.array([math.prod(covering(*size, to)) for size in sizes], np.int64)
    limit = max(most_resized(config), math.prod(to))
    keeps_ratio = config.DATA.CROP_MODE in ("center", "short")
    return (pixels > limit) & keeps_ratio & records["readable"]


def _label_findings(
    config: Configuration, splits: Mapping[str, CheckedImages], listed: bool
) -> list[Finding]:
    """Returns findings about classes.

    They are about classes that have no image in a split, and about folders of images that may be
    several classes.
    """
    result = []
    source = splits["train"].source
    if not have_labels(splits):
        return result
    classes = source.classes
    has_sets = isinstance(source.labels, LabelSets)
    if splits.keys() >= {"train", "val"}:
        train_counts = _images_by_class(splits["train"], listed)
        val_counts = _images_by_class(splits["val"], listed)
        size = max(len(classes), len(train_counts), len(val_counts))
        train = np.pad(train_counts, (0, size - len(train_counts))) > 0
        val = np.pad(val_counts, (0, size - len(val_counts))) > 0

        def report(flagged: np.ndarray, text: str, is_error: bool = False) -> None:
            if flagged.any():
                labels = np.flatnonzero(flagged)[:EXAMPLES].tolist()
                names = [class_name(classes, label) for label in labels]
                result.append(Finding(f"{text}: {flagged.sum():,}", names, is_error))

        report(~(train | val), "classes without an image")
        report(val & ~train, "classes with validation images only", is_error=not has_sets)
        report(train & ~val, "classes without a validation image")
        # Images of one class may have much to learn from, if it isn't their class.
        task = datasets.components[config.DATA.DATASET].given.get("task", "classification")
        if not has_sets and task in ("classification", "any"):
            present = np.flatnonzero(train | val)
            problem = one_class(present, classes, config.DATA.DATA_PATH, source.paths)
            if problem:
                result.append(Finding(problem, [], True))
    if config.DATA.DATASET == "folder" and isinstance(source.labels, np.ndarray):
        remark = nested_classes(source.labels, classes, source.paths)
        if remark:
            result.append(Finding(remark, [], False))
    return result


def _images_by_class(split: CheckedImages, listed: bool) -> np.ndarray:
    """Returns the number of images of each class; with ``listed``, only of readable ones."""
    labels = split.source.labels
    if listed:
        labels = take_labels(labels, np.flatnonzero(split.records["readable"]))
    return np.bincount(every_label(labels))


def _duplicate_findings(
    splits: Mapping[str, CheckedImages], images: ReadableImages, alike: Duplicates, verb: str
) -> list[Finding]:
    leaked = f"validation images that {verb} a training image"
    result = _remarks(splits, images, alike.leaked, leaked)
    result += _remarks(
        splits, images, alike.relabelled, f"images that {verb} one that has another label"
    )
    for number, mode in enumerate(images.modes):
        name = NAMES[mode]
        flagged = alike.same & (images.mode == number)
        text = f"{name} images that {verb} another {name} image"
        result += _remarks(splits, images, flagged, text)
    return result


def _remarks(
    splits: Mapping[str, CheckedImages], images: ReadableImages, flagged: np.ndarray, text: str
) -> list[Finding]:
    """Returns a remark about the flagged images, or none if there are none."""
    if not flagged.any():
        return []
    places = np.flatnonzero(flagged)[:EXAMPLES].tolist()
    examples = [image_name(splits, images, place) for place in places]
    return [Finding(f"{text}: {flagged.sum():,}", examples, False)]


def image_name(splits: Mapping[str, CheckedImages], images: ReadableImages, index: int) -> str:
    """Returns the name of a readable image, for messages."""
    split = splits[images.modes[images.mode[index]]]
    return printable(split.source.name(int(images.place[index])))


def table(splits: Mapping[str, CheckedImages]) -> list[tuple[str, list[str]]]:
    """Returns the rows of a table: a name, and its value in each split."""
    rows: dict[str, list[str]] = {}
    columns = dict.fromkeys(column for split in splits.values() for column in split.masks)
    for split in splits.values():
        records = split.records
        known = records[records["width"] > 0]
        short = np.minimum(known["width"], known["height"])
        shorter_side = ""
        if len(short):
            shorter_side = f"{short.min():,} to {short.max():,}, median {np.median(short):,.0f}"
        classes = ""
        per_class = ""
        if are_known(split.source.labels):
            counts = np.bincount(every_label(split.source.labels))
            held = counts[counts > 0]
            classes = f"{len(held):,}"
            per_class = f"{held.min(initial=len(records)):,} to {held.max(initial=0):,}"
        values = {
            "images": f"{len(records):,}",
            "classes": classes,
            "images per class": per_class,
            "megabytes": f"{records['bytes'].sum() / 1e6:,.1f}",
            "can't be read": f"{(~records['readable']).sum():,}",
            "shorter side": shorter_side,
            "largest": _largest(known),
            "formats": _value_counts(known["format"]),
            "modes": _value_counts(known["mode"]),
        }
        for column in columns:
            # One part may have masks that the other part lacks.
            held = ""
            per_mask = ""
            if masks := split.masks.get(column):
                held = held_indices(masks, split.source.classes if masks.kind.classes else ())
                counts = masks.records["indices"][masks.records["readable"]]
                if len(counts):
                    per_mask = f"{counts.min():,} to {counts.max():,}"
            values[f"{column}: pixels"] = held
            values[f"{column}: indices in a mask"] = per_mask
        for name, value in values.items():
            rows.setdefault(name, []).append(value)
    return [(name, values) for name, values in rows.items() if any(values)]


def _largest(records: np.ndarray) -> str:
    """Returns the size of the image with the most pixels."""
    if not len(records):
        return ""
    pixels = records["width"].astype(np.int64) * records["height"]
    largest = records[pixels.argmax()]
    return f"{largest['width']} x {largest['height']}"


def _value_counts(values: np.ndarray) -> str:
    """Returns how often each value comes, in words, the most frequent first."""
    names, counts = np.unique(values[values != b""], return_counts=True)
    ordered = sorted(zip(counts.tolist(), names.tolist(), strict=True), reverse=True)
    return ", ".join(f"{name.decode()} {count:,}" for count, name in ordered)
