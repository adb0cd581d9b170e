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

    # One class per image. "multilabel": an image has any number of classes.
    TASK: str = "classification"

    # The folder of all runs. A run writes to SAVE/<train|eval>-<model>-<time>.
    SAVE: FilePath = key("./output", is_unset("OUTPUT"))

    # The folder of this run itself. It replaces SAVE.
    OUTPUT: FilePath | None = None

    # Also write metrics for visualdl, tensorboard, wandb or mlflow, offline: one name or a list.
    TRACKERS: Sequence[str] | None = key(None, TRAINING)

    # Your note about the run. It is kept in config.yaml.
    TAG: str = "default"

    # Save a checkpoint after every SAVE_FREQ-th epoch and never remove it. 0: never for this reason.
    SAVE_FREQ: Number = key(10, TRAINING)

    # Save a checkpoint each time that this many steps are done. 0: never for this reason.
    SAVE_STEPS: Number = key(0, TRAINING)

    # Save a checkpoint when this many minutes have passed since the last. None: never for this reason.
    SAVE_MINUTES: Seconds | None = key(15.0, TRAINING)

    # Keep this many of the newest checkpoints, besides the best ones and those of SAVE_FREQ.
    KEEP_LAST: Every = key(2, TRAINING)

    # The metric that chooses the best checkpoint: acc1 (auto), acc5 or mean_class_acc. multilabel: mAP (auto),
    # f1_micro or f1_macro. Or loss: the lowest is the best. Or knn, with PROBE.FREQ. Or a metric of
    # RETRIEVAL.
    BEST_METRIC: str = key("auto", TRAINING)

    # Evaluate retrieval, too: recall_K for each of these K, mAP and mAP_R of the embeddings, the inputs
    # of the classifier. Each image is compared with all others. None: don't.
    RETRIEVAL: Sequence[Every] | None = key(None, is_("TASK", "classification"))

    # End the run if a checkpoint can't be written (full disk). "continue": report it and continue.
    SAVE_ON_ERROR: Literal["stop", "continue"] = "stop"

    # Steps between two reports of the training, in the log and in metrics.jsonl.
    REPORT_FREQ: Every = key(20, TRAINING)

    # Epochs between two evaluations. The last epoch is always evaluated.
    VALIDATE_FREQ: Every = key(1, TRAINING)

    # Write report.html when the run ends, with predictions.csv and confusion.csv of the last
    # evaluation.
    REPORT: bool = True

    # Seed of the first weights, of the order of images and of their augmentation.
    SEED: Number = 0

    # True: evaluate only, don't train.
    EVAL: bool = False

    # EVAL on a CPU: "inference" exports the model and runs it by Paddle Inference (oneDNN).
    EVAL_ENGINE: Literal["eager", "inference"] = key("eager", EVALUATION, LABELS)

    # True: compute in bfloat16. A GPU without it uses float16 with a loss scaler. A CPU needs
    # avx512_bf16 or AMX; its linear, MLP and attention layers use bfloat16. EVAL_ENGINE inference:
    # the whole program does.
    AMP: bool = False

    # With AMP: True evaluates in the same precision. False: evaluate in float32, as PaddleViT does.
    AMP_EVAL: bool = key(False, is_("AMP", True))

    # The number of processes. -1: one per visible GPU, or one per core if there is no GPU.
    NGPUS: Processes = -1

    # GPU: True repeats a run bit by bit, and may be slower. A CPU always does.
    DETERMINISTIC: bool = False

    # GPU: True lets cuDNN search for its fastest algorithm. Not with DETERMINISTIC.
    CUDNN_BENCHMARK: bool = False

    # GPU from Ampere on: True multiplies float32 with TF32's 10 bits. False: in full. None: as
    # Paddle does.
    TF32: bool | None = None

    # Tune threads, strides, memory and compiled operators for speed. On a GPU: only the memory.
    TUNE_CPU: bool = True

    # GPU, training: compile the model to a graph (paddle.jit.to_static). A CPU is faster without.
    TO_STATIC: bool = key(False, TRAINING)


