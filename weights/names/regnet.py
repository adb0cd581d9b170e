"""The names of tensors in files of RegNet."""

import re
from collections.abc import Collection

import numpy as np

from weights.names.rules import Arrays, rename, same_shape


def _place(match: re.Match[str]) -> str:
    """Numbers stages and blocks from 1. torchvision numbers blocks from 0, PaddleViT both."""
    groups = match.groupdict()
    stage = int(groups["from1"]) if "from1" in groups else int(groups["from0"]) + 1
    return f"s{stage}.b{int(groups['block']) + 1}."


_RULES = (
    (r"^stem\.0\.", "stem.conv."),
    (r"^stem\.1\.", "stem.bn."),
    # torchvision
    (r"^trunk_output\.block(?P<from1>\d)\.block\d-(?P<block>\d+)\.", _place),
    (r"\.f\.a\.0\.", ".conv1.conv."),
    (r"\.f\.a\.1\.", ".conv1.bn."),
    (r"\.f\.b\.0\.", ".conv2.conv."),
    (r"\.f\.b\.1\.", ".conv2.bn."),
    (r"\.f\.c\.0\.", ".conv3.conv."),
    (r"\.f\.c\.1\.", ".conv3.bn."),
    (r"\.f\.se\.", ".se."),
    (r"\.proj\.0\.", ".downsample.conv."),
    (r"\.proj\.1\.", ".downsample.bn."),
    (r"^fc\.", "head.fc."),
    # PaddleViT
    (r"^stages\.(?P<from0>\d)\.blocks\.(?P<block>\d+)\.", _place),
    (r"\.conv([123])\.(weight|bias)$", r".conv\1.conv.\2"),
    (r"\.bn([123])\.", r".conv\1.bn."),
    (r"\.se\.conv([12])_1x1\.", r".se.fc\1."),
    (r"\.downsample\.conv1x1\.", ".downsample.conv."),
    (r"^head\.2\.", "head.fc."),
)


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of timm 1.0.31's ``RegNet``.

    Sources: the files of torchvision and of PaddleViT. DeiT's teacher has timm's names. PaddleViT's
    third convolutions have a bias, and a batch norm follows. Such a bias only shifts the norm's
    running mean, so it is subtracted from that.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    arrays = rename(arrays, _RULES)
    for name in [name for name in arrays if name.endswith("conv3.conv.bias")]:
        mean = name.replace("conv.bias", "bn.running_mean")
        if mean in arrays:
            values, bias = same_shape(arrays[mean], arrays.pop(name), f"{mean} and {name}")
            arrays[mean] = np.subtract(values, bias)
    return arrays
