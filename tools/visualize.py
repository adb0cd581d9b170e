"""Draws the regions that a model looks at, and its features, as PNG pictures.

    python tools/visualize.py attention CHECKPOINT photo.jpg -output attention.png

attention    where each head of a block (-block) attends to
rollout      attention through all blocks
cam          the regions that a class is predicted from (-class, -method)
merging      the patches that were merged (MODEL.MERGE_TOKENS) after a block (-block), in their mean
             colour
features     principal components of the features of all IMAGES as colours (-method pca: of each
             stage; foreground: of the last stage, the first component next to the following three;
             channels: the channels that vary most)
embeddings   the images of a folder in two dimensions, by t-SNE, with their classes
positions    the learnt position embeddings, without any image
predictions  a grid of images with their classes; -mistakes: only wrong ones

attention: ViT, DeiT, NaFlexViT, BEiT, EVA-02, DINOv3, T2T-ViT, CaiT, PiT, XCiT, CrossViT, Swin,
Swin V2, CSwin, HaloNet, BoTNet, PVTv2, VOLO, Hiera, CAFormer, MobileViT, TopFormer, CvT, Focal,
ResT, ResTv2, HVT, Shuffle.
rollout: ViT, DeiT, NaFlexViT, BEiT, EVA-02, DINOv3, T2T-ViT.
positions: ViT, DeiT, NaFlexViT, BEiT, EVA-02, CaiT, PiT, XCiT, CrossViT, Swin, Swin V2, VOLO,
Hiera, T2T-ViT, Focal, HVT, Shuffle.
merging: ViT, DeiT.
The other pictures can be drawn for every architecture.

IMAGES are files, folders, patterns and lists, as for tools/predict.py. An image's true class is the
outermost folder around it that is one of the model's classes, so train/ and val/ don't count.
-output is one picture, FILE.png, or a new folder with a picture for each image.
"""

import argparse
import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run by its path, Python would look in tools/ alone

import launch.startup  # noqa: E402, F401  (signals and streams)
from errors import InputError, RunError, remedy, reporting  # noqa: E402
from settings.parser import Parser  # noqa: E402

ONE_BY_ONE = ("attention", "rollout", "cam", "merging", "features")
TOGETHER = ("embeddings", "positions", "predictions")
# The methods of a kind of picture. The first is the default.
METHODS = {
    "cam": ("gradcam", "hirescam", "gradcam++", "layercam"),
    "features": ("pca", "foreground", "channels"),
    "embeddings": ("tsne", "umap"),
}
# The kinds of pictures that a flag is for. With others it is refused, because it would do nothing.
FLAGS = {
    "block": ("attention", "features", "merging", "positions"),
    "output_class": ("cam",),
    "original": ("attention", "rollout", "cam"),
    "mass": ("attention",),
    "threshold": ("features",),
    "mistakes": ("predictions",),
    "most": ("predictions",),
    "seed": ("embeddings",),
}
# The most images on a picture.
ON_A_SHEET = 16


