"""The configuration: every key that all runs share, and how YAML files and the command line set it.

A key is declared here, once. The comment above it says what it means, its annotation what values it
takes (``settings/keys.py``), and ``key(default, ...)`` what it needs to have an effect
(``settings/needs.py``). Architectures, optimizers, schedules, losses, datasets and adapters declare
keys of their own where they are defined.

Precedence, lowest first: the defaults, the YAML file (its BASE files before it), flags, and ``-o
KEY VALUE KEY=VALUE``. The names of keys are PaddleViT's. This module doesn't import Paddle, so that
``-h`` and a mistyped key are answered at once.
"""

import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from settings.architectures import keep_model_keys
from settings.configuration import (
    CONFIG_DIR,
    Configuration,
    Option,
    add_note,
    explicit_sources,
    is_users,
    leaves,
)
from settings.conflicts import check_conflicts
from settings.corruptions import CORRUPTIONS
from settings.explaining import explanation
from settings.idle import FILES, PLAIN_FILES, SHARDS, STORED, refuse_idle
from settings.keys import (
    Batch,
    CropShare,
    Epochs,
    Every,
    Factor,
    Few,
    FilePath,
    MixAlpha,
    Number,
    PaddedCropShare,
    Part,
    Positive,
    Processes,
    Rate,
    Seconds,
    Section,
    Share,
    Side,
    Size,
    WholeEpochs,
    between,
    key,
)
from settings.merging import (
    Keys,
    find_config,
    model_files,
    segmentation_files,
    shipped_configs,
    shipped_model,
    shipped_models,
    tag_options,
)
from settings.names import current_name
from settings.needs import (
    BCE,
    CUTMIX,
    EIGHT_BITS,
    EVALUATION,
    FLEET,
    LABELS,
    LOADED_AHEAD,
    MAPS,
    MIXING,
    MIXUP,
    ONE_VIEW,
    OWN_BATCH,
    PARTS,
    TEACHER,
    TRAINING,
    WEIGHTS,
    above_zero,
    is_,
    is_not,
    is_set,
    is_unset,
)
from settings.paddlevit import reading
from settings.paddlevit.programs import explain_missing_modules, options_of
from settings.parser import pairs

__all__ = [
    "CONFIG_DIR", "asked_config", "default_values", "differences", "explain", "find_config", "get_config", "is_users",
    "model_files", "named_keys", "resolved_yaml", "segmentation_files", "shipped_configs", "shipped_model",
    "shipped_models", "update_config", "with_options", "with_values",
]  # fmt: skip

# Within another program (tools/package) this module has another name, and imports aren't changed.
if __name__ == "config":
    explain_missing_modules()


class Root(Section):
    # YAML files that this one is based on; later ones override earlier ones. Paths are relative to
    # the file that names them. WITHOUT: [TRAIN, MODEL.DROPOUT] drops the values of these keys and
    # sections from the files of BASE.
    BASE: Sequence[str] = [""]

    # The kind of training. classification: each image has one class. multilabel: an image has any
    # number of classes.
    TASK: str = "classification"

    # The folder in which each run makes a folder of its own, <train|eval>-<model>-<time>.
    SAVE: FilePath = key("./output", is_unset("OUTPUT"))

    # The folder of this run. None: a new folder in SAVE.
    OUTPUT: FilePath | None = None

    # One name or a list of visualdl, tensorboard, wandb, mlflow, swanlab and trackio: metrics are
    # also written in these formats, offline. None: only to metrics.jsonl.
    TRACKERS: Sequence[str] | None = key(None, TRAINING)

    # A note of yours about the run, which is stored in config.yaml.
    TAG: str = "default"

    # Save a checkpoint every SAVE_FREQ epochs and never remove it. 0: no such checkpoints.
    SAVE_FREQ: Number = key(10, TRAINING)

    # Save a checkpoint every SAVE_STEPS steps. 0: no such checkpoints.
    SAVE_STEPS: Number = key(0, TRAINING)

    # Save a checkpoint when this many minutes have passed since the last one. None: no such
    # checkpoints.
    SAVE_MINUTES: Seconds | None = key(15.0, TRAINING)

    # The number of newest checkpoints to keep, in addition to the best ones and those of SAVE_FREQ.
    KEEP_LAST: Every = key(2, TRAINING)

    # The metric that selects the best checkpoint. Classification: acc1 (auto), acc5 or
    # mean_class_acc. Multi-label: mAP (auto), f1_micro or f1_macro. Also loss (lower is better),
    # knn (needs PROBE.FREQ) or a metric of RETRIEVAL.
    BEST_METRIC: str = key("auto", TRAINING)

    # A list of K: evaluations also report recall_K, mAP and mAP_R of the embeddings (the inputs of
    # the classifier), comparing each image with all others. None: no retrieval metrics.
    RETRIEVAL: Sequence[Every] | None = key(None, is_("TASK", "classification"))

    # What happens when a checkpoint can't be written, because the disk is full for example. stop:
    # the run ends. continue: the error is reported and training continues.
    SAVE_ON_ERROR: Literal["stop", "continue"] = "stop"

    # Write training metrics to the log and to metrics.jsonl every REPORT_FREQ steps.
    REPORT_FREQ: Every = key(20, TRAINING)

    # Profile so many steps after the first three: each process writes trace_rank<number>.json, and
    # the log says what takes longest. 0: none.
    PROFILE: Annotated[int, between(0, 50)] = key(0, TRAINING)

    # Evaluate every VALIDATE_FREQ epochs, and after the last epoch.
    VALIDATE_FREQ: Every = key(1, TRAINING)

    # Whether to write report.html after each evaluation, with predictions.csv and confusion.csv.
    REPORT: bool = True

    # The random seed of the initial weights, the order of images and their augmentation.
    SEED: Number = 0

    # True: evaluate without training.
    EVAL: bool = False

    # What runs an evaluation on a CPU. eager: Paddle, as in training. inference: the model is
    # exported and run by Paddle Inference (oneDNN).
    EVAL_ENGINE: Literal["eager", "inference"] = key("eager", EVALUATION, LABELS)

    # True: mixed precision in bfloat16, or in float16 with loss scaling on a GPU that lacks
    # bfloat16. A CPU needs avx512_bf16 or AMX, and uses bfloat16 in linear, MLP and attention
    # layers only; with EVAL_ENGINE inference, everywhere.
    AMP: bool = False

    # Whether evaluations use mixed precision as well. False: they use float32, as in PaddleViT.
    AMP_EVAL: bool = key(False, is_("AMP", True))

    # The number of processes. -1: one per visible GPU, or one per core if there is no GPU.
    NGPUS: Processes = -1

    # True: repeated runs on a GPU give bit-identical results, possibly at a lower speed. Runs on a
    # CPU always do.
    DETERMINISTIC: bool = False

    # True: cuDNN searches for its fastest algorithms (GPU). It can't be combined with
    # DETERMINISTIC.
    CUDNN_BENCHMARK: bool = False

    # Whether GPUs (Ampere or newer) may multiply float32 numbers in TF32, which has a mantissa of
    # 10 bits. None: Paddle's own default.
    TF32: bool | None = None

    # Whether to tune threads, tensor strides, memory allocation and compiled operators for speed.
    # On a GPU, only the memory allocation is tuned.
    TUNE_CPU: bool = True

    # True: compile the model to a static graph for training on a GPU (paddle.jit.to_static). On a
    # CPU, training is faster without.
    TO_STATIC: bool = key(False, TRAINING)


