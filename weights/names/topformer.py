"""The names of tensors in PaddleViT's files of TopFormer."""

import re
from collections.abc import Collection

from weights.names.rules import Arrays, rename

_RULES = (
    (r"^tpm\.stem\.", "stem."),
    (r"^trans\.layers\.", "blocks."),
    (r"\.proj\.1\.", ".proj."),
    (r"\.norm\.", ".bn."),
    (r"^head\.l\.", "head.linear."),
)
# The layers of an inverted residual, in PaddleViT's order. The last convolution has its norm next
# to it.
_LAYERS = ("conv1_1x1.", "conv2_kxk.", "conv3_1x1.conv.", "conv3_1x1.bn.")


_HEAD = (
    # The first map is injected into by nothing.
    *((rf"^encoder\.sim\.{i + 1}\.", f"decode_head.injections.{i}.") for i in range(3)),
    (r"^decoder\.linear_fuse\.", "decode_head.fuse."),
    (r"^decoder\.conv_seg\.", "decode_head.classifier."),
    (r"^(decode_head\..*)\.norm\.", r"\1.bn."),
)


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of ``models.topformer``.

    PaddleViT numbers the inverted residuals of all stages in one row.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    found = (re.match(r"stages\.(\d+)\.(\d+)\.", name) for name in wanted)
    places = sorted({(int(match[1]), int(match[2])) for match in found if match})

    def residual(match: re.Match[str]) -> str:
        number = int(match[1])
        if number >= len(places):
            return match[0]
        # The first layer is absent where nothing is widened.
        absent = 0 if f"tpm.layers.{number}.conv.3.weight" in arrays else 1
        stage, block = places[number]
        return f"stages.{stage}.{block}.{_LAYERS[int(match[2]) + absent]}"

    return rename(arrays, [(r"^tpm\.layers\.(\d+)\.conv\.([0-3])\.", residual), *_RULES])


def head_names(arrays: Arrays, wanted: Collection[str]) -> Arrays:
    """Returns the arrays of PaddleViT's head under the names of ``models.heads.topformer``.

    Its injections are layers of the encoder there. Other arrays, and those of other heads, stay as
    they are.

    Args:
        wanted: see ``weights.names.timm_names``.
    """
    if "decode_head.injections.0.global_act.conv.weight" not in wanted:
        return arrays
    return rename(arrays, _HEAD)
