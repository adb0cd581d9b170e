"""Small configurations, and the models of timm that compute the same: make_timm_models.py builds
these, tests/models/test_timm_models.py finds them.
"""

# By the name of a case: the model here, its options, timm's name, and timm's arguments besides the
# number of classes, which is 5.
CASES = {
    "vit": (
        "vit_tiny_patch16_224",
        ["DATA.IMAGE_SIZE", "64x96", "MODEL.DEPTH", "2"],
        "vit_tiny_patch16_224",
        {"depth": 2, "img_size": [64, 96]},
    ),
    "vit_digits": (
        "vit_digits",
        [],
        "vit_tiny_patch16_224",
        {
            "patch_size": 2,
            "embed_dim": 64,
            "depth": 4,
            "num_heads": 4,
            "mlp_ratio": 2.0,
            "img_size": 8,
            "in_chans": 1,
        },
    ),
    "vit_mae": (
        "vit_base_patch16_224_finetune",
        ["MODEL.DEPTH", "1", "MODEL.EMBED_DIM", "48", "MODEL.NUM_HEADS", "4", "MODEL.QKV_BIAS", "False"],
        "vit_base_patch16_224",
        {"depth": 1, "embed_dim": 48, "num_heads": 4, "qkv_bias": False, "global_pool": "avg", "img_size": 224},
    ),
    "deit_distilled": (
        "deit_tiny_distilled_patch16_224",
        ["MODEL.DEPTH", "2", "DATA.IMAGE_CHANNELS", "1", "DATA.IMAGENET_MEAN", "[0.5]", "DATA.IMAGENET_STD", "[0.5]"],
        "deit_tiny_distilled_patch16_224",
        {"depth": 2, "img_size": 224, "in_chans": 1},
    ),
    "beit": (
        "beit_base_patch16_224",
        ["MODEL.DEPTH", "2", "MODEL.EMBED_DIM", "96", "MODEL.NUM_HEADS", "3", "MODEL.INIT_VALUES", "0.01"],
        "beit_base_patch16_224",
        {"depth": 2, "embed_dim": 96, "num_heads": 3, "init_values": 0.01, "img_size": 224},
    ),
    "dinov2": (
        "vit_small_patch14_dinov2",
        ["DATA.IMAGE_SIZE", "56", "MODEL.DEPTH", "2"],
        "vit_small_patch14_dinov2",
        {"depth": 2, "img_size": 56},
    ),
    "swin": (
        "swin_tiny_patch4_window7_224",
        ["MODEL.EMBED_DIM", "24", "MODEL.STAGE_DEPTHS", "[1,2,1,1]", "MODEL.NUM_HEADS", "[1,2,4,4]"],
        "swin_tiny_patch4_window7_224",
        {"embed_dim": 24, "depths": [1, 2, 1, 1], "num_heads": [1, 2, 4, 4], "img_size": 224},
    ),
    "swinv2": (
        "swinv2_small_window8_256",
        ["MODEL.EMBED_DIM", "24", "MODEL.STAGE_DEPTHS", "[1,2,1,1]", "MODEL.NUM_HEADS", "[1,2,4,4]"],
        "swinv2_small_window8_256",
        {"embed_dim": 24, "depths": [1, 2, 1, 1], "num_heads": [1, 2, 4, 4], "img_size": 256},
    ),
    "convnext": (
        "convnext_atto",
        ["MODEL.STAGE_DEPTHS", "[1,1,2,1]", "MODEL.EMBED_DIMS", "[16,32,48,64]"],
        "convnext_atto",
        {"depths": [1, 1, 2, 1], "dims": [16, 32, 48, 64]},
    ),
    "convnextv2": (
        "convnextv2_atto",
        ["MODEL.STAGE_DEPTHS", "[1,1,2,1]"],
        "convnextv2_atto",
        {"depths": [1, 1, 2, 1]},
    ),
    "mixer": ("mixer_s32_224", [], "mixer_s32_224", {"img_size": 224}),
    "cait": (
        "cait_xxs24_224",
        ["MODEL.DEPTH", "2"],
        "cait_xxs24_224",
        {"depth": 2, "img_size": 224},
    ),
    "metaformer": ("poolformerv2_s12", [], "poolformerv2_s12", {}),
    "pvtv2": (
        "pvtv2_b0",
        ["MODEL.STAGE_DEPTHS", "[1,1,2,1]"],
        "pvt_v2_b0",
        {"depths": [1, 1, 2, 1]},
    ),
    "eva02": ("eva02_tiny_patch14_224", [], "eva02_tiny_patch14_224", {"img_size": 224}),
    "levit": ("levit_128s", [], "levit_128s", {"img_size": 224}),
    "levit_conv": ("levit_conv_128s", [], "levit_128s", {"img_size": 224}),
    "mobilevit": ("mobilevit_xxs", [], "mobilevit_xxs", {}),
    "hiera": ("hiera_tiny_224", [], "hiera_tiny_224", {"img_size": 224}),
}  # fmt: skip
