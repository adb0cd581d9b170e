"""Finds the images most like a given one, by the cosine similarity of their features.

    python tools/search.py QUERY FOLDER -checkpoint CHECKPOINT [-top 10] [-grid FILE.png]
    python tools/search.py QUERY FEATURES.npy [-top 10] [-grid FILE.png]

QUERY is an image. It is compared with the images of FOLDER, at any depth, or with features that
tools/features.py wrote. Such a file names its model, whose weights must not have changed since. Its
images aren't read again.

The table has a row for each neighbour, the nearest first: similarity (1: the same direction) and
file. The query's own file isn't listed. -grid draws the neighbours. Exit status: 0; 1 if an image
of the folder can't be read; 2 for a wrong command line or input.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run by its path, Python would look in tools/ alone

import launch.startup  # noqa: E402, F401  (signals and streams)
from errors import InputError, printable, reporting  # noqa: E402
from settings.parser import Parser  # noqa: E402
from tools.features import add_model, check  # noqa: E402


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("query", metavar="QUERY", help="an image")
    parser.add_argument("where", metavar="FOLDER|FEATURES", help="a folder of images, or features")
    parser.add_argument(
        "-checkpoint",
        "--checkpoint",
        metavar="CHECKPOINT",
        help="the model; of FEATURES: where its weights are now",
    )
    parser.add_argument(
        "-top", "--top", type=int, default=10, metavar="N", help="neighbours; default: 10"
    )
    parser.add_argument("-grid", "--grid", type=Path, metavar="FILE.png", help="a picture of them")
    add_model(parser)
    arguments = parser.parse_args()
    check(arguments)
    if arguments.top < 1:
        raise InputError(f"-top is {arguments.top}, expected a number from 1 on")
    if arguments.grid and arguments.grid.suffix.lower() != ".png":
        raise InputError(f"{arguments.grid}: the grid is a PNG; give it the ending .png")
    from inference.inputs import check_output
    from inference.search import write_grid
    from ops.device import tune_cpu

    check_output(arguments.grid, (arguments.query, arguments.where))
    tune_cpu(1)
    search = _in_folder if Path(arguments.where).is_dir() else _in_features
    neighbours, errors, oriented = search(arguments)
    print("similarity  file")
    for name, similarity in neighbours:
        print(f"{similarity:10.4f}  {printable(name, 4000)}")
    for error in errors:
        print(error, file=sys.stderr)
    if arguments.grid:
        unseen = write_grid(arguments.query, neighbours, arguments.grid, oriented)
        if unseen:
            which = f"{len(unseen)} of its {len(neighbours) + 1} images"
            print(
                f"{arguments.grid}: {which} can't be read, the first: {unseen[0]}", file=sys.stderr
            )
    return 1 if errors else 0


def _in_folder(arguments: argparse.Namespace) -> tuple[list, list[str], bool]:
    """Returns (file, similarity) of the neighbours, the errors of images that can't be read, and
    whether images were turned as their EXIF data says.
    """
    from inference.feature_store import FeatureExtractor
    from inference.inputs import paths_of
    from inference.search import in_images

    if arguments.checkpoint is None:
        raise InputError("a folder's features are computed by a model; give -checkpoint")
    features = FeatureExtractor(
        arguments.checkpoint,
        arguments.cfg,
        arguments.o,
        arguments.batch_size,
        arguments.layer,
        arguments.pool or "avg",
        arguments.norm,
    )
    images = paths_of([arguments.where])
    neighbours, errors = in_images(
        features, arguments.query, images, arguments.top, arguments.workers
    )
    return neighbours, errors, features.made["oriented"]


def _in_features(arguments: argparse.Namespace) -> tuple[list, list[str], bool]:
    """Returns the same as ``_in_folder``, from a file of features."""
    from inference.feature_store import open_features
    from inference.search import nearest_in

    if arguments.layer is not None or arguments.cfg or arguments.o:
        raise InputError(
            "a file of features names its model and layer; leave out -cfg, -layer and -o"
        )
    stored = open_features(Path(arguments.where))
    neighbours = nearest_in(stored, arguments.query, arguments.top, arguments.checkpoint, _tell)
    return neighbours, [], stored.made.get("oriented", False)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    with reporting():
        sys.exit(main())
