"""Writes the .npz files of formula.py from timm's own code; needs torch and timm (made with timm 1.0.31, torch 2.13.0).

PYTHONPATH=tests python tests/golden/make_golden.py
"""

from pathlib import Path

import numpy as np
import timm
import torch
from timm.layers import resample_abs_pos_embed
from timm.models.deit import VisionTransformerDistilled

from golden.formula import RESIZES, VARIANTS, VIT, array

FOLDER = Path(__file__).parent


def write_model(name: str) -> None:
    distilled = name == "vit_distilled"
    kind = VisionTransformerDistilled if distilled else timm.models.VisionTransformer
    model = kind(**{**VIT, **VARIANTS[name]}).eval()
    state = {key: torch.from_numpy(array(key, tuple(t.shape))) for key, t in model.state_dict().items()}
    model.load_state_dict(state)
    images = torch.from_numpy(array("images", (2, 3, VIT["img_size"], VIT["img_size"])))
    logits = model(images)
    (logits * torch.from_numpy(array("loss", tuple(logits.shape)))).sum().backward()
    arrays = {f"grad/{key}": parameter.grad for key, parameter in model.named_parameters()}
    arrays |= {"logits": logits.detach(), "features": model.forward_features(images).detach()}
    if distilled:
        model.set_distilled_training()
        arrays["train_logits"], arrays["train_logits_dist"] = (out.detach() for out in model.train()(images))
    np.savez(FOLDER / f"{name}.npz", **{key: tensor.numpy() for key, tensor in arrays.items()})


def write_resizes() -> None:
    arrays = {}
    for prefix, old, new in RESIZES:
        pos_embed = torch.from_numpy(array("pos_embed", (1, prefix + old * old, 3)))
        resized = resample_abs_pos_embed(pos_embed, [new, new], num_prefix_tokens=prefix)
        arrays[f"{prefix} {old} {new}"] = resized.numpy()
    np.savez(FOLDER / "resize.npz", **arrays)


if __name__ == "__main__":
    for variant in VARIANTS:
        write_model(variant)
    write_resizes()
