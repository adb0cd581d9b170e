"""Forks itself for each client. The fork runs the program that the client was started for, as a
fresh
interpreter would: as ``__main__``, and with the same end.
"""

import ast
import atexit
import contextlib
import gc
import importlib
import io
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import types
import warnings
from pathlib import Path

LISTENER = int(sys.argv[1])
CLIENT = sys.argv[2]
INITIAL = dict(os.environ)
ROOT = Path(__file__).resolve().parents[2]
# Variables that are read before a program's first line, or while Paddle is imported. Also those of
# launchers, whose ranks mustn't have imported Paddle when they fork.
EARLY = re.compile(
    r"PYTHON(?!PATH|WARNINGS)|(FLAGS|OMP|MKL|KMP|GOMP|OPENBLAS|LD|LC|GLOG|CUDA|NVIDIA|MALLOC|SLURM|TORCHELASTIC|PADDLE(?!_VIT))_"
    r"|(LANG|GLIBC_TUNABLES|RANK|WORLD_SIZE|LOCAL_RANK)$"
)
# A number above all descriptors of this process and its clients.
ROOM = 200
# Modules that programs import. zlib comes before Paddle (errors.py says why).
PRELOADED = (
    "zlib",
    "paddle",
    "paddle.distributed",
    "matplotlib.pyplot",
    "sklearn.datasets",
    "safetensors.numpy",
    "yacs.config",
    "yaml",
    "threadpoolctl",
    "simplejpeg",
    "cykooz_resizer",
    "unittest.mock",
)


def preload():
    """Imports PRELOADED. Returns the variables that Paddle's import changed."""
    changed = {}
    for name in PRELOADED:
        importlib.import_module(name)
        if name == "paddle":
            changed = {
                name: value for name, value in os.environ.items() if INITIAL.get(name) != value
            }
    # At its start, a program has no handlers of Paddle.
    sys.modules["paddle"].disable_signal_handler()
    # The first text of a process searches for fonts.
    figure = sys.modules["matplotlib.figure"].Figure()
    figure.subplots().set_title("0")
    figure.savefig(io.BytesIO())
    return changed


def keep_trees():
    """Makes ``ast.parse`` remember the syntax trees of the toolkit's files. Each program parses
    them to read the keys of all architectures and components.
    """
    parse = ast.parse
    trees = {}
    for room in ("models", "training", "loading"):
        for file in (ROOT / room).rglob("*.py"):
            text = file.read_text(encoding="utf-8")
            if room == "models" or ".register(" in text:
                trees[text] = parse(text)
    ast.parse = lambda source, *how, **named: trees.get(source) or parse(source, *how, **named)


class Start:
    """Describes how a client was started.

    Attributes:
        words: its arguments, without those of the interpreter.
        environment: its variables.
        numbers: its descriptors.
        received: this process's copies of them.
        pid: its process.
    """

    def __init__(self, connection):
        self.connection = connection
        self.words = []
        numbers, self.received, _, _ = socket.recv_fds(connection, 4096, 250)
        self.numbers = [int(number) for number in numbers.split()]
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        self.pid = int.from_bytes(credentials[:4], sys.byteorder)

    def read(self):
        """Reads the client's process from /proc. Returns whether all of its descriptors came."""
        # The first three are Python, -IS and the client.
        self.words = self._read("cmdline").split("\0")[3:-1]
        pairs = (pair.partition("=") for pair in self._read("environ").split("\0") if pair)
        self.environment = {name: value for name, _, value in pairs}
        self.status = dict(re.findall(r"^(\w+):\s*(.*)$", self._read("status"), re.M))
        # A program that starts others passes its interpreter's flags on.
        flags = subprocess._args_from_interpreter_flags()
        if self.words[: len(flags)] == flags:
            del self.words[: len(flags)]
        return len(self.numbers) == len(self.received)

    def _read(self, name):
        return Path(f"/proc/{self.pid}/{name}").read_bytes().decode(errors="surrogateescape")

    def is_like_mine(self, changed):
        """Returns whether a fork of this process behaves as the client's program would."""
        folder = os.readlink(f"/proc/{self.pid}/cwd")
        if not self.words or not os.path.isdir(folder):
            return False
        fresh, inherited, early = (
            {name: value for name, value in variables.items() if EARLY.match(name)}
            for variables in (INITIAL, INITIAL | changed, self.environment)
        )
        # What a fork of this process starts inherits the variables that Paddle's import changed.
        # Python's own helpers, such as its resource tracker (-c), need no Paddle and are left to
        # Python.
        is_rank = "--multiprocessing-fork" in self.words
        is_code = self.words[0] in ("-c", "-m")
        if is_rank:
            is_known = early == inherited
        elif is_code:
            is_known = early == fresh
        else:
            is_known = early in (fresh, inherited)
        is_file = os.path.isfile(os.path.join(folder, self.words[0]))
        namespaces = ("net", "mnt", "pid", "user", "ipc", "uts")
        return (
            is_known
            and (is_file or is_code)
            and {0, 1, 2} <= {*self.numbers}
            and max(self.numbers) < ROOM
            and not any(os.isatty(descriptor) for descriptor in self.received)
            and self._read("limits") == Path("/proc/self/limits").read_text()
            and all(
                os.readlink(f"/proc/{self.pid}/ns/{name}") == os.readlink(f"/proc/self/ns/{name}")
                for name in namespaces
            )
        )

    def become(self, changed):
        """Gives this process, a fork, the state of the client's process."""
        high = [os.dup2(old, ROOM + place) for place, old in enumerate(self.received)]
        # Otherwise the socket would later close its number, which then belongs to something else.
        self.connection.detach()
        os.closerange(3, ROOM)
        for number, descriptor in zip(self.numbers, high, strict=True):
            os.dup2(descriptor, number)
        os.closerange(ROOM, ROOM + len(high))
        os.chdir(os.readlink(f"/proc/{self.pid}/cwd"))
        os.umask(int(self.status["Umask"], 8))
        os.sched_setaffinity(0, os.sched_getaffinity(self.pid))
        os.environ.clear()
        os.environ.update(self.environment)
        # Variables that Paddle's import would change, unless the client has other values.
        same = (name for name in changed if self.environment.get(name) == INITIAL.get(name))
        os.environ.update({name: changed[name] for name in same})
        # A mask with a bit for each signal that the client ignored at its start.
        ignored = int(self.status["SigIgn"], 16)
        for number in (
            signal.SIGINT,
            signal.SIGTERM,
            signal.SIGHUP,
            signal.SIGUSR1,
            signal.SIGXCPU,
            signal.SIGCHLD,
        ):
            usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, signal.SIG_IGN if ignored >> (number - 1) & 1 else usual)
        signal.set_wakeup_fd(-1)
        sys.orig_argv = [sys.executable, *self.words]


