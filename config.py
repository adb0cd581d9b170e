"""The configuration: every option with its default, unit and meaning; YAML and command line merged, checked, frozen.

Precedence, lowest first: the defaults below, the YAML file (its BASE files first), flags, ``-o KEY VALUE KEY=VALUE``.
Key names are PaddleViT's. This module doesn't import Paddle, so that ``-h`` and a typing error answer at once.
"""

import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from yacs.config import CfgNode

from settings.architectures import settle
from settings.conflicts import check
from settings.key_needs import NEEDS
from settings.key_types import REMOVED, TYPES, WORDS
from settings.merging import (
    Keys,
    Option,
    find_config,
    model_files,
    shipped_configs,
    shipped_model,
    shipped_models,
    tag_options,
)
from settings.names import current_name
from settings.needs import refuse_idle
from settings.options import (
    CONFIG_DIR,
    Configuration,
    add_note,
    explicit_sources,
    is_users,
    leaves,
    pairs,
)
from settings.paddlevit import reading
from settings.paddlevit.programs import Section, explain_missing_modules, options_of
from settings.registry import add_keys

__all__ = [
    "CONFIG_DIR", "asked_config", "default_values", "differences", "find_config", "get_config", "is_users",
    "model_files", "named_keys", "resolved_yaml", "shipped_configs", "shipped_model", "shipped_models",
    "update_config", "with_options", "with_values",
]  # fmt: skip

# An installed copy has another name (tools/package). It leaves the imports of the program that uses it alone.
if __name__ == "config":
    explain_missing_modules()

# fmt: off
_C = Configuration()
# YAML files that are merged before this one, the first lowest. Paths are relative to the file that names them.
# WITHOUT: [TRAIN, MODEL.DROPOUT] beside BASE drops what those files set for these keys and sections.
_C.BASE = [""]

_C.TASK = "classification"  # One class per image. "multilabel": an image has any number of classes.

