"""Workers, as the server sees them: replaced when they end, and only by ones that loaded the same
model.
"""

import asyncio
import io
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

import numpy as np
import pytest
from PIL import Image
from support.programs import ROOT
from support.servers import form, serving, wait_until, write_checkpoint

from errors import RunError
from inference import Predictor
from inference.serve import server, workers
from inference.serve.batching import Batcher, Item, Lost
from inference.serve.metrics import Metrics
from inference.serve.progress import COMPUTING, READING, Progress
from inference.serve.settings import Settings
from inference.serve.workers import Pool, Worker
from launch.startup import STOP_SIGNALS

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
        server.said(
            "a worker was killed by SIGKILL; a new one is started and gets its 0 images", "err"
        )
        wait_until(lambda: server.ask("GET", "/ready")[0] == 200)
        assert server.ask("POST", "/predict", photographs[0], JPEG)[0] == 200
        assert server.metric("paddle_vit_worker_restarts_total") == 1
        assert server.end(signal.SIGINT) == 130


@pytest.mark.slow
def test_workers_killed_under_load_lose_no_more_than_the_image_that_they_read(
    checkpoint, photographs, tmp_path
):
    with serving(checkpoint, "-workers=2", "-batch_size=4", folder=tmp_path) as server:
        wait_until(lambda: server.ready().ask("GET", "/ready")[1]["workers"] == 2)
        statuses = []
        over = threading.Event()

        def ask():
            while not over.is_set():
                statuses.append(
                    server.ask("POST", "/predict", *form(*[("a", "b", photographs[0])] * 2))[0]
                )

        with ThreadPoolExecutor(8) as clients:
            asking = [clients.submit(ask) for _ in range(8)]
            try:
                for turn in range(1, 6):
                    done = len(statuses)
                    wait_until(lambda done=done: len(statuses) > done + 50)
                    os.kill(server.workers()[turn % 2], signal.SIGKILL)
                    server.said("a worker was killed by SIGKILL", "err", times=turn)
                    wait_until(lambda: server.ask("GET", "/ready")[1]["workers"] == 2, seconds=90)
            finally:
                over.set()
            for client in asking:
                client.result(30)
        assert set(statuses) <= {200, 500}
        assert statuses.count(500) == server.text("err").count("on an image from 127.0.0.1") <= 5
        assert server.metric("paddle_vit_worker_restarts_total") == 5
        assert server.end() == 143


def test_a_run_is_the_checkpoint_that_was_its_best_as_the_server_started(tmp_path):
    (tmp_path / "checkpoints" / "epoch_1").mkdir(parents=True)
    (tmp_path / "checkpoints" / "best").symlink_to("epoch_1")
    (tmp_path / "file").symlink_to("other")
    first = str(tmp_path / "checkpoints" / "epoch_1")
    assert [
        server._real_folder(str(path))
        for path in (tmp_path, tmp_path / "checkpoints" / "best", first)
    ] == [first] * 3
    # its neighbours tell what it is
    assert server._real_folder(str(tmp_path / "file")) == str(tmp_path / "file")


def test_a_worker_with_another_model_isnt_used(capsys):
    """Others go on, and it is told once; without any the server ends."""

    async def lives():
        pool = object.__new__(Pool)
        loop = asyncio.get_running_loop()
        pool.settings = Settings("model")
        pool.ended = loop.create_future()
        pool.about = {}
        pool._fingerprint = ""
        pool._reported = ""
        pool.metrics = Metrics()
        pool.batcher = Batcher(4, 0.0, 10)
        pool._failures = 0
        killed = []
        memory = Progress(Progress.create())
        workers = [
            Worker(SimpleNamespace(kill=lambda: killed.append(1)), memory, None, None)
            for _ in range(4)
        ]
        pool.workers = list(workers)
        about = {"model": "vit", "task": "classification"}
        loaded = {
            "loaded": about,
            "oriented": False,
            "gives_maps": False,
            "keeps_sizes": False,
            "takes_classes": False,
            "warning": "",
        }
        pool._handle(workers[0], {**loaded, "fingerprint": "a"}, [])
        for worker in workers[1:3]:
            pool._handle(worker, {**loaded, "fingerprint": "b"}, [])
            pool._record_end(worker, -9)
        pool._handle(workers[3], {"error": "no weights at model", "status": 2}, [])
        assert [worker.ready for worker in workers] == [True, False, False, False]
        assert (len(killed), pool.about, pool._failures, pool.ended.done()) == (2, about, 0, False)
        workers[0].ready = False
        pool._handle(workers[1], {**loaded, "fingerprint": "b"}, [])
        with pytest.raises(
            RunError, match="model has changed since the server started; start the server again"
        ):
            await pool.ended

    asyncio.run(lives())
    went = "error: a worker can't be replaced, 1 continue: "
    assert capsys.readouterr().err.splitlines() == [
        f"{went}model has changed since the server started; start the server again",
        f"{went}no weights at model",
    ]


