"""What the values of a configuration may be: choices, ranges, and keys that have to fit each other."""

from collections.abc import Callable
from typing import Any

from yacs.config import CfgNode

from errors import InputError
from options import leaves

DATASETS = ("imagenet2012", "folder", "shards", "cifar10", "cifar100", "mnist", "fashion_mnist", "digits", "synthetic")
_CHOICES = {
    "DATA.DATASET": DATASETS,
    "DATA.IMAGE_CHANNELS": (1, 3),
    "DATA.INTERPOLATION": ("bicubic", "bilinear", "nearest"),
    "DATA.LOADER": ("paddle", "dali"),
    "DATA.SAMPLER": ("shuffle", "balanced"),
    "DATA.SHUFFLE_MODE": ("global", "shard"),
    "MODEL.GLOBAL_POOL": ("token", "avg"),
    "MODEL.ACT": (None, "gelu", "relu"),
    "TRAIN.OPTIMIZER.NAME": ("AdamW", "Adam", "SGD", "LAMB", "Lion", "Muon"),
    "TRAIN.LR_SCHEDULER.NAME": (
        "warmupcosine",
        "cosine",
        "linear",
        "poly",
        "step",
        "multistep",
        "multi-step",
        "constant",
    ),
    "TRAIN.LR_SCALING": ("linear", "sqrt"),
    "TRAIN.GRAD_CLIP_MODE": ("norm", "value", "agc"),
    "TRAIN.LOSS": ("auto", "cross_entropy", "soft_target", "bce"),
    "TRAIN.DISTILLATION_TYPE": (None, "hard", "soft"),
    "TRAIN.CROP": ("random_resized", "simple"),
    "TRAIN.INTERPOLATION": (None, "bicubic", "bilinear", "nearest", "random"),
    "TRAIN.RANDOM_ERASE_MODE": ("const", "rand", "pixel"),
    "TRAIN.MIXUP_MODE": ("batch", "pair", "elem"),
    "BEST_METRIC": ("acc1", "acc5", "mean_class_acc", "loss"),
    "SAVE_ON_ERROR": ("stop", "continue"),
    "EVAL_ENGINE": ("eager", "inference"),
    "DIST.ENGINE": ("data_parallel", "fleet"),
    "DIST.STRATEGY.sharding_configs.stage": (1, 2),
}
_AT_LEAST_ONE = (
    "DATA.BATCH_SIZE", "DATA.BATCH_SIZE_EVAL", "DATA.IMAGE_SIZE", "DATA.SYNTHETIC_SIZE", "MODEL.PATCH_SIZE",
    "MODEL.EMBED_DIM", "MODEL.NUM_HEADS", "MODEL.DEPTH", "MODEL.STAGE_DEPTHS", "MODEL.EMBED_DIMS", "MODEL.WINDOW_SIZE",
    "MODEL.SR_RATIO", "MODEL.KERNEL_SIZE", "MODEL.GROUP_WIDTH", "TRAIN.NUM_EPOCHS", "TRAIN.ACCUM_ITER", "KEEP_LAST",
    "REPORT_FREQ", "VALIDATE_FREQ", "MODEL.ATTN_HEAD_SIZE", "TRAIN.LINEAR_SCALED_LR",
    "DATA.PREFETCH", "TRAIN.RANDOM_ERASE_COUNT", "TRAIN.REPEATED_AUGMENT", "TRAIN.LR_SCHEDULER.DECAY_EPOCHS",
    "DATA.SHARD_SHUFFLE", "DATA.GLOBAL_BATCH", "DIST.STRATEGY.fuse_grad_size_in_MB",
    "DIST.STRATEGY.gradient_merge_configs.k_steps",
)  # fmt: skip
_NOT_NEGATIVE = (
    "DATA.NUM_WORKERS", "TRAIN.LAST_EPOCH", "TRAIN.WARMUP_EPOCHS", "TRAIN.COOLDOWN_EPOCHS", "TRAIN.WEIGHT_DECAY",
    "TRAIN.BASE_LR", "TRAIN.WARMUP_START_LR", "TRAIN.END_LR", "TRAIN.HEAD_LR", "TRAIN.COLOR_JITTER",
    "TRAIN.MIXUP_ALPHA", "TRAIN.CUTMIX_ALPHA", "TRAIN.MIXUP_OFF_EPOCH", "MODEL.HEAD_INIT_SCALE", "MODEL.NUM_CLASSES",
    "MODEL.REG_TOKENS", "MODEL.SE_RATIO", "SEED", "SAVE_FREQ", "SAVE_STEPS", "DIST.MAX_RESTART",
)  # fmt: skip
_ABOVE_ZERO = (
    "TRAIN.GRAD_CLIP", "TRAIN.LR_SCHEDULER.DECAY_RATE", "TRAIN.LR_SCHEDULER.POWER", "TRAIN.DISTILLATION_TAU",
    "TRAIN.LAYER_DECAY", "MODEL.INIT_VALUES", "MODEL.NORM_EPS", "TRAIN.OPTIMIZER.EPS", "SAVE_MINUTES", "DIST.TIMEOUT",
    "DIST.INIT_TIMEOUT", "DIST.STRATEGY.last_comm_group_size_MB",
)  # fmt: skip
_BELOW_ONE = (
    "MODEL.DROPOUT", "MODEL.ATTENTION_DROPOUT", "MODEL.DROPPATH", "MODEL.PATCH_DROP", "TRAIN.SMOOTHING",
    "TRAIN.MODEL_EMA_DECAY", "TRAIN.OPTIMIZER.MOMENTUM",
)  # fmt: skip
_PROBABILITIES = (
    "TRAIN.HFLIP", "TRAIN.VFLIP", "TRAIN.RANDOM_ERASE_PROB", "TRAIN.MIXUP_PROB", "TRAIN.MIXUP_SWITCH_PROB",
    "TRAIN.DISTILLATION_ALPHA", "TRAIN.BCE_TARGET_THRESH", "TRAIN.LAYER_DECAY",
)  # fmt: skip
_LENGTHS = {
    "TRAIN.OPTIMIZER.BETAS": 2,
    "TRAIN.CROP_SCALE": 2,
    "TRAIN.CROP_RATIO": 2,
    "TRAIN.AFFINE": 3,
    "TRAIN.CUTMIX_MINMAX": 2,
}


