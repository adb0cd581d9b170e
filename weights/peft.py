"""Reads peft's adapter_config.json: the settings of a LoRA, and the tensors that it requires.

The rules are those of peft 0.21 (``tuners/tuners_utils.py``, ``utils/save_and_load.py``). But a
missing tensor, of which peft only warns, and an unexpected one, which peft ignores, are errors
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
# The size of the file at most, in bytes.
_LONGEST = 1 << 20
# The time that a regular expression may take, in seconds.
_PATTERN_TIMEOUT = 4

_NAMES = Rule("a list of layers' names", lambda value: is_list(value, is_name))
_PATTERN = Rule(
    "a list of layers' names, or a pattern",
    lambda value: _NAMES.holds(value) or is_name(value, 4096),
)
# Other initialisations ("pissa", "olora", "corda", "loftq", "lora_ga") change the base's weights
# before the training.
_INITIALISATIONS = ("gaussian", "orthogonal", "eva")
_FORM: Form = {
    "peft_type": Rule("LORA, the only supported type", lambda value: value == "LORA"),
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
        f"true, false or one of {', '.join(_INITIALISATIONS)} (others change the base as well)",
        lambda value: type(value) is bool or value in _INITIALISATIONS,
    ),
}
_NEEDED = ("peft_type", "r", "lora_alpha", "target_modules")
# Entries that don't change what a trained Linear computes.
_IGNORED = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
    "fan_in_fan_out", "inference_mode", "lora_dropout", "megatron_core", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "task_type",
}  # fmt: skip


class Contents(NamedTuple):
    """The description of an adapter.

    Attributes:
        scale: the factor of the products.
        rank: the rank of each product; None: it isn't given.
        names: the tensors that the adapter has to hold; None: they aren't given.
        base, vectors, sized: identify the base (``adapters.of_base``); None, or {}: not given.
    """

    scale: float
    rank: int | None
    names: set[str] | None
    base: str | None
    vectors: str | None = None
    sized: Mapping[str, list[Any]] = MappingProxyType({})


def read_contents(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> Contents:
    """Returns the description of an adapter in a folder's adapter_config.json.

    Args:
        shapes: the shapes of the model's tensors, by their names in files.

    Raises:
        Unreadable: it isn't a LoRA's, belongs to another model, or asks for a computation that
            models here don't have.
    """
    config = parsed_json(whole_file(folder / CONFIG, _LONGEST))
    check_form(config, _FORM, _NEEDED, f"{CONFIG}'s ")
    for name, value in config.items():
        if value and name not in _FORM and name not in _IGNORED:
            raise Unreadable(
                f"its {CONFIG} has {printable(name, 60)} {value_text(value)}, which isn't"
                " supported; use an"
                " adapter without it, or remove the entry if it has no effect"
            )
    layers = [
        name.removesuffix(".weight")
        for name, shape in shapes.items()
        if name.endswith(".weight") and shape[1:]
    ]
    saved = _within(shapes, config.get("modules_to_save") or [])
    targets = {layer for layer in _targets(config, layers) if f"{layer}.weight" not in saved}
    _check_targets(config["target_modules"], targets)
    names = {layer + suffix for layer in targets for suffix in (LORA_A, LORA_B)} | saved
    if config.get("bias") == "all":
        names |= {name for name in shapes if "bias" in name}
    elif config.get("bias") == "lora_only":
        names |= {f"{layer}.bias" for layer in targets} & shapes.keys()
    rank = config["r"]
    divisor = math.sqrt(rank) if config.get("use_rslora") else rank
    return Contents(config["lora_alpha"] / divisor, rank, names, base=None)


def _targets(config: dict[str, Any], layers: list[str]) -> set[str]:
    """Returns those of the ``layers`` that have a product."""
    modules = config["target_modules"]
    blocks = config.get("layers_to_transform")
    targets = _matching(modules, layers) - _matching(config.get("exclude_modules") or [], layers)
    if blocks in (None, []) or type(modules) is str:
        return targets

    # Only the layers of some blocks are adapted. A block's number follows the name of a list.
    lists = config.get("layers_pattern") or []
    if type(lists) is str:
        lists = [lists]
    number_pattern = r".*?\.[^.]*\.(\d+)\."
    if lists:
        number_pattern = rf"(?:^|.*?\.)(?:{'|'.join(map(re.escape, lists))})\.(\d+)\."
    chosen = {blocks} if type(blocks) is int else set(blocks)
    numbers = {layer: re.match(number_pattern, layer) for layer in targets}
    return {
        layer
        for layer, number in numbers.items()
        if layer in modules or (number and int(number[1]) in chosen)
    }


def _check_targets(modules: str | list[str], targets: set[str]) -> None:
    """Raises Unreadable if a layer that ``modules`` names isn't in the model."""
    known = {ending for layer in targets for ending in _endings(layer)}
    unknown = [name for name in modules if name not in known] if type(modules) is list else []
    if unknown or not targets:
        name = printable(unknown[0] if unknown else str(modules), 80)
        raise Unreadable(
            f"its {CONFIG}'s target_modules has {name}, which isn't an adaptable layer of this"
            " model; use an"
            " adapter of this model"
        )


def _matching(modules: str | list[str], layers: list[str]) -> set[str]:
    """Returns those of the ``layers`` that ``modules`` matches.

    Args:
        modules: names, which match the last parts of a layer's name; or a regular expression.
    """
    if not isinstance(modules, str):
        wanted = set(modules)
        return {layer for layer in layers if wanted.intersection(_endings(layer))}
    # A regular expression may take Python years. So it runs in a process that can be ended.
    script = "import json, re, sys; pattern, *names = json.load(sys.stdin)"
    script += "; json.dump([name for name in names if re.fullmatch(pattern, name)], sys.stdout)"
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", script],
            input=json.dumps([modules, *layers]).encode(),
            capture_output=True,
            timeout=_PATTERN_TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        raise Unreadable(
            f"its {CONFIG}'s {printable(modules, 80)} takes too long to match; list the names"
        ) from None
    if done.returncode:
        raise Unreadable(
            f"its {CONFIG}'s {printable(modules, 80)} isn't a valid regular expression; list the"
            " names"
        )
    return set(parsed_json(done.stdout))


def _within(tensors: Iterable[str], modules: list[str]) -> set[str]:
    """Returns those of the ``tensors`` whose layer, or one around it, ``modules`` names.

    A name matches the last parts of a layer's name.
    """
    wanted = set(modules)
    matching = set()
    for tensor in tensors:
        parts = tensor.split(".")[:-1]
        layers = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
        if any(wanted.intersection(_endings(layer)) for layer in layers):
            matching.add(tensor)
    return matching


def _endings(name: str) -> set[str]:
    """Returns ``a.b.c``, ``b.c`` and ``c`` for ``a.b.c``."""
    parts = name.split(".")
    return {".".join(parts[first:]) for first in range(len(parts))}
