"""Beside a GPU, a checkpoint's copy goes to pinned memory in its turn, and a thread waits for it
(simulated).
"""

import threading

import numpy as np
import paddle
import pytest
from support.small_training import SmallTraining

from training.checkpoint import Progress, saver, storage

Tensor = paddle.base.core.eager.Tensor


class Stream:
    """Copies in the order of the device, which are there when ``done`` is set; ``taken``: how many."""

    def __init__(self):
        self.done = threading.Event()
        self.taken = 0
        self.recorded = 0

    def pin_memory(self, tensor, blocking=True):
        assert not blocking
        assert not self.recorded, "begun after the event that is waited for"
        self.taken += 1
        return Pinned(self, tensor.numpy().copy())

    def record(self):
        self.recorded = self.taken

    def query(self):
        return self.done.is_set()


class Pinned:
    """Memory that is read too early before the stream is done."""

    def __init__(self, stream, array):
        self.stream = stream
        self.array = array

    def numpy(self):
        assert self.stream.done.is_set(), "read before it was there"
        return self.array


@pytest.fixture
def stream(monkeypatch):
    made = Stream()
    monkeypatch.setattr(saver, "num_gpus", lambda: 1)
    monkeypatch.setattr(
        Tensor, "pin_memory", lambda tensor, blocking=True: made.pin_memory(tensor, blocking)
    )
    monkeypatch.setattr(paddle.device, "Event", lambda: made)
    yield made
    made.done.set()


def test_the_training_goes_on_while_the_copy_is_under_way(tmp_path, tiny, stream):
    training = SmallTraining(tmp_path, tiny)
    training.update(0)
    expected = training.held()
    training.saver.save(Progress(samples=8, step=1))
    assert stream.recorded == stream.taken > 2 * len(expected[storage.MODEL])
    training.update(1)
    training.saver.thread.join(0.2)
    assert training.saver.thread.is_alive()
    assert not training.saver.path.exists()
    stream.done.set()
    training.saver.wait()
    training.assert_saved("epoch_0001_sample_000000008", expected)


def test_what_paddle_promises_of_the_copy_is_there():
    """Both builds document them; ``numpy`` of pinned memory is a copy on the host."""
    assert {"record", "query"} <= set(dir(paddle.device.Event))
    assert callable(Tensor.pin_memory)


def test_copies_are_the_tensors_values_at_their_time():
    weight = paddle.to_tensor([1.0, 2.0])
    arrived = saver.host_copies({"w": weight})
    weight.zero_()
    np.testing.assert_array_equal(arrived()["w"], [1.0, 2.0])
