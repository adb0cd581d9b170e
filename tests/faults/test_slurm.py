"""run_train_slurm.sh under one node of a real SLURM, which tests/support/slurm.py starts; skipped
where none is installed.
"""

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from support import slurm
from support.fault_runs import RUN, finish
from support.programs import ROOT
from support.training_runs import assert_same_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not slurm.is_installed(), reason="no SLURM (Debian: slurm-wlm, munge)"),
]
NODE = ("--nodes=1", "--gpus-per-node=0", "--ntasks-per-node=2", "--cpus-per-task=1", "--time=10")
FLAGS = [flag for flag in RUN if not flag.startswith("-output")]


@pytest.fixture(scope="module")
def environment():
    with (
        tempfile.TemporaryDirectory(prefix="slurm") as folder,
        slurm.one_node(Path(folder)) as found,
    ):
        yield found | {"PATH": f"{Path(sys.executable).parent}:{found['PATH']}", "VIRTUAL_ENV": "1"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return finish(tmp_path_factory.mktemp("whole"))[0]


def sbatch(environment, folder):
    """Submits the run; returns the job's number."""
    command = [
        "sbatch",
        "--parsable",
        *NODE,
        f"--output={folder}/job.txt",
        "run_train_slurm.sh",
        f"-output={folder}/run",
    ]
    return answer([*command, *FLAGS], environment)


def answer(command, environment):
    return subprocess.run(
        command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True
    ).stdout.strip()


def ended(environment, number, folder, seconds=240):
    """Waits for a job's end; returns what SLURM tells of it."""
    deadline = time.monotonic() + seconds
    while True:
        told = answer(["scontrol", "show", "job", number], environment)
        state = re.search(r"JobState=(\w+)", told)[1]
        if state in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"):
            assert state == "COMPLETED", (folder / "job.txt").read_text()
            return told
        assert time.monotonic() < deadline, told
        time.sleep(0.5)


def test_two_tasks_train_to_the_bits_of_spawned_processes(environment, whole, tmp_path):
    number = sbatch(environment, tmp_path)
    assert "Restarts=0 " in ended(environment, number, tmp_path)
    assert_same_run(whole, tmp_path / "run")
    log = (tmp_path / "run" / "log.txt").read_text()
    # --cpus-per-task, without cgroups
    assert "2 processes over GLOO on cpu, cpu: 1 thread per process" in log


def test_a_job_that_is_asked_to_stop_is_queued_again_and_goes_on(environment, whole, tmp_path):
    number = sbatch(environment, tmp_path)
    log = tmp_path / "run" / "log.txt"
    deadline = time.monotonic() + 90
    while not (log.exists() and " step " in log.read_text()):
        assert time.monotonic() < deadline, (tmp_path / "job.txt").read_text()
        time.sleep(0.01)
    # as --signal does before the time limit
    answer(["scancel", "--signal=TERM", number], environment)
    assert "Restarts=1 " in ended(environment, number, tmp_path)
    assert "resumed" in (tmp_path / "job.txt").read_text()
    assert_same_run(whole, tmp_path / "run")


def test_the_users_threads_and_a_cluster_without_gpus(environment, tmp_path):
    words = [
        "main_multi_gpu.py",
        "-cfg=vit_digits",
        f"-output={tmp_path}/run",
        "-o",
        "TRAIN.NUM_EPOCHS",
        "1",
    ]
    command = [
        "srun",
        "--ntasks=2",
        sys.executable,
        *words,
        "TRAIN.WARMUP_EPOCHS",
        "0",
        "REPORT",
        "False",
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment | {"OMP_NUM_THREADS": "3"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert "3 threads (OMP_NUM_THREADS) per process" in (tmp_path / "run" / "log.txt").read_text()
    with_gpus = [flag for flag in NODE if "gpus" not in flag]
    refused = subprocess.run(
        ["sbatch", *with_gpus, "run_train_slurm.sh"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    # what docs/guides/slurm.md says --gpus-per-node=0 for
    assert "Invalid generic resource" in refused.stderr
