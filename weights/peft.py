"""adapter_config.json: what peft says of a LoRA, and which tensors there have to be beside it.

The rules are those of peft 0.21 (``tuners/tuners_utils.py``, ``utils/save_and_load.py``). Where
peft only warns about a missing tensor, or ignores one that it doesn't expect, this is an error
here.
"""

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from errors import Unreadable, printable
from settings.plain import (
    FLAG,
    Form,
    Rule,
    check_form,
    is_list,
    is_name,
    is_real,
    is_whole,
    optional,
    parsed_json,
    value_text,
    whole_file,
)
from weights.hub import ADAPTER_CONFIG as CONFIG

LORA_A = ".lora_A.weight"
LORA_B = ".lora_B.weight"
_LONGEST = 1 << 20  # bytes of the file
_PATIENCE = 4  # seconds that a regular expression may take

_NAMES = Rule("a list of layers' names", lambda value: is_list(value, is_name))
_PATTERN = Rule(
    "a list of layers' names, or a pattern",
    lambda value: _NAMES.holds(value) or is_name(value, 4096),
)
# The others ("pissa", "olora", "corda", "loftq", "lora_ga") change the base's weights before the
# training.
_STARTS = ("gaussian", "orthogonal", "eva")
_FORM: Form = {
    "peft_type": Rule("LORA, the type that is computed here", lambda value: value == "LORA"),
    "r": Rule("a rank, a whole number from 1", lambda value: is_whole(value, 1, 1 << 20)),
    "lora_alpha": Rule("a number", lambda value: is_real(value, 0, 1e6)),
    "use_rslora": FLAG,
    "target_modules": _PATTERN,
    "exclude_modules": optional(_PATTERN),
    "layers_to_transform": optional(
        Rule("block numbers", lambda v: is_whole(v) or is_list(v, is_whole))
    ),
    "layers_pattern": optional(Rule("layers' names", lambda v: is_name(v) or _NAMES.holds(v))),
    "modules_to_save": optional(_NAMES),
    "bias": Rule("none, all or lora_only", lambda value: value in ("none", "all", "lora_only")),
    "init_lora_weights": Rule(
        f"true, false or one of {', '.join(_STARTS)} (others change the base, too)",
        lambda value: type(value) is bool or value in _STARTS,
    ),
}
_NEEDED = ("peft_type", "r", "lora_alpha", "target_modules")
# Entries that don't change what a trained Linear computes.
_IDLE = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "fan_in_fan_out",
    "inference_mode", "lora_dropout", "megatron_core", "peft_version", "qalora_group_size", "revision",
    "runtime_config", "task_type",
}  # fmt: skip


class Contents(NamedTuple):
    """What an adapter says of itself.

    Attributes:
        scale: what products are multiplied by.
        rank: of each product; None: it doesn't say.
        names: the tensors that it has to hold; None: it doesn't say.
        base, vectors, sized: of its base (``adapters.of_base``); None, or none: it doesn't say.
    """

    scale: float
    rank: int | None
    names: set[str] | None
    base: str | None
    vectors: str | None = None
    sized: Mapping[str, list[Any]] = MappingProxyType({})


