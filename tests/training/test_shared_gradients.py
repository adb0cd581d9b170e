"""Ranks of one machine average their gradients in shared memory: to NumPy's means, to the bits of
DataParallel.
"""

import os
import stat
from pathlib import Path

import numpy as np
import paddle
import pytest
from support.ranks import run_ranks
from support.training_runs import assert_same_run, train

from config import get_config
from training import parallel, shared_gradients
from utils import rank, world_size

SHAPES = {"long": [7, 9], "one": [1], "turned": [4, 3], "mine": [5], "nobodys": [2, 2]}


class Model(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        for name, shape in SHAPES.items():
            setattr(self, name, self.create_parameter(shape))


def gradient(name, place, turn):
    """What rank ``place`` adds to a gradient in a pass; None: nothing."""
    if name == "nobodys" or (name == "mine" and place != 1):
        return None
    return (
        np.random.default_rng([*map(ord, name), place, turn])
        .normal(size=SHAPES[name])
        .astype(np.float32)
    )


def averaged():
    """The gradients after each of two updates of two passes each, and whether ranks have shared
    memory for it.
    """
    # with which the gradient of a transposed weight is strided
    paddle.set_flags({"FLAGS_use_stride_kernel": True})
    model = Model()
    found = []
    network = parallel.wrap_model(get_config(None), model)
    optimizer = paddle.optimizer.SGD(parameters=model.parameters())
    for update in range(2):
        for turn in (2 * update, 2 * update + 1):
            loss = 0.0
            for name, parameter in model.named_parameters():
                if (own := gradient(name, rank(), turn)) is not None:
                    own = paddle.to_tensor(own)
                    loss += (
                        (parameter.t() * own.t()).sum()
                        if name == "turned"
                        else (parameter * own).sum()
                    )
            loss.backward()
        parallel.reduce_gradients(network, optimizer)
        found.append(
            {
                name: p.grad if p.grad is None else p.grad.numpy()
                for name, p in model.named_parameters()
            }
        )
        optimizer.clear_grad(False)
    return found, isinstance(network, paddle.DataParallel) and network.shared is not None


def in_small_pieces():
    shared_gradients.PIECE = 10
    return averaged()


@pytest.mark.smoke
@pytest.mark.parametrize("ranks", [2, 3])
def test_each_rank_has_the_mean_gradients_and_those_that_no_rank_has_stay_absent(ranks):
    told = run_ranks(in_small_pieces, ranks=ranks)
    assert [shared for _, shared in told] == [True] * ranks
    for update in range(2):
        for name in SHAPES:
            passes = [
                gradient(name, place, turn)
                for place in range(ranks)
                for turn in (2 * update, 2 * update + 1)
            ]
            mean = sum(own for own in passes if own is not None) / ranks
            for found, _ in told:
                if name == "nobodys":
                    assert found[update][name] is None
                else:
                    np.testing.assert_allclose(found[update][name], mean, atol=1e-6)
                    np.testing.assert_array_equal(found[update][name], told[0][0][update][name])


def memory_and_refusals():
    """What this rank's memory is to the system; what there is where a rank can't have it, or is
    elsewhere.
    """
    before = {*os.listdir("/proc/self/fd")}
    segments = {*os.listdir("/dev/shm")}
    parameters = [paddle.create_parameter([3], "float32")]
    shared = shared_gradients.share_gradients(parameters)
    left = {*os.listdir("/proc/self/fd")} - before
    held = [
        os.stat(f"/proc/self/fd/{number}")
        for number in left
        if Path(f"/proc/self/fd/{number}").exists()
    ]
    told = [(stat.S_IMODE(one.st_mode), one.st_nlink, one.st_size) for one in held]
    segments ^= {*os.listdir("/dev/shm")}
    del shared
    mapped = shared_gradients.mmap.mmap
    stated = os.stat
    refused = []
    for what in ("no memory", "another machine", "another type"):
        if rank() == 1 and what == "no memory":
            shared_gradients.mmap.mmap = lambda *_: (_ for _ in ()).throw(PermissionError)
        if rank() == 1 and what == "another machine":
            shared_gradients.os.stat = lambda _: stated("/")
        if what == "another type":
            parameters = [paddle.create_parameter([3], "float64")]
        refused.append(shared_gradients.share_gradients(parameters))
        shared_gradients.mmap.mmap, shared_gradients.os.stat = mapped, stated
    return told, segments, refused


def test_the_memory_has_no_name_and_where_one_rank_lacks_it_none_has_it():
    for told, segments, refused in run_ranks(memory_and_refusals):
        assert told == [(0o600, 0, 2 * (3 * 4 + 1))]
        assert segments == set()
        assert refused == [None] * 3


def both_ways(options, folder):
    """Trains by shared memory and by DataParallel's own reducing."""
    train(options, folder / "shared", 64)
    shared_gradients.os.memfd_create = lambda _: (_ for _ in ()).throw(OSError)
    train(options, folder / "sent", 64)
    return world_size()


def test_a_run_has_the_bits_of_one_whose_gradients_are_sent(tmp_path, tiny):
    options = [*tiny, "DATA.BATCH_SIZE", "4", "TRAIN.ACCUM_ITER", "2", "TRAIN.GRAD_CLIP", "0.5"]
    assert run_ranks(both_ways, options, tmp_path) == [2, 2]
    assert_same_run(tmp_path / "sent", tmp_path / "shared")
    line = "gradients are averaged in shared memory"
    assert [line in (tmp_path / name / "log.txt").read_text() for name in ("shared", "sent")] == [
        True,
        False,
    ]
