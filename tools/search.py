"""Finds the images that are most similar to a query, by the cosine similarity of their features, and
manages indexes of images.

    python tools/search.py QUERY ... FOLDER -checkpoint CHECKPOINT [-top 10] [-grid FILE.png]
    python tools/search.py QUERY ... FILE.index [-top 10] [-faiss hnsw] [-grid FILE.png]
    python tools/search.py -index FILE.index FOLDER ... -checkpoint CHECKPOINT
    python tools/search.py -index FILE.index -remove PATH ...
    python tools/search.py -index FILE.index -list
    python tools/search.py -metrics FILE.index

QUERY is an image or its URL. For CLIP and SigLIP it may be a text, such as "a red flower" (an index
for texts needs -pool embedding). It is compared with the images in FOLDER, in an index, or in the
features that tools/features.py wrote (FILE.npy). An index and a file of features name their model,
whose weights must not have changed since. Their images aren't read again.

The table has a row for each neighbour, the most similar first: similarity (at most 1) and file. The
query itself isn't listed. Several queries give several tables. -grid draws the neighbours of one
query.

-index creates an index of the images in folders, or adds the images that it lacks. Images are
identified by their path. -remove takes images, folders with all that is in them, or patterns. -metrics
prints Recall@K and mean average precision, where the class of an image is its folder.

-faiss searches with FAISS: exactly (flat), or approximately and faster (hnsw, ivf). The share of exact
neighbours that were found is printed. Its structure is built for each command, which pays off for
hundreds of queries.

Exit status: 0; 1 if an image of a folder can't be read; 2 for a wrong command line or input.
"""

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run by its path, Python would look in tools/ alone

import launch.startup  # noqa: E402, F401  (signals and streams)
from errors import InputError, counted, printable, reporting  # noqa: E402
from settings.parser import Parser  # noqa: E402
from tools.features import add_model, check  # noqa: E402

if TYPE_CHECKING:
    from inference.feature_store import FeatureExtractor

# The K of Recall@K, as papers report them.
KS = (1, 2, 4, 8)
# The queries of which -faiss compares the neighbours with the exact ones.
COMPARED = 100


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        help="images, then a folder, an index or features; with -index: folders or images",
    )
    parser.add_argument(
        "-checkpoint",
        "--checkpoint",
        metavar="CHECKPOINT",
        help="the model; for an index or features: the current path of its weights",
    )
    parser.add_argument(
        "-top", "--top", type=int, default=10, metavar="N", help="number of neighbours; default: 10"
    )
    parser.add_argument(
        "-grid", "--grid", type=Path, metavar="FILE.png", help="draw the images that were found"
    )
    parser.add_argument(
        "-faiss", "--faiss", choices=("flat", "hnsw", "ivf"), help="search by FAISS"
    )
    parser.add_argument(
        "-index", "--index", type=Path, metavar="FILE.index", help="create or change this index"
    )
    parser.add_argument(
        "-remove", "--remove", nargs="+", metavar="PATH", help="remove images from the index"
    )
    parser.add_argument(
        "-list", "--list", action="store_true", help="print the images of the index"
    )
    parser.add_argument(
        "-metrics",
        "--metrics",
        action="store_true",
        help="measure how well images of the same folder are found",
    )
    add_model(parser)
    arguments = parser.parse_args()
    check(arguments)
    _check(arguments)
    from ops.device import tune_cpu

    tune_cpu(1)
    if arguments.index:
        return _change(arguments)
    if arguments.metrics:
        return _measure(arguments)
    return _search(arguments)


