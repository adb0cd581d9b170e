"""What the values of a configuration may be: choices, ranges, keys that have to fit each other, or need each other.

Two keys that can't both be had are a conflict (``check``). A key that has nothing to act on is idle (``NEEDS``).
"""

from collections.abc import Callable
from typing import Any

from configs import registry
from configs.needs import Need
from configs.ranges import check_values
from configs.registry import KINDS, datasets
from configs.values import quoted
from errors import InputError
from options import Configuration, leaves


def mixes(config: Configuration) -> bool:
    """Returns whether training mixes its images: mixup or CutMix is on."""
    return _MIXING.met(dict(leaves(config)))


def check(config: Configuration) -> None:
    """Raises InputError, naming the key, what it is and what it may be, for a configuration that can't be meant."""
    values = dict(leaves(config))

    def require(valid: bool, key: str, expected: str) -> None:
        if not valid:
            raise InputError(f"{key} is {quoted(values.get(key))}, expected {expected}")

    check_values(values)
    _check_data(config, require)
    _check_recipe(config, require)
    require(not (config.MODEL.RESUME and config.EVAL), "MODEL.RESUME", "-pretrained FILE with -eval")
    automatic = config.MODEL.RESUME == "auto"
    one = automatic or not (config.MODEL.RESUME and config.MODEL.PRETRAINED)
    require(one, "MODEL.RESUME", "auto with -pretrained, which a run then starts from, or one of both")
    require(not (config.TO_STATIC and config.MODEL.get("RECOMPUTE")), "TO_STATIC", "False with MODEL.RECOMPUTE")
    chosen = not (config.CUDNN_BENCHMARK and config.DETERMINISTIC)
    require(chosen, "CUDNN_BENCHMARK", "False with DETERMINISTIC: which algorithm is fastest changes from run to run")
    several = config.EVAL or not config.MODEL.get("HEAD_BATCH_NORM") or config.DATA.BATCH_SIZE > 1
    require(several, "DATA.BATCH_SIZE", "2 or more with MODEL.HEAD_BATCH_NORM: one image has no variance")
    anew = config.OUTPUT and config.MODEL.RESUME in (None, "auto") and not config.TRAIN.LAST_EPOCH
    require(
        not config.DIST.MAX_RESTART or config.EVAL or anew,
        "DIST.MAX_RESTART",
        "0, or -output with it, in which to look for checkpoints, and no -last_epoch or -resume=PATH",
    )
    require(not automatic or config.OUTPUT, "MODEL.RESUME", "-output with it: the folder in which to look")


