"""Small models for segmentation as PaddleViT's YAML files name them, with weights by name and shape.

The files have the keys of PaddleViT's own; only sizes are smaller.
"""

import zlib

import numpy as np

# What all files have.
_COMMON = """
DATA:
    BATCH_SIZE: 2
    BATCH_SIZE_VAL: 1
    DATASET: 'ADE20K'
    DATA_PATH: '/dataset/ADEChallengeData2016'
    CROP_SIZE: ({size},{size})
    NUM_CLASSES: 7
TRAIN:
    BASE_LR: 0.001
    END_LR: 1e-4
    DECODER_LR_COEF: 10.0
    ITERS: 160000
    LR_SCHEDULER:
        NAME: 'PolynomialDecay'
VAL:
    MULTI_SCALES_VAL: False
    IMAGE_BASE_SIZE: {size}
    CROP_SIZE: [{size},{size}]
    STRIDE_SIZE: [{size},{size}]
MODEL:
"""
_VIT = """
    TRANS:
        PATCH_SIZE: 16
        HIDDEN_SIZE: 24
        MLP_RATIO: 4
        NUM_HEADS: 3
        NUM_LAYERS: 4
        QKV_BIAS: True
"""
_SETR = (
    """
    ENCODER:
        TYPE: 'ViT'
        OUT_INDICES: [0, 1, 2, 3]
    PRETRAINED: None
    AUX:
        AUXIHEAD: True
"""
    + _VIT
)
_SEGMENTER = (
    """
    NAME: 'Segmenter'
    PRETRAINED: None
    SEGMENTER:
        NUM_LAYERS: 2
"""
    # Its decoder has the encoder's heads, whose width is 64 in all files.
    + _VIT.replace("24", "128").replace("NUM_HEADS: 3", "NUM_HEADS: 2")
    + "        KEEP_CLS_TOKEN: True\n"
)
_TRANS2SEG = """
    NAME: "Trans2Seg"
    ENCODER:
        TYPE: "resnet50c"
    TRANS2SEG:
        EMBED_DIM: 24
        DEPTH: 2
        NUM_HEADS: 3
        MLP_RATIO: 3.
        HID_DIM: 8
    AUX:
        AUXIHEAD: False
        AUXHEAD_ALIGN_CORNERS: False
"""
_TOPFORMER = """
    NAME: "TopFomer"
    ENCODER:
        TYPE: 'TopTransformer'
    DECODER_TYPE: 'SimpleHead'
    SIMPLE:
        IS_DW: True
        IN_CHANNELS: [16, 16, 16]
        CHANNELS: 16
    DROP_PATH: 0.0
    DROPOUT: 0.0
    TRANS:
        MLP_RATIO: 2
        ATTEN_RATIO: 2.0
        NUM_HEADS: 4
        INPUT_CHANNELS: [8, 8, 16, 24]
        OUT_CHANNELS: [None, 16, 16, 16]
        EMBED_OUT_INDICE: [2, 4, 6, 8]
        DECODE_OUT_INDICES: [1, 2, 3]
        C2T_STRIDE: 2
        KEY_DIM: 8
        DEPTH: 2
        INJECTION: True
        INJECTION_TYPE: "multi_sum"
        CFGS: [[3, 1, 16, 1], [3, 4, 8, 2], [3, 3, 8, 1], [5, 3, 8, 2], [5, 3, 8, 1],
               [3, 3, 16, 2], [3, 3, 16, 1], [5, 6, 24, 2], [5, 6, 24, 1]]
"""
_SEGFORMER = """
    NAME: 'Segformer'
    ENCODER:
        TYPE: 'MixVisionTransformer'
        OUT_INDICES: [0, 1, 2, 3]
    PRETRAINED: None
    DECODER_TYPE: 'SegformerHead'
    SEGFORMER:
        IN_CHANNELS: [8, 16, 40, 64]
        CHANNELS: 16
        ALIGN_CORNERS: False
    TRANS:
        IN_CHANNELS: 3
        EMBED_DIM: 8
        NUM_STAGES: 4
        NUM_LAYERS: [2, 1, 1, 1]
        NUM_HEADS: [1, 2, 5, 8]
        PATCH_SIZE: [7, 3, 3, 3]
        STRIDES: [4, 2, 2, 2]
        SR_RATIOS: [8, 4, 2, 1]
        HIDDEN_SIZE: 768
        MLP_RATIO: 4
        QKV_BIAS: True
    DROPOUT: 0.0
    ATTENTION_DROPOUT: 0.0
    DROP_PATH: 0.1
"""
_DPT = (
    """
    NAME: 'DPT'
    ENCODER:
        TYPE: 'ViT'
        OUT_INDICES: [0, 1, 2, 3]
    PRETRAINED: None
    DECODER_TYPE: 'DPTHead'
    DPT:
        HIDDEN_FEATURES: [8, 16, 24, 32]
        FEATURES: 16
        READOUT_PROCESS: 'project'
"""
    + _VIT
    + "        KEEP_CLS_TOKEN: True\n"
)
_UPERNET = """
    NAME: 'UperNet_Swin'
    ENCODER:
        TYPE: 'SwinTransformer'
        OUT_INDICES: [0, 1, 2, 3]
    DECODER_TYPE: 'UperHead'
    UPERHEAD:
        IN_CHANNELS: [12, 24, 48, 96]
        IN_INDEX: [0, 1, 2, 3]
        POOL_SCALES: [1, 2, 3, 6]
        CHANNELS: 16
        DROP_RATIO: 0.1
        ALIGN_CORNERS: False
    TRANS:
        PATCH_SIZE: 4
        WINDOW_SIZE: 7
        IN_CHANNELS: 3
        HIDDEN_SIZE: 12
        EMBED_DIM: 12
        STAGE_DEPTHS: [2, 2, 2, 1]
        NUM_HEADS: [1, 2, 3, 6]
        MLP_RATIO: 4
        QKV_BIAS: True
        QK_SCALE: None
        APE: False
        PATCH_NORM: True
    AUX:
        AUXIHEAD: True
    AUXFCN:
        IN_CHANNELS: 48
        UP_RATIO: 16
"""
_UPERNET_CSWIN = (
    _UPERNET.replace("UperNet_Swin", "UperNet_CSwin")
    .replace("SwinTransformer", "CSwinTransformer")
    .replace("[12, 24, 48, 96]", "[16, 32, 64, 128]")
    .replace("DIM: 12", "DIM: 16")
    .replace("IN_CHANNELS: 48", "IN_CHANNELS: 64")
    .replace("STAGE_DEPTHS: [2, 2, 2, 1]", "STAGE_DEPTHS: [1, 1, 2, 1]")
    .replace("NUM_HEADS: [1, 2, 3, 6]", "NUM_HEADS: [2, 4, 4, 8]")
    # All but the second stage's maps are padded.
    .replace("WINDOW_SIZE: 7", "SPLIT_SIZES: [3, 2, 3, 3]")
)
_UPERNET_FOCAL = (
    _UPERNET.replace("UperNet_Swin", "UperNet_Focal")
    .replace("SwinTransformer", "FocalTransformer")
    .replace("STAGE_DEPTHS: [2, 2, 2, 1]", "STAGE_DEPTHS: [1, 1, 2, 1]")
    # The last stage has one window. The others' maps of 32, 16 and 8 are padded.
    .replace(
        "WINDOW_SIZE: 7",
        """WINDOW_SIZE: 6
        FOCAL_STAGES: [0, 1, 3]
        FOCAL_LEVELS: [2, 2, 2, 2]
        FOCAL_WINDOWS: [5, 3, 3, 1]
        EXPAND_STAGES: [0, 1, 2, 3]
        EXPAND_SIZES: [3, 2, 2, 1]
        USE_CONV_EMBED: True""",
    )
)
_SETR_MLA = """
    NAME: 'SETR_MLA'
    DECODER_TYPE: 'VIT_MLAHead'
    MLA:
        MLA_CHANNELS: 256
        MLAHEAD_CHANNELS: 16
        MLAHEAD_ALIGN_CORNERS: False
"""
_SETR_PUP = """
    NAME: 'SETR_PUP'
    DECODER_TYPE: 'PUP_VisionTransformerUpHead'
    PUP:
       INPUT_CHANNEL: 24
       NUM_CONV: 4
       NUM_UPSAMPLE_LAYER: 4
       CONV3x3_CONV1x1: True
       ALIGN_CORNERS: False
    AUXPUP:
       INPUT_CHANNEL: 24
       NUM_CONV: 2
       NUM_UPSAMPLE_LAYER: 2
       CONV3x3_CONV1x1: True
       ALIGN_CORNERS: False
"""
_SETR_NAIVE = """
    NAME: 'SETR_Naive'
    DECODER_TYPE: 'Naive_VisionTransformerUpHead'
    PUP:
       INPUT_CHANNEL: 24
       NUM_CONV: 2
       NUM_UPSAMPLE_LAYER: 1
       CONV3x3_CONV1x1: False
       ALIGN_CORNERS: False
    AUXPUP:
       INPUT_CHANNEL: 24
       NUM_CONV: 2
       NUM_UPSAMPLE_LAYER: 1
       CONV3x3_CONV1x1: False
       ALIGN_CORNERS: False
"""
_MASK = """
    ENCODER:
        TYPE: '{encoder}'
        OUT_INDICES: [3]
    DECODER_TYPE: '{decoder}'
"""
# The side of the images, and the keys of MODEL, of each small model.
_MODELS = {
    "setr_mla": (64, _SETR_MLA + _SETR.replace("'ViT'", "'ViT_MLA'")),
    "setr_pup": (64, _SETR_PUP + _SETR),
    "setr_naive": (64, _SETR_NAIVE + _SETR),
    "upernet_swin": (128, _UPERNET),
    "upernet_cswin": (128, _UPERNET_CSWIN),
    "upernet_focal": (128, _UPERNET_FOCAL),
    "segformer": (64, _SEGFORMER),
    "segmenter": (64, _MASK.format(encoder="ViT", decoder="MaskTransformer") + _SEGMENTER),
    "segmenter_linear": (64, _MASK.format(encoder="ViT", decoder="Linear") + _SEGMENTER),
    "segmenter_deit": (64, _MASK.format(encoder="DeiT", decoder="MaskTransformer") + _SEGMENTER),
    "segmenter_deit_linear": (
        64,
        _MASK.format(encoder="DeiT", decoder="LinearDecoder") + _SEGMENTER,
    ),
    "dpt": (64, _DPT),
    "topformer": (128, _TOPFORMER),
    # Its code takes this size alone.
    "trans2seg": (512, _TRANS2SEG),
}
# A small file of PaddleViT's for each of its models.
FILES = {name: _COMMON.format(size=size) + model for name, (size, model) in _MODELS.items()}


def array(name: str, shape: list[int]) -> np.ndarray | None:
    """Returns the weight, bias or statistic of a name: the same on each call. Of a table that
    follows from sizes it returns None.

    Weights have the deviation 1 / sqrt(inputs), scales of norms and variances are near 1.
    """
    if name.endswith(("relative_position_index", "attn_mask", "valid_ind_rolled")):
        return None
    if "relative_position_index_" in name:
        return None
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    values = rng.standard_normal(shape)
    if name.endswith("_variance"):
        return (1 + 0.2 * np.tanh(values)).astype(np.float32)
    if len(shape) == 1:
        return (0.3 * values + name.endswith("weight")).astype(np.float32)
    inputs = np.prod(shape[1:]) if len(shape) == 4 else shape[-2]
    return (values / np.sqrt(inputs)).astype(np.float32)


def images(size: int) -> np.ndarray:
    """Returns two normalised images, [2, 3, size, size]."""
    return np.random.default_rng(0).standard_normal((2, 3, size, size)).astype(np.float32)


def places(logits: np.ndarray) -> np.ndarray:
    """Returns some places of logits [B, K, H, W], for all classes."""
    step = logits.shape[2] // 12
    return logits[:, :, ::step, 2::step]
