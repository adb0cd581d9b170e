"""Starts programs for tests without the two seconds of CPU time that the imports of each would
take.

``python()`` is a program that tests start instead of the interpreter: a client (client.py). A
server (server.py) has imported Paddle and other packages, but nothing of the toolkit. For each
client it forks itself. The fork takes over the client's arguments, environment, folder and
descriptors, and runs the program. If a fork couldn't behave as a real start would, the client runs
the real interpreter. Tests of the start itself, of signals, streams and limits use
``sys.executable``.
"""

import functools
import os
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_starting = threading.Lock()


def _folder() -> tempfile.TemporaryDirectory:
    """Returns the folder with the client, whose name is ``python``. The first call starts this
    process's server.
    """
    # Threads of a test may call this at the same time.
    with _starting:
        return _started()


@functools.cache
def _started() -> tempfile.TemporaryDirectory:
    folder = tempfile.TemporaryDirectory(prefix="warm-")
    client = Path(folder.name, "python")
    address = f"{folder.name}/socket"
    given = f"ADDRESS, PYTHON = {address!r}, {sys.executable!r}\n"
    client.write_text(f"#!{sys.executable} -IS\n{given}{(_HERE / 'client.py').read_text()}")
    client.chmod(0o755)
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
        open(f"{folder.name}/log", "w") as log,
    ):
        listener.bind(address)
        listener.listen(64)
        words = [sys.executable, str(_HERE / "server.py"), str(listener.fileno()), str(client)]
        # The server ends when its stdin is closed, at the end of this process.
        folder.server = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=[listener.fileno()]
        )
    return folder


def python() -> str:
    """Returns the path of the client, which replaces ``sys.executable``."""
    return str(Path(_folder().name, "python"))


def environment(**more: str) -> dict[str, str]:
    """Returns this process's environment and ``more``. Its ``python`` is the client."""
    path = os.pathsep.join([_folder().name, str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "VIRTUAL_ENV": "1", **more}
