"""The names of tensors in files of OpenAI and OpenCLIP: the image towers of CLIP and SigLIP."""

from collections.abc import Collection

import numpy as np

from weights.names.rules import Arrays, rename

# The prefix of towers that OpenCLIP takes from timm.
_TIMM_TOWER = "visual.trunk."
# A name that all other towers have.
_CLASS_TOKEN = "visual.class_embedding"
_RULES = (
    # the text's tower, and the temperature
    (r"^(?!visual\.)", None),
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
    """Returns the arrays of an image tower by timm's names. Other files' arrays stay as they are.

    The projection into the space of images and texts becomes the classifier's weight. The
    classifier's bias is zero then, as in timm.
    """
    if any(name.startswith(_TIMM_TOWER) for name in arrays):
        return {
            name.removeprefix(_TIMM_TOWER): array
            for name, array in arrays.items()
            if name.startswith(_TIMM_TOWER)
        }
    if _CLASS_TOKEN not in arrays:
        return arrays
    named = rename(arrays, _RULES)
    named["cls_token"] = named["cls_token"][None, None]
    named["pos_embed"] = named["pos_embed"][None]
    if "head.weight" in named:
        named["head.weight"] = named["head.weight"].T
        named["head.bias"] = np.zeros(len(named["head.weight"]), np.float32)
    return named


def is_openais(names: Collection[str]) -> bool:
    """Returns whether weights are OpenAI's own, whose model has ``QuickGELU``.

    Only their files hold the size of the vocabulary.
    """
    return {_CLASS_TOKEN, "vocab_size"} <= set(names)
