"""Writes settings/timm_tags.json: timm 1.0.31's names, its weights, and how it prepares images for
each of them.

PYTHONPATH=. python tests/golden/make_timm_tags.py     # with torch, timm and yacs

``names`` has all architectures' names by the file of timm's that makes them, without its own tests'
(``test_*``); ``old`` what timm calls by another name now. ``ways`` holds each way to prepare images
once: image size, crop_pct, crop_mode, interpolation, mean and std; ``tags`` the number of a tag's
way, of architectures that configs/ has under timm's name. Of several tags ``default`` has the one
that timm takes for the name alone.
"""

import json
from pathlib import Path

from config import model_files
from settings.names import names
from tools.benchmarks.timm_reference import timm


def way(tagged: str) -> list:
    found = timm.get_pretrained_cfg(tagged)
    side = found.input_size[1]
    return [
        side,
        found.crop_pct,
        found.crop_mode,
        found.interpolation,
        list(found.mean),
        list(found.std),
    ]


def rows(table: dict) -> str:
    return "{\n" + ",\n".join(f'"{name}": {json.dumps(of)}' for name, of in table.items()) + "\n}"


if __name__ == "__main__":
    registry = timm.models._registry
    old = dict(sorted(registry._deprecated_models.items()))
    # of some tags that it tells for old names it has none any more
    weights = set(timm.list_pretrained())
    old = {name: now if now in weights else now.partition(".")[0] for name, now in old.items()}
    made = {
        module: [name for name in sorted(of) if name not in old and not name.startswith("test_")]
        for module, of in sorted(registry._module_to_models.items())
    }
    known = sorted(
        {names(file)["timm"].partition(".")[0] for file in model_files() if "timm" in names(file)}
    )
    ways = []
    tags = {}
    for name in known:
        for tagged in timm.list_pretrained(f"{name}.*"):
            one = way(tagged)
            ways += [] if one in ways else [one]
            tags.setdefault(name, {})[tagged.partition(".")[2]] = ways.index(one)
    several = [name for name, of in tags.items() if len(of) > 1]
    default = {name: timm.get_pretrained_cfg(name).tag for name in several}
    families = {module: " ".join(of) for module, of in made.items() if of}
    text = '{"ways": [\n' + ",\n".join(map(json.dumps, ways)) + f'\n],\n"tags": {rows(tags)},\n'
    text += f'"default": {rows(default)},\n"names": {rows(families)},\n"old": {rows(old)}\n}}\n'
    (Path(__file__).resolve().parents[2] / "settings" / "timm_tags.json").write_text(text)
