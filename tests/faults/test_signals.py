"""Signals from terminals, launchers and the system, streams that fail in a whole run, and a short
memory.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT
from support.fault_runs import RUN, assert_ends_like, assert_fails, finish
from support.launches import MAIN, torchrun
from support.launches import start as launch
from support.programs import (
    assert_none_left,
    descendants,
    ranks_of,
    start,
    start_in_terminal,
    wait_for,
    wait_for_exit,
    wait_for_first_step,
    wait_for_steps,
)
from support.ranks import free_ports

SCRIPT = ["sh", str(ROOT / "run_train_multi.sh"), "-ngpus=2"]
STOPPED = r"stopped by {} after step \d+, saved in run/checkpoints/\w+; -resume=auto -output=run continues from there\n"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that was left alone."""
    return finish(tmp_path_factory.mktemp("whole"))[0]


def training(folder, *flags):
    """Starts the short run and waits for its first steps; (the process, the pids of all that
    belongs to it).
    """
    process = start(folder, *RUN, *flags)
    pids = wait_for_first_step(process, folder / "run")
    assert pids
    return process, [*pids, process.pid]


# ---------------------------------------------------------------- terminals


@pytest.mark.slow
@pytest.mark.parametrize("how", ["the script", "a shell's job"])
def test_a_terminal_that_is_closed(tmp_path, whole, how):
    command = [*SCRIPT, *RUN]
    if how == "a shell's job":
        command = ["bash", "--norc", "-ic", " ".join(f"'{word}'" for word in command) + "; true"]
    pid, terminal = start_in_terminal(tmp_path, *command)
    wait_for_steps(tmp_path / "run", 1, terminal)
    pids = list(descendants(pid))
    os.close(terminal)
    status = wait_for_exit(pid)
    assert_none_left(pids)
    assert status == (129 if how == "the script" else -signal.SIGHUP)
    assert re.search(
        "stopped by SIGHUP after step .*, saved in", (tmp_path / "run" / "log_0.txt").read_text()
    )
    assert_ends_like(whole, tmp_path)


@pytest.mark.slow
def test_under_nohup_a_run_goes_on(tmp_path, whole):
    pid, terminal = start_in_terminal(tmp_path, "nohup", *SCRIPT, *RUN)
    wait_for_steps(tmp_path / "run", 1, terminal)
    os.close(terminal)
    assert wait_for_exit(pid, 120) == 0
    assert_ends_like(whole, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [10, 45])
def test_a_run_that_is_suspended_by_ctrl_z_goes_on(tmp_path, whole, seconds):
    process, pids = training(tmp_path, "DIST.TIMEOUT", "8")
    os.killpg(process.pid, signal.SIGTSTP)
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGCONT)
    _, errors = process.communicate(timeout=120)
    print(seconds, process.returncode, errors)
    if seconds < 30:  # gloo gives up after 30 s, where a rank waited for another
        assert (process.returncode, errors) == (0, "")
    assert process.returncode in (0, 1)
    assert errors.count("\n") <= 1
    assert_none_left(pids)
    assert_ends_like(whole, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["the main process", "the group", "a rank"])
@pytest.mark.parametrize("name", ["SIGHUP", "SIGXCPU"])
def test_signals_that_save_and_stop(tmp_path, whole, name, to):
    process, pids = training(tmp_path)
    pid = {
        "the main process": process.pid,
        "the group": -process.pid,
        "a rank": ranks_of(process)[0],
    }[to]
    os.kill(pid, getattr(signal, name))
    assert_fails(process, 128 + getattr(signal, name), re.compile(STOPPED.format(name)), pids)
    assert_ends_like(whole, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["the group", "a rank"])
def test_ctrl_backslash_ends_a_run_at_once(tmp_path, whole, to):
    process, pids = training(tmp_path)
    os.kill(-process.pid if to == "the group" else ranks_of(process)[0], signal.SIGQUIT)
    status, line = (
        (-signal.SIGQUIT, "")
        if to == "the group"
        else (1, r"error: rank \d was killed by SIGQUIT at .*\n")
    )
    assert_fails(process, status, re.compile(line), pids)
    assert_ends_like(whole, tmp_path)


# ---------------------------------------------------------------- launchers

