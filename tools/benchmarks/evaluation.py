"""``eval`` measures the images/s of evaluation: ours (eager, and EVAL_ENGINE inference) and timm's
(eager and torch.compile).

Ours is a whole ``main_single_gpu.py -eval`` on synthetic images and random weights, timed from
batch to batch. timm's side reads the same weights, normalises random uint8 images and counts the
hits. The first WARM_UP batches of each run don't count. The peak memory is that of a run's process.
"""

import argparse
import functools
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

# Batches that don't count: torch.compile makes its code at the first one, and ours returns memory
# to the system up to the third one.
WARM_UP = 4
_RATE = "evaluation"


def evaluation(arguments: argparse.Namespace) -> None:
    """Measures evaluation. With ``-amp`` it runs in bfloat16; ours needs a CPU that has bfloat16.

    Raises:
        InputError: timm isn't there, or keys aren't free here.
    """
    positive(arguments, "batch_size", "batches", "threads")
    peers = timm_versions(arguments.timm_python) if arguments.against else {}
    with temporary_folder() as folder:
        kinds = evaluation_sides(arguments, folder)
        ours = [kind for kind in kinds if kind.startswith("ours")]
        theirs = [kind for kind in kinds if kind.startswith("timm")]
        precision = "bfloat16" if arguments.amp else "float32"
        title = (
            f"{arguments.cfg}, batch {arguments.batch_size},"
            f" one process of {arguments.threads} threads, {precision},"
            f" {arguments.batches} batches a run"
        )
        units = {_RATE: "images/s", MEMORY: "MB"}
        compared = each(_RATE, ours, theirs)
        measure(Benchmark(title, kinds, units, compared, peers), arguments)


def evaluation_sides(arguments: argparse.Namespace, folder: Path) -> dict[str, Run]:
    """Returns the runs of "ours, ENGINE" and, with ``--against timm``, those of "timm, MODE".

    Args:
        folder: where the model's random weights are written.
    """
    batch = arguments.batch_size
    has_engines = "EVAL_ENGINE" in get_config(arguments.cfg)
    engines = ["eager"]
    fixed = {
        "DATA.DATASET": "synthetic",
        "DATA.BATCH_SIZE_EVAL": batch,
        # One batch more, because the time is taken from the beginning of one to that of the next.
        "DATA.SYNTHETIC_SIZE": batch * (WARM_UP + arguments.batches + 1),
        # Synthetic images aren't resized, which would only take time.
        "DATA.CROP_PCT": 1.0,
        "TUNE_CPU": True,
        "AMP": arguments.amp,
        "EVAL": True,
    }
    if arguments.amp:
        fixed["AMP_EVAL"] = True
    if has_engines:
        engines.append("inference")
        fixed["EVAL_ENGINE"] = "eager"
    options = option_words(arguments, fixed)
    weights = f"{folder}/{Path(arguments.cfg).stem}.safetensors"
    request = {"cfg": arguments.cfg, "options": options, "weights": weights}
    ask("our_evaluation.py", request, arguments.threads)
    request["warm_up"] = WARM_UP

    def ours(engine: str) -> dict[str, list[float]]:
        chosen = list(options)
        if has_engines:
            chosen += ["EVAL_ENGINE", engine]
        with temporary_folder(folder) as output:
            own_request = request | {"options": chosen, "output": f"{output}/run"}
            return _figures(ask("our_evaluation.py", own_request, arguments.threads))

    kinds: dict[str, Run] = {f"ours, {name}": functools.partial(ours, name) for name in engines}
    if arguments.against:
        peer_request = timm_request(arguments.cfg, options) | {
            "measure": "eval",
            "batch_size": batch,
            "amp": arguments.amp,
            "threads": arguments.threads,
            "weights": weights,
            "warm_up": WARM_UP,
            "batches": arguments.batches,
        }

        def theirs(mode: str) -> dict[str, list[float]]:
            answer = ask(
                "timm_peer.py",
                peer_request | {"compile": mode == "compile"},
                arguments.threads,
                arguments.timm_python,
            )
            return _figures(answer)

        kinds |= {f"timm, {mode}": functools.partial(theirs, mode) for mode in arguments.timm_modes}
    return kinds


def _figures(answer: dict[str, Any]) -> dict[str, list[float]]:
    return {_RATE: answer["images_per_s"], MEMORY: [answer["peak_memory"]]}