def list_images(words: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Returns the image files that the command line names, and the folders around each file.

    Args:
        words: files, folders, patterns, lists, URLs. A folder around a file is returned only if it is
            below a folder that was named.

    Raises:
        InputError: a word names nothing.
    """
    from inference.inputs import paths_of, standard_input

    files: list[str] = []
    between: list[list[str]] = []
    for word in words:
        within = os.path.isdir(word)
        for file in paths_of([word], standard_input(), urls=True):
            files.append(file)
            between.append(os.path.relpath(file, word).split(os.sep)[:-1] if within else [])
    return files, between


def true_class(folders: Sequence[str], classes: Collection[str]) -> str | None:
    """Returns the class of an image: the first of its folders that is one of ``classes``, or else
    the first folder. Without folders it is None.

    Args:
        folders: the folders around the image, the outermost first.
        classes: the classes that the model knows.
    """
    known = [name for name in folders if name in classes]
    return next(iter(known or folders), None)


def one_by_one(kind: str, predictor: Any, files: Sequence[str], options: Any, output: Path) -> str:
    """Draws the panels of each image, on one picture or into a folder. Returns a line for the user."""
    from inference.visualization import maps
    from inference.visualization.merged import merged_panels
    from inference.visualization.predicted_image import predict_image
    from training.pages.sheets import sheet

    whole = output.suffix == ".png"
    if len(files) > ON_A_SHEET and (whole or kind == "features"):
        advice = "give fewer"
        if kind != "features":
            advice = "set -output to a folder for one picture of each"
        raise InputError(
            f"found {len(files)} images, a picture shows {ON_A_SHEET} at most; {advice}"
        )
    panels: dict[str, Callable] = {
        "attention": maps.attention_panels,
        "rollout": maps.rollout_panels,
        "cam": maps.cam_panels,
        "merging": merged_panels,
    }
    if kind == "features":
        images = [predict_image(predictor, file) for file in files]
        drawn = iter(maps.feature_panels(predictor, images, options))
    else:
        drawn = (
            panels[kind](predictor, predict_image(predictor, file, options.original), options)
            for file in files
        )
    if whole:
        rows = list(drawn)
        _write(output, sheet(rows, *maps.title_of(kind, predictor, options)))
        return f"{output}: {kind} of {_count(len(files), 'image')}"
    # Each image is read before the folder is made, so that it gets all pictures or none.
    for file in files:
        predictor.pixels(file)
    first = next(drawn)
    with _reporting_write_errors(output):
        output.mkdir(parents=True)
    names = _names(files)
    for name, row in zip(names, itertools.chain([first], drawn), strict=True):
        _write(output / name, sheet([row], *maps.title_of(kind, predictor, options)))
    return f"{output}: {_count(len(files), 'picture')} of {kind}"


def _names(files: Sequence[str]) -> list[str]:
    """Returns a file name for the picture of each image, with a number if a name is taken."""
    names: list[str] = []
    taken: set[str] = set()
    for file in files:
        stem = Path(file).stem
        number = 1
        name = f"{stem}.png"
        while name in taken:
            number += 1
            name = f"{stem}_{number}.png"
        taken.add(name)
        names.append(name)
    return names


def together(
    arguments: argparse.Namespace, predictor: Any, files: Sequence[str], truth: Sequence[str | None]
) -> str:
    """Draws one picture of all images, or of the model alone. Returns a line for the user."""
    from inference.visualization.embeddings import embeddings, predictions
    from inference.visualization.positions import positions

    output = _file(arguments.output, arguments.kind)
    kind = arguments.kind
    if kind == "positions":
        picture = positions(predictor, arguments.block)
        content = "positions"
    elif kind == "embeddings":
        picture = embeddings(
            predictor, files, truth, arguments.method, arguments.seed or 0, arguments.workers
        )
        content = f"embeddings of {_count(len(files), 'image')}"
    else:
        picture, content = predictions(
            predictor, files, truth, arguments.mistakes, arguments.most or 28, arguments.workers
        )
    _write(output, picture)
    return f"{output}: {content}"


def _file(output: Path, kind: str) -> Path:
    return output if output.suffix == ".png" else output / f"{kind}.png"


def _write(path: Path, picture: bytes) -> None:
    from utils import writing_whole

    with _reporting_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with writing_whole(path, "wb") as file:
            file.write(picture)


@contextlib.contextmanager
def _reporting_write_errors(path: Path) -> Iterator[None]:
    """Reports that ``path`` can't be written."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{path} can't be written ({error.strerror}); {remedy(error)}, or choose another"
            " -output"
        ) from None


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(__doc__)
    parser.add_argument(
        "kind", choices=[*ONE_BY_ONE, *TOGETHER], metavar="WHAT", help="what to draw: see above"
    )
    parser.add_argument("checkpoint", help="a checkpoint's folder or file, or a run's folder")
    parser.add_argument("images", nargs="*", help="files, folders, URLs")
    parser.add_argument(
        "-output",
        "--output",
        required=True,
        type=Path,
        metavar="FILE.png|DIR",
        help="the picture or the folder to create",
    )
    parser.add_argument(
        "-cfg",
        "--cfg",
        metavar="MODEL",
        help="the model's YAML file or name, if the weights don't name it",
    )
    parser.add_argument(
        "-block", "--block", type=int, metavar="N", help="index of a block, from 0; -1: the last"
    )
    parser.add_argument(
        "-class",
        "--class",
        dest="output_class",
        metavar="NAME|N",
        help="class for cam; default: the predicted one",
    )
    methods = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in METHODS.items())
    parser.add_argument("-method", "--method", help=methods)
    parser.add_argument(
        "-original",
        "--original",
        action="store_true",
        help="draw on the original image",
    )
    parser.add_argument(
        "-mass",
        "--mass",
        type=float,
        metavar="SHARE",
        help="draw only the positions with the largest SHARE of a head's attention (DINO: 0.6)",
    )
    parser.add_argument(
        "-threshold",
        "--threshold",
        type=float,
        metavar="SHARE",
        help="positions whose first component is below SHARE are black; 0: none (-method foreground;"
        " default: the threshold that separates best)",
    )
    parser.add_argument(
        "-mistakes",
        "--mistakes",
        action="store_true",
        help="only wrong predictions, the most confident first",
    )
    parser.add_argument(
        "-most", "--most", type=int, metavar="N", help="number of images of a grid (28)"
    )
    parser.add_argument("-seed", "--seed", type=int, help="seed of the positions in the plane (0)")
    parser.add_argument(
        "-workers", "--workers", type=int, default=0, help="data loader workers (0)"
    )
    parser.add_keys()
    return parser


