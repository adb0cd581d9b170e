"""Strangers' bytes, and ranks' own messages, at rank 0's admission and on its lines, in this process."""

import contextlib
import json
import selectors
import socket
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import hostile_files
from support.port_attackers import GREETING, HELLO, REPLAYED, WORDS

from launch import channel, launched
from launch.admission import Admission, Unproved

SECRET = b"s" * 32
SCALAR = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
VALUE = st.recursive(
    SCALAR,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)
SEEN = {
    "place": 1,
    "process": 7,
    "host": "far",
    "time": 1.0,
    "step": 3.0,
    "doing": 2.0,
    "trouble": "",
    "gone": "",
}
MESSAGE = {
    "seen": SEEN | {"gone_at": 0.0, "failure": [2, "so", False]},
    "ready": False,
    "done": False,
}


@st.composite
def changed(draw, base):
    """JSON of ``base`` with keys that are gone, more, or of other kinds; or edited as text; or
    something else.
    """
    found = json.loads(json.dumps(base))
    for _ in range(draw(st.integers(0, 3))):
        inner = (
            found["seen"]
            if "seen" in found and isinstance(found["seen"], dict) and draw(st.booleans())
            else found
        )
        key = draw(st.sampled_from([*inner, "more"]))
        if draw(st.booleans()):
            inner[key] = draw(VALUE)
        else:
            inner.pop(key, None)
    text = json.dumps(found)
    if draw(st.booleans()):
        text = draw(hostile_files.damaged(text.encode())).decode(errors="replace")
    return draw(
        st.sampled_from(
            [text, text, text, "[" * 10_000, '{"a":' * 2_000, "9" * 5000, "-", "1e999", ""]
        )
    )


@contextlib.contextmanager
def an_admission():
    """An admission, a stranger at it, and the stranger's end."""
    with socket.create_server(("127.0.0.1", 0)) as waiting:
        theirs = socket.create_connection(waiting.getsockname())
        ours = waiting.accept()[0]
    with socket.socket() as listener, theirs, ours, selectors.DefaultSelector() as selector:
        admission = Admission(listener, SECRET, "2 ranks", 2, "rank")
        admission.selector.close()
        admission.selector = selector
        ours.settimeout(0)
        theirs.settimeout(0)
        selector.register(ours, selectors.EVENT_READ)
        admission.unproved[ours.fileno()] = Unproved(ours)
        yield admission, ours.fileno(), theirs


def ours_hears(admission, file):
    """The admission hears what has been sent, once it is there."""
    admission.selector.select(5)
    admission._read(file)


@settings(max_examples=2 * settings.default.max_examples)
@given(
    st.lists(
        st.sampled_from(WORDS)
        | hostile_files.damaged(HELLO)
        | hostile_files.damaged(HELLO + REPLAYED),
        max_size=4,
    )
)
@example([HELLO, REPLAYED])
def test_no_bytes_let_a_stranger_in(words):
    with an_admission() as (admission, file, theirs):
        for word in words:
            with contextlib.suppress(OSError):
                theirs.send(word[:100_000])
            for _ in range(3):
                admission._read(file)
        assert not admission.guests
        with contextlib.suppress(OSError):
            told = theirs.recv(1 << 16)
            assert all(
                line.startswith((b"challenge ", b"differs ", b"secret"))
                for line in told.splitlines()
            )
            assert len(told) < 2048
    hostile_files.tried["a stranger's bytes"]["refused"] += 1


@given(changed(GREETING))
@example(json.dumps(GREETING))
@example(json.dumps(GREETING | {"place": 2}))
@example(json.dumps(GREETING | {"place": True}))
def test_a_proved_greeting_is_taken_as_it_should_be_or_its_end_is_closed(text):
    with an_admission() as (admission, file, theirs):
        theirs.send(HELLO)
        ours_hears(admission, file)
        theirs.settimeout(5)
        challenge = theirs.recv(100).split()[1].decode()
        key = channel.key(
            SECRET, channel.nonce(HELLO.split()[2].decode()), channel.nonce(challenge)
        )
        channel.Channel(theirs, key, host=False).send(text)
        ours_hears(admission, file)
        for place, guest in admission.guests.items():
            told = json.loads(text)
            assert [type(told["place"]), told["party"]] == [int, "2 ranks"]
            assert told["place"] == place in (0, 1)
            assert not guest.closed
            assert guest.socket.fileno() == file
        hostile_files.tried["a rank's greeting"]["read" if admission.guests else "refused"] += 1


@given(st.lists(changed(MESSAGE), max_size=3), st.binary(max_size=100))
def test_a_watchers_message_is_taken_or_its_line_is_closed(texts, tail):
    monkeypatch = pytest.MonkeyPatch()
    with monkeypatch.context() as patched:
        patched.setattr(launched, "_stage", [launched.READING])
        patched.setenv("PADDLE_TRAINER_ID", "0")
        own = SimpleNamespace(pid=1, exitcode=None, start=lambda: None)
        guest, host = channel.pair()
        with guest.socket, host.socket:
            meeting = SimpleNamespace(guests={0: None, 1: host})
            first = launched.DecidingWatcher(
                meeting, own, SimpleNamespace(value=b""), [0.0] * 4, 60.0
            )
            with contextlib.suppress(OSError):  # its other end is closed
                for text in texts:
                    guest.send(text)
                    first.check()
                    first.verdict()
                guest.socket.sendall(tail)
                first.check()
            seen = first.all_states[1]
            assert seen.place == 1
            assert [*map(type, (seen.host, seen.trouble, seen.gone))] == [str] * 3
            hostile_files.tried["a watcher's message"]["refused" if host.closed else "read"] += 1
