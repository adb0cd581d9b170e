"""Conflicts: values that are fine by themselves, and can't be had together.

Each rule is an ``if`` that yields the key to change and what is expected of it instead. The first
conflict is reported. (A key that has no effect where it stands isn't a conflict but idle:
``settings.idle``.)
"""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from errors import InputError
from settings import registry
from settings.configuration import Configuration, pair
from settings.needs import float_pixels
from settings.tasks import answers_of, is_read_by, mixes
from settings.values import quoted

# A key, and what is expected of it instead of its value.
Conflict = tuple[str, str]

# The shortest side in pixels that the blurs of the corruptions work on.
_LEAST_CORRUPTED = 32


def check_conflicts(config: Configuration, values: Mapping[str, Any]) -> None:
    """Checks that the values of a configuration fit each other.

    Args:
        values: the configuration's, by dotted key.

    Raises:
        InputError: two don't; the message names a key, its value and what is expected.
    """
    for name in config.TRACKERS or []:
        registry.refuse_other("TRACKERS", name, registry.trackers.names())
    task = registry.tasks.components[config.TASK]
    metrics = task.given.get("metrics", "").split()
    if config.PROBE.FREQ:
        metrics.append("knn")
    if config.RETRIEVAL is not None:
        metrics += [*(f"recall_{k}" for k in config.RETRIEVAL), "mAP", "mAP_R"]
    registry.refuse_other("BEST_METRIC", config.BEST_METRIC, ("auto", *metrics, "loss"))
    rules = (
        _of_data,
        _of_crops,
        _of_whole_images,
        _of_patches,
        _of_patch_sizes,
        _of_evaluation_sets,
        _of_float_pixels,
        _of_dali,
        _of_run,
        _of_probes,
        _of_retrieval,
        _of_sharded_weights,
        _of_losses,
        _of_metric_losses,
        _of_schedule,
        _of_mixing,
        _of_multilabel,
        _of_target_threshold,
        _of_heads,
    )
    for key, expected in chain.from_iterable(rule(config) for rule in rules):
        raise InputError(f"{key} is {quoted(values.get(key))}, expected {expected}")


def _of_run(config: Configuration) -> Iterator[Conflict]:
    resume = config.MODEL.RESUME
    trackers = config.TRACKERS or []
    if len(set(trackers)) < len(trackers):
        yield "TRACKERS", "each once"
    if resume and config.EVAL:
        yield "MODEL.RESUME", "None with -eval; give the weights by -pretrained FILE"
    if resume and resume != "auto" and config.MODEL.PRETRAINED:
        yield "MODEL.RESUME", "auto if -pretrained is given as well, or only one of the two"
    if config.TO_STATIC and config.MODEL.get("RECOMPUTE"):
        yield "TO_STATIC", "False with MODEL.RECOMPUTE"
    if config.TO_STATIC and config.MODEL.get("PATCH_DROP_END") is not None:
        yield "TO_STATIC", "False with MODEL.PATCH_DROP_END: a graph keeps one share of patches"
    if config.CUDNN_BENCHMARK and config.DETERMINISTIC:
        yield (
            "CUDNN_BENCHMARK",
            "False with DETERMINISTIC: which algorithm is fastest changes from run to run",
        )
    if not config.EVAL and config.MODEL.get("HEAD_BATCH_NORM") and config.DATA.BATCH_SIZE == 1:
        yield (
            "DATA.BATCH_SIZE",
            "2 or more with MODEL.HEAD_BATCH_NORM: a batch of one image has no variance",
        )
    # A restart resumes from the newest checkpoint of OUTPUT, and starts over without one.
    restartable = config.OUTPUT and resume in (None, "auto") and not config.TRAIN.LAST_EPOCH
    if config.DIST.MAX_RESTART and not config.EVAL and not restartable:
        yield (
            "DIST.MAX_RESTART",
            "0, or -output with it (the folder of the checkpoints) and neither -last_epoch nor "
            "-resume=PATH",
        )
    if resume == "auto" and not config.OUTPUT:
        yield "MODEL.RESUME", "-output with it: the folder of the checkpoints"