_C.DATA = Section("DATA")
_C.DATA.BATCH_SIZE = 256  # Training samples per device and step.
_C.DATA.GLOBAL_BATCH = None  # Training samples of all devices per step. If set, BATCH_SIZE is its share. None: not set.
_C.DATA.BATCH_SIZE_EVAL = 64  # Evaluation samples per device and step.
_C.DATA.DATA_PATH = "/dataset/imagenet/"  # The folder of the dataset.
_C.DATA.DATASET = "imagenet2012"  # How the dataset is stored: folder, imagenet2012, shards, digits, ... (see loading/).
_C.DATA.IMAGE_SIZE = 224  # Height and width in pixels, or [height, width]. The command line also takes 224x160.
_C.DATA.IMAGE_CHANNELS = 3  # 3: RGB. 1: grey. Other numbers up to 64: the channels of TIFF and .npy files.
_C.DATA.IMAGE_DTYPE = "auto"  # 8-bit pixels for 3 channels or 1, float32 for other numbers. "float32": pixels keep
# their full depth. 8-bit values are divided by 255 and 16-bit values by 65535. Floats stay as stored.
_C.DATA.CROP_PCT = 0.875  # Evaluation: the share of the resized side that the central crop keeps, 0.1 to 1.
_C.DATA.CROP_MODE = "center"  # Evaluation: resize the short side, then crop. "squash": resize both sides, then crop.
_C.DATA.INTERPOLATION = "bicubic"  # How images are resized: bicubic, bilinear or nearest.
_C.DATA.EXIF_ORIENTATION = False  # True: turn photographs as their EXIF data says. timm and PaddleViT don't.
_C.DATA.FAST_EVAL = False  # Evaluation: True decodes JPEG as fast as training does. False: exactly Pillow's pixels.
_C.DATA.NUM_WORKERS = 2  # Loader processes per device. 0: the training process loads the images itself.
_C.DATA.PREFETCH = 2  # Batches that each loader process loads in advance.
_C.DATA.LOADER = "paddle"  # Training: "dali" decodes with NVIDIA DALI, on the GPU if there is one.
_C.DATA.IMAGENET_MEAN = [0.5, 0.5, 0.5]  # Subtracted from pixels (0 to 1, or floats as stored). One value, or one per
# channel.
_C.DATA.IMAGENET_STD = [0.5, 0.5, 0.5]  # Pixels are divided by this afterwards. One value, or one per channel.
_C.DATA.DROP_LAST = True  # Training: drop the last images if they fill no global batch. False: pad to a multiple of
# devices.
_C.DATA.SHUFFLE_MODE = "global"  # Shuffle all images, then split them. "shard": split once, then shuffle each part.
_C.DATA.SAMPLER = "shuffle"  # Training: draw each image once an epoch. "balanced": draw all classes equally often.
_C.DATA.MULTI_SCALE = None  # Training: a list of image sizes in pixels. Each step uses one of them. None: IMAGE_SIZE.
_C.DATA.SCALE_SCHEDULE = "mixed"  # Every epoch uses all sizes. A batch has as many pixels as BATCH_SIZE images of
# IMAGE_SIZE. "progressive" (timm): the run goes from the first size to the last. Each batch has BATCH_SIZE images.
_C.DATA.SCALE_SPREAD = 0.65  # progressive: standard deviation of an epoch's sizes, in places of the list. 0: one size.
_C.DATA.SCALE_RANDOM = 0.1  # progressive: the share of the steps that draw any of the sizes.
_C.DATA.SHARD_SHUFFLE = None  # shards: read this many shards at a time and mix their samples. None: mix all samples.
_C.DATA.CACHE = None  # A folder for decoded images of one size, which all processes share. None: decode in each epoch.
_C.DATA.MAX_PIXELS = 100_000_000  # An image file with more pixels is treated as unreadable.
_C.DATA.VAL_SPLIT = None  # Use this share of each class's training images for validation. None: the data has its own.
_C.DATA.FOLDS = None  # k-fold: split the training images into this many parts. Each part has its share of every class.
_C.DATA.FOLD = 0  # This part (0 to FOLDS - 1) validates, the others train. The data's own validation set isn't read.
_C.DATA.SPLIT_SEED = 0  # The random seed of VAL_SPLIT and FOLDS. The parts are the same for every SEED.
_C.DATA.SPLIT_GROUPS = None  # Keep the images of a group in one part. This regular expression (or its first brackets)
# finds the group in an image's path. Or name a file: each line holds a path, a TAB and a group. None: no groups.
_C.DATA.CLASSES = None  # Evaluation: "present" compares only the outputs of classes that the data has (ImageNet-A, -R).
# Or name a file: each line holds a class of the data, a TAB and its output. None: compare all outputs.
_C.DATA.LABELS = None  # Evaluation: the file real.json of ReaL. Its labels replace those of ImageNet's validation set.
_C.DATA.CORRUPTION = None  # Evaluation: corrupt each cropped image as ImageNet-C does (fog, snow, ...). None: don't.
_C.DATA.SEVERITY = 1  # How strong the corruption is, 1 to 5.
_C.DATA.SKIP_BROKEN = False  # Training: True replaces an unreadable image by the next one, counts it and lists it.

_C.MODEL = Section("MODEL")
# Each architecture has more keys here. Its constructor in models/ declares their types and defaults. The command
# python tools/list_models.py --keys NAME lists them. null (None) means the constructor's default.
_C.MODEL.TYPE = "ViT"  # The architecture: a name that a class in models/ registers. Upper and lower case are equal.
_C.MODEL.NAME = "vit_base_patch16_224"  # What logs and files call the model.
_C.MODEL.RESUME = None  # Continue from this checkpoint. "auto": from the newest whole one in OUTPUT, or anew if there
# is none.
_C.MODEL.PRETRAINED = None  # Weights to start from or to evaluate: a file, a folder or hf-hub:org/name. None: random.
_C.MODEL.PRETRAINED_ALLOW = None  # Patterns of weights that the file or the model may lack: ["fc_norm.*"]. None: none.
_C.MODEL.PRETRAINED_CLASSES = None  # The order of ImageNet-22k's classes in the weights: imagenet22k or
# imagenet22k_swin. Only ImageNet-1k's classes are kept. None: keep the classifier as it is.
_C.MODEL.PRETRAINED_ADAPTER = None  # An adapter to merge into the weights: adapter.safetensors, or peft's LoRA. None:
# none.
_C.MODEL.NUM_CLASSES = 1000  # The model's outputs. "auto": the number of the data's classes. 0: none (create_model
# only).

