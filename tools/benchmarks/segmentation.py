"""``segmentation`` compares training steps and evaluations of segmentation models with those of the
library transformers.

Both sides have the same architecture, random images of 512 x 512 or DATA.IMAGE_SIZE, masks of 150
classes, and AdamW. A training step normalises uint8 images, computes logits and the cross-entropy
at the masks' size, the backward pass and the update. An evaluation computes the logits at the
masks' size and their largest class for each pixel. Ours also computes the loss and counts the
pixels of each pair of classes there, one image at a time. Neither reads files. Reports are counted
as in ``train``, and each figure has a process of its own, whose peak memory is shown.
"""

import argparse
import functools
import statistics
from pathlib import Path
from typing import Any

from config import get_config
from errors import InputError, counted
from launch.files import temporary_folder
from settings.configuration import pair
from tools.benchmarks.measure import (
    Benchmark,
    Ratio,
    ask,
    measure,
    option_words,
    positive,
    timm_versions,
)
from tools.benchmarks.training import STEPS, without_recipe

CLASSES = 150
# For each encoder and head that transformers has, too: the configuration file of the encoder, and
# the keys of the model.
MODELS = {
    "segformer_b0_ade20k": ("mit_b0", {"HEAD.NAME": "segformer"}),
    "upernet_swin_tiny_ade20k": (
        "swin_tiny_patch4_window7_224",
        {"HEAD.NAME": "upernet", "HEAD.AUXILIARY": True},
    ),
}
_FIGURES = {"train": "training", "eval": "evaluation"}


def segmentation(arguments: argparse.Namespace) -> None:
    """Measures training and evaluation of one of MODELS beside transformers.

    Raises:
        InputError: there is no such model, transformers isn't there, or keys aren't free here.
    """
    positive(arguments, "batch_size", "reports", "threads")
    name = arguments.cfg
    if name not in MODELS:
        raise InputError(f"-cfg {name}: transformers is compared on {', '.join(MODELS)}")
    with temporary_folder() as folder:
        measure(_benchmark(arguments, folder), arguments)


def _benchmark(arguments: argparse.Namespace, folder: Path) -> Benchmark:
    name = arguments.cfg
    cfg, keys = MODELS[name]
    cfg = without_recipe(cfg, folder)
    arguments = argparse.Namespace(**vars(arguments) | {"cfg": cfg})
    fixed = {
        "TASK": "segmentation",
        "MODEL.NUM_CLASSES": CLASSES,
        "DATA.BATCH_SIZE": arguments.batch_size,
        "DATA.CROP_MODE": "own",
        "TUNE_CPU": True,
        "AMP": False,
    }
    options = option_words(arguments, fixed | keys, {"DATA.IMAGE_SIZE": 512})
    config = get_config(cfg, options)
    height, width = pair(config.DATA.IMAGE_SIZE)
    request: dict[str, Any] = {
        "cfg": cfg,
        "options": options,
        "model": name,
        "image": [3, height, width],
        "classes": CLASSES,
        "droppath": config.MODEL.DROPPATH,
        "mean": config.DATA.IMAGENET_MEAN,
        "std": config.DATA.IMAGENET_STD,
        "weight_decay": config.TRAIN.WEIGHT_DECAY,
        "batch_size": arguments.batch_size,
        "steps": STEPS,
        "reports": arguments.reports,
        "threads": arguments.threads,
    }

    def one_run(*side: str) -> dict[str, list[float]]:
        figures = {}
        for what, shown in _FIGURES.items():
            answer = ask(side[0], request | {"measure": what}, arguments.threads, *side[1:])
            figures[shown] = [statistics.median(answer["images_per_s"])]
            figures[f"{shown}, peak memory"] = [answer["peak_memory"]]
        return figures

    kinds = {"ours": functools.partial(one_run, "our_segmentation.py")}
    peers = {}
    ratios = []
    if arguments.against:
        python = arguments.timm_python
        peers = timm_versions(python)
        kinds["transformers"] = functools.partial(one_run, "segmentation_peer.py", python)
        ratios = [Ratio(shown, "ours", "transformers") for shown in _FIGURES.values()]
    units = {}
    for shown in _FIGURES.values():
        units |= {shown: "images/s", f"{shown}, peak memory": "MB"}
    title = (
        f"{name}, {height} x {width}, batch {arguments.batch_size},"
        f" {counted(arguments.threads, 'thread')}, float32"
    )
    return Benchmark(title, kinds, units, ratios, peers)
