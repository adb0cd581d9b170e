"""Checks this machine and the communication of its processes. Each line is ok, or says what to do.

    python tools/doctor.py [-ngpus N] [-master HOST:PORT] [-cfg FILE] [-dataset NAME] [-data_path DIR] ...
    python -m paddle.distributed.launch --nnodes 2 --master HOST:PORT ... tools/doctor.py     (on each machine)
    python tools/doctor.py --gpu [--rehearse] [--only NAME ...] [-ngpus N]

The first form starts N ranks here (default: one per visible GPU, or 2), and times an all-reduce
between them. Started by a launcher on several machines, it is one of their ranks. The all-reduce is
then over all of them, and rank 0 prints what is wrong on any machine. --gpu runs the first steps on
this machine's GPUs, in about ten minutes (docs/guides/gpu.md). --rehearse runs them on the CPU, in small
sizes. Exit status: 0 if no problem was found; 1 otherwise.
"""

import argparse
import contextlib
import io
import multiprocessing
import os
import queue
import signal
import socket
import statistics
import sys
import time
import types
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run by its path, Python would look in tools/ alone

import launch.startup  # noqa: E402, F401  (signals and streams)
from errors import InputError, RunError, reporting  # noqa: E402
from launch import launched, launchers, spawned  # noqa: E402
from settings.parser import Parser  # noqa: E402
from tools.checks import machine  # noqa: E402

try:
    from tools.gpu import first_steps
except ModuleNotFoundError:  # an installed copy has none
    first_steps = None

# float32 numbers that are reduced, as many as ViT-S/16 has parameters
ELEMENTS = 22_050_664
REPEATS = 5
# Bytes per second. A network of 1 Gbit/s reaches about this rate.
MIN_RATE = 0.1e9
# seconds by which the hosts' clocks may differ
MAX_CLOCK_DIFFERENCE = 5.0
HANG = "do all ranks run? check firewalls, GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME), NCCL_DEBUG=INFO"

# ------------------------------------------------------------ between ranks


def rank_of(answers: Any, problems: list[str]) -> None:
    """Runs a rank: it joins the others, times an all-reduce, and gathers the problems of all hosts.

    A rank is a process of its own, because it may hang. It puts (rank, "joined") into ``answers``,
    and then (rank, result) or (rank, exception).

    Args:
        problems: the problems that were found on this host.
    """
    try:
        import paddle
        import paddle.distributed as dist

        import utils
        from launch.signals import die_with_parent

        die_with_parent()
        paddle.disable_signal_handler()
        rank = utils.rank()
        ranks = utils.world_size()
        if ranks > 1:
            # Paddle prints a list of its flags.
            with contextlib.redirect_stderr(io.StringIO()):
                dist.init_parallel_env()
        answers.put((rank, "joined"))
        times = []
        right = True
        for _ in range(REPEATS + 1):
            tensor = paddle.full([ELEMENTS], rank + 1.0)
            # A barrier, so that all ranks begin at the same time.
            utils.all_gather(None)
            start = time.perf_counter()
            if ranks > 1:
                dist.all_reduce(tensor)
            # Reading a value waits for the device.
            right = tensor[-1].item() == ranks * (ranks + 1) / 2 and right
            times.append(time.perf_counter() - start)
        hosts = utils.all_gather((socket.gethostname(), problems, time.time()))
        backend = dist.get_backend() if ranks > 1 else "nothing"
        answers.put((rank, (ranks, backend, statistics.median(times[1:]), right, hosts)))
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        if not lines:
            lines = [type(error).__name__]
        answers.put((int(os.environ.get("PADDLE_TRAINER_ID") or 0), RuntimeError(lines[-1])))