@pytest.mark.slow
def test_a_checkpoint_that_changed_ends_the_server_once_no_worker_has_the_first_one(
    checkpoint, tmp_path
):
    file = tmp_path / "own.safetensors"
    file.write_bytes(checkpoint.read_bytes())
    with serving(file, folder=tmp_path) as server:
        server.ready()
        blocked = re.search(
            r"SigBlk:\s*(\w+)", Path(f"/proc/{server.workers()[0]}/status").read_text()
        )[1]
        assert all(int(blocked, 16) >> (number - 1) & 1 for number in STOP_SIGNALS)
        write_checkpoint(file, classes=("one", "two", "three"))
        os.kill(server.workers()[0], signal.SIGKILL)
        assert server.process.wait(30) == 1
        last = server.text("err").splitlines()[-1]
    assert last == f"error: {file} has changed since the server started; start the server again"


@pytest.mark.slow
def test_a_worker_whose_server_has_gone_ends(checkpoint, tmp_path):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        words = [
            sys.executable,
            str(ROOT / "inference" / "serve" / "compute.py"),
            str(theirs.fileno()),
        ]
        words.append(json.dumps({"server": os.getpid() + 1}))
        ran = subprocess.run(
            words, pass_fds=[theirs.fileno()], capture_output=True, timeout=60, check=False
        )
    assert (ran.returncode, ran.stderr) == (1, b"")


def test_a_busy_workers_next_batch_grows_until_half_of_the_one_before_is_computed():
    pool = object.__new__(Pool)
    worker = Worker(None, None, None, None)
    pool.batcher = Batcher(2, 0.0, 10)
    now = worker.active = time.monotonic()
    worker.batch_seconds = 100.0
    assert not pool._can_wait(worker)  # it is idle
    worker.pending = {1: (now, [])}
    assert pool._can_wait(worker)
    pool.batcher.put([Item(b"", {}, None), Item(b"", {}, None)])
    assert not pool._can_wait(worker)  # a batch is full
    pool.batcher = Batcher(2, 0.0, 10)
    worker.active = now - 51
    assert not pool._can_wait(worker)


def pool_of(**settings):
    """A Pool without processes."""
    pool = object.__new__(Pool)
    pool.settings, pool.batcher, pool.metrics = (
        Settings("model", **settings),
        Batcher(4, 0.0, 10),
        Metrics(),
    )
    pool.ended = asyncio.get_running_loop().create_future()
    pool._failures = 0
    pool.workers = []
    return pool


def images(count, kind="predict"):
    """The images of one request."""
    asked = {"kind": kind}
    loop = asyncio.get_running_loop()
    return [
        Item(b"", asked, loop.create_future(), "1.2.3.4", kind != "predict") for _ in range(count)
    ]


def worker_with(**batches):
    """A worker that was given batches: computing=..., reading=..."""
    killed = []
    worker = Worker(
        SimpleNamespace(kill=lambda: killed.append(1)), Progress(Progress.create()), None, None
    )
    worker.killed = killed
    worker.pending = {number: (0.0, items) for number, items in enumerate(batches.values(), 1)}
    return worker


def lost(item):
    """(status, line) of an image that was given up, or None."""
    if not item.answer.done():
        return None
    with pytest.raises(Lost) as found:
        item.answer.result()
    return found.value.status, str(found.value)


ENDED = (
    500,
    "the process that worked on an image was killed by SIGSEGV; the image isn't processed again",
)


def test_an_image_that_ended_its_worker_as_it_was_read_is_given_up_with_its_request(capsys):
    async def lives():
        pool, (guilty, sibling), others, computed = pool_of(), images(2), images(2), images(2)
        gone = images(1)
        gone[0].answer.cancel()
        worker = worker_with(
            computing=computed, reading=[others[0], guilty, sibling, *gone, others[1]]
        )
        worker.progress.begin(COMPUTING, 1)
        worker.progress.begin(READING, 2, 1)
        pool._record_end(worker, -signal.SIGSEGV)
        assert lost(guilty) == lost(sibling) == ENDED
        assert list(pool.batcher._returned) == [*computed, *others]
        assert not any(item.tried or item.alone for item in [*computed, *others])
        assert await pool.batcher.take() == [*computed, *others]
        assert pool._failures == 0  # a request can't end the server
        assert pool.metrics.restarts._value.get() == 1

    asyncio.run(lives())
    how = "a worker was killed by SIGSEGV on an image from 1.2.3.4; a new one is started and gets its 4 images"
    assert capsys.readouterr().err.splitlines() == [how]


