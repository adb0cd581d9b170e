"""Translates PaddleViT's files for semantic segmentation.

They have a ``config.py`` of their own (configs/paddlevit/segmentation.yaml). A file names its model
by MODEL.NAME, MODEL.ENCODER.TYPE and MODEL.DECODER_TYPE. All models share that file's keys, and each
reads some of them, so a key that the chosen model doesn't read has no effect in PaddleViT.
"""

import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from errors import InputError
from settings.paddlevit.absent import absent_type
from settings.suggestions import nearest_key
from settings.values import quoted

NAME = "segmentation"
# Keys that only files for segmentation have.
_SIGNS = frozenset({"MODEL.ENCODER.TYPE", "MODEL.DECODER_TYPE", "VAL.MULTI_SCALES_VAL"})
# The encoders that PaddleViT has and this toolkit hasn't, by MODEL.ENCODER.TYPE.
_ABSENT = {"CSwinTransformer": "cswin", "FocalTransformer": "focal"}
# Keys of training that have another name here and the same meaning.
_SAME = {
    "DATA.BATCH_SIZE": "DATA.BATCH_SIZE",
    "DATA.DATA_PATH": "DATA.DATA_PATH",
    "DATA.NUM_CLASSES": "MODEL.NUM_CLASSES",
    "DATA.NUM_WORKERS": "DATA.NUM_WORKERS",
    "MODEL.NAME": "MODEL.NAME",
    "MODEL.AUX.AUX_WEIGHT": "METHOD.AUX_WEIGHT",
    "TRAIN.BASE_LR": "TRAIN.BASE_LR",
    "TRAIN.END_LR": "TRAIN.END_LR",
    "SAVE_DIR": "SAVE",
    "KEEP_CHECKPOINT_MAX": "KEEP_LAST",
    "SAVE_FREQ_CHECKPOINT": "SAVE_STEPS",
    "LOGGING_INFO_FREQ": "REPORT_FREQ",
    "TAG": "TAG",
}
# The keys of each optimizer besides its rate and weight decay, by its name in lower case.
_OPTIMIZERS: dict[str, tuple[str, dict[str, str]]] = {
    "sgd": ("SGD", {"MOMENTUM": "MOMENTUM", "NESTEROV": "NESTEROV"}),
    "adam": ("Adam", {"EPS": "EPS"}),
    "adamw": ("AdamW", {"EPS": "EPS", "BETAS": "BETAS"}),
}


class _Dataset(NamedTuple):
    """A dataset of PaddleViT's.

    Attributes:
        name: of its reader here.
        images: number of its training images, by which iterations become epochs.
    """

    name: str
    images: int


_DATASETS = {
    "ADE20K": _Dataset("ade20k", 20_210),
    "Cityscapes": _Dataset("cityscapes", 2_975),
    "PascalContext": _Dataset("pascal_context", 4_998),
    "Trans10kV2": _Dataset("trans10k", 5_000),
    # Patches of 512 pixels, 256 apart, as mmsegmentation cuts them.
    "Vaihingen": _Dataset("vaihingen", 344),
}


class _Settings:
    """PaddleViT's values, which remembers what was read.

    Attributes:
        path: of the file, for errors.
        keys_read: the keys that were read so far.
    """

    def __init__(self, values: dict[str, Any], path: Path) -> None:
        self._values = values
        self.path = path
        self.keys_read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.keys_read.add(key)
        return self._values[key]

    def refuse(self, key: str, expected: str) -> NoReturn:
        raise InputError(f"{self.path}: {key} is {quoted(self[key])}, expected {expected}")

    def require(self, key: str, *values: Any) -> Any:
        """Returns the value of a key, of which this toolkit has only some.

        Raises:
            InputError: it is another one.
        """
        if self[key] not in values:
            choices = " or ".join(str(value) for value in values)
            self.refuse(key, f"{choices}, which is what this toolkit has")
        return self[key]

    def sides(self, key: str) -> list[int]:
        """Returns a list of two sides.

        Raises:
            InputError: the value isn't one.
        """
        value = self[key]
        are_sides = isinstance(value, list) and all(
            type(side) is int and side > 0 for side in value
        )
        if not are_sides or len(value) != 2:
            self.refuse(key, "two numbers of pixels")
        return value


