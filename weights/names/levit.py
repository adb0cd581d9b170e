"""LeViT."""

import re
from collections.abc import Collection, Iterable
from typing import Any

from weights.names.rules import Arrays, dense_of, rename

_ENTRY = r"^blocks\.(\d{1,6})\."
_RULES = (
    *((rf"^patch_embed\.{2 * i}\.(c|conv)\.", f"stem.conv{i + 1}.linear.") for i in range(4)),
    *((rf"^patch_embed\.{2 * i}\.(bn|norm)\.", f"stem.conv{i + 1}.bn.") for i in range(4)),
    (r"_bias_idxs$", None),
    (r"\.m\.(qkv|proj|attention_biases)", r".attn.\1"),
    (r"\.m\.0\.", ".mlp.ln1."),
    (r"\.m\.2\.", ".mlp.ln2."),
    (r"\.attn_biases$", ".attention_biases"),  # PaddleViT
    (r"\.downsample\.(?:attn\.)?(kv|q|proj|attention_biases)", r".downsample.attn_downsample.\1"),
    (r"\.(q|proj)\.1\.", r".\1.ln."),
    (r"\.(qkv|kv|ln|ln1|ln2)\.c\.", r".\1.linear."),
    (r"\.(qkv|kv|ln|ln1|ln2)\.norm\.", r".\1.bn."),
    (r"^(head|head_dist)\.l\.", r"\1.linear."),
    (r"^(head|head_dist)\.norm\.", r"\1.bn."),
)


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of timm 1.0.31's ``LevitDistilled``.

    Sources: the files of facebookresearch/LeViT and of PaddleViT. Both number all blocks in one
    list ``blocks``, with what is between two stages. The authors' list has attention and MLP as
    entries of their own. Which row of the table a query and a key read is computed here, so
    ``attention_bias_idxs`` is dropped. The 1 x 1 convolutions of timm's ``levit_conv_*`` become
    Linears.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    places = _places(arrays)
    arrays = rename(arrays, [(_ENTRY, lambda match: f"{places[int(match[1])]}."), *_RULES])
    return {
        name: dense_of(array, layout, 2)
        if re.search(r"^stages\..*\.linear\.weight$", name)
        else array
        for name, array in arrays.items()
    }


def _places(names: Iterable[str]) -> dict[int, str]:
    """Returns which part of the model each entry of ``blocks`` is of, by its number."""
    entries: dict[int, list[str]] = {}
    for name in names:
        if match := re.match(_ENTRY, name):
            entries.setdefault(int(match[1]), []).append(name[match.end() :])
    found = {}
    stage = 0
    block = 0
    place = "stages.0.blocks.0"
    for number in sorted(entries):
        parts = entries[number]
        if any(part.startswith(("kv.", "attn.kv.")) for part in parts):
            stage = stage + 1
            block = 0
            place = f"stages.{stage}.downsample"
        elif not all(part.startswith(("m.0.", "m.2.")) for part in parts):
            # the authors' MLP is of the same block
            place = f"stages.{stage}.blocks.{block}"
            block = block + 1
        found[number] = place
    return found


def computes(arrays: Collection[str]) -> dict[str, Any]:
    """Tells whether there are two classifiers."""
    return (
        {"DISTILLED": "head_dist.linear.weight" in arrays} if "head.linear.weight" in arrays else {}
    )
