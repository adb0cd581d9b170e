"""Runs a program of the toolkit for another Python program, the caller: in a process of its own.

The caller computes nothing, forks nothing and gets no signal handlers. It shows what the run prints,
and gets the run's folder or its error. ``call`` is the caller's part; ``end_with_caller`` and
``answer`` are the run's.
"""

import codecs
import contextlib
import os
import re
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from errors import InputError, RunError
from launch import startup
from launch.files import temporary_folder, writing_whole
from launch.verdict import how_it_ended

# The caller's process, and the file in which the run leaves its folder.
_CALLER = "PADDLE_VIT_CALLER"
_ANSWER = "PADDLE_VIT_ANSWER"
# How a line on stderr begins that says why the run failed.
_ERROR = re.compile(r"(rank \d+: )?error: ")
# seconds between two checks whether the run has ended
_CHECK = 0.2


def call(words: Sequence[str], quiet: bool) -> Path:
    """Runs a program until it ends, and returns the folder of its run.

    Ctrl-C, or the interrupt of a notebook, asks the run to stop; its state is saved. A second one
    ends it at once. If this process ends first, the run is stopped, too.

    Args:
        words: the program and its arguments, without a shell.
        quiet: show warnings and tracebacks alone.

    Raises:
        InputError, RunError: as the run reported it.
        KeyboardInterrupt: the run was interrupted; the message says where its state is.
    """
    with temporary_folder() as folder:
        file = folder / "answer"
        environment = _environment() | {_CALLER: str(os.getpid()), _ANSWER: str(file)}
        try:
            # In a session of its own: an interrupt reaches the run only through this process.
            run = subprocess.Popen(
                words,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise InputError(f"{words[0]} can't be started ({error.strerror})") from None
        output = _Output(run, quiet)
        with run:
            try:
                interrupted = output.follow()
                status = run.wait()
            except BaseException:
                run.terminate()
                run.wait()
                raise
        if interrupted or status == 128 + signal.SIGINT:
            raise KeyboardInterrupt(output.last)
        if status == InputError.exit_status:
            raise InputError(output.last)
        if status:
            raise RunError(output.last or f"the run {how_it_ended(status)}")
        return Path(os.fsdecode(file.read_bytes()))


def _environment() -> dict[str, str]:
    """Returns this process's environment as the run shall inherit it.

    Paddle's import sets OMP_NUM_THREADS to 1 if it isn't set. The run would take that for the user's
    wish. Its output is read as UTF-8.
    """
    environment = dict(os.environ)
    environment.pop("PYTHONIOENCODING", None)
    if "paddle" in sys.modules and environment.get("OMP_NUM_THREADS") == "1":
        with contextlib.suppress(OSError):
            at_start = Path("/proc/self/environ").read_bytes().split(b"\0")
            if b"OMP_NUM_THREADS=1" not in at_start:
                del environment["OMP_NUM_THREADS"]
    return environment


class _Output:
    """The output of a run, which is shown on this process's streams as it comes.

    The error that the run ends with isn't shown, because it is raised.

    Attributes:
        last: the last line on stderr, without "error: ".
    """

    def __init__(self, run: subprocess.Popen[bytes], quiet: bool) -> None:
        self.run = run
        self.quiet = quiet
        self.last = ""
        # An error that is shown if another line follows.
        self.error = ""

    def follow(self) -> bool:
        """Shows the output until the run has ended; returns whether it was interrupted.

        Another process that the run has started may hold the pipes open beyond its end.
        """
        interrupted = False
        with selectors.DefaultSelector() as selector:
            for pipe, show in ((self.run.stdout, self._show), (self.run.stderr, self._show_error)):
                assert pipe is not None
                selector.register(pipe, selectors.EVENT_READ, _Lines(show))
            while selector.get_map():
                try:
                    has_ended = self.run.poll() is not None
                    ready = selector.select(0 if has_ended else _CHECK)
                    for key, _ in ready:
                        if not key.data.read(key.fd):
                            selector.unregister(key.fileobj)
                    if has_ended and not ready:
                        break
                except KeyboardInterrupt:
                    interrupted = True
                    self.run.send_signal(signal.SIGINT)
        return interrupted

    def _show(self, line: str) -> None:
        if not self.quiet:
            _write(sys.stdout, line)

    def _show_error(self, line: str) -> None:
        _write(sys.stderr, self.error)
        if match := _ERROR.match(line):
            self.error = line
            self.last = f"{match[1] or ''}{line[match.end() :].strip()}"
        else:
            self.error = ""
            self.last = line.strip() or self.last
            _write(sys.stderr, line)


class _Lines:
    """Passes the lines of a pipe on, each with its end, once it is complete."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self.show = show
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.rest = ""

    def read(self, descriptor: int) -> bool:
        """Reads what there is; returns whether there may be more."""
        data = os.read(descriptor, 1 << 16)
        *lines, self.rest = (self.rest + self.decoder.decode(data, not data)).split("\n")
        for line in lines:
            self.show(f"{line}\n")
        if not data and self.rest:
            self.show(self.rest)
        return bool(data)


def _write(stream: TextIO | None, line: str) -> None:
    """Writes a line to a stream of the caller, such as a notebook's. If the stream is closed, the
    line is lost, and the run continues.
    """
    if stream is None or not line:
        return
    encoding = getattr(stream, "encoding", None) or "utf-8"
    with contextlib.suppress(OSError, ValueError):
        stream.write(line.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()


def end_with_caller() -> None:
    """Has this run stop, with its state saved, when its caller ends; nothing without a caller."""
    if caller := os.environ.get(_CALLER):
        startup.end_with_parent(signal.SIGTERM)
        # The caller may have ended before Linux was asked.
        if str(os.getppid()) != caller:
            startup.end_at_once(signal.SIGTERM, None)


def answer(folder: Path) -> None:
    """Gives the caller the run's folder; nothing without a caller."""
    if file := os.environ.get(_ANSWER):
        with writing_whole(Path(file), "wb") as answered:
            answered.write(os.fsencode(os.path.abspath(folder)))
