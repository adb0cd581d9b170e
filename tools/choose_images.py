"""Chooses the images of an unlabelled folder that are most worth labelling next.

    python tools/choose_images.py RUN /data/unlabelled -count 20 -by margin -output next

-by margin      images whose two most probable classes have the most similar probabilities (default)
-by energy      images least like the training images, by their energy (arXiv:2010.03759)
-by coverage    images whose features are farthest from those of labelled and already chosen images
                (core-set, arXiv:1708.00489)
-by mixed       ten times as many by margin, of which coverage chooses

RUN is a run's folder, or a checkpoint of one. Its training images are the labelled ones; if they have
moved, -data_path is their current folder. Images similar to labelled ones and images of a single
colour are skipped. Of similar images, only the first path is considered; ties go to the first path.

-output is a new folder with chosen.csv (image, value, class, probability), chosen.txt (a path per
line, relative to the current folder, for tools/predict.py), and sheets of the images
(sheet_1.png ...). Exit status: 0; 1 if an image can't be read (it is left out); 2 for a wrong
command line or input; 130 or 143 after Ctrl-C or SIGTERM, which leave no folder.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run by its path, Python would look in tools/ alone

import launch.startup  # noqa: E402, F401  (signals and streams)
from errors import InputError, RunError, counted, printable, remedy, reporting  # noqa: E402
from inference.acquisition import RULES  # noqa: E402
from settings.parser import Parser  # noqa: E402
from tools.find_label_errors import check_new_folder  # noqa: E402


def parsed_arguments() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("run", metavar="RUN", help="a run's folder, or a checkpoint of one")
    text = "files, folders, patterns, lists (.txt), or -"
    parser.add_argument("inputs", nargs="+", metavar="IMAGES", help=text)

    def option(name: str, **settings: Any) -> None:
        parser.add_argument(f"-{name}", f"--{name}", **settings)

    option("output", required=True, type=Path, metavar="FOLDER", help="the folder to create")
    option("count", type=int, default=20, metavar="N", help="number of images; default: 20")
    option("by", choices=RULES, default=RULES[0], help="how images are chosen; default: margin")
    option("dataset", metavar="NAME", help="kind of the labelled images; default: the run's")
    option("data_path", metavar="PATH", help="current folder of the labelled images")
    option("workers", type=int, default=2, metavar="N", help="data loader workers; default: 2")
    arguments = parser.parse_args()
    if arguments.count < 1 or arguments.workers < 0:
        raise InputError(
            f"-count is {arguments.count}, expected at least 1; -workers is {arguments.workers},"
            " expected at least 0"
        )
    check_new_folder(arguments.output)
    return arguments


def main() -> int:
    arguments = parsed_arguments()
    from tqdm import tqdm

    from inference import selection
    from inference.inputs import paths_of, standard_input
    from inference.label_errors import all_images
    from ops.device import tune_cpu

    tune_cpu(1)
    rule = arguments.by
    flags = {"DATA.DATASET": arguments.dataset, "DATA.DATA_PATH": arguments.data_path}
    data = [(key, value) for key, value in flags.items() if value]
    labelled = all_images(arguments.run, data, arguments.workers)
    paths = paths_of(arguments.inputs, standard_input())
    pool = selection.read_pool(paths, labelled, arguments.workers)
    with tqdm(unit=" images", disable=None, dynamic_ncols=True) as bar:
        chosen = selection.choose(
            pool, labelled, arguments.count, rule, arguments.workers, bar.update
        )
    try:
        names = selection.write(arguments.output, pool, chosen, rule, labelled)
    except OSError as error:
        raise RunError(
            f"-output {arguments.output} can't be written ({error.strerror}); {remedy(error)}"
        ) from None
    print(
        f"{counted(len(paths), 'image')}: {pool.known} look like a labelled one, {pool.twins} like"
        f" another one, {pool.blank} have one colour, {len(pool.problems)} can't be read"
    )
    print(
        f"{printable(str(arguments.output))}: {counted(len(chosen.rows), 'image')} by {rule};"
        f" {', '.join(names)}"
    )
    if len(chosen.rows) < arguments.count:
        print(f"-count {arguments.count}: there are no more images", file=sys.stderr)
    for problem in filter(None, pool.problems[:5]):
        print(problem, file=sys.stderr)
    return 1 if pool.problems else 0


if __name__ == "__main__":
    with reporting():
        sys.exit(main())