class DATA(Section):
    # Training samples per device and step. auto: the largest power of two that fits into memory and
    # leaves an epoch 8 updates. A resumed run keeps its number.
    BATCH_SIZE: Batch | Literal["auto"] = key(256, OWN_BATCH)

    # Training samples per step over all devices; BATCH_SIZE is then computed from it. None:
    # BATCH_SIZE applies.
    GLOBAL_BATCH: Batch | None = key(None, TRAINING)

    # Evaluation samples per device and step. auto: as many as in training; under EVAL, as many as
    # fit into memory.
    BATCH_SIZE_EVAL: Batch | Literal["auto"] = 64

    # The folder of the dataset.
    DATA_PATH: FilePath = "/dataset/imagenet/"

    # The format in which the dataset is stored.
    DATASET: str = "imagenet2012"

    # The column of a table that holds the images or their paths. auto: it is recognised by its name
    # or its content.
    IMAGE_COLUMN: str = "auto"

    # The column of a table that holds the labels, or several columns of 0 and 1, one for each class
    # (TASK multilabel). auto: it is recognised by its name. None: images have no labels.
    LABEL_COLUMN: str | Sequence[str] | None = "auto"

    # What separates the labels in a cell of a table (TASK multilabel). None: a cell is one label.
    LABEL_SEPARATOR: Literal["space", "comma", "semicolon", "bar"] | None = None

    # Image size in pixels: one side, or [height, width]. The command line also accepts 224x160.
    IMAGE_SIZE: Side | Sequence[Side] = 224

    # The number of channels: 3 for RGB, 1 for grey. Other numbers, up to 64, are for TIFF and .npy
    # files.
    IMAGE_CHANNELS: Annotated[int, between(1, 64)] = 3

    # The type of pixels. auto: 8-bit with 1 or 3 channels, otherwise float32. float32: pixels keep
    # their full depth; 8-bit values are divided by 255, 16-bit values by 65535, and floats are used
    # as stored.
    IMAGE_DTYPE: Literal["auto", "float32"] = "auto"

    # Evaluation: images are resized to IMAGE_SIZE / CROP_PCT, then IMAGE_SIZE is cropped from the
    # centre. Above 1, up to 2: the smaller image is padded with black.
    CROP_PCT: PaddedCropShare = key(
        0.875, is_not("DATA.CROP_MODE", "short", "own"), is_unset("DATA.NUM_TOKENS")
    )

    # Evaluation: how images are resized. center: the short side, then a central crop. squash: both
    # sides, then a central crop. short (segmentation): until the image covers IMAGE_SIZE, without a
    # crop. own (segmentation): not at all.
    CROP_MODE: Literal["center", "squash", "short", "own"] = "center"

    # The size to which CROP_MODE short and squash resize images in segmentation. IMAGE_SIZE is then
    # only the window size of HEAD.STRIDE. None: IMAGE_SIZE.
    EVAL_SIZE: Side | Sequence[Side] | None = key(
        None, MAPS, is_("DATA.CROP_MODE", "short", "squash")
    )

    # NaFlexViT: images are resized to at most this many patches and keep their aspect ratio. None:
    # images are resized to IMAGE_SIZE.
    NUM_TOKENS: Size | None = key(None, LABELS)

    # Training with NUM_TOKENS: a list of patch counts, of which each step uses one. A batch always
    # has as many patches as BATCH_SIZE images of NUM_TOKENS. None: always NUM_TOKENS.
    TOKEN_LENGTHS: Sequence[Size] | None = key(None, TRAINING, LABELS, is_set("DATA.NUM_TOKENS"))

    # The interpolation that resizes images.
    INTERPOLATION: Literal["bicubic", "bilinear", "nearest"] = "bicubic"

    # Whether to rotate photographs as their EXIF orientation says. timm and PaddleViT don't.
    EXIF_ORIENTATION: bool = key(False, FILES)

    # Evaluation: True decodes JPEG files as fast as training does. False: the pixels are exactly
    # those of Pillow.
    FAST_EVAL: bool = key(False, FILES, is_unset("DATA.CACHE"), EIGHT_BITS)

    # Data loader workers per device. 0: the training process loads the images itself.
    NUM_WORKERS: Annotated[int, between(0, 256)] = 2

    # The number of batches that each worker loads in advance.
    PREFETCH: Few = key(2, LOADED_AHEAD)

    # The data loader of training. dali: NVIDIA DALI, which decodes on the GPU if there is one.
    LOADER: Literal["paddle", "dali"] = key("paddle", TRAINING, ONE_VIEW)

    # The mean that is subtracted from the pixels, whose range is 0 to 1 (floats: as stored). One
    # value, or one per channel.
    IMAGENET_MEAN: Sequence[Annotated[float, between(-1000, 1000)]] = [0.5, 0.5, 0.5]

    # The standard deviation by which pixels are divided after the mean is subtracted. One value, or
    # one per channel.
    IMAGENET_STD: Sequence[Annotated[float, between(0.000001, 1000)]] = [0.5, 0.5, 0.5]

    # Training: whether to drop the last images of an epoch if they don't fill a global batch.
    # False: they form a smaller batch, padded to a multiple of the devices.
    DROP_LAST: bool = key(True, TRAINING)

    # How an epoch is divided among processes. global: all images are shuffled, then divided. shard:
    # images are divided once, and each process shuffles its own part.
    SHUFFLE_MODE: Literal["global", "shard"] = key("global", TRAINING)

    # How training draws images. shuffle: each image once per epoch. balanced: all classes equally
    # often. per_class: balanced, with PER_CLASS images of each drawn class in a global batch.
    SAMPLER: Literal["shuffle", "balanced", "per_class"] = key("shuffle", TRAINING, LABELS)

    # SAMPLER per_class: images per class in a global batch. TRAIN.LOSS triplet compares them.
    PER_CLASS: Few = key(4, TRAINING, LABELS, is_("DATA.SAMPLER", "per_class"))

    # A list of image sizes in pixels, of which each training step uses one. None: always
    # IMAGE_SIZE.
    MULTI_SCALE: Sequence[Side] | None = key(None, TRAINING, ONE_VIEW)

    # The order of the sizes of MULTI_SCALE. mixed: every epoch uses all of them, and a batch has as
    # many pixels as BATCH_SIZE images of IMAGE_SIZE. progressive (timm): from the first size to the
    # last in the course of the run, with BATCH_SIZE images per batch.
    SCALE_SCHEDULE: Literal["mixed", "progressive"] = key(
        "mixed", TRAINING, is_set("DATA.MULTI_SCALE")
    )

    # SCALE_SCHEDULE progressive: the standard deviation of the sizes within an epoch, counted in
    # positions of the list. 0: an epoch has one size.
    SCALE_SPREAD: Annotated[float, between(0, 1000)] = key(
        0.65,
        TRAINING,
        is_set("DATA.MULTI_SCALE"),
        is_("DATA.SCALE_SCHEDULE", "progressive"),
    )

    # SCALE_SCHEDULE progressive: the share of steps whose size is drawn from all sizes.
    SCALE_RANDOM: Share = key(
        0.1,
        TRAINING,
        is_set("DATA.MULTI_SCALE"),
        is_("DATA.SCALE_SCHEDULE", "progressive"),
    )

    # The number of shards that are read at a time and whose samples are mixed; of Parquet, the number
    # of row groups. None: the samples of all are mixed.
    SHARD_SHUFFLE: Every | None = key(
        None, TRAINING, SHARDS, is_("DATA.SAMPLER", "shuffle"), is_unset("DATA.CACHE")
    )

    # A folder in which decoded and resized images are cached, for all processes. None: images are
    # decoded in each epoch.
    CACHE: FilePath | None = key(None, STORED)

    # The largest number of pixels of an image file. A larger image is treated as unreadable.
    MAX_PIXELS: Every = key(100_000_000, FILES)

    # The share of each class's training images that is used for validation. None: the validation
    # set of the dataset is used.
    VAL_SPLIT: Part | None = key(None, FILES)

    # Cross-validation: the number of parts into which the training images are split, class by
    # class. None: no cross-validation.
    FOLDS: Annotated[int, between(2, 1000)] | None = key(None, STORED)

    # Cross-validation: the part, from 0 to FOLDS - 1, that is used for validation. The other parts
    # are trained on, and the validation set of the dataset isn't read.
    FOLD: Number = key(0, is_set("DATA.FOLDS"), STORED)

    # The random seed of VAL_SPLIT and FOLDS. It doesn't depend on SEED, so runs with different
    # seeds have the same split.
    SPLIT_SEED: Number = key(0, PARTS, STORED)

    # Keeps images of a group together in VAL_SPLIT and FOLDS. Either a regular expression that
    # finds the group in an image's path (its match, or its first pair of brackets), or a file with
    # a path, a tab and a group per line. None: no groups.
    SPLIT_GROUPS: str | None = key(None, PARTS, FILES)

    # Evaluation on some of the model's classes (ImageNet-A, ImageNet-R). present: only the outputs
    # of classes in the data are compared. Or a file with a class of the data, a tab and the number
    # of its output per line. None: all outputs are compared.
    CLASSES: FilePath | None = key(None, EVALUATION, LABELS)

    # Evaluation: the file real.json of ReaL, whose labels replace those of the ImageNet validation
    # set. None: the labels of the dataset.
    LABELS: FilePath | None = key(None, EVALUATION, LABELS, PLAIN_FILES)

    # Evaluation: the corruption of ImageNet-C, such as fog, that is applied to each cropped image.
    # None: no corruption.
    CORRUPTION: str | None = key(None, EVALUATION, choices=CORRUPTIONS)

    # The severity of CORRUPTION, from 1 (weak) to 5 (strong).
    SEVERITY: Literal[1, 2, 3, 4, 5] = key(1, EVALUATION, is_set("DATA.CORRUPTION"))

    # Training: True replaces an unreadable image by the next one and reports it. False: the run
    # ends with an error.
    SKIP_BROKEN: bool = key(False, TRAINING, FILES)


