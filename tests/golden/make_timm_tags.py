"""Writes configs/timm_tags.json: how timm 1.0.31 prepares images for each of its weights, by architecture and tag.

PYTHONPATH=. python tests/golden/make_timm_tags.py     # with torch, timm and yacs

Of architectures that configs/ has under timm's name. ``ways`` holds each way once: image size, crop_pct, crop_mode,
interpolation, mean and std; ``tags`` the number of a tag's way. Of several tags ``default`` has the one that timm takes
for the name alone.
"""

import json
from pathlib import Path

from config import model_files
from configs.names import names
from tools.timm_reference import timm


def way(tagged: str) -> list:
    found = timm.get_pretrained_cfg(tagged)
    side = found.input_size[1]
    return [side, found.crop_pct, found.crop_mode, found.interpolation, list(found.mean), list(found.std)]


if __name__ == "__main__":
    known = sorted({names(file)["timm"].partition(".")[0] for file in model_files() if "timm" in names(file)})
    ways, tags = [], {}
    for name in known:
        for tagged in timm.list_pretrained(f"{name}.*"):
            one = way(tagged)
            ways += [] if one in ways else [one]
            tags.setdefault(name, {})[tagged.partition(".")[2]] = ways.index(one)
    lines = [f'"{name}": {json.dumps(of)}' for name, of in tags.items()]
    several = [name for name, of in tags.items() if len(of) > 1]
    chosen = [f'"{name}": {json.dumps(timm.get_pretrained_cfg(name).tag)}' for name in several]
    text = '{"ways": [\n' + ",\n".join(map(json.dumps, ways)) + '\n],\n"tags": {\n' + ",\n".join(lines)
    text += '\n},\n"default": {\n' + ",\n".join(chosen) + "\n}}\n"
    (Path(__file__).resolve().parents[2] / "configs" / "timm_tags.json").write_text(text)
