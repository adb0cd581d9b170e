"""Maps the classes of a dataset to the outputs of a model, by name where names are known.

The classes of a folder are its subfolders in sorted order, and a model's outputs have the order of
its training set. If a folder to evaluate lacks a class, or spells one differently, every label
after it would be that of another output.
"""

import functools
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from config import is_users, with_values
from errors import InputError
from loading.class_names import lookalike, read_class_map
from loading.label_sets import LabelSets, every_label
from settings.configuration import Configuration, add_note

_IMAGENET = Path(__file__).with_name("imagenet1k_classes.txt")
# The value of DATA.CLASSES for the classes that the data has.
PRESENT = "present"
_SYNSET = re.compile(r"n\d{8}(?!\d)")
# Digits that the number of an output may have.
_DIGITS = 9


class Labelled(Protocol):
    """The labels of a dataset.

    Attributes:
        labels: one of each image, [n], or a set of each.
        classes: names, in the order of the labels; empty where none are known.
        compared: the outputs of which an evaluation takes the largest; None: all of them.
    """

    labels: np.ndarray | LabelSets
    classes: list[str]
    compared: np.ndarray | None


def check_training(config: Configuration, train: Labelled, val: Labelled) -> Configuration:
    """Returns ``config`` with NUM_CLASSES resolved.

    Raises:
        InputError: the validation set's class names aren't the training set's, or it has a class
            that no training image has, and images have one class each. Or the model has more
            outputs than the data has classes, and the user didn't set their number.
    """
    if train.classes and val.classes:
        _check_same_classes(train.classes, val.classes)
    train_labels = set(np.unique(every_label(train.labels)).tolist())
    val_labels = set(np.unique(every_label(val.labels)).tolist())
    if unknown := sorted(val_labels - train_labels):
        names = [val.classes[label] if val.classes else f"class {label}" for label in unknown[:3]]
        more = "..." if len(unknown) > 3 else ""
        problem = (
            f"validation has {len(unknown)} classes without a training image:"
            f" {', '.join(names)}{more}"
        )
        if not isinstance(train.labels, LabelSets):
            raise InputError(problem)
        add_note(config, problem)
    outputs = config.MODEL.NUM_CLASSES
    classes = max(_count(train), _count(val))
    # The labels of a list of files are the numbers of outputs.
    if not (train.classes or outputs == "auto"):
        if classes < outputs and not is_users(config, "MODEL.NUM_CLASSES"):
            add_note(
                config,
                f"the labels are 0..{classes - 1}, but the model has {outputs} outputs;"
                " check MODEL.NUM_CLASSES",
            )
        return config
    return _with_num_classes(config, classes, "the data has")


def absent_classes(train: Labelled, val: Labelled) -> str:
    """Returns a note about classes without a training or a validation image; "" if there are none.

    If the classes have no names, they are the numbers up to the largest label.
    """
    count = max(_count(train), _count(val))
    remarks = []
    for dataset, kind in ((train, "training"), (val, "validation")):
        absent = np.setdiff1d(np.arange(count), every_label(dataset.labels))
        if len(absent):
            names = [
                train.classes[label] if label < len(train.classes) else str(label)
                for label in absent[:3]
            ]
            more = ", ..." if len(absent) > len(names) else ""
            remarks.append(f"{len(absent):,} have no {kind} image ({', '.join(names)}{more})")
    return f"of {count:,} classes {' and '.join(remarks)}" if remarks else ""


def check_evaluation(
    config: Configuration, val: Labelled, trained: Sequence[str] | None
) -> Configuration:
    """Returns ``config`` with NUM_CLASSES resolved, and maps the labels of ``val`` to outputs.

    The labels and class names of ``val`` become those of the weights' outputs. With DATA.CLASSES
    its ``compared`` is set.

    Args:
        trained: the names of the weights' outputs; None or empty where they aren't known. Then a
            model of 1,000 outputs is taken for one of ImageNet-1k's classes, if every class of the
            data is one of these.

    Raises:
        InputError: the weights, or the file of DATA.CLASSES, don't have a class of the data. Or the
            number of outputs differs, and the user didn't set it.
    """
    if config.DATA.CLASSES is None:
        return _match_names(config, val, trained)
    if config.DATA.CLASSES == PRESENT:
        config = _match_names(config, val, trained)
        compared = np.unique(every_label(val.labels))
    else:
        config, compared = _map_outputs(config, val, trained)
    val.compared = compared
    outputs = config.MODEL.NUM_CLASSES
    add_note(config, f"DATA.CLASSES: {len(compared)} of the model's {outputs} outputs are compared")
    return config