def is_segmentation(keys: Collection[str]) -> bool:
    """Returns whether a file without BASE is PaddleViT's for segmentation.

    Args:
        keys: the dotted keys that it sets.
    """
    return "MODEL.TYPE" not in keys and not _SIGNS.isdisjoint(keys)


def check_keys(path: Path, own: dict[str, Any], known: Collection[str]) -> None:
    """Checks a file's encoder, and then its keys.

    Args:
        own: the dotted keys and values that it sets.
        known: PaddleViT's keys.

    Raises:
        InputError: the encoder isn't here, or PaddleViT has no such key.
    """
    encoder = own.get("MODEL.ENCODER.TYPE")
    if isinstance(encoder, str) and encoder in _ABSENT:
        raise InputError(
            f"{path}: MODEL.ENCODER.TYPE is '{encoder}': {absent_type(_ABSENT[encoder])}"
        )
    for key in own:
        if key not in known:
            raise InputError(
                f"{path}: it is PaddleViT's for semantic segmentation, which has no key"
                f" {quoted(key)}{nearest_key(key, known)}"
            )


def translate(values: dict[str, Any], path: Path) -> tuple[dict[str, Any], set[str]]:
    """Returns (this toolkit's keys and values, PaddleViT's keys that its code reads).

    Args:
        values: of all of PaddleViT's keys.
        path: of the file, for errors.

    Raises:
        InputError: a value that this toolkit doesn't have.
    """
    settings = _Settings(values, path)
    for name, of_model in _MODELS.items():
        # PaddleViT looks for these names, in this order.
        if name in settings["MODEL.NAME"]:
            break
    else:
        settings.refuse("MODEL.NAME", f"a name with {', '.join(_MODELS)}")
    translated: dict[str, Any] = {"TASK": "segmentation", "VALIDATE_FREQ": 1, "NGPUS": -1}
    translated |= {own: settings[key] for key, own in _SAME.items()}
    translated |= _of_training(settings)
    translated |= _of_evaluation(settings)
    return translated | of_model(settings), settings.keys_read


def _of_training(settings: _Settings) -> dict[str, Any]:
    dataset = _DATASETS.get(settings["DATA.DATASET"])
    if dataset is None:
        settings.refuse("DATA.DATASET", f"one of {', '.join(_DATASETS)}")
    settings.require("TRAIN.LOSS", "MixSoftmaxCrossEntropyLoss", "CrossEntropyLoss")
    # What the file ignores: -1 is none, because no mask has it.
    settings.require("TRAIN.IGNORE_INDEX", 255, -1)
    if not settings["MODEL.AUX.LOSS"]:
        settings.refuse("MODEL.AUX.LOSS", "True; set MODEL.AUX.AUX_WEIGHT to weigh the losses")
    height, width = settings.sides("DATA.CROP_SIZE")
    images_per_step = settings["DATA.BATCH_SIZE"]
    steps = settings["TRAIN.ITERS"]
    values = {
        "DATA.DATASET": dataset.name,
        "DATA.IMAGE_SIZE": height if height == width else [height, width],
        # Its files have iterations, of which one process makes this many epochs.
        "TRAIN.NUM_EPOCHS": max(1, math.ceil(steps * images_per_step / dataset.images)),
        "TRAIN.CROP": "scale_jitter",
        "TRAIN.CROP_BASE": "own",
        "TRAIN.CROP_SCALE": [0.5, 2.0],
        "TRAIN.CROP_MAX_CLASS": 1.0,
        "TRAIN.PHOTOMETRIC": True,
        "TRAIN.HFLIP": 0.5,
        "TRAIN.INTERPOLATION": "bilinear",
        "TRAIN.WEIGHT_DECAY": settings["TRAIN.OPTIMIZER.WEIGHT_DECAY"],
        "TRAIN.HEAD_LR": 1.0,
    }
    if settings["DATA.DATASET"] == "Trans10kV2":
        values |= {"TRAIN.CROP": "squash", "TRAIN.CROP_PCT": 1.0, "TRAIN.PHOTOMETRIC": False}
        del values["TRAIN.CROP_SCALE"], values["TRAIN.CROP_BASE"], values["TRAIN.CROP_MAX_CLASS"]
    values |= _of_schedule(settings, images_per_step / dataset.images)
    return values | _of_optimizer(settings)


