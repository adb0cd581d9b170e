"""The names of tensors in files of Swin Transformer."""

import re
from collections.abc import Collection

from weights.names.rules import Arrays, rename

_RULES = (
    (r"\.(relative_position_index|attn_mask)$", None),
    (r"^head\.(weight|bias)$", r"head.fc.\1"),
    # PaddleViT
    (r"^patch_embedding\.patch_embed\.", "patch_embed.proj."),
    (r"^patch_embedding\.norm\.", "patch_embed.norm."),
    (r"^stages\.", "layers."),
    (r"^fc\.", "head.fc."),
    # SimMIM's pre-training
    (r"^(mask_token$|decoder\.)", None),
)


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of timm 1.0.31's ``SwinTransformer``.

    Sources: microsoft/Swin-Transformer, and PaddleViT's Swin in all its versions. Both merge
    patches at the end of a stage, also of the first one; timm does so at the beginning of the next
    one. Derived buffers are dropped, and the mask token and decoder of SimMIM.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    arrays = rename(arrays, _RULES)
    if "layers.0.downsample.reduction.weight" in arrays:
        merging = re.compile(r"(?<=^layers\.)\d+(?=\.downsample\.)")
        arrays = {
            merging.sub(lambda match: str(int(match[0]) + 1), name): array
            for name, array in arrays.items()
        }
    return arrays
