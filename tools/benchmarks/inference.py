"""``infer``: images/s of a model that only answers: ours (eager, and each export) and timm's (eager
and torch.compile).

What is timed is a call from images [B, C, S, S] float32 in memory to logits in memory. Weights are
random; int8 is calibrated on crops of photographs: the speed is the same. timm's bfloat16 is a
model of bfloat16, without autocast; max-autotune freezes the weights, which its kernels for CPUs
need.
"""

import argparse

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

WARM_UP = 5  # calls: of the first, torch.compile makes its code
MODELS = [
    "vit_tiny_patch16_224",
    "vit_small_patch16_224",
    "vit_base_patch16_224",
    "swin_tiny_patch4_window7_224",
]
MODELS += ["convnext_tiny"]
SIDES = ("paddle, float32", "paddle, bfloat16", "onnx, float32", "onnx, int8")
SIDES += ("openvino, float32", "openvino, bfloat16", "openvino, int8")
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
                    peer = timm_request(cfg, options) | {
                        "measure": "infer",
                        "batch_size": batch,
                        "warm_up": WARM_UP,
                    }
                    peer |= {"threads": arguments.threads, "seconds": arguments.seconds}
                    sides |= {
                        f"timm, {mode}, {kind}": peer
                        | {"mode": mode, "bfloat16": kind == "bfloat16"}
                        for mode in arguments.timm_modes
                        for kind in ("float32", "bfloat16")
                    }
                prefix = f"{cfg}, {batch}: "
                for side, asked in sides.items():
                    kinds[prefix + side] = lambda asked=asked: {_RATE: _ask(asked, arguments)}
                compared += _ratios(prefix, list(sides))
        title = f"one process of {arguments.threads} threads, {arguments.seconds:g} s a run"
        measure(Benchmark(title, kinds, {_RATE: "images/s"}, compared, peers), arguments)


def _options(arguments: argparse.Namespace, cfg: str) -> list[str]:
    one = argparse.Namespace(**vars(arguments) | {"cfg": cfg})
    return option_words(one, {"EVAL": True} if "EVAL" in get_config(cfg) else {})


def _ask(request: dict, arguments: argparse.Namespace) -> list[float]:
    if "side" in request:
        return ask("our_inference.py", request, arguments.threads)
    return ask("timm_peer.py", request, arguments.threads, arguments.timm_python)


def _ratios(prefix: str, sides: list[str]) -> list[Ratio]:
    """Ours over theirs: a precision over the same one; int8 over float32."""
    pairs = [
        (one, other)
        for one in sides
        for other in sides
        if one.startswith("ours") and other.startswith("timm") and other.endswith(_peer(one))
    ]
    return [Ratio(_RATE, prefix + one, prefix + other) for one, other in pairs]


def _peer(side: str) -> str:
    return "bfloat16" if side.endswith("bfloat16") else "float32"