def _of_schedule(settings: _Settings, epochs_per_step: float) -> dict[str, Any]:
    """Returns the keys of the schedule.

    WarmupPolyLR falls to WARM_UP_LR_INIT, and END_LR is the lowest rate: with both 0, as all files
    have them, that is ``poly`` after a warm-up.
    """
    name = settings.require("TRAIN.LR_SCHEDULER.NAME", "PolynomialDecay", "WarmupPolyLR")
    values = {"TRAIN.LR_SCHEDULER.NAME": "poly", "TRAIN.WARMUP_EPOCHS": 0.0}
    if name == "PolynomialDecay":
        return values | {"TRAIN.LR_SCHEDULER.POWER": settings["TRAIN.POWER"]}
    settings.require("TRAIN.END_LR", 0.0)
    return values | {
        "TRAIN.LR_SCHEDULER.POWER": settings["TRAIN.LR_SCHEDULER.POWER"],
        "TRAIN.WARMUP_EPOCHS": settings["TRAIN.LR_SCHEDULER.WARM_UP_STEPS"] * epochs_per_step,
        "TRAIN.WARMUP_START_LR": settings.require("TRAIN.LR_SCHEDULER.WARM_UP_LR_INIT", 0.0),
    }


def _of_optimizer(settings: _Settings) -> dict[str, Any]:
    name = str(settings["TRAIN.OPTIMIZER.NAME"]).lower()
    if name not in _OPTIMIZERS:
        settings.refuse("TRAIN.OPTIMIZER.NAME", "SGD, Adam or AdamW")
    own_name, keys = _OPTIMIZERS[name]
    values = {"TRAIN.OPTIMIZER.NAME": own_name, "TRAIN.GRAD_CLIP": None}
    for key, own in keys.items():
        values[f"TRAIN.OPTIMIZER.{own}"] = settings[f"TRAIN.OPTIMIZER.{key}"]
    # PaddleViT's Adam doesn't clip. 0 means None there.
    if name != "adam":
        values["TRAIN.GRAD_CLIP"] = settings["TRAIN.OPTIMIZER.GRAD_CLIP"] or None
    return values


def _of_evaluation(settings: _Settings) -> dict[str, Any]:
    """Returns the keys of sizes, windows and colours.

    PaddleViT's windows and strides are (width, height), its sizes of images (height, width).
    """
    size = settings.sides("DATA.CROP_SIZE")
    settings.require("VAL.RESCALE_FROM_ORI", False)
    values: dict[str, Any] = {
        "HEAD.STRIDE": None,
        "DATA.CROP_PCT": 1.0,
        "DATA.INTERPOLATION": "bilinear",
        "DATA.IMAGENET_MEAN": _of_levels(settings, "VAL.MEAN"),
        "DATA.IMAGENET_STD": _of_levels(settings, "VAL.STD"),
    }
    if settings["VAL.IS_SLIDE"]:
        if settings.sides("VAL.CROP_SIZE")[::-1] != size:
            settings.refuse("VAL.CROP_SIZE", f"{size[::-1]}, the windows of DATA.CROP_SIZE")
        down, right = settings.sides("VAL.STRIDE_SIZE")[::-1]
        values["HEAD.STRIDE"] = down if down == right else [down, right]
    if settings["VAL.KEEP_ORI_SIZE"]:
        return values | {"DATA.CROP_MODE": "own"}
    base = settings["VAL.IMAGE_BASE_SIZE"]
    if isinstance(base, list):
        sides = settings.sides("VAL.IMAGE_BASE_SIZE")
        if settings["VAL.SIZE_DIVISOR"] is not None:
            settings.refuse("VAL.IMAGE_BASE_SIZE", "a number, because there is a SIZE_DIVISOR")
        values["DATA.CROP_MODE"] = "squash"
        values["DATA.EVAL_SIZE"] = None if sides == size else sides
    elif type(base) is int and base > 0:
        # SIZE_DIVISOR stretches the long side to a multiple; here, images are padded to one.
        settings.require("VAL.SIZE_DIVISOR", None, 32)
        values["DATA.CROP_MODE"] = "short"
        values["DATA.EVAL_SIZE"] = None if size == [base, base] else base
    else:
        settings.refuse("VAL.IMAGE_BASE_SIZE", "the pixels of the short side, or of both sides")
    return values


