"""Which of timm's names are available, for the pages of the families (docs/models).

tests/golden/make_timm_tags.py stored timm's names in settings/timm_tags.json.
"""

import fnmatch
import functools
from collections.abc import Collection
from typing import NamedTuple

from config import model_files
from settings.names import families, names


class Claim(NamedTuple):
    """Names of timm that belong to families that are shipped.

    Attributes:
        module: timm's file.
        pattern: of the names in it.
        page: the page of docs/models that lists those that aren't available.
    """

    module: str
    pattern: str
    page: str


CLAIMED = [
    Claim("vision_transformer", "*", "vit"),
    Claim("naflexvit", "*", "naflexvit"),
    Claim("deit", "*", "deit"),
    Claim("beit", "*", "beit"),
    Claim("eva", "*", "eva02"),
    Claim("cait", "*", "cait"),
    Claim("xcit", "*", "xcit"),
    Claim("crossvit", "*", "crossvit"),
    Claim("swin_transformer", "*", "swin"),
    Claim("swin_transformer_v2", "*", "swin"),
    Claim("pvt_v2", "*", "pvtv2"),
    Claim("pit", "*", "pit"),
    Claim("volo", "*", "volo"),
    Claim("coat", "*", "coat"),
    Claim("levit", "*", "levit"),
    Claim("tiny_vit", "*", "tinyvit"),
    Claim("hiera", "*", "hiera"),
    Claim("convnext", "*", "convnext"),
    Claim("metaformer", "*", "poolformer"),
    Claim("byobnet", "mobileone*", "mobileone"),
    Claim("mobilevit", "*", "mobilevit"),
    Claim("byoanet", "*halo*", "halonet"),
    Claim("byoanet", "botnet*", "halonet"),
    Claim("mlp_mixer", "*", "mixer"),
    Claim("convmixer", "*", "convmixer"),
    Claim("regnet", "*", "regnet"),
    Claim("resnet", "*", "resnet"),
]


@functools.cache
def folders() -> dict[str, set[str]]:
    """Returns the folders of configs/ that have a model of timm's, by timm's name."""
    found: dict[str, set[str]] = {}
    for file in model_files():
        if name := names(file).get("timm", "").partition(".")[0]:
            found.setdefault(name, set()).add(file.parent.name)
    return found


def claimed() -> dict[str, str]:
    """Returns the page of each claimed name, where it isn't available."""
    return {
        name: claim.page
        for claim in CLAIMED
        for name in families()[claim.module]
        if fnmatch.fnmatchcase(name, claim.pattern)
    }


def of_page(of: Collection[str], page: str) -> tuple[list[str], list[str]]:
    """Returns timm's names that are available, and those that aren't.

    Args:
        of: the folders of configs/ that the page is about.
        page: its name.
    """
    available = sorted(name for name, where in folders().items() if where & set(of))
    missing = [name for name, at in claimed().items() if at == page and name not in folders()]
    return available, missing


def count() -> tuple[int, int]:
    """Returns how many of the claimed names are available, and how many there are."""
    return len(claimed().keys() & folders().keys()), len(claimed())
