"""``infer`` measures the images/s of inference: ours (eager, and each export) and timm's (eager and
torch.compile).

A call is timed from images [B, C, S, S] float32 in memory to logits in memory. The weights are
random, and int8 is calibrated on crops of photographs, which doesn't change the speed. timm's
bfloat16 is a model in bfloat16, without autocast. max-autotune freezes the weights, because its
kernels for CPUs need that.
"""

import argparse
import functools
from typing import Any

from config import get_config
from errors import InputError
from launch.files import temporary_folder
from tools.benchmarks.measure import (
    Benchmark,
    Ratio,
    ask,
    measure,
    option_words,
    positive,
    timm_versions,
)
from tools.benchmarks.training import timm_request

# Calls that don't count: torch.compile makes its code at the first one.
WARM_UP = 5
MODELS = [
    "vit_tiny_patch16_224",
    "vit_small_patch16_224",
    "vit_base_patch16_224",
    "swin_tiny_patch4_window7_224",
    "convnext_tiny",
]
SIDES = (
    "paddle, float32",
    "paddle, bfloat16",
    "onnx, float32",
    "onnx, int8",
    "openvino, float32",
    "openvino, bfloat16",
    "openvino, int8",
)
MODES = ("eager", "compile", "max-autotune")
_RATE = "inference"


def infer(arguments: argparse.Namespace) -> None:
    """Measures inference of each model and batch size.

    Raises:
        InputError: nothing is to be measured, timm isn't there, or keys aren't free here.
    """
    positive(arguments, "batch_size", "threads")
    if arguments.seconds <= 0:
        raise InputError(f"--seconds {arguments.seconds}: expected more than 0")
    kinds = {}
    compared = []
    peers = {}
    if arguments.against:
        peers = timm_versions(arguments.timm_python)
    with temporary_folder() as folder:
        for number, cfg in enumerate(arguments.cfg):
            options = _options(arguments, cfg)
            request = {"cfg": cfg, "options": options, "folder": f"{folder}/{number}"}
            made = ask("our_inference.py", request | {"sides": arguments.sides}, arguments.threads)
            request |= {"warm_up": WARM_UP, "seconds": arguments.seconds}
            for batch in arguments.batch_size:
                sides = {
                    f"ours, {side}": request | {"side": side, "batch_size": batch}
                    for side in ("eager", *made)
                }
                if arguments.against:
                    sides |= _timm_sides(arguments, timm_request(cfg, options), batch)
                prefix = f"{cfg}, {batch}: "
                for side, side_request in sides.items():
                    kinds[prefix + side] = functools.partial(_rate, side_request, arguments)
                compared += _ratios(prefix, list(sides))
        title = f"one process of {arguments.threads} threads, {arguments.seconds:g} s a run"
        measure(Benchmark(title, kinds, {_RATE: "images/s"}, compared, peers), arguments)


def _options(arguments: argparse.Namespace, cfg: str) -> list[str]:
    arguments = argparse.Namespace(**vars(arguments) | {"cfg": cfg})
    return option_words(arguments, {"EVAL": True} if "EVAL" in get_config(cfg) else {})


def _timm_sides(
    arguments: argparse.Namespace, request: dict[str, Any], batch: int
) -> dict[str, dict[str, Any]]:
    """Returns the requests to timm's side, by its modes and precisions."""
    request = request | {
        "measure": "infer",
        "batch_size": batch,
        "warm_up": WARM_UP,
        "threads": arguments.threads,
        "seconds": arguments.seconds,
    }
    return {
        f"timm, {mode}, {precision}": request | {"mode": mode, "bfloat16": precision == "bfloat16"}
        for mode in arguments.timm_modes
        for precision in ("float32", "bfloat16")
    }


def _rate(request: dict[str, Any], arguments: argparse.Namespace) -> dict[str, list[float]]:
    if "side" in request:
        rates = ask("our_inference.py", request, arguments.threads)
    else:
        rates = ask("timm_peer.py", request, arguments.threads, arguments.timm_python)
    return {_RATE: rates}


def _ratios(prefix: str, sides: list[str]) -> list[Ratio]:
    """Returns the ratios of ours over theirs, each of the same precision. int8 is compared with
    float32.
    """
    ratios = []
    for ours in sides:
        if not ours.startswith("ours"):
            continue
        precision = "bfloat16" if ours.endswith("bfloat16") else "float32"
        for theirs in sides:
            if theirs.startswith("timm") and theirs.endswith(precision):
                ratios.append(Ratio(_RATE, prefix + ours, prefix + theirs))
    return ratios
