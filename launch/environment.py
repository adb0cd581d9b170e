"""What started this process. The other modules read it from one place: the PADDLE_* variables of
Paddle's launcher.

It doesn't import Paddle, which reads some of them as it is imported. run_train_multi_node.sh runs
this module as a program: it waits for the other machines and prints the flags for Paddle's
launcher.
"""

import contextlib
import importlib.util
import itertools
import multiprocessing.spawn
import os
import re
import socket
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from errors import InputError, install, reporting
from launch import gpus, rendezvous, secret

PADDLE = (
    "PADDLE_TRAINER_ID",
    "PADDLE_TRAINERS_NUM",
    "PADDLE_CURRENT_ENDPOINT",
    "PADDLE_TRAINER_ENDPOINTS",
)
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# Of MPI's launchers: the rank, how many there are, and the same two on this machine.
MPI = (
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    (
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
)
# Those with the rank and with the number of ranks, of all launchers that are supported.
RANKS = " ".join(["PADDLE_TRAINER_ID", "RANK", *(names[0] for names in MPI), "SLURM_PROCID"])
SIZES = " ".join(
    ["PADDLE_TRAINERS_NUM", "WORLD_SIZE", *(names[1] for names in MPI), "SLURM_STEP_NUM_TASKS"]
)
# Variables with the rank, of launchers that aren't supported: PMIx alone, Cray, Flux, IBM.
UNREAD = (
    "PMIX_RANK",
    "PMI_RANK",
    "PALS_RANKID",
    "ALPS_APP_PE",
    "FLUX_TASK_RANK",
    "JSM_NAMESPACE_RANK",
)
# srun's tasks are a step, which may be a part of a SLURM job. So a step's variables come before the
# job's.
SLURM_NTASKS = "SLURM_STEP_NUM_TASKS SLURM_NTASKS"
SLURM_HOSTS = "SLURM_STEP_NODELIST SLURM_NODELIST SLURM_JOB_NODELIST"
SLURM_SIZES = "SLURM_STEP_TASKS_PER_NODE SLURM_TASKS_PER_NODE SLURM_NTASKS_PER_NODE"
JOBS = (
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "TORCHELASTIC_RUN_ID",
    "PMIX_NAMESPACE",
)  # variables by which a run differs from others
NODE = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")

_held: Any = None  # holds MASTER_PORT while this process lives


def is_launched() -> bool:
    """Returns whether this process was started as one of a run: by Paddle's launcher, torchrun,
    mpirun or SLURM's srun.

    It translates the variables of the last three to those that
    ``paddle.distributed.init_parallel_env`` reads, in ``os.environ``. It also rewrites
    CUDA_VISIBLE_DEVICES as Paddle reads it.

    Raises:
        InputError: only some of a launcher's variables are set, or they contradict each other. The
            other ranks, which would wait for this one, get the error, too.
    """
    with _telling_others(RANKS, SIZES):
        gpus.check()
        if _complete(
            PADDLE, "start with python -m paddle.distributed.launch, or unset them", PADDLE
        ):
            rank = _number(PADDLE[0])
            ranks = _number(PADDLE[1], least=1)
            _check_rank(PADDLE[0], rank, ranks)
            here = _number_here("PADDLE_LOCAL_SIZE", PADDLE[1], ranks, ranks)
            _check_rank("PADDLE_LOCAL_RANK", _number("PADDLE_LOCAL_RANK", 0), here)
        elif all(map(os.environ.get, TORCHRUN)):
            _translate_torchrun()
        elif not (_translate_mpi() or _translate_slurm()):
            _tell_unread()
            # MASTER_ADDR and MASTER_PORT alone don't show that a launcher started this process.
            return _complete(
                TORCHRUN,
                "start with torchrun or run_train_multi_node.sh, or unset them",
                TORCHRUN[:3],
            )
        _select_device(_number("PADDLE_LOCAL_RANK", 0))
    return True


@contextlib.contextmanager
def _telling_others(ranks: str, sizes: str, kind: str = "rank") -> Iterator[None]:
    """Tells the other ranks, or nodes, of an InputError that is raised within: they would wait for
    this one in vain.

    Args:
        ranks: variables that may have this one's number.
        sizes: variables that may have how many there are.
    """
    try:
        yield
    except InputError as error:
        # rank 0's address or the secret is unknown, or nobody listens
        with contextlib.suppress(InputError, OSError):
            rendezvous.cancel(_master(), _first(ranks), _first(sizes), str(error), _job(), kind)
        raise


def _master() -> str:
    """Returns HOST:PORT where rank 0 waits for the others."""
    if os.environ.get("PADDLE_TRAINER_ID"):
        return (
            os.environ.get("PADDLE_MASTER")
            or os.environ.get("PADDLE_TRAINER_ENDPOINTS", "").split(",")[0]
        )
    port = _number("MASTER_PORT")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        port += 1  # torchrun itself listens at its MASTER_PORT, for its own workers
    return f"{os.environ.get('MASTER_ADDR', '')}:{port}"


def _job() -> str:
    return " ".join(filter(None, map(os.environ.get, JOBS)))


def meet(limit: float) -> rendezvous.Meeting:
    """Waits until all ranks of a launched run are there, for ``limit`` seconds at most. ``ready``
    of the returned meeting waits until they have read their data, too.

    Between machines, it tells gloo and NCCL to use the network interface that reaches rank 0. By
    itself gloo takes the address that the machine's own name stands for. In many an /etc/hosts that
    is 127.0.1.1, where no other machine finds it. NCCL takes the first interface, which may lead
    nowhere.

    Raises:
        InputError, RunError: as ``rendezvous.meet``.
    """
    rank = _number("PADDLE_TRAINER_ID")
    ranks = _number("PADDLE_TRAINERS_NUM")
    master = _master()
    here = _number("PADDLE_LOCAL_SIZE", 1)
    # for certain
    if here == ranks > 1 and not (
        os.environ.get("RANK") and not os.environ.get("LOCAL_WORLD_SIZE")
    ):
        master = os.environ["PADDLE_MASTER"] = (
            f"{rendezvous.LOOPBACK}:{rendezvous.parse_address(master)[1]}"
        )
        stay_inside()
    first = _number("PADDLE_LOCAL_RANK", 0) == 0
    seat = ""
    if visible_gpus() and os.environ.get("PADDLE_DISTRI_BACKEND") != "gloo":
        with _telling_others(RANKS, SIZES):
            seat = gpus.own()
    meeting = rendezvous.meet(
        master, rank, ranks, limit, job=_job(), here=here, first=first, seat=seat
    )
    if ranks > 1:
        secret.take_run(meeting.run_key)
    names = {address: name for name, address in rendezvous.addresses().items()}
    if ranks > here and (name := names.get(meeting.own_address)):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        # "=": this name, not any that begins with it
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
    return meeting


def stay_inside() -> None:
    """Makes gloo listen on loopback only, for ranks that are all on this machine."""
    for name, address in rendezvous.addresses().items():
        if address == rendezvous.LOOPBACK:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


@contextlib.contextmanager
def without_current_folder() -> Iterator[None]:
    """Has multiprocessing start its Python processes so that they import no module from the current
    folder.

    They would look there first, and a stranger's run may have a ``socket.py``. So they start in
    ``/``. Before they import anything of this program, they change to the current folder.
    """
    current = os.getcwd()
    prepared = multiprocessing.spawn.get_preparation_data
    multiprocessing.spawn.get_preparation_data = lambda name: prepared(name) | {"dir": current}
    os.chdir("/")
    try:
        yield
    finally:
        os.chdir(current)
        multiprocessing.spawn.get_preparation_data = prepared


def prepare_spawn() -> None:
    """Prepares for the ranks that this process will spawn: makes their run's key, and has them use
    loopback. They meet at MASTER_PORT if that is set, else at a free port that Paddle chooses.

    Raises:
        InputError: MASTER_PORT is taken.
    """
    global _held
    secret.take_run()
    stay_inside()
    if port := os.environ.get("MASTER_PORT"):
        address = f"{rendezvous.LOOPBACK}:{port}"
        if _held:  # by an earlier run of this process, in a notebook, say
            _held.close()
        _held = rendezvous.check_free(address)
        os.environ["PADDLE_MASTER"] = address


def visible_gpus() -> int:
    """Returns the number of GPUs that Paddle will find; 0 for its CPU build."""
    found = gpus.visible()
    paddle = importlib.util.find_spec("paddle")
    if not found or not paddle or not paddle.submodule_search_locations:
        return 0
    version = Path(paddle.submodule_search_locations[0], "version", "__init__.py").read_text()
    return 0 if re.search(r"^cuda_version\s*=\s*'False'", version, re.MULTILINE) else found


def check_seen(gpus_seen: int) -> None:
    """Raises InputError if Paddle sees no GPU though there are some. It would use the CPU without a
    warning.
    """
    if not gpus_seen and (there := visible_gpus()):
        found = f"{there} GPU{'s are' if there > 1 else ' is'} visible, but Paddle finds none"
        raise InputError(
            f"{found}; tools/doctor.py looks for the cause; CUDA_VISIBLE_DEVICES=-1 selects the CPU"
        )


def expand_hosts(nodelist: str) -> list[str]:
    """Returns the names of SLURM's ``node[01-03,7],gpu-a``: node01, node02, node03, node7, gpu-a.

    Raises:
        InputError: a bracket without its other half, or a range that isn't one.
    """
    parts = re.findall(r"(?:[^,\[\]]|\[[-\d,]+\])+", nodelist)
    if not parts or ",".join(parts) != nodelist:
        raise InputError(
            f"SLURM's list of nodes is {nodelist!r}; expected one like node[01-03,7],gpu-a"
        )
    return [host for part in parts for host in _expand(part)]


def expand_counts(text: str) -> list[int]:
    """Returns the numbers of SLURM's ``4(x2),3``: 4, 4, 3."""
    parts = text.split(",")
    found = [match for part in parts if (match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part))]
    if len(found) < len(parts):
        raise InputError(f"SLURM's tasks per node are {text!r}; expected a list like 4(x2),3")
    return [int(match[1]) for match in found for _ in range(int(match[2] or 1))]


