"""The conditions under which keys have an effect, as ``config.py`` and annotations name them.

A key whose need isn't met is idle, and setting it is an error (``settings.idle``).
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

# All values of a configuration, by dotted key.
Values = Mapping[str, Any]


class Need(NamedTuple):
    """A condition under which a key has an effect.

    Attributes:
        text: what is missing where it isn't met; it follows "does nothing".
        keys: the keys that decide.
        met: whether it is met, from all values.
        files_wait: a file may set the key where the need isn't met (yet).
    """

    text: str
    keys: tuple[str, ...]
    met: Callable[[Values], bool]
    files_wait: bool = False


@functools.cache
def is_(key: str, *choices: Any) -> Need:
    """Needs ``key`` to have one of the values."""
    text = f"without {key} {' or '.join(map(str, choices))}"
    return Need(text, (key,), lambda values: values[key] in choices)


@functools.cache
def is_not(key: str, *choices: Any) -> Need:
    """Needs ``key`` to have none of the values."""
    text = f"with {key} {' or '.join(map(str, choices))}"
    return Need(text, (key,), lambda values: values[key] not in choices)


@functools.cache
def is_set(key: str) -> Need:
    """Needs ``key`` to be neither None nor False."""
    return Need(f"without {key}", (key,), lambda values: bool(values[key]))


@functools.cache
def is_unset(key: str) -> Need:
    """Needs ``key`` to be None or False."""
    return Need(f"with {key}", (key,), lambda values: not values[key])


@functools.cache
def above_zero(key: str) -> Need:
    """Needs ``key`` to be a number above 0."""
    return Need(f"without {key} above 0", (key,), lambda values: values[key] > 0)


def _loads_ahead(values: Values) -> bool:
    by_dali = values["DATA.LOADER"] == "dali" and not values["EVAL"]
    return values["DATA.NUM_WORKERS"] > 0 or by_dali


def _decodes_eight_bits(values: Values) -> bool:
    return values["DATA.IMAGE_DTYPE"] != "float32" and values["DATA.IMAGE_CHANNELS"] in (1, 3)


def _uses_batch_size(values: Values) -> bool:
    return values["EVAL"] or not values["DATA.GLOBAL_BATCH"]


def _splits_training_images(values: Values) -> bool:
    return values["DATA.VAL_SPLIT"] is not None or values["DATA.FOLDS"] is not None


def _has_binary_loss(values: Values) -> bool:
    loss = values["TRAIN.LOSS"]
    return loss == "bce" or (loss == "auto" and values["TASK"] == "multilabel")


def _cuts(values: Values) -> bool:
    return values["TRAIN.CUTMIX_ALPHA"] > 0 or values["TRAIN.CUTMIX_MINMAX"] is not None


# Only tasks that train on the data's labels read a key with this need, and those that list the key
# (``settings.tasks``). ``settings.idle`` replaces it by a need that names these tasks.
LABELS = Need("with a TASK that doesn't read it", ("TASK",), lambda _: True)
# Only tasks whose model has a classifier read a key with this need. It is replaced in the same way.
CLASSIFIER = Need("with a TASK whose model has no classifier", ("TASK",), lambda _: True)
# Only tasks that train on one view of an image read a key with this need. It is replaced, too.
ONE_VIEW = Need("with a TASK that draws views of its own", ("TASK",), lambda _: True)
# Only tasks whose model gives a class for each pixel read a key with this need. It is replaced, too.
MAPS = Need("without a TASK of masks", ("TASK",), lambda _: True)
TRAINING = Need("under EVAL", ("EVAL",), lambda values: not values["EVAL"], files_wait=True)
EVALUATION = is_("EVAL", True)
WEIGHTS = is_set("MODEL.PRETRAINED")._replace(files_wait=True)
TEACHER = is_("TRAIN.DISTILLATION_TYPE", "hard", "soft", "feature")
FLEET = is_("DIST.ENGINE", "fleet")
LOADED_AHEAD = Need(
    "without DATA.NUM_WORKERS above 0 or DATA.LOADER dali",
    ("DATA.NUM_WORKERS", "DATA.LOADER", "EVAL"),
    _loads_ahead,
)
EIGHT_BITS = Need(
    "with float32 pixels, which are decoded differently",
    ("DATA.IMAGE_DTYPE", "DATA.IMAGE_CHANNELS"),
    _decodes_eight_bits,
)
OWN_BATCH = Need(
    "with DATA.GLOBAL_BATCH, which determines it",
    ("DATA.GLOBAL_BATCH",),
    _uses_batch_size,
)
PARTS = Need(
    "without DATA.VAL_SPLIT or DATA.FOLDS",
    ("DATA.VAL_SPLIT", "DATA.FOLDS"),
    _splits_training_images,
)
BCE = Need(
    "without TRAIN.LOSS bce, or auto under TASK multilabel",
    ("TRAIN.LOSS", "TASK"),
    _has_binary_loss,
)
MIXUP = above_zero("TRAIN.MIXUP_ALPHA")
CUTMIX = Need(
    "without TRAIN.CUTMIX_ALPHA above 0 or TRAIN.CUTMIX_MINMAX",
    ("TRAIN.CUTMIX_ALPHA", "TRAIN.CUTMIX_MINMAX"),
    _cuts,
)
MIXING = Need(
    "without TRAIN.MIXUP_ALPHA or TRAIN.CUTMIX_ALPHA above 0, or TRAIN.CUTMIX_MINMAX",
    (*MIXUP.keys, *CUTMIX.keys),
    lambda values: MIXUP.met(values) or CUTMIX.met(values),
)


def float_pixels(data: Mapping[str, Any]) -> bool:
    """Returns whether images are float32 up to the model, in full depth. Otherwise they are uint8,
    colours or grey.

    Args:
        data: DATA's keys, by their names.
    """
    return data["IMAGE_DTYPE"] == "float32" or data["IMAGE_CHANNELS"] not in (1, 3)
