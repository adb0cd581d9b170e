"""Adapters (LoRA): the tensors that a training adds to those of a model.

They are merged into the model's tensors when weights are written, stored in a file of their own,
and read again from such a file or from one of peft's.

An adapter's file has peft's names: ``base_model.model.blocks.0.attn.qkv.lora_A.weight`` [rank, in]
and ``lora_B`` [out, rank] beside ``base_model.model.head.weight``, in PyTorch's layout. Its
metadata hold the scale of the products, and identify the base: by the SHA-256 of the base's tensors
that the adapter doesn't replace. peft itself writes adapter_config.json instead.
"""

import hashlib
import json
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np

from errors import InputError, Unreadable, printable, reading
from settings.plain import (
    NAME,
    Form,
    Rule,
    check_form,
    is_list,
    is_name,
    is_real,
    is_whole,
    optional,
    parsed_json,
)
from weights.arrays import LazyArray
from weights.formats import LONGEST_NAME, read_metadata, read_weights
from weights.hub import best_of_run, find_weights
from weights.layout import Target, file_name, linear_weights, sublayer
from weights.peft import CONFIG, LORA_A, LORA_B, Contents, read_contents

# The entry of a .safetensors file's metadata.
METADATA = "adapter"
PREFIX = "base_model.model."
# A model's own tensors that the weights it starts from don't have.
LEARNT_ANEW = ("prompt_tokens",)
# The layer that feature distillation adds.
PROJECTION = "feature_projection"
_ADDED = re.compile(rf"(^|\.)(lora_[AB]|{PROJECTION})\.")


def _is_sized(value: Any) -> bool:
    def holds(entry: Any) -> bool:
        return (
            is_list(entry, lambda _: True, 3, 3)
            and is_list(entry[0], is_whole)
            and all(map(is_real, entry[1:]))
        )

    return type(value) is dict and all(map(holds, value.values()))


_FORM: Form = {
    "kind": NAME,
    "scale": Rule("a number", lambda value: is_real(value, 0, 1e6)),
    "base": Rule("a SHA-256", lambda value: is_name(value, 64)),
    "vectors": Rule("a SHA-256", lambda value: is_name(value, 64)),
    "sized": Rule("shapes, means and deviations by name", _is_sized),
    "rank": optional(Rule("a rank", lambda value: is_whole(value, 1, 1 << 20))),
    "tensors": Rule(
        "names of tensors",
        lambda value: is_list(value, lambda name: is_name(name, LONGEST_NAME), 1),
    ),
}
# Adapters of earlier versions have no other keys.
_NEEDED = ("kind", "scale", "base")

Arrays = dict[str, np.ndarray]
_Value = TypeVar("_Value")


def is_added(name: str) -> bool:
    """Returns whether a training added the tensor of this name to the model."""
    return _ADDED.search(name) is not None


def merge(model: Any, state: Arrays) -> Arrays:
    """Returns the model's own tensors of ``state``, with LoRA's products added to their weights."""
    merged = {name: array for name, array in state.items() if not is_added(name)}
    for name in state:
        if name.endswith(LORA_A):
            layer = name.removesuffix(LORA_A)
            product = state[layer + LORA_A] @ state[layer + LORA_B]
            scale = np.float32(sublayer(model, layer).scale)
            merged[f"{layer}.weight"] = merged[f"{layer}.weight"] + scale * product
    return merged


def unmerged_tensors(state: dict[str, _Value]) -> dict[str, _Value]:
    """Returns the tensors that ``merge`` changes or drops. A run needs them to be resumed."""
    bases = {name.replace(LORA_A, ".weight") for name in state if name.endswith(LORA_A)}
    return {name: array for name, array in state.items() if is_added(name) or name in bases}


def adapter_arrays(model: Target, state: Arrays, trained: Collection[str]) -> Arrays:
    """Returns the arrays of an adapter's file under peft's names.

    They are the tensors that were trained, and the running statistics of the classifiers.

    Args:
        state: the tensors of ``model``, by structured name.
        trained: the structured names of those that were trained.
    """
    heads = tuple(f"{name}." for name in model.head_names())
    linear = linear_weights(model)
    kept = {
        name: array for name, array in state.items() if name in trained or name.startswith(heads)
    }
    return {
        PREFIX + file_name(name): array.T if name in linear else array
        for name, array in kept.items()
        if not name.startswith(PROJECTION)
    }


