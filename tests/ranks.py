"""Real processes for the tests: ``run_ranks`` calls a function in N of them, joined by gloo."""

import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle.distributed as dist

from errors import RunError


def run_ranks(function: Callable, *args: Any, ranks: int = 2) -> list[Any]:
    """Returns what ``function(*args)`` returned (or the error it raised) on each of ``ranks`` processes, by rank.

    One rank runs here, without a process group, as a run of one process does.
    """
    if ranks == 1:
        return [function(*args)]
    with tempfile.TemporaryDirectory() as folder:
        dist.spawn(_call, args=(function, args, folder), nprocs=ranks)
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(ranks)]


def _call(function: Callable, args: tuple, folder: str) -> None:
    dist.init_parallel_env()
    try:
        result = function(*args)
    except RunError as error:
        result = error
    (Path(folder) / str(dist.get_rank())).write_bytes(pickle.dumps(result))
