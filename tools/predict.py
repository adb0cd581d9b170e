"""Predicts the classes of images with trained weights. Their probabilities are those of -eval.
A model of TASK segmentation predicts the class of each pixel.

    python tools/predict.py CHECKPOINT IMAGE|URL|VIDEO|FOLDER|"GLOB"|LIST.txt|- ... [-top 5] [-output FILE]
    python tools/predict.py CHECKPOINT FOLDER -format masks|overlays -output DIR
    python tools/predict.py CHECKPOINT FOLDER -ngpus 2 (or python -m paddle.distributed.launch ... tools/predict.py)

CHECKPOINT is a run's folder (its best checkpoint is taken), a checkpoint, or its model.safetensors
alone. For other weights, -cfg names the model. Folders are searched recursively, in sorted order. A
list has a path on each line; "-" is a list on standard input. Results are in the order of the images.
URLs are of http or https. Of a video (mp4, mov, m4v, avi, mkv, webm), the first frame of each second
is predicted, or of each -every seconds.
Images are rotated by their EXIF orientation if the model was trained with DATA.EXIF_ORIENTATION.

For segmentation, masks are PNG files of class numbers in the size of the image, and overlays show the
image with coloured classes and a legend. The other formats list the area of each class in percent.

Exit status: 0; 1 if an image can't be read (its row says why); 2 for a wrong command line or input.
130 or 143 after Ctrl-C or SIGTERM. 141 if standard output was closed.
"""

import argparse
import contextlib
import functools
import math
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run by its path, Python would look in tools/ alone

import launch.startup  # noqa: E402, F401  (signals and streams)
from errors import InputError, RunError, printable, reporting, reporting_memory  # noqa: E402
from launch import files, launched, launchers, sharing, signals, spawned  # noqa: E402

# isort: split
from config import default_values, get_config  # noqa: E402
from main_multi_gpu import as_rank, import_paddle, spawn  # noqa: E402
from settings.configuration import Configuration  # noqa: E402
from settings.parser import Parser, pairs, whole_number  # noqa: E402

# The graph of an export may never end. Unless DIST.TIMEOUT is set, a batch has this time.
EXPORT_SECONDS = 60.0
EXPORT_SECONDS_PER_IMAGE = 10.0
# The seconds of a video of which one frame is predicted.
EVERY = 1.0
# What says which classes of an image are given.
CHOICES = ("top", "threshold", "coverage", "reject", "score")
SCORES = ("energy", "max_logit", "knn")
FORMATS = ("table", "csv", "jsonl", "pictures", "masks", "overlays")
# Those that make a folder of files.
_FOLDERS = ("pictures", "masks", "overlays")
# Those that a model with a class for each pixel has alone.
_OF_MAPS = ("masks", "overlays")
_SUFFIXES = {
    ".csv": "csv",
    ".jsonl": "jsonl",
    ".png": "pictures",
    ".jpg": "pictures",
    ".jpeg": "pictures",
}


