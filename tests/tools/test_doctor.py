"""tools/doctor.py: all well here, and each thing that it finds wrong, made wrong."""

import argparse
import multiprocessing
import os
import queue
import re
import resource
import signal
import socket
import subprocess
import time
from unittest import mock

import pytest
import warm
from conftest import ROOT
from support.ranks import free_ports

import ops
from errors import InputError
from tools import doctor
from tools.checks import machine, network

ABSENT = "/no/such/folder"
ELSEWHERE = "198.51.100.7"  # of a network for documentation (RFC 5737)
COMPILED = ops.library().is_file()


def start(shm, *flags, **environment):
    """Starts the doctor, who takes ``shm`` for the folder of shared memory: a container's may be
    small.
    """
    words = [warm.python(), str(ROOT / "tools" / "doctor.py"), f"-shm={shm}", *flags]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(words, env=os.environ | environment, **streams)


def end(process):
    """(exit status, {name: (whether it is ok, what is told)}, what else is told); but for the
    compiled operators, which not every machine has.
    """
    printed, errors = process.communicate(timeout=120)
    lines = re.findall(r"^(ok|todo) +(\S+) +(.*)$", printed, re.MULTILINE)
    found = {name: (word == "ok", text) for word, name, text in lines if name != "operators"}
    return (
        process.returncode,
        found,
        re.sub(r"^(ok|todo) .*\n", "", printed, flags=re.MULTILINE) + errors,
    )


@pytest.mark.smoke
def test_all_is_well_here(tmp_path):
    (free,) = free_ports(1)
    status, found, last = end(start(tmp_path, "-ngpus=2", f"-master=127.0.0.1:{free}"))
    assert list(found) == [
        "python", "paddle", "libraries", "devices", "cuda", "interfaces", "host", "port", "secret", "store", "shm",
        "memory", "files", "clock", "loader", "all-reduce",
    ]  # fmt: skip
    assert {name: text for name, (ok, text) in found.items() if not ok} == {}
    assert (status, last.splitlines()[0]) == ((0, "all is well") if COMPILED else (1, "1 to do"))
    assert re.fullmatch(
        r"88 MB between 2 ranks over GLOO: [\d.]+ ms, median of 5 \([\d.]+ GB/s\)",
        found["all-reduce"][1],
    )
    assert re.fullmatch(r"digits, 8 pixels: \d+ images/s per worker", found["loader"][1])
    assert found["port"][1] == f"127.0.0.1:{free} is free on this machine"


def test_ranks_that_dont_answer_are_named_and_ended():
    context = multiprocessing.get_context("fork")
    for ends, first, joined, expected in [
        ([os._exit, 3], 4, False, "rank 4 ended with status 3"),
        ([signal.raise_signal, signal.SIGKILL], 0, True, "rank 0 was killed by SIGKILL"),
        ([time.sleep, 60], 0, False, f"no answer in 0.3 s: rank 0 didn't join; {doctor.HANG}"),
        (
            [time.sleep, 60],
            2,
            True,
            f"no answer in 0.3 s: rank 2 joined, but didn't finish all-reducing; {doctor.HANG}",
        ),
    ]:
        process = context.Process(target=ends[0], args=ends[1:], daemon=True)
        answers = queue.Queue()
        if joined:
            answers.put((first, "joined"))
        process.start()
        timeout = 0.3 if "0.3" in expected else 30
        assert doctor.all_reduce([process], answers, first, timeout) == ((False, expected), [])
        assert not process.is_alive()


def test_an_all_reduce_is_judged():
    hosts = [("a", [], 1000.0), ("b", [], 1004.0)]
    found = "88 MB between 2 ranks over NCCL: 60.0 ms, median of 5 (1.47 GB/s)"
    assert doctor.judge_all_reduce(2, "NCCL", 0.06, True, hosts) == (True, found)
    assert doctor.judge_all_reduce(2, "NCCL", 0.06, False, hosts) == (
        False,
        f"{found}, but the sums are wrong; check the memory and network hardware",
    )
    ok, text = doctor.judge_all_reduce(2, "NCCL", 0.9, True, hosts)
    assert (
        ok,
        text.endswith(
            ": 900.0 ms, median of 5 (0.098 GB/s): less than 0.1 GB/s; choose a faster interface"
        ),
    ) == (False, True)
    ok, text = doctor.judge_all_reduce(2, "NCCL", 0.06, True, [*hosts, ("c", [], 990.0)])
    assert (ok, text) == (
        False,
        f"{found}; the clocks of the hosts differ by 14 s: set them by NTP",
    )


