"""A server's life: it starts or says why not, answers what it took, replaces workers, ends with a
status that tells.
"""

import importlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from support.hostile_files import attempt
from support.photographs import write_weights
from support.programs import ROOT
from support.servers import serving, wait_until

from errors import RunError, install
from inference.serve import server
from inference.serve.protocol import Protocol

JPEG = {"Content-Type": "image/jpeg"}
TOKEN = "a-token-of-the-tests"


def started(folder, *words, **environment):
    """(status, stdout, stderr) of a server that doesn't come to be."""
    command = [sys.executable, str(ROOT / "tools" / "serve.py"), *map(str, words)]
    run = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return run.returncode, run.stdout, run.stderr


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["-port=70000"], "-port is 70000, expected 0 to 65535 (0: any that is free)"),
        (["-workers=0"], "-workers is 0, expected 1 or more"),
        (["-workers=999999"], "-workers is 999999, expected 1024 at most"),
        (["-max_queue=8"], "-max_queue is 8, expected 64 or more"),
        (["-max_request_mb=1000"], "-max_request_mb is 1000.0, expected more than 0, at most 128"),
        (["-timeout=nan"], "-timeout is nan, expected more than 0, at most 3600"),
        (
            ["-formats", "bmp", "jpeg2000"],
            "-formats has jpeg2000, expected any of bmp, npy, ppm, tiff",
        ),
        (["-host=256.0.0.1"], "can't listen at 256.0.0.1, port 8000 ("),
        (
            ["-host=a..b"],
            "can't listen at a..b, port 8000 (this isn't a host name); choose another -host or -port",
        ),
        (
            ["-token_file="],
            ": can't be read as a token (FileNotFoundError: No such file or directory)",
        ),
        (
            ["-token_file=none"],
            "none: can't be read as a token (FileNotFoundError: No such file or directory)",
        ),
    ],
)
def test_what_cant_be_served_is_told_in_one_line(tmp_path, monkeypatch, capfd, words, line):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["serve.py", "model", *words])

    def serve():
        with pytest.raises(RunError) as caught:
            importlib.import_module("tools.serve").main()
        assert caught.value.exit_status == 2
        raise caught.value

    assert line in attempt("command line", 0, serve)
    assert capfd.readouterr() == ("", "")


def test_a_classifier_that_tells_nothing_apart_is_warned_of_once(tmp_path, photographs):
    """However many workers load it. Of equal classes the first is the best one."""
    zeros = {"head.weight": np.zeros((2, 16), np.float32), "head.bias": np.zeros(2, np.float32)}
    weights = write_weights(tmp_path / "blind.safetensors", changes=zeros)
    with serving(weights, "-workers=2", folder=tmp_path) as server:
        server.ready()
        wait_until(lambda: server.metric("paddle_vit_workers_ready") == 2)
        status, answer, _ = server.ask("POST", "/predict?top=1", photographs[0], JPEG)
        assert (status, answer["predictions"][0]["outputs"]) == (200, [0])
        assert answer["predictions"][0]["probabilities"] == [0.5]
        warning = "warning: .*: the weights of its classifier are the same for all classes, so all classes get the same probability"
        assert len(re.findall(warning, server.text("err"))) == 1


