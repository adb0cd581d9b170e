"""Exports a model for Paddle Inference, with what prepares its images.

    python tools/export_model.py -cfg MODEL -pretrained WEIGHTS -output DIR [-o KEY VALUE ...]

DIR then holds inference.json (Paddle 2.6: inference.pdmodel), inference.pdiparams and preprocessing.json. The program
takes normalised images [B, C, S, S] float32 and gives logits; it is run once, on random images, and held to the model.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a tool is run by its path: only tools/ is there to import from

import launch.startup  # noqa: E402, F401  (streams)
from errors import reported  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-cfg", "--cfg", required=True, metavar="MODEL", help="the model's YAML file or name")
    parser.add_argument("-pretrained", "--pretrained", required=True, help="a file, a folder or hf-hub:org/name")
    parser.add_argument("-output", "--output", required=True, type=Path, metavar="DIR", help="a folder that is new")
    parser.add_argument("-o", "--o", nargs="+", action="extend", default=[], metavar="KEY VALUE", help="any keys")
    arguments = parser.parse_args()
    from config import get_config
    from models import build_model
    from models.inference import write_export
    from models.pretrained import with_preprocessing
    from training.checkpoint import classes_of  # after the command line: these import Paddle
    from weights import load_weights

    options = [*arguments.o, "MODEL.PRETRAINED", arguments.pretrained]
    config = with_preprocessing(get_config(arguments.cfg, options))
    model = build_model(config)
    allow, classes = config.MODEL.PRETRAINED_ALLOW, config.MODEL.PRETRAINED_CLASSES
    print(load_weights(model, arguments.pretrained, allow=allow, classes=classes))
    differs = write_export(config, model, arguments.output, classes_of(arguments.pretrained) or [])
    print(f"{arguments.output}: on random images, logits differ from the eager ones by {differs:.1e} of their range")


if __name__ == "__main__":
    with reported():
        main()