class DATA(Section):
    # Training samples per device and step.
    BATCH_SIZE: Batch = key(256, OWN_BATCH)

    # Training samples of all devices per step. If set, BATCH_SIZE is its share. None: not set.
    GLOBAL_BATCH: Batch | None = key(None, TRAINING)

    # Evaluation samples per device and step.
    BATCH_SIZE_EVAL: Batch = 64

    # The folder of the dataset.
    DATA_PATH: FilePath = "/dataset/imagenet/"

    # How the dataset is stored.
    DATASET: str = "imagenet2012"

    # Height and width in pixels, or [height, width]. The command line also takes 224x160.
    IMAGE_SIZE: Side | Sequence[Side] = 224

    # 3: RGB. 1: grey. Other numbers up to 64: the channels of TIFF and .npy files.
    IMAGE_CHANNELS: Annotated[int, between(1, 64)] = 3

    # 8-bit pixels for 3 channels or 1, float32 for other numbers. "float32": pixels keep their full
    # depth. 8-bit values are divided by 255 and 16-bit values by 65535. Floats stay as stored.
    IMAGE_DTYPE: Literal["auto", "float32"] = "auto"

    # Evaluation: the share of the resized side that the central crop keeps. Above 1, up to 2: images
    # are resized to less than IMAGE_SIZE, and padded with black.
    CROP_PCT: PaddedCropShare = key(
        0.875, is_not("DATA.CROP_MODE", "short", "own"), is_unset("DATA.NUM_TOKENS")
    )

    # Evaluation: resize the short side, then crop. "squash": resize both sides, then crop.
    # Segmentation: "short" resizes the image until it covers IMAGE_SIZE and crops nothing; "own"
    # keeps its size.
    CROP_MODE: Literal["center", "squash", "short", "own"] = "center"

    # Segmentation, short and squash: resize images to this instead of IMAGE_SIZE, which is then the
    # size of HEAD.STRIDE's windows alone. None: to IMAGE_SIZE.
    EVAL_SIZE: Side | Sequence[Side] | None = key(
        None, MAPS, is_("DATA.CROP_MODE", "short", "squash")
    )

    # NaFlexViT: images keep their ratio. Each is resized to at most this many patches. None: to
    # IMAGE_SIZE.
    NUM_TOKENS: Size | None = key(None, LABELS)

    # Training: a list of numbers of patches. Each step uses one of them, with as many patches in a
    # batch as BATCH_SIZE images of NUM_TOKENS have. None: NUM_TOKENS.
    TOKEN_LENGTHS: Sequence[Size] | None = key(None, TRAINING, LABELS, is_set("DATA.NUM_TOKENS"))

    # How images are resized: bicubic, bilinear or nearest.
    INTERPOLATION: Literal["bicubic", "bilinear", "nearest"] = "bicubic"

    # True: turn photographs as their EXIF data says. timm and PaddleViT don't.
    EXIF_ORIENTATION: bool = key(False, FILES)

    # Evaluation: True decodes JPEG as fast as training does. False: exactly Pillow's pixels.
    FAST_EVAL: bool = key(False, FILES, is_unset("DATA.CACHE"), EIGHT_BITS)

    # Loader processes per device. 0: the training process loads the images itself.
    NUM_WORKERS: Annotated[int, between(0, 256)] = 2

    # Batches that each loader process loads in advance.
    PREFETCH: Few = key(2, LOADED_AHEAD)

    # Training: "dali" decodes with NVIDIA DALI, on the GPU if there is one.
    LOADER: Literal["paddle", "dali"] = key("paddle", TRAINING, ONE_VIEW)

    # Subtracted from pixels (0 to 1, or floats as stored). One value, or one per channel.
    IMAGENET_MEAN: Sequence[Annotated[float, between(-1000, 1000)]] = [0.5, 0.5, 0.5]

    # Pixels are divided by this afterwards. One value, or one per channel.
    IMAGENET_STD: Sequence[Annotated[float, between(0.000001, 1000)]] = [0.5, 0.5, 0.5]

    # Training: drop the last images if they fill no global batch. False: pad to a multiple of
    # devices.
    DROP_LAST: bool = key(True, TRAINING)

    # Shuffle all images, then split them. "shard": split once, then shuffle each part.
    SHUFFLE_MODE: Literal["global", "shard"] = key("global", TRAINING)

    # Training: draw each image once an epoch. "balanced": draw all classes equally often.
    # "per_class": balanced, with PER_CLASS images of each class in a global batch.
    SAMPLER: Literal["shuffle", "balanced", "per_class"] = key("shuffle", TRAINING, LABELS)

    # Images of a class in a global batch, which TRAIN.LOSS triplet compares.
    PER_CLASS: Few = key(4, TRAINING, LABELS, is_("DATA.SAMPLER", "per_class"))

    # Training: a list of image sizes in pixels. Each step uses one of them. None: IMAGE_SIZE.
    MULTI_SCALE: Sequence[Side] | None = key(None, TRAINING, ONE_VIEW)

    # Every epoch uses all sizes. A batch has as many pixels as BATCH_SIZE images of IMAGE_SIZE.
    # "progressive" (timm): the run goes from the first size to the last. Each batch has BATCH_SIZE
    # images.
    SCALE_SCHEDULE: Literal["mixed", "progressive"] = key(
        "mixed", TRAINING, is_set("DATA.MULTI_SCALE")
    )

    # progressive: standard deviation of an epoch's sizes, in places of the list. 0: one size.
    SCALE_SPREAD: Annotated[float, between(0, 1000)] = key(
        0.65,
        TRAINING,
        is_set("DATA.MULTI_SCALE"),
        is_("DATA.SCALE_SCHEDULE", "progressive"),
    )

    # progressive: the share of the steps that draw any of the sizes.
    SCALE_RANDOM: Share = key(
        0.1,
        TRAINING,
        is_set("DATA.MULTI_SCALE"),
        is_("DATA.SCALE_SCHEDULE", "progressive"),
    )

    # shards: read this many shards at a time and mix their samples. None: mix all samples.
    SHARD_SHUFFLE: Every | None = key(
        None, TRAINING, SHARDS, is_("DATA.SAMPLER", "shuffle"), is_unset("DATA.CACHE")
    )

    # A folder for decoded images of one size, which all processes share. None: decode in each
    # epoch.
    CACHE: FilePath | None = key(None, STORED)

    # An image file with more pixels is treated as unreadable.
    MAX_PIXELS: Every = key(100_000_000, FILES)

    # Use this share of each class's training images for validation. None: the data has its own.
    VAL_SPLIT: Part | None = key(None, FILES)

    # k-fold: split the training images into this many parts. Each part has its share of every
    # class.
    FOLDS: Annotated[int, between(2, 1000)] | None = key(None, STORED)

    # This part (0 to FOLDS - 1) validates, the others train. The data's own validation set isn't
    # read.
    FOLD: Number = key(0, is_set("DATA.FOLDS"), STORED)

    # The random seed of VAL_SPLIT and FOLDS. The parts are the same for every SEED.
    SPLIT_SEED: Number = key(0, PARTS, STORED)

    # Keep the images of a group in one part. This regular expression (or its first brackets) finds
    # the group in an image's path. Or name a file: each line holds a path, a TAB and a group. None:
    # no groups.
    SPLIT_GROUPS: str | None = key(None, PARTS, FILES)

    # Evaluation: "present" compares only the outputs of classes that the data has (ImageNet-A, -R).
    # Or name a file: each line holds a class of the data, a TAB and its output. None: compare all
    # outputs.
    CLASSES: FilePath | None = key(None, EVALUATION, LABELS)

    # Evaluation: the file real.json of ReaL. Its labels replace those of ImageNet's validation set.
    LABELS: FilePath | None = key(None, EVALUATION, LABELS, PLAIN_FILES)

    # Evaluation: corrupt each cropped image as ImageNet-C does (fog, snow, ...). None: don't.
    CORRUPTION: str | None = key(None, EVALUATION, choices=CORRUPTIONS)

    # How strong the corruption is, 1 to 5.
    SEVERITY: Literal[1, 2, 3, 4, 5] = key(1, EVALUATION, is_set("DATA.CORRUPTION"))

    # Training: True replaces an unreadable image by the next one, counts it and lists it.
    SKIP_BROKEN: bool = key(False, TRAINING, FILES)


