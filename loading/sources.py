"""What readers of datasets give, and the readers of lists of files, of folders of classes and of
what comes along.

It is one of ``Files``, ``Arrays``, ``shards.Shards`` and ``Drawn``. Nothing is downloaded.
"""

import functools
import gzip
import importlib.util
import math
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from errors import Allowance, InputError, Unreadable, open_file, printable, reading
from loading.class_names import UNPRINTABLE, lookalike, names_beside
from loading.files import Paths, count_lines, text_lines, why_missing
from loading.label_sets import LabelSets
from loading.layout import IMAGE_SUFFIXES, describe_folder, is_leftover, named_as_splits
from settings.registry import datasets
from settings.signatures import Size

Decoded = tuple[np.ndarray, np.ndarray, list[str]]  # images, labels, class names

MOST_CLASSES = 10_000_000  # where any label may stand
_KEPT = 1000  # problems, for a check
LISTED = 32  # bytes that a line takes besides its own: its label, its end, its folder
# bytes that a run of images of one folder takes, and each folder, as they are looked for by folder
_SORTED = 32
_AT_ONCE = 1 << 12
_UNLISTED = 10_000  # folders that aren't there, after which no more are looked for


class Split(NamedTuple):
    """What is to be read.

    Args:
        mode: "train" or "val".
        num_classes: labels are below it; "auto": they may be any.
        problems: takes, for a check of the data, what a reader can leave out and go on; None: it
            raises.
        alone: there is no validation part beside it.
        skipped: takes the paths of entries that aren't data (``layout.is_leftover``); None: nobody
            asks.
    """

    mode: str
    num_classes: int | Literal["auto"] = "auto"
    problems: list[str] | None = None
    alone: bool = False
    skipped: list[str] | None = None

    def skip(self, paths: Iterable[str]) -> None:
        """Notes the paths of entries that aren't data."""
        if self.skipped is not None:
            self.skipped.extend(paths)

    def refuse(self, problem: str) -> None:
        """Raises InputError; or, for a check, keeps the problem: the first of very many."""
        if self.problems is None:
            raise InputError(problem)
        if len(self.problems) < _KEPT:
            self.problems.append(problem)


class Files(NamedTuple):
    """Images in files: their ``paths`` below ``root``, labels, or sets of them, class names (empty:
    none are known).
    """

    root: Path
    paths: Sequence[str]
    labels: np.ndarray | LabelSets
    classes: Sequence[str]


class Arrays(NamedTuple):
    """Decoded images: ``read()`` gives images [n, H, W] or [n, H, W, 3] uint8, labels [n] and class
    names. A cache of them serves as long as ``files`` stay as they are.
    """

    files: Sequence[Path]
    read: Callable[[], Decoded]


class Drawn(NamedTuple):
    """``count`` random images."""

    count: int


@datasets.register(
    "imagenet2012",
    holds="`train_list.txt` and `val_list.txt`: on each line a path (it may hold spaces), then a label; `classes.txt`,"
    " if there is one: a name a line",
    val="val_list.txt",
)
def imagenet2012(split: Split, *, data_path: str) -> Files:
    """Reads PaddleViT's ``<mode>_list.txt``, and the classes' names, if they are beside it.

    Raises:
        InputError: the list or files are missing, a line is wrong (which), a label is outside the
            range.
    """
    root = Path(data_path)
    file = root / f"{split.mode}_list.txt"
    if not os.path.lexists(file):
        raise InputError(missing_list(file, "imagenet2012"))
    classes = names_beside(root)
    with (
        reading(file, "a list", "; DATASET imagenet2012 needs it under -data_path"),
        open_file(file) as lines,
    ):
        labels = array("q")
        folders = array("q")
        allowance = take_lines(lines)
        paths = Paths(_list_paths(file, lines, split, len(classes), labels, folders))
        if not labels:
            raise InputError(f"{file}: the list is empty")
        # For a check each file is opened.
        if split.problems is None and (missing := missing_files(root, paths, folders, allowance)):
            raise InputError(f"{file}: {missing}")
        return Files(root, paths, np.frombuffer(labels, np.int64), classes)


