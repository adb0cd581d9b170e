"""The configuration: every option with its default, unit and meaning; YAML and command line merged, checked, frozen.

Precedence, lowest first: the defaults below, the YAML file (its BASE files first), flags, ``-o KEY VALUE KEY=VALUE``.
Key names are PaddleViT's. This module doesn't import Paddle, so that ``-h`` and a typing error answer at once.
"""

import os
from collections.abc import Iterable, Sequence
from typing import Any

from yacs.config import CfgNode

from config_checks import check
from configs.architectures import settle
from configs.key_needs import NEEDS
from configs.merging import (
    Keys,
    Option,
    find_config,
    model_files,
    shipped_configs,
    shipped_model,
    shipped_models,
    tag_options,
)
from configs.needs import refuse_idle
from configs.paddlevit import reading
from configs.registry import add_keys, own_keys
from options import CONFIG_DIR, Configuration, add_note, is_users, leaves, pairs, set_by_someone

__all__ = [  # besides what is defined here
    "CONFIG_DIR", "find_config", "is_users", "model_files", "shipped_configs", "shipped_model", "shipped_models",
]  # fmt: skip

_C = Configuration()
# YAML files, relative to the one that names them, merged before it. WITHOUT: [TRAIN, MODEL.DROPOUT] beside BASE takes
# back what those files said of these keys and sections.
_C.BASE = [""]

_C.TASK = "classification"  # one class per image; multilabel: any number of classes, each a yes or a no

_C.DATA = CfgNode()
_C.DATA.BATCH_SIZE = 256  # training samples per device and step
_C.DATA.GLOBAL_BATCH = None  # training samples of all devices together per step, instead: BATCH_SIZE is its share
_C.DATA.BATCH_SIZE_EVAL = 64  # evaluation samples per device and step
_C.DATA.DATA_PATH = "/dataset/imagenet/"  # the dataset's folder
_C.DATA.DATASET = "imagenet2012"  # a reader in loading/, such as folder, imagenet2012, shards, digits
_C.DATA.IMAGE_SIZE = 224  # pixels, height = width; or [height, width], on the command line 224x160, too
_C.DATA.IMAGE_CHANNELS = 3  # 3: RGB, 1: grey; others, up to 64: the channels of TIFF and .npy files
_C.DATA.IMAGE_DTYPE = "auto"  # 8-bit colours or grey where IMAGE_CHANNELS is 3 or 1, otherwise as float32. "float32":
# pixels keep their full depth: 8-bit values / 255, 16-bit values / 65535, floats as they are stored
_C.DATA.CROP_PCT = 0.875  # evaluation: the central crop's share of the resized side
_C.DATA.CROP_MODE = "center"  # evaluation: the short side is resized; "squash": both sides, to its shape (timm)
_C.DATA.INTERPOLATION = "bicubic"  # of every resize: bicubic, bilinear or nearest
_C.DATA.EXIF_ORIENTATION = False  # turn a photograph as its EXIF says; False: as it is stored (timm, PaddleViT)
_C.DATA.FAST_EVAL = False  # evaluation: decode JPEG as fast as training does; False: Pillow's pixels, to the bit
_C.DATA.NUM_WORKERS = 2  # loader processes per device; 0: load in the training process
_C.DATA.PREFETCH = 2  # batches that each of them loads ahead
_C.DATA.LOADER = "paddle"  # training: "dali": NVIDIA DALI decodes, on the GPU where there is one
_C.DATA.IMAGENET_MEAN = [0.5, 0.5, 0.5]  # per channel, or one for all; of pixels in 0..1, of floats in their unit
_C.DATA.IMAGENET_STD = [0.5, 0.5, 0.5]  # as many values
_C.DATA.DROP_LAST = True  # training: drop the tail that fills no global batch; False: pad it to a multiple of devices
_C.DATA.SHUFFLE_MODE = "global"  # the epoch is shuffled, then split; "shard": split once, each device shuffles its own
_C.DATA.SAMPLER = "shuffle"  # training: each image once an epoch; "balanced": each class equally often
_C.DATA.MULTI_SCALE = None  # training: sizes of images, one at a step; as many images as make BATCH_SIZE's pixels
_C.DATA.SCALE_SCHEDULE = "mixed"  # "progressive" (timm): BATCH_SIZE images of each, from the first size to the last
_C.DATA.SCALE_SPREAD = 0.65  # progressive: standard deviation of an epoch's sizes, counted in places of the list
_C.DATA.SCALE_RANDOM = 0.1  # progressive: share of the steps that draw any size
_C.DATA.SHARD_SHUFFLE = None  # shards: so many at a time, in random order, their samples mixed; None: all at random
_C.DATA.CACHE = None  # folder for the decoded images, of one size, that processes then share (memory-mapped)
_C.DATA.MAX_PIXELS = 100_000_000  # of an image file; one that has more is as one that can't be read
_C.DATA.VAL_SPLIT = None  # take this share of each class's training images for validation; the data has none itself
_C.DATA.FOLDS = None  # k-fold: split the training images into this many parts; each has its share of every class
_C.DATA.FOLD = 0  # number of the part for validation, from 0; the data's own validation images aren't read
_C.DATA.SPLIT_SEED = 0  # draws the parts of VAL_SPLIT and FOLDS. They don't depend on SEED: all seeds share them
_C.DATA.SPLIT_GROUPS = None  # images of a group are in one part: a pattern of paths, or a file of paths and groups
_C.DATA.CLASSES = None  # evaluation: "present" compares only the outputs of the data's own classes (ImageNet-A, -R).
# Or a file: on each line a class of the data, a TAB and its output (docs/own_data.md)
_C.DATA.LABELS = None  # evaluation: ReaL's real.json, whose labels take the place of an ImageNet validation set's
_C.DATA.CORRUPTION = None  # evaluation: corrupt each image after its crop, as ImageNet-C does: fog, snow, ...
_C.DATA.SEVERITY = 1  # of the corruption, 1 to 5
_C.DATA.SKIP_BROKEN = False  # training: replace an unreadable image by the next one, count and list it

