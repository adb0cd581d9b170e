"""Reads hostile files in a forked process, whose memory and time are measured, and damages files.

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
# --hypothesis-profile chooses another.
settings.load_profile("suite")
# For each kind of file, how many were "read" and "refused".
tried = collections.defaultdict(collections.Counter)


def a_share(part):
    """Hypothesis' settings for one of ``part`` tests that share the examples of the profile."""
    return settings(max_examples=max(1, settings.default.max_examples // part))


def attempt(kind, size, read, lines=0, pixels=0):
    """Calls ``read()`` in a forked process, which has to succeed or to end with one line.

    Returns the line of the error, or "" if there was none.

    Args:
        kind: the kind of file, for the table (``tried``).
        size: the number of bytes that ``read`` reads.
        lines: the number of lines of a list or a table.
        pixels: the number of pixels that an image may have.

    Raises:
        AssertionError: it crashed, hung, printed a traceback or a malformed line, or took too much
            memory or time.
    """
    seconds = FREE_SECONDS + size / BYTES_PER_SECOND + SECONDS_PER_LINE * lines
    reader, writer = os.pipe()
    started = time.monotonic()
    pid = os.fork()
    if not pid:
        os.close(reader)
        _become_child(writer, read)
    os.close(writer)
    report = b""
    # ``select.select`` takes no descriptor from 1024 on.
    ready = select.poll()
    ready.register(reader, select.POLLIN)
    while ready.poll(max(0.0, 1000 * (started + 4 * seconds - time.monotonic()))):
        part = os.read(reader, 1 << 16)
        report += part
        if not part:
            break
    else:
        os.kill(pid, signal.SIGKILL)
    os.close(reader)
    _, ended, used = os.wait4(pid, 0)
    assert not (status := os.waitstatus_to_exitcode(ended)), f"{kind}: crashed with status {status}"
    head, _, line = report.decode().partition("\n")
    grown, children_seconds = head.split()
    # CPU time, because other programs may be busy.
    took = used.ru_utime + used.ru_stime + float(children_seconds)
    assert took <= seconds, f"{kind}: {took:.1f} s instead of {seconds:.1f} for {size} bytes"
    most = FREE_BYTES + BYTES_PER_BYTE * size + BYTES_PER_PIXEL * pixels
    assert int(grown) <= most, (
        f"{kind}: {int(grown) >> 20} MiB instead of {most >> 20} for {size} bytes ({line})"
    )
    check_line(line)
    tried[kind]["refused" if line else "read"] += 1
    return line


def one_thread():
    """Makes a forked process compute in one thread. Otherwise it would wait for its parent's
    threads.
    """
    threadpoolctl.threadpool_limits(1)


def check_line(line):
    """Asserts that an error is one short printable line without a traceback."""
    assert not line or line.isprintable(), line
    assert len(line) <= LONGEST_LINE, line
    assert "Traceback" not in line, line


def _become_child(writer, read):
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # A collection would copy all pages that the parent shares.
    gc.freeze()
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
    # Resets VmHWM.
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def _memory(field, process="self"):
    """Returns the memory of a process in bytes; 0 if it has ended."""
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
    """Returns the bytes with one to four edits: another byte, an extreme number, or a piece that is
    removed, doubled or moved.
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
