"""The names of tensors in files of a training by MoCo v3, with both encoders."""

from collections.abc import Collection

from weights.names.encoders import split, with_timm_names
from weights.names.rules import ENCODER_PREFIX, Arrays, rename

_RULES = (
    # The projection is in the place of the model's classifier.
    (r"^base_encoder\.head\.", "projector."),
    (r"^momentum_encoder\.head\.", "momentum.projector."),
    (r"^base_encoder\.", ENCODER_PREFIX),
    (r"^momentum_encoder\.", f"momentum.{ENCODER_PREFIX}"),
)


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of MoCo v3's network.

    Source: the names in facebookresearch/moco-v3's published checkpoints.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    arrays = rename(arrays, _RULES)
    for prefix in (ENCODER_PREFIX, f"momentum.{ENCODER_PREFIX}"):
        of_encoder, others = split(arrays, prefix)
        arrays = with_timm_names(of_encoder, prefix, layout, wanted) | others
    return arrays
