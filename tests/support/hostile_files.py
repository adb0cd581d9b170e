"""Reads hostile files in a forked process that measures memory and time, and damages files.

``make test`` tries them for half a minute, ``make fuzz`` for an hour, ``make campaign`` with fixed
seeds.
"""

import collections
import gc
import os
import re
import resource
import select
import signal
import struct
import time
import traceback

import threadpoolctl
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from errors import LONGEST_LINE, RunError

FREE_BYTES = 64 << 20
BYTES_PER_BYTE = 3
BYTES_PER_PIXEL = 32
FREE_SECONDS = 10.0
BYTES_PER_SECOND = 100e6
SECONDS_PER_LINE = 5e-6
_COMMON = {
    "deadline": None,
    "database": None,
    "print_blob": True,
    "suppress_health_check": list(HealthCheck),
}
settings.register_profile("suite", max_examples=60, derandomize=True, **_COMMON)
settings.register_profile("campaign", max_examples=1000, derandomize=True, **_COMMON)
settings.register_profile("fuzz", max_examples=1000, **_COMMON)
settings.load_profile("suite")  # --hypothesis-profile chooses another
tried = collections.defaultdict(collections.Counter)  # by kind: "read", "refused"


def a_share(part):
    """Hypothesis' settings for one of ``part`` tests that share the examples of the profile."""
    return settings(max_examples=max(1, settings.default.max_examples // part))


def attempt(kind, size, read, lines=0, pixels=0):
    """Calls ``read()`` in a forked process, which has to end well or with one line.

    Args:
        kind: the kind of file, for the table (``tried``).
        size: the bytes of the files that it reads.
        lines: of a list or a table.
        pixels: that an image may have.

    Returns:
        The error's line, or "" if it was read.

    Raises: AssertionError: a crash, a hang, a traceback, a malformed line, or too much memory or
    time.
    """
    seconds = FREE_SECONDS + size / BYTES_PER_SECOND + SECONDS_PER_LINE * lines
    reader, writer = os.pipe()
    started = time.monotonic()
    pid = os.fork()
    if not pid:
        os.close(reader)
        _become_child(writer, read)
    os.close(writer)
    told = b""
    ready = select.poll()  # select takes no descriptor from 1024 on
    ready.register(reader, select.POLLIN)
    while ready.poll(max(0.0, 1000 * (started + 4 * seconds - time.monotonic()))):
        part = os.read(reader, 1 << 16)
        told += part
        if not part:
            break
    else:
        os.kill(pid, signal.SIGKILL)
    os.close(reader)
    _, ended, used = os.wait4(pid, 0)
    assert not (status := os.waitstatus_to_exitcode(ended)), f"{kind}: crashed with status {status}"
    head, _, line = told.decode().partition("\n")
    grown, of_others = head.split()
    took = used.ru_utime + used.ru_stime + float(of_others)  # of a core: others may be busy
    assert took <= seconds, f"{kind}: {took:.1f} s instead of {seconds:.1f} for {size} bytes"
    most = FREE_BYTES + BYTES_PER_BYTE * size + BYTES_PER_PIXEL * pixels
    assert int(grown) <= most, (
        f"{kind}: {int(grown) >> 20} MiB instead of {most >> 20} for {size} bytes ({line})"
    )
    check_line(line)
    tried[kind]["refused" if line else "read"] += 1
    return line


def one_thread():
    """Makes a forked process compute in one thread: it would wait for threads of its parent."""
    threadpoolctl.threadpool_limits(1)


def check_line(line):
    """An error has one short printable line and no traceback."""
    assert not line or line.isprintable(), line
    assert len(line) <= LONGEST_LINE, line
    assert "Traceback" not in line, line


def _become_child(writer, read):
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    gc.freeze()  # a collection would copy every page that the parent shares
    _reset_peak()
    before = _memory("VmRSS")
    try:
        read()
        line = ""
    except RunError as error:
        line = str(error)
    except BaseException:
        line = traceback.format_exc()
    grown = max(0, _memory("VmHWM") - before)
    seconds = 0.0
    for child in _children():
        grown += _memory("VmHWM", child)
        seconds += _cpu_seconds(child)
    os.write(writer, f"{grown} {seconds}\n{line}".encode()[: 1 << 15])
    os._exit(0)


def _reset_peak():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # VmHWM begins anew


def _memory(field, process="self"):
    """Bytes of a process; 0 of one that has ended."""
    with open(f"/proc/{process}/status") as file:
        found = re.search(rf"{field}:\s+(\d+) kB", file.read())
    return int(found[1]) << 10 if found else 0


def _children():
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return file.read().split()


def _cpu_seconds(process):
    with open(f"/proc/{process}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


_EXTREMES = (
    0,
    1,
    -1,
    0x7F,
    0x80,
    1 << 15,
    0xFFFF,
    1 << 31,
    0x7FFFFFFF,
    0xFFFFFFFF,
    1 << 40,
    (1 << 63) - 1,
)


@st.composite
def damaged(draw, data):
    """Bytes with one to four edits: a byte, a number at an extreme, a piece that is removed,
    doubled or moved.
    """
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, max(0, len(data) - 1)))
        length = draw(st.integers(1, 64))
        match draw(st.sampled_from(["byte", "number", "remove", "double", "move", "end"])):
            case "byte":
                data = data[:place] + bytes([draw(st.integers(0, 255))]) + data[place + 1 :]
            case "number":
                form = draw(st.sampled_from(["<B", "<H", "<I", "<Q", ">H", ">I", ">Q"]))
                width = struct.calcsize(form)
                number = draw(st.sampled_from(_EXTREMES)) % (1 << 8 * width)
                data = data[:place] + struct.pack(form, number) + data[place + width :]
            case "remove":
                data = data[:place] + data[place + length :]
            case "double":
                data = data[:place] + data[place : place + length] * 2 + data[place + length :]
            case "move":
                other = draw(st.integers(0, len(data)))
                data = data[:other] + data[place : place + length] + data[other:]
            case "end":
                data = data[:place]
    return data
