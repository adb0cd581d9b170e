"""Measures rates in the same way for Paddle's side and torch's. This module imports neither."""

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path


def images_per_second(
    counts: Iterable[int], warm_up: int, images: int, cpu: Callable[[], float]
) -> tuple[float, float]:
    """Takes batches as fast as they come and discards them.

    Args:
        counts: yields the number of images of each batch.
        warm_up: images that come before the clock starts.
        images: images to take from there on, at least.
        cpu: returns the CPU seconds that the processes that make the batches have used so far.

    Returns:
        (images per second, images per CPU second).

    Raises:
        ValueError: there are fewer batches.
    """
    taken = -warm_up
    started = None
    busy = 0.0
    for count in counts:
        taken += count
        if started is None:
            if taken >= 0:
                taken = 0
                started = time.perf_counter()
                busy = cpu()
        elif taken >= images:
            return taken / (time.perf_counter() - started), taken / max(cpu() - busy, 1e-9)
    raise ValueError(f"the batches end before {warm_up} images to warm up and {images} to measure")


def workers_cpu() -> float:
    """Returns the CPU seconds that this process's living children have used (Linux)."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The fields after the program's name, which may have any characters: the state, the
            # parent, and so on. 11 and 12 are the ticks of the user and of the system.
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            # This process has ended.
            continue
        if int(fields[1]) == os.getpid():
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def calls_rate(call: Callable[[], object], batch: int, warm_up: int, seconds: float) -> float:
    """Returns the images/s of ``call``, which computes ``batch`` of them.

    Args:
        warm_up, seconds: see ``call_times``.
    """
    times = call_times(call, warm_up, seconds)
    return len(times) * batch / sum(times)


def call_times(call: Callable[[], object], warm_up: int, seconds: float) -> list[float]:
    """Returns the seconds that each of several calls took, one after the other.

    Args:
        warm_up: the number of calls before the clock starts, in which compilers make their code and
            libraries choose their kernels.
        seconds: of all calls; there are three at least.
    """
    for _ in range(warm_up):
        call()
    times = []
    started = before = time.perf_counter()
    while len(times) < 3 or before - started < seconds:
        call()
        after = time.perf_counter()
        times.append(after - before)
        before = after
    return times
