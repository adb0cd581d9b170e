"""What a training adds to a model's own tensors: merged into them where weights are written, stored alone, read again.

An adapter's file has peft's names: ``base_model.model.blocks.0.attn.qkv.lora_A.weight`` [rank, in] and ``lora_B``
[out, rank] beside ``base_model.model.head.weight``, in PyTorch's layout. Its metadata say how the products count, and
of which base it is: the SHA-256 of the tensors that it doesn't hold. peft itself writes adapter_config.json instead.
"""

import hashlib
import json
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from errors import InputError, Unreadable, printable, reading
from weights.formats import read_metadata, read_weights
from weights.hub import best_of_run, find_weights
from weights.layout import Target, file_name, linear_weights, sublayer
from weights.plain import NAME, Form, Rule, check_form, is_name, is_real, parsed_json, whole_file

METADATA = "adapter"  # the entry of a .safetensors file's metadata
PREFIX = "base_model.model."
LEARNT_ANEW = ("prompt_tokens",)  # a model's own tensors that its base has not
_PEFT, _LONGEST = "adapter_config.json", 1 << 20
PROJECTION = "feature_projection"  # of feature distillation
_ADDED = re.compile(rf"(^|\.)(lora_[AB]|{PROJECTION})\.")
_A, _B = ".lora_A.weight", ".lora_B.weight"
_FORM: Form = {
    "kind": NAME,
    "scale": Rule("a number", lambda value: is_real(value, 0, 1e6)),
    "base": Rule("a SHA-256", lambda value: is_name(value, 64)),
}
_PEFT_FORM: Form = {
    "r": Rule("a rank", lambda value: is_real(value, 1, 1e6)),
    "lora_alpha": Rule("a number", lambda value: is_real(value, 0, 1e6)),
}
_OTHERS = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "fan_in_fan_out")  # what peft computes otherwise

Arrays = dict[str, np.ndarray]
_Value = TypeVar("_Value")


def is_added(name: str) -> bool:
    """Returns whether a tensor of this name is a training's, not the model's own."""
    return _ADDED.search(name) is not None


def merge(model: Any, state: Arrays) -> Arrays:
    """Returns the model's own tensors of ``state``, with the products of low rank in their weights (LoRA)."""
    own = {name: array for name, array in state.items() if not is_added(name)}
    for layer in (name.removesuffix(_A) for name in state if name.endswith(_A)):
        product = state[layer + _A] @ state[layer + _B]
        own[f"{layer}.weight"] = own[f"{layer}.weight"] + np.float32(sublayer(model, layer).scale) * product
    return own


def unmerged_tensors(state: dict[str, _Value]) -> dict[str, _Value]:
    """Returns what ``merge`` changes or leaves out: what a run needs besides to go on."""
    bases = {name.replace(_A, ".weight") for name in state if name.endswith(_A)}
    return {name: array for name, array in state.items() if is_added(name) or name in bases}


def adapter_arrays(model: Target, state: Arrays, trained: Collection[str]) -> Arrays:
    """Returns the arrays of an adapter's file: what trained, with the classifiers' statistics, under peft's names.

    Args:
        state: of ``model``.
        trained: structured names.
    """
    heads, linear = tuple(f"{name}." for name in model.classifier_names()), linear_weights(model)
    kept = {name: array for name, array in state.items() if name in trained or name.startswith(heads)}
    return {
        PREFIX + file_name(name): array.T if name in linear else array
        for name, array in kept.items()
        if not name.startswith(PROJECTION)
    }


def base_hash(model: Target, arrays: Mapping[str, np.ndarray], without: Collection[str] = ()) -> str:
    """Returns the SHA-256 of the matrices and kernels of ``arrays``, in this toolkit's layout. Left out are
    ``without``, the first convolution and what follows the image's size. The others are the same at every size.
    """
    first, sha256 = (model.first_conv, *model.beside_first_conv), hashlib.sha256()
    for name in sorted(arrays):
        own = name.endswith(".weight") and arrays[name].ndim > 1 and not is_added(name)
        if own and name not in without and name.removesuffix(".weight") not in first:
            sha256.update(name.encode())
            sha256.update(np.ascontiguousarray(arrays[name], dtype=np.float32).tobytes())
    return sha256.hexdigest()


