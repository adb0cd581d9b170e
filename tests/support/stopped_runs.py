"""Runs that are stopped at a chosen moment."""

import itertools
import os
import signal
import time
from pathlib import Path
from unittest import mock

from launch import signals
from support.training_runs import train
from training import requests
from utils import rank, world_size


def each(calls):
    """Calls functions in turn in the same ranks, because starting ranks takes longer than a run."""
    return [function(*args) for function, *args in calls]


def stop_at(call, options, output, length, number=signal.SIGTERM):
    """Trains until the last rank gets a signal at the ``call``-th check for requests.

    Requests are checked after each step but an epoch's last, at the end of each epoch, and after
    evaluated batches.

    Returns:
        The exit status, and the name of the last checkpoint.
    """
    calls = itertools.count(1)
    real_check = requests.Checkpointing._asked_signal

    def signalled(keeper):
        if next(calls) == call and rank() == world_size() - 1:
            signals.received[number] = time.monotonic()
        return real_check(keeper)

    try:
        # Ranks meet at every step.
        patched = mock.patch.object(requests.Checkpointing, "_asked_signal", signalled)
        with patched, mock.patch.object(requests.Requests, "MOST_STEPS", 1):
            train(options, output, length)
    except requests.Stopped as stopped:
        return stopped.exit_status, os.readlink(Path(output) / "checkpoints" / "last")
    finally:
        signals.received.clear()
    raise AssertionError("the run came to its end")
