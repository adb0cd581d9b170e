"""``startup`` measures the seconds from the command to the end of the first step, part by part.

Each run is the program itself (our_startup.py calls its ``main``), on synthetic images, with one
step. A part lasts from one of its lines to the next, and all parts add up to the whole. The last
two parts come from the run's first report (data_wait). Spawned processes import everything again,
which counts as "processes".

``-X importtime`` also measures how long one process imports the modules of each package. It slows
the import down, so it gets a run of its own, once.
"""

import argparse
import collections
import functools
import re
import subprocess
import sys
import time
from pathlib import Path

from errors import RunError, counted
from launch.files import temporary_folder
from launch.startup import end_with_parent
from tools.benchmarks.measure import (
    HERE,
    ROOT,
    Benchmark,
    Run,
    environment,
    measure,
    option_words,
    positive,
    train_records,
)
from tools.benchmarks.our_startup import IMPORTS

# Each part begins when the one before ends, and ends with a line of this pattern.
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
        "DATA.DATASET": "synthetic",
        "DATA.BATCH_SIZE": batch,
        "DATA.SYNTHETIC_SIZE": batch * max(arguments.processes),
    }
    options = option_words(arguments, fixed)

    def one_start(processes: int) -> dict[str, list[float]]:
        parts = start(arguments.cfg, processes, options)
        return {part: [seconds] for part, seconds in parts.items()}

    kinds: dict[str, Run] = {}
    for processes in dict.fromkeys(arguments.processes):
        name = counted(processes, "process", "processes")
        kinds[name] = functools.partial(one_start, processes)
    title = (
        f"{arguments.cfg}, batch {batch} per process, from the command to the end of the first step"
    )
    # The first run has the figures, and later ones have none.
    once = iter([import_times()])
    kinds["1 process, -X importtime"] = lambda: next(once, {})
    measure(Benchmark(title, kinds, {"": "s"}), arguments)


def start(cfg: str, processes: int, options: list[str]) -> dict[str, float]:
    """Returns the seconds of each part of one run's start, and their sum.

    Raises:
        RunError: the run failed, or one of its lines wasn't found.
    """
    name = "main_single_gpu"
    ngpus = []
    if processes > 1:
        name = "main_multi_gpu"
        ngpus = [f"-ngpus={processes}"]
    with temporary_folder() as folder:
        flags = [f"-cfg={cfg}", f"-output={folder}/run", *ngpus, "-o", *options]
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
            errors = process.stderr.read().strip()
        if process.returncode or awaited:
            reason = errors or f"no line {awaited[0]}"
            raise RunError(f"{name} ended with status {process.returncode}: {reason}")
        first = train_records(Path(folder) / "run")[0]
    parts = {
        part: end - begin for part, begin, end in zip(_PARTS, moments, moments[1:], strict=False)
    }
    step = first["samples"] / first["images_per_s"]
    parts["checkpoints, loaders"] -= step
    parts |= {_WAIT: first["data_wait"] * step, _STEP: (1 - first["data_wait"]) * step}
    return {"all": moments[-1] - moments[0], **parts}


def import_times(count: int = 10) -> dict[str, list[float]]:
    """Returns the import times of the ``count`` packages that took longest, each without the
    packages that it imports, and the sum over all packages.
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
