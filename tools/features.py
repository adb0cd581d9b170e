"""Computes features of images with a trained model, and writes them to a file with an index.

    python tools/features.py CHECKPOINT FOLDER -output FILE.npy

FILE.npy (or FILE.safetensors) has a float32 row for each image, in the order of the images. A row is
the input of the model's classifier, or with -layer N the output of an intermediate layer (-1: the
last). Two files are written next to it: the index FILE.csv (or .jsonl) with row, file and error, and
FILE.json, which describes the features for tools/search.py. If an image can't be read, its row is
NaN, and the error is in the index.

CHECKPOINT is a run's folder (its best checkpoint is taken), a checkpoint, or its model.safetensors
alone. Images are files, folders (at any depth, sorted), patterns, lists of paths (.txt), or "-" for
a list on standard input. Exit status: 0; 1 if an image can't be read; 2 for a wrong command line or
input; 143 after SIGTERM, which leaves no file.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run by its path, Python would look in tools/ alone

import launch.startup  # noqa: E402, F401  (signals and streams)
from errors import InputError, counted, reporting  # noqa: E402
from settings.parser import Parser  # noqa: E402


def add_model(parser: Parser) -> None:
    """Adds the flags that choose the model and its features; tools/search.py has them, too."""
    parser.add_argument(
        "-cfg",
        "--cfg",
        metavar="MODEL",
        help="the model's YAML file or name, if the weights don't name it",
    )
    parser.add_argument(
        "-layer",
        "--layer",
        type=int,
        metavar="N",
        help="index of an intermediate layer; negative: from the end",
    )
    text = (
        "pooling of a layer: the mean of its positions, its class token, the token and the mean,"
        " or all positions; default: avg. embedding, without a layer: the embedding that CLIP and"
        " SigLIP compare with texts"
    )
    pools = ("avg", "token", "both", "map", "embedding")
    parser.add_argument("-pool", "--pool", choices=pools, help=text)
    parser.add_argument(
        "-norm",
        "--norm",
        action="store_true",
        help="apply the model's last norm to the layer, if it has the same channels",
    )
    parser.add_argument(
        "-batch_size",
        "--batch_size",
        type=int,
        default=32,
        metavar="N",
        help="images per batch; default: 32",
    )
    parser.add_argument(
        "-workers",
        "--workers",
        type=int,
        default=2,
        metavar="N",
        help="data loader workers; default: 2",
    )
    parser.add_keys()


def check(arguments: argparse.Namespace) -> None:
    """Raises InputError if flags don't go together, or a number is out of range."""
    of_layer = arguments.norm or arguments.pool not in (None, "embedding")
    if arguments.layer is None and of_layer:
        raise InputError("-pool and -norm need -layer N; add it, or leave them out")
    if arguments.batch_size < 1 or arguments.workers < 0:
        raise InputError(
            f"-batch_size is {arguments.batch_size}, expected at least 1; -workers is"
            f" {arguments.workers}, expected at least 0"
        )


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="weights that -eval takes, or a run's folder"
    )
    parser.add_argument(
        "inputs", nargs="+", metavar="IMAGES", help="files, folders, patterns, lists (.txt), or -"
    )
    parser.add_argument(
        "-output",
        "--output",
        required=True,
        type=Path,
        metavar="FILE",
        help="the file to create: .npy or .safetensors",
    )
    parser.add_argument(
        "-index",
        "--index",
        choices=("csv", "jsonl"),
        default="csv",
        help="format of the index; default: csv",
    )
    add_model(parser)
    arguments = parser.parse_args()
    check(arguments)
    from tqdm import tqdm

    from inference.feature_store import FeatureExtractor, write_features
    from inference.inputs import paths_of, standard_input
    from ops.device import tune_cpu

    tune_cpu(1)
    images = paths_of(arguments.inputs, standard_input())
    features = FeatureExtractor(
        arguments.checkpoint,
        arguments.cfg,
        arguments.o,
        arguments.batch_size,
        arguments.layer,
        arguments.pool or "avg",
        arguments.norm,
    )
    with tqdm(total=len(images), unit="image", disable=None, dynamic_ncols=True) as bar:
        made = write_features(
            features, images, arguments.output, arguments.index, arguments.workers, bar.update
        )
    shape = " x ".join(map(str, made["shape"]))
    unread = counted(made["failures"], "image")
    print(f"{arguments.output}: {shape} float32; {unread} can't be read")
    return 1 if made["failures"] else 0


if __name__ == "__main__":
    with reporting():
        sys.exit(main())
