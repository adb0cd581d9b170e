"""What every package uses: this process's place among the others, seeds, loggers, files."""

import contextlib
import logging
import os
import pickle
import random
import re
import resource
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from tqdm import tqdm

from errors import InputError, RunError, printable, remedy
from launch.devices import num_cores
from launch.files import obstacle, open_to_append
from launch.files import sync_directory as sync_directory
from launch.files import writing_whole as writing_whole
from settings.paddlevit.programs import instead

if __name__ == "utils":  # as a part of another program (tools/package) it leaves these to that one
    # Paddle's import sets INFO: its notes on ports are no news for users
    logging.getLogger().setLevel(logging.WARNING)
    # a thread that wakes bars that nobody updates: ours are, at each step
    tqdm.monitor_interval = 0
    # its default is a semaphore of the system, left behind by a killed process
    tqdm.set_lock(threading.RLock())

# Programs that this one starts would look for their libraries in the current folder, which may be a
# stranger's run: the linker takes an empty entry for it. OpenCV adds one, and Paddle imports OpenCV
# where it is installed.
if "LD_LIBRARY_PATH" in os.environ:
    os.environ["LD_LIBRARY_PATH"] = ":".join(filter(None, os.environ["LD_LIBRARY_PATH"].split(":")))

# ---------------------------------------------------------------- processes


def rank() -> int:
    """Returns this process's number among the run's processes, from 0; 0 in a run of one process."""
    return dist.get_rank()


def world_size() -> int:
    """Returns the number of the run's processes, on all machines."""
    return dist.get_world_size()


def num_gpus() -> int:
    """Returns the number of GPUs that CUDA_VISIBLE_DEVICES leaves to this process; 0 on a CPU
    build.
    """
    return paddle.device.cuda.device_count() if paddle.device.is_compiled_with_cuda() else 0


def num_processes(ngpus: int) -> int:
    """Returns how many processes to spawn for the key NGPUS.

    Raises:
        InputError: more are asked for than there are GPUs, or without a GPU, cores; or none.
    """
    if ngpus < 1 and ngpus != -1:
        raise InputError(f"NGPUS asks for {ngpus} processes, expected 1 or more; -1 takes all")
    gpus = num_gpus()
    found = gpus or num_cores()
    if ngpus > found:
        kind = "visible GPUs" if gpus else "cores (no GPU is visible)"
        raise InputError(
            f"NGPUS asks for {ngpus} processes, found {found} {kind}; lower -ngpus, or -1 takes all"
        )
    return found if ngpus == -1 else ngpus


def free_memory() -> int:
    """Returns the bytes that this machine, or its container's limit (cgroup v2), has left."""
    free = sys.maxsize
    with contextlib.suppress(OSError):
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = 1024 * int(fields["MemAvailable"].split()[0])
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max": no limit
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        # What was read from files is let go where memory is short, also what was read twice, as a
        # data set is.
        files = re.findall(
            r"^(?:in)?active_file (\d+)", (group / "memory.stat").read_text(), re.MULTILINE
        )
        free = min(free, limit - used + sum(map(int, files)))
    return free


