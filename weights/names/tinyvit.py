"""The names of tensors in files of TinyViT."""

from collections.abc import Collection

from weights.names.rules import Arrays, rename

_RULES = (
    (r"\.attention_bias_idxs$", None),
    # a copy of the biases for evaluation, one for each pair of places
    (r"\.ab$", None),
    (r"^patch_embed\.seq\.0\.", "patch_embed.conv1."),
    (r"^patch_embed\.seq\.2\.", "patch_embed.conv2."),
    (r"\.c\.weight$", ".conv.weight"),
    (r"^norm_head\.", "head.norm."),
    (r"^head\.(weight|bias)$", r"head.fc.\1"),
    # Neighbours are merged at the end of a stage; timm does so at the beginning of the next one.
    (r"^layers\.(\d+)\.downsample\.", lambda match: f"stages.{int(match[1]) + 1}.downsample."),
    (r"^layers\.", "stages."),
)


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of timm 1.0.31's ``TinyVit``.

    Source: TinyViT of microsoft/Cream. Derived buffers are dropped.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    return rename(arrays, _RULES)