def _of_retrieval(config: Configuration) -> Iterator[Conflict]:
    ks = config.RETRIEVAL
    if ks is None:
        return
    if len(set(ks)) < len(ks):
        yield "RETRIEVAL", "each K once"
    if config.EVAL_ENGINE != "eager":
        yield "EVAL_ENGINE", "eager with RETRIEVAL: the exported model gives no embeddings"
    if config.TO_STATIC:
        yield "TO_STATIC", "False with RETRIEVAL"
    if config.DATA.LABELS is not None:
        yield "DATA.LABELS", "None with RETRIEVAL, which needs one class per image"


def _of_probes(config: Configuration) -> Iterator[Conflict]:
    freq = config.PROBE.FREQ
    validate_freq = config.VALIDATE_FREQ
    if freq and freq % validate_freq:
        yield (
            "PROBE.FREQ",
            f"a multiple of VALIDATE_FREQ ({validate_freq}): a probe follows an evaluation",
        )
    if config.BEST_METRIC == "knn" and freq != validate_freq:
        yield "PROBE.FREQ", f"VALIDATE_FREQ ({validate_freq}), because BEST_METRIC is knn"


def _of_sharded_weights(config: Configuration) -> Iterator[Conflict]:
    """Stage 3 needs blocks that are computed again, and no second copy of all weights."""
    strategy = config.DIST.STRATEGY
    if config.EVAL or config.DIST.ENGINE != "fleet" or not strategy.sharding:
        return
    if strategy.sharding_configs.stage != 3:
        return
    key = "DIST.STRATEGY.sharding_configs.stage"
    if "RECOMPUTE" not in config.MODEL:
        yield key, f"1 or 2 with {config.MODEL.TYPE}, which doesn't support MODEL.RECOMPUTE"
    elif not config.MODEL.RECOMPUTE:
        yield "MODEL.RECOMPUTE", f"True with {key} 3"
    if config.TRAIN.MODEL_EMA:
        yield (
            "TRAIN.MODEL_EMA",
            f"False with {key} 3: each process would hold a copy of all weights",
        )


def _of_data(config: Configuration) -> Iterator[Conflict]:
    data = config.DATA
    channels = data.IMAGE_CHANNELS
    for key in ("IMAGENET_MEAN", "IMAGENET_STD"):
        if len(data[key]) not in (1, channels):
            expected = f"1 or {channels} values" if channels > 1 else "1 value"
            yield f"DATA.{key}", f"{expected}, as IMAGE_CHANNELS"
    for key in ("IMAGE_SIZE", "EVAL_SIZE"):
        if isinstance(data[key], list) and len(data[key]) != 2:
            yield f"DATA.{key}", "a number of pixels, or two: [height, width]"
    repeats = config.TRAIN.REPEATED_AUGMENT > 1
    mixed = data.SAMPLER != "shuffle" or data.SHARD_SHUFFLE is not None or repeats
    if data.SHUFFLE_MODE == "shard" and mixed:
        yield (
            "DATA.SHUFFLE_MODE",
            "global, or with it SAMPLER shuffle, REPEATED_AUGMENT 1 and no SHARD_SHUFFLE",
        )
    if data.SAMPLER == "per_class" and repeats:
        yield "TRAIN.REPEATED_AUGMENT", "1 with DATA.SAMPLER per_class"
    sizes = data.MULTI_SCALE
    if sizes is not None:
        if data.SAMPLER == "per_class":
            yield (
                "DATA.MULTI_SCALE",
                "None with DATA.SAMPLER per_class, whose batches have one size",
            )
        if len(set(sizes)) < len(sizes) or repeats:
            yield "DATA.MULTI_SCALE", "None, or different sizes, with REPEATED_AUGMENT 1"
        if data.SCALE_SCHEDULE == "progressive":
            if len(sizes) < 2:
                yield "DATA.MULTI_SCALE", "two sizes or more with SCALE_SCHEDULE progressive"
            if config.TRAIN.MAX_MINUTES is not None:
                yield (
                    "TRAIN.MAX_MINUTES",
                    "None with SCALE_SCHEDULE progressive, whose steps differ in duration",
                )
    if data.FOLDS is not None:
        if data.FOLD >= data.FOLDS:
            yield "DATA.FOLD", f"0 to {data.FOLDS - 1}, below FOLDS"
        if data.VAL_SPLIT is not None:
            yield "DATA.FOLDS", "None with VAL_SPLIT: set only one of the two"
    if data.CACHE is not None and data.SKIP_BROKEN:
        yield "DATA.CACHE", "None with SKIP_BROKEN: a cache has to contain every image"


