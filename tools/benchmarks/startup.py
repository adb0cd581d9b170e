"""``startup``: seconds from the command to the end of the first step, and what they are made of.

Each run is the program itself (our_startup.py calls its ``main``), on synthetic images, with one
step. The parts lie between the moments at which its lines arrive here, and add up to the whole. The
run's first report (data_wait) tells the last two. Spawned processes import everything again: that
is in their "processes".

Besides, ``-X importtime`` tells how long importing one process's modules took, by package: once,
and in a run of its own, for telling takes time too.
"""

import argparse
import collections
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from errors import RunError
from launch.files import temporary_folder
from launch.startup import end_with_parent
from tools.benchmarks.measure import (
    HERE,
    ROOT,
    Benchmark,
    environment,
    measure,
    option_words,
    positive,
    train_records,
)
from tools.benchmarks.our_startup import IMPORTS

# What begins when the one before has ended, and the line that ends it.
_PARTS = {
    "interpreter": "^begun",
    "imports": "^imported",
    "data set": "^data$",
    "processes": " configuration, where ",
    "model, optimizer": r": [\d,]+ parameters",
    "checkpoints, loaders": "epoch 1/1 step 1:",
}
_WAIT = "waiting for the first batch"
_STEP = "first step"


def startup(arguments: argparse.Namespace) -> None:
    """Measures the start of runs on each of ``--processes``.

    Raises:
        InputError: keys aren't free here, or more processes are asked for than there are cores.
    """
    positive(arguments, "batch_size", "processes")
    batch = arguments.batch_size
    fixed = {
        "TRAIN.NUM_EPOCHS": 1,
        "TRAIN.WARMUP_EPOCHS": 0,
        "TRAIN.ACCUM_ITER": 1,
        "REPORT_FREQ": 1,
        "SAVE_FREQ": 0,
    }
    fixed |= {"DATA.DATASET": "synthetic", "DATA.BATCH_SIZE": batch}
    fixed |= {"DATA.SYNTHETIC_SIZE": batch * max(arguments.processes)}
    options = option_words(arguments, fixed)
    kinds: dict[str, Callable[[], dict[str, list[float]]]] = {
        f"{n} process{'es' * (n > 1)}": lambda n=n: {
            what: [s] for what, s in start(arguments.cfg, n, options).items()
        }
        for n in dict.fromkeys(arguments.processes)
    }
    title = (
        f"{arguments.cfg}, batch {batch} per process, from the command to the end of the first step"
    )
    once = iter([import_times()])
    kinds["1 process, -X importtime"] = lambda: next(once, {})
    measure(Benchmark(title, kinds, {"": "s"}), arguments)


def start(cfg: str, processes: int, options: list[str]) -> dict[str, float]:
    """Returns the seconds of each part of one run's start, and their sum.

    Raises:
        RunError: the run failed, or one of its lines wasn't found.
    """
    name, many = (
        ("main_single_gpu", []) if processes == 1 else ("main_multi_gpu", [f"-ngpus={processes}"])
    )
    with temporary_folder() as folder:
        flags = [f"-cfg={cfg}", f"-output={folder}/run", *many, "-o", *options]
        command = [sys.executable, str(HERE / "our_startup.py"), name, *flags]
        moments = [time.perf_counter()]
        awaited = list(_PARTS.values())
        streams = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
            "preexec_fn": end_with_parent,
        }
        with subprocess.Popen(command, env=environment(None), **streams) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            for line in process.stdout:
                if awaited and re.search(awaited[0], line.rstrip()):
                    moments.append(time.perf_counter())
                    del awaited[0]
            told = process.stderr.read().strip()
        if process.returncode or awaited:
            raise RunError(
                f"{name} ended with status {process.returncode}: {told or 'no line ' + awaited[0]}"
            )
        first = train_records(Path(folder) / "run")[0]
    parts = {
        part: end - begin for part, begin, end in zip(_PARTS, moments, moments[1:], strict=False)
    }
    step = first["samples"] / first["images_per_s"]
    parts["checkpoints, loaders"] -= step
    parts |= {_WAIT: first["data_wait"] * step, _STEP: (1 - first["data_wait"]) * step}
    return {"all": moments[-1] - moments[0], **parts}


def import_times(count: int = 10) -> dict[str, list[float]]:
    """Returns the ``count`` packages whose modules took longest to import, each without those of
    others, and the sum of all packages.
    """
    modules = ", ".join(["main_single_gpu", *IMPORTS["main_single_gpu"].split()])
    command = [sys.executable, "-X", "importtime", "-c", f"import {modules}"]
    done = subprocess.run(
        command,
        env=environment(None),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=end_with_parent,
    )
    seconds: dict[str, float] = collections.defaultdict(float)
    for line in done.stderr.splitlines():
        if found := re.match(r"import time: +(\d+) \| +\d+ \| +([\w.]+)", line):
            seconds[found[2].partition(".")[0]] += int(found[1]) / 1e6
    longest = sorted(seconds, key=seconds.__getitem__, reverse=True)[:count]
    return {"imports": [sum(seconds.values())]} | {name: [seconds[name]] for name in longest}
