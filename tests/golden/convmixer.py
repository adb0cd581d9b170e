"""Reduced ConvMixers; run with torch and timm it records them: PYTHONPATH=tests python -m
golden.convmixer
"""

CASES = {
    "convmixer": {"dim": 16, "depth": 3, "kernel_size": 5, "patch_size": 4, "num_classes": 5},
    "convmixer_relu": {
        "dim": 12,
        "depth": 2,
        "kernel_size": 4,
        "patch_size": 3,
        "num_classes": 5,
        "act": "relu",
    },
}
# the second leaves pixels over; its kernel is even
SIZES = {"convmixer": (16, 16), "convmixer_relu": (20, 14)}

if __name__ == "__main__":
    from timm.models.convmixer import ConvMixer
    from torch import nn

    from golden.convolutions import array
    from golden.record import record

    for name, sizes in CASES.items():
        act = nn.ReLU if sizes.get("act") == "relu" else nn.GELU
        model = ConvMixer(
            **{key: value for key, value in sizes.items() if key != "act"}, act_layer=act
        )
        record(name, model, SIZES[name], gradients=name == "convmixer", array=array)
