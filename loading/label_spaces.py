"""Which output of a model is which class of the data: matched by name where names are known, for
evaluation.

A folder's classes are its subfolders in sorted order. Weights have the order of their training set.
A folder that lacks a class, or spells one differently, would shift every label after it.
"""

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from config import is_users, with_values
from errors import InputError
from loading.class_names import lookalike, read_class_map
from loading.label_sets import LabelSets, every_label
from settings.options import Configuration, add_note

_IMAGENET = Path(__file__).with_name("imagenet1k_classes.txt")
PRESENT = "present"  # DATA.CLASSES: those that the data has
_SYNSET = re.compile(r"n\d{8}(?!\d)")
_DIGITS = 9  # of an output's number, at most


class Labelled(Protocol):
    """A dataset, as far as its labels go: ``classes`` are names, in the order of ``labels``, or
    none are known.

    ``compared`` are the outputs among which an evaluation looks for the largest; None: all of them.
    """

    labels: np.ndarray | LabelSets
    classes: list[str]
    compared: np.ndarray | None


def check_training(config: Configuration, train: Labelled, val: Labelled) -> Configuration:
    """Returns ``config`` with NUM_CLASSES resolved.

    Raises:
        InputError: validation has a class that no training image has (unless images have several).
            Or the model has more outputs than the data has classes, and the user didn't ask for
            that.
    """
    theirs, ours = (
        set(np.unique(every_label(dataset.labels)).tolist()) for dataset in (train, val)
    )
    if unknown := sorted(ours - theirs):
        names = [val.classes[label] if val.classes else f"class {label}" for label in unknown[:3]]
        more = "..." * (len(unknown) > 3)
        told = f"validation has {len(unknown)} classes that no training image has: {', '.join(names)}{more}"
        if not isinstance(train.labels, LabelSets):
            raise InputError(told)
        config = with_values(config)  # a copy: the note is this start's
        add_note(config, told)
    outputs = config.MODEL.NUM_CLASSES
    classes = max(_count(dataset) for dataset in (train, val))
    if not (train.classes or outputs == "auto"):  # a list of files: labels are outputs
        if classes < outputs and not is_users(config, "MODEL.NUM_CLASSES"):
            config = with_values(config)
            add_note(
                config,
                f"the labels are 0..{classes - 1}, but the model has {outputs} outputs; check MODEL.NUM_CLASSES",
            )
        return config
    return _with_num_classes(config, classes, "the data has")


def absent_classes(train: Labelled, val: Labelled) -> str:
    """Returns a note about classes without a training or a validation image; "" if there are none.

    If the classes have no names, they are the numbers up to the largest label.
    """
    count = max(_count(dataset) for dataset in (train, val))
    parts = []
    for dataset, kind in ((train, "training"), (val, "validation")):
        absent = np.setdiff1d(np.arange(count), every_label(dataset.labels))
        if len(absent):
            names = [
                train.classes[label] if label < len(train.classes) else str(label)
                for label in absent[:3]
            ]
            more = ", ..." if len(absent) > len(names) else ""
            parts.append(f"{len(absent):,} have no {kind} image ({', '.join(names)}{more})")
    return f"of {count:,} classes {' and '.join(parts)}" if parts else ""


def check_evaluation(
    config: Configuration, val: Labelled, trained: Sequence[str] | None
) -> Configuration:
    """Returns ``config`` with NUM_CLASSES resolved; gives ``val`` the labels and class names of the
    weights' outputs, and with DATA.CLASSES which of them are ``compared``.

    Args:
        trained: the names of the weights' outputs; None or empty where they aren't known. A model
            of 1,000 outputs then is taken for one of ImageNet-1k's classes if every class of the
            data is one of them.

    Raises:
        InputError: a class that the weights, or the file of DATA.CLASSES, don't know, or another
            number of outputs that the user didn't ask for.
    """
    if config.DATA.CLASSES is None:
        return _match_names(config, val, trained)
    if config.DATA.CLASSES == PRESENT:
        config = _match_names(config, val, trained)
        compared = np.unique(every_label(val.labels))
    else:
        config, compared = _map_outputs(config, val, trained)
    val.compared, config = compared, with_values(config)  # a copy: the note is this start's
    add_note(
        config,
        f"DATA.CLASSES: {len(compared)} of the model's {config.MODEL.NUM_CLASSES} outputs are compared",
    )
    return config


