"""The queue of images that wait for a worker, and batches of them.

A batch is complete by its number of images, or by how long its first image has waited. Each client
(an address) has a queue of its own, and these take turns. So a client that sends thousands of
images delays its own ones.
"""

import asyncio
import collections
import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


class Full(Exception):
    """The queue is full. ``seconds``: when there may be a free place."""

    def __init__(self, seconds: int) -> None:
        super().__init__(f"as many images wait as may; try again in {seconds} s")
        self.seconds = seconds


class Lost(Exception):
    """An image has no answer, because its worker ended. ``status``: of the HTTP response."""

    def __init__(self, line: str, status: int) -> None:
        super().__init__(line)
        self.status = status


@dataclass(eq=False)
class Item:
    """An image of a request.

    Attributes:
        data: the content of the image's file.
        asked: the request's parameters for a worker: "kind" ("predict" or "attention"), "top",
            "threshold". All images of a request have the same object.
        answer: the worker's answer, in JSON's types, and a picture.
        client: address of the client.
        alone: whether it is a batch by itself. Maps are, and so is an image that was being computed
            when its worker ended.
        tried: whether a worker ended while it computed the image.
        since: when it began to wait, by ``time.monotonic``.
    """

    data: bytes
    asked: dict[str, Any]
    answer: asyncio.Future[tuple[dict[str, Any], bytes]]
    client: str = ""
    alone: bool = False
    tried: bool = False
    since: float = field(default_factory=time.monotonic)


class Batcher:
    """The queue of waiting images.

    Args:
        batch_size: the most images of a batch.
        max_delay: seconds that the first image of a batch waits for others.
        most: the most images that wait.
    """

    def __init__(self, batch_size: int, max_delay: float, most: int) -> None:
        self.batch_size = batch_size
        self.max_delay = max_delay
        self.most = most
        # Images per second, averaged over the last batches.
        self.rate = 1.0
        # A queue for each client. None is empty, and the first is the next to be served.
        self._lines: dict[str, collections.deque[Item]] = {}
        # Images that were put back, which come before all others.
        self._again: collections.deque[Item] = collections.deque()
        self._arrived = asyncio.Event()
        # Held by the worker that gathers a batch: workers take batches one after the other.
        self._one = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._again) + sum(map(len, self._lines.values()))

    def put(self, items: Sequence[Item]) -> None:
        """Adds the images of a request to the queue, all or none.

        If the queue is full, the last images of the longest client's queue lose their places to a
        client that has fewer.

        Raises:
            Full: there are no places for them.
        """
        if len(self) + len(items) > self.most:
            self._drop_given_up()
        share = len(self._lines.get(items[0].client, ())) + len(items)
        lacking = len(self) + len(items) - self.most
        full = Full(min(60, max(1, math.ceil(len(self) / self.rate))))
        if lacking > sum(max(0, len(line) - share) for line in self._lines.values()):
            raise full
        for _ in range(lacking):
            lost = max(self._lines.values(), key=len).pop()
            if not lost.answer.done():
                lost.answer.set_exception(full)
        self._lines.setdefault(items[0].client, collections.deque()).extend(items)
        self._arrived.set()

    def put_back(self, items: Sequence[Item]) -> None:
        """Puts images whose worker has ended before all others."""
        self._again.extendleft(reversed(items))
        self._arrived.set()

    async def take(self) -> list[Item]:
        """Waits for the next batch, and returns it."""
        async with self._one:
            while True:
                await self._first()
                first = self._line()[0]
                if not first.alone:
                    await self._others(first.since + self.max_delay)
                if batch := self._pop():
                    return batch

    async def _first(self) -> None:
        while not len(self):
            self._arrived.clear()
            await self._arrived.wait()

    async def _others(self, until: float) -> None:
        """Waits for further images of a batch until it is full or the time is ``until``."""
        while len(self) < self.batch_size and (left := until - time.monotonic()) > 0:
            self._arrived.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._arrived.wait(), left)

    def _pop(self) -> list[Item]:
        batch: list[Item] = []
        while len(self) and len(batch) < self.batch_size:
            if batch and self._line()[0].alone:
                break
            item = self._next()
            # It is done if the client has left, or has waited too long.
            if not item.answer.done():
                batch.append(item)
            if item.alone and batch:
                break
        return batch

    def _line(self) -> collections.deque[Item]:
        """Returns the queue that is the next to be served."""
        return self._again or next(iter(self._lines.values()))

    def _next(self) -> Item:
        """Takes the first image of the queue that is the next to be served.

        That queue then comes after all others.
        """
        if self._again:
            return self._again.popleft()
        client = next(iter(self._lines))
        line = self._lines.pop(client)
        item = line.popleft()
        if line:
            self._lines[client] = line
        return item

    def _drop_given_up(self) -> None:
        """Removes images whose client has left, or has waited too long."""
        self._again = collections.deque(item for item in self._again if not item.answer.done())
        left = {
            client: [item for item in line if not item.answer.done()]
            for client, line in self._lines.items()
        }
        self._lines = {client: collections.deque(line) for client, line in left.items() if line}

    def record_rate(self, images: int, seconds: float) -> None:
        """Records how fast a batch was answered, for the estimate of ``Full.seconds``."""
        self.rate = 0.8 * self.rate + 0.2 * images / max(seconds, 1e-6)
