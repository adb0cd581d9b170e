"""The processes that compute, as the HTTP process sees them: started, given batches, replaced when
they end.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from errors import InputError, RunError, one_line
from inference.serve import messages
from inference.serve.batching import Batcher, Item, Lost
from inference.serve.metrics import Metrics
from inference.serve.progress import COMPUTING, READING, Progress
from inference.serve.settings import Settings
from launch.startup import STOP_SIGNALS
from launch.verdict import START_UP

_PROGRAM = Path(__file__).with_name("compute.py")
# The batches that a worker has: it decodes one while it computes another.
_AHEAD = 2
# A worker that lived this many seconds doesn't count as one of several failures in a row.
_LASTING = 60.0


class Worker:
    """A worker process, from its start to its end. The worker that replaces it is a new object."""

    def __init__(
        self,
        process: subprocess.Popen,
        progress: Progress,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.process = process
        self.progress = progress
        self.reader = reader
        self.writer = writer
        self.born = time.monotonic()
        self.ready = False
        # The model couldn't be loaded, or another one was.
        self.unfit = False
        # Killed because it read one image for too long.
        self.stuck = False
        self.slots = asyncio.Semaphore(_AHEAD)
        self.pending: dict[int, tuple[float, list[Item]]] = {}
        # When it last answered, or last got work while it had none.
        self.heard = self.born
        # The seconds that its last batch took.
        self.usual = 0.0

    def send(self, number: int, items: list[Item]) -> None:
        if not self.pending:
            self.heard = time.monotonic()
        self.pending[number] = time.monotonic(), items
        head = {"id": number, "asked": [item.asked for item in items]}
        self.writer.write(messages.pack(head, [item.data for item in items]))

    def reading(self) -> tuple[Item, float] | None:
        """Returns the image that it is reading, and since when."""
        note = self.progress.of(READING)
        if note.batch not in self.pending:
            return None
        return self.pending[note.batch][1][note.place], note.since

    def computing(self) -> list[Item]:
        """Returns the images that it is computing, or receives next."""
        batch = self.progress.of(COMPUTING).batch
        if batch not in self.pending:
            batch = next(iter(self.pending), 0)
        return self.pending[batch][1] if batch else []

    def culprits(self) -> list[Item]:
        """Returns the images over which it ended: the one that it was reading, or what it computed
        for a second time.

        An image ends a process by being read; a map's is read once more where it is computed.
        Somebody else may have ended a process that computed a batch, so it is tried again.
        """
        if reading := self.reading():
            return [reading[0]]
        return [item for item in self.computing() if item.tried or item.asked["kind"] != "predict"]


class Pool:
    """``settings.workers`` of them.

    Attributes:
        about: what the model says of itself ("model", "task"), once one is loaded.
        oriented: whether the model sees photographs rotated as their EXIF says
            (DATA.EXIF_ORIENTATION).
        ended: gets an exception once the server can't go on.
    """

    def __init__(self, settings: Settings, batcher: Batcher, metrics: Metrics) -> None:
        self.settings = settings
        self.batcher = batcher
        self.metrics = metrics
        self.workers: list[Worker | None] = [None] * settings.workers
        self.about: dict[str, Any] = {}
        self.oriented = False
        self._sum = ""
        self._told = ""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._deaths = 0
        self._sent = 0
        self._tasks = [
            asyncio.ensure_future(self._keep(place)) for place in range(settings.workers)
        ]
        self._tasks.append(asyncio.ensure_future(self._watch()))

    @property
    def reading_limit(self) -> float:
        """Returns seconds that reading an image may take: others, which wait meanwhile, have time
        left.
        """
        return self.settings.timeout / 5

    def ready(self) -> int:
        """Returns how many have loaded the model."""
        return sum(worker is not None and worker.ready for worker in self.workers)

    async def close(self) -> None:
        """Ends all: there is nothing left that they could save."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep(self, place: int) -> None:
        """Keeps one worker alive, life after life."""
        unfit = 0
        try:
            while not self.ended.done():
                worker = self.workers[place] = await self._start(place)
                code = await self._live(worker)
                self.workers[place] = None
                unfit = unfit + 1 if worker.unfit else 0
                self._record_death(worker, code)
                again = max(unfit, self._deaths - 1)
                await asyncio.sleep(
                    min(60.0 if unfit else 15.0, 0.25 * 2 ** min(again, 10)) if again else 0
                )
        except Exception as error:  # no process can be started
            self._end(
                RunError(f"a worker can't be started ({one_line(str(error))}); is memory short?")
            )

    async def _start(self, place: int) -> Worker:
        ours, theirs = socket.socketpair()
        memory = Progress.create()
        with theirs, open(memory, "rb"):
            settings = self.settings
            told = {
                key: getattr(settings, key)
                for key in ("path", "cfg", "classes", "workers", "batch_size")
            }
            told |= {
                "options": list(settings.options),
                "place": place,
                "server": os.getpid(),
                "progress": memory,
            }
            words = [
                sys.executable,
                "-X",
                "utf8",
                str(_PROGRAM),
                str(theirs.fileno()),
                json.dumps(told),
            ]
            # A signal to the whole group is for the server, which still needs the worker: so they
            # stay blocked there.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
            try:
                process = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno(), memory]
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            progress = Progress(memory)
        return Worker(process, progress, *await asyncio.open_connection(sock=ours))

    async def _live(self, worker: Worker) -> int:
        """Gives a worker batches and takes its answers until it ends; returns its exit status."""
        feeding = asyncio.ensure_future(self._feed(worker))
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                await self._listen(worker)
        finally:
            worker.ready = False
            feeding.cancel()
            worker.writer.transport.abort()
            worker.process.kill()
            code = await asyncio.to_thread(worker.process.wait)
        return code

    async def _listen(self, worker: Worker) -> None:
        """Takes what a worker says: first that it has loaded the model, which may not take for
        ever.
        """
        limit = max(START_UP, 2 * self.settings.timeout)
        try:
            self._heard(worker, *await asyncio.wait_for(messages.receive(worker.reader), limit))
        except asyncio.TimeoutError:
            line = f"the model didn't answer within {limit:g} s of its start; raise -timeout where it is slow"
            self._unfit(worker, line, RunError.exit_status)
            return
        while True:
            self._heard(worker, *await messages.receive(worker.reader))

    async def _feed(self, worker: Worker) -> None:
        while True:
            await worker.slots.acquire()
            while not worker.ready or self._can_wait(worker):
                await asyncio.sleep(0.02 if not worker.ready else min(0.02, worker.usual / 20))
            items = await self.batcher.take()
            self._sent += 1
            self.metrics.batches.observe(len(items))
            worker.send(self._sent, items)

    def _can_wait(self, worker: Worker) -> bool:
        """Whether a busy worker's next batch may still grow: it is needed once the one before is
        half computed.
        """
        early = time.monotonic() < worker.heard + worker.usual / 2
        return bool(worker.pending) and early and len(self.batcher) < self.batcher.batch_size

    def _heard(self, worker: Worker, head: dict[str, Any], parts: list[bytes]) -> None:
        before = worker.heard
        worker.heard = time.monotonic()
        if "loaded" in head and self._sum in ("", head["sum"]):
            if head["warning"] and not self.about:
                print(f"warning: {head['warning']}", file=sys.stderr, flush=True)
            worker.ready = True
            self.about = head["loaded"]
            self._sum = head["sum"]
            self._told = ""
            self.oriented = head["oriented"]
        elif "loaded" in head:
            worker.process.kill()
            found = f"{self.settings.path} isn't what it was as the server started"
            self._unfit(worker, f"{found}; start the server anew", InputError.exit_status)
        elif "error" in head:
            self._unfit(worker, head["error"], head["status"])
        else:
            sent, items = worker.pending.pop(head["id"])
            worker.slots.release()
            worker.usual = worker.heard - max(sent, before)
            self._deaths = 0
            self.batcher.record_rate(len(items), worker.heard - sent)
            for item, answer, part in zip(items, head["answers"], parts, strict=True):
                if not item.answer.done():
                    item.answer.set_result((answer, part))

    def _unfit(self, worker: Worker, line: str, status: int) -> None:
        """A worker can't load the model, or loaded another one: others go on, if there are any."""
        worker.unfit = True
        wrong = status == InputError.exit_status  # the next one will do no better
        if not self.about or (wrong and not self.ready()):
            self._end((RunError if self.about or not wrong else InputError)(line))
        elif self._told != line:
            self._told = line
            print(
                f"error: a worker can't be replaced, {self.ready()} go on: {line}",
                file=sys.stderr,
                flush=True,
            )

    def _record_death(self, worker: Worker, code: int) -> None:
        """Notes an end. The request over which it ended is given up, and the other images wait
        anew.

        Ends of processes that had nothing to do end the server where there are too many in a row:
        requests can't.
        """
        self.metrics.restarts.inc()
        if worker.unfit and (self.ready() or self.ended.done()):  # it was reported
            return
        how = (
            f"was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"ended with exit status {code}"
        )
        culprits = worker.culprits()
        if worker.stuck:
            lost = Lost(f"reading an image took more than {self.reading_limit:g} s", 504)
        else:
            lost = Lost(
                f"the process that worked on an image {how}; the image isn't tried again", 500
            )
        left = [
            item for _, items in worker.pending.values() for item in items if not item.answer.done()
        ]
        # All images of their requests that this process has: none of them ends another one.
        given_up = [
            item for item in left if any(item.asked is culprit.asked for culprit in culprits)
        ]
        for item in given_up:
            item.answer.set_exception(lost)
        again = [item for item in left if not item.answer.done()]
        if not worker.reading():
            for item in worker.computing():
                item.alone = item.tried = True
        self.batcher.put_back(again)
        over = f" on an image from {culprits[0].client}" if culprits else ""
        print(
            f"a worker {how}{over}; another one starts, {len(again)} images go to it",
            file=sys.stderr,
            flush=True,
        )
        if worker.pending:
            return
        self._deaths = 1 if time.monotonic() - worker.born > _LASTING else self._deaths + 1
        if self._deaths > 3 * self.settings.workers + 2:
            self._end(
                RunError(
                    f"{self._deaths} workers ended in a row, the last one {how}; is memory short?"
                )
            )

    def _end(self, error: RunError) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)

    async def _watch(self) -> None:
        """Kills a worker that reads one image for too long, or answers nothing for twice the time
        of a request.
        """
        while True:
            await asyncio.sleep(0.5)
            now = time.monotonic()
            for worker in self.workers:
                if not worker or not worker.pending:
                    continue
                reading = worker.reading()
                worker.stuck = reading is not None and now - reading[1] > self.reading_limit
                if worker.stuck or now - worker.heard > 2 * self.settings.timeout:
                    worker.process.kill()
