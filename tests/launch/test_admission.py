"""Rank 0's door: ranks come in beside any number of strangers, of whom none holds it up."""

import contextlib
import json
import multiprocessing
import os
import resource
import socket
import threading
import time

import pytest
from support.port_attackers import GREETING, HELLO, REPLAYED, WORDS

from launch import admission, channel
from launch.admission import Admission

SECRET = b"s" * 32
MACHINE = {"gpu": "", "machine": "host"}


@pytest.fixture
def door(monkeypatch):
    """Returns a function that opens a door: (it, its address, its thread)."""
    opened = []

    def door(count=2, limit=20.0):
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        found = Admission(listener, SECRET, f"{count} ranks", count, "rank")
        thread = threading.Thread(target=found.receive_all, args=(limit,))
        opened.append((found, thread))
        thread.start()
        return found, listener.getsockname(), thread

    yield door
    for found, thread in opened:
        found.close()
        thread.join(10)
        assert not thread.is_alive()
        for guest in found.guests.values():
            guest.close()


def come(address, place, key=SECRET, party="2 ranks", **more):
    """Comes as a rank: the connection, or None where another secret is told; and the answer."""
    connection = socket.create_connection(address, 5)
    found = channel.introduce(connection, key, 5.0)
    assert isinstance(found, channel.Channel)
    found.send(json.dumps({"party": party, "place": place} | MACHINE | more))
    answer = ""
    try:
        answer = found.wait(5)
    except channel.Forged as error:
        found = None
        answer = error.line.decode()
    finally:
        if answer != "wait":
            connection.close()
    return found, answer


def met(address, *places):
    """Ranks come within a second each, and are told that all did."""
    began = time.monotonic()
    guests = [come(address, place) for place in places]
    assert [answer for _, answer in guests] == ["wait"] * len(places)
    assert time.monotonic() - began < 1.0 * len(places)
    verdicts = [guest.wait(5).split()[:2] for guest, _ in guests]
    for guest, _ in guests:
        guest.close()
    return verdicts


def test_a_rank_that_ended_may_be_started_again(door):
    found, address, thread = door()
    first, answer = come(address, 1)
    assert answer == "wait"
    assert come(address, 1)[1] == "twice"
    first.close()
    time.sleep(0.2)
    assert met(address, 1, 0) == [["ok", "127.0.0.1"]] * 2
    thread.join(5)
    assert sorted(found.guests) == [0, 1]


def test_silent_slow_and_many_strangers_hold_up_nobody(door):
    _, address, _ = door()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    with contextlib.ExitStack() as strangers:
        strangers.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for number in range(1500):
            one = strangers.enter_context(socket.create_connection(address, 5))
            if number % 3:
                with contextlib.suppress(OSError):  # it went for a later one
                    one.sendall(HELLO[: number % len(HELLO)])
        assert met(address, 1, 0) == [["ok", "127.0.0.1"]] * 2


def _serve_with_few_files(listener):
    files = listener.fileno() + 12
    # what the worker of the tests had open would count, too
    os.closerange(listener.fileno() + 1, files)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    Admission(listener, SECRET, "2 ranks", 2, "rank").receive_all(20.0)
    time.sleep(5)  # what it told is heard


def test_few_files_are_enough():
    with (
        socket.create_server(("127.0.0.1", 0), backlog=1024) as listener,
        contextlib.ExitStack() as strangers,
    ):
        process = multiprocessing.get_context("fork").Process(
            target=_serve_with_few_files, args=(listener,), daemon=True
        )
        process.start()
        for _ in range(100):
            strangers.enter_context(socket.create_connection(listener.getsockname(), 5))
        assert met(listener.getsockname(), 0, 1) == [["ok", "127.0.0.1"]] * 2
        process.kill()
        process.join()


def test_a_byte_now_and_then_is_no_way_to_stay(door, monkeypatch):
    monkeypatch.setattr(admission, "PATIENCE", 0.5)
    _, address, _ = door()
    with (
        socket.create_connection(address, 5) as slow,
        pytest.raises(OSError, match="Broken pipe|reset"),
    ):
        for byte in HELLO:
            slow.sendall(bytes([byte]))
            time.sleep(0.1)
    assert met(address, 0, 1) == [["ok", "127.0.0.1"]] * 2


@pytest.mark.parametrize("words", WORDS, ids=lambda words: repr(words[:20]))
def test_no_words_let_a_stranger_in_or_end_the_door(door, words):
    found, address, _ = door()
    with socket.create_connection(address, 5) as stranger:
        with contextlib.suppress(OSError):
            stranger.sendall(words)
            stranger.shutdown(socket.SHUT_WR)
            stranger.settimeout(5)
            told = b"".join(iter(lambda: stranger.recv(4096), b""))
            assert not told or told.startswith((b"differs ", b"challenge ", b"secret"))
        assert not found.guests
        assert met(address, 0, 1) == [["ok", "127.0.0.1"]] * 2


