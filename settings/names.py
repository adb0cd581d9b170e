"""The names of shipped models here, in timm and in PaddleViT. A model's file has PaddleViT's name,
or timm's if PaddleViT lacks the model. NAMES in it gives both:

``NAMES: {timm: pvt_v2_b1, PaddleViT: pvtv2_b1}`` stands in a model's file. timm's name may have the
tag of its weights, where several files are of one architecture:
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
from settings.options import nearest_model
from settings.paddlevit.absent import absent_name

TOOLKITS = ("timm", "PaddleViT")
_KEYS = [
    f"DATA.{key}"
    for key in (
        "IMAGE_SIZE",
        "CROP_PCT",
        "CROP_MODE",
        "INTERPOLATION",
        "IMAGENET_MEAN",
        "IMAGENET_STD",
    )
]


@functools.cache
def names(file: Path) -> dict[str, str]:
    """Returns what a shipped model is called, by toolkit; a toolkit that hasn't got it is absent."""
    with reading(file, "a configuration"):
        lines = [
            line
            for line in file.read_text(encoding="utf-8").splitlines()
            if line.startswith("NAMES:")
        ]
        return yaml.safe_load(lines[0])["NAMES"] if lines else {}


def matching_file(name: str, files: Sequence[Path]) -> Path | None:
    """Returns the file, of shipped models, that a name means: its own, or another toolkit's; None:
    it is nobody's.

    Of several that timm has under one name, the one without a tag, then the first, is meant. A tag
    is timm's, or the name is nobody's. A name that timm gave up means what timm says:
    ``convnext_base_in22k`` is ``convnext_base.fb_in22k``.
    """
    plain, _, tag = name.partition(".")
    own = {file.stem: file for file in files}
    if name in own:  # without a look into each file, which takes a program's start 0.2 s
        return own[name]
    name = current_name(name)
    plain, _, tag = name.partition(".")
    others = [(told, file) for file in files for told in names(file).values()]
    exact = next((file for told, file in others if told == name), None)
    if exact or (tag and tag not in tags(plain)):
        return exact
    others.sort(key=lambda one: ("." in one[0], one[0]))
    return own.get(plain) or next(
        (file for told, file in others if plain == told.partition(".")[0]), None
    )


def matches(file: Path, pattern: str) -> bool:
    """Returns whether a model's own name, or another toolkit's, matches a shell pattern, in any
    case.
    """
    called = (file.stem, *names(file).values())
    return any(fnmatch.fnmatchcase(one.lower(), pattern.lower()) for one in called)


def tags(name: str) -> list[str]:
    """Returns the tags of the weights that timm has of an architecture, by its name there."""
    return list(_table()["tags"].get(name, ()))


def hub_weights(name: str, file: Path | None) -> str:
    """Returns where timm's weights of a shipped model are: ``hf-hub:timm/NAME.TAG``.

    Args:
        name: as the model was asked for; its tag counts. Without one the file's counts, then timm's
            default.
        file: the model's.

    Raises:
        InputError: timm has no weights of it.
    """
    timm_name = names(file).get("timm", "") if file else ""
    plain, _, tag_of_file = timm_name.partition(".")
    tag_of_name = current_name(name).partition(".")[2]
    known = tags(plain)
    if not known:
        raise InputError(f"timm has no weights of {name}; give pretrained=FILE, or leave it out")
    tag = tag_of_name or tag_of_file or _table()["default"].get(plain, known[0])
    # timm keeps these weights once, whichever GELU their name has.
    return f"hf-hub:timm/{plain.replace('_clip_quickgelu_', '_clip_')}.{tag}"


def images_of(name: str) -> dict[str, Any]:
    """Returns how timm prepares images for the weights NAME.TAG, in keys of DATA; {} where they
    aren't timm's.
    """
    plain, _, tag = current_name(name).partition(".")
    number = _table()["tags"].get(plain, {}).get(tag)
    return {} if number is None else dict(zip(_KEYS, _table()["ways"][number], strict=True))


def current_name(name: str) -> str:
    """Returns what timm calls an architecture, or weights of it, by now; a name that it didn't
    change as it is.
    """
    return _table()["old"].get(name, name)


def families() -> dict[str, list[str]]:
    """Returns the names of timm's architectures, by the file of timm's that makes them."""
    return {family: of.split() for family, of in _table()["names"].items()}


def instead(name: str, files: Sequence[Path]) -> str:
    """Returns how the error about a model's name that means no file goes on: "; did you mean ...?",
    or nothing.

    For a name of timm's or PaddleViT's it says that this variant, or its whole family, isn't here.
    Others get the nearest name.

    Args:
        name: it may be a file's, or have timm's tag of weights.
        files: of the shipped models.
    """
    ours = [file.stem for file in files]
    given = name.rpartition("/")[2].removesuffix(".yaml").removesuffix(".yml")
    if absent := absent_name(given):
        return f": {absent}"
    plain = current_name(given).partition(".")[0]
    family, others = next(((one, of) for one, of in families().items() if plain in of), ("", []))
    here = [other for other in others if matching_file(other, files)]
    if not family or plain in here:
        return nearest_model(name, ours)
    if not here:
        return f"; timm's {family} isn't here, docs/architectures.md lists what is"
    near = difflib.get_close_matches(plain, here, 3, 0.0)
    count = f"{len(here)} of the {len(others)} names of timm's {family}"
    return f"; {count} are here, this one isn't; the nearest are {', '.join(near)}"


@functools.cache
def _table() -> dict[str, Any]:
    file = Path(__file__).with_name("timm_tags.json")
    with reading(file, "timm's tags"):
        return json.loads(file.read_text(encoding="utf-8"))
