"""``zoo``: images/s and peak memory of training and of evaluation, ours and timm's, one model of
each architecture.

Each figure is that of ``train --against timm`` or of ``eval --against timm`` (both eager). A
model's four runs follow each other; then comes the next model, and after the last one the next
round. Beside them stands the share of the machine's rate of matrix products that our training
reaches. That rate is sgemm's, which our_sgemm.py measures once in each round. A training step
counts as 3 forward passes, a multiply-add as 2 operations, as models/costs.py counts those.
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

# One of each architecture that timm has, of about 25 M parameters if there is one.
ZOO = [
    "vit_small_patch16_224", "deit3_small_patch16_224", "beit_base_patch16_224", "eva02_small_patch14_224",
    "vit_small_patch16_dinov3", "cait_xxs36_224", "crossvit_15_224", "pit_s_224", "levit_256", "volo_d1_224",
    "xcit_small_12_p16_224", "swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256", "hiera_tiny_224",
    "tiny_vit_21m_224", "coat_lite_small", "pvtv2_b2", "caformer_s18", "convformer_s18", "poolformer_s24",
    "mobilevit_s", "halonet_50ts_256", "convnext_tiny", "convnextv2_tiny", "convmixer_1024_20", "mobileone_s4",
    "resnet50", "regnety_160", "mixer_b16_224", "resmlp_24_224", "gmlp_s16_224",
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
            one = argparse.Namespace(**vars(arguments) | _FIXED | {"cfg": cfg})
            training = training_sides(one, folder)
            evaluating = evaluation_sides(one, folder)
            sides = {
                "training": training.values(),
                "evaluation": (evaluating["ours, eager"], evaluating["timm, eager"]),
            }
            for what, (ours, theirs) in sides.items():
                kinds |= {f"{cfg}, {what}: ours": ours, f"{cfg}, {what}: timm": theirs}
                compared.append(
                    Ratio(
                        what, f"{cfg}, {what}: ours", f"{cfg}, {what}: timm", name=f"{cfg}, {what}"
                    )
                )
            compared += [
                Ratio(MEMORY, one.of, one.over, name=f"{one.name}, {MEMORY}")
                for one in compared[-2:]
            ]
            operations = 6 * describe(find_config(cfg))["macs"] / 1e9
            compared.append(
                Ratio(
                    "training",
                    f"{cfg}, training: ours",
                    _SGEMM,
                    operations,
                    f"{cfg}, share",
                    _SGEMM,
                )
            )
        title = (
            f"batch {arguments.batch_size}, one process of {arguments.threads} threads, "
            f"float32, {_SGEMM} in GFLOP/s"
        )
        measure(
            Benchmark(
                title,
                kinds,
                {"": "images/s", _SGEMM: "GFLOP/s", MEMORY: "MB"},
                compared,
                peers,
                _rows,
            ),
            arguments,
        )


_FIXED = {"amp": False, "processes": 1, "timm_modes": ["eager"], "against": ["timm"]}


def _rows(report: dict[str, Any]) -> list[str]:
    """Returns two tables in Markdown, of rates and of memory, with a line for each model: medians,
    and in parentheses the least and the most of the ratios.
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
    """Returns the lines of a table: ``measured`` are a training's and an evaluation's figure."""
    figures = report["figures"]
    ratios = {one["what"]: one for one in report["ratios"]}
    with_share = MEMORY not in measured
    sides = ["ours", "timm", "ours / timm"]
    titles = [
        "model",
        "training: ours",
        *sides[1:],
        *["share of sgemm"] * with_share,
        "evaluation: ours",
        *sides[1:],
    ]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for cfg in (name.removesuffix(", share") for name in ratios if name.endswith(", share")):
        cells = [cfg]
        for what, figure in zip(("training", "evaluation"), measured, strict=True):
            cells += [
                format_number(figures[f"{cfg}, {what}: {side}"][figure]["median"])
                for side in sides[:2]
            ]
            found = ratios[f"{cfg}, {what}" if with_share else f"{cfg}, {what}, {MEMORY}"]
            cells.append(f"{found['median']:.2f} ({found['min']:.2f}, {found['max']:.2f})")
            cells += (
                [f"{ratios[f'{cfg}, share']['median']:.0%}"]
                if with_share and what == "training"
                else []
            )
        lines.append(f"| {' | '.join(cells)} |")
    return lines
