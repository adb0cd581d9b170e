"""Makes a classifier from class names, without training, with the text tower of CLIP or SigLIP.

    python tools/zero_shot.py CLIP -data_path /data/flowers -output CLASSIFIER

CLIP stands for weights of both towers with their tokenizer: a folder of transformers or OpenCLIP,
hf-hub:org/name, or a file. CLASSIFIER is a new folder with weights that every command
accepts: -eval, tools/predict.py, tools/export_model.py, tools/serve.py. Training starts from it, too
(-pretrained=CLASSIFIER).

-classes     names of the classes, one per line, or imagenet1k
-data_path   use the classes of this dataset, whose format is -dataset
-templates   sentences, one per line, with {} for the name; default: "a photo of a {}."
             The sentences of a class are averaged (arXiv:2103.00020).

Exit status: 0; 2 for a wrong command line or input.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run by its path, Python would look in tools/ alone

import launch.startup  # noqa: E402, F401  (signals and streams)
from errors import InputError, counted, reporting, reporting_memory  # noqa: E402

# isort: split
from config import default_values  # noqa: E402
from launch.files import check_new_folder  # noqa: E402
from settings.parser import Parser, pairs  # noqa: E402


def parsed_arguments() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("weights", metavar="WEIGHTS", help="weights of CLIP or SigLIP")

    def option(name: str, **settings: Any) -> None:
        parser.add_argument(f"-{name}", f"--{name}", **settings)

    option("output", type=Path, required=True, metavar="FOLDER", help="the folder to create")
    option("classes", metavar="FILE", help="class names, one per line, or imagenet1k")
    option("data_path", metavar="PATH", help="use the classes of this dataset")
    option("dataset", metavar="NAME", help="kind of that dataset; default: folder")
    text = 'sentences with {}, one per line; default: "a photo of a {}."'
    option("templates", metavar="FILE", help=text)
    option("cfg", metavar="MODEL", help="the image tower's YAML file, if the weights don't name it")
    parser.add_keys()
    arguments = parser.parse_args()
    from_data = bool(arguments.data_path or arguments.dataset)
    if bool(arguments.classes) == from_data:
        raise InputError(
            "the classes are missing: pass either -classes FILE, or -data_path (and -dataset)"
        )
    check_new_folder(arguments.output)
    return arguments


def main() -> None:
    arguments = parsed_arguments()
    # After the command line is parsed: these import Paddle.
    from inference.inputs import class_names
    from inference.run_data import split_options
    from inference.text.prompts import TEMPLATES, read_templates
    from inference.text.writing import classes_of_data, write_classifier

    data, options = split_options(
        pairs(arguments.o, default_values()), arguments.dataset, arguments.data_path, "a classifier"
    )
    templates = list(TEMPLATES)
    if arguments.templates:
        templates = read_templates(arguments.templates)
    names = {}
    if arguments.classes:
        classes = class_names(arguments.classes)
    else:
        classes, names = classes_of_data(data)
    with reporting_memory(lambda: "take a smaller model"):
        predictor = write_classifier(
            arguments.weights, classes, templates, arguments.output, arguments.cfg, options, names
        )
    if predictor.warning:
        print(f"warning: {predictor.warning}", file=sys.stderr)
    sentences = counted(len(templates), "sentence")
    print(
        f"{arguments.output}: {predictor.config.MODEL.NAME}, {counted(len(classes), 'class', 'classes')}"
        f" of {sentences} each"
    )


if __name__ == "__main__":
    with reporting():
        main()
