"""Starts the machines of a run under Paddle's launcher: the program of run_train_multi_node.sh.

It waits until all machines have come, each with the same numbers, and then prints the flags for
``python -m paddle.distributed.launch``. That launcher would hang if the port is taken or the
address is wrong.
"""

import importlib.util
import itertools
import os
import socket

from errors import InputError, install, reporting
from launch import devices, rendezvous, secret
from launch.launchers import all_set, check_rank, read_number, telling_others

VARIABLES = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


def launcher_flags() -> list[str]:
    """Waits for the other machines and returns the flags for Paddle's launcher, from the variables
    that run_train_multi_node.sh explains.

    Raises:
        InputError: some variables are missing or make no sense.
        InputError, RunError: as ``rendezvous.meet``.
    """
    devices.check_visible()
    secret.keep_from_logs()
    processes = os.environ.get("NPROC_PER_NODE")
    if not processes:
        processes = str(devices.num_gpus_of_paddle() or devices.num_cores())
    flags = ["--nproc_per_node", processes]
    # An elastic run has MASTER, etcd://HOST:PORT: nodes come and go, and etcd numbers them.
    if etcd := os.environ.get("MASTER"):
        _check_etcd(etcd)
        variables = {"--nnodes": "NNODES", "--rank": "NODE_RANK", "--host": "HOST"}
        given = [(flag, os.environ[name]) for flag, name in variables.items() if os.getenv(name)]
        return [*flags, "--master", etcd, *itertools.chain(*given)]
    all_set(VARIABLES, "see the first lines of run_train_multi_node.sh")
    with telling_others(["NODE_RANK"], ["NNODES"], kind="node"):
        node = read_number("NODE_RANK")
        nodes = read_number("NNODES", least=1)
        check_rank("NODE_RANK", node, nodes)
    port = os.environ["MASTER_PORT"]
    address = f"{os.environ['MASTER_ADDR']}:{port}"
    limit = read_number("INIT_TIMEOUT", default=300)
    meeting = rendezvous.meet(address, node, nodes, limit, kind="node")
    # Both are IP addresses: Paddle's launcher becomes the master if --master begins with --host.
    # Its default for --host is the address that the machine's own name stands for.
    host = os.environ.get("HOST") or meeting.own_address
    master = host if node == 0 else meeting.connection.socket.getpeername()[0]
    meeting.ready()
    flags += ["--nnodes", str(nodes), "--rank", str(node)]
    return [*flags, "--master", f"{master}:{port}", "--host", host]


def _check_etcd(master: str) -> None:
    """Raises InputError where Paddle's launcher would fail over its etcd server."""
    if not importlib.util.find_spec("etcd3"):
        raise InputError(f"MASTER is {master}, but etcd3 isn't installed; {install('elastic')}")
    host, port = rendezvous.parse_address(master.removeprefix("etcd://"))
    try:
        socket.create_connection((host, port), rendezvous.CONNECT).close()
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(
            f"no etcd server answers at MASTER {master} ({reason}); start one there, or correct"
            " MASTER"
        ) from None


if __name__ == "__main__":
    with reporting():
        print(*launcher_flags())