_C.MODEL = CfgNode()
# Besides these: the keys of the architecture, which its constructor in models/ declares with their types and defaults.
# python tools/list_models.py --keys NAME lists them; null (None) is the constructor's default.
_C.MODEL.TYPE = "ViT"  # the architecture, in any case: a name that a class of models/ registers
_C.MODEL.NAME = "vit_base_patch16_224"
_C.MODEL.RESUME = None  # checkpoint to go on from; "auto": the newest whole one in OUTPUT, or none: from the start
_C.MODEL.PRETRAINED = None  # weights to start from or to evaluate: a file, a folder or hf-hub:org/name
_C.MODEL.PRETRAINED_ALLOW = None  # patterns of names that may be missing in them, or in the model: ["fc_norm.*"]
_C.MODEL.PRETRAINED_CLASSES = None  # imagenet22k(_swin): their classes' order; ImageNet-1k's are kept
_C.MODEL.PRETRAINED_ADAPTER = None  # an adapter.safetensors that was trained on them, or peft's LoRA: merged into them
_C.MODEL.NUM_CLASSES = 1000  # or "auto": the dataset's; 0: no classifier (create_model)

_C.TRAIN = CfgNode()
_C.TRAIN.LAST_EPOCH = 0  # the last epoch already done; a resumed run takes it from its checkpoint
_C.TRAIN.NUM_EPOCHS = 300  # passes over the training images
_C.TRAIN.MAX_MINUTES = None  # budget of training and evaluations; the schedule is shortened so that it ends there
_C.TRAIN.EARLY_STOP = None  # stop after this many evaluations in a row without gain in BEST_METRIC, EMA's included
_C.TRAIN.EARLY_STOP_MIN = 0.0  # a gain is more than this over the last one that counted; percent, or of the loss
_C.TRAIN.WARMUP_EPOCHS = 32.0  # linear from WARMUP_START_LR to BASE_LR; 0.2: a fifth of the first epoch's updates
_C.TRAIN.COOLDOWN_EPOCHS = 0  # the last of NUM_EPOCHS, at the schedule's last rate
_C.TRAIN.WEIGHT_DECAY = 0.3  # times the rate, per update; Adam, SGD, LARS: an L2 term of the gradient
_C.TRAIN.DECAY_ALL = False  # weight decay of biases, norms and tokens, too (PaddleViT); False: of matrices alone
_C.TRAIN.BASE_LR = 3e-3  # the highest learning rate, where warm-up ends
_C.TRAIN.WARMUP_START_LR = 1e-6  # where warm-up begins
_C.TRAIN.END_LR = 0.0  # where the schedule ends (step, multistep: its lower bound)
_C.TRAIN.LINEAR_SCALED_LR = None  # batch that the three rates are meant for; they scale with the effective batch
_C.TRAIN.LR_SCALING = "linear"  # how they scale; "sqrt": with the square root of the batches' ratio
_C.TRAIN.LR_SCALED = "all"  # which of them; "base": BASE_LR alone
_C.TRAIN.RECIPE_BATCH = None  # batch that a recipe's rates are for where they don't scale: a run far from it is told
_C.TRAIN.LAYER_DECAY = None  # factor on the rate per block, from the classifier (1) down to the patch embedding
_C.TRAIN.LAYER_DECAY_GROUPS = "authors"  # which parameters have a rate in common: the authors' groups, or "timm"'s
_C.TRAIN.HEAD_LR = 1.0  # factor on the rate of the classifier
_C.TRAIN.FREEZE = None  # patterns of parameters that stay as they are: ["patch_embed.*", "blocks.[0-5].*"]; "backbone"
_C.TRAIN.ADAPTER = CfgNode()  # a few parameters train with the classifier, and nothing else
_C.TRAIN.ADAPTER.NAME = None  # lora (RANK, ALPHA, TARGETS, DROPOUT), prompt (MODEL.PROMPT_TOKENS), bitfit: the biases
_C.TRAIN.GRAD_CLIP = None  # bound on the gradients: of GRAD_CLIP_MODE
_C.TRAIN.GRAD_CLIP_MODE = "norm"  # global norm; "value": each element; "agc": a unit's norm over its weights' norm
_C.TRAIN.SYNC_BN = False  # GPU: batch norm's statistics over all devices' images (paddle.nn.SyncBatchNorm)
_C.TRAIN.ACCUM_ITER = 1  # steps whose gradients make one update