@contextlib.contextmanager
def within_memory() -> Iterator[None]:
    """Makes what is allocated within, on a CPU, fail with a MemoryError where the machine hasn't
    got it.

    Else the kernel would promise it, and end some process later.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    # another kernel, or a limit that is lower already
    with contextlib.suppress(OSError, ValueError):
        if not num_gpus():
            used = re.search(
                r"^VmData:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE
            )
            swap = re.search(
                r"^SwapFree:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE
            )
            most = (
                1024 * (int(used[1] if used else "none") + int(swap[1] if swap else 0))
                + free_memory()
            )
            resource.setrlimit(resource.RLIMIT_DATA, (most if soft < 0 else min(most, soft), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


# -------------------------------------------------------------- collectives


def to_device(tensor: paddle.Tensor) -> paddle.Tensor:
    """Returns ``tensor`` where this process computes, from where NCCL takes it. Paddle keeps some
    elsewhere: the powers of Adam's betas are on the CPU.
    """
    here = paddle.framework._current_expected_place()
    # Not Tensor.to: in Paddle 2.6 it moves the tensor itself.
    return tensor if tensor.place._equals(here) else tensor._copy_to(here, True)


def all_reduce_sum(tensor: paddle.Tensor) -> paddle.Tensor:
    """Returns the sum of ``tensor`` over all processes; every process calls it, with the same shape
    and dtype.
    """
    if world_size() == 1:
        return tensor
    total = to_device(tensor).clone().detach()
    dist.all_reduce(total)
    return total


def all_reduce_mean(tensor: paddle.Tensor | float) -> paddle.Tensor | float:
    """Returns the mean of ``tensor`` over all processes; of a number, the mean as a number."""
    if isinstance(tensor, paddle.Tensor):
        return all_reduce_sum(tensor) / world_size()
    return float(all_reduce_sum(paddle.to_tensor(tensor, dtype="float64"))) / world_size()


def reduce_dict(
    input_dict: dict[str, paddle.Tensor], average: bool = True
) -> dict[str, paddle.Tensor]:
    """Returns the mean (``average``) or sum over all processes of each tensor, by one collective
    per dtype.

    Raises:
        RunError: on every process, when keys, shapes or dtypes differ between them.
    """
    keys = sorted(input_dict)
    signature = [(key, tuple(input_dict[key].shape), str(input_dict[key].dtype)) for key in keys]
    for other, theirs in enumerate(all_gather(signature)):
        if theirs != signature:
            odd = sorted(set(theirs) ^ set(signature))
            raise RunError(
                f"reduce_dict: ranks {rank()} and {other} differ in {', '.join(map(str, odd))}"
            )
    reduced: dict[str, paddle.Tensor] = {}
    for dtype in sorted({dtype for _, _, dtype in signature}):
        group = [key for key, _, kind in signature if kind == dtype]
        flat = all_reduce_sum(
            paddle.concat([input_dict[key].detach().reshape([-1]) for key in group])
        )
        sizes = [int(np.prod(input_dict[key].shape, dtype=np.int64)) for key in group]
        for key, part in zip(group, paddle.split(flat, sizes), strict=True):
            part = part.reshape(input_dict[key].shape)
            reduced[key] = part / world_size() if average else part
    return {key: reduced[key] for key in input_dict}


_gathered = 0  # by ``all_gather``, which every rank calls as often


def all_gather(data: Any) -> list[Any]:
    """Returns every process's ``data`` (any picklable object; sizes may differ), in the order of
    ranks.

    A pickle can run code. So only a rank's own is read: each has a proof, by the run's key, of the
    pickle, its rank and its turn (``launch.secret``).

    Raises:
        RunError: what came isn't a rank's.
    """
    global _gathered
    if world_size() == 1:
        return [data]
    from launch import secret

    key = secret.of_run()
    _gathered = _gathered + 1
    pickled = pickle.dumps(data, pickle.HIGHEST_PROTOCOL)
    sealed = secret.mac(key, f"{rank()} {_gathered}".encode(), pickled) + pickled
    sizes: list[paddle.Tensor] = []
    dist.all_gather(sizes, paddle.to_tensor([len(sealed)], dtype="int64"))
    longest = max(map(int, sizes))
    flat = np.frombuffer(sealed.ljust(longest, b"\0"), np.uint8)
    parts: list[paddle.Tensor] = []
    dist.all_gather(parts, paddle.to_tensor(flat))
    found = []
    for place, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        said = part.numpy()[: int(size)].tobytes()
        proof = said[: secret.SIZE]
        pickled = said[secret.SIZE :]
        if not secret.same(proof, secret.mac(key, f"{place} {_gathered}".encode(), pickled)):
            raise RunError(
                f"what came as rank {place}'s is unproved: a stranger said it, or {secret.VARIABLE} differs"
            )
        found.append(pickle.loads(pickled))
    return found


def all_to_all(parts: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
    """Sends an array to each process, and returns those that all sent to this one, [m, n] each, in
    the order of ranks.

    Args:
        parts: [N, m, n], an array for each of N processes.
        lengths: the n of each process.
    """
    if world_size() == 1:
        return [*parts]
    received = []
    dtype: Any = str(parts.dtype)
    for source, length in enumerate(lengths):
        found = paddle.empty([parts.shape[1], length], dtype)
        if length:
            # One after the other: Paddle's own all-to-all has no gloo. A list of tensors would be
            # copied once more.
            sent = paddle.to_tensor(parts).flatten(0, 1) if source == rank() else None
            dist.stream.scatter(found, sent, source)
        received.append(found.numpy())
    return received


# ------------------------------------------------------------------- seeds


def seed_everything(seed: int) -> None:
    """Seeds Python, NumPy and Paddle."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    paddle.seed(seed)


