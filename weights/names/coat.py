"""CoaT."""

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
# What timm's and the authors' files hold again in each block that uses it.
_REPEATED = (
    (r"^serial_blocks(\d)\.\d+\.cpe\.", r"cpe\1."),
    (r"^serial_blocks(\d)\.\d+\.factoratt_crpe\.crpe\.", r"crpe\1."),
    (r"^parallel_blocks\.\d+\.factoratt_crpe(\d)\.crpe\.", r"crpe\1."),
    (r"^(parallel_blocks\.\d+)\.mlp[34]\.", r"\1.mlp2."),
)


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of timm 1.0.31's ``CoaT``, each tensor that blocks share once.

    Sources: the files of mlpc-ucsd/CoaT and of PaddleViT. The authors' norms that nothing reads are
    dropped: the first, and of CoaT-Lite the second and third.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.

    Raises:
        InputError: tensors that blocks share differ, as PaddleViT's three MLPs of a block do after
            training there.
    """
    unread = (
        r"^norm1\." if any(name.startswith("aggregate.") for name in arrays) else r"^norm[123]\."
    )
    found = {}
    sources = {}
    for source, array in rename(arrays, (*_RULES, (unread, None))).items():
        name = _own(source)
        if name in found and (
            found[name].shape != array.shape or found[name].tobytes() != array.tobytes()
        ):
            raise InputError(
                f"{sources[name]} and {source} differ, CoaT has one tensor for both; take other weights"
            )
        if name not in found:
            found[name], sources[name] = array, source
    return found


def repeated_names(names: Collection[str]) -> dict[str, str]:
    """Returns {timm's name: ours} of what timm's files hold again.

    Args:
        names: the model's own.
    """
    blocks = sorted(
        {
            match[0]
            for name in names
            if (match := re.match(r"(serial_blocks\d|parallel_blocks)\.\d+", name))
        }
    )
    places = [f"{block}.cpe." for block in blocks if block.startswith("serial")]
    places += [f"{block}.factoratt_crpe.crpe." for block in blocks if block.startswith("serial")]
    for block in blocks:
        if block.startswith("parallel"):
            places += [
                *(f"{block}.factoratt_crpe{i}.crpe." for i in (2, 3, 4)),
                f"{block}.mlp3.",
                f"{block}.mlp4.",
            ]
    return {
        place + name.removeprefix(own): name
        for place in places
        if (own := _own(place))
        for name in names
        if name.startswith(own)
    }


def computes(arrays: Collection[str]) -> dict[str, Any]:
    """Tells how many parallel blocks there are."""
    found = {name.split(".")[1] for name in arrays if name.startswith("parallel_blocks.")}
    return {"PARALLEL_DEPTH": len(found)}


def _own(name: str) -> str:
    for pattern, replacement in _REPEATED:
        name = re.sub(pattern, replacement, name)
    return name
