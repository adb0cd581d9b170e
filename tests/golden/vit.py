"""Reduced ViTs and their options; run with torch and timm it records them: PYTHONPATH=tests python
-m golden.vit
"""

SMALL = {
    "img_size": 16,
    "patch_size": 4,
    "embed_dim": 24,
    "depth": 2,
    "num_heads": 3,
    "num_classes": 7,
}
CASES = {
    "vit": SMALL | {"depth": 3},
    "vit_deit3": SMALL | {"init_values": 0.1, "no_embed_class": True},
    "vit_avg": SMALL | {"global_pool": "avg"},
    "vit_distilled": SMALL,
    "vit_registers": SMALL | {"reg_tokens": 3, "qk_norm": True, "pre_norm": True},
    "vit_registers_gap": SMALL
    | {"reg_tokens": 2, "class_token": False, "global_pool": "avg", "no_embed_class": True},
    "vit_clip": SMALL | {"pre_norm": True, "act": "quick_gelu"},
    "vit_siglip": SMALL
    | {
        "class_token": False,
        "global_pool": "map",
        "act": "gelu_tanh",
        "img_size": (18, 15),
        "cut_images": True,
    },
    "vit_gated": SMALL
    | {
        "act": "swiglu",
        "mlp_ratio": 5.5,
        "reg_tokens": 2,
        "no_embed_class": True,
        "global_pool": "avg",
    },
    "vit_differential": SMALL | {"attention": "differential", "init_values": 0.1},
    "vit_parallel": SMALL | {"block": "parallel", "init_values": 0.1, "qk_norm": True},
    "vit_parallel_unbiased": SMALL | {"block": "parallel", "qkv_bias": False, "global_pool": "avg"},
    "vit_differential_parallel": SMALL
    | {"block": "parallel", "attention": "differential", "qk_norm": True},
    "vit_no_norm": SMALL | {"final_norm": False, "reg_tokens": 2, "no_embed_class": True},
    "vit_map": SMALL | {"class_token": False, "reg_tokens": 2, "global_pool": "map"},
    "vit_gap": SMALL
    | {"class_token": False, "global_pool": "avg", "fc_norm": False, "img_size": (12, 20)},
}
BLOCKS = ("block", "attention")
WAVES = (
    "vit_siglip",
    "vit_map",
    "vit_gated",
    "vit_differential",
)  # golden.convolutions' formula: these forget the images of the other

if __name__ == "__main__":
    from functools import partial

    import torch
    from timm.layers import SwiGLUPacked
    from timm.models.deit import VisionTransformerDistilled
    from timm.models.vision_transformer import (
        DiffParallelScalingBlock,
        ParallelScalingBlock,
        VisionTransformer,
    )

    from golden import convolutions
    from golden.formula import array
    from golden.record import record, with_formula

    for name, case in CASES.items():
        sizes = {
            key: value for key, value in case.items() if key not in ("act", "cut_images", *BLOCKS)
        }
        if case.get("block") == "parallel":
            sizes["block_fn"] = (
                DiffParallelScalingBlock if "attention" in case else ParallelScalingBlock
            )
        elif "attention" in case:
            sizes["attn_layer"] = "diff"
        sizes |= {"act_layer": case["act"]} if "act" in case else {}
        sizes |= {"norm_layer": partial(torch.nn.LayerNorm, eps=1e-5)} if name == "vit_clip" else {}
        sizes |= {"mlp_layer": SwiGLUPacked, "act_layer": "silu"} if name == "vit_gated" else {}
        model = (VisionTransformerDistilled if name == "vit_distilled" else VisionTransformer)(
            **sizes
        )
        extra = {}
        if name == "vit_distilled":
            with_formula(model).set_distilled_training()
            outputs = model.train()(torch.from_numpy(array("images", (2, 3, 16, 16))))
            extra = dict(zip(("train_logits", "train_logits_dist"), outputs, strict=True))
            model.set_distilled_training(False)
        formula = convolutions.array if name in WAVES else array
        record(name, model, sizes["img_size"], gradients=True, extra=extra, array=formula)
