"""Programs that tests start, without the two seconds of processor time that the imports of each
would take.

``python()`` is an interpreter by the look of it: a client (client.py). A server (server.py), which
has imported Paddle and other packages, though nothing of the toolkit, forks itself and takes over
the client's words, environment, folder and descriptors. Whatever a fork couldn't do as a start
does, the client leaves to the real interpreter. Tests of the start itself, of signals, streams and
limits start that, by ``sys.executable``.
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
    """Returns the folder with the client, which is a ``python``; at first it starts this process's
    server.
    """
    with _starting:  # a test's threads ask at the same time
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
        folder.server = subprocess.Popen(  # until this process ends, which closes its stdin
            words, stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=[listener.fileno()]
        )
    return folder


def python() -> str:
    """Returns what stands for ``sys.executable``."""
    return str(Path(_folder().name, "python"))


def environment(**more: str) -> dict[str, str]:
    """Returns this process's environment, in which ``python`` is ``python()``, and ``more``."""
    path = os.pathsep.join([_folder().name, str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "VIRTUAL_ENV": "1", **more}
