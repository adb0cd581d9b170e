"""The columns of tables: which one holds the images, which ones the labels, and what these are.

CSV, Parquet and the folders of Hugging Face's datasets have such columns.
"""

import re
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from errors import Allowance, Unreadable, printable
from loading.class_names import check_name, each_once, lookalike
from loading.label_sets import LabelSets
from settings.suggestions import nearest

# The value of a key with which a column is recognised.
AUTO = "auto"
# Names of columns, in lower case with _ between words.
IMAGE_NAMES = (
    *("image", "img", "picture", "file", "filename", "file_name", "filepath", "file_path"),
    *("path", "image_path", "img_path", "image_file", "image_name"),
)
LABEL_NAMES = ("label", "labels", "class", "classes", "class_name", "target", "category")
# The characters that separate the labels of a cell, by the words of DATA.LABEL_SEPARATOR.
SEPARATORS = {"space": None, "comma": ",", "semicolon": ";", "bar": "|"}
# Digits of a number. One of more is outside any range, and slow to convert.
_DIGITS = 18
_DECIMAL = re.compile(r"-?\d+\.\d*", re.ASCII)
_BYTES_PER_TEXT = 200
_BYTES_PER_LABEL = 8
# Columns that a message names.
_NAMED = 8


class Cells(NamedTuple):
    """The cells of the label column of n images.

    Attributes:
        values: labels, or places in ``texts``: of all cells, one after the other, [m].
        texts: the different texts; None: the values are numbers.
        ends: those of cell i are values[ends[i]:ends[i + 1]], [n + 1]. None: a cell is one value.
    """

    values: np.ndarray
    texts: Sequence[str] | None = None
    ends: np.ndarray | None = None


class TextCells:
    """Collects cells of text.

    Args:
        separator: a word of SEPARATORS, which a cell's labels are separated by; None: each cell is
            one label.
        allowance: of the file that they are in.
    """

    def __init__(self, separator: str | None, allowance: Allowance) -> None:
        self._separator = separator
        self._allowance = allowance
        self._places: dict[str, int] = {}
        self._values = array("q")
        self._ends = array("q", [0])

    def add(self, text: str) -> None:
        """Adds a cell; raises Unreadable if it can't be a label."""
        if self._separator is None:
            self._values.append(self._place(text.strip()))
            return
        words = [word.strip() for word in text.split(SEPARATORS[self._separator])]
        # A label that a cell has twice counts once.
        for word in dict.fromkeys(filter(None, words)):
            self._allowance.left -= _BYTES_PER_LABEL
            self._values.append(self._place(word))
        self._ends.append(len(self._values))

    def _place(self, text: str) -> int:
        place = self._places.get(text)
        if place is None:
            self._allowance.take(_BYTES_PER_TEXT + 4 * len(text))
            check_name(text, "label")
            place = len(self._places)
            self._places[text] = place
        return place

    def cells(self) -> Cells:
        """Returns the cells that were added."""
        values = np.frombuffer(self._values, np.int64) if self._values else np.zeros(0, np.int64)
        ends = np.frombuffer(self._ends, np.int64)
        return Cells(values, list(self._places), None if self._separator is None else ends)


def cells_of_columns(columns: Mapping[str, np.ndarray]) -> Cells:
    """Returns the cells of several columns of 0 and 1, one for each class.

    Args:
        columns: the numbers of each, [n].

    Raises:
        Unreadable: a column has another value.
    """
    for name, numbers in columns.items():
        if not np.isin(numbers, (0, 1)).all():
            other = numbers[~np.isin(numbers, (0, 1))][0]
            raise Unreadable(
                f"its column '{printable(name)}' has the value {other}, expected 0 or 1"
            )
    table = np.stack([numbers.astype(bool) for numbers in columns.values()], axis=1)
    ends = np.concatenate([[0], np.cumsum(table.sum(1))])
    return Cells(np.nonzero(table)[1], list(columns), ends)


