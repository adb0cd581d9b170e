"""The queue of images that wait for a worker, and batches of them.

A batch is complete if it has enough images, or if its first image has waited long enough. Each
client (an address) has a queue of its own, and these take turns. So a client that sends thousands
of images delays only its own.
"""

import asyncio
import collections
import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

# The parameters of a request that say which classes of its images are given (``Predictor.choice``).
CHOICES = ("top", "threshold", "coverage", "reject", "score")


class Full(Exception):
    """The queue is full.

    Args:
        seconds: when there may be a free place.
    """

    def __init__(self, seconds: int) -> None:
        super().__init__(f"too many images are waiting; try again in {seconds} s")
        self.seconds = seconds


class Lost(Exception):
    """An image has no answer, because its worker ended.

    Args:
        line: says how the worker ended.
        status: the status of the HTTP response.
    """

    def __init__(self, line: str, status: int) -> None:
        super().__init__(line)
        self.status = status


class Answer(NamedTuple):
    """A worker's answer to an image.

    Attributes:
        content: "outputs", "classes" and "probabilities" of a prediction, with "unknown" and "score"
            if a rejection was asked for; of a class for each pixel "width", "height", "outputs",
            "classes" and "percents"; or "error", why the image can't be read; or "refused", which
            parameter the model doesn't take; or "failed", why the model gives no outputs. The values
            are JSON's types.
        picture: a PNG, for an image of /attention or /mask.
    """

    content: dict[str, Any]
    picture: bytes = b""


@dataclass(eq=False)
class Item:
    """An image of a request.

    Attributes:
        data: the content of the image's file.
        parameters: the request's parameters for a worker: "kind" ("predict", "attention" or
            "mask") and CHOICES. All images of a request have the same object.
        answer: gets the worker's answer.
        client: address of the client.
        alone: whether it is a batch by itself. An image of /attention is, and each one of a model
            whose images differ in size (``Predictor.keeps_sizes``). So is one that was being
            computed when its worker ended.
        tried: whether a worker ended while it computed the image.
        since: when it began to wait, by ``time.monotonic``.
    """

    data: bytes
    parameters: dict[str, Any]
    answer: asyncio.Future[Answer]
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
        # A queue for each client. No queue is empty, and the first one is the next to be served.
        self._queues: dict[str, collections.deque[Item]] = {}
        # Images whose worker has ended. They come before all others.
        self._returned: collections.deque[Item] = collections.deque()
        self._arrived = asyncio.Event()
        # Workers take their batches one after the other.
        self._taking = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._returned) + sum(map(len, self._queues.values()))

    def put(self, items: Sequence[Item]) -> None:
        """Adds the images of a request to the queue, all or none.

        If the queue is full, the last images of the longest client's queue lose their places to a
        client that has fewer.

        Raises:
            Full: there are no places for them.
        """
        if len(self) + len(items) > self.most:
            self._drop_given_up()
        client = items[0].client
        # What the client would have in the queue, and the places that the queue lacks for it.
        share = len(self._queues.get(client, ())) + len(items)
        lacking = len(self) + len(items) - self.most
        full = Full(min(60, max(1, math.ceil(len(self) / self.rate))))
        if lacking > sum(max(0, len(queue) - share) for queue in self._queues.values()):
            raise full
        for _ in range(lacking):
            lost = max(self._queues.values(), key=len).pop()
            if not lost.answer.done():
                lost.answer.set_exception(full)
        self._queues.setdefault(client, collections.deque()).extend(items)
        self._arrived.set()

    def put_back(self, items: Sequence[Item]) -> None:
        """Adds images whose worker has ended, before all others."""
        self._returned.extendleft(reversed(items))
        self._arrived.set()

    async def take(self) -> list[Item]:
        """Waits for the next batch, and returns it."""
        async with self._taking:
            while True:
                await self._wait_for_image()
                first = self._first_queue()[0]
                if not first.alone:
                    await self._wait_for_others(first.since + self.max_delay)
                if batch := self._pop():
                    return batch

    async def _wait_for_image(self) -> None:
        """Waits until the queue has an image."""
        while not len(self):
            self._arrived.clear()
            await self._arrived.wait()

    async def _wait_for_others(self, until: float) -> None:
        """Waits for further images of a batch until it is full or the time is ``until``."""
        while len(self) < self.batch_size and (seconds := until - time.monotonic()) > 0:
            self._arrived.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._arrived.wait(), seconds)

    def _pop(self) -> list[Item]:
        """Takes a batch from the queue. It is empty if nobody waits for its images any more."""
        batch: list[Item] = []
        while len(self) and len(batch) < self.batch_size:
            if batch and self._first_queue()[0].alone:
                break
            item = self._next()
            # It is done if the client has left, or has waited too long.
            if not item.answer.done():
                batch.append(item)
            if item.alone and batch:
                break
        return batch

    def _first_queue(self) -> collections.deque[Item]:
        """Returns the queue that is the next to be served."""
        return self._returned or next(iter(self._queues.values()))

    def _next(self) -> Item:
        """Takes the first image of the queue that is the next to be served.

        That queue then comes after all others.
        """
        if self._returned:
            return self._returned.popleft()
        client = next(iter(self._queues))
        queue = self._queues.pop(client)
        item = queue.popleft()
        if queue:
            self._queues[client] = queue
        return item

    def _drop_given_up(self) -> None:
        """Removes images whose client has left, or has waited too long."""
        self._returned = collections.deque(
            item for item in self._returned if not item.answer.done()
        )
        for client, queue in list(self._queues.items()):
            kept = collections.deque(item for item in queue if not item.answer.done())
            if kept:
                self._queues[client] = kept
            else:
                del self._queues[client]

    def record_rate(self, images: int, seconds: float) -> None:
        """Records how fast a batch was answered, for the estimate of ``Full.seconds``."""
        self.rate = 0.8 * self.rate + 0.2 * images / max(seconds, 1e-6)
