"""Sources of images, and the readers of datasets that return them.

The readers here are those of lists, of folders of classes, of scikit-learn's digits and of random
images. A reader returns ``Files``, ``Arrays``, ``shards.Shards`` or ``Drawn``. Nothing is
downloaded.
"""

import functools
import gzip
import importlib.util
import os
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from errors import InputError, Unreadable, counted, printable, reading
from loading.class_names import UNPRINTABLE, lookalike, names_beside
from loading.files import Paths
from loading.label_sets import LabelSets, take_labels
from loading.layout import (
    IMAGE_SUFFIXES,
    describe_folder,
    is_folder,
    is_leftover,
    is_run,
    named_as_splits,
    part_folder,
)
from loading.lists import TextList, open_list
from loading.mask_tables import MaskTable
from settings.keys import Size
from settings.registry import datasets

# Images, labels and class names.
Decoded = tuple[np.ndarray, np.ndarray, list[str]]

# The limit of labels where any label may stand.
MOST_CLASSES = 10_000_000
# Columns that datasets and loaders have themselves, so a source's need other names.
OWN_COLUMNS = ("pixels", "labels", "erased", "skipped", "mixed")
COLUMN_NAME = re.compile("[a-z][a-z0-9_]*")
# The types of numbers that both NumPy and Paddle have.
_NUMBERS = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
# A check keeps so many problems of a dataset.
_MOST_PROBLEMS = 1000


class Split(NamedTuple):
    """The part of a dataset to read, and the handling of unreadable files.

    Args:
        mode: "train" or "val".
        num_classes: labels have to be below it; "auto": any label is allowed.
        problems: a list that collects problems for a check of the data, if the reader can continue
            without them. None: a problem is raised.
        alone: the dataset has no validation part beside the training part.
        skipped: a list that collects the paths of entries that aren't data
            (``layout.is_leftover``); None: they aren't collected.
    """

    mode: str
    num_classes: int | Literal["auto"] = "auto"
    problems: list[str] | None = None
    alone: bool = False
    skipped: list[str] | None = None

    def skip(self, paths: Iterable[str]) -> None:
        """Collects the paths of entries that aren't data."""
        if self.skipped is not None:
            self.skipped.extend(paths)

    def refuse(self, problem: str) -> None:
        """Raises InputError; or, for a check, keeps the problem if there aren't very many yet."""
        if self.problems is None:
            raise InputError(problem)
        if len(self.problems) < _MOST_PROBLEMS:
            self.problems.append(problem)

    def label_limit(self, classes: Sequence[str]) -> int:
        """Returns the number that labels have to be below.

        Args:
            classes: names of all classes; empty where none are known.
        """
        if classes:
            return len(classes)
        return MOST_CLASSES if self.num_classes == "auto" else self.num_classes


class Masks(NamedTuple):
    """A column of files that hold an index for each pixel of an image: PNGs, grey or with a palette.

    With a table of colours, the files hold a colour for each pixel.

    Args:
        paths: of the masks, [n], relative to the images' folder.
        ignored: the index of pixels without a label. It fills what lies outside of the picture
            after TRAIN.AFFINE.
        dtype: of the column. int32 is for indices above 255, because Paddle has no integers of 16
            bits without a sign.
        table: the class index of each index or colour that a file may hold (``mask_tables``). None:
            files hold any indices, which are taken as they are.
    """

    paths: Sequence[str]
    ignored: int = 255
    dtype: Literal["uint8", "int32"] = "uint8"
    table: MaskTable | None = None

    @property
    def classes(self) -> int:
        """The number of classes; 0 where it isn't known."""
        if self.table is None:
            return 0
        indices = self.table.indices[self.table.indices != self.ignored]
        return int(indices.max(initial=-1)) + 1


class Files(NamedTuple):
    """Images in files.

    Args:
        root: the folder that ``paths`` are relative to.
        paths: of the images, [n].
        labels: one of each image, [n], or a set of each. None: they have no labels.
        classes: names in the order of the labels; empty where none are known.
        columns: more of each image, by name. Masks are cropped and flipped with their image. Numbers
            [n, ...] stay as they are.
    """

    root: Path
    paths: Sequence[str]
    labels: np.ndarray | LabelSets | None
    classes: Sequence[str]
    columns: Mapping[str, Masks | np.ndarray] = {}

    def at_places(self, places: np.ndarray) -> "Files":
        """Returns the images at ``places`` [k]."""

        def taken(paths: Sequence[str]) -> Paths:
            return Paths(str(paths[place]) for place in places.tolist())

        columns: dict[str, Masks | np.ndarray] = {}
        for name, column in self.columns.items():
            if isinstance(column, Masks):
                columns[name] = column._replace(paths=taken(column.paths))
            else:
                columns[name] = np.asarray(column)[places]
        labels = take_labels(self.labels, places)
        return self._replace(paths=taken(self.paths), labels=labels, columns=columns)