def carried_out(config: CfgNode) -> dict[str, Any]:
    """Returns what DIST.STRATEGY asks of other keys: options that fleet, in dynamic graph mode, takes and ignores."""
    options = config.DIST.STRATEGY
    asked = {"TRAIN.ACCUM_ITER": options.gradient_merge_configs.k_steps} if options.gradient_merge else {}
    asked |= {"MODEL.RECOMPUTE": True} if options.recompute else {}
    return asked | ({"AMP": True} if options.amp else {})


def check(config: CfgNode) -> None:
    """Raises InputError, naming the key, what it is and what it may be, for a configuration that can't be meant."""
    values = dict(leaves(config))

    def require(valid: bool, key: str, expected: str) -> None:
        if not valid:
            raise InputError(f"{key} is {values[key]!r}, expected {expected}")

    def given(keys: tuple[str, ...]) -> list[str]:
        return [key for key in keys if values[key] not in (None, "auto")]

    for key, choices in _CHOICES.items():
        require(values[key] in choices, key, "one of " + ", ".join(map(str, choices)))
    for key in given(_AT_LEAST_ONE):
        numbers = values[key] if isinstance(values[key], list) else [values[key]]
        require(len(numbers) > 0 and min(numbers) >= 1, key, "at least 1")
    for key in given(_NOT_NEGATIVE):
        require(values[key] >= 0, key, "0 or more")
    for key in given(_ABOVE_ZERO):
        require(values[key] > 0, key, "above 0")
    for key in given(_BELOW_ONE):
        require(0 <= values[key] < 1, key, "0 <= value < 1")
    for key in given(_PROBABILITIES):
        require(0 <= values[key] <= 1, key, "0 to 1")
    for key in given(tuple(_LENGTHS)):
        require(len(values[key]) == _LENGTHS[key], key, f"{_LENGTHS[key]} values")
    _check_data(config, require)
    _check_recipe(config, require)
    _check_strategy(config, require)
    require(config.NGPUS == -1 or config.NGPUS >= 1, "NGPUS", "-1 (all) or at least 1")
    require(config.EVAL or config.EVAL_ENGINE == "eager", "EVAL_ENGINE", "eager, or -eval with it: training is eager")
    require(config.AMP or not config.AMP_EVAL, "AMP_EVAL", "False, or with it AMP")
    require(not (config.MODEL.RESUME and config.EVAL), "MODEL.RESUME", "-pretrained FILE with -eval")
    automatic = config.MODEL.RESUME == "auto"
    require(
        automatic or not (config.MODEL.RESUME and config.MODEL.PRETRAINED),
        "MODEL.RESUME",
        "auto with -pretrained, which a run then starts from, or one of both",
    )
    require(not (config.TO_STATIC and config.MODEL.RECOMPUTE), "TO_STATIC", "False with MODEL.RECOMPUTE")
    require(not (config.TO_STATIC and config.EVAL), "TO_STATIC", "False with EVAL: it is of training")
    anew = config.OUTPUT and not config.EVAL and config.MODEL.RESUME in (None, "auto") and not config.TRAIN.LAST_EPOCH
    require(
        not config.DIST.MAX_RESTART or anew,
        "DIST.MAX_RESTART",
        "0, or -output with it, in which to look for checkpoints, and no -eval, -last_epoch or -resume=PATH",
    )
    require(not automatic or config.OUTPUT, "MODEL.RESUME", "-output with it: the folder in which to look")


