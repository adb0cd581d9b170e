"""Lists the shipped models: name, parameters, GFLOPs, images, source.

    python tools/list_models.py ["vit_*_384"]
    python tools/list_models.py --keys vit_base_patch16_224

GFLOPs are billions of multiply-adds of one image's forward pass, as papers and timm count them (models/costs.py says
what is counted; tools/model_info.py tells more of one model). --keys lists the keys of MODEL that the architecture of a
model takes.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a tool is run by its path: only tools/ is there to import from

import launch.startup  # noqa: E402, F401  (streams)
from errors import InputError, reported  # noqa: E402


def describe(name: str) -> dict[str, Any]:
    """Returns ``name``, ``parameters``, ``macs`` (multiply-adds of one image), ``images`` (C, H, W) and ``source``.

    The model is traced, not run: a fraction of a second.
    """
    from config import find_config, get_config
    from models.costs import cost

    found = cost(get_config(name))
    first = find_config(name).read_text(encoding="utf-8").partition("\n")[0]
    source = first.partition(": ")[2].rstrip(".")
    told = {"name": name, "parameters": found.parameters, "macs": found.macs}
    return told | {"images": found.images, "source": source}


def print_keys(name: str) -> None:
    """Prints the keys of MODEL that a model's architecture takes: type, default, its own value, meaning."""
    from config import get_config
    from configs.architectures import architecture

    model = get_config(name).MODEL
    rows = [("key", "takes", "default", "here", "")]
    for key, argument in sorted(architecture(model.TYPE).arguments.items()):
        rows.append((key, argument.takes, argument.default, model[key.removeprefix("MODEL.")], argument.text))
    widths = [max(len(str(row[column])) for row in rows) for column in range(4)]
    for row in rows:
        cells = [f"{cell!s:{width}}" for cell, width in zip(row, widths, strict=False)]
        print("  ".join([*cells, row[-1]]).rstrip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pattern", nargs="?", default="*", help="a shell pattern of names")
    parser.add_argument("-keys", "--keys", metavar="NAME", help="a model, or its YAML file")
    arguments = parser.parse_args()
    pattern = arguments.pattern
    if arguments.keys:
        print_keys(arguments.keys)
        return
    from models import list_models
    from options import nearest_model

    names = list_models(pattern)
    if not names:
        wider = next(
            (f"; did you mean '{wide}'?" for wide in (f"{pattern}*", f"*{pattern}*") if list_models(wide)), None
        )
        wider = wider or nearest_model(pattern, list_models())
        raise InputError(f"no model matches {pattern!r}{wider}; without a pattern all {len(list_models())} are listed")
    width = max(map(len, names))
    print(f"{'name':{width}}  {'parameters':>13}  {'GFLOPs':>7}  {'images':>13}  source")
    for name in names:
        found = describe(name)
        images = "{} x {} x {}".format(*found["images"])
        print(f"{name:{width}}  {found['parameters']:13,}  {found['macs'] / 1e9:7.2f}  {images:>13}  {found['source']}")


if __name__ == "__main__":
    with reported():
        main()