def test_a_rank_needs_the_secret_the_party_and_a_number_of_it(door):
    found, address, _ = door(count=3)
    assert come(address, 1, key=b"another") == (None, "secret")
    assert found.others == 1
    assert come(address, 1, party="2 ranks")[1] == "differs 3 ranks"
    first, answer = come(address, 1, party="3 ranks")
    assert answer == "wait"
    assert come(address, 1, party="3 ranks")[1] == "twice"
    for place in (-1, 3, 10**20, True, 1.0, "1", None, [1], {}):
        with pytest.raises(OSError, match="reset"):
            come(address, place, party="3 ranks")
    for wrong in ({"machine": 5}, {"gpu": None}, {"party": ["3 ranks"]}):
        with pytest.raises(OSError, match="reset"):
            come(address, 2, **{"party": "3 ranks"} | wrong)
    assert list(found.guests) == [1]
    first.close()


def test_nobody_but_a_rank_of_this_job_can_end_it(door):
    """By saying that it can't start: neither a stranger, nor a rank of another job with the same
    secret.
    """
    found, address, _ = door()
    for refusal in ("no", "x" * 10_000):
        assert come(address, -1, key=b"another", refusal=refusal) == (None, "secret")
    assert come(address, -1, party="2 ranks of job 7", refusal="no")[1] == "told"
    assert not found.contradiction
    for refusal in ("", None, 0, [], {}):  # as if it said nothing of the kind
        with pytest.raises(OSError, match="reset"):
            come(address, -1, refusal=refusal)
    assert met(address, 0, 1) == [["ok", "127.0.0.1"]] * 2


def test_a_rank_more_than_there_are_ends_no_run_that_is_complete(door):
    found, address, _ = door()
    first, _ = come(address, 0)
    assert come(address, -1, party="? ranks", refusal="RANK is 2")[1] == "told"
    assert found.contradiction == "RANK is 2"
    second, _ = come(address, 1)
    assert [guest.wait(5).split()[0] for guest in (first, second)] == ["ok", "ok"]
    first.close()
    second.close()


def test_what_was_heard_before_proves_nothing(door):
    """A stranger hears a rank's greeting and says it again, in a connection of its own."""
    found, address, _ = door()
    with socket.create_connection(address, 5) as stranger:
        stranger.sendall(HELLO)
        assert stranger.recv(100).startswith(b"challenge ")
        nonces = bytes.fromhex("ab" * 32), bytes.fromhex("cd" * 32)  # of the meeting that it heard
        theirs, ours = socket.socketpair()
        with theirs, ours:
            channel.Channel(theirs, channel.key(SECRET, *nonces), host=False).send(
                json.dumps(GREETING)
            )
            heard = ours.recv(4096)
        assert len(heard) == len(REPLAYED)
        stranger.sendall(heard)
        assert stranger.recv(100) == b"secret\n"
    assert not found.guests


def test_those_who_miss_a_rank_hear_of_another_secret(door):
    _, address, _ = door(limit=1.0)
    come(address, 1, key=b"another")
    guest, _ = come(address, 0)
    said = guest.wait(5)
    guest.close()
    assert said.startswith(
        "rank 1 of 2 didn't connect within 1 s (DIST.INIT_TIMEOUT), 1 had a different secret; start what"
    )


def test_lines_are_taken_once_in_order_and_in_one_direction():
    guest, host = channel.pair()
    with guest.socket, host.socket:
        for word in ("a", "b", "c\nd"):
            guest.send(word)
        heard = host.socket.recv(4096)
        one, two, three = heard.splitlines(keepends=True)
        for wrong in (
            two,
            one + one,
            one + three,
            heard[1:],
            heard.replace(b" a", b" A"),
            b"\n",
            b"x" * 200_000,
        ):
            fresh = channel.Channel(host.socket, host.key, host=True)
            guest.socket.sendall(wrong)
            with pytest.raises(channel.Forged):
                fresh.receive()
            while wrong:  # drain what it left
                host.socket.settimeout(0.05)
                with contextlib.suppress(OSError):
                    wrong = host.socket.recv(1 << 20)
                    continue
                break
        fresh = channel.Channel(host.socket, host.key, host=True)
        guest.socket.sendall(heard)
        assert fresh.receive() == ["a", "b", "c d"]
        back = channel.Channel(guest.socket, guest.key, host=False)
        host.socket.sendall(heard)  # its own words, sent back
        with pytest.raises(channel.Forged):
            back.receive()
