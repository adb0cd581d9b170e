"""Errors that a user can act on, and how a program reports them: one line, and an exit status that
tells.
"""

import contextlib
import errno
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
import zlib  # noqa: F401
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NamedTuple

# What make install installs, by the names under which it is imported.
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
)
NEEDED += ("matplotlib", "threadpoolctl", "tqdm")
_HERE = os.path.dirname(os.path.realpath(__file__))
_FOLDER, _PROGRAM = os.path.split(os.path.realpath(getattr(sys, "argv", [""])[0]))

# What has to stand before Paddle's import; every program imports this module first. Paddle 2.6
# carries a zlib of its own that crashes Python's, unless Python's (above) is loaded already. CUDA
# takes -1 for "none"; asked how many that are, it answers with an error. Of "" Paddle doesn't ask.
if os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0].strip() == "-1":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _keep_quiet() -> None:
    """Leaves out what libraries tell that is no news for users: Paddle's notes on sockets;
    warnings; of ranks that are ended together, what Python's tracker says of the semaphores that
    their loaders leave to it.
    """
    os.environ.setdefault("GLOG_minloglevel", "2")
    # a notebook's, which this interpreter may lack; programs draw into files alone
    os.environ.pop("MPLBACKEND", None)
    if "resource_tracker" not in (told := os.environ.get("PYTHONWARNINGS", "")):
        os.environ["PYTHONWARNINGS"] = ",".join(filter(None, [told, "ignore:resource_tracker"]))
    for message in (
        "No ccache found",
        "You are using GPU version Paddle, but",
        "Your model will be trained under CPUONLY",
        "When training, we now always track global mean and variance",
        "Reading `.npy` or `.npz` file required additional header parsing",
    ):
        warnings.filterwarnings("ignore", message=message)
    warnings.filterwarnings("ignore", module=r"PIL\.")  # of files that others wrote


if __name__ == "errors":  # as a part of another program (tools/package) it leaves these to that one
    _keep_quiet()


def missing(error: BaseException) -> str:
    """Returns the line that says what isn't installed, where that is why ``error`` was raised;
    otherwise nothing.
    """
    if not isinstance(error, ModuleNotFoundError) or error.name not in NEEDED:
        return ""
    from importlib.util import find_spec

    names = [name for name in NEEDED if not find_spec(name)]
    lacks = ", ".join(names[:3]) + f" and {len(names) - 3} more packages" * (len(names) > 3)
    if not os.path.exists(os.path.join(_HERE, "Makefile")):  # an installed copy
        return f"error: {sys.executable} lacks {lacks}; pip install what paddle-vit-toolkit needs, and Paddle"
    script = ", or sh run_train_multi.sh ..." if _PROGRAM == "main_multi_gpu.py" else ""
    how = f".venv/bin/python {os.path.relpath(sys.argv[0], _HERE)} ...{script}"
    return f"error: {sys.executable} lacks {lacks}; in {_HERE} run make install once, then {how}"


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
    [listed] = re.findall(rf"^{extra} = \[(.*)\]", shipped("pyproject.toml"), re.M)
    names = re.findall(r'"([\w-]+)', listed)
    pins = [pin for name in names for pin in re.findall(rf"^{name}==[\w.]+", versions, re.M)]
    return f"pip install {' '.join(pins)}"


def _tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """For what is imported outside of ``reporting``."""
    if line := missing(error):
        print(line, file=sys.stderr, flush=True)
        os._exit(2)
    if isinstance(error, RunError):  # a component or a configuration that ships says what can't be
        print(f"{error.prefix}{error}", file=sys.stderr, flush=True)
        os._exit(error.exit_status)
    if isinstance(error, KeyboardInterrupt):  # a tool's imports take a second, too
        print("interrupted", file=sys.stderr, flush=True)
        os._exit(128 + signal.SIGINT)
    sys.__excepthook__(kind, error, trace)


if _FOLDER in (_HERE, os.path.join(_HERE, "tools"), os.path.join(_HERE, "examples")):
    sys.excepthook = _tell


LONGEST_LINE = 500  # characters of an error


def printable(text: str, most: int = 160) -> str:
    """Returns a stranger's text as a message may show it: what can't be printed as escapes, at most
    ``most`` of it.
    """
    cut = text if len(text) <= most else f"{text[:most]} ..."
    return (
        cut if cut.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in cut)
    )


