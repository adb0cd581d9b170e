"""CSV tables as this toolkit writes and reads them."""

import csv
import re
from collections.abc import Iterable, Iterator
from typing import Any

# A spreadsheet takes a cell that begins like this for a formula, also behind quotes and spaces.
# Full-width signs count.
_FORMULA = re.compile(r"""[\s'"]*[=+\-@\uff0b\uff0d\uff1d\uff20]|[ '"]*[\t\r\n]""")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.I | re.A)


def csv_line(*cells: Any) -> str:
    """Returns a row of a CSV table (RFC 4180) in which a spreadsheet finds no formula.

    Text is quoted, numbers aren't, and None is an empty cell. Text that a spreadsheet would compute
    gets a ' in front, which ``csv_rows`` removes. Text that is a number, such as "-1", doesn't get
    one.
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
        csv.Error: it isn't such a table.
    """
    for row in csv.reader(lines, strict=True):
        yield [
            cell[1:] if cell.startswith("'") and _FORMULA.match(cell[1:]) else cell for cell in row
        ]
