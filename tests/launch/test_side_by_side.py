"""Commands side by side: no more at a time than places, signals passed on, nothing left behind."""

import os
import signal
import subprocess
import sys
import time

import pytest
from support.programs import ROOT, assert_none_left, wait_for

from launch import devices, side_by_side, signals
from launch.side_by_side import Command, environments, run


@pytest.fixture(autouse=True)
def _handlers_as_before():
    before = {number: signal.getsignal(number) for number in signals.SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    side_by_side._received.clear()


def shell(folder, name, text):
    return Command(name, ["sh", "-c", text], folder / f"{name}.txt")


def test_each_place_has_one_command_at_a_time(tmp_path):
    log = tmp_path / "log"
    ended = []
    both = f"grep -q '+ 1' {log} && grep -q '+ 2' {log}"  # the first two wait for each other
    wait = f"for _ in $(seq 200); do {both} && break; sleep 0.05; done"
    text = f"echo + $PLACE >> {log}; {wait}; echo - $PLACE >> {log}; echo told; exit $((PLACE - 1))"
    commands = [shell(tmp_path, str(number), text) for number in range(6)]
    assert run(commands, [{"PLACE": "1"}, {"PLACE": "2"}], lambda *how: ended.append(how)) == 0
    taken = set()
    most = 0
    for sign, place in map(str.split, log.read_text().splitlines()):
        assert (place in taken) == (sign == "-")
        taken ^= {place}
        most = max(most, len(taken))
    assert most == 2
    assert sorted(ended) == sorted((str(number), dict(ended)[str(number)]) for number in range(6))
    assert sorted({status for _, status in ended}) == [0, 1]
    assert (tmp_path / "5.txt").read_text() == "told\n"


def test_a_signal_is_passed_on_once_and_nothing_starts_after_it(tmp_path):
    text = "trap 'echo asked; exit 143' TERM; trap 'echo save' USR1; while :; do sleep 0.05; done"
    commands = [
        shell(tmp_path, "a", text),
        shell(tmp_path, "b", "sleep 0.3"),
        shell(tmp_path, "c", "echo c"),
    ]
    ended = []

    def end(name, status):
        ended.append((name, status))
        if name == "b":
            for number in (signal.SIGUSR1, signal.SIGTERM):
                os.kill(os.getpid(), number)

    assert run(commands, [{}, {}], end) == signal.SIGTERM
    assert ended == [("b", 0), ("a", 143)]
    assert (tmp_path / "a.txt").read_text() == "save\nasked\n"
    assert not (tmp_path / "c.txt").exists()


def test_a_killed_tools_commands_are_asked_to_stop(tmp_path):
    command = [
        "sh",
        "-c",
        f"trap 'sleep 0.3; echo saved >> {tmp_path}/log; exit' TERM; echo $$; while :; do sleep 0.05; done",
    ]
    code = (
        "from pathlib import Path; from launch.side_by_side import *;"
        f"run([Command('a', {command!r}, Path({str(tmp_path / 'printed')!r}))], [{{}}], print)"
    )
    tool = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    printed = tmp_path / "printed"
    assert wait_for(lambda: printed.exists() and printed.read_text().endswith("\n"), tool, 20)
    tool.kill()
    tool.wait()
    assert_none_left([int(printed.read_text())])
    assert (tmp_path / "log").read_text() == "saved\n"


def test_devices_are_shared_out(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(side_by_side, "num_cores", lambda: 8)
    monkeypatch.setattr(side_by_side, "num_gpus_of_paddle", lambda: 0)
    assert environments(1, None) == [{"OMP_NUM_THREADS": "1"}] * 8
    assert environments(2, None) == [{"OMP_NUM_THREADS": "1"}] * 4
    assert environments(1, 2) == [{"OMP_NUM_THREADS": "4"}] * 2
    assert environments(16, None) == [{"OMP_NUM_THREADS": "1"}]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert environments(1, 2) == [{"OMP_NUM_THREADS": "3"}] * 2
    monkeypatch.setattr(devices, "check_visible", lambda: None)
    monkeypatch.setattr(side_by_side, "num_gpus_of_paddle", lambda: 4)
    monkeypatch.setattr(devices, "visible_names", lambda: ["3", "5", "6", "7"])
    assert environments(2, None) == [
        {"CUDA_VISIBLE_DEVICES": "3,5"},
        {"CUDA_VISIBLE_DEVICES": "6,7"},
    ]
    assert environments(1, 3) == [{"CUDA_VISIBLE_DEVICES": number} for number in "356"]
    monkeypatch.setattr(devices, "visible_names", lambda: None)
    assert environments(3, None) == [{"CUDA_VISIBLE_DEVICES": "0,1,2"}]
    assert environments(5, None) == []
    assert devices.num_cores() >= 1


def test_a_command_that_ends_at_once_is_noticed_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(side_by_side, "_CHECK", 60.0)
    commands = [Command(f"{place}", ["true"], tmp_path / f"{place}.txt") for place in range(3)]
    ended = []
    started = time.monotonic()
    assert run(commands, [{}], lambda *told: ended.append(told)) == 0
    assert time.monotonic() - started < 30
    assert ended == [("0", 0), ("1", 0), ("2", 0)]
