"""Translates the models of PaddleViT's files for segmentation."""

from collections.abc import Callable
from typing import Any

from settings.paddlevit.models import pyramid_keys
from settings.paddlevit.tracked import TrackedSettings


def _of_vit(settings: TrackedSettings, keeps_token: bool) -> dict[str, Any]:
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


def _of_setr(settings: TrackedSettings) -> dict[str, Any]:
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
            settings.require(f"MODEL.{section}.INPUT_CHANNEL", settings["MODEL.TRANS.HIDDEN_SIZE"])
            settings.require(f"MODEL.{section}.ALIGN_CORNERS", False)
            for name, value in layers.items():
                settings.require(f"MODEL.{section}.{name}", value)
    return values | _of_vit(settings, keeps_token=False)


def _of_upernet(settings: TrackedSettings) -> dict[str, Any]:
    """Returns the keys of UPerNet and its encoder."""
    encoder = settings.require("MODEL.ENCODER.TYPE", *_UPERNET_ENCODERS)
    settings.require("MODEL.DECODER_TYPE", "UperHead")
    settings.require("MODEL.ENCODER.OUT_INDICES", [0, 1, 2, 3])
    settings.require("MODEL.TRANS.QK_SCALE", None)
    settings.require("MODEL.UPERHEAD.ALIGN_CORNERS", False)
    # Its network always computes the auxiliary logits.
    settings.require("MODEL.AUX.AUXIHEAD", True)
    dim = settings["MODEL.TRANS.EMBED_DIM"]
    settings.require("MODEL.UPERHEAD.IN_CHANNELS", [dim, 2 * dim, 4 * dim, 8 * dim])
    settings.require("MODEL.AUXFCN.IN_CHANNELS", 4 * dim)
    settings.require("MODEL.AUXFCN.UP_RATIO", 16)
    return {
        "DATA.IMAGE_CHANNELS": settings["MODEL.TRANS.IN_CHANNELS"],
        "MODEL.EMBED_DIM": dim,
        "MODEL.STAGE_DEPTHS": settings["MODEL.TRANS.STAGE_DEPTHS"],
        "MODEL.NUM_HEADS": settings["MODEL.TRANS.NUM_HEADS"],
        "MODEL.MLP_RATIO": settings["MODEL.TRANS.MLP_RATIO"],
        "MODEL.QKV_BIAS": settings["MODEL.TRANS.QKV_BIAS"],
        "MODEL.DROPOUT": settings["MODEL.DROPOUT"],
        "MODEL.ATTENTION_DROPOUT": settings["MODEL.ATTENTION_DROPOUT"],
        "MODEL.DROPPATH": settings["MODEL.DROP_PATH"],
        "HEAD.NAME": "upernet",
        "HEAD.INDICES": [0, 1, 2, 3],
        "HEAD.PYRAMID_CHANNELS": settings["MODEL.UPERHEAD.CHANNELS"],
        "HEAD.POOL_SCALES": settings["MODEL.UPERHEAD.POOL_SCALES"],
        **_UPERNET_ENCODERS[encoder](settings),
    }


def _swin(settings: TrackedSettings) -> dict[str, Any]:
    settings.require("MODEL.TRANS.APE", False)
    return {
        "MODEL.TYPE": "Swin",
        "MODEL.PATCH_SIZE": settings["MODEL.TRANS.PATCH_SIZE"],
        "MODEL.WINDOW_SIZE": settings["MODEL.TRANS.WINDOW_SIZE"],
        "MODEL.PAD_FIRST": True,
    }


def _cswin(settings: TrackedSettings) -> dict[str, Any]:
    settings.require("MODEL.TRANS.PATCH_SIZE", 4)
    return {
        "MODEL.TYPE": "CSwin",
        "MODEL.SPLIT_SIZES": settings["MODEL.TRANS.SPLIT_SIZES"],
        "MODEL.PAD_TOKENS": True,
    }


def _focal(settings: TrackedSettings) -> dict[str, Any]:
    stages = settings["MODEL.TRANS.FOCAL_STAGES"]
    levels = settings.numbers("MODEL.TRANS.FOCAL_LEVELS", 4)
    windows = settings.numbers("MODEL.TRANS.FOCAL_WINDOWS", 4)
    if not set(levels) <= {1, 2}:
        settings.refuse("MODEL.TRANS.FOCAL_LEVELS", "1 or 2 for each stage")
    if not isinstance(stages, list):
        settings.refuse("MODEL.TRANS.FOCAL_STAGES", "the numbers of stages")
    return {
        "MODEL.TYPE": "Focal",
        "MODEL.PATCH_SIZE": settings["MODEL.TRANS.PATCH_SIZE"],
        "MODEL.WINDOW_SIZE": settings["MODEL.TRANS.WINDOW_SIZE"],
        "MODEL.EXPAND_SIZES": settings["MODEL.TRANS.EXPAND_SIZES"],
        "MODEL.FOCAL_WINDOWS": [
            window if level == 2 and stage in stages else 0
            for stage, (level, window) in enumerate(zip(levels, windows, strict=True))
        ],
        "MODEL.CONV_EMBED": settings["MODEL.TRANS.USE_CONV_EMBED"],
    }


def _of_dpt(settings: TrackedSettings) -> dict[str, Any]:
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


def _of_segmenter(settings: TrackedSettings) -> dict[str, Any]:
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


