"""Calibrates a classifier: honest probabilities, sets of classes, and "I don't know".

    python tools/calibrate.py RUN -output CALIBRATED -outside /data/photographs

RUN is a run's folder (its best checkpoint is taken), or other weights. CALIBRATED is a new folder
with weights that every command takes: -eval, tools/predict.py, tools/export_model.py, tools/serve.py.

-scaling     how the logits are scaled (arXiv:1706.04599): temperature; class (a temperature for
             each class); vector (also a shift for each class); none; auto: chosen by
             cross-validation. The scaling becomes part of the classifier.
-coverage    sets of classes that contain the right one with these probabilities (RAPS,
             arXiv:2009.14193): tools/predict.py CALIBRATED IMAGES -coverage 0.95
-by_class    the coverage holds for the images of each class
-false_alarms  pictures of something else are rejected, at these rates of wrongly rejected images:
             tools/predict.py CALIBRATED IMAGES -reject 0.05
-outside     folders of pictures of something else, on which the rejection is measured
-folds       runs of a cross-validation (DATA.FOLDS), whose held-out images fit the scaling

A quarter of the validation set fits the scaling, a quarter sets the thresholds, and all results are
measured on the other half. They are in report.html and calibration.json in CALIBRATED. Without
-dataset and -data_path, the images are those of the run. Exit status: 0; 1 if an image can't be read; 2 for a wrong
command line or input.
"""

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run by its path, Python would look in tools/ alone

import launch.startup  # noqa: E402, F401  (signals and streams)
from errors import printable, reporting, reporting_memory  # noqa: E402

# isort: split
from config import default_values  # noqa: E402
from launch import signals  # noqa: E402
from launch.files import check_new_folder  # noqa: E402
from settings.parser import Parser, pairs, whole_number  # noqa: E402

KINDS = ("auto", "none", "temperature", "class", "vector")
# Levels of -coverage and -false_alarms at most.
MOST_LEVELS = 20


def parsed_arguments() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument(
        "weights", metavar="RUN", help="a run's folder, or weights that -eval takes"
    )

    def option(name: str, **settings: Any) -> None:
        parser.add_argument(f"-{name}", f"--{name}", **settings)

    option("output", type=Path, required=True, metavar="FOLDER", help="the folder to create")
    option("scaling", choices=KINDS, default="auto", help="how logits are scaled; default: auto")
    text = "probabilities of the sets of classes; default: 0.8,0.9,0.95,0.99"
    option("coverage", type=_levels, default=[0.8, 0.9, 0.95, 0.99], metavar="LIST", help=text)
    option(
        "by_class",
        action="store_true",
        help="the coverage holds for each class; default: on average over all images",
    )
    text = "rates of false alarms; default: 0.01,0.05,0.1"
    option("false_alarms", type=_levels, default=[0.01, 0.05, 0.1], metavar="LIST", help=text)
    option(
        "outside",
        nargs="+",
        default=[],
        metavar="FOLDER",
        help="images of something else; default: none",
    )
    option(
        "folds",
        nargs="+",
        default=[],
        metavar="RUN",
        help="runs of a cross-validation; default: none",
    )
    text = (
        "the knn score is the distance to the N-th nearest neighbour; 0: no knn score; default: 10"
    )
    option("k", type=whole_number(0), default=10, metavar="N", help=text)
    option(
        "seed",
        type=whole_number(0),
        default=0,
        metavar="N",
        help="seed for splitting the images; default: 0",
    )
    option(
        "dataset",
        metavar="NAME",
        help="kind of the dataset; default: the run's, or what the folder contains",
    )
    option("data_path", metavar="PATH", help="folder or file of the dataset; default: the run's")
    option(
        "cfg", metavar="MODEL", help="the model's YAML file or name, if the weights don't name it"
    )
    option(
        "batch_size",
        type=whole_number(1),
        default=32,
        metavar="N",
        help="images per batch; default: 32",
    )
    text = "data loader workers; default: 2"
    option("workers", type=whole_number(0), default=2, metavar="N", help=text)
    parser.add_keys()
    arguments = parser.parse_args()
    check_new_folder(arguments.output)
    return arguments


def _levels(text: str) -> list[float]:
    levels = []
    for part in text.split(","):
        try:
            level = float(part)
        except ValueError:
            level = 0.0
        if not 0 < level < 1:
            raise argparse.ArgumentTypeError(f"{part!r} isn't between 0 and 1")
        levels.append(level)
    if len(levels) > MOST_LEVELS:
        raise argparse.ArgumentTypeError(f"found {len(levels)} levels, at most {MOST_LEVELS}")
    return sorted(set(levels))


def main() -> None:
    arguments = parsed_arguments()
    # After the command line is parsed: these import Paddle.
    from main_multi_gpu import import_paddle

    import_paddle()
    from tqdm import tqdm

    from inference.calibration.calibrate import Calibrator, Settings, calibrate, write
    from inference.calibration.report import figures_of, lines_of, page_of
    from inference.run_data import split_options

    data, options = split_options(
        pairs(arguments.o, default_values()),
        arguments.dataset,
        arguments.data_path,
        "a calibration",
    )
    settings = Settings(
        scaling=arguments.scaling,
        coverages=arguments.coverage,
        by_class=arguments.by_class,
        false_alarms=arguments.false_alarms,
        k=arguments.k,
        seed=arguments.seed,
    )
    with (
        reporting_memory(lambda: f"lower -batch_size (now {arguments.batch_size})"),
        tqdm(unit=" images", disable=None) as bar,
    ):
        calibrator = Calibrator(
            arguments.weights,
            arguments.cfg,
            options,
            data,
            arguments.batch_size,
            arguments.workers,
            bar.update,
        )
        found = calibrate(calibrator, settings, arguments.folds, arguments.outside)
        outcome, scale, bank = found
        command = shlex.join(["python", "tools/calibrate.py", *sys.argv[1:]])
        figures = {"command": command, **figures_of(outcome, calibrator.predictor.classes)}
        title = f"Calibration of {calibrator.predictor.config.MODEL.NAME}: {arguments.weights}"
        page = page_of(outcome, figures, title)
        write(calibrator, outcome, scale, bank, arguments.output, figures, page)
    signals.end_workers()
    for line in lines_of(figures):
        print(printable(line, 300))
    print(f"{printable(str(arguments.output))} is written")


if __name__ == "__main__":
    with reporting():
        main()
