"""Measures one size of a subject of tools/benchmark.py growth, in a process of its own. It prepares
the work and does it once.

The argument is a request as one word of JSON. The answer has the seconds, the CPU seconds, the peak
memory in MB, and the part of this memory that the work added. Processes that the work started count
once they have ended.
"""

import json
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from errors import reporting
from tools.benchmarks.growth import CPU, MEASURES, PEAK, RISE, SECONDS
from tools.benchmarks.growth_measure import Cost


def main() -> None:
    request = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        work = MEASURES[request["subject"]].prepare(request["size"], Path(folder))
        print(json.dumps(measured(work)))
        # Ranks that still write would do so while their folder is removed.
        for process in multiprocessing.active_children():
            process.kill()
            process.join()


def measured(work: Callable[[], object]) -> dict[str, list[float]]:
    """Does the work, and returns its costs."""
    # Resets the peak memory of this process.
    Path("/proc/self/clear_refs").write_text("5")
    before = _own_memory("VmRSS")
    started = time.perf_counter()
    busy = _cpu()
    result = work()
    seconds = time.perf_counter() - started
    busy = _cpu() - busy
    # Of the processes that the work started, the largest one counts.
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    peak = max(_own_memory("VmHWM"), children)
    rise = peak - before
    if isinstance(result, Cost):
        seconds = result.seconds
        if result.memory is not None:
            rise = result.memory
        if result.busy is not None:
            busy = result.busy
    return {SECONDS: [seconds], CPU: [busy], PEAK: [peak], RISE: [max(0.0, rise)]}


def _own_memory(what: str) -> float:
    """Returns a figure of this process's memory, in MB (Linux)."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{what}:"))


def _cpu() -> float:
    return sum(os.times()[:4])


if __name__ == "__main__":
    with reporting():
        main()
