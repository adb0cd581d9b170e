"""Paddle's store, once all ranks are connected: it serves them, and nobody else connects."""

import os
import pickle
import socket
import threading
import time
from types import SimpleNamespace

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from support.ranks import run_ranks

import utils
from errors import RunError
from launch import secret, store


def connects(address):
    try:
        socket.create_connection(address, 0.3).close()
    except OSError:
        return False
    return True


def test_a_shut_listener_keeps_its_connections_and_takes_no_more():
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        address = listener.getsockname()
        with socket.create_connection(address) as guest, listener.accept()[0] as host:
            copies = {found.getsockname() for found in store.listeners()}
            assert {address, other.getsockname()} <= copies
            os.environ["PADDLE_MASTER"] = f"127.0.0.1:{address[1]}"
            assert store.shut_store()
            del os.environ["PADDLE_MASTER"]
            assert not connects(address)
            assert connects(other.getsockname())
            guest.sendall(b"still here")
            assert host.recv(20) == b"still here"


def _shut():
    utils.all_gather(None)
    listening = [found.getsockname() for found in store.listeners()]
    before = [connects(("127.0.0.1", port)) for _, port in listening]
    shut = store.shut_store()
    after = [connects(("127.0.0.1", port)) for _, port in listening]
    total = utils.all_reduce_sum(paddle.to_tensor([1.0])).item()
    dist.barrier()
    return shut, before, after, total, utils.all_gather({"rank": utils.rank()})


def test_paddles_store_is_shut_and_the_ranks_go_on():
    first, second = run_ranks(_shut)
    assert first == (True, [True], [False], 2.0, [{"rank": 0}, {"rank": 1}])
    assert second == (True, [], [], 2.0, [{"rank": 0}, {"rank": 1}])


def _gather(folder):
    sizes = [
        utils.all_gather("x" * (1 + 1000 * utils.rank())),
        utils.all_gather(np.arange(3)),
        utils.all_gather(None),
    ]
    if utils.rank():
        secret.set_run_key("another")  # as who holds no secret of this run's
        code = f"cposix\nmkdir\n(V{folder}/planted\ntR.".encode()
        utils.pickle = SimpleNamespace(
            dumps=lambda *_: code, loads=pickle.loads, HIGHEST_PROTOCOL=5
        )
    try:
        utils.all_gather(None)
    except RunError as error:
        return sizes, str(error)
    return sizes, "taken"


def test_only_a_ranks_own_pickle_is_read(tmp_path):
    (sizes, first), (same, second) = run_ranks(_gather, str(tmp_path))
    assert [*map(len, sizes[0])] == [1, 1001] == [*map(len, same[0])]
    assert [array.tolist() for array in sizes[1]] == [[0, 1, 2]] * 2
    assert sizes[2] == [None, None]
    message = (
        "a message claiming to be from rank {} failed authentication:"
        " it came from another program, or PADDLE_VIT_SECRET differs between the ranks"
    )
    assert (first, second) == (message.format(1), message.format(0))
    assert not list(tmp_path.iterdir())


def _replay():
    """What a rank said at one turn is said again at another."""
    say = secret.mac
    said = {}

    def again(key, turn, *parts):
        return said.setdefault(turn.split()[0], say(key, turn, *parts))

    secret.mac = again if utils.rank() else say
    try:
        return [utils.all_gather("a"), utils.all_gather("a")]
    except RunError as error:
        return str(error)


def test_what_was_gathered_before_is_not_taken_again():
    first, _ = run_ranks(_replay)
    assert first.startswith("a message claiming to be from rank 1 failed authentication")


def test_a_kernel_without_filters_says_no(monkeypatch):
    monkeypatch.setattr(store, "SO_ATTACH_FILTER", 60000)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert not store.shut(listener)
        assert connects(listener.getsockname())


@pytest.mark.parametrize("master", ["", "10.0.0.1:1", "nonsense", "host:http"])
def test_no_store_here_is_nothing_to_shut(monkeypatch, master):
    monkeypatch.setenv("PADDLE_MASTER", master)
    assert store.shut_store()


def test_a_rank_waits_for_the_store_of_its_own_machine(monkeypatch):
    def waited():
        began = time.monotonic()
        store.wait_for_store()
        return time.monotonic() - began

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        monkeypatch.setenv("PADDLE_MASTER", f"127.0.0.1:{listener.getsockname()[1]}")
        monkeypatch.setenv("PADDLE_TRAINER_ENDPOINTS", "127.0.0.1:1,127.0.0.1:2")
        for rank, endpoint in (("0", "127.0.0.1:1"), ("1", "127.0.0.2:2")):
            monkeypatch.setenv("PADDLE_TRAINER_ID", rank)
            monkeypatch.setenv("PADDLE_CURRENT_ENDPOINT", endpoint)
            assert waited() < 0.2
        monkeypatch.setenv("PADDLE_CURRENT_ENDPOINT", "127.0.0.1:2")
        threading.Timer(0.4, listener.listen).start()
        assert 0.3 < waited() < store.AGAIN
        assert waited() < 0.2