def seed_step(seed: int, step: int) -> None:
    """Seeds what this step draws from Python, NumPy and Paddle (dropout, drop path) by (seed, step,
    rank). So there is no generator's state to save for a resume.
    """
    seed_everything(int(np.random.SeedSequence([seed, step, rank()]).generate_state(1)[0]))


# ------------------------------------------------------------ logs and files


class AverageMeter:
    """A weighted mean: ``update(val, n)`` adds a mean ``val`` over ``n`` samples."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.sum = 0.0
        self.count = 0

    def update(self, val: float, n: int = 1) -> None:
        self.sum += float(val) * n
        self.count += n

    @property
    def avg(self) -> float:
        return self.sum / self.count if self.count else 0.0

    @property
    def cnt(self) -> int:
        """PaddleViT's name of ``count``."""
        return self.count


class _Printable(logging.Formatter):
    """Shows what can't be printed as escapes: a class's name may hold what a terminal acts on."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(printable(line, len(line)) for line in super().format(record).split("\n"))


_LINE = _Printable("%(asctime)s %(message)s", "%m%d %H:%M:%S")


class _ConsoleHandler(logging.StreamHandler):
    """Prints a line without tearing a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stdout)
        sys.stdout.flush()


class _Held(logging.Handler):
    """Keeps the lines for ``file`` until there is a folder to write it in."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self.file = file
        self.records = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


class _LogFile(logging.FileHandler):
    """A log that can't be written (a full disk) is shown once, and ends no run: what a run needs is
    in other files.
    """

    told = False

    def _open(self) -> Any:
        return open_to_append(Path(self.baseFilename))

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif record.levelno < logging.ERROR and not self.told:  # errors are on stderr already
            self.told = True
            print(
                f"{self.baseFilename}: not written ({error.strerror}); the run goes on",
                file=sys.stderr,
                flush=True,
            )


def get_loggers() -> tuple[logging.Logger, logging.Logger]:
    """Returns (local, main): ``log_<rank>.txt`` of this process; console and ``log.txt`` for rank 0
    alone.

    The console is spoken to at once; what goes to files is held in memory until ``open_logs``.
    """
    local = logging.getLogger("local")
    main = logging.getLogger("main")
    handlers = {local: [_Held(f"log_{rank()}.txt")], main: [logging.NullHandler()]}
    if rank() == 0:
        handlers[main] = [_Held("log.txt"), _ConsoleHandler()]
    for logger, mine in handlers.items():
        for old in logger.handlers[:]:
            logger.removeHandler(old)
            old.close()
        logger.setLevel(logging.INFO)
        logger.propagate = False
        for handler in mine:
            handler.setFormatter(_LINE)
            logger.addHandler(handler)
    return local, main


def open_logs(directory: Path) -> None:
    """Writes what ``get_loggers``'s two hold to their files in ``directory``, and from now on each
    line at once.
    """
    for logger in map(logging.getLogger, ("local", "main")):
        for held in [handler for handler in logger.handlers if isinstance(handler, _Held)]:
            if problem := obstacle(directory / held.file):
                raise InputError(
                    f"{problem.filename}: {problem.strerror}; {remedy(problem)}", shared=False
                )
            file = _LogFile(directory / held.file)
            file.setFormatter(_LINE)
            logger.removeHandler(held)
            logger.addHandler(file)
            for record in held.records:
                file.handle(record)


def get_logger(file_path: str | Path) -> tuple[logging.Logger, logging.Logger]:
    """PaddleViT's function: returns ``get_loggers()``, which write to the folder ``file_path`` from
    now on.
    """
    loggers = get_loggers()
    open_logs(Path(file_path))
    return loggers


def write_log(
    local_logger: logging.Logger | None,
    master_logger: logging.Logger | None,
    msg_local: str,
    msg_master: str | None = None,
    level: str = "info",
) -> None:
    """PaddleViT's function: writes a line to this process's log, and one to the log of all
    processes.

    Args:
        msg_local: the line of this process's log.
        msg_master: the line of the log of all processes; None: ``msg_local``.
        level: info, warning or fatal.
    """
    number = getattr(logging, level.upper())
    if local_logger:
        local_logger.log(number, msg_local)
    if master_logger:
        master_logger.log(number, msg_local if msg_master is None else msg_master)


def __getattr__(name: str) -> Any:
    """Returns a name of PaddleViT's ``utils``; for one that isn't here, the error says what to
    write.
    """
    from settings.paddlevit import helpers

    if name in helpers.__all__:
        return getattr(helpers, name)
    return instead("utils", name)