class MODEL(Section):
    """The keys of all models. Each architecture has more, which its constructor in models/ declares:
    ``python tools/list_models.py --keys NAME`` lists them.
    """

    # The name of the architecture, as a class in models/ registers it. Upper and lower case are
    # equivalent.
    TYPE: str = "ViT"

    # The name of the model in logs, folders and files.
    NAME: str = "vit_base_patch16_224"

    # The checkpoint to resume from. "auto": the newest complete checkpoint in OUTPUT; if there is
    # none, a new run starts.
    RESUME: FilePath | None = None

    # Weights to start from or to evaluate: a file, a folder, or hf-hub:org/name. None: random
    # weights.
    PRETRAINED: FilePath | None = None

    # Patterns of parameter names that may be missing in the weight file or in the model, such as
    # ["fc_norm.*"]. None: none may be missing.
    PRETRAINED_ALLOW: Sequence[str] | None = key(None, WEIGHTS)

    # Keep only the ImageNet-1k classes of an ImageNet-22k classifier, whose order of classes is
    # imagenet22k or imagenet22k_swin. None: keep the classifier as it is.
    PRETRAINED_CLASSES: Literal["imagenet22k", "imagenet22k_swin"] | None = key(
        None, WEIGHTS, LABELS
    )

    # An adapter that is merged into the weights: adapter.safetensors, or a LoRA of peft. None: no
    # adapter.
    PRETRAINED_ADAPTER: FilePath | None = key(None, WEIGHTS)

    # The number of outputs. "auto": the number of classes in the data. 0: no classifier
    # (create_model only).
    NUM_CLASSES: Annotated[int, between(0, 10_000_000)] | Literal["auto"] = key(1000, LABELS)


