"""The names of tensors in files of LeViT."""

import re
from collections.abc import Collection, Iterable
from typing import Any

from weights.names.rules import Arrays, dense_of, rename

# An entry of the list in which both sources number all blocks.
_ENTRY = r"^blocks\.(\d{1,6})\."
_RULES = (
    *((rf"^patch_embed\.{2 * i}\.(c|conv)\.", f"stem.conv{i + 1}.linear.") for i in range(4)),
    *((rf"^patch_embed\.{2 * i}\.(bn|norm)\.", f"stem.conv{i + 1}.bn.") for i in range(4)),
    (r"_bias_idxs$", None),
    (r"\.m\.(qkv|proj|attention_biases)", r".attn.\1"),
    (r"\.m\.0\.", ".mlp.ln1."),
    (r"\.m\.2\.", ".mlp.ln2."),
    # PaddleViT
    (r"\.attn_biases$", ".attention_biases"),
    (r"\.downsample\.(?:attn\.)?(kv|q|proj|attention_biases)", r".downsample.attn_downsample.\1"),
    (r"\.(q|proj)\.1\.", r".\1.ln."),
    (r"\.(qkv|kv|ln|ln1|ln2)\.c\.", r".\1.linear."),
    (r"\.(qkv|kv|ln|ln1|ln2)\.norm\.", r".\1.bn."),
    (r"^(head|head_dist)\.l\.", r"\1.linear."),
    (r"^(head|head_dist)\.norm\.", r"\1.bn."),
)


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of timm 1.0.31's ``LevitDistilled``.

    Sources: the files of facebookresearch/LeViT and of PaddleViT. Both number all blocks, and the
    downsampling between two stages, in one list ``blocks``. In the authors' list, attention and MLP
    are entries of their own. ``attention_bias_idxs`` is dropped, because the model computes which
    row of the table a query and a key read. The 1 x 1 convolutions of timm's ``levit_conv_*``
    become Linears.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    modules = _modules(arrays)
    arrays = rename(arrays, [(_ENTRY, lambda match: f"{modules[int(match[1])]}."), *_RULES])
    for name, array in arrays.items():
        if re.search(r"^stages\..*\.linear\.weight$", name):
            arrays[name] = dense_of(array, layout, 2)
    return arrays


def _modules(names: Iterable[str]) -> dict[int, str]:
    """Returns timm's name of the block or the downsampling to which each entry belongs.

    Returns:
        {number of the entry in ``blocks``: name}.
    """
    entries: dict[int, list[str]] = {}
    for name in names:
        if match := re.match(_ENTRY, name):
            entries.setdefault(int(match[1]), []).append(name[match.end() :])
    modules = {}
    stage = 0
    block = 0
    module = "stages.0.blocks.0"
    for number in sorted(entries):
        tensors = entries[number]
        if any(tensor.startswith(("kv.", "attn.kv.")) for tensor in tensors):
            stage += 1
            block = 0
            module = f"stages.{stage}.downsample"
        elif not all(tensor.startswith(("m.0.", "m.2.")) for tensor in tensors):
            module = f"stages.{stage}.blocks.{block}"
            block += 1
        # Otherwise it is the authors' MLP, which belongs to the same block as the entry before.
        modules[number] = module
    return modules


def model_keys(arrays: Collection[str]) -> dict[str, Any]:
    """Returns whether there are two classifiers."""
    if "head.linear.weight" not in arrays:
        return {}
    return {"DISTILLED": "head_dist.linear.weight" in arrays}
