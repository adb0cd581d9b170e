"""timm's model of a configuration: the name and the arguments by which timm builds it.

This is the way back of ``timm_arguments``. It knows the arguments of the architectures in
``_ARGUMENTS``, as timm 1.0.31 has them. Other architectures have to be those of timm's names.
"""

from typing import Any, NamedTuple

from config import get_config, model_files
from errors import InputError
from models import architecture as model_class
from settings.architectures import architecture
from settings.configuration import Configuration, pair
from settings.names import current_name, families, names
from settings.needs import TRAINING
from settings.plain import value_text

# Keys that matter for fresh weights, or for weights of another size, alone.
_IGNORED = {"MODEL.WEIGHT_INIT", "MODEL.POS_RESIZE", "MODEL.PROMPT_DEEP", "MODEL.HEAD_INIT_SCALE"}
_PLAIN = ("PATCH_SIZE", "EMBED_DIM", "NUM_HEADS", "MLP_RATIO", "QKV_BIAS")
_VIT = {
    **{key: key.lower() for key in _PLAIN},
    "DEPTH": "depth",
    "ACT": "act_layer",
    "QK_NORM": "qk_norm",
    "INIT_VALUES": "init_values",
    "GLOBAL_POOL": "global_pool",
    "FC_NORM": "fc_norm",
    "CLASS_TOKEN": "class_token",
    "REG_TOKENS": "reg_tokens",
    "NO_EMBED_CLASS": "no_embed_class",
    "PRE_NORM": "pre_norm",
}
# By MODEL.TYPE, timm's arguments by keys of MODEL. timm refuses the arguments that define a variant of
# some other architectures, such as MLP-Mixer and MetaFormer.
_ARGUMENTS: dict[str, dict[str, str]] = {
    "vit": _VIT,
    "deit": _VIT,
    "beit": {
        **{key: key.lower() for key in _PLAIN},
        "DEPTH": "depth",
        "INIT_VALUES": "init_values",
        "USE_ABS_POS_EMB": "use_abs_pos_emb",
        "USE_REL_POS_BIAS": "use_rel_pos_bias",
        "USE_SHARED_REL_POS_BIAS": "use_shared_rel_pos_bias",
        "GLOBAL_POOL": "global_pool",
    },
    "swin": {
        **{key: key.lower() for key in _PLAIN},
        "STAGE_DEPTHS": "depths",
        "WINDOW_SIZE": "window_size",
    },
    "swinv2": {
        **{key: key.lower() for key in _PLAIN},
        "STAGE_DEPTHS": "depths",
        "WINDOW_SIZE": "window_size",
        "PRETRAINED_WINDOW_SIZES": "pretrained_window_sizes",
    },
    "convnext": {"STAGE_DEPTHS": "depths", "EMBED_DIMS": "dims"},
    "cait": {
        **{key: key.lower() for key in _PLAIN},
        "DEPTH": "depth",
        "DEPTH_TOKEN_ONLY": "depth_token_only",
    },
    "pvtv2": {
        "STAGE_DEPTHS": "depths",
        "EMBED_DIMS": "embed_dims",
        "NUM_HEADS": "num_heads",
        "MLP_RATIO": "mlp_ratios",
        "SR_RATIO": "sr_ratios",
        "LINEAR": "linear",
        "QKV_BIAS": "qkv_bias",
    },
}
# What timm's models have, where those of the same names here have something else.
_EXPECTED: dict[tuple[str, str], Any] = {("poolformer", "FC_NORM"): True}
# By MODEL.TYPE, the shipped model that a model without a name of timm's is identified by.
_BASES = {
    "vit": "vit_tiny_patch16_224",
    "deit": "deit_tiny_patch16_224",
    "beit": "beit_base_patch16_224",
    "swin": "swin_tiny_patch4_window7_224",
    "convnext": "convnext_tiny",
}


class TimmModel(NamedTuple):
    """How timm builds a model.

    Attributes:
        architecture: timm's name.
        arguments: what ``timm.create_model`` gets besides it and the number of classes.
        takes_size: whether the model is built for images of one size, which ``img_size`` names.
    """

    architecture: str
    arguments: dict[str, Any]
    takes_size: bool


def timm_model(config: Configuration) -> TimmModel:
    """Returns how timm builds the model of a configuration.

    Raises:
        InputError: timm doesn't have it; the line says why.
    """
    kind = config.MODEL.TYPE.lower()
    name, base = _base(config)
    arguments: dict[str, Any] = {}
    known = _ARGUMENTS.get(kind, {})
    for key, declared in architecture(kind).arguments.items():
        if key in _IGNORED or TRAINING in declared.needs:
            continue
        short = key.removeprefix("MODEL.")
        value = config.MODEL[short]
        expected = _EXPECTED.get((kind, short), base.MODEL[short])
        if value == expected:
            continue
        # timm's create_model leaves out arguments that are None.
        if short not in known or value is None:
            raise InputError(
                f"{key} is {value_text(value)}, timm's {name} has {value_text(expected)},"
                " and no argument of timm corresponds to it"
            )
        arguments[known[short]] = value
    # PVTv2 has the attribute once it is built.
    takes_size = model_class(config).min_image_size is None and kind != "pvtv2"
    if takes_size:
        height, width = pair(config.DATA.IMAGE_SIZE)
        arguments["img_size"] = height if height == width else [height, width]
    if config.DATA.IMAGE_CHANNELS != 3:
        arguments["in_chans"] = config.DATA.IMAGE_CHANNELS
    return TimmModel(name, arguments, takes_size)


def _base(config: Configuration) -> tuple[str, Configuration]:
    """Returns timm's name of the model, and the configuration here of timm's model of that name.

    Raises:
        InputError: timm has no such model.
    """
    files = {file.stem: file for file in model_files()}
    kind = config.MODEL.TYPE.lower()
    file = files.get(config.MODEL.NAME)
    if file is not None:
        name = current_name(names(file).get("timm", file.stem)).partition(".")[0]
        # The same model, whose Linear layers timm writes as convolutions of 1 x 1.
        name = name.replace("levit_conv_", "levit_")
        # Files of several recipes may be of one model of timm's, which has the plainest one.
        base = get_config(files.get(name, file))
        in_timm = any(name in members for members in families().values())
        if in_timm and base.MODEL.TYPE.lower() == kind:
            return name, base
    if kind not in _BASES:
        raise InputError(f"timm has no model {config.MODEL.NAME} of type {config.MODEL.TYPE}")
    return _BASES[kind], get_config(files[_BASES[kind]])