def one_line(text: str) -> str:
    """Returns text as one line without control characters; of a long one the middle is left out:
    advice ends it.
    """
    line = printable(" ".join(text.split()), len(text))
    half = LONGEST_LINE // 2 - 3
    return line if len(line) <= LONGEST_LINE else f"{line[:half]} ... {line[-half:]}"


class RunError(Exception):
    """A failure inside a run (exit status 1). The message is one line: found, expected, what to do.

    Args:
        shared: every rank raises this same error, so rank 0 reports it for all.
    """

    exit_status = 1
    prefix = "error: "

    def __init__(self, message: str, shared: bool = False) -> None:
        super().__init__(one_line(message))
        self.shared = shared


class InputError(RunError):
    """A wrong command line, configuration or input (exit status 2), which is the same for every
    rank.
    """

    exit_status = 2

    def __init__(self, message: str, shared: bool = True) -> None:
        super().__init__(message, shared)


class Unreadable(ValueError):
    """What a stranger wrote can't be read; the message says why, without the file's name."""


class NoRegularFile(Unreadable):
    """What is to be read is a folder, a pipe or a device."""


class Allowance:
    """What reading a stranger's file of ``size`` bytes may take: 64 MiB and three times that; 10 s
    and 1 s per 100 MB.

    Each reader counts what it is about to hold. The time is this thread's on a core: a slow disk is
    no attack.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.left = (64 << 20) + 3 * size
        self.counted = time.thread_time()  # up to here
        self.until = self.counted + 10 + size / 100e6

    def take(self, count: int) -> None:
        """Raises Unreadable where ``count`` more bytes of memory are out of proportion, or the time
        is up.
        """
        self.left -= count
        if self.left < 0:
            raise Unreadable(
                f"its content would take more than 64 MiB and three times its {self.size} bytes"
            )
        self.counted = time.thread_time()
        if self.counted > self.until:
            raise Unreadable(f"reading its {self.size} bytes takes too long")

    def resume(self) -> None:
        """Goes on after a pause, in this thread or another: what was done since the last ``take``
        wasn't reading.
        """
        self.until += time.thread_time() - self.counted


IMAGE = "an image"  # no error quotes bytes of one, so data sets may be made of links
_opened = threading.local()  # .path: what ``open_file`` opened last within ``reading``


def leads_out(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is a link that leads out of its folder: a stranger's may lead to any
    file.
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
    """Opens a regular file to be read. ``open`` would wait at a pipe, and read from a device
    without end.

    Raises:
        NoRegularFile: it is something else.
        OSError, ValueError: it can't be opened.
    """
    _opened.path = path
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NoRegularFile("it is no regular file")
    return open(descriptor, "rb")


@contextlib.contextmanager
def reading(
    file: Any, what: str, advice: str = "", kind: type[RunError] = InputError
) -> Iterator[None]:
    """Turns whatever reading a stranger's file leads to into one line: every reader of one goes
    through here.

    The line may quote the file. Of one that a link leads to, out of the link's folder, it quotes
    nothing.

    Args:
        file: its name, or its path.
        what: what it should be: "weights", "an image".
        advice: ends the line: "; repair or remove it".
        kind: of the error that is raised.
    """
    before = getattr(_opened, "path", "")
    _opened.path = ""
    try:
        yield
    except Exception as error:
        linked = what != IMAGE and (leads_out(_opened.path) or leads_out(str(file)))
        if linked and not isinstance(error, (OSError, MemoryError, NoRegularFile)):
            why = "it is a link out of its folder: name the file that it leads to, to see what is wrong"
            raise kind(f"{file}: can't be read as {what} ({why})") from None
        if isinstance(error, RunError):
            raise
        if isinstance(error, Unreadable):
            raise kind(f"{file}: {error}{advice}") from None
        # an OSError's would name the file a second time
        text = getattr(error, "strerror", None) or str(error)
        said = (
            out_of_memory(error) or f"{type(error).__name__}: {printable(' '.join(text.split()))}"
        )
        raise kind(f"{file}: can't be read as {what} ({said}){advice}") from None
    finally:
        _opened.path = before


FAILURE = 1 << 15  # bytes for one


class Failure(NamedTuple):
    """What a rank tells the process that watches it; unforeseen: an exception that isn't one of the
    program's own.
    """

    status: int
    text: str
    unforeseen: bool


# What a disk does to a run that is no mistake of the program.
_DISK = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some of the quota",
    errno.EROFS: "make it writable",
}
_DISK |= {
    errno.EACCES: "give this user the right to it",
    errno.EPERM: "give this user the right to it",
}
_DISK |= dict.fromkeys((errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.EEXIST), "move it away")
_DISK |= {
    errno.EFBIG: "raise the limit on a file's size",
    errno.EIO: "check the disk",
    errno.ESTALE: "mount it again",
}


_REMEDIES = _DISK | dict.fromkeys(
    (errno.ENOENT, errno.ENOTDIR), "its folder was moved or removed, put it back"
)


def remedy(error: OSError) -> str:
    """Returns what to do about a file that can't be written."""
    return _REMEDIES.get(error.errno or 0, "check the disk")