def _check_data(config: CfgNode, require: Callable[[bool, str, str], None]) -> None:
    data, train, channels = config.DATA, config.TRAIN, config.DATA.IMAGE_CHANNELS
    for key, values in (("DATA.IMAGENET_MEAN", data.IMAGENET_MEAN), ("DATA.IMAGENET_STD", data.IMAGENET_STD)):
        require(len(values) in (1, channels), key, f"1 or {channels} values, as IMAGE_CHANNELS")
    require(all(std > 0 for std in data.IMAGENET_STD), "DATA.IMAGENET_STD", "values above 0")
    require(0 < data.CROP_PCT <= 1, "DATA.CROP_PCT", "0 < value <= 1")
    require(0 < train.CROP_SCALE[0] <= train.CROP_SCALE[1] <= 1, "TRAIN.CROP_SCALE", "0 < low <= high <= 1")
    require(0 < train.CROP_RATIO[0] <= train.CROP_RATIO[1], "TRAIN.CROP_RATIO", "0 < low <= high")
    in_turn = data.DATASET == "shards" and data.SAMPLER == "shuffle" and data.CACHE is None
    expected = "None, or with it DATASET shards, SAMPLER shuffle and no CACHE"
    require(data.SHARD_SHUFFLE is None or in_turn, "DATA.SHARD_SHUFFLE", expected)
    plain = data.SAMPLER == "shuffle" and data.SHARD_SHUFFLE is None and train.REPEATED_AUGMENT == 1
    expected = "global, or with it SAMPLER shuffle, REPEATED_AUGMENT 1 and no SHARD_SHUFFLE"
    require(data.SHUFFLE_MODE == "global" or plain, "DATA.SHUFFLE_MODE", expected)
    encoded = data.DATASET in ("folder", "imagenet2012", "shards") and data.CACHE is None
    require(encoded or not data.FAST_EVAL, "DATA.FAST_EVAL", "False: the dataset has no files to decode, or is cached")
    cached = data.CACHE is None or not (data.SKIP_BROKEN or data.DATASET == "synthetic")
    require(cached, "DATA.CACHE", "None with SKIP_BROKEN (a cache holds every image) and with DATASET synthetic")
    if data.LOADER == "dali" and not config.EVAL:
        for key, value, idle in (
            ("TRAIN.CROP", train.CROP, "random_resized"),
            ("TRAIN.AFFINE", train.AFFINE, [0.0] * 3),
            ("TRAIN.AUTO_AUGMENT", train.AUTO_AUGMENT, None),
            ("TRAIN.COLOR_JITTER", train.COLOR_JITTER, 0.0),
            ("DATA.SKIP_BROKEN", data.SKIP_BROKEN, False),
        ):
            require(value == idle, key, f"{idle} with DATA.LOADER dali, which crops, resizes and flips")
        require(train.INTERPOLATION != "random", "TRAIN.INTERPOLATION", "one of the others with DATA.LOADER dali")
    box = train.CUTMIX_MINMAX or [0.5, 0.5]
    require(0 <= box[0] <= box[1] <= 1, "TRAIN.CUTMIX_MINMAX", "0 <= low <= high <= 1")