class HEAD(Section):
    """The head that makes a class for each pixel from an encoder's features (TASK segmentation).

    Each head has more keys, which its constructor in models/heads/ declares.
    """

    # The segmentation head, as a class in models/heads/ registers it. None: no head, the model
    # classifies images.
    NAME: str | None = key(None, MAPS)

    # The encoder blocks or stages whose features the head reads, counted from 0; negative numbers
    # count from the last. None: the default of the head.
    INDICES: Sequence[int] | None = key(None, MAPS, is_set("HEAD.NAME"))

    # Evaluate in sliding windows of IMAGE_SIZE, this many pixels apart, and average where they
    # overlap. One number, or [vertical, horizontal]. None: the whole image at once.
    STRIDE: Side | Sequence[Side] | None = key(None, MAPS, is_set("HEAD.NAME"))


class TRAIN(Section):
    # The last epoch that is already done. A resumed run reads it from its checkpoint.
    LAST_EPOCH: WholeEpochs = 0

    # The number of epochs, which are passes over the training images.
    NUM_EPOCHS: Size = key(300, TRAINING)

    # The time limit in minutes. The learning rate schedule is shortened to end within it. None: no
    # limit.
    MAX_MINUTES: Seconds | None = key(None, TRAINING)

    # Stop after this many evaluations in a row in which neither BEST_METRIC nor that of the
    # averaged weights (MODEL_EMA) improved. None: never stop early.
    EARLY_STOP: Every | None = key(None, TRAINING)

    # The smallest improvement that counts for EARLY_STOP, in percentage points or in units of the
    # loss.
    EARLY_STOP_MIN: Factor = key(0.0, TRAINING, is_set("TRAIN.EARLY_STOP"))

    # The number of epochs in which the learning rate rises linearly from WARMUP_START_LR to
    # BASE_LR. Fractions such as 0.2 are allowed. 0: no warm-up.
    WARMUP_EPOCHS: Epochs = key(32.0, TRAINING)

    # The number of epochs, at the end of NUM_EPOCHS, with the final learning rate of the schedule.
    COOLDOWN_EPOCHS: WholeEpochs = key(0, TRAINING, is_not("TRAIN.LR_SCHEDULER.NAME", "constant"))

    # Weight decay: each update shrinks weights by the learning rate times this. With Adam, SGD and
    # LARS, it is an L2 term of the gradient.
    WEIGHT_DECAY: Factor = key(0.3, TRAINING)

    # The weight decay at the end of training. It changes from WEIGHT_DECAY along a cosine, as in
    # DINO. None: it is constant.
    WEIGHT_DECAY_END: Factor | None = key(None, TRAINING)

    # Whether weight decay also applies to biases, norms and tokens, as in PaddleViT. False: to
    # matrices only.
    DECAY_ALL: bool = key(False, TRAINING)

    # The highest learning rate, reached when warm-up ends.
    BASE_LR: Factor = key(0.003, TRAINING)

    # The learning rate when warm-up begins.
    WARMUP_START_LR: Factor = key(1e-06, TRAINING, above_zero("TRAIN.WARMUP_EPOCHS"))

    # The learning rate at the end of the schedule. With step and multistep, the lowest learning
    # rate.
    END_LR: Factor = key(0.0, TRAINING, is_not("TRAIN.LR_SCHEDULER.NAME", "constant"))

    # The batch size for which BASE_LR, WARMUP_START_LR and END_LR are given. They are multiplied by
    # the effective batch size (all devices and ACCUM_ITER steps) over this. None: they are used as
    # they are.
    LINEAR_SCALED_LR: Batch | None = key(None, TRAINING)

    # How LINEAR_SCALED_LR scales learning rates: linearly with the batch size (linear), or with its
    # square root (sqrt).
    LR_SCALING: Literal["linear", "sqrt"] = key(
        "linear", TRAINING, is_set("TRAIN.LINEAR_SCALED_LR")
    )

    # Which learning rates LINEAR_SCALED_LR scales. all: BASE_LR, WARMUP_START_LR and END_LR. base:
    # only BASE_LR.
    LR_SCALED: Literal["all", "base"] = key("all", TRAINING, is_set("TRAIN.LINEAR_SCALED_LR"))

    # The effective batch size for which the recipe's learning rates were chosen, if
    # LINEAR_SCALED_LR doesn't scale them. A run with a very different batch size prints a warning.
    # None: no warning.
    RECIPE_BATCH: Batch | None = key(None, TRAINING, is_unset("TRAIN.LINEAR_SCALED_LR"))

    # Layer-wise learning rate decay: each block's learning rate is that of the next block times
    # this; the classifier's isn't reduced. None: all layers have the same learning rate.
    LAYER_DECAY: Annotated[float, between(1e-12, 1)] | None = key(None, TRAINING)

    # How LAYER_DECAY assigns parameters to layers: as the authors' code (authors), or as timm
    # (timm).
    LAYER_DECAY_GROUPS: Literal["authors", "timm"] = key(
        "authors", TRAINING, is_set("TRAIN.LAYER_DECAY")
    )

    # A factor on the learning rate of the classifier.
    HEAD_LR: Factor = key(1.0, TRAINING, LABELS)

    # A factor on the learning rate of the patch embedding. DINOv2 uses 0.2.
    PATCH_EMBED_LR: Factor = key(1.0, TRAINING)

    # Patterns of parameters that aren't trained, such as ["patch_embed.*", "blocks.[0-5].*"].
    # "backbone": all but the classifier. None: all parameters are trained.
    FREEZE: Sequence[str] | None = key(None, TRAINING, is_unset("TRAIN.ADAPTER.NAME"))

    class ADAPTER(Section):
        """With an adapter, only a few parameters and the classifier train."""

        # The adapter that is trained instead of all weights: lora (with the keys RANK, ALPHA,
        # TARGETS and DROPOUT), prompt (with MODEL.PROMPT_TOKENS) or bitfit (biases only). None: no
        # adapter.
        NAME: str | None = key(None, TRAINING)

    # The limit for gradient clipping, which GRAD_CLIP_MODE applies. None: no clipping.
    GRAD_CLIP: Positive | None = key(None, TRAINING)

    # What GRAD_CLIP limits. norm: the norm of all gradients together. parameter: the norm of each
    # parameter's gradient. value: each element. agc (adaptive): the norm of each unit's gradient
    # over the norm of its weights, except in the classifier.
    GRAD_CLIP_MODE: Literal["norm", "parameter", "value", "agc"] = key(
        "norm", TRAINING, is_set("TRAIN.GRAD_CLIP")
    )

    # GPU: whether batch norm computes its statistics over the images of all devices.
    SYNC_BN: bool = key(False, TRAINING)

    # Gradient accumulation: the number of steps per update.
    ACCUM_ITER: Every = 1

    class LR_SCHEDULER(Section):
        # The learning rate schedule. cosine is the same as warmupcosine, and multi-step as
        # multistep. All begin with WARMUP_EPOCHS epochs of warm-up; PaddleViT's cosine and
        # multi-step have none, so set WARMUP_EPOCHS to 0 to get them.
        NAME: str = key("warmupcosine", TRAINING)

        # True: the schedule begins after warm-up. False: it begins at epoch 0, and warm-up replaces
        # its first epochs.
        WARMUP_PREFIX: bool = key(True, TRAINING, above_zero("TRAIN.WARMUP_EPOCHS"))

        # step and multistep: the factor of each decay. onecycle: the share of BASE_LR below which
        # the learning rate falls more slowly.
        DECAY_RATE: Annotated[float, between(1e-12, 1)] = key(0.1, TRAINING)

        # False: the learning rate changes with each update. Otherwise it is constant within an
        # epoch: the value at the epoch's start ("start", timm), at its end ("end" or True,
        # PaddleViT) or at the start of the epoch before ("late", DeiT and PVT).
        PER_EPOCH: bool | Literal["start", "late", "end"] = key(False, TRAINING)

    class OPTIMIZER(Section):
        # The optimizer. Muon updates matrices only; AdamW updates all other parameters.
        NAME: str = key("AdamW", TRAINING)

        # The epsilon that is added to the denominator of an update.
        EPS: Annotated[float, between(1e-30, 1)] = key(1e-08, TRAINING)

        # The decay rates of the moving averages of the gradient and its square. Lion's paper uses
        # [0.9, 0.99].
        BETAS: tuple[Rate, Rate] = key([0.9, 0.999], TRAINING)

        # The momentum: the share of the previous update direction that is kept.
        MOMENTUM: Rate = key(0.9, TRAINING)

        # Whether to use Nesterov momentum.
        NESTEROV: bool = key(True, TRAINING, above_zero("TRAIN.OPTIMIZER.MOMENTUM"))

    # Whether to keep an exponential moving average (EMA) of the weights, which is evaluated and
    # saved as well.
    MODEL_EMA: bool = key(False, TRAINING)

    # The share of the old average that each update keeps, from 0 to below 1.
    MODEL_EMA_DECAY: Rate = key(0.9999, TRAINING, is_("TRAIN.MODEL_EMA", True))

    # Whether MODEL_EMA_DECAY is lower at first, so that early weights are forgotten: update n (from
    # 0) keeps at most 1 - (1 + n) ** (-2 / 3).
    MODEL_EMA_WARMUP: bool = key(True, TRAINING, is_("TRAIN.MODEL_EMA", True))

    # The loss. auto: soft_target with mixup or CutMix, bce with TASK multilabel, otherwise
    # cross_entropy. bce, focal and asymmetric treat each class as a yes-or-no question.
    LOSS: str = key("auto", TRAINING, LABELS)

    # Label smoothing s of the training loss. 0: none. With TASK multilabel, the targets are 1 - s /
    # 2 and s / 2.
    SMOOTHING: Rate = key(0.0, TRAINING, LABELS)

    # A weight per class in the loss. "auto": inversely proportional to the number of its training
    # images. None: all weights are 1.
    CLASS_WEIGHTS: Sequence[Factor] | Literal["auto"] | None = key(None, TRAINING, LABELS)

    # LOSS bce: for each class, the weight of images that have it. "auto": negatives / positives.
    # None: 1.
    POS_WEIGHT: Sequence[Factor] | Literal["auto"] | None = key(None, TRAINING, LABELS, BCE)

    # What the student learns from the teacher: its predicted class ("hard"), its probabilities
    # ("soft") or its last feature map ("feature"). None: no distillation.
    DISTILLATION_TYPE: Literal["hard", "soft", "feature"] | None = key(None, TRAINING, LABELS)

    # The weight of distillation in the loss, from 0 to 1.
    DISTILLATION_ALPHA: Share = key(0.5, TRAINING, LABELS, TEACHER)

    # DISTILLATION_TYPE soft: the temperature of the probabilities of student and teacher.
    DISTILLATION_TAU: Positive = key(1.0, TRAINING, LABELS, is_("TRAIN.DISTILLATION_TYPE", "soft"))

    # The YAML file or the name of the teacher model.
    TEACHER_MODEL: FilePath | None = key(None, TRAINING, LABELS, TEACHER)

    # The file of the teacher's weights.
    TEACHER_PATH: FilePath | None = key(None, TRAINING, LABELS, TEACHER)

    # How training crops images to IMAGE_SIZE. random_resized: a random box, resized; up to ten
    # boxes are drawn until one fits. random_resized_once: one box, cut at the image's border (BYOL,
    # MAE's probe). simple (DeiT-III): the short side is resized to IMAGE_SIZE, 4 mirrored pixels
    # are added on each side, then a random crop. short_side and squash (big_vision): the short
    # side, or both sides, are resized to IMAGE_SIZE / CROP_PCT, then a random crop. scale_jitter
    # (segmentation): resized by a random factor, then a random crop; missing pixels on the right
    # and at the bottom get the mean colour, and the ignored index in masks.
    CROP: Literal[
        "random_resized", "random_resized_once", "simple", "short_side", "squash", "scale_jitter"
    ] = key("random_resized", TRAINING, ONE_VIEW)

    # CROP short_side and squash: images are resized to IMAGE_SIZE / CROP_PCT before the crop. 0.1
    # to 1.
    CROP_PCT: CropShare = key(0.875, TRAINING, ONE_VIEW, is_("TRAIN.CROP", "short_side", "squash"))

    # CROP random_resized and random_resized_once: the smallest and largest share of the image's
    # area. scale_jitter: the smallest and largest factor, usually [0.5, 2.0].
    CROP_SCALE: tuple[float, float] = key(
        [0.08, 1.0],
        TRAINING,
        ONE_VIEW,
        is_("TRAIN.CROP", "random_resized", "random_resized_once", "scale_jitter"),
    )

    # CROP random_resized and random_resized_once: the smallest and largest aspect ratio (width /
    # height) of the box.
    CROP_RATIO: tuple[float, float] = key(
        [0.75, 4 / 3],
        TRAINING,
        is_("TRAIN.CROP", "random_resized", "random_resized_once"),
    )

    # CROP scale_jitter: the size of an image at a factor of 1. short: it just covers IMAGE_SIZE.
    # own: its original size.
    CROP_BASE: Literal["short", "own"] = key(
        "short", TRAINING, ONE_VIEW, is_("TRAIN.CROP", "scale_jitter")
    )

    # CROP scale_jitter: the largest share of labelled pixels that one class may have in a crop,
    # usually 0.75. Otherwise the crop is drawn again, up to ten times. 1.0: no limit.
    CROP_MAX_CLASS: Annotated[float, between(0.01, 1)] = key(
        1.0, TRAINING, MAPS, is_("TRAIN.CROP", "scale_jitter")
    )

    # The interpolation of training images. "random": bilinear or bicubic, drawn for each image.
    # None: DATA.INTERPOLATION.
    INTERPOLATION: Literal["bicubic", "bilinear", "nearest", "random"] | None = key(None, TRAINING)

    # The probability of a horizontal flip.
    HFLIP: Share = key(0.5, TRAINING)

    # The probability of a vertical flip.
    VFLIP: Share = key(0.0, TRAINING)

    # The largest random rotation in degrees, the largest shift as a share of the image size, and
    # the largest change of scale as a share. 0: none.
    AFFINE: tuple[float, float, float] = key([0.0, 0.0, 0.0], TRAINING)

    # An augmentation policy, spelled as in timm: rand-m9-mstd0.5-inc1, original, v0, trivial, 3a or
    # augmix-m3-w3-d2. rand-m9-tRotate+Invert uses only the named operations. None: no policy.
    AUTO_AUGMENT: str | None = key(None, TRAINING, ONE_VIEW)

    # The strength of random changes of brightness, contrast and saturation, after AUTO_AUGMENT. 0:
    # none.
    COLOR_JITTER: Annotated[float, between(0, 10)] = key(0.0, TRAINING, ONE_VIEW)

    # Whether to change brightness, contrast, saturation and hue at random as SSD does, each with a
    # probability of 0.5, after COLOR_JITTER. In grey images, brightness and contrast only.
    PHOTOMETRIC: bool = key(False, TRAINING, ONE_VIEW)

    # The probability of random erasing, which fills boxes of an image.
    RANDOM_ERASE_PROB: Share = key(0.0, TRAINING, LABELS)

    # What random erasing fills boxes with: noise (pixel), a random colour (rand) or the mean colour
    # (const).
    RANDOM_ERASE_MODE: Literal["const", "rand", "pixel"] = key(
        "pixel", TRAINING, LABELS, above_zero("TRAIN.RANDOM_ERASE_PROB")
    )

    # Random erasing: the largest number of boxes in an image. They share the erased area.
    RANDOM_ERASE_COUNT: Few = key(1, TRAINING, LABELS, above_zero("TRAIN.RANDOM_ERASE_PROB"))

    # Repeated augmentation: the number of differently augmented copies of each image in a global
    # batch. DeiT uses 3. 1: none.
    REPEATED_AUGMENT: Few = key(1, TRAINING)

    # Mixup: the mixing ratio is drawn from Beta(alpha, alpha). 0: no mixup.
    MIXUP_ALPHA: MixAlpha = key(0.0, TRAINING, LABELS)

    # CutMix: the mixing ratio is drawn from Beta(alpha, alpha). 0: no CutMix.
    CUTMIX_ALPHA: MixAlpha = key(0.0, TRAINING, LABELS, is_unset("TRAIN.CUTMIX_MINMAX"))

    # CutMix with boxes whose sides are a share of the image between [low, high], instead of
    # CUTMIX_ALPHA. None: CUTMIX_ALPHA applies.
    CUTMIX_MINMAX: tuple[Share, Share] | None = key(None, TRAINING, LABELS)

    # The probability that mixup or CutMix is applied to a batch, a pair or an image (MIXUP_MODE).
    MIXUP_PROB: Share = key(1.0, TRAINING, LABELS, MIXING)

    # The probability of CutMix instead of mixup, if both are enabled.
    MIXUP_SWITCH_PROB: Share = key(0.5, TRAINING, LABELS, MIXUP, CUTMIX)

    # Whether mixup and CutMix draw their parameters once for the global batch (batch), for each
    # pair of images (pair) or for each image (elem).
    MIXUP_MODE: Literal["batch", "pair", "elem"] = key("batch", TRAINING, LABELS, MIXING)

    # Disable mixup and CutMix after this many epochs. 0: never.
    MIXUP_OFF_EPOCH: Number = key(0, TRAINING, LABELS, MIXING)


