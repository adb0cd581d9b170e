"""Programs of the toolkit as processes that tests watch, signal and kill."""

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import warm

ROOT = Path(__file__).resolve().parents[2]
# Processes that a test may leave running if it fails.
started = []


def start(folder, *flags, disturbed=True, **environment):
    """Starts run_train_multi.sh on two processes in a process group of its own.

    Args:
        disturbed: whether the test needs the processes themselves. Otherwise the warm server forks
            them.
    """
    command = ["sh", str(ROOT / "run_train_multi.sh"), "-ngpus=2", *flags]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    if disturbed:
        environment = os.environ | {"PATH": path, "VIRTUAL_ENV": "1"} | environment
    else:
        environment = warm.environment() | environment
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(
        command, cwd=folder, env=environment, start_new_session=True, **streams
    )
    started.append(process)
    return process


def descendants(pid):
    """Returns {pid: (parent, command line)} of a run's ranks and loader workers, while it lives."""
    rows = {}
    # This takes a fifth of the time of ps.
    for folder in sorted(Path("/proc").glob("[0-9]*"), key=lambda folder: int(folder.name)):
        # A process may have ended.
        with contextlib.suppress(OSError):
            status = (folder / "stat").read_text(errors="replace")
            command = (folder / "cmdline").read_text(errors="replace")
            parent = int(status.rpartition(")")[2].split()[1])
            rows[int(folder.name)] = parent, command.replace("\0", " ").strip()
    found = {}
    wanted = {pid}
    while wanted:
        children = {child: row for child, row in rows.items() if row[0] in wanted}
        found |= children
        wanted = set(children)
    return found


def ranks_of(process):
    """Returns the pids of the ranks, in no order."""
    return [
        pid
        for pid, (parent, args) in descendants(process.pid).items()
        if parent == process.pid and "resource_tracker" not in args
    ]


def workers_of(process):
    """Returns the pids of the ranks' loader workers."""
    ranks = ranks_of(process)
    return [pid for pid, (parent, _) in descendants(process.pid).items() if parent in ranks]


def wait_for(condition, process, seconds=90):
    """Waits for ``condition()`` while the process lives; returns whether it still does."""
    deadline = time.time() + seconds
    while not condition():
        if process.poll() is not None:
            return False
        assert time.time() < deadline, f"nothing came in {seconds} s"
        time.sleep(0.005)
    return process.poll() is None


def wait_for_first_step(process, run):
    """Waits for the run's next report; returns the pids of its processes.

    Returns none if the run ended well before.
    """
    log = Path(run) / "log.txt"

    def steps():
        return len(re.findall(r"epoch \d+/\d+ step ", log.read_text())) if log.exists() else 0

    before = steps()
    if not wait_for(lambda: steps() > before, process):
        assert process.returncode == 0, process.stderr.read()
        return []
    return list(descendants(process.pid))


def assert_none_left(pids):
    deadline = time.time() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.time() < deadline, "processes are left"
        time.sleep(0.05)


def start_in_terminal(folder, *command):
    """Starts a program in a terminal of its own; returns its pid and the terminal's other end."""
    pid, terminal = pty.fork()
    if not pid:
        # The tests may run under nohup, which ignores this signal.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        os.chdir(folder)
        os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
        os.execvpe(command[0], command, os.environ | {"VIRTUAL_ENV": "1"})
    os.set_blocking(terminal, False)
    return pid, terminal


def wait_for_steps(run, count, terminal=None, shown=b"", seconds=60):
    """Waits for ``count`` more reports in the log, and for a text on the terminal.

    The terminal is read meanwhile, so that it doesn't block the run.
    """

    def reports():
        return (run / "log.txt").read_text().count(" step ") if (run / "log.txt").exists() else 0

    before = reports()
    deadline = time.monotonic() + seconds
    said = b""
    while reports() < before + count or shown not in said:
        assert time.monotonic() < deadline, said.decode()
        time.sleep(0.02)
        # Nothing may have come, or nohup has closed the terminal.
        with contextlib.suppress(OSError):
            said += os.read(terminal, 1 << 16) if terminal else b""


def wait_for_exit(pid, seconds=60):
    """Waits for a child that ``os`` started, and kills it in the end; returns its exit status."""
    deadline = time.monotonic() + seconds
    while not (found := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return os.waitstatus_to_exitcode(found[1])
