"""The names of an encoder with a head for segmentation: mmsegmentation's, transformers' and
PaddleViT's.
"""

from collections.abc import Collection, Mapping

import paddle

from weights.names import heads_paddlevit, heads_transformers, segformer, topformer, trans2seg
from weights.names.encoders import split, with_timm_names
from weights.names.rules import ENCODER_PREFIX, Arrays, rename

_HEAD = "decode_head."
# The program of EoMT's authors (tue-mps/eomt), which names heads as here.
_EOMT = (
    (r"^criterion\.|^network\.encoder\.pixel_(mean|std)$", None),
    (r"^network\.encoder\.backbone\.", "encoder."),
    (r"^network\.", "decode_head."),
)


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns the arrays under this toolkit's names (``weights.names.timm_names``)."""
    if "network.q.weight" in arrays:
        arrays = rename(arrays, _EOMT)
    arrays = heads_paddlevit.network_names(arrays, layout, wanted)
    arrays = trans2seg.head_names(arrays, wanted)
    arrays = _with_prefixes(heads_transformers.network_names(arrays))
    arrays = segformer.head_names(arrays, layout, wanted)
    arrays = topformer.head_names(arrays, wanted)
    encoder, others = split(arrays, ENCODER_PREFIX)
    return with_timm_names(encoder, ENCODER_PREFIX, layout, wanted) | others


def _with_prefixes(arrays: Arrays) -> Arrays:
    """Returns the arrays with the encoder's prefix before all names outside of the head.

    transformers' names have lost their own prefix before (``weights.names.transformers``), and the
    authors of SegFormer have "backbone.".
    """
    if any(name.startswith(ENCODER_PREFIX) for name in arrays):
        return arrays
    return rename(arrays, [(rf"^(backbone\.)?(?!{_HEAD})", ENCODER_PREFIX)])


def unstored_arrays(arrays: Arrays, state: Mapping[str, paddle.Tensor]) -> Arrays:
    """Returns the arrays that a file's toolkit doesn't have (``weights.names.unstored_arrays``)."""
    of_transformers = heads_transformers.unstored_arrays(arrays, state)
    return of_transformers | heads_paddlevit.unstored_arrays(arrays, state)