class PROBE(Section):
    # Evaluate the frozen features every FREQ epochs and after the last one: accuracy of k nearest
    # neighbours (knn), RankMe and standard deviation. None: never.
    FREQ: Every | None = key(None, TRAINING)

    # The number of nearest training images that vote for the class of a validation image.
    K: Size = key(20, TRAINING, is_set("PROBE.FREQ"))

    # The number of training images to compare with, drawn once at random. None: all.
    IMAGES: Size | None = key(None, TRAINING, is_set("PROBE.FREQ"))


class DIST(Section):
    # Stop the run after this many seconds without progress, and name the slowest process. Before
    # the first batch, at least 600 seconds are allowed.
    TIMEOUT: Seconds = 1800.0

    # The number of seconds that the processes of a launcher wait for each other at the start.
    INIT_TIMEOUT: Seconds = 300.0

    # The number of times that all processes are restarted after one of them died or stalled.
    # Processes of a launcher aren't restarted.
    MAX_RESTART: Number = key(0, TRAINING)

    # The data parallelism. data_parallel: paddle.DataParallel. fleet: paddle.distributed.fleet,
    # with the keys of STRATEGY.
    ENGINE: Literal["data_parallel", "fleet"] = key("data_parallel", TRAINING)

    class STRATEGY(Section):
        """Keys of fleet's DistributedStrategy, spelled as there."""

        # Whether each process keeps only a share of the optimizer's state (ZeRO).
        sharding: bool = key(False, TRAINING, FLEET)

        class sharding_configs(Section):
            # What is sharded. 1: the optimizer's state. 2: also the gradients. 3: also the weights
            # of blocks.
            stage: Literal[1, 2, 3] = key(1, TRAINING, FLEET, is_("DIST.STRATEGY.sharding", True))

        # The size in MB of the gradients that are communicated together.
        fuse_grad_size_in_MB: Few = key(32, TRAINING, FLEET)

        # True is needed if a step may not use all parameters of the model.
        find_unused_parameters: bool = key(
            False, TRAINING, FLEET, is_unset("DIST.STRATEGY.sharding")
        )