_C.TRAIN = Section("TRAIN")
_C.TRAIN.LAST_EPOCH = 0  # The last epoch that is already done. A resumed run takes it from its checkpoint.
_C.TRAIN.NUM_EPOCHS = 300  # Passes over the training images.
_C.TRAIN.MAX_MINUTES = None  # The run ends within this many minutes: its schedule is shortened. None: no limit.
_C.TRAIN.EARLY_STOP = None  # Stop after this many evaluations in a row without a gain in BEST_METRIC. A gain of the
# averaged weights (MODEL_EMA) counts, too. None: never stop early.
_C.TRAIN.EARLY_STOP_MIN = 0.0  # A gain must be larger than this, in percent or in units of the loss.
_C.TRAIN.WARMUP_EPOCHS = 32.0  # The rate rises linearly from WARMUP_START_LR to BASE_LR. 0.2: in a fifth of an epoch.
_C.TRAIN.COOLDOWN_EPOCHS = 0  # The last epochs of NUM_EPOCHS. They use the schedule's final rate.
_C.TRAIN.WEIGHT_DECAY = 0.3  # Each update shrinks weights by rate x this. Adam, SGD, LARS: an L2 term of the gradient.
_C.TRAIN.DECAY_ALL = False  # False: only matrices decay. True: biases, norms and tokens decay too (PaddleViT).
_C.TRAIN.BASE_LR = 3e-3  # The highest learning rate, reached when warm-up ends.
_C.TRAIN.WARMUP_START_LR = 1e-6  # The learning rate when warm-up begins.
_C.TRAIN.END_LR = 0.0  # The learning rate when the schedule ends. step, multistep: the lowest rate.
_C.TRAIN.LINEAR_SCALED_LR = None  # The batch size that the three rates are meant for. They scale with the effective
# batch: all devices, ACCUM_ITER steps. None: the rates stay.
_C.TRAIN.LR_SCALING = "linear"  # The rates grow with the batch. "sqrt": with the square root of the batches' ratio.
_C.TRAIN.LR_SCALED = "all"  # The rates that scale: all three. "base": only BASE_LR.
_C.TRAIN.RECIPE_BATCH = None  # The recipe's batch size, if its rates don't scale. A run far from it prints a warning.
_C.TRAIN.LAYER_DECAY = None  # Each block's learning rate is this times the next block's. The classifier
# has 1. None: all layers have the same rate.
_C.TRAIN.LAYER_DECAY_GROUPS = "authors"  # Which parameters share a rate: the authors' groups. "timm": timm's groups.
_C.TRAIN.HEAD_LR = 1.0  # The classifier's learning rate is multiplied by this.
_C.TRAIN.FREEZE = None  # Patterns of parameters that don't train: ["patch_embed.*", "blocks.[0-5].*"]. "backbone": all
# but the classifier. None: all parameters train.
_C.TRAIN.ADAPTER = CfgNode()  # With an adapter, only a few parameters and the classifier train.
_C.TRAIN.ADAPTER.NAME = None  # lora (keys RANK, ALPHA, TARGETS, DROPOUT), prompt (MODEL.PROMPT_TOKENS) or bitfit
# (biases). None: no adapter.
_C.TRAIN.GRAD_CLIP = None  # The bound that GRAD_CLIP_MODE applies to the gradients. None: gradients aren't clipped.
_C.TRAIN.GRAD_CLIP_MODE = "norm"  # Clip the norm of all gradients together. "value": clip each element. "agc": clip
# each unit's norm at GRAD_CLIP times the norm of its weights, except in the classifier.
_C.TRAIN.SYNC_BN = False  # GPU: True computes batch norm's statistics over the images of all devices.
_C.TRAIN.ACCUM_ITER = 1  # Steps whose gradients are added up for one update.