def test_more_of_the_same(tmp_path, checkpoint):
    (tmp_path / "short").write_text("secret\n")
    status, _, err = started(tmp_path, checkpoint, "-token_file=short")
    expected = "expected 16 printable ASCII characters or more, without spaces"
    assert (status, err) == (2, f"error: short holds a token of 6 characters, {expected}\n")
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\nf = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'uvicorn' else f(name, *a)\n"
    )
    status, _, err = started(tmp_path, checkpoint, PYTHONPATH=str(tmp_path))
    advice = install("serve")
    assert (status, err) == (2, f"error: {sys.executable} lacks uvicorn; {advice}\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, _, err = started(tmp_path, checkpoint, f"-port={port}")
    found = f"can't listen at 127.0.0.1, port {port} (Address already in use)"
    assert (status, err) == (2, f"error: {found}; choose another -host or -port\n")


def test_weights_that_cant_be_read_end_the_server(tmp_path):
    (tmp_path / "no.safetensors").write_bytes(b"no")
    status, out, err = started(tmp_path, "no.safetensors", "-port=0")
    assert status == 2
    assert "ready" not in out
    assert err.startswith("error: ")
    assert "no.safetensors" in err.splitlines()[0]
    assert "Traceback" not in err


def test_a_signal_while_the_model_loads_ends_it_at_once(checkpoint, tmp_path):
    with serving(checkpoint, folder=tmp_path) as server:
        assert server.end(signal.SIGTERM, 5) == 143
        assert "Traceback" not in server.text("err")


@pytest.fixture
def patient(checkpoint, tmp_path):
    """A server with a token, a small queue, and one worker that takes two batches."""
    flags = ["-batch_size=2", "-max_images=4", "-max_queue=4", "-timeout=25"]
    with serving(checkpoint, *flags, folder=tmp_path, PADDLE_VIT_TOKEN=TOKEN) as server:
        yield server


@pytest.mark.smoke
def test_from_loading_to_the_drain(patient, photographs):
    bearing = JPEG | {"Authorization": f"Bearer {TOKEN}"}
    assert patient.ask("GET", "/health")[:2] == (200, {"status": "alive"})
    assert patient.ask("GET", "/ready")[:2] == (
        503,
        {"status": "loading", "workers": 0, "waiting": 0},
    )
    status, answer, headers = patient.ask("POST", "/predict", photographs[0], bearing)
    assert (status, answer, headers["retry-after"]) == (
        503,
        {"error": "the model is being loaded"},
        "2",
    )
    patient.ready()

    for wrong in ({}, {"Authorization": f"Basic {TOKEN}"}, {"Authorization": f"Bearer {TOKEN}x"}):
        for path in ("/predict", "/attention"):
            status, answer, headers = patient.ask("POST", path, photographs[0], JPEG | wrong)
            assert (status, headers["www-authenticate"]) == (401, "Bearer")
            assert answer == {
                "error": "this server needs a token: send Authorization: Bearer TOKEN"
            }
        assert patient.ask("GET", "/metrics", headers=wrong)[0] == 401
    assert patient.ask("GET", "/")[0] == 200
    described = patient.ask("GET", "/openapi.json")[1]
    guarded = {
        path
        for path, methods in described["paths"].items()
        if "security" in next(iter(methods.values()))
    }
    assert guarded == {"/predict", "/attention", "/metrics"}
    assert described["paths"]["/predict"]["post"]["security"] == [{"token": []}]
    assert b"<td>Authorization</td><td>Bearer TOKEN</td>" in patient.ask("GET", "/docs")[1]
    assert patient.ask("POST", "/predict", photographs[0], bearing)[0] == 200
    assert TOKEN not in patient.text()

    os.kill(patient.workers()[0], signal.SIGKILL)
    patient.said(
        "a worker was killed by SIGKILL; a new one is started and gets its 0 images", "err"
    )
    # it waits for the other one
    assert patient.ask("POST", "/predict", photographs[0], bearing)[0] == 200
    [worker] = patient.workers()
    os.kill(worker, signal.SIGSTOP)
    with ThreadPoolExecutor(16) as clients:
        taken = []
        for count in range(1, 7):  # two batches of one, and four that wait
            taken.append(clients.submit(patient.ask, "POST", "/predict", photographs[0], bearing))
            wait_until(lambda count=count: waiting(patient) == max(0, count - 2))
            time.sleep(0.1)
        status, answer, headers = patient.ask("POST", "/predict", photographs[0], bearing)
        assert status == 429
        assert int(headers["retry-after"]) >= 1
        assert answer["error"].startswith("too many images are waiting; try again in ")
        patient.process.send_signal(signal.SIGTERM)
        patient.said("stopped by SIGTERM: 6 requests are finished first", "err")
        wait_until(lambda: patient.ask("GET", "/ready")[0] == 503)
        assert patient.ask("GET", "/ready")[1]["status"] == "draining"
        status, answer, _ = patient.ask("POST", "/predict", photographs[0], bearing)
        assert (status, answer) == (503, {"error": "the server is shutting down"})
        os.kill(worker, signal.SIGCONT)
        assert [one.result()[0] for one in taken] == [200] * 6
    assert patient.process.wait(20) == 143
    assert not os.path.exists(f"/proc/{worker}")


def waiting(server):
    return server.ask("GET", "/ready")[1]["waiting"]


def test_connections_answer_at_once_and_leave_files_for_other_needs(monkeypatch):
    with (
        server._listening("127.0.0.1", 0) as listener,
        socket.create_connection(listener.getsockname()),
    ):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    for files, most in ((-1, 8192), (1 << 20, 8192), (1024, 768), (64, 32)):
        monkeypatch.setattr(server.resource, "getrlimit", lambda _, files=files: (files, files))
        assert server._connections() == most


def test_connections_that_cant_be_accepted_are_told_once_a_minute(capsys, monkeypatch):
    told = server._accept_error_handler()
    now = [0.0]
    left = []
    monkeypatch.setattr(server.time, "monotonic", lambda: now[0])
    loop = SimpleNamespace(default_exception_handler=left.append)
    failed = {
        "message": "socket.accept() out of system resource",
        "exception": OSError(24, "Too many open files"),
    }
    for now[0] in (1000.0, 1001.0, 1059.0, 1061.0):
        told(loop, failed)
    told(loop, other := {"message": "another"})
    assert left == [other]
    line = "warning: connections can't be accepted ([Errno 24] Too many open files)"
    assert capsys.readouterr().err.splitlines() == [line] * 2


def test_who_is_slow_loses_the_connection_and_who_asks_keeps_it():
    """(Ten seconds after another; a tick may come just when a request was answered.)"""

    def ticks(*states):
        aborted = []
        protocol = object.__new__(Protocol)
        protocol.transport = SimpleNamespace(
            is_closing=lambda: False, abort=lambda: aborted.append(True)
        )
        protocol.loop = SimpleNamespace(call_later=lambda *_: None)
        for protocol.cycle, paused in states:
            protocol.flow = SimpleNamespace(write_paused=paused)
            protocol._close_if_idle()
        return bool(aborted)

    first, second, open_one = (
        SimpleNamespace(response_complete=done) for done in (True, True, False)
    )
    assert ticks((None, False))  # a silent one
    assert not ticks((first, False), (second, False))
    assert ticks((first, False), (first, False))  # the next head trickles in
    assert not ticks((open_one, False), (open_one, False))  # it waits for its answer
    assert ticks((open_one, True), (open_one, True))  # it reads nothing of it
    assert not ticks((open_one, True), (open_one, False))
