"""Records what a PyTorch model gives with the formula's weights; needs torch (the files: timm 1.0.31, torch 2.13.0)."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from golden.formula import array

FOLDER = Path(__file__).parent


def with_formula(model: torch.nn.Module, array: Callable = array) -> torch.nn.Module:
    """Returns ``model`` in evaluation mode, every tensor of its state made by ``array`` from name and shape."""
    state = {name: torch.from_numpy(array(name, tuple(t.shape))).to(t.dtype) for name, t in model.state_dict().items()}
    model.load_state_dict(state)
    return model.eval()


def record(
    name: str,
    model: torch.nn.Module,
    image_size: int | tuple[int, int],
    channels: int = 3,
    gradients: bool = False,
    extra: dict[str, torch.Tensor] | None = None,
    array: Callable = array,
) -> None:
    """Writes NAME.npz: logits and features (``forward_features``) of two images, with ``gradients`` those of
    sum(logits * array("loss")) by parameter, as grad/NAME, and what else is given.
    """
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    images = torch.from_numpy(array("images", (2, channels, height, width)))
    model = with_formula(model, array)
    logits = model(images)
    arrays = {"logits": logits, "features": model.forward_features(images)} | (extra or {})
    if gradients:
        (logits * torch.from_numpy(array("loss", tuple(logits.shape)))).sum().backward()
        arrays |= {f"grad/{key}": parameter.grad for key, parameter in model.named_parameters()}
    np.savez_compressed(FOLDER / f"{name}.npz", **{key: tensor.detach().numpy() for key, tensor in arrays.items()})
