"""Exports a trained model with its preprocessing, for Paddle Inference, ONNX Runtime or OpenVINO.

    python tools/export_model.py -cfg MODEL -pretrained WEIGHTS -output DIR [-o KEY VALUE ...]
    python tools/export_model.py -pretrained CHECKPOINT -output DIR [-format openvino] [-precision bfloat16]

DIR contains two graphs: the model, from normalised images [B, C, S, S] float32 to logits, and the
preprocessing, from pixels [B, H, W, C] uint8 of any size to such images. preprocess.json,
labels.txt and timm's config.json describe both. The export is run and compared with the model before
DIR is created. -cfg is needed if the weights don't name their model. int8 is calibrated on images of
a training set: that of the run, or -dataset at -data_path. int8_weights and int4_weights make the
file smaller without any images; they compute in float32.

-format paddlex and paddleclas are for PaddleX 3 and for PaddleClas's deployment. DIR then contains a
graph that returns probabilities, and the settings that the client reads: inference.yml or
paddleclas.yml.
"""

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run by its path, Python would look in tools/ alone

import launch.startup  # noqa: E402, F401  (signals and streams)
from errors import InputError, reporting  # noqa: E402
from settings.parser import Parser, pairs  # noqa: E402

_FORMATS = ("paddle", "paddle-legacy", "paddlex", "paddleclas", "onnx", "openvino")
_PRECISIONS = ("float32", "float16", "bfloat16", "int8", "int8_weights", "int4_weights")


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("-cfg", "--cfg", metavar="MODEL", help="the model's YAML file or name")
    parser.add_argument(
        "-pretrained",
        "--pretrained",
        required=True,
        help="weights: a file, a folder or hf-hub:org/name",
    )
    parser.add_argument(
        "-output", "--output", required=True, type=Path, metavar="DIR", help="the folder to create"
    )
    parser.add_argument(
        "-format", "--format", choices=_FORMATS, default="paddle", help="default: paddle"
    )
    text = "the part of CLIP or SigLIP to export; text: tokens [B, L] int64 -> embeddings [B, D], with the tokenizer"
    parser.add_argument("-tower", "--tower", choices=("image", "text"), default="image", help=text)
    parser.add_argument(
        "-precision",
        "--precision",
        choices=_PRECISIONS,
        default="float32",
        help="type of the numbers that the exported model computes with; default: float32",
    )
    dataset_help = (
        "for int8: the kind of its training set (default: the run's, or what the folder contains)"
    )
    parser.add_argument("-dataset", "--dataset", help=dataset_help)
    path_help = "for int8: the folder of its training set (default: the run's)"
    parser.add_argument("-data_path", "--data_path", metavar="FOLDER", help=path_help)
    parser.add_argument(
        "-calibration_images",
        "--calibration_images",
        type=int,
        default=300,
        metavar="N",
        help="for int8: number of training images for the calibration; default: 300",
    )
    parser.add_argument(
        "-least_agreement",
        "--least_agreement",
        type=float,
        default=0.8,
        metavar="SHARE",
        help="share of images on which an export in another precision has to predict the same class;"
        " default: 0.8",
    )
    parser.add_keys()
    arguments = parser.parse_args()
    flags = _data(arguments)
    # After the command line is parsed: these import Paddle.
    from config import default_values
    from inference import Predictor
    from inference.export_manifest import refuse_export
    from inference.exporting import check_combination, check_target, write_export
    from inference.quantise import training_images
    from inference.run_data import data_keys, is_data_key

    check_combination(arguments.format, arguments.precision)
    # This also removes "..".
    arguments.output = Path(os.path.abspath(arguments.output))
    check_target(arguments.output)
    refuse_export(
        arguments.pretrained, " already; set -pretrained to the checkpoint that it was made from"
    )
    if arguments.tower == "text":
        _export_text(arguments)
        return
    trained = Predictor(arguments.pretrained, arguments.cfg, arguments.o)
    assert trained.model is not None
    # These formats return probabilities. The others export a model without classes, too.
    if arguments.format in ("paddlex", "paddleclas"):
        trained.check_classifier()
    print(trained.report)
    if not trained.has_classes:
        print("the outputs are features, because the model has no classes")
    if trained.warning:
        print(f"warning: {trained.warning}", file=sys.stderr)
    images = None
    if arguments.precision == "int8":
        named = [pair for pair in pairs(arguments.o, default_values()) if is_data_key(pair[0])]
        purpose = "-precision int8 is calibrated on a training set"
        data = data_keys(trained.weights, [*flags, *named], purpose)
        images = training_images(trained.config, data, arguments.calibration_images)
    report = write_export(
        trained.config,
        trained.model,
        arguments.output,
        trained.classes,
        arguments.format,
        arguments.precision,
        trained.task,
        images,
        arguments.least_agreement,
        trained.thresholds,
        features=not trained.has_classes,
        calibrated=trained.calibration,
    )
    size = sum(file.stat().st_size for file in arguments.output.iterdir()) / 1e6
    print(f"{arguments.output}: {arguments.format}, {arguments.precision}, {size:.1f} MB; {report}")


def _export_text(arguments: argparse.Namespace) -> None:
    """Exports the text tower of CLIP or SigLIP."""
    from inference.text.exporting import write_text_export

    if arguments.precision != "float32":
        raise InputError(
            f"-tower text doesn't support -precision {arguments.precision}; leave it out"
        )
    for name in ("cfg", "o", "dataset", "data_path"):
        if getattr(arguments, name):
            raise InputError(f"-{name} is for the image tower; leave it out with -tower text")
    difference = write_text_export(arguments.pretrained, arguments.output, arguments.format)
    size = sum(file.stat().st_size for file in arguments.output.iterdir()) / 1e6
    print(
        f"{arguments.output}: {arguments.format}, text tower, {size:.1f} MB; embeddings differ from the"
        f" eager ones by {difference:.1g}"
    )


def _data(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    """Returns the keys and values that the flags set for the training set that calibrates int8.

    Raises:
        InputError: a flag is out of range, or would have no effect.
    """
    if arguments.precision != "int8" and (arguments.dataset or arguments.data_path):
        raise InputError(
            "-dataset and -data_path are for the calibration of -precision int8; leave them out"
        )
    if arguments.calibration_images < 1:
        raise InputError(f"-calibration_images {arguments.calibration_images}: expected at least 1")
    if not 0 <= arguments.least_agreement <= 1:
        raise InputError(f"-least_agreement {arguments.least_agreement}: expected 0 to 1")
    flags = {"DATA.DATASET": arguments.dataset, "DATA.DATA_PATH": arguments.data_path}
    return [(key, value) for key, value in flags.items() if value]


if __name__ == "__main__":
    with reporting():
        main()
