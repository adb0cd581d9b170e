"""Runs under each launcher: to the same weights as spawned processes, or to an error that says what
to do.
"""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from safetensors.numpy import load_file
from support.launches import FLAGS, MAIN, printed, start, statuses, torchrun
from support.ranks import free_ports

from launch.launchers import MPI


@contextlib.contextmanager
def machines():
    """Two network namespaces joined by a pair of interfaces: how to start in each, and the first's
    name.

    That name stands for 127.0.1.1 on the first itself, as Debian has it, and the machine's own for
    127.0.0.1 on both.
    """
    names = [f"vit{os.getpid()}{side}" for side in "ab"]
    # ``ip netns exec`` shows its files in /etc
    folders = [Path("/etc/netns") / name for name in names]
    ends = [("10.213.7.1", f"v{os.getpid()}a"), ("10.213.7.2", f"v{os.getpid()}b")]

    def ip(*words):
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip(
            "link",
            "add",
            ends[0][1],
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            ends[1][1],
            "netns",
            names[1],
        )
        for name, (address, end) in zip(names, ends, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
        for folder, address in zip(folders, ("127.0.1.1", ends[0][0]), strict=True):
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(
                f"127.0.0.1 localhost {socket.gethostname()}\n{address} {names[0]}\n"
            )
        yield [("ip", "netns", "exec", name) for name in names], names[0]
    except (OSError, subprocess.CalledProcessError):  # no right to, or no such program
        yield [(), ()], "127.0.0.1"
    finally:
        for name, folder in zip(names, folders, strict=True):
            with contextlib.suppress(OSError):
                subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # there are others
            folders[0].parent.rmdir()


SRUN = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift; done
export SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST='127.0.0.[1-2]' SLURM_STEP_TASKS_PER_NODE='1(x2)'
export SLURM_LOCALID=0
SLURM_PROCID=1 SLURM_NODEID=1 "$@" &
SLURM_PROCID=0 SLURM_NODEID=0 "$@" && wait $!
"""


def sbatch(folder, srun, *flags, **given):
    """Starts run_train_slurm.sh as sbatch does, with stand-ins for srun and scontrol."""
    (folder / "bin").mkdir()
    for name, text in (("srun", srun), ("scontrol", '#!/bin/sh\necho "$@" >scontrol.txt\n')):
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    path = os.pathsep.join(
        [str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    )
    job = {"SLURM_JOB_ID": 4242, "SLURM_SUBMIT_DIR": ROOT, "SLURM_NTASKS": 2, "SLURM_PROCID": 0}
    return start(
        folder, "bash", str(ROOT / "run_train_slurm.sh"), *flags, **{"PATH": path} | job | given
    )


@pytest.mark.parametrize(("status", "queued"), [(143, True), (1, False)])
def test_a_batch_that_was_stopped_in_time_is_queued_again(tmp_path, status, queued):
    run = sbatch(tmp_path, f"#!/bin/sh\necho $@\nexit {status}\n", "-o", "SEED", "1")
    assert statuses(run) == [status]
    flags = "-default_cfg=vit_digits -output=.*/output/slurm_4242 -resume=auto -o SEED 1"
    assert re.fullmatch(f"--kill-on-bad-exit=1 python {MAIN[1]} {flags}\n", printed(run))
    assert (tmp_path / "scontrol.txt").exists() == queued
    assert not queued or (tmp_path / "scontrol.txt").read_text() == "requeue 4242\n"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One training by every launcher, all at once, for they mostly wait: each one's folder, and
    what it printed.
    """
    folders = {
        name: tmp_path_factory.mktemp(name)
        for name in ("spawned", "launched", "nodes", "slurm", "torchrun", "mpi")
    }
    ports = free_ports(5)
    talking = {"MASTER_PORT": ports[3], "GLOG_minloglevel": 0}  # Paddle then tells where ranks meet
    with machines() as (insides, master):
        started = {"spawned": [start(folders["spawned"], *MAIN, "-ngpus=2", *FLAGS, **talking)]}
        # On a CPU, Paddle's launcher takes its devices from this variable alone.
        launch = (
            sys.executable,
            "-m",
            "paddle.distributed.launch",
            "--devices=0,1",
            "--log_dir=log",
            MAIN[1],
            *FLAGS,
        )
        started["launched"] = [start(folders["launched"], *launch, CUDA_VISIBLE_DEVICES="0,1")]
        script = ("sh", str(ROOT / "run_train_multi_node.sh"), *FLAGS)
        given = {"NNODES": 2, "NPROC_PER_NODE": 1}
        given |= {"MASTER_ADDR": master, "MASTER_PORT": ports[0]}
        started["nodes"] = [
            start(
                folders["nodes"],
                *script,
                inside=inside,
                NODE_RANK=node,
                LOG_DIR=f"log{node}",
                **given,
            )
            for node, inside in enumerate(insides)
        ]
        started["slurm"] = [sbatch(folders["slurm"], SRUN, *FLAGS, MASTER_PORT=ports[1])]
        started["torchrun"] = [
            torchrun(folders["torchrun"], rank, ports[2], *FLAGS) for rank in (1, 0)
        ]
        started["mpi"] = [
            start(
                folders["mpi"],
                *MAIN,
                *FLAGS,
                MASTER_PORT=ports[4],
                **dict(zip(MPI[0], (rank, 2, rank, 2), strict=True)),
            )
            for rank in (1, 0)
        ]
        for some in started.values():
            assert statuses(*some) == [0] * len(some), printed(*some)
    where = f"two nodes: {'network namespaces' if insides[0] else 'loopback, for want of network namespaces'}"
    said = {name: printed(*some) for name, some in started.items()}
    assert f"127.0.0.1:{ports[3]}" in said["spawned"]
    return folders, said, where


@pytest.mark.long
@pytest.mark.smoke
def test_every_launcher_trains_to_the_weights_of_spawned_processes(runs, capsys):
    folders, said, where = runs
    with capsys.disabled():
        print(f" [{where}] ", end="")
    weights = {
        name: load_file(folder / "run/checkpoints/last/model.safetensors")
        for name, folder in folders.items()
    }
    for name, found in weights.items():
        assert [
            key for key, value in weights["spawned"].items() if (found[key] != value).any()
        ] == [], name
        assert "2 processes over GLOO" in (folders[name] / "run" / "log.txt").read_text()
    assert "rank 0 waits at 127.0.0.1:" in said["slurm"]
    assert not (folders["slurm"] / "scontrol.txt").exists()  # ended well: not queued again
    assert "node 0 waits at " in said["nodes"]


def test_the_ranks_of_a_machine_read_the_data_once(tmp_path):
    port = free_ports(1)[0]
    more = [
        "DATA.CACHE=cache",
        "TRAIN.NUM_EPOCHS=1",
        "TRAIN.WARMUP_EPOCHS=0",
        "MODEL.DEPTH=1",
        "REPORT=False",
    ]
    started = [
        torchrun(tmp_path, rank, port, "-output=run", "-cfg=vit_digits", "-o", *more)
        for rank in (1, 0)
    ]
    assert statuses(*started) == [0, 0], printed(*started)
    assert printed(*started).count("doesn't exist yet: decoding") == 2  # training and validation
    flags = ("-cfg=vit_digits", "-dataset=folder", "-data_path=absent")
    wrong = [torchrun(tmp_path, rank, port, *flags) for rank in (1, 0)]
    assert statuses(*wrong) == [2, 2]
    assert printed(*wrong).count("error: -data_path is absent, but there is no such folder") == 1


def test_under_torchrun_a_taken_port_is_named_and_other_machines_end(tmp_path):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        first = torchrun(tmp_path, 0, port, "-cfg=vit_digits")
        assert statuses(first) == [2]
    assert (
        printed(first)
        == f"error: port {port} on 127.0.0.1 is taken (by another run?); choose another MASTER_PORT\n"
    )
    second = torchrun(
        tmp_path, 1, port, "-cfg=vit_digits", "-o", "DIST.INIT_TIMEOUT", "0.2", machines=2
    )
    assert statuses(second) == [1]
    silent = f"rank 0 didn't answer at 127.0.0.1:{port} within 0.2 s"
    message = rf"rank 1: error: {silent} \(.*\); rank 1 on .* waited for it; .*\n"
    assert re.fullmatch(message, printed(second))


def test_the_script_for_several_nodes_says_what_is_missing_or_taken(tmp_path):
    script = ("sh", str(ROOT / "run_train_multi_node.sh"))
    incomplete = start(tmp_path, *script, NNODES=2, MASTER_PORT=29500)
    assert statuses(incomplete) == [2]
    assert (
        "found NNODES=2, MASTER_PORT=29500, missing NODE_RANK, MASTER_ADDR; see the first"
        in printed(incomplete)
    )
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        first = start(
            tmp_path, *script, NNODES=2, NODE_RANK=0, MASTER_ADDR="127.0.0.1", MASTER_PORT=port
        )
        assert statuses(first) == [2]
    assert (
        printed(first)
        == f"error: port {port} on 127.0.0.1 is taken (by another run?); choose another MASTER_PORT\n"
    )
