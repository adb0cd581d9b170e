"""Reads what a launcher set for this process: its rank, the number of ranks, and where rank 0 is.

Paddle's launcher, torchrun, mpirun and SLURM's srun each have variables of their own. All other
modules read the PADDLE_* variables of Paddle's launcher, to which ``is_launched`` translates the
rest. Paddle itself reads some of them when it is imported, so this module doesn't import it.
"""

import contextlib
import os
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from errors import InputError
from launch import devices


class MpiVariables(NamedTuple):
    """Names of an MPI launcher's variables; the local ones count the processes of this machine."""

    rank: str
    ranks: str
    local_rank: str
    local_ranks: str


PADDLE = (
    "PADDLE_TRAINER_ID",
    "PADDLE_TRAINERS_NUM",
    "PADDLE_CURRENT_ENDPOINT",
    "PADDLE_TRAINER_ENDPOINTS",
)
TORCHRUN_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
TORCHRUN = (*TORCHRUN_RANKS, "MASTER_ADDR", "MASTER_PORT")
MPI = (
    # Open MPI
    MpiVariables(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    # MVAPICH
    MpiVariables(
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    # MPICH and Intel MPI
    MpiVariables("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
# srun's tasks are a step, which may be a part of a SLURM job. So a step's variables come before the
# job's.
SLURM_NTASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
SLURM_HOSTS = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
SLURM_SIZES = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
# the rank and the number of ranks, by all launchers that are supported
RANKS = ("PADDLE_TRAINER_ID", "RANK", *(names.rank for names in MPI), "SLURM_PROCID")
SIZES = (
    "PADDLE_TRAINERS_NUM",
    "WORLD_SIZE",
    *(names.ranks for names in MPI),
    "SLURM_STEP_NUM_TASKS",
)
# the rank, by launchers that aren't supported: PMIx alone, Cray, Flux, IBM
UNSUPPORTED = (
    "PMIX_RANK",
    "PMI_RANK",
    "PALS_RANKID",
    "ALPS_APP_PE",
    "FLUX_TASK_RANK",
    "JSM_NAMESPACE_RANK",
)
# variables that identify a run
JOBS = ("SLURM_JOB_ID", "SLURM_STEP_ID", "TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE")
# If none of these is set, no launcher started this process.
_SIGNS = (*PADDLE, *RANKS, *SIZES, *UNSUPPORTED, *TORCHRUN_RANKS, *SLURM_NTASKS, "SLURM_STEP_ID")


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
    with telling_others(RANKS, SIZES):
        devices.check_visible()
        return any(map(os.environ.get, _SIGNS)) and _translate()


def _translate() -> bool:
    """Sets the variables of Paddle's launcher. Returns whether a launcher started this process."""
    if all_set(PADDLE, "start with python -m paddle.distributed.launch, or unset them", PADDLE):
        rank = read_number("PADDLE_TRAINER_ID")
        ranks = read_number("PADDLE_TRAINERS_NUM", least=1)
        check_rank("PADDLE_TRAINER_ID", rank, ranks)
        local_ranks = _local_ranks("PADDLE_LOCAL_SIZE", "PADDLE_TRAINERS_NUM", ranks, ranks)
        check_rank("PADDLE_LOCAL_RANK", read_number("PADDLE_LOCAL_RANK", default=0), local_ranks)
    elif all(map(os.environ.get, TORCHRUN)):
        _translate_torchrun()
    elif not (_translate_mpi() or _translate_slurm()):
        _note_unsupported()
        # MASTER_ADDR and MASTER_PORT alone don't show that a launcher started this process.
        advice = "start with torchrun or run_train_multi_node.sh, or unset them"
        return all_set(TORCHRUN, advice, TORCHRUN_RANKS)
    _select_device(read_number("PADDLE_LOCAL_RANK", default=0))
    return True


@contextlib.contextmanager
def telling_others(
    ranks: Sequence[str], sizes: Sequence[str], kind: str = "rank"
) -> Iterator[None]:
    """Tells the other ranks, or nodes, of an InputError that is raised within: they would wait for
    this one.

    Args:
        ranks: variables that may hold this one's number.
        sizes: variables that may hold how many there are.
        kind: "rank" or "node".
    """
    try:
        yield
    except InputError as error:
        from launch import rendezvous

        # The others can't be informed if rank 0's address or the secret is unknown, or if nobody
        # listens.
        with contextlib.suppress(InputError, OSError):
            rendezvous.cancel(
                master_address(), first_set(*ranks), first_set(*sizes), str(error), job(), kind
            )
        raise


def master_address() -> str:
    """Returns HOST:PORT where rank 0 waits for the others."""
    if os.environ.get("PADDLE_TRAINER_ID"):
        endpoints = os.environ.get("PADDLE_TRAINER_ENDPOINTS", "")
        return os.environ.get("PADDLE_MASTER") or endpoints.split(",")[0]
    port = read_number("MASTER_PORT")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun itself listens at MASTER_PORT, for its workers.
        port += 1
    return f"{os.environ.get('MASTER_ADDR', '')}:{port}"


def job() -> str:
    """Returns an identifier of this run, from the launcher's variables; "" if the launcher sets
    none.
    """
    return " ".join(filter(None, map(os.environ.get, JOBS)))


def set_by_launcher() -> bool:
    """Returns whether Paddle's launcher or torchrun started this process.

    Both set OMP_NUM_THREADS for their ranks, which says nothing about the user's wish. srun and
    mpirun pass on the user's own value.
    """
    with contextlib.suppress(OSError):
        # as it was at the start: ``is_launched`` changes os.environ
        started = Path("/proc/self/environ").read_bytes()
        return bool(re.search(rb"(?:^|\0)(PADDLE_TRAINER_ID|TORCHELASTIC_RUN_ID)=", started))
    return False


def cores_each(processes: int) -> int:
    """Returns the number of cores for each of a run's ``processes`` on this machine.

    SLURM gives each task cores of its own. Without cgroups, a task also sees those of the other
    tasks.
    """
    cores = devices.num_cores()
    per_task = read_number("SLURM_CPUS_PER_TASK", default=0)
    if not per_task:
        return max(1, cores // processes)
    # If SLURM started as many tasks as there are processes, each process is a task.
    if first_set(*SLURM_NTASKS) == os.environ.get("PADDLE_TRAINERS_NUM"):
        return min(cores, per_task)
    return min(cores, max(1, per_task // processes))


def expand_hosts(nodelist: str) -> list[str]:
    """Returns the names of SLURM's ``node[01-03,7],gpu-a``: node01, node02, node03, node7, gpu-a.

    Raises:
        InputError: a bracket without its other half, or a range that isn't one.
    """
    items = re.findall(r"(?:[^,\[\]]|\[[-\d,]+\])+", nodelist)
    if not items or ",".join(items) != nodelist:
        raise InputError(
            f"SLURM's list of nodes is {nodelist!r}; expected one like node[01-03,7],gpu-a"
        )
    return [host for item in items for host in _expand(item)]


def _expand(item: str) -> list[str]:
    before, bracket, after = item.partition("[")
    if not bracket:
        return [item]
    inside, _, after = after.partition("]")
    numbers = []
    for number_range in inside.split(","):
        low, _, high = number_range.partition("-")
        high = high or low
        if not (low.isdecimal() and high.isdecimal() and int(low) <= int(high)):
            raise InputError(
                f"SLURM's list of nodes has the range {number_range!r}; expected one like 01-03"
            )
        numbers += [f"{number:0{len(low)}d}" for number in range(int(low), int(high) + 1)]
    return [f"{before}{number}{rest}" for number in numbers for rest in _expand(after)]


def expand_counts(text: str) -> list[int]:
    """Returns the numbers of SLURM's ``4(x2),3``: 4, 4, 3."""
    counts = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item)
        if not match:
            raise InputError(f"SLURM's tasks per node are {text!r}; expected a list like 4(x2),3")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _translate_torchrun() -> None:
    rank = read_number("RANK")
    ranks = read_number("WORLD_SIZE", least=1)
    local_rank = read_number("LOCAL_RANK")
    check_rank("RANK", rank, ranks)
    # Without LOCAL_WORLD_SIZE, the guess is that all ranks from this machine's first one on are on
    # it.
    at_most = min(ranks, ranks - (rank - local_rank))
    local_ranks = _local_ranks("LOCAL_WORLD_SIZE", "WORLD_SIZE", ranks, at_most)
    check_rank("LOCAL_RANK", local_rank, local_ranks)
    hosts = _made_up_hosts(os.environ["MASTER_ADDR"], ranks, local_ranks)
    _set(rank, local_rank, local_ranks, hosts, master_address())


def _translate_mpi() -> bool:
    """Translates the variables of Open MPI, MVAPICH, MPICH or Intel MPI; returns whether one of
    these started this process as one of several.
    """
    for names in MPI:
        if all(map(os.environ.get, names)) and read_number(names.ranks) != 1:
            _translate_mpi_variables(names)
            return True
    return False


def _translate_mpi_variables(names: MpiVariables) -> None:
    """Translates one MPI launcher's variables. None of these launchers names the machine of rank 0.
    Only Open MPI has a number of its job, from which a port follows.
    """
    rank, ranks, local_rank, local_ranks = map(read_number, names)
    check_rank(names.rank, rank, ranks)
    _local_ranks(names.local_ranks, names.ranks, ranks, local_ranks)
    check_rank(names.local_rank, local_rank, local_ranks)
    job_name = os.environ.get("PMIX_NAMESPACE")
    missing = []
    if not os.environ.get("MASTER_ADDR") and local_ranks != ranks:
        missing.append("MASTER_ADDR (the machine of rank 0)")
    if not os.environ.get("MASTER_PORT") and not job_name:
        missing.append("MASTER_PORT (any free one, such as 29500)")
    if missing:
        # ``errors.reporting`` reads these variables, so that rank 0 alone prints the error.
        os.environ |= {"PADDLE_TRAINER_ID": str(rank), "PADDLE_TRAINERS_NUM": str(ranks)}
        raise InputError(
            f"{names.ranks} is {ranks}, {names.local_ranks} is {local_ranks}:"
            f" the ranks need {' and '.join(missing)} to find each other;"
            " give them to mpirun: -x NAME=VALUE (Open MPI), -genv NAME VALUE (MPICH, Intel MPI)"
        )
    host = os.environ.get("MASTER_ADDR") or "127.0.0.1"
    port = os.environ.get("MASTER_PORT") or 20000 + zlib.crc32((job_name or "").encode()) % 10000
    hosts = _made_up_hosts(host, ranks, local_ranks)
    _set(rank, local_rank, local_ranks, hosts, f"{host}:{port}")


def _translate_slurm() -> bool:
    """Translates srun's variables; returns whether srun started this process as one of several.

    The shell of sbatch and salloc has rank 0's variables, too (SLURM_PROCID=0, the job's
    SLURM_NTASKS), but isn't a rank: only processes of srun have a SLURM_STEP_ID. A shell that srun
    started (srun --pty) is a step of one task.
    """
    job_id = first_set("SLURM_JOB_ID", "SLURM_JOBID")
    tasks = read_number(*SLURM_NTASKS, default=0)
    is_task = bool(
        os.environ.get("SLURM_STEP_ID") or (os.environ.get("SLURM_PROCID") and not job_id)
    )
    if tasks == 1:
        return False
    if not is_task:
        if tasks > 1:
            _note(
                f"SLURM gave this job {tasks} tasks, but srun didn't start this process"
                " (no SLURM_STEP_ID): it runs on this machine alone; use srun to start all tasks"
            )
        return False
    needed = ("SLURM_PROCID", SLURM_NTASKS, "SLURM_LOCALID", SLURM_HOSTS)
    all_set(needed, "start with srun")
    rank = read_number("SLURM_PROCID")
    local_rank = read_number("SLURM_LOCALID")
    check_rank("SLURM_PROCID", rank, tasks)
    nodes = expand_hosts(first_set(*SLURM_HOSTS) or "")
    sizes = expand_counts(first_set(*SLURM_SIZES) or "1")
    # SLURM_NTASKS_PER_NODE is one number for all nodes, and tasks may not be divisible by it.
    if (len(sizes), sum(sizes)) != (len(nodes), tasks):
        each, rest = divmod(tasks, len(nodes))
        sizes = [each + 1 if node < rest else each for node in range(len(nodes))]
    hosts = [host for host, size in zip(nodes, sizes, strict=True) for _ in range(size)]
    node = read_number("SLURM_NODEID", default=nodes.index(hosts[rank]))
    host = os.environ.get("MASTER_ADDR") or nodes[0]
    port = os.environ.get("MASTER_PORT") or 20000 + int(job_id or 0) % 10000
    _set(rank, local_rank, sizes[node], hosts, f"{host}:{port}")
    return True


def _note_unsupported() -> None:
    """Prints a note if an unsupported launcher started this process: each of its ranks is then a
    run of its own.

    srun, and mpirun with a single rank, set such variables, too.
    """
    is_single = first_set(*(names.ranks for names in MPI)) == "1"
    if first_set("SLURM_STEP_ID") or is_single or all(map(os.environ.get, TORCHRUN_RANKS)):
        return
    if rank := next(filter(os.environ.get, UNSUPPORTED), None):
        _note(
            f"{rank} is {os.environ[rank]}, which isn't supported: it runs on this"
            " machine alone; for one run of all ranks set RANK, WORLD_SIZE, LOCAL_RANK,"
            " MASTER_ADDR and MASTER_PORT"
        )


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr, flush=True)


def _made_up_hosts(master: str, ranks: int, local_ranks: int) -> list[str]:
    """Returns a host for each rank, where only rank 0's host is known. ``_set`` says why made-up
    names suffice for the other machines.
    """
    return [
        f"node{rank // local_ranks}" if rank >= local_ranks else master for rank in range(ranks)
    ]


def _set(rank: int, local_rank: int, local_ranks: int, hosts: list[str], master: str) -> None:
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
        "PADDLE_LOCAL_SIZE": str(local_ranks),
        "PADDLE_NNODES": str(len(set(hosts))),
        "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
    }


def _select_device(local_rank: int) -> None:
    """Selects this process's GPU, or gloo without one, unless Paddle's launcher has done so."""
    gpus = devices.num_gpus_of_paddle()
    if not gpus:
        os.environ.setdefault("PADDLE_DISTRI_BACKEND", "gloo")
    elif local_rank >= gpus > 1:
        raise InputError(
            f"local rank {local_rank} has no GPU: only {gpus} are visible;"
            f" start at most {gpus} processes per machine",
            shared=False,
        )
    else:
        # SLURM shows each task a single GPU, its own. The ranks compare their GPUs when they meet
        # (``admission.shared_gpu_error``).
        os.environ.setdefault("FLAGS_selected_gpus", str(local_rank if gpus > 1 else 0))


def _local_ranks(name: str, name_of_all: str, ranks: int, default: int) -> int:
    """Returns how many of the ``ranks`` are on this machine, by the variable ``name``."""
    local_ranks = read_number(name, default=default, least=1)
    if local_ranks > ranks:
        raise InputError(
            f"{name} is {local_ranks}, but {name_of_all} is {ranks}:"
            " a machine can't have more ranks than the run",
            shared=False,
        )
    return local_ranks


def check_rank(name: str, rank: int, ranks: int) -> None:
    """Raises InputError if ``rank``, which the variable ``name`` holds, isn't below ``ranks``."""
    if rank >= ranks:
        raise InputError(f"{name} is {rank}, expected a number from 0 to {ranks - 1}", shared=False)


def all_set(
    names: Sequence[str | tuple[str, ...]], advice: str, signs: Sequence[str] | None = None
) -> bool:
    """Returns whether all variables are set. Of those in a tuple, any one suffices.

    Args:
        advice: ends the error.
        signs: variables that show that the others are needed; None: they are needed anyway.

    Raises:
        InputError: some are missing though they are needed.
    """
    alternatives = [(name,) if isinstance(name, str) else name for name in names]
    missing = [names for names in alternatives if not first_set(*names)]
    if missing and (signs is None or first_set(*signs)):
        present = [
            f"{names[0]}={first_set(*names)}" for names in alternatives if names not in missing
        ]
        absent = [" or ".join(names) for names in missing]
        raise InputError(
            f"a distributed run's environment is incomplete: found {', '.join(present) or 'none'},"
            f" missing {', '.join(absent)}; {advice}"
        )
    return not missing


def first_set(*names: str) -> str | None:
    """Returns the value of the first of these variables that is set and not empty."""
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


def read_number(*names: str, default: int | None = None, least: int = 0) -> int:
    """Returns the whole number in the first of these variables that is set.

    Raises:
        InputError: none is set and there is no default, or it isn't a whole number of at least
            ``least``.
    """
    text = first_set(*names)
    if text is None and default is not None:
        return default
    if text is None or not re.fullmatch("[0-9]{1,18}", text):
        shown = f"{text[:100]}..." if text and len(text) > 100 else text
        raise InputError(f"{names[0]} is {shown!r}; expected a whole number", shared=False)
    if int(text) < least:
        raise InputError(f"{names[0]} is {text}; expected at least {least}", shared=False)
    return int(text)