def node_flags() -> list[str]:
    """Waits for the other machines and returns Paddle's launcher's flags, from
    run_train_multi_node.sh's variables.

    Raises:
        InputError: some are missing or make no sense.
        InputError, RunError: as ``rendezvous.meet``.
    """
    gpus.check()
    secret.keep_from_logs()
    processes = os.environ.get("NPROC_PER_NODE") or str(visible_gpus() or num_cores())
    flags = ["--nproc_per_node", processes]
    # etcd://HOST:PORT: nodes come and go there, and are numbered by it
    if master := os.environ.get("MASTER"):
        _check_etcd(master)
        named = {"--nnodes": "NNODES", "--rank": "NODE_RANK", "--host": "HOST"}
        given = [(flag, os.environ[name]) for flag, name in named.items() if os.environ.get(name)]
        return [*flags, "--master", master, *itertools.chain(*given)]
    _complete(NODE, "the first lines of run_train_multi_node.sh explain them", signs=None)
    with _telling_others("NODE_RANK", "NNODES", kind="node"):
        node = _number("NODE_RANK")
        nodes = _number("NNODES", least=1)
        port = os.environ["MASTER_PORT"]
        _check_rank("NODE_RANK", node, nodes)
    address = f"{os.environ['MASTER_ADDR']}:{port}"
    meeting = rendezvous.meet(address, node, nodes, _number("INIT_TIMEOUT", 300), kind="node")
    # As numbers: Paddle's launcher becomes the master where --master begins with --host, and by
    # itself takes for that what the machine's name stands for.
    host = os.environ.get("HOST") or meeting.own_address
    master = host if node == 0 else meeting.connection.socket.getpeername()[0]
    meeting.ready()
    return [
        *flags,
        "--nnodes",
        str(nodes),
        "--rank",
        str(node),
        "--master",
        f"{master}:{port}",
        "--host",
        host,
    ]


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
            f"no etcd server answers at MASTER {master} ({reason}); start it there, or correct it"
        ) from None


