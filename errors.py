"""Errors that a user can act on, and how a program reports them: one line, and an exit status that tells."""

import contextlib
import logging
import os
import signal
import sys
import time
import traceback
import warnings
import zlib  # noqa: F401
from collections.abc import Iterator
from typing import Any

# What has to stand before Paddle's import; every program imports this module first. Paddle 2.6 carries a zlib of its
# own that crashes Python's, unless Python's (above) is loaded already; and its notes on sockets are no news for users.
os.environ.setdefault("GLOG_minloglevel", "2")
for _message in (
    "No ccache found",
    "You are using GPU version Paddle, but",
    "Your model will be trained under CPUONLY",
):
    warnings.filterwarnings("ignore", message=_message)


class RunError(Exception):
    """A failure inside a run (exit status 1). The message is one line: found, expected, what to do.

    Args:
        shared: every rank raises this same error, so rank 0 reports it for all.
    """

    exit_status = 1

    def __init__(self, message: str, shared: bool = False) -> None:
        if (
            "Traceback (most recent call last)" in message
        ):  # a loader worker's: the message is its traceback's last line
            message = message.strip().rsplit("\n", 1)[-1].partition(": ")[2]
        super().__init__(" ".join(message.split()))
        self.shared = shared


class InputError(RunError):
    """A wrong command line, configuration or input (exit status 2), which is the same for every rank."""

    exit_status = 2

    def __init__(self, message: str, shared: bool = True) -> None:
        super().__init__(message, shared)


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Turns what ends this process into one line on stderr and its exit status: 1, 2, or 130 after Ctrl-C.

    Of several ranks, the one that failed speaks. A rank that only sees a collective fail because another left, or that
    shares an error with rank 0, waits first: whoever started the ranks ends it meanwhile, or else it speaks too.
    """
    rank, ranks = int(os.environ.get("PADDLE_TRAINER_ID") or 0), int(os.environ.get("PADDLE_TRAINERS_NUM") or 1)
    speaker = f"rank {rank}: " if ranks > 1 else ""
    try:
        yield
    except RunError as error:
        if error.shared and rank:
            time.sleep(5)
        _say(f"{'' if error.shared else speaker}error: {error}")
        _exit(error.exit_status)
    except KeyboardInterrupt:
        _say("interrupted")
        _exit(128 + signal.SIGINT)
    except Exception:
        if ranks > 1:
            time.sleep(3)
        _say(speaker + traceback.format_exc())
        _exit(1)


def wait_for_ranks(context: Any) -> None:
    """Waits for spawned ranks (a ``paddle.distributed`` spawn context); when one fails, ends the others and exits with
    its status. It has said why itself, unless a signal killed it.
    """
    try:
        while not context.join():
            pass
    except KeyboardInterrupt:
        for process in context.processes:
            process.terminate()
            process.join()
        raise
    except Exception:  # Paddle's way of saying that a rank ended with a status other than 0
        statuses = [process.exitcode for process in context.processes]
        for rank, status in enumerate(statuses):
            if status < 0 and -status != signal.SIGTERM:
                _say(f"error: rank {rank} was killed by {signal.Signals(-status).name}")
        sys.exit(max([status for status in statuses if status > 0], default=1))


def _say(text: str) -> None:
    print(text, file=sys.stderr)
    if logging.getLogger("local").handlers:  # the run's own log, once there is one
        logging.getLogger("local").error(text)


def _exit(status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # not sys.exit, which waits for loader workers and collectives that may never end
