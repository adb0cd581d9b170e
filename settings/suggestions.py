"""Suggestions for unknown keys, flags and models: what other toolkits' names are called here, and
the nearest known name.
"""

import difflib
import re
from collections.abc import Iterable

# What timm, PaddleClas, PaddleViT and others call a key, as a flag or as a key's last part: by our
# key, or by the words to write. A key's own last part (--num-classes, Global.seed) needs no line.
_FOREIGN = {
    # PaddleViT's segmentation
    "-eval -pretrained={}": "model_path",
    "python tools/predict.py CHECKPOINT {} -format masks -output DIR": "img_dir",
    "-cfg={}": "arch arch.name c config m model",
    "AMP": "use_amp",
    "BEST_METRIC": "eval_metric",
    "CUDA_VISIBLE_DEVICES= before the command: the GPUs to use, or none for the CPU": "device",
    "CUDA_VISIBLE_DEVICES={} before the command": "gpus",
    "DATA.BATCH_SIZE": "b",
    "DATA.BATCH_SIZE_EVAL": "dataloader.eval.sampler.batch_size validation_batch_size vb",
    "DATA.DATA_PATH": "data_dir image_root",
    "DATA.IMAGENET_MEAN": "mean",
    "DATA.IMAGENET_STD": "std",
    "DATA.IMAGE_CHANNELS": "in_chans",
    "DATA.IMAGE_SIZE": "img_size input_size",
    "DATA.NUM_WORKERS": "j workers",
    "DIST.STRATEGY.fuse_grad_size_in_MB": "last_comm_group_size_mb",
    "KEEP_LAST": "checkpoint_hist",
    "METHOD.SCALES '[0.5,0.75,1.0,1.25,1.5,1.75]' METHOD.FLIP True": "multi_scales",
    "MODEL.DROPOUT": "drop",
    "MODEL.DROPPATH": "drop_path drop_path_rate",
    "MODEL.NUM_CLASSES": "class_num nb_classes",
    "MODEL.PRETRAINED": "finetune initial_checkpoint pretrained_backbone pretrained_model",
    "MODEL.RECOMPUTE True": "grad_checkpointing",
    "MODEL.RESUME": "checkpoints",
    "NGPUS": "nproc_per_node",
    "OUTPUT": "output_dir results_dir",
    "REPORT_FREQ": "log_interval print_batch_step print_freq",
    "SAVE_FREQ": "save_interval",
    "TO_STATIC True": "torchcompile",
    "TRACKERS swanlab": "log_swanlab use_swanlab",
    "TRACKERS visualdl": "use_visualdl use_vdl",
    "TRACKERS wandb": "log_wandb use_wandb",
    "TRAIN.ACCUM_ITER": "grad_accum_steps gradient_merge k_steps",
    "TRAIN.AUTO_AUGMENT": "aa",
    "TRAIN.BASE_LR": "learning_rate lr lr_base",
    "TRAIN.CROP": "train_crop_mode",
    "TRAIN.CROP_RATIO": "ratio",
    "TRAIN.CROP_SCALE": "scale",
    "TRAIN.CUTMIX_ALPHA": "cutmix",
    "TRAIN.END_LR": "min_lr",
    "TRAIN.GRAD_CLIP": "clip_grad",
    "TRAIN.GRAD_CLIP_MODE": "clip_mode",
    "TRAIN.INTERPOLATION": "train_interpolation",
    "TRAIN.LAST_EPOCH": "start_epoch",
    "TRAIN.LINEAR_SCALED_LR": "lr_base_size",
    "TRAIN.LOSS bce": "bce_loss",
    "TRAIN.LR_SCALING": "lr_base_scale",
    "TRAIN.LR_SCHEDULER.MILESTONES": "decay_milestones",
    "TRAIN.LR_SCHEDULER.NAME": "optimizer.lr.name sched",
    "TRAIN.MIXUP_ALPHA": "mixup",
    "TRAIN.NUM_EPOCHS": "epochs max_epochs",
    "TRAIN.OPTIMIZER.BETAS": "opt_betas",
    "TRAIN.OPTIMIZER.EPS": "opt_eps",
    "TRAIN.OPTIMIZER.NAME": "opt",
    "TRAIN.PATCH_EMBED_LR": "patch_embed_lr_mult",
    "TRAIN.RANDOM_ERASE_COUNT": "recount",
    "TRAIN.RANDOM_ERASE_MODE": "remode",
    "TRAIN.RANDOM_ERASE_PROB": "reprob",
    "TRAIN.REPEATED_AUGMENT": "aug_repeats",
    "TRAIN.TEACHER_MODEL regnety_160 TRAIN.TEACHER_PATH {}": "teacher_model teacher_model_path",
    "TRAIN.WARMUP_EPOCHS": "warmup_epoch",
    "TRAIN.WARMUP_START_LR": "warmup_lr",
    "TRAIN.WEIGHT_DECAY": "coeff wd",
    "VALIDATE_FREQ": "eval_interval",
}
_MEANT = {name: target for target, names in _FOREIGN.items() for name in names.split()}
# The longest name that is compared with others. The time grows with its square.
_LONGEST_NAME = 200
# From the names of models in timm, PaddleViT and PaddleClas to those here.
_MODEL_NAMES = (
    (r"^swintransformer_", "swin_"),
    (r"^pvt_v2_", "pvtv2_"),
    (r"_li$", "_linear"),
    (r"_ks\d+_p\d+$", ""),
    (r"^mixer_([bl])[a-z]+_patch(\d+)", r"mixer_\1\2"),
    (r"^resnet(\d+)_v([cd])$", r"resnet\1\2"),
    (r"^se_resn", "seresn"),
)


