"""What dummy ranks do in ``test_supervision``: here, so that their processes need no Paddle."""

import os
import signal
import time


def wait():
    time.sleep(60)


def leave(status):
    os._exit(status)


def kill(number):
    os.kill(os.getpid(), number)
    time.sleep(60)


def fail(failed, status):
    failed.value = status
    time.sleep(60)


def obey(ready, failed, asked):
    """Does as a rank: a signal to stop ends the run; SIGUSR1 is counted."""

    def heed(number, _):
        if number == signal.SIGUSR1:
            asked.value += 1
        else:
            failed.value = 128 + number

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, heed)
    ready.release()
    while True:
        time.sleep(60)


def ignore(ready):
    """Heeds no signal."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    ready.release()
    time.sleep(60)