def _list_paths(
    file: Path, lines: Any, split: Split, classes: int, labels: array, folders: array
) -> Iterator[bytes]:
    """Yields a list's paths; appends their labels, and the hashes of their folders
    (``missing_files``).
    """
    limit = classes or (MOST_CLASSES if split.num_classes == "auto" else split.num_classes)
    for number, line in enumerate(text_lines(lines), 1):
        if not (words := line.rsplit(None, 1)):
            continue
        path = words[0].strip()
        label = words[-1]
        if len(words) == 1 or not (label.isdigit() or (label[:1] == b"-" and label[1:].isdigit())):
            found = printable(os.fsdecode(line.strip()[:200]))
            several = b"," in label and label.replace(b",", b"").isdigit() and len(words) > 1
            advice = (
                "; several labels an image are -dataset=multilabel_list -o TASK multilabel"
                if several
                else ""
            )
            expected = "a path, then a label, which is a whole number"
            split.refuse(f"{file}, line {number}: expected {expected}; found '{found}'{advice}")
            continue
        value = int(label) if len(label) <= 18 else limit
        if not 0 <= value < limit:
            split.refuse(
                f"{file}, line {number}: label {printable(label.decode(), 30)} is outside 0..{limit - 1}"
            )
            continue
        if b"\0" in path:
            split.refuse(f"{file}, line {number}: its path holds a NUL character")
            continue
        labels.append(value)
        folders.append(hash(path[: path.rfind(b"/") + 1]))
        yield path


def take_lines(lines: Any, more: int = 0) -> Allowance:
    """Returns what is left of a list's allowance after its lines; each byte is looked at once, so
    there is no clock.

    Args:
        more: bytes that each line takes besides LISTED.

    Raises:
        Unreadable: it has so many lines that they are out of proportion.
    """
    allowance = Allowance(os.fstat(lines.fileno()).st_size)
    allowance.until = math.inf
    allowance.take(allowance.size + (LISTED + more) * count_lines(lines))
    return allowance


def missing_files(root: Path, paths: Paths, folders: array, allowance: Allowance) -> str:
    """Returns how many of ``paths`` aren't there, and which is the first, or "".

    Args:
        folders: the hash of each path's folder, [n].
        allowance: of the list.

    Raises:
        Unreadable: the folders are so many that they are out of proportion.
    """
    # One listing per folder, not one stat per file: a second for ImageNet on a local disk, far less
    # on a network's.
    hashes = np.frombuffer(folders, np.int64)
    # Runs of images of one folder, and the order of the runs by folder.
    begins = _changes(hashes)
    allowance.take(_SORTED * len(begins))
    order = np.argsort(hashes[begins], kind="stable")
    groups = _changes(hashes[begins[order]])
    allowance.take(_SORTED * len(groups))
    missing = 0
    unlisted = 0
    first = len(paths)
    # The folders come as the list has them.
    for group in np.argsort(order[groups]):
        runs = order[groups[group] : groups[group + 1] if group + 1 < len(groups) else None]
        path = paths.path_bytes(int(begins[runs[0]]))
        folder = path[: path.rfind(b"/") + 1]
        try:
            present = set(os.listdir(os.path.join(os.fsencode(root), folder)))
        except OSError:
            present = set()
            unlisted += 1
        for place in _places(begins, len(paths), runs):
            if paths.path_bytes(place)[len(folder) :] not in present:
                missing += 1
                first = min(first, place)
        if unlisted == _UNLISTED:
            break
    if not missing:
        return ""
    many = "at least " * (unlisted == _UNLISTED)
    why = why_missing(root, paths.path_bytes(first))
    return f"{many}{missing} of {len(paths)} files are missing, the first is {root / paths[first]}{why}"


def _changes(values: np.ndarray) -> np.ndarray:
    """Returns where in ``values`` another value begins than the one before, from 0 on."""
    return np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))


