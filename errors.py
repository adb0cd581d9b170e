"""Errors that a user can act on. A program reports each of them in one line, and its exit status
tells the kind. It is 1 for a failure inside a run, and 2 for a wrong input.

Every program imports this module before Paddle, so it also sets what Paddle reads when it is
imported.
"""

import contextlib
import errno
import functools
import io
import json
import logging
import os
import re
import signal
import stat
import sys
import threading
import time
import traceback
import warnings
import zlib  # noqa: F401  (before Paddle 2.6, whose own zlib would crash Python's)
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NamedTuple

# the packages that make install installs, by the names under which they are imported
NEEDED = (
    "numpy",
    "paddle",
    "yaml",
    "yacs",
    "PIL",
    "simplejpeg",
    "cykooz_resizer",
    "safetensors",
    "sklearn",
    "matplotlib",
    "threadpoolctl",
    "tqdm",
)
_HERE = os.path.dirname(os.path.realpath(__file__))
_FOLDER, _PROGRAM = os.path.split(os.path.realpath(getattr(sys, "argv", [""])[0]))

# -1 means no GPU. Paddle would still ask CUDA for the number of GPUs, and get an error; with "" it
# doesn't ask.
if os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0].strip() == "-1":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _keep_quiet() -> None:
    """Silences warnings of libraries that users can't act on."""
    # Paddle's notes on sockets
    os.environ.setdefault("GLOG_minloglevel", "2")
    # A notebook's backend, which this interpreter may lack. Programs only draw into files.
    os.environ.pop("MPLBACKEND", None)
    # If ranks are ended together, Python's resource tracker warns of their loaders' semaphores.
    filters = os.environ.get("PYTHONWARNINGS", "")
    if "resource_tracker" not in filters:
        os.environ["PYTHONWARNINGS"] = ",".join(filter(None, [filters, "ignore:resource_tracker"]))
    for message in (
        "No ccache found",
        "You are using GPU version Paddle, but",
        "Your model will be trained under CPUONLY",
        "When training, we now always track global mean and variance",
        "Reading `.npy` or `.npz` file required additional header parsing",
    ):
        warnings.filterwarnings("ignore", message=message)
    # warnings about files that others wrote
    warnings.filterwarnings("ignore", module=r"PIL\.")


# Within another program (tools/package) the module has another name, and the program decides.
if __name__ == "errors":
    _keep_quiet()


def missing(error: BaseException) -> str:
    """Returns the line that says which packages aren't installed; "" if that isn't why ``error``
    was raised.
    """
    if not isinstance(error, ModuleNotFoundError) or error.name not in NEEDED:
        return ""
    from importlib.util import find_spec

    names = [name for name in NEEDED if not find_spec(name)]
    lacks = ", ".join(names[:3])
    if len(names) > 3:
        lacks += f" and {len(names) - 3} more packages"
    if not _is_checkout():
        return f"error: {sys.executable} lacks {lacks}; pip install Paddle and the toolkit's dependencies"
    script = ", or sh run_train_multi.sh ..." if _PROGRAM == "main_multi_gpu.py" else ""
    how = f".venv/bin/python {os.path.relpath(sys.argv[0], _HERE)} ...{script}"
    return f"error: {sys.executable} lacks {lacks}; in {_HERE} run make install once, then {how}"


def _is_checkout() -> bool:
    """Returns whether this is a checkout, and not an installed copy."""
    return os.path.exists(os.path.join(_HERE, "Makefile"))


def install(extra: str) -> str:
    """Returns the command that installs what a part of the toolkit needs, at the versions that the
    tests run with. It names the packages themselves, so it fits a checkout and an installed copy.

    Args:
        extra: its name in pyproject.toml.
    """

    def shipped(name: str) -> str:
        with open(os.path.join(_HERE, name), encoding="utf-8") as file:
            return file.read()

    versions = shipped("constraints.txt")
    if getattr(sys.modules.get("paddle"), "__version__", "").startswith("2.6"):
        versions = re.sub(r"^.*# Paddle 2\.6: ", "", versions, flags=re.M)
    [listed] = re.findall(rf"^{extra} = \[(.*?)\]$", shipped("pyproject.toml"), re.M | re.S)
    requirements = filter(_serves_this_python, re.findall(r'"([^"]+)"', listed))
    names = [re.split(r"[^\w-]", requirement)[0] for requirement in requirements]
    usable = "\n".join(filter(_serves_this_python, versions.splitlines()))
    pins = [pin for name in names for pin in re.findall(rf"^{name}==[\w.]+", usable, re.M)]
    return f"pip install {' '.join(pins)}"


