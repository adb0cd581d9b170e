"""Reduced ConvNeXts; run with torch and timm it records them: PYTHONPATH=tests python -m
golden.convnext
"""

SMALL = {"depths": (1, 2, 1, 1), "dims": (4, 8, 12, 16), "num_classes": 5}
CASES = {
    "convnext": SMALL | {"ls_init_value": 0.1},
    "convnext_no_scale": SMALL | {"ls_init_value": None, "depths": (1, 1, 4, 2)},
    "convnext_tiered": SMALL
    | {
        "ls_init_value": 0.1,
        "conv_mlp": True,
        "stem_type": "overlap_tiered",
        "dims": (22, 8, 8, 16),
    },
    "convnext_v2": SMALL | {"ls_init_value": None, "use_grn": True},
    "convnext_v2_conv": SMALL
    | {
        "ls_init_value": None,
        "use_grn": True,
        "conv_mlp": True,
        "stem_type": "overlap",
        "dims": (8, 12, 16, 16),
    },
    "convnext_first": SMALL | {"ls_init_value": 0.1, "head_norm_first": True},
    "convnext_hidden": SMALL | {"ls_init_value": 0.1, "norm_eps": 1e-3, "head_hidden_size": 12},
}
SIZES = dict.fromkeys(CASES, (64, 64))
# pixels are left over at each downsampling
SIZES |= {"convnext_no_scale": (59, 72), "convnext_v2_conv": (59, 72)}
WITH_GRADIENTS = ("convnext", "convnext_v2")

if __name__ == "__main__":
    from timm.models.convnext import ConvNeXt

    from golden.convolutions import array
    from golden.record import record

    for name, sizes in CASES.items():
        record(name, ConvNeXt(**sizes), SIZES[name], gradients=name in WITH_GRADIENTS, array=array)
