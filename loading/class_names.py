"""Names of classes: text files with a name on each line, in the order of the labels."""

import itertools
import os
import re
import sys
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path

from errors import Allowance, Unreadable, open_file, printable, reading
from loading.files import count_lines, not_utf8, text_lines

# Characters that the name of a class can't have, because they would break messages, tables or JSON
# files.
UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
# The file of class names beside a list of images.
FILE = "classes.txt"
_MOST = 1_000_000
_LONGEST = 1000
# Bytes that a name takes besides its own, in a list and while the names are sorted.
_NAME = 32
# Bytes that a line of a class map takes at most, and also each of its outputs.
_FIELD = 300


def _without_spaces(name: str) -> str:
    return "".join(name.split())


def _composed(name: str) -> str:
    return unicodedata.normalize("NFC", name)


def _plainest(name: str) -> str:
    return _without_spaces(_composed(_composed(name).casefold()))


# In what two names may differ that look alike, and a function that makes such names equal.
_LIKENESS: tuple[tuple[str, Callable[[str], str]], ...] = (
    ("spaces", _without_spaces),
    ("upper and lower case", str.casefold),
    ("Unicode's form (NFC and NFD)", _composed),
    ("spaces, case or Unicode's form", _plainest),
)


def class_name(classes: Sequence[str], label: int) -> str:
    """Returns the name of a label."""
    return classes[label] if label < len(classes) else f"class {label}"


def lookalike(names: Sequence[str], known: Sequence[str]) -> str:
    """Returns a hint ("; ...") if one of the names nearly equals a known one, otherwise "".

    Only the first five names are compared.
    """
    for name in names[:5]:
        for what, fold in _LIKENESS:
            if alike := [other for other in known if fold(other) == fold(name)]:
                return f"; '{name}' and '{alike[0]}' differ only in {what}"
    return ""


def read_class_names(path: str | Path) -> list[str]:
    """Returns the names in a file.

    Raises:
        InputError: it can't be read; a line is empty, too long, or can't be printed (which).
    """
    with reading(printable(str(path)), "classes, one a line"):
        return [check_name(line, f"line {number}") for number, line in enumerate(_lines(path), 1)]


def read_class_map(path: str | Path) -> dict[str, list[str]]:
    """Returns the outputs of each class in a file.

    Each line has a class, and then its outputs, each after a TAB. Any of these is right. A class
    that is alone on its line has the output of that name.

    Raises:
        InputError: as ``read_class_names``; a class is there twice.
    """
    with reading(printable(str(path)), "classes and their outputs"):
        rows = [
            [check_name(field, f"line {number}") for field in line.split("\t")]
            for number, line in enumerate(_lines(path, _FIELD), 1)
        ]
        each_once([name for name, *_ in rows])
        return {name: outputs or [name] for name, *outputs in rows}


def _lines(path: str | Path, field: int = 0) -> list[str]:
    """Returns the lines of a file, without empty ones at its end.

    Args:
        field: bytes that each field of a line takes.
    """
    with open_file(path) as file:
        allowance = Allowance(os.fstat(file.fileno()).st_size)
        if (count := count_lines(file)) > _MOST:
            raise Unreadable(f"it has {count} lines, at most {_MOST} are allowed")
        lines = []
        # Each line is decoded by itself. In one text, an emoji would make all letters take four
        # bytes.
        for number, line in enumerate(text_lines(file), 1):
            try:
                lines.append(line.removesuffix(b"\r").decode())
            except UnicodeDecodeError:
                raise not_utf8(number) from None
            allowance.take(sys.getsizeof(lines[-1]) + _NAME + field * (1 + line.count(b"\t")))
    while lines and not lines[-1]:
        lines.pop()
    return lines or [""]


def names_beside(root: Path) -> list[str]:
    """Returns the names in the ``classes.txt`` of a dataset's folder, or [] if there is none.

    Raises:
        InputError: as ``read_class_names``; a name is there twice.
    """
    if not os.path.lexists(root / FILE):
        return []
    names = read_class_names(root / FILE)
    with reading(printable(str(root / FILE)), "classes, one a line"):
        return each_once(names)


def check_name(name: str, where: str) -> str:
    """Returns a name; raises Unreadable where it can't be a class's."""
    if not name.strip() or len(name) > _LONGEST or UNPRINTABLE.search(name):
        raise Unreadable(f"its {where} is '{printable(name, 40)}', expected a class's name")
    return name


def each_once(names: list[str], what: str = "class") -> list[str]:
    """Returns names; raises Unreadable where one is there twice.

    Args:
        what: the names are of, for the message.
    """
    if twice := [name for name, other in itertools.pairwise(sorted(names)) if name == other]:
        raise Unreadable(f"it has the {what} '{printable(twice[0], 40)}' twice")
    return names