class MODEL(Section):
    """The keys of all models. Each architecture has more, which its constructor in models/ declares:
    ``python tools/list_models.py --keys NAME`` lists them.
    """

    # The architecture: a name that a class in models/ registers. Upper and lower case are equal.
    TYPE: str = "ViT"

    # What logs and files call the model.
    NAME: str = "vit_base_patch16_224"

    # Continue from this checkpoint. "auto": from the newest complete one in OUTPUT; without one, a new
    # run starts.
    RESUME: FilePath | None = None

    # Weights to start from or to evaluate: a file, a folder or hf-hub:org/name. None: random.
    PRETRAINED: FilePath | None = None

    # Patterns of weights that the file or the model may lack: ["fc_norm.*"]. None: none.
    PRETRAINED_ALLOW: Sequence[str] | None = key(None, WEIGHTS)

    # The order of ImageNet-22k's classes in the weights: imagenet22k or imagenet22k_swin. Only
    # ImageNet-1k's classes are kept. None: keep the classifier as it is.
    PRETRAINED_CLASSES: Literal["imagenet22k", "imagenet22k_swin"] | None = key(
        None, WEIGHTS, LABELS
    )

    # An adapter to merge into the weights: adapter.safetensors, or peft's LoRA. None: none.
    PRETRAINED_ADAPTER: FilePath | None = key(None, WEIGHTS)

    # The model's outputs. "auto": the number of the data's classes. 0: none (create_model only).
    NUM_CLASSES: Annotated[int, between(0, 10_000_000)] | Literal["auto"] = key(1000, LABELS)


