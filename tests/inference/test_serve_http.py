"""HTTP as bytes: malformed requests end their connection, and unusual ones that are well formed are
answered.
"""

import json
import time

import pytest

HOST = b"Host: localhost\r\n"
GET = b"GET /health HTTP/1.1\r\n" + HOST
POST = b"POST /predict HTTP/1.1\r\nContent-Type: image/jpeg\r\n" + HOST
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
NO_REQUEST = {"error": "this isn't a valid HTTP request"}

MALFORMED = {
    "length and chunks": POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and length": POST + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
    "chunks in HTTP/1.0": b"POST /predict HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked twice": POST
    + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked, chunked": POST + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    "gzip, chunked": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "xchunked": POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "identity": POST + b"Transfer-Encoding: identity\r\n\r\n",
    "tab before chunked": POST + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "two equal lengths": POST + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
    "two lengths": POST + b"Content-Length: 3\r\ncontent-LENGTH: 4\r\n\r\nabc",
    "length in a list": POST + b"Content-Length: 3, 3\r\n\r\nabc",
    "length with a sign": POST + b"Content-Length: +3\r\n\r\nabc",
    "negative length": POST + b"Content-Length: -3\r\n\r\nabc",
    "hexadecimal length": POST + b"Content-Length: 0x3\r\n\r\nabc",
    "underscored length": POST + b"Content-Length: 0_3\r\n\r\nabc",
    "length of other digits": POST + "Content-Length: \u0663\r\n\r\nabc".encode(),
    "no length": POST + b"Content-Length:\r\n\r\nabc",
    "long length": POST + b"Content-Length: " + b"0" * 21 + b"3\r\n\r\nabc",
    "bare LF": b"GET /health HTTP/1.1\nHost: localhost\n\n",
    "bare LF after the first line": b"GET /health HTTP/1.1\nHost: localhost\r\n\r\n",
    "bare LF in a head": GET + b"A: b\nC: d\r\n\r\n",
    "bare LF at its end": GET + b"\n",
    "bare CR in a head": GET + b"A: b\rC: d\r\n\r\n",
    "folded": GET + b"A: b\r\n c\r\n\r\n",
    "folded by a tab": GET + b"A: b\r\n\tc\r\n\r\n",
    "folded at the start": b"GET /health HTTP/1.1\r\n A: b\r\n" + HOST + b"\r\n",
    "NUL": GET + b"A: b\0\r\n\r\n",
    "SOH": GET + b"A: b\x01\r\n\r\n",
    "escape": GET + b"A: \x1b[31m\r\n\r\n",
    "vertical tab": GET + b"A: b\x0bc\r\n\r\n",
    "delete": GET + b"A: b\x7f\r\n\r\n",
    "blank before the colon": GET + b"A : b\r\n\r\n",
    "tab before the colon": GET + b"A\t: b\r\n\r\n",
    "blank in a name": GET + b"A b: c\r\n\r\n",
    "no name": GET + b": b\r\n\r\n",
    "no colon": GET + b"A\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two hosts": GET + HOST + b"\r\n",
    "HTTP/9.9": b"GET /health HTTP/9.9\r\n" + HOST + b"\r\n",
    "HTTP/2.0": b"GET /health HTTP/2.0\r\n" + HOST + b"\r\n",
    "HTTP/1.2": b"GET /health HTTP/1.2\r\n" + HOST + b"\r\n",
    "HTTP/1.10": b"GET /health HTTP/1.10\r\n" + HOST + b"\r\n",
    "HTTP/0.9": b"GET /health\r\n\r\n",
    "http/1.1": b"GET /health http/1.1\r\n" + HOST + b"\r\n",
    "two blanks": b"GET  /health HTTP/1.1\r\n" + HOST + b"\r\n",
    "tabs": b"GET\t/health\tHTTP/1.1\r\n" + HOST + b"\r\n",
    "another URL": b"GET http://elsewhere/health HTTP/1.1\r\n" + HOST + b"\r\n",
    "own URL": b"GET http://localhost/health HTTP/1.1\r\n" + HOST + b"\r\n",
    "authority": b"CONNECT localhost:80 HTTP/1.1\r\n" + HOST + b"\r\n",
    "asterisk": b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n",
    "no slash": b"GET health HTTP/1.1\r\n" + HOST + b"\r\n",
    "no ASCII": b"GET /h\xc3\xa4 HTTP/1.1\r\n" + HOST + b"\r\n",
    "17 KiB of a method": b"G" * (17 << 10) + b" /health HTTP/1.1\r\n" + HOST + b"\r\n",
    "17 KiB of a path": b"GET /" + b"a" * (17 << 10) + b" HTTP/1.1\r\n" + HOST + b"\r\n",
    "17 KiB of a head": GET + b"A: " + b"a" * (17 << 10) + b"\r\n\r\n",
    "17 KiB of heads": GET + b"A: b\r\n" * (17 << 8) + b"\r\n",
    "bare LF after a chunk's size": CHUNKED + b"3\nabc\r\n0\r\n\r\n",
    "bare LF after a chunk": CHUNKED + b"3\r\nabc\n0\r\n\r\n",
    "bare LF after the last chunk": CHUNKED + b"3\r\nabc\r\n0\r\n\n",
    "bare CR in an extension": CHUNKED + b"3;a\rb\r\nabc\r\n0\r\n\r\n",
    "bare LF in an extension": CHUNKED + b"3;a\nb\r\nabc\r\n0\r\n\r\n",
    "long extension": CHUNKED + b"3;" + b"a" * 255 + b"\r\nabc\r\n0\r\n\r\n",
    "endless extension": CHUNKED + b"3;" + b"a" * 400,
    "chunk's size with a sign": CHUNKED + b"+3\r\nabc\r\n0\r\n\r\n",
    "chunk's size with 0x": CHUNKED + b"0x3\r\nabc\r\n0\r\n\r\n",
    "chunk's size of many digits": CHUNKED + b"0" * 30 + b"3\r\nabc\r\n0\r\n\r\n",
    "bare LF in a trailer": CHUNKED + b"3\r\nabc\r\n0\r\nA: b\n\r\n",
    "folded trailer": CHUNKED + b"3\r\nabc\r\n0\r\nA: b\r\n c\r\n\r\n",
    "NUL in a trailer": CHUNKED + b"3\r\nabc\r\n0\r\nA: \0\r\n\r\n",
}
TAKEN = {
    "HTTP/1.0": (b"GET /health HTTP/1.0\r\n\r\n", 200),
    "16 KB of a head": (GET + b"A: " + b"a" * 16_000 + b"\r\n\r\n", 200),
    "tab and bytes above ASCII": (GET + b"A:\tb\tc\x80 \r\n\r\n", 200),
    "name that begins like another": (GET + b"Content-Length-Of: a\r\n\r\n", 200),
    "length with zeros": (POST + b"Content-Length: 003\r\n\r\nabc", 422),
    "another spelling": (POST + b"tRANSFER-eNCODING: Chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", 422),
    "extension": (CHUNKED + b"3;a=b\r\nabc\r\n0\r\n\r\n", 422),
    "trailer": (CHUNKED + b"3\r\nabc\r\n0\r\nA: b\r\n\r\n", 422),
    "upgrade to HTTP/2": (
        POST + b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 3\r\n\r\nabc",
        422,
    ),
    "body of a GET": (GET + b"Content-Length: 3\r\n\r\nabc", 200),
    "bare LF in a body": (POST + b"Content-Length: 3\r\n\r\n\n\r ", 422),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_request_is_refused_and_its_connection_closed(server, case):
    started = time.monotonic()
    head, _, body = server.raw(MALFORMED[case], timeout=9).partition(b"\r\n\r\n")
    assert head.startswith(
        b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-type: application/json\r\n"
    )
    assert json.loads(body) == NO_REQUEST
    assert time.monotonic() - started < 9  # who is silent loses the connection later


@pytest.mark.parametrize(
    "case", ["bare LF in a head", "folded", "NUL", "17 KiB of heads", "folded trailer"]
)
def test_a_malformed_request_is_refused_however_it_comes(server, case):
    """(Byte by byte: each one is looked at once.)"""
    data = MALFORMED[case]
    parts = (
        [data[place : place + 1] for place in range(len(data))]
        if len(data) < 400
        else [data[:9000], data[9000:]]
    )
    assert server.raw(*parts, timeout=9).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("case", TAKEN)
def test_a_request_that_is_well_formed_is_taken(server, case):
    sent, status = TAKEN[case]
    for parts in (
        [sent],
        [sent[place : place + 1] for place in range(len(sent))] if len(sent) < 400 else [sent],
    ):
        found = server.raw(*parts, timeout=9, half=True)
        assert found.startswith(b"HTTP/1.1 %d " % status), found
        assert found.count(b"HTTP/1.1") == 1


def test_a_client_that_sends_nothing_more_gets_its_answers(server, photographs):
    length = b"Content-Length: %d\r\n\r\n" % len(photographs[0])
    one = POST + length + photographs[0]
    assert server.raw(one, half=True).startswith(b"HTTP/1.1 200 ")
    assert server.raw(CHUNKED + b"3\r\nabc\r\n0\r\n\r\n", half=True).startswith(b"HTTP/1.1 422 ")
    found = server.raw(one * 2 + GET + b"\r\n" + one, half=True, timeout=20)
    assert found.count(b"HTTP/1.1 200 OK") == 4
    assert found.count(b'{"status":"alive"}') == 1
    assert server.raw(one + GET, half=True).count(b"HTTP/1.1") == 1  # the second one isn't whole
    assert server.raw(POST + length, half=True) == b""


def test_after_a_malformed_request_comes_nothing_of_the_same_connection(server):
    found = server.raw(GET + b"\r\n" + GET + b"A: b\n\r\n" + GET + b"\r\n")
    assert (
        found.count(b"HTTP/1.1 200 "),
        found.count(b"HTTP/1.1 400 "),
        found.count(b"HTTP/1.1"),
    ) == (1, 1, 2)


def test_head_is_answered_as_get_is(server):
    for path in ("/", "/docs", "/openapi.json", "/health", "/ready", "/metrics", "/predict", "/no"):
        status, _, told = server.ask("GET", path)
        found, body, same = server.ask("HEAD", path)
        assert (found, body) == (status, b"")
        assert same["content-type"] == told["content-type"]
        if path != "/metrics":  # its counts changed
            assert same["content-length"] == told["content-length"]
    server.said(r"HEAD /health 200 ")
