"""Runs that are stopped at a chosen moment, for the tests."""

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
    """Calls functions one after the other, in the same ranks: starting ranks takes longer than a
    small run.
    """
    return [function(*args) for function, *args in calls]


def stop_at(call, options, output, length, number=signal.SIGTERM):
    """Trains until, as requests are heeded for the ``call``-th time, the last rank has got a
    signal.

    Steps but an epoch's last, each epoch's end and evaluated batches heed requests. Returns (exit
    status, name of the last checkpoint).
    """
    calls = itertools.count(1)
    asked = requests.Checkpointing._asked_signal

    def signalled(keeper):
        if next(calls) == call and rank() == world_size() - 1:
            signals.received[number] = time.monotonic()
        return asked(keeper)

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
