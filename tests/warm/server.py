"""Forks itself for each client, into the program that the client was started as. It begins as a
fresh interpreter does: its module is __main__, and its end is as Python's.
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
# What is read before the first line of a program runs, or as Paddle is imported; and what launchers
# set, whose ranks mustn't have imported it when they fork.
EARLY = re.compile(
    r"PYTHON(?!PATH|WARNINGS)|(FLAGS|OMP|MKL|KMP|GOMP|OPENBLAS|LD|LC|GLOG|CUDA|NVIDIA|MALLOC|SLURM|TORCHELASTIC|PADDLE(?!_VIT))_"
    r"|(LANG|GLIBC_TUNABLES|RANK|WORLD_SIZE|LOCAL_RANK)$"
)
ROOM = 200  # above the descriptors that this process and its clients have


# What programs import; zlib before Paddle (errors.py says why).
PRELOADED = (
    "zlib",
    "paddle",
    "paddle.distributed",
    "matplotlib.pyplot",
    "sklearn.datasets",
    "safetensors.numpy",
)
PRELOADED += (
    "yacs.config",
    "yaml",
    "threadpoolctl",
    "simplejpeg",
    "cykooz_resizer",
    "unittest.mock",
)


def preload():
    """Imports PRELOADED; returns what Paddle's import changed in the environment."""
    changed = {}
    for name in PRELOADED:
        importlib.import_module(name)
        if name == "paddle":
            changed = {
                name: value for name, value in os.environ.items() if INITIAL.get(name) != value
            }
    # as in a program's first moments, in which there is none
    sys.modules["paddle"].disable_signal_handler()
    figure = sys.modules["matplotlib.figure"].Figure()  # its first text looks for fonts
    figure.subplots().set_title("0")
    figure.savefig(io.BytesIO())
    return changed


def keep_trees():
    """Lets ``ast.parse`` remember the toolkit's files: each program reads the keys of all
    architectures and components there, by syntax alone.
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
    """What a client was started as: its words, its environment, its descriptors."""

    def __init__(self, connection):
        self.connection = connection
        self.words = []
        numbers, self.received, _, _ = socket.recv_fds(connection, 4096, 250)
        self.numbers = [int(number) for number in numbers.split()]
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        self.pid = int.from_bytes(credentials[:4], sys.byteorder)

    def read(self):
        """Reads what the client's process tells of itself; returns whether that is all."""
        # after Python's name, -IS and the client's
        self.words = self._read("cmdline").split("\0")[3:-1]
        pairs = (pair.partition("=") for pair in self._read("environ").split("\0") if pair)
        self.environment = {name: value for name, _, value in pairs}
        self.status = dict(re.findall(r"^(\w+):\s*(.*)$", self._read("status"), re.M))
        flags = subprocess._args_from_interpreter_flags()  # as what a program starts gets them
        if self.words[: len(flags)] == flags:
            del self.words[: len(flags)]
        return len(self.numbers) == len(self.received)

    def _read(self, name):
        return Path(f"/proc/{self.pid}/{name}").read_bytes().decode(errors="surrogateescape")

    def is_like_mine(self, changed):
        """Whether a fork of this process can stand for it."""
        fresh, inherited, early = (
            {name: env[name] for name in env if EARLY.match(name)}
            for env in (INITIAL, INITIAL | changed, self.environment)
        )
        # What a fork of this process starts inherits what Paddle's import has set. Python's own
        # helpers, such as its resource tracker (-c), need no Paddle and are left to Python.
        is_rank = "--multiprocessing-fork" in self.words
        is_program = self.words[:1] not in (["-c"], ["-m"])
        spaces = ("net", "mnt", "pid", "user", "ipc", "uts")
        folder = os.readlink(f"/proc/{self.pid}/cwd")
        return (
            len(self.words) > 0
            and (
                self.words[0] in ("-c", "-m") or os.path.isfile(os.path.join(folder, self.words[0]))
            )
            and (
                (early == fresh and not is_rank) or (early == inherited and (is_rank or is_program))
            )
            and os.path.isdir(folder)
            and {0, 1, 2} <= {*self.numbers}
            and max(self.numbers) < ROOM
            and not any(os.isatty(descriptor) for descriptor in self.received)
            and self._read("limits") == Path("/proc/self/limits").read_text()
            and all(
                os.readlink(f"/proc/{self.pid}/ns/{n}") == os.readlink(f"/proc/self/ns/{n}")
                for n in spaces
            )
        )

    def become(self, changed):
        """Makes this process, a fork, what the client was."""
        high = [os.dup2(old, ROOM + place) for place, old in enumerate(self.received)]
        self.connection.detach()  # or it would close its number later, whatever that is by then
        os.closerange(3, ROOM)
        for number, descriptor in zip(self.numbers, high, strict=True):
            os.dup2(descriptor, number)
        os.closerange(ROOM, ROOM + len(high))
        os.chdir(os.readlink(f"/proc/{self.pid}/cwd"))
        os.umask(int(self.status["Umask"], 8))
        os.sched_setaffinity(0, os.sched_getaffinity(self.pid))
        os.environ.clear()
        os.environ.update(self.environment)
        same = (name for name in changed if self.environment.get(name) == INITIAL.get(name))
        os.environ.update({name: changed[name] for name in same})
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
    """Forks for those who come, and passes on how it ended; a client's end is its program's, too."""

    def __init__(self, listener, changed):
        self.listener = listener
        self.changed = changed
        self.poll = select.poll()
        self.poll.register(listener, select.POLLIN)
        self.poll.register(0, select.POLLIN)
        # By the descriptors of the connection and of the process: (connection, pid, pidfd, parent
        # of a rank's client).
        self.programs = {}

    def serve(self):
        """Returns in forks alone: what each is to be."""
        while True:
            for descriptor, _ in self.poll.poll():
                if descriptor == 0:  # the tests have ended
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
        except OSError:  # it is gone
            known = False
        if known and not (pid := os.fork()):
            return start
        if not known:
            print("left to Python:", start.words, flush=True)  # in the log, beside the socket
        for descriptor in start.received:
            os.close(descriptor)
        if not known:
            connection.close()  # the client sees that
            return None
        handle = os.pidfd_open(pid)
        program = (
            connection,
            pid,
            handle,
            int(start.status["PPid"]) if "--multiprocessing-fork" in start.words else 0,
        )
        for descriptor in (connection.fileno(), handle):
            self.programs[descriptor] = program
            self.poll.register(descriptor, select.POLLIN)
        connection.send(str(pid).encode())
        return None

    def look_at(self, descriptor):
        connection, pid, handle, _ = self.programs[descriptor]
        if descriptor != handle:  # its client was killed, and what that started goes with it
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
    """Does as the interpreter does with its words."""
    import multiprocessing
    import runpy

    paths = [
        path for path in sys.path[1:] if path not in INITIAL.get("PYTHONPATH", "").split(os.pathsep)
    ]
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path] + paths
    sys.executable = CLIENT  # of what it starts in turn
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
    """Does the program, and what an interpreter does at its end but for taking its modules apart:
    that touches, and so copies, every page of them.
    """
    status = 0
    try:
        as_main(words)
    except SystemExit as asked:
        status = asked.code if isinstance(asked.code, int) else int(asked.code is not None)
        if status and not isinstance(asked.code, int):
            print(asked.code, file=sys.stderr)
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
gc.freeze()  # else a collection copies every page that forks share
gc.set_threshold(10_000)  # as tests/conftest.py
gc.enable()
start = Server(socket.socket(fileno=LISTENER), changed).serve()
start.become(changed)
status = status_of(start.words)
if status < 0:
    signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status & 0xFF)
