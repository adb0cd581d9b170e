"""Reduced ConvNeXts; run with torch and timm it records them: PYTHONPATH=tests python -m golden.convnext"""

SMALL = {"depths": (1, 2, 1, 1), "dims": (4, 8, 12, 16), "num_classes": 5}
CASES = {
    "convnext": SMALL | {"ls_init_value": 0.1},
    "convnext_no_scale": SMALL | {"ls_init_value": None, "depths": (1, 1, 4, 2)},
}
SIZES = {"convnext": (64, 64), "convnext_no_scale": (59, 72)}  # the second leaves pixels over at each downsampling

if __name__ == "__main__":
    from timm.models.convnext import ConvNeXt

    from golden.convolutions import array
    from golden.record import record

    for name, sizes in CASES.items():
        record(name, ConvNeXt(**sizes), SIZES[name], gradients=name == "convnext", array=array)