class HEAD(Section):
    """The head that makes a class for each pixel from an encoder's features (TASK segmentation).

    Each head has more keys, which its constructor in models/heads/ declares.
    """

    # The head: a name that a class in models/heads/ registers. None: the model classifies images.
    NAME: str | None = key(None, MAPS)

    # The encoder's intermediates that the head reads, by number from 0; negative ones count from the
    # last. None: the head's own choice.
    INDICES: Sequence[int] | None = key(None, MAPS, is_set("HEAD.NAME"))

    # Compute maps in windows of IMAGE_SIZE, this many pixels apart, and average where they overlap.
    # One number, or [down, right]. None: of the whole image at once.
    STRIDE: Side | Sequence[Side] | None = key(None, MAPS, is_set("HEAD.NAME"))


class TRAIN(Section):
    # The last epoch that is already done. A resumed run takes it from its checkpoint.
    LAST_EPOCH: WholeEpochs = 0

    # Passes over the training images.
    NUM_EPOCHS: Size = key(300, TRAINING)

    # The run ends within this many minutes: its schedule is shortened. None: no limit.
    MAX_MINUTES: Seconds | None = key(None, TRAINING)

    # Stop after this many evaluations in a row without a gain in BEST_METRIC. A gain of the
    # averaged weights (MODEL_EMA) counts, too. None: never stop early.
    EARLY_STOP: Every | None = key(None, TRAINING)

    # A gain must be larger than this, in percent or in units of the loss.
    EARLY_STOP_MIN: Factor = key(0.0, TRAINING, is_set("TRAIN.EARLY_STOP"))

    # The rate rises linearly from WARMUP_START_LR to BASE_LR. 0.2: in a fifth of an epoch.
    WARMUP_EPOCHS: Epochs = key(32.0, TRAINING)

    # The last epochs of NUM_EPOCHS. They use the schedule's final rate.
    COOLDOWN_EPOCHS: WholeEpochs = key(0, TRAINING, is_not("TRAIN.LR_SCHEDULER.NAME", "constant"))

    # Each update shrinks weights by rate x this. Adam, SGD, LARS: an L2 term of the gradient.
    WEIGHT_DECAY: Factor = key(0.3, TRAINING)

    # WEIGHT_DECAY changes to this along a cosine over all updates, as in DINO. None: it is constant.
    WEIGHT_DECAY_END: Factor | None = key(None, TRAINING)

    # False: only matrices decay. True: biases, norms and tokens decay too (PaddleViT).
    DECAY_ALL: bool = key(False, TRAINING)

    # The highest learning rate, reached when warm-up ends.
    BASE_LR: Factor = key(0.003, TRAINING)

    # The learning rate when warm-up begins.
    WARMUP_START_LR: Factor = key(1e-06, TRAINING, above_zero("TRAIN.WARMUP_EPOCHS"))

    # The learning rate when the schedule ends. step, multistep: the lowest rate.
    END_LR: Factor = key(0.0, TRAINING, is_not("TRAIN.LR_SCHEDULER.NAME", "constant"))

    # The batch size that BASE_LR, WARMUP_START_LR and END_LR are meant for. They are multiplied by
    # the effective batch (all devices, ACCUM_ITER steps) divided by this. None: they don't scale.
    LINEAR_SCALED_LR: Batch | None = key(None, TRAINING)

    # The rates grow with the batch. "sqrt": with the square root of the batches' ratio.
    LR_SCALING: Literal["linear", "sqrt"] = key(
        "linear", TRAINING, is_set("TRAIN.LINEAR_SCALED_LR")
    )

    # The rates that scale: all three. "base": only BASE_LR.
    LR_SCALED: Literal["all", "base"] = key("all", TRAINING, is_set("TRAIN.LINEAR_SCALED_LR"))

    # The recipe's batch size, if its rates don't scale. A run far from it prints a warning.
    RECIPE_BATCH: Batch | None = key(None, TRAINING, is_unset("TRAIN.LINEAR_SCALED_LR"))

    # Each block's learning rate is this times the next block's. The classifier has 1. None: all
    # layers have the same rate.
    LAYER_DECAY: Annotated[float, between(1e-12, 1)] | None = key(None, TRAINING)

    # Which parameters share a rate: the authors' groups. "timm": timm's groups.
    LAYER_DECAY_GROUPS: Literal["authors", "timm"] = key(
        "authors", TRAINING, is_set("TRAIN.LAYER_DECAY")
    )

    # The classifier's learning rate is multiplied by this.
    HEAD_LR: Factor = key(1.0, TRAINING, LABELS)

    # The learning rate of the layer that reads the image is multiplied by this. DINOv2: 0.2.
    PATCH_EMBED_LR: Factor = key(1.0, TRAINING)

    # Patterns of parameters that don't train: ["patch_embed.*", "blocks.[0-5].*"]. "backbone": all
    # but the classifier. None: all parameters train.
    FREEZE: Sequence[str] | None = key(None, TRAINING, is_unset("TRAIN.ADAPTER.NAME"))

    class ADAPTER(Section):
        """With an adapter, only a few parameters and the classifier train."""

        # lora (keys RANK, ALPHA, TARGETS, DROPOUT), prompt (MODEL.PROMPT_TOKENS) or bitfit
        # (biases). None: no adapter.
        NAME: str | None = key(None, TRAINING)

    # The bound that GRAD_CLIP_MODE applies to the gradients. None: gradients aren't clipped.
    GRAD_CLIP: Positive | None = key(None, TRAINING)

    # Clip the norm of all gradients together. "parameter": clip each parameter's norm. "value": clip
    # each element. "agc": clip each unit's norm at GRAD_CLIP times the norm of its weights, except in
    # the classifier.
    GRAD_CLIP_MODE: Literal["norm", "parameter", "value", "agc"] = key(
        "norm", TRAINING, is_set("TRAIN.GRAD_CLIP")
    )

    # GPU: True computes batch norm's statistics over the images of all devices.
    SYNC_BN: bool = key(False, TRAINING)

    # Steps whose gradients are added up for one update.
    ACCUM_ITER: Every = 1

    class LR_SCHEDULER(Section):
        # The course of the learning rate. cosine is warmupcosine, multi-step is multistep. Each
        # begins with WARMUP_EPOCHS epochs of warm-up. PaddleViT's cosine and multi-step have none:
        # set WARMUP_EPOCHS 0 for them.
        NAME: str = key("warmupcosine", TRAINING)

        # It begins after warm-up. False: at epoch 0, where warm-up replaces it.
        WARMUP_PREFIX: bool = key(True, TRAINING, above_zero("TRAIN.WARMUP_EPOCHS"))

        # step, multistep: the factor of each step. onecycle: its fall slows at this share of
        # BASE_LR.
        DECAY_RATE: Annotated[float, between(1e-12, 1)] = key(0.1, TRAINING)

        # False: each update has its own rate. Otherwise an epoch has one rate: of its "start"
        # (timm) or of its "end" (PaddleViT; also True). "late": of the start of the epoch before
        # (DeiT, PVT).
        PER_EPOCH: bool | Literal["start", "late", "end"] = key(False, TRAINING)

    class OPTIMIZER(Section):
        # The optimizer. Muon uses AdamW for all but matrices.
        NAME: str = key("AdamW", TRAINING)

        # Added to the denominator of the update.
        EPS: Annotated[float, between(1e-30, 1)] = key(1e-08, TRAINING)

        # Decay rates of the two moving averages. Lion's paper uses [0.9, 0.99].
        BETAS: tuple[Rate, Rate] = key([0.9, 0.999], TRAINING)

        # The share of the old momentum that an update keeps.
        MOMENTUM: Rate = key(0.9, TRAINING)

        # True uses Nesterov's momentum.
        NESTEROV: bool = key(True, TRAINING, above_zero("TRAIN.OPTIMIZER.MOMENTUM"))

    # True: keep, evaluate and save an exponential moving average of the weights, too.
    MODEL_EMA: bool = key(False, TRAINING)

    # The share of the old average that each update keeps. 0 <= value < 1.
    MODEL_EMA_DECAY: Rate = key(0.9999, TRAINING, is_("TRAIN.MODEL_EMA", True))

    # Update n (from 0) keeps at most 1 - (1 + n) ** (-2 / 3), so early weights fade fast.
    MODEL_EMA_WARMUP: bool = key(True, TRAINING, is_("TRAIN.MODEL_EMA", True))

    # The loss to minimise. auto: soft_target with mixup or CutMix, bce with TASK multilabel,
    # otherwise cross_entropy. bce, focal and asymmetric ask for yes or no per class.
    LOSS: str = key("auto", TRAINING, LABELS)

    # Label smoothing s of the training loss. multilabel: targets are 1 - s / 2 and s / 2.
    SMOOTHING: Rate = key(0.0, TRAINING, LABELS)

    # A factor per class on the loss. "auto": inverse to its training images. None: all are 1.
    CLASS_WEIGHTS: Sequence[Factor] | Literal["auto"] | None = key(None, TRAINING, LABELS)

    # bce: a factor on the loss of images with the class. "auto": negatives / positives. None: 1.
    POS_WEIGHT: Sequence[Factor] | Literal["auto"] | None = key(None, TRAINING, LABELS, BCE)

    # The student learns the teacher's choice ("hard"), its distribution ("soft") or its last map
    # ("feature"). None: no teacher.
    DISTILLATION_TYPE: Literal["hard", "soft", "feature"] | None = key(None, TRAINING, LABELS)

    # The share of the distillation in the loss, 0 to 1.
    DISTILLATION_ALPHA: Share = key(0.5, TRAINING, LABELS, TEACHER)

    # soft: the temperature of both distributions.
    DISTILLATION_TAU: Positive = key(1.0, TRAINING, LABELS, is_("TRAIN.DISTILLATION_TYPE", "soft"))

    # The teacher's YAML file or model name.
    TEACHER_MODEL: FilePath | None = key(None, TRAINING, LABELS, TEACHER)

    # The file of the teacher's weights.
    TEACHER_PATH: FilePath | None = key(None, TRAINING, LABELS, TEACHER)

    # A random box, resized to IMAGE_SIZE. Up to ten boxes are drawn until one fits.
    # "random_resized_once": draw one box and cut it at the image's border (BYOL, MAE's probe).
    # "simple" (DeiT-III): resize the short side to IMAGE_SIZE, add 4 mirrored pixels on each side,
    # crop at random. "short_side", "squash" (big_vision): resize the short side, or both sides, to
    # IMAGE_SIZE / CROP_PCT, crop at random. "scale_jitter" (segmentation): resize by a random factor,
    # crop at random. Where the crop is smaller than IMAGE_SIZE, its right and bottom are padded with
    # the mean colour, masks with their ignored index.
    CROP: Literal[
        "random_resized", "random_resized_once", "simple", "short_side", "squash", "scale_jitter"
    ] = key("random_resized", TRAINING, ONE_VIEW)

    # short_side, squash: the share of the resized side that the crop keeps, 0.1 to 1.
    CROP_PCT: CropShare = key(0.875, TRAINING, ONE_VIEW, is_("TRAIN.CROP", "short_side", "squash"))

    # Random boxes: smallest and largest share of the image's area. scale_jitter: smallest and
    # largest factor; [0.5, 2.0] is usual.
    CROP_SCALE: tuple[float, float] = key(
        [0.08, 1.0],
        TRAINING,
        ONE_VIEW,
        is_("TRAIN.CROP", "random_resized", "random_resized_once", "scale_jitter"),
    )

    # Random boxes: smallest and largest width / height.
    CROP_RATIO: tuple[float, float] = key(
        [0.75, 4 / 3],
        TRAINING,
        is_("TRAIN.CROP", "random_resized", "random_resized_once"),
    )

    # scale_jitter: at a factor of 1, the image covers IMAGE_SIZE. "own": it has its own size.
    CROP_BASE: Literal["short", "own"] = key(
        "short", TRAINING, ONE_VIEW, is_("TRAIN.CROP", "scale_jitter")
    )

    # scale_jitter: draw the place again, up to ten times, where one class has more than this share of
    # the crop's labelled pixels. 0.75 is usual. 1.0: never.
    CROP_MAX_CLASS: Annotated[float, between(0.01, 1)] = key(
        1.0, TRAINING, MAPS, is_("TRAIN.CROP", "scale_jitter")
    )

    # None: use DATA.INTERPOLATION. "random": draw bilinear or bicubic for each image.
    INTERPOLATION: Literal["bicubic", "bilinear", "nearest", "random"] | None = key(None, TRAINING)

    # Probability of a horizontal flip.
    HFLIP: Share = key(0.5, TRAINING)

    # Probability of a vertical flip.
    VFLIP: Share = key(0.0, TRAINING)

    # Largest rotation in degrees, shift as a share of the size, and scaling as a share.
    AFFINE: tuple[float, float, float] = key([0.0, 0.0, 0.0], TRAINING)

    # A policy in timm's spelling: rand-m9-mstd0.5-inc1, original, v0, trivial, 3a or
    # augmix-m3-w3-d2. rand-m9-tRotate+Invert uses only these operations. None: no policy.
    AUTO_AUGMENT: str | None = key(None, TRAINING, ONE_VIEW)

    # Strength of random brightness, contrast and saturation, applied after AUTO_AUGMENT.
    COLOR_JITTER: Annotated[float, between(0, 10)] = key(0.0, TRAINING, ONE_VIEW)

    # Random brightness, contrast, saturation and hue as in SSD, each with probability 0.5, applied
    # after COLOR_JITTER. Of grey images, brightness and contrast.
    PHOTOMETRIC: bool = key(False, TRAINING, ONE_VIEW)

    # Probability that boxes of an image are erased.
    RANDOM_ERASE_PROB: Share = key(0.0, TRAINING, LABELS)

    # Fill boxes with noise. "rand": with a random colour. "const": with the mean colour.
    RANDOM_ERASE_MODE: Literal["const", "rand", "pixel"] = key(
        "pixel", TRAINING, LABELS, above_zero("TRAIN.RANDOM_ERASE_PROB")
    )

    # The largest number of boxes. They share the erased area.
    RANDOM_ERASE_COUNT: Few = key(1, TRAINING, LABELS, above_zero("TRAIN.RANDOM_ERASE_PROB"))

    # Copies of an image in a global batch. Each is augmented again. DeiT uses 3.
    REPEATED_AUGMENT: Few = key(1, TRAINING)

    # Mixup draws its share from Beta(alpha, alpha). 0: no mixup.
    MIXUP_ALPHA: MixAlpha = key(0.0, TRAINING, LABELS)

    # CutMix draws its share from Beta(alpha, alpha). 0: no CutMix.
    CUTMIX_ALPHA: MixAlpha = key(0.0, TRAINING, LABELS, is_unset("TRAIN.CUTMIX_MINMAX"))

    # [low, high]: the share of each side that CutMix's box has. It replaces CUTMIX_ALPHA.
    CUTMIX_MINMAX: tuple[Share, Share] | None = key(None, TRAINING, LABELS)

    # Probability that a batch (a pair, an image) is mixed.
    MIXUP_PROB: Share = key(1.0, TRAINING, LABELS, MIXING)

    # Probability of CutMix if both are on.
    MIXUP_SWITCH_PROB: Share = key(0.5, TRAINING, LABELS, MIXUP, CUTMIX)

    # Draw once for the global batch. "pair": for each pair. "elem": for each image.
    MIXUP_MODE: Literal["batch", "pair", "elem"] = key("batch", TRAINING, LABELS, MIXING)

    # Stop mixing after this many epochs. 0: never stop.
    MIXUP_OFF_EPOCH: Number = key(0, TRAINING, LABELS, MIXING)


