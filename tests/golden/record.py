"""Records what a PyTorch model gives with the formula's weights; needs torch (the files: timm
1.0.31, torch 2.13.0).
"""

import inspect
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from golden.formula import array, places

FOLDER = Path(__file__).parent


def with_formula(model: torch.nn.Module, array: Callable = array) -> torch.nn.Module:
    """Returns ``model`` in evaluation mode, every tensor of its state made by ``array`` from name
    and shape.
    """
    state = {
        name: torch.from_numpy(array(name, tuple(t.shape))).to(t.dtype)
        for name, t in model.state_dict().items()
    }
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
    double: bool = False,
) -> None:
    """Writes NAME.npz: logits and features (``forward_features``) of two images, with ``gradients``
    those of sum(logits * array("loss")) by parameter, as grad/NAME, and what else is given. Writes
    into intermediates.npz what ``intermediates`` keeps. With ``double`` all is computed in float64.
    """
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    images = torch.from_numpy(array("images", (2, channels, height, width)))
    model = with_formula(model, array)
    loss = torch.from_numpy(array("loss", (2, model(images).shape[1])))
    if double:
        model, images, loss = model.double(), images.double(), loss.double()
    logits = model(images)
    arrays = {"logits": logits, "features": model.forward_features(images)} | (extra or {})
    if gradients:
        (logits * loss).sum().backward()
        arrays |= {f"grad/{key}": parameter.grad for key, parameter in model.named_parameters()}
    np.savez_compressed(
        FOLDER / f"{name}.npz",
        **{key: tensor.detach().float().numpy() for key, tensor in arrays.items()},
    )
    file = FOLDER / "intermediates.npz"
    stored = dict(np.load(file)) if file.exists() else {}
    kept = {key: value for key, value in stored.items() if key.partition("/")[0] != name}
    kept |= {f"{name}/{key}": array for key, array in intermediates(model, images).items()}
    np.savez_compressed(file, **dict(sorted(kept.items())))


@torch.no_grad()
def intermediates(model: torch.nn.Module, images: torch.Tensor) -> dict[str, np.ndarray]:
    """Returns of ``forward_intermediates`` ``shapes`` [n, 4] and ``places`` of each: ``plain``,
    ``normed``, and ``prefix`` where there are prefix tokens; ``early``: of the features that stop
    at the second; ``info``: channels and reduction of each [n, 2].
    """
    plain = model.forward_intermediates(images, intermediates_only=True)
    normed = model.forward_intermediates(images, norm=True, intermediates_only=True)
    early, _ = model.forward_intermediates(images, [min(1, len(plain) - 1)], stop_early=True)
    found = {"shapes": [one.shape for one in plain], "early": [places(early.numpy())]}
    found |= {
        "plain": [places(one.numpy()) for one in plain],
        "normed": [places(one.numpy()) for one in normed],
    }
    found["info"] = [(one["num_chs"], one["reduction"]) for one in model.feature_info]
    takes = inspect.signature(model.forward_intermediates).parameters
    if getattr(model, "num_prefix_tokens", 0) and "return_prefix_tokens" in takes:
        pairs = model.forward_intermediates(
            images, return_prefix_tokens=True, intermediates_only=True
        )
        found["prefix"] = [places(prefix.numpy()) for _, prefix in pairs]
    return {key: np.array(values) for key, values in found.items()}
