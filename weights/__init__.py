"""Loads weights from files of several toolkits, and writes files of weights.

The files are this toolkit's, timm's, the Hugging Face Hub's, PaddleViT's, Google's, and those of
the papers' repositories. A file passes three stages before a tensor of the model is set:
``formats`` reads its arrays, whatever wrote them; ``names`` gives them timm's names; ``fit``
resizes them for this model. Files that are written have timm's names and layout: a Linear's weight
is [out, in].
"""

import os
import zlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn

from errors import InputError, printable, reading
from settings.configuration import pair
from settings.plain import parsed_json
from weights.adapters import LEARNT_ANEW, PREFIX, Adapter, is_added, merge, read_adapter
from weights.fit import blind_classifiers, classifiers_of, fit_classifiers, fit_sizes
from weights.formats import METADATA, WeightFile, open_weights, read_metadata, write_weights
from weights.hub import SIDE, find_weights
from weights.imagenet22k import keep_imagenet1k
from weights.layout import (
    Target,
    encoders_of,
    file_name,
    linear_weights,
    numpy_dtype,
)
from weights.names import (
    differences,
    encoder_arrays,
    repeated_names,
    switches,
    timm_names,
    unread_classifier,
    unstored_arrays,
)
from weights.names.clip import is_openais
from weights.names.guess import guess_type
from weights.names.rules import ENCODER_PREFIX
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
    """The result of ``load_weights``. Tensors are listed by timm's names.

    Attributes:
        file: the file that was read.
        loaded: tensors whose values are from the file, resized ones included.
        resized: a sentence for each thing that was resized.
        fresh: tensors of classifiers that keep the model's own values, because of ``reason``.
        missing, unexpected: names that differ between file and model, where ``allow`` permits it.
        notes: anything else that the user should know.
        config: timm's config.json beside the file, or {}.
        checksums: the CRC-32 by name of each tensor as the file has it, and of an adapter's
            products; {} unless they are requested.
        warning: with ``strict``, a warning about classifiers that can't tell classes apart; "" if
            there is nothing to warn about.
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
        """Returns a line for each difference between the model and the file; [] if none."""
        lines = list(self.resized)
        if self.fresh:
            lines.append(f"classifier initialised randomly: {self.reason}")
        if self.missing:
            lines.append(f"missing {_shortened(self.missing)}")
        if self.unexpected:
            lines.append(f"unexpected {_shortened(self.unexpected)}")
        return lines

    def __str__(self) -> str:
        summary = f"{len(self.loaded)} tensors loaded from {self.file}"
        return "; ".join([summary, *self.notes, *self.changes])


def load_weights(
    model: Target,
    path: str | Path,
    strict: bool = True,
    allow: Sequence[str] | None = None,
    classes: str | None = None,
    adapter: str | Path | None = None,
    checksums: bool = False,
) -> LoadReport:
    """Loads every parameter and buffer of ``model``; the model changes only if all of them fit.

    What a training adds to a model (LoRA, projections) is not loaded. If the file holds a network
    for pre-training and ``model`` is none, the file's encoder is loaded
    (``weights.names.encoder_arrays``). If ``model`` is such a network, and the file holds a model or
    another method's network, only the encoder is loaded, and the teacher's or the moving average's
    is a copy of it. With ``strict`` that is an error.

    The file is read one tensor at a time: once to check all tensors, and once more to set them. So
    little memory is needed besides the model's. Position embeddings, tables of relative positions,
    the stem's channels and the patch size are adapted to the model's (``weights.fit``). If the file
    doesn't say how large its images are, they are taken to be squares.

    Args:
        path: what ``find_weights`` takes.
        strict: False is for fine-tuning: the layers ``model.classifier_names()`` stay fresh if the
            file has none, or has them for another number of classes. Prompt tokens stay fresh, too.
        allow: shell patterns of names that may be missing in the file or in the model.
        classes: MODEL.PRETRAINED_CLASSES: of a classifier of ImageNet-22k's classes, those of
            ImageNet-1k are kept.
        adapter: what ``weights.adapters.read_adapter`` takes. Its tensors replace the file's, and
            its products are merged into them.
        checksums: whether to report checksums. They are of the files' tensors, before these are
            resized or merged.

    Returns:
        the report, to be shown.

    Raises:
        InputError: there is no such file, or it is damaged or dangerous; its names or shapes differ
            from the model's; a value is NaN or infinite; or another program writes to the file
            meanwhile. If some tensors were set before that, the message says that the model must
            not be used.
    """
    with open_weights(path) as stored:
        return _load(model, stored, strict, allow or (), classes, adapter, checksums)


def _load(
    model: Target,
    stored: WeightFile,
    strict: bool,
    allow: Sequence[str],
    classes: str | None,
    adapter_path: str | Path | None,
    checksums: bool,
) -> LoadReport:
    if any(name.startswith(PREFIX) for name in stored.arrays):
        advice = f"pass the weights that it was trained on, and -o MODEL.PRETRAINED_ADAPTER {stored.path}"
        raise InputError(f"{stored.path} is an adapter, not a whole model; {advice}")
    state = {
        file_name(name): tensor for name, tensor in model.state_dict().items() if not is_added(name)
    }
    encoders = encoders_of(model)
    if encoders and not strict and _is_of_model(model, stored, state):
        encoder = encoders["encoder"]
        report = _load(encoder, stored, strict, allow, classes, adapter_path, checksums)
        for other in encoders.values():
            if other is not encoder:
                _copy(encoder, other)
        return _as_encoders(report, encoders, state)
    stored = _encoder_of(stored, state)
    report = LoadReport(stored.path, notes=list(stored.notes), config=stored.config)
    _check_activation(stored, model)
    adapter = read_adapter(model, adapter_path) if adapter_path else None

    # A damaged file may have shapes on which NumPy fails below. ``reading`` makes one line of it.
    with reading(stored.path, "weights of this model"):
        arrays, computed = _arrange(model, stored, state)
        report.notes += [
            f"{name} computed, because files of its toolkit omit it" for name in computed
        ]
        report.notes += _other_switches(model, switches(model.weight_names, stored.arrays))
        if classes:
            report.resized = keep_imagenet1k(model, state, arrays, classes, stored.path)

        # The adapter's tensors come first, because its classifier is the one to compare.
        if adapter:
            arrays |= adapter.tensors
        if not strict:
            state = _without_fresh(model, stored, state, arrays, report)
        heads = classifiers_of(model, list(arrays))
        left_out = heads if report.fresh else []
        if heads and not strict and not model.num_classes:
            report.notes.append(f"ignored, because the model has no classes: {_shortened(heads)}")
            left_out = heads
        arrays = {name: array for name, array in arrays.items() if name not in left_out}
        if checksums:
            kept = {name: arrays[name] for name in state if name in arrays}
            report.checksums = _checksums(model, kept, adapter)

        settings = differences(model.weight_names, arrays, state)
        report.resized += fit_sizes(model, state, arrays, _image_size(stored))
        if adapter:
            arrays = adapter.apply_to(model, arrays, state, stored.path)
            report.notes.append(f"merged with {adapter.file}")
        report.missing = [name for name in state if name not in arrays]
        report.unexpected = [name for name in arrays if name not in state]
        _check(model, stored, report, state, arrays, allow, settings)

        report.loaded = [name for name in state if name in arrays]
        # All values are read here, and so checked, before the first tensor is set. Setting them
        # reads them again.
        for name in report.loaded:
            np.asarray(arrays[name])
        _set(stored, {name: arrays[name] for name in report.loaded}, state)
    if strict:
        report.warning = blind_classifiers(model, stored.path)
    return report


def _is_of_model(model: Target, stored: WeightFile, state: dict[str, paddle.Tensor]) -> bool:
    """Returns whether a file has nothing of what a network for pre-training has beside its encoder.

    Such a file holds a model or another method's network. A mask token alone doesn't count: DINOv2's
    models have one, too.
    """
    own = set(_beside_encoders(encoders_of(model), state)) - {"mask_token"}
    try:
        named = timm_names(model.weight_names, stored.arrays, stored.layout, state)
    except InputError:
        # What doesn't go together is reported where the file is loaded.
        return True
    return own.isdisjoint(named)


def _copy(source: nn.Layer, target: nn.Layer) -> None:
    """Gives one model's tensors to another one of the same kind."""
    values = source.state_dict()
    for name, tensor in target.state_dict().items():
        tensor.set_value(values[name])