def start_ranks(ngpus: int | None, problems: list[str]) -> tuple[Any, Any]:
    """Starts the ranks of this process: one, if a launcher started this process. Returns their
    context and the queue of their answers.
    """
    import paddle.distributed as dist

    spawn = multiprocessing.get_context("spawn")
    ranks = machine.ranks_here(ngpus)
    spawns = not launchers.is_launched() and ranks > 1
    if spawns:
        spawned.prepare_spawn()
    with spawned.without_current_folder():
        answers = spawn.Queue()
        if spawns:
            # They are on this host, whose problems this process prints itself.
            return dist.spawn(rank_of, args=(answers, []), nprocs=ranks, join=False), answers
        process = spawn.Process(target=rank_of, args=(answers, problems), daemon=True)
        process.start()
    return types.SimpleNamespace(processes=[process]), answers


def all_reduce(
    processes: list[Any], answers: Any, first: int, timeout: float
) -> tuple[machine.Finding, list[tuple]]:
    """Waits for the ranks; returns the finding and what each rank's host reported.

    A rank that doesn't answer within ``timeout`` seconds is named. All ranks are ended.

    Args:
        first: the number of the first rank of ``processes``.
    """
    deadline = time.monotonic() + timeout
    waiting = {first + place: "didn't join" for place in range(len(processes))}
    result: Any = None
    try:
        while waiting:
            try:
                rank, answer = answers.get(timeout=0.1)
            except queue.Empty:
                for place, process in enumerate(processes):
                    if code := process.exitcode:
                        how = f"ended with status {code}"
                        if code < 0:
                            how = f"was killed by {signal.Signals(-code).name}"
                        return (False, f"rank {first + place} {how}"), []
                if time.monotonic() > deadline:
                    who = ", ".join(
                        f"rank {rank} {state}" for rank, state in sorted(waiting.items())
                    )
                    return (False, f"no answer in {timeout:g} s: {who}; {HANG}"), []
                continue
            if isinstance(answer, Exception):
                return (False, f"rank {rank}: {answer}"), []
            if answer == "joined":
                waiting[rank] = "joined, but didn't finish all-reducing"
            else:
                del waiting[rank]
                result = answer
    finally:
        for process in processes:
            process.kill()
            process.join()
    return judge_all_reduce(*result), result[-1]


def judge_all_reduce(
    ranks: int, backend: str, seconds: float, right: bool, hosts: list[tuple]
) -> machine.Finding:
    """Returns the finding for an all-reduce.

    Args:
        seconds: the median time.
        right: whether all sums were right.
        hosts: for each rank, the name, the problems and the time of its host (``rank_of``).
    """
    size = 4 * ELEMENTS
    found = (
        f"{size / 1e6:.0f} MB between {ranks} ranks over {backend}:"
        f" {1e3 * seconds:.1f} ms, median of {REPEATS} ({size / seconds / 1e9:.3g} GB/s)"
    )
    if not right:
        return False, f"{found}, but the sums are wrong; check the memory and network hardware"
    if size / seconds < MIN_RATE:
        return False, f"{found}: less than {MIN_RATE / 1e9:g} GB/s; choose a faster interface"
    clocks = [clock for _, _, clock in hosts]
    difference = max(clocks) - min(clocks)
    if difference > MAX_CLOCK_DIFFERENCE:
        return (
            False,
            f"{found}; the clocks of the hosts differ by {difference:.0f} s: set them by NTP",
        )
    return True, found


# ------------------------------------------------------------------- screen


