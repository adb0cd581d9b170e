"""``infer`` measures the images/s of inference: ours (eager, and each export) and timm's (eager and
torch.compile).

A call is timed from images [B, C, S, S] float32 in memory to logits in memory. The first table has
a row for each export: its size, images/s by batch size, and the median and 95th percentile of the
latency with the smallest batch. With -pretrained it has acc1 on the validation set of -data_path,
and on how many of its images the best class is that of the eager model in float32. Otherwise the
weights are random, which says nothing of accuracy. int8 is then calibrated on crops of photographs,
which doesn't change the speed. Exports that this CPU or a format doesn't have are listed below the
table, with the reason.

timm's bfloat16 is a model in bfloat16, without autocast. max-autotune freezes the weights, because
its kernels for CPUs need that.
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
    format_number,
    measure,
    option_words,
    positive,
    rows_of_all,
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
    "onnx, int8_weights",
    "openvino, float32",
    "openvino, bfloat16",
    "openvino, int8",
    "openvino, int8_weights",
    "openvino, int4_weights",
)
MODES = ("eager", "compile", "max-autotune")
_RATE = "inference"
# Of the latency of a call.
_MEDIAN = "p50"
_LATE = "p95"


def infer(arguments: argparse.Namespace) -> None:
    """Measures inference of each model and batch size.

    Raises:
        InputError: nothing is to be measured, timm isn't there, or keys aren't free here.
    """
    positive(arguments, "batch_size", "threads")
    if arguments.seconds <= 0:
        raise InputError(f"--seconds {arguments.seconds}: expected more than 0")
    if arguments.pretrained and (len(arguments.cfg) > 1 or arguments.against):
        raise InputError("-pretrained are the weights of one -cfg; leave out --against and others")
    if not arguments.pretrained and (arguments.dataset or arguments.data_path):
        raise InputError("-dataset and -data_path measure accuracy, which needs -pretrained")
    kinds = {}
    compared = []
    peers = {}
    exports = {}
    if arguments.against:
        peers = timm_versions(arguments.timm_python)
    with temporary_folder() as folder:
        for number, cfg in enumerate(arguments.cfg):
            options = _options(arguments, cfg)
            request = {"cfg": cfg, "options": options, "folder": f"{folder}/{number}"}
            trained = {"sides": arguments.sides, "pretrained": arguments.pretrained}
            trained["data"] = _data(arguments)
            exports[cfg] = ask("our_inference.py", request | trained, arguments.threads)
            made = exports[cfg]["made"]
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
        units = {_RATE: "images/s", _MEDIAN: "ms", _LATE: "ms"}

        def rows(report: dict[str, Any]) -> list[str]:
            lines = []
            for cfg, export in exports.items():
                lines += [*_table(report, cfg, export, arguments.batch_size), ""]
            return [*lines, *rows_of_all(report)]

        benchmark = Benchmark(
            title, kinds, units, compared, peers, rows, more=lambda _: {"exports": exports}
        )
        measure(benchmark, arguments)


def _data(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    """Returns the keys and values of the labelled set that the flags name."""
    flags = {"DATA.DATASET": arguments.dataset, "DATA.DATA_PATH": arguments.data_path}
    return [(key, value) for key, value in flags.items() if value]


def _table(
    report: dict[str, Any], cfg: str, export: dict[str, Any], batches: list[int]
) -> list[str]:
    """Returns the lines of a model's table in Markdown, of medians over the runs.

    Args:
        export: the answer of our_inference.py about the exports.
    """
    smallest = min(batches)
    titles = [cfg, "MB", f"p50 ms, {smallest}", f"p95 ms, {smallest}"]
    titles += [f"images/s, {batch}" for batch in batches]
    shares = export.get("shares", {})
    if shares:
        titles += [f"acc1, {export['images']['validation']} images", "as eager, %"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for side in ("eager", *export["made"]):
        megabytes = export["made"].get(side)
        cells = [side, format_number(megabytes) if megabytes else ""]
        figures = {batch: report["figures"][f"{cfg}, {batch}: ours, {side}"] for batch in batches}
        measured = [figures[smallest][_MEDIAN], figures[smallest][_LATE]]
        measured += [figures[batch][_RATE] for batch in batches]
        cells += [format_number(each["median"]) for each in measured]
        if shares:
            cells += [f"{shares[side]['acc1']:.2f}", f"{shares[side]['agreement']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, *(f"{side}: {reason}" for side, reason in export["refused"].items())]


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
        figures = ask("our_inference.py", request, arguments.threads)
        return {what: [value] for what, value in figures.items()}
    return {_RATE: ask("timm_peer.py", request, arguments.threads, arguments.timm_python)}


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