def _as_encoders(
    report: LoadReport, encoders: dict[str, Any], state: dict[str, paddle.Tensor]
) -> LoadReport:
    """Returns the report of an encoder's weights as one of the whole network's.

    Args:
        encoders: the network's by name, which have the same weights now.
        state: the network's tensors.
    """
    for names in (report.loaded, report.missing):
        names[:] = [f"{encoder}.{name}" for encoder in encoders for name in names]
    sums = {f"{ENCODER_PREFIX}{name}": value for name, value in report.checksums.items()}
    parameters = encoders["encoder"].named_parameters()
    fixed = [name for name, values in parameters if values.stop_gradient]
    owner = "the encoder's" if len(encoders) == 1 else f"those of {' and '.join(encoders)}"
    others = ", ".join(dict.fromkeys(_beside_encoders(encoders, state).values()))
    note = f"the file's tensors are {owner}; {others} are initialised randomly"
    if fixed:
        note += f"; not trained: {_shortened(fixed)}"
    return replace(report, checksums=sums, notes=[note, *report.notes])


def _beside_encoders(encoders: Collection[str], names: Iterable[str]) -> dict[str, str]:
    """Returns the names that aren't an encoder's, each with its layer, such as "teacher.head".

    Args:
        encoders: the names of a network's encoders.
        names: of the network's tensors.
    """
    prefixes = tuple(f"{encoder}." for encoder in encoders)
    owners = {encoder.rpartition(".")[0] for encoder in encoders}
    layers = {}
    for name in names:
        if name.startswith(prefixes):
            continue
        layer, _, rest = name.partition(".")
        if layer in owners:
            layer += "." + rest.partition(".")[0]
        layers[name] = layer
    return layers


