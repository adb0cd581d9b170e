"""Reduced NaFlexViTs; run with torch and timm it records them: PYTHONPATH=tests python -m
golden.naflexvit
"""

import zlib

import numpy as np

SMALL = {
    "patch_size": 4,
    "embed_dim": 24,
    "depth": 2,
    "num_heads": 3,
    "num_classes": 7,
    "pos_embed_grid_size": (5, 5),
}
GAP = {"global_pool": "avg", "fc_norm": True, "reg_tokens": 4, "init_values": 0.1}
RADIO = {
    "class_token": True,
    "global_pool": "token",
    "final_norm": False,
    "reg_tokens": 2,
    "pos_embed_grid_size": (12, 12),
    "pos_embed_interp_mode": "bilinear",
    "pos_embed_ar_preserving": True,
    "pos_embed_antialias": False,
}
# One of each family of timm's names.
CASES = {
    "naflexvit": SMALL | GAP,
    "naflexvit_par": SMALL | GAP | {"pos_embed_ar_preserving": True},
    "naflexvit_parfac": SMALL | GAP | {"pos_embed_ar_preserving": True, "pos_embed": "factorized"},
    "naflexvit_map": SMALL | {"init_values": 0.1, "reg_tokens": 1},
    "naflexvit_so150m2": SMALL | GAP | {"reg_tokens": 1, "qkv_bias": False, "mlp_ratio": 2.6},
    "naflexvit_siglip": SMALL | {"act_layer": "gelu_tanh", "pos_embed_interp_mode": "bilinear"},
    "naflexvit_radio_v3": SMALL | RADIO | {"pos_embed_align_corners": True, "init_values": 0.1},
    "naflexvit_radio_v4": SMALL | RADIO,
}
# Rows and columns of the images of a batch. The grid of positions itself is one of them, others
# are larger and smaller, and the first one fills the batch's length.
GRIDS = ((3, 13), (5, 5), (1, 1), (9, 4), (2, 6), (1, 30))
LENGTH = 39
IMAGE = (16, 24)


def array(name, shape):
    """Returns random numbers, drawn by the name; around 1 for the weight of a norm.

    With ``golden.formula``'s waves the weights have rank 2, and the images of a batch are alike.
    """
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    values = rng.standard_normal(shape)
    if name not in ("images", "patches"):
        values = 0.3 * values + ("norm" in name and name.endswith("weight"))
    return values.astype(np.float32)


def our_names(case):
    """Returns a case's arguments by our names."""
    names = {
        "pos_embed_grid_size": "pos_grid",
        "pos_embed_ar_preserving": "pos_keep_ratio",
        "act_layer": "act",
    }
    ours = {names.get(name, name): value for name, value in case.items()}
    mode = ours.pop("pos_embed_interp_mode", "bicubic")
    antialiased = ours.pop("pos_embed_antialias", True)
    if ours.pop("pos_embed_align_corners", False):
        mode = "corners"
    elif mode == "bilinear" and antialiased:
        mode = "antialiased"
    return ours | {"pos_resize": mode, "image_size": IMAGE}


if __name__ == "__main__":
    import torch
    from timm.models.naflexvit import NaFlexVit, NaFlexVitCfg

    from golden.record import record, with_formula

    for name, case in CASES.items():
        sizes = dict(case)
        model = NaFlexVit(NaFlexVitCfg(), num_classes=sizes.pop("num_classes"), **sizes)
        coord = torch.zeros(len(GRIDS), LENGTH, 2, dtype=torch.int64)
        valid = torch.zeros(len(GRIDS), LENGTH, dtype=torch.bool)
        for number, (rows, columns) in enumerate(GRIDS):
            place = torch.arange(rows * columns)
            coord[number, : len(place), 0] = place // columns
            coord[number, : len(place), 1] = place % columns
            valid[number, : len(place)] = True

        with_formula(model, array)
        patches = torch.from_numpy(array("patches", (len(GRIDS), LENGTH, 48)))
        logits = model({"patches": patches, "patch_coord": coord, "patch_valid": valid})
        (logits * torch.from_numpy(array("loss", tuple(logits.shape)))).sum().backward()
        extra = {"packed": logits}
        extra |= {
            f"packed_grad/{key}": parameter.grad.clone()
            for key, parameter in model.named_parameters()
            if key.startswith(("embeds.", "attn_pool.", "head."))
        }
        model.zero_grad()
        record(name, model, IMAGE, gradients=True, extra=extra, array=array)