def _check_data(config: Configuration, require: Callable[[bool, str, str], None]) -> None:
    data, train, channels = config.DATA, config.TRAIN, config.DATA.IMAGE_CHANNELS
    for key, values in (("DATA.IMAGENET_MEAN", data.IMAGENET_MEAN), ("DATA.IMAGENET_STD", data.IMAGENET_STD)):
        require(
            len(values) in (1, channels),
            key,
            f"1 {f'or {channels} values' if channels > 1 else 'value'}, as IMAGE_CHANNELS",
        )
    require(
        isinstance(data.IMAGE_SIZE, int) or len(data.IMAGE_SIZE) == 2,
        "DATA.IMAGE_SIZE",
        "a number of pixels, or two: [height, width]",
    )
    turn, shift, scale = train.AFFINE
    within = 0 <= turn <= 360 and 0 <= shift <= 1 and 0 <= scale < 1
    require(within, "TRAIN.AFFINE", "degrees of 0 to 360, a shift of 0 to 1, a scaling of 0 <= value < 1")
    require(
        1e-6 <= train.CROP_SCALE[0] <= train.CROP_SCALE[1] <= 1,
        "TRAIN.CROP_SCALE",
        "0 < low <= high <= 1, from 1e-6 on",
    )
    low, high = train.CROP_RATIO
    require(0.001 <= low <= high <= 1000, "TRAIN.CROP_RATIO", "0 < low <= high, from 0.001 to 1000")
    plain = data.SAMPLER == "shuffle" and data.SHARD_SHUFFLE is None and train.REPEATED_AUGMENT == 1
    expected = "global, or with it SAMPLER shuffle, REPEATED_AUGMENT 1 and no SHARD_SHUFFLE"
    require(data.SHUFFLE_MODE == "global" or plain, "DATA.SHUFFLE_MODE", expected)
    sizes = data.MULTI_SCALE
    once = sizes is None or (len(set(sizes)) == len(sizes) and train.REPEATED_AUGMENT == 1)
    require(once, "DATA.MULTI_SCALE", "None, or sizes, each once, with REPEATED_AUGMENT 1")
    fixed = data.SCALE_SCHEDULE != "progressive" or sizes is None
    require(fixed or len(sizes or ()) > 1, "DATA.MULTI_SCALE", "two sizes or more with SCALE_SCHEDULE progressive")
    expected = "None with SCALE_SCHEDULE progressive: its steps don't take equally long"
    require(fixed or train.MAX_MINUTES is None, "TRAIN.MAX_MINUTES", expected)
    require(data.FOLDS is None or data.FOLD < data.FOLDS, "DATA.FOLD", f"0 to {(data.FOLDS or 1) - 1}, of FOLDS")
    require(data.FOLDS is None or data.get("VAL_SPLIT") is None, "DATA.FOLDS", "None with VAL_SPLIT, or VAL_SPLIT None")
    cached = data.CACHE is None or not data.SKIP_BROKEN
    require(cached, "DATA.CACHE", "None with SKIP_BROKEN: a cache holds every image")
    if data.LOADER == "dali" and not config.EVAL:
        for key, value, idle in (
            ("TRAIN.AFFINE", train.AFFINE, [0.0] * 3),
            ("TRAIN.AUTO_AUGMENT", train.AUTO_AUGMENT, None),
            ("TRAIN.COLOR_JITTER", train.COLOR_JITTER, 0.0),
            ("DATA.SKIP_BROKEN", data.SKIP_BROKEN, False),
            ("DATA.EXIF_ORIENTATION", data.EXIF_ORIENTATION, False),
            ("DATA.MULTI_SCALE", data.MULTI_SCALE, None),
        ):
            require(value == idle, key, f"{idle} with DATA.LOADER dali, which crops, resizes and flips")
        drawn = train.CROP.startswith("random_resized")
        require(drawn, "TRAIN.CROP", "random_resized or random_resized_once with DATA.LOADER dali")
        require(train.INTERPOLATION != "random", "TRAIN.INTERPOLATION", "one of the others with DATA.LOADER dali")
    box = train.CUTMIX_MINMAX or [0.5, 0.5]
    require(0 <= box[0] <= box[1] <= 1, "TRAIN.CUTMIX_MINMAX", "0 <= low <= high <= 1")


def _check_recipe(config: Configuration, require: Callable[[bool, str, str], None]) -> None:
    train = config.TRAIN
    weights = train.CLASS_WEIGHTS if isinstance(train.CLASS_WEIGHTS, list) else [1.0]
    require(max(weights) >= 1e-6, "TRAIN.CLASS_WEIGHTS", "a value above 0, and 1e-6 or more: nothing would be learned")
    if train.DISTILLATION_TYPE == "feature" and not config.EVAL:
        whole = not config.MODEL.get("PATCH_DROP")
        require(whole, "MODEL.PATCH_DROP", "0 with DISTILLATION_TYPE feature: every place has to be there")
        require(train.LOSS != "token_label", "TRAIN.LOSS", "another one with DISTILLATION_TYPE feature")
    steps = train.LR_SCHEDULER.MILESTONES
    require(steps == sorted(set(steps)), "TRAIN.LR_SCHEDULER.MILESTONES", "epochs in rising order, each once")
    held = train.WARMUP_EPOCHS + train.COOLDOWN_EPOCHS <= train.NUM_EPOCHS or not train.COOLDOWN_EPOCHS
    expected = f"NUM_EPOCHS {train.NUM_EPOCHS} to hold WARMUP_EPOCHS {train.WARMUP_EPOCHS} and it"
    require(held, "TRAIN.COOLDOWN_EPOCHS", expected)
    falling = train.LR_SCHEDULER.WSD_DECAY_EPOCHS
    require(
        config.EVAL
        or train.LR_SCHEDULER.NAME != "wsd"
        or train.WARMUP_EPOCHS + (falling or 0) + train.COOLDOWN_EPOCHS <= train.NUM_EPOCHS,
        "TRAIN.LR_SCHEDULER.WSD_DECAY_EPOCHS",
        f"at most the {max(0, train.NUM_EPOCHS - train.WARMUP_EPOCHS - train.COOLDOWN_EPOCHS):g} of {train.NUM_EPOCHS}"
        " epochs that warm-up and cool-down leave",
    )
    require(
        config.EVAL or not 0 < train.NUM_EPOCHS <= train.WARMUP_EPOCHS,
        "TRAIN.WARMUP_EPOCHS",
        f"fewer than TRAIN.NUM_EPOCHS, {train.NUM_EPOCHS}: a tenth of them, say; the run would end before BASE_LR",
    )
    require(
        train.LR_SCHEDULER.NAME != "onecycle"
        or config.EVAL
        or 0 < 2 * train.WARMUP_EPOCHS < train.NUM_EPOCHS - train.COOLDOWN_EPOCHS,
        "TRAIN.WARMUP_EPOCHS",
        f"more than 0 and less than half of the {train.NUM_EPOCHS - train.COOLDOWN_EPOCHS} epochs of onecycle",
    )
    if mixes(config):
        *others, last = (
            name for name, loss in registry.losses.components.items() if loss.given.get("takes") != "labels"
        )
        require(
            train.LOSS in (*others, last),
            "TRAIN.LOSS",
            f"{', '.join(others)} or {last}: mixup and CutMix make distributions, not labels",
        )
        even = config.EVAL or config.DATA.BATCH_SIZE % 2 == 0
        require(even, "DATA.BATCH_SIZE", "an even number: mixup and CutMix mix pairs of neighbours")
    _check_task(config, require)
    _check_threshold(config, require)