def unusable_path(error: BaseException) -> str:
    """Returns what is wrong with a path that no file can have, where that is why ``error`` was
    raised.
    """
    # pathlib's, before Python 3.13
    if isinstance(error, RuntimeError) and str(error).startswith("Symlink loop from "):
        return f"{one_line(str(error))}; choose another path"
    cache = os.path.join(os.path.expanduser("~"), ".cache")
    if isinstance(error, OSError) and str(error.filename).startswith(cache):
        return f"Paddle's import makes {printable(cache)}, found {error.strerror}; set HOME to a folder of yours"
    if isinstance(error, OSError) and error.errno in (
        errno.ENAMETOOLONG,
        errno.ENOTDIR,
        errno.ELOOP,
    ):
        return f"{printable(str(error.filename))}: {error.strerror}; choose another path"
    return ""


# Paddle's words for memory that ran out. Its allocators raise a MemoryError; CUDA, cuBLAS and cuDNN
# raise an OSError.
_DEVICE = r"(GPU \d+|[\w-]+:\d+)"  # a plugin's is "npu:0"
_GPU_MEMORY = re.compile(
    rf"Out of memory error on {_DEVICE}|CUDA error\(2\), out of memory|CU[A-Z]+_STATUS_ALLOC_FAILED"
)
_SIZES = re.compile(
    rf"annot allocate (\S+) memory on {_DEVICE}, (?:(\S+) memory has been.* and )?available memory is only (\S+)\."
)
_CPU_MEMORY = re.compile(r"Fail to alloc memory of (\d+) size")
# A limit of the system's, in the words of Python and of C++; and what to raise.
_LIMITS = {"Too many open files": "open files (ulimit -n)"}
_LIMITS |= dict.fromkeys(
    ("Resource temporarily unavailable", "can't start new thread"),
    "this user's processes (ulimit -u)",
)
_IN_WORKER = re.compile(
    r"^(?:[\w.]+\.)?_?(?:Array)?MemoryError\b:? ?(.*)", re.MULTILINE
)  # the last line of a traceback
# CUDA's numbers of what no further start gets over, and what to do.
_CUDA = re.compile(r"CUDA error\((\d+)\), (.*?)\.\s")
_CUDA_ADVICE = {
    35: "install a newer driver, or a Paddle that is built for an older CUDA",
    46: "another process has the GPU for itself: end it, or name another GPU in CUDA_VISIBLE_DEVICES",
    100: "name GPUs that nvidia-smi -L lists in CUDA_VISIBLE_DEVICES, or unset it",
    101: "name GPUs that nvidia-smi -L lists in CUDA_VISIBLE_DEVICES, or unset it",
    209: "this Paddle isn't built for this GPU's compute capability: install one that is",
    803: "the driver's parts are of two versions: restart the machine",
}


def gpu_failure(error: BaseException) -> str:
    """Returns why the GPU can't be used, and what to do, where that is what ``error`` says;
    otherwise nothing.
    """
    found = _CUDA.search(f"{error} ")
    if not found or int(found[1]) not in _CUDA_ADVICE:
        return ""
    return (
        f"the GPU can't be used: {found[2]} (CUDA error {found[1]}); {_CUDA_ADVICE[int(found[1])]}"
    )


def out_of_memory(error: BaseException) -> str:
    """Returns which memory ran out, with the sizes that it names, where that is why ``error`` was
    raised; otherwise nothing.
    """
    text = str(error)
    # not a file's
    paddles = isinstance(error, (MemoryError, OSError)) and not getattr(error, "errno", None)
    if paddles and (found := _GPU_MEMORY.search(text)):
        gpu = found[1] or "the GPU"
        if not (sizes := _SIZES.search(text)):
            return f"{gpu} is out of memory ({found[0]})"
        asked, _, used, free = (
            re.sub(r"(\.\d\d)\d+", r"\1", size or "") for size in sizes.groups()
        )
        return f"{gpu} is out of memory: {asked} were asked for, {f'{used} are in use, ' * bool(used)}{free} are free"
    worker = _IN_WORKER.search(text) if isinstance(error, RuntimeError) else None
    if not (
        worker or isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
    ):
        return ""
    if asked := _CPU_MEMORY.search(text):
        return f"out of memory: {int(asked[1]) / 2**30:,.2f}GB were asked for"
    said = (
        worker[1]
        if worker
        else re.sub(r"(?s)^.*?ResourceExhausted(?:Error)?[):]\s*", "", text).partition("\n")[0]
    )
    return f"out of memory: {said}" if said else "out of memory"


