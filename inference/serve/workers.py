"""Starts the worker processes of a server, gives them batches, and replaces those that end.

This is the HTTP process's side. ``compute`` is the program of a worker.
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
from inference.serve.batching import Answer, Batcher, Item, Lost
from inference.serve.gate import log
from inference.serve.metrics import Metrics
from inference.serve.progress import COMPUTING, READING, Progress
from inference.serve.settings import Settings
from launch.startup import STOP_SIGNALS
from launch.verdict import START_UP

_PROGRAM = Path(__file__).with_name("compute.py")
# The number of batches that a worker has: it decodes one while it computes another.
_AHEAD = 2
# A worker that lived for this many seconds starts a new count of failures in a row.
_LASTING = 60.0


class Worker:
    """A worker process, from its start to its end. The worker that replaces it is a new object.

    Attributes:
        started: when it was started, by ``time.monotonic``.
        ready: whether it has loaded the model.
        load_failed: whether it couldn't load the model, or loaded another one than the first
            worker.
        stuck: whether it was killed because it read one image for too long.
        slots: free places for batches.
        pending: the batches that it hasn't answered, by number: when each was sent, and its images.
        active: when it last answered, or when it got work while it had none.
        batch_seconds: how long its last batch took.
    """

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
        self.started = time.monotonic()
        self.ready = False
        self.load_failed = False
        self.stuck = False
        self.slots = asyncio.Semaphore(_AHEAD)
        self.pending: dict[int, tuple[float, list[Item]]] = {}
        self.active = self.started
        self.batch_seconds = 0.0

    def send(self, number: int, items: list[Item]) -> None:
        """Sends a batch, whose number is new."""
        if not self.pending:
            self.active = time.monotonic()
        self.pending[number] = time.monotonic(), items
        head = {"id": number, "parameters": [item.parameters for item in items]}
        self.writer.write(messages.pack(head, [item.data for item in items]))

    def reading(self) -> tuple[Item, float] | None:
        """Returns the image that it is reading, and since when."""
        note = self.progress.of(READING)
        if note.batch not in self.pending:
            return None
        _, items = self.pending[note.batch]
        return items[note.place], note.since

    def computing(self) -> list[Item]:
        """Returns the images that it is computing, or those that it receives next."""
        batch = self.progress.of(COMPUTING).batch
        if batch not in self.pending:
            batch = next(iter(self.pending), 0)
        if not batch:
            return []
        _, items = self.pending[batch]
        return items

    def culprits(self) -> list[Item]:
        """Returns the images that may have ended it.

        An image ends a process as it is read. If the process was reading one, it is that image. An
        image of /attention is read once more where it is computed. Other images that were being
        computed may be innocent, because somebody else may have ended the process. They are tried
        once more, and are culprits if they end another one.
        """
        if reading := self.reading():
            item, _ = reading
            return [item]
        return [
            item
            for item in self.computing()
            if item.tried or item.parameters["kind"] == "attention"
        ]


class Pool:
    """The workers of a server, ``settings.workers`` of them.

    Attributes:
        about: the model's name and task ("model", "task"), once a worker has loaded it.
        oriented: whether the model sees photographs rotated as their EXIF says
            (DATA.EXIF_ORIENTATION).
        gives_maps: whether the model gives a class for each pixel; None: it isn't known yet.
        keeps_sizes: whether images differ in size when the model sees them.
        takes_classes: whether requests may name their classes.
        ended: gets an exception once the server can't continue.
    """

    def __init__(self, settings: Settings, batcher: Batcher, metrics: Metrics) -> None:
        self.settings = settings
        self.batcher = batcher
        self.metrics = metrics
        self.workers: list[Worker | None] = [None] * settings.workers
        self.about: dict[str, Any] = {}
        self.oriented = False
        self.gives_maps: bool | None = None
        self.keeps_sizes = False
        self.takes_classes = False
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # The hash of the model that the first worker loaded.
        self._fingerprint = ""
        # The last reason why a worker can't be replaced, which is logged once.
        self._reported = ""
        # How many workers in a row ended while they had no batch.
        self._failures = 0
        # The number of the last batch.
        self._batches = 0
        self._tasks = [
            asyncio.ensure_future(self._keep_alive(place)) for place in range(settings.workers)
        ]
        self._tasks.append(asyncio.ensure_future(self._watch()))

    @property
    def reading_limit(self) -> float:
        """Returns the seconds that reading an image may take. The other images of its batch wait
        meanwhile, and have some of their time left.
        """
        return self.settings.timeout / 5

    def ready(self) -> int:
        """Returns how many workers have loaded the model."""
        return sum(worker is not None and worker.ready for worker in self.workers)

    async def close(self) -> None:
        """Kills all workers. They have nothing to save."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep_alive(self, place: int) -> None:
        """Starts a worker, and another one each time it ends."""
        failed_loads = 0
        try:
            while not self.ended.done():
                worker = await self._start(place)
                self.workers[place] = worker
                code = await self._run(worker)
                self.workers[place] = None
                failed_loads = failed_loads + 1 if worker.load_failed else 0
                self._record_end(worker, code)
                await asyncio.sleep(self._pause(failed_loads))
        except Exception as error:
            # No process can be started.
            self._end(
                RunError(f"a worker can't be started ({one_line(str(error))}); out of memory?")
            )

    def _pause(self, failed_loads: int) -> float:
        """Returns the seconds to wait before another worker is started: the more failures in a row,
        the longer.
        """
        failures = max(failed_loads, self._failures - 1)
        if not failures:
            return 0
        longest = 60.0 if failed_loads else 15.0
        return min(longest, 0.25 * 2 ** min(failures, 10))

    async def _start(self, place: int) -> Worker:
        ours, theirs = socket.socketpair()
        memory = Progress.create()
        # This process closes its copies of both descriptors once the worker has them.
        with theirs, open(memory, "rb"):
            settings = self.settings
            start_settings = {
                "path": settings.path,
                "cfg": settings.cfg,
                "options": list(settings.options),
                "classes": settings.classes,
                "workers": settings.workers,
                "batch_size": settings.batch_size,
                "place": place,
                "server": os.getpid(),
                "progress": memory,
            }
            python = [sys.executable, "-X", "utf8"]
            command = [*python, str(_PROGRAM), str(theirs.fileno()), json.dumps(start_settings)]
            # A signal to the whole process group is meant for the server, which still needs its
            # workers. A new process inherits which signals are blocked.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
            try:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno(), memory]
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            progress = Progress(memory)
        reader, writer = await asyncio.open_connection(sock=ours)
        return Worker(process, progress, reader, writer)

    async def _run(self, worker: Worker) -> int:
        """Gives a worker batches and takes its answers until it ends; returns its exit status."""
        feeding = asyncio.ensure_future(self._feed(worker))
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                await self._receive(worker)
        finally:
            worker.ready = False
            feeding.cancel()
            worker.writer.transport.abort()
            worker.process.kill()
            code = await asyncio.to_thread(worker.process.wait)
        return code

    async def _receive(self, worker: Worker) -> None:
        """Receives a worker's messages until it ends. The first one, which says that it has loaded
        the model, has to come in time.
        """
        limit = max(START_UP, 2 * self.settings.timeout)
        try:
            head, parts = await asyncio.wait_for(messages.receive(worker.reader), limit)
        except asyncio.TimeoutError:
            line = f"the model didn't answer within {limit:g} s after its start; raise -timeout if it is slow"
            self._record_failed_load(worker, line, RunError.exit_status)
            return
        self._handle(worker, head, parts)
        while True:
            head, parts = await messages.receive(worker.reader)
            self._handle(worker, head, parts)

    async def _feed(self, worker: Worker) -> None:
        """Sends batches to a worker, once it has loaded the model."""
        while True:
            await worker.slots.acquire()
            while not worker.ready:
                await asyncio.sleep(0.02)
            while self._can_wait(worker):
                await asyncio.sleep(min(0.02, worker.batch_seconds / 20))
            items = await self.batcher.take()
            self._batches += 1
            self.metrics.batches.observe(len(items))
            worker.send(self._batches, items)

    def _can_wait(self, worker: Worker) -> bool:
        """Returns whether a busy worker's next batch may still grow. It is needed once half of the
        batch before it is computed.
        """
        is_early = time.monotonic() < worker.active + worker.batch_seconds / 2
        return bool(worker.pending) and is_early and len(self.batcher) < self.batcher.batch_size

    def _handle(self, worker: Worker, head: dict[str, Any], parts: list[bytes]) -> None:
        """Takes a worker's message: that it has loaded the model, that it can't, or the answers to
        a batch.
        """
        before = worker.active
        worker.active = time.monotonic()
        if "loaded" in head and self._fingerprint in ("", head["fingerprint"]):
            if head["warning"] and not self.about:
                log(f"warning: {head['warning']}")
            worker.ready = True
            self.about = head["loaded"]
            self.oriented = head["oriented"]
            self.gives_maps = head["gives_maps"]
            self.keeps_sizes = head["keeps_sizes"]
            self.takes_classes = head["takes_classes"]
            self._fingerprint = head["fingerprint"]
            self._reported = ""
        elif "loaded" in head:
            worker.process.kill()
            line = (
                f"{self.settings.path} has changed since the server started; start the server again"
            )
            self._record_failed_load(worker, line, InputError.exit_status)
        elif "error" in head:
            self._record_failed_load(worker, head["error"], head["status"])
        else:
            sent, items = worker.pending.pop(head["id"])
            worker.slots.release()
            worker.batch_seconds = worker.active - max(sent, before)
            self._failures = 0
            self.batcher.record_rate(len(items), worker.active - sent)
            for item, content, picture in zip(items, head["answers"], parts, strict=True):
                if not item.answer.done():
                    item.answer.set_result(Answer(content, picture))

    def _record_failed_load(self, worker: Worker, line: str, status: int) -> None:
        """Records that a worker couldn't load the model, or loaded another one.

        The other workers continue. The server ends if no worker has ever loaded the model, or if none
        is left and the input is wrong, so that the next worker would fail, too.
        """
        worker.load_failed = True
        is_input_error = status == InputError.exit_status
        if not self.about:
            kind = InputError if is_input_error else RunError
            self._end(kind(line))
        elif is_input_error and not self.ready():
            self._end(RunError(line))
        elif self._reported != line:
            self._reported = line
            log(f"error: a worker can't be replaced, {self.ready()} continue: {line}")

    def _record_end(self, worker: Worker, code: int) -> None:
        """Records that a worker ended. The requests that ended it are given up, and its other
        images go to another worker.

        The server ends if too many workers in a row end without having had anything to do. So
        requests can't end it.
        """
        self.metrics.restarts.inc()
        # The reason was logged already.
        if worker.load_failed and (self.ready() or self.ended.done()):
            return
        how = f"ended with exit status {code}"
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        culprits = worker.culprits()
        returned = self._give_up(worker, culprits, how)
        if not worker.reading():
            for item in worker.computing():
                item.alone = True
                item.tried = True
        self.batcher.put_back(returned)
        cause = f" on an image from {culprits[0].client}" if culprits else ""
        log(f"a worker {how}{cause}; a new one is started and gets its {len(returned)} images")
        if worker.pending:
            return
        if time.monotonic() - worker.started > _LASTING:
            self._failures = 1
        else:
            self._failures += 1
        if self._failures > 3 * self.settings.workers + 2:
            row = f"{self._failures} workers ended in a row, the last one {how}"
            self._end(RunError(f"{row}; out of memory?"))

    def _give_up(self, worker: Worker, culprits: list[Item], how: str) -> list[Item]:
        """Gives up the requests of images that ended a worker; returns the worker's other images.

        All images of these requests that the worker had are given up, so that none of them ends
        another worker.
        """
        if worker.stuck:
            lost = Lost(f"reading an image took more than {self.reading_limit:g} s", 504)
        else:
            lost = Lost(
                f"the process that worked on an image {how}; the image isn't processed again", 500
            )
        returned = []
        for _, items in worker.pending.values():
            for item in items:
                if item.answer.done():
                    continue
                if any(item.parameters is culprit.parameters for culprit in culprits):
                    item.answer.set_exception(lost)
                else:
                    returned.append(item)
        return returned

    def _end(self, error: RunError) -> None:
        """Ends the server with an error."""
        if not self.ended.done():
            self.ended.set_exception(error)

    async def _watch(self) -> None:
        """Kills a worker that reads one image for too long, or that doesn't answer for twice the
        time of a request.
        """
        while True:
            await asyncio.sleep(0.5)
            now = time.monotonic()
            for worker in self.workers:
                if not worker or not worker.pending:
                    continue
                reading = worker.reading()
                worker.stuck = reading is not None and now - reading[1] > self.reading_limit
                if worker.stuck or now - worker.active > 2 * self.settings.timeout:
                    worker.process.kill()
