"""What a check found, in words: what stops a run, and what spoils its numbers."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from errors import printable
from loading.check.duplicates import count_bits, near_pairs
from loading.check.images import CheckedImages
from loading.class_names import class_name
from loading.label_sets import LabelSets, every_label, kinds, take_labels
from loading.layout import nested_classes, one_class
from loading.transforms import most_resized
from loading.transforms.image import before_crop, covering
from settings.options import Configuration, pair

NAMES = {"train": "training", "val": "validation"}
# of a finding; of images that look alike
_EXAMPLES = 5
_PAIRS = 8


class Finding(NamedTuple):
    """A line, and some of the images that it is about. ``stops``: a run with these data ends in an
    error.
    """

    text: str
    examples: Sequence[str]
    is_error: bool


class ReadableImages(NamedTuple):
    """Those of all parts that can be read, one after the other: [n] each, but for the names of the
    parts.

    ``mode`` and ``place`` say where an image is from, ``labels`` which have the same label, or set
    of labels.
    """

    modes: list[str]
    mode: np.ndarray
    place: np.ndarray
    labels: np.ndarray
    content: np.ndarray
    hashes: np.ndarray
    blank: np.ndarray


class Duplicates(NamedTuple):
    """Which of the images are there more than once, [n] bool: ``same`` in their part, ``leaked``
    from training into validation, ``torn`` between labels.
    """

    same: np.ndarray
    leaked: np.ndarray
    torn: np.ndarray


def images_of(parts: Mapping[str, CheckedImages]) -> ReadableImages:
    """Returns the images that can be read."""
    kept = [np.flatnonzero(part.records["readable"]) for part in parts.values()]
    columns = [
        np.concatenate(
            [part.records[name][own] for part, own in zip(parts.values(), kept, strict=True)]
        )
        for name in ("content", "hash", "blank")
    ]
    labels = [
        kinds(part.source.labels)[own] for part, own in zip(parts.values(), kept, strict=True)
    ]
    mode = np.repeat(np.arange(len(parts)), [len(own) for own in kept])
    return ReadableImages(list(parts), mode, np.concatenate(kept), np.concatenate(labels), *columns)


def exact_duplicates(images: ReadableImages) -> Duplicates:
    """Returns which images have the same bytes as another."""
    _, group = np.unique(images.content, return_inverse=True)
    train, val, low, high = _counts(group, images)
    is_val = _is_val(images)
    own = np.where(is_val, val[group], train[group])
    return Duplicates(own > 1, is_val & (train[group] > 0), low[group] != high[group])


def near_duplicates(images: ReadableImages) -> tuple[Duplicates, int]:
    """Returns which images look like another one of other bytes, and how many comparisons were left
    out.

    Blank ones aren't compared. Where an image has a copy in the other part, it isn't reported
    again.
    """
    first, group = np.unique(images.content, return_index=True, return_inverse=True)[1:]
    train, val, low, high = _counts(group, images)
    seen = np.flatnonzero(~images.blank[first])  # files that differ, and aren't blank
    hashes, node = np.unique(images.hashes[first][seen], return_inverse=True)
    found = np.zeros((2, len(hashes)), int)  # files in each part that look so
    np.add.at(found[0], node, train[seen] > 0)
    np.add.at(found[1], node, val[seen] > 0)
    lowest, highest = _bounds(node, low[seen], high[seen], len(hashes))
    beside = np.zeros((2, len(hashes)), bool)
    around = (lowest.copy(), highest.copy())

    def meet(one: np.ndarray, other: np.ndarray) -> None:
        for a, b in ((one, other), (other, one)):
            for part in (0, 1):
                np.logical_or.at(beside[part], a, found[part][b] > 0)
            np.minimum.at(around[0], a, lowest[b])
            np.maximum.at(around[1], a, highest[b])

    missed = near_pairs(hashes, meet)
    files = np.zeros((3, len(first)), bool)  # near a training file, near a validation file, torn
    for part, own in enumerate((train, val)):
        files[part, seen] = (found[part][node] > (own[seen] > 0)) | beside[part][node]
    files[2, seen] = (around[0][node] < low[seen]) | (around[1][node] > high[seen])
    is_val = _is_val(images)
    same = np.where(is_val, files[1][group], files[0][group])
    return Duplicates(same, is_val & files[0][group] & (train[group] == 0), files[2][group]), missed


def _is_val(images: ReadableImages) -> np.ndarray:
    return np.array([mode == "val" for mode in images.modes])[images.mode]


def _counts(
    group: np.ndarray, images: ReadableImages
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """By group: training images, validation images, the lowest label, the highest."""
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
    lowest = np.full(count, np.iinfo(np.int64).max)
    highest = np.full(count, -1)
    np.minimum.at(lowest, group, low)
    np.maximum.at(highest, group, high)
    return lowest, highest


def duplicate_pairs(images: ReadableImages, alike: Duplicates) -> list[tuple[int, int]]:
    """Returns examples of images that look alike, across the parts first: [(index, index of the
    most alike)].
    """
    is_val = _is_val(images)
    found = []
    for flagged, across in ((alike.leaked, True), (alike.torn, False), (alike.same, False)):
        for index in np.flatnonzero(flagged)[: _PAIRS - len(found)]:
            apart = count_bits(images.hashes ^ images.hashes[index]).astype(int)
            other = images.content != images.content[index]
            other &= (is_val != is_val[index]) if across else ~images.blank
            if flagged is alike.torn:
                other &= images.labels != images.labels[index]
            if other.any() and (int(index) not in {place for pair in found for place in pair}):
                found.append((int(index), int(np.where(other, apart, 65).argmin())))
    return found


def findings(
    config: Configuration,
    parts: Mapping[str, CheckedImages],
    problems: Mapping[str, Sequence[str]],
    skipped: Sequence[str] = (),
    listed: bool = False,
) -> tuple[list[Finding], ReadableImages, Duplicates]:
    """Returns what was found, the images that can be read, and which of them look alike.

    Args:
        problems: what the readers left out, by mode.
        skipped: paths of entries that aren't data.
        listed: lists of the readable images are written, so the other images don't stop a run.
    """
    found = []
    for mode, said in problems.items():
        if said:
            text = said[0] if len(said) == 1 else f"{said[0]} (and {len(said) - 1} more)"
            stops = not listed or mode not in parts
            found.append(Finding(text, said[1:_EXAMPLES], stops))
    if skipped:
        found.append(
            Finding(
                f"hidden or system entries, skipped: {len(skipped):,}", skipped[:_EXAMPLES], False
            )
        )
    for mode, part in parts.items():
        broken = ~part.records["readable"]
        if broken.any():
            kept = listed or (config.DATA.SKIP_BROKEN and mode == "train")
            stops = bool(broken.all()) or not kept
            found.append(_of_files(part, broken, f"{NAMES[mode]} images that can't be read", stops))
        if part.records["flawed"].any():
            text = f"{NAMES[mode]} images that are damaged, but decoded"
            found.append(_of_files(part, part.records["flawed"], text, False))
        narrow = too_narrow(config, part.records) if mode == "val" else np.zeros(0, bool)
        if narrow.any():
            names = list(map(part.source.name, np.flatnonzero(narrow)[:_EXAMPLES].tolist()))
            found.append(
                Finding(
                    f"{NAMES[mode]} images too narrow to be resized: {narrow.sum():,}", names, True
                )
            )
    found += _labels(config, parts, listed)
    images = images_of(parts)
    same, (like, missed) = exact_duplicates(images), near_duplicates(images)
    found += _repeats(parts, images, same, "are the same file as")
    found += _repeats(parts, images, like, "look like")
    if missed:
        found.append(
            Finding(f"comparisons of images that may look alike, left out: {missed:,}", [], False)
        )
    found += _findings(parts, images, images.blank, "images of one colour")
    turned = sum(int((part.records["turn"] > 1).sum()) for part in parts.values())
    if turned:
        oriented = config.DATA.EXIF_ORIENTATION
        what = "so they are" if oriented else "they are read as they are stored"
        text = f"images whose EXIF turns them: {turned:,}; with DATA.EXIF_ORIENTATION {oriented} {what}"
        found.append(Finding(text, [], False))
    return found, images, like


def too_narrow(config: Configuration, records: np.ndarray) -> np.ndarray:
    """Returns which images have more than MAX_PIXELS once they are resized, as ``EvalTransform``
    does.
    """
    data, (widths, heights) = (
        config.DATA,
        (np.maximum(records[side], 1).tolist() for side in ("width", "height")),
    )
    to = before_crop(pair(data.IMAGE_SIZE), data.CROP_PCT)
    sides = zip(widths, heights, strict=True)
    resized = np.array(
        [math.prod(covering(width, height, to)) for width, height in sides], np.int64
    )
    return (
        (resized > max(most_resized(config), math.prod(to)))
        & (data.CROP_MODE != "squash")
        & records["readable"]
    )


def _of_files(part: CheckedImages, flagged: np.ndarray, text: str, stops: bool) -> Finding:
    said = [
        part.messages[place]
        for place in np.flatnonzero(flagged)[:_EXAMPLES].tolist()
        if place in part.messages
    ]
    return Finding(f"{text}: {flagged.sum():,}", said, stops)


def _labels(
    config: Configuration, parts: Mapping[str, CheckedImages], listed: bool
) -> list[Finding]:
    """Classes that a part lacks."""
    found = []
    several = isinstance(parts["train"].source.labels, LabelSets)
    counts = {mode: _images_by_class(part, listed) for mode, part in parts.items()}
    if counts.keys() >= {"train", "val"}:
        classes = parts["train"].source.classes
        size = max(len(classes), *map(len, counts.values()))
        train, val = (
            np.pad(counts[mode], (0, size - len(counts[mode]))) > 0 for mode in ("train", "val")
        )
        for flagged, text, stops in (
            (~(train | val), "classes without an image", False),
            (val & ~train, "classes that have validation images alone", not several),
            (train & ~val, "classes without a validation image", False),
        ):
            if flagged.any():
                names = [
                    class_name(classes, label)
                    for label in np.flatnonzero(flagged)[:_EXAMPLES].tolist()
                ]
                found.append(Finding(f"{text}: {flagged.sum():,}", names, stops))
        present = np.flatnonzero(train | val)
        source = parts["train"].source
        if not several and (
            problem := one_class(present, classes, config.DATA.DATA_PATH, source.paths)
        ):
            found.append(Finding(problem, [], True))
    source = parts["train"].source
    remark = ""
    if config.DATA.DATASET == "folder" and not isinstance(source.labels, LabelSets):
        remark = nested_classes(source.labels, source.classes, source.paths)
    if remark:
        found.append(Finding(remark, [], False))
    return found


def _images_by_class(part: CheckedImages, listed: bool) -> np.ndarray:
    """Returns the number of images of each class; with ``listed``, of images that can be read."""
    labels = part.source.labels
    if listed:
        labels = take_labels(labels, np.flatnonzero(part.records["readable"]))
    return np.bincount(every_label(labels))


def _repeats(
    parts: Mapping[str, CheckedImages], images: ReadableImages, alike: Duplicates, verb: str
) -> list[Finding]:
    found = _findings(
        parts, images, alike.leaked, f"validation images that {verb} a training image"
    )
    found += _findings(parts, images, alike.torn, f"images that {verb} one that has another label")
    for number, mode in enumerate(images.modes):
        own = alike.same & (images.mode == number)
        found += _findings(
            parts, images, own, f"{NAMES[mode]} images that {verb} another {NAMES[mode]} image"
        )
    return found


def _findings(
    parts: Mapping[str, CheckedImages], images: ReadableImages, flagged: np.ndarray, text: str
) -> list[Finding]:
    if not flagged.any():
        return []
    examples = [
        image_name(parts, images, index) for index in np.flatnonzero(flagged)[:_EXAMPLES].tolist()
    ]
    return [Finding(f"{text}: {flagged.sum():,}", examples, False)]


def image_name(parts: Mapping[str, CheckedImages], images: ReadableImages, index: int) -> str:
    """Returns what a person calls an image."""
    return printable(parts[images.modes[images.mode[index]]].source.name(int(images.place[index])))


def table(parts: Mapping[str, CheckedImages]) -> list[tuple[str, list[str]]]:
    """Returns rows: the name of a figure, and its value in each part."""
    rows: dict[str, list[str]] = {}
    for part in parts.values():
        records = part.records
        counts = np.bincount(every_label(part.source.labels))
        known = records[records["width"] > 0]
        short = np.minimum(known["width"], known["height"])
        held = counts[counts > 0]
        values = {
            "images": f"{len(records):,}",
            "classes": f"{len(held):,}",
            "images per class": f"{held.min(initial=len(records)):,} to {held.max(initial=0):,}",
            "megabytes": f"{records['bytes'].sum() / 1e6:,.1f}",
            "can't be read": f"{(~records['readable']).sum():,}",
            "shorter side": f"{short.min():,} to {short.max():,}, median {np.median(short):,.0f}"
            if len(short)
            else "",
            "largest": _largest(known),
            "formats": _kinds(known["format"]),
            "modes": _kinds(known["mode"]),
        }
        for name, value in values.items():
            rows.setdefault(name, []).append(value)
    return [(name, values) for name, values in rows.items() if any(values)]


def _largest(records: np.ndarray) -> str:
    pixels = records["width"].astype(np.int64) * records["height"]
    return "{} x {}".format(*records[["width", "height"]][pixels.argmax()]) if len(records) else ""


def _kinds(values: np.ndarray) -> str:
    names, counts = np.unique(values[values != b""], return_counts=True)
    ordered = sorted(zip(counts.tolist(), names.tolist(), strict=True), reverse=True)
    return ", ".join(f"{name.decode()} {count:,}" for count, name in ordered)
