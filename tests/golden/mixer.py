"""Reduced MLP-Mixer, gMLP and ResMLP; PYTHONPATH=tests python -m golden.mixer (torch, timm) records"""

SMALL = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "num_blocks": 2, "num_classes": 7}
CASES = {
    "mixer": SMALL | {"mlp_ratio": (0.5, 3.0)},
    "mixer_wide": SMALL | {"img_size": (12, 20), "mlp_ratio": 2.0},
    "gmlp": SMALL | {"mlp_ratio": 3.0},
    "resmlp": SMALL | {"mlp_ratio": 2.0},
}

if __name__ == "__main__":
    from timm.layers import GatedMlp
    from timm.models import mlp_mixer

    from golden.record import record

    gated = {"block_layer": mlp_mixer.SpatialGatingBlock, "mlp_layer": GatedMlp}
    residual = {"block_layer": mlp_mixer.ResBlock, "norm_layer": mlp_mixer.Affine}
    for name, sizes in CASES.items():
        model = mlp_mixer.MlpMixer(**sizes, **{"gmlp": gated, "resmlp": residual}.get(name, {}))
        record(name, model, sizes["img_size"], gradients=name != "mixer_wide")
