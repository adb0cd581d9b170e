"""The names of tensors in other toolkits' weight files, and how they become timm's.

Each family of architectures has a module here, to which a model's class refers as
``ImageModel.weight_names``. Its function ``timm_names`` renames a file's tensors. Names also show
how a file's model computes, so a module may have further functions:

- ``model_keys(arrays)``: keys of MODEL that change the model's tensors, found by timm's names. A
  distillation token, for example, means DISTILLED. If file and model differ in such a key, the
  error says which keys to set.
- ``switches(arrays)``: keys of MODEL that change no tensors, found by the file's own names.
- ``unstored_arrays(arrays, state)``: arrays that the file's toolkit computes instead of storing
  them.
- ``repeated_names(names)``: names under which timm's files store a shared tensor again.
"""

import re
from collections.abc import Collection
from types import ModuleType
from typing import Any

import paddle

from weights.layout import Target
from weights.names import mixer, transformers, vit
from weights.names.pretraining import encoder_arrays
from weights.names.rules import Arrays, rename

__all__ = [
    "differences",
    "encoder_arrays",
    "google_names",
    "has_switches",
    "repeated_names",
    "switches",
    "timm_names",
    "unread_classifier",
    "unstored_arrays",
]

# Paddle's names of batch norm's statistics become PyTorch's. PyTorch's count of batches is dropped:
# only an average over all batches needs it.
_BATCH_NORM = (
    (r"\._mean$", ".running_mean"),
    (r"\._variance$", ".running_var"),
    (r"\.num_batches_tracked$", None),
)


def timm_names(
    family: ModuleType | None, arrays: Arrays, layout: str, wanted: Collection[str]
) -> Arrays:
    """Returns a file's arrays under timm 1.0.31's names.

    Arrays that have timm's names, or names that the family doesn't know, stay as they are. Arrays
    that only other programs need are dropped, such as derived buffers; the family's docstring says
    which. ``encoder_arrays`` has left out decoders before.

    Args:
        family: the model's ``weight_names``; None: only the names of batch norm and of transformers
            are changed.
        arrays: by name. Wrappers and "module." are removed already.
        layout: of the Linear weights: [out, in] for "torch", [in, out] for "paddle", Flax's kernels
            for "jax".
        wanted: the model's own names. They decide where a file may be read in two ways.

    Returns:
        arrays in the same layout; "jax" becomes "torch".

    Raises:
        InputError: two arrays get the same name.
    """
    arrays = transformers.timm_names(rename(arrays, _BATCH_NORM))
    return arrays if family is None else family.timm_names(arrays, layout, wanted)


def differences(
    family: ModuleType | None, arrays: Arrays, state: dict[str, paddle.Tensor]
) -> dict[str, Any]:
    """Returns the keys of MODEL in which a file differs from the model, with the file's values.

    Args:
        family: the model's ``weight_names``.
        arrays: the file's, by timm's names.
        state: the model's tensors, by timm's names.
    """
    model_keys = getattr(family, "model_keys", None)
    if model_keys is None:
        return {}
    of_model = model_keys(state)
    return {
        key: value
        for key, value in model_keys(arrays).items()
        if key not in of_model or of_model[key] != value
    }


def switches(family: ModuleType | None, arrays: Arrays) -> dict[str, Any]:
    """Returns the keys of MODEL that change no tensors, with the values of a file's model.

    Args:
        family: the model's ``weight_names``.
        arrays: by the file's names.
    """
    return family.switches(arrays) if family and has_switches(family) else {}


def unread_classifier(arrays: Collection[str]) -> str:
    """Returns the reason why a file's classifier isn't read; "" if it is read, or there is none.

    Args:
        arrays: the file's own names.
    """
    if any(re.match(r"(opt/target/)?pre_logits\b", name) for name in arrays):
        return "its classifier reads a layer pre_logits, which isn't supported"
    return ""


def has_switches(family: ModuleType | None) -> bool:
    """Returns whether files of this family's models may imply ``switches``."""
    return hasattr(family, "switches")


def unstored_arrays(
    family: ModuleType | None, arrays: Arrays, state: dict[str, paddle.Tensor]
) -> Arrays:
    """Returns the arrays that a file's toolkit computes instead of storing them, by timm's names.

    Args:
        family: the model's ``weight_names``.
        arrays: by the file's names.
        state: the model's tensors, by timm's names. The arrays have their sizes.
    """
    if family and hasattr(family, "unstored_arrays"):
        return family.unstored_arrays(arrays, state)
    return {}


def repeated_names(family: ModuleType | None, names: Collection[str]) -> dict[str, str]:
    """Returns {other name: the model's name} of the tensors that timm's files hold more than once.

    Args:
        family: the model's ``weight_names``.
        names: of the model's tensors.
    """
    if family and hasattr(family, "repeated_names"):
        return family.repeated_names(names)
    return {}


def google_names(model: Target, arrays: Arrays) -> Arrays:
    """Returns a model's arrays as Google's .npz files have them.

    Args:
        model: a plain ViT or an MLP-Mixer.
        arrays: by timm's names, in torch's layout.

    Raises:
        InputError: the model has an array that has no place in these files.
    """
    if model.weight_names is vit:
        return vit.google_names(arrays, model.blocks[0].attn.num_heads)
    return mixer.google_names(arrays)