def read_contents(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> Contents:
    """Returns what a folder's adapter_config.json says of the tensors beside it.

    Args:
        shapes: of the model's tensors, by their names in files.

    Raises:
        Unreadable: it isn't a LoRA's, not one of this model, or one that is computed otherwise.
    """
    told = parsed_json(whole_file(folder / CONFIG, _LONGEST))
    check_form(told, _FORM, _NEEDED, f"{CONFIG}'s ")
    for name, value in told.items():
        if value and name not in _FORM and name not in _IDLE:
            raise Unreadable(
                f"its {CONFIG} has {printable(name, 60)} {value_text(value)}, which isn't computed here; take an"
                " adapter without it, or remove the entry if it changes nothing"
            )
    layers = [
        name.removesuffix(".weight")
        for name, shape in shapes.items()
        if name.endswith(".weight") and shape[1:]
    ]
    saved = _within(shapes, told.get("modules_to_save") or [])
    targets = {layer for layer in _targets(told, layers) if f"{layer}.weight" not in saved}
    _check_targets(told["target_modules"], targets)
    names = {layer + part for layer in targets for part in (LORA_A, LORA_B)} | saved
    if told.get("bias") == "all":
        names |= {name for name in shapes if "bias" in name}
    elif told.get("bias") == "lora_only":
        names |= {f"{layer}.bias" for layer in targets} & shapes.keys()
    rank = told["r"]
    divisor = math.sqrt(rank) if told.get("use_rslora") else rank
    return Contents(told["lora_alpha"] / divisor, rank, names, None)


def _targets(told: dict[str, Any], layers: list[str]) -> set[str]:
    """Returns those of the ``layers`` that have a product."""
    modules = told["target_modules"]
    blocks = told.get("layers_to_transform")
    found = _matching(modules, layers) - _matching(told.get("exclude_modules") or [], layers)
    if blocks in (None, []) or type(modules) is str:
        return found
    lists = told.get("layers_pattern") or []
    lists = [lists] if type(lists) is str else lists
    numbered = (
        rf"(?:^|.*?\.)(?:{'|'.join(map(re.escape, lists))})\.(\d+)\."
        if lists
        else r".*?\.[^.]*\.(\d+)\."
    )
    chosen = {blocks} if type(blocks) is int else set(blocks)
    numbers = {layer: re.match(numbered, layer) for layer in found}
    return {
        layer
        for layer, number in numbers.items()
        if layer in modules or (number and int(number[1]) in chosen)
    }


def _check_targets(modules: str | list[str], targets: set[str]) -> None:
    """Raises Unreadable where a layer that ``modules`` names isn't in the model."""
    known = {ending for layer in targets for ending in _endings(layer)}
    strange = [name for name in modules if name not in known] if type(modules) is list else []
    if strange or not targets:
        named = printable(strange[0] if strange else str(modules), 80)
        raise Unreadable(
            f"its {CONFIG}'s target_modules has {named}, which is no layer of this model that it may adapt; take an"
            " adapter of this model"
        )


def _matching(modules: str | list[str], layers: list[str]) -> set[str]:
    """Returns those of the ``layers`` that ``modules`` names by their last parts, or matches as a
    regular expression.

    An expression may take Python years. It runs in a process of its own, which is ended after some
    seconds.
    """
    if not isinstance(modules, str):
        wanted = set(modules)
        return {layer for layer in layers if wanted.intersection(_endings(layer))}
    script = "import json, re, sys; pattern, *names = json.load(sys.stdin)"
    script += "; json.dump([name for name in names if re.fullmatch(pattern, name)], sys.stdout)"
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", script],
            input=json.dumps([modules, *layers]).encode(),
            capture_output=True,
            timeout=_PATIENCE,
        )
    except subprocess.TimeoutExpired:
        raise Unreadable(
            f"its {CONFIG}'s {printable(modules, 80)} takes too long to match; list the names"
        ) from None
    if done.returncode:
        raise Unreadable(
            f"its {CONFIG}'s {printable(modules, 80)} is no regular expression; list the names"
        )
    return set(parsed_json(done.stdout))


def _within(tensors: Iterable[str], modules: list[str]) -> set[str]:
    """Returns those of the ``tensors`` that are in a layer which ``modules`` names by its last
    parts.
    """
    wanted = set(modules)
    found = set()
    for tensor in tensors:
        parts = tensor.split(".")[:-1]
        layers = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
        if any(wanted.intersection(_endings(layer)) for layer in layers):
            found.add(tensor)
    return found


def _endings(name: str) -> set[str]:
    """Returns ``b.c`` and ``c`` for ``a.b.c``, and itself."""
    parts = name.split(".")
    return {".".join(parts[first:]) for first in range(len(parts))}
