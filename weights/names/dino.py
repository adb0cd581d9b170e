"""The names of tensors in files of a training by DINO, iBOT or DINOv2, with student and teacher."""

from collections.abc import Collection
from typing import Any

import numpy as np

from weights.names.encoders import split, with_timm_names
from weights.names.rules import ENCODER_PREFIX, Arrays, rename

_RULES = (
    # DistributedDataParallel's prefix, within the student's
    (r"^(student|teacher)\.module\.", r"\1."),
    (r"^(student|teacher)\.backbone\.", r"\1.encoder."),
    # iBOT
    (r"^(student|teacher)\.encoder\.masked_embed$", r"\1.encoder.mask_token"),
    (r"^ibot_loss\.center$", "center"),
    (r"^ibot_loss\.center2$", "patch_center"),
    # DINOv2
    (r"^(student|teacher)\.dino_head\.", r"\1.head."),
    (r"^(student|teacher)\.ibot_head\.", r"\1.patch_head."),
    (r"^ibot_patch_loss\.center$", "patch_center"),
    # DINO and DINOv2
    (r"^dino_loss\.center$", "center"),
    # The teacher sees all patches.
    (r"^teacher\.encoder\.mask_token$", None),
    (r"^student\.encoder\.mask_token$", "mask_token"),
    (r"^student\.", ""),
)
# By name, the shape of what the authors' files have with further axes.
_SHAPES = {"center": [-1], "patch_center": [-1], "mask_token": [1, 1, -1]}
_TEACHER = "teacher."


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of ``models.pretraining.dino.Dino``.

    Sources: the checkpoints of facebookresearch/dino, bytedance/ibot and facebookresearch/dinov2.

    iBOT's head for patches shares the MLP with the head for images, and has a last layer of its own.
    Here it is a head with a copy of that MLP, which gives the same logits.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    arrays = rename(arrays, _RULES)
    arrays = {
        name: array.reshape(_SHAPES[name]) if name in _SHAPES else array
        for name, array in arrays.items()
    }
    for prefix in ("", _TEACHER):
        arrays = _with_patch_head(arrays, prefix, wanted)
    for prefix in (ENCODER_PREFIX, _TEACHER + ENCODER_PREFIX):
        of_encoder, others = split(arrays, prefix)
        arrays = with_timm_names(of_encoder, prefix, layout, wanted) | others
    return arrays


def _with_patch_head(arrays: Arrays, prefix: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays with iBOT's last layer for patches as a head of its own.

    Where the network has one head, the layer is left out if it is the one for images, which iBOT's
    files with a shared head hold twice.

    Args:
        prefix: of the names of the student or the teacher.
    """
    own_layer, others = split(arrays, f"{prefix}head.last_layer2.")
    if not own_layer:
        return arrays
    if any(name.startswith(f"{prefix}patch_head.") for name in wanted):
        mlp, _ = split(others, f"{prefix}head.mlp.")
        others |= {f"{prefix}patch_head.mlp.{name}": array for name, array in mlp.items()}
        return others | {
            f"{prefix}patch_head.last_layer.{name}": array for name, array in own_layer.items()
        }
    layer, _ = split(arrays, f"{prefix}head.last_layer.")
    is_shared = layer.keys() == own_layer.keys() and all(
        _are_equal(array, layer[name]) for name, array in own_layer.items()
    )
    return others if is_shared else arrays


def _are_equal(one: Any, other: Any) -> bool:
    # Shapes are compared first: they are known without reading the values.
    return one.shape == other.shape and np.array_equal(np.asarray(one), np.asarray(other))