def _encoder_of(stored: WeightFile, state: dict[str, paddle.Tensor]) -> WeightFile:
    """Returns the file with the arrays of its model alone, and a note of the others."""
    try:
        arrays, left_out = encoder_arrays(stored.arrays, state)
    except InputError as error:
        raise InputError(f"{stored.path}: its tensors are inconsistent ({error})") from None
    notes = [*stored.notes, left_out] if left_out else stored.notes
    return replace(stored, arrays=arrays, notes=notes)


def _without_fresh(
    model: Target,
    stored: WeightFile,
    state: dict[str, paddle.Tensor],
    arrays: dict[str, Any],
    report: LoadReport,
) -> dict[str, paddle.Tensor]:
    """Returns the tensors of ``state`` that the file has to fill; notes the others in ``report``."""
    report.fresh, report.reason = fit_classifiers(model, state, arrays)
    report.reason = unread_classifier(stored.arrays) or report.reason
    prompts = [name for name in LEARNT_ANEW if name in state and name not in arrays]
    report.notes += [f"{name} left fresh" for name in prompts]
    fresh = {*report.fresh, *prompts}
    return {name: tensor for name, tensor in state.items() if name not in fresh}


def _set(stored: WeightFile, arrays: dict[str, Any], state: dict[str, paddle.Tensor]) -> None:
    """Sets the tensors, and stops if another program writes to the file.

    Only checked values may reach the model.
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
            raise InputError(f"{error}; the model was loaded partially and can't be used") from None
        raise


def _checksums(
    model: Target, arrays: dict[str, np.ndarray], adapter: Adapter | None
) -> dict[str, int]:
    """Returns the CRC-32 of the arrays, and of an adapter's products.

    They are computed in PyTorch's layout. Most files have it, and their arrays need no copy then.
    """
    transposed = linear_weights(model)
    sums = {
        name: checksum(array.T if name in transposed else array) for name, array in arrays.items()
    }
    if adapter:
        scale = np.array(adapter.scale)
        for layer, (a, b) in adapter.products.items():
            sums[f"{layer}'s product"] = checksum(a.T, b.T, scale)
    return sums


def checksum(*arrays: np.ndarray) -> int:
    """Returns the CRC-32 of arrays, one after the other: a tenth of a second for 200 MB."""
    crc = 0
    for array in arrays:
        crc = zlib.crc32(np.ascontiguousarray(array).data, crc)
    return crc


def _arrange(
    model: Target, stored: WeightFile, state: dict[str, paddle.Tensor]
) -> tuple[dict[str, Any], list[str]]:
    """Returns a file's arrays by timm's names in the model's layout, and which were computed."""
    try:
        arrays = timm_names(model.weight_names, stored.arrays, stored.layout, state)
        computed = unstored_arrays(model.weight_names, stored.arrays, state)
    except InputError as error:
        raise InputError(f"{stored.path}: its tensors are inconsistent ({error})") from None
    if stored.layout != "paddle":
        transposed = linear_weights(model)
        arrays = {name: array.T if name in transposed else array for name, array in arrays.items()}
    return arrays | computed, list(computed)