def test_images_that_were_computed_as_their_worker_ended_are_tried_once_more_alone(capsys):
    """(By another one, as if somebody had killed the process: reading them didn't.)"""

    async def lives():
        pool = pool_of()
        computed = images(1) + images(1)
        waiting = images(1)
        worker = worker_with(computing=computed, waiting=waiting)
        worker.progress.begin(COMPUTING, 1)
        pool._record_end(worker, -signal.SIGSEGV)
        assert await pool.batcher.take() == computed[:1]
        worker = worker_with(computing=computed[:1])
        worker.progress.begin(COMPUTING, 1)
        pool._record_end(worker, -signal.SIGSEGV)
        assert (lost(computed[0]), lost(computed[1]), pool._failures) == (ENDED, None, 0)
        assert await pool.batcher.take() == computed[1:]
        assert await pool.batcher.take() == waiting
        assert (waiting[0].tried, waiting[0].alone) == (False, False)

        [drawn] = images(1, "attention")  # a map's image is read once more as it is drawn
        worker = worker_with(computing=[drawn])
        worker.progress.begin(COMPUTING, 1)
        pool._record_end(worker, -signal.SIGSEGV)
        assert lost(drawn) == ENDED

        # the process noted nothing yet: a lack of memory for what it is sent
        [received] = images(1)
        for _ in range(2):
            pool._record_end(worker_with(received=[received]), -signal.SIGSEGV)
        assert lost(received) == ENDED

    asyncio.run(lives())


def test_ends_without_a_request_end_the_server_and_an_answer_forgives_them():
    async def lives():
        pool = pool_of(workers=2)
        for _ in range(8):
            pool._record_end(worker_with(), 1)
            pool._record_end(worker_with(reading=images(1)), -signal.SIGKILL)
        assert (pool._failures, pool.ended.done()) == (8, False)
        pool._record_end(worker_with(), 1)
        line = "9 workers ended in a row, the last one ended with exit status 1; out of memory?"
        with pytest.raises(RunError, match=line):
            await pool.ended

    asyncio.run(lives())


def test_a_worker_that_reads_one_image_for_too_long_is_ended(monkeypatch):
    """(A fifth of the time of a request: others have time left.)"""

    async def lives():
        pool, [slow], [other] = pool_of(timeout=5), images(1), images(1)
        reads = worker_with(reading=[slow, other])
        computes = worker_with(computing=images(1))
        pool.workers = [None, reads, computes]
        reads.progress.begin(READING, 1, 0)
        computes.progress.begin(COMPUTING, 1, 0)
        monkeypatch.setattr(workers.time, "monotonic", lambda: clock() + 0.9)
        watching = asyncio.ensure_future(pool._watch())
        await asyncio.sleep(0.8)
        watching.cancel()
        assert (reads.killed, computes.killed, reads.stuck) == ([1], [], True)
        pool._record_end(reads, -signal.SIGKILL)
        assert lost(slow) == (504, "reading an image took more than 1 s")
        assert list(pool.batcher._returned) == [other]

    clock = time.monotonic
    asyncio.run(lives())


HOSTILE = """
import os, signal, time
from PIL import Image

opened = Image.open


def open_hostile(file, *words, **more):
    data = file.getvalue() if hasattr(file, "getvalue") else b""
    if data.endswith(b"END"):
        os.kill(os.getpid(), signal.SIGKILL)
    if data.endswith(b"SLOW"):
        time.sleep(60)
    if data.endswith(b"LOUD"):
        os.write(2, b"a line of a library\\n" * 6000)
    return opened(file, *words, **more)


Image.open = open_hostile
"""


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_clients_that_end_workers_cost_others_time_alone(checkpoint, photographs, tmp_path, count):
    """64 clients, of which a few send images that end, stop or fill the log of the process that
    reads them.
    """
    (tmp_path / "sitecustomize.py").write_text(HOSTILE)
    file = io.BytesIO()
    Image.open(io.BytesIO(photographs[0])).convert("P").save(file, "GIF")
    harmless = file.getvalue()
    files = [*photographs, file.getvalue()]
    expected = Predictor(checkpoint)(files)
    flags = [f"-workers={count}", "-timeout=120", "-max_queue=512"]
    with serving(checkpoint, *flags, folder=tmp_path, PYTHONPATH=str(tmp_path)) as server:
        server.ready()

        def honest(client):
            for turn in range(4):
                which = (client + turn) % len(files)
                status, answer, _ = server.ask("POST", "/predict", files[which], JPEG, 150)
                assert status == 200, answer
                assert answer["predictions"][0]["outputs"] == expected[which].outputs
                shares = answer["predictions"][0]["probabilities"]
                np.testing.assert_allclose(shares, expected[which].probabilities, rtol=1e-5)

        def hostile(end):
            return server.ask("POST", "/predict", harmless + end, JPEG, 150)[:2]

        assert server.ask("POST", "/predict", harmless + b"LOUD", JPEG)[0] == 200
        with ThreadPoolExecutor(64) as clients:
            asking = [clients.submit(honest, client) for client in range(60)]
            attacks = [clients.submit(hostile, end) for end in [b"END", b"END", b"END", b"SLOW"]]
            for one in asking:
                one.result(300)
            answers = [attack.result(300) for attack in attacks]
        line = "the process that worked on an image was killed by SIGKILL; the image isn't processed again"
        assert answers[:3] == [(500, {"error": line})] * 3
        assert answers[3] == (504, {"error": "reading an image took more than 24 s"})
        assert server.metric("paddle_vit_worker_restarts_total") == 4  # one for each
        assert (
            server.text("err").count("\n") == server.text("err").count("a new one is started") == 4
        )
        assert server.process.poll() is None


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
    assert (
        last
        == "error: 6 workers ended in a row, the last one was killed by SIGKILL; out of memory?"
    )