_C.TRAIN.LR_SCHEDULER = CfgNode()
_C.TRAIN.LR_SCHEDULER.NAME = "warmupcosine"  # Also cosine (the same), linear, poly, step, multistep (or multi-step),
# onecycle, wsd and constant. Each begins with WARMUP_EPOCHS. PaddleViT's cosine and multi-step don't: set them to 0.
_C.TRAIN.LR_SCHEDULER.WARMUP_PREFIX = True  # It begins after warm-up. False: at epoch 0, where warm-up replaces it.
_C.TRAIN.LR_SCHEDULER.DECAY_RATE = 0.1  # step, multistep: the factor of each step. onecycle: its fall slows at this
# share of BASE_LR.
_C.TRAIN.LR_SCHEDULER.PER_EPOCH = False  # False: each update has its own rate. Otherwise an epoch has one rate: of its
# "start" (timm) or of its "end" (PaddleViT; also True). "late": of the start of the epoch before (DeiT, PVT).

_C.TRAIN.OPTIMIZER = CfgNode()
_C.TRAIN.OPTIMIZER.NAME = "AdamW"  # Also Adam, SGD, LAMB, LARS, Lion and Muon. Muon uses AdamW for all but matrices.
_C.TRAIN.OPTIMIZER.EPS = 1e-8  # Added to the denominator of the update.
_C.TRAIN.OPTIMIZER.BETAS = [0.9, 0.999]  # What its two moving averages keep at an update. Lion's paper uses [0.9,
# 0.99].
_C.TRAIN.OPTIMIZER.MOMENTUM = 0.9  # SGD, LARS and Muon: the share of the old momentum that an update keeps.
_C.TRAIN.OPTIMIZER.NESTEROV = True  # SGD and Muon: True uses Nesterov's momentum.

_C.TRAIN.MODEL_EMA = False  # True: keep, evaluate and save an exponential moving average of the weights, too.
_C.TRAIN.MODEL_EMA_DECAY = 0.9999  # The share of the old average that each update keeps. 0 <= value < 1.
_C.TRAIN.MODEL_EMA_WARMUP = True  # Update n (from 0) keeps at most 1 - (1 + n) ** (-2 / 3), so early weights fade fast.

_C.TRAIN.LOSS = "auto"  # cross_entropy (labels), soft_target (distributions), or one yes or no per class: bce, focal,
# asymmetric. auto: soft_target with mixup or CutMix, bce with TASK multilabel, otherwise cross_entropy.
_C.TRAIN.SMOOTHING = 0.0  # Label smoothing s of the training loss. multilabel: targets are 1 - s / 2 and s / 2.
_C.TRAIN.CLASS_WEIGHTS = None  # A factor per class on the loss. "auto": inverse to its training images. None: all are
# 1.
_C.TRAIN.POS_WEIGHT = None  # bce: a factor on the loss of images with the class. "auto": negatives / positives. None:
# 1.

_C.TRAIN.DISTILLATION_TYPE = None  # The student learns the teacher's choice ("hard"), its distribution ("soft") or its
# last map ("feature"). None: no teacher.
_C.TRAIN.DISTILLATION_ALPHA = 0.5  # The share of the distillation in the loss, 0 to 1.
_C.TRAIN.DISTILLATION_TAU = 1.0  # soft: the temperature of both distributions.
_C.TRAIN.TEACHER_MODEL = None  # The teacher's YAML file or model name.
_C.TRAIN.TEACHER_PATH = None  # The file of the teacher's weights.