def _places(begins: np.ndarray, count: int, runs: np.ndarray) -> Iterator[int]:
    """Yields the places of the images of some runs, of which few at once are Python's numbers."""
    for start in range(0, len(runs), _AT_ONCE):
        part = runs[start : start + _AT_ONCE]
        ends = begins[np.minimum(part + 1, len(begins) - 1)]
        ends[part == len(begins) - 1] = count  # of the last run
        if (ends == begins[part] + 1).all():  # as in a shuffled list
            yield from begins[part].tolist()
            continue
        for begin, end in zip(begins[part].tolist(), ends.tolist(), strict=True):
            yield from range(begin, end)


@datasets.register(
    "folder",
    holds="`train/<class>/**`, `val/<class>/**`; one alone, or `<class>/**`, to evaluate, or with `DATA.VAL_SPLIT`",
    val="val",
)
def class_folders(split: Split, *, data_path: str) -> Files:
    """Reads class names, sorted, and images at any depth; the training folder's classes count.

    Raises:
        InputError: no class folders, one without images, one that the training folder lacks, or
            that can't be listed.
    """
    root = Path(data_path)
    mode = split.mode
    bare = root.is_dir() and not (root / "train").is_dir() and not (root / "val").is_dir()
    checked = split.problems is not None  # as training images
    if bare and (mode == "train" if split.alone or checked else mode == "val"):
        mode = "."  # <class>/ stands there alone
    with reading(
        root / mode, "class folders", "; DATASET folder needs train/ and val/ under -data_path"
    ):
        own, leftovers = _classes(root / mode)
        known, _ = _classes(root / "train")
        split.skip(os.path.normpath(f"{mode}/{name}") for name in leftovers)
        if not own:
            needs = os.path.normpath(f"{mode}/<class>/<image>")
            advice = "" if split.alone else "; without a val/, DATA.VAL_SPLIT splits what there is"
            raise InputError(
                f"{root / mode}: no class folders; DATASET folder needs {needs} under -data_path{advice};"
                f" {_found_instead(root, mode)}"
            )
        if mode == ".":
            _check_classes_alone(root, own)
        if known and (unknown := sorted(set(own) - set(known))):
            lacking = ", ".join(f"'{name}'" for name in unknown[:3])
            split.refuse(
                f"{root / mode}: classes that train/ lacks: {lacking}{lookalike(unknown, known)}"
            )
            known += unknown
        classes = known or own
        # of ImageNet-22k there are 21,841
        places = {name: place for place, name in enumerate(classes)}
        labels = array("q")

        def found() -> Iterator[str]:
            for name in own:
                for path in images_below(root, os.path.normpath(f"{mode}/{name}"), split.skip):
                    labels.append(places[name])
                    yield path

        paths = Paths(found())
        if empty := sorted(set(own) - {classes[label] for label in np.unique(labels)}):
            split.refuse(
                f"{root / mode / empty[0]}: holds no image ({len(empty)} such classes);"
                f" images end in {' '.join(IMAGE_SUFFIXES)}"
            )
        return Files(root, paths, np.array(labels), classes)


def _check_classes_alone(root: Path, names: Sequence[str]) -> None:
    """Raises InputError where folders that stand without train/ and val/ are a dataset's parts, or
    whole datasets.
    """
    if named_as_splits(names):
        raise InputError(
            f"{root}: its folders {', '.join(names)} have names of a dataset's parts, not of classes;"
            " DATASET folder needs the names train and val"
        )
    for name in names:
        if (root / name / "train").is_dir() and (root / name / "val").is_dir():
            raise InputError(
                f"{root}: its folder {name} holds train/ and val/; give -data_path={root / name}"
            )


def missing_list(file: Path, dataset: str) -> str:
    """Returns the error about a dataset's list or table that isn't there."""
    advice = ""
    if (file.parent / "train").is_dir():
        advice = "; for folders of classes give -dataset=folder"
    elif file.name.startswith("val"):
        advice = "; without one, DATA.VAL_SPLIT splits the training images"
    needs = (
        f"DATASET {dataset} needs it under -data_path, which holds {describe_folder(file.parent)}"
    )
    return f"{file}: there is no such file; {needs}{advice}"


