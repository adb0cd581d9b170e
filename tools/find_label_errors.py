"""Finds training images whose labels are probably wrong, by confident learning (arXiv:1911.00068).

    python tools/find_label_errors.py FOLD0 FOLD1 FOLD2 FOLD3 FOLD4 -output wrong
    python tools/find_label_errors.py RUN -features -output near

FOLD0 to FOLD4 are the runs of a cross-validation (DATA.FOLDS 5, and DATA.FOLD 0 to 4). Each image's
probabilities come from the run that wasn't trained on it. With -features, one run or checkpoint is
enough: each label is compared with those of the images with the nearest features.

-output is a new folder with label_errors.csv (image, label, suggested_label, score, action), whose
most suspicious labels come first. Edit the actions (keep, relabel, remove) and the suggestions, then
run tools/check_dataset.py --apply. For multi-label data, each row is about one class, which is missing
or superfluous. The sheets (sheet_1.png ...) show each image with its two nearest images and their
labels.

Exit status: 0; 1 if an image can't be read; 2 for a wrong command line or input; 130 or 143 after
Ctrl-C or SIGTERM, which leave no folder.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run by its path, Python would look in tools/ alone

import launch.startup  # noqa: E402, F401  (signals and streams)
from errors import InputError, RunError, printable, remedy, reporting  # noqa: E402
from inference.confident_learning import FILTERS, SCORES  # noqa: E402
from settings.parser import Parser  # noqa: E402

# Images that are drawn.
DRAWN = 48


def parsed_arguments() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="one run per fold, or one run")

    def option(name: str, **settings: Any) -> None:
        parser.add_argument(f"-{name}", f"--{name}", **settings)

    option("output", required=True, type=Path, metavar="FOLDER", help="the folder to create")
    option("features", action="store_true", help="compare with the nearest images, for one run")
    option("k", type=int, metavar="N", help="with -features: number of nearest images; default: 10")
    text = "which labels are listed; default: prune_by_noise_rate"
    option("filter", choices=FILTERS, default=FILTERS[0], help=text)
    text = "the score to sort by; default: self_confidence, the label's probability"
    option("score", choices=SCORES, default=SCORES[0], help=text)
    option(
        "drawn",
        type=int,
        default=DRAWN,
        metavar="N",
        help=f"number of images on the sheets; default: {DRAWN}",
    )
    option("dataset", metavar="NAME", help="kind of the dataset; default: the runs'")
    option("data_path", metavar="PATH", help="current folder of the runs' data")
    option("workers", type=int, default=2, metavar="N", help="data loader workers; default: 2")
    arguments = parser.parse_args()
    if arguments.features and len(arguments.runs) > 1:
        raise InputError(f"-features needs one run, found {len(arguments.runs)}")
    if arguments.k is not None and not arguments.features:
        raise InputError("-k has no effect without -features; leave it out, or add -features")
    if arguments.k is not None and arguments.k < 1:
        raise InputError(f"-k is {arguments.k}, expected at least 1")
    if arguments.drawn < 0 or arguments.workers < 0:
        raise InputError(
            f"-drawn is {arguments.drawn} and -workers is {arguments.workers}, expected at least 0"
        )
    check_new_folder(arguments.output)
    return arguments


def check_new_folder(output: Path) -> None:
    """Raises InputError if a folder can't be made; tools/choose_images.py calls it, too."""
    if os.path.lexists(output):
        raise InputError(f"{output} exists; choose another -output, or remove it")
    if not output.parent.is_dir() or not os.access(output.parent, os.W_OK):
        raise InputError(
            f"-output {output}: {output.parent} isn't a writable folder; choose another"
        )


def main() -> None:
    arguments = parsed_arguments()
    from tqdm import tqdm

    from inference import label_errors, label_sheets
    from ops.device import tune_cpu

    tune_cpu(1)
    flags = {"DATA.DATASET": arguments.dataset, "DATA.DATA_PATH": arguments.data_path}
    data = [(key, value) for key, value in flags.items() if value]
    place = arguments.output.parent
    how = {"method": arguments.filter, "score": arguments.score}
    features = []
    if arguments.features:
        parts = [label_errors.all_images(arguments.runs[0], data, arguments.workers)]
    else:
        parts = label_errors.held_out(arguments.runs, data, arguments.workers)
    count = sum(len(images.dataset) for images in parts)
    with tqdm(total=count, unit=" images", disable=None, dynamic_ncols=True) as bar:
        if arguments.features:
            features = [label_errors.features_of(parts[0], bar.update)]
            k = arguments.k or label_errors.NEIGHBOURS
            probabilities = label_errors.votes_of(parts[0], features[0], k, place)
        else:
            probabilities = label_errors.probabilities_of(parts, place, bar.update)
        with probabilities as values:
            found = label_errors.find(parts, values, **how)
    try:
        names = label_sheets.write(arguments.output, found, arguments.drawn, features)
    except OSError as error:
        raise RunError(
            f"-output {arguments.output} can't be written ({error.strerror}); {remedy(error)}"
        ) from None
    print(label_sheets.summary(found))
    print(f"{printable(str(arguments.output))}: {', '.join(names)}")


if __name__ == "__main__":
    with reporting():
        main()