def main() -> None:
    arguments = _arguments()
    if arguments.ngpus is not None and arguments.ngpus < 1 and arguments.ngpus != -1:
        raise InputError(f"-ngpus is {arguments.ngpus}, expected -1 (all) or at least 1")
    if arguments.gpu or arguments.rehearse or arguments.only:
        if first_steps is None:
            raise InputError(
                "--gpu needs a checkout of the toolkit; run python tools/doctor.py --gpu there"
            )
        sys.exit(first_steps.main(arguments, _tell))
    meeting = None
    meeting_error = ""
    if launchers.is_launched():
        try:
            # This also shows gloo which network reaches rank 0.
            meeting = launched.meet(arguments.timeout)
        except RunError as error:
            meeting_error = str(error)
    rank = int(os.environ.get("PADDLE_TRAINER_ID") or 0)
    ranks = int(os.environ.get("PADDLE_TRAINERS_NUM") or 1)
    local_ranks = int(os.environ.get("PADDLE_LOCAL_SIZE") or 1)
    findings: dict[str, machine.Finding] = {}
    # One rank of each machine checks it: the others would find the same.
    if not int(os.environ.get("PADDLE_LOCAL_RANK") or 0):
        for name, finding in machine.checks(arguments, several=ranks > local_ranks):
            findings[name] = finding
            _tell(name, finding, aloud=rank == 0)
        if "devices" not in findings:
            sys.exit("the other checks need these packages")
    problems = [f"{name}: {text}" for name, (ok, text) in findings.items() if not ok]
    if meeting_error:
        findings["all-reduce"] = False, meeting_error
        hosts = []
    else:
        if meeting:
            meeting.ready()
        # ``started`` is kept, because a rank that starts needs its parent's queues.
        started, answers = start_ranks(arguments.ngpus, problems)
        findings["all-reduce"], hosts = all_reduce(
            started.processes, answers, rank, arguments.timeout
        )
    _tell("all-reduce", findings["all-reduce"], aloud=rank == 0)
    for name, host_problems, _ in hosts[1:]:
        if host_problems:
            findings[name] = False, "; ".join(host_problems)
            _tell(name, findings[name], aloud=rank == 0)
    if rank and not hosts:
        # Rank 0 has no report of this machine.
        for name, finding in findings.items():
            _tell(name, finding, aloud=not finding[0])
    todo = sum(not ok for ok, _ in findings.values())
    if rank == 0:
        print(f"{todo} to do" if todo else "all is well")
    sys.exit(1 if todo else 0)


def _tell(name: str, finding: machine.Finding, aloud: bool) -> None:
    is_well, text = finding
    if aloud:
        print(f"{'ok  ' if is_well else 'todo'}  {name:10}  {text}", flush=True)


def _arguments() -> argparse.Namespace:
    parser = Parser(__doc__)

    def flag(name: str, kind: type, text: str, default: Any = None, **how: Any) -> None:
        parser.add_argument(f"-{name}", f"--{name}", type=kind, default=default, help=text, **how)

    flag(
        "ngpus",
        int,
        "ranks to start on this machine; -1: one per GPU, or without a GPU one per core",
        None,
    )
    flag(
        "master",
        str,
        "check that this port is free (on this machine) or reachable (on another one)",
        metavar="HOST:PORT",
    )
    flag(
        "timeout",
        float,
        "time limit of the all-reduce in seconds (default: %(default)s)",
        60.0,
    )
    flag("shm", str, "the folder of shared memory", "/dev/shm")
    flag("cfg", str, "the model whose data loading is checked (default: %(default)s)", "vit_digits")
    flag("dataset", str, "the dataset to load")
    flag("data_path", str, "the folder of the dataset")
    flag(
        "o",
        str,
        "set any keys, for the loader",
        [],
        nargs="+",
        action="extend",
        metavar="KEY VALUE",
    )
    parser.add_argument(
        "-gpu", "--gpu", action="store_true", help="run the first steps on this machine's GPUs"
    )
    parser.add_argument(
        "-rehearse",
        "--rehearse",
        action="store_true",
        help="with --gpu: try the checks on the CPU, in small sizes",
    )
    flag(
        "only",
        str,
        "with --gpu: only these checks",
        nargs="+",
        metavar="NAME",
        choices=first_steps and first_steps.CHECKS,
    )
    arguments = parser.parse_args()
    arguments.changed = [
        name for name, value in vars(arguments).items() if value != parser.get_default(name)
    ]
    return arguments


if __name__ == "__main__":
    with reporting():
        main()
