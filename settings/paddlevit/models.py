"""Translates models of PaddleViT whose keys have no one-to-one counterpart: several keys together
give one of this toolkit's.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from errors import InputError, printable

_Settings = dict[str, Any]


def of_models(settings: _Settings, own: _Settings, path: Path) -> _Settings:
    """Removes such keys of MODEL from ``settings``, and returns this toolkit's keys for them.

    Args:
        own: the keys that the file itself sets; empty: ``settings`` are the family's defaults.

    Raises:
        InputError: values that no model here has.
    """
    if own and settings.get("MODEL.ACT", "") is None:
        raise InputError(
            f"{path}: MODEL.ACT is None, which is no activation there; give relu or silu"
        )
    return next(
        (come_to(settings, path) for key, come_to in _BY_KEY.items() if f"MODEL.{key}" in settings),
        {},
    )


def _of_mobileone(settings: _Settings, path: Path) -> _Settings:
    """Translates MobileOne. In PaddleViT, its first stage is the stem."""
    blocks, channels, factors, branches = (
        settings.pop(f"MODEL.{name}")
        for name in ("NUM_BLOCKS", "CHANNELS", "EXPANSIONS", "NUM_BRANCHES")
    )
    numbers = all(
        len(one) == 5
        and all(isinstance(number, int | float) and abs(number) < 1e6 for number in one)
        for one in (blocks, channels, factors, branches)
    )
    dims = []
    if numbers:
        dims = [int(number * factor) for number, factor in zip(channels, factors, strict=True)]
    if not numbers or blocks[0] != 1 or dims[0] != min(64, dims[1]) or len(set(branches[1:])) > 1:
        found = f"NUM_BLOCKS {blocks}, CHANNELS {channels} x EXPANSIONS {factors}, NUM_BRANCHES {branches}"
        raise InputError(
            f"{path}: {printable(found, 200)}: expected five numbers each: a stem of one block with the next stage's"
            " channels (at most 64), then four stages with as many branches each"
        )
    return {
        "MODEL.STAGE_DEPTHS": blocks[1:],
        "MODEL.EMBED_DIMS": dims[1:],
        "MODEL.NUM_BRANCHES": branches[1],
    }


def _of_crossvit(settings: _Settings, path: Path) -> _Settings:
    """Translates CrossViT. Its blocks are given by stage, and its images' sizes in pixels, whatever
    the image that comes in.
    """
    group = "MODEL.TRANS" if "MODEL.TRANS.IMG_SIZE" in settings else "MODEL"
    sizes, depth, ratios = (
        settings.pop(f"{group}.{name}") for name in ("IMG_SIZE", "DEPTH", "MLP_RATIO")
    )
    lists = all(isinstance(one, list) and one for one in (sizes, depth, ratios))
    pixels = settings["DATA.IMAGE_SIZE"]
    counts = depth[0] if lists and isinstance(depth[0], list) else []
    numbers = lists and all(type(one) is int for one in (*counts, *sizes, pixels))
    if not numbers or counts[2:] != [0] or any(one != counts for one in depth) or pixels < 1:
        found = f"DEPTH {depth}, IMG_SIZE {sizes}, IMAGE_SIZE {pixels}"
        raise InputError(
            f"{path}: {printable(found, 200)}: expected sizes in pixels, and equal stages: blocks of both branches,"
            " then 0"
        )
    scales = {"MODEL.IMAGE_SCALES": [size / pixels for size in sizes]}
    return scales | {
        "MODEL.DEPTH": len(depth),
        "MODEL.BRANCH_DEPTHS": counts[:2],
        "MODEL.MLP_RATIO": ratios[:2],
    }


def _of_halonet(settings: _Settings, path: Path) -> _Settings:
    """Translates HaloNet. Its blocks are listed. HIDDEN_CHANNEL is what a stage's first block
    reads, where that attends.
    """
    stages = [settings.pop(f"MODEL.STAGE{stage}_BLOCK") for stage in (1, 2, 3, 4)]
    depths, channels, heads, hidden = (
        settings.pop(f"MODEL.{name}") for name in ("DEPTH", "CHANNEL", "NUM_HEAD", "HIDDEN_CHANNEL")
    )
    every = [_every(stage) for stage in stages if isinstance(stage, list)]
    known = (
        all(isinstance(one, list) for one in (channels, heads))
        and len(channels) == 5
        and channels[0] == 64
    )
    known = (
        known
        and None not in every
        and depths == [len(stage) for stage in stages if isinstance(stage, list)]
    )
    if known:
        begins = [i for i, count in enumerate(every) if count == 1]
        known = all((channels[i + 1] if hidden is None else hidden) == channels[i] for i in begins)
    if not known:
        found = f"STAGE1_BLOCK to 4 {stages}, DEPTH {depths}, CHANNEL {channels}, HIDDEN_CHANNEL {hidden}"
        raise InputError(
            f"{path}: {printable(found, 300)}: expected a stem of 64 channels, and four stages in which every so"
            " many-th block attends (attn)"
        )
    return {
        "MODEL.STAGE_DEPTHS": depths,
        "MODEL.EMBED_DIMS": channels[1:],
        "MODEL.ATTENTION_EVERY": every,
        "MODEL.NUM_HEADS": heads,
    }


def _every(blocks: list[Any]) -> int | None:
    """Returns n where each n-th block attends, and no other; 0: none does; None: there is no such
    n.
    """
    attends = [block == "attn" for block in blocks]
    count = attends.index(True) + 1 if True in attends else 0
    same = attends == [count > 0 and (i + 1) % count == 0 for i in range(len(blocks))]
    return count if same and all(block in ("attn", "bottle") for block in blocks) else None


_BY_KEY: dict[str, Callable[[_Settings, Path], _Settings]] = {
    "EXPANSIONS": _of_mobileone,
    "IMG_SIZE": _of_crossvit,
    "TRANS.IMG_SIZE": _of_crossvit,
    "STAGE1_BLOCK": _of_halonet,
}
