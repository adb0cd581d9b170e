"""What the keys of ``config.py`` take besides values of their default's type, and the keys that
once were.
"""

from settings.registry import own_keys

# The types of keys whose default is None or a section's. Each of these keys also takes None (YAML:
# null).
TYPES = {
    "DATA.VAL_SPLIT": float, "DATA.FOLDS": int, "DATA.SPLIT_GROUPS": str, "DATA.GLOBAL_BATCH": int,
    "DATA.MULTI_SCALE": [int], "DATA.SHARD_SHUFFLE": int, "DATA.CACHE": str, "MODEL.RESUME": str,
    "MODEL.PRETRAINED": str, "MODEL.PRETRAINED_ALLOW": [str], "MODEL.PRETRAINED_CLASSES": str,
    "MODEL.PRETRAINED_ADAPTER": str, "TRAIN.MAX_MINUTES": float, "TRAIN.EARLY_STOP": int, "TRAIN.LINEAR_SCALED_LR": int,
    "TRAIN.RECIPE_BATCH": int, "TRAIN.LAYER_DECAY": float, "TRAIN.FREEZE": [str], "TRAIN.ADAPTER.NAME": str,
    "TRAIN.GRAD_CLIP": float, "TRAIN.CLASS_WEIGHTS": [float], "TRAIN.POS_WEIGHT": [float],
    "TRAIN.DISTILLATION_TYPE": str, "TRAIN.TEACHER_MODEL": str, "TRAIN.TEACHER_PATH": str, "TRAIN.INTERPOLATION": str,
    "TRAIN.AUTO_AUGMENT": str, "TRAIN.CUTMIX_MINMAX": [float], "OUTPUT": str, "SAVE_MINUTES": float, "TF32": bool,
    "TRACKERS": [str], "DATA.CLASSES": str, "DATA.LABELS": str, "DATA.CORRUPTION": str,
} | {key: own.kind for key, own in own_keys().items() if own.optional}  # fmt: skip
# Removed keys with their defaults. Older runs wrote them into their config.yaml, whoever had set
# them.
REMOVED = {
    "DATA.FOLDS_SEED": 0,
    "DATA.FOLDS_GROUPS": None,
    "DATA.VAL_SPLIT_SEED": 0,
    "DATA.VAL_SPLIT_GROUPS": None,
    "DIST.STRATEGY.gradient_merge": False,
    "DIST.STRATEGY.gradient_merge_configs.k_steps": 1,
    "DIST.STRATEGY.recompute": False,
    "DIST.STRATEGY.amp": False,
    "DIST.STRATEGY.last_comm_group_size_MB": 1.0,
}
WORDS = {  # words that a key takes besides values of its type
    "MODEL.NUM_CLASSES": ("auto",),
    "TRAIN.CLASS_WEIGHTS": ("auto",),
    "TRAIN.POS_WEIGHT": ("auto",),
    "TRAIN.LR_SCHEDULER.PER_EPOCH": ("start", "late", "end"),
}
