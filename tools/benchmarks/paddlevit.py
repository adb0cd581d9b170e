"""``paddlevit`` measures images/s and peak memory of training, ours and PaddleViT's own, for a model
of each family that only PaddleViT has.

Both sides compute the forward pass, cross entropy and the backward pass, and update by AdamW, in
float32 and without dropout or drop path. Ours is a whole run, which also makes and normalises its
images. PaddleViT's code is given one batch, made beforehand. Paddle has the threads on both sides.
"""

import argparse
import functools
import statistics
from pathlib import Path

from config import find_config, get_config
from errors import InputError
from launch.files import temporary_folder
from settings.names import names
from tools.benchmarks.measure import (
    MEMORY,
    Benchmark,
    Ratio,
    Run,
    ask,
    measure,
    option_words,
    positive,
)
from tools.benchmarks.training import RATE, STEPS, fixed_options, our_training, without_recipe

# The smallest model of each family.
PADDLEVITS = [
    "botnet50", "convmlp_s", "cswin_tiny_224", "cvt-13-224x224", "cyclemlp_b1", "ff_only_tiny",
    "focal_tiny_patch4_window7_224", "hvt_ti_1_patch16_224", "mobileformer_26m", "replknet_31b",
    "repmlp_b_224", "rest_lite", "restv2_tiny", "shuffle_vit_tiny_patch4_window7_224", "t2t_vit_7",
    "topformer_tiny", "vip_s7",
]  # fmt: skip


def paddlevit(arguments: argparse.Namespace) -> None:
    """Measures training steps of each model of ``-cfg`` beside PaddleViT's own.

    Raises:
        InputError: ``--paddlevit`` isn't a checkout of it, or a model isn't PaddleViT's.
    """
    positive(arguments, "batch_size", "reports", "threads")
    kinds: dict[str, Run] = {}
    ratios = []
    with temporary_folder() as folder:
        for cfg in arguments.cfg:
            ours = f"{cfg}: ours"
            theirs = f"{cfg}: PaddleViT"
            file = without_recipe(cfg, folder)
            own = argparse.Namespace(**vars(arguments) | {"cfg": file, "processes": 1})
            fixed = fixed_options(own) | _no_drops(file)
            kinds[ours] = our_training(own, option_words(own, fixed))
            kinds[theirs] = functools.partial(_theirs, _file(cfg, arguments.paddlevit), arguments)
            ratios += [
                Ratio(figure, ours, theirs, name=f"{cfg}, {figure}") for figure in (RATE, MEMORY)
            ]
        title = f"training, batch {arguments.batch_size}, {arguments.threads} threads, float32"
        units = {RATE: "images/s", MEMORY: "MB"}
        measure(Benchmark(title, kinds, units, ratios), arguments)


def _no_drops(cfg: str) -> dict[str, float]:
    """Returns the keys that turn off what a model drops by itself, without its recipe."""
    rates = get_config(cfg).MODEL
    return {
        f"MODEL.{key}": 0.0
        for key, rate in rates.items()
        if "DROP" in key and isinstance(rate, float)
    }


def _file(cfg: str, checkout: Path) -> Path:
    """Returns PaddleViT's YAML file of one of our models."""
    name = names(find_config(cfg)).get("PaddleViT")
    files = list(Path(checkout).glob(f"image_classification/*/configs/{name}.yaml"))
    if len(files) != 1:
        raise InputError(
            f"--paddlevit {checkout} has no configuration of {cfg}; expected a checkout of"
            " BR-IDL/PaddleViT, and one of its models"
        )
    return files[0].resolve()


def _theirs(file: Path, arguments: argparse.Namespace) -> dict[str, list[float]]:
    request = {
        "file": str(file),
        "batch_size": arguments.batch_size,
        "steps": STEPS,
        "reports": arguments.reports,
    }
    answer = ask("paddlevit_peer.py", request, arguments.threads)
    return {RATE: [statistics.median(answer["images_per_s"])], MEMORY: [answer["peak_memory"]]}