def labels_of(
    cells: Cells, training: Cells, names: Sequence[str], limit: int, mode: str
) -> tuple[np.ndarray | LabelSets, list[str]]:
    """Returns (the labels of cells, class names or [] where none are known).

    Cells of whole numbers hold labels. Otherwise they hold class names, whose order is that of
    ``names``; without any, the names in the training cells are sorted.

    Args:
        training: the cells of the training images, which decide for the validation images, too.
        names: of the classes, where the data names them; or [].
        limit: labels are below it.
        mode: "train" or "val", for messages.

    Raises:
        Unreadable: a label is outside the range, a decimal number, or isn't one of the classes; or
            no image of several has a label.
    """
    classes = list(names)
    values = cells.values
    if _are_numbers(training, names):
        if cells.texts is not None:
            if others := [text for text in cells.texts if not _is_number(text)]:
                raise Unreadable(
                    f"its label '{printable(others[0], 60)}' isn't a number, but the training labels are"
                )
            values = np.array([int(text) for text in cells.texts], np.int64)[values]
        outside = values[(values < 0) | (values >= limit)]
        if len(outside):
            problem = f"its label {outside[0]} is outside 0..{limit - 1}"
            # Test parts of public datasets have it in place of each label.
            if outside[0] == -1:
                problem += "; for images without labels set DATA.LABEL_COLUMN to null"
            raise Unreadable(problem)
    else:
        classes = classes or sorted(training.texts or ())
        if cells.texts is None:
            raise Unreadable("its labels are numbers, but the training labels are names")
        place_of = {name: place for place, name in enumerate(classes)}
        if unknown := sorted(set(cells.texts) - place_of.keys()):
            first = ", ".join(f"'{printable(name, 60)}'" for name in unknown[:3])
            whose = "the classes" if names or mode == "train" else "those of the training images"
            raise Unreadable(
                f"it has labels that aren't among {whose}: {first}{lookalike(unknown, classes)}"
            )
        values = np.array([place_of[text] for text in cells.texts], np.int64)[values]
    if cells.ends is None:
        return values, classes
    if not len(values):
        raise Unreadable(f"none of its {len(cells.ends) - 1} images has a label")
    # Each label of an image once, in rising order.
    images = np.repeat(np.arange(len(cells.ends) - 1), np.diff(cells.ends))
    most = int(values.max()) + 1
    images, values = np.divmod(np.unique(images * most + values), most)
    counts = np.bincount(images, minlength=len(cells.ends) - 1)
    return LabelSets(values, np.concatenate([[0], np.cumsum(counts)])), classes


def _are_numbers(training: Cells, names: Sequence[str]) -> bool:
    """Returns whether labels are numbers, and not names of classes.

    Raises:
        Unreadable: they are decimal numbers.
    """
    if training.texts is None:
        return True
    if names and set(training.texts) <= set(names):
        return False
    # As names, 0.0 and 10.0 would be the classes 0 and 1.
    if training.texts and all(map(_DECIMAL.fullmatch, training.texts)):
        first = printable(training.texts[0], 30)
        raise Unreadable(f"its label {first} is a decimal number, expected whole numbers or names")
    return all(map(_is_number, training.texts))


def _is_number(text: str) -> bool:
    digits = text.removeprefix("-")
    return digits.isascii() and digits.isdigit() and len(digits) <= _DIGITS


# --------------------------------------------------------------- choices


def plain_name(column: str) -> str:
    """Returns a column's name as IMAGE_NAMES and LABEL_NAMES have it."""
    return column.strip().lower().replace(" ", "_").replace("-", "_")


