"""Runs that go on by themselves after a rank or a machine was lost, and what a launcher's console
tells.

Elastic runs under Paddle's launcher need the extra ``elastic``; they are skipped without it.
"""

import importlib.util
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from support import programs
from support.fault_runs import RUN, finish
from support.programs import (
    assert_none_left,
    descendants,
    ranks_of,
    start,
    wait_for,
    wait_for_first_step,
)
from support.ranks import free_ports
from support.training_runs import assert_same_run

MAIN = str(programs.ROOT / "main_multi_gpu.py")
LONG = [
    "-cfg=vit_digits", "-output=run", "-resume=auto", "-o", "TRAIN.NUM_EPOCHS", "20", "VALIDATE_FREQ", "10",
    "REPORT_FREQ", "11", "SAVE_STEPS", "20", "SAVE_FREQ", "0", "SAVE_MINUTES", "none",
]  # fmt: skip
ETCD = Path(sys.executable).with_name("etcd")
needs_etcd = pytest.mark.skipif(
    not (importlib.util.find_spec("etcd3") and ETCD.exists()), reason="no etcd"
)


def launch(folder, name, *flags):
    """Starts Paddle's launcher on main_multi_gpu.py; returns the process, whose console is the file
    ``name``.
    """
    command = [sys.executable, "-m", "paddle.distributed.launch", f"--log_dir=log_{name}"]
    command += [flag for flag in flags if flag.startswith("--")] + [MAIN]
    return started(folder, name, [*command, *(flag for flag in flags if not flag.startswith("--"))])


def launch_elastic(folder, name, *flags, **environment):
    """Starts run_train_multi_node.sh; returns the process, whose console is the file ``name``."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment |= {"PATH": path, "VIRTUAL_ENV": "1", "LOG_DIR": f"log_{name}"}
    return started(
        folder, name, ["sh", str(programs.ROOT / "run_train_multi_node.sh"), *flags], **environment
    )


def started(folder, name, command, **environment):
    environment = {
        key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"
    } | environment
    environment["OMP_NUM_THREADS"] = "1"
    with open(folder / name, "w") as console:
        streams = {"stdout": console, "stderr": console}
        process = subprocess.Popen(
            command, cwd=folder, env=environment, start_new_session=True, **streams
        )
    programs.started.append(process)
    return process


def launched_ranks(process):
    """The pids of a launcher's ranks (not of the processes that watch them), by rank."""
    found = descendants(process.pid)
    watchers = [pid for pid, (parent, _) in found.items() if parent == process.pid]
    ranks = {pid for pid, (parent, _) in found.items() if parent in watchers}
    return [pid for _, pid in sorted((rank_of(pid), pid) for pid in ranks)]


def wait_for_save(process, run):
    """Waits for a checkpoint and a step after it; returns the pids of the run's processes."""
    assert wait_for((run / "checkpoints" / "last").exists, process)
    return wait_for_first_step(process, run)


def rank_of(pid):
    return int(re.search(rb"PADDLE_TRAINER_ID=(\d+)", Path(f"/proc/{pid}/environ").read_bytes())[1])


def losses(console):
    """The lines of a console that tell why a run ended, without the launcher's own."""
    return set(re.findall(r"(?m)^(?:error: |stopped by |rank \d+: ).*", console.read_text()))


def samples_by_epoch(run):
    """How many samples the steps took that are reported, by epoch."""
    taken = Counter()
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["split"] == "train":
            taken[record["epoch"]] += record["samples"]
    return dict(taken)