def test_paddle_isnt_imported_where_packages_are_wrong():
    arguments = argparse.Namespace()  # what the other checks would ask for
    with mock.patch.object(
        machine, "installed_versions", return_value={"paddlepaddle": "3.3.1", "numpy": "2.2.6"}
    ):
        assert list(machine.checks(arguments, several=False)) == [
            ("python", machine.python()),
            ("paddle", (True, "paddlepaddle 3.3.1")),
            ("libraries", (False, "protobuf, simplejpeg not installed; make install")),
        ]


@pytest.mark.slow
def test_what_is_to_do_here_is_told_once_and_gives_status_1():
    with socket.create_server(("127.0.0.1", 0)) as server:
        master = f"127.0.0.1:{server.getsockname()[1]}"
        process = start(
            ABSENT, f"-master={master}", "-dataset=imagenet2012", f"-data_path={ABSENT}"
        )
        status, found, last = end(process)
    assert [name for name, (ok, _) in found.items() if not ok] == ["port", "shm", "loader"]
    assert ABSENT in found["loader"][1]
    assert (status, last.splitlines()[0]) == (1, f"{3 + (not COMPILED)} to do")


@pytest.mark.slow
def test_ranks_that_cant_bind_are_heard(tmp_path):
    status, found, _ = end(start(tmp_path, "-ngpus=2", "-timeout=30", GLOO_SOCKET_IFNAME="eth97"))
    assert not found["interfaces"][0]
    assert not found["all-reduce"][0]
    assert status == 1


@pytest.mark.slow
def test_rank_0_tells_of_other_hosts_and_who_waits_in_vain_of_itself(tmp_path):
    ports = free_ports(4)

    def host(rank, ports, *flags):
        endpoints = [f"127.0.0.1:{port}" for port in ports]
        environment = {
            "PADDLE_TRAINER_ID": str(rank),
            "PADDLE_TRAINERS_NUM": "2",
            "PADDLE_LOCAL_SIZE": "1",
        }
        environment |= {
            "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
            "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
        }
        return start(tmp_path, *flags, **environment, PADDLE_DISTRI_BACKEND="gloo")

    wrong = [f"-shm={ABSENT}", "-cfg=vit_digit"]
    started = [
        host(0, ports[:2]),
        host(1, ports[:2], *wrong),
        host(1, ports[2:], *wrong, "-timeout=4"),
    ]
    first, second, alone = (end(process) for process in started)
    findings = {name: text for name, (ok, text) in first[1].items() if not ok}
    assert list(findings) == [socket.gethostname()]
    (theirs,) = findings.values()
    assert f"shm: {ABSENT} doesn't exist or isn't writable; docker run --shm-size=1g" in theirs
    assert theirs.endswith("; loader: no configuration file vit_digit; did you mean vit_digits?")
    assert "host: " not in theirs  # gloo is told where to listen
    assert "between 2 ranks" in first[1]["all-reduce"][1]
    assert [status for status, *_ in (first, second, alone)] == [1, 1, 1]
    assert second[1] == {}
    assert list(alone[1])[-3:] == ["shm", "loader", "all-reduce"]
    assert not any(ok for ok, _ in alone[1].values())
    assert alone[1]["all-reduce"][1].startswith(
        f"rank 0 didn't answer at 127.0.0.1:{ports[2]} within 4 s ("
    )


# ------------------------------------------------------------------ one machine


