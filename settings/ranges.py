"""What each key may be on its own: the choices, ranges and lengths of the keys that all runs share.

A range ends where nobody means it any more, and before a run fails of it, or never ends, without
naming the key.
"""

from collections.abc import Mapping
from typing import Any

from errors import InputError
from settings import registry
from settings.registry import KINDS
from settings.signatures import Factor, Part, Positive, Range, Rate, Share, between
from settings.values import LARGEST_INT, quoted


def _range(kind: Any) -> Range:
    [found] = kind.__metadata__
    return found


# ImageNet-C's (arXiv:1903.12261): the benchmark's, then those that the paper keeps for validation.
BENCHMARK: tuple[str, ...] = (
    "gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "snow",
    "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression",
)  # fmt: skip
CORRUPTIONS: tuple[str, ...] = (*BENCHMARK, "speckle_noise", "gaussian_blur", "spatter", "saturate")
SEVERITIES = (1, 2, 3, 4, 5)
_CHOICES = {kind.key: (*(None,) * kind.optional, *kind.names()) for kind in KINDS} | {
    "DATA.IMAGE_DTYPE": ("auto", "float32"),
    "DATA.CORRUPTION": (None, *CORRUPTIONS),
    "DATA.SEVERITY": SEVERITIES,
    "DATA.CROP_MODE": ("center", "squash"),
    "DATA.INTERPOLATION": ("bicubic", "bilinear", "nearest"),
    "DATA.LOADER": ("paddle", "dali"),
    "DATA.SAMPLER": ("shuffle", "balanced"),
    "DATA.SHUFFLE_MODE": ("global", "shard"),
    "DATA.SCALE_SCHEDULE": ("mixed", "progressive"),
    "MODEL.PRETRAINED_CLASSES": (None, "imagenet22k", "imagenet22k_swin"),
    "TRAIN.LR_SCALING": ("linear", "sqrt"),
    "TRAIN.LR_SCALED": ("all", "base"),
    "TRAIN.LAYER_DECAY_GROUPS": ("authors", "timm"),
    "TRAIN.GRAD_CLIP_MODE": ("norm", "value", "agc"),
    "TRAIN.DISTILLATION_TYPE": (None, "hard", "soft", "feature"),
    "TRAIN.CROP": ("random_resized", "random_resized_once", "simple", "short_side", "squash"),
    "TRAIN.INTERPOLATION": (None, "bicubic", "bilinear", "nearest", "random"),
    "TRAIN.RANDOM_ERASE_MODE": ("const", "rand", "pixel"),
    "TRAIN.MIXUP_MODE": ("batch", "pair", "elem"),
    "SAVE_ON_ERROR": ("stop", "continue"),
    "EVAL_ENGINE": ("eager", "inference"),
    "DIST.ENGINE": ("data_parallel", "fleet"),
    "DIST.STRATEGY.sharding_configs.stage": (1, 2, 3),
    **{key: own.choices + (None,) * own.optional for key, own in registry.own_keys().items() if own.choices},
}  # fmt: skip