def _serves_this_python(requirement: str) -> bool:
    """Returns whether a package is for the running Python, by the marker that may end it."""
    marker = re.search(r"; python_version (<|>=) '3\.(\d+)'$", requirement)
    if not marker:
        return True
    is_older = sys.version_info[1] < int(marker[2])
    return is_older == (marker[1] == "<")


@functools.cache
def deprecated(what: str, instead: str, since: str) -> None:
    """Warns, once in a process, of something that still works in this minor version and the next.

    tests/test_house.py fails in the version after that: the call is removed then, with what it is about.

    Args:
        what: a key, flag, name or file, with what it was for.
        instead: what to use or do in its place.
        since: the minor version whose changelog names it first: "1.0".
    """
    major, minor = since.split(".")
    text = (
        f"{what} is deprecated since version {since} and will be removed in version {major}.{int(minor) + 2};"
        f" {instead}"
    )
    if __name__ == "errors":
        print(f"warning: {text}", file=sys.stderr)
    else:
        # In another program (tools/package), whose warnings are its own.
        warnings.warn(text, FutureWarning, stacklevel=3)


def _report_import(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Reports an error of a program's imports, which are outside of ``reporting``: Python's hook
    for uncaught exceptions.
    """
    if line := missing(error):
        print(line, file=sys.stderr, flush=True)
        os._exit(2)
    # A component or a shipped configuration may be wrong.
    if isinstance(error, RunError):
        print(f"{error.prefix}{error}", file=sys.stderr, flush=True)
        os._exit(error.exit_status)
    # A tool's imports take a second, in which Ctrl-C may come.
    if isinstance(error, KeyboardInterrupt):
        print("interrupted", file=sys.stderr, flush=True)
        os._exit(128 + signal.SIGINT)
    sys.__excepthook__(kind, error, trace)


if _FOLDER in (_HERE, os.path.join(_HERE, "tools"), os.path.join(_HERE, "examples")):
    sys.excepthook = _report_import

# characters of an error
LONGEST_LINE = 500


def printable(text: str, most: int = 160) -> str:
    """Returns a text that somebody else wrote, fit to be shown in a message: at most ``most``
    characters, and escapes for those that can't be printed.
    """
    cut = text if len(text) <= most else f"{text[:most]} ..."
    if cut.isprintable():
        return cut
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in cut)


def one_line(text: str) -> str:
    """Returns text as one line without control characters. The middle of a long one is left out,
    because it ends with the advice.
    """
    line = printable(" ".join(text.split()), len(text))
    half = LONGEST_LINE // 2 - 3
    return line if len(line) <= LONGEST_LINE else f"{line[:half]} ... {line[-half:]}"


def counted(count: int, noun: str, plural: str = "") -> str:
    """Returns a number and what it counts: "1 image", "2 images".

    Args:
        noun: what is counted, in the singular.
        plural: the plural, if it isn't the singular and an "s".
    """
    if count == 1:
        return f"1 {noun}"
    return f"{count} {plural or f'{noun}s'}"


class RunError(Exception):
    """A failure inside a run (exit status 1).

    Args:
        message: one line: what was found, what was expected, and what to do.
        shared: whether every rank raises this same error, so that rank 0 reports it for all.
    """

    exit_status = 1
    prefix = "error: "

    def __init__(self, message: str, shared: bool = False) -> None:
        super().__init__(one_line(message))
        self.shared = shared


class InputError(RunError):
    """A wrong command line, configuration or input (exit status 2), by default the same for every
    rank.
    """

    exit_status = 2

    def __init__(self, message: str, shared: bool = True) -> None:
        super().__init__(message, shared)


class OutOfMemory(RunError):
    """Something takes more memory than there is. The program can continue with something smaller."""


class Unreadable(ValueError):
    """A file that somebody else wrote can't be read. The message says why, without the file's name."""


class NoRegularFile(Unreadable):
    """A folder, a pipe or a device was found where a file was expected."""


class Allowance:
    """Limits the memory and time for reading a file of ``size`` bytes of unknown origin.

    It may take 64 MiB of memory and three times the file's size, and 10 s and 1 s per 100 MB. Each
    reader counts the memory that it is about to use. The time is this thread's CPU time: a slow
    disk isn't an attack.

    Attributes:
        left: bytes of memory that may still be used.
        counted_at: the CPU time at the last count.
        until: the CPU time at which reading has to end.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.left = (64 << 20) + 3 * size
        self.counted_at = time.thread_time()
        self.until = self.counted_at + 10 + size / 100e6

    def take(self, count: int) -> None:
        """Counts ``count`` bytes of memory.

        Raises:
            Unreadable: they are out of proportion, or the time is up.
        """
        self.left -= count
        if self.left < 0:
            raise Unreadable(
                "its content would take more than 64 MiB and more than three times its"
                f" {self.size} bytes"
            )
        self.counted_at = time.thread_time()
        if self.counted_at > self.until:
            raise Unreadable(f"reading its {self.size} bytes takes too long")

    def resume(self) -> None:
        """Leaves out the time since the last ``take``, in which this thread did something else.
        Call it before the reading continues.
        """
        self.until += time.thread_time() - self.counted_at


# No error message quotes bytes of an image, so data sets may be made of links.
IMAGE = "an image"
# .path is what ``open_file`` opened last within ``reading``
_opened = threading.local()


def leads_out(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is a link that points outside its folder. In a folder that somebody else
    made, it may lead to any file of the user.
    """
    path = os.fsdecode(path)
    if not os.path.islink(path):
        return False
    folder = os.path.realpath(os.path.dirname(path) or ".")
    # Hugging Face's cache has its files in MODEL/blobs, and links to them in
    # MODEL/snapshots/REVISION.
    folder = folder.partition("/snapshots/")[0]
    return os.path.commonpath([folder, os.path.realpath(path)]) != folder


def open_file(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Opens a regular file to be read. ``open`` would wait for ever at a pipe, and a device has no
    end.

    Raises:
        NoRegularFile: it isn't a regular file.
        OSError, ValueError: it can't be opened.
    """
    _opened.path = path
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NoRegularFile("it isn't a regular file")
    return open(descriptor, "rb")


@contextlib.contextmanager
def reading(
    file: Any, what: str, advice: str = "", kind: type[RunError] = InputError
) -> Iterator[None]:
    """Turns any exception of the body, which reads a file that somebody else wrote, into an error
    of one line.

    The line may quote the file's content. If the file was reached through a link that points outside its
    folder, the line quotes nothing. Such a link may lead to a secret of the user.

    Args:
        file: its name or path.
        what: what it should be, such as "weights" or "an image".
        advice: ends the line, such as "; repair or remove it".
        kind: the class of the error that is raised.
    """
    before = getattr(_opened, "path", "")
    _opened.path = ""
    try:
        yield
    except Exception as error:
        is_linked = what != IMAGE and (leads_out(_opened.path) or leads_out(str(file)))
        if is_linked and not isinstance(error, (OSError, MemoryError, NoRegularFile)):
            why = "it is a link to a file outside its folder: name that file to see what is wrong"
            raise kind(f"{file}: can't be read as {what} ({why})") from None
        if isinstance(error, RunError):
            raise
        if isinstance(error, Unreadable):
            raise kind(f"{file}: {error}{advice}") from None
        # The text of an OSError would name the file a second time.
        text = getattr(error, "strerror", None) or str(error)
        reason = out_of_memory(error)
        if not reason:
            reason = f"{type(error).__name__}: {printable(' '.join(text.split()))}"
        raise kind(f"{file}: can't be read as {what} ({reason}){advice}") from None
    finally:
        _opened.path = before


# bytes of shared memory for a failure
FAILURE = 1 << 15


class Failure(NamedTuple):
    """A rank's failure, as the process that watches it receives it.

    Attributes:
        status: the exit status.
        text: what is printed.
        unforeseen: whether it is an exception other than those that the program foresees. Another
            rank may then be the cause.
    """

    status: int
    text: str
    unforeseen: bool


# Errors of a disk or of its administration, which aren't mistakes of the program; and what to do.
_DISK = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some of the quota",
    errno.EROFS: "make it writable",
    errno.EACCES: "give this user access to it",
    errno.EPERM: "give this user access to it",
    errno.ELOOP: "move it away",
    errno.EISDIR: "move it away",
    errno.ENXIO: "move it away",
    errno.EEXIST: "move it away",
    errno.EFBIG: "raise the limit on a file's size",
    errno.EIO: "check the disk",
    errno.ESTALE: "mount it again",
}
# These may also be a mistake of the program, which then needs its traceback.
_REMEDIES = _DISK | {
    errno.ENOENT: "its folder was moved or removed; restore it",
    errno.ENOTDIR: "its folder was moved or removed; restore it",
}


def remedy(error: OSError) -> str:
    """Returns what to do about a file that can't be written."""
    return _REMEDIES.get(error.errno or 0, "check the disk")


def unusable_path(error: BaseException) -> str:
    """Returns what is wrong with a path that no file can have; "" if that isn't why ``error`` was
    raised.
    """
    # pathlib raises this before Python 3.13.
    if isinstance(error, RuntimeError) and str(error).startswith("Symlink loop from "):
        return f"{one_line(str(error))}; choose another path"
    cache = os.path.join(os.path.expanduser("~"), ".cache")
    if isinstance(error, OSError) and str(error.filename).startswith(cache):
        return f"Paddle can't create {printable(cache)} ({error.strerror}); set HOME to a writable folder"
    if isinstance(error, OSError) and error.errno in (
        errno.ENAMETOOLONG,
        errno.ENOTDIR,
        errno.ELOOP,
    ):
        return f"{printable(str(error.filename))}: {error.strerror}; choose another path"
    return ""


# The words of Paddle's errors when memory runs out. Its allocators raise a MemoryError; CUDA,
# cuBLAS and cuDNN raise an OSError. A plugin's device is "npu:0", for example.
_DEVICE = r"(GPU \d+|[\w-]+:\d+)"
_GPU_MEMORY = re.compile(
    rf"Out of memory error on {_DEVICE}|CUDA error\(2\), out of memory|CU[A-Z]+_STATUS_ALLOC_FAILED"
)
_SIZES = re.compile(
    rf"annot allocate (\S+) memory on {_DEVICE}, (?:(\S+) memory has been.* and )?available memory is only (\S+)\."
)
_CPU_MEMORY = re.compile(r"Fail to alloc memory of (\d+) size")
# How Python and C++ say that a limit of the system is reached; and which limit to raise.
_LIMITS = {
    "Too many open files": "open files (ulimit -n)",
    "Resource temporarily unavailable": "this user's processes (ulimit -u)",
    "can't start new thread": "this user's processes (ulimit -u)",
}
# the last line of the traceback that a loader's worker sends
_IN_WORKER = re.compile(r"^(?:[\w.]+\.)?_?(?:Array)?MemoryError\b:? ?(.*)", re.MULTILINE)
# Errors of CUDA that another start wouldn't get over, and what to do.
_CUDA = re.compile(r"CUDA error\((\d+)\), (.*?)\.\s")
_CUDA_ADVICE = {
    35: "install a newer driver, or a Paddle that is built for an older CUDA",
    46: "another process uses the GPU exclusively: end it, or select another GPU by CUDA_VISIBLE_DEVICES",
    100: "set CUDA_VISIBLE_DEVICES to GPUs that nvidia-smi -L lists, or unset it",
    101: "set CUDA_VISIBLE_DEVICES to GPUs that nvidia-smi -L lists, or unset it",
    209: "this Paddle isn't built for the compute capability of this GPU: install a build that is",
    803: "the versions of the driver's components differ: restart the machine",
}


def gpu_failure(error: BaseException) -> str:
    """Returns why the GPU can't be used, and what to do; "" if ``error`` doesn't say so."""
    match = _CUDA.search(f"{error} ")
    if not match or int(match[1]) not in _CUDA_ADVICE:
        return ""
    advice = _CUDA_ADVICE[int(match[1])]
    return f"the GPU can't be used: {match[2]} (CUDA error {match[1]}); {advice}"


def out_of_memory(error: BaseException) -> str:
    """Returns which memory ran out, with the sizes that ``error`` names; "" if that isn't why it
    was raised.
    """
    text = str(error)
    # An OSError with a number is about a file.
    may_be_paddles = isinstance(error, (MemoryError, OSError)) and not getattr(error, "errno", None)
    if may_be_paddles and (match := _GPU_MEMORY.search(text)):
        return _out_of_gpu_memory(match, text)
    in_worker = _IN_WORKER.search(text) if isinstance(error, RuntimeError) else None
    is_memory = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
    if not (in_worker or is_memory):
        return ""
    if size := _CPU_MEMORY.search(text):
        return f"out of memory: {int(size[1]) / 2**30:,.2f}GB were requested"
    if in_worker:
        reason = in_worker[1]
    else:
        # Paddle's message follows its stack and the name of the error.
        message = re.sub(r"(?s)^.*?ResourceExhausted(?:Error)?[):]\s*", "", text)
        reason = message.partition("\n")[0]
    return f"out of memory: {reason}" if reason else "out of memory"


def _out_of_gpu_memory(match: re.Match[str], text: str) -> str:
    gpu = match[1] or "the GPU"
    sizes = _SIZES.search(text)
    if not sizes:
        return f"{gpu} is out of memory ({match[0]})"
    # two decimals of each size
    requested, _, used, free = (
        re.sub(r"(\.\d\d)\d+", r"\1", size or "") for size in sizes.groups()
    )
    in_use = f"{used} are in use, " if used else ""
    return f"{gpu} is out of memory: {requested} were requested, {in_use}{free} are free"


def limit_reached(error: BaseException) -> str:
    """Returns which limit of the system is reached; "" if that isn't why ``error`` was raised."""
    if isinstance(error, (OSError, RuntimeError)):
        for words, limit in _LIMITS.items():
            if words in str(error):
                return f"{words}: raise the limit on {limit}"
    return ""


@contextlib.contextmanager
def reporting_memory(advice: Callable[[], str]) -> Iterator[None]:
    """Raises OutOfMemory, whose line ends with ``advice()``, if memory runs out in the body."""
    try:
        yield
    except Exception as error:
        if line := out_of_memory(error):
            raise OutOfMemory(f"{line}; {advice()}") from None
        raise


@contextlib.contextmanager
def reporting(failed: Any = None) -> Iterator[None]:
    """Turns an exception of the body into one line on stderr, and ends the process with an exit
    status: 1, 2, or 130 after Ctrl-C.

    Of several ranks, only the one that failed should report. Another rank may see a collective fail
    because that one has gone, or raise the same error as rank 0. Such a rank waits before it
    reports, and meanwhile whoever started the ranks ends it.

    Args:
        failed: shared bytes (an ``Array`` of FAILURE) in which a watched rank leaves its failure.
            The process that watches it reports the failure and ends all ranks at once. Otherwise
            the other ranks would see this one go, and abort with messages of their own.
    """
    try:
        yield
    except RunError as error:
        rank, _ = _rank()
        if error.shared and rank:
            time.sleep(5)
        speaker = "" if error.shared else _speaker()
        _end(error.exit_status, f"{speaker}{error.prefix}{error}", failed)
    except KeyboardInterrupt:
        _end(128 + signal.SIGINT, "interrupted", failed)
    except Exception as error:
        if line := missing(error):
            _end(InputError.exit_status, line, failed)
        if line := unusable_path(error):
            _end(InputError.exit_status, f"error: {line}", failed)
        if line := out_of_memory(error):
            line += "; use smaller batches, or end other processes that use it"
        if line := line or gpu_failure(error) or limit_reached(error):
            _end(1, f"{_speaker()}error: {line}", failed)
        if isinstance(error, OSError) and error.errno in _DISK:
            is_tool = os.path.join(_HERE, "tools") == _FOLDER
            goes_on = "" if is_tool else ", then continue with -resume=auto"
            _end(1, f"{_speaker()}error: {error}; {remedy(error)}{goes_on}", failed)
        _, ranks = _rank()
        if ranks > 1:
            time.sleep(3)
        _end(1, _speaker() + traceback.format_exc(), failed, unforeseen=True)


def _rank() -> tuple[int, int]:
    """Returns this process's rank and the number of ranks, as a launcher set them. If these aren't
    numbers, that is the error to report, and one process reports it.
    """
    rank = os.environ.get("PADDLE_TRAINER_ID") or "0"
    ranks = os.environ.get("PADDLE_TRAINERS_NUM") or "1"
    if not (re.fullmatch("[0-9]{1,18}", rank) and re.fullmatch("[0-9]{1,18}", ranks)):
        return 0, 1
    return int(rank), int(ranks)


def _speaker() -> str:
    rank, ranks = _rank()
    return f"rank {rank}: " if ranks > 1 else ""


def _end(status: int, text: str, failed: Any, unforeseen: bool = False) -> None:
    # the run's own log, once there is one
    if logging.getLogger("local").handlers:
        logging.getLogger("local").error(text)
    if failed is None:
        print(text, file=sys.stderr, flush=True)
    else:
        # A character takes up to 6 bytes, as an escape in JSON.
        failure = Failure(status, text[-FAILURE // 8 :], unforeseen)
        encoded = json.dumps(failure, ensure_ascii=False).encode(errors="replace")
        # The first failure counts.
        failed.value = failed.value or encoded
        # The process that watches this one ends it meanwhile.
        time.sleep(10)
    sys.stdout.flush()
    # Not sys.exit: it waits for loader workers and collectives, which may never end.
    os._exit(status)
