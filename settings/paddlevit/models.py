"""Translates models of PaddleViT where several of its keys together give one of this toolkit's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from errors import InputError, printable
from settings.paddlevit.tracked import TrackedSettings

_Settings = dict[str, Any]


def of_models(settings: _Settings, own: _Settings, path: Path) -> _Settings:
    """Removes such keys of MODEL from ``settings``, and returns this toolkit's keys for them.

    Args:
        settings: PaddleViT's keys and values.
        own: those that the file itself sets; empty: ``settings`` are the family's defaults.
        path: the file, for errors.

    Raises:
        InputError: no model here has such values.
    """
    if own and settings.get("MODEL.ACT", "") is None:
        raise InputError(
            f"{path}: MODEL.ACT is None, which PaddleViT doesn't support either; set relu or silu"
        )
    for key, translate in _BY_KEY.items():
        if f"MODEL.{key}" in settings:
            return translate(settings, path)
    return {}


def _of_mobileone(settings: _Settings, path: Path) -> _Settings:
    """Translates MobileOne. In PaddleViT, its first stage is the stem."""
    blocks = settings.pop("MODEL.NUM_BLOCKS")
    channels = settings.pop("MODEL.CHANNELS")
    factors = settings.pop("MODEL.EXPANSIONS")
    branches = settings.pop("MODEL.NUM_BRANCHES")
    dims = []
    if all(map(_are_five_numbers, (blocks, channels, factors, branches))):
        dims = [int(number * factor) for number, factor in zip(channels, factors, strict=True)]
    if not dims or blocks[0] != 1 or dims[0] != min(64, dims[1]) or len(set(branches[1:])) > 1:
        found = (
            f"NUM_BLOCKS {blocks}, CHANNELS {channels} x EXPANSIONS {factors},"
            f" NUM_BRANCHES {branches}"
        )
        raise InputError(
            f"{path}: {printable(found, 200)}: expected five numbers each: a stem of one block with"
            " the next stage's channels (at most 64), then four stages with as many branches each"
        )
    return {
        "MODEL.STAGE_DEPTHS": blocks[1:],
        "MODEL.EMBED_DIMS": dims[1:],
        "MODEL.NUM_BRANCHES": branches[1],
    }


def _are_five_numbers(values: list[Any]) -> bool:
    return len(values) == 5 and all(
        isinstance(value, int | float) and abs(value) < 1e6 for value in values
    )


def _of_crossvit(settings: _Settings, path: Path) -> _Settings:
    """Translates CrossViT.

    PaddleViT gives its blocks by stage, and the sizes of its images in pixels, whatever the size
    of the image that comes in.
    """
    group = "MODEL.TRANS" if "MODEL.TRANS.IMG_SIZE" in settings else "MODEL"
    sizes = settings.pop(f"{group}.IMG_SIZE")
    stages = settings.pop(f"{group}.DEPTH")
    ratios = settings.pop(f"{group}.MLP_RATIO")
    pixels = settings["DATA.IMAGE_SIZE"]
    are_lists = all(isinstance(values, list) and values for values in (sizes, stages, ratios))
    # The first stage's blocks of both branches, and of both together.
    blocks = stages[0] if are_lists and isinstance(stages[0], list) else []
    are_numbers = are_lists and all(type(value) is int for value in (*blocks, *sizes, pixels))
    are_equal = blocks[2:] == [0] and all(stage == blocks for stage in stages)
    if not are_numbers or not are_equal or pixels < 1:
        found = f"DEPTH {stages}, IMG_SIZE {sizes}, IMAGE_SIZE {pixels}"
        raise InputError(
            f"{path}: {printable(found, 200)}: expected sizes in pixels, and equal stages: blocks of"
            " both branches, then 0"
        )
    return {
        "MODEL.IMAGE_SCALES": [size / pixels for size in sizes],
        "MODEL.DEPTH": len(stages),
        "MODEL.BRANCH_DEPTHS": blocks[:2],
        "MODEL.MLP_RATIO": ratios[:2],
    }


def _of_halonet(settings: _Settings, path: Path) -> _Settings:
    """Translates HaloNet.

    PaddleViT lists its blocks. HIDDEN_CHANNEL is the number of channels that the first block of a
    stage reads, if this block attends; None: as many as the stage has.
    """
    stages = [settings.pop(f"MODEL.STAGE{stage}_BLOCK") for stage in (1, 2, 3, 4)]
    depths = settings.pop("MODEL.DEPTH")
    channels = settings.pop("MODEL.CHANNEL")
    heads = settings.pop("MODEL.NUM_HEAD")
    hidden = settings.pop("MODEL.HIDDEN_CHANNEL")
    listed = [stage for stage in stages if isinstance(stage, list)]
    every = [_every(stage) for stage in listed]
    is_known = (
        isinstance(channels, list)
        and isinstance(heads, list)
        and len(channels) == 5
        and channels[0] == 64
        and None not in every
        and depths == [len(stage) for stage in listed]
    )
    if is_known:
        for stage, count in enumerate(every):
            read = channels[stage + 1] if hidden is None else hidden
            if count == 1 and read != channels[stage]:
                is_known = False
    if not is_known:
        found = (
            f"STAGE1_BLOCK to 4 {stages}, DEPTH {depths}, CHANNEL {channels},"
            f" HIDDEN_CHANNEL {hidden}"
        )
        raise InputError(
            f"{path}: {printable(found, 300)}: expected a stem of 64 channels, and four stages in"
            " which every so many-th block attends (attn)"
        )
    return {
        "MODEL.STAGE_DEPTHS": depths,
        "MODEL.EMBED_DIMS": channels[1:],
        "MODEL.ATTENTION_EVERY": every,
        "MODEL.NUM_HEADS": heads,
    }


def _every(blocks: list[Any]) -> int | None:
    """Returns n if each n-th block attends and no other does; 0 if none does; otherwise None."""
    attends = [block == "attn" for block in blocks]
    count = attends.index(True) + 1 if True in attends else 0
    expected = [count > 0 and number % count == 0 for number in range(1, len(blocks) + 1)]
    if attends != expected or any(block not in ("attn", "bottle") for block in blocks):
        return None
    return count


def _of_vip(settings: _Settings, path: Path) -> _Settings:
    """Translates the Vision Permutator.

    PaddleViT's SEGMENT_DIM is the number of places along a side of each stage's maps, which follows
    from the image here. The last of its TRANSITIONS has no meaning.
    """
    depths = settings.pop("MODEL.MIXER.LAYER")
    transitions = settings.pop("MODEL.MIXER.TRANSITIONS")
    segments = settings.pop("MODEL.MIXER.SEGMENT_DIM")
    places = settings["DATA.IMAGE_SIZE"] // settings.get("MODEL.MIXER.PATCH_SIZE", 7)
    expected = []
    for halves in transitions:
        expected.append(places)
        places = places // 2 if halves else places
    if segments != expected:
        raise InputError(
            f"{path}: SEGMENT_DIM is {segments}, expected the places along a side of each stage's"
            f" maps: {expected}"
        )
    return {"MODEL.STAGE_DEPTHS": depths, "MODEL.TRANSITIONS": transitions[:-1]}


def _of_topformer(settings: _Settings, path: Path) -> _Settings:
    """Translates TopFormer, whose CFGS lists the blocks of its pyramid. The family's defaults have
    no blocks.
    """
    found = {"MODEL.POOL_STRIDE": settings.pop("MODEL.C2T_STRIDE")}
    if settings["MODEL.CFGS"] is not None:
        found |= pyramid_keys(TrackedSettings(settings, path), "MODEL.", "CHANNELS")
    for key in ("CFGS", "CHANNELS", "EMBED_OUT_INDICE"):
        settings.pop(f"MODEL.{key}")
    return found


def pyramid_keys(settings: TrackedSettings, section: str, channels: str) -> _Settings:
    """Returns the keys of TopFormer's convolutions.

    CFGS has (side of the kernels, expansion, channels, stride) of each block of its pyramid, and
    EMBED_OUT_INDICE the last block of each stage.

    Args:
        section: of PaddleViT's keys, such as "MODEL.TRANS.".
        channels: the key of the stages' channels within it.
    """
    cfgs = f"{section}CFGS"
    blocks = settings[cfgs]
    lasts = settings.numbers(f"{section}EMBED_OUT_INDICE", 4)
    dims = settings.numbers(f"{section}{channels}", 4)
    are_blocks = isinstance(blocks, list) and blocks
    if not are_blocks or any(not isinstance(block, list) or len(block) != 4 for block in blocks):
        settings.refuse(cfgs, "four numbers for each block")
    depths = [last - before for before, last in zip([-1, *lasts[:3]], lasts, strict=True)]
    # The first block keeps the size; the first other one of each stage halves it.
    expected = [[blocks[0][2], 1]]
    for stage, (depth, dim) in enumerate(zip(depths, dims, strict=True)):
        expected += [[dim, 2]] + [[dim, 1]] * (depth - 1 - (stage == 0))
    if [block[2:] for block in blocks] != expected:
        settings.refuse(
            cfgs,
            f"stages that end with the blocks {lasts}, of {dims} channels, which halve the size",
        )
    return {
        "MODEL.STAGE_DEPTHS": depths,
        "MODEL.EMBED_DIMS": dims,
        "MODEL.STEM_DIM": blocks[0][2],
        "MODEL.KERNEL_SIZE": [block[0] for block in blocks],
        "MODEL.EXPAND_RATIO": [block[1] for block in blocks],
    }


def _of_cvt(settings: _Settings, path: Path) -> _Settings:
    """Translates CvT, of which each stage has rates and maybe a class token of its own."""
    tokens = settings.pop("MODEL.CLS_TOKEN")
    drops = settings.pop("MODEL.DROP_RATE")
    attention_drops = settings.pop("MODEL.ATTN_DROP_RATE")
    rates = settings.pop("MODEL.DROP_PATH_RATE")
    stages = settings.pop("MODEL.NUM_STAGES")
    lists = [tokens, drops, attention_drops, rates]
    is_known = all(isinstance(values, list) and len(values) == stages > 0 for values in lists)
    if is_known:
        is_known = not any(tokens[:-1]) and not any(rates[:-1])
        is_known = is_known and len(set(drops)) == 1 and len(set(attention_drops)) == 1
    if not is_known:
        found = (
            f"CLS_TOKEN {tokens}, DROP_RATE {drops}, ATTN_DROP_RATE {attention_drops},"
            f" DROP_PATH_RATE {rates}"
        )
        raise InputError(
            f"{path}: {printable(found, 200)}: expected NUM_STAGES {stages} values each, a class token"
            " and drop path in the last stage alone, and equal rates of dropout"
        )
    return {
        "MODEL.EMBED_DIMS": settings.pop("MODEL.DIM_EMBED"),
        "MODEL.CLASS_TOKEN": tokens[-1],
        "MODEL.DROPOUT": drops[-1],
        "MODEL.ATTENTION_DROPOUT": attention_drops[-1],
        "MODEL.DROPPATH": rates[-1],
    }


def _of_repmlp(settings: _Settings, path: Path) -> _Settings:
    """Translates RepMLP, whose linear layers read whole maps here, as in all of PaddleViT's files."""
    sides = [settings["DATA.IMAGE_SIZE"] // (4 * 2**stage) for stage in range(4)]
    for key in ("HEIGHTS", "WIDTHS"):
        found = settings.pop(f"MODEL.{key}")
        if found != sides:
            raise InputError(
                f"{path}: {key} is {printable(str(found), 100)}, expected the places along a side of each"
                f" stage's maps: {sides}"
            )
    return {}


def _of_repmlp_resnet(settings: _Settings, path: Path) -> _Settings:
    """Translates RepMLP-ResNet, whose maps follow from the image here, and whose parts are square."""
    sizes = [settings.pop(f"MODEL.MIXER.{key}") for key in ("IMG_H", "IMG_W", "H", "W")]
    pixels = settings["DATA.IMAGE_SIZE"]
    if sizes != [pixels, pixels, sizes[2], sizes[2]]:
        raise InputError(
            f"{path}: IMG_H, IMG_W, H and W are {printable(str(sizes), 100)}, expected IMAGE_SIZE"
            f" {pixels} twice, and equal H and W"
        )
    return {"MODEL.PART_SIZE": sizes[2]}


def _of_convmlp(settings: _Settings, path: Path) -> _Settings:
    """Translates ConvMLP, whose CHANNELS are those of its stage of convolutions."""
    return {
        "MODEL.STAGE_DEPTHS": settings.pop("MODEL.MIXER.BLOCKS"),
        "MODEL.STEM_DIM": settings.pop("MODEL.MIXER.CHANNELS"),
    }


# This toolkit's names of MobileFormer's keys below MODEL.MF.
_MOBILEFORMER_KEYS = {
    "STEM.OUT_CHANNELS": "STEM_DIM",
    "LITE_BNECK.STRIED": "LITE_STRIDE",
    "BLOCK.OUT_CHANNELS": "EMBED_DIMS",
    "BLOCK.HIDDEN_CHANNELS": "HIDDEN_DIMS",
    "BLOCK.STRIEDS": "STRIDES",
    "POINTWISECONV_GROUPS": "CONV_GROUPS",
    "NUM_HEAD": "NUM_HEADS",
    "MLP_RATIO": "MLP_RATIO",
    "QKV_BIAS": "QKV_BIAS",
    "DYRELU.USE_DYRELU": "DYNAMIC_RELU",
    "DYRELU.REDUCE": "RELU_REDUCTION",
    "CHANNEL_CONV.OUT_CHANNEL": "LAST_DIM",
    "HEAD.HIDDEN_FEATURE": "HEAD_DIM",
}


def _of_mobileformer(settings: _Settings, path: Path) -> _Settings:
    """Translates Mobile-Former.

    PaddleViT's in-channels are always those of the layer before, except in its defaults of HEAD. With
    kernels of another side than 3, its maps would lose their margins.
    """
    prefix = "MODEL.MF."
    model = {
        key.removeprefix(prefix): settings.pop(key)
        for key in list(settings)
        if key.startswith(prefix)
    }
    found = {f"MODEL.{own}": model[name] for name, own in _MOBILEFORMER_KEYS.items()}
    lite_dim = model["LITE_BNECK.OUT_CHANNEL"]
    found["MODEL.LITE_DIMS"] = [model["LITE_BNECK.HIDDEN_CHANNEL"], lite_dim]
    found["MODEL.NUM_TOKENS"], found["MODEL.TOKEN_DIM"] = model["TOKENS"]
    dims = found["MODEL.EMBED_DIMS"]
    expected = {
        "LITE_BNECK.IN_CHANNEL": found["MODEL.STEM_DIM"],
        "BLOCK.IN_CHANNELS": [lite_dim, *dims[:-1]],
        "BLOCK.KERNELS": [3] * len(dims),
        "BLOCK.PADDINGS": [1] * len(dims),
        "CHANNEL_CONV.IN_CHANNEL": dims[-1],
    }
    for name, value in expected.items():
        if model[name] != value:
            raise InputError(
                f"{path}: {prefix}{name} is {printable(str(model[name]), 100)}, expected {value},"
                " as the other keys say"
            )
    return found


def _of_focal(settings: _Settings, path: Path) -> _Settings:
    """Translates Focal Transformer. A stage of two levels attends to pooled windows, too."""
    group = "MODEL.FOCAL"
    pool = settings.pop(f"{group}.FOCAL_POOL")
    stages = settings.pop(f"{group}.FOCAL_STAGES")
    levels = settings.pop(f"{group}.FOCAL_LEVELS")
    windows = settings.pop(f"{group}.FOCAL_WINDOWS")
    lists = [stages, levels, windows]
    is_known = all(isinstance(values, list) for values in lists) and pool in ("fc", "none", None)
    is_known = is_known and len(levels) == len(windows) and set(levels) <= {1, 2}
    if not is_known:
        found = f"FOCAL_POOL {pool}, FOCAL_STAGES {stages}, FOCAL_LEVELS {levels}"
        raise InputError(
            f"{path}: {printable(found, 200)}: expected the pool fc or none, and 1 or 2 levels for"
            " each stage"
        )
    pooled = [
        window if pool == "fc" and level == 2 and stage in stages else 0
        for stage, (level, window) in enumerate(zip(levels, windows, strict=True))
    ]
    return {
        "MODEL.FOCAL_WINDOWS": pooled,
        "MODEL.CONV_EMBED": settings.pop(f"{group}.USE_CONV_EMBED"),
    }


# By a key of MODEL that only models of one kind have.
_BY_KEY: dict[str, Callable[[_Settings, Path], _Settings]] = {
    "EXPANSIONS": _of_mobileone,
    "IMG_SIZE": _of_crossvit,
    "TRANS.IMG_SIZE": _of_crossvit,
    "STAGE1_BLOCK": _of_halonet,
    "MIXER.SEGMENT_DIM": _of_vip,
    "CFGS": _of_topformer,
    "MF.TOKENS": _of_mobileformer,
    "DIM_EMBED": _of_cvt,
    "HEIGHTS": _of_repmlp,
    "MIXER.BLOCK_TYPE": _of_repmlp_resnet,
    "MIXER.N_CONV_BLOCKS": _of_convmlp,
    "FOCAL.FOCAL_LEVELS": _of_focal,
}
