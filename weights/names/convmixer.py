"""ConvMixer."""

import re
from collections.abc import Collection

from weights.names.rules import Arrays, rename


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of timm 1.0.31's ``ConvMixer``.

    Sources: the files of locuslab/convmixer and of PaddleViT, which number all layers through. 0 to
    2 are the stem, then come the blocks; the last is the classifier.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    numbers = sorted({int(match[1]) for name in arrays if (match := re.match(r"(\d+)\.", name))})
    rules = [(rf"^{number}\.", f"blocks.{number - 3}.") for number in numbers[:-1] if number > 2]
    rules += [(rf"^{number}\.", "head.") for number in numbers[-1:] if number > 2]
    return rename(arrays, [(r"^([02])\.", r"stem.\1."), *rules])
