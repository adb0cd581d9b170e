"""Images that wait for a worker, and batches of them: by count, and by how long the first has
waited.

Each client (an address) has a line of its own, and the lines take turns: who sends thousands waits
behind himself.
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
    """The queue is full; ``seconds``: until there may be a free place."""

    def __init__(self, seconds: int) -> None:
        super().__init__(f"as many images wait as may; try again in {seconds} s")
        self.seconds = seconds


class Lost(Exception):
    """An image isn't answered as its worker ended over it; ``status``: of the answer."""

    def __init__(self, line: str, status: int) -> None:
        super().__init__(line)
        self.status = status


@dataclass(eq=False)
class Item:
    """An image of a request.

    Attributes:
        data: the image's file.
        asked: what a worker is to do with it: "kind" ("predict" or "attention"), "top",
            "threshold". The images of a request have the same object.
        answer: (what the worker says, in JSON's terms; a picture).
        client: who asks.
        alone: it is computed by itself, as a map is, or an image that was being computed as its
            worker ended.
        tried: a worker ended that was computing it.
    """

    data: bytes
    asked: dict[str, Any]
    answer: asyncio.Future[tuple[dict[str, Any], bytes]]
    client: str = ""
    alone: bool = False
    tried: bool = False
    since: float = field(default_factory=time.monotonic)


class Batcher:
    """The images that wait.

    Args:
        batch_size: of a batch, at most.
        max_delay: seconds that the first of a batch waits for others.
        most: images that may wait.
    """

    def __init__(self, batch_size: int, max_delay: float, most: int) -> None:
        self.batch_size = batch_size
        self.max_delay = max_delay
        self.most = most
        self.rate = 1.0  # images per second, of late
        # none is empty; the first has its turn
        self._lines: dict[str, collections.deque[Item]] = {}
        self._again: collections.deque[Item] = collections.deque()  # before all others
        self._arrived, self._one = asyncio.Event(), asyncio.Lock()

    def __len__(self) -> int:
        return len(self._again) + sum(map(len, self._lines.values()))

    def put(self, items: Sequence[Item]) -> None:
        """Lets the images of a request wait, all or none.

        If the queue is full, the last images of the longest line lose their places to those of a
        shorter one.

        Raises:
            Full: the queue has no places for them.
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
        """Puts images whose worker ended before all others."""
        self._again.extendleft(reversed(items))
        self._arrived.set()

    async def take(self) -> list[Item]:
        """Returns the next batch, once there is one."""
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
        """Waits until the batch is full or the time has come; an image that comes alone isn't
        waited for.
        """
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
            if not item.answer.done():  # who asked has gone, or has waited too long
                batch.append(item)
            if item.alone and batch:
                break
        return batch

    def _line(self) -> collections.deque[Item]:
        """Returns the line that has its turn."""
        return self._again or next(iter(self._lines.values()))

    def _next(self) -> Item:
        """Takes the first image of the line that has its turn; the others have theirs before it has
        another.
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
        self._again = collections.deque(item for item in self._again if not item.answer.done())
        left = {
            client: [item for item in line if not item.answer.done()]
            for client, line in self._lines.items()
        }
        self._lines = {client: collections.deque(line) for client, line in left.items() if line}

    def record_rate(self, images: int, seconds: float) -> None:
        """Records how fast a batch was answered; ``Full.seconds`` is estimated from it."""
        self.rate = 0.8 * self.rate + 0.2 * images / max(seconds, 1e-6)
