"""Runs one node of a real SLURM, for the slow tests: munged, slurmctld and slurmd of this machine,
in a folder of their own.

    python tests/support/slurm.py FOLDER sbatch --wait run_train_slurm.sh ...    # runs a command with it

On Debian, apt-get install slurm-wlm munge installs it. The node has no cgroups, so a task sees all
cores, as on many small clusters.
"""

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from support.ranks import free_ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo")
_FOLDERS = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
# cred_expire: a job that is queued again waits for as long, by default two minutes.
# config_overrides: the node has as many CPUs as this says, whatever the machine has.
_SETTINGS = """ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
KillWait=5
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def is_installed() -> bool:
    return all(shutil.which(name, path=_FOLDERS) for name in PROGRAMS)


@contextlib.contextmanager
def one_node(folder: Path, cpus: int = 4) -> Iterator[dict[str, str]]:
    """Yields the environment in which ``sbatch``, ``srun`` and ``scontrol`` reach the node.

    Args:
        folder: for its files; short, because a socket's path has at most 107 bytes.
        cpus: that the node is said to have.
    """
    host = socket.gethostname().partition(".")[0]
    environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": _FOLDERS}
    for name in ("state", "spool"):
        (folder / name).mkdir()
    settings = _SETTINGS.format(
        host=host, ports=free_ports(2), user=getpass.getuser(), folder=folder, cpus=cpus
    )
    (folder / "slurm.conf").write_text(settings)
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    started = []
    try:
        munged = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files]
        for command in (munged, ["slurmctld", "-D"], ["slurmd", "-D"]):
            with open(folder / f"{command[0]}.out", "w") as out:
                started.append(subprocess.Popen(command, env=environment, stdout=out, stderr=out))
            if command is munged:
                _wait(lambda: (folder / "munge.socket").exists(), folder)
        _wait(lambda: _answer(["sinfo", "-h", "-o", "%T"], environment) == "idle", folder)
        yield environment
        subprocess.run(
            ["scancel", "--full", "--user", getpass.getuser()], env=environment, check=False
        )
        _wait(lambda: _answer(["squeue", "-h"], environment) == "", folder)
    finally:
        for process in reversed(started):
            process.terminate()
        for process in reversed(started):
            process.wait(30)


def _answer(command: list[str], environment: dict[str, str]) -> str:
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False
    ).stdout.strip()


def _wait(reached, folder: Path, limit: float = 60) -> None:
    until = time.monotonic() + limit
    while not reached():
        if time.monotonic() > until:
            raise RuntimeError(f"SLURM doesn't start; {folder}/*.log and *.out tell why")
        time.sleep(0.2)


if __name__ == "__main__":
    with one_node(Path(sys.argv[1]).absolute()) as _environment:
        sys.exit(subprocess.run(sys.argv[2:], env=_environment, check=False).returncode)