_C.TRAIN.LR_SCHEDULER = CfgNode()
_C.TRAIN.LR_SCHEDULER.NAME = "warmupcosine"  # or cosine (the same), linear, poly, step, multistep (or multi-step),
# onecycle, wsd, constant; each begins with WARMUP_EPOCHS, where PaddleViT's (cosine, multi-step) don't: set them to 0
_C.TRAIN.LR_SCHEDULER.WARMUP_PREFIX = True  # it begins after warm-up; False: at epoch 0, warm-up in its place
_C.TRAIN.LR_SCHEDULER.DECAY_RATE = 0.1  # each step's factor; onecycle: the share of BASE_LR where its fall slows down
_C.TRAIN.LR_SCHEDULER.PER_EPOCH = False  # all an epoch's updates have the rate of its "start" (timm), its "end"
# (PaddleViT; True), or "late", of the start of the epoch before (DeiT, PVT)

_C.TRAIN.OPTIMIZER = CfgNode()
_C.TRAIN.OPTIMIZER.NAME = "AdamW"  # or Adam, SGD, LAMB, LARS, Lion, Muon (AdamW where a parameter is no matrix)
_C.TRAIN.OPTIMIZER.EPS = 1e-8  # of the denominator
_C.TRAIN.OPTIMIZER.BETAS = [0.9, 0.999]  # Lion's paper: [0.9, 0.99]
_C.TRAIN.OPTIMIZER.MOMENTUM = 0.9  # SGD, LARS, Muon
_C.TRAIN.OPTIMIZER.NESTEROV = True  # SGD, Muon

