"""The names of the tensors of SegFormer's head in other toolkits' files."""

from collections.abc import Collection

from weights.names.rules import Arrays, dense_of, rename

# NVlabs/SegFormer's, which number the maps from 1. The layer for all maps reads the deepest first.
_NVIDIA = (
    (r"^decode_head\.linear_c(\d)\.proj\.", lambda match: _projection(int(match[1]) - 1)),
    (r"^decode_head\.linear_fuse\.conv\.", "decode_head.fuse."),
    (r"^decode_head\.linear_fuse\.bn\.", "decode_head.norm."),
    (r"^decode_head\.linear_pred\.", "decode_head.classifier."),
    (r"^decode_head\.conv_seg\.", None),
)
# transformers', in the same order.
_TRANSFORMERS = (
    (r"^decode_head\.linear_c\.(\d)\.proj\.", lambda match: _projection(int(match[1]))),
    (r"^decode_head\.linear_fuse\.", "decode_head.fuse."),
    (r"^decode_head\.batch_norm\.", "decode_head.norm."),
)
# PaddleViT's and mmsegmentation's, where the layer for all maps reads the largest map first.
_MMSEGMENTATION = (
    (r"^decode_head\.convs\.(\d)\.", lambda match: _projection(int(match[1]))),
    (r"^decode_head\.fusion_conv\.conv\.", "decode_head.fuse."),
    (r"^decode_head\.fusion_conv\.bn\.", "decode_head.norm."),
    (r"^decode_head\.conv_seg\.", "decode_head.classifier."),
)
_FUSE = "decode_head.fuse.{}.weight"


def _projection(index: int) -> str:
    return f"decode_head.projections.{index}."


def head_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns the arrays of a head under the names of ``models.heads.segformer``.

    Other arrays, and those of other heads, stay as they are. The weight of the layer for all maps
    is split into the shares of the maps.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    if _FUSE.format(0) not in wanted:
        return arrays
    largest_first = "decode_head.fusion_conv.conv.weight" in arrays
    if largest_first:
        rules = _MMSEGMENTATION
    elif "decode_head.linear_fuse.conv.weight" in arrays:
        rules = _NVIDIA
    else:
        rules = _TRANSFORMERS
    arrays = rename(arrays, rules)
    count = sum(_FUSE.format(index) in wanted for index in range(len(wanted)))
    for index in range(count):
        # The weight of a Linear, in transformers' and NVIDIA's files.
        name = f"{_projection(index)}weight"
        if name in arrays:
            arrays[name] = dense_of(arrays[name], layout, 4)
    weight = arrays.pop("decode_head.fuse.weight", None)
    if weight is not None:
        channels = weight.shape[1] // count
        for index in range(count):
            place = index if largest_first else count - 1 - index
            share = weight[:, place * channels : (place + 1) * channels]
            arrays[_FUSE.format(index)] = share
    return arrays