def _match_names(
    config: Configuration, val: Labelled, trained: Sequence[str] | None
) -> Configuration:
    """Matches by names, where they are known."""
    if not val.classes:
        count = len(trained or ()) or _count(val)
        return (
            _with_num_classes(config, count, "the data has")
            if config.MODEL.NUM_CLASSES == "auto"
            else config
        )
    if trained:
        config = _with_num_classes(config, len(trained), "the weights have")
        if list(trained) == val.classes:
            return config
        places = {name: place for place, name in enumerate(trained)}
        unknown = [name for name in _present(val) if name not in places]
        if unknown:
            raise InputError(
                f"the weights were trained on the classes {some_of(trained)}, the data has others: {some_of(unknown)}"
                f"{lookalike(unknown, trained)};"
                " name its folders as the weights' classes are, or leave the others out"
            )
        return _with_outputs(config, val, places, list(trained), "the weights' classes")
    if config.MODEL.NUM_CLASSES == 1000:
        places, problem = imagenet_places(_present(val))
        if not problem:
            return _with_outputs(config, val, places, imagenet_synsets(), "ImageNet-1k's classes")
        if 2 * len(places) > len(_present(val)) and not is_users(config, "MODEL.NUM_CLASSES"):
            raise InputError(f"most of the data's classes are ImageNet-1k's, but {problem}")
    if config.DATA.LABELS or config.DATA.CLASSES:
        advice = (
            ""
            if config.DATA.LABELS
            else "; give DATA.CLASSES a file of classes and outputs' numbers"
        )
        raise InputError(
            f"DATA.{'LABELS' if config.DATA.LABELS else 'CLASSES'} goes by the names of the outputs' classes, which"
            f" aren't known of this model: MODEL.NUM_CLASSES is {config.MODEL.NUM_CLASSES}, ImageNet-1k's 1000{advice}"
        )
    return _with_num_classes(config, len(val.classes), "the data has")


def _map_outputs(
    config: Configuration, val: Labelled, trained: Sequence[str] | None
) -> tuple[Configuration, np.ndarray]:
    """Gives ``val`` the outputs that the file of DATA.CLASSES says for labels; returns all that it
    names, too.
    """
    file = config.DATA.CLASSES
    if trained:
        config = _with_num_classes(config, len(trained), "the weights have")
    outputs = config.MODEL.NUM_CLASSES
    if outputs == "auto" or not val.classes:
        lacks = (
            "the data, which names no classes"
            if not val.classes
            else "MODEL.NUM_CLASSES auto; give a number"
        )
        raise InputError(
            f"DATA.CLASSES {file} maps classes to outputs, which isn't possible with {lacks}"
        )
    names = list(trained or (imagenet_synsets() if outputs == 1000 else map(str, range(outputs))))
    places = {name: place for place, name in enumerate(names)}
    found = read_class_map(file)
    if missing := [name for name in _present(val) if name not in found]:
        raise InputError(f"{file}: classes of the data aren't in it: {some_of(missing)}")

    def place_of(name: str) -> int:
        candidates = (
            {places[name]}
            if name in places
            else set()
            if trained or outputs != 1000
            else _candidates(name)
        )
        if (
            not candidates
            and name.isascii()
            and name.isdigit()
            and len(name) < _DIGITS
            and int(name) < outputs
        ):
            candidates = {int(name)}
        if len(candidates) != 1:
            how = "the name of several outputs" if candidates else "no output's name or number"
            raise InputError(
                f"{file}: '{name}' is {how}; the model has {outputs}: {some_of(names)}"
            )
        return candidates.pop()

    wanted = {name: sorted(set(map(place_of, several))) for name, several in found.items()}
    sets = [wanted.get(name, []) for name in val.classes]
    if max(map(len, sets)) == 1:
        val.labels = np.array([own[0] if own else -1 for own in sets], np.int64)[
            every_label(val.labels)
        ]
    else:
        ends = np.cumsum([0, *map(len, sets)])
        val.labels = LabelSets(np.concatenate(sets), ends).at_places(every_label(val.labels))
    val.classes = names
    return config, np.unique(np.concatenate(list(wanted.values())))