def test_versions_that_dont_go_together():
    paddle = {
        "paddlepaddle": "3.3.1",
        "numpy": "2.2.6",
        "protobuf": "7.36.2",
        "simplejpeg": "1.9.0",
    }
    old = {
        "paddlepaddle-gpu": "2.6.2",
        "numpy": "1.26.4",
        "protobuf": "6.33.1",
        "simplejpeg": "1.9.0",
    }
    assert machine.python((3, 13, 1)) == (True, "3.13.1")
    assert machine.python((3, 9, 18)) == (
        False,
        "3.9.18, expected 3.10 to 3.13; make PYTHON=python3.11 install",
    )
    assert machine.paddle_package(paddle) == (True, "paddlepaddle 3.3.1")
    assert machine.paddle_package({"paddlepaddle-gpu": "3.2.0"})[1].endswith(
        "3.2.0 (2.6.2 and 3.3.1 are tested)"
    )
    assert machine.paddle_package({}) == (False, "found no Paddle; make install")
    assert machine.paddle_package(paddle | old)[1].endswith(
        "the one installed last is used; uninstall both, then make install"
    )
    assert (
        machine.paddle_package({"paddlepaddle": "2.5.1"})[1]
        == "paddlepaddle 2.5.1, expected 2.6.2 or 3.3.1; make install"
    )
    assert machine.libraries(paddle) == (True, "numpy 2.2.6, protobuf 7.36.2, simplejpeg 1.9.0")
    assert machine.libraries(old)[0]
    ok, text = machine.libraries(old | {"numpy": "2.2.6"})
    assert (ok, text.endswith('Paddle 2.6.2 was built against NumPy 1; pip install "numpy<2"')) == (
        False,
        True,
    )
    ok, text = machine.libraries(old | {"protobuf": "7.36.2"})
    assert (
        ok,
        text.endswith('fleet uses functions that protobuf 7 removed; pip install "protobuf<7"'),
    ) == (
        False,
        True,
    )
    assert machine.libraries({"paddlepaddle": "3.3.1", "numpy": "2.2.6", "protobuf": "6.33.1"}) == (
        False,
        "simplejpeg not installed; make install",
    )


def test_gpus_that_paddle_doesnt_see(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "97,98")
    ok, text = machine.devices()
    assert not ok
    assert re.fullmatch(
        r"CUDA_VISIBLE_DEVICES=97,98 names 2 GPUs, Paddle \(a [CG]PU build\) sees 0; .*", text
    )
    for none in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", none)
        text = machine.devices()[1]
        assert text.endswith(f"; unset CUDA_VISIBLE_DEVICES='{none}' for paddle.distributed.launch")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert machine.devices()[1].endswith("on the CPU, over gloo")


def test_the_secret_and_the_store_that_strangers_find_open(monkeypatch, tmp_path):
    monkeypatch.setenv("PADDLE_VIT_SECRET_FILE", str(tmp_path / "none"))
    assert network.common_secret() == (
        False,
        f"PADDLE_VIT_SECRET_FILE names {tmp_path}/none, which doesn't exist; write 32 random characters to it",
    )
    monkeypatch.setenv("PADDLE_VIT_SECRET", "a" * 32)
    assert network.common_secret() == (
        True,
        "PADDLE_VIT_SECRET, mark f2f6f3bb: the same on all machines of a run",
    )
    ok, text = network.can_fence()
    assert ok
    assert re.fullmatch(
        "Paddle's store listens at .* until all ranks are connected; then nobody else can connect",
        text,
    )
    monkeypatch.setattr(network.store, "SO_ATTACH_FILTER", 60000)
    ok, text = network.can_fence()
    assert not ok
    assert text.startswith(
        "this kernel doesn't filter sockets: Paddle's store accepts anybody during the whole run (at "
    )