def _match_names(
    config: Configuration, val: Labelled, trained: Sequence[str] | None
) -> Configuration:
    """Maps the labels of ``val`` by the names of classes, where these are known."""
    if not val.classes:
        if config.MODEL.NUM_CLASSES != "auto":
            return config
        count = len(trained or ()) or _count(val)
        return _with_num_classes(config, count, "the data has")
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
                " name the folders like the weights' classes, or remove the others"
            )
        _map_to_outputs(config, val, places, list(trained), "the weights' classes")
        return config
    if config.MODEL.NUM_CLASSES == 1000:
        places, problem = imagenet_places(_present(val))
        if not problem:
            _map_to_outputs(config, val, places, imagenet_synsets(), "ImageNet-1k's classes")
            return config
        if 2 * len(places) > len(_present(val)) and not is_users(config, "MODEL.NUM_CLASSES"):
            raise InputError(f"most of the data's classes are ImageNet-1k's, but {problem}")
    if config.DATA.LABELS or config.DATA.CLASSES:
        key = "DATA.LABELS"
        advice = ""
        if not config.DATA.LABELS:
            key = "DATA.CLASSES"
            advice = "; set DATA.CLASSES to a file of classes and output numbers"
        raise InputError(
            f"{key} needs the class names of the outputs, which aren't known for this model:"
            f" MODEL.NUM_CLASSES is {config.MODEL.NUM_CLASSES}, ImageNet-1k's 1000{advice}"
        )
    return _with_num_classes(config, len(val.classes), "the data has")


def _map_outputs(
    config: Configuration, val: Labelled, trained: Sequence[str] | None
) -> tuple[Configuration, np.ndarray]:
    """Maps the labels of ``val`` to the outputs that the file of DATA.CLASSES names.

    Returns:
        (``config`` with NUM_CLASSES resolved, all outputs in the file).
    """
    file = config.DATA.CLASSES
    if trained:
        config = _with_num_classes(config, len(trained), "the weights have")
    outputs = config.MODEL.NUM_CLASSES
    if outputs == "auto" or not val.classes:
        why = "MODEL.NUM_CLASSES auto; set a number"
        if not val.classes:
            why = "the data, which names no classes"
        raise InputError(
            f"DATA.CLASSES {file} maps classes to outputs, which isn't possible with {why}"
        )
    if trained:
        names = list(trained)
    elif outputs == 1000:
        names = imagenet_synsets()
    else:
        names = [str(place) for place in range(outputs)]
    places = {name: place for place, name in enumerate(names)}
    class_map = read_class_map(file)
    if missing := [name for name in _present(val) if name not in class_map]:
        raise InputError(f"{file}: it lacks classes of the data: {some_of(missing)}")

    def place_of(name: str) -> int:
        """Returns the output of a name or a number in the file."""
        candidates: set[int] = set()
        if name in places:
            candidates = {places[name]}
        elif not trained and outputs == 1000:
            candidates = _candidates(name)
        is_number = name.isascii() and name.isdigit() and len(name) < _DIGITS
        if not candidates and is_number and int(name) < outputs:
            candidates = {int(name)}
        if len(candidates) != 1:
            how = (
                "the name of several outputs"
                if candidates
                else "neither the name nor the number of an output"
            )
            raise InputError(
                f"{file}: '{name}' is {how}; the model has {outputs}: {some_of(names)}"
            )
        return candidates.pop()

    outputs_of = {name: sorted(set(map(place_of, right))) for name, right in class_map.items()}
    sets = [outputs_of.get(name, []) for name in val.classes]
    if max(map(len, sets)) == 1:
        # A class without an image may be missing in the file.
        lookup = np.array([right[0] if right else -1 for right in sets], np.int64)
        val.labels = lookup[every_label(val.labels)]
    else:
        ends = np.cumsum([0, *map(len, sets)])
        val.labels = LabelSets(np.concatenate(sets), ends).at_places(every_label(val.labels))
    val.classes = names
    return config, np.unique(np.concatenate(list(outputs_of.values())))