def checked_columns(
    columns: Mapping[str, Masks | np.ndarray], count: int
) -> dict[str, Masks | np.ndarray]:
    """Returns a source's further columns: masks with their paths in one block, numbers as arrays.

    Args:
        count: the number of generated images.

    Raises:
        InputError: a column's name is taken, its numbers are of no type or shape that a batch can
            have, or it has another number of entries than there are images.
    """
    checked: dict[str, Masks | np.ndarray] = {}
    for name, column in columns.items():
        if not COLUMN_NAME.fullmatch(name) or name in OWN_COLUMNS:
            raise InputError(
                f"the column '{printable(name)}' needs another name"
                " of lower-case letters, digits and _ that no other column has"
            )
        if isinstance(column, Masks):
            paths = column.paths
            # One block of bytes, which is small to hand over to other processes.
            if not isinstance(paths, Paths | np.ndarray):
                paths = Paths(paths)
            checked[name] = column._replace(paths=paths)
            entries = len(paths)
        else:
            checked[name] = _numbers(name, column)
            entries = len(checked[name])
        if entries != count:
            raise InputError(f"the column '{name}' has {entries} entries for {count} images")
    return checked


def _numbers(name: str, values: Any) -> np.ndarray:
    """Returns a column's numbers [n, ...]; raises InputError where they aren't such an array."""
    try:
        numbers = np.asarray(values)
    except ValueError:
        raise InputError(
            f"the values of the column '{name}' differ in shape; they need the same shape"
        ) from None
    if numbers.dtype.kind not in "biuf" or not numbers.ndim:
        raise InputError(f"the column '{name}' has values of {numbers.dtype}, expected numbers")
    if numbers.dtype.name not in _NUMBERS:
        raise InputError(
            f"the column '{name}' has values of {numbers.dtype.name}, which Paddle can't take;"
            f" expected {', '.join(_NUMBERS)}"
        )
    # Of this machine's byte order.
    return numbers.astype(numbers.dtype.newbyteorder("="), copy=False)


class Arrays(NamedTuple):
    """Images that are decoded already.

    Args:
        files: what they are read from. A cache of the images is valid as long as these stay as they
            are.
        read: returns images [n, H, W] or [n, H, W, 3] uint8, labels [n] and class names.
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
    """Reads PaddleViT's ``<mode>_list.txt``, and the class names in ``classes.txt`` if it exists.

    Raises:
        InputError: the list or files are missing, a line is wrong (which), a label is outside the
            range.
    """
    root = Path(data_path)
    file = root / f"{split.mode}_list.txt"
    classes = names_beside(root)
    with open_list(file, "imagenet2012") as lines:
        labels = array("q")
        paths = Paths(_list_paths(lines, split, split.label_limit(classes), labels))
        if not labels:
            raise InputError(f"{file}: the list is empty")
        # A check opens each file anyway.
        if split.problems is None:
            lines.check_files(paths)
        return Files(root, paths, np.frombuffer(labels, np.int64), classes)


def _list_paths(lines: TextList, split: Split, limit: int, labels: array) -> Iterator[bytes]:
    """Yields a list's paths, and appends their labels to ``labels``."""
    for number, line in lines:
        words = line.rsplit(None, 1)
        if not words:
            continue
        path = words[0].strip()
        label = words[-1]
        is_number = label.isdigit() or (label[:1] == b"-" and label[1:].isdigit())
        if len(words) == 1 or not is_number:
            problem = lines.unexpected(
                number, "a path, then a label, which is a whole number", line.strip()
            )
            if len(words) > 1 and b"," in label and label.replace(b",", b"").isdigit():
                problem += "; for several labels per image pass -dataset=multilabel_list -o TASK multilabel"
            elif os.fsdecode(line).strip().lower().endswith(IMAGE_SUFFIXES):
                problem += "; for lists of paths without labels pass -dataset=images_list"
            split.refuse(problem)
            continue
        # A number of more digits is outside any range, and slow to convert.
        value = int(label) if len(label) <= 18 else limit
        if not 0 <= value < limit:
            split.refuse(lines.label_outside(number, label, limit))
            continue
        try:
            path = lines.add_path(number, path)
        except InputError as error:
            split.refuse(str(error))
            continue
        labels.append(value)
        yield path


