"""The table of labels that are probably wrong, which a person edits, and what the edits do.

``inference.label_errors`` writes it. Each row says what becomes of a label: "keep", "relabel" or
"remove". Applying the table makes lists of the images with their new labels. The images and the
dataset's own files stay as they are.
"""

import collections
import csv
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from errors import Allowance, InputError, Unreadable, open_file, printable, reading
from loading.class_names import lookalike
from loading.files import Paths, not_utf8, text_lines
from loading.label_sets import LabelSets
from loading.sources import Files
from loading.tables import csv_line, csv_rows

# Images of one label each, and of several.
COLUMNS = ("image", "label", "suggested_label", "score", "action")
SEVERAL_COLUMNS = ("image", "class", "problem", "score", "action")
ACTIONS = ("keep", "relabel", "remove")
# What is wrong with a class of an image that may have several.
MISSING = "missing"
SUPERFLUOUS = "superfluous"
# Bytes of a line, and bytes that a row takes besides its own: an Edit, its image's name and the
# entries of dictionaries.
_LONGEST = 20_000
_BYTES_PER_ROW = 500
# Lines of a row: names may hold line breaks, and a quote that is never closed would hold all lines.
_LINES_PER_ROW = 10


class Edit(NamedTuple):
    """A row of the table.

    Attributes:
        line: its number in the file, for messages.
        image: the image's path, relative to the dataset's folder.
        label: the label's class; of several labels the class that the row is about.
        suggested: the class to take instead; of several labels MISSING or SUPERFLUOUS.
        action: one of ACTIONS. To relabel an image of several labels adds a class that is missing,
            and takes away one that is superfluous.
    """

    line: int
    image: str
    label: str
    suggested: str
    action: str


def class_text(classes: Sequence[str], label: int) -> str:
    """Returns how a table names a class: by its name, or by its number where it has none."""
    return classes[label] if classes else str(label)


def write_table(file: Any, rows: Iterable[Sequence[Any]], several: bool) -> None:
    """Writes the table into a file of bytes.

    Bytes of paths that aren't UTF-8 are written unchanged.

    Args:
        rows: (image, label or class, suggested label or problem, score, action).
        several: whether images may have several labels.
    """
    columns = SEVERAL_COLUMNS if several else COLUMNS
    file.write((",".join(columns) + "\n").encode())
    for row in rows:
        file.write(csv_line(*row).encode(errors="surrogateescape"))


def read_table(path: Path, several: bool) -> dict[str, list[Edit]]:
    """Returns the rows of an edited table by their images.

    Further columns are allowed, in any order. Rows that were removed count as "keep".

    Args:
        several: whether the dataset's images may have several labels.

    Raises:
        InputError: it can't be read, lacks a column, or a row is wrong (which).
    """
    columns = SEVERAL_COLUMNS if several else COLUMNS
    with reading(path, "a table of labels", f"; expected the columns {','.join(columns)}"):
        with open_file(path) as opened:
            allowance = Allowance(os.fstat(opened.fileno()).st_size)
            # Each byte is read once, so the time is in proportion without a clock.
            allowance.until = math.inf
            rows = _rows(opened, allowance)
            _, head = next(rows, (1, []))
            places = _places(head, columns, several)
            # Most names of classes come often, and are held once.
            texts: dict[str, str] = {}
            by_image: dict[str, list[Edit]] = {}
            seen: set[tuple[str, str]] = set()
            for line, cells in rows:
                edit = _edit(line, cells, places, len(head), several)
                edit = edit._replace(
                    label=texts.setdefault(edit.label, edit.label),
                    suggested=texts.setdefault(edit.suggested, edit.suggested),
                )
                key = (edit.image, edit.label if several else "")
                if key in seen:
                    raise _twice(edit, by_image[edit.image], several)
                seen.add(key)
                by_image.setdefault(edit.image, []).append(edit)
        return by_image


