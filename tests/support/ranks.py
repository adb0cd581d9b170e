"""Calls functions in the ranks of real process groups (``run_ranks``)."""

import multiprocessing
import os
import pickle
import socket
import tempfile
import zlib  # noqa: F401  (before Paddle's import: errors.py says why)
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

# Modules that the fork server imports, so that ranks needn't. Paddle computes nothing there. A
# device's plugin is read at Paddle's import, so ranks of another backend are started without the
# fork server.
_PRELOADED = [
    "zlib",
    "paddle.distributed",
    "pytest",
    "training.engine",
    "sklearn.datasets",
    "matplotlib.pyplot",
    "hypothesis",
    "models",
    "support.hostile_files",
    "support.servers",
    "support.training_runs",
    "support.fork_server_preload",
]


def run_ranks(
    function: Callable, *args: Any, ranks: int = 2, backend: str = "gloo", compiled: bool = True
) -> list[Any]:
    """Calls ``function(*args)`` in each of ``ranks`` processes. Returns what each returned, or the
    RunError that it raised, by rank.

    A single rank runs in this process, without a process group, as a run of one process does.

    Args:
        compiled: whether ranks load the operators that are compiled for CPUs, as runs do. If not,
            they are loaded only if the function's module imports tests/conftest.py.
    """
    if ranks == 1:
        return [function(*args)]
    endpoints = ",".join(f"127.0.0.1:{port}" for port in free_ports(ranks))
    context = multiprocessing.get_context("forkserver" if backend == "gloo" else "spawn")
    # This saves three seconds for each rank.
    context.set_forkserver_preload(_PRELOADED)
    with mock.patch.dict(os.environ, PYTHONPATH=_path_of_fork_server()):
        forkserver.ensure_running()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (endpoints, backend, compiled and backend == "gloo", function, args, folder)
        processes = [
            context.Process(target=_call, args=(rank, *arguments), daemon=True)
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(120)
            assert process.exitcode == 0, f"a rank ended with {process.exitcode}"
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(ranks)]


def _path_of_fork_server() -> str:
    """Returns a PYTHONPATH with the folders of the toolkit and of its tests.

    Python 3.11's fork server doesn't take over ``sys.path``, and leaves out without a word what it
    can't import. support.fork_server_preload takes the two folders out again.
    """
    tests = Path(__file__).resolve().parents[1]
    return os.pathsep.join([str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")])


def free_ports(count: int) -> list[int]:
    """Returns ports of this machine that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    for taken in sockets:
        taken.bind(("127.0.0.1", 0))
    ports = [taken.getsockname()[1] for taken in sockets]
    for taken in sockets:
        taken.close()
    return ports


def _call(
    rank: int,
    endpoints: str,
    backend: str,
    compiled: bool,
    function: Callable,
    args: tuple,
    folder: str,
) -> None:
    os.environ |= {
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": str(endpoints.count(",") + 1),
        "PADDLE_TRAINER_ENDPOINTS": endpoints,
        "PADDLE_CURRENT_ENDPOINT": endpoints.split(",")[rank],
        "PADDLE_DISTRI_BACKEND": backend,
        # The bits of a product of few rows depend on the number of threads. conftest.py, which some
        # functions' modules import, takes this variable away.
        "OMP_NUM_THREADS": "1",
        # The device of tests/stand_in.
        "FLAGS_selected_stand_ins": str(rank),
    }
    import paddle.distributed as dist

    import ops
    from errors import RunError

    if compiled:
        ops.load()
    dist.init_parallel_env()
    # If a rank ended while another one still connects, the other one would fail ("TIMEOUT").
    dist.barrier()
    try:
        result = function(*args)
    except RunError as error:
        result = error
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(result))
