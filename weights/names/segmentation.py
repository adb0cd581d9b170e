"""The names of an encoder with a head for segmentation: mmsegmentation's and transformers'."""

from collections.abc import Collection

from weights.names.encoders import split, with_timm_names
from weights.names.heads_transformers import network_names, unstored_arrays
from weights.names.rules import ENCODER_PREFIX, Arrays

__all__ = ["timm_names", "unstored_arrays"]


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns the arrays under this toolkit's names (``weights.names.timm_names``)."""
    encoder, others = split(network_names(arrays), ENCODER_PREFIX)
    return with_timm_names(encoder, ENCODER_PREFIX, layout, wanted) | others