_KEYS = Keys((Root, DATA, MODEL, HEAD, TRAIN, PROBE, DIST))
_C = _KEYS.tree()


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
    return asked_config(cfg_file, _parsed(options))


class FromFile(NamedTuple):
    """A configuration as its file gives it, before options.

    Attributes:
        config: the configuration, not checked yet.
        tagged: options that follow from the file's name (``vit_base_patch16_224.augreg_in21k``).
    """

    config: Configuration
    tagged: list[Option]


def asked_config(
    cfg_file: str | os.PathLike | tuple[str, ...] | None,
    options: Iterable[Option],
    read: dict[Any, FromFile] | None = None,
) -> Configuration:
    """Returns the configuration of ``get_config``, from options that know which flag gave them.

    Args:
        cfg_file: as of ``get_config``; or the names of several files, as in BASE.
        read: files that earlier calls read, which aren't read again; this call adds to it.
    """
    read = {} if read is None else read
    if cfg_file not in read:
        read[cfg_file] = _from_file(cfg_file)
    config = read[cfg_file].config.clone()
    tagged = read[cfg_file].tagged
    _KEYS.merge_options(config, [*tagged, *options])
    if tagged and not config.MODEL.PRETRAINED:
        name = current_name(Path(str(cfg_file)).name)
        add_note(config, f"pass -pretrained=hf-hub:timm/{name} to load the weights {name}")
    _finish(config)
    config.freeze()
    return config