class Server:
    """Forks a program for each client, and sends it the program's exit status. If a client ends,
    its program is killed.
    """

    def __init__(self, listener, changed):
        self.listener = listener
        self.changed = changed
        self.poll = select.poll()
        self.poll.register(listener, select.POLLIN)
        self.poll.register(0, select.POLLIN)
        # By the descriptors of the connection and of the process: (connection, pid, pidfd, pid of
        # the program that spawned this one, or 0).
        self.programs = {}

    def serve(self):
        """Returns in forks alone, with the ``Start`` of their client."""
        while True:
            for descriptor, _ in self.poll.poll():
                if descriptor == 0:
                    # The tests have ended.
                    for _, pid, _, _ in self.programs.values():
                        os.kill(pid, signal.SIGKILL)
                    os._exit(0)
                if descriptor == self.listener.fileno():
                    if start := self.begin(self.listener.accept()[0]):
                        return start
                elif descriptor in self.programs:
                    self.look_at(descriptor)

    def begin(self, connection):
        start = Start(connection)
        try:
            known = start.read() and start.is_like_mine(self.changed)
        except OSError:
            # The client has gone.
            known = False
        if known and not (pid := os.fork()):
            return start
        for descriptor in start.received:
            os.close(descriptor)
        if not known:
            # The log is beside the socket.
            print("left to Python:", start.words, flush=True)
            # The client then runs the real interpreter.
            connection.close()
            return None
        handle = os.pidfd_open(pid)
        parent = int(start.status["PPid"]) if "--multiprocessing-fork" in start.words else 0
        program = connection, pid, handle, parent
        for descriptor in (connection.fileno(), handle):
            self.programs[descriptor] = program
            self.poll.register(descriptor, select.POLLIN)
        connection.send(str(pid).encode())
        return None

    def look_at(self, descriptor):
        connection, pid, handle, _ = self.programs[descriptor]
        if descriptor != handle:
            # The client was killed, so its program is killed, too.
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(OSError):
            connection.send(str(os.waitstatus_to_exitcode(status)).encode())
        for number in (connection.fileno(), handle):
            self.poll.unregister(number)
            del self.programs[number]
        connection.close()
        os.close(handle)
        for _, child, _, parent in list(self.programs.values()):
            if parent == pid:
                os.kill(child, signal.SIGKILL)


def as_main(words):
    """Runs a program as the interpreter does with these arguments."""
    import multiprocessing
    import runpy

    paths = [
        path for path in sys.path[1:] if path not in INITIAL.get("PYTHONPATH", "").split(os.pathsep)
    ]
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path] + paths
    # Programs that this one starts are warm, too.
    sys.executable = CLIENT
    multiprocessing.set_executable(CLIENT)
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()
    if told := os.environ.get("PYTHONWARNINGS"):
        sys.warnoptions[:] = told.split(",")
        warnings._processoptions(sys.warnoptions)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__builtins__ = __builtins__
    if words[0] == "-m":
        sys.argv[:], sys.path[:] = words[1:], [os.getcwd(), *paths]
        runpy._run_module_as_main(words[1])
    elif words[0] == "-c":
        sys.argv[:], sys.path[:] = ["-c", *words[2:]], ["", *paths]
        exec(words[1], main.__dict__)
    else:
        main.__file__ = os.path.abspath(words[0])
        sys.argv[:], sys.path[:] = words, [os.path.dirname(os.path.realpath(words[0])), *paths]
        with open(words[0], "rb") as file:
            code = compile(file.read(), main.__file__, "exec")
        exec(code, main.__dict__)


def status_of(words):
    """Runs the program and ends it as an interpreter does. Returns the exit status.

    Modules aren't torn down: that would write to each of their pages, and so copy it.
    """
    status = 0
    try:
        as_main(words)
    except SystemExit as error:
        if isinstance(error.code, int):
            status = error.code
        elif error.code is not None:
            status = 1
            print(error.code, file=sys.stderr)
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        status = -signal.SIGINT
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            status = 120
    return status


gc.disable()
changed = preload()
keep_trees()
gc.collect()
# Otherwise a collection would copy all pages that forks share.
gc.freeze()
# as in tests/conftest.py
gc.set_threshold(10_000)
gc.enable()
start = Server(socket.socket(fileno=LISTENER), changed).serve()
start.become(changed)
status = status_of(start.words)
if status < 0:
    signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status & 0xFF)
