"""The names of tensors in files of SimMIM's pre-training."""

from collections.abc import Collection

from weights.names.encoders import with_timm_names
from weights.names.rules import ENCODER_PREFIX, Arrays


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of ``models.pretraining.simmim.SimMIM``.

    Sources: microsoft/SimMIM, whose encoder has the mask token; and transformers' classes
    ForMaskedImageModeling, which have no prefix before the encoder's names.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    arrays = {name.removeprefix(ENCODER_PREFIX): array for name, array in arrays.items()}
    others = {
        name: arrays.pop(name)
        for name in list(arrays)
        if name == "mask_token" or name.startswith("decoder.")
    }
    return with_timm_names(arrays, ENCODER_PREFIX, layout, wanted) | others
