"""What stands before a server's app: what it refuses, what it counts, and that it keeps nothing of
what it refused.
"""

import asyncio
from types import SimpleNamespace

import pytest

from inference.serve import gate as gates
from inference.serve.app import create_app
from inference.serve.gate import Gate
from inference.serve.metrics import Metrics
from inference.serve.settings import HELD, Settings


class Client:
    """Sends a body in parts, and takes the answer; with ``leaves``, it goes after so many parts."""

    def __init__(self, *parts, leaves=None, path="/predict", **headers):
        self.parts = list(parts)
        self.leaves = leaves
        self.answer = b""
        self.status = None
        names = [
            (name.replace("_", "-").encode(), str(value).encode())
            for name, value in headers.items()
        ]
        self.scope = {"type": "http", "method": "POST", "path": path, "client": ("here", 1)}
        self.scope["headers"] = names or [(b"transfer-encoding", b"chunked")]

    async def receive(self):
        if self.leaves == 0 or (self.status and not self.parts):
            return {"type": "http.disconnect"}
        if self.leaves:
            self.leaves -= 1
        if not self.parts:
            await asyncio.sleep(60)
        return {"type": "http.request", "body": self.parts.pop(0), "more_body": bool(self.parts)}

    async def send(self, message):
        self.status = message.get("status", self.status)
        self.answer += message.get("body", b"")


def ask(client, app=None, loaded=True, before=lambda gate: None, **settings):
    """Sends a client through a gate, before an app that answers what it got; returns the gate."""

    async def echo(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(scope.pop("body", b""))})

    async def main():
        gate = Gate(
            app or echo, Settings("model", quiet=True, **settings), Metrics(), lambda: loaded
        )
        before(gate)
        held = gate.held
        await asyncio.wait_for(gate(client.scope, client.receive, client.send), 20)
        assert (gate.active, gate.held) == (0, held)
        assert "body" not in client.scope
        return gate

    return asyncio.run(main())


def counted(gate, status):
    return gate.metrics.requests.labels("/predict", status)._value.get()


def test_a_body_comes_to_the_app_whole():
    client = Client(b"one", b"", b"two")
    gate = ask(client)
    assert (client.status, client.answer) == (200, b"onetwo")
    assert counted(gate, 200) == 1


@pytest.mark.parametrize(
    ("client", "how", "status", "line"),
    [
        (
            Client(bytes(700_000), bytes(700_000)),
            {"max_request_mb": 1},
            413,
            b"the request has more bytes than that",
        ),
        (
            Client(b"x", content_length=2 << 20),
            {"max_request_mb": 1},
            413,
            b"the request has 2097152 bytes, at most",
        ),
        (
            Client(b"x", content_encoding="gzip"),
            {},
            415,
            b"the body is compressed (Content-Encoding)",
        ),
        (Client(b"x"), {"loaded": False}, 503, b"the model is being loaded"),
        (
            Client(b"x"),
            {"before": lambda gate: setattr(gate, "draining", True)},
            503,
            b"the server is shutting down",
        ),
        (
            Client(b"x", b"y"),
            {"before": lambda gate: setattr(gate, "held", HELD - 1)},
            429,
            b"too many large requests",
        ),
        (
            Client(b"x", authorization="Bearer no"),
            {"token": "t" * 16},
            401,
            b"this server needs a token",
        ),
        (
            Client(b"x", host="evil.example:80"),
            {},
            403,
            b"found the Host evil.example:80, expected",
        ),
        (
            Client(b"x", host="localhost:1", origin="http://evil.example"),
            {},
            403,
            b"found the Origin http://evil.example,",
        ),
        (
            Client(b"x", host="localhost:1", origin="null"),
            {},
            403,
            b"found the Origin null, expected this server's own",
        ),
        (
            Client(b"x", host="localhost:1", origin="http://localhost:2"),
            {},
            403,
            b"found the Origin http://localhost:2",
        ),
        (
            Client(b"x", host="localhost", sec_fetch_site="cross-site"),
            {},
            403,
            b"found the Origin of a foreign site,",
        ),
        (Client(b"x", path="/metrics"), {"token": "t" * 16}, 401, b"this server needs a token"),
    ],
)
def test_what_is_refused_is_told_and_not_kept(client, how, status, line):
    ask(client, **how)
    assert client.status == status
    assert line in client.answer


@pytest.mark.parametrize(
    ("host", "how"),
    [(name, {}) for name in ("localhost", "LOCALHOST:8000", "127.0.0.1:80", "[::1]", "[::1]:8000")]
    + [("evil.example", {"token": "t" * 16}), ("evil.example", {"host": "0.0.0.0"})],
)
def test_a_private_server_is_asked_by_its_own_names_alone(host, how):
    """(A page of a foreign site, whose name is made to lead to 127.0.0.1, could read the answers
    otherwise.)
    """
    client = Client(b"x", host=host, authorization="Bearer " + "t" * 16)
    ask(client, **how)
    assert client.status == 200


