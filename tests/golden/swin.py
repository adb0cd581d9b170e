"""Reduced Swin Transformers; run with torch and timm it records them: PYTHONPATH=tests python -m
golden.swin
"""

SMALL = {
    "img_size": 32,
    "embed_dim": 8,
    "depths": (2, 2, 1),
    "num_heads": (1, 2, 4),
    "num_classes": 7,
}
CASES = {
    # maps of 8, 4 and 2: two windows, shifted; one; a smaller one
    "swin": SMALL | {"window_size": 4},
    # 8 and 4 are padded, and shifted
    "swin_padded": SMALL | {"window_size": 3, "mlp_ratio": (3.0, 2.0, 1.0)},
    # 9 x 5, 5 x 3 (one shift), 3 x 2
    "swin_odd": SMALL | {"img_size": (36, 20), "window_size": 4, "qkv_bias": False},
    "swin_windows": SMALL | {"window_size": (4, 2, 1)},  # a size for each stage
}

if __name__ == "__main__":
    from timm.models.swin_transformer import SwinTransformer

    from golden.record import record

    for name, sizes in CASES.items():
        record(
            name,
            SwinTransformer(**sizes),
            sizes["img_size"],
            gradients=name not in ("swin", "swin_windows"),
        )
