"""Reduced LeViTs; run with torch and timm it records them: PYTHONPATH=tests python -m golden.levit"""

SMALL = {
    "embed_dim": (16, 16, 24),
    "key_dim": 4,
    "num_heads": (2, 3, 2),
    "depth": (1, 1, 1),
    "num_classes": 5,
}
PLAIN = {
    "embed_dim": (8, 16),
    "key_dim": 8,
    "num_heads": (3, 1),
    "depth": (2, 1),
    "attn_ratio": 1,
    "mlp_ratio": 3,
}
EIGHT = {"act_layer": "silu", "stem_type": "s8", "depth": (1, 2, 1)}
CASES = {"levit": SMALL, "levit_plain": SMALL | PLAIN, "levit_s8": SMALL | EIGHT}
# The second leaves a row and a column over between its stages.
SIZES = {"levit": (64, 96), "levit_plain": (80, 48), "levit_s8": (40, 56)}

if __name__ == "__main__":
    from timm.models.levit import Levit, LevitDistilled

    from golden.convolutions import array
    from golden.record import record

    for name, sizes in CASES.items():
        model = (LevitDistilled if name == "levit" else Levit)(SIZES[name], **sizes)
        record(name, model, SIZES[name], gradients=name != "levit_s8", array=array)
