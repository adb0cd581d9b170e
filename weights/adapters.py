"""What a training adds to a model's own tensors: merged into them where weights are written, stored
alone, read again.

An adapter's file has peft's names: ``base_model.model.blocks.0.attn.qkv.lora_A.weight`` [rank, in]
and ``lora_B`` [out, rank] beside ``base_model.model.head.weight``, in PyTorch's layout. Its
metadata say how the products count, and of which base it is: the SHA-256 of the tensors that it
doesn't hold. peft itself writes adapter_config.json instead.
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

METADATA = "adapter"  # the entry of a .safetensors file's metadata
PREFIX = "base_model.model."
LEARNT_ANEW = ("prompt_tokens",)  # a model's own tensors that its base has not
PROJECTION = "feature_projection"  # of feature distillation
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
_NEEDED = ("kind", "scale", "base")  # adapters of earlier versions have no more

Arrays = dict[str, np.ndarray]
_Value = TypeVar("_Value")


def is_added(name: str) -> bool:
    """Returns whether a tensor of this name is a training's, not the model's own."""
    return _ADDED.search(name) is not None


def merge(model: Any, state: Arrays) -> Arrays:
    """Returns the model's own tensors of ``state``, with the products of low rank in their weights
    (LoRA).
    """
    own = {name: array for name, array in state.items() if not is_added(name)}
    for layer in (name.removesuffix(LORA_A) for name in state if name.endswith(LORA_A)):
        product = state[layer + LORA_A] @ state[layer + LORA_B]
        own[f"{layer}.weight"] = (
            own[f"{layer}.weight"] + np.float32(sublayer(model, layer).scale) * product
        )
    return own


def unmerged_tensors(state: dict[str, _Value]) -> dict[str, _Value]:
    """Returns what ``merge`` changes or leaves out: what a run needs besides to go on."""
    bases = {name.replace(LORA_A, ".weight") for name in state if name.endswith(LORA_A)}
    return {name: array for name, array in state.items() if is_added(name) or name in bases}


def adapter_arrays(model: Target, state: Arrays, trained: Collection[str]) -> Arrays:
    """Returns the arrays of an adapter's file: what trained, with the classifiers' statistics,
    under peft's names.

    Args:
        state: of ``model``.
        trained: structured names.
    """
    heads = tuple(f"{name}." for name in model.classifier_names())
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
    """Returns the SHA-256 of the matrices and kernels of ``arrays``, in this toolkit's layout. Left
    out are ``without``, the first convolution and what follows the image's size. The others are the
    same at every size.
    """
    first = (model.first_conv, *model.beside_first_conv)
    sha256 = hashlib.sha256()
    for name in sorted(arrays):
        own = name.endswith(".weight") and arrays[name].ndim > 1 and not is_added(name)
        if own and name not in without and name.removesuffix(".weight") not in first:
            sha256.update(name.encode())
            sha256.update(np.ascontiguousarray(arrays[name], dtype=np.float32).tobytes())
    return sha256.hexdigest()


def vectors_hash(arrays: Mapping[str, np.ndarray], without: Collection[str] = ()) -> str:
    """Returns the SHA-256 of the vectors of ``arrays``, such as biases. Left out are ``without``
    and the running statistics of batch norms, which a training may change without training them.
    """
    sha256 = hashlib.sha256()
    for name in sorted(arrays):
        own = (
            arrays[name].ndim == 1
            and not is_added(name)
            and not name.endswith(("_mean", "_variance"))
        )
        if own and name not in without:
            sha256.update(name.encode())
            sha256.update(np.ascontiguousarray(arrays[name], dtype=np.float32).tobytes())
    return sha256.hexdigest()


def sized_moments(
    model: Target, arrays: Mapping[str, np.ndarray], without: Collection[str] = ()
) -> dict[str, list[Any]]:
    """Returns, by name, the shape, mean and standard deviation of what ``base_hash`` leaves out,
    vectors aside: tokens, and what follows the image's size. A resized tensor may differ in its
    last digits, so it has no hash.
    """
    first = (model.first_conv, *model.beside_first_conv)
    moments = {}
    for name, array in arrays.items():
        hashed = name.endswith(".weight") and name.removesuffix(".weight") not in first
        if (
            array.ndim > 1
            and array.dtype.kind == "f"
            and not hashed
            and not is_added(name)
            and name not in without
        ):
            moments[name] = [
                list(array.shape),
                float(array.mean(dtype=np.float64)),
                float(array.std(dtype=np.float64)),
            ]
    return moments


def of_base(
    model: Target, arrays: Mapping[str, np.ndarray], without: Collection[str] = ()
) -> dict[str, Any]:
    """Returns what an adapter's metadata say of its base, of which ``without`` isn't a part."""
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
        base: ``of_base``.
        rank: of its products; None: it has none.
        names: of ``adapter_arrays``.
    """
    tensors = sorted(name.removeprefix(PREFIX) for name in names)
    return {
        METADATA: json.dumps(
            {"kind": kind, "scale": scale, **base, "rank": rank, "tensors": tensors}
        )
    }


