"""Records what the authors' own code computes with the formula's weights; needs torch.

The code is a checkout of the authors' repository, whose folder comes first in PYTHONPATH.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import nn

from golden.record import with_formula

FOLDER = Path(__file__).parent


class DropPath(nn.Identity):
    """timm's ``DropPath`` in evaluation."""

    def __init__(self, drop_prob: float = 0.0) -> None:
        super().__init__()


def stand_in_for_timm() -> None:
    """Adds modules by the names that timm had in 2021, with what models need in evaluation."""
    layers = {
        "DropPath": DropPath,
        "trunc_normal_": nn.init.trunc_normal_,
        "to_2tuple": lambda value: value if isinstance(value, tuple) else (value, value),
    }
    contents = {
        "timm": {},
        "timm.models": {},
        "timm.models.layers": layers,
        "timm.models.helpers": {"load_pretrained": None},
        "timm.models.registry": {"register_model": lambda function: function},
        "timm.models.vision_transformer": {"_cfg": dict},
        "timm.data": {"IMAGENET_DEFAULT_MEAN": None, "IMAGENET_DEFAULT_STD": None},
    }
    for name, members in contents.items():
        module = ModuleType(name)
        module.__dict__.update(members)
        sys.modules[name] = module


def record(name: str, model: nn.Module, image_size: tuple[int, int], array: Callable) -> None:
    """Writes NAME.npz: logits of two images, and the gradients of sum(logits * array("loss")) by
    parameter, as grad/NAME. All is computed in float64.
    """
    images = torch.from_numpy(array("images", (2, 3, *image_size)))
    model = with_formula(model, array).double()
    logits = model(images.double())
    (logits * torch.from_numpy(array("loss", tuple(logits.shape)))).sum().backward()
    arrays = {"logits": logits}
    for key, parameter in model.named_parameters():
        if parameter.grad is not None:
            arrays[f"grad/{key}"] = parameter.grad
    np.savez_compressed(
        FOLDER / f"{name}.npz",
        **{key: tensor.detach().float().numpy() for key, tensor in arrays.items()},
    )