@datasets.register(
    "folder",
    holds="`train/<class>/**`, `val/<class>/**` (or `training`, `valid`, `validation`); one alone, or `<class>/**`, to"
    " evaluate, or with `DATA.VAL_SPLIT`",
    val="val valid validation",
)
def class_folders(split: Split, *, data_path: str) -> Files:
    """Reads a folder for each class, with images at any depth.

    The classes are the subfolders of train/, in sorted order, for the validation images, too.

    Raises:
        InputError: there are no class folders, or one has no image, isn't in train/ or can't be
            listed.
    """
    root = Path(data_path)
    mode = part_folder(root, split.mode) or split.mode
    train = part_folder(root, "train") or "train"
    has_parts = part_folder(root, "train") or part_folder(root, "val")
    if root.is_dir() and not has_parts:
        # Class folders without train/ and val/ above them are evaluated. They are trained on where
        # no validation set is needed. A check takes them for training images.
        is_check = split.problems is not None
        wanted = "train" if split.alone or is_check else "val"
        if split.mode == wanted:
            mode = "."
    with reading(
        root / mode, "class folders", "; DATASET folder needs train/ and val/ under -data_path"
    ):
        names, leftovers = _class_names(root / mode)
        train_names, _ = _class_names(root / train)
        split.skip(os.path.normpath(f"{mode}/{name}") for name in leftovers)
        if not names:
            raise InputError(_no_classes(root, mode, split.alone))
        if mode == ".":
            check_no_parts(root, names, "folder")
        if train_names and (unknown := sorted(set(names) - set(train_names))):
            first = ", ".join(f"'{name}'" for name in unknown[:3])
            split.refuse(
                f"{root / mode}: classes that the training images lack:"
                f" {first}{lookalike(unknown, train_names)}"
            )
            train_names += unknown
        classes = train_names or names
        # A dict, because ImageNet-22k has 21,841 classes.
        label_of = {name: label for label, name in enumerate(classes)}
        labels = array("q")

        def image_paths() -> Iterator[str]:
            for name in names:
                for path in images_below(root, os.path.normpath(f"{mode}/{name}"), split.skip):
                    labels.append(label_of[name])
                    yield path

        paths = Paths(image_paths())
        if empty := sorted(set(names) - {classes[label] for label in np.unique(labels)}):
            split.refuse(
                f"{root / mode / empty[0]}: no image files found ({counted(len(empty), 'such class', 'such classes')});"
                f" images end in {' '.join(IMAGE_SUFFIXES)}"
            )
        return Files(root, paths, np.array(labels), classes)


def _no_classes(root: Path, mode: str, alone: bool) -> str:
    """Returns the error's message about a folder without class folders."""
    needed = os.path.normpath(f"{mode}/<class>/<image>")
    advice = "" if alone else "; without a val/, DATA.VAL_SPLIT splits the images"
    folder = root / mode if (root / mode).is_dir() else root
    contents = describe_folder(folder)
    if folder == root and "folder" not in contents:
        contents += "; pass the folder above it, or -dataset=images for images without labels"
    return (
        f"{root / mode}: no class folders; DATASET folder needs {needed} under -data_path{advice};"
        f" {folder} holds {contents}"
    )


def check_no_parts(root: Path, names: Sequence[str], dataset: str) -> None:
    """Checks that a folder whose images are one part doesn't contain several parts.

    Args:
        names: of its folders.
        dataset: its name, for messages.

    Raises:
        InputError: its folders are splits of a dataset, or whole datasets.
    """
    if named_as_splits(names):
        raise InputError(
            f"{root}: its folders {', '.join(names)} look like the parts of a dataset;"
            f" DATASET {dataset} needs the names train and val"
        )
    for name in names:
        if (root / name / "train").is_dir() and (root / name / "val").is_dir():
            raise InputError(
                f"{root}: its folder {name} holds train/ and val/; pass -data_path={root / name}"
            )