class PROBE(Section):
    # Epochs between two probes of the frozen features: the accuracy of k nearest neighbours (knn),
    # RankMe and the deviation. The last epoch is always probed. None: no probes.
    FREQ: Every | None = key(None, TRAINING)

    # The number of neighbours, training images that vote for a validation image's class.
    K: Size = key(20, TRAINING, is_set("PROBE.FREQ"))

    # Compare with this many training images, drawn once. None: all.
    IMAGES: Size | None = key(None, TRAINING, is_set("PROBE.FREQ"))


class DIST(Section):
    # Stop the run after this many seconds without progress and name the slowest process. Until the
    # first batch at least 600 s are allowed.
    TIMEOUT: Seconds = 1800.0

    # Seconds that processes of a launcher wait for each other at the start.
    INIT_TIMEOUT: Seconds = 300.0

    # How often to start all processes again if one is lost or stalls. Not for those of a launcher.
    MAX_RESTART: Number = key(0, TRAINING)

    # Use paddle.DataParallel. "fleet": use paddle.distributed.fleet with STRATEGY.
    ENGINE: Literal["data_parallel", "fleet"] = key("data_parallel", TRAINING)

    class STRATEGY(Section):
        """Keys of fleet's DistributedStrategy, spelled as there."""

        # True: each process keeps a share of the optimizer's state (ZeRO).
        sharding: bool = key(False, TRAINING, FLEET)

        class sharding_configs(Section):
            # What is shared. 1: the optimizer's state. 2: the gradients, too. 3: the weights of
            # blocks, too.
            stage: Literal[1, 2, 3] = key(1, TRAINING, FLEET, is_("DIST.STRATEGY.sharding", True))

        # Gradients of this many MB are sent together.
        fuse_grad_size_in_MB: Few = key(32, TRAINING, FLEET)

        # Set True if a step may not use all parameters of the model.
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
    cfg_file: str | os.PathLike | None,
    options: Iterable[Option],
    read: dict[Any, FromFile] | None = None,
) -> Configuration:
    """Returns the configuration of ``get_config``, from options that know which flag gave them.

    Args:
        read: files that earlier calls read, which aren't read again; this call adds to it.
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
        add_note(config, f"pass -pretrained=hf-hub:timm/{name} to load the weights {name}")
    _finish(config)
    config.freeze()
    return config


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
