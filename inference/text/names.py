"""The names of classes that a call or a request may give."""

from collections.abc import Sequence

from errors import InputError, counted

MOST_CLASSES = 100
LONGEST_CLASS = 200


def check_classes(classes: Sequence[str]) -> None:
    """Raises InputError for names of classes that aren't taken: too many, one that is empty or too
    long, or one that is there twice.
    """
    if not 0 < len(classes) <= MOST_CLASSES:
        raise InputError(
            f"found {counted(len(classes), 'class', 'classes')}, expected 1 to {MOST_CLASSES}"
        )
    for name in classes:
        if not name.strip() or len(name) > LONGEST_CLASS:
            raise InputError(
                f"a class's name has {counted(len(name), 'character')}, expected 1 to {LONGEST_CLASS}"
            )
    if len(set(classes)) < len(classes):
        raise InputError("a class occurs twice; remove one")
