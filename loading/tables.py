"""CSV tables as this toolkit writes and reads them."""

import csv
import re
from collections.abc import Iterable, Iterator
from typing import Any

# A spreadsheet takes such a cell for a formula, also behind quotes and spaces. Numbers are none.
_FORMULA = re.compile(r"""[\s'"]*[=+\-@\uff0b\uff0d\uff1d\uff20]|[ '"]*[\t\r\n]""")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.I | re.A)


def csv_line(*cells: Any) -> str:
    """Returns a row of a CSV table (RFC 4180), which a spreadsheet can open: no name becomes a formula there.

    Text is in quotes, numbers aren't, None is empty. Text that a spreadsheet would compute gets a ' in front, which
    ``csv_rows`` takes away again.
    """
    return ",".join(map(_csv_cell, cells)) + "\n"


def _csv_cell(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        return str(value)
    if _FORMULA.match(value) and not _NUMBER.fullmatch(value):
        value = f"'{value}"
    # Python's own writer leaves a carriage return without quotes, at which readers break.
    return '"{}"'.format(value.replace('"', '""'))


def csv_rows(lines: Iterable[str]) -> Iterator[list[str]]:
    """Yields the cells of each row of a table that ``csv_line`` wrote.

    Args:
        lines: with their ends, as a file opened with ``newline=""`` has them.

    Raises:
        csv.Error: it is no such table.
    """
    for row in csv.reader(lines, strict=True):
        yield [cell[1:] if cell.startswith("'") and _FORMULA.match(cell[1:]) else cell for cell in row]