def set_outputs(config: Configuration, *datasets: Labelled) -> None:
    """Sets the number of outputs of label sets, once NUM_CLASSES is resolved.

    Raises:
        InputError: TASK is for images of one label each, and these have several, or the other way
            round.
    """
    for dataset in datasets:
        has_sets = isinstance(dataset.labels, LabelSets)
        # With these keys, any one of an image's labels is right: it is a classification still.
        any_is_right = config.DATA.LABELS or config.DATA.CLASSES
        task = "multilabel" if has_sets and not any_is_right else "classification"
        if {config.TASK, task} == {"classification", "multilabel"}:
            count = "several labels" if has_sets else "one label"
            raise InputError(
                f"TASK is {config.TASK}, but the images of '{config.DATA.DATASET}' have {count}"
                " each"
            )
        if isinstance(dataset.labels, LabelSets):
            dataset.labels.outputs = config.MODEL.NUM_CLASSES


def check_pretrained_classes(config: Configuration, dataset: Labelled) -> None:
    """Checks that the data has ImageNet-1k's classes, if PRETRAINED_CLASSES keeps their classifier.

    Args:
        config: with NUM_CLASSES resolved.

    Raises:
        InputError: the data has other classes.
    """
    order = config.MODEL.PRETRAINED_CLASSES
    outputs = config.MODEL.NUM_CLASSES
    if not (order and config.MODEL.PRETRAINED):
        return
    places, _ = imagenet_places(dataset.classes)
    in_order = [places.get(name) for name in dataset.classes] == list(range(1000))
    has_others = dataset.classes and not in_order
    if outputs != 1000 or has_others:
        classes = f"others: {some_of(dataset.classes)}"
        if outputs != 1000:
            classes = f"{outputs} classes"
        raise InputError(
            f"MODEL.PRETRAINED_CLASSES is {order}, which keeps ImageNet-1k's 1000 classes,"
            f" but the data has {classes};"
            " set it with -o MODEL.PRETRAINED_CLASSES null for a new classifier"
        )


def imagenet_synsets() -> list[str]:
    """Returns ImageNet-1k's 1,000 WordNet synsets, in the order of a model's outputs."""
    return [synset for synset, _ in _imagenet()]


def imagenet_names() -> list[str]:
    """Returns the usual names of ImageNet-1k's 1,000 classes, in the order of a model's outputs.

    Two of the names are those of two classes.
    """
    return [names[0] for _, names in _imagenet()]


def imagenet_places(names: Sequence[str]) -> tuple[dict[str, int], str]:
    """Returns the outputs that names of ImageNet-1k classes stand for.

    A name may be a synset, also with the class's name behind it (``n02099601-golden_retriever``).
    Or it may be one of the class's names, in any case, with spaces or underscores. If the names are
    the numbers 0 to 999, these are the outputs (ImageNetV2).

    Returns:
        (the output of each name that is one of these classes, the problem with the other names or
        "").
    """
    if sorted(names) == sorted(map(str, range(1000))):
        return {name: int(name) for name in names}, ""
    candidates_of = {name: _candidates(name) for name in names}
    places = {
        name: next(iter(candidates))
        for name, candidates in candidates_of.items()
        if len(candidates) == 1
    }
    unknown = [name for name, candidates in candidates_of.items() if not candidates]
    if unknown:
        problem = f"not {some_of(unknown)}; name a folder by its synset (n01440764) or name (tench)"
        return places, problem
    synsets = imagenet_synsets()
    for name, candidates in candidates_of.items():
        if name not in places:
            several = " or ".join(synsets[place] for place in sorted(candidates))
            return places, f"'{name}' is {several}; name the folder by its synset"
    first: dict[int, str] = {}
    for name, place in places.items():
        if first.setdefault(place, name) != name:
            problem = (
                f"'{first[place]}' and '{name}' are the same class, {synsets[place]};"
                " make them one folder"
            )
            return places, problem
    return places, ""


def _candidates(name: str) -> set[int]:
    """Returns the outputs that a name may mean, by the strictest of the readings that finds any."""
    synset = _SYNSET.match(name)
    simplified = _simplified_name(name)
    keys = (synset and synset[0], name, simplified, simplified)
    for reading, key in zip(_readings(), keys, strict=True):
        if key in reading:
            return set(reading[key])
    return set()


