"""Writes mae.npz beside this file: losses and gradients of transformers' ``ViTMAEForPreTraining``
with given noise (made with transformers 5.24.0, torch 2.13.0).

PYTHONPATH=tests python tests/golden/make_mae.py

Weights and images are those of ``positive`` by the names in the state of the model. A case's arrays
are named CASE/loss, CASE/mask, CASE/noise, CASE/grad/NAME and CASE/positions/NAME. A fresh model of
transformers 5.24.0 has positions of 0, so the script sets what ``initialize_weights`` means to set.
transformers takes squares alone, so its check is left out for the other images.
"""

import sys
import types
from pathlib import Path

import numpy as np
import torch

# torchvision's operators don't load beside a CPU torch
for name in ("_meta_registrations", "_autograd_registrations"):
    sys.modules[f"torchvision.{name}"] = types.ModuleType(name)
import transformers as hf  # noqa: E402
from transformers.models.vit_mae import modeling_vit_mae as module  # noqa: E402

from golden.make_names_vit import positive, values  # noqa: E402

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "patch_size": 4,
    "layer_norm_eps": 1e-6,
    "decoder_hidden_size": 24,
    "decoder_num_hidden_layers": 1,
    "decoder_num_attention_heads": 3,
    "decoder_intermediate_size": 96,
}
CASES = {
    "normalised": {"image_size": (16, 16), "norm_pix_loss": True},
    "pixels": {"image_size": (16, 16), "num_channels": 1, "mask_ratio": 0.6},
    "rectangle": {"image_size": (8, 32), "norm_pix_loss": True},
}


def positions(rows: int, columns: int, width: int) -> torch.Tensor:
    """Returns the positions of ``initialize_weights``, for any grid."""
    table = module.build_2d_sinusoidal_position_embedding(rows, columns, width, cls_token=True)
    return torch.cat([table[:, width // 2 :], table[:, : width // 2]], dim=1)[None]


class AnySize(hf.ViTMAEForPreTraining):
    """The model without the checks that images are squares."""

    def patchify(self, pixel_values: torch.Tensor, **_: object) -> torch.Tensor:
        return super().patchify(pixel_values, interpolate_pos_encoding=True)


def case(name: str, options: dict) -> dict[str, np.ndarray]:
    config = hf.ViTMAEConfig(**SIZES, **options)
    model = AnySize(config)
    height, width = config.image_size
    rows, columns = height // 4, width // 4
    state = {}
    for key, tensor in model.state_dict().items():
        if "pos" in key:
            state[key] = positions(rows, columns, tensor.shape[-1])
        else:
            state[key] = torch.from_numpy(positive(key, tensor.shape))
    if rows == columns:
        model.decoder.initialize_weights(rows * columns)
        expected = model.decoder.decoder_pos_embed
        assert torch.equal(state["decoder.decoder_pos_embed"], expected)
    model.load_state_dict(state)
    images = torch.from_numpy(values("images", (2, config.num_channels, height, width)))
    noise = np.random.RandomState(0).random_sample((2, rows * columns)).astype(np.float32)
    given = torch.from_numpy(noise)
    outputs = model(images, noise=given)
    outputs.loss.backward()
    arrays = {"loss": outputs.loss, "mask": outputs.mask, "noise": given}
    for key, parameter in model.named_parameters():
        if "pos" in key:
            arrays[f"positions/{key}"] = parameter
        else:
            arrays[f"grad/{key}"] = parameter.grad
    return {f"{name}/{key}": tensor.detach().numpy() for key, tensor in arrays.items()}


if __name__ == "__main__":
    golden = {}
    for name, options in CASES.items():
        golden |= case(name, options)
    np.savez_compressed(Path(__file__).with_name("mae.npz"), **golden)
