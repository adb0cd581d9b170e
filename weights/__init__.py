"""Weights from files of this toolkit, timm, the Hugging Face Hub, PaddleViT, Google and the papers'
repositories.

A file goes through ``formats`` (arrays, whatever wrote them), ``names`` (timm's names for them),
``fit`` (this model's sizes), and only then into the model. What is written has timm's names and
layout: a Linear's weight is [out, in].
"""

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn

from errors import InputError, printable, reading
from settings.options import pair
from settings.plain import parsed_json
from weights.adapters import LEARNT_ANEW, PREFIX, Adapter, is_added, merge, read_adapter
from weights.fit import blind_classifiers, classifiers_of, fit_classifiers, fit_sizes
from weights.formats import METADATA, WeightFile, open_weights, read_metadata, write_weights
from weights.hub import SIDE, find_weights
from weights.imagenet22k import keep_imagenet1k
from weights.layout import Target, file_name, linear_weights, numpy_dtype
from weights.names import (
    differences,
    repeated_names,
    switches,
    timm_names,
    unread_classifier,
    unstored_arrays,
)
from weights.names.clip import is_openais
from weights.names.guess import guess_type
from weights.names.transformers import timm_names as from_transformers

__all__ = [
    "SUFFIX",
    "LoadReport",
    "checksum",
    "file_arrays",
    "find_weights",
    "load_weights",
    "save_weights",
]

SUFFIX = ".safetensors"


@dataclass
class LoadReport:
    """What ``load_weights`` did; tensors by timm's names.

    Attributes:
        file: what was read.
        loaded: tensors that are the file's, resized ones among them.
        resized: what was resized, in words.
        fresh: classifier tensors that stayed as they were, for ``reason``.
        missing, unexpected: what was allowed to be so.
        notes: what else there is to tell.
        config: timm's config.json beside the file, or {}.
        checksums: the CRC-32 of each tensor as it is in the file, and in an adapter's, by name; {}
            unless asked for.
        warning: with ``strict``: a warning about classifiers that can't tell classes apart; "":
            they can.
    """

    file: Path
    loaded: list[str] = field(default_factory=list)
    resized: list[str] = field(default_factory=list)
    fresh: list[str] = field(default_factory=list)
    reason: str = ""
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    checksums: dict[str, int] = field(default_factory=dict)
    warning: str = ""

    @property
    def changes(self) -> list[str]:
        """Returns what distinguishes the model from the file, in words; empty if nothing does."""
        lines = [*self.resized, f"classifier left fresh: {self.reason}" if self.fresh else ""]
        lines += [f"missing {_some(self.missing)}" if self.missing else ""]
        lines += [f"unexpected {_some(self.unexpected)}" if self.unexpected else ""]
        return [line for line in lines if line]

    def __str__(self) -> str:
        return "; ".join(
            [f"{len(self.loaded)} tensors loaded from {self.file}", *self.notes, *self.changes]
        )


def load_weights(
    model: Target,
    path: str | Path,
    strict: bool = True,
    allow: Sequence[str] | None = None,
    classes: str | None = None,
    adapter: str | Path | None = None,
    checksums: bool = False,
) -> LoadReport:
    """Loads every parameter and buffer of ``model`` but what a training added; it is changed only
    if all of them fit.

    The file is read one tensor at a time, once to check it and once to take it. So it needs little
    memory of its own. Position embeddings, tables of relative positions, the stem's channels and
    the patches' size are adapted to the model's (``weights.fit``). A file that doesn't tell the
    size of its images is one of squares.

    Args:
        path: what ``find_weights`` takes.
        strict: False, for fine-tuning: the layers ``model.classifier_names()`` stay fresh where the
            file has none, or has them for another number of classes; so do prompt tokens.
        allow: shell patterns of names that may be missing in the file or in the model.
        classes: MODEL.PRETRAINED_CLASSES: of a classifier of ImageNet-22k's classes ImageNet-1k's
            are kept.
        adapter: what ``weights.adapters.read_adapter`` takes: merged into the file's tensors, whose
            place it takes.
        checksums: whether to report checksums. They are of the files' tensors, before any is
            resized or merged.

    Returns:
        the report, to be shown.

    Raises:
        InputError: no such file, a damaged or dangerous one, names or shapes that differ from the
            model's, or a value that is NaN or infinite. Or another program writes to the file. If
            some tensors were set before that, the message says that the model isn't to be used.
    """
    with open_weights(path) as stored:
        return _load(model, stored, strict, allow or (), classes, adapter, checksums)


