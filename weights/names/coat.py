"""The names of tensors in files of CoaT."""

import re
from collections.abc import Collection
from typing import Any

from errors import InputError
from weights.names.rules import Arrays, rename

_RULES = (
    *(
        (rf"^{name}s\.{i}(?=\.|$)", f"{name}{i + 1}")
        for name in ("patch_embed", "cls_token", "cpe", "crpe")
        for i in range(4)
    ),
    *((rf"^serial_blocks\.{i}\.", f"serial_blocks{i + 1}.") for i in range(4)),
    (r"^(patch_embed\d)\.patch_embed\.", r"\1.proj."),
)
# Tensors that timm's and the authors' files store again in each block that shares them.
_REPEATED = (
    (r"^serial_blocks(\d)\.\d+\.cpe\.", r"cpe\1."),
    (r"^serial_blocks(\d)\.\d+\.factoratt_crpe\.crpe\.", r"crpe\1."),
    (r"^parallel_blocks\.\d+\.factoratt_crpe(\d)\.crpe\.", r"crpe\1."),
    (r"^(parallel_blocks\.\d+)\.mlp[34]\.", r"\1.mlp2."),
)


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of timm 1.0.31's ``CoaT``.

    Each tensor that blocks share is returned once. Sources: the files of mlpc-ucsd/CoaT and of
    PaddleViT. The authors' norms that nothing reads are dropped: the first one, and in CoaT-Lite
    also the second and third.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.

    Raises:
        InputError: a tensor that blocks share has several values. PaddleViT trains three MLPs in a
            block, for example, where CoaT has one.
    """
    is_lite = not any(name.startswith("aggregate.") for name in arrays)
    unread = r"^norm[123]\." if is_lite else r"^norm1\."
    named = {}
    sources = {}
    for source, array in rename(arrays, (*_RULES, (unread, None))).items():
        name = _shared_name(source)
        if name not in named:
            named[name] = array
            sources[name] = source
        elif named[name].shape != array.shape or named[name].tobytes() != array.tobytes():
            raise InputError(
                f"{sources[name]} and {source} differ, but CoaT shares them; take other weights"
            )
    return named


def repeated_names(names: Collection[str]) -> dict[str, str]:
    """Returns {timm's name: the model's} of the tensors that timm's files store again.

    Args:
        names: of the model's tensors.
    """
    block = re.compile(r"(serial_blocks\d|parallel_blocks)\.\d+")
    blocks = sorted({match[0] for name in names if (match := block.match(name))})
    serial = [name for name in blocks if name.startswith("serial")]
    prefixes = [f"{name}.cpe." for name in serial]
    prefixes += [f"{name}.factoratt_crpe.crpe." for name in serial]
    for name in blocks:
        if name.startswith("parallel"):
            prefixes += [f"{name}.factoratt_crpe{scale}.crpe." for scale in (2, 3, 4)]
            prefixes += [f"{name}.mlp3.", f"{name}.mlp4."]
    repeated = {}
    for prefix in prefixes:
        shared = _shared_name(prefix)
        for name in names:
            if name.startswith(shared):
                repeated[prefix + name.removeprefix(shared)] = name
    return repeated


def model_keys(arrays: Collection[str]) -> dict[str, Any]:
    """Returns the number of parallel blocks."""
    blocks = {name.split(".")[1] for name in arrays if name.startswith("parallel_blocks.")}
    return {"PARALLEL_DEPTH": len(blocks)}


def _shared_name(name: str) -> str:
    """Returns the name of a tensor, or the beginning of one, without the block that shares it."""
    for pattern, replacement in _REPEATED:
        name = re.sub(pattern, replacement, name)
    return name