def parsed_arguments() -> argparse.Namespace:
    """Returns the parsed command line. Without -output, ``output`` and ``temporary`` are None."""
    parser = Parser(__doc__)
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="weights that -eval takes, or a run's folder"
    )
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="IMAGES",
        help="files, folders, patterns, lists (.txt), URLs, videos, or -",
    )

    def option(name: str, **settings: Any) -> None:
        parser.add_argument(f"-{name}", f"--{name}", **settings)

    option(
        "cfg", metavar="FILE", help="the model's YAML file or name, if the weights don't name it"
    )
    parser.add_keys()
    text = (
        "names of the model's outputs, one per line, or imagenet1k; for CLIP and SigLIP any classes"
    )
    option("classes", metavar="FILE", help=text)
    text = 'for CLIP and SigLIP: sentences with {} for a class, one per line; default: "a photo of a {}."'
    option("templates", metavar="FILE", help=text)
    option(
        "top",
        type=whole_number(1),
        metavar="K",
        help="number of classes per image; default: 5, for several labels all",
    )
    option(
        "threshold",
        type=_share,
        metavar="P",
        help="for several labels: the lowest probability; default: the trained one",
    )
    option(
        "coverage",
        type=_share,
        metavar="P",
        help="calibrated weights: a set of classes that contains the right one with this probability",
    )
    option(
        "reject",
        type=_share,
        metavar="P",
        help="calibrated weights: detect images of something else, with this rate of false alarms",
    )
    option("score", choices=SCORES, help="the score of -reject; default: energy")
    option(
        "format",
        choices=FORMATS,
        help="format of the output; default: by the ending of -output, or table",
    )
    text = (
        "the file to write; for masks and overlays a new folder, for pictures a folder"
        " or a .png or .jpg of all"
    )
    option("output", type=Path, metavar="PATH", help=text)
    text = (
        "test-time augmentation: flip (the mirror image, too), five (centre and corners),"
        " ten (both); default: flip"
    )
    option("tta", nargs="?", const="flip", default="", choices=("flip", "five", "ten"), help=text)
    text = "of a video, predict the first frame of each N seconds; default: 1"
    option("every", type=_seconds, metavar="N", help=text)
    option(
        "batch_size",
        type=whole_number(1),
        default=32,
        metavar="N",
        help="images per device; default: 32",
    )
    option(
        "workers",
        type=whole_number(0),
        default=2,
        metavar="N",
        help="data loader workers per device; default: 2",
    )
    option(
        "ngpus",
        type=int,
        metavar="N",
        help="number of processes, one per device; -1: all devices; default: 1",
    )
    option(
        "amp",
        nargs="?",
        const="True",
        metavar="BOOL",
        help="half precision, as with -eval: needs -o AMP_EVAL True",
    )
    arguments = parser.parse_args()
    suffix = arguments.output.suffix.lower() if arguments.output else ""
    arguments.format = arguments.format or _SUFFIXES.get(suffix, "table")
    # One picture of all images, and not a folder of pictures.
    arguments.sheet = arguments.format == "pictures" and _SUFFIXES.get(suffix) == "pictures"
    arguments.options = list(arguments.o)
    if arguments.amp:
        arguments.options += ["AMP", arguments.amp]
    arguments.temporary = _temporary(arguments)
    return arguments


def _share(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= float(text) <= 1:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} isn't a probability from 0 to 1")


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0.001 <= float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} isn't a number of seconds from 0.001 on")


def _temporary(arguments: argparse.Namespace) -> Path | None:
    """Returns the temporary path for -output until it is complete. It is the same in all processes.

    Raises:
        InputError: -output can't be written.
    """
    if arguments.output is None:
        if arguments.format == "pictures":
            raise InputError(
                "-format pictures needs -output: a new folder, or a file that ends in .png or .jpg"
            )
        if arguments.format in _OF_MAPS:
            raise InputError(f"-format {arguments.format} needs -output: a new folder")
        return None
    arguments.named = arguments.output
    # Folders on the path to a file may be links, and so may a folder itself.
    output = arguments.output
    output = output.resolve() if output.is_dir() else output.parent.resolve() / output.name
    arguments.output = output
    flag = f"-output {printable(str(output))}"
    if not output.parent.is_dir():
        raise InputError(f"{flag}: there is no folder {printable(str(output.parent))}")
    if not os.access(output.parent, os.W_OK):
        raise InputError(f"{flag}: its folder isn't writable; give this user access to it")
    if arguments.format in _FOLDERS and not arguments.sheet:
        if os.path.lexists(output) and not (output.is_dir() and not any(output.iterdir())):
            raise InputError(f"{flag} already exists and isn't an empty folder; choose another")
    elif problem := files.obstacle(output):
        raise InputError(f"{flag}: {problem.strerror}; choose another")
    return files.unfinished_path(output)


class ReaderLeft(RunError):
    """The reader of standard output has left. The rank and the process that watches it end without
    a message.
    """

    exit_status = 128 + signal.SIGPIPE
    prefix = ""


@contextlib.contextmanager
def _reporting_reader_left() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise ReaderLeft("", shared=True) from None


