"""``dino`` compares DINO's training steps with those of the authors' code on torch.

Both sides train the same ViT with the same head, views of the same sizes, AdamW, clipped gradients
and a teacher. Ours is a run of main_single_gpu.py on synthetic images, which makes its views
meanwhile; the authors' views are made before. The last layer is trained. Reports are counted as in
``train``.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

from config import get_config
from errors import InputError, RunError, counted
from launch.files import temporary_folder
from tools.benchmarks.measure import (
    MEMORY,
    Benchmark,
    Ratio,
    ask,
    measure,
    option_words,
    positive,
)
from tools.benchmarks.training import (
    RATE,
    STEPS,
    fixed_options,
    our_training,
    without_recipe,
)

# The authors' networks by their width.
_MODELS = {192: "vit_tiny", 384: "vit_small", 768: "vit_base"}
# The authors' settings, where they aren't the defaults of our keys.
_DEFAULTS = {
    "METHOD.LOCAL_VIEWS": 6,
    "MODEL.DROPPATH": 0.1,
    "TRAIN.WEIGHT_DECAY": 0.04,
    "TRAIN.GRAD_CLIP": 3.0,
}


def dino(arguments: argparse.Namespace) -> None:
    """Measures DINO's steps beside the authors'.

    Raises:
        InputError: the authors' code or torch isn't there, they have no such network, or keys
            aren't free here.
    """
    positive(arguments, "batch_size", "reports", "threads")
    arguments.processes = 1
    peers = _peers(arguments)
    fixed = {"TASK": "dino", "METHOD.FREEZE_LAST_LAYER": 0}
    with temporary_folder() as folder:
        plain = without_recipe(arguments.cfg, folder)
        arguments = argparse.Namespace(**vars(arguments) | {"cfg": plain})
        options = option_words(arguments, fixed_options(arguments) | fixed, _DEFAULTS)
        request = _request(arguments, options)

        def theirs() -> dict[str, list[float]]:
            answer = ask("dino_peer.py", request, arguments.threads, arguments.python)
            rate = statistics.median(answer["images_per_s"])
            return {RATE: [rate], MEMORY: [answer["peak_memory"]]}

        views = f"2 x {request['size']} + {request['locals']} x {request['local_size']}"
        title = (
            f"{request['model']}, {views}, {request['outputs']} prototypes, batch"
            f" {arguments.batch_size}, {counted(arguments.threads, 'thread')}, float32"
        )
        kinds = {"ours": our_training(arguments, options), "authors": theirs}
        units = {RATE: "images/s", MEMORY: "MB"}
        ratios = [Ratio(RATE, "ours", "authors")]
        measure(Benchmark(title, kinds, units, ratios, peers), arguments)


def _peers(arguments: argparse.Namespace) -> dict[str, str]:
    """Returns the versions of the authors' side.

    Raises:
        InputError: a part of it isn't there.
    """
    if not (arguments.dino / "main_dino.py").is_file():
        raise InputError(
            f"--dino {arguments.dino}: found no main_dino.py; name a checkout of facebookresearch/dino"
        )
    try:
        return ask("dino_peer.py", {"measure": "versions"}, None, arguments.python)
    except (RunError, OSError) as error:
        raise InputError(
            f"--python {arguments.python} gave no torch ({error}); name an interpreter that has torch"
            " and torchvision"
        ) from None


def _request(arguments: argparse.Namespace, options: list[str]) -> dict[str, Any]:
    """Returns the request to the authors' side for the same work.

    Raises:
        InputError: they have no such network.
    """
    config = get_config(arguments.cfg, options)
    model = config.MODEL
    if model.TYPE.lower() not in ("vit", "deit") or model.EMBED_DIM not in _MODELS:
        raise InputError(
            f"-cfg {Path(arguments.cfg).stem}: the authors have ViTs of"
            f" {', '.join(map(str, _MODELS))} channels; choose one of these"
        )
    return {
        "measure": "train",
        "dino": str(arguments.dino.resolve()),
        "model": _MODELS[model.EMBED_DIM],
        "patch_size": model.PATCH_SIZE,
        "droppath": model.DROPPATH,
        "outputs": config.METHOD.PROTOTYPES,
        "size": config.DATA.IMAGE_SIZE,
        "locals": config.METHOD.LOCAL_VIEWS,
        "local_size": config.METHOD.LOCAL_SIZE,
        "mean": config.DATA.IMAGENET_MEAN,
        "std": config.DATA.IMAGENET_STD,
        "weight_decay": config.TRAIN.WEIGHT_DECAY,
        "clip_grad": config.TRAIN.GRAD_CLIP,
        "batch_size": arguments.batch_size,
        "steps": STEPS,
        "reports": arguments.reports,
        "threads": arguments.threads,
    }
