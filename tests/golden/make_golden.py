"""Writes vit.npz beside this file from timm's own model; needs torch and timm (made with timm 1.0.31, torch 2.13.0).

PYTHONPATH=tests python tests/golden/make_golden.py
"""

from pathlib import Path

import numpy as np
import timm
import torch

from golden.formula import VIT, array


def main() -> None:
    model = timm.models.VisionTransformer(**VIT).eval()
    state = {name: torch.from_numpy(array(name, tuple(t.shape))) for name, t in model.state_dict().items()}
    model.load_state_dict(state)
    images = torch.from_numpy(array("images", (2, 3, VIT["img_size"], VIT["img_size"])))
    logits = model(images)
    (logits * torch.from_numpy(array("loss", tuple(logits.shape)))).sum().backward()
    np.savez(
        Path(__file__).with_name("vit.npz"),
        logits=logits.detach().numpy(),
        features=model.forward_features(images).detach().numpy(),
        **{f"grad/{name}": parameter.grad.numpy() for name, parameter in model.named_parameters()},
    )


if __name__ == "__main__":
    main()
