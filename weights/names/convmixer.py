"""The names of tensors in files of ConvMixer."""

import re
from collections.abc import Collection

from weights.names.rules import Arrays, rename


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of timm 1.0.31's ``ConvMixer``.

    Sources: the files of locuslab/convmixer and of PaddleViT. Their layers have one row of numbers:
    0 to 2 are the stem's, then come the blocks, and the last one is the classifier.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    numbers = sorted({int(match[1]) for name in arrays if (match := re.match(r"(\d+)\.", name))})
    behind_stem = [number for number in numbers if number > 2]
    rules = [(r"^([02])\.", r"stem.\1.")]
    rules += [(rf"^{number}\.", f"blocks.{number - 3}.") for number in behind_stem[:-1]]
    # The last one is the classifier. A file may have none of them.
    rules += [(rf"^{number}\.", "head.") for number in behind_stem[-1:]]
    return rename(arrays, rules)