def file_arrays(
    model: nn.Layer, state: dict[str, np.ndarray] | None = None
) -> dict[str, np.ndarray]:
    """Returns every parameter and buffer of ``model`` in timm's names and layout.

    A tensor for which timm has several names is returned under each. What a training added to the
    model is merged into its tensors (LoRA), or left out.

    Args:
        state: values by the model's names; None: the current ones.
    """
    transposed = linear_weights(model)
    if state is None:
        state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    merged = merge(model, state)
    arrays = {
        file_name(name): array.T if name in transposed else array for name, array in merged.items()
    }
    repeated = repeated_names(getattr(model, "weight_names", None), arrays)
    return arrays | {other: arrays[name] for other, name in repeated.items()}


def save_weights(model: nn.Layer, file: str | os.PathLike[str]) -> None:
    """Writes every parameter and buffer of ``model``; timm loads the file without conversion."""
    write_weights(Path(file), file_arrays(model))


def _image_size(stored: WeightFile) -> tuple[int, int] | None:
    """Returns the (height, width) of the images that a file's model reads; None if it is unknown."""
    if description := read_metadata(stored.path).get(METADATA):
        size = parsed_json(description.encode())["values"].get("DATA.IMAGE_SIZE")
    else:
        size = (stored.config.get("input_size") or [])[1:]
    return pair(size) if SIDE.holds(size) else None


def _check_activation(stored: WeightFile, model: Target) -> None:
    is_quick = "quickgelu" in str(stored.config.get("architecture")) or is_openais(stored.arrays)
    if is_quick and getattr(model, "act", None) != "quick_gelu":
        raise InputError(f"{stored.path}: its model uses the quick GELU; set MODEL.ACT quick_gelu")


def _other_switches(model: Target, expected: dict[str, Any]) -> list[str]:
    """Returns a note for each key of ``expected`` for which the model has another value.

    Args:
        expected: values by key of MODEL, as the file's names imply them.
    """
    notes = []
    for key, value in expected.items():
        current = getattr(model, key.lower())
        if current != value:
            notes.append(
                f"according to the names of its tensors, MODEL.{key} is {value}, the model has"
                f" {current}"
            )
    return notes


def _check(
    model: Target,
    stored: WeightFile,
    report: LoadReport,
    state: dict[str, paddle.Tensor],
    arrays: dict[str, np.ndarray],
    allow: Sequence[str],
    settings: dict[str, Any],
) -> None:
    """Raises InputError for names that differ and aren't allowed to, and for shapes that differ.

    Args:
        settings: keys of MODEL, and the values with which the model's names would be the file's.
    """

    def refused(names: list[str]) -> list[str]:
        return [name for name in names if not any(fnmatchcase(name, pattern) for pattern in allow)]

    problems = []
    if missing := refused(report.missing):
        problems.append(f"missing {_shortened(missing)}")
    if unexpected := refused(report.unexpected):
        problems.append(f"unexpected {_shortened(unexpected)}")
    shapes = [
        f"{name} is {list(arrays[name].shape)}, the model's {list(tensor.shape)}"
        for name, tensor in state.items()
        if name in arrays and list(arrays[name].shape) != list(tensor.shape)
    ]
    problems += shapes[:4]
    if len(shapes) > 4:
        problems.append(f"{len(shapes) - 4} more shapes")
    if not problems:
        return

    # The cause, where it can be told: another architecture, no classifier, or a key of MODEL.
    file_type = guess_type(from_transformers(stored.arrays))
    is_other = file_type is not None and file_type != guess_type(state)
    if is_other and not settings and 2 * len(report.missing) > len(state):
        problems.append(f"the names of its tensors suggest MODEL.TYPE {file_type}")
    heads = classifiers_of(model, state)
    if heads and not report.unexpected and report.missing == heads:
        reason = unread_classifier(stored.arrays) or "it has no classifier"
        problems.append(f"{reason}; train one, or use its features (tools/features.py)")
    if settings:
        keys = " and ".join(f"MODEL.{key} {value}" for key, value in settings.items())
        problems.append(f"according to the names of its tensors, set {keys}")
    if encoders_of(model) and not is_other and (shapes or unexpected):
        problems.append("if its METHOD keys differ, set those of its run's config.yaml")
    source = str(report.file)
    if "architecture" in report.config:
        source += f" (of {report.config['architecture']})"
    raise InputError(f"{source} doesn't fit the model: {'; '.join(problems)}")


def _shortened(names: list[str], most: int = 4) -> str:
    text = ", ".join(printable(name, 80) for name in names[:most])
    if len(names) > most:
        text += f" and {len(names) - most} more"
    return text
