"""Lists the shipped models: name, parameters, GFLOPs, images, timm's and PaddleViT's names, source.

    python tools/list_models.py ["vit_*_384"]
    python tools/list_models.py -family convnext -most 30
    python tools/list_models.py --keys vit_base_patch16_224

GFLOPs are billions of multiply-adds of one image's forward pass, as papers and timm count them.
(models/costs.py says what is counted; tools/model_info.py tells more of one model.) "=" stands for
the name in the first column. --keys lists the keys of MODEL that the architecture of a model takes.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a tool is run by its path: only tools/ is there to import from

import launch.startup  # noqa: E402, F401  (signals and streams)
from errors import InputError, reporting  # noqa: E402  (first: it says what isn't installed)

# isort: split
from config import get_config, model_files  # noqa: E402
from settings.names import TOOLKITS, instead, matches, names  # noqa: E402
from settings.options import Parser  # noqa: E402

TABLE = ROOT / "settings" / "costs.json"


def content(file: Path) -> str:
    """Returns a digest of a model's keys, without comments: the costs of another content are
    computed anew.
    """
    keys = [line for line in file.read_bytes().splitlines() if not line.startswith(b"#")]
    return hashlib.sha256(b"\n".join(keys)).hexdigest()[:12]


def cost_row(file: Path) -> dict[str, Any]:
    """Returns a row of settings/costs.json: ``content``, ``parameters``, ``macs``, ``images`` (C,
    H, W).

    The model is traced, not run: a fraction of a second.
    """
    from models.costs import cost

    found = cost(get_config(file))
    row = {"content": content(file), "parameters": found.parameters, "macs": found.macs}
    return row | {"images": list(found.images)}


def describe(file: Path) -> dict[str, Any]:
    """Returns ``cost_row``'s row, ``name``, ``source`` and what the toolkits call a shipped model."""
    stored = json.loads(TABLE.read_text(encoding="utf-8")).get(file.stem)
    if stored is None or stored["content"] != content(file):
        stored = cost_row(file)
    first = file.read_text(encoding="utf-8").partition("\n")[0]
    called = {toolkit: names(file).get(toolkit, "-") for toolkit in TOOLKITS}
    own = {toolkit: "=" if name == file.stem else name for toolkit, name in called.items()}
    return stored | own | {"name": file.stem, "source": first.partition(": ")[2].rstrip(".")}


def chosen_rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the rows of the models that were asked for.

    Raises:
        InputError: there are none.
    """
    files = model_files()
    families = sorted({file.parent.name for file in files})
    if arguments.family not in (None, *families):
        raise InputError(f"no family {arguments.family!r}; there are {', '.join(families)}")
    found = [file for file in files if matches(file, arguments.pattern)]
    if not found:
        patterns = (f"{arguments.pattern}*", f"*{arguments.pattern}*")
        wider = [wide for wide in patterns if any(matches(file, wide) for file in files)]
        hint = f"; did you mean {wider[0]!r}?" if wider else instead(arguments.pattern, files)
        raise InputError(
            f"no model matches {arguments.pattern!r}{hint}; without a pattern all {len(files)} are listed"
        )
    rows = [describe(file) for file in found if arguments.family in (None, file.parent.name)]
    rows = [row for row in rows if not arguments.source or row[arguments.source] != "-"]
    least = 1e6 * arguments.least
    most = 1e6 * arguments.most
    rows = [row for row in rows if least <= row["parameters"] <= most]
    if not rows:
        raise InputError("no model fits all of that; leave a condition out")
    return rows


def print_keys(name: str) -> None:
    """Prints the keys of MODEL that a model's architecture takes: type, default, its own value,
    meaning.
    """
    from settings.architectures import architecture

    model = get_config(name).MODEL
    rows = [("key", "takes", "default", "here", "")]
    for key, argument in sorted(architecture(model.TYPE).arguments.items()):
        rows.append(
            (
                key,
                argument.takes,
                argument.default,
                model[key.removeprefix("MODEL.")],
                argument.text,
            )
        )
    print_table(rows)


def print_table(rows: list[tuple]) -> None:
    """Prints rows below each other; the last column has any width."""
    widths = [max(len(str(row[column])) for row in rows) for column in range(len(rows[0]) - 1)]
    for row in rows:
        cells = [f"{cell!s:{width}}" for cell, width in zip(row, widths, strict=False)]
        print("  ".join([*cells, row[-1]]).rstrip())


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument(
        "pattern",
        nargs="?",
        default="*",
        help="a shell pattern of names: ours, timm's or PaddleViT's",
    )
    parser.add_argument("-keys", "--keys", metavar="NAME", help="a model, or its YAML file")
    parser.add_argument("-family", "--family", help="a folder of configs/")
    parser.add_argument(
        "-source", "--source", choices=TOOLKITS, help="models that this toolkit has, too"
    )
    parser.add_argument(
        "-least", "--least", type=float, default=0, metavar="M", help="million parameters at least"
    )
    parser.add_argument(
        "-most", "--most", type=float, default=1e6, metavar="M", help="million parameters at most"
    )
    arguments = parser.parse_args()
    if arguments.keys:
        print_keys(arguments.keys)
        return
    rows = [("name", "parameters", "GFLOPs", "images", *TOOLKITS, "source")]
    for row in chosen_rows(arguments):
        sizes = (
            f"{row['parameters']:13,}",
            f"{row['macs'] / 1e9:7.2f}",
            "{} x {} x {}".format(*row["images"]),
        )
        rows.append((row["name"], *sizes, *(row[toolkit] for toolkit in TOOLKITS), row["source"]))
    print_table(rows)


if __name__ == "__main__":
    with reporting():
        main()
