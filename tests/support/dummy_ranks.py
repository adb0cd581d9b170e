"""Functions that ranks call in ``test_supervision`` and ``test_launched``. Their processes need no
Paddle.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from errors import reporting
from launch import launched, progress, signals


def wait():
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals.SIGNALS)
    time.sleep(60)


def leave(status):
    os._exit(status)


def kill(number):
    os.kill(os.getpid(), number)
    time.sleep(60)


def fail(failed, *failure):
    """Reports (status, text, whether it is unforeseen)."""
    failed.value = json.dumps(failure if len(failure) == 3 else (*failure, False)).encode()
    time.sleep(60)


def obey(ready, failed, num_requests):
    """Behaves as a rank: a signal to stop ends it. SIGUSR1 is counted."""

    def heed(number, _):
        if number == signal.SIGUSR1:
            num_requests.value += 1
        else:
            failed.value = json.dumps((128 + number, "stopped", False)).encode()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, heed)
    ready.release()
    while True:
        time.sleep(60)


def ignore(ready):
    """Ignores all signals."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    ready.release()
    time.sleep(60)


def launch(place, count, port, folder, acts, timeout, separate):
    """Starts the launcher's process of rank ``place`` of ``count``, which prints to the file
    ``place``.

    Args:
        acts: the functions that the ranks call once all are ready and at step 7, with their
            arguments, by rank.
        separate: whether each rank's stderr is a file of its own, as under Paddle's launcher.
    """
    os.environ |= {
        "PADDLE_TRAINER_ID": str(place),
        "PADDLE_TRAINERS_NUM": str(count),
        "PADDLE_MASTER": f"127.0.0.1:{port}",
        "PADDLE_TRAINER_ENDPOINTS": "127.0.0.1:1,127.0.0.1:2",
    }
    if separate:
        os.environ["PADDLE_LOG_DIR"] = "log"
    sys.stderr = open(Path(folder) / str(place), "w")  # noqa: SIM115
    launched.REPORT_INTERVAL = 0.1
    launched.REPORT_TIMEOUT = 0.5
    launched.VERDICT_TIMEOUT = 1.0
    keys = SimpleNamespace(TIMEOUT=timeout, MAX_RESTART=0, INIT_TIMEOUT=20.0)
    with reporting():
        launched.watch(_launched, SimpleNamespace(DIST=keys, act=acts[place]))


def _launched(failed, beats, config):
    signals.die_with_parent()
    progress.share_beats(beats, 0)
    function, *args = config.act
    if function in (fail, fail_early):
        args = [failed, *args]
    if function in (stop_early, fail_early, read_slowly):
        function(*args)
    launched.wait_for_all()
    progress.beat(progress.COMPUTING, 7)
    if function in (leave, read_slowly):
        return
    # The parents report the step meanwhile.
    time.sleep(0.5)
    function(*args)


def stay_behind():
    """Waits for data at a step that the other ranks have finished."""
    progress.beat(progress.LOADING, 7)
    time.sleep(60)


def stop_early():
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(60)


def fail_early(failed, *failure):
    fail(failed, *failure)


def read_slowly():
    time.sleep(3)


def suspend_parent():
    os.kill(os.getppid(), signal.SIGSTOP)
    time.sleep(60)


def kill_parent():
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)
