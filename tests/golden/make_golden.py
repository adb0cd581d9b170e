"""Writes resize.npz from timm's own code; needs torch and timm (made with timm 1.0.31, torch 2.13.0).

PYTHONPATH=tests python tests/golden/make_golden.py
"""

from pathlib import Path

import numpy as np
import torch
from timm.layers import resample_abs_pos_embed

from golden.formula import RESIZES, array

FOLDER = Path(__file__).parent


def write_resizes() -> None:
    arrays = {}
    for prefix, old, new in RESIZES:
        pos_embed = torch.from_numpy(array("pos_embed", (1, prefix + old * old, 3)))
        resized = resample_abs_pos_embed(pos_embed, [new, new], num_prefix_tokens=prefix)
        arrays[f"{prefix} {old} {new}"] = resized.numpy()
    np.savez(FOLDER / "resize.npz", **arrays)


if __name__ == "__main__":
    write_resizes()
