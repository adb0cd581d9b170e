"""ResNet."""

from collections.abc import Collection

from weights.names.batch_norm import BATCH_NORM
from weights.names.rules import Arrays, rename


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of timm 1.0.31's ``ResNet``: torchvision's and ``paddle.vision``'s, but for batch
    norm's statistics.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    return rename(arrays, BATCH_NORM)