def _found_instead(root: Path, mode: str) -> str:
    """Returns what is in the place of class folders, in words."""
    where = root / mode if (root / mode).is_dir() else root
    found = describe_folder(where)
    advice = "; give the folder above it" if where == root and "folder" not in found else ""
    return f"{where} holds {found}{advice}"


def _classes(folder: Path) -> tuple[list[str], list[str]]:
    """Returns the names of a folder's subfolders, sorted, and of its entries that aren't data.

    A folder that isn't there has none.
    """
    if not folder.is_dir():
        return [], []
    with os.scandir(folder) as entries:
        found = sorted((entry.name, entry.is_dir()) for entry in entries)
    leftovers = [name for name, _ in found if is_leftover(name)]
    names = [name for name, is_folder in found if is_folder and not is_leftover(name)]
    if bad := [name for name in names if UNPRINTABLE.search(name)]:
        raise Unreadable(
            f"the name of its class folder '{printable(bad[0])}' can't be printed; rename it"
        )
    holds = os.path.realpath(folder)
    for name in names:
        if os.path.islink(folder / name) and Path(holds).is_relative_to(
            os.path.realpath(folder / name)
        ):
            raise Unreadable(
                f"its class folder {name} is a link to a folder that holds it; remove it"
            )
    return names, leftovers


def images_below(root: Path, below: str, skip: Callable[[Iterable[str]], Any]) -> Iterator[str]:
    """Yields the paths of the images in a folder, in the folders' order, relative to ``root``.

    Links to files are followed, links to folders aren't.

    Args:
        skip: takes the paths of entries that aren't data, which are left out.

    Raises:
        Unreadable: a folder can't be listed: within ``errors.reading``.
    """

    def refuse(error: OSError) -> None:
        raise Unreadable(
            f"its folder '{printable(str(error.filename))}' can't be listed ({error.strerror})"
        )

    for folder, subfolders, files in os.walk(root / below, onerror=refuse):
        where = os.path.relpath(folder, root)
        leftovers = {name for name in (*subfolders, *files) if is_leftover(name)}
        skip(os.path.normpath(f"{where}/{name}") for name in sorted(leftovers))
        subfolders[:] = sorted(set(subfolders) - leftovers)
        images = (file for file in sorted(files) if file.lower().endswith(IMAGE_SUFFIXES))
        yield from (f"{where}/{file}" for file in images if file not in leftovers)


@datasets.register("digits", holds="nothing: scikit-learn brings them along")
def digits(split: Split) -> Arrays:
    """Reads scikit-learn's handwritten digits."""
    return Arrays([_digits_file()], functools.partial(_digits, split.mode))


@datasets.register(
    "synthetic",
    holds="nothing: fixed random images are made, `DATA.SYNTHETIC_SIZE` of them, for measuring",
)
def synthetic(split: Split, *, synthetic_size: Size = 1024) -> Drawn:
    """Draws fixed random images.

    Args:
        synthetic_size: how many.
    """
    return Drawn(synthetic_size)


def _digits_file() -> Path:
    # The file that sklearn.datasets.load_digits reads: importing scikit-learn takes most of a
    # second, and leaves semaphores in /dev/shm when the process is killed.
    spec = importlib.util.find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise InputError("DATASET digits needs scikit-learn; pip install scikit-learn")
    return Path(spec.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"


def _digits(mode: str) -> Decoded:
    """scikit-learn's 1,797 digits of 8 x 8 pixels; the split is fixed and stratified: of each
    class, every fifth image in the file's order is for validation (364 in all), the others (1,433)
    for training.
    """
    with gzip.open(_digits_file()) as file:
        table = np.loadtxt(file, delimiter=",")
    images, labels = (
        np.round(table[:, :-1] * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8),
        table[:, -1].astype(int),
    )
    place = np.zeros(len(labels), int)  # of each image among those of its class
    for label in range(10):
        place[labels == label] = np.arange((labels == label).sum())
    chosen = (place % 5 == 0) == (mode == "val")
    return images[chosen], labels[chosen], [str(digit) for digit in range(10)]
