"""A program that calls a run: streams, errors, interrupts. Short scripts stand in for the run;
tests/training/test_api.py has real ones.
"""

import io
import os
import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from conftest import ROOT

from errors import InputError, RunError
from launch import caller

# It leaves its folder as a run does.
ANSWER = (
    "import os, signal, sys, time; open(os.environ['PADDLE_VIT_ANSWER'], 'w').write('/the/run')\n"
)


@pytest.fixture(autouse=True)
def interruptible():
    """A shell's background processes ignore interrupts, and these tests may run in one."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def call(script, quiet=False):
    return caller.call([sys.executable, "-c", ANSWER + textwrap.dedent(script)], quiet)


def test_it_returns_the_folder_and_shows_both_streams(capsys):
    assert str(call("print('one\\ntwo'); print('a warning', file=sys.stderr)")) == "/the/run"
    assert capsys.readouterr() == ("one\ntwo\n", "a warning\n")


def test_quiet_hides_what_is_logged_and_no_warning(capsys):
    call("print('one'); print('a warning', file=sys.stderr)", quiet=True)
    assert capsys.readouterr() == ("", "a warning\n")


def test_letters_and_ends_of_lines_stay_what_they_are(capsys):
    """A letter that is written in two parts, a carriage return, a last line without an end."""
    call("""
        out = sys.stdout.buffer
        for part in ("花".encode()[:1], "花".encode()[1:] + b"\\r\\n", b"\\xff", b"end"):
            out.write(part)
            out.flush()
            time.sleep(0.05)
    """)
    assert capsys.readouterr().out == "花\r\n\ufffdend"


def test_lines_are_shown_while_the_run_lasts(monkeypatch):
    seen = []
    monkeypatch.setattr(caller, "_write", lambda stream, line: seen.append((time.time(), line)))
    call("print('first', time.time(), flush=True); time.sleep(0.6); print('second')")
    times = {line.split()[0]: moment for moment, line in seen if line}
    assert times["second"] - times["first"] > 0.5


def test_much_output_on_both_streams_blocks_nothing(capsys):
    call("""
        for number in range(4000):
            print(f"{number} " + 80 * "o")
            print(f"{number} " + 80 * "e", file=sys.stderr)
    """)
    out, err = capsys.readouterr()
    assert [int(line.split()[0]) for line in out.splitlines()] == list(range(4000))
    assert [int(line.split()[0]) for line in err.splitlines()] == list(range(4000))


@pytest.mark.parametrize(
    ("status", "printed", "raised", "message", "shown"),
    [
        (2, "error: found 1; expected 2", InputError, "found 1; expected 2", ""),
        (1, "rank 1: error: the disk is full", RunError, "rank 1: the disk is full", ""),
        (2, "error: a: error: b", InputError, "a: error: b", ""),
        (1, "Traceback:\\nValueError: 3", RunError, "ValueError: 3", "Traceback:\nValueError: 3\n"),
        (2, "error: one\\nerror: two", InputError, "two", "error: one\n"),
        (1, "error: one\\nnot the last", RunError, "not the last", "error: one\nnot the last\n"),
        (3, "", RunError, "the run ended with status 3", ""),
        (143, "stopped by SIGTERM", RunError, "stopped by SIGTERM", "stopped by SIGTERM\n"),
        (130, "stopped by SIGINT", KeyboardInterrupt, "stopped by SIGINT", "stopped by SIGINT\n"),
    ],
)
def test_a_failure_is_an_exception_with_the_runs_line(
    status, printed, raised, message, shown, capsys
):
    script = f"sys.stderr.write('{printed}\\n' if '{printed}' else '')\nsys.exit({status})"
    with pytest.raises(raised) as caught:
        call(script)
    assert type(caught.value) is raised
    assert str(caught.value) == message
    assert capsys.readouterr() == ("", shown)


def test_a_run_that_is_killed_says_so():
    with pytest.raises(RunError, match=r"^the run was killed by SIGKILL \(out of memory\?\)$"):
        call("os.kill(os.getpid(), signal.SIGKILL)")


def test_a_program_that_cannot_be_started_is_an_input_error():
    with pytest.raises(InputError, match=r"^/none/python can't be started \(No such file"):
        caller.call(["/none/python"], quiet=True)


def test_streams_that_cannot_take_a_line_lose_it_alone(monkeypatch):
    plain = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", plain)
    assert str(call("sys.stdout.buffer.write('花\\n'.encode())")) == "/the/run"
    assert plain.buffer.getvalue() == b"\\u82b1\n"
    closed = io.StringIO()
    closed.close()
    for stream in (closed, None):
        monkeypatch.setattr(sys, "stdout", stream)
        assert str(call("print('lost')")) == "/the/run"


def test_a_process_that_outlives_the_run_holds_nothing_up():
    before = time.monotonic()
    call("import subprocess; subprocess.Popen(['sleep', '3'])")
    assert time.monotonic() - before < 2.5


def interrupt_at(monkeypatch, *lines):
    """Has this process interrupted once each of these lines is shown."""
    left = list(lines)
    write = caller._write

    def write_and_interrupt(stream, line):
        write(stream, line)
        if left and line == f"{left[0]}\n":
            del left[0]
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(caller, "_write", write_and_interrupt)


# It prints how many signals it got, as a run that saves its state.
SAVES = """
    count = 0
    def handle(number, _):
        global count
        count += 1
        print("asked", flush=True)
    signal.signal(signal.SIGINT, handle)
    print("ready", flush=True)
    until = time.monotonic() + 30
    while count < {stops} and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(0.3)
    print(f"saved after {{count}}", file=sys.stderr)
    sys.exit(130)
