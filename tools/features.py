"""Computes features of images by a trained model, and keeps them in a file with an index.

    python tools/features.py CHECKPOINT FOLDER -output FILE.npy

FILE.npy (or FILE.safetensors) has a row for each image, float32, in the images' order. A row is
what the model's classifier reads, or with -layer N an intermediate of it (-1: the last). Beside it
are FILE.csv (or .jsonl), the index: row, file, error; and FILE.json, how they were made, for
tools/search.py. An image that can't be read is a row of NaN, and its error is in the index.
CHECKPOINT is a run's folder (its best), a checkpoint, or its model.safetensors alone. Images are
files, folders (at any depth, sorted), patterns, lists of paths (.txt), or "-", a list on standard
input. Exit status: 0; 1 where an image can't be read; 2 for a wrong command line or input; 143
after SIGTERM, which leaves no file.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a tool is run by its path: only tools/ is there to import from

import launch.startup  # noqa: E402, F401  (signals and streams)
from errors import InputError, reporting  # noqa: E402
from settings.options import Parser  # noqa: E402


def add_model(parser: argparse.ArgumentParser) -> None:
    """Adds what says which model computes which features; tools/search.py takes it, too."""
    parser.add_argument(
        "-cfg",
        "--cfg",
        metavar="MODEL",
        help="the YAML file or name, where the weights don't tell it",
    )
    parser.add_argument(
        "-layer", "--layer", type=int, metavar="N", help="an intermediate; from the end if negative"
    )
    text = "of a layer: the mean of its places, its class token, or all places; default: avg"
    parser.add_argument("-pool", "--pool", choices=("avg", "token", "map"), help=text)
    parser.add_argument(
        "-norm",
        "--norm",
        action="store_true",
        help="apply the model's last norm to a layer it fits",
    )
    parser.add_argument(
        "-batch_size", "--batch_size", type=int, default=32, metavar="N", help="default: 32"
    )
    parser.add_argument(
        "-workers", "--workers", type=int, default=2, metavar="N", help="that load; default: 2"
    )
    parser.add_argument(
        "-o", "--o", nargs="+", action="extend", default=[], metavar="KEY VALUE", help="any keys"
    )


def check(arguments: argparse.Namespace) -> None:
    """Raises InputError for options that don't go together, or numbers out of range."""
    if arguments.layer is None and (arguments.pool or arguments.norm):
        raise InputError(
            "-pool and -norm are of a layer, and none is chosen; give -layer N, or leave them out"
        )
    if arguments.batch_size < 1 or arguments.workers < 0:
        raise InputError("-batch_size is a number from 1 on, -workers one from 0 on")


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="weights that -eval takes, or a run's folder"
    )
    parser.add_argument(
        "inputs", nargs="+", metavar="IMAGES", help="files, folders, patterns, lists (.txt), or -"
    )
    parser.add_argument(
        "-output", "--output", required=True, type=Path, metavar="FILE", help="a new file"
    )
    parser.add_argument(
        "-index", "--index", choices=("csv", "jsonl"), default="csv", help="default: csv"
    )
    add_model(parser)
    arguments = parser.parse_args()
    check(arguments)
    from tqdm import tqdm

    from inference.features import Features, write_features
    from inference.inputs import paths_of, standard_input
    from ops.device import tune_cpu

    tune_cpu(1)
    images = paths_of(arguments.inputs, standard_input())
    chosen = (arguments.layer, arguments.pool or "avg", arguments.norm)
    features = Features(
        arguments.checkpoint, arguments.cfg, arguments.o, arguments.batch_size, *chosen
    )
    with tqdm(total=len(images), unit="image", disable=None, dynamic_ncols=True) as bar:
        made = write_features(
            features, images, arguments.output, arguments.index, arguments.workers, bar.update
        )
    print(
        f"{arguments.output}: {' x '.join(map(str, made['shape']))} float32; {made['failures']} images can't be read"
    )
    return 1 if made["failures"] else 0


if __name__ == "__main__":
    with reporting():
        sys.exit(main())
