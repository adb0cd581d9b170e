"""What the values of a configuration may be: choices, ranges, keys that have to fit each other.

Two keys that can't both be had are a conflict (``check``). A key that has nothing to act on is idle
(``settings.key_needs``).
"""

from collections.abc import Callable, Mapping
from typing import Any

from errors import InputError
from settings import registry
from settings.key_needs import float_pixels, mixes
from settings.options import Configuration, pair
from settings.ranges import check_values
from settings.values import quoted

_LEAST_CORRUPTED = 32  # pixels of a side, which the corruptions' blurs need


def check(config: Configuration, values: Mapping[str, Any]) -> None:
    """Raises InputError, naming the key, what it is and what it may be, for a configuration that
    can't be meant.

    Args:
        values: the same, by dotted key.
    """

    def require(valid: bool, key: str, expected: str) -> None:
        if not valid:
            raise InputError(f"{key} is {quoted(values.get(key))}, expected {expected}")

    check_values(values)
    trackers = config.TRACKERS or []
    require(len(set(trackers)) == len(trackers), "TRACKERS", "each once")
    for name in trackers:
        registry.refuse_other("TRACKERS", name, registry.trackers.names())
    _check_data(config, require)
    if not config.EVAL:
        _check_augmentation(config, require)
    _check_recipe(config, require)
    require(
        not (config.MODEL.RESUME and config.EVAL),
        "MODEL.RESUME",
        "None with -eval; give the weights by -pretrained FILE",
    )
    automatic = config.MODEL.RESUME == "auto"
    one = automatic or not (config.MODEL.RESUME and config.MODEL.PRETRAINED)
    require(one, "MODEL.RESUME", "auto together with -pretrained, or only one of the two")
    require(
        not (config.TO_STATIC and config.MODEL.get("RECOMPUTE")),
        "TO_STATIC",
        "False with MODEL.RECOMPUTE",
    )
    _check_stage_3(config, require)
    chosen = not (config.CUDNN_BENCHMARK and config.DETERMINISTIC)
    require(
        chosen,
        "CUDNN_BENCHMARK",
        "False with DETERMINISTIC: which algorithm is fastest changes from run to run",
    )
    several = config.EVAL or not config.MODEL.get("HEAD_BATCH_NORM") or config.DATA.BATCH_SIZE > 1
    require(
        several,
        "DATA.BATCH_SIZE",
        "2 or more with MODEL.HEAD_BATCH_NORM: one image has no variance",
    )
    anew = config.OUTPUT and config.MODEL.RESUME in (None, "auto") and not config.TRAIN.LAST_EPOCH
    require(
        not config.DIST.MAX_RESTART or config.EVAL or anew,
        "DIST.MAX_RESTART",
        "0, or -output with it (the folder of the checkpoints) and neither -last_epoch nor -resume=PATH",
    )
    require(
        not automatic or config.OUTPUT,
        "MODEL.RESUME",
        "-output with it: the folder of the checkpoints",
    )


def _check_stage_3(config: Configuration, require: Callable[[bool, str, str], None]) -> None:
    """What sharding the weights asks for: blocks that are computed anew, and no second copy of all
    weights.
    """
    options = config.DIST.STRATEGY
    key = "DIST.STRATEGY.sharding_configs.stage"
    if (
        config.EVAL
        or config.DIST.ENGINE != "fleet"
        or not options.sharding
        or options.sharding_configs.stage != 3
    ):
        return
    require(
        "RECOMPUTE" in config.MODEL,
        key,
        f"1 or 2 with {config.MODEL.TYPE}, which takes no MODEL.RECOMPUTE",
    )
    require(config.MODEL.RECOMPUTE, "MODEL.RECOMPUTE", f"True with {key} 3")
    require(
        not config.TRAIN.MODEL_EMA,
        "TRAIN.MODEL_EMA",
        f"False with {key} 3: each process would hold all weights",
    )