class Adapter(NamedTuple):
    """What an adapter's file holds, in this toolkit's layout.

    Attributes:
        tensors: by the model's names, which take the place of the base's.
        products: by layer (A [in, rank], B [rank, out]).
        scale: what products are multiplied by.
        base: ``base_hash`` of its base; None: of peft's, which doesn't tell.
        vectors: ``vectors_hash`` of its base; None: it doesn't tell.
        sized: ``sized_moments`` of its base, or of some of it.
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
        """Returns ``arrays``, the base's and ``tensors``, with the products merged into them.

        Args:
            wanted: the model's own names, without those that stay fresh.
            base: their file, to be named.

        Raises:
            InputError: it was trained on another base, or a merged weight isn't finite.
        """
        own = {name: array for name, array in arrays.items() if name in wanted}
        if self.base not in (None, found := base_hash(model, own, self.tensors)):
            raise InputError(
                f"{self.file} was trained on other weights than {base} (their hashes are {printable(self.base, 12)} and"
                f" {found[:12]}); give -pretrained what it was trained on"
            )
        other = (
            "biases or factors"
            if self.vectors not in (None, vectors_hash(own, self.tensors))
            else ""
        )
        for name, (shape, mean, deviation) in sized_moments(model, own, self.tensors).items():
            then = self.sized.get(name)
            # At another size of the images it was resized.
            if (
                then
                and then[0] == shape
                and max(abs(then[1] - mean), abs(then[2] - deviation)) > 1e-3 * then[2] + 1e-6
            ):
                other = name
        if other:
            raise InputError(
                f"{self.file} was trained on other weights than {base} (the {other} differ); give -pretrained what it"
                " was trained on"
            )
        merged = dict(arrays)
        for layer, (a, b) in self.products.items():
            name = f"{layer}.weight"
            if name not in arrays or arrays[name].shape != (a.shape[0], b.shape[1]):
                raise InputError(
                    f"{base} has no {name} {[a.shape[0], b.shape[1]]}, which {self.file} changes"
                )
            merged[name] = self._merged(name, arrays[name], a, b)
        return merged

    def _merged(self, name: str, weight: Any, a: np.ndarray, b: np.ndarray) -> Any:
        """Returns a weight with a product merged into it, lazily. Reading it raises InputError
        where a value isn't finite.
        """

        def read() -> np.ndarray:
            with np.errstate(over="ignore", invalid="ignore"):
                array = np.asarray(weight, np.float32) + np.float32(self.scale) * (a @ b)
            if not np.isfinite(array).all():
                raise InputError(
                    f"{self.file}: with it {name} has values that are no finite numbers"
                )
            return array

        return LazyArray(weight.shape, np.dtype(np.float32), read)


def find_adapter(path: str | Path) -> Path:
    """Returns the file of an adapter: itself, or the one in a checkpoint's, a run's or peft's
    folder.
    """
    path = best_of_run(path)
    inside = (
        Path(path) / name
        for name in ("adapter.safetensors", "adapter_model.safetensors", "adapter_model.bin")
    )
    return next((file for file in inside if os.path.isfile(file)), None) or find_weights(path)


def read_adapter(model: Target, path: str | Path) -> Adapter:
    """Reads an adapter that a run left, or a folder or file of peft's LoRA.

    Raises:
        InputError: it can't be read, isn't whole, or is of another model, or something else.
    """
    file = find_adapter(path)
    stored = read_weights(file)
    linear = linear_weights(model)
    # In PyTorch's layout, as the file.
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
                    f"it holds {printable(name, 80)} twice, with and without the prefix {PREFIX}"
                )
            arrays[name] = array
        layers = _check_whole(arrays, contents, shapes)
        products = {}
        for layer in layers:
            a, b = arrays.pop(layer + LORA_A), arrays.pop(layer + LORA_B)
            _check_factors(layer, a, b, shapes[f"{layer}.weight"], contents.rank)
            products[layer] = a.astype(np.float32).T, b.astype(np.float32).T
        tensors = {name: array.T if name in linear else array for name, array in arrays.items()}
        return Adapter(
            file, tensors, products, contents.scale, contents.base, contents.vectors, contents.sized
        )


def _check_whole(
    arrays: Arrays, contents: Contents, shapes: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """Returns the layers that have a product.

    Raises:
        Unreadable: a tensor is missing, or there is one that nothing takes.
    """
    added = [name for name in arrays if is_added(name)]
    layers = sorted({name.removesuffix(LORA_A).removesuffix(LORA_B) for name in added})
    pairs = {layer + part for layer in layers for part in (LORA_A, LORA_B)}
    strange = [name for name in added if name not in pairs]
    strange += [name for name in arrays if name not in added and name not in shapes]
    strange += [f"{layer}{LORA_A}" for layer in layers if f"{layer}.weight" not in shapes]
    if strange:
        raise Unreadable(f"it is an adapter of another model: it has {printable(strange[0], 80)}")
    missing = sorted((pairs | (contents.names or set())) - arrays.keys())
    if missing:
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise Unreadable(
            f"it is an adapter of another model, or not whole: it lacks {printable(missing[0], 80)}{more}"
        )
    # peft's config names what there has to be, ours all that there is.
    held = arrays.keys() if contents.base is not None else pairs
    unused = sorted(held - contents.names) if contents.names is not None else []
    if unused:
        raise Unreadable(f"it holds {printable(unused[0], 80)}, which its description doesn't name")
    return layers


def _check_factors(
    layer: str, a: np.ndarray, b: np.ndarray, weight: tuple[int, ...], rank: int | None
) -> None:
    """Raises Unreadable where a layer's factors don't have the shapes [rank, in] and [out, rank]."""
    if len(weight) != 2:
        raise Unreadable(
            f"it adapts {printable(layer, 80)}, which is no Linear; only those of Linears are computed here"
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
    """What the metadata, or peft's adapter_config.json beside the file, tell."""
    if text := read_metadata(file).get(METADATA):
        told = parsed_json(text.encode())
        check_form(told, _FORM, _NEEDED)
        names = set(told["tensors"]) if "tensors" in told else None
        return Contents(
            float(told["scale"]),
            told.get("rank"),
            names,
            told["base"],
            told.get("vectors"),
            told.get("sized", {}),
        )
    if not (file.parent / CONFIG).is_file():
        raise Unreadable(
            f"it is no adapter: its metadata don't say so, and there is no {CONFIG} beside it"
        )
    return read_contents(file.parent, shapes)