LAUNCHER = """
import os, subprocess, sys
ranks = [subprocess.Popen(sys.argv[1:], env=os.environ | {"RANK": rank, "LOCAL_RANK": rank}) for rank in "01"]
sys.exit(max(rank.wait() for rank in ranks))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["torchrun", "paddle"])
def test_ranks_of_a_launcher_that_is_killed_save_and_end(tmp_path, kind):
    given = {
        "WORLD_SIZE": 2,
        "LOCAL_WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_ports(1)[0],
    }
    command = [sys.executable, "-c", LAUNCHER, *MAIN]
    given["TORCHELASTIC_RUN_ID"] = "none"
    if kind == "paddle":
        command = [
            sys.executable,
            "-m",
            "paddle.distributed.launch",
            "--devices=0,1",
            "--log_dir=log",
            MAIN[1],
        ]
        given = {"CUDA_VISIBLE_DEVICES": "0,1"}
    process, _ = launch(tmp_path, *command, *RUN, "TRAIN.NUM_EPOCHS", "100", **given)
    run = tmp_path / "run"
    assert wait_for(lambda: (run / "checkpoints" / "last").exists(), process)
    pids = list(descendants(process.pid))
    process.kill()
    process.wait()
    assert_none_left(pids)
    assert re.search("stopped by SIGTERM after step .*, saved in", (run / "log_0.txt").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_the_watcher_of_a_launched_rank_is_killed(tmp_path, rank):
    port = free_ports(1)[0]
    both = [torchrun(tmp_path, place, port, *RUN, "TRAIN.NUM_EPOCHS", "100") for place in (0, 1)]
    assert wait_for(lambda: (tmp_path / "run" / "checkpoints" / "last").exists(), both[0][0])
    pids = [pid for process, _ in both for pid in descendants(process.pid)]
    both[rank][0].kill()
    assert both[1 - rank][0].wait(60) == 1
    assert_none_left(pids)
    said = "".join(log.read_text() for _, log in both)
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, errors
    assert re.match(
        rf"error: rank {rank} .*was lost \(its machine is down, or its launcher killed it\)",
        errors[0],
    )


# ------------------------------------------------------------ whole streams


@pytest.mark.slow
@pytest.mark.parametrize(
    "streams", ["| head -1", ">&-", "<&- >&- 2>&-", ">/dev/full 2>&1", "| sleep 200"]
)
def test_a_run_goes_on_whatever_becomes_of_its_output(tmp_path, whole, streams):
    command = " ".join(f"'{word}'" for word in [*SCRIPT, *RUN])
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    shell = [
        "bash",
        "-c",
        f"{command} {streams.replace('|', '2>errors |')}; exit ${{PIPESTATUS[0]}}",
    ]
    if "sleep" in streams:
        shell[2] = f"({command} 2>errors; echo $? >status) {streams}"
    given = {
        "env": os.environ | {"PATH": path, "VIRTUAL_ENV": "1"},
        "cwd": tmp_path,
        "start_new_session": True,
    }
    with contextlib.ExitStack() as last:
        process = subprocess.Popen(
            shell, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **given
        )
        last.enter_context(process)  # which waits, and closes its pipes, after the following:
        last.callback(lambda: process.poll() is None and os.killpg(process.pid, signal.SIGKILL))
        if "sleep" in streams:
            assert wait_for(
                lambda: (tmp_path / "status").exists() and (tmp_path / "status").read_text(),
                process,
            )
            assert (tmp_path / "status").read_text() == "0\n"
        else:
            printed, errors = process.communicate(timeout=120)
            assert (process.returncode, errors) == (0, "")
            assert printed.count("\n") == ("head" in streams)
    assert not (tmp_path / "errors").exists() or not (tmp_path / "errors").read_text()
    assert "summary: acc1" in (tmp_path / "run" / "log.txt").read_text()
    assert_ends_like(whole, tmp_path)


# ------------------------------------------------------------------- memory


@pytest.fixture
def memory_group():
    """A control group that limits memory: its folder."""
    group = Path("/sys/fs/cgroup/memory") / f"vit{os.getpid()}"
    if not group.parent.exists():
        group = Path("/sys/fs/cgroup") / group.name
    try:
        group.mkdir()
    except OSError:
        pytest.skip("a control group needs root")
    yield group
    with contextlib.suppress(OSError):
        group.rmdir()


@pytest.mark.slow
def test_where_memory_is_short_a_rank_is_named(tmp_path, memory_group, whole):
    limit, used = (memory_group / name for name in ("memory.max", "memory.current"))
    if not limit.exists():
        limit, used = (
            memory_group / name for name in ("memory.limit_in_bytes", "memory.usage_in_bytes")
        )

    def limit_to_what_is_used():
        with contextlib.suppress(OSError):  # it has grown meanwhile
            return limit.write_text(used.read_text())

    # All that the run takes counts, from its first page on: whom the kernel kills depends on each
    # one's share of it.
    (memory_group / "cgroup.procs").write_text(str(os.getpid()))
    try:
        process, pids = training(tmp_path)
    finally:
        (memory_group.parent / "cgroup.procs").write_text(str(os.getpid()))
    (rank,) = ranks_of(process)[:1]
    scores = {
        pid: int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in (process.pid, rank)
    }
    assert scores[rank] == 500 > scores[process.pid]
    assert wait_for(limit_to_what_is_used, process)
    line = r"error: rank \d was killed by SIGKILL \(out of memory\?\) at step \d+\n"
    worker = r"rank \d: error: loader worker \d+ was killed by SIGKILL; out of memory\?\n"
    assert_fails(process, 1, re.compile(f"{line}|{worker}"), pids)
    assert_ends_like(whole, tmp_path)