def set_outputs(config: Configuration, *datasets: Labelled) -> None:
    """Tells images of several classes how many there are, once NUM_CLASSES is resolved.

    Raises:
        InputError: TASK is for images of one class each, and these have several, or the other way
            round.
    """
    for dataset in datasets:
        several = isinstance(dataset.labels, LabelSets)
        # of several: a classification, all the same
        any_is_right = config.DATA.LABELS or config.DATA.CLASSES
        meant = "multilabel" if several and not any_is_right else "classification"
        if {config.TASK, meant} == {"classification", "multilabel"}:
            found = "several labels" if several else "one label"
            raise InputError(
                f"TASK is {config.TASK}, the images of '{config.DATA.DATASET}' have {found} each"
            )
        if isinstance(dataset.labels, LabelSets):
            dataset.labels.outputs = config.MODEL.NUM_CLASSES


def check_pretrained_classes(config: Configuration, dataset: Labelled) -> None:
    """Raises InputError where PRETRAINED_CLASSES keeps ImageNet-1k's classes for data that has
    others.

    Args:
        config: with NUM_CLASSES resolved.
    """
    order = config.MODEL.PRETRAINED_CLASSES
    outputs = config.MODEL.NUM_CLASSES
    if not (order and config.MODEL.PRETRAINED):
        return
    places = imagenet_places(dataset.classes)[0]
    others = dataset.classes and [places.get(name) for name in dataset.classes] != list(range(1000))
    if outputs != 1000 or others:
        found = f"{outputs} classes" if outputs != 1000 else f"others: {some_of(dataset.classes)}"
        raise InputError(
            f"MODEL.PRETRAINED_CLASSES is {order}, which keeps ImageNet-1k's 1000 classes, but the data has {found};"
            " set it with -o MODEL.PRETRAINED_CLASSES null for a fresh classifier"
        )


def imagenet_synsets() -> list[str]:
    """Returns ImageNet-1k's 1,000 WordNet synsets, in the order of a model's outputs."""
    return [synset for synset, _ in _imagenet()]


def imagenet_names() -> list[str]:
    """Returns the usual names of ImageNet-1k's 1,000 classes, in the order of a model's outputs;
    two are of two.
    """
    return [names[0] for _, names in _imagenet()]


def imagenet_places(names: Sequence[str]) -> tuple[dict[str, int], str]:
    """Returns (the output of each name that is one of ImageNet-1k's classes, what is wrong with the
    others or "").

    A name is a synset, alone or before the class's name (``n02099601-golden_retriever``), or one of
    the class's names in any case, with spaces or underscores. The numbers 0 to 999, all of them,
    are the outputs themselves (ImageNetV2).
    """
    if sorted(names) == sorted(map(str, range(1000))):
        return {name: int(name) for name in names}, ""
    found = {name: _candidates(name) for name in names}
    places = {name: places.pop() for name, places in found.items() if len(places) == 1}
    unknown = [name for name, candidates in found.items() if name not in places and not candidates]
    if unknown:
        return (
            places,
            f"not {some_of(unknown)}; name a folder by its synset (n01440764) or name (tench)",
        )
    synsets = imagenet_synsets()
    for name, candidates in found.items():
        if name not in places:
            several = " or ".join(synsets[place] for place in sorted(candidates))
            return places, f"'{name}' is {several}; name the folder by its synset"
    first: dict[int, str] = {}
    for name, place in places.items():
        if first.setdefault(place, name) != name:
            return (
                places,
                f"'{first[place]}' and '{name}' are the same class, {synsets[place]}; make them one folder",
            )
    return places, ""


