"""Helpers that every package uses: ranks and collectives, seeds, loggers.

All of them also work in a run of one process, where nothing is communicated.
"""

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

# Within another program (tools/package) the module has another name, and the program decides.
if __name__ == "utils":
    # Paddle's import sets INFO, which shows notes on ports.
    logging.getLogger().setLevel(logging.WARNING)
    # tqdm's thread wakes bars that nobody updates. Ours are updated at each step.
    tqdm.monitor_interval = 0
    # tqdm's own lock is a semaphore of the system, which a killed process leaves behind.
    tqdm.set_lock(threading.RLock())

# Removes empty entries, which the linker takes for the current folder. OpenCV adds one, and Paddle
# imports OpenCV if it is installed. Programs that this one starts would load libraries from a folder
# that may be somebody else's.
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
    """Returns the number of GPUs that CUDA_VISIBLE_DEVICES leaves to this process; 0 for Paddle's CPU
    build.
    """
    return paddle.device.cuda.device_count() if paddle.device.is_compiled_with_cuda() else 0


def num_processes(ngpus: int) -> int:
    """Returns how many processes to spawn for the key NGPUS: one for each GPU, or without a GPU, for
    each core.

    Args:
        ngpus: the key's value; -1: as many as there are.

    Raises:
        InputError: it is more than there are, or less than 1.
    """
    if ngpus < 1 and ngpus != -1:
        raise InputError(f"NGPUS asks for {ngpus} processes, expected 1 or more, or -1 for all")
    gpus = num_gpus()
    devices = gpus or num_cores()
    if ngpus > devices:
        kind = "visible GPUs" if gpus else "cores (no GPU is visible)"
        raise InputError(
            f"NGPUS asks for {ngpus} processes, found {devices} {kind}; lower -ngpus, or use -1"
            " for all"
        )
    return devices if ngpus == -1 else ngpus


def free_memory() -> int:
    """Returns the bytes of memory that this machine has free, or its container's limit (cgroup v2)
    leaves.
    """
    free = sys.maxsize
    with contextlib.suppress(OSError):
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = 1024 * int(fields["MemAvailable"].split()[0])
    # There may be no such file, or "max" in it: no limit.
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        # The kernel frees its cache of files if memory is short. Data sets, which are read again and
        # again, are in the active part of it.
        statistics = (group / "memory.stat").read_text()
        cached = re.findall(r"^(?:in)?active_file (\d+)", statistics, re.MULTILINE)
        free = min(free, limit - used + sum(map(int, cached)))
    return free


def process_memory(field: str) -> int:
    """Returns a figure of this process's memory in bytes, on Linux.

    Args:
        field: of /proc/self/status: VmRSS, its resident memory; VmHWM, the peak of that; VmSize,
            its address space; VmData, the part of it that is data.
    """
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.findall(rf"^{field}:\s+(\d+) kB", status, re.MULTILINE)[0])


def memory_below_limits() -> int:
    """Returns the bytes that this process's own limits leave it (ulimit -v and -d), on Linux."""
    left = sys.maxsize
    for limit, field in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY:
            left = min(left, max(0, soft - process_memory(field)))
    return left


