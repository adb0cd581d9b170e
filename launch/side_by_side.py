"""Runs commands side by side, each on its own devices, until all have ended or a signal asks to
stop.
"""

import contextlib
import functools
import os
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from launch import devices, signals
from launch.devices import num_cores, num_gpus_of_paddle
from launch.files import open_to_append

# seconds between two checks of the commands
_CHECK = 0.1
# signals that this process received
_received: deque[int] = deque()


class Command(NamedTuple):
    """A command to run.

    Attributes:
        name: by which its end is reported.
        words: the program and its arguments.
        printed: the file for its output.
    """

    name: str
    words: list[str]
    printed: Path


def environments(processes: int, side_by_side: int | None) -> list[dict[str, str]]:
    """Returns the environment variables for each command that may run at the same time. They name
    its GPUs, or its share of the CPU's cores.

    Args:
        processes: the number of processes of each command; each takes a GPU. GPUs aren't shared.
        side_by_side: the number of commands at a time, at most; None: as many as the devices allow.
    """
    devices.check_visible()
    if gpus := num_gpus_of_paddle():
        names = devices.visible_names() or [str(number) for number in range(gpus)]
        shares = [
            names[first : first + processes] for first in range(0, gpus - processes + 1, processes)
        ]
        return [{"CUDA_VISIBLE_DEVICES": ",".join(share)} for share in shares[:side_by_side]]
    count = side_by_side or max(1, num_cores() // processes)
    threads = str(max(1, num_cores() // (count * processes)))
    return [{"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}] * count


def run(
    commands: Iterable[Command],
    environments: Sequence[dict[str, str]],
    on_end: Callable[[str, int], None],
    pass_fds: Sequence[int] = (),
) -> int:
    """Runs the commands until all have ended or a signal asks to stop; returns that signal, or 0.

    A signal is sent on to the running commands, and no other command is started after it. If this
    process is killed, the running commands get SIGTERM.

    Args:
        environments: as ``environments`` returns them. With each, one command runs at a time.
        on_end: is called with the name and the exit status of each command that ends. A negative
            status is the number of a signal.
        pass_fds: descriptors that the commands inherit.
    """
    waiting = deque(commands)
    free = list(environments)
    stop = 0
    running: dict[str, tuple[subprocess.Popen[bytes], dict[str, str]]] = {}
    signals.catch_signals(lambda number, _: _received.append(number))
    while running or (waiting and not stop):
        while waiting and free and not (stop or _received):
            command = waiting.popleft()
            environment = free.pop(0)
            running[command.name] = _start(command, environment, pass_fds), environment
        while _received:
            number = _received.popleft()
            if number in signals.STOP_SIGNALS and not stop:
                stop = number
            for process, _ in running.values():
                process.send_signal(number)
        # Waits for one of the commands: in contrast to a sleep, this returns as soon as it ends.
        for process, _ in list(running.values())[:1]:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_CHECK)
        for name, (process, environment) in list(running.items()):
            if (status := process.poll()) is not None:
                del running[name]
                free.append(environment)
                on_end(name, status)
    return stop


def _start(
    command: Command, environment: dict[str, str], pass_fds: Sequence[int]
) -> subprocess.Popen[bytes]:
    """Starts a command in its own session: a terminal's Ctrl-C reaches it only through this
    process.
    """
    with open_to_append(command.printed) as printed:
        return subprocess.Popen(
            command.words,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=pass_fds,
            preexec_fn=functools.partial(signals.die_with_parent, signal.SIGTERM),
        )
