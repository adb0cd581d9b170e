"""Batches of images that wait: their sizes, their order, and who is left out."""

import asyncio
import time

import pytest

from inference.serve.batching import Batcher, Full, Item


def run(test):
    asyncio.run(asyncio.wait_for(test(), 10))


def item(number, alone=False, client=""):
    return Item(b"", {"number": number}, asyncio.get_running_loop().create_future(), client, alone)


def numbers(batch):
    return [one.parameters["number"] for one in batch]


def test_a_batch_is_full_at_once_or_waits_for_others_as_long_as_told():
    async def test():
        batcher = Batcher(4, 0.5, 100)
        batcher.put([item(n) for n in range(6)])
        started = time.monotonic()
        assert numbers(await batcher.take()) == [0, 1, 2, 3]
        assert time.monotonic() - started < 0.4
        asyncio.get_running_loop().call_later(0.05, batcher.put, [item(6)])
        assert numbers(await batcher.take()) == [4, 5, 6]
        assert time.monotonic() - started >= 0.49

    run(test)


def test_what_fills_a_batch_ends_its_waiting():
    async def test():
        batcher = Batcher(3, 5.0, 100)
        batcher.put([item(0)])
        asyncio.get_running_loop().call_later(0.05, batcher.put, [item(1), item(2), item(3)])
        started = time.monotonic()
        assert numbers(await batcher.take()) == [0, 1, 2]
        assert time.monotonic() - started < 1

    run(test)


def test_takers_take_turns():
    async def test():
        batcher = Batcher(2, 0.01, 100)
        takers = [asyncio.ensure_future(batcher.take()) for _ in range(3)]
        await asyncio.sleep(0.01)
        batcher.put([item(n) for n in range(5)])
        assert [numbers(await taker) for taker in takers] == [[0, 1], [2, 3], [4]]

    run(test)


def test_who_has_gone_is_left_out():
    async def test():
        batcher = Batcher(3, 0.01, 100)
        items = [item(n) for n in range(5)]
        batcher.put(items)
        for gone in (0, 1, 3):
            items[gone].answer.cancel()
        assert numbers(await batcher.take()) == [2, 4]

    run(test)


def test_maps_and_images_to_try_alone_are_alone():
    async def test():
        batcher = Batcher(4, 0.01, 100)
        batcher.put([item(0), item(1, alone=True), item(2), item(3)])
        assert [numbers(await batcher.take()) for _ in range(3)] == [[0], [1], [2, 3]]
        again = [item(4, alone=True), item(5, alone=True)]
        batcher.put([item(6), item(7)])
        batcher.put_back(again)
        assert [numbers(await batcher.take()) for _ in range(3)] == [[4], [5], [6, 7]]

    run(test)


def test_the_queue_takes_all_of_a_request_or_nothing():
    async def test():
        batcher = Batcher(2, 0.01, 4)
        first = [item(n) for n in range(3)]
        batcher.put(first)
        with pytest.raises(Full) as full:
            batcher.put([item(3), item(4)])
        assert len(batcher) == 3
        assert full.value.seconds == 3  # at one image a second, as long as nothing is known
        for _ in range(50):
            batcher.record_rate(30, 1.0)
        with pytest.raises(Full) as full:
            batcher.put([item(3), item(4)])
        assert full.value.seconds == 1
        first[0].answer.cancel()  # nobody waits for it any more: there is room
        batcher.put([item(3), item(4)])
        assert [numbers(await batcher.take()) for _ in range(2)] == [[1, 2], [3, 4]]

    run(test)


def test_clients_take_turns():
    async def test():
        batcher = Batcher(3, 0.01, 100)
        batcher.put([item(n, client="many") for n in range(6)])
        batcher.put([item(n, client="some") for n in (10, 11)])
        batcher.put([item(20, client="one")])
        assert [numbers(await batcher.take()) for _ in range(3)] == [
            [0, 10, 20],
            [1, 11, 2],
            [3, 4, 5],
        ]

    run(test)


def test_the_longest_line_gives_its_last_places_to_a_shorter_one():
    async def test():
        batcher = Batcher(10, 0.01, 6)
        many = [item(n, client="many") for n in range(5)]
        batcher.put(many)
        batcher.put([item(10, client="some")])
        batcher.put([item(20, client="one"), item(21, client="one")])
        with pytest.raises(Full):
            batcher.put([item(22, client="one")])  # its line would be as long as the longest
        assert [one.answer.done() for one in many] == [False, False, False, True, True]
        for lost in many[3:]:
            with pytest.raises(Full, match="too many images are waiting; try again in 6 s"):
                lost.answer.result()
        assert numbers(await batcher.take()) == [0, 10, 20, 1, 21, 2]

    run(test)


def test_what_was_tried_once_keeps_its_place():
    async def test():
        batcher = Batcher(10, 0.01, 2)
        batcher.put_back([item(0, client="many", alone=True), item(1, client="many", alone=True)])
        with pytest.raises(Full):
            batcher.put([item(2, client="one")])
        assert [numbers(await batcher.take()) for _ in range(2)] == [[0], [1]]

    run(test)