def _of_segformer(settings: TrackedSettings) -> dict[str, Any]:
    """Returns the keys of SegFormer. Its Mix Transformer is a PVTv2 with other sizes."""
    settings.require("MODEL.TRANS.NUM_STAGES", 4)
    settings.require("MODEL.TRANS.PATCH_SIZE", [7, 3, 3, 3])
    settings.require("MODEL.TRANS.STRIDES", [4, 2, 2, 2])
    settings.require("MODEL.ENCODER.OUT_INDICES", [0, 1, 2, 3])
    settings.require("MODEL.SEGFORMER.ALIGN_CORNERS", False)
    heads = settings.numbers("MODEL.TRANS.NUM_HEADS", 4)
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


def _of_topformer(settings: TrackedSettings) -> dict[str, Any]:
    """Returns the keys of TopFormer."""
    settings.require("MODEL.ENCODER.TYPE", "TopTransformer")
    settings.require("MODEL.DECODER_TYPE", "SimpleHead")
    settings.require("MODEL.TRANS.INJECTION", True)
    settings.require("MODEL.TRANS.INJECTION_TYPE", "multi_sum")
    settings.require("MODEL.TRANS.DECODE_OUT_INDICES", [1, 2, 3])
    settings.require("MODEL.SIMPLE.INPUT_TRANSFORM", "multiple_select")
    settings.require("MODEL.SIMPLE.IN_INDEX", [0, 1, 2])
    settings.require("MODEL.SIMPLE.ALIGN_CORNERS", False)
    channels = settings["MODEL.SIMPLE.CHANNELS"]
    settings.require("MODEL.SIMPLE.IN_CHANNELS", [channels] * 3)
    # The first map isn't injected.
    if settings["MODEL.TRANS.OUT_CHANNELS"][1:] != [channels] * 3:
        settings.refuse("MODEL.TRANS.OUT_CHANNELS", f"three times {channels} after the first")
    return pyramid_keys(settings, "MODEL.TRANS.", "INPUT_CHANNELS") | {
        "MODEL.TYPE": "TopFormer",
        "MODEL.DEPTH": settings["MODEL.TRANS.DEPTH"],
        "MODEL.NUM_HEADS": settings["MODEL.TRANS.NUM_HEADS"],
        "MODEL.KEY_DIM": settings["MODEL.TRANS.KEY_DIM"],
        "MODEL.ATTN_RATIO": settings["MODEL.TRANS.ATTEN_RATIO"],
        "MODEL.MLP_RATIO": settings["MODEL.TRANS.MLP_RATIO"],
        "MODEL.POOL_STRIDE": settings["MODEL.TRANS.C2T_STRIDE"],
        "MODEL.DROPOUT": settings["MODEL.DROPOUT"],
        "MODEL.DROPPATH": settings["MODEL.DROP_PATH"],
        "MODEL.PRETRAINED": settings["MODEL.PRETRAINED"],
        "HEAD.NAME": "topformer",
        "HEAD.INJECTED_CHANNELS": channels,
        "HEAD.DEPTHWISE_FUSION": settings["MODEL.SIMPLE.IS_DW"],
        "HEAD.DROPOUT": settings["MODEL.SIMPLE.DROPOUT_RATIO"],
        # PaddleViT applies the gate's function twice, unlike the paper.
        "HEAD.GATED_TWICE": True,
    }


def _of_trans2seg(settings: TrackedSettings) -> dict[str, Any]:
    """Returns the keys of Trans2Seg, whose encoder always is a ResNet-50 with a deep stem."""
    settings.require("MODEL.ENCODER.TYPE", "resnet50c")
    settings.require("MODEL.ENCODER.MULTI_GRID", False, None)
    settings.require("MODEL.BACKBONE_SCALE", 1.0)
    # Its auxiliary head doesn't fit the encoder's channels.
    settings.require("MODEL.AUX.AUXIHEAD", False)
    return {
        "MODEL.TYPE": "ResNet",
        "MODEL.DEPTH": 50,
        "MODEL.STEM_TYPE": "deep",
        "MODEL.STEM_WIDTH": 64,
        "MODEL.OUTPUT_STRIDE": settings["MODEL.OUTPUT_STRIDE"],
        "MODEL.PRETRAINED": settings["MODEL.PRETRAINED"],
        "HEAD.NAME": "trans2seg",
        "HEAD.TRANSFORMER_CHANNELS": settings["MODEL.TRANS2SEG.EMBED_DIM"],
        "HEAD.TRANSFORMER_DEPTH": settings["MODEL.TRANS2SEG.DEPTH"],
        "HEAD.TRANSFORMER_HEADS": settings["MODEL.TRANS2SEG.NUM_HEADS"],
        "HEAD.TRANSFORMER_MLP_RATIO": settings["MODEL.TRANS2SEG.MLP_RATIO"],
        "HEAD.CLASS_CHANNELS": settings["MODEL.TRANS2SEG.HID_DIM"],
    }


# The keys of UPerNet's encoders that aren't the same for all, by MODEL.ENCODER.TYPE.
_UPERNET_ENCODERS: dict[str, Callable[[TrackedSettings], dict[str, Any]]] = {
    "SwinTransformer": _swin,
    "CSwinTransformer": _cswin,
    "FocalTransformer": _focal,
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
# By a part of MODEL.NAME. PaddleViT looks for these names, in this order.
MODELS: dict[str, Callable[[TrackedSettings], dict[str, Any]]] = {
    "SETR": _of_setr,
    "UperNet": _of_upernet,
    "DPT": _of_dpt,
    "Segmenter": _of_segmenter,
    "Trans2Seg": _of_trans2seg,
    "Segformer": _of_segformer,
    # Its spelling.
    "TopFomer": _of_topformer,
}
