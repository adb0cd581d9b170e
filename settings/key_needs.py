"""What each key needs so as to do something: one that has nothing to act on is idle, and refused."""

from collections.abc import Mapping
from typing import Any

from settings import registry
from settings.needs import Need
from settings.options import Configuration, leaves
from settings.registry import KINDS, datasets


def mixes(config: Configuration) -> bool:
    """Returns whether training mixes its images: mixup or CutMix is on."""
    return _MIXING.met(dict(leaves(config.TRAIN, "TRAIN.")))


def float_pixels(values: Mapping[str, Any]) -> bool:
    """Returns whether images are float32 up to the model, in full depth; else they are uint8,
    colours or grey.

    Args:
        values: DATA's keys, by their names.
    """
    return values["IMAGE_DTYPE"] == "float32" or values["IMAGE_CHANNELS"] not in (1, 3)


def _is(key: str, *values: Any) -> Need:
    return Need(
        f"without {key} {' or '.join(map(str, values))}", (key,), lambda found: found[key] in values
    )


def _is_not(key: str, *values: Any) -> Need:
    return Need(
        f"with {key} {' or '.join(map(str, values))}",
        (key,),
        lambda found: found[key] not in values,
    )


def _is_set(key: str) -> Need:
    return Need(f"without {key}", (key,), lambda found: bool(found[key]))


def _is_unset(key: str) -> Need:
    return Need(f"with {key}", (key,), lambda found: not found[key])


def _above_zero(key: str) -> Need:
    return Need(f"without {key} above 0", (key,), lambda found: found[key] > 0)


def _is_one_of(kind: registry.Registry, names: tuple[str, ...]) -> tuple[Need, ...]:
    """One of these components; nothing where they are all of their kind."""
    others = tuple(name for name in kind.names() if name not in names)
    if 2 * len(others) < len(names):
        return (_is_not(kind.key, *others),) if others else ()
    return (_is(kind.key, *names),)


_WEIGHTS = _is_set("MODEL.PRETRAINED")._replace(files_wait=True)
_TRAINING = Need("under EVAL", ("EVAL",), lambda found: not found["EVAL"], files_wait=True)
_EVALUATION = _is("EVAL", True)
_FLEET = _is("DIST.ENGINE", "fleet")
_NO_SHARDING = _is_unset("DIST.STRATEGY.sharding")
_FILES, _SHARDS = (
    _is_one_of(datasets, datasets.names(returns=kinds))
    for kinds in (("Files", "Shards"), ("Shards",))
)
_STORED = _is_one_of(datasets, datasets.names(returns=("Files", "Shards", "Arrays")))
_NO_CACHE = _is_unset("DATA.CACHE")
_LOADED_AHEAD = Need(
    "without DATA.NUM_WORKERS above 0 or DATA.LOADER dali",
    ("DATA.NUM_WORKERS", "DATA.LOADER", "EVAL"),
    lambda found: found["DATA.NUM_WORKERS"] > 0
    or (found["DATA.LOADER"] == "dali" and not found["EVAL"]),
)
_EIGHT_BITS = Need(
    "with pixels of float32, which aren't decoded that way",
    ("DATA.IMAGE_DTYPE", "DATA.IMAGE_CHANNELS"),
    lambda found: not float_pixels({key.partition(".")[2]: found[key] for key in _EIGHT_BITS.keys}),
)
_OWN_BATCH = Need(
    "with DATA.GLOBAL_BATCH, of which it is a share",
    ("DATA.GLOBAL_BATCH",),
    lambda found: found["EVAL"] or not found["DATA.GLOBAL_BATCH"],
)
_PARTS = Need(
    "without DATA.VAL_SPLIT or DATA.FOLDS",
    ("DATA.VAL_SPLIT", "DATA.FOLDS"),
    lambda found: found["DATA.VAL_SPLIT"] is not None or found["DATA.FOLDS"] is not None,
)
_PROGRESSIVE = _is("DATA.SCALE_SCHEDULE", "progressive")
_BCE = Need(
    "without TRAIN.LOSS bce, or auto under TASK multilabel",
    ("TRAIN.LOSS", "TASK"),
    lambda found: found["TRAIN.LOSS"] == "bce"
    or (found["TRAIN.LOSS"] == "auto" and found["TASK"] == "multilabel"),
)
_SCHEDULE = "TRAIN.LR_SCHEDULER.NAME"
_OPTIMIZER = "TRAIN.OPTIMIZER.NAME"
_MIXUP = _above_zero("TRAIN.MIXUP_ALPHA")
_CUTMIX = Need(
    "without TRAIN.CUTMIX_ALPHA above 0 or TRAIN.CUTMIX_MINMAX",
    ("TRAIN.CUTMIX_ALPHA", "TRAIN.CUTMIX_MINMAX"),
    lambda found: found["TRAIN.CUTMIX_ALPHA"] > 0 or found["TRAIN.CUTMIX_MINMAX"] is not None,
)
_MIXING = Need(
    "without TRAIN.MIXUP_ALPHA or TRAIN.CUTMIX_ALPHA above 0, or TRAIN.CUTMIX_MINMAX",
    (*_MIXUP.keys, *_CUTMIX.keys),
    lambda found: _MIXUP.met(found) or _CUTMIX.met(found),
)

