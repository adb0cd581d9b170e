"""The names of an encoder with a head for segmentation: mmsegmentation's, transformers' and
PaddleViT's.
"""

from collections.abc import Collection, Mapping

import paddle

from weights.names import heads_paddlevit
from weights.names.encoders import split, with_timm_names
from weights.names.rules import ENCODER_PREFIX, Arrays


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns the arrays under this toolkit's names (``weights.names.timm_names``)."""
    arrays = heads_paddlevit.network_names(arrays, layout, wanted)
    encoder, others = split(arrays, ENCODER_PREFIX)
    return with_timm_names(encoder, ENCODER_PREFIX, layout, wanted) | others


def unstored_arrays(arrays: Collection[str], state: Mapping[str, paddle.Tensor]) -> Arrays:
    """Returns the arrays that a file's toolkit doesn't have (``weights.names.unstored_arrays``)."""
    return heads_paddlevit.unstored_arrays(arrays, state)