"""


@pytest.mark.parametrize("stops", [1, 2])
def test_an_interrupt_asks_the_run_to_stop_and_waits_for_it(stops, capsys, monkeypatch):
    """Each interrupt is passed on once; what the run says before its end is shown."""
    interrupt_at(monkeypatch, *["ready", "asked"][:stops])
    with pytest.raises(KeyboardInterrupt, match=f"^saved after {stops}$"):
        call(SAVES.format(stops=stops))
    assert capsys.readouterr() == ("ready\n" + stops * "asked\n", f"saved after {stops}\n")


def test_an_interrupt_counts_though_the_run_comes_to_its_end(monkeypatch):
    interrupt_at(monkeypatch, "ready")
    with pytest.raises(KeyboardInterrupt):
        call("signal.signal(signal.SIGINT, signal.SIG_IGN); print('ready', flush=True)")


def test_another_exception_in_the_caller_stops_the_run(monkeypatch, tmp_path):
    def fail(stream, line):
        if line:
            raise SystemExit(7)

    monkeypatch.setattr(caller, "_write", fail)
    with pytest.raises(SystemExit):
        call(f"""
            def handle(number, _):
                open({str(tmp_path / "stopped")!r}, "w").write("saved")
                sys.exit(143)
            signal.signal(signal.SIGTERM, handle)
            print("line", flush=True)
            time.sleep(30)
        """)
    assert (tmp_path / "stopped").read_text() == "saved"


def test_the_run_has_no_terminal_and_a_session_of_its_own(capsys):
    call("print(sys.stdin.read() == '', os.getsid(0) == os.getpid())")
    assert capsys.readouterr().out == "True True\n"


def test_a_thread_that_paddles_import_chose_is_not_the_users_wish(monkeypatch):
    """Here Paddle is imported, and the variable wasn't set when this process started."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")
    at_start = (ROOT / "pyproject.toml").read_bytes()
    monkeypatch.setattr(caller.Path, "read_bytes", lambda path: at_start)
    assert {"OMP_NUM_THREADS", "PYTHONIOENCODING"} & caller._environment().keys() == set()
    monkeypatch.setattr(caller.Path, "read_bytes", lambda path: b"A=1\0OMP_NUM_THREADS=1\0")
    assert caller._environment()["OMP_NUM_THREADS"] == "1"
    monkeypatch.setattr(caller.Path, "read_bytes", lambda path: b"A=1\0")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert caller._environment()["OMP_NUM_THREADS"] == "3"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delitem(sys.modules, "paddle")
    assert caller._environment()["OMP_NUM_THREADS"] == "1"


# A run whose caller has gone before it asked Linux to be told.
@pytest.mark.parametrize(("parent", "status"), [("itself", 0), ("another", 143)])
def test_a_run_whose_caller_has_ended_does_not_begin(parent, status):
    number = os.getpid() if parent == "itself" else 1 << 22
    script = "from launch import caller; caller.end_with_caller()"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=os.environ | {"PADDLE_VIT_CALLER": str(number)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == status, done.stderr
    assert re.fullmatch(r"(stopped by SIGTERM\n)?", done.stderr)


def test_without_a_caller_nothing_is_asked_or_answered(monkeypatch, tmp_path):
    monkeypatch.delenv("PADDLE_VIT_CALLER", raising=False)
    monkeypatch.delenv("PADDLE_VIT_ANSWER", raising=False)
    caller.end_with_caller()
    caller.answer(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_answer_is_the_absolute_path_of_any_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PADDLE_VIT_ANSWER", str(tmp_path / "answer"))
    for name in ("run", "a b\n花", os.fsdecode(b"\xff")):
        caller.answer(caller.Path(name))
        found = os.fsdecode((tmp_path / "answer").read_bytes())
        assert found == f"{tmp_path}/{name}"