def _from_file(cfg_file: str | os.PathLike | tuple[str, ...] | None) -> FromFile:
    config = _C.clone()
    if cfg_file is None:
        return FromFile(config, [])
    if isinstance(cfg_file, tuple):
        for name in cfg_file:
            _KEYS.merge_file(config, find_config(name))
        return FromFile(config, [])
    _KEYS.merge_file(config, find_config(cfg_file))
    return FromFile(config, tag_options(cfg_file))


def update_config(config: Configuration, args: Any) -> Configuration:
    """Returns a configuration changed by ``args.cfg`` and then by the flags in ``args``, as
    PaddleViT's function of this name does.

    The result isn't frozen, so that a program can set keys afterwards, as PaddleViT's programs do.
    Those aren't checked.

    Args:
        args: parsed flags as attributes (``dataset``, ``batch_size``, ...); those that are missing
            or None set nothing. ``output`` is SAVE, as in PaddleViT.

    Raises:
        InputError: as ``get_config``.
    """
    changed = _thawed(config)
    if getattr(args, "cfg", None):
        _KEYS.merge_file(changed, find_config(args.cfg))
    _KEYS.merge_options(changed, options_of(args, changed.EVAL))
    _finish(changed)
    return changed


def default_values(config: Configuration | None = None) -> dict[str, Any]:
    """Returns the defaults by dotted key.

    Args:
        config: whose architecture's keys of MODEL are meant. None: those of all architectures; of a
            key that several have, the default of one of them.
    """
    return dict(_KEYS.defaults) if config is None else _KEYS.defaults_of(config)


