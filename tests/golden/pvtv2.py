"""Reduced PVTv2s; run with torch and timm it records them: PYTHONPATH=tests python -m golden.pvtv2"""

SMALL = {
    "depths": (2, 1, 1, 1),
    "embed_dims": (4, 8, 12, 16),
    "num_heads": (1, 2, 3, 4),
    "num_classes": 5,
}
CASES = {
    "pvtv2": SMALL,
    "pvtv2_plain": SMALL | {"sr_ratios": (5, 3, 1, 2), "mlp_ratios": 3, "qkv_bias": False},
    "pvtv2_linear": SMALL | {"linear": True},
}
# The second leaves pixels over at each downsampling and tokens over at each reduction; the third
# has maps of more and of fewer than 7 x 7 tokens.
SIZES = {"pvtv2": (64, 64), "pvtv2_plain": (59, 74), "pvtv2_linear": (50, 64)}

if __name__ == "__main__":
    from timm.models.pvt_v2 import PyramidVisionTransformerV2

    from golden.make_names_vit import values
    from golden.record import record

    for name, sizes in CASES.items():
        record(
            name,
            PyramidVisionTransformerV2(**sizes),
            SIZES[name],
            gradients=name != "pvtv2_plain",
            array=values,
        )