def base_hash(
    model: Target, arrays: Mapping[str, np.ndarray], without: Collection[str] = ()
) -> str:
    """Returns the SHA-256 of the matrices and kernels of ``arrays``, in this toolkit's layout.

    ``without``, the first convolution and tensors that depend on the image's size are left out. So
    the hash is the same for every image size and number of channels.
    """
    first = (model.first_conv, *model.beside_first_conv)
    hashed = []
    for name, array in arrays.items():
        is_matrix = name.endswith(".weight") and array.ndim > 1 and not is_added(name)
        if is_matrix and name not in without and name.removesuffix(".weight") not in first:
            hashed.append(name)
    return _sha256(arrays, hashed)


def vectors_hash(arrays: Mapping[str, np.ndarray], without: Collection[str] = ()) -> str:
    """Returns the SHA-256 of the vectors of ``arrays``, such as biases.

    ``without`` and the running statistics of batch norms are left out. A training may change the
    latter in a batch norm that isn't trained.
    """
    hashed = []
    for name, array in arrays.items():
        is_vector = array.ndim == 1 and not is_added(name)
        if is_vector and name not in without and not name.endswith(("_mean", "_variance")):
            hashed.append(name)
    return _sha256(arrays, hashed)


def _sha256(arrays: Mapping[str, np.ndarray], names: Collection[str]) -> str:
    sha256 = hashlib.sha256()
    for name in sorted(names):
        sha256.update(name.encode())
        sha256.update(np.ascontiguousarray(arrays[name], dtype=np.float32).tobytes())
    return sha256.hexdigest()


def sized_moments(
    model: Target, arrays: Mapping[str, np.ndarray], without: Collection[str] = ()
) -> dict[str, list[Any]]:
    """Returns, by name, the shape, mean and standard deviation of the tensors without a hash.

    These are tokens, the first convolution, and what depends on the image's size. They have no
    hash, because a tensor that is resized again may differ in its last digits.
    """
    first = (model.first_conv, *model.beside_first_conv)
    moments = {}
    for name, array in arrays.items():
        if array.ndim < 2 or array.dtype.kind != "f" or is_added(name) or name in without:
            continue
        if name.endswith(".weight") and name.removesuffix(".weight") not in first:
            continue
        mean = float(array.mean(dtype=np.float64))
        deviation = float(array.std(dtype=np.float64))
        moments[name] = [list(array.shape), mean, deviation]
    return moments


def of_base(
    model: Target, arrays: Mapping[str, np.ndarray], without: Collection[str] = ()
) -> dict[str, Any]:
    """Returns the entries of an adapter's metadata that identify its base.

    Args:
        without: names of tensors that the adapter replaces.
    """
    return {
        "base": base_hash(model, arrays, without),
        "vectors": vectors_hash(arrays, without),
        "sized": sized_moments(model, arrays, without),
    }


def adapter_metadata(
    kind: str, scale: float, base: Mapping[str, Any], rank: int | None, names: Collection[str]
) -> dict[str, str]:
    """Returns the metadata of an adapter's file.

    Args:
        base: what ``of_base`` returns.
        rank: the rank of its products; None: it has none.
        names: the names of ``adapter_arrays``.
    """
    tensors = sorted(name.removeprefix(PREFIX) for name in names)
    metadata = {"kind": kind, "scale": scale, **base, "rank": rank, "tensors": tensors}
    return {METADATA: json.dumps(metadata)}


