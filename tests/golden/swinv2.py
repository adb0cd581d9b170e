"""Reduced Swin Transformers V2; run with torch and timm it records them: PYTHONPATH=tests python -m
golden.swinv2
"""

import numpy as np

from golden import convolutions

SMALL = {
    "img_size": 32,
    "embed_dim": 8,
    "depths": (2, 2, 1),
    "num_heads": (1, 2, 4),
    "num_classes": 7,
    "window_size": 4,
}
CASES = {
    # Maps of 9 x 5 and 5 x 3: padded, and shifted; offsets are measured by smaller windows, and by
    # a window's own.
    "swinv2": SMALL
    | {
        "img_size": (36, 20),
        "depths": (2, 1),
        "num_heads": (1, 2),
        "pretrained_window_sizes": (3, 0),
    },
    # 8, 4 and 2: two windows, shifted; one; a smaller one
    "swinv2_plain": SMALL | {"qkv_bias": False},
}


def array(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns ``convolutions.array``; the logarithms of the cosines' factors are about that of 100,
    the largest.
    """
    return convolutions.array(name, shape) + np.float32(4.6 if name.endswith("logit_scale") else 0)


if __name__ == "__main__":
    from timm.models.swin_transformer_v2 import SwinTransformerV2

    from golden.record import record

    for name, sizes in CASES.items():
        record(
            name,
            SwinTransformerV2(**sizes),
            sizes["img_size"],
            gradients=name == "swinv2",
            array=array,
        )
