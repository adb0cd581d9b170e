"""TinyViT."""

from collections.abc import Collection

from weights.names.rules import Arrays, rename

_RULES = (
    (r"\.attention_bias_idxs$", None),
    (r"\.ab$", None),  # the biases, spread in evaluation
    (r"^patch_embed\.seq\.0\.", "patch_embed.conv1."),
    (r"^patch_embed\.seq\.2\.", "patch_embed.conv2."),
    (r"\.c\.weight$", ".conv.weight"),
    (r"^norm_head\.", "head.norm."),
    (r"^head\.(weight|bias)$", r"head.fc.\1"),
    # Neighbours are merged at a stage's end; timm does so at the next one's beginning.
    (r"^layers\.(\d+)\.downsample\.", lambda found: f"stages.{int(found[1]) + 1}.downsample."),
    (r"^layers\.", "stages."),
)


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of timm 1.0.31's ``TinyVit``; derived buffers are dropped.

    Source: microsoft/Cream's TinyViT.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    return rename(arrays, _RULES)
