"""Runs that are stopped or killed in their first seconds: the status, the one line, and nothing is
left.

python -m pytest -m slow tests/faults/test_start.py -s    every start, stopped at many moments, a line for each
"""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import ROOT
from support.launches import MAIN, start, torchrun
from support.programs import descendants, ranks_of
from support.ranks import free_ports

# A model that takes a while to build: until then nothing is there to be saved.
FLAGS = ["-cfg=vit_digits", "-dataset=digits", "-output=run", "-o", "MODEL.DEPTH", "100"]
SINGLE = (sys.executable, str(ROOT / "main_single_gpu.py"), *FLAGS)
SPAWNED = (*MAIN, "-ngpus=2", *FLAGS)
SCRIPT = ("sh", str(ROOT / "run_train_multi.sh"), "-ngpus=2", *FLAGS)
TERM = signal.SIGTERM
INT = signal.SIGINT
KILL = signal.SIGKILL


def read(pid, name):
    """A file of /proc, while there is one."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except OSError:
        return ""


def listens(process, _):
    found = re.search(r"SigCgt:\s*(\w+)", read(process.pid, "status"))
    return found and int(found[1], 16) >> TERM - 1 & 1


def imports_paddle(process, _):
    return "libpaddle" in read(process.pid, "maps")


def starts_ranks(process, _):
    return len(ranks_of(process)) == 2


def ranks_import_paddle(process, _):
    return any("libpaddle" in read(pid, "maps") for pid in ranks_of(process))


def builds(_, log):
    return " on cpu" in log.read_text()


def stop(started, moment, number, victims=lambda process: [process.pid]):
    """Sends ``number`` at a moment to ``victims(process)``; (exit status, what was printed), once
    nothing is left.
    """
    process, log = started
    deadline = time.monotonic() + 120
    while not moment(process, log):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, "the moment never came"
        time.sleep(0.002)
    sent = time.monotonic()
    for pid in victims(process):
        os.kill(pid, number)
    status = process.wait(90)
    while left(process.pid):
        assert time.monotonic() < sent + 90, "processes are left"
        time.sleep(0.05)
    return status, log.read_text()


def left(session):
    """The command lines of a session's processes."""
    command = ["ps", "-eww", "-o", "sid=,stat=,args="]
    rows = [
        line.split(None, 2)
        for line in subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    ]
    return [row[-1] for row in rows if row[0] == str(session) and not row[1].startswith("Z")]


def the_group(process):
    return [-process.pid]


def last_rank(process):
    return ranks_of(process)[-1:]


STOPS = [
    (SINGLE, listens, TERM, None),
    (SINGLE, imports_paddle, INT, None),
    (SINGLE, builds, TERM, None),
    (SPAWNED, listens, INT, None),
    (SCRIPT, imports_paddle, TERM, None),
    (SPAWNED, starts_ranks, TERM, None),
    (SPAWNED, starts_ranks, TERM, last_rank),
    (SPAWNED, ranks_import_paddle, INT, the_group),
    (SPAWNED, builds, TERM, None),
    (SPAWNED, builds, TERM, last_rank),
]


@pytest.mark.long
def test_a_run_that_is_stopped_before_its_first_step_says_so(tmp_path):
    def stopped(case):
        number, (command, moment, signalled, victims) = case
        folder = tmp_path / str(number)
        folder.mkdir()
        given = (victims,) if victims else ()
        return folder, stop(start(folder, *command), moment, signalled, *given)

    with ThreadPoolExecutor(2) as pool:
        for case, (folder, (status, printed)) in zip(
            STOPS, pool.map(stopped, enumerate(STOPS)), strict=True
        ):
            number = case[2]
            # but the log's
            told = [line for line in printed.splitlines() if not re.match(r"\d{4} \d\d:|  ", line)]
            said = f"stopped by {number.name} before the first step; there is nothing to save"
            assert (status, told) == (128 + number, [said]), case
            assert not (folder / "run" / "checkpoints").exists()


def test_launched_ranks_that_are_stopped_before_their_first_step_say_so_once(tmp_path):
    """On the console that they share; also one that waits for the other, which starts late."""
    said = "stopped by SIGTERM before the first step; there is nothing to save\n"
    port = free_ports(1)[0]
    deadline = time.monotonic() + 120
    first = torchrun(tmp_path, 0, port, *FLAGS)

    def stopped(*ranks):
        for process, _ in ranks:
            process.send_signal(TERM)
        assert [process.wait(90) for process, _ in ranks] == [143] * len(ranks)
        assert [left(process.pid) for process, _ in ranks] == [[]] * len(ranks)
        printed = "".join(log.read_text() for _, log in ranks)
        assert (printed.count(said), "Traceback" in printed) == (1, False)

    def wait_for(condition):
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    wait_for(lambda: "rank 0 waits at" in first[1].read_text())
    stopped(first)
    ranks = [torchrun(tmp_path, rank, port, *FLAGS) for rank in (0, 1)]
    wait_for(lambda: all(list(descendants(process.pid)) for process, _ in ranks))
    stopped(*ranks)