_C.TRAIN.MODEL_EMA = False  # an exponential moving average of the weights, evaluated and saved beside them
_C.TRAIN.MODEL_EMA_DECAY = 0.9999  # per update
_C.TRAIN.MODEL_EMA_WARMUP = True  # a decay of 1 - (1 + updates) ** -(2 / 3) until that is more than MODEL_EMA_DECAY

_C.TRAIN.LOSS = "auto"  # cross_entropy (of labels), soft_target (of distributions); of a yes or no for each class: bce,
# focal, asymmetric; auto: what mixup calls for, and under TASK multilabel bce
_C.TRAIN.SMOOTHING = 0.0  # label smoothing s of the training loss; of a yes and a no (multilabel): 1 - s / 2 and s / 2
_C.TRAIN.CLASS_WEIGHTS = None  # a factor per class; "auto": inverse to its number of training images, 1 on average
_C.TRAIN.POS_WEIGHT = None  # bce: factor on the loss of a class's own images; "auto": negatives over positives

_C.TRAIN.DISTILLATION_TYPE = None  # hard: the teacher's choice as label; soft: its distribution; feature: its last map
_C.TRAIN.DISTILLATION_ALPHA = 0.5  # share of the distillation in the loss
_C.TRAIN.DISTILLATION_TAU = 1.0  # soft: temperature
_C.TRAIN.TEACHER_MODEL = None  # the teacher's YAML file, or name
_C.TRAIN.TEACHER_PATH = None  # the teacher's weights

_C.TRAIN.CROP = "random_resized"  # or "simple" (DeiT-III): short side to IMAGE_SIZE, mirrored 4 pixels wider, cropped;
# "random_resized_once": a box is drawn once and clipped to the image (BYOL, MAE's probe), not until one fits;
# "short_side", "squash": resized as DATA.CROP_MODE center and squash do, by CROP_PCT, a crop at random (big_vision)
_C.TRAIN.CROP_PCT = 0.875  # short_side, squash: the crop's share of the resized side
_C.TRAIN.CROP_SCALE = [0.08, 1.0]  # random resized crops: share of the image's area
_C.TRAIN.CROP_RATIO = [0.75, 1.3333333333333333]  # random resized crops: width / height
_C.TRAIN.INTERPOLATION = None  # None: DATA.INTERPOLATION; "random": bilinear or bicubic, per image
_C.TRAIN.HFLIP = 0.5  # probability of a horizontal flip
_C.TRAIN.VFLIP = 0.0  # probability of a vertical flip
_C.TRAIN.AFFINE = [0.0, 0.0, 0.0]  # largest rotation (degrees), shift (share of the size), scaling (share)
_C.TRAIN.AUTO_AUGMENT = None  # rand-m9-mstd0.5-inc1 (-tRotate+Invert: of these operations alone), original, v0,
# trivial, 3a or augmix-m3-w3-d2, timm's way
_C.TRAIN.COLOR_JITTER = 0.0  # strength of brightness, contrast and saturation jitter, after AUTO_AUGMENT
_C.TRAIN.RANDOM_ERASE_PROB = 0.0  # probability that boxes of an image are erased
_C.TRAIN.RANDOM_ERASE_MODE = "pixel"  # filled by noise; "rand": one random colour; "const": the mean colour
_C.TRAIN.RANDOM_ERASE_COUNT = 1  # at most so many boxes, which share the area
_C.TRAIN.REPEATED_AUGMENT = 1  # copies of an image in a global batch, each augmented anew (DeiT: 3)
_C.TRAIN.MIXUP_ALPHA = 0.0  # of the Beta distribution of mixup's share; 0: no mixup
_C.TRAIN.CUTMIX_ALPHA = 0.0  # of the Beta distribution of CutMix's share; 0: no CutMix
_C.TRAIN.CUTMIX_MINMAX = None  # [low, high]: CutMix's box as a share of each side, instead of CUTMIX_ALPHA
_C.TRAIN.MIXUP_PROB = 1.0  # probability that a batch (pair, element) is mixed
_C.TRAIN.MIXUP_SWITCH_PROB = 0.5  # probability of CutMix where both are on
_C.TRAIN.MIXUP_MODE = "batch"  # one draw per global batch, per "pair" or per "elem"
_C.TRAIN.MIXUP_OFF_EPOCH = 0  # epochs after which mixing stops; 0: never

