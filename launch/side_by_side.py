"""Commands side by side, each on devices of its own, until all have ended or a signal asks to stop."""

import functools
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from launch import gpus, signals
from launch.environment import num_cores, visible_gpus

_LOOK = 0.1  # seconds between two looks at what runs
_noted: deque[int] = deque()  # signals that came


class Command(NamedTuple):
    """A command, and the file for what it prints."""

    name: str
    words: list[str]
    printed: Path


def places(processes: int, side_by_side: int | None) -> list[dict[str, str]]:
    """Returns the environment of each command that runs at a time: its GPUs, or on a CPU its share of the cores.

    Args:
        processes: of a command; each takes a GPU.
        side_by_side: commands at a time; None: as many as there are devices for. Of GPUs, more share none.
    """
    gpus.check()
    if found := visible_gpus():
        names = gpus.visible_gpus() or [str(place) for place in range(found)]
        shares = [names[first : first + processes] for first in range(0, found - processes + 1, processes)]
        return [{"CUDA_VISIBLE_DEVICES": ",".join(share)} for share in shares[:side_by_side]]
    count = side_by_side or max(1, num_cores() // processes)
    threads = str(max(1, num_cores() // (count * processes)))
    return [{"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}] * count


def run(
    commands: Iterable[Command],
    environments: Sequence[dict[str, str]],
    ended: Callable[[str, int], None],
    keep: Sequence[int] = (),
) -> int:
    """Runs the commands, one at a time for each environment; returns the signal that asked to stop, or 0.

    A signal is passed on, once, to what runs; nothing is started after it. Where this process is killed, what it
    started gets SIGTERM.

    Args:
        ended: is called with the name and the exit status (negative: a signal) of each, as it ends.
        keep: descriptors that what is started keeps open.
    """
    waiting, free, stop = deque(commands), list(environments), 0
    running: dict[str, tuple[subprocess.Popen[bytes], dict[str, str]]] = {}
    signals.catch_signals(lambda number, _: _noted.append(number))
    while running or (waiting and not stop):
        while waiting and free and not (stop or _noted):
            command, environment = waiting.popleft(), free.pop(0)
            running[command.name] = _start(command, environment, keep), environment
        while _noted:
            number = _noted.popleft()
            stop = stop or (number if number in signals.STOPS else 0)
            for process, _ in running.values():
                process.send_signal(number)
        time.sleep(_LOOK)
        for name, (process, environment) in list(running.items()):
            if (status := process.poll()) is not None:
                del running[name]
                free.append(environment)
                ended(name, status)
    return stop


def _start(command: Command, environment: dict[str, str], keep: Sequence[int]) -> subprocess.Popen[bytes]:
    """Starts a command in a session of its own: a terminal's Ctrl-C reaches it by this process alone."""
    with open(command.printed, "ab") as printed:
        return subprocess.Popen(
            command.words,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=keep,
            preexec_fn=functools.partial(signals.die_with_parent, signal.SIGTERM),
        )
