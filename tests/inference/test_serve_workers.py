"""Workers, as the server sees them: replaced when they end, and only by ones that loaded the same model."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from programs import ROOT
from served import form, serving, wait_until, write_checkpoint

from errors import RunError
from inference.serve import server
from inference.serve.batching import Batcher, Item, Lost
from inference.serve.metrics import Metrics
from inference.serve.settings import Settings
from inference.serve.workers import Pool, Worker
from launch.startup import STOPS

JPEG = {"Content-Type": "image/jpeg"}
TOKEN = "a-token-of-the-tests"


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


def test_a_run_is_the_checkpoint_that_was_its_best_as_the_server_started(tmp_path):
    (tmp_path / "checkpoints" / "epoch_1").mkdir(parents=True)
    (tmp_path / "checkpoints" / "best").symlink_to("epoch_1")
    (tmp_path / "file").symlink_to("other")
    first = str(tmp_path / "checkpoints" / "epoch_1")
    assert [server._real_folder(str(path)) for path in (tmp_path, tmp_path / "checkpoints" / "best", first)] == [
        first
    ] * 3
    assert server._real_folder(str(tmp_path / "file")) == str(tmp_path / "file")  # its neighbours tell what it is


def test_a_worker_with_another_model_isnt_used(capsys):
    """Others go on, and it is told once; without any the server ends."""

    async def lives():
        pool, loop = object.__new__(Pool), asyncio.get_running_loop()
        pool.settings, pool.ended, pool.about, pool._sum, pool._told = (
            Settings("model"),
            loop.create_future(),
            {},
            "",
            "",
        )
        pool.metrics, pool.batcher, pool._deaths = Metrics(), Batcher(4, 0.0, 10), 0
        killed = []
        workers = [Worker(SimpleNamespace(kill=lambda: killed.append(1)), None, None) for _ in range(4)]
        pool.workers = list(workers)
        about = {"model": "vit", "task": "classification"}
        pool._heard(workers[0], {"loaded": about, "oriented": False, "warning": "", "sum": "a"}, [])
        for worker in workers[1:3]:
            pool._heard(worker, {"loaded": about, "oriented": False, "sum": "b"}, [])
            pool._record_death(worker, -9)
        pool._heard(workers[3], {"error": "no weights at model", "status": 2}, [])
        assert [worker.ready for worker in workers] == [True, False, False, False]
        assert (len(killed), pool.about, pool._deaths, pool.ended.done()) == (2, about, 0, False)
        workers[0].ready = False
        pool._heard(workers[1], {"loaded": about, "oriented": False, "warning": "", "sum": "b"}, [])
        with pytest.raises(RunError, match="model isn't what it was as the server started; start the server anew"):
            await pool.ended

    asyncio.run(lives())
    went = "error: a worker can't be replaced, 1 go on: "
    assert capsys.readouterr().err.splitlines() == [
        f"{went}model isn't what it was as the server started; start the server anew",
        f"{went}no weights at model",
    ]


@pytest.mark.slow
def test_a_checkpoint_that_changed_ends_the_server_once_no_worker_has_the_first_one(checkpoint, tmp_path):
    file = tmp_path / "own.safetensors"
    file.write_bytes(checkpoint.read_bytes())
    with serving(file, folder=tmp_path) as server:
        server.ready()
        blocked = re.search(r"SigBlk:\s*(\w+)", Path(f"/proc/{server.workers()[0]}/status").read_text())[1]
        assert all(int(blocked, 16) >> (number - 1) & 1 for number in STOPS)
        write_checkpoint(file, classes=("one", "two", "three"))
        os.kill(server.workers()[0], signal.SIGKILL)
        assert server.process.wait(30) == 1
        last = server.text("err").splitlines()[-1]
    assert last == f"error: {file} isn't what it was as the server started; start the server anew"


@pytest.mark.slow
def test_a_worker_whose_server_has_gone_ends(checkpoint, tmp_path):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        words = [sys.executable, str(ROOT / "inference" / "serve" / "compute.py"), str(theirs.fileno())]
        words.append(json.dumps({"server": os.getpid() + 1}))
        ran = subprocess.run(words, pass_fds=[theirs.fileno()], capture_output=True, timeout=60, check=False)
    assert (ran.returncode, ran.stderr) == (1, b"")


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
        pool._record_death(worker, -9)
        assert list(pool.batcher._again) == items[:2]
        assert await pool.batcher.take() == items[:1]
        worker.pending = {2: (0.0, items[:1])}
        pool._record_death(worker, 1)
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
