"""The names of shipped models: this toolkit's, timm's and PaddleViT's.

A model's file has PaddleViT's name, or timm's if PaddleViT lacks the model. Where the names differ,
a line of the file says so:

``NAMES: {timm: pvt_v2_b1, PaddleViT: pvtv2_b1}``

timm's name may have the tag of weights, if several files are of one architecture:
``convnext_base.fb_in22k_ft_in1k_384``. timm_tags.json has timm's names and tags, and how images are
prepared for the weights (tests/golden/make_timm_tags.py writes it).
"""

import difflib
import fnmatch
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from errors import InputError, reading
from settings.suggestions import nearest_model

TOOLKITS = ("timm", "PaddleViT")
WEIGHT_SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".pdparams", ".npz")
# The keys of which timm_tags.json has values, in their order there.
_IMAGE_KEYS = (
    "DATA.IMAGE_SIZE",
    "DATA.CROP_PCT",
    "DATA.CROP_MODE",
    "DATA.INTERPOLATION",
    "DATA.IMAGENET_MEAN",
    "DATA.IMAGENET_STD",
)


@functools.cache
def names(file: Path) -> dict[str, str]:
    """Returns the names of a shipped model, by toolkit. A toolkit that lacks the model is absent."""
    with reading(file, "a configuration"):
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.startswith("NAMES:"):
                return yaml.safe_load(line)["NAMES"]
        return {}


def matching_file(name: str, files: Sequence[Path]) -> Path | None:
    """Returns the file of the shipped model that a name means, or None if it means none.

    A model's own name comes first, then another toolkit's. If timm has one name for several files,
    the file without a tag is meant, or else the first one. A name with a tag that timm doesn't have
    means no file. A name that timm gave up means what timm says: ``convnext_base_in22k`` is
    ``convnext_base.fb_in22k``.

    Args:
        files: of the shipped models.
    """
    by_name = {file.stem: file for file in files}
    # This comes first, because to look into each file takes 0.2 s of a program's start.
    if name in by_name:
        return by_name[name]
    name = current_name(name)
    plain, _, tag = name.partition(".")
    others = [(other, file) for file in files for other in names(file).values()]
    for other, file in others:
        if other == name:
            return file
    if tag and tag not in tags(plain):
        return None
    if plain in by_name:
        return by_name[plain]
    others.sort(key=lambda entry: ("." in entry[0], entry[0]))
    for other, file in others:
        if other.partition(".")[0] == plain:
            return file
    return None


def matches(file: Path, pattern: str) -> bool:
    """Returns whether any toolkit's name of a model matches a shell pattern, in any case."""
    lowered = [name.lower() for name in (file.stem, *names(file).values())]
    return any(fnmatch.fnmatchcase(name, pattern.lower()) for name in lowered)


def tags(name: str) -> list[str]:
    """Returns the tags of the weights that timm has of an architecture, by timm's name of it."""
    return list(_table()["tags"].get(name, ()))


def hub_weights(name: str, file: Path | None) -> str:
    """Returns where timm's weights of a shipped model are: ``hf-hub:timm/NAME.TAG``.

    Args:
        name: of the model, as it was requested. The tag is this name's, or else the file's, or else
            timm's default.
        file: the model's.

    Raises:
        InputError: timm has no weights of it.
    """
    timm_name = names(file).get("timm", "") if file else ""
    plain, _, tag_of_file = timm_name.partition(".")
    tag_of_name = current_name(name).partition(".")[2]
    known = tags(plain)
    if not known:
        raise InputError(f"timm has no weights of {name}; pass pretrained=FILE, or leave it out")
    tag = tag_of_name or tag_of_file or _table()["default"].get(plain, known[0])
    # timm stores these weights once, under the name with the usual GELU.
    return f"hf-hub:timm/{plain.replace('_clip_quickgelu_', '_clip_')}.{tag}"


def images_of(name: str) -> dict[str, Any]:
    """Returns how timm prepares images for the weights NAME.TAG, in keys of DATA.

    It is {} for weights that aren't timm's.
    """
    table = _table()
    plain, _, tag = current_name(name).partition(".")
    number = table["tags"].get(plain, {}).get(tag)
    if number is None:
        return {}
    return dict(zip(_IMAGE_KEYS, table["ways"][number], strict=True))


def current_name(name: str) -> str:
    """Returns timm's present name for one that timm gave up; any other name as it is."""
    return _table()["old"].get(name, name)


def families() -> dict[str, list[str]]:
    """Returns the names of timm's architectures, by the module of timm that defines them."""
    return {family: members.split() for family, members in _table()["names"].items()}


def instead(name: str, files: Sequence[Path]) -> str:
    """Returns the end of the error about a model's name that means no file: advice, or "".

    If the name is timm's, the advice says that this variant, or its whole family, isn't included.
    Otherwise it is the nearest name.

    Args:
        name: a model's, also with timm's tag of weights, or that of a file.
        files: of the shipped models.
    """
    given = name.rpartition("/")[2].removesuffix(".yaml").removesuffix(".yml")
    plain = current_name(given).partition(".")[0]
    family = next((family for family, members in families().items() if plain in members), None)
    members = families()[family] if family else []
    here = [member for member in members if matching_file(member, files)]
    if family is None or plain in here:
        return nearest_model(name, [file.stem for file in files])
    if not here:
        return f"; timm's {family} isn't included, docs/models/index.md lists the models that are"
    near = difflib.get_close_matches(plain, here, 3, 0.0)
    count = f"{len(here)} of the {len(members)} names of timm's {family}"
    return f"; {count} are included, but not this one; the nearest are {', '.join(near)}"


@functools.cache
def _table() -> dict[str, Any]:
    """Returns the content of timm_tags.json.

    - "tags": for each architecture, the number of the way in which images are prepared, by tag.
    - "ways": for each number, the values of _IMAGE_KEYS.
    - "default": of an architecture with several tags, that of its default weights.
    - "old": the present names, by the names that timm gave up.
    - "names": the names of the architectures in one text, by the module that defines them.
    """
    file = Path(__file__).with_name("timm_tags.json")
    with reading(file, "timm's tags"):
        return json.loads(file.read_text(encoding="utf-8"))