def _check_data(config: Configuration, require: Callable[[bool, str, str], None]) -> None:
    data = config.DATA
    train = config.TRAIN
    channels = config.DATA.IMAGE_CHANNELS
    for key, values in (
        ("DATA.IMAGENET_MEAN", data.IMAGENET_MEAN),
        ("DATA.IMAGENET_STD", data.IMAGENET_STD),
    ):
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
    require(
        within,
        "TRAIN.AFFINE",
        "degrees of 0 to 360, a shift of 0 to 1, a scaling of 0 <= value < 1",
    )
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
    require(
        fixed or len(sizes or ()) > 1,
        "DATA.MULTI_SCALE",
        "two sizes or more with SCALE_SCHEDULE progressive",
    )
    expected = "None with SCALE_SCHEDULE progressive: its steps don't take equally long"
    require(fixed or train.MAX_MINUTES is None, "TRAIN.MAX_MINUTES", expected)
    require(
        data.FOLDS is None or data.FOLD < data.FOLDS,
        "DATA.FOLD",
        f"0 to {(data.FOLDS or 1) - 1}, of FOLDS",
    )
    require(
        data.FOLDS is None or data.VAL_SPLIT is None,
        "DATA.FOLDS",
        "None with VAL_SPLIT: set only one of the two",
    )
    cached = data.CACHE is None or not data.SKIP_BROKEN
    require(cached, "DATA.CACHE", "None with SKIP_BROKEN: a cache holds every image")
    corrupts = data.CORRUPTION is not None
    require(not corrupts or channels == 3, "DATA.IMAGE_CHANNELS", "3 with DATA.CORRUPTION")
    require(
        not corrupts or not float_pixels(data),
        "DATA.IMAGE_DTYPE",
        "auto with DATA.CORRUPTION, of 8-bit colours",
    )
    large = not corrupts or min(pair(data.IMAGE_SIZE)) >= _LEAST_CORRUPTED
    require(large, "DATA.IMAGE_SIZE", "32 or more with DATA.CORRUPTION")
    own = data.LABELS is None or data.CLASSES in (None, "present")
    require(
        own,
        "DATA.CLASSES",
        "None or present with DATA.LABELS, which are ImageNet's classes themselves",
    )
    for key in ("CLASSES", "LABELS"):
        require(
            data[key] is None or config.TASK == "classification",
            f"DATA.{key}",
            f"None with TASK {config.TASK}",
        )
    box = train.CUTMIX_MINMAX or [0.5, 0.5]
    require(0 <= box[0] <= box[1] <= 1, "TRAIN.CUTMIX_MINMAX", "0 <= low <= high <= 1")


def _check_augmentation(config: Configuration, require: Callable[[bool, str, str], None]) -> None:
    """What training may do to images of many channels, and DALI."""
    data = config.DATA
    train = config.TRAIN
    if float_pixels(data):
        for key, value, idle in (
            ("TRAIN.AUTO_AUGMENT", train.AUTO_AUGMENT, None),
            ("TRAIN.COLOR_JITTER", train.COLOR_JITTER, 0.0),
            ("DATA.LOADER", data.LOADER, "paddle"),
        ):
            expected = (
                f"{idle} with IMAGE_CHANNELS {data.IMAGE_CHANNELS} of float32: "
                "it is for colours and grey of 8 bits"
            )
            require(value == idle, key, expected)
    if data.LOADER == "dali":
        for key, value, idle in (
            ("TRAIN.AFFINE", train.AFFINE, [0.0] * 3),
            ("TRAIN.AUTO_AUGMENT", train.AUTO_AUGMENT, None),
            ("TRAIN.COLOR_JITTER", train.COLOR_JITTER, 0.0),
            ("DATA.SKIP_BROKEN", data.SKIP_BROKEN, False),
            ("DATA.EXIF_ORIENTATION", data.EXIF_ORIENTATION, False),
            ("DATA.MULTI_SCALE", data.MULTI_SCALE, None),
        ):
            require(
                value == idle, key, f"{idle} with DATA.LOADER dali, which crops, resizes and flips"
            )
        drawn = train.CROP.startswith("random_resized")
        require(drawn, "TRAIN.CROP", "random_resized or random_resized_once with DATA.LOADER dali")
        require(
            train.INTERPOLATION != "random",
            "TRAIN.INTERPOLATION",
            "bicubic, bilinear or nearest with DATA.LOADER dali",
        )