def _check_recipe(config: CfgNode, require: Callable[[bool, str, str], None]) -> None:
    train = config.TRAIN
    require(all(0 <= beta < 1 for beta in train.OPTIMIZER.BETAS), "TRAIN.OPTIMIZER.BETAS", "0 <= values < 1")
    weights = train.CLASS_WEIGHTS if isinstance(train.CLASS_WEIGHTS, list) else []
    require(all(weight >= 0 for weight in weights), "TRAIN.CLASS_WEIGHTS", "values of 0 or more")
    require(
        train.WARMUP_EPOCHS + train.COOLDOWN_EPOCHS <= train.NUM_EPOCHS or not train.COOLDOWN_EPOCHS,
        "TRAIN.COOLDOWN_EPOCHS",
        f"NUM_EPOCHS {train.NUM_EPOCHS} to hold WARMUP_EPOCHS {train.WARMUP_EPOCHS} and it",
    )
    mixed = train.MIXUP_ALPHA > 0 or train.CUTMIX_ALPHA > 0 or train.CUTMIX_MINMAX is not None
    if mixed:
        require(
            train.LOSS != "cross_entropy",
            "TRAIN.LOSS",
            "auto, soft_target or bce: mixup and CutMix make distributions, not labels",
        )
        require(
            config.EVAL or config.DATA.BATCH_SIZE % 2 == 0,
            "DATA.BATCH_SIZE",
            "an even number: mixup and CutMix mix pairs of neighbours",
        )
    # What would do nothing isn't taken in silence.
    for key, idle, use, needed in (
        ("TRAIN.GRAD_CLIP_MODE", "norm", train.GRAD_CLIP, "GRAD_CLIP"),
        ("TRAIN.LR_SCALING", "linear", train.LINEAR_SCALED_LR, "LINEAR_SCALED_LR"),
        ("TRAIN.MIXUP_OFF_EPOCH", 0, mixed, "MIXUP_ALPHA, CUTMIX_ALPHA or CUTMIX_MINMAX"),
        ("TRAIN.BCE_TARGET_THRESH", None, train.LOSS == "bce", "LOSS bce"),
        ("TRAIN.BCE_SUM", False, train.LOSS == "bce", "LOSS bce"),
        ("TRAIN.TEACHER_PATH", None, train.DISTILLATION_TYPE, "DISTILLATION_TYPE hard or soft"),
    ):
        value = train[key.removeprefix("TRAIN.")]
        require(value == idle or bool(use), key, f"{idle}, or with it {needed}")


def _check_strategy(config: CfgNode, require: Callable[[bool, str, str], None]) -> None:
    values = dict(leaves(config))
    options = config.DIST.STRATEGY
    fleet, merges, sharding = config.DIST.ENGINE == "fleet", options.gradient_merge, options.sharding
    for key, idle, use, needed in (
        ("gradient_merge", False, fleet, "DIST.ENGINE fleet"),
        ("gradient_merge_configs.k_steps", 1, merges, "gradient_merge True"),
        ("recompute", False, fleet, "DIST.ENGINE fleet"),
        ("amp", False, fleet, "DIST.ENGINE fleet"),
        ("sharding", False, fleet, "DIST.ENGINE fleet"),
        ("sharding_configs.stage", 1, sharding, "sharding True"),
        ("fuse_grad_size_in_MB", 32, fleet and not sharding, "DIST.ENGINE fleet without sharding"),
        ("last_comm_group_size_MB", 1.0, fleet and not sharding, "DIST.ENGINE fleet without sharding"),
        ("find_unused_parameters", False, fleet and not sharding, "DIST.ENGINE fleet without sharding"),
    ):
        key = f"DIST.STRATEGY.{key}"
        require(values[key] == idle or use, key, f"{idle}, or with it {needed}")
    for key, value in carried_out(config).items():
        require(values[key] == value, key, f"{value}, as DIST.STRATEGY asks; give one of the two, or the same")