_C.TRAIN.CROP = "random_resized"  # A random box, resized to IMAGE_SIZE. Up to ten boxes are drawn until one fits.
# "random_resized_once": draw one box and cut it at the image's border (BYOL, MAE's probe). "simple" (DeiT-III): resize
# the short side to IMAGE_SIZE, add 4 mirrored pixels on each side, crop at random. "short_side", "squash" (big_vision):
# resize the short side, or both sides, to IMAGE_SIZE / CROP_PCT, crop at random.
_C.TRAIN.CROP_PCT = 0.875  # short_side, squash: the share of the resized side that the crop keeps, 0.1 to 1.
_C.TRAIN.CROP_SCALE = [0.08, 1.0]  # Random boxes: smallest and largest share of the image's area.
_C.TRAIN.CROP_RATIO = [0.75, 1.3333333333333333]  # Random boxes: smallest and largest width / height.
_C.TRAIN.INTERPOLATION = None  # None: use DATA.INTERPOLATION. "random": draw bilinear or bicubic for each image.
_C.TRAIN.HFLIP = 0.5  # Probability of a horizontal flip.
_C.TRAIN.VFLIP = 0.0  # Probability of a vertical flip.
_C.TRAIN.AFFINE = [0.0, 0.0, 0.0]  # Largest rotation in degrees, shift as a share of the size, and scaling as a share.
_C.TRAIN.AUTO_AUGMENT = None  # A policy in timm's spelling: rand-m9-mstd0.5-inc1, original, v0, trivial, 3a or
# augmix-m3-w3-d2. rand-m9-tRotate+Invert uses only these operations. None: no policy.
_C.TRAIN.COLOR_JITTER = 0.0  # Strength of random brightness, contrast and saturation, applied after AUTO_AUGMENT.
_C.TRAIN.RANDOM_ERASE_PROB = 0.0  # Probability that boxes of an image are erased.
_C.TRAIN.RANDOM_ERASE_MODE = "pixel"  # Fill boxes with noise. "rand": with a random colour. "const": with the mean
# colour.
_C.TRAIN.RANDOM_ERASE_COUNT = 1  # The largest number of boxes. They share the erased area.
_C.TRAIN.REPEATED_AUGMENT = 1  # Copies of an image in a global batch. Each is augmented anew. DeiT uses 3.
_C.TRAIN.MIXUP_ALPHA = 0.0  # Mixup draws its share from Beta(alpha, alpha). 0: no mixup.
_C.TRAIN.CUTMIX_ALPHA = 0.0  # CutMix draws its share from Beta(alpha, alpha). 0: no CutMix.
_C.TRAIN.CUTMIX_MINMAX = None  # [low, high]: the share of each side that CutMix's box has. It replaces CUTMIX_ALPHA.
_C.TRAIN.MIXUP_PROB = 1.0  # Probability that a batch (a pair, an image) is mixed.
_C.TRAIN.MIXUP_SWITCH_PROB = 0.5  # Probability of CutMix if both are on.
_C.TRAIN.MIXUP_MODE = "batch"  # Draw once for the global batch. "pair": for each pair. "elem": for each image.
_C.TRAIN.MIXUP_OFF_EPOCH = 0  # Stop mixing after this many epochs. 0: never stop.