def result(run):
    return json.loads((run / "result.json").read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run of LONG that was left alone."""
    return finish(tmp_path_factory.mktemp("whole"), LONG)[0]


# ----------------------------------------------------- ranks that this program spawns


@pytest.mark.slow
def test_a_lost_rank_is_started_again_and_the_run_ends_in_the_same_bits(tmp_path, whole):
    process = start(tmp_path, *LONG, "DIST.MAX_RESTART", "2")
    killed = []
    for _ in range(2):
        pids = wait_for_save(process, tmp_path / "run")
        victim = max(set(ranks_of(process)) & set(pids))
        os.kill(victim, signal.SIGKILL)
        killed += pids
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    lost = r"rank \d was killed by SIGKILL \(out of memory\?\) at step \d+"
    where = r"\(DIST\.MAX_RESTART\) with 2 processes from run/checkpoints/epoch_\w+\n"
    assert re.fullmatch(rf"{lost}; restart 1 of 2 {where}{lost}; restart 2 of 2 {where}", errors), (
        errors
    )
    assert (tmp_path / "run" / "log.txt").read_text().count("; restart ") == 2
    assert_same_run(whole, tmp_path / "run")
    assert set(samples_by_epoch(tmp_path / "run").values()) == {1408}
    assert_none_left([process.pid, *killed])


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_a_restart_takes_as_many_processes_as_there_are_devices(tmp_path, whole):
    process = start(tmp_path, *LONG, "DIST.MAX_RESTART", "2")
    wait_for_save(process, tmp_path / "run")
    # without a GPU, cores are the devices
    os.sched_setaffinity(process.pid, [min(os.sched_getaffinity(0))])
    os.kill(ranks_of(process)[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert (
        "with 1 process instead of 2, the number of devices now, from run/checkpoints/epoch_"
        in errors
    )
    assert "\n1 process on cpu" in re.sub(
        r"(?m)^\d{4} [\d:]+ ", "", (tmp_path / "run" / "log.txt").read_text()
    )
    assert set(samples_by_epoch(tmp_path / "run").values()) == {1408}
    print(f"acc1 {result(tmp_path / 'run')['acc1']:.2f}, left alone {result(whole)['acc1']:.2f}")


# ------------------------------------------------------------- what a launcher tells


@pytest.mark.smoke
def test_a_launchers_console_tells_the_cause(tmp_path):
    process = launch(tmp_path, "console", "--nproc_per_node=2", *RUN, "TRAIN.NUM_EPOCHS", "100")
    pids = wait_for_first_step(process, tmp_path / "run")
    victim = launched_ranks(process)[1]
    os.kill(victim, signal.SIGKILL)
    assert process.wait(60) == 1
    (told,) = losses(tmp_path / "console")
    assert re.fullmatch(
        rf"error: rank 1 \(process {victim} on \S+\) was killed by SIGKILL \(out of memory\?\) at step \d+",
        told,
    )
    assert "terminate called" not in (tmp_path / "console").read_text()
    assert_none_left(pids)


@pytest.mark.slow
@pytest.mark.parametrize("patience", ["15", "1800"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_suspended_rank_is_named_under_a_launcher(tmp_path, rank, patience):
    flags = [*RUN, "TRAIN.NUM_EPOCHS", "100", "DIST.TIMEOUT", patience]
    process = launch(tmp_path, "console", "--nproc_per_node=2", *flags)
    pids = wait_for_first_step(process, tmp_path / "run")
    victim = launched_ranks(process)[rank]
    asked = time.time()
    os.kill(victim, signal.SIGSTOP)
    assert process.wait(60) == 1
    who = rf"rank {rank} \(process {victim} on \S+\) is suspended \(SIGSTOP, or a debugger\) at step \d+"
    stalled = rf"error: no progress in 15 s \(DIST\.TIMEOUT\): {who}"
    expected = stalled if patience == "15" else f"error: {who}, and the other ranks waited for it"
    (told,) = losses(tmp_path / "console")
    assert re.fullmatch(expected, told)
    assert time.time() - asked < (25 if patience == "15" else 45)
    assert_none_left(pids)


@pytest.mark.slow
def test_a_launcher_that_is_killed_takes_its_ranks_along(tmp_path):
    process = launch(tmp_path, "console", "--nproc_per_node=2", *RUN, "TRAIN.NUM_EPOCHS", "100")
    pids = wait_for_first_step(process, tmp_path / "run")
    process.kill()
    process.wait()
    assert_none_left(pids)


# ------------------------------------------------------------ elastic, by etcd


@pytest.fixture(scope="module")
def etcd(tmp_path_factory):
    """The environment of run_train_multi_node.sh for a server of our own; each call is another job."""
    client, peer = (f"http://127.0.0.1:{port}" for port in free_ports(2))
    flags = [
        "--listen-client-urls",
        client,
        "--advertise-client-urls",
        client,
        "--listen-peer-urls",
        peer,
    ]
    command = [
        str(ETCD),
        "--data-dir",
        str(tmp_path_factory.mktemp("etcd")),
        "--log-level",
        "error",
        *flags,
    ]
    server = subprocess.Popen(command, start_new_session=True)
    jobs = itertools.count()
    common = {"MASTER": client.replace("http", "etcd"), "ELASTIC_TIMEOUT": "10"}
    yield lambda: {**common, "JOB_ID": f"job{next(jobs)}"}
    os.killpg(server.pid, signal.SIGKILL)  # the console script starts the server
    server.wait()


@needs_etcd
@pytest.mark.slow
def test_a_rank_that_is_killed_is_started_again_by_the_launcher(tmp_path, whole, etcd):
    process = launch_elastic(tmp_path, "console", *LONG, **etcd(), NNODES="1", NPROC_PER_NODE="2")
    wait_for_save(process, tmp_path / "run")
    killed = launched_ranks(process)[1]
    os.kill(killed, signal.SIGKILL)
    asked = time.time()
    log = tmp_path / "run" / "log.txt"
    assert wait_for(lambda: "resumed after" in log.read_text(), process)
    took = time.time() - asked
    assert process.wait(120) == 0
    (told,) = losses(tmp_path / "console")
    assert re.fullmatch(
        rf"error: rank 1 \(process {killed} on \S+\) was killed by SIGKILL \(out of memory\?\) at step \d+",
        told,
    )
    assert_same_run(whole, tmp_path / "run")
    assert set(samples_by_epoch(tmp_path / "run").values()) == {1408}
    print(
        f"went on after {took:.0f} s, acc1 {result(tmp_path / 'run')['acc1']:.2f}, the same bits as left alone"
    )


@needs_etcd
@pytest.mark.slow
@pytest.mark.parametrize("node", [0, 1])
def test_a_node_that_is_lost_and_comes_back(tmp_path, etcd, node):
    """The other goes on alone, with half the global batch, and with both once the lost one is back."""
    environment = {**etcd(), "NNODES": "1:2", "NPROC_PER_NODE": "1"}
    flags = [*LONG, "TRAIN.NUM_EPOCHS", "40"]
    nodes = [launch_elastic(tmp_path, f"node{k}", *flags, **environment) for k in range(2)]
    log = tmp_path / "run" / "log.txt"
    moments = []

    def went_on(words):
        began = time.time()
        assert wait_for(
            lambda: log.read_text().rpartition("configuration, where")[2].count(words),
            nodes[1 - lost],
        )
        wait_for_first_step(nodes[1 - lost], tmp_path / "run")
        moments.append(time.time() - began)

    wait_for_save(nodes[0], tmp_path / "run")
    lost = next(k for k in range(2) if rank_of(launched_ranks(nodes[k])[0]) == node)
    nodes[lost].kill()
    nodes[lost].wait()
    went_on("1 process on cpu")
    nodes[lost] = launch_elastic(tmp_path, "again", *flags, **environment)
    went_on("2 processes over GLOO")
    assert [process.wait(240) for process in nodes] == [0, 0]
    taken = samples_by_epoch(tmp_path / "run")
    assert list(taken) == list(range(1, 41))
    # Where the global batch changed within an epoch, its tail is what doesn't fill a batch of the
    # new size.
    changed = [samples for samples in taken.values() if samples != 1408]
    assert len(changed) <= 2
    assert all(1433 - 64 < samples <= 1433 for samples in changed)
    waited = " and ".join(f"{seconds:.0f}" for seconds in moments)
    print(
        f"rank {node}'s node: went on after {waited} s, acc1 {result(tmp_path / 'run')['acc1']:.2f}"
    )