class Adapter(NamedTuple):
    """The contents of an adapter's file, in this toolkit's layout.

    Attributes:
        tensors: replace the base's tensors of the same names.
        products: by layer, the factors A [in, rank] and B [rank, out].
        scale: the factor of the products.
        base: ``base_hash`` of the base; None: unknown, as in peft's files.
        vectors: ``vectors_hash`` of the base; None: unknown.
        sized: ``sized_moments`` of the base, or of a part of it.
    """

    file: Path
    tensors: Arrays
    products: dict[str, tuple[np.ndarray, np.ndarray]]
    scale: float
    base: str | None
    vectors: str | None = None
    sized: Mapping[str, list[Any]] = MappingProxyType({})

    def apply_to(
        self, model: Target, arrays: Arrays, wanted: Collection[str], base: Path
    ) -> Arrays:
        """Returns ``arrays`` with the products merged into them.

        Args:
            arrays: the base's, with ``tensors`` in place of some.
            wanted: the model's own names, without those that stay fresh.
            base: the base's file, for errors.

        Raises:
            InputError: the adapter was trained on another base, or a merged weight isn't finite.
        """
        self._check_base(model, {name: arrays[name] for name in arrays if name in wanted}, base)
        merged = dict(arrays)
        for layer, (a, b) in self.products.items():
            name = f"{layer}.weight"
            if name not in arrays or arrays[name].shape != (a.shape[0], b.shape[1]):
                raise InputError(
                    f"{base} has no {name} {[a.shape[0], b.shape[1]]}, which {self.file} adapts"
                )
            merged[name] = self._merged(name, arrays[name], a, b)
        return merged

    def _check_base(self, model: Target, arrays: Arrays, base: Path) -> None:
        """Raises InputError if ``arrays`` aren't those of the base that the adapter was trained on."""
        actual = base_hash(model, arrays, self.tensors)
        if self.base not in (None, actual):
            hashes = f"their hashes are {printable(self.base, 12)} and {actual[:12]}"
            raise InputError(
                f"{self.file} was trained on other weights than {base} ({hashes}); "
                "set -pretrained to those weights"
            )
        different = ""
        if self.vectors not in (None, vectors_hash(arrays, self.tensors)):
            different = "biases or factors"
        for name, (shape, mean, deviation) in sized_moments(model, arrays, self.tensors).items():
            # A tensor of another shape was resized for another image size, and can't be compared.
            if name not in self.sized or self.sized[name][0] != shape:
                continue
            _, base_mean, base_deviation = self.sized[name]
            distance = max(abs(base_mean - mean), abs(base_deviation - deviation))
            if distance > 1e-3 * base_deviation + 1e-6:
                different = name
        if different:
            raise InputError(
                f"{self.file} was trained on other weights than {base} (the {different} differ); "
                "set -pretrained to those weights"
            )

    def _merged(self, name: str, weight: Any, a: np.ndarray, b: np.ndarray) -> Any:
        """Returns the weight plus the product, lazily.

        Reading it raises InputError if a value isn't finite.
        """

        def read() -> np.ndarray:
            with np.errstate(over="ignore", invalid="ignore"):
                array = np.asarray(weight, np.float32) + np.float32(self.scale) * (a @ b)
            if not np.isfinite(array).all():
                raise InputError(f"{self.file}: with it, {name} has values that aren't finite")
            return array

        return LazyArray(weight.shape, np.dtype(np.float32), read)


def find_adapter(path: str | Path) -> Path:
    """Returns an adapter's file.

    Args:
        path: the file itself, or the folder of a checkpoint, of a run or of peft that holds it.
    """
    path = best_of_run(path)
    for name in ("adapter.safetensors", "adapter_model.safetensors", "adapter_model.bin"):
        file = Path(path) / name
        if os.path.isfile(file):
            return file
    return find_weights(path)