def answer(arguments: argparse.Namespace, images: Any, config: Configuration) -> None:
    """Predicts the images. Each process runs this for its share of the images.

    Raises:
        RunError: some images can't be read. The others are predicted.
    """
    import utils
    from inference import Failure, Predictor
    from inference.calibration.choice import check_one_view
    from inference.distributed import check_same_images, predict_distributed
    from inference.inputs import class_names
    from inference.text.prompts import TEMPLATES, read_templates
    from training import parallel
    from training.setup import precision_text

    parallel.init(config)
    check_same_images(images)
    named = arguments.classes and class_names(arguments.classes)
    templates = list(TEMPLATES)
    if arguments.templates:
        templates = read_templates(arguments.templates)
    how = {"workers": arguments.workers, "tta": arguments.tta}
    failed = 0
    with reporting_memory(lambda: f"lower -batch_size (now {arguments.batch_size})"):
        predictor = Predictor(
            arguments.checkpoint,
            arguments.cfg,
            arguments.options,
            named,
            arguments.batch_size,
            templates,
        )
        if arguments.templates:
            predictor.check_text_tower()
        check_format(arguments, predictor)
        if predictor.warning and utils.rank() == 0:
            print(f"warning: {predictor.warning}", file=sys.stderr)
        outputs = predictor.config.MODEL.NUM_CLASSES
        # A picture's caption has space for a few classes only.
        default_top = 5
        if predictor.gives_maps or (predictor.has_several and arguments.format != "pictures"):
            default_top = outputs
        top = min(outputs, arguments.top or default_top)
        if not predictor.gives_maps:
            how |= {
                "threshold": arguments.threshold,
                "coverage": arguments.coverage,
                "reject": arguments.reject,
                "score": arguments.score,
                # A set has as many classes as it takes.
                "top": top if arguments.coverage is None else arguments.top,
            }
            choice = predictor.choice(**{name: how[name] for name in CHOICES})
            check_one_view(choice, arguments.tta)
        if arguments.amp and utils.rank() == 0:
            print(f"computes in {precision_text(predictor.config)}", file=sys.stderr)
        with writing(arguments, predictor, images, top) as (write, bar):
            for part in predict_distributed(predictor, images, **how):
                for each in part:
                    write(each)
                    failed += isinstance(each, Failure)
                bar.update(len(part))
    signals.end_workers()
    if failed:
        where = "picture" if arguments.format in ("pictures", "overlays") else "row"
        told = f"each {where} shows the reason"
        if arguments.format == "masks":
            told = "they have no mask; see -format csv"
        raise RunError(f"{failed} of {len(images)} images can't be read; {told}", shared=True)


def check_format(arguments: argparse.Namespace, predictor: Any) -> None:
    """Raises InputError if the model has no answers of the format, or a flag is for other models."""
    if not predictor.gives_maps:
        predictor.check_classifier()
        if arguments.format in _OF_MAPS:
            predictor.check_maps()
    elif arguments.format == "pictures":
        raise InputError(
            "-format pictures is for image classes; use -format overlays or masks for"
            f" pixel classes (TASK {predictor.task})"
        )
    elif arguments.tta not in ("", "flip"):
        raise InputError(
            f"-tta {arguments.tta} crops images, but each pixel needs a class; use -tta flip"
        )
    for flag in ("coverage", "reject", "score"):
        if getattr(arguments, flag) is not None and predictor.gives_maps:
            raise InputError(f"-{flag} is for image classes; leave it out")
    if arguments.threshold is not None and not predictor.has_several:
        raise InputError("-threshold is for models with several labels per image; use -top")


@contextlib.contextmanager
def writing(
    arguments: argparse.Namespace, predictor: Any, images: Any, top: int
) -> Iterator[tuple[Any, Any]]:
    """Yields a function that writes an answer, and a progress bar. On all ranks but the first, the
    function is None, and the bar shows nothing.
    """
    from tqdm import tqdm

    import utils
    from inference import prediction_writers

    if utils.rank():
        yield None, tqdm(disable=True)
        return
    config = predictor.config
    # Both are paths, or None for standard output.
    path: Any = arguments.output
    temporary: Any = arguments.temporary
    # A bar would break the lines of answers on a terminal.
    on_terminal = not arguments.output and os.isatty(1)
    with contextlib.ExitStack() as stack:
        bar = tqdm(
            total=len(images), unit=" images", disable=on_terminal or None, dynamic_ncols=True
        )
        stack.enter_context(contextlib.closing(bar))
        if arguments.format not in _FOLDERS:
            if arguments.output:
                opened = prediction_writers.text_file(path, temporary)
            else:
                opened = prediction_writers.standard_output(utils.world_size() > 1)
            out = stack.enter_context(opened)
            writer = prediction_writers.text_writer(
                arguments.format,
                out,
                images,
                predictor.classes,
                predictor.gives_maps,
                arguments.reject is not None,
            )
            write: Any = writer.write
            if predictor.gives_maps:
                write = areas_writer(writer, predictor.classes, top)
            yield write, bar
            out.flush()
            return
        from inference import captions, map_pictures

        if arguments.format in _OF_MAPS:
            kind = arguments.format
            folder = map_pictures.Folder(kind, config, images, temporary, path, predictor.classes)
            yield folder.write, bar
        elif arguments.sheet:
            sheet = captions.Sheet(config, images, top)
            yield sheet.write, bar
            sheet.save(temporary, path)
        else:
            yield captions.Folder(config, images, temporary, path, top).write, bar
        prediction_writers.move_into_place(temporary, path)


