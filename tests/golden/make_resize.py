"""Cases of resizing; run with torch and timm it writes resize.npz (made with timm 1.0.31, torch
2.13.0).

PYTHONPATH=.:tests python tests/golden/make_resize.py
"""

# Position embeddings [1, prefix + h * w, 3]: (prefix, old grid, new grid).
POS_EMBEDS = [
    (0, (4, 4), (7, 7)),
    (1, (7, 7), (4, 4)),
    (2, (14, 14), (24, 24)),
    (1, (24, 24), (14, 14)),
    (2, (3, 3), (3, 3)),
    (1, (1, 1), (3, 3)),
    (1, (6, 6), (4, 9)),
    (2, (3, 8), (6, 4)),
    (0, (2, 6), (4, 3)),
]
# Relative position tables [(2h - 1)(2w - 1) + extra, 2]: (extra, old window, new window).
TABLES = [
    (0, (7, 7), (12, 12)),
    (0, (12, 12), (7, 7)),
    (3, (14, 14), (24, 24)),
    (3, (3, 3), (2, 2)),
    (0, (4, 4), (4, 4)),
    (0, (1, 1), (3, 3)),
    (0, (4, 4), (6, 3)),
    (3, (3, 5), (4, 2)),
    (0, (2, 6), (2, 8)),
]
# Patch kernels [2, 3, h, w]: (old size, new size).
KERNELS = [
    ((16, 16), (8, 8)),
    ((16, 16), (32, 32)),
    ((16, 16), (14, 14)),
    ((4, 4), (4, 4)),
    ((4, 8), (6, 5)),
]
# First convolutions [2, 3, 4, 4] and their input channels.
CHANNELS = [1, 2, 3, 4, 7]


def name(*case: object) -> str:
    """Returns the case's name in resize.npz."""
    return " ".join(map(str, case))


if __name__ == "__main__":
    import math
    from pathlib import Path

    import numpy as np
    import torch
    from timm.layers import resample_abs_pos_embed, resample_patch_embed, resize_rel_pos_bias_table
    from timm.models._manipulate import adapt_input_conv

    from golden.formula import array

    def tensor(*shape: int) -> torch.Tensor:
        return torch.from_numpy(array("resize", shape))

    arrays = {}
    for prefix, old, new in POS_EMBEDS:
        resized = resample_abs_pos_embed(tensor(1, prefix + math.prod(old), 3), new, old, prefix)
        arrays[name("pos_embed", prefix, old, new)] = resized
    for extra, old, new in TABLES:
        found, wanted = ((2 * h - 1) * (2 * w - 1) + extra for h, w in (old, new))
        arrays[name("table", extra, old, new)] = resize_rel_pos_bias_table(
            tensor(found, 2), new, (wanted, 2), old
        )
    for old, new in KERNELS:
        arrays[name("kernel", old, new)] = resample_patch_embed(tensor(2, 3, *old), new)
    for count in CHANNELS:
        arrays[name("channels", count)] = adapt_input_conv(count, tensor(2, 3, 4, 4))
    np.savez_compressed(Path(__file__).with_name("resize.npz"), **arrays)