@functools.cache
def _imagenet() -> list[tuple[str, list[str]]]:
    """Returns (synset, names) of each class."""
    lines = _IMAGENET.read_text(encoding="utf-8").splitlines()
    pairs = (line.split(" ", 1) for line in lines if not line.startswith("#"))
    return [(synset, [name.strip() for name in names.split(",")]) for synset, names in pairs]


@functools.cache
def _readings() -> tuple[dict[str, list[int]], ...]:
    """Returns dicts from names to outputs, from the strictest reading of a name to the loosest.

    The names are: synsets; usual names as they are written; simplified usual names; and any
    simplified name of a class, or all of its names in a row.
    """
    by_synset: dict[str, list[int]] = {}
    by_name: dict[str, list[int]] = {}
    by_simplified: dict[str, list[int]] = {}
    by_any: dict[str, list[int]] = {}
    for place, (synset, names) in enumerate(_imagenet()):
        by_synset.setdefault(synset, []).append(place)
        by_name.setdefault(names[0], []).append(place)
        by_simplified.setdefault(_simplified_name(names[0]), []).append(place)
        for name in {_simplified_name(name) for name in (*names, ", ".join(names))}:
            by_any.setdefault(name, []).append(place)
    return by_synset, by_name, by_simplified, by_any


def _simplified_name(name: str) -> str:
    return " ".join(name.replace("_", " ").replace("-", " ").casefold().split())


def _map_to_outputs(
    config: Configuration, val: Labelled, places: dict[str, int], names: list[str], whose: str
) -> None:
    """Maps the labels of ``val`` to outputs, and adds a note about it.

    Args:
        places: the output of each class of the data.
        names: of all outputs. The data's own names replace those of its classes.
        whose: says in the note whose classes the outputs are.
    """
    note = (
        f"the data's {len(_present(val))} classes are matched by name with {whose}:"
        f" {len(names)} outputs"
    )
    lookup = np.array([places.get(name, -1) for name in val.classes], np.int64)
    for name, place in places.items():
        names[place] = name
    if isinstance(val.labels, LabelSets):
        val.labels = val.labels.map_labels(lookup)
    else:
        val.labels = lookup[val.labels]
    val.classes = names
    add_note(config, note)


def _with_num_classes(config: Configuration, classes: int, who_has: str) -> Configuration:
    """Returns ``config`` with NUM_CLASSES set to ``classes``, or as the user set it to more.

    Args:
        who_has: begins the error's message, such as "the data has".
    """
    outputs = config.MODEL.NUM_CLASSES
    if outputs in ("auto", classes):
        # From now on the number comes from the data. So a run's config.yaml doesn't say that a user
        # set it, for any data.
        return with_values(
            config, f"the number of classes that {who_has}", MODEL__NUM_CLASSES=classes
        )
    if outputs < classes or not is_users(config, "MODEL.NUM_CLASSES"):
        choice = f", or to {outputs} if you want that" if outputs > classes else ""
        raise InputError(
            f"{who_has} {classes} classes, the model {outputs} outputs (MODEL.NUM_CLASSES);"
            f" set it with -o MODEL.NUM_CLASSES auto{choice}"
        )
    return config


def _count(dataset: Labelled) -> int:
    return len(dataset.classes) or int(every_label(dataset.labels).max()) + 1


def _present(dataset: Labelled) -> list[str]:
    """Returns the names of the classes that have a sample."""
    return [dataset.classes[label] for label in np.unique(every_label(dataset.labels))]


def _check_same_classes(train: Sequence[str], val: Sequence[str]) -> None:
    """Raises InputError unless the training and the validation images have the same classes."""
    for number, (name, other) in enumerate(itertools.zip_longest(train, val, fillvalue="missing")):
        if name != other:
            raise InputError(
                f"the training images have the classes {some_of(train)}, the validation images"
                f" {some_of(val)}: class {number} is {name} in one and {other} in the other; use"
                " the same classes in the same order"
            )


def some_of(names: Sequence[str]) -> str:
    """Returns the first names of classes, with their number, for a message."""
    if not names:
        return "without names"
    more = ", ..." if len(names) > 5 else ""
    return f"{', '.join(names[:5])}{more} ({len(names)})"