def _of_levels(settings: _Settings, key: str) -> list[float]:
    """Returns a value for each channel, from 0 to 255 there, from 0 to 1."""
    levels = settings[key]
    if not isinstance(levels, list) or any(
        not isinstance(level, int | float) for level in levels
    ):
        settings.refuse(key, "a number per channel")
    return [level / 255 for level in levels]


def _of_vit(settings: _Settings, keeps_token: bool) -> dict[str, Any]:
    """Returns the keys of a ViT without a last norm."""
    settings.require("MODEL.TRANS.PATCH_GRID", None)
    return {
        "MODEL.TYPE": "ViT",
        "MODEL.PATCH_SIZE": settings["MODEL.TRANS.PATCH_SIZE"],
        "MODEL.EMBED_DIM": settings["MODEL.TRANS.HIDDEN_SIZE"],
        "MODEL.DEPTH": settings["MODEL.TRANS.NUM_LAYERS"],
        "MODEL.NUM_HEADS": settings["MODEL.TRANS.NUM_HEADS"],
        "MODEL.MLP_RATIO": settings["MODEL.TRANS.MLP_RATIO"],
        "MODEL.QKV_BIAS": settings["MODEL.TRANS.QKV_BIAS"],
        "MODEL.DROPOUT": settings["MODEL.DROPOUT"],
        "MODEL.ATTENTION_DROPOUT": settings["MODEL.ATTENTION_DROPOUT"],
        "MODEL.CLASS_TOKEN": keeps_token,
        "MODEL.GLOBAL_POOL": "token" if keeps_token else "avg",
        "MODEL.FINAL_NORM": False,
        "MODEL.PRETRAINED": settings["MODEL.PRETRAINED"],
        # Its weights are a classifier's, which has more than this encoder.
        "MODEL.PRETRAINED_ALLOW": ["norm.*"] if keeps_token else ["norm.*", "cls_token"],
        "HEAD.INDICES": settings["MODEL.ENCODER.OUT_INDICES"],
    }


def _of_setr(settings: _Settings) -> dict[str, Any]:
    """Returns the keys of SETR. Its ViT leaves out the class token before the first block."""
    decoder = settings.require("MODEL.DECODER_TYPE", *_SETR_HEADS)
    head, encoder = _SETR_HEADS[decoder]
    settings.require("MODEL.ENCODER.TYPE", encoder)
    values = {
        "HEAD.NAME": head,
        "HEAD.AUXILIARY": settings["MODEL.AUX.AUXIHEAD"],
        "TRAIN.HEAD_LR": settings["TRAIN.DECODER_LR_COEF"],
    }
    if head == "setr_mla":
        settings.require("MODEL.AUX.AUXHEAD_ALIGN_CORNERS", False)
        settings.require("MODEL.MLA.MLAHEAD_ALIGN_CORNERS", False)
        values["HEAD.DECODER_CHANNELS"] = settings["MODEL.MLA.MLA_CHANNELS"]
        values["HEAD.MLA_CHANNELS"] = settings["MODEL.MLA.MLAHEAD_CHANNELS"]
    else:
        for section, layers in zip(("PUP", "AUXPUP"), _UP_LAYERS[head], strict=True):
            settings.require(
                f"MODEL.{section}.INPUT_CHANNEL", settings["MODEL.TRANS.HIDDEN_SIZE"]
            )
            settings.require(f"MODEL.{section}.ALIGN_CORNERS", False)
            for name, value in layers.items():
                settings.require(f"MODEL.{section}.{name}", value)
    return values | _of_vit(settings, keeps_token=False)