def equivalent_key(name: str, known: Iterable[str]) -> str | None:
    """Returns the key, or the entry of ``_FOREIGN``, that somebody else's flag or dotted key stands
    for, or None.
    """
    lower = name[-_LONGEST_NAME:].lower().replace("-", "_")
    last = lower.rpartition(".")[2]
    if entry := _MEANT.get(lower) or _MEANT.get(last):
        return entry
    same = [key for key in known if key.lower().rpartition(".")[2] == last]
    return max(
        same,
        key=lambda key: difflib.SequenceMatcher(None, key.lower(), lower).ratio(),
        default=None,
    )


def nearest_key(name: str, known: Iterable[str]) -> str:
    """Returns what to write instead of the dotted key ``name``: "; did you mean TRAIN.NUM_EPOCHS?",
    or nothing.
    """
    meant = equivalent_key(name, known)
    if meant is None:
        return nearest(name, known)
    key = meant.split()[0]
    return f"; did you mean {key}?" if key in known else f"; write {meant.format('VALUE')}"


def nearest_model(name: str, known: Iterable[str]) -> str:
    """Returns the shipped model that a name of timm's, PaddleViT's or PaddleClas's means, or the
    nearest, or nothing.

    Args:
        name: it may be a file's; after a dot timm has the name of weights
            (``vit_base_patch16_224.augreg_in1k``).
        known: the names of the shipped models.
    """
    # hf-hub:timm/NAME is NAME.
    name = name[-_LONGEST_NAME:].rpartition("/")[2]
    given, _, tag = name.removesuffix(".yaml").removesuffix(".yml").partition(".")
    model = given.lower()
    for theirs, ours in _MODEL_NAMES:
        model = re.sub(theirs, ours, model)
    if model in known and tag:
        return f"; the model is {model}, its weights are -pretrained=hf-hub:timm/{given}.{tag}"
    if model in known:
        return nearest(model, known)
    longer = [other for other in sorted(known) if other.startswith(model)]
    if longer and model:
        return f"; did you mean {longer[0]}?"
    # Letters before the first number or underscore are a family's: resnet35 isn't regnety_032.
    relatives = [other for other in known if _family(other) == _family(model)]
    return nearest(model, relatives or known)


def _family(model: str) -> str:
    return re.split(r"[^a-z]", model)[0]


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns "; did you mean ...?" for the known name that is nearest, in any case, or nothing."""
    spelled = {other.lower(): other for other in known}
    matches = difflib.get_close_matches(name[:_LONGEST_NAME].lower(), list(spelled), 1, 0.5)
    return f"; did you mean {spelled[matches[0]]}?" if matches else ""