@contextlib.contextmanager
def within_memory() -> Iterator[None]:
    """Makes an allocation in the body fail with a MemoryError if the machine doesn't have that much
    memory. Otherwise the kernel would promise it, and kill some process later. This is for CPUs: with
    a GPU nothing is limited.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    # It fails on another kernel, or if the limit is lower already: then nothing changes.
    with contextlib.suppress(OSError, ValueError):
        if not num_gpus():
            status = Path("/proc/self/status").read_text()
            used = re.search(r"^VmData:\s+(\d+) kB", status, re.MULTILINE)
            memory = Path("/proc/meminfo").read_text()
            swap = re.search(r"^SwapFree:\s+(\d+) kB", memory, re.MULTILINE)
            if used:
                most = 1024 * (int(used[1]) + int(swap[1] if swap else 0)) + free_memory()
                if soft >= 0:
                    most = min(most, soft)
                resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


# -------------------------------------------------------------- collectives


def to_device(tensor: paddle.Tensor) -> paddle.Tensor:
    """Returns ``tensor`` on the device on which this process computes, where NCCL needs it. Paddle
    keeps some tensors elsewhere: the powers of Adam's betas are on the CPU.
    """
    place = paddle.framework._current_expected_place()
    # Not by Tensor.to: in Paddle 2.6 that moves the tensor itself.
    return tensor if tensor.place._equals(place) else tensor._copy_to(place, True)


def all_reduce_sum(tensor: paddle.Tensor) -> paddle.Tensor:
    """Returns the sum of ``tensor`` over all processes. Every process has to call it, with the same
    shape and dtype.
    """
    if world_size() == 1:
        return tensor
    total = to_device(tensor).clone().detach()
    dist.all_reduce(total)
    return total


def all_gather_tensor(tensor: paddle.Tensor) -> paddle.Tensor:
    """Returns the rows of all processes, in the order of ranks: [B, ...] -> [processes * B, ...].

    They have no gradients. Every process has to call it, with the same shape and dtype.
    """
    if world_size() == 1:
        return tensor.detach()
    parts: list[paddle.Tensor] = []
    dist.all_gather(parts, to_device(tensor.detach()).contiguous())
    return paddle.concat(parts)


def all_reduce_mean(tensor: paddle.Tensor | float) -> paddle.Tensor | float:
    """Returns the mean of ``tensor`` over all processes. For a number, the mean is a number, too."""
    if isinstance(tensor, paddle.Tensor):
        return all_reduce_sum(tensor) / world_size()
    return float(all_reduce_sum(paddle.to_tensor(tensor, dtype="float64"))) / world_size()


def reduce_dict(
    input_dict: dict[str, paddle.Tensor], average: bool = True
) -> dict[str, paddle.Tensor]:
    """Returns each tensor's mean over all processes, or its sum, by one collective per dtype.

    Args:
        input_dict: tensors of any shapes, by names. Every process has the same names, shapes and
            dtypes.
        average: whether the mean is returned; else the sum.

    Raises:
        RunError: on every process, if names, shapes or dtypes differ between them.
    """
    keys = sorted(input_dict)
    signature = [(key, tuple(input_dict[key].shape), str(input_dict[key].dtype)) for key in keys]
    for other, other_signature in enumerate(all_gather(signature)):
        if other_signature != signature:
            different = sorted(set(other_signature) ^ set(signature))
            raise RunError(
                f"reduce_dict: ranks {rank()} and {other} differ in {', '.join(map(str, different))}"
            )
    reduced: dict[str, paddle.Tensor] = {}
    for dtype in sorted({dtype for _, _, dtype in signature}):
        group = [key for key, _, key_dtype in signature if key_dtype == dtype]
        flat = paddle.concat([input_dict[key].detach().reshape([-1]) for key in group])
        flat = all_reduce_sum(flat)
        sizes = [int(np.prod(input_dict[key].shape, dtype=np.int64)) for key in group]
        for key, part in zip(group, paddle.split(flat, sizes), strict=True):
            part = part.reshape(input_dict[key].shape)
            reduced[key] = part / world_size() if average else part
    return {key: reduced[key] for key in input_dict}


# how often ``all_gather`` was called, which is the same on every rank
_calls = 0


def all_gather(data: Any) -> list[Any]:
    """Returns every process's ``data``, in the order of ranks.

    A pickle can run code, so only the pickles of this run's ranks are loaded. Each comes with a
    message authentication code by the run's key, of the pickle, its rank and the number of the call
    (``launch.secret``).

    Args:
        data: any object that can be pickled; sizes may differ between processes.

    Raises:
        RunError: a message failed authentication.
    """
    global _calls
    if world_size() == 1:
        return [data]
    from launch import secret

    key = secret.run_key()
    _calls += 1
    pickled = pickle.dumps(data, pickle.HIGHEST_PROTOCOL)
    message = secret.mac(key, f"{rank()} {_calls}".encode(), pickled) + pickled
    sizes: list[paddle.Tensor] = []
    dist.all_gather(sizes, paddle.to_tensor([len(message)], dtype="int64"))
    # Of a tensor itself, int is refused by NumPy 2.4: it has an axis.
    lengths = [int(size.numpy().item()) for size in sizes]
    # The collective takes messages of one size.
    longest = max(lengths)
    padded = np.frombuffer(message.ljust(longest, b"\0"), np.uint8)
    messages: list[paddle.Tensor] = []
    dist.all_gather(messages, paddle.to_tensor(padded))
    gathered = []
    for sender, (tensor, length) in enumerate(zip(messages, lengths, strict=True)):
        message = tensor.numpy()[:length].tobytes()
        code = message[: secret.MAC_SIZE]
        pickled = message[secret.MAC_SIZE :]
        if not secret.same(code, secret.mac(key, f"{sender} {_calls}".encode(), pickled)):
            raise RunError(
                f"a message claiming to be from rank {sender} failed authentication:"
                f" it came from another program, or {secret.SECRET_VARIABLE} differs between the"
                " ranks"
            )
        gathered.append(pickle.loads(pickled))
    return gathered


def all_to_all(parts: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
    """Sends an array to each process, and returns the arrays that all processes sent to this one, in
    the order of ranks: [m, n] each.

    Args:
        parts: [N, m, n], an array for each of N processes. All processes have the same m.
        lengths: the n of each process.
    """
    if world_size() == 1:
        return [*parts]
    received = []
    dtype: Any = str(parts.dtype)
    for source, length in enumerate(lengths):
        array = paddle.empty([parts.shape[1], length], dtype)
        if length:
            # One process sends after the other, because Paddle has no all-to-all over gloo. A list of
            # tensors would be copied once more.
            sent = paddle.to_tensor(parts).flatten(0, 1) if source == rank() else None
            dist.stream.scatter(array, sent, source)
        received.append(array.numpy())
    return received


# ------------------------------------------------------------------- seeds


def seed_everything(seed: int) -> None:
    """Seeds Python, NumPy and Paddle."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    paddle.seed(seed)