# Every key of config.py, with what it needs, and keys of architectures: those that aren't here need
# nothing. A key whose loss would be missed conflicts instead, and needs nothing. A key that
# components read, as their keyword, needs one of these as well.
_DECLARED = (
    # What a script for both hands to training and evaluation alike (-batch_size, -accum_iter,
    # -last_epoch, -amp) needs no training; nor does what depends on the machine need that.
    ((), (
        "BASE", "TASK", "DATA.BATCH_SIZE_EVAL", "DATA.DATASET", "DATA.IMAGE_SIZE", "DATA.IMAGE_CHANNELS",
        "DATA.IMAGE_DTYPE", "DATA.CROP_PCT",
        "DATA.CROP_MODE", "DATA.INTERPOLATION", "DATA.NUM_WORKERS", "DATA.IMAGENET_MEAN", "DATA.IMAGENET_STD",
        "MODEL.TYPE", "MODEL.NAME", "MODEL.RESUME", "MODEL.PRETRAINED", "MODEL.NUM_CLASSES", "TRAIN.LAST_EPOCH",
        "TRAIN.ACCUM_ITER", "OUTPUT", "TAG", "SAVE_ON_ERROR", "REPORT", "SEED", "EVAL", "AMP", "NGPUS", "DETERMINISTIC",
        "CUDNN_BENCHMARK", "TF32", "TUNE_CPU", "DIST.TIMEOUT", "DIST.INIT_TIMEOUT",
    )),
    ((_TRAINING,), (
        "DATA.GLOBAL_BATCH", "DATA.LOADER", "DATA.DROP_LAST", "DATA.SHUFFLE_MODE", "DATA.SAMPLER", "DATA.MULTI_SCALE",
        "MODEL.DROPOUT",
        "MODEL.ATTENTION_DROPOUT", "MODEL.DROPPATH", "MODEL.PATCH_DROP", "MODEL.RECOMPUTE", "MODEL.HEAD_INIT_SCALE",
        "MODEL.HEAD_INIT_BIAS", "MODEL.ZERO_INIT_LAST",
        "TRAIN.NUM_EPOCHS", "TRAIN.MAX_MINUTES", "TRAIN.EARLY_STOP", "TRAIN.WARMUP_EPOCHS", "TRAIN.WEIGHT_DECAY",
        "TRAIN.DECAY_ALL",
        "TRAIN.LR_SCHEDULER.PER_EPOCH", "TRAIN.BASE_LR", "TRAIN.LINEAR_SCALED_LR",
        "TRAIN.LAYER_DECAY", "TRAIN.HEAD_LR", "TRAIN.ADAPTER.NAME", "TRAIN.GRAD_CLIP", "TRAIN.SYNC_BN", _SCHEDULE,
        _OPTIMIZER,
        "TRAIN.MODEL_EMA", "TRAIN.LOSS", "TRAIN.SMOOTHING", "TRAIN.CLASS_WEIGHTS", "TRAIN.DISTILLATION_TYPE",
        "TRAIN.CROP", "TRAIN.INTERPOLATION", "TRAIN.HFLIP", "TRAIN.VFLIP", "TRAIN.AFFINE", "TRAIN.AUTO_AUGMENT",
        "TRAIN.COLOR_JITTER", "TRAIN.RANDOM_ERASE_PROB", "TRAIN.REPEATED_AUGMENT", "TRAIN.MIXUP_ALPHA",
        "TRAIN.CUTMIX_MINMAX", "SAVE_FREQ", "SAVE_STEPS", "SAVE_MINUTES", "KEEP_LAST", "BEST_METRIC", "REPORT_FREQ",
        "VALIDATE_FREQ", "TRACKERS", "TO_STATIC", "DIST.MAX_RESTART", "DIST.ENGINE",
    )),
    ((_EVALUATION,), ("EVAL_ENGINE", "DATA.CLASSES", "DATA.CORRUPTION")),
    ((_EVALUATION, _is_set("DATA.CORRUPTION")), ("DATA.SEVERITY",)),
    ((_EVALUATION, *_is_one_of(datasets, datasets.names(returns=("Files",)))), ("DATA.LABELS",)),
    ((_is("AMP", True),), ("AMP_EVAL",)),
    ((_is_unset("OUTPUT"),), ("SAVE",)),
    ((_OWN_BATCH,), ("DATA.BATCH_SIZE",)),
    (_STORED, ("DATA.CACHE", "DATA.FOLDS")),
    ((_is_set("DATA.FOLDS"), *_STORED), ("DATA.FOLD",)),
    ((_PARTS, *_STORED), ("DATA.SPLIT_SEED",)),
    ((_PARTS, *_FILES), ("DATA.SPLIT_GROUPS",)),
    ((*_FILES, _NO_CACHE, _EIGHT_BITS), ("DATA.FAST_EVAL",)),
    (_FILES, ("DATA.MAX_PIXELS", "DATA.EXIF_ORIENTATION", "DATA.VAL_SPLIT")),
    ((_TRAINING, *_FILES), ("DATA.SKIP_BROKEN",)),
    ((_TRAINING, *_SHARDS, _is("DATA.SAMPLER", "shuffle"), _NO_CACHE), ("DATA.SHARD_SHUFFLE",)),
    ((_TRAINING, _is_set("DATA.MULTI_SCALE")), ("DATA.SCALE_SCHEDULE",)),
    ((_TRAINING, _is_set("DATA.MULTI_SCALE"), _PROGRESSIVE), ("DATA.SCALE_SPREAD", "DATA.SCALE_RANDOM")),
    ((_LOADED_AHEAD,), ("DATA.PREFETCH",)),
    ((_WEIGHTS,), ("MODEL.PRETRAINED_ALLOW", "MODEL.PRETRAINED_CLASSES", "MODEL.PRETRAINED_ADAPTER")),
    ((_TRAINING, _is_unset("TRAIN.ADAPTER.NAME")), ("TRAIN.FREEZE",)),
    ((_above_zero("MODEL.PROMPT_TOKENS"),), ("MODEL.PROMPT_DEEP",)),
    ((_TRAINING, _above_zero("TRAIN.WARMUP_EPOCHS")), ("TRAIN.WARMUP_START_LR",)),
    ((_TRAINING, _is_not(_SCHEDULE, "constant")), ("TRAIN.END_LR", "TRAIN.COOLDOWN_EPOCHS")),
    ((_TRAINING, _is_set("TRAIN.LINEAR_SCALED_LR")), ("TRAIN.LR_SCALING", "TRAIN.LR_SCALED")),
    ((_TRAINING, _is_set("TRAIN.LAYER_DECAY")), ("TRAIN.LAYER_DECAY_GROUPS",)),
    ((_TRAINING, _is_unset("TRAIN.LINEAR_SCALED_LR")), ("TRAIN.RECIPE_BATCH",)),
    ((_TRAINING, _is_set("TRAIN.GRAD_CLIP")), ("TRAIN.GRAD_CLIP_MODE",)),
    ((_TRAINING, _is_set("TRAIN.EARLY_STOP")), ("TRAIN.EARLY_STOP_MIN",)),
    ((_above_zero("TRAIN.WARMUP_EPOCHS"),), ("TRAIN.LR_SCHEDULER.WARMUP_PREFIX",)),
    ((_above_zero("TRAIN.OPTIMIZER.MOMENTUM"),), ("TRAIN.OPTIMIZER.NESTEROV",)),
    ((_TRAINING, _above_zero("MODEL.DROPPATH")), ("MODEL.DROPPATH_SHAPE",)),
    ((_TRAINING, _is("TRAIN.MODEL_EMA", True)), ("TRAIN.MODEL_EMA_DECAY", "TRAIN.MODEL_EMA_WARMUP")),
    ((_TRAINING, _is("TRAIN.DISTILLATION_TYPE", "hard", "soft", "feature")), (
        "TRAIN.DISTILLATION_ALPHA", "TRAIN.TEACHER_MODEL", "TRAIN.TEACHER_PATH",
    )),
    ((_TRAINING, _is("TRAIN.DISTILLATION_TYPE", "soft")), ("TRAIN.DISTILLATION_TAU",)),
    ((_TRAINING, _is("TRAIN.CROP", "random_resized", "random_resized_once")), ("TRAIN.CROP_SCALE", "TRAIN.CROP_RATIO")),
    ((_TRAINING, _is("TRAIN.CROP", "short_side", "squash")), ("TRAIN.CROP_PCT",)),
    ((_TRAINING, _above_zero("TRAIN.RANDOM_ERASE_PROB")), ("TRAIN.RANDOM_ERASE_MODE", "TRAIN.RANDOM_ERASE_COUNT")),
    ((_TRAINING, _BCE), ("TRAIN.POS_WEIGHT",)),
    ((_TRAINING, _is_unset("TRAIN.CUTMIX_MINMAX")), ("TRAIN.CUTMIX_ALPHA",)),
    ((_TRAINING, _MIXING), ("TRAIN.MIXUP_PROB", "TRAIN.MIXUP_MODE", "TRAIN.MIXUP_OFF_EPOCH")),
    ((_TRAINING, _MIXUP, _CUTMIX), ("TRAIN.MIXUP_SWITCH_PROB",)),
    ((_TRAINING, _FLEET, _is("DIST.STRATEGY.sharding", True)), ("DIST.STRATEGY.sharding_configs.stage",)),
    ((_TRAINING, _FLEET), ("DIST.STRATEGY.sharding", "DIST.STRATEGY.fuse_grad_size_in_MB")),
    ((_TRAINING, _FLEET, _NO_SHARDING), ("DIST.STRATEGY.find_unused_parameters",)),
)  # fmt: skip
NEEDS: dict[str, tuple[Need, ...]] = {key: needs for needs, keys in _DECLARED for key in keys}
for _kind in KINDS:
    _first = () if _kind is datasets else (_TRAINING,)
    NEEDS |= {
        key: (*_first, *_is_one_of(_kind, names), *NEEDS.get(key, ()))
        for key, names in _kind.readers().items()
    }