@pytest.mark.parametrize(
    "how", [{"token": "t" * 16}, {"host": "0.0.0.0"}, {"origin": "http://localhost:1"}]
)
def test_a_page_of_its_own_asks_and_any_page_where_strangers_may(how):
    client = Client(
        b"x",
        **{"origin": "http://evil", "host": "localhost:1", "authorization": "Bearer " + "t" * 16}
        | how,
    )
    ask(client, **{key: value for key, value in how.items() if key != "origin"})
    assert client.status == 200


def test_a_slow_body_is_refused(monkeypatch):
    monkeypatch.setattr(gates, "_BODY_SECONDS", 0.1)
    monkeypatch.setattr(gates, "_LINGER", 0.1)
    client = Client(b"x", b"y", b"z")
    client.parts, client.receive = [], lambda: asyncio.sleep(60)
    ask(client)
    assert client.status == 408


@pytest.mark.parametrize("leaves", [1, 2])
def test_who_leaves_isnt_worked_for(leaves):
    """(Leaving after one part of two: while it is read; after both: while the app works.)"""
    worked = []

    async def app(scope, receive, send):
        try:
            await asyncio.sleep(60)
        finally:
            worked.append(scope.pop("body"))

    client = Client(b"a", b"b", leaves=leaves)
    gate = ask(client, app)
    assert worked == ([b"ab"] if leaves == 2 else [])
    assert client.status is None
    assert counted(gate, 499) == 1


def test_a_mistake_of_the_apps_is_told_to_nobody_but_the_log(capsys):
    async def app(scope, receive, send):
        raise ZeroDivisionError("secret")

    client = Client(b"a")
    gate = ask(client, app)
    assert (client.status, client.answer) == (
        500,
        b'{"error":"the server failed; see its log"}',
    )
    assert "ZeroDivisionError: secret" in capsys.readouterr().err
    assert counted(gate, 500) == 1


def test_a_mistake_within_the_app_is_json_too(capsys):
    """(starlette's own answer would be plain text.)"""

    class Broken:
        def put(self, items):
            raise ZeroDivisionError("secret")

    pool = SimpleNamespace(gives_maps=False, keeps_sizes=False, about={})
    app = create_app(Settings("model"), Broken(), pool, Metrics(), lambda: False)
    client = Client(b"GIF89a", content_type="image/gif")
    client.scope |= {"query_string": b"", "http_version": "1.1", "root_path": ""}
    gate = ask(client, app)
    assert (client.status, client.answer) == (
        500,
        b'{"error":"the server failed; see its log"}',
    )
    assert "ZeroDivisionError: secret" in capsys.readouterr().err
    assert counted(gate, 500) == 1


def test_a_request_that_is_cut_off_by_the_end_is_answered_in_json():
    """(uvicorn cancels what takes too long as it ends, and would answer in plain text.)"""

    async def app(scope, receive, send):
        await asyncio.sleep(60)

    async def main():
        gate = Gate(app, Settings("model", quiet=True), Metrics(), lambda: True)
        client = Client(b"a")
        client.receive = asyncio.Event().wait
        working = asyncio.ensure_future(gate(client.scope, client.receive, client.send))
        await asyncio.sleep(0.05)
        working.cancel()
        await working
        assert (client.status, client.answer) == (503, b'{"error":"the server is shutting down"}')
        assert (gate.active, gate.held) == (0, 0)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("8.8.8.8", "8.8.8.8"),
        ("2001:DB8::1", "2001:db8::1"),
        ("fe80::1%eth0", "fe80::1"),
        ("8.8.8.8 GET /health 200 1.0 ms", "-"),
        ("x" * 600, "-"),
        ("::1%8 GET /health 200 1.0 ms", "::1"),
    ],
)
def test_what_a_proxy_says_is_a_client_only_if_it_is_an_address(capsys, said, shown):
    """uvicorn takes any text of X-Forwarded-For: it would forge a line of the log, or hide the
    status in it.
    """
    clients = []

    async def app(scope, receive, send):
        clients.append(scope["client"][0])
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    client = Client(path="/nothing")
    client.scope["client"] = (said, 0)
    asyncio.run(
        Gate(app, Settings("model"), Metrics(), lambda: True)(
            client.scope, client.receive, client.send
        )
    )
    assert clients == [shown]
    assert f" {shown} POST /nothing 404 " in capsys.readouterr().out
