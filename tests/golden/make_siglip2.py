"""Writes text/siglip2_naflex/ and siglip2_naflex.npz beside this file: a small SigLIP 2 of
transformers 5.24, and its answers to images of three ratios and to texts.

python tests/golden/make_siglip2.py     # with torch and transformers

Its tokenizer is the one in text/siglip2/. transformers' SiglipModel has images of one size, and
Siglip2Model has those of the NaFlex checkpoints.
"""

import json
import sys
import types
from pathlib import Path

import numpy as np
import torch

for name in ("_meta_registrations", "_autograd_registrations"):
    sys.modules[f"torchvision.{name}"] = types.ModuleType(name)

import transformers  # noqa: E402

FOLDER = Path(__file__).parent
PATCH = 4
LENGTH = 24
GRIDS = [(4, 6), (3, 5), (7, 1)]


def model() -> transformers.Siglip2Model:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    config = transformers.Siglip2Config(
        text_config={"vocab_size": 1601, "max_position_embeddings": 16, "hidden_size": 32}
        | {"projection_size": 32}
        | sizes,
        vision_config={"hidden_size": 32, "patch_size": PATCH, "num_patches": 16} | sizes,
    )
    made = transformers.Siglip2Model(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_factor = parameter.ndim == 1 and name.endswith("weight")
            parameter.copy_(1 + 0.2 * noise if is_factor else 0.15 * noise)
        made.logit_scale.fill_(2.0)
        made.logit_bias.fill_(-3.0)
    return made


if __name__ == "__main__":
    made = model()
    made.save_pretrained(FOLDER / "text" / "siglip2_naflex")
    processor = {"image_processor_type": "Siglip2ImageProcessor", "max_num_patches": LENGTH}
    processor |= {"patch_size": PATCH, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    processor |= {"resample": 2, "rescale_factor": 1 / 255, "do_normalize": True}
    file = FOLDER / "text" / "siglip2_naflex" / "preprocessor_config.json"
    file.write_text(json.dumps(processor, indent=1) + "\n")
    rng = np.random.default_rng(0)
    patches = rng.standard_normal((len(GRIDS), LENGTH, 3 * PATCH**2)).astype(np.float32)
    mask = np.zeros((len(GRIDS), LENGTH), np.int64)
    for row, (height, width) in enumerate(GRIDS):
        mask[row, : height * width] = 1
    with np.load(FOLDER / "text" / "answers.npz") as answers:
        tokens = answers["siglip2/tokens"][:20].astype(np.int64)
    with torch.no_grad():
        found = made(
            input_ids=torch.tensor(tokens),
            pixel_values=torch.tensor(patches),
            pixel_attention_mask=torch.tensor(mask),
            spatial_shapes=torch.tensor(GRIDS),
        )
    np.savez_compressed(
        FOLDER / "siglip2_naflex.npz",
        patches=patches,
        grids=np.array(GRIDS, np.int32),
        logits=found.logits_per_image.numpy(),
        images=found.image_embeds.numpy(),
    )
