"""Reduced CaiTs; run with torch and timm it records them: PYTHONPATH=tests python -m golden.cait"""

SMALL = {
    "img_size": 16,
    "patch_size": 4,
    "embed_dim": 16,
    "depth": 3,
    "num_heads": 4,
    "num_classes": 7,
}
CASES = {
    "cait": SMALL | {"init_values": 0.1},
    "cait_avg": SMALL
    | {
        "img_size": (12, 20),
        "depth": 2,
        "depth_token_only": 1,
        "mlp_ratio_token_only": 2.0,
        "qkv_bias": False,
    }
    | {"global_pool": "avg"},
}

if __name__ == "__main__":
    from timm.models.cait import Cait

    from golden.make_names_vit import values
    from golden.record import record

    for name, sizes in CASES.items():
        record(name, Cait(**sizes), sizes["img_size"], gradients=True, array=values)