def named_keys(options: Sequence[str]) -> set[str]:
    """Returns the keys that words as after ``-o`` set.

    Raises:
        InputError: one has no value.
    """
    return {option.key for option in _parsed(options)}


def with_values(config: Configuration, why: str = "", /, **values: Any) -> Configuration:
    """Returns a frozen copy of ``config`` in which each KEY (dots written as ``__``) has its new
    value.

    Args:
        why: where the values come from, in words.
    """
    changed = _thawed(config)
    _KEYS.write_out(changed, {key.replace("__", "."): value for key, value in values.items()}, why)
    _check(changed, effective=())
    changed.freeze()
    return changed


def with_options(config: Configuration, options: Sequence[str]) -> Configuration:
    """Returns a frozen copy of ``config`` in which ``options`` count, words as after ``-o``.

    Raises:
        InputError: as ``get_config``.
    """
    changed = _thawed(config)
    _KEYS.merge_options(changed, _parsed(options))
    _check(changed, effective=named_keys(options))
    changed.freeze()
    return changed


def explain(config: Configuration, names: Sequence[str]) -> str:
    """Returns a paragraph for each key: its value, where that came from, what it means and needs.

    Args:
        names: keys, sections, or shell patterns of keys.

    Raises:
        InputError: there is no such key.
    """
    return explanation(config, names, _KEYS)


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


def _thawed(config: Configuration) -> Configuration:
    """Returns a copy that can be changed."""
    copy = config.clone()
    copy.defrost()
    return copy


def _parsed(options: Sequence[str]) -> list[Option]:
    return [Option(key, value) for key, value in pairs(options, _KEYS.defaults)]


def _finish(config: Configuration) -> None:
    """Checks a configuration that has all its values."""
    _check(config)
    if config.families and not config.EVAL:
        for line in reading.difference_lines(config.families[-1], config):
            add_note(config, line)


def _check(config: Configuration, effective: Collection[str] | None = None) -> None:
    """Checks each key by itself, then all of them together.

    Args:
        effective: dotted keys that have to have an effect, if somebody set them. None: all keys.

    Raises:
        InputError: a value out of range, a conflict of two keys, or a key without effect.
    """
    keep_model_keys(config)
    values = dict(leaves(config))
    _KEYS.check_values(values)
    check_conflicts(config, values)
    given = explicit_sources(config)
    if effective is not None:
        given = {key: source for key, source in given.items() if key in effective}
    refuse_idle(values, given, _KEYS.needs_of(config))