def _rows(opened: Any, allowance: Allowance) -> Iterator[tuple[int, list[str]]]:
    """Yields (number of its first line, cells) of each row that isn't empty."""
    number = 0
    begin = 1

    def lines() -> Iterator[str]:
        nonlocal number
        for number, line in enumerate(text_lines(opened, _LONGEST), 1):
            if number - begin >= _LINES_PER_ROW:
                raise Unreadable(f"its line {begin} has a cell with unclosed quotes")
            yield line.decode(errors="surrogateescape") + "\n"

    try:
        for cells in csv_rows(lines()):
            if any(cells):
                allowance.take(_BYTES_PER_ROW + sum(map(len, cells)))
                yield begin, cells
            begin = number + 1
    except csv.Error as error:
        raise Unreadable(f"its line {number} isn't a valid row of CSV ({error})") from None


def _places(head: list[str], columns: Sequence[str], several: bool) -> list[int]:
    """Returns the places of the table's columns in a row."""
    names = [name.strip().lower() for name in head]
    missing = [name for name in columns if name not in names]
    if not missing:
        if twice := [name for name in columns if names.count(name) > 1]:
            raise Unreadable(f"it has the column {twice[0]} twice")
        return [names.index(name) for name in columns]
    text = f"its header lacks {', '.join(missing)}"
    other = COLUMNS if several else SEVERAL_COLUMNS
    if set(other) <= set(names):
        kind = "one label" if several else "several labels"
        text = f"it is a table of images with {kind} each, unlike those of the dataset"
    elif len(names) == 1:
        for separator, what in ((";", "semicolons"), ("\t", "TABs")):
            if separator in head[0]:
                text = f"it has {what} instead of commas; save it as CSV with commas"
    raise Unreadable(text)


def _edit(line: int, cells: list[str], places: list[int], width: int, several: bool) -> Edit:
    """Returns a row of the table."""
    if len(cells) != width:
        raise Unreadable(f"its line {line} has {len(cells)} cells, the header has {width}")
    image, label, suggested, _, action = (cells[place] for place in places)
    # Spreadsheets and people add spaces and capitals.
    action = action.strip().lower()
    suggested = suggested.strip()
    if action not in ACTIONS:
        raise Unreadable(
            f"its line {line} has the action '{printable(action, 40)}', expected one of"
            f" {', '.join(ACTIONS)}"
        )
    if several and suggested not in (MISSING, SUPERFLUOUS):
        raise Unreadable(
            f"its line {line} has the problem '{printable(suggested, 40)}', expected {MISSING} or"
            f" {SUPERFLUOUS}"
        )
    return Edit(line, image, label.strip(), suggested, ACTIONS[ACTIONS.index(action)])


def _twice(edit: Edit, before: Sequence[Edit], several: bool) -> Unreadable:
    """Returns the error about a row that is about the same label as one of those before."""
    line = next(other.line for other in before if not several or other.label == edit.label)
    what = f"image '{printable(edit.image, 80)}'"
    if several:
        what += f" with the class '{printable(edit.label, 40)}'"
    return Unreadable(f"its lines {line} and {edit.line} name the same {what}")


def apply_table(
    path: Path, parts: Mapping[str, Files], root: str
) -> tuple[dict[str, Files], dict[str, int]]:
    """Returns (the edited parts of a dataset, how many labels or images each action changed).

    Args:
        path: the edited table.
        parts: what the dataset's reader returned, by mode.
        root: the dataset's folder, DATA.DATA_PATH.

    Raises:
        InputError: as ``read_table``; or a row names an image or a class that the dataset lacks, or
            the label isn't the image's any more; or no image of a part is left.
    """
    several = any(isinstance(part.labels, LabelSets) for part in parts.values())
    by_image = read_table(path, several)
    with reading(path, "a table of labels"):
        edited = {}
        seen: set[str] = set()
        for mode, part in parts.items():
            edited[mode] = _edited(part, by_image, seen, root)
        if unknown := next((image for image in by_image if image not in seen), None):
            raise _unknown_image(by_image[unknown][0])
    for mode, part in edited.items():
        if len(parts[mode].paths) and not len(part.paths):
            raise InputError(f"{path}: it removes all {len(parts[mode].paths)} {mode} images")
    counts = collections.Counter(edit.action for edits in by_image.values() for edit in edits)
    return edited, {action: counts[action] for action in ACTIONS}