def _of_crops(config: Configuration) -> Iterator[Conflict]:
    train = config.TRAIN
    turn, shift, scale = train.AFFINE
    if not (0 <= turn <= 360 and 0 <= shift <= 1 and 0 <= scale < 1):
        yield "TRAIN.AFFINE", "degrees of 0 to 360, a shift of 0 to 1, a scaling of 0 <= value < 1"
    low, high = train.CROP_SCALE
    if train.CROP == "scale_jitter":
        if not 0.01 <= low <= high <= 100:
            yield "TRAIN.CROP_SCALE", "0 < low <= high, from 0.01 to 100, with CROP scale_jitter"
    elif not 1e-6 <= low <= high <= 1:
        yield "TRAIN.CROP_SCALE", "0 < low <= high <= 1, from 1e-6 on"
    low, high = train.CROP_RATIO
    if not 0.001 <= low <= high <= 1000:
        yield "TRAIN.CROP_RATIO", "0 < low <= high, from 0.001 to 1000"
    if train.CUTMIX_MINMAX is not None:
        low, high = train.CUTMIX_MINMAX
        if low > high:
            yield "TRAIN.CUTMIX_MINMAX", "0 <= low <= high <= 1"


def _of_whole_images(config: Configuration) -> Iterator[Conflict]:
    """Maps are evaluated on all of an image, and other tasks on images of one size."""
    mode = config.DATA.CROP_MODE
    if answers_of(config.TASK) != "pixels":
        if mode in ("short", "own"):
            yield (
                "DATA.CROP_MODE",
                f"center or squash with TASK {config.TASK}, whose images have one size",
            )
        return
    if mode == "center":
        yield "DATA.CROP_MODE", f"short, squash or own with TASK {config.TASK}, which doesn't crop"
    if mode == "squash" and config.DATA.CROP_PCT != 1:
        yield "DATA.CROP_PCT", f"1.0 with TASK {config.TASK}, which doesn't crop"


def _of_patches(config: Configuration) -> Iterator[Conflict]:
    """Packed images (NUM_TOKENS) differ in size, and their pixels aren't a picture."""
    data = config.DATA
    train = config.TRAIN
    if data.NUM_TOKENS is None:
        return
    if config.MODEL.TYPE.lower() != "naflexvit":
        yield (
            "DATA.NUM_TOKENS",
            f"None with MODEL.TYPE {config.MODEL.TYPE}; NaFlexViT takes patches",
        )
    if config.TASK not in ("classification", "multilabel"):
        yield "DATA.NUM_TOKENS", f"None with TASK {config.TASK}, which reads images of one size"
    place = "with DATA.NUM_TOKENS, which keeps the aspect ratio of images"
    if data.CROP_MODE != "center":
        yield "DATA.CROP_MODE", f"center, its default, {place}"
    if data.CORRUPTION is not None:
        yield "DATA.CORRUPTION", f"None {place}"
    if config.EVAL:
        if config.EVAL_ENGINE != "eager":
            yield "EVAL_ENGINE", f"eager {place}"
        return
    if data.LOADER != "paddle":
        yield "DATA.LOADER", f"paddle {place}"
    if data.MULTI_SCALE is not None:
        yield "DATA.MULTI_SCALE", f"None {place}; set TOKEN_LENGTHS instead"
    lengths = data.TOKEN_LENGTHS
    if lengths is not None and (len(set(lengths)) < len(lengths) or train.REPEATED_AUGMENT > 1):
        yield "DATA.TOKEN_LENGTHS", "None, or different numbers, with REPEATED_AUGMENT 1"
    if train.CROP != "random_resized":
        yield "TRAIN.CROP", f"random_resized {place}"
    if train.RANDOM_ERASE_PROB:
        yield "TRAIN.RANDOM_ERASE_PROB", f"0.0 {place}"
    if mixes(config):
        key = "CUTMIX_MINMAX"
        if train.MIXUP_ALPHA:
            key = "MIXUP_ALPHA"
        elif train.CUTMIX_ALPHA:
            key = "CUTMIX_ALPHA"
        off = "None" if key == "CUTMIX_MINMAX" else "0.0"
        yield f"TRAIN.{key}", f"{off} {place}: images of different shapes can't be mixed"
    if train.DISTILLATION_TYPE is not None:
        yield "TRAIN.DISTILLATION_TYPE", f"None {place}: the teacher reads images of one size"