def _of_upernet(settings: _Settings) -> dict[str, Any]:
    """Returns the keys of UPerNet on Swin."""
    settings.require("MODEL.ENCODER.TYPE", "SwinTransformer")
    settings.require("MODEL.DECODER_TYPE", "UperHead")
    settings.require("MODEL.ENCODER.OUT_INDICES", [0, 1, 2, 3])
    settings.require("MODEL.TRANS.APE", False)
    settings.require("MODEL.TRANS.QK_SCALE", None)
    settings.require("MODEL.UPERHEAD.ALIGN_CORNERS", False)
    # Its network always computes the auxiliary logits.
    settings.require("MODEL.AUX.AUXIHEAD", True)
    dim = settings["MODEL.TRANS.EMBED_DIM"]
    settings.require("MODEL.UPERHEAD.IN_CHANNELS", [dim, 2 * dim, 4 * dim, 8 * dim])
    settings.require("MODEL.AUXFCN.IN_CHANNELS", 4 * dim)
    settings.require("MODEL.AUXFCN.UP_RATIO", 16)
    return {
        "MODEL.TYPE": "Swin",
        "DATA.IMAGE_CHANNELS": settings["MODEL.TRANS.IN_CHANNELS"],
        "MODEL.PATCH_SIZE": settings["MODEL.TRANS.PATCH_SIZE"],
        "MODEL.EMBED_DIM": dim,
        "MODEL.STAGE_DEPTHS": settings["MODEL.TRANS.STAGE_DEPTHS"],
        "MODEL.NUM_HEADS": settings["MODEL.TRANS.NUM_HEADS"],
        "MODEL.WINDOW_SIZE": settings["MODEL.TRANS.WINDOW_SIZE"],
        "MODEL.PAD_FIRST": True,
        "MODEL.MLP_RATIO": settings["MODEL.TRANS.MLP_RATIO"],
        "MODEL.QKV_BIAS": settings["MODEL.TRANS.QKV_BIAS"],
        "MODEL.DROPOUT": settings["MODEL.DROPOUT"],
        "MODEL.ATTENTION_DROPOUT": settings["MODEL.ATTENTION_DROPOUT"],
        "MODEL.DROPPATH": settings["MODEL.DROP_PATH"],
        "HEAD.NAME": "upernet",
        "HEAD.INDICES": [0, 1, 2, 3],
        "HEAD.PYRAMID_CHANNELS": settings["MODEL.UPERHEAD.CHANNELS"],
        "HEAD.POOL_SCALES": settings["MODEL.UPERHEAD.POOL_SCALES"],
    }


def _of_dpt(settings: _Settings) -> dict[str, Any]:
    """Returns the keys of DPT."""
    settings.require("MODEL.ENCODER.TYPE", "ViT")
    # Its head reads the token, so its ViT has to keep it.
    settings.require("MODEL.TRANS.KEEP_CLS_TOKEN", True)
    readout = settings.require("MODEL.DPT.READOUT_PROCESS", "drop", "add", "project")
    return _of_vit(settings, keeps_token=True) | {
        "HEAD.NAME": "dpt",
        "HEAD.READOUT": "ignore" if readout == "drop" else readout,
        "HEAD.NECK_CHANNELS": settings["MODEL.DPT.HIDDEN_FEATURES"],
        "HEAD.FUSION_CHANNELS": settings["MODEL.DPT.FEATURES"],
        "HEAD.FUSION_BATCH_NORM": True,
        "HEAD.AUXILIARY": False,
    }


def _of_segmenter(settings: _Settings) -> dict[str, Any]:
    """Returns the keys of Segmenter. PaddleViT looks for parts of the names of both halves."""
    encoder = settings["MODEL.ENCODER.TYPE"]
    decoder = settings["MODEL.DECODER_TYPE"]
    values = _of_vit(settings, keeps_token=True)
    values["MODEL.FINAL_NORM"] = True
    values["MODEL.PRETRAINED_ALLOW"] = None
    values["TRAIN.HEAD_LR"] = settings["TRAIN.DECODER_LR_COEF"]
    if "ViT" in encoder:
        settings.require("MODEL.TRANS.KEEP_CLS_TOKEN", True)
    elif "DeiT" in encoder:
        values["MODEL.DISTILLED"] = True
        values["DATA.IMAGE_CHANNELS"] = settings["MODEL.TRANS.IN_CHANNELS"]
        # The dropout of its blocks has no key, and its weights aren't loaded.
        settings.require("MODEL.DROPOUT", 0.0)
        values["MODEL.PRETRAINED"] = None
    else:
        settings.refuse("MODEL.ENCODER.TYPE", "ViT or DeiT")
    if "MaskTransformer" in decoder:
        return values | {
            "HEAD.NAME": "segmenter",
            "HEAD.MASK_LAYERS": settings["MODEL.SEGMENTER.NUM_LAYERS"],
            "HEAD.MASK_DROPOUT": settings["MODEL.DROPOUT"],
        }
    if "Linear" not in decoder:
        settings.refuse("MODEL.DECODER_TYPE", "MaskTransformer or Linear")
    return values | {"HEAD.NAME": "linear", "HEAD.BATCH_NORM": False, "HEAD.DROPOUT": 0.0}