_C.SAVE = "./output"  # The folder of all runs. A run writes to SAVE/<train|eval>-<model>-<time>.
_C.OUTPUT = None  # The folder of this run itself. It replaces SAVE.
_C.TRACKERS = None  # Also write metrics for visualdl, tensorboard, wandb or mlflow, offline: one name or a list.
_C.TAG = "default"  # Your note about the run. It is kept in config.yaml.
_C.SAVE_FREQ = 10  # Save a checkpoint after every SAVE_FREQ-th epoch and never remove it. 0: never for that.
_C.SAVE_STEPS = 0  # Save a checkpoint each time that this many steps are done. 0: never for that.
_C.SAVE_MINUTES = 15.0  # Save a checkpoint when this many minutes have passed since the last. None: never for that.
_C.KEEP_LAST = 2  # Keep this many of the newest checkpoints, besides the best ones and those of SAVE_FREQ.
_C.BEST_METRIC = "auto"  # What makes a checkpoint the best: acc1 (auto), acc5 or mean_class_acc. multilabel: mAP
# (auto), f1_micro or f1_macro. Or loss: the lowest is the best.
_C.SAVE_ON_ERROR = "stop"  # End the run if a checkpoint can't be written (full disk). "continue": report it and go on.
_C.REPORT_FREQ = 20  # Steps between two reports of the training, in the log and in metrics.jsonl.
_C.VALIDATE_FREQ = 1  # Epochs between two evaluations. The last epoch is always evaluated.
_C.REPORT = True  # Write report.html when the run ends, with predictions.csv and confusion.csv of the last evaluation.
_C.SEED = 0  # Seed of the first weights, of the order of images and of their augmentation.
_C.EVAL = False  # True: evaluate only, don't train.
_C.EVAL_ENGINE = "eager"  # EVAL on a CPU: "inference" exports the model and runs it by Paddle Inference (oneDNN).
_C.AMP = False  # True: compute in bfloat16. A GPU without it uses float16 with a loss scaler. A CPU needs avx512_bf16
# or AMX; its linear, MLP and attention layers use bfloat16. EVAL_ENGINE inference: the whole program does.
_C.AMP_EVAL = False  # With AMP: True evaluates in the same precision. False: evaluate in float32, as PaddleViT does.
_C.NGPUS = -1  # Processes. -1: one per visible GPU, or one per core if there is no GPU.
_C.DETERMINISTIC = False  # GPU: True repeats a run bit by bit, and may be slower. A CPU always does.
_C.CUDNN_BENCHMARK = False  # GPU: True lets cuDNN search for its fastest algorithm. Not with DETERMINISTIC.
_C.TF32 = None  # GPU from Ampere on: True multiplies float32 with TF32's 10 bits. False: in full. None: as Paddle does.
_C.TUNE_CPU = True  # Tune threads, strides, memory and compiled operators for speed. On a GPU: only the memory.
_C.TO_STATIC = False  # GPU, training: compile the model to a graph (paddle.jit.to_static). A CPU is faster without.

_C.DIST = CfgNode()
_C.DIST.TIMEOUT = 1800.0  # Stop the run after this many seconds without progress and name the slowest process. Until
# the first batch at least 600 s are allowed.
_C.DIST.INIT_TIMEOUT = 300.0  # Seconds that processes of a launcher wait for each other at the start.
_C.DIST.MAX_RESTART = 0  # How often to start all processes again if one is lost or stalls. Not for those of a launcher.
_C.DIST.ENGINE = "data_parallel"  # Use paddle.DataParallel. "fleet": use paddle.distributed.fleet with STRATEGY.
_C.DIST.STRATEGY = CfgNode()  # The keys of fleet's DistributedStrategy, spelled as there.
_C.DIST.STRATEGY.sharding = False  # True: each process keeps a share of the optimizer's state (ZeRO).
_C.DIST.STRATEGY.sharding_configs = CfgNode()
_C.DIST.STRATEGY.sharding_configs.stage = 1  # What is shared. 1: the optimizer's state. 2: the gradients, too. 3: the
# weights of blocks, too.
_C.DIST.STRATEGY.fuse_grad_size_in_MB = 32  # Gradients of this many MB are sent together.
_C.DIST.STRATEGY.find_unused_parameters = False  # Set True if a step may not use all parameters of the model.

add_keys(_C)  # Optimizers, schedules, losses and datasets declare keys of their own where they are defined.

_KEYS = Keys(_C, TYPES, WORDS, REMOVED)
# fmt: on


def get_config(
    cfg_file: str | os.PathLike | None = None, options: Sequence[str] = ()
) -> Configuration:
    """Returns the frozen configuration: defaults, then ``cfg_file``, then ``options``.

    Args:
        cfg_file: a YAML file, or the name of a model under configs/ (``vit_base_patch16_224``).
        options: words as after ``-o``: ``["TRAIN.BASE_LR", "1e-4", "SEED=3"]``.

    Raises:
        InputError: an unknown key, a wrong type, a value out of range, an unreadable file.
    """
    return asked_config(
        cfg_file, [Option(key, value) for key, value in pairs(options, _KEYS.defaults)]
    )


class FromFile(NamedTuple):
    """What a configuration's file says: the configuration, not checked yet, and what the file's name adds to it."""

    config: Configuration
    tagged: list[Option]


