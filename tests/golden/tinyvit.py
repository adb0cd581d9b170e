"""Reduced TinyViTs; run with torch and timm it records them: PYTHONPATH=tests python -m
golden.tinyvit
"""

import numpy as np

from golden import trained

SMALL = {
    "embed_dims": (4, 8, 12, 16),
    "depths": (1, 2, 1, 1),
    "num_heads": (1, 2, 3, 4),
    "num_classes": 5,
}
CASES = {
    "tinyvit": SMALL | {"window_sizes": (7, 4, 4, 2)},  # maps of 8, 4 and 2: four windows, one, one
    # 9 x 5, 5 x 3, 3 x 2
    "tinyvit_padded": SMALL | {"window_sizes": (7, 3, 4, 2), "mlp_ratio": 2.0},
}
SIZES = {"tinyvit": (64, 64), "tinyvit_padded": (67, 40)}


def array(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns ``trained.array``; weights of norms are about 0.9, else ten convolutions would lose
    the images.
    """
    return np.asarray(
        trained.array(name, shape) + 0.6 * (len(shape) == 1 and name.endswith("weight")), np.float32
    )


if __name__ == "__main__":
    from timm.models.tiny_vit import TinyVit

    from golden.record import FOLDER, record

    for name, sizes in CASES.items():
        record(name, TinyVit(**sizes), SIZES[name], gradients=name == "tinyvit_padded", array=array)
    # timm's own gradients are 2e-5 of their range from those in float64: a test of their own has a
    # wider tolerance.
    file = FOLDER / "tinyvit_padded.npz"
    np.savez_compressed(
        file, **{key.replace("grad/", "rounded/"): value for key, value in np.load(file).items()}
    )
