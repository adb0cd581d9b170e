"""The image towers of CLIP as OpenAI and OpenCLIP store them, and of SigLIP as OpenCLIP does."""

from collections.abc import Collection

import numpy as np

from weights.names.rules import Arrays, rename

_TIMMS = "visual.trunk."  # OpenCLIP, where timm makes the tower
_TOWER = "visual.class_embedding"
_RULES = (
    (r"^(?!visual\.)", None),  # the text's tower, and the temperature
    (r"^visual\.class_embedding$", "cls_token"),
    (r"^visual\.positional_embedding$", "pos_embed"),
    (r"^visual\.conv1\.", "patch_embed.proj."),
    (r"^visual\.ln_pre\.", "norm_pre."),
    (r"^visual\.ln_post\.", "norm."),
    (r"^visual\.proj$", "head.weight"),
    (r"^visual\.transformer\.resblocks\.", "blocks."),
    (r"\.ln_([12])\.", r".norm\1."),
    (r"\.attn\.in_proj_", ".attn.qkv."),
    (r"\.attn\.out_proj\.", ".attn.proj."),
    (r"\.mlp\.c_fc\.", ".mlp.fc1."),
    (r"\.mlp\.c_proj\.", ".mlp.fc2."),
)


def from_clip(arrays: Arrays) -> Arrays:
    """Returns the image tower's arrays by timm's names; other arrays as they are.

    The projection into the space of images and texts is the classifier's weight; its bias is zero,
    as in timm.
    """
    if any(name.startswith(_TIMMS) for name in arrays):
        return {
            name.removeprefix(_TIMMS): array
            for name, array in arrays.items()
            if name.startswith(_TIMMS)
        }
    if _TOWER not in arrays:
        return arrays
    found = rename(arrays, _RULES)
    found["cls_token"], found["pos_embed"] = (
        found["cls_token"][None, None],
        found["pos_embed"][None],
    )
    if "head.weight" in found:
        found["head.weight"] = found["head.weight"].T
        found["head.bias"] = np.zeros(len(found["head.weight"]), np.float32)
    return found


def is_openais(names: Collection[str]) -> bool:
    """Returns whether these are OpenAI's own weights: only they hold the vocabulary's size. They
    need ``QuickGELU``.
    """
    return {_TOWER, "vocab_size"} <= set(names)