def test_a_request_to_save_before_there_is_something_is_ignored(tmp_path):
    process, _ = started = start(tmp_path, *SINGLE)
    while not listens(*started):
        time.sleep(0.002)
    process.send_signal(signal.SIGUSR1)
    status, printed = stop(started, builds, TERM)
    assert status == 143
    assert printed.endswith("stopped by SIGTERM before the first step; there is nothing to save\n")


def test_a_rank_that_is_killed_as_it_starts_ends_the_run(tmp_path):
    """Its arguments, of more than a pipe holds, aren't waited for."""
    status, printed = stop(start(tmp_path, *SPAWNED), starts_ranks, KILL, last_rank)
    assert status == 1
    assert re.fullmatch(
        r"error: rank \d was killed by SIGKILL \(out of memory\?\) at step 0\n", printed
    )


@pytest.mark.slow
def test_ranks_do_not_outlive_a_parent_that_is_killed_as_they_start(tmp_path):
    assert stop(start(tmp_path, *SPAWNED), starts_ranks, KILL) == (-KILL, "")


LACKING = sorted([*ROOT.glob("main_*.py"), *ROOT.glob("examples/*.py"), *ROOT.glob("tools/*.py")])


def test_without_the_environment_every_program_says_how_to_get_it():
    """-S: without what is installed beside Python."""

    def printed(words):
        done = subprocess.run(
            [sys.executable, "-S", *words], cwd=ROOT, capture_output=True, text=True
        )
        return done.returncode, done.stdout, done.stderr

    # doctor.py has a line of its own.
    programs = [str(path.relative_to(ROOT)) for path in LACKING if path.name != "doctor.py"]
    with ThreadPoolExecutor(2) as pool:
        found = dict(
            zip(programs, pool.map(printed, ([name, "-h"] for name in programs)), strict=True)
        )
    found = {
        name: said for name, said in found.items() if said[0] or not said[1].startswith("usage: ")
    }
    assert {"main_multi_gpu.py", "main_single_gpu.py", "tools/make_shards.py"} < set(found)
    # which imports what it needs later
    found["tools/list_models.py"] = printed(["tools/list_models.py"])
    for name, said in found.items():
        script = ", or sh run_train_multi.sh ..." if name == "main_multi_gpu.py" else ""
        how = f"in {ROOT} run make install once, then .venv/bin/python {name} ...{script}"
        lacks = rf"error: {re.escape(sys.executable)} lacks \w+, \w+, \w+ and \d+ more packages; {re.escape(how)}\n"
        assert said[:2] == (2, ""), name
        assert re.fullmatch(lacks, said[2]), name


@pytest.mark.slow
def test_at_any_moment(tmp_path, capsys):
    """What Python does before a program's first line can't be handled: there the signal itself ends
    the process.
    """
    rng = random.Random(1)
    rows = []
    flags = [*FLAGS[:-2], "REPORT_FREQ", "10"]
    cases = [((sys.executable, str(ROOT / "main_single_gpu.py"), *flags), None)]
    cases += [((*MAIN, "-ngpus=2", *flags), victims) for victims in (None, the_group, last_rank)]
    for count, (command, victims) in enumerate(case for case in cases for _ in range(15)):
        folder = tmp_path / str(count)
        number = (TERM, INT)[count % 2]
        delay = rng.uniform(0.1, 6)
        folder.mkdir()
        began = time.monotonic()
        started = start(folder, *command)

        def late(process, _, began=began, delay=delay, victims=victims):
            return time.monotonic() - began > delay and (
                victims is not last_rank or last_rank(process)
            )

        with contextlib.ExitStack() as given:
            given.callback(lambda process=started[0]: process.poll() is None and process.kill())
            status, printed = stop(started, late, number, *([victims] if victims else []))
        said = [line for line in printed.splitlines() if line.startswith("stopped by ")]
        rows.append(f"{Path(command[1]).name} {number.name} after {delay:.2f} s: {status} {said}")
        with capsys.disabled():
            print("\n" + rows[-1], end="")
        assert (status, len(said)) in ((128 + number, 1), (-number, 0)), printed
        assert status > 0 or delay < 0.5
        assert "Traceback" not in printed
