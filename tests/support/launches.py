"""Programs as launchers start them: torchrun, Slurm, MPI."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch import secret
from support import programs
from support.programs import ROOT

# The beginnings of the names of variables that launchers set.
LAUNCHER_VARIABLES = (
    "PADDLE_", "SLURM_", "MASTER_", "NODE_RANK", "NNODES", "RANK", "WORLD_SIZE", "LOCAL_", "FLAGS_selected",
    "OMPI_", "MV2_", "PMI_", "MPI_LOCAL", "PMIX_", "PALS_", "ALPS_", "FLUX_", "JSM_", "TORCHELASTIC",
    "CUDA_VISIBLE", "GLOO_", "NCCL_SOCKET", "NPROC_PER", "MASTER", "HOST", "INIT_TIMEOUT",
)  # fmt: skip


@pytest.fixture
def variables(monkeypatch):
    """Removes the variables of launchers from ``os.environ`` for a test.

    Returns a function that sets others. Everything is restored afterwards.
    """
    monkeypatch.setattr(os, "environ", os.environ.copy())
    for name in list(os.environ):
        if name.startswith(LAUNCHER_VARIABLES) and name != secret.SECRET_FILE_VARIABLE:
            del os.environ[name]
    return lambda **values: os.environ.update({name: str(value) for name, value in values.items()})


TORCHRUN_VARIABLES = {
    "RANK": 3,
    "WORLD_SIZE": 4,
    "LOCAL_RANK": 1,
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": 29500,
}

MAIN = (sys.executable, str(ROOT / "main_multi_gpu.py"))
FLAGS = [
    "-output=run",
    "-cfg=vit_digits",
    "-o",
    "TRAIN.NUM_EPOCHS=1",
    "TRAIN.WARMUP_EPOCHS=0",
    "MODEL.DEPTH=2",
]


def start(folder, *command, inside=(), **given):
    """Starts a program in ``folder`` without the variables of this process's launcher.

    Args:
        command: the program and its arguments.
        inside: the beginning of the command, such as ``ip netns exec NAME``.
        given: variables of its environment.

    Returns:
        The process, and the file that it prints to.
    """
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)
    }
    path = os.pathsep.join([str(Path(sys.executable).parent), kept["PATH"]])
    # OMP_NUM_THREADS: ranks of one machine that seem to be on two would each use all cores, and sum in
    # another order.
    environment = kept | {
        "PATH": path,
        "VIRTUAL_ENV": "1",
        "OMP_NUM_THREADS": "1",
        "HOME": str(folder),
    }
    environment |= {name: str(value) for name, value in given.items()}
    log = folder / f"printed{len(list(folder.glob('printed*')))}.txt"
    with open(log, "w") as out:
        streams = {"stdout": out, "stderr": out, "start_new_session": True}
        process = subprocess.Popen([*inside, *command], cwd=folder, env=environment, **streams)
    programs.started.append(process)
    return process, log


def statuses(*started, within=120):
    """Waits for programs that ``start`` started; returns their exit statuses.

    Args:
        within: the longest wait for each, in seconds.
    """
    return [process.wait(within) for process, _ in started]


def printed(*started):
    """What programs that ``start`` started have printed so far."""
    return "\n".join(log.read_text() for _, log in started)


def torchrun(folder, rank, port, *flags, machines=1, **more):
    """Starts one process of two as torchrun does."""
    given = {
        "RANK": rank,
        "WORLD_SIZE": 2,
        "LOCAL_RANK": rank // machines,
        "LOCAL_WORLD_SIZE": 2 // machines,
    }
    return start(folder, *MAIN, *flags, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **given, **more)
