"""A server's life: it starts or says why not, answers what it took, replaces workers, ends with a status that tells."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from programs import ROOT
from served import form, serving

from inference.serve.batching import Batcher, Item, Lost
from inference.serve.metrics import Metrics
from inference.serve.server import Protocol
from inference.serve.settings import Settings
from inference.serve.workers import Pool, Worker

JPEG = {"Content-Type": "image/jpeg"}
TOKEN = "a-token-of-the-tests"


def started(folder, *words, **environment):
    """(status, stdout, stderr) of a server that doesn't come to be."""
    command = [sys.executable, str(ROOT / "tools" / "serve.py"), *map(str, words)]
    run = subprocess.run(
        command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=60, check=False
    )
    return run.returncode, run.stdout, run.stderr


def wait_until(condition, seconds=30):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"not within {seconds} s"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["-port=70000"], "-port is 70000, expected 0 to 65535 (0: any that is free)"),
        (["-workers=0"], "-workers is 0, expected 1 or more"),
        (["-max_queue=8"], "-max_queue is 8, expected 64 or more"),
        (["-max_request_mb=1000"], "-max_request_mb is 1000.0, expected more than 0, at most 128"),
        (["-timeout=nan"], "-timeout is nan, expected more than 0, at most 3600"),
        (["-host=256.0.0.1"], "can't listen at 256.0.0.1, port 8000 ("),
        (["-token_file=none"], "none: can't be read as a token (FileNotFoundError: No such file or directory)"),
    ],
)
def test_what_cant_be_served_is_told_in_one_line(tmp_path, words, line):
    status, out, err = started(tmp_path, "model", *words)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert line in err
    assert err.count("\n") == 1


def test_more_of_the_same(tmp_path, checkpoint):
    (tmp_path / "short").write_text("secret\n")
    status, _, err = started(tmp_path, checkpoint, "-token_file=short")
    expected = "expected 16 printable ASCII characters or more, without blanks"
    assert (status, err) == (2, f"error: short holds a token of 6 characters, {expected}\n")
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\nf = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'uvicorn' else f(name, *a)\n"
    )
    status, _, err = started(tmp_path, checkpoint, PYTHONPATH=str(tmp_path))
    assert (status, err) == (2, f"error: {sys.executable} lacks uvicorn; install requirements-serve.txt with pip\n")
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
    assert patient.ask("GET", "/ready")[:2] == (503, {"status": "loading", "workers": 0, "waiting": 0})
    status, answer, headers = patient.ask("POST", "/predict", photographs[0], bearing)
    assert (status, answer, headers["retry-after"]) == (503, {"error": "the model is being loaded"}, "2")
    patient.ready()

    for wrong in ({}, {"Authorization": f"Basic {TOKEN}"}, {"Authorization": f"Bearer {TOKEN}x"}):
        for path in ("/predict", "/attention"):
            status, answer, headers = patient.ask("POST", path, photographs[0], JPEG | wrong)
            assert (status, headers["www-authenticate"]) == (401, "Bearer")
            assert answer == {"error": "this server asks for a token: Authorization: Bearer TOKEN"}
        assert patient.ask("GET", "/metrics", headers=wrong)[0] == 401
    assert patient.ask("GET", "/")[0] == 200
    assert patient.ask("POST", "/predict", photographs[0], bearing)[0] == 200
    assert TOKEN not in patient.text()

    os.kill(patient.workers()[0], signal.SIGKILL)
    patient.said("a worker was killed by SIGKILL; another one starts, 0 images go to it", "err")
    assert patient.ask("POST", "/predict", photographs[0], bearing)[0] == 200  # it waits for the other one
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
        assert answer["error"].startswith("as many images wait as may; try again in ")
        patient.process.send_signal(signal.SIGTERM)
        patient.said("stopped by SIGTERM: 6 requests are answered first", "err")
        wait_until(lambda: patient.ask("GET", "/ready")[0] == 503)
        assert patient.ask("GET", "/ready")[1]["status"] == "draining"
        status, answer, _ = patient.ask("POST", "/predict", photographs[0], bearing)
        assert (status, answer) == (503, {"error": "the server is ending"})
        os.kill(worker, signal.SIGCONT)
        assert [one.result()[0] for one in taken] == [200] * 6
    assert patient.process.wait(20) == 143
    assert not os.path.exists(f"/proc/{worker}")


def waiting(server):
    return server.ask("GET", "/ready")[1]["waiting"]


@pytest.mark.slow
def test_a_worker_that_hangs_costs_a_timeout_and_is_replaced(checkpoint, photographs, tmp_path):
    with serving(checkpoint, "-timeout=1", folder=tmp_path) as server:
        server.ready()
        [worker] = server.workers()
        os.kill(worker, signal.SIGSTOP)
        status, answer, _ = server.ask("POST", "/predict", photographs[0], JPEG)
        assert (status, answer) == (504, {"error": "there was no answer within 1 s"})
        server.said("a worker was killed by SIGKILL; another one starts, 0 images go to it", "err")
        wait_until(lambda: server.ask("GET", "/ready")[0] == 200)
        assert server.ask("POST", "/predict", photographs[0], JPEG)[0] == 200
        assert server.metric("paddle_vit_worker_restarts_total") == 1
        assert server.end(signal.SIGINT) == 130


