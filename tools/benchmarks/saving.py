"""``checkpoint`` measures the time that saving takes from training, by checkpoint.Saver and by
paddle.save of the state dicts.

Each run is a process of its own (measure_saves.py).
"""

import argparse

from launch.files import temporary_folder
from tools.benchmarks.measure import Benchmark, ask, measure, option_words, positive


def checkpoint(arguments: argparse.Namespace) -> None:
    """Measures saving by each kind.

    Raises:
        InputError: nothing is to be measured; -o names a key that isn't free here, or what
            ``get_config`` refuses.
    """
    positive(arguments, "saves", "batch_size", "threads")
    fixed = {
        "DATA.DATASET": "synthetic",
        "DATA.BATCH_SIZE": arguments.batch_size,
        "DATA.NUM_WORKERS": 0,
        "TRAIN.NUM_EPOCHS": 1,
        "TRAIN.WARMUP_EPOCHS": 0,
        "TRAIN.ACCUM_ITER": 1,
        "KEEP_LAST": 1,
        "SAVE_FREQ": 0,
    }
    options = option_words(arguments, fixed | {"DATA.SYNTHETIC_SIZE": arguments.batch_size})

    def saves(kind: str) -> dict[str, list[float]]:
        with temporary_folder(arguments.output) as folder:
            request = {
                "kind": kind,
                "cfg": arguments.cfg,
                "options": [*options, "OUTPUT", f"{folder}/run"],
                "saves": arguments.saves,
            }
            return ask("measure_saves.py", request, arguments.threads)

    kinds = {kind: lambda kind=kind: saves(kind) for kind in ("Saver", "paddle.save")}
    title = (
        f"{arguments.cfg}, batch {arguments.batch_size},"
        f" one process of {arguments.threads} threads, {arguments.saves} saves a run"
    )
    units = {"": "s", "memory": "MB", "memory with saves": "MB"}
    measure(Benchmark(title, kinds, units), arguments)
