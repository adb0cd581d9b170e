"""Training images in two parts, the second for validation: which image goes where follows from the
images' paths.

So it is the same for every number of processes, for each resume, and for ``-eval`` of the run
afterwards. Images that are added later move few of the others.
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

# bytes that a line of groups takes in a dictionary, besides its text; and so does a group
_LISTED = 130


def validation(
    paths: Sequence[str],
    labels: Sequence[int] | np.ndarray | LabelSets,
    share: float,
    seed: int,
    groups: Sequence[str] | None = None,
) -> np.ndarray:
    """Returns which images are for validation, [n] bool.

    The share of each class is rounded. At least one image of a class is taken, and never its last
    one. Whole groups are taken in an order that the seed decides. Each is taken if it brings its
    classes' shares closer to the wanted one. So the share is met as well as the groups' sizes
    allow.

    Args:
        paths: as the dataset names them, [n]: below its folder.
        labels: [n]; of label sets the rarest label of each counts.
        share: of the images, between 0 and 1.
        seed: another one chooses other images.
        groups: of the images, [n], which aren't torn apart.

    Raises:
        InputError: a part is empty.
    """
    counted = rarest(labels)
    chosen = (
        _by_groups(groups, counted, share, seed)
        if groups
        else _by_images(paths, counted, share, seed)
    )
    if chosen.all() or not chosen.any():
        part = "training" if chosen.all() else "validation"
        of = f"{len(set(groups))} groups of images" if groups else f"{len(counted)} images"
        raise InputError(
            f"DATA.VAL_SPLIT {share}: {of} leave no image for {part}; change the share, or the groups"
        )
    return chosen


def _by_images(paths: Sequence[str], labels: np.ndarray, share: float, seed: int) -> np.ndarray:
    totals = np.bincount(labels)
    wanted = np.clip(np.floor(share * totals + 0.5).astype(int), 1, np.maximum(totals - 1, 0))
    order = np.lexsort((random_numbers(paths, seed), labels))
    # of each among its class
    place = np.arange(len(labels)) - (np.cumsum(totals) - totals)[labels[order]]
    chosen = np.zeros(len(labels), bool)
    chosen[order] = place < wanted[labels[order]]
    return chosen


def _by_groups(names: Sequence[str], labels: np.ndarray, share: float, seed: int) -> np.ndarray:
    known, group = np.unique(np.array(names), return_inverse=True)
    order = np.argsort(group, kind="stable")
    members = np.split(order, np.cumsum(np.bincount(group))[:-1])
    counted = [np.unique(labels[own], return_counts=True) for own in members]
    totals = np.bincount(labels).astype(float)
    taken = np.zeros_like(totals)
    chosen = np.zeros(len(labels), bool)

    def take(number: int, needed: bool) -> None:
        classes, counts = counted[number]
        before = taken[classes]
        total = totals[classes]
        closer = ((share * total - before) ** 2 - (share * total - before - counts) ** 2) / total**2
        missing = needed and (before == 0).any()
        if (
            (missing or closer.sum() > 0)
            and (before + counts < total).all()
            and not chosen[members[number]].any()
        ):
            taken[classes] += counts
            chosen[members[number]] = True

    for number in np.argsort(random_numbers(known.tolist(), seed), kind="stable"):
        take(number, needed=False)
    # for classes of large groups alone
    for number in np.argsort([len(own) for own in members], kind="stable"):
        take(number, needed=True)
    return chosen


def random_numbers(names: Iterable[str], seed: int) -> np.ndarray:
    """Returns a random number for each name, [n], which depends on nothing else."""
    sums = (
        hashlib.blake2b(f"{seed}\0{name}".encode(errors="surrogateescape"), digest_size=8)
        for name in names
    )
    return np.array([int.from_bytes(each.digest(), "big") for each in sums], np.uint64)


def groups_of(paths: Sequence[str], groups: str) -> list[str]:
    """Returns the group of each image.

    Args:
        groups: a file; each of its lines holds a path, a tab and a group. Or a pattern (Python's
            ``re``). The group is what its first pair of brackets finds in a path, or without
            brackets all that it finds.

    Raises:
        InputError: an image has none.
    """
    if os.path.isfile(groups):
        listed = _in_file(groups)
        where = "names"
        found = [listed.get(os.fsencode(path)) for path in paths]
    else:
        where = "finds (it is no file, so it is a pattern)"
        group = _by_pattern(groups)
        found = [group(path) for path in paths]
    if without := [path for path, name in zip(paths, found, strict=True) if name is None]:
        told = (
            f"{len(without)} of {len(paths)} images have no group that {printable(groups)} {where}"
        )
        raise InputError(f"DATA.SPLIT_GROUPS: {told}, the first is {printable(without[0])}")
    return [name for name in found if name is not None]


def _by_pattern(groups: str) -> Callable[[str], str | None]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pattern = re.compile(groups)
    except (re.error, Warning, RecursionError, OverflowError) as error:
        raise InputError(
            f"DATA.SPLIT_GROUPS is {printable(groups)!r}: no file, and no pattern ({error})"
        ) from None

    def group(path: str) -> str | None:
        found = pattern.search(path)
        return found and found[1 if pattern.groups else 0]

    return group


def _in_file(file: str) -> dict[bytes, str]:
    """Returns the groups of paths."""
    found: dict[bytes, str] = {}
    names: dict[bytes, str] = {}
    with reading(file, "a list of groups"), open_file(file) as lines:
        allowance = Allowance(os.fstat(lines.fileno()).st_size)
        allowance.until = math.inf  # each byte is looked at once: a clock would refuse long lists
        allowance.take(_LISTED * count_lines(lines))
        for number, line in enumerate(text_lines(lines), 1):
            path, tab, name = line.rstrip(b"\r").partition(b"\t")
            if not line.strip():
                continue
            if not (path and tab and name):
                told = f"'{printable(os.fsdecode(path))}'"
                raise Unreadable(f"line {number}: expected a path, a tab and a group; found {told}")
            if name not in names:
                allowance.take(_LISTED + 4 * len(name))
                names[name] = os.fsdecode(name)
            allowance.take(len(path))
            found[path] = names[name]
    return found