def seed_step(seed: int, step: int) -> None:
    """Seeds Python, NumPy and Paddle for one step (dropout, drop path) by (seed, step, rank). So a
    checkpoint needs no generator's state.
    """
    seed_everything(int(np.random.SeedSequence([seed, step, rank()]).generate_state(1)[0]))


# ------------------------------------------------------------ logs and files


class AverageMeter:
    """A running mean, weighted by the number of samples.

    ``update(val, n)`` adds the mean ``val`` of ``n`` samples, ``avg`` is the mean of all samples, and
    0 if there are none.
    """

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
        """The number of samples: PaddleViT's name for ``count``."""
        return self.count


class _Printable(logging.Formatter):
    """Writes characters that can't be printed as escapes. The name of a class may contain a
    terminal's control sequences.
    """

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(printable(line, len(line)) for line in super().format(record).split("\n"))


_LINE = _Printable("%(asctime)s %(message)s", "%m%d %H:%M:%S")


class _ConsoleHandler(logging.StreamHandler):
    """Prints lines above a progress bar, if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stdout)
        sys.stdout.flush()


class _Held(logging.Handler):
    """Keeps the lines for ``file`` until the run has a directory to write it in."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self.file = file
        self.records = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


class _LogFile(logging.FileHandler):
    """A log file whose errors, such as a full disk, are printed once and don't end the run: what a
    run needs is in other files.
    """

    is_reported = False

    def _open(self) -> Any:
        return open_to_append(Path(self.baseFilename))

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        # An error of the run is on stderr already.
        elif record.levelno < logging.ERROR and not self.is_reported:
            self.is_reported = True
            print(
                f"{self.baseFilename}: can't be written ({error.strerror}); the run continues",
                file=sys.stderr,
                flush=True,
            )


def get_loggers() -> tuple[logging.Logger, logging.Logger]:
    """Returns (local, main): the logger of this process, and that of all processes.

    ``local`` writes to ``log_<rank>.txt``. ``main`` writes to the console and to ``log.txt`` on rank
    0, and nowhere on other ranks. Lines for files are kept in memory until ``open_logs``.
    """
    local = logging.getLogger("local")
    main = logging.getLogger("main")
    handlers: dict[logging.Logger, list[logging.Handler]] = {
        local: [_Held(f"log_{rank()}.txt")],
        main: [logging.NullHandler()],
    }
    if rank() == 0:
        handlers[main] = [_Held("log.txt"), _ConsoleHandler()]
    for logger, new_handlers in handlers.items():
        for old in logger.handlers[:]:
            logger.removeHandler(old)
            old.close()
        logger.setLevel(logging.INFO)
        logger.propagate = False
        for handler in new_handlers:
            handler.setFormatter(_LINE)
            logger.addHandler(handler)
    return local, main


def open_logs(directory: Path) -> None:
    """Opens the log files in ``directory``. The lines that the two loggers have kept are written to
    them, and from now on each line at once.

    Raises:
        InputError: a file can't be written.
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
    """Returns the two loggers of ``get_loggers``, with their files opened in the folder ``file_path``.
    This is PaddleViT's function.
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
    """Writes a line to this process's log, and one to the log of all processes. This is PaddleViT's
    function.

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
    """Returns a name of PaddleViT's ``utils``. For an unsupported one, the error says what to write
    instead.
    """
    from settings.paddlevit import helpers

    if name in helpers.__all__:
        return getattr(helpers, name)
    return instead("utils", name)