_C.SAVE = "./output"  # runs go to SAVE/<train|eval>-<model>-<time>
_C.OUTPUT = None  # the run's folder itself, instead
_C.TRACKERS = None  # also write metrics for these, offline: visualdl, tensorboard, wandb, mlflow; one or a list
_C.TAG = "default"  # a note, kept with the run
_C.SAVE_FREQ = 10  # epochs between checkpoints that stay; 0: none stays for that
_C.SAVE_STEPS = 0  # steps between checkpoints; 0: only at epochs' ends
_C.SAVE_MINUTES = 15.0  # minutes between checkpoints, at most; None: the clock plays no part
_C.KEEP_LAST = 2  # so many of the newest checkpoints stay, besides the best and every SAVE_FREQ-th epoch's
_C.BEST_METRIC = "auto"  # what makes a checkpoint the best: acc1 (auto), acc5, mean_class_acc; multilabel: mAP (auto),
# f1_micro, f1_macro; or loss, the lowest
_C.SAVE_ON_ERROR = "stop"  # when a checkpoint can't be written (a full disk): end the run; "continue": say so, go on
_C.REPORT_FREQ = 20  # steps between reports
_C.VALIDATE_FREQ = 1  # epochs between evaluations
_C.REPORT = True  # at a run's end: report.html, and the last evaluation's predictions.csv and confusion.csv
_C.SEED = 0  # of weights, order and augmentation
_C.EVAL = False  # evaluate only
_C.EVAL_ENGINE = "eager"  # with EVAL on a CPU: "inference" exports the model and runs it by Paddle Inference (oneDNN)
_C.AMP = False  # GPU: autocast to bfloat16, or to float16 with a loss scaler where there is no bfloat16; CPU that has
# bfloat16 (avx512_bf16, AMX): products of linear, MLP and attention layers; EVAL_ENGINE inference: the whole program
_C.AMP_EVAL = False  # with AMP: evaluations too; False: they are in float32, as PaddleViT's
_C.NGPUS = -1  # processes; -1: one per visible GPU, or without a GPU one per core
_C.DETERMINISTIC = False  # GPU: the same bits twice: ordered sums in convolutions, pooling, attention (the CPU's are)
_C.CUDNN_BENCHMARK = False  # GPU: let cuDNN search for its fastest algorithm; not with DETERMINISTIC
_C.TF32 = None  # GPU, from Ampere on: float32 products and convolutions by TF32, of 10 bits; None: as this Paddle does
_C.TUNE_CPU = True  # CPU: threads, stride kernels, compiled operators; CPU and GPU: allocator (ops.settings)
_C.TO_STATIC = False  # GPU, training: the model as a compiled graph (paddle.jit.to_static); a CPU is faster without

_C.DIST = CfgNode()
_C.DIST.TIMEOUT = 1800.0  # seconds without progress of any process that end the run, naming the late one; 600 to start
_C.DIST.INIT_TIMEOUT = 300.0  # seconds that ranks which a launcher started wait for one another
_C.DIST.MAX_RESTART = 0  # times that spawned processes which are lost or stall are started again, by themselves
_C.DIST.ENGINE = "data_parallel"  # paddle.DataParallel; "fleet": paddle.distributed.fleet, with STRATEGY
_C.DIST.STRATEGY = CfgNode()  # keys of fleet's DistributedStrategy, spelled as there
_C.DIST.STRATEGY.sharding = False  # each process keeps a share of the optimizer's state (ZeRO)
_C.DIST.STRATEGY.sharding_configs = CfgNode({"stage": 1})  # 2: and of the gradients
_C.DIST.STRATEGY.fuse_grad_size_in_MB = 32  # gradients that processes bring together at a time
_C.DIST.STRATEGY.find_unused_parameters = False  # for a model that leaves parameters out of a step

