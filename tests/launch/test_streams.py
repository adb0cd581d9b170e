"""Standard streams that are closed, broken, full or blocked, and surroundings in which no program
can work.
"""

import fcntl
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from conftest import ROOT
from support.programs import start_in_terminal, wait_for_exit, wait_for_steps

from errors import InputError
from launch import spawned, startup, streams

SINGLE = f"{sys.executable} {ROOT}/main_single_gpu.py"
SMALL = [
    "-cfg=vit_digits",
    "-output=run",
    "-o",
    "MODEL.DEPTH",
    "2",
    "REPORT_FREQ",
    "2",
    "SAVE_MINUTES",
    "none",
]


@pytest.fixture
def pipe():
    """(reader, a stream to write to it, its raw end)"""
    reader, writer = os.pipe()
    stream = streams.lasting(writer, lines=True)
    yield reader, stream, stream.buffer.raw
    os.close(stream.buffer.raw.end)
    for end in (reader, writer):
        fcntl.fcntl(end, fcntl.F_GETFD)  # nobody else closed it
        os.close(end)


def test_a_pipe_that_nobody_reads_holds_up_no_run(pipe, monkeypatch):
    reader, stream, raw = pipe
    monkeypatch.setattr(streams, "_hurried", True)
    monkeypatch.setattr(streams, "WAIT", 0.2)
    lines = [f"{number} {'x' * 90}\n" for number in range(30_000)]
    began = time.monotonic()
    for line in lines:
        stream.write(line)
    assert 0.2 < time.monotonic() - began < 10  # once, not at each line
    assert streams.MOST - 100 < len(raw.kept) <= streams.MOST
    read = b""
    while raw.kept:
        read += os.read(reader, 1 << 20)
        stream.write("more\n")
    read = (read + os.read(reader, 1 << 20)).decode().splitlines(keepends=True)
    read = [line for line in read if line != "more\n"]
    first = next(place for place, line in enumerate(read) if line != lines[place])
    assert first > 600  # what the pipe holds; then the newest, as whole lines
    assert read[first + 1 :] == lines[-(len(read) - first - 1) :]
    assert len(read) - first > 10_000


def test_other_commands_wait_for_their_reader(pipe):
    reader, stream, _ = pipe
    writing = threading.Thread(
        target=lambda: (stream.write("x" * 300_000), stream.flush()), daemon=True
    )
    writing.start()
    time.sleep(0.1)
    assert writing.is_alive()
    read = b""
    while len(read) < 300_000:
        read += os.read(reader, 1 << 20)
    writing.join(10)
    assert read == b"x" * 300_000


def test_a_child_does_not_say_what_its_parent_keeps(pipe, monkeypatch):
    _, _, raw = pipe
    raw.kept += b"kept"
    if not (child := os.fork()):
        os._exit(len(raw.kept))
    assert os.waitpid(child, 0)[1] == 0
    assert raw.kept == b"kept"


@pytest.mark.parametrize(
    "command",
    [
        "{} -h >&-",
        "{} -h <&- >&-",
        "{} -h >/dev/full",
        "{{ {} -h; echo $? >&2; }} | true",
        "{{ {} -explain SEED; echo $? >&2; }} | head -1 | grep -q SEED",
        "LC_ALL=C PYTHONUTF8=0 PYTHONIOENCODING=ascii {} -cfg=数据",
        "{} -h 2>&-",
    ],
)
def test_no_stream_ends_a_program(tmp_path, command):
    done = subprocess.run(
        ["bash", "-c", command.format(SINGLE)], cwd=tmp_path, capture_output=True, timeout=60
    )
    said = done.stderr.decode()
    if "数据" in command:
        assert (done.returncode, said) == (2, "error: no configuration file \\u6570\\u636e\n")
    else:
        assert (done.returncode, said) in [(0, ""), (0, "0\n")]


@pytest.mark.parametrize("mine", [False, True])
def test_what_only_imports_a_module_keeps_its_own_streams(tmp_path, mine):
    """A program that comes by stdin would be started anew without it, where the locale isn't UTF-8;
    a notebook's streams lead to its cells.
    """
    code = "import io, sys; before = sys.stdout; import launch.startup; assert sys.stdout is before; print('came')"
    if mine:  # %run main_single_gpu.py
        code = f"import io, sys; sys.argv = ['{ROOT}/tools/doctor.py']; sys.stdout = sys.stderr = io.StringIO(); {code}"
        code += "; sys.__stdout__.write(sys.stdout.getvalue())"
    environment = os.environ | {
        "LC_ALL": "POSIX",
        "PYTHONUTF8": "0" if not mine else "1",
        "PYTHONCOERCECLOCALE": "0",
    }
    for arguments, given in ((["-c", code], ""), (["-"], code)):
        command = [sys.executable, *arguments]
        done = subprocess.run(
            command,
            input=given,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "came\n", "")


