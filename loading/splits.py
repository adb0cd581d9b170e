"""The random split of training images into a training and a validation set (DATA.VAL_SPLIT).

Which images are for validation is a function of their paths and a seed. So it is the same for every
number of processes, after a resume, and for ``-eval`` of the run. Images that are added later move
few of the others to the other set.
"""

import hashlib
import math
import os
import re
import warnings
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from errors import Allowance, InputError, Unreadable, open_file, printable, reading
from loading.files import count_lines, text_lines
from loading.label_sets import LabelSets, rarest

# Bytes that a line of a list of groups takes in a dictionary besides its text, and also a group.
_BYTES_PER_ENTRY = 130


def validation(
    paths: Sequence[str],
    labels: Sequence[int] | np.ndarray | LabelSets,
    share: float,
    seed: int,
    groups: Sequence[str] | None = None,
) -> np.ndarray:
    """Returns which images are for validation, [n] bool.

    The share is taken of each class, and rounded. At least one image of a class is taken, and at
    least one is left.

    Groups are taken as a whole, in an order that the seed decides. A group is taken if that brings
    the shares of its classes closer to the wanted one. So the share is met as closely as the sizes
    of the groups allow.

    Args:
        paths: of the images, relative to the dataset's folder, [n].
        labels: [n]; if an image has several, its rarest one counts.
        share: of the images, between 0 and 1.
        seed: of the random choice.
        groups: of the images, [n]; images of a group stay in the same set.

    Raises:
        InputError: a set is empty.
    """
    counted = rarest(labels)
    if groups:
        chosen = _by_groups(groups, counted, share, seed)
    else:
        chosen = _by_images(paths, counted, share, seed)
    if chosen.all() or not chosen.any():
        empty = "training" if chosen.all() else "validation"
        given = f"{len(set(groups))} groups of images" if groups else f"{len(counted)} images"
        raise InputError(
            f"DATA.VAL_SPLIT {share}: {given} leave no images for {empty};"
            " change the share, or the groups"
        )
    return chosen


def _by_images(paths: Sequence[str], labels: np.ndarray, share: float, seed: int) -> np.ndarray:
    totals = np.bincount(labels)
    wanted = np.clip(np.floor(share * totals + 0.5).astype(int), 1, np.maximum(totals - 1, 0))
    order = np.lexsort((random_numbers(paths, seed), labels))
    # The place of each image in its class, in this order.
    place = np.arange(len(labels)) - (np.cumsum(totals) - totals)[labels[order]]
    chosen = np.zeros(len(labels), bool)
    chosen[order] = place < wanted[labels[order]]
    return chosen


def _by_groups(names: Sequence[str], labels: np.ndarray, share: float, seed: int) -> np.ndarray:
    known, group = np.unique(np.array(names), return_inverse=True)
    order = np.argsort(group, kind="stable")
    members = np.split(order, np.cumsum(np.bincount(group))[:-1])
    counted = [np.unique(labels[images], return_counts=True) for images in members]
    totals = np.bincount(labels).astype(float)
    taken = np.zeros_like(totals)
    chosen = np.zeros(len(labels), bool)

    def take(number: int, needed: bool) -> None:
        """Takes a group for validation, if that brings the shares of its classes closer.

        With ``needed``, it is also taken if one of its classes has no validation image yet. The
        last images of a class are never taken.
        """
        classes, counts = counted[number]
        before = taken[classes]
        total = totals[classes]
        wanted = share * total
        closer = ((wanted - before) ** 2 - (wanted - before - counts) ** 2) / total**2
        is_missing = needed and (before == 0).any()
        leaves_some = (before + counts < total).all()
        is_taken = chosen[members[number]].any()
        if (is_missing or closer.sum() > 0) and leaves_some and not is_taken:
            taken[classes] += counts
            chosen[members[number]] = True

    for number in np.argsort(random_numbers(known.tolist(), seed), kind="stable"):
        take(number, needed=False)
    # A class whose groups are all large may still have no image. Its smallest group is taken then.
    for number in np.argsort([len(images) for images in members], kind="stable"):
        take(number, needed=True)
    return chosen


def random_numbers(names: Iterable[str], seed: int) -> np.ndarray:
    """Returns a random number for each name, [n] uint64.

    It depends on the name and the seed alone.
    """
    hashes = (
        hashlib.blake2b(f"{seed}\0{name}".encode(errors="surrogateescape"), digest_size=8)
        for name in names
    )
    return np.array([int.from_bytes(each.digest(), "big") for each in hashes], np.uint64)


def groups_of(paths: Sequence[str], groups: str) -> list[str]:
    """Returns the group of each image.

    Args:
        groups: a file, each line of which has a path, a TAB and a group; or a regular expression
            (Python's ``re``). Then the group is what its first pair of brackets matches in a path,
            or the whole match if it has no brackets.

    Raises:
        InputError: an image has no group.
    """
    if os.path.isfile(groups):
        listed = _in_file(groups)
        verb = "names"
        names = [listed.get(os.fsencode(path)) for path in paths]
    else:
        verb = "matches (it isn't a file, so it is used as a pattern)"
        group_of = _by_pattern(groups)
        names = [group_of(path) for path in paths]
    if without := [path for path, name in zip(paths, names, strict=True) if name is None]:
        raise InputError(
            f"DATA.SPLIT_GROUPS: {len(without)} of {len(paths)} images have no group that"
            f" {printable(groups)} {verb}, the first is {printable(without[0])}"
        )
    return [name for name in names if name is not None]


def _by_pattern(groups: str) -> Callable[[str], str | None]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pattern = re.compile(groups)
    except (re.error, Warning, RecursionError, OverflowError) as error:
        raise InputError(
            f"DATA.SPLIT_GROUPS is {printable(groups)!r}, which is neither a file nor a pattern"
            f" ({error})"
        ) from None

    def group_of(path: str) -> str | None:
        match = pattern.search(path)
        return match and match[1 if pattern.groups else 0]

    return group_of


def _in_file(file: str) -> dict[bytes, str]:
    """Returns the groups in a file by path."""
    groups: dict[bytes, str] = {}
    # One text for all images of a group.
    names: dict[bytes, str] = {}
    with reading(file, "a list of groups"), open_file(file) as lines:
        allowance = Allowance(os.fstat(lines.fileno()).st_size)
        # Each byte is read once, so the time is in proportion without a clock.
        allowance.until = math.inf
        allowance.take(_BYTES_PER_ENTRY * count_lines(lines))
        for number, line in enumerate(text_lines(lines), 1):
            path, tab, name = line.rstrip(b"\r").partition(b"\t")
            if not line.strip():
                continue
            if not (path and tab and name):
                quoted = printable(os.fsdecode(path))
                raise Unreadable(
                    f"line {number}: expected a path, a tab and a group; found '{quoted}'"
                )
            if name not in names:
                allowance.take(_BYTES_PER_ENTRY + 4 * len(name))
                names[name] = os.fsdecode(name)
            allowance.take(len(path))
            groups[path] = names[name]
    return groups
