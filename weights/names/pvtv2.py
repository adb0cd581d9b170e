"""PVTv2."""

from collections.abc import Collection

from weights.names.rules import Arrays, rename

_RULES = (
    (r"^patch_embed(ding)?1\.", "patch_embed."),
    *((rf"^patch_embed(ding)?{i + 1}\.", f"stages.{i}.downsample.") for i in (1, 2, 3)),
    *((rf"^block{i + 1}\.", f"stages.{i}.blocks.") for i in range(4)),
    *((rf"^norm{i + 1}\.", f"stages.{i}.norm.") for i in range(4)),
    (r"\.dwconv\.dwconv\.", ".dwconv."),
    (r"(patch_embed|downsample)\.patch_embed\.", r"\1.proj."),  # PaddleViT
)


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of timm 1.0.31's ``PyramidVisionTransformerV2``.

    Sources: the files of whai362/PVT and of PaddleViT. The norms after PaddleViT's patch embeddings have an epsilon of
    1e-6; timm's and the authors' have 1e-5.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    return rename(arrays, _RULES)
