"""The names of tensors in files of BoTNet."""

from collections.abc import Collection

from weights.arrays import concatenated
from weights.names.rules import Arrays, rename

# PaddleViT's model is a sequence of a ResNet's layers, the stage with attention, and a Linear. Its
# tensors have the numbers of the layers.
_RULES = (
    (r"^0\.", "stem.conv."),
    (r"^1\.", "stem.bn."),
    (r"^([456])\.", lambda match: f"stages.{int(match[1]) - 4}."),
    (r"^(stages\.\d+\.\d+)\.conv([13])\.", r"\1.conv\2_1x1.conv."),
    (r"^(stages\.\d+\.\d+)\.bn([13])\.", r"\1.conv\2_1x1.bn."),
    (r"^(stages\.\d+\.\d+)\.conv2\.", r"\1.conv2_kxk.conv."),
    (r"^(stages\.\d+\.\d+)\.bn2\.", r"\1.conv2_kxk.bn."),
    (r"^(stages\.\d+\.\d+)\.downsample\.", r"\1.shortcut."),
    (r"^7\.net\.", "stages.3."),
    (r"^(stages\.3\.\d+)\.net\.0\.", r"\1.conv1_1x1.conv."),
    (r"^(stages\.3\.\d+)\.net\.1\.", r"\1.conv1_1x1.bn."),
    (r"^(stages\.3\.\d+)\.net\.3\.pos_emb\.rel_(height|width)$", r"\1.self_attn.pos_embed.\2_rel"),
    (r"^(stages\.3\.\d+)\.net\.3\.", r"\1.self_attn."),
    (r"^(stages\.3\.\d+)\.net\.5\.", r"\1.post_attn."),
    (r"^(stages\.3\.\d+)\.net\.7\.", r"\1.conv3_1x1.conv."),
    (r"^(stages\.3\.\d+)\.net\.8\.", r"\1.conv3_1x1.bn."),
    (r"\.shortcut\.0\.", ".shortcut.conv."),
    (r"\.shortcut\.1\.", ".shortcut.bn."),
    (r"^10\.", "head.fc."),
)


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of timm 1.0.31's ``ByobNet``.

    Source: PaddleViT's BoTNet, whose values have a convolution of their own.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    named = rename(arrays, _RULES)
    for name in [name for name in named if name.endswith(".to_qk.weight")]:
        prefix = name.removesuffix("to_qk.weight")
        if f"{prefix}to_v.weight" in named:
            parts = [named.pop(name), named.pop(f"{prefix}to_v.weight")]
            named[f"{prefix}qkv.weight"] = concatenated(parts)
    return named