def test_interfaces_and_addresses(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for variable, wrong, right in (
        ("GLOO", "eth97", "lo"),
        ("NCCL", "eth97,ib97", "^docker"),
        ("NCCL", "=ib", "ib,l"),
    ):
        monkeypatch.setenv(f"{variable}_SOCKET_IFNAME", right)
        assert machine.interfaces()[0]
        if wrong != "=ib":
            monkeypatch.setenv(f"{variable}_SOCKET_IFNAME", wrong)
            ok, text = machine.interfaces()
            assert not ok
            assert text.startswith(
                f"{variable}_SOCKET_IFNAME={wrong} isn't an interface with an address; there are lo 127"
            )
        monkeypatch.delenv(f"{variable}_SOCKET_IFNAME")
    assert machine.host("localhost", several=False) == (
        True,
        "localhost is 127.0.0.1 (enough for one machine)",
    )
    ok, text = machine.host("localhost", several=True)
    assert not ok
    assert text.startswith(
        "localhost resolves to 127.0.0.1, where gloo would listen, but which no other machine can reach; give"
    )
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert machine.host("localhost", several=True) == (
        True,
        "localhost is 127.0.0.1, but gloo listens at lo",
    )
    ok, text = machine.host(ELSEWHERE, several=False)
    assert not ok
    assert "which isn't an address of this machine; correct /etc/hosts or DNS" in text
    ok, text = machine.host("no-such-host.invalid", several=False)
    assert (ok, text.startswith("no-such-host.invalid resolves to no address (")) == (False, True)


def test_ports():
    with socket.create_server(("127.0.0.1", 0)) as server:
        master = f"127.0.0.1:{server.getsockname()[1]}"
        ok, text = machine.port(master)
        assert (ok, text) == (
            False,
            f"{master} can't be used here (Address already in use); choose another port (ss -ltnp)",
        )
    assert machine.port(master) == (True, f"{master} is free on this machine")
    there = f"{ELSEWHERE}:6170"
    # no other machine is at hand
    answers = [mock.Mock(), ConnectionRefusedError(), TimeoutError("timed out")]
    with mock.patch("socket.create_connection", side_effect=answers) as connect:
        assert machine.port(there) == (True, f"{there} answers")
        assert (
            machine.port(there)[1]
            == f"{ELSEWHERE} answers; nothing listens at 6170 yet: start the program there first"
        )
        wrong = machine.port(there)
    assert wrong == (
        False,
        f"{there} doesn't answer (timed out); check the address, routes and firewalls",
    )
    connect.assert_called_with((ELSEWHERE, 6170), 3.0)
    assert machine.port("no-such-host.invalid:6170")[1].startswith(
        "no-such-host.invalid resolves to no address; give"
    )
    for wrong in ("6170", "host", ":6170", "host:0", "host:70000", "host:a"):
        with pytest.raises(InputError, match=f"-master {wrong}: expected HOST:PORT, such as"):
            machine.port(wrong)
    far = {
        "127.0.0.1:6170": False,
        "localhost:1": False,
        f"{ELSEWHERE}:6170": True,
        "no-such-host.invalid:1": True,
    }
    assert {master: machine.is_far(master) for master in far} == far
    assert not machine.is_far(None)


def test_resources_that_are_short(tmp_path):
    assert machine.shared_memory(str(tmp_path), least=1)[0]
    ok, text = machine.shared_memory(str(tmp_path), least=1 << 60)
    assert not ok
    assert re.fullmatch(
        r"\S+ has [\d.]+ GB free, expected 1\.07374e\+09; docker run --shm-size=1g, .*", text
    )
    ok, text = machine.memory(1 << 30)
    assert not ok
    assert text.endswith("expected 1 GB each; raise the container's limit, or lower -ngpus")
    assert machine.memory(2, least=1)[0]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
        assert machine.open_files() == (
            False,
            "at most 512 open files, expected 1024; ulimit -n 65536",
        )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert machine.clock(0) == (
        False,
        "1970-01-01 00:00 UTC is before this toolkit was written: set the clock by NTP",
    )
    with (
        mock.patch.object(ops, "_loaded", False),
        mock.patch.object(ops, "library", return_value=tmp_path / "ops.so"),
    ):
        ok, text = machine.operators()
    assert (ok, text.endswith("(docs/evidence/performance.md); python -m ops.build")) == (
        False,
        True,
    )


def test_a_loader_that_fails_or_is_slow():
    ok, text = machine.loader("vit_digits", ["DATA.DATASET", "folder", "DATA.DATA_PATH", ABSENT])
    assert not ok
    assert ABSENT in text
    with mock.patch.object(machine, "LOADER_SECONDS", 0.1):
        ok, text = machine.loader("vit_digits", [], least=1e9)
    assert not ok
    assert re.fullmatch(
        r"digits, 8 pixels: \d+ images/s per worker: few; for slow storage, use .*", text
    )
