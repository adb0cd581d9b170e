"""Measures this machine: the speed of training, or what saving costs it, each beside what is usual with Paddle.

    python tools/benchmark.py train -cfg=vit_small_patch16_224 -batch_size=8
    python tools/benchmark.py checkpoint -cfg=vit_base_patch16_224 [-output DIR] [--json FILE] [-o KEY VALUE ...]

``train``: images/s tuned (TUNE_CPU) and with Paddle's defaults. Each measurement is a run of main_single_gpu.py on
synthetic images, in a process of its own. The first report of each run is its warm-up and doesn't count.

``checkpoint``: seconds by checkpoint.Saver, and by paddle.save of the state dicts (tools/measure_saves.py).

The two kinds alternate, so that a machine whose speed drifts drifts for both.
"""

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a tool is run by its path: only tools/ is there to import from

from config import get_config  # noqa: E402
from errors import InputError, reported  # noqa: E402

STEPS = 2  # per report


def measure(cfg: str, batch_size: int, reports: int, tuned: bool) -> float:
    """Returns the median images/s over ``reports`` reports of one run, after its warm-up."""
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "TUNE_CPU": tuned,
            "DATA.SYNTHETIC_SIZE": batch_size * STEPS * (reports + 1),
            "REPORT_FREQ": STEPS,
            "TRAIN.NUM_EPOCHS": 1,
            "TRAIN.WARMUP_EPOCHS": 0,
        }
        flags = [f"-cfg={cfg}", "-dataset=synthetic", f"-batch_size={batch_size}", f"-output={folder}/run", "-o"]
        words = [str(word) for pair in options.items() for word in pair]
        command = [sys.executable, str(ROOT / "main_single_gpu.py"), *flags, *words]
        environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rates = [record["images_per_s"] for record in map(json.loads, lines) if record["split"] == "train"]
    return statistics.median(rates[1:])


def compare_training(arguments: argparse.Namespace) -> None:
    """Prints the rates of the two kinds, and their ratio, run by run."""
    rates: dict[str, list[float]] = {"tuned": [], "default": []}
    for _ in range(arguments.repeats):
        for kind in rates:
            rates[kind].append(measure(arguments.cfg, arguments.batch_size, arguments.reports, kind == "tuned"))
    print(f"{arguments.cfg}, batch {arguments.batch_size}, one process, {os.cpu_count()} cores, {platform.machine()}")
    for kind, values in rates.items():
        print(f"{kind:8} {statistics.median(values):6.2f} images/s  (min {min(values):.2f}, max {max(values):.2f})")
    ratios = [tuned / default for tuned, default in zip(rates["tuned"], rates["default"], strict=True)]
    print(f"ratio    {statistics.median(ratios):6.2f}           (min {min(ratios):.2f}, max {max(ratios):.2f})")


def compare_saving(arguments: argparse.Namespace) -> None:
    """Prints what a save costs by each kind, and writes every value into the file of ``--json``.

    Raises:
        InputError: nothing is to be measured; -o names a key that isn't free here, or what ``get_config`` refuses.
    """
    fixed = {"DATA.DATASET": "synthetic", "DATA.BATCH_SIZE": arguments.batch_size, "DATA.NUM_WORKERS": 0}
    fixed |= {"TRAIN.NUM_EPOCHS": 1, "TRAIN.WARMUP_EPOCHS": 0, "TRAIN.ACCUM_ITER": 1, "KEEP_LAST": 1, "SAVE_FREQ": 0}
    if taken := (fixed.keys() | {"OUTPUT", "DATA.SYNTHETIC_SIZE"}) & set(arguments.o[::2]):
        raise InputError(f"-o {' '.join(sorted(taken))}: this benchmark sets it itself; leave it out")
    if arguments.repeats < 1 or arguments.saves < 1:
        raise InputError(f"-repeats {arguments.repeats}, -saves {arguments.saves}: expected at least 1 of each")
    options = [*arguments.o, *(str(word) for pair in fixed.items() for word in pair)]
    get_config(arguments.cfg, options)  # an error is told before anything is measured
    found: dict[str, dict[str, list[float]]] = {"Saver": defaultdict(list), "paddle.save": defaultdict(list)}
    for _ in range(arguments.repeats):
        for kind, figures in found.items():
            with tempfile.TemporaryDirectory(dir=arguments.output) as folder:
                given = (kind, arguments.cfg, [*options, "OUTPUT", f"{folder}/run"], arguments.saves)
                with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                    for what, values in pool.submit(_measure_saves, *given).result().items():
                        figures[what] += values
    print(f"{arguments.cfg}, batch {arguments.batch_size}, one process, {os.cpu_count()} cores, {platform.machine()}")
    for kind, figures in found.items():
        print(f"\n{kind}: median (min, max)")
        for what, values in figures.items():
            digits, unit = (0, "MB") if what.startswith("memory") else (3, "s")
            middle, low, high = (f"{of(values):.{digits}f}" for of in (statistics.median, min, max))
            print(f"  {what:29} {middle:>7} {unit:2} ({low}, {high}), of {len(values)}")
    if arguments.json:
        Path(arguments.json).write_text(
            json.dumps({"command": sys.argv[1:], **found}, indent=2) + "\n", encoding="utf-8"
        )


def _measure_saves(*given: Any) -> dict[str, list[float]]:
    from tools.measure_saves import measure_saves  # Paddle's import, in this process of its own

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):  # the run's own lines
        return measure_saves(*given)


def main() -> None:
    parser = argparse.ArgumentParser("tools/benchmark.py", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="what", required=True)
    train, checkpoint = commands.add_parser("train"), commands.add_parser("checkpoint")
    for command, cfg, batch_size, repeats in (
        (train, "vit_small_patch16_224", 8, 3),
        (checkpoint, "vit_base_patch16_224", 2, 2),
    ):
        command.add_argument("-cfg", "--cfg", default=cfg, help="YAML file, or a model's name")
        command.add_argument("-batch_size", "--batch_size", type=int, default=batch_size)
        command.add_argument("-repeats", "--repeats", type=int, default=repeats, help="processes of each kind")
    train.add_argument("-reports", "--reports", type=int, default=3, help=f"reports of {STEPS} steps in a run")
    checkpoint.add_argument("-saves", "--saves", type=int, default=2, help="in each process")
    checkpoint.add_argument("-output", "--output", help="a folder on the disk to write to; default: the temporary one")
    checkpoint.add_argument("-json", "--json", help="a file for every value")
    checkpoint.add_argument("-o", nargs="*", default=[], metavar="KEY VALUE", help="any key of config.py")
    arguments = parser.parse_args()
    (compare_training if arguments.what == "train" else compare_saving)(arguments)


if __name__ == "__main__":
    with reported():
        main()
