"""Reduced BEiTs; run with torch and timm it records them: PYTHONPATH=tests python -m golden.beit"""

SMALL = {
    "img_size": 16,
    "patch_size": 4,
    "embed_dim": 24,
    "depth": 2,
    "num_heads": 3,
    "num_classes": 7,
}
RELATIVE = {"use_abs_pos_emb": False, "use_rel_pos_bias": True}
CASES = {
    "beit": SMALL | RELATIVE | {"init_values": 0.1},
    "beit_shared": SMALL | RELATIVE | {"use_shared_rel_pos_bias": True, "img_size": (12, 20)},
    "beit_absolute": SMALL
    | {"qkv_bias": False, "global_pool": "token", "mlp_ratio": 2.0, "init_values": 0.1},
    "beit_all_but_tables": SMALL | {"use_shared_rel_pos_bias": True, "fc_norm": False, "depth": 1},
}

if __name__ == "__main__":
    from timm.models.beit import Beit

    from golden.record import record

    for name, sizes in CASES.items():
        sizes = {"use_fc_norm" if key == "fc_norm" else key: value for key, value in sizes.items()}
        record(name, Beit(**sizes), sizes["img_size"], gradients=name in ("beit", "beit_shared"))