def _of_patch_sizes(config: Configuration) -> Iterator[Conflict]:
    """Each training step has patches of another size (FlexiViT)."""
    sizes = config.MODEL.get("PATCH_SIZES")
    if sizes is None or config.EVAL:
        return
    key = "MODEL.PATCH_SIZES"
    image = config.DATA.IMAGE_SIZE
    sides = image if isinstance(image, list) else [image]
    if len(set(sizes)) < len(sizes) or any(side % size for side in sides for size in sizes):
        fitting = [size for size in range(1, min(sides) + 1) if not any(s % size for s in sides)]
        known = ", ".join(map(str, fitting))
        yield key, f"different divisors of DATA.IMAGE_SIZE {image}: {known}"
    if config.DATA.MULTI_SCALE is not None:
        yield "DATA.MULTI_SCALE", f"None with {key}: both change the number of patches"
    if config.TO_STATIC:
        yield "TO_STATIC", f"False with {key}: a graph needs patches of one size"
    if config.TRAIN.DISTILLATION_TYPE == "feature" or config.TRAIN.LOSS == "token_label":
        yield key, "None if patches are compared with those of a teacher or with patch labels"


def _of_evaluation_sets(config: Configuration) -> Iterator[Conflict]:
    data = config.DATA
    if data.CORRUPTION is not None:
        if data.IMAGE_CHANNELS != 3:
            yield "DATA.IMAGE_CHANNELS", "3 with DATA.CORRUPTION"
        if float_pixels(data):
            yield "DATA.IMAGE_DTYPE", "auto with DATA.CORRUPTION, which needs 8-bit colours"
        if min(pair(data.IMAGE_SIZE)) < _LEAST_CORRUPTED:
            yield "DATA.IMAGE_SIZE", f"{_LEAST_CORRUPTED} or more with DATA.CORRUPTION"
    if data.LABELS is not None and data.CLASSES not in (None, "present"):
        yield (
            "DATA.CLASSES",
            "None or present with DATA.LABELS, whose labels are the classes of ImageNet",
        )
    for key in ("CLASSES", "LABELS"):
        if data[key] is not None and config.TASK != "classification":
            yield f"DATA.{key}", f"None with TASK {config.TASK}"


def _of_float_pixels(config: Configuration) -> Iterator[Conflict]:
    data = config.DATA
    train = config.TRAIN
    if config.EVAL or not float_pixels(data):
        return
    place = f"with IMAGE_CHANNELS {data.IMAGE_CHANNELS} of float32"
    reason = "it supports 8-bit colour and grey images only"
    if train.AUTO_AUGMENT is not None:
        yield "TRAIN.AUTO_AUGMENT", f"None {place}: {reason}"
    if train.COLOR_JITTER:
        yield "TRAIN.COLOR_JITTER", f"0.0 {place}: {reason}"
    if train.PHOTOMETRIC:
        yield "TRAIN.PHOTOMETRIC", f"False {place}: {reason}"
    if data.LOADER != "paddle":
        yield "DATA.LOADER", f"paddle {place}: {reason}"