def _check(arguments: argparse.Namespace) -> None:
    """Raises InputError if flags don't go together."""
    paths = len(arguments.paths)
    if arguments.top < 1:
        raise InputError(f"-top is {arguments.top}, expected a number of at least 1")
    if arguments.grid and arguments.grid.suffix.lower() != ".png":
        raise InputError(f"{arguments.grid}: the grid is a PNG; use the ending .png")
    if (arguments.remove or arguments.list) and not arguments.index:
        raise InputError("-remove and -list need the index; add -index FILE.index")
    if arguments.index or arguments.metrics:
        if arguments.grid or arguments.faiss:
            raise InputError("-grid and -faiss are for a search; leave out -index and -metrics")
        tasks = [arguments.remove, arguments.list, arguments.metrics, arguments.index and paths]
        if sum(map(bool, tasks)) != 1:
            raise InputError(
                "-index takes either images to add, or -remove PATH ..., or -list; pass one of these"
            )
        if arguments.metrics and paths != 1:
            raise InputError(f"-metrics takes an index or a file of features, found {paths} paths")
        return
    if paths < 2:
        raise InputError(
            f"expected a query and where to search it, found {counted(paths, 'path')}; see -h"
        )
    if arguments.grid and paths > 2:
        raise InputError(f"-grid draws the neighbours of one query, found {paths - 1} queries")


def _change(arguments: argparse.Namespace) -> int:
    """Adds images to an index, removes some, or lists them."""
    from inference.search_index import add_images, check_suffix, open_index, remove_images

    file = arguments.index
    check_suffix(file)
    if arguments.list:
        stored, names = open_index(file)
        for row in range(len(stored.values)):
            print(printable(names.name(row), 4000))
        return 0
    if arguments.remove:
        removed = remove_images(file, arguments.remove)
        print(f"{file}: {counted(removed, 'image')} removed")
        return 0
    from tqdm import tqdm

    from inference.feature_store import FeatureExtractor
    from inference.inputs import paths_of, standard_input

    def extractor(made: dict | None) -> FeatureExtractor:
        if made is None:
            return _extractor(arguments)
        _refuse_model(arguments, "an index")
        _check_pool(arguments, made)
        return FeatureExtractor(
            arguments.checkpoint or made["checkpoint"],
            made["cfg"],
            made["options"],
            arguments.batch_size,
            made["layer"],
            made["pool"],
            made["norm"],
        )

    images = paths_of(arguments.paths, standard_input())
    with tqdm(total=len(images), unit="image", disable=None, dynamic_ncols=True) as bar:
        result = add_images(file, images, extractor, arguments.workers, bar.update)
    for error in result.errors:
        print(error, file=sys.stderr)
    line = f"{file}: {counted(result.added, 'image')} added, {result.known} known"
    print(f"{line}, {len(result.errors)} can't be read")
    return 1 if result.errors else 0


def _measure(arguments: argparse.Namespace) -> int:
    """Prints how well the images of a folder find each other."""
    from inference.search import Collected, folder_metrics

    collected = Collected(Path(arguments.paths[0]), arguments.checkpoint, _tell)
    metrics, images, queries = folder_metrics(collected, KS)
    print(", ".join(f"{name}: {value:.2f}" for name, value in metrics.items()))
    print(f"{counted(images, 'image')}, of which {queries} have another one in their folder")
    return 0


def _search(arguments: argparse.Namespace) -> int:
    """Prints the neighbours of each query."""
    from inference.inputs import check_output
    from inference.search import write_grid

    *queries, where = arguments.paths
    check_output(arguments.grid, arguments.paths)
    search = _in_folder if Path(where).is_dir() else _in_features
    neighbours, errors, oriented = search(arguments, queries, where)
    for query, found in zip(queries, neighbours, strict=True):
        if len(queries) > 1:
            print(printable(query, 4000))
        print("similarity  file")
        for name, similarity in found:
            print(f"{similarity:10.4f}  {printable(name, 4000)}")
    for error in errors:
        print(error, file=sys.stderr)
    if arguments.grid:
        unseen = write_grid(queries[0], neighbours[0], arguments.grid, oriented)
        if unseen:
            which = f"{len(unseen)} of its {len(neighbours[0]) + 1} images"
            print(
                f"{arguments.grid}: {which} can't be read, the first: {unseen[0]}", file=sys.stderr
            )
    return 1 if errors else 0