def limit_reached(error: BaseException) -> str:
    """Returns which limit of the system is reached, where that is why ``error`` was raised;
    otherwise nothing.
    """
    found = next((said for said in _LIMITS if said in str(error)), "")
    return (
        found
        and isinstance(error, (OSError, RuntimeError))
        and f"{found}: raise the limit on {_LIMITS[found]}"
    ) or ""


@contextlib.contextmanager
def reporting_memory(advice: Callable[[], str]) -> Iterator[None]:
    """Turns memory that ran out into a RunError of one line, which ends in what to do."""
    try:
        yield
    except Exception as error:
        if line := out_of_memory(error):
            raise RunError(f"{line}; {advice()}") from None
        raise


@contextlib.contextmanager
def reporting(failed: Any = None) -> Iterator[None]:
    """Turns what ends this process into one line on stderr and its exit status: 1, 2, or 130 after
    Ctrl-C.

    Of several ranks, the one that failed speaks. A rank may only see a collective fail because
    another rank left, or share an error with rank 0. It waits first. Meanwhile whoever started the
    ranks ends it; otherwise it speaks, too.

    Args:
        failed: the shared bytes of a watched rank (an ``Array`` of FAILURE). The rank writes its
            failure there. Then the process that watches it reports the failure and ends all ranks
            at once. Left alone, the other ranks would see it go and abort with messages of their
            own.
    """
    try:
        yield
    except RunError as error:
        if error.shared and _rank()[0]:
            time.sleep(5)
        _end(
            error.exit_status, f"{'' if error.shared else _speaker()}{error.prefix}{error}", failed
        )
    except KeyboardInterrupt:
        _end(128 + signal.SIGINT, "interrupted", failed)
    except Exception as error:
        if line := missing(error):
            _end(InputError.exit_status, line, failed)
        if line := unusable_path(error):
            _end(InputError.exit_status, f"error: {line}", failed)
        memory = out_of_memory(error)
        line = memory and f"{memory}; take smaller batches, or end what else holds it"
        if line := line or gpu_failure(error) or limit_reached(error):
            _end(1, f"{_speaker()}error: {line}", failed)
        if isinstance(error, OSError) and error.errno in _DISK:
            goes_on = (
                "" if os.path.join(_HERE, "tools") == _FOLDER else ", then -resume=auto goes on"
            )
            _end(1, f"{_speaker()}error: {error}; {remedy(error)}{goes_on}", failed)
        if _rank()[1] > 1:
            time.sleep(3)
        _end(1, _speaker() + traceback.format_exc(), failed, unforeseen=True)


def _rank() -> tuple[int, int]:
    """This process's rank and the number of ranks, as a launcher set them: maybe after
    ``reporting`` began. They may be no numbers: then that is the error.
    """
    told = os.environ.get("PADDLE_TRAINER_ID") or "0", os.environ.get("PADDLE_TRAINERS_NUM") or "1"
    if not all(re.fullmatch("[0-9]{1,18}", text) for text in told):
        return 0, 1
    rank, ranks = map(int, told)
    return rank, ranks


def _speaker() -> str:
    rank, ranks = _rank()
    return f"rank {rank}: " if ranks > 1 else ""


def _end(status: int, text: str, failed: Any, unforeseen: bool = False) -> None:
    if logging.getLogger("local").handlers:  # the run's own log, once there is one
        logging.getLogger("local").error(text)
    if failed is None:
        print(text, file=sys.stderr, flush=True)
    else:
        # The first one counts. A character takes up to 6 bytes, as an escape of JSON's.
        told = json.dumps(Failure(status, text[-FAILURE // 8 :], unforeseen), ensure_ascii=False)
        failed.value = failed.value or told.encode(errors="replace")
        time.sleep(10)  # the process that watches is ending this one
    sys.stdout.flush()
    # not sys.exit, which waits for loader workers and collectives that may never end
    os._exit(status)