def num_cores() -> int:
    """Returns the number of cores this process may use, by its affinity and its container's quota
    (cgroup v2).
    """
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max": no quota
        quota, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())
        cores = min(cores, max(1, quota // period))
    return cores


def cores_each(processes: int) -> int:
    """Returns the number of cores for each of a run's ``processes`` on this machine.

    SLURM gives each task cores of its own. Without cgroups, a task also sees those of the other
    tasks.
    """
    cores = num_cores()
    per_task = _number("SLURM_CPUS_PER_TASK", 0)
    if not per_task:
        return max(1, cores // processes)
    # If SLURM started as many tasks as there are processes, each process is a task.
    if _first(SLURM_NTASKS) == os.environ.get("PADDLE_TRAINERS_NUM"):
        return min(cores, per_task)
    return min(cores, max(1, per_task // processes))


def set_by_launcher() -> bool:
    """Returns whether Paddle's launcher or torchrun started this process.

    Both set OMP_NUM_THREADS for their ranks, which says nothing about the user's wish. srun and
    mpirun pass on the user's own value.
    """
    with contextlib.suppress(OSError):
        started = Path("/proc/self/environ").read_bytes()
        return bool(re.search(rb"(?:^|\0)(PADDLE_TRAINER_ID|TORCHELASTIC_RUN_ID)=", started))
    return False


def _complete(names: Sequence[str], advice: str, signs: Sequence[str] | None) -> bool:
    """Returns whether all ``names`` are set. If a name is several, separated by spaces, any of them
    counts.

    Raises:
        InputError: they aren't all set, but one of ``signs`` is. If ``signs`` is None, the latter
            doesn't matter.
    """
    missing = [name for name in names if not _first(name)]
    if missing and (signs is None or any(map(_first, signs))):
        found = [f"{name.split()[0]}={_first(name)}" for name in names if name not in missing]
        absent = [name.replace(" ", " or ") for name in missing]
        raise InputError(
            f"a distributed run's environment is incomplete: found {', '.join(found) or 'none'},"
            f" missing {', '.join(absent)}; {advice}"
        )
    return not missing


def _translate_torchrun() -> None:
    """Translates torchrun's variables. It names only the first machine; ``_set`` says why made-up
    names will do.
    """
    rank = _number("RANK")
    ranks = _number("WORLD_SIZE", least=1)
    local_rank = _number("LOCAL_RANK")
    _check_rank("RANK", rank, ranks)
    here = _number_here(
        "LOCAL_WORLD_SIZE", "WORLD_SIZE", ranks, min(ranks, ranks - (rank - local_rank))
    )
    _check_rank("LOCAL_RANK", local_rank, here)
    _set(rank, local_rank, here, _made_up_hosts(os.environ["MASTER_ADDR"], ranks, here), _master())


def _made_up_hosts(master: str, ranks: int, here: int) -> list[str]:
    """Returns a host for each rank, where only the master's is known: names that tell the machines
    apart.
    """
    return [f"node{place // here}" if place >= here else master for place in range(ranks)]


def _translate_mpi() -> bool:
    """Translates the variables of Open MPI, MVAPICH, MPICH or Intel MPI.

    Returns whether one of these started this process as one of several. None of them names the
    machine of rank 0. Only Open MPI has a number of its job, from which a port follows.
    """
    for names in MPI:
        if not all(map(os.environ.get, names)) or _number(names[1]) == 1:
            continue
        rank, ranks, local_rank, here = map(_number, names)
        _check_rank(names[0], rank, ranks)
        _check_rank(names[2], local_rank, _number_here(names[3], names[1], ranks, here))
        job = os.environ.get("PMIX_NAMESPACE")
        missing = []
        if not os.environ.get("MASTER_ADDR") and here != ranks:
            missing.append("MASTER_ADDR (the machine of rank 0)")
        if not os.environ.get("MASTER_PORT") and not job:
            missing.append("MASTER_PORT (any free one, such as 29500)")
        if missing:
            # With these variables, rank 0 alone prints the error.
            os.environ |= {"PADDLE_TRAINER_ID": str(rank), "PADDLE_TRAINERS_NUM": str(ranks)}
            found = f"{names[1]} is {ranks}, {names[3]} is {here}"
            advice = (
                "give them to mpirun: -x NAME=VALUE (Open MPI), -genv NAME VALUE (MPICH, Intel MPI)"
            )
            raise InputError(
                f"{found}: the ranks need {' and '.join(missing)} to find each other; {advice}"
            )
        master = os.environ.get("MASTER_ADDR") or rendezvous.LOOPBACK
        port = os.environ.get("MASTER_PORT") or 20000 + zlib.crc32((job or "").encode()) % 10000
        _set(rank, local_rank, here, _made_up_hosts(master, ranks, here), f"{master}:{port}")
        return True
    return False


def _tell_unread() -> None:
    """Prints a note if an unsupported launcher started this process: each of its ranks is then a
    run of its own.

    srun, and mpirun with a single rank, set such variables, too.
    """
    of_one = _first("SLURM_STEP_ID") or _first(" ".join(names[1] for names in MPI)) == "1"
    rank = next(filter(os.environ.get, UNREAD), None)
    if rank and not of_one and not all(map(os.environ.get, TORCHRUN[:3])):
        found = f"{rank} is {os.environ[rank]}, which this program doesn't read"
        needs = (
            "for one run of all ranks set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
        )
        print(f"note: {found}: it runs on this machine alone; {needs}", file=sys.stderr, flush=True)


def _translate_slurm() -> bool:
    """Translates srun's variables; returns whether srun started this process as one of several.

    The shell of sbatch and salloc has rank 0's variables, too (SLURM_PROCID=0, the job's
    SLURM_NTASKS), but is no rank: only processes of srun have a SLURM_STEP_ID. A shell that srun
    started (srun --pty) is a step of one task.
    """
    job = _first("SLURM_JOB_ID SLURM_JOBID")
    tasks = _number(SLURM_NTASKS, 0)
    is_task = bool(os.environ.get("SLURM_STEP_ID") or (os.environ.get("SLURM_PROCID") and not job))
    if tasks == 1 or not is_task:
        if tasks > 1:
            found = f"SLURM gave this job {tasks} tasks, but srun didn't start this process (no SLURM_STEP_ID)"
            print(
                f"note: {found}: it runs on this machine alone; srun starts all tasks",
                file=sys.stderr,
                flush=True,
            )
        return False
    _complete(
        ("SLURM_PROCID", SLURM_NTASKS, "SLURM_LOCALID", SLURM_HOSTS), "start with srun", signs=None
    )
    rank = _number("SLURM_PROCID")
    local_rank = _number("SLURM_LOCALID")
    _check_rank("SLURM_PROCID", rank, tasks)
    nodes = expand_hosts(_first(SLURM_HOSTS) or "")
    sizes = expand_counts(_first(SLURM_SIZES) or "1")
    # SLURM_NTASKS_PER_NODE is one number for all
    if (len(sizes), sum(sizes)) != (len(nodes), tasks):
        sizes = [tasks // len(nodes) + (node < tasks % len(nodes)) for node in range(len(nodes))]
    hosts = [host for host, size in zip(nodes, sizes, strict=True) for _ in range(size)]
    node = _number("SLURM_NODEID", nodes.index(hosts[rank]))
    port = os.environ.get("MASTER_PORT") or 20000 + int(job or 0) % 10000
    _set(
        rank, local_rank, sizes[node], hosts, f"{os.environ.get('MASTER_ADDR') or nodes[0]}:{port}"
    )
    return True


def _set(rank: int, local_rank: int, here: int, hosts: list[str], master: str) -> None:
    """Sets the variables that Paddle's launcher would set.

    Nothing connects to the endpoints: ranks find one another through the store at PADDLE_MASTER
    (NCCL's and gloo's own addresses are exchanged there), and fleet only counts machines by them.
    So their ports are made up, and so are the names of torchrun's machines except the first.
    """
    endpoints = [f"{host}:{6170 + place}" for place, host in enumerate(hosts)]
    os.environ |= {
        "PADDLE_MASTER": master,
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": str(len(hosts)),
        "PADDLE_LOCAL_RANK": str(local_rank),
        "PADDLE_RANK_IN_NODE": str(local_rank),
        "PADDLE_LOCAL_SIZE": str(here),
        "PADDLE_NNODES": str(len(set(hosts))),
        "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
    }


def _select_device(local_rank: int) -> None:
    """Selects this process's GPU, or gloo if there is none, unless Paddle's launcher has done so."""
    found = visible_gpus()
    if not found:
        os.environ.setdefault("PADDLE_DISTRI_BACKEND", "gloo")
    elif local_rank >= found > 1:
        what = f"local rank {local_rank} has no GPU: only {found} are visible"
        raise InputError(f"{what}; start at most {found} processes per machine", shared=False)
    else:
        # a single one: SLURM shows each task its own GPU. ``Door`` checks that no two are the same
        os.environ.setdefault("FLAGS_selected_gpus", str(local_rank if found > 1 else 0))


def _check_rank(name: str, rank: int, ranks: int) -> None:
    if rank >= ranks:
        raise InputError(
            f"{name} is {rank}, expected a number below {ranks}: the first is 0", shared=False
        )


def _number_here(name: str, name_of_all: str, ranks: int, default: int) -> int:
    """Returns how many of the ``ranks`` are on this machine."""
    here = _number(name, default, least=1)
    if here > ranks:
        found = f"{name} is {here}, but {name_of_all} is {ranks}"
        raise InputError(f"{found}: a machine has at most all of a run's ranks", shared=False)
    return here


def _first(names: str) -> str | None:
    """Returns the value of the first of these variables (separated by spaces) that is set."""
    return next((os.environ[name] for name in names.split() if os.environ.get(name)), None)


def _number(names: str, default: int | None = None, least: int = 0) -> int:
    text = _first(names)
    if text is None and default is not None:
        return default
    if text is None or not re.fullmatch("[0-9]{1,18}", text):
        found = f"{text[:100]}..." if text and len(text) > 100 else text
        raise InputError(f"{names.split()[0]} is {found!r}; expected a whole number", shared=False)
    if int(text) < least:
        raise InputError(f"{names.split()[0]} is {text}; expected at least {least}", shared=False)
    return int(text)


def _expand(part: str) -> list[str]:
    before, bracket, after = part.partition("[")
    if not bracket:
        return [part]
    inside, _, after = after.partition("]")
    numbers = []
    for item in inside.split(","):
        low, _, high = item.partition("-")
        high = high or low
        if not (low.isdecimal() and high.isdecimal() and int(low) <= int(high)):
            raise InputError(
                f"SLURM's list of nodes has the range {item!r}; expected one like 01-03"
            )
        numbers += [f"{number:0{len(low)}d}" for number in range(int(low), int(high) + 1)]
    return [f"{before}{number}{rest}" for number in numbers for rest in _expand(after)]


if __name__ == "__main__":
    with reporting():
        print(*node_flags())
