"""The vocabulary in which keys are declared: type and range, default, meaning, and needs.

Keys are declared in three places. ``config.py`` has those of all runs, in classes:

    class DATA(Section):
        # Training samples per device and step.
        BATCH_SIZE: Batch = key(256, OWN_BATCH)

An architecture (``models/``) and a component (an optimizer, a loss, a dataset) have theirs in their
signature and docstring: ``settings.signatures`` reads them from the source.
"""

import ast
import collections.abc
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from errors import InputError
from settings.needs import CLASSIFIER, TRAINING, Need, above_zero, is_, is_not, is_set, is_unset
from settings.suggestions import nearest
from settings.values import LARGEST_INT, coerce, quoted


class Range(NamedTuple):
    """The values that a key may have, of those of its type."""

    text: str
    holds: Callable[[Any], bool]


class Key(NamedTuple):
    """A key as it was declared.

    Attributes:
        name: dotted, such as TRAIN.BASE_LR.
        kind: a type; [type] for a list of it; (type, [type]) for either.
        optional: None is a value, too.
        words: texts that are values besides those of ``kind``, such as "auto".
        choices: all values that there are, besides None; (): any of ``kind``.
        range: the values of ``kind`` that are allowed; None: all of them.
        length: of a list; None: any from 1 on.
        default: the value if nobody sets the key.
        text: what it means; "" where a class declares it (``meanings``).
        needs: the conditions under which it has an effect.
    """

    name: str
    kind: Any
    optional: bool
    words: tuple[str, ...]
    choices: tuple[Any, ...]
    range: Range | None
    length: int | None
    default: Any
    text: str
    needs: tuple[Need, ...]

    @property
    def takes(self) -> str:
        """Describes the values of the key."""
        words = list(map(str, self.choices)) or [*_kind_names(self.kind), *self.words]
        if self.optional:
            words.append("None")
        said = " or ".join(words)
        if self.range:
            said += f", {self.range.text}"
        return f"{said}, {self.length} values" if self.length else said

    def coerced(self, value: Any, source: str) -> Any:
        """Returns ``value`` in the key's type; a word of the command line is parsed.

        Args:
            source: where the value was found, named in errors.

        Raises:
            InputError: it is of another type.
        """
        return coerce(self.name, value, self.kind, self.optional, self.words, source)

    def problem(self, value: Any) -> str:
        """Returns what is expected instead of a value of the key's type, or "" where it may be."""
        if value in self.words or (value is None and self.optional):
            return ""
        if self.choices and value not in self.choices:
            choices = (None, *self.choices) if self.optional else self.choices
            known = list(map(str, choices))
            return f"one of {', '.join(known)}{nearest(str(value), known)}"
        numbers = value if isinstance(value, list) else [value]
        if self.range and not (numbers and all(map(self.range.holds, numbers))):
            return self.range.text
        if self.length and len(numbers) != self.length:
            return f"{self.length} values"
        return ""

    def value(self, found: Any, source: str) -> Any:
        """Returns ``found`` as the key takes it.

        Raises:
            InputError: it doesn't take it; ``source`` is where it was found.
        """
        value = self.coerced(found, source)
        if expected := self.problem(value):
            raise InputError(f"{source}: {self.name} is {quoted(value)}, expected {expected}")
        return value


# ------------------------------------------------- types


def between(low: float, high: float) -> Range:
    """Returns the range of both bounds and what lies between them."""
    return Range(f"{low} to {high}", lambda value: low <= value <= high)


# Bytes: below Linux's 4,096 and 255, for what a run adds.
_LONGEST_PATH = 3500
_LONGEST_NAME = 200


def _is_path(value: str) -> bool:
    path = value.encode()
    return len(path) <= _LONGEST_PATH and max(map(len, path.split(b"/"))) <= _LONGEST_NAME


# Ranges exclude values that can't be meant, and those with which a run would fail or never end
# without naming the key.
Size = Annotated[int, between(1, 1_000_000)]
# A number of layers. Each takes time to build.
Depth = Annotated[int, between(1, 200)]
# As Depth, or 0.
Blocks = Annotated[int, between(0, 200)]
# The side of a convolution's kernel.
Kernel = Annotated[int, between(1, 99)]
# The epsilon of a norm; Paddle takes no larger one.
Epsilon = Annotated[float, between(1e-12, 0.001)]
Count = Annotated[int, between(0, 1_000_000)]
Factor = Annotated[float, between(0, 1_000_000)]
Positive = Annotated[float, between(1e-12, 1_000_000)]
Share = Annotated[float, between(0, 1)]
Rate = Annotated[float, Range("0 <= value < 1", lambda value: 0 <= value < 1)]
Part = Annotated[float, Range("0 < value < 1", lambda value: 0 < value < 1)]
KeyType = TypeVar("KeyType")
# InTraining[bool]: a key that has an effect in training alone
InTraining = Annotated[KeyType, TRAINING]
# OfClassifier[bool]: a key that has an effect only in a model with a classifier
OfClassifier = Annotated[KeyType, CLASSIFIER]
# Those of config.py alone.
Batch = Annotated[int, between(1, 10_000_000)]
Few = Annotated[int, between(1, 1000)]
Number = Annotated[int, between(0, LARGEST_INT)]
# How often something is done: at every n-th step, epoch, ...
Every = Annotated[int, between(1, LARGEST_INT)]
Epochs = Annotated[float, between(0, 1_000_000)]
WholeEpochs = Annotated[int, between(0, 1_000_000)]
Seconds = Annotated[float, Range("above 0, at most 1000000", lambda value: 0.001 <= value <= 1e6)]
# A side of an image, in pixels.
Side = Annotated[int, between(1, 10_000)]
CropShare = Annotated[
    float,
    Range(
        "0.1 <= value <= 1: images are resized to IMAGE_SIZE / it", lambda value: 0.1 <= value <= 1
    ),
]
# Likewise of an evaluation, which pads an image that is smaller than the crop.
PaddedCropShare = Annotated[
    float,
    Range(
        "0.1 <= value <= 2: images are resized to IMAGE_SIZE / it", lambda value: 0.1 <= value <= 2
    ),
]
MixAlpha = Annotated[
    float, Range("0 (off), or 0.001 to 1000", lambda value: not value or 0.001 <= value <= 1000)
]
Processes = Annotated[
    int, Range("-1 (all), or 1 to 10000", lambda value: value == -1 or 1 <= value <= 10_000)
]
FilePath = Annotated[
    str,
    Range(
        f"a path of at most {_LONGEST_PATH} bytes, with names of at most {_LONGEST_NAME}", _is_path
    ),
]
# What a signature's annotation may name.
VOCABULARY: dict[str, Any] = {
    **{kind.__name__: kind for kind in (bool, int, float, str, tuple)},
    "Literal": Literal,
    "Sequence": Sequence,
    **{name: value for name, value in globals().items() if get_origin(value) is Annotated},
    "Annotated": Annotated,
    "between": between,
    **{need.__name__: need for need in (is_, is_not, is_set, is_unset, above_zero)},
}


