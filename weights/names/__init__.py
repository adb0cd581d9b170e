"""Renames the tensors of other toolkits' weight files to timm's names. There is a module per family of
architectures, which a model's class refers to as ``ImageModel.weight_names``.

Names also tell how the model computes. Besides ``timm_names``, a family may have:

- ``computes(arrays)``: keys of MODEL that can be told from timm's names, because other tensors come
  with them. A distillation token means DISTILLED. If file and model differ in such a key, the error
  says which keys to set.
- ``switches(arrays)``: keys of MODEL that change no tensors, told from the file's own names.
- ``unstored_arrays``: arrays that the file's toolkit computes instead of storing them.
- ``repeated_names``: names under which timm's files store a shared tensor again.
"""

import re
from collections.abc import Collection
from types import ModuleType
from typing import Any

import paddle

from weights.layout import Target
from weights.names import mixer, transformers, vit
from weights.names.rules import Arrays, rename

# Paddle's names of batch norm's statistics; PyTorch's count of batches, which only an average over
# all of them needs.
_BATCH_NORM = (
    (r"\._mean$", ".running_mean"),
    (r"\._variance$", ".running_var"),
    (r"\.num_batches_tracked$", None),
)


def timm_names(
    family: ModuleType | None, arrays: Arrays, layout: str, wanted: Collection[str]
) -> Arrays:
    """Returns a file's arrays under timm 1.0.31's names.

    Arrays under timm's names pass untouched. Names that the family doesn't know are left as they
    are. What only serves other programs is dropped: a decoder, derived buffers, batch norm's count
    of batches. The family's docstring says which. Batch norm's statistics have PyTorch's names
    before the family sees them.

    Args:
        family: the model's ``weight_names``.
        arrays: by name; wrappers and "module." are removed already.
        layout: of the Linear weights: "torch": [out, in], "paddle": [in, out], "jax": Flax's
            kernels.
        wanted: the model's own names, which decide where a file may be meant in two ways.

    Returns:
        arrays in the same layout; "jax" becomes "torch".

    Raises:
        InputError: two arrays come to the same name.
    """
    arrays = transformers.timm_names(rename(arrays, _BATCH_NORM))
    return arrays if family is None else family.timm_names(arrays, layout, wanted)


def differences(
    family: ModuleType | None, arrays: Arrays, state: dict[str, paddle.Tensor]
) -> dict[str, Any]:
    """Returns MODEL's keys, with the file's values, that the names tell to be otherwise in the file
    than in the model.

    Args:
        family: the model's ``weight_names``.
        arrays, state: the file's and the model's, both by timm's names.
    """
    computes = getattr(family, "computes", None)
    if computes is None:
        return {}
    ours = computes(state)
    return {
        key: value
        for key, value in computes(arrays).items()
        if key not in ours or ours[key] != value
    }


def switches(family: ModuleType | None, arrays: Arrays) -> dict[str, Any]:
    """Returns MODEL's keys that a file's own names tell, and that need no other tensors.

    Args:
        family: the model's ``weight_names``.
        arrays: by the file's names.
    """
    return family.switches(arrays) if family and has_switches(family) else {}


def unread_classifier(arrays: Collection[str]) -> str:
    """Returns why a file's classifier isn't read, in words; "" if it is read, or there is none.

    Args:
        arrays: the file's names, untranslated.
    """
    if any(re.match(r"(opt/target/)?pre_logits\b", name) for name in arrays):
        return "its classifier reads a layer pre_logits, which no model here has"
    return ""


def has_switches(family: ModuleType | None) -> bool:
    """Returns whether a file's names can tell ``switches`` of models of this family."""
    return hasattr(family, "switches")


def unstored_arrays(
    family: ModuleType | None, arrays: Arrays, state: dict[str, paddle.Tensor]
) -> Arrays:
    """Returns arrays, by timm's names, that the file's toolkit computes instead of storing, for the
    model's size.

    Args:
        family: the model's ``weight_names``.
        arrays: by the file's names.
        state: the model's, by timm's names.
    """
    return (
        family.unstored_arrays(arrays, state)
        if family and hasattr(family, "unstored_arrays")
        else {}
    )


def repeated_names(family: ModuleType | None, names: Collection[str]) -> dict[str, str]:
    """Returns {timm's other name: the model's} of tensors that timm's files hold more than once.

    Args:
        family: the model's ``weight_names``.
        names: the model's, by timm's names.
    """
    return family.repeated_names(names) if family and hasattr(family, "repeated_names") else {}


def google_names(model: Target, arrays: Arrays) -> Arrays:
    """Returns a model's arrays (timm's names, torch's layout) as Google's .npz files have them.

    Raises:
        InputError: it is neither a plain ViT nor an MLP-Mixer.
    """
    if model.weight_names is vit:
        return vit.google_names(arrays, model.blocks[0].attn.num_heads)
    return mixer.google_names(arrays)