_EVER = between(1, LARGEST_INT)  # how often something is done; so rarely is never
_BATCH, _EPOCHS, _SECONDS = (
    between(1, 10_000_000),
    between(0, 1_000_000),
    Range("above 0, at most 1000000", lambda value: 0.001 <= value <= 1e6),
)
_RANGES = (
    (_BATCH, (
        "DATA.BATCH_SIZE", "DATA.BATCH_SIZE_EVAL", "DATA.GLOBAL_BATCH", "TRAIN.LINEAR_SCALED_LR", "TRAIN.RECIPE_BATCH",
    )),
    (between(1, 10_000), ("DATA.IMAGE_SIZE", "DATA.MULTI_SCALE")),
    (between(0, 256), ("DATA.NUM_WORKERS",)),
    (between(1, 64), ("DATA.IMAGE_CHANNELS",)),
    (between(1, 1000), (
        "DATA.PREFETCH", "TRAIN.RANDOM_ERASE_COUNT", "TRAIN.REPEATED_AUGMENT", "DIST.STRATEGY.fuse_grad_size_in_MB",
    )),
    (between(0, 10_000_000), ("MODEL.NUM_CLASSES",)),
    (_EVER, (
        "KEEP_LAST", "REPORT_FREQ", "VALIDATE_FREQ", "TRAIN.ACCUM_ITER", "TRAIN.EARLY_STOP", "DATA.SHARD_SHUFFLE",
        "DATA.MAX_PIXELS",
    )),
    (between(2, 1000), ("DATA.FOLDS",)),
    (_range(Part), ("DATA.VAL_SPLIT",)),
    (between(0, LARGEST_INT), (
        "SEED", "DATA.FOLD", "DATA.SPLIT_SEED", "SAVE_FREQ", "SAVE_STEPS", "DIST.MAX_RESTART", "TRAIN.MIXUP_OFF_EPOCH",
    )),
    (between(1, 1_000_000), ("TRAIN.NUM_EPOCHS",)),
    (_EPOCHS, ("TRAIN.LAST_EPOCH", "TRAIN.WARMUP_EPOCHS", "TRAIN.COOLDOWN_EPOCHS")),
    (_range(Factor), (
        "TRAIN.WEIGHT_DECAY", "TRAIN.BASE_LR", "TRAIN.WARMUP_START_LR", "TRAIN.END_LR", "TRAIN.HEAD_LR",
        "TRAIN.EARLY_STOP_MIN",
    )),
    (_range(Positive), (
        "TRAIN.GRAD_CLIP", "TRAIN.DISTILLATION_TAU", "TRAIN.LAYER_DECAY",
    )),
    (between(1e-12, 1), ("TRAIN.LR_SCHEDULER.DECAY_RATE",)),
    (between(0, 1000), ("DATA.SCALE_SPREAD",)),
    (between(1e-30, 1), ("TRAIN.OPTIMIZER.EPS",)),
    (_SECONDS, ("SAVE_MINUTES", "TRAIN.MAX_MINUTES", "DIST.TIMEOUT", "DIST.INIT_TIMEOUT")),
    (between(0, 10), ("TRAIN.COLOR_JITTER",)),
    (Range("0 (off), or 0.001 to 1000", lambda value: not value or 0.001 <= value <= 1000), (
        "TRAIN.MIXUP_ALPHA", "TRAIN.CUTMIX_ALPHA",
    )),
    (_range(Rate), ("TRAIN.SMOOTHING", "TRAIN.MODEL_EMA_DECAY", "TRAIN.OPTIMIZER.MOMENTUM", "TRAIN.OPTIMIZER.BETAS")),
    (_range(Share), (
        "TRAIN.HFLIP", "TRAIN.VFLIP", "TRAIN.RANDOM_ERASE_PROB", "TRAIN.MIXUP_PROB", "TRAIN.MIXUP_SWITCH_PROB",
        "TRAIN.DISTILLATION_ALPHA", "TRAIN.LAYER_DECAY", "TRAIN.CUTMIX_MINMAX", "DATA.SCALE_RANDOM",
    )),
    (Range("0.1 <= value <= 1: images are resized to IMAGE_SIZE / it", lambda value: 0.1 <= value <= 1), (
        "DATA.CROP_PCT", "TRAIN.CROP_PCT",
    )),
    (between(-1000, 1000), ("DATA.IMAGENET_MEAN",)),
    (between(0.000001, 1000), ("DATA.IMAGENET_STD",)),
    (between(0, 1_000_000), ("TRAIN.CLASS_WEIGHTS", "TRAIN.POS_WEIGHT")),
    (Range("-1 (all), or 1 to 10000", lambda value: value == -1 or 1 <= value <= 10_000), ("NGPUS",)),
    *((own.range, (key,)) for key, own in registry.own_keys().items() if own.range),
)  # fmt: skip
_PATHS = (
    "DATA.DATA_PATH", "DATA.CACHE", "DATA.CLASSES", "DATA.LABELS", "MODEL.RESUME", "MODEL.PRETRAINED",
    "MODEL.PRETRAINED_ADAPTER",
    "TRAIN.TEACHER_MODEL", "TRAIN.TEACHER_PATH", "OUTPUT", "SAVE",
)  # fmt: skip
# bytes: below Linux's 4,096 and 255, for what a run adds
_LONGEST_PATH = 3500
_LONGEST_NAME = 200
_LENGTHS = {
    "TRAIN.OPTIMIZER.BETAS": 2,
    "TRAIN.CROP_SCALE": 2,
    "TRAIN.CROP_RATIO": 2,
    "TRAIN.CUTMIX_MINMAX": 2,
}
_LENGTHS |= {"TRAIN.AFFINE": 3}


def check_values(values: Mapping[str, Any]) -> None:
    """Raises InputError, naming the key, for a value that is none of its choices, or out of its
    range.

    Args:
        values: by dotted key.
    """
    for key, choices in _CHOICES.items():
        registry.refuse_other(key, values[key], choices)
    for allowed, keys in _RANGES:
        for key in _keys_with_values(values, keys):
            numbers = values[key] if isinstance(values[key], list) else [values[key]]
            if not numbers or not all(map(allowed.holds, numbers)):
                raise InputError(f"{key} is {quoted(values[key])}, expected {allowed.said}")
    for key in _keys_with_values(values, _PATHS):
        path = values[key].encode()
        if len(path) > _LONGEST_PATH or max(map(len, path.split(b"/"))) > _LONGEST_NAME:
            expected = f"a path of at most {_LONGEST_PATH} bytes, {_LONGEST_NAME} a name"
            raise InputError(f"{key} is {quoted(values[key])}, expected {expected}")
    for key in _keys_with_values(values, tuple(_LENGTHS)):
        if len(values[key]) != _LENGTHS[key]:
            raise InputError(f"{key} is {quoted(values[key])}, expected {_LENGTHS[key]} values")


def _keys_with_values(values: Mapping[str, Any], keys: tuple[str, ...]) -> list[str]:
    return [key for key in keys if values[key] not in (None, "auto")]