def _check_recipe(config: Configuration, require: Callable[[bool, str, str], None]) -> None:
    train = config.TRAIN
    weights = train.CLASS_WEIGHTS if isinstance(train.CLASS_WEIGHTS, list) else [1.0]
    require(
        max(weights) >= 1e-6,
        "TRAIN.CLASS_WEIGHTS",
        "a value above 0, and 1e-6 or more: nothing would be learned",
    )
    if train.DISTILLATION_TYPE == "feature" and not config.EVAL:
        whole = not config.MODEL.get("PATCH_DROP")
        require(
            whole,
            "MODEL.PATCH_DROP",
            "0 with DISTILLATION_TYPE feature: the student needs every patch",
        )
        require(
            train.LOSS != "token_label", "TRAIN.LOSS", "another one with DISTILLATION_TYPE feature"
        )
    steps = train.LR_SCHEDULER.MILESTONES
    require(
        steps == sorted(set(steps)),
        "TRAIN.LR_SCHEDULER.MILESTONES",
        "epochs in rising order, each once",
    )
    held = (
        train.WARMUP_EPOCHS + train.COOLDOWN_EPOCHS <= train.NUM_EPOCHS or not train.COOLDOWN_EPOCHS
    )
    expected = f"at most NUM_EPOCHS {train.NUM_EPOCHS} - WARMUP_EPOCHS {train.WARMUP_EPOCHS}"
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
        f"fewer than TRAIN.NUM_EPOCHS, {train.NUM_EPOCHS} (a tenth of them is usual); otherwise the run"
        " ends before it reaches BASE_LR",
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
            name
            for name, loss in registry.losses.components.items()
            if loss.given.get("takes") != "labels"
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
    task = config.TASK
    train = config.TRAIN
    metrics = registry.tasks.components[task].given.get("metrics", "").split()
    registry.refuse_other("BEST_METRIC", config.BEST_METRIC, ("auto", *metrics, "loss"))
    if task != "multilabel" or config.EVAL:
        return
    each = [
        name
        for name, loss in registry.losses.components.items()
        if loss.given.get("takes") == "any"
    ]
    require(
        train.LOSS in each,
        "TRAIN.LOSS",
        f"one of {', '.join(each)} with TASK multilabel: a yes or no for each class",
    )
    require(
        train.DISTILLATION_TYPE is None,
        "TRAIN.DISTILLATION_TYPE",
        "None with TASK multilabel: distillation is for one class per image",
    )
    require(
        config.DATA.SAMPLER == "shuffle",
        "DATA.SAMPLER",
        "shuffle with TASK multilabel: an image may have several classes",
    )


def _check_threshold(config: Configuration, require: Callable[[bool, str, str], None]) -> None:
    """BCE_TARGET_THRESH has to lie between a target's two values: else all of them are 1, or all
    are 0.
    """
    train = config.TRAIN
    classes = config.MODEL.NUM_CLASSES
    threshold = train.BCE_TARGET_THRESH
    smoothing = train.SMOOTHING
    if threshold is None or train.LOSS != "bce" or not classes:
        return
    halves = classes == "auto" or config.TASK == "multilabel"  # not known yet, or a yes and a no
    off = smoothing / (2 if halves else classes)  # the target of what isn't the label
    on = 1 - smoothing + off  # the label's own
    require(
        threshold > off or smoothing == 0 or (classes == "auto" and threshold > 0),
        "TRAIN.BCE_TARGET_THRESH",
        f"above {off:.3g} (SMOOTHING / NUM_CLASSES, the target of other classes): otherwise all targets would be 1",
    )
    require(
        threshold < on,
        "TRAIN.BCE_TARGET_THRESH",
        f"below {on:.3g} (the label's own target): otherwise all targets would be 0",
    )