def _check_task(config: Configuration, require: Callable[[bool, str, str], None]) -> None:
    task, train = config.TASK, config.TRAIN
    metrics = registry.tasks.components[task].given.get("metrics", "").split()
    registry.refuse_other("BEST_METRIC", config.BEST_METRIC, ("auto", *metrics, "loss"))
    if task != "multilabel" or config.EVAL:
        return
    each = [name for name, loss in registry.losses.components.items() if loss.given.get("takes") == "any"]
    require(
        train.LOSS in each, "TRAIN.LOSS", f"one of {', '.join(each)} with TASK multilabel: a yes or no for each class"
    )
    require(train.DISTILLATION_TYPE is None, "TRAIN.DISTILLATION_TYPE", "None with TASK multilabel: it is of one class")
    require(config.DATA.SAMPLER == "shuffle", "DATA.SAMPLER", "shuffle with TASK multilabel: an image has no one class")


def _check_threshold(config: Configuration, require: Callable[[bool, str, str], None]) -> None:
    """BCE_TARGET_THRESH has to lie between a target's two values: else all of them are 1, or all are 0."""
    train, classes = config.TRAIN, config.MODEL.NUM_CLASSES
    threshold, smoothing = train.BCE_TARGET_THRESH, train.SMOOTHING
    if threshold is None or train.LOSS != "bce" or not classes:
        return
    halves = classes == "auto" or config.TASK == "multilabel"  # not known yet, or a yes and a no
    off = smoothing / (2 if halves else classes)  # the target of what isn't the label
    on = 1 - smoothing + off  # the label's own
    require(
        threshold > off or smoothing == 0 or (classes == "auto" and threshold > 0),
        "TRAIN.BCE_TARGET_THRESH",
        f"above {off:.3g}, SMOOTHING over NUM_CLASSES, the target of every class: all targets would be 1",
    )
    require(threshold < on, "TRAIN.BCE_TARGET_THRESH", f"below {on:.3g}, the label's own target: all would be 0")


# ----------------------------------------------------------------- idle keys


def _is(key: str, *values: Any) -> Need:
    return Need(f"without {key} {' or '.join(map(str, values))}", (key,), lambda found: found[key] in values)


def _is_not(key: str, *values: Any) -> Need:
    return Need(f"with {key} {' or '.join(map(str, values))}", (key,), lambda found: found[key] not in values)


def _is_set(key: str) -> Need:
    return Need(f"without {key}", (key,), lambda found: bool(found[key]))


def _is_unset(key: str) -> Need:
    return Need(f"with {key}", (key,), lambda found: not found[key])


def _above_zero(key: str) -> Need:
    return Need(f"without {key} above 0", (key,), lambda found: found[key] > 0)


def _chosen(kind: registry.Registry, names: tuple[str, ...]) -> tuple[Need, ...]:
    """One of these components; nothing where they are all of their kind."""
    others = tuple(name for name in kind.names() if name not in names)
    if 2 * len(others) < len(names):
        return (_is_not(kind.key, *others),) if others else ()
    return (_is(kind.key, *names),)