def read_adapter(model: Target, path: str | Path) -> Adapter:
    """Reads an adapter of a run, or a folder or file of peft's LoRA.

    Raises:
        InputError: it can't be read, is incomplete, belongs to another model, or isn't an adapter.
    """
    file = find_adapter(path)
    stored = read_weights(file)
    linear = linear_weights(model)
    # The model's shapes in PyTorch's layout, which the file has.
    shapes = {
        file_name(name): tuple(tensor.shape)[::-1] if name in linear else tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        if not is_added(name)
    }
    with reading(file, "an adapter"):
        contents = _contents(file, shapes)
        arrays: Arrays = {}
        for name, array in stored.arrays.items():
            name = name.removeprefix(PREFIX).replace(".base_layer.", ".")
            if name in arrays:
                raise Unreadable(
                    f"it contains {printable(name, 80)} twice, with and without the prefix {PREFIX}"
                )
            arrays[name] = array
        layers = _check_whole(arrays, contents, shapes)
        products = {}
        for layer in layers:
            a = arrays.pop(layer + LORA_A)
            b = arrays.pop(layer + LORA_B)
            _check_factors(layer, a, b, shapes[f"{layer}.weight"], contents.rank)
            products[layer] = (a.astype(np.float32).T, b.astype(np.float32).T)
        return Adapter(
            file=file,
            tensors={name: array.T if name in linear else array for name, array in arrays.items()},
            products=products,
            scale=contents.scale,
            base=contents.base,
            vectors=contents.vectors,
            sized=contents.sized,
        )


def _check_whole(
    arrays: Arrays, contents: Contents, shapes: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """Returns the layers that have a product.

    Raises:
        Unreadable: a tensor is missing, or has no place in the model or the description.
    """
    added = [name for name in arrays if is_added(name)]
    layers = sorted({name.removesuffix(LORA_A).removesuffix(LORA_B) for name in added})
    factors = {layer + suffix for layer in layers for suffix in (LORA_A, LORA_B)}
    unknown = [name for name in added if name not in factors]
    unknown += [name for name in arrays if name not in added and name not in shapes]
    unknown += [f"{layer}{LORA_A}" for layer in layers if f"{layer}.weight" not in shapes]
    if unknown:
        raise Unreadable(f"it is an adapter of another model: it has {printable(unknown[0], 80)}")
    missing = sorted((factors | (contents.names or set())) - arrays.keys())
    if missing:
        problem = f"it lacks {printable(missing[0], 80)}"
        if missing[1:]:
            problem += f" and {len(missing) - 1} more"
        raise Unreadable(f"it is an adapter of another model, or incomplete: {problem}")
    if contents.names is not None:
        # Our metadata name all tensors of the file. peft's config names only those it requires.
        held = factors if contents.base is None else set(arrays)
        unnamed = sorted(held - contents.names)
        if unnamed:
            raise Unreadable(
                f"it contains {printable(unnamed[0], 80)}, which its description doesn't name"
            )
    return layers


def _check_factors(
    layer: str, a: np.ndarray, b: np.ndarray, weight: tuple[int, ...], rank: int | None
) -> None:
    """Raises Unreadable unless a layer's factors have the shapes [rank, in] and [out, rank]."""
    if len(weight) != 2:
        raise Unreadable(
            f"it adapts {printable(layer, 80)}, which isn't a Linear; only adapters of Linears"
            " are supported"
        )
    outs, ins = weight
    rank = rank or max(1, *a.shape[:1])
    if (a.shape, b.shape) != ((rank, ins), (outs, rank)):
        found = f"{list(a.shape)} and {list(b.shape)}"
        expected = f"{[rank, ins]} and {[outs, rank]}"
        raise Unreadable(
            f"its lora_A and lora_B of {printable(layer, 80)} are {found}, expected {expected}"
        )
    for factor in (a, b):
        if factor.dtype.kind in "biu":
            raise Unreadable(
                f"a factor of {printable(layer, 80)} has the type {factor.dtype}, expected floating point"
            )


def _contents(file: Path, shapes: Mapping[str, tuple[int, ...]]) -> Contents:
    """Reads the file's metadata, or peft's adapter_config.json next to it."""
    if text := read_metadata(file).get(METADATA):
        metadata = parsed_json(text.encode())
        check_form(metadata, _FORM, _NEEDED)
        return Contents(
            scale=float(metadata["scale"]),
            rank=metadata.get("rank"),
            names=set(metadata["tensors"]) if "tensors" in metadata else None,
            base=metadata["base"],
            vectors=metadata.get("vectors"),
            sized=metadata.get("sized", {}),
        )
    if not (file.parent / CONFIG).is_file():
        raise Unreadable(
            f"it isn't an adapter: its metadata don't say so, and there is no {CONFIG} next to it"
        )
    return read_contents(file.parent, shapes)
