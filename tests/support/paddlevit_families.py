"""The values that PaddleViT's files of each family stand for, by its config.py files
(test_paddlevit.py).
"""

HALF = [0.5] * 3
IMAGENET = [0.485, 0.456, 0.406]
NOTHING = {
    "TRAIN.MIXUP_ALPHA": 0.0,
    "TRAIN.CUTMIX_ALPHA": 0.0,
    "TRAIN.AUTO_AUGMENT": None,
    "TRAIN.SMOOTHING": 0.0,
}
RECIPE = {
    "TRAIN.MIXUP_ALPHA": 0.8, "TRAIN.CUTMIX_ALPHA": 1.0, "TRAIN.RANDOM_ERASE_PROB": 0.25, "TRAIN.SMOOTHING": 0.1,
    "TRAIN.AUTO_AUGMENT": "rand-m9-n2-mstd0.5-inc1", "TRAIN.COLOR_JITTER": 0.0, "TRAIN.LINEAR_SCALED_LR": 512,
}  # fmt: skip
AUTO = {
    **RECIPE,
    "TRAIN.AUTO_AUGMENT": "original",
    "TRAIN.HFLIP": 0.0,
    "TRAIN.CROP_SCALE": [0.05, 1.0],
}
AUTO |= {"TRAIN.LINEAR_SCALED_LR": None}
AUTO_512 = {**AUTO, "TRAIN.LINEAR_SCALED_LR": 512}
# By MODEL of a file: the family whose defaults the file changes, and the values of some keys.
FAMILIES = {
    "TYPE: vit": ("vit", {"DATA.IMAGENET_MEAN": HALF, "TRAIN.BASE_LR": 3e-3, "TRAIN.WARMUP_EPOCHS": 32, **NOTHING}),
    "TYPE: deit": ("deit", {**RECIPE, "DATA.IMAGENET_MEAN": IMAGENET, "TRAIN.MODEL_EMA": True}),
    "TYPE: BEiT": ("beit", {**RECIPE, "DATA.IMAGENET_MEAN": HALF, "MODEL.GLOBAL_POOL": "avg"}),
    "TYPE: swin": ("swin", {**RECIPE, "DATA.CROP_PCT": 0.9, "TRAIN.BASE_LR": 5e-4, "TRAIN.GRAD_CLIP": 5.0}),
    "TYPE: PVTv2": ("pvtv2", {**RECIPE, "MODEL.EMBED_DIMS": [32, 64, 160, 256], "MODEL.STAGE_DEPTHS": [2, 2, 2, 2]}),
    "TYPE: convnext": ("convnext", {**RECIPE, "TRAIN.BASE_LR": 4e-3, "TRAIN.MODEL_EMA": True, "DATA.DROP_LAST": False}),
    "TYPE: Mixer": ("mixer", {**RECIPE, "DATA.IMAGENET_MEAN": HALF, "TRAIN.WEIGHT_DECAY": 0.1, "MODEL.TYPE": "Mixer"}),
    "TYPE: GatedMLP": ("gmlp", {**RECIPE, "MODEL.TYPE": "gMLP", "MODEL.MLP_RATIO": 6.0, "TRAIN.GRAD_CLIP": None}),
    "TYPE: ResMLP": ("resmlp", {**RECIPE, "DATA.CROP_PCT": 0.875, "MODEL.DROPPATH": 0.1}),
    "{TYPE: convmixer, CNN: {ACTIVATION: ReLU}}": ("convmixer", {**RECIPE, "MODEL.ACT": "relu", "MODEL.DROPOUT": 0.0}),
    "TYPE: poolformer": ("poolformer", {**RECIPE, "MODEL.FC_NORM": False, "TRAIN.LINEAR_SCALED_LR": 1024}),
    "{TYPE: MobileOne, EXPANSIONS: [1.0, 1.5, 2.0, 2.5, 4.0]}": (
        "mobileone",
        {**NOTHING, "TRAIN.MIXUP_ALPHA": 0.8, "TRAIN.CUTMIX_ALPHA": 1.0, "TRAIN.SMOOTHING": 0.1, "TRAIN.BASE_LR": 2e-3}
        | {"MODEL.EMBED_DIMS": [96, 256, 640, 2048], "MODEL.STAGE_DEPTHS": [2, 8, 10, 1], "MODEL.NUM_BRANCHES": 4},
    ),
    "{TYPE: MobileViT, HIDDEN_DIMS: [64, 80, 96]}": (
        "mobilevit",
        {**NOTHING, "TRAIN.MIXUP_ALPHA": 0.8, "TRAIN.CUTMIX_ALPHA": 1.0, "TRAIN.BASE_LR": 2e-3, "TRAIN.SMOOTHING": 0.1}
        | {"MODEL.EMBED_DIMS": [16, 32, 48, 48, 48, 64, 80, 96, 384], "MODEL.NUM_HEADS": 8, "MODEL.HIDDEN_NORM": True},
    ),
    "{TYPE: MAE, TRANS: {ENCODER: {DEPTH: 7}}}": ("mae", {"MODEL.TYPE": "ViT", "MODEL.DEPTH": 7, "TRAIN.HFLIP": 0.0}),
    "TYPE: coat_lite": ("coat", {**RECIPE, "MODEL.TYPE": "CoaT", "MODEL.PARALLEL_DEPTH": 6, "TRAIN.BASE_LR": 4e-3}),
    "{TYPE: coat, SERIAL_DEPTHS: [1, 2, 1, 1]}": ("coat", {"MODEL.STAGE_DEPTHS": [1, 2, 1, 1], "MODEL.DROPPATH": 0.0}),
    "TYPE: PiT": ("pit", {**RECIPE, "MODEL.STAGE_DEPTHS": [3, 6, 4], "MODEL.DISTILLED": False}),
    "TYPE: volo": ("volo", {**RECIPE, "MODEL.STAGE_DEPTHS": [12, 12, 20, 4], "TRAIN.LINEAR_SCALED_LR": 128}),
    "{TYPE: TopFormer, CHANNELS: [8, 8, 8, 8], EMBED_OUT_INDICE: [1, 2, 3, 4], CFGS: [[3, 1, 16, 1], [3, 4, 8, 2], [5, 3, 8, 2], [3, 3, 8, 2], [5, 6, 8, 2]]}": (
        "topformer",
        {"MODEL.STAGE_DEPTHS": [2, 1, 1, 1], "MODEL.KERNEL_SIZE": [3, 3, 5, 3, 5], "MODEL.EXPAND_RATIO": [1, 4, 3, 3, 6]}
        | {"MODEL.STEM_DIM": 16, "MODEL.POOL_STRIDE": 2, "TRAIN.MIXUP_ALPHA": 0.2, "TRAIN.MODEL_EMA": True},
    ),
    "{TYPE: FF_Only, LAYERS: 3}": ("ff_only", {**RECIPE, "MODEL.TYPE": "FF_Only", "MODEL.DEPTH": 3, "MODEL.EMBED_DIM": 768}),
    "{TYPE: BoTNet, NUM_HEADS: 12}": (
        "botnet",
        {**RECIPE, "MODEL.TYPE": "BoTNet", "MODEL.NUM_HEADS": [0, 0, 0, 4], "MODEL.LAST_STRIDE": 1, "DATA.CROP_PCT": 0.95}
        | {"TRAIN.LINEAR_SCALED_LR": 128},
    ),
    "{TYPE: MobileFormer, MF: {TOKENS: [6, 192]}}": (
        "mobileformer",
        {"MODEL.NUM_TOKENS": 6, "MODEL.TOKEN_DIM": 192, "MODEL.LITE_DIMS": [24, 12], "MODEL.HEAD_DIM": 576}
        | {"MODEL.STRIDES": [1, 2, 1, 2, 1, 1, 2, 1], "TRAIN.GRAD_CLIP": 2.0, "TRAIN.LINEAR_SCALED_LR": None},
    ),
    "TYPE: vip": (
        "vip",
        {**RECIPE, "MODEL.TYPE": "ViP", "MODEL.STAGE_DEPTHS": [4, 3, 8, 3], "MODEL.TRANSITIONS": [True, False, False]},
    ),
    "TYPE: CaiT": ("cait", {**RECIPE, "MODEL.DEPTH_TOKEN_ONLY": 2, "TRAIN.MODEL_EMA": True, "TRAIN.BASE_LR": 5e-4}),
    "TYPE: xcit": ("xcit", {**RECIPE, "MODEL.TOKENS_NORM": False, "TRAIN.DISTILLATION_TYPE": None}),
    "{TYPE: XCiT, ETA: 1e-5, CLS_ATTN_LAYERS: 3}": ("xcit", {"MODEL.INIT_VALUES": 1e-5, "MODEL.DEPTH_TOKEN_ONLY": 3}),
    "TYPE: CrossViT": (
        "crossvit",
        {**RECIPE, "MODEL.BRANCH_DEPTHS": [1, 4], "MODEL.DEPTH": 3, "MODEL.IMAGE_SCALES": [240 / 224, 1.0]},
    ),
    "{TYPE: cswin, SPLIT_SIZES: [1, 2, 7, 7], NUM_HEADS: [4, 8, 16, 32]}": (
        "cswin",
        {**RECIPE, "MODEL.SPLIT_SIZES": [1, 2, 7, 7], "MODEL.STAGE_DEPTHS": [2, 2, 6, 2], "MODEL.PAD_TOKENS": False}
        | {"MODEL.NUM_HEADS": [4, 8, 16, 32], "TRAIN.BASE_LR": 2e-3, "TRAIN.GRAD_CLIP": 5.0},
    ),
    "{TYPE: CvT, DEPTH: [1, 4, 16], DROP_PATH_RATE: [0.0, 0.0, 0.3], DROP_RATE: [0.1, 0.1, 0.1]}": (
        "cvt",
        {**RECIPE, "MODEL.STAGE_DEPTHS": [1, 4, 16], "MODEL.EMBED_DIMS": [64, 192, 384], "MODEL.DROPPATH": 0.3}
        | {"MODEL.DROPOUT": 0.1, "MODEL.CLASS_TOKEN": True, "MODEL.PATCH_SIZE": [7, 3, 3], "TRAIN.WEIGHT_DECAY": 0.1},
    ),
    "{TYPE: focal, FOCAL: {FOCAL_POOL: fc, FOCAL_LEVELS: [2, 1, 2, 2], FOCAL_STAGES: [0, 1, 2]}}": (
        "focal",
        {**RECIPE, "MODEL.FOCAL_WINDOWS": [7, 0, 3, 0], "MODEL.CONV_EMBED": False, "TRAIN.LINEAR_SCALED_LR": None}
        | {"MODEL.EXPAND_SIZES": [3, 3, 3, 3], "TRAIN.GRAD_CLIP": 5.0, "MODEL.STAGE_DEPTHS": [2, 2, 6, 2]},
    ),
    "{TYPE: halo, ACT: silu}": (
        "halonet",
        {**RECIPE, "MODEL.ATTENTION_EVERY": [0, 4, 2, 2], "MODEL.EMBED_DIMS": [256, 512, 1024, 2048]}
        | {"MODEL.STAGE_DEPTHS": [3, 4, 6, 3], "MODEL.NUM_HEADS": [0, 4, 8, 8], "TRAIN.LINEAR_SCALED_LR": 128},
    ),
    "{TYPE: T2T-ViT, TOKEN_TYPE: transformer}": (
        "t2t_vit",
        {**RECIPE, "MODEL.TYPE": "T2T_ViT", "MODEL.TOKEN_TYPE": "transformer", "MODEL.NORM_EPS": 1e-6}
        | {"MODEL.FIXED_TABLES": False, "TRAIN.LINEAR_SCALED_LR": None, "TRAIN.MODEL_EMA": True},
    ),
    "{TYPE: ResT, DROPPATH: 0.1, DEPTHS: [2, 2, 18, 2]}": (
        "rest",
        {**RECIPE, "MODEL.TYPE": "ResT", "MODEL.STAGE_DEPTHS": [2, 2, 18, 2], "MODEL.SR_RATIO": [8, 4, 2, 1]}
        | {"MODEL.APPLY_TRANSFORM": True, "MODEL.DROPPATH": 0.0, "TRAIN.LINEAR_SCALED_LR": 256, "TRAIN.LR_SCALED": "base"},
    ),
    "TYPE: ResT_V2": ("restv2", {**RECIPE, "MODEL.TYPE": "ResTv2", "MODEL.DROPPATH": 0.0, "TRAIN.LINEAR_SCALED_LR": 256}),
    "TYPE: hvt": (
        "hvt",
        {**RECIPE, "MODEL.TYPE": "HVT", "MODEL.POOL_BLOCK_WIDTH": 6, "MODEL.DROPPATH_SHAPE": "constant"}
        | {"TRAIN.WEIGHT_DECAY": 0.1},
    ),
    "{TYPE: shuffle, NUM_HEADS: [3, 6, 12, 24], DROPPATH: 0.3}": (
        "shuffle",
        {**RECIPE, "MODEL.QKV_BIAS": True, "MODEL.EMBED_DIM": 96, "MODEL.TOKEN_DIM": 32, "MODEL.DROPPATH": 0.3},
    ),
    "TYPE: RegNet": ("regnet", {"MODEL.GROUP_WIDTH": 112, "DATA.IMAGENET_MEAN": IMAGENET}),
    "{TYPE: levit, DEPTH: [1, 1, 1]}": ("levit", {"MODEL.STAGE_DEPTHS": [1, 1, 1], "TRAIN.MIXUP_ALPHA": 0.2}),
    "{TYPE: RepLKNet, LARGE_KERNEL_SIZES: [31, 29, 27, 13], SMALL_KERNEL: None}": (
        "replknet",
        {**RECIPE, "TRAIN.AUTO_AUGMENT": "original-mstd0.5", "TRAIN.LINEAR_SCALED_LR": 256, "TRAIN.LR_SCALED": "base"}
        | {"MODEL.STAGE_DEPTHS": [2, 2, 18, 2], "MODEL.EMBED_DIMS": [128, 256, 512, 1024], "MODEL.SMALL_KERNEL": None},
    ),
    "{TYPE: RepMLP, NUM_BLOCKS: [1, 2, 3, 4], CHANNELS: [8, 8, 32, 128]}": (
        "repmlp",
        {**RECIPE, "MODEL.STAGE_DEPTHS": [1, 2, 3, 4], "MODEL.EMBED_DIMS": [8, 8, 32, 128], "DATA.DROP_LAST": False}
        | {"TRAIN.WEIGHT_DECAY": 0.1, "DATA.INTERPOLATION": "bilinear", "TRAIN.INTERPOLATION": "bicubic"},
    ),
    "{TYPE: ConvMLP, MIXER: {BLOCKS: [1, 2, 3], CHANNELS: 24}}": (
        "convmlp",
        {**RECIPE, "MODEL.STAGE_DEPTHS": [1, 2, 3], "MODEL.EMBED_DIMS": [128, 256, 512], "MODEL.MLP_RATIO": [2, 2, 2]}
        | {"MODEL.STEM_DIM": 24, "MODEL.N_CONV_BLOCKS": 2, "MODEL.DROPPATH": 0.1, "TRAIN.WEIGHT_DECAY": 0.1},
    ),
    "{TYPE: CycleMLP, LAYERS: [1, 2, 3, 4], MLP_RATIOS: [8, 8, 4, 4]}": (
        "cyclemlp",
        {**RECIPE, "MODEL.STAGE_DEPTHS": [1, 2, 3, 4], "MODEL.EMBED_DIMS": [64, 128, 320, 512], "MODEL.DROPPATH": 0.0}
        | {"MODEL.MLP_RATIO": [8, 8, 4, 4], "TRAIN.WEIGHT_DECAY": 0.1, "DATA.DROP_LAST": False},
    ),
    # by their names of 2021
    "{TYPE: ViT, TRANS: {DEPTH: 3}}": ("vit_2021", {"MODEL.DEPTH": 3, "MODEL.DROPOUT": 0.1, "MODEL.PATCH_SIZE": 32}),
    "{TYPE: DeiT, TRANS: {DEPTH: 3}}": ("deit_2021", {**AUTO_512, "MODEL.DISTILLED": True}),
    "{TYPE: BEiT, TRANS: {DEPTH: 3}}": ("beit_2021", {**AUTO_512, "MODEL.INIT_VALUES": 0.1}),
    "{TYPE: swin, TRANS: {WINDOW_SIZE: 12}}": ("swin_2021", {**AUTO_512, "DATA.CROP_PCT": 0.9}),
    "{TYPE: PVTv2, DROP_PATH: 0.3}": ("pvtv2_2021", {**AUTO, "MODEL.DROPPATH": 0.3, "TRAIN.MODEL_EMA_DECAY": 0.99992}),
    "{TYPE: Mixer, MIXER: {NUM_LAYERS: 3}}": ("mixer_2021", {"MODEL.DEPTH": 3, "TRAIN.WEIGHT_DECAY": 0.01, **NOTHING}),
    "{TYPE: GatedMLP, MIXER: {HIDDEN_SIZE: 8}}": ("gmlp_2021", {"MODEL.EMBED_DIM": 8, "MODEL.DEPTH": 30, **NOTHING}),
    "{TYPE: ResMLP, MIXER: {HIDDEN_SIZE: 8}}": ("resmlp_2021", {"MODEL.EMBED_DIM": 8, "TRAIN.COLOR_JITTER": 0.4}),
    "{TYPE: FF_Only, MIXER: {EMBED_DIM: 192}}": ("ff_only_2021", {**AUTO, "MODEL.EMBED_DIM": 192, "MODEL.DEPTH": 12}),
    "{TYPE: PiT, DISTILL: True}": ("pit_2021", {**AUTO, "MODEL.DISTILLED": True, "MODEL.NUM_HEADS": [4, 8, 16]}),
    "{TYPE: PiT, DISTILL: False}": ("pit_2021", {**AUTO, "MODEL.DISTILLED": False, "TRAIN.DISTILLATION_TYPE": None}),
    "{TYPE: cait, TRANS: {DEPTH: 3}}": ("cait_2021", {"MODEL.DEPTH": 3, "MODEL.INIT_VALUES": 1e-4, **NOTHING}),
    "{TYPE: xcit, TRANS: {ETA: 1e-5, TOKENS_NORM: True}}": (
        "xcit_2021",
        {**AUTO, "MODEL.INIT_VALUES": 1e-5, "MODEL.TOKENS_NORM": True, "MODEL.DROPPATH": 0.0, "TRAIN.ACCUM_ITER": 2}
        | {"TRAIN.AUTO_AUGMENT": None, "TRAIN.RANDOM_ERASE_PROB": 0.0},
    ),
    "{TYPE: crossvit, TRANS: {DEPTH: [[1, 2, 0]], MLP_RATIO: [3, 2, 1]}}": (
        "crossvit_2021",
        {"MODEL.DEPTH": 1, "MODEL.BRANCH_DEPTHS": [1, 2], "MODEL.MLP_RATIO": [3, 2], "MODEL.DROPPATH": 0.0, **NOTHING},
    ),
    "{TYPE: halo, ACT: relu, RESUME_EMA: null}": (
        "halonet_2021",
        {"TRAIN.MIXUP_ALPHA": 0.8, "TRAIN.COLOR_JITTER": 0.0, "TRAIN.RANDOM_ERASE_PROB": 0.0, "MODEL.ACT": "relu"},
    ),
    "{TYPE: cswin, TRANS: {SPLIT_SIZES: [1, 2, 7, 7], NUM_HEADS: [4, 8, 16, 32]}}": (
        "cswin_2021",
        {**AUTO, "TRAIN.LINEAR_SCALED_LR": 256, "TRAIN.ACCUM_ITER": 2, "MODEL.DROPPATH": 0.2, "SEED": 42},
    ),
    "{TYPE: T2T-ViT, TRANS: {DEPTH: 3}}": ("t2t_vit_2021", {**AUTO, "MODEL.DEPTH": 3, "MODEL.DROPPATH": 0.0}),
    "{TYPE: focal, DROP_PATH: 0.3, FOCAL: {USE_CONV_EMBED: True}}": (
        "focal_2021",
        {**AUTO_512, "MODEL.DROPPATH": 0.3, "MODEL.FOCAL_WINDOWS": [0, 0, 0, 0], "MODEL.CONV_EMBED": True},
    ),
    "{TYPE: RepMLP_ResNet, MIXER: {NUM_BLOCKS: [1, 2, 1, 1], BLOCK_TYPE: bottleneck, FC3_GROUPS: 8}}": (
        "repmlp_2021",
        {"MODEL.STAGE_DEPTHS": [1, 2, 1, 1], "MODEL.BLOCK_TYPE": "bottleneck", "MODEL.FC3_GROUPS": 8}
        | {"MODEL.PART_SIZE": 7, "TRAIN.AUTO_AUGMENT": None, "TRAIN.COLOR_JITTER": 0.4, "TRAIN.HFLIP": 0.0},
    ),
    "{TYPE: hvt, TRANS: {POOL_BLOCK_WIDTH: 4}}": (
        "hvt_2021",
        {**AUTO, "TRAIN.HFLIP": 0.5, "MODEL.POOL_BLOCK_WIDTH": 4, "TRAIN.ACCUM_ITER": 2},
    ),
    "{TYPE: shuffle, DROP_PATH: 0.3, TRANS: {DEPTHS: [2, 2, 18, 2]}}": (
        "shuffle_2021",
        {**AUTO_512, "MODEL.STAGE_DEPTHS": [2, 2, 18, 2], "MODEL.DROPPATH": 0.0, "MODEL.QKV_BIAS": True},
    ),
    "{TYPE: poolformer, TRANS: {LAYERS: [1, 1, 1, 1]}}": ("poolformer_2021", AUTO),
}  # fmt: skip
