"""Errors that a user can act on, and how a program reports them: one line, and an exit status that tells."""

import contextlib
import logging
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator

# What Paddle says at its import and about its sockets is no news for a user. It has to be told before it is imported,
# and every program imports this module first.
os.environ.setdefault("GLOG_minloglevel", "2")
for _message in ("No ccache found", "You are using GPU version Paddle, but", "Your model will be trained under CPUONLY"):
    warnings.filterwarnings("ignore", message=_message)


class RunError(Exception):
    """A failure inside a run (exit status 1). The message is one line: found, expected, what to do.

    Args:
        shared: every rank raises this same error, so rank 0 alone reports it.
    """

    exit_status = 1

    def __init__(self, message: str, shared: bool = False) -> None:
        super().__init__(message)
        self.shared = shared

    def __str__(self) -> str:
        # A loader worker's error comes back wrapped in that worker's traceback, whose last line is the message.
        text = super().__str__().strip().rsplit("\n", 1)[-1]
        return text.removeprefix(f"{type(self).__module__}.{type(self).__name__}: ")


class InputError(RunError):
    """A wrong command line, configuration or input (exit status 2)."""

    exit_status = 2


@contextlib.contextmanager
def reported(rank: int = 0, ranks: int = 1) -> Iterator[None]:
    """Turns what ends a process into one line on stderr and its exit status: 1, 2, or 130 after Ctrl-C.

    Of several ranks the one that failed speaks. The others, whose collectives then fail too, wait a moment before they
    say so: by then whoever started the ranks has ended them.
    """
    name = f"rank {rank}: " if ranks > 1 else ""
    try:
        yield
    except RunError as error:
        if not (error.shared and rank):
            _say(f"{name if not error.shared else ''}error: {error}")
        else:
            time.sleep(5)
        _exit(error.exit_status)
    except KeyboardInterrupt:
        _say("interrupted")
        _exit(128 + signal.SIGINT)
    except Exception:
        if ranks > 1:
            time.sleep(3)
        _say(f"{name}{traceback.format_exc()}")
        _exit(1)


def _say(text: str) -> None:
    print(text, file=sys.stderr)
    logging.getLogger("local").error(text)


def _exit(status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # not sys.exit, which waits for loader workers and collectives that may never end
