"""Idle keys: setting a key that has no effect where it stands is an error."""

from collections.abc import Collection, Mapping

from errors import InputError
from settings.configuration import COMMAND_LINE, Given
from settings.keys import Key
from settings.needs import (
    CLASSIFIER,
    LABELS,
    MAPS,
    ONE_VIEW,
    TRAINING,
    Need,
    Values,
    is_,
    is_not,
)
from settings.registry import KINDS, Registry, datasets, heads, losses, tasks
from settings.tasks import is_read_by


def _component(kind: Registry, names: Collection[str]) -> tuple[Need, ...]:
    """Returns the need of one of these components, or nothing where they are all of their kind."""
    others = tuple(name for name in kind.names() if name not in names)
    if not others:
        return ()
    # The shorter list is the one that a person reads.
    if 2 * len(others) < len(names):
        return (is_not(kind.key, *others),)
    return (is_(kind.key, *names),)


def _stored_as(*returns: str) -> Need:
    """Needs a dataset whose reader returns one of these types (loading/sources.py)."""
    [need] = _component(datasets, datasets.names(returns=returns))
    return need


FILES = _stored_as("Files", "Shards", "Rows")
PLAIN_FILES = _stored_as("Files")
SHARDS = _stored_as("Shards", "Rows")
STORED = _stored_as("Files", "Shards", "Rows", "Arrays")


def all_needs(keys: Mapping[str, Key]) -> dict[str, tuple[Need, ...]]:
    """Returns the needs of each key, by dotted key.

    A key that components read needs one of these components, besides what it declares. All
    components but datasets, heads and tasks are for training.
    """
    needs = {name: key.needs for name, key in keys.items()}
    for kind in KINDS:
        first: tuple[Need, ...] = () if kind in (datasets, tasks) else (TRAINING,)
        if kind is losses:
            first = (TRAINING, LABELS)
        elif kind is heads:
            first = (MAPS,)
        for name, readers in kind.readers().items():
            declared = tuple(need for need in needs[name] if need not in first)
            needs[name] = (*first, *_component(kind, readers), *declared)
    return with_tasks(needs)


def with_tasks(needs: Mapping[str, tuple[Need, ...]]) -> dict[str, tuple[Need, ...]]:
    """Returns keys' needs, with the tasks that read them in place of ``LABELS``, ``CLASSIFIER``,
    ``ONE_VIEW`` and ``MAPS``.

    Args:
        needs: by dotted key.
    """
    # All but ``LABELS`` mean the same tasks for each key.
    known: dict[Need, tuple[Need, ...]] = {}
    replaced = {}
    for key, own in needs.items():
        found: tuple[Need, ...] = ()
        for need in own:
            if need == LABELS:
                found += _task_needs(key, need)
            elif need in (CLASSIFIER, ONE_VIEW, MAPS):
                if need not in known:
                    known[need] = _task_needs(key, need)
                found += known[need]
            else:
                found += (need,)
        replaced[key] = found
    return replaced


def _task_needs(key: str, need: Need) -> tuple[Need, ...]:
    readers = [task for task in tasks.names() if is_read_by(task, key, need)]
    return _component(tasks, readers)


def unmet(needs: tuple[Need, ...], values: Values) -> Need | None:
    """Returns the first need that isn't met by all keys' values, or None."""
    return next((need for need in needs if not need.met(values)), None)


def refuse_idle(
    values: Values, given: Mapping[str, Given], needs: Mapping[str, tuple[Need, ...]]
) -> None:
    """Checks that each key that was set has an effect, whatever its value.

    Three cases aren't errors. What takes the key's effect away was set later: ``-o
    TRAIN.OPTIMIZER.NAME SGD`` over a recipe's BETAS. The key stands in a file, and its need is one
    that files may wait for: EVAL in the file that also trains. The value is None, which takes back
    what an earlier file set.

    Args:
        values: a configuration's, by dotted key.
        given: what somebody set, by dotted key.
        needs: of each key.

    Raises:
        InputError: a key does nothing; the message says what it needs.
    """
    for key, source in given.items():
        if values[key] is None:
            continue
        for need in needs.get(key, ()):
            if need.met(values):
                continue
            if need.files_wait and source.source != COMMAND_LINE:
                continue
            if any(given[other].level > source.level for other in need.keys if other in given):
                continue
            change = ", or set what it needs" if need.text.startswith("without") else ""
            raise InputError(
                f"{source.source}: {key} has no effect {need.text}; leave it out{change}"
            )