def _load(
    model: Target,
    stored: WeightFile,
    strict: bool,
    allow: Sequence[str],
    classes: str | None,
    adapter: str | Path | None,
    checksums: bool,
) -> LoadReport:
    family = model.weight_names
    report = LoadReport(stored.path, notes=list(stored.notes), config=stored.config)
    _check_activation(stored, model)
    if any(name.startswith(PREFIX) for name in stored.arrays):
        advice = f"give the weights that it was trained on, and -o MODEL.PRETRAINED_ADAPTER {stored.path}"
        raise InputError(f"{stored.path} is an adapter, no whole model; {advice}")
    state = {
        file_name(name): tensor for name, tensor in model.state_dict().items() if not is_added(name)
    }
    own = read_adapter(model, adapter) if adapter else None
    with reading(stored.path, "weights of this model"):  # shapes that no such file has, too
        arrays, computed = _arrange(model, stored, state)
        report.notes += [f"{name} computed: its toolkit's files leave it out" for name in computed]
        report.notes += _other_switches(model, switches(family, stored.arrays))
        report.resized = (
            keep_imagenet1k(model, state, arrays, classes, stored.path) if classes else []
        )
        if own:  # before anything is compared: a classifier is the adapter's
            arrays |= own.tensors
        if not strict:
            report.fresh, report.reason = fit_classifiers(model, state, arrays)
            report.reason = unread_classifier(stored.arrays) or report.reason
            new = [name for name in LEARNT_ANEW if name in state.keys() - arrays.keys()]
            report.notes += [f"{name} left fresh" for name in new]
            state = {
                name: tensor for name, tensor in state.items() if name not in {*report.fresh, *new}
            }
        for name in classifiers_of(model, list(arrays)) if report.fresh else ():
            del arrays[name]
        if checksums:
            report.checksums = _checksums(
                model, {name: arrays[name] for name in state if name in arrays}, own
            )
        told = differences(family, arrays, state)
        report.resized += fit_sizes(model, state, arrays, _images_of(stored))
        if own:
            arrays = own.apply_to(model, arrays, state, stored.path)
            report.notes.append(f"merged with {own.file}")
        report.missing = [name for name in state if name not in arrays]
        report.unexpected = [name for name in arrays if name not in state]
        kinds = guess_type(from_transformers(stored.arrays)), guess_type(state)
        heads = classifiers_of(model, state)
        headless = ""
        if heads and not report.unexpected and report.missing == heads:
            lacks = unread_classifier(stored.arrays) or "it has no classifier"
            headless = f"{lacks}; train one, or compute its features (tools/features.py)"
        _check(
            report,
            state,
            arrays,
            allow,
            told,
            "" if kinds[0] == kinds[1] else kinds[0] or "",
            headless,
        )
        report.loaded = [name for name in state if name in arrays]
        # All are read to be checked before the first one is set, which reads it again.
        for name in report.loaded:
            np.asarray(arrays[name])
        _set(stored, {name: arrays[name] for name in report.loaded}, state)
    if strict:
        report.warning = blind_classifiers(model, stored.path)
    return report


def _set(stored: WeightFile, arrays: dict[str, Any], state: dict[str, paddle.Tensor]) -> None:
    """Sets the tensors. Another program may write to the file meanwhile: whatever is set is what
    was checked.
    """
    is_changed = False
    try:
        with paddle.no_grad():
            for name, array in arrays.items():
                values = np.ascontiguousarray(array, dtype=numpy_dtype(state[name]))
                stored.check_unchanged()
                state[name].set_value(values)
                is_changed = True
    except InputError as error:
        if is_changed:
            raise InputError(
                f"{error}; the model has only some of its tensors: don't use it"
            ) from None
        raise


def _checksums(
    model: Target, arrays: dict[str, np.ndarray], adapter: Adapter | None
) -> dict[str, int]:
    """Returns the CRC-32 of the arrays, and of an adapter's products.

    They are taken in PyTorch's layout: most files have it, and arrays in it need no copy.
    """
    transposed = linear_weights(model)
    found = {
        name: checksum(array.T if name in transposed else array) for name, array in arrays.items()
    }
    if adapter:
        scale = np.array(adapter.scale)
        found |= {
            f"{layer}'s product": checksum(a.T, b.T, scale)
            for layer, (a, b) in adapter.products.items()
        }
    return found


def checksum(*arrays: np.ndarray) -> int:
    """Returns the CRC-32 of arrays, one after the other: a tenth of a second for 200 MB."""
    crc = 0
    for array in arrays:
        crc = zlib.crc32(np.ascontiguousarray(array).data, crc)
    return crc