@pytest.mark.parametrize(("unbuffered", "first"), [("1", b"."), ("", b".. end\n")])
def test_python_that_does_not_buffer_hands_everything_on_at_once(unbuffered, first):
    code = f"import sys; sys.argv = ['{ROOT}/tools/doctor.py']; import launch.startup, os, time; print('.', end='')"
    code += "; time.sleep(0.5); print('. end'); assert sys.stdout.name == '<stdout>'"
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, stdout=subprocess.PIPE
    ) as running:
        assert running.stdout
        assert os.read(running.stdout.fileno(), 100) == first
    assert running.returncode == 0


def test_a_file_that_is_opened_is_never_standard_output(tmp_path):
    """With a descriptor closed, the next file would get its number, and with it what a library
    prints.
    """
    code = "import sys; sys.argv = [sys.path[0] + '/tools/doctor.py']; from errors import reporting; import launch.startup"
    code += "; file = open('opened', 'w'); assert file.fileno() > 2; import os; os.write(1, b'lost'); print('lost')"
    command = (
        f'"{sys.executable}" -c "import sys; sys.path.insert(0, \'{ROOT}\'); {code}" <&- >&- 2>&-'
    )
    assert subprocess.run(command, shell=True, cwd=tmp_path, timeout=60).returncode == 0
    assert (tmp_path / "opened").read_text() == ""


@pytest.mark.parametrize(
    ("surroundings", "said"),
    [
        (
            "ulimit -n 24",
            "the limit on open files is 24, expected 64 at least; raise it (ulimit -n)",
        ),
        (
            "ulimit -v 600000",
            "the limit on memory is 585 MB, expected 1200 MB at least, for Paddle alone; raise it (ulimit -v)",
        ),
        ("umask 777", "umask 777 denies you access to your own files; use umask 022"),
        (
            "mkdir gone; cd gone; rmdir ../gone",
            "the current folder no longer exists; change to another one",
        ),
    ],
)
@pytest.mark.parametrize("name", ["main_multi_gpu.py", "tools/make_photographs.py"])
def test_surroundings_in_which_no_program_can_work_are_named(tmp_path, surroundings, said, name):
    command = f"{surroundings}; exec {sys.executable} {ROOT}/{name} -h"
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {said}\n")


def test_every_program_goes_by_lasting_streams():
    found = [*ROOT.glob("main_*.py"), *ROOT.glob("tools/*.py"), *ROOT.glob("examples/*.py")]
    texts = {path.name: path.read_text() for path in found}
    programs = {
        name for name, text in texts.items() if "with reporting():" in text and "__main__" in text
    }
    assert len(programs) > 10
    assert not {
        name
        for name in programs
        if not re.search(r"^(import|from) launch.*\bstartup", texts[name], re.M)
    }


def test_shared_memory_without_room_is_named(monkeypatch):
    full = os.statvfs_result((4096, 4096, 8, 1, 1, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    message = r"^/dev/shm has 4 kB free, but 2 processes need 224 kB; free some space, or mount a larger one \(docker run .*\)$"
    with pytest.raises(InputError, match=message):
        spawned.shared_arrays(None, 2)


def test_what_was_ignored_at_the_start_stays_ignored():
    code = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); from launch import signals, startup;"
    code += "startup.stop_at_once(); signals.record_signals(); signal.raise_signal(signal.SIGHUP);"
    code += "print(signals.received, signal.SIGHUP in signals.SIGNALS, len(signals.STOP_SIGNALS))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("{} False 4\n", "")
    assert set(startup.STOP_SIGNALS) >= {signal.SIGHUP, signal.SIGXCPU}


@pytest.mark.smoke
def test_a_terminal_that_is_stopped_and_then_closed(tmp_path):
    command = [sys.executable, str(ROOT / "main_single_gpu.py"), *SMALL, "TRAIN.NUM_EPOCHS", "100"]
    pid, terminal = start_in_terminal(tmp_path, *command)
    wait_for_steps(tmp_path / "run", 2, terminal, b"epoch 1/100 step 4")
    os.write(terminal, b"\x13")  # Ctrl-S
    wait_for_steps(tmp_path / "run", 60)
    os.close(terminal)
    assert wait_for_exit(pid) == 129
    assert "stopped by SIGHUP after step" in (tmp_path / "run" / "log_0.txt").read_text()
    assert (tmp_path / "run" / "checkpoints" / "last").exists()