def adapter_metadata(kind: str, scale: float, base: str) -> dict[str, str]:
    """Returns the metadata of an adapter's file."""
    return {METADATA: json.dumps({"kind": kind, "scale": scale, "base": base})}


class Adapter(NamedTuple):
    """What an adapter's file holds, in this toolkit's layout.

    Attributes:
        tensors: by the model's names, which take the place of the base's.
        products: by layer (A [in, rank], B [rank, out]).
        scale: what products are multiplied by.
        base: ``base_hash`` of its base; None: of peft's, which doesn't tell.
    """

    file: Path
    tensors: Arrays
    products: dict[str, tuple[np.ndarray, np.ndarray]]
    scale: float
    base: str | None

    def apply_to(self, model: Target, arrays: Arrays, wanted: Collection[str], base: Path) -> Arrays:
        """Returns ``arrays``, the base's and ``tensors``, with the products merged into them.

        Args:
            wanted: the model's own names.
            base: their file, to be named.

        Raises:
            InputError: it was trained on another base, or for another model.
        """
        strange = [name for name in (*self.tensors, *(f"{one}.weight" for one in self.products)) if name not in wanted]
        if strange:
            raise InputError(f"{self.file}: an adapter of another model: it has {printable(strange[0], 80)}")
        own = {name: array for name, array in arrays.items() if name in wanted}
        if self.base not in (None, found := base_hash(model, own, self.tensors)):
            raise InputError(
                f"{self.file} was trained on other weights than {base} (their hashes are {printable(self.base, 12)} and"
                f" {found[:12]}); give -pretrained what it was trained on"
            )
        own = dict(arrays)
        for layer, (a, b) in self.products.items():
            weight = own.get(f"{layer}.weight", np.zeros(0))
            fits = a.ndim == b.ndim == 2 and a.shape[1] == b.shape[0]
            if not fits or (a.shape[0], b.shape[1]) != weight.shape:
                found = f"{list(a.shape)} times {list(b.shape)}"
                raise InputError(f"{self.file}: {printable(layer, 80)} is {list(weight.shape)}, its product {found}")
            own[f"{layer}.weight"] = weight.astype(np.float32) + np.float32(self.scale) * (a @ b)
        return own


def find_adapter(path: str | Path) -> Path:
    """Returns the file of an adapter: itself, or the one in a checkpoint's, a run's or peft's folder."""
    path = best_of_run(path)
    inside = (Path(path) / name for name in ("adapter.safetensors", "adapter_model.safetensors"))
    return next((file for file in inside if os.path.isfile(file)), None) or find_weights(path)


def read_adapter(model: Target, path: str | Path) -> Adapter:
    """Reads an adapter that a run left, or a folder or file of peft's LoRA.

    Raises:
        InputError: it can't be read, or is something else.
    """
    file = find_adapter(path)
    stored = read_weights(file)
    with reading(file, "an adapter"):
        told = _adapter_settings(file)
        arrays = {name.removeprefix(PREFIX): array for name, array in stored.arrays.items()}
        linear = linear_weights(model)
        products, tensors = {}, {}
        for name, array in arrays.items():
            if name.endswith(_A):
                layer = name.removesuffix(_A)
                products[layer] = (array.astype(np.float32).T, arrays[layer + _B].astype(np.float32).T)
            elif not name.endswith(_B):
                if is_added(name):
                    raise Unreadable(f"it holds {printable(name, 80)}, which no Linear takes")
                tensors[name] = array.T if name in linear else array
        return Adapter(file, tensors, products, float(told["scale"]), told.get("base"))


def _adapter_settings(file: Path) -> dict[str, Any]:
    """What the metadata, or peft's adapter_config.json beside the file, tell."""
    if text := read_metadata(file).get(METADATA):
        found = parsed_json(text.encode())
        check_form(found, _FORM, tuple(_FORM))
        return found
    if not (file.parent / _PEFT).is_file():
        raise Unreadable(f"it is no adapter: its metadata don't say so, and there is no {_PEFT} beside it")
    found = parsed_json(whole_file(file.parent / _PEFT, _LONGEST))
    check_form(found, _PEFT_FORM, tuple(_PEFT_FORM), f"{_PEFT}'s ")
    if others := [name for name in _OTHERS if found.get(name)]:
        raise Unreadable(f"its {_PEFT} has {others[0]}, which isn't computed here")
    return {"scale": found["lora_alpha"] / found["r"]}