def areas_writer(writer: Any, classes: list[str], top: int) -> Any:
    """Returns a function that writes the areas of a map's ``top`` largest classes."""
    from inference import Failure
    from inference.maps import areas

    def write(outcome: Any) -> None:
        if not isinstance(outcome, Failure):
            found = areas(outcome, classes)
            outcome = found._replace(
                outputs=found.outputs[:top],
                classes=found.classes[:top],
                percents=found.percents[:top],
            )
        writer.write(outcome)

    return write


def images_of(arguments: argparse.Namespace, stdin: IO[bytes] | None = None) -> Any:
    """Returns the paths, URLs and frames that the command line names."""
    from inference.inputs import paths_of
    from loading.transforms.video import frame_of

    every = arguments.every or EVERY
    images = paths_of(arguments.inputs, stdin, urls=True, every=every)
    if arguments.every is not None and not any(map(frame_of, images)):
        raise InputError("-every is for videos, and none is given; leave it out")
    return images


def spawned_rank(failed: Any, beats: Any, handed: spawned.SharedObjects) -> None:
    """Runs a rank that this program started."""
    with as_rank(failed, beats), _reporting_reader_left():
        answer(*handed.open())


def launched_rank(
    arguments: argparse.Namespace, failed: Any, beats: Any, config: Configuration
) -> None:
    """Runs a rank that a launcher started. One rank of each machine lists the images for all."""
    with as_rank(failed, beats), _reporting_reader_left():
        from inference.inputs import check_output

        key = repr(("images", arguments.inputs, arguments.every)).encode()
        [images] = sharing.read_once(lambda: (images_of(arguments),), key)
        check_output(arguments.output, (arguments.checkpoint, *arguments.inputs), images)
        launched.wait_for_all()
        answer(arguments, images, config)


def run(arguments: argparse.Namespace) -> None:
    """Predicts in one process or in several, which this program or a launcher starts."""
    dist_options = []
    for key, value in pairs(arguments.o, default_values()):
        if key.startswith("DIST."):
            dist_options += [key, value]
    config = get_config(None, ["EVAL", "True", *dist_options])
    if launchers.is_launched():
        if arguments.ngpus is not None:
            raise InputError("-ngpus can't be used with a launcher; leave it out")
        launched.watch(functools.partial(launched_rank, arguments), config)
    import_paddle()
    import utils
    from config import with_values
    from inference.export_manifest import is_export
    from inference.inputs import check_output, standard_input
    from loading import remote

    ranks = utils.num_processes(1 if arguments.ngpus is None else arguments.ngpus)
    images = images_of(arguments, standard_input())
    check_output(arguments.output, (arguments.checkpoint, *arguments.inputs), images)
    exported = is_export(arguments.checkpoint)
    if ranks == 1 and not exported:
        answer(arguments, images, config)
        return
    if exported and "DIST.TIMEOUT" not in dist_options:
        per_image = EXPORT_SECONDS_PER_IMAGE
        if any(map(remote.is_url, images)):
            per_image += remote.SECONDS
        seconds = EXPORT_SECONDS + per_image * arguments.batch_size
        config = with_values(config, DIST__TIMEOUT=seconds)
    if ranks > 1:
        spawned.prepare_spawn()

    def start(config: Configuration, count: int, failed: Any, beats: Any) -> Any:
        return spawn(spawned_rank, count, failed, beats, arguments, images, config)

    spawned.run(config, ranks, start)


def main() -> None:
    arguments = parsed_arguments()
    try:
        with files.removing_if_stopped(arguments.temporary):
            run(arguments)
        if arguments.output:
            print(f"{printable(str(arguments.named))} is written")
    except BrokenPipeError:
        # The reader has left, as ``| head`` does.
        os._exit(128 + signal.SIGPIPE)
    finally:
        files.remove(arguments.temporary)


if __name__ == "__main__":
    with reporting():
        main()