def _of_dali(config: Configuration) -> Iterator[Conflict]:
    data = config.DATA
    train = config.TRAIN
    if config.EVAL or data.LOADER != "dali":
        return
    reason = "with DATA.LOADER dali, which only crops, resizes and flips"
    if train.AFFINE != [0.0, 0.0, 0.0]:
        yield "TRAIN.AFFINE", f"[0.0, 0.0, 0.0] {reason}"
    if train.AUTO_AUGMENT is not None:
        yield "TRAIN.AUTO_AUGMENT", f"None {reason}"
    if train.COLOR_JITTER:
        yield "TRAIN.COLOR_JITTER", f"0.0 {reason}"
    if train.PHOTOMETRIC:
        yield "TRAIN.PHOTOMETRIC", f"False {reason}"
    if data.SKIP_BROKEN:
        yield "DATA.SKIP_BROKEN", f"False {reason}"
    if data.EXIF_ORIENTATION:
        yield "DATA.EXIF_ORIENTATION", f"False {reason}"
    if data.MULTI_SCALE is not None:
        yield "DATA.MULTI_SCALE", f"None {reason}"
    if not train.CROP.startswith("random_resized"):
        yield "TRAIN.CROP", "random_resized or random_resized_once with DATA.LOADER dali"
    if train.INTERPOLATION == "random":
        yield "TRAIN.INTERPOLATION", "bicubic, bilinear or nearest with DATA.LOADER dali"


def _of_losses(config: Configuration) -> Iterator[Conflict]:
    train = config.TRAIN
    weights = train.CLASS_WEIGHTS
    if isinstance(weights, list) and max(weights) < 1e-6:
        yield (
            "TRAIN.CLASS_WEIGHTS",
            "a value of 1e-6 or more; otherwise nothing would be learned",
        )
    if train.DISTILLATION_TYPE == "feature" and not config.EVAL:
        if config.MODEL.get("PATCH_DROP"):
            yield (
                "MODEL.PATCH_DROP",
                "0 with DISTILLATION_TYPE feature: the student needs every patch",
            )
        if train.LOSS == "token_label":
            yield "TRAIN.LOSS", "another optimizer with DISTILLATION_TYPE feature"


def _of_metric_losses(config: Configuration) -> Iterator[Conflict]:
    train = config.TRAIN
    loss = train.LOSS
    if config.EVAL or not is_read_by(config.TASK, "TRAIN.LOSS"):
        return
    if loss in ("arcface", "proxy_anchor") and config.MODEL.get("HEAD_COSINE") is None:
        yield "MODEL.HEAD_COSINE", f"a scale of the cosines, such as 64, with TRAIN.LOSS {loss}"
    if loss == "triplet":
        if train.DISTILLATION_TYPE is not None:
            yield "TRAIN.DISTILLATION_TYPE", "None with TRAIN.LOSS triplet"
        if config.TO_STATIC:
            yield "TO_STATIC", "False with TRAIN.LOSS triplet"
    # Nothing of these losses could apply them.
    unweighted = loss == "proxy_anchor" or (loss == "triplet" and not train.TRIPLET_CROSS_ENTROPY)
    if unweighted and train.SMOOTHING:
        yield "TRAIN.SMOOTHING", f"0.0 with TRAIN.LOSS {loss}, which has no target probabilities"
    if unweighted and train.CLASS_WEIGHTS is not None:
        yield "TRAIN.CLASS_WEIGHTS", f"None with TRAIN.LOSS {loss}"


def _of_schedule(config: Configuration) -> Iterator[Conflict]:
    train = config.TRAIN
    schedule = train.LR_SCHEDULER
    epochs = train.NUM_EPOCHS
    warmup = train.WARMUP_EPOCHS
    cooldown = train.COOLDOWN_EPOCHS
    if sorted(set(schedule.MILESTONES)) != schedule.MILESTONES:
        yield "TRAIN.LR_SCHEDULER.MILESTONES", "different epochs in ascending order"
    if cooldown and warmup + cooldown > epochs:
        yield "TRAIN.COOLDOWN_EPOCHS", f"at most NUM_EPOCHS {epochs} - WARMUP_EPOCHS {warmup}"
    if config.EVAL:
        return
    if schedule.NAME == "wsd" and warmup + (schedule.WSD_DECAY_EPOCHS or 0) + cooldown > epochs:
        yield (
            "TRAIN.LR_SCHEDULER.WSD_DECAY_EPOCHS",
            f"at most the {max(0, epochs - warmup - cooldown):g} of {epochs} epochs that are left "
            "between warm-up and cool-down",
        )
    if 0 < epochs <= warmup:
        yield (
            "TRAIN.WARMUP_EPOCHS",
            f"fewer than TRAIN.NUM_EPOCHS, {epochs} (a tenth of them is usual); otherwise the run "
            "ends before it reaches BASE_LR",
        )
    if schedule.NAME == "onecycle" and not 0 < 2 * warmup < epochs - cooldown:
        yield (
            "TRAIN.WARMUP_EPOCHS",
            f"more than 0 and less than half of the {epochs - cooldown} epochs of onecycle",
        )