def asked_config(
    cfg_file: str | os.PathLike | None,
    options: Iterable[Option],
    read: dict[Any, FromFile] | None = None,
) -> Configuration:
    """Returns ``get_config``'s configuration, which knows by what each option was given.

    Args:
        read: what was read for earlier calls, by file, which isn't read again; this call adds to it.
    """
    read = {} if read is None else read
    if cfg_file not in read:
        read[cfg_file] = FromFile(_C.clone(), [] if cfg_file is None else tag_options(cfg_file))
        if cfg_file is not None:
            _KEYS.merge_file(read[cfg_file].config, find_config(cfg_file))
    config = read[cfg_file].config.clone()
    tagged = read[cfg_file].tagged
    _KEYS.merge_options(config, [*tagged, *options])
    if tagged and not config.MODEL.PRETRAINED:
        name = current_name(os.path.basename(cfg_file or ""))
        add_note(config, f"give -pretrained=hf-hub:timm/{name} to load the weights {name}")
    _finish(config)
    config.freeze()
    return config


def update_config(config: Configuration, args: Any) -> Configuration:
    """Returns what a configuration, then the YAML file ``args.cfg`` and the flags in ``args`` come to, as PaddleViT's
    function of this name does.

    The result isn't frozen, so that a program can set keys afterwards, as PaddleViT's do. These aren't checked.

    Args:
        args: parsed flags as attributes (``dataset``, ``batch_size``, ...); those that are missing or None set nothing.
            ``output`` is SAVE, as in PaddleViT.

    Raises:
        InputError: as ``get_config``.
    """
    changed = config.clone()
    changed.defrost()
    if getattr(args, "cfg", None):
        _KEYS.merge_file(changed, find_config(args.cfg))
    _KEYS.merge_options(changed, options_of(args, changed.EVAL))
    _finish(changed)
    return changed


def _finish(config: Configuration) -> None:
    """Checks a configuration of which all values are given."""
    settle(config)
    values = dict(leaves(config))
    check(config, values)
    refuse_idle(values, explicit_sources(config), NEEDS)
    if config.families and not config.EVAL:
        for line in reading.difference_lines(config.families[-1], config):
            add_note(config, line)


def default_values(config: Configuration | None = None) -> dict[str, Any]:
    """Returns the defaults by dotted key.

    Args:
        config: whose architecture's keys of MODEL are meant; None: those of all, with the default of one of them.
    """
    return dict(_KEYS.defaults) if config is None else _KEYS.defaults_of(config)


def named_keys(options: Sequence[str]) -> set[str]:
    """Returns the keys that words as after ``-o`` set.

    Raises:
        InputError: one has no value.
    """
    return {key for key, _ in pairs(options, _KEYS.defaults)}


def with_values(config: Configuration, why: str = "", /, **values: Any) -> Configuration:
    """Returns a frozen copy of ``config`` in which each KEY (dots written as ``__``) has its new value.

    Args:
        why: where the values come from, in words.
    """
    changed = config.clone()
    changed.defrost()
    _KEYS.write_out(changed, {key.replace("__", "."): value for key, value in values.items()}, why)
    settle(changed)
    check(changed, dict(leaves(changed)))
    changed.freeze()
    return changed


def with_options(config: Configuration, options: Sequence[str]) -> Configuration:
    """Returns a frozen copy of ``config`` in which ``options`` count, words as after ``-o``.

    Raises:
        InputError: as ``get_config``.
    """
    changed = config.clone()
    changed.defrost()
    _KEYS.merge_options(
        changed, [Option(key, value) for key, value in pairs(options, _KEYS.defaults)]
    )
    settle(changed)
    values = dict(leaves(changed))
    check(changed, values)
    named = named_keys(options)
    refuse_idle(
        values, {key: by for key, by in explicit_sources(changed).items() if key in named}, NEEDS
    )
    changed.freeze()
    return changed


def differences(config: Configuration) -> list[str]:
    """Returns one line ``KEY: default -> value`` for each key that isn't at its default."""
    default = default_values(config)
    return [
        f"{key}: {default[key]} -> {value}"
        for key, value in leaves(config)
        if value != default[key]
    ]


def resolved_yaml(config: Configuration) -> str:
    """Returns YAML that ``-cfg`` takes again: every key, and where its value came from."""
    return _KEYS.to_yaml(config)
