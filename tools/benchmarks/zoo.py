"""``zoo`` measures images/s and peak memory of training and evaluation, ours and timm's, for one
model of each architecture.

The figures are those of ``train --against timm`` and of ``eval --against timm`` (both eager). A
round makes the four runs of the first model, then those of the next one, and so on. The table also
shows which share of the machine's rate of matrix products our training reaches. our_sgemm.py
measures that rate once in each round. A training step counts as 3 forward passes, and a
multiply-add of models/costs.py as 2 operations.
"""

import argparse
from typing import Any

from config import find_config
from launch.files import temporary_folder
from tools.benchmarks.evaluation import evaluation_sides
from tools.benchmarks.measure import (
    MEMORY,
    Benchmark,
    Ratio,
    Run,
    ask,
    format_number,
    measure,
    positive,
    timm_versions,
)
from tools.benchmarks.training import training_sides
from tools.list_models import describe

# A model of each architecture that timm has, with about 25 million parameters if there is one.
ZOO = [
    "vit_small_patch16_224", "deit3_small_patch16_224", "beit_base_patch16_224", "eva02_small_patch14_224",
    "vit_small_patch16_dinov3", "cait_xxs36_224", "crossvit_15_224", "pit_s_224", "levit_256", "volo_d1_224",
    "xcit_small_12_p16_224", "swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256", "hiera_tiny_224",
    "naflexvit_base_patch16_gap",
    "tiny_vit_21m_224", "coat_lite_small", "pvtv2_b2", "caformer_s18", "convformer_s18", "poolformer_s24",
    "mobilevit_s", "halonet_50ts_256", "convnext_tiny", "convnextv2_tiny", "convmixer_1024_20", "mobileone_s4",
    "resnet50", "regnety_160", "mixer_b16_224", "resmlp_24_224", "gmlp_s16_224", "botnet50ts_256",
]  # fmt: skip
_SGEMM = "sgemm"


def zoo(arguments: argparse.Namespace) -> None:
    """Measures each model of ``-cfg`` beside timm's.

    Raises:
        InputError: timm isn't there, or a key isn't free here.
    """
    positive(arguments, "batch_size", "batches", "reports", "threads")
    peers = timm_versions(arguments.timm_python)
    compared = []
    kinds: dict[str, Run] = {_SGEMM: lambda: {_SGEMM: ask("our_sgemm.py", {}, arguments.threads)}}
    with temporary_folder() as folder:
        for cfg in arguments.cfg:
            model_arguments = argparse.Namespace(**vars(arguments) | _FIXED | {"cfg": cfg})
            training = training_sides(model_arguments, folder)
            evaluating = evaluation_sides(model_arguments, folder)
            kinds[f"{cfg}, training: ours"] = training["ours"]
            kinds[f"{cfg}, training: timm"] = training["timm"]
            kinds[f"{cfg}, evaluation: ours"] = evaluating["ours, eager"]
            kinds[f"{cfg}, evaluation: timm"] = evaluating["timm, eager"]
            compared += _ratios(cfg)
        title = (
            f"batch {arguments.batch_size}, one process of {arguments.threads} threads,"
            f" float32, {_SGEMM} in GFLOP/s"
        )
        units = {"": "images/s", _SGEMM: "GFLOP/s", MEMORY: "MB"}
        measure(Benchmark(title, kinds, units, compared, peers, rows=_rows), arguments)


# The arguments of ``train`` and ``eval`` that ``zoo`` has no flags for.
_FIXED = {"amp": False, "processes": 1, "timm_modes": ["eager"], "against": ["timm"]}


def _ratios(cfg: str) -> list[Ratio]:
    """Returns the ratios of rates and of memory, and the share of the rate of matrix products."""
    ratios = []
    for figure in ("", MEMORY):
        for what in ("training", "evaluation"):
            ours = f"{cfg}, {what}: ours"
            theirs = f"{cfg}, {what}: timm"
            name = f"{cfg}, {what}, {figure}" if figure else f"{cfg}, {what}"
            ratios.append(Ratio(figure or what, ours, theirs, name=name))
    # GFLOP of a training step, for each image
    operations = 3 * 2 * describe(find_config(cfg))["macs"] / 1e9
    share = Ratio(
        "training",
        f"{cfg}, training: ours",
        _SGEMM,
        factor=operations,
        name=f"{cfg}, share",
        base=_SGEMM,
    )
    return [*ratios, share]


def _rows(report: dict[str, Any]) -> list[str]:
    """Returns two tables in Markdown, one of rates and one of memory, with a line for each model.
    They show medians, and the smallest and the largest ratio in parentheses.
    """
    rates = _table(report, "training", "evaluation")
    memory = _table(report, MEMORY, MEMORY)
    sgemm = format_number(report["figures"][_SGEMM][_SGEMM]["median"])
    return [
        *rates,
        "",
        f"{_SGEMM}: {sgemm} GFLOP/s",
        "",
        f"{MEMORY} of the process, MB:",
        "",
        *memory,
    ]


def _table(report: dict[str, Any], *measured: str) -> list[str]:
    """Returns the lines of a table.

    Args:
        measured: the figures of training and of evaluation.
    """
    figures = report["figures"]
    ratios = {ratio["what"]: ratio for ratio in report["ratios"]}
    has_share = MEMORY not in measured
    titles = ["model", "training: ours", "timm", "ours / timm"]
    if has_share:
        titles.append("share of sgemm")
    titles += ["evaluation: ours", "timm", "ours / timm"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for cfg in (name.removesuffix(", share") for name in ratios if name.endswith(", share")):
        cells = [cfg]
        for what, figure in zip(("training", "evaluation"), measured, strict=True):
            for side in ("ours", "timm"):
                median = figures[f"{cfg}, {what}: {side}"][figure]["median"]
                cells.append(format_number(median))
            ratio = ratios[f"{cfg}, {what}" if has_share else f"{cfg}, {what}, {MEMORY}"]
            cells.append(f"{ratio['median']:.2f} ({ratio['min']:.2f}, {ratio['max']:.2f})")
            if has_share and what == "training":
                cells.append(f"{ratios[f'{cfg}, share']['median']:.0%}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines
