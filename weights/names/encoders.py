"""The names of the tensors of a model within a network for pre-training."""

from collections.abc import Collection

from weights.names import (
    beit,
    cait,
    convnext,
    cswin,
    eva,
    focal,
    mixer,
    pvtv2,
    swin,
    swinv2,
    topformer,
    vit,
    xcit,
)
from weights.names.guess import guess_type
from weights.names.rules import Arrays

# Of architectures that methods with several encoders train, and whose names other toolkits change.
_FAMILIES = {
    "beit": beit,
    "cait": cait,
    "convnext": convnext,
    "cswin": cswin,
    "eva": eva,
    "focal": focal,
    "gmlp": mixer,
    "mixer": mixer,
    "pvtv2": pvtv2,
    "resmlp": mixer,
    "swin": swin,
    "swinv2": swinv2,
    "topformer": topformer,
    "vit": vit,
    "xcit": xcit,
}


def split(arrays: Arrays, prefix: str) -> tuple[Arrays, Arrays]:
    """Returns the arrays whose names begin with ``prefix``, without it, and all others."""
    inside = {}
    others = {}
    for name, array in arrays.items():
        if name.startswith(prefix):
            inside[name.removeprefix(prefix)] = array
        else:
            others[name] = array
    return inside, others


def with_timm_names(arrays: Arrays, prefix: str, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under timm's names, each behind ``prefix``.

    Args:
        arrays: of a model, by the file's names, without a prefix.
        prefix: of the model's names in the network.
        layout: see ``weights.names.timm_names``.
        wanted: the network's own names.
    """
    own = [name.removeprefix(prefix) for name in wanted if name.startswith(prefix)]
    family = _FAMILIES.get(guess_type(own) or "")
    if family:
        arrays = family.timm_names(arrays, layout, own)
    return {f"{prefix}{name}": array for name, array in arrays.items()}
