"""Errors that a user can act on, and how a program reports them: one line, and an exit status that tells."""

import contextlib
import errno
import json
import logging
import os
import signal
import sys
import time
import traceback
import warnings
import zlib  # noqa: F401
from collections.abc import Iterator
from typing import Any, NamedTuple

from startup import missing

# What has to stand before Paddle's import; every program imports this module first. Paddle 2.6 carries a zlib of its
# own that crashes Python's, unless Python's (above) is loaded already; and its notes on sockets are no news for users.
os.environ.setdefault("GLOG_minloglevel", "2")
# Ranks that are ended together leave their loaders' semaphores to Python's tracker, a process that would say so.
if "resource_tracker" not in os.environ.get("PYTHONWARNINGS", ""):
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker"]))
for _message in (
    "No ccache found",
    "You are using GPU version Paddle, but",
    "Your model will be trained under CPUONLY",
    "When training, we now always track global mean and variance",
):
    warnings.filterwarnings("ignore", message=_message)


class RunError(Exception):
    """A failure inside a run (exit status 1). The message is one line: found, expected, what to do.

    Args:
        shared: every rank raises this same error, so rank 0 reports it for all.
    """

    exit_status = 1
    prefix = "error: "

    def __init__(self, message: str, shared: bool = False) -> None:
        super().__init__(" ".join(message.split()))
        self.shared = shared


class InputError(RunError):
    """A wrong command line, configuration or input (exit status 2), which is the same for every rank."""

    exit_status = 2

    def __init__(self, message: str, shared: bool = True) -> None:
        super().__init__(message, shared)


FAILURE = 1 << 15  # bytes for one


class Failure(NamedTuple):
    """What a rank tells the process that watches it; unforeseen: an exception that isn't one of the program's own."""

    status: int
    text: str
    unforeseen: bool


# What a disk does to a run that is no mistake of the program.
_DISK = {errno.ENOSPC: "free some space", errno.EDQUOT: "free some of the quota", errno.EROFS: "make it writable"}
_DISK |= {errno.EFBIG: "raise the limit on a file's size", errno.EIO: "check the disk", errno.ESTALE: "mount it again"}


def remedy(error: OSError) -> str:
    """Returns what to do about a file that can't be written."""
    return _DISK.get(error.errno, "check the disk")


@contextlib.contextmanager
def reported(failed: Any = None) -> Iterator[None]:
    """Turns what ends this process into one line on stderr and its exit status: 1, 2, or 130 after Ctrl-C.

    Of several ranks, the one that failed speaks. A rank that only sees a collective fail because another left, or that
    shares an error with rank 0, waits first: whoever started the ranks ends it meanwhile, or else it speaks too.

    Args:
        failed: a watched rank's shared bytes (an ``Array`` of FAILURE): it puts its failure there and lets the process
            that watches it speak and end all ranks at once. Left alone, peers would see it go, and abort with a message
            of their own.
    """
    try:
        yield
    except RunError as error:
        if error.shared and _rank()[0]:
            time.sleep(5)
        _end(error.exit_status, f"{'' if error.shared else _speaker()}{error.prefix}{error}", failed)
    except KeyboardInterrupt:
        _end(128 + signal.SIGINT, "interrupted", failed)
    except Exception as error:
        if line := missing(error):
            _end(InputError.exit_status, line, failed)
        if isinstance(error, OSError) and error.errno in _DISK:
            _end(1, f"{_speaker()}error: {error}; {remedy(error)}, then -resume=auto goes on", failed)
        if _rank()[1] > 1:
            time.sleep(3)
        _end(1, _speaker() + traceback.format_exc(), failed, unforeseen=True)


def _rank() -> tuple[int, int]:
    """This process's rank and the number of ranks, as a launcher set them: maybe after ``reported`` began."""
    return int(os.environ.get("PADDLE_TRAINER_ID") or 0), int(os.environ.get("PADDLE_TRAINERS_NUM") or 1)


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
    os._exit(status)  # not sys.exit, which waits for loader workers and collectives that may never end