def _extractor(arguments: argparse.Namespace) -> "FeatureExtractor":
    """Returns the feature extractor that the flags ask for."""
    from inference.feature_store import FeatureExtractor

    if arguments.checkpoint is None:
        raise InputError("the features of a folder are computed by a model; pass -checkpoint")
    return FeatureExtractor(
        arguments.checkpoint,
        arguments.cfg,
        arguments.o,
        arguments.batch_size,
        arguments.layer,
        arguments.pool or "avg",
        arguments.norm,
    )


def _check_pool(arguments: argparse.Namespace, made: Mapping[str, Any]) -> None:
    """Raises InputError if -pool isn't that of stored features.

    Args:
        made: how they were made.
    """
    if arguments.pool not in (None, made["pool"]):
        raise InputError(
            f"-pool is {arguments.pool}, but the features were made with {made['pool']}; leave"
            " it out, or"
            " make them again"
        )


def _refuse_model(arguments: argparse.Namespace, what: str) -> None:
    """Raises InputError if flags choose a model where the stored features name it."""
    if arguments.layer is not None or arguments.cfg or arguments.o:
        raise InputError(f"{what} determines the model and layer; leave out -cfg, -layer and -o")


def _in_folder(
    arguments: argparse.Namespace, queries: Sequence[str], where: str
) -> tuple[list, list[str], bool]:
    """Returns each query's neighbours, the errors of images that can't be read, and whether images
    were turned as their EXIF data says.
    """
    from inference.inputs import paths_of
    from inference.search import Query, among_images, of_text, query_among

    if arguments.faiss:
        raise InputError("-faiss searches an index or a file of features; make one with -index")
    if arguments.pool is None and any(map(_is_text, queries)):
        arguments.pool = "embedding"
    features = _extractor(arguments)
    images = paths_of([where])
    found = [
        Query(of_text(features, query, _tell))
        if _is_text(query)
        else query_among(features, query, images)
        for query in queries
    ]
    neighbours, errors = among_images(features, found, images, arguments.top, arguments.workers)
    return neighbours, errors, features.made["oriented"]


def _in_features(
    arguments: argparse.Namespace, queries: Sequence[str], where: str
) -> tuple[list, list[str], bool]:
    """Returns the same as ``_in_folder``, from an index or a file of features."""
    from inference.search import Collected

    _refuse_model(arguments, "a file of features")
    collected = Collected(Path(where), arguments.checkpoint, _tell)
    _check_pool(arguments, collected.stored.made)
    found = [
        collected.of_text(query) if _is_text(query) else collected.of_image(query)
        for query in queries
    ]
    approximate = None
    if arguments.faiss:
        from inference.approximate import ApproximateSearch, recall

        begin = time.perf_counter()
        approximate = ApproximateSearch(collected.stored, arguments.faiss)
        built = time.perf_counter()
        compared = found[:COMPARED]
        some = collected.rows(compared, arguments.top, approximate)
        searched = time.perf_counter()
        share = recall(some, collected.rows(compared, arguments.top))
        _tell(
            f"faiss {arguments.faiss}: recall {100 * share:.2f} % of the exact {arguments.top}"
            f" of {counted(len(compared), 'query', 'queries')}; built in {built - begin:.2f} s,"
            f" {1000 * (searched - built) / len(compared):.2f} ms a query"
        )
    neighbours = collected.nearest(found, arguments.top, approximate)
    return neighbours, [], collected.stored.made.get("oriented", False)


def _is_text(query: str) -> bool:
    """Returns whether a query is a text: it isn't a URL, there is no such file, and its ending isn't
    an image's.
    """
    from loading.layout import IMAGE_SUFFIXES
    from loading.remote import is_url

    if is_url(query) or os.path.lexists(query):
        return False
    return Path(query).suffix.lower() not in IMAGE_SUFFIXES


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    with reporting():
        sys.exit(main())