add_keys(_C)  # of single optimizers, schedules, losses and datasets: declared beside them

# What a key takes whose default doesn't tell it; each takes None (YAML: null) too.
_TYPES = {
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
# Keys that were, with their defaults: runs wrote these out into their config.yaml, whoever had set them.
_REMOVED = {
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
_WORDS = {  # values besides those of the type
    "MODEL.NUM_CLASSES": ("auto",),
    "TRAIN.CLASS_WEIGHTS": ("auto",),
    "TRAIN.POS_WEIGHT": ("auto",),
    "TRAIN.LR_SCHEDULER.PER_EPOCH": ("start", "late", "end"),
}


_KEYS = Keys(_C, _TYPES, _WORDS, _REMOVED)


def get_config(cfg_file: str | os.PathLike | None = None, options: Sequence[str] = ()) -> Configuration:
    """Returns the frozen configuration: defaults, then ``cfg_file``, then ``options``.

    Args:
        cfg_file: a YAML file, or the name of a model under configs/ (``vit_base_patch16_224``).
        options: words as after ``-o``: ``["TRAIN.BASE_LR", "1e-4", "SEED=3"]``.

    Raises:
        InputError: an unknown key, a wrong type, a value out of range, an unreadable file.
    """
    return asked_config(cfg_file, [Option(key, value) for key, value in pairs(options, _KEYS.defaults)])


def asked_config(cfg_file: str | os.PathLike | None, options: Iterable[Option]) -> Configuration:
    """Returns ``get_config``'s configuration, which knows by what each option was given."""
    config, tagged = _C.clone(), [] if cfg_file is None else tag_options(cfg_file)
    if cfg_file is not None:
        _KEYS.merge_file(config, find_config(cfg_file))
    _KEYS.merge_options(config, [*tagged, *options])
    if tagged and not config.MODEL.PRETRAINED:
        name = os.path.basename(cfg_file or "")
        add_note(config, f"the weights {name} are -pretrained=hf-hub:timm/{name}")
    settle(config)
    check(config)
    refuse_idle(config, set_by_someone(config), NEEDS)
    if config.families and not config.EVAL:
        for line in reading.differences_told(config.families[-1], config):
            add_note(config, line)
    config.freeze()
    return config


def default_values(config: Configuration | None = None) -> dict[str, Any]:
    """Returns the defaults by dotted key.

    Args:
        config: whose architecture's keys of MODEL are meant; None: those of all, with the default of one of them.
    """
    return _KEYS.defaults if config is None else _KEYS.defaults_of(config)


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
    check(changed)
    changed.freeze()
    return changed


def with_options(config: Configuration, options: Sequence[str]) -> Configuration:
    """Returns a frozen copy of ``config`` in which ``options`` count, words as after ``-o``.

    Raises:
        InputError: as ``get_config``.
    """
    changed = config.clone()
    changed.defrost()
    _KEYS.merge_options(changed, [Option(key, value) for key, value in pairs(options, _KEYS.defaults)])
    settle(changed)
    check(changed)
    named = named_keys(options)
    refuse_idle(changed, {key: by for key, by in set_by_someone(changed).items() if key in named}, NEEDS)
    changed.freeze()
    return changed


def differences(config: Configuration) -> list[str]:
    """Returns one line ``KEY: default -> value`` for each key that isn't at its default."""
    default = default_values(config)
    return [f"{key}: {default[key]} -> {value}" for key, value in leaves(config) if value != default[key]]


def resolved(config: Configuration) -> str:
    """Returns YAML that ``-cfg`` takes again: every key, and where its value came from."""
    return _KEYS.written(config)