def _unknown_image(edit: Edit) -> Unreadable:
    # A name that isn't UTF-8 may be right, so it is looked up first.
    try:
        edit.image.encode()
    except UnicodeEncodeError:
        return not_utf8(edit.line)
    return Unreadable(
        f"its line {edit.line} names the image '{printable(edit.image, 80)}', which the dataset"
        " lacks; paths are relative to -data_path"
    )


def _edited(
    part: Files, by_image: Mapping[str, Sequence[Edit]], seen: set[str], root: str
) -> Files:
    """Returns an edited part; ``seen`` gets the names of the edited images that it has."""
    paths = part.paths if isinstance(part.paths, Paths) else Paths(part.paths)
    number_of = {name: label for label, name in enumerate(part.classes)}
    kept = np.ones(len(paths), bool)
    sets: dict[int, list[int]] = {}
    labels: Any = part.labels
    if isinstance(labels, np.ndarray):
        labels = labels.copy()
    for place, name in enumerate(paths.below(root)):
        if name not in by_image:
            continue
        seen.add(name)
        for edit in by_image[name]:
            if edit.action == "remove":
                kept[place] = False
            label = _number(edit, edit.label, number_of, part)
            if isinstance(labels, LabelSets):
                own = sets.setdefault(place, labels.of(place).tolist())
                _change_set(edit, label, own)
                continue
            if labels[place] != label:
                found = class_text(part.classes, int(labels[place]))
                raise _changed(edit, f"label '{printable(found, 40)}'")
            if edit.action == "relabel":
                labels[place] = _number(edit, edit.suggested, number_of, part)
    if sets:
        labels = _with_sets(labels, sets)
    return part._replace(labels=labels).at_places(np.flatnonzero(kept))


def _number(edit: Edit, name: str, number_of: Mapping[str, int], part: Files) -> int:
    """Returns the label of a class that a row names."""
    if number_of:
        if name in number_of:
            return number_of[name]
        hint = lookalike([name], list(number_of))
    else:
        known = int(np.max(_all_labels(part), initial=-1)) + 1
        if name.isascii() and name.isdigit() and len(name) <= 18 and int(name) < known:
            return int(name)
        hint = f"; its classes are 0 to {known - 1}"
    raise Unreadable(
        f"its line {edit.line} names the class '{printable(name, 40)}', which the dataset lacks{hint}"
    )


def _all_labels(part: Files) -> np.ndarray:
    return part.labels.labels if isinstance(part.labels, LabelSets) else np.asarray(part.labels)


def _change_set(edit: Edit, label: int, own: list[int]) -> None:
    """Adds a class to an image's labels, or takes it away, as a row says."""
    if (label in own) != (edit.suggested == SUPERFLUOUS):
        has = "has" if label in own else "hasn't"
        raise _changed(edit, f"labels: it {has} the class '{printable(edit.label, 40)}'")
    if edit.action != "relabel":
        return
    if label in own:
        own.remove(label)
    else:
        own.append(label)


def _changed(edit: Edit, found: str) -> Unreadable:
    return Unreadable(
        f"its line {edit.line} isn't about the image's current {found};"
        " the dataset or the table has changed"
    )


def _with_sets(labels: LabelSets, sets: Mapping[int, list[int]]) -> LabelSets:
    """Returns label sets of which some, by their images, are others."""
    every = [sets.get(place, labels.of(place)) for place in range(len(labels))]
    ends = np.concatenate([[0], np.cumsum([len(own) for own in every])])
    return LabelSets(np.concatenate([np.asarray(own, np.int32) for own in every]), ends)
