"""Finds the images most like one: the nearest by the cosine of their features.

    python tools/search.py QUERY FOLDER -checkpoint CHECKPOINT [-top 10] [-grid FILE.png]
    python tools/search.py QUERY FEATURES.npy [-top 10] [-grid FILE.png]

QUERY is an image. FEATURES is what tools/features.py wrote; it tells the model, whose weights have
to be the same still, and its images aren't read again. A folder's images are taken at any depth.
The query's own file isn't listed. The table has a row for each neighbour, the nearest first:
similarity (1: the same direction) and file; -grid draws them. Exit status: 0; 1 where an image of
the folder can't be read; 2 for a wrong command line or input.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a tool is run by its path: only tools/ is there to import from

import launch.startup  # noqa: E402, F401  (signals and streams)
from errors import InputError, printable, reporting  # noqa: E402
from settings.options import Parser  # noqa: E402
from tools.features import add_model, check  # noqa: E402


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("query", metavar="QUERY", help="an image")
    parser.add_argument("where", metavar="FOLDER|FEATURES", help="a folder of images, or features")
    parser.add_argument(
        "-checkpoint",
        "--checkpoint",
        metavar="CHECKPOINT",
        help="weights: for a folder, or where they are now",
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
    neighbours, errors, oriented = (_in_folder if Path(arguments.where).is_dir() else _in_features)(
        arguments
    )
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
    from inference.features import Features
    from inference.inputs import paths_of
    from inference.search import in_images

    if arguments.checkpoint is None:
        raise InputError("a folder's features are computed by a model; give -checkpoint")
    chosen = (arguments.layer, arguments.pool or "avg", arguments.norm)
    features = Features(
        arguments.checkpoint, arguments.cfg, arguments.o, arguments.batch_size, *chosen
    )
    images = paths_of([arguments.where])
    found = in_images(features, arguments.query, images, arguments.top, arguments.workers)
    return *found, features.made["oriented"]


def _in_features(arguments: argparse.Namespace) -> tuple[list, list[str], bool]:
    from inference.features import stored_features
    from inference.search import nearest_in

    if arguments.layer is not None or arguments.cfg or arguments.o:
        raise InputError(
            "the features tell their model and layer themselves; leave out -cfg, -layer and -o"
        )
    stored = stored_features(Path(arguments.where))
    neighbours = nearest_in(stored, arguments.query, arguments.top, arguments.checkpoint, _tell)
    return neighbours, [], stored.made.get("oriented", False)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    with reporting():
        sys.exit(main())
