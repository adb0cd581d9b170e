"""Reduced EVA-02s and DINOv3s; run with torch and timm it records them: PYTHONPATH=tests python -m
golden.eva
"""

SMALL = {
    "img_size": 16,
    "patch_size": 4,
    "embed_dim": 24,
    "depth": 2,
    "num_heads": 3,
    "num_classes": 7,
}
EVA02 = SMALL | {
    "swiglu_mlp": True,
    "mlp_ratio": 8 / 3,
    "use_rot_pos_emb": True,
    "ref_feat_shape": 2,
}
DINOV3 = SMALL | {
    "use_rot_pos_emb": True, "rope_type": "dinov3", "rope_temperature": 100, "rope_rotate_half": True,
    "use_abs_pos_emb": False, "dynamic_img_size": True, "num_reg_tokens": 2, "init_values": 0.1, "use_fc_norm": False,
}  # fmt: skip
CASES = {
    "eva": EVA02 | {"img_size": (16, 24)},
    "eva_subln": EVA02
    | {"qkv_fused": False, "scale_mlp": True, "scale_attn_inner": True, "global_pool": "token"},
    "eva_dinov3": DINOV3 | {"qkv_bias": False},
    "eva_gated": DINOV3
    | {"swiglu_mlp": True, "swiglu_align_to": 40, "mlp_ratio": 2, "img_size": (12, 20)},
    "eva_patches": EVA02
    | {
        "class_token": False,
        "num_reg_tokens": 1,
        "use_abs_pos_emb": False,
        "swiglu_mlp": False,
        "init_values": 0.1,
    },
}
LARGER = (24, 8)  # another size of images, for those that take any

if __name__ == "__main__":
    from functools import partial

    import torch
    from timm.layers import LayerNorm
    from timm.models.eva import Eva

    from golden.convolutions import array
    from golden.record import record, with_formula

    for name, sizes in CASES.items():
        norm = partial(LayerNorm, eps=1e-5 if "rope_type" in sizes else 1e-6)
        model = Eva(**sizes, norm_layer=norm)
        extra = {}
        if sizes.get("dynamic_img_size"):
            with torch.no_grad():
                extra["larger"] = with_formula(model, array)(
                    torch.from_numpy(array("images", (2, 3, *LARGER)))
                )
        record(name, model, sizes["img_size"], gradients=True, extra=extra, array=array)