def check(arguments: argparse.Namespace) -> None:
    """Checks the command line before a model is built, and fills in the default method.

    Raises:
        InputError: flags that don't fit together, or an -output that exists or can't be written.
    """
    kind = arguments.kind
    methods = METHODS.get(arguments.kind, ())
    for flag, kinds in FLAGS.items():
        if getattr(arguments, flag) not in (None, False) and kind not in kinds:
            name = "class" if flag == "output_class" else flag
            raise InputError(f"-{name} has no effect for {kind}; it is for {', '.join(kinds)}")
    if arguments.method is not None and arguments.method not in methods:
        expected = f"{kind} has no methods; leave it out"
        if methods:
            expected = f"expected {', '.join(methods)}"
        raise InputError(f"-method is {arguments.method!r}, {expected}")
    if not methods:
        arguments.method = ""
    elif arguments.method is None:
        arguments.method = methods[0]
    if arguments.threshold is not None and arguments.method != "foreground":
        raise InputError("-threshold only has an effect on features -method foreground")
    mass = arguments.mass
    threshold = arguments.threshold
    if mass is not None and not 0 < mass <= 1:
        raise InputError(f"-mass is {mass:g}, expected above 0 to 1")
    if threshold is not None and not 0 <= threshold <= 1:
        raise InputError(f"-threshold is {threshold:g}, expected 0 to 1")
    if arguments.images and kind == "positions":
        raise InputError("positions doesn't need images; leave them out")
    if not arguments.images and kind != "positions":
        raise InputError(f"{kind} needs images")
    for flag, least in (("most", 1), ("seed", 0), ("workers", 0)):
        value = getattr(arguments, flag)
        if value is not None and not least <= value < 1 << 32:
            raise InputError(f"-{flag} is {value}, expected {least} or more")
    output = arguments.output
    if output.suffix and output.suffix != ".png":
        raise InputError(f"-output is {output}, expected a file that ends in .png, or a folder")
    if os.path.lexists(output):
        raise InputError(f"-output is {output}, which already exists; choose a new name")
    above = next(folder for folder in output.absolute().parents if os.path.lexists(folder))
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise InputError(
            f"-output is {output}, but {above} isn't a writable folder; choose another"
        )


def main() -> None:
    arguments = _parser().parse_args()
    check(arguments)
    files, between = list_images(arguments.images)
    from inference.inputs import check_output

    check_output(arguments.output, (arguments.checkpoint, *arguments.images), files)
    # After the command line is parsed: this imports Paddle.
    from inference import Predictor
    from inference.export_manifest import refuse_export
    from inference.visualization.maps import MapOptions

    refuse_export(
        arguments.checkpoint,
        ", which has no accessible layers; use the checkpoint that it was made from",
    )
    predictor = Predictor(arguments.checkpoint, arguments.cfg, arguments.o)
    if predictor.gives_maps:
        # What is drawn is about a whole image's class or features.
        predictor.check_classifier()
    if arguments.kind in TOGETHER:
        classes = set(predictor.classes)
        truth = [true_class(folders, classes) for folders in between]
        print(together(arguments, predictor, files, truth))
        return
    options = MapOptions(
        block=arguments.block,
        method=arguments.method,
        output=arguments.output_class,
        original=arguments.original,
        mass=1.0 if arguments.mass is None else arguments.mass,
        threshold=arguments.threshold,
    )
    print(one_by_one(arguments.kind, predictor, files, options, arguments.output))


if __name__ == "__main__":
    with reporting():
        main()