@pytest.mark.slow
def test_workers_killed_under_load_lose_no_request(checkpoint, photographs, tmp_path):
    with serving(checkpoint, "-workers=2", "-batch_size=4", folder=tmp_path) as server:
        wait_until(lambda: server.ready().ask("GET", "/ready")[1]["workers"] == 2)
        statuses, over = [], threading.Event()

        def ask():
            while not over.is_set():
                statuses.append(server.ask("POST", "/predict", *form(*[("a", "b", photographs[0])] * 2))[0])

        with ThreadPoolExecutor(8) as clients:
            asking = [clients.submit(ask) for _ in range(8)]
            for turn in range(1, 6):
                done = len(statuses)
                wait_until(lambda done=done: len(statuses) > done + 50)
                os.kill(server.workers()[turn % 2], signal.SIGKILL)
                server.said("a worker was killed by SIGKILL", "err", times=turn)
                wait_until(lambda: server.ask("GET", "/ready")[1]["workers"] == 2)
            over.set()
            for client in asking:
                client.result(30)
        assert set(statuses) <= {200, 503}
        assert statuses.count(503) <= 4
        assert server.metric("paddle_vit_worker_restarts_total") == 5
        assert server.end() == 143


def test_who_is_slow_loses_the_connection_and_who_asks_keeps_it():
    """(Ten seconds after another; a tick may come just when a request was answered.)"""

    def ticks(*states):
        aborted, protocol = [], object.__new__(Protocol)
        protocol.transport = SimpleNamespace(is_closing=lambda: False, abort=lambda: aborted.append(True))
        protocol.loop = SimpleNamespace(call_later=lambda *_: None)
        for protocol.cycle, paused in states:
            protocol.flow = SimpleNamespace(write_paused=paused)
            protocol._tick()
        return bool(aborted)

    first, second, open_one = (SimpleNamespace(response_complete=done) for done in (True, True, False))
    assert ticks((None, False))  # a silent one
    assert not ticks((first, False), (second, False))
    assert ticks((first, False), (first, False))  # the next head trickles in
    assert not ticks((open_one, False), (open_one, False))  # it waits for its answer
    assert ticks((open_one, True), (open_one, True))  # it reads nothing of it
    assert not ticks((open_one, True), (open_one, False))


def test_a_busy_workers_next_batch_grows_until_half_of_the_one_before_is_computed():
    pool, worker = object.__new__(Pool), Worker(None, None, None)
    pool.batcher = Batcher(2, 0.0, 10)
    now = worker.heard = time.monotonic()
    worker.usual = 100.0
    assert not pool._can_wait(worker)  # it is idle
    worker.pending = {1: (now, [])}
    assert pool._can_wait(worker)
    pool.batcher.put([Item(b"", {}, None), Item(b"", {}, None)])
    assert not pool._can_wait(worker)  # a batch is full
    pool.batcher = Batcher(2, 0.0, 10)
    worker.heard = now - 51
    assert not pool._can_wait(worker)


def test_an_image_whose_worker_ends_is_tried_once_more_alone(capsys):
    async def lives():
        pool, loop = object.__new__(Pool), asyncio.get_running_loop()
        pool.settings, pool.batcher, pool.metrics = Settings("model"), Batcher(4, 0.0, 10), Metrics()
        pool.ended, pool._deaths = loop.create_future(), 0
        items = [Item(b"", {}, loop.create_future()) for _ in range(3)]
        items[2].answer.cancel()
        worker = Worker(None, None, None)
        worker.pending = {1: (0.0, items)}
        pool._died(worker, -9)
        assert list(pool.batcher._again) == items[:2]
        assert await pool.batcher.take() == items[:1]
        worker.pending = {2: (0.0, items[:1])}
        pool._died(worker, 1)
        with pytest.raises(Lost, match="the process that computed it ended, twice"):
            await items[0].answer
        assert list(pool.batcher._again) == items[1:2]
        assert not pool.ended.done()
        assert pool.metrics.restarts._value.get() == 2

    asyncio.run(lives())
    assert capsys.readouterr().err.splitlines() == [
        "a worker was killed by SIGKILL; another one starts, 2 images go to it",
        "a worker ended with exit status 1; another one starts, 0 images go to it",
    ]


@pytest.mark.slow
def test_workers_that_end_again_and_again_end_the_server(checkpoint, tmp_path):
    with serving(checkpoint, folder=tmp_path) as server:
        server.ready()
        gone = set()
        until = time.monotonic() + 120
        while server.process.poll() is None and time.monotonic() < until:
            for pid in set(server.workers()) - gone:
                os.kill(pid, signal.SIGKILL)
                gone.add(pid)
            time.sleep(0.05)
        assert server.process.wait(5) == 1
        last = server.text("err").splitlines()[-1]
    assert last == "error: 6 workers ended in a row, the last one was killed by SIGKILL; is memory short?"
