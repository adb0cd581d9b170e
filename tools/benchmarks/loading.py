"""``loader``: images/s of the training or evaluation data, per worker, of the toolkit, timm and
PaddleViT's pipeline.

Each run is a process of its own. It measures the loader, whose batches are taken as fast as they
come and discarded. Then it measures the dataset alone, one image after the other. Each side reads
the same files; a list repeats them until they suffice for one epoch. Besides images/s there are
images per CPU second (of the loader: of its workers), which other work on the machine disturbs
less.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

from config import get_config, named_keys
from errors import InputError
from launch.files import temporary_folder
from launch.startup import end_with_parent
from settings.options import Configuration, pair, size_text
from tools.benchmarks.measure import (
    HERE,
    Benchmark,
    ask,
    each,
    measure,
    option_words,
    positive,
    timm_versions,
)

_SUFFIXES = (".jpg", ".jpeg", ".png")


def loader(arguments: argparse.Namespace) -> None:
    """Measures the training data's loading.

    Raises:
        InputError: no images, a peer that isn't there or can't do what is asked, keys that aren't
            free here.
    """
    positive(arguments, "workers", "images", "batch_size")
    own = "DATA.DATASET" in named_keys(arguments.o)
    if own and (arguments.against or arguments.data_path):
        raise InputError(
            "-o DATA.DATASET measures that data set alone; leave out --against and -data_path, or it"
        )
    augmented = arguments.auto_augment or arguments.color_jitter
    if augmented and arguments.evaluation:
        raise InputError(
            "--evaluation: its images aren't augmented; leave out --auto_augment and --color_jitter"
        )
    if (augmented or arguments.evaluation) and "paddlevit" in arguments.against:
        raise InputError(
            "--against paddlevit: its training images alone were rebuilt, without further augmentation"
        )
    with temporary_folder() as folder:
        fixed = {"DATA.BATCH_SIZE": arguments.batch_size, "DATA.NUM_WORKERS": arguments.workers}
        fixed |= {
            "TRAIN.AUTO_AUGMENT": arguments.auto_augment,
            "TRAIN.COLOR_JITTER": arguments.color_jitter,
        }
        if arguments.evaluation:
            fixed["DATA.BATCH_SIZE_EVAL"] = arguments.batch_size
        # More than the workers load ahead. As much follows the measured images: they work until the
        # clock stops.
        ahead = 4 * arguments.workers * arguments.batch_size
        warm_up = max(256, ahead)
        if not own:
            source = Path(arguments.data_path) if arguments.data_path else photographs(folder)
            _list(source, folder, warm_up + arguments.images + ahead)
            fixed |= {
                "DATA.DATASET": "imagenet2012",
                "DATA.DATA_PATH": str(folder),
                "MODEL.NUM_CLASSES": "auto",
            }
        options = option_words(arguments, fixed)
        config = get_config(arguments.cfg, options)
        if odd := [
            key for key, plain in _PLAIN.items() if arguments.against and config.TRAIN[key] != plain
        ]:
            raise InputError(
                f"--against: the peers' images have no TRAIN.{odd[0]}; set it to {_PLAIN[odd[0]]} with -o"
            )
        request = _crop(config) | {"measure": "loader", "cfg": arguments.cfg, "options": options}
        request |= {"list": f"{folder}/train_list.txt", "warm_up": warm_up}
        asked = (
            "images",
            "batch_size",
            "workers",
            "threads",
            "auto_augment",
            "color_jitter",
            "evaluation",
        )
        request |= {key: getattr(arguments, key) for key in asked}

        def side(
            script: str, pipeline: str, python: str = sys.executable
        ) -> dict[str, list[float]]:
            answer = ask(script, request | {"pipeline": pipeline}, arguments.threads, python)
            return _figures(answer, arguments.workers)

        kinds = {"ours": lambda: side("our_loader.py", "ours")}
        if "timm" in arguments.against:
            kinds["timm"] = lambda: side("timm_peer.py", "timm", arguments.timm_python)
        if "paddlevit" in arguments.against:
            kinds["paddlevit"] = lambda: side("our_loader.py", "paddlevit")
        title = (
            f"{size_text(config.DATA.IMAGE_SIZE)} pixels, workers {arguments.workers}, "
            f"batch {arguments.batch_size},"
        )
        images = config.DATA.DATASET if own else arguments.data_path or "make_photographs.py"
        title += f" {arguments.images} images a run of {images}"
        jitter = [f"colour jitter {arguments.color_jitter}"] * (arguments.color_jitter > 0)
        kind = "evaluation" if arguments.evaluation else "no further augmentation"
        title += f", {' and '.join([arguments.auto_augment, *jitter] if arguments.auto_augment else jitter) or kind}"
        compared = [row for what in _UNITS for row in each(what, ["ours"], list(kinds)[1:])]
        peers = timm_versions(arguments.timm_python) if "timm" in arguments.against else {}
        measure(Benchmark(title, kinds, _UNITS, compared, peers), arguments)


# What the peers' pipelines haven't, or not in the same way.
_PLAIN = {"CROP": "random_resized", "VFLIP": 0.0, "AFFINE": [0.0, 0.0, 0.0]}
_PLAIN |= {"RANDOM_ERASE_PROB": 0.0, "REPEATED_AUGMENT": 1}
_UNITS = {
    "dataset alone": "images/s",
    "dataset alone, CPU": "images/CPU s",
    "loader, per worker": "images/s",
    "loader, workers' CPU": "images/CPU s",
}


def _crop(config: Configuration) -> dict[str, Any]:
    data = config.DATA
    train = config.TRAIN
    found = {
        "size": pair(data.IMAGE_SIZE),
        "mean": data.IMAGENET_MEAN,
        "std": data.IMAGENET_STD,
        "hflip": train.HFLIP,
    }
    found |= {"scale": train.CROP_SCALE, "ratio": train.CROP_RATIO}
    found |= {"crop_pct": data.CROP_PCT, "eval_interpolation": data.INTERPOLATION}
    return found | {"interpolation": train.INTERPOLATION or data.INTERPOLATION}


def _figures(answer: dict[str, tuple[float, float]], workers: int) -> dict[str, list[float]]:
    rate, per_cpu = answer["loader"]
    return {
        what: [value]
        for what, value in zip(_UNITS, (*answer["dataset"], rate / workers, per_cpu), strict=True)
    }


def photographs(folder: Path) -> Path:
    """Makes some; returns their folder."""
    script = HERE.parent / "make_photographs.py"
    done = subprocess.run(
        [sys.executable, str(script), f"-output={folder / 'images'}"],
        capture_output=True,
        text=True,
        preexec_fn=end_with_parent,
    )
    if done.returncode:
        raise InputError(done.stderr.strip().removeprefix("error: "))
    return folder / "images"


def _list(source: Path, folder: Path, count: int) -> None:
    """Writes train_list.txt, and val_list.txt alike: the training images of a folder data set, over
    and over.
    """
    classes = sorted(entry for entry in (source / "train").glob("*") if entry.is_dir())
    lines = [
        f"{path.resolve()} {label}\n"
        for label, name in enumerate(classes)
        for path in sorted(name.rglob("*"))
        if path.suffix.lower() in _SUFFIXES
    ]
    if not lines:
        raise InputError(
            f"{source}: no images train/<class>/*{'|'.join(_SUFFIXES)}; -data_path takes such a folder"
        )
    for name in ("train_list.txt", "val_list.txt"):
        (folder / name).write_text("".join(lines * -(-count // len(lines))), encoding="utf-8")