def key_of(
    name: str, annotation: Any, default: Any, text: str = "", needs: tuple[Need, ...] = ()
) -> Key:
    """Returns a key of this type; raises TypeError for an annotation that is none of a key's."""
    whole, marks = _unwrapped(annotation)
    alternatives = get_args(whole) if get_origin(whole) in (Union, types.UnionType) else (whole,)
    kinds: list[Any] = []
    words: tuple[Any, ...] = ()
    optional = False
    length = None
    for part in alternatives:
        part, more = _unwrapped(part)
        marks += more
        origin = get_origin(part)
        if part is types.NoneType:
            optional = True
        elif origin is Literal:
            words += get_args(part)
        elif origin in (tuple, collections.abc.Sequence):
            item, more = _unwrapped(get_args(part)[0])
            marks += more
            kinds.append([item])
            if origin is tuple:
                length = len(get_args(part))
        else:
            kinds.append(part)
    if not all(kind in (bool, int, float, str) for [kind] in map(_as_list, kinds)):
        raise TypeError(f"{annotation} isn't supported as the type of a key")
    limits = next((mark for mark in marks if isinstance(mark, Range)), None)
    needs += tuple(mark for mark in marks if isinstance(mark, Need))
    choices: tuple[Any, ...] = ()
    if not kinds:
        kinds = [type(words[0])]
        choices = words
        words = ()
    # A single value before a list of them.
    kinds.sort(key=lambda kind: isinstance(kind, list))
    kind = tuple(kinds) if len(kinds) > 1 else kinds[0]
    return Key(name, kind, optional, words, choices, limits, length, default, text, needs)


def _unwrapped(annotation: Any) -> tuple[Any, list[Any]]:
    """Returns (a type, the marks that Annotated adds to it)."""
    if get_origin(annotation) is Annotated:
        plain, *marks = get_args(annotation)
        return plain, marks
    return annotation, []


def _as_list(kind: Any) -> list[Any]:
    return kind if isinstance(kind, list) else [kind]


def _kind_names(kind: Any) -> list[str]:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    return [
        f"list of {one[0].__name__}s" if isinstance(one, list) else one.__name__ for one in kinds
    ]


# ------------------------------------------------- declarations in classes


class Declared(NamedTuple):
    """The arguments of a call of ``key``."""

    default: Any
    needs: tuple[Need, ...]
    choices: tuple[str, ...]


def key(default: Any, *needs: Need, choices: tuple[str, ...] = ()) -> Any:
    """Declares a key of a ``Section``, in whose class its annotation is its type.

    Args:
        needs: all that it needs to have an effect.
        choices: the values of a text that may be one of many.
    """
    return Declared(default, needs, choices)


class Section:
    """Keys that stand together. A subclass declares them; the classes in it are the sections
    within.

    The comment above a key says what it means, with its unit.
    """


def declared(section: type[Section], prefix: str = "") -> Iterator[Key]:
    """Yields the keys of a section and of those within, in the order in which they are written."""
    for name, value in vars(section).items():
        if isinstance(value, type) and issubclass(value, Section):
            yield from declared(value, f"{prefix}{name}.")
        elif name in section.__annotations__:
            one = value if isinstance(value, Declared) else Declared(value, (), ())
            made = key_of(
                f"{prefix}{name}", section.__annotations__[name], one.default, "", one.needs
            )
            yield made._replace(choices=one.choices) if one.choices else made


def meanings(source: str, root: str = "Root") -> dict[str, str]:
    """Returns what the comments above the keys of a source say, by dotted key.

    Args:
        root: the class whose keys are in no section.
    """
    lines = source.splitlines()
    found: dict[str, str] = {}

    def read(node: ast.ClassDef, prefix: str) -> None:
        for one in node.body:
            if isinstance(one, ast.ClassDef):
                read(one, f"{prefix}{one.name}.")
            elif isinstance(one, ast.AnnAssign):
                first = one.lineno - 1
                while lines[first - 1].lstrip().startswith("#"):
                    first -= 1
                said = (
                    line.strip().removeprefix("#").strip() for line in lines[first : one.lineno - 1]
                )
                found[f"{prefix}{ast.unparse(one.target)}"] = " ".join(said)

    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and any(
            ast.unparse(base) == "Section" for base in node.bases
        ):
            read(node, "" if node.name == root else f"{node.name}.")
    return found