def chosen_column(key: str, given: str, candidates: Sequence[str], columns: Sequence[str]) -> str:
    """Returns the column that a key names or, with AUTO, the only candidate.

    Args:
        key: "IMAGE_COLUMN" or "LABEL_COLUMN".
        candidates: the columns that may be meant.
        columns: all that there are.

    Raises:
        Unreadable: there is no such column, or not exactly one candidate.
    """
    shown = _shown(columns)
    if given != AUTO:
        if given not in columns:
            raise Unreadable(
                f"it has no column '{printable(given, 60)}' (DATA.{key}); its columns are"
                f" {shown}{nearest(given, columns)}"
            )
        return given
    if len(candidates) == 1:
        return candidates[0]
    what = "images" if key == "IMAGE_COLUMN" else "labels"
    problem = f"several columns may hold the {what}: {_shown(candidates)}"
    if not candidates:
        problem = f"no column is known to hold the {what}"
    advice = f"set DATA.{key} to one of {shown}"
    if key == "LABEL_COLUMN":
        advice += ", or to several of 0 and 1, or to null for images without labels"
    raise Unreadable(f"{problem}; {advice}")


def label_columns(
    given: str | Sequence[str] | None, candidates: Sequence[str], columns: Sequence[str], image: str
) -> list[str]:
    """Returns the columns that hold the labels; [] if images have none.

    Args:
        given: the value of DATA.LABEL_COLUMN.
        candidates: the columns that may be meant with AUTO. Without any, the only column besides
            the images' is taken.
        columns: all that there are.
        image: the column of the images.

    Raises:
        Unreadable: as of ``chosen_column``.
    """
    others = [column for column in columns if column != image]
    if given is None or (given == AUTO and not others):
        return []
    if not isinstance(given, str):
        chosen = [chosen_column("LABEL_COLUMN", name, (), columns) for name in given]
        return each_once(chosen, "column")
    candidates = [column for column in candidates if column in others]
    if not candidates and len(others) == 1:
        candidates = others
    return [chosen_column("LABEL_COLUMN", given, candidates, columns)]


def _shown(columns: Sequence[str]) -> str:
    more = f" and {len(columns) - _NAMED} more" if len(columns) > _NAMED else ""
    return ", ".join(printable(column, 40) for column in columns[:_NAMED]) + more


# ---------------------------------------------- features of Hugging Face


class Feature(NamedTuple):
    """A column, as Hugging Face's datasets describe it.

    Attributes:
        kind: "Image", "ClassLabel" or another name of theirs; of the items, if it holds lists.
        names: of the classes.
    """

    kind: str
    names: list[str]


def features_of(content: Any) -> dict[str, Feature]:
    """Returns the columns that Hugging Face's "features" describe, by name.

    Raises:
        Unreadable: the names of classes aren't names.
    """
    features: dict[str, Feature] = {}
    for column, feature in content.items() if type(content) is dict else ():
        # A list is written as a list of one, or as a feature within a feature.
        while True:
            if type(feature) is list and len(feature) == 1:
                feature = feature[0]
            elif type(feature) is dict and type(feature.get("feature")) in (dict, list):
                feature = feature["feature"]
            else:
                break
        if type(feature) is not dict:
            continue
        kind = feature.get("_type")
        names = feature.get("names")
        if kind != "ClassLabel" or type(names) is not list:
            names = []
        checked = []
        for name in names:
            if type(name) is not str:
                raise Unreadable(f"the classes of its column '{printable(column)}' aren't names")
            checked.append(check_name(name, f"class {len(checked)} of '{printable(column, 40)}'"))
        features[column] = Feature(str(kind), each_once(checked))
    return features


def named_classes(features: Mapping[str, Feature], columns: Sequence[str]) -> list[str]:
    """Returns the class names of the label columns: those of one, or the names of several."""
    if len(columns) != 1:
        return list(columns)
    return features[columns[0]].names if columns[0] in features else []


def label_candidates(features: Mapping[str, Feature], columns: Sequence[str]) -> list[str]:
    """Returns the columns that may hold labels: those of class labels, otherwise by their names."""
    labelled = [
        name for name in columns if name in features and features[name].kind == "ClassLabel"
    ]
    return labelled or [name for name in columns if plain_name(name) in LABEL_NAMES]