def _of_segformer(settings: _Settings) -> dict[str, Any]:
    """Returns the keys of SegFormer. Its Mix Transformer is a PVTv2 with other sizes."""
    settings.require("MODEL.TRANS.NUM_STAGES", 4)
    settings.require("MODEL.TRANS.PATCH_SIZE", [7, 3, 3, 3])
    settings.require("MODEL.TRANS.STRIDES", [4, 2, 2, 2])
    settings.require("MODEL.ENCODER.OUT_INDICES", [0, 1, 2, 3])
    settings.require("MODEL.SEGFORMER.ALIGN_CORNERS", False)
    heads = settings["MODEL.TRANS.NUM_HEADS"]
    dims = [settings["MODEL.TRANS.EMBED_DIM"] * number for number in heads]
    settings.require("MODEL.SEGFORMER.IN_CHANNELS", dims)
    return {
        "MODEL.TYPE": "PVTv2",
        "DATA.IMAGE_CHANNELS": settings["MODEL.TRANS.IN_CHANNELS"],
        "MODEL.EMBED_DIMS": dims,
        "MODEL.STAGE_DEPTHS": settings["MODEL.TRANS.NUM_LAYERS"],
        "MODEL.NUM_HEADS": heads,
        "MODEL.MLP_RATIO": settings["MODEL.TRANS.MLP_RATIO"],
        "MODEL.SR_RATIO": settings["MODEL.TRANS.SR_RATIOS"],
        "MODEL.QKV_BIAS": settings["MODEL.TRANS.QKV_BIAS"],
        "MODEL.DROPOUT": settings["MODEL.DROPOUT"],
        "MODEL.ATTENTION_DROPOUT": settings["MODEL.ATTENTION_DROPOUT"],
        "MODEL.DROPPATH": settings["MODEL.DROP_PATH"],
        "MODEL.NORM_EPS": 1e-5,
        "MODEL.PRETRAINED": settings["MODEL.PRETRAINED"],
        "HEAD.NAME": "segformer",
        "HEAD.INDICES": [0, 1, 2, 3],
        "HEAD.FUSED_CHANNELS": settings["MODEL.SEGFORMER.CHANNELS"],
        "HEAD.MAP_BATCH_NORMS": True,
    }


# For each decoder of SETR: the head, and the encoder that it needs.
_SETR_HEADS = {
    "VIT_MLAHead": ("setr_mla", "ViT_MLA"),
    "PUP_VisionTransformerUpHead": ("setr_pup", "ViT"),
    "Naive_VisionTransformerUpHead": ("setr_naive", "ViT"),
}
_NAIVE = {"NUM_CONV": 2, "NUM_UPSAMPLE_LAYER": 1, "CONV3x3_CONV1x1": False}
# The layers of each head, and of its auxiliary heads.
_UP_LAYERS = {
    "setr_naive": (_NAIVE, _NAIVE),
    "setr_pup": (
        {"NUM_CONV": 4, "NUM_UPSAMPLE_LAYER": 4},
        {"NUM_CONV": 2, "NUM_UPSAMPLE_LAYER": 2, "CONV3x3_CONV1x1": True},
    ),
}
# By a part of MODEL.NAME.
_MODELS: dict[str, Callable[[_Settings], dict[str, Any]]] = {
    "SETR": _of_setr,
    "UperNet": _of_upernet,
    "DPT": _of_dpt,
    "Segmenter": _of_segmenter,
    "Segformer": _of_segformer,
}