_WEIGHTS = _is_set("MODEL.PRETRAINED")._replace(files_wait=True)
_TRAINING = Need("under EVAL", ("EVAL",), lambda found: not found["EVAL"], files_wait=True)
_FLEET, _NO_SHARDING = _is("DIST.ENGINE", "fleet"), _is_unset("DIST.STRATEGY.sharding")
_FILES, _SHARDS = (_chosen(datasets, datasets.names(returns=kinds)) for kinds in (("Files", "Shards"), ("Shards",)))
_STORED, _NO_CACHE = _chosen(datasets, datasets.names(returns=("Files", "Shards", "Arrays"))), _is_unset("DATA.CACHE")
_LOADED_AHEAD = Need(
    "without DATA.NUM_WORKERS above 0 or DATA.LOADER dali",
    ("DATA.NUM_WORKERS", "DATA.LOADER", "EVAL"),
    lambda found: found["DATA.NUM_WORKERS"] > 0 or (found["DATA.LOADER"] == "dali" and not found["EVAL"]),
)
_OWN_BATCH = Need(
    "with DATA.GLOBAL_BATCH, of which it is a share",
    ("DATA.GLOBAL_BATCH",),
    lambda found: found["EVAL"] or not found["DATA.GLOBAL_BATCH"],
)
_PROGRESSIVE = _is("DATA.SCALE_SCHEDULE", "progressive")
_BCE = Need(
    "without TRAIN.LOSS bce, or auto under TASK multilabel",
    ("TRAIN.LOSS", "TASK"),
    lambda found: found["TRAIN.LOSS"] == "bce" or (found["TRAIN.LOSS"] == "auto" and found["TASK"] == "multilabel"),
)
_SCHEDULE, _OPTIMIZER = "TRAIN.LR_SCHEDULER.NAME", "TRAIN.OPTIMIZER.NAME"
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

# Every key of config.py, with what it needs, and keys of architectures: those that aren't here need nothing. A key
# whose loss would be missed conflicts instead, and needs nothing. A key that components read, as their keyword, needs
# one of these as well.
_DECLARED = (
    # What a script for both hands to training and evaluation alike (-batch_size, -accum_iter, -last_epoch, -amp)
    # needs no training; nor does what depends on the machine need that.
    ((), (
        "BASE", "TASK", "DATA.BATCH_SIZE_EVAL", "DATA.DATASET", "DATA.IMAGE_SIZE", "DATA.IMAGE_CHANNELS",
        "DATA.CROP_PCT",
        "DATA.CROP_MODE", "DATA.INTERPOLATION", "DATA.NUM_WORKERS", "DATA.IMAGENET_MEAN", "DATA.IMAGENET_STD",
        "MODEL.TYPE", "MODEL.NAME", "MODEL.RESUME", "MODEL.PRETRAINED", "MODEL.NUM_CLASSES", "TRAIN.LAST_EPOCH",
        "TRAIN.ACCUM_ITER", "OUTPUT", "TAG", "SAVE_ON_ERROR", "SEED", "EVAL", "AMP", "NGPUS", "DETERMINISTIC",
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
        "VALIDATE_FREQ", "TO_STATIC", "DIST.MAX_RESTART", "DIST.ENGINE",
    )),
    ((_is("EVAL", True),), ("EVAL_ENGINE",)),
    ((_is("AMP", True),), ("AMP_EVAL",)),
    ((_is_unset("OUTPUT"),), ("SAVE",)),
    ((_OWN_BATCH,), ("DATA.BATCH_SIZE",)),
    (_STORED, ("DATA.CACHE", "DATA.FOLDS")),
    ((_is_set("DATA.FOLDS"), *_STORED), ("DATA.FOLD", "DATA.FOLDS_SEED")),
    ((_is_set("DATA.FOLDS"), *_FILES), ("DATA.FOLDS_GROUPS",)),
    ((*_FILES, _NO_CACHE), ("DATA.FAST_EVAL",)),
    (_FILES, ("DATA.MAX_PIXELS", "DATA.EXIF_ORIENTATION")),
    ((_TRAINING, *_FILES), ("DATA.SKIP_BROKEN",)),
    ((_is_set("DATA.VAL_SPLIT"),), ("DATA.VAL_SPLIT_SEED", "DATA.VAL_SPLIT_GROUPS")),
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
    NEEDS |= {key: (*_first, *_chosen(_kind, names), *NEEDS.get(key, ())) for key, names in _kind.readers().items()}
