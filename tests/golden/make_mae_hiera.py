"""Writes mae_hiera.npz beside this file: losses and gradients of transformers'
``HieraForPreTraining`` with given noise (made with transformers 5.24.0, torch 2.13.0).

PYTHONPATH=tests python tests/golden/make_mae_hiera.py

Weights and images are those of ``trained.array`` by the names in the state of the model. A case's
arrays are named CASE/loss, CASE/mask, CASE/noise and CASE/grad/NAME. They are computed in float64,
so that the rounding is ours alone. Norms over fewer than eight channels would enlarge it: with four,
torch's own gradients in float32 differ by up to 1.2e-5 of their size, with eight by 5.5e-6.
"""

import sys
import types
from pathlib import Path

import numpy as np

from golden import trained

SIZES = {
    "embed_dim": 8,
    "depths": [1, 2, 1, 1],
    "decoder_hidden_size": 12,
    "decoder_depth": 1,
    "decoder_num_heads": 3,
}
# The authors pre-train with two poolings of three.
CASES = {
    "normalised": {"image_size": [64, 96], "num_query_pool": 2, "normalize_pixel_loss": True},
    "pixels": {
        "image_size": [96, 64],
        "num_query_pool": 2,
        "normalize_pixel_loss": False,
        "num_channels": 1,
        "mask_ratio": 0.4,
    },
    "three_poolings": {
        "image_size": [64, 96],
        "num_query_pool": 3,
        "normalize_pixel_loss": True,
        "num_channels": 1,
        "mask_ratio": 0.4,
    },
}


def array(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns ``trained.array``; weights of norms are about 0.9, positions about 1."""
    values = trained.array(name, shape)
    if len(shape) == 1 and name.endswith("weight"):
        values = values + 0.6
    if name.endswith("position_embeddings"):
        values = values / values.std()
    return np.asarray(values, np.float32)


if __name__ == "__main__":
    # torchvision's operators don't load beside a CPU torch.
    for module in ("_meta_registrations", "_autograd_registrations"):
        sys.modules[f"torchvision.{module}"] = types.ModuleType(module)
    import torch
    import transformers as hf

    golden = {}
    for case, options in CASES.items():
        config = hf.HieraConfig(**SIZES, **options)
        model = hf.HieraForPreTraining(config).double().eval()
        for name, parameter in model.named_parameters():
            parameter.data = torch.from_numpy(array(name, tuple(parameter.shape))).double()
        height, width = config.image_size
        images = array("images", (2, config.num_channels, height, width))
        units = height // 32 * (width // 32)
        noise = np.random.RandomState(0).random_sample((2, units))
        outputs = model(torch.from_numpy(images).double(), noise=torch.from_numpy(noise))
        outputs.loss.backward()
        golden[f"{case}/loss"] = outputs.loss.detach().numpy()
        golden[f"{case}/mask"] = outputs.bool_masked_pos.numpy()
        golden[f"{case}/noise"] = noise
        for name, parameter in model.named_parameters():
            golden[f"{case}/grad/{name}"] = parameter.grad.float().numpy()
    np.savez_compressed(Path(__file__).with_name("mae_hiera.npz"), **golden)