def _candidates(name: str) -> set[int]:
    """The outputs that a name may mean: those of the strictest reading that finds any."""
    synset = _SYNSET.match(name)
    for readings, key in zip(
        _readings(),
        (synset and synset[0], name, _simplified_name(name), _simplified_name(name)),
        strict=True,
    ):
        if key in readings:
            return set(readings[key])
    return set()


@functools.cache
def _imagenet() -> list[tuple[str, list[str]]]:
    """(synset, names) of each class."""
    lines = _IMAGENET.read_text(encoding="utf-8").splitlines()
    pairs = (line.split(" ", 1) for line in lines if not line.startswith("#"))
    return [(synset, [name.strip() for name in names.split(",")]) for synset, names in pairs]


@functools.cache
def _readings() -> tuple[dict[str, list[int]], ...]:
    """The outputs by synset, by the usual name as it is written, by the usual name, and by any name
    or all of them.
    """
    readings: tuple[dict[str, list[int]], ...] = ({}, {}, {}, {})
    for place, (synset, names) in enumerate(_imagenet()):
        anyhow = {_simplified_name(name) for name in (*names, ", ".join(names))}
        for reading, keys in zip(
            readings, ({synset}, {names[0]}, {_simplified_name(names[0])}, anyhow), strict=True
        ):
            for key in keys:
                reading.setdefault(key, []).append(place)
    return readings


def _simplified_name(name: str) -> str:
    return " ".join(name.replace("_", " ").replace("-", " ").casefold().split())


def _with_outputs(
    config: Configuration, val: Labelled, places: dict[str, int], names: list[str], whose: str
) -> Configuration:
    """Gives ``val`` the labels of ``places`` and ``names`` for outputs, with the data's own names
    where it has one.
    """
    config = with_values(config)  # a copy: the note is this start's
    add_note(
        config,
        f"the data's {len(_present(val))} classes are matched by name with {whose}: {len(names)} outputs",
    )
    lookup = np.array([places.get(name, -1) for name in val.classes], np.int64)
    for name, place in places.items():
        names[place] = name
    val.labels = (
        val.labels.map_labels(lookup) if isinstance(val.labels, LabelSets) else lookup[val.labels]
    )
    val.classes = names
    return config


def _with_num_classes(config: Configuration, classes: int, who_has: str) -> Configuration:
    """Returns ``config`` with NUM_CLASSES ``classes``, or as the user set it; ``who_has`` begins
    the error.
    """
    outputs = config.MODEL.NUM_CLASSES
    if outputs in ("auto", classes):
        # The number is the data's now: in a run's config.yaml it isn't one that somebody meant for
        # any data.
        return with_values(
            config, f"the number of classes that {who_has}", MODEL__NUM_CLASSES=classes
        )
    if outputs < classes or not is_users(config, "MODEL.NUM_CLASSES"):
        raise InputError(
            f"{who_has} {classes} classes, the model {outputs} outputs (MODEL.NUM_CLASSES); set it with"
            f" -o MODEL.NUM_CLASSES auto{f', or to {outputs} if that is meant' if outputs > classes else ''}"
        )
    return config


def _count(dataset: Labelled) -> int:
    return len(dataset.classes) or int(every_label(dataset.labels).max()) + 1


def _present(dataset: Labelled) -> list[str]:
    """The classes that have a sample."""
    return [dataset.classes[label] for label in np.unique(every_label(dataset.labels))]


def some_of(names: Sequence[str]) -> str:
    """Returns the first names of classes, with their number, for a message."""
    more = ", ..." if len(names) > 5 else ""
    return f"{', '.join(names[:5])}{more} ({len(names)})"