def _of_mixing(config: Configuration) -> Iterator[Conflict]:
    if not mixes(config):
        return
    losses = registry.losses.components.items()
    takers = [name for name, loss in losses if loss.given.get("takes") != "labels"]
    if config.TRAIN.LOSS not in takers:
        yield (
            "TRAIN.LOSS",
            f"{', '.join(takers[:-1])} or {takers[-1]}: mixup and CutMix yield "
            "distributions, not labels",
        )
    size = config.DATA.BATCH_SIZE
    # "auto" is even.
    if not config.EVAL and size != "auto" and size % 2:
        yield "DATA.BATCH_SIZE", "an even number: mixup and CutMix pair the images of a batch"


def _of_multilabel(config: Configuration) -> Iterator[Conflict]:
    if answers_of(config.TASK) != "sigmoid" or config.EVAL:
        return
    losses = registry.losses.components.items()
    takers = [name for name, loss in losses if loss.given.get("takes") == "any"]
    if config.TRAIN.LOSS not in takers:
        yield (
            "TRAIN.LOSS",
            f"one of {', '.join(takers)} with TASK {config.TASK}, which decides on each class"
            " separately",
        )
    if config.TRAIN.DISTILLATION_TYPE is not None:
        yield (
            "TRAIN.DISTILLATION_TYPE",
            f"None with TASK {config.TASK}: distillation needs one class per image",
        )
    if config.DATA.SAMPLER != "shuffle":
        yield (
            "DATA.SAMPLER",
            f"shuffle with TASK {config.TASK}: an image may have several classes",
        )


def _of_target_threshold(config: Configuration) -> Iterator[Conflict]:
    """BCE_TARGET_THRESH lies between the two values of a smoothed target."""
    train = config.TRAIN
    classes = config.MODEL.NUM_CLASSES
    threshold = train.BCE_TARGET_THRESH
    if threshold is None or train.LOSS != "bce" or not classes:
        return
    # Smoothing spreads over all classes, or, with several labels, over a yes and a no. Where the
    # number of classes isn't known yet, the bound of two is checked.
    spread = 2 if classes == "auto" or config.TASK == "multilabel" else classes
    other = train.SMOOTHING / spread
    label = 1 - train.SMOOTHING + other
    known_later = classes == "auto" and threshold > 0
    if threshold <= other and train.SMOOTHING and not known_later:
        yield (
            "TRAIN.BCE_TARGET_THRESH",
            f"above {other:.3g} (SMOOTHING / NUM_CLASSES, the target of other classes): otherwise "
            "all targets are 1",
        )
    if threshold >= label:
        yield (
            "TRAIN.BCE_TARGET_THRESH",
            f"below {label:.3g} (the target of the label): otherwise all targets are 0",
        )


def _of_heads(config: Configuration) -> Iterator[Conflict]:
    if answers_of(config.TASK) != "pixels":
        return
    if config.HEAD.NAME is None:
        names = ", ".join(registry.heads.names())
        yield (
            "HEAD.NAME",
            f"one of {names} with TASK {config.TASK}, or a file of configs/segmentation",
        )
    stride = config.HEAD.STRIDE
    if isinstance(stride, list) and len(stride) != 2:
        yield "HEAD.STRIDE", "a number of pixels, or two: [down, right]"
    if stride is not None:
        window = pair(config.DATA.IMAGE_SIZE)
        if any(step > side for step, side in zip(pair(stride), window, strict=True)):
            yield "HEAD.STRIDE", "at most IMAGE_SIZE, so that the windows cover all pixels"
