"""Converts the output of an annotation tool to a dataset of images and masks, for -dataset=masks.

    python tools/make_masks.py -format labelme -data_path annotated -output masks
    python tools/make_masks.py -format coco -data_path instances.json -images images -output masks
    python tools/make_masks.py -format voc -data_path VOCdevkit/VOC2012 -output masks
    python tools/make_masks.py -format cvat -data_path task -output masks

labelme: a folder of JSON files, each next to its image, with polygons, rectangles and circles. Later
ones cover earlier ones. coco: a JSON file of polygons or runs (RLE); smaller areas cover larger ones.
It needs pycocotools (the extra masks). voc: JPEGImages, SegmentationClass and
ImageSets/Segmentation/train.txt and val.txt. cvat: the same layout ("Segmentation mask"), with
labelmap.txt, which lists the colour of each class.

The classes are "background" and all labels that occur, in sorted order or in the order of COCO's ids
or of labelmap.txt. -classes FILE sets them instead, one per line in the order of their indices. If
"background" isn't among them, pixels without annotations are ignored. LabelMe's "__ignore__" is
ignored, too.

The output contains copies of the images in images/train and images/val, the masks as grey PNG files
in masks/, and classes.txt. If an image has an EXIF orientation, its mask gets the same. The output is
complete or isn't created at all. -val is the share of the images for validation, which are chosen by
their names and -seed; VOC has its own lists.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run by its path, Python would look in tools/ alone

import launch.startup  # noqa: E402, F401  (signals and streams)
from errors import (  # noqa: E402  (first: it says what isn't installed)
    InputError,
    RunError,
    remedy,
    reporting,
)

# isort: split
from launch.files import making_folder  # noqa: E402
from settings.parser import Parser  # noqa: E402

FORMATS = ("labelme", "coco", "voc", "cvat")


def source_of(options: argparse.Namespace, most: int) -> Any:
    """Returns the annotations that the command line names (``tools.annotations.pictures.Source``).

    Args:
        most: pixels that an image may have.

    Raises:
        InputError: they aren't there, or can't be read.
    """
    from tools.annotations.coco import Coco
    from tools.annotations.labelme import LabelMe
    from tools.annotations.voc import LABELMAP, Voc

    path = options.data_path
    if options.format == "coco":
        if not path.is_file():
            raise InputError(f"-data_path is {path}, expected COCO's JSON file")
        return Coco(path, options.images or path.parent)
    if not path.is_dir():
        raise InputError(f"-data_path is {path}, expected the folder of the annotations")
    if options.format == "labelme":
        return LabelMe(path)
    if options.format == "cvat" and not (path / LABELMAP).is_file():
        raise InputError(
            f"{path / LABELMAP}: there is no such file; CVAT writes it with its format"
            ' "Segmentation mask", use -format voc for masks of indices'
        )
    return Voc(path, options.images, most)


def make_masks(options: argparse.Namespace) -> str:
    """Makes the folder that the command line names. Returns a line for the user.

    Raises:
        InputError: an annotation or an image can't be read, or the output is there already.
        RunError: the output can't be written.
    """
    from config import default_values
    from tools.annotations.pictures import write_folder

    output = options.output
    if output.exists() or output.is_symlink():
        raise InputError(f"-output {output} already exists; choose another, or remove it")
    start = time.monotonic()
    most = options.max_pixels or default_values()["DATA.MAX_PIXELS"]
    source = source_of(options, most)
    try:
        with making_folder(output) as temporary:
            text = write_folder(source, options.classes, temporary, options.val, options.seed, most)
    except OSError as error:
        raise RunError(f"{output} can't be written ({error}); {remedy(error)}") from None
    return f"{output}: {text}, {time.monotonic() - start:.1f} s"


def main() -> None:
    parser = Parser(__doc__)

    def option(name: str, **settings: Any) -> None:
        parser.add_argument(f"-{name}", f"--{name}", **settings)

    option(
        "format", choices=FORMATS, required=True, help="the program or format of the annotations"
    )
    option(
        "data_path",
        type=Path,
        required=True,
        metavar="IN",
        help="the folder of the annotations; for coco the JSON file",
    )
    option(
        "images",
        type=Path,
        metavar="DIR",
        help="coco, voc, cvat: the images' folder; default: the folder of the JSON file, or JPEGImages",
    )
    option("output", type=Path, required=True, metavar="OUT", help="the folder to create")
    option("classes", type=Path, metavar="FILE", help="names of the classes, one per line")
    option(
        "val",
        type=float,
        default=0.1,
        metavar="SHARE",
        help="share of the images for validation; 0: none; default: 0.1",
    )
    option(
        "seed", type=int, default=0, metavar="N", help="seed for the choice of images; default: 0"
    )
    option(
        "max_pixels",
        type=int,
        metavar="N",
        help="maximum number of pixels of an image; default: DATA.MAX_PIXELS",
    )
    options = parser.parse_args()
    if not 0 <= options.val < 1:
        parser.error(f"--val is {options.val}, expected 0 <= value < 1")
    if options.images and options.format == "labelme":
        parser.error("--images has no effect with -format labelme, whose files name their images")
    print(make_masks(options))


if __name__ == "__main__":
    with reporting():
        main()
