"""``eval``: images/s of evaluation, ours (eager, and EVAL_ENGINE inference) and timm's (eager and
torch.compile).

Ours is a whole ``main_single_gpu.py -eval`` on synthetic images and random weights, timed from
batch to batch. timm's reads the same weights. It takes random uint8 images, normalises them and
counts the hits. The first WARM_UP batches of each run don't count. Each run tells the peak memory
of its process.
"""

import argparse
from pathlib import Path
from typing import Any

from config import get_config
from launch.files import temporary_folder
from tools.benchmarks.measure import (
    MEMORY,
    Benchmark,
    Run,
    ask,
    each,
    measure,
    option_words,
    positive,
    timm_versions,
)
from tools.benchmarks.training import timm_request

# batches: at the first, torch.compile makes its code; up to the third, ours gives memory back
WARM_UP = 4
_RATE = "evaluation"


def evaluation(arguments: argparse.Namespace) -> None:
    """Measures evaluation; with ``-amp`` in bfloat16, which eager layers have where the CPU has it.

    Raises:
        InputError: timm isn't there, or keys aren't free here.
    """
    positive(arguments, "batch_size", "batches", "threads")
    peers = timm_versions(arguments.timm_python) if arguments.against else {}
    with temporary_folder() as folder:
        kinds = evaluation_sides(arguments, folder)
        own = [kind for kind in kinds if kind.startswith("ours")]
        title = f"{arguments.cfg}, batch {arguments.batch_size}, one process of {arguments.threads} threads,"
        title += f" {'bfloat16' if arguments.amp else 'float32'}, {arguments.batches} batches a run"
        compared = each(_RATE, own, [kind for kind in kinds if kind not in own])
        measure(
            Benchmark(title, kinds, {_RATE: "images/s", MEMORY: "MB"}, compared, peers), arguments
        )


def evaluation_sides(arguments: argparse.Namespace, folder: Path) -> dict[str, Run]:
    """Returns the runs of "ours, ENGINE" and, if timm is asked for, of "timm, MODE".

    Args:
        folder: where the model's random weights are written.
    """
    batch = arguments.batch_size
    engine = "EVAL_ENGINE" in get_config(arguments.cfg)
    engines = ["eager", *(["inference"] if engine else [])]
    # One batch more: the time runs from beginning to beginning. Resizing synthetic images would
    # only take time.
    fixed = {
        "DATA.DATASET": "synthetic",
        "DATA.BATCH_SIZE_EVAL": batch,
        "DATA.CROP_PCT": 1.0,
        "TUNE_CPU": True,
    }
    fixed |= {
        "DATA.SYNTHETIC_SIZE": batch * (WARM_UP + arguments.batches + 1),
        "AMP": arguments.amp,
        "EVAL": True,
    }
    if arguments.amp:
        fixed["AMP_EVAL"] = True
    if engine:
        fixed["EVAL_ENGINE"] = "eager"
    options = option_words(arguments, fixed)
    weights = f"{folder}/{Path(arguments.cfg).stem}.safetensors"
    request = {"cfg": arguments.cfg, "options": options, "weights": weights}
    ask("our_evaluation.py", request, arguments.threads)
    request["warm_up"] = WARM_UP

    def ours(name: str) -> dict[str, list[float]]:
        with temporary_folder(folder) as output:
            chosen = [*options, *(["EVAL_ENGINE", name] if engine else [])]
            asked = request | {"options": chosen, "output": f"{output}/run"}
            return _figures(ask("our_evaluation.py", asked, arguments.threads))

    kinds: dict[str, Run] = {f"ours, {name}": lambda name=name: ours(name) for name in engines}
    if arguments.against:
        peer = timm_request(arguments.cfg, options) | {"measure": "eval", "batch_size": batch}
        peer |= {"amp": arguments.amp, "threads": arguments.threads, "weights": weights}
        peer |= {"warm_up": WARM_UP, "batches": arguments.batches}

        def theirs(mode: str) -> dict[str, list[float]]:
            asked = peer | {"compile": mode == "compile"}
            return _figures(ask("timm_peer.py", asked, arguments.threads, arguments.timm_python))

        kinds |= {f"timm, {mode}": lambda mode=mode: theirs(mode) for mode in arguments.timm_modes}
    return kinds


def _figures(answer: dict[str, Any]) -> dict[str, list[float]]:
    return {_RATE: answer["images_per_s"], MEMORY: [answer["peak_memory"]]}