def _arrange(
    model: Target, stored: WeightFile, state: dict[str, paddle.Tensor]
) -> tuple[dict[str, Any], list[str]]:
    """Returns (a file's arrays by timm's names in the model's layout, names of those that are
    computed).
    """
    try:
        arrays = timm_names(model.weight_names, stored.arrays, stored.layout, state)
        computed = unstored_arrays(model.weight_names, stored.arrays, state)
    except InputError as error:
        raise InputError(f"{stored.path}: its tensors don't go together ({error})") from None
    if stored.layout != "paddle":
        transposed = linear_weights(model)
        arrays = {name: array.T if name in transposed else array for name, array in arrays.items()}
    return arrays | computed, list(computed)


def file_arrays(
    model: nn.Layer, state: dict[str, np.ndarray] | None = None
) -> dict[str, np.ndarray]:
    """Returns every parameter and buffer of ``model`` in timm's names and layout, under each name
    that timm has for it. What a training added is merged into them, or left out.

    Args:
        state: as they were before; None: as they are.
    """
    transposed = linear_weights(model)
    if state is None:
        state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    own = merge(model, state)
    arrays = {
        file_name(name): array.T if name in transposed else array for name, array in own.items()
    }
    others = repeated_names(getattr(model, "weight_names", None), arrays)
    return arrays | {other: arrays[name] for other, name in others.items()}


def save_weights(model: nn.Layer, file: str | os.PathLike[str]) -> None:
    """Writes every parameter and buffer of ``model``; timm loads the file as it is."""
    write_weights(Path(file), file_arrays(model))


def _images_of(stored: WeightFile) -> tuple[int, int] | None:
    """Returns the (height, width) of the images that a file's tensors are for; None: it doesn't
    tell.
    """
    told = read_metadata(stored.path).get(METADATA)
    size = (stored.config.get("input_size") or [])[1:]
    size = parsed_json(told.encode())["values"].get("DATA.IMAGE_SIZE") if told else size
    return pair(size) if SIDE.holds(size) else None


def _check_activation(stored: WeightFile, model: Target) -> None:
    quick = "quickgelu" in str(stored.config.get("architecture")) or is_openais(stored.arrays)
    if quick and getattr(model, "act", None) != "quick_gelu":
        raise InputError(
            f"{stored.path}: its model has the quick GELU, this one hasn't; set MODEL.ACT quick_gelu"
        )


def _other_switches(model: Target, told: dict[str, Any]) -> list[str]:
    """Returns a note for each key that the file's names tell, and that the model has otherwise."""
    found = {key: getattr(model, key.lower()) for key in told}
    return [
        f"its names tell MODEL.{key} {told[key]}, the model has {value}"
        for key, value in found.items()
        if value != told[key]
    ]


def _check(
    report: LoadReport,
    state: dict[str, paddle.Tensor],
    arrays: dict[str, np.ndarray],
    allow: Sequence[str],
    told: dict[str, Any],
    other: str,
    headless: str,
) -> None:
    """Raises InputError for names that differ and aren't allowed to, and for shapes that differ.

    Args:
        told: the keys of MODEL, and the values with which the names would be the file's.
        other: MODEL.TYPE that the file's names look like, where the model is another.
        headless: what to say if the file lacks the classifiers and nothing else; "": it lacks
            something else.
    """

    def refused(names: list[str]) -> list[str]:
        return [name for name in names if not any(fnmatchcase(name, pattern) for pattern in allow)]

    problems = []
    for kind, names in (
        ("missing", refused(report.missing)),
        ("unexpected", refused(report.unexpected)),
    ):
        problems += [f"{kind} {_some(names)}"] if names else []
    shapes = [
        f"{name} is {list(arrays[name].shape)}, the model's {list(tensor.shape)}"
        for name, tensor in state.items()
        if name in arrays and list(arrays[name].shape) != list(tensor.shape)
    ]
    problems += [*shapes[:4], *([f"{len(shapes) - 4} more shapes"] if len(shapes) > 4 else [])]
    if problems:
        of = f" (of {report.config['architecture']})" if "architecture" in report.config else ""
        keys = " and ".join(f"MODEL.{key} {value}" for key, value in told.items())
        another = other and not keys and 2 * len(report.missing) > len(state)
        problems += [f"its names look like a {other}'s"] if another else []
        problems += [headless] if headless else []
        problems += [f"its names tell {keys}: set that"] if keys else []
        raise InputError(f"{report.file}{of} doesn't fit the model: {'; '.join(problems)}")


def _some(names: list[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(printable(name, 80) for name in names[:most]) + more
