"""``loader`` measures the images/s of the training or evaluation data, per worker: those of the
toolkit, of timm and of PaddleViT's pipeline.

Each run is a process of its own. First it measures the loader, whose batches are taken as fast as
they come and discarded. Then it measures the dataset alone, one image after the other. All sides
read the same files, which a list repeats until they are enough for one epoch. The images per CPU
second are measured, too, because other programs on the machine disturb them less. For the loader,
these are CPU seconds of its workers.
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
from settings.configuration import Configuration, pair, size_text
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
        InputError: no images, a peer that isn't there or doesn't support the request, keys that aren't
            free here.
    """
    positive(arguments, "workers", "images", "batch_size")
    names_dataset = "DATA.DATASET" in named_keys(arguments.o)
    if names_dataset and (arguments.against or arguments.data_path):
        raise InputError(
            "-o DATA.DATASET measures that data set alone;"
            " leave out --against and -data_path, or it"
        )
    augmented = arguments.auto_augment or arguments.color_jitter
    if augmented and arguments.evaluation:
        raise InputError(
            "--evaluation: its images aren't augmented; leave out --auto_augment and --color_jitter"
        )
    if (augmented or arguments.evaluation) and "paddlevit" in arguments.against:
        raise InputError(
            "--against paddlevit: its training images alone were rebuilt,"
            " without further augmentation"
        )
    with temporary_folder() as folder:
        fixed = {
            "DATA.BATCH_SIZE": arguments.batch_size,
            "DATA.NUM_WORKERS": arguments.workers,
            "TRAIN.AUTO_AUGMENT": arguments.auto_augment,
            "TRAIN.COLOR_JITTER": arguments.color_jitter,
        }
        if arguments.evaluation:
            fixed["DATA.BATCH_SIZE_EVAL"] = arguments.batch_size
        # More images than the workers load ahead. As many follow the measured images, so that the
        # workers are busy until the clock stops.
        ahead = 4 * arguments.workers * arguments.batch_size
        warm_up = max(256, ahead)
        if not names_dataset:
            source = Path(arguments.data_path) if arguments.data_path else photographs(folder)
            _list(source, folder, warm_up + arguments.images + ahead)
            fixed |= {
                "DATA.DATASET": "imagenet2012",
                "DATA.DATA_PATH": str(folder),
                "MODEL.NUM_CLASSES": "auto",
            }
        options = option_words(arguments, fixed)
        config = get_config(arguments.cfg, options)
        if arguments.against:
            for key, plain in _PLAIN.items():
                if config.TRAIN[key] != plain:
                    raise InputError(
                        f"--against: the peers' images have no TRAIN.{key};"
                        f" set it to {plain} with -o"
                    )
        request = _crop(config) | {
            "measure": "loader",
            "cfg": arguments.cfg,
            "options": options,
            "list": f"{folder}/train_list.txt",
            "warm_up": warm_up,
            "images": arguments.images,
            "batch_size": arguments.batch_size,
            "workers": arguments.workers,
            "threads": arguments.threads,
            "auto_augment": arguments.auto_augment,
            "color_jitter": arguments.color_jitter,
            "evaluation": arguments.evaluation,
        }

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
        if names_dataset:
            source_name = config.DATA.DATASET
        else:
            source_name = arguments.data_path or "make_photographs.py"
        augmentation = []
        if arguments.auto_augment:
            augmentation.append(arguments.auto_augment)
        if arguments.color_jitter > 0:
            augmentation.append(f"colour jitter {arguments.color_jitter}")
        if not augmentation:
            plain = "evaluation" if arguments.evaluation else "no further augmentation"
            augmentation.append(plain)
        title = (
            f"{size_text(config.DATA.IMAGE_SIZE)} pixels, workers {arguments.workers},"
            f" batch {arguments.batch_size}, {arguments.images} images a run of {source_name},"
            f" {' and '.join(augmentation)}"
        )
        compared = [row for what in _UNITS for row in each(what, ["ours"], list(kinds)[1:])]
        peers = timm_versions(arguments.timm_python) if "timm" in arguments.against else {}
        measure(Benchmark(title, kinds, _UNITS, compared, peers), arguments)


# Keys of TRAIN that the peers' pipelines lack or treat differently, with the values that switch
# them off.
_PLAIN = {
    "CROP": "random_resized",
    "VFLIP": 0.0,
    "AFFINE": [0.0, 0.0, 0.0],
    "RANDOM_ERASE_PROB": 0.0,
    "REPEATED_AUGMENT": 1,
}
_UNITS = {
    "dataset alone": "images/s",
    "dataset alone, CPU": "images/CPU s",
    "loader, per worker": "images/s",
    "loader, workers' CPU": "images/CPU s",
}


def _crop(config: Configuration) -> dict[str, Any]:
    data = config.DATA
    train = config.TRAIN
    return {
        "size": pair(data.IMAGE_SIZE),
        "mean": data.IMAGENET_MEAN,
        "std": data.IMAGENET_STD,
        "hflip": train.HFLIP,
        "scale": train.CROP_SCALE,
        "ratio": train.CROP_RATIO,
        "crop_pct": data.CROP_PCT,
        "eval_interpolation": data.INTERPOLATION,
        "interpolation": train.INTERPOLATION or data.INTERPOLATION,
    }


def _figures(answer: dict[str, tuple[float, float]], workers: int) -> dict[str, list[float]]:
    rate, per_cpu = answer["loader"]
    return {
        what: [value]
        for what, value in zip(_UNITS, (*answer["dataset"], rate / workers, per_cpu), strict=True)
    }


def photographs(folder: Path) -> Path:
    """Makes photographs, and returns their folder."""
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
    """Writes train_list.txt and val_list.txt, with at least ``count`` lines. Both list the training
    images of a folder data set over and over.
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
            f"{source}: no images train/<class>/*{'|'.join(_SUFFIXES)};"
            " -data_path takes such a folder"
        )
    for name in ("train_list.txt", "val_list.txt"):
        (folder / name).write_text("".join(lines * -(-count // len(lines))), encoding="utf-8")
