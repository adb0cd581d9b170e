"""``TrackedSettings``: PaddleViT's values, which remember what was read."""

from pathlib import Path
from typing import Any, NoReturn

from errors import InputError
from settings.values import quoted


class TrackedSettings:
    """PaddleViT's values, which remembers what was read.

    Attributes:
        path: of the file, for errors.
        keys_read: the keys that were read so far.
    """

    def __init__(self, values: dict[str, Any], path: Path) -> None:
        self._values = values
        self.path = path
        self.keys_read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.keys_read.add(key)
        return self._values[key]

    def refuse(self, key: str, expected: str) -> NoReturn:
        raise InputError(f"{self.path}: {key} is {quoted(self[key])}, expected {expected}")

    def require(self, key: str, *values: Any) -> Any:
        """Returns the value of a key, of which this toolkit has only some.

        Raises:
            InputError: it is another one.
        """
        if self[key] not in values:
            choices = " or ".join(str(value) for value in values)
            self.refuse(key, f"{choices}, which this toolkit supports")
        return self[key]

    def numbers(self, key: str, count: int | None = None) -> list[int]:
        """Returns a list of whole numbers from 0 on.

        Args:
            count: of the numbers; None: any.

        Raises:
            InputError: the value isn't such a list.
        """
        value = self[key]
        are_numbers = isinstance(value, list) and all(
            type(number) is int and number >= 0 for number in value
        )
        if not are_numbers or not value or (count or len(value)) != len(value):
            self.refuse(key, f"{count or 'some'} whole numbers")
        return value

    def sides(self, key: str) -> list[int]:
        """Returns a list of two sides.

        Raises:
            InputError: the value isn't one.
        """
        value = self[key]
        are_sides = isinstance(value, list) and len(value) == 2
        if not are_sides or any(type(side) is not int or side < 1 for side in value):
            self.refuse(key, "two numbers of pixels")
        return value
