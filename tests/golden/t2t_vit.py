"""Reduced T2T-ViTs; run with torch and a checkout of yitu-opensource/T2T-ViT it records them (the
files: 0f63dc9, torch 2.13.0): PYTHONPATH=CHECKOUT:tests python -P -m golden.t2t_vit
"""

from golden.trained import array

SMALL = {
    "embed_dim": 24,
    "depth": 2,
    "num_heads": 3,
    "mlp_ratio": 2.0,
    "num_classes": 5,
    "token_dim": 8,
}
CASES = {
    "t2t_vit": SMALL | {"tokens_type": "performer"},
    "t2t_vit_t": SMALL | {"tokens_type": "transformer", "qkv_bias": True},
}
SIZE = 48


if __name__ == "__main__":
    from golden.authors import record, stand_in_for_timm

    stand_in_for_timm()
    from models.t2t_vit import T2T_ViT

    for name, sizes in CASES.items():
        record(name, T2T_ViT(SIZE, **sizes), (SIZE, SIZE), array)
