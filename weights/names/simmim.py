"""The names of tensors in files of SimMIM's pre-training."""

from collections.abc import Collection

from weights.names import beit, cait, eva, mixer, swin, swinv2, vit
from weights.names.guess import guess_type
from weights.names.rules import ENCODER_PREFIX, Arrays

_FAMILIES = {
    "beit": beit,
    "cait": cait,
    "eva": eva,
    "gmlp": mixer,
    "mixer": mixer,
    "resmlp": mixer,
    "swin": swin,
    "swinv2": swinv2,
    "vit": vit,
}


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
    encoders = [
        name.removeprefix(ENCODER_PREFIX) for name in wanted if name.startswith(ENCODER_PREFIX)
    ]
    family = _FAMILIES.get(guess_type(encoders) or "")
    if family:
        arrays = family.timm_names(arrays, layout, encoders)
    return {f"{ENCODER_PREFIX}{name}": array for name, array in arrays.items()} | others
