"""Lists the shipped models: parameters, GMACs, images, names in timm and PaddleViT, source.

    python tools/list_models.py ["vit_*_384"]
    python tools/list_models.py -family convnext -most 30
    python tools/list_models.py --keys vit_base_patch16_224

GMACs are billions of multiply-adds of one image's forward pass, each counted once, as in timm's
results. Papers often call the same number FLOPs. models/costs.py says what is counted, and
tools/model_info.py shows the costs of each layer. "=" stands for the name in the first column.
--keys lists the keys of MODEL that a model's architecture takes.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run by its path, Python would look in tools/ alone

import launch.startup  # noqa: E402, F401  (signals and streams)
from errors import InputError, reporting  # noqa: E402  (first: it says what isn't installed)

# isort: split
from config import get_config, model_files, segmentation_files  # noqa: E402
from settings.names import TOOLKITS, instead, matches, names  # noqa: E402
from settings.parser import Parser  # noqa: E402

# What the error says of models whose costs aren't counted.
_OF_SEGMENTATION = "segmentation models aren't listed; see docs/guides/segmentation.md"
TABLE = ROOT / "settings" / "costs.json"


def content(file: Path) -> str:
    """Returns a digest of a model's file without comments. If it differs from the stored one, the
    costs are computed again.
    """
    keys = [line for line in file.read_bytes().splitlines() if not line.startswith(b"#")]
    return hashlib.sha256(b"\n".join(keys)).hexdigest()[:12]


def cost_row(file: Path) -> dict[str, Any]:
    """Returns a row of settings/costs.json: ``content``, ``parameters``, ``macs`` (multiply-adds),
    ``images`` (C, H, W).

    The model is traced and not run, which takes a fraction of a second.
    """
    from models.costs import cost

    costs = cost(get_config(file))
    return {
        "content": content(file),
        "parameters": costs.parameters,
        "macs": costs.macs,
        "images": list(costs.images),
    }


def describe(file: Path) -> dict[str, Any]:
    """Returns the row of ``cost_row``, with ``name``, ``source`` and the names in TOOLKITS."""
    stored = json.loads(TABLE.read_text(encoding="utf-8")).get(file.stem)
    if stored is None or stored["content"] != content(file):
        stored = cost_row(file)
    first = file.read_text(encoding="utf-8").partition("\n")[0]
    name_in = {toolkit: names(file).get(toolkit, "-") for toolkit in TOOLKITS}
    shown = {toolkit: "=" if name == file.stem else name for toolkit, name in name_in.items()}
    return stored | shown | {"name": file.stem, "source": first.partition(": ")[2].rstrip(".")}


def chosen_rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the rows of the models that the command line chooses.

    Raises:
        InputError: it chooses none.
    """
    files = model_files()
    families = sorted({file.parent.name for file in files})
    if arguments.family == "segmentation":
        raise InputError(f"{_OF_SEGMENTATION}: {', '.join(f.stem for f in segmentation_files())}")
    if arguments.family not in (None, *families):
        raise InputError(f"no family {arguments.family!r}; there are {', '.join(families)}")
    chosen = [file for file in files if matches(file, arguments.pattern)]
    of_pixels = [f.stem for f in segmentation_files() if matches(f, arguments.pattern)]
    if of_pixels and not chosen:
        raise InputError(f"{_OF_SEGMENTATION}: {', '.join(of_pixels)}")
    if not chosen:
        patterns = (f"{arguments.pattern}*", f"*{arguments.pattern}*")
        wider = [wide for wide in patterns if any(matches(file, wide) for file in files)]
        hint = f"; did you mean {wider[0]!r}?" if wider else instead(arguments.pattern, files)
        raise InputError(
            f"no model matches {arguments.pattern!r}{hint};"
            f" without a pattern all {len(files)} are listed"
        )
    rows = [describe(file) for file in chosen if arguments.family in (None, file.parent.name)]
    rows = [row for row in rows if not arguments.source or row[arguments.source] != "-"]
    least = 1e6 * arguments.least
    most = 1e6 * arguments.most
    rows = [row for row in rows if least <= row["parameters"] <= most]
    if not rows:
        raise InputError("no model meets all of these conditions; leave one out")
    return rows


def print_keys(name: str) -> None:
    """Prints the keys of MODEL that a model's architecture takes: type, default, the model's value,
    meaning.
    """
    from settings.architectures import architecture

    model = get_config(name).MODEL
    rows = [("key", "takes", "default", "here", "")]
    for key, argument in sorted(architecture(model.TYPE).arguments.items()):
        value = model[key.removeprefix("MODEL.")]
        rows.append((key, argument.takes, argument.default, value, argument.text))
    print_table(rows)


def print_table(rows: list[tuple]) -> None:
    """Prints rows as a table. All columns but the last are padded to the widest cell."""
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
        help="a shell pattern of names: this toolkit's, timm's or PaddleViT's",
    )
    parser.add_argument("-keys", "--keys", metavar="NAME", help="a model, or its YAML file")
    parser.add_argument("-family", "--family", help="a folder of configs/")
    parser.add_argument(
        "-source", "--source", choices=TOOLKITS, help="only models that this toolkit also provides"
    )
    parser.add_argument(
        "-least",
        "--least",
        type=float,
        default=0,
        metavar="M",
        help="at least M million parameters",
    )
    parser.add_argument(
        "-most", "--most", type=float, default=1e6, metavar="M", help="at most M million parameters"
    )
    arguments = parser.parse_args()
    if arguments.keys:
        print_keys(arguments.keys)
        return
    rows = [("name", "parameters", "GMACs", "images", *TOOLKITS, "source")]
    for row in chosen_rows(arguments):
        parameters = f"{row['parameters']:13,}"
        gmacs = f"{row['macs'] / 1e9:7.2f}"
        images = " x ".join(map(str, row["images"]))
        names_in = [row[toolkit] for toolkit in TOOLKITS]
        rows.append((row["name"], parameters, gmacs, images, *names_in, row["source"]))
    print_table(rows)


if __name__ == "__main__":
    with reporting():
        main()