def _class_names(folder: Path) -> tuple[list[str], list[str]]:
    """Returns (the names of a folder's subfolders, sorted; its entries that aren't data).

    Both are empty for a folder that doesn't exist.
    """
    if not folder.is_dir():
        return [], []
    with os.scandir(folder) as entries:
        are_folders = {entry.name: is_folder(entry) for entry in entries}
    check_no_run(folder)
    leftovers = [name for name in sorted(are_folders) if is_leftover(name) or is_run(folder / name)]
    names = [name for name in sorted(are_folders) if are_folders[name] and name not in leftovers]
    if unprintable := [name for name in names if UNPRINTABLE.search(name)]:
        raise Unreadable(
            f"the name of its class folder '{printable(unprintable[0])}' has unprintable"
            " characters;"
            " rename it"
        )
    # A link to a folder above would be followed without end.
    real_folder = Path(os.path.realpath(folder))
    for name in names:
        path = folder / name
        if os.path.islink(path) and real_folder.is_relative_to(os.path.realpath(path)):
            raise Unreadable(
                f"its class folder {name} is a link to a folder that holds it; remove it"
            )
    return names, leftovers


def check_no_run(folder: Path) -> None:
    """Raises Unreadable if a folder of images is also that of a run, whose pictures would be read."""
    if is_run(folder):
        raise Unreadable(
            "it contains the pictures of a run (config.yaml, metrics.jsonl); move the run or the"
            " images to another folder"
        )


def images_below(root: Path, below: str, skip: Callable[[Iterable[str]], Any]) -> Iterator[str]:
    """Yields the paths of the images in a folder and below, relative to ``root``, in sorted order.

    Links to files are followed, links to folders aren't.

    Args:
        below: the folder, relative to ``root``.
        skip: is called with the paths of entries that aren't data, of folders of runs, and of links
            to folders, all of which are left out.

    Raises:
        Unreadable: a folder can't be listed. Call this within ``errors.reading``.
    """

    def refuse(error: OSError) -> None:
        raise Unreadable(
            f"its folder '{printable(str(error.filename))}' can't be listed ({error.strerror})"
        )

    check_no_run(root / below)
    for folder, subfolders, files in os.walk(root / below, onerror=refuse):
        relative = os.path.relpath(folder, root)
        prefix = "" if relative == "." else f"{relative}/"
        leftovers = {name for name in (*subfolders, *files) if is_leftover(name)}
        for name in subfolders:
            path = os.path.join(folder, name)
            if os.path.islink(path) or is_run(path):
                leftovers.add(name)
        skip(f"{prefix}{name}" for name in sorted(leftovers))
        # os.walk descends into what is left in this list.
        subfolders[:] = sorted(set(subfolders) - leftovers)
        for file in sorted(files):
            if file.lower().endswith(IMAGE_SUFFIXES) and file not in leftovers:
                yield f"{prefix}{file}"


@datasets.register("digits", holds="nothing: the images are part of scikit-learn")
def digits(split: Split) -> Arrays:
    """Reads scikit-learn's handwritten digits."""
    return Arrays([_digits_file()], functools.partial(_digits, split.mode))


@datasets.register(
    "synthetic",
    holds="nothing: `DATA.SYNTHETIC_SIZE` fixed random images are generated, for benchmarks",
)
def synthetic(split: Split, *, synthetic_size: Size = 1024) -> Drawn:
    """Returns random images, the same ones each time.

    Args:
        synthetic_size: the number of generated images.
    """
    return Drawn(synthetic_size)


def _digits_file() -> Path:
    # The file that sklearn.datasets.load_digits reads. Importing scikit-learn would take most of a
    # second, and leave semaphores in /dev/shm when the process is killed.
    spec = importlib.util.find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise InputError("DATASET digits needs scikit-learn; pip install scikit-learn")
    return Path(spec.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"


def _digits(mode: str) -> Decoded:
    """Returns scikit-learn's 1,797 digits of 8 x 8 pixels.

    The split is fixed and stratified: of each class, every fifth image in the file's order is for
    validation (364 in all), the others (1,433) are for training.
    """
    with gzip.open(_digits_file()) as file:
        table = np.loadtxt(file, delimiter=",")
    # The values are 0 to 16; the last column is the label.
    images = np.round(table[:, :-1] * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8)
    labels = table[:, -1].astype(int)
    # The place of each image in its class.
    place = np.zeros(len(labels), int)
    for label in range(10):
        is_label = labels == label
        place[is_label] = np.arange(is_label.sum())
    chosen = (place % 5 == 0) == (mode == "val")
    return images[chosen], labels[chosen], [str(digit) for digit in range(10)]
