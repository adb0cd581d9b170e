"""Writes naflex_data.npz: what timm 1.0.31 makes of images for NaFlex.

PYTHONPATH=tests python tests/golden/make_naflex_data.py     # with torch, torchvision and timm

``sizes`` [n, 6]: height, width, patch_size, max_seq_len of ``get_image_size_for_seq``, and its
target (height, width). ``patches_<n>``, ``coord_<n>`` and ``valid_<n>``: the photograph of
golden/formula.py at the sizes of PICTURES, after ``ResizeToSequence``, ``Patchify`` and
``NaFlexCollator`` with LENGTHS[n].
"""

from pathlib import Path

import numpy as np

from golden.formula import photograph

# (height, width) of pictures, cut from the photograph's upper left.
PICTURES = ((188, 250), (150, 30), (20, 200), (77, 77), (3, 5))
LENGTHS = (16, 25, 60)
PATCH = 8


def pictures():
    """Returns the pictures, as Pillow's."""
    return [photograph().crop((0, 0, width, height)) for height, width in PICTURES]


def sizes():
    """Returns (height, width, patch_size, max_seq_len) of images of all kinds."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(300):
        height, width = np.exp(rng.uniform(0, np.log(6000), 2)).astype(int) + 1
        rows.append((height, width, rng.choice([4, 8, 14, 16, 32]), rng.integers(1, 1025)))
    rows += [(1, 1, 16, 1024), (384, 384, 16, 576), (1, 5000, 16, 1), (5000, 1, 16, 3)]
    rows += [(375, 500, 16, length) for length in (128, 256, 576, 784, 1024)]
    return [tuple(map(int, row)) for row in rows]


if __name__ == "__main__":
    from timm.data.naflex_dataset import NaFlexCollator
    from timm.data.naflex_transforms import Patchify, ResizeToSequence, get_image_size_for_seq

    arrays = {
        "sizes": [(*row, *get_image_size_for_seq(row[:2], row[2], row[3])[1]) for row in sizes()]
    }
    for number, length in enumerate(LENGTHS):
        resize = ResizeToSequence(PATCH, length)
        samples = [(Patchify(PATCH)(resize(picture)), 0) for picture in pictures()]
        batch, _ = NaFlexCollator(length)(samples)
        arrays[f"patches_{number}"] = (batch["patches"].numpy() * 255).round().astype(np.uint8)
        arrays[f"coord_{number}"] = batch["patch_coord"].numpy()
        arrays[f"valid_{number}"] = batch["patch_valid"].numpy()
    np.savez_compressed(Path(__file__).parent / "naflex_data.npz", **arrays)
