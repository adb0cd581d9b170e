"""Images by their URLs: what is fetched, and what is refused in a line, in time and in memory."""

import contextlib
import http.server
import socket
import threading
import time

import pytest

from errors import Unreadable
from loading import remote
from loading.remote import fetched, is_url

BODY = bytes(range(256)) * 40
# What redirects to where.
MOVED = {
    "/moved": "/file",
    "/moved5": "/moved4",
    "/moved4": "/moved3",
    "/moved3": "/moved2",
    "/moved2": "/moved1",
    "/moved1": "/file",
    "/moved6": "/moved5",
    "/circle": "/circle",
    "/local": "file:///etc/passwd",
    "/ftp": "ftp://127.0.0.1/file",
    "/named": "http://user:secret@127.0.0.1/file",
}


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        self.server.requests.append((self.path, dict(self.headers)))
        path = self.path.partition("?")[0]
        if path in MOVED:
            self.send_response(302)
            self.send_header("Location", MOVED[path])
            # A body without an end, which nobody has to read.
            self.end_headers()
            with contextlib.suppress(OSError):
                while not self.server.is_over:
                    self.wfile.write(bytes(1 << 16))
            return
        if path == "/slow_headers":
            self.drip(b"HTTP/1.0 200 OK\r\n" + b"X: 1\r\n" * 1000)
        elif path == "/slow":
            self.send_response(200)
            self.end_headers()
            self.drip(BODY)
        elif path == "/endless":
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                while not self.server.is_over:
                    self.wfile.write(bytes(1 << 16))
        elif path == "/claimed":
            self.send_response(200)
            self.send_header("Content-Length", "5000000000")
            self.end_headers()
        elif path == "/cut":
            self.send_response(200)
            self.send_header("Content-Length", str(len(BODY) + 1))
            self.end_headers()
            self.wfile.write(BODY)
        elif path == "/page":
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
        elif path in ("/file", "/caf%C3%A9%20a.png") or path.startswith("http://"):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(BODY)
        else:
            self.send_error(404)

    def drip(self, data):
        with contextlib.suppress(OSError):
            for byte in data:
                self.wfile.write(bytes([byte]))
                time.sleep(0.05)
                if self.server.is_over:
                    return


@pytest.fixture
def server(monkeypatch):
    for name in ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        running.requests = []
        running.is_over = False
        running.url = f"http://127.0.0.1:{running.server_address[1]}"
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield running
        running.is_over = True
        running.shutdown()
        thread.join()


def problem(url, most=1 << 20):
    with pytest.raises(Unreadable) as caught:
        fetched(url, most)
    return str(caught.value)


def test_a_file_comes_whole_also_after_redirects(server):
    assert fetched(f"{server.url}/file", len(BODY)) == BODY
    assert fetched(f"{server.url}/moved", len(BODY)) == BODY
    assert fetched(f"{server.url}/moved5", len(BODY)) == BODY
    # Letters outside of ASCII and spaces are escaped, what is escaped stays.
    assert fetched(f"{server.url.upper()}/café%20a.png", len(BODY)) == BODY
    assert fetched(f"{server.url}/caf%C3%A9 a.png?x=1&y=%20#part", len(BODY)) == BODY
    assert server.requests[-1][0] == "/caf%C3%A9%20a.png?x=1&y=%20"


def test_nothing_about_the_user_is_sent(server, monkeypatch, tmp_path):
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login somebody password secret\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    fetched(f"{server.url}/moved", len(BODY))
    for _, headers in server.requests:
        assert headers.keys() == {"Host", "User-Agent", "Accept", "Accept-Encoding", "Connection"}
    told = "it has a user name or a password, which aren't sent; remove them"
    assert problem("http://user:secret@127.0.0.1/file") == told
    assert problem(f"{server.url}/named") == told


def test_what_cannot_be_fetched_is_a_line(server):
    assert problem(f"{server.url}/none") == "the server answers 404 (Not Found)"
    assert problem(f"{server.url}/page").startswith("the server answers with a page (text/html)")
    assert problem(f"{server.url}/cut") == (
        f"the server sends {len(BODY)} of its {len(BODY) + 1} bytes"
    )
    assert problem(f"{server.url}/moved6") == "it is redirected more than 5 times"
    assert problem(f"{server.url}/circle") == "it is redirected more than 5 times"
    assert problem(f"{server.url}/local") == "it is redirected to file:, expected http or https"
    assert problem(f"{server.url}/ftp") == "it is redirected to ftp:, expected http or https"
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert problem(f"http://127.0.0.1:{port}/") == "can't be fetched (Connection refused)"
    assert problem("http://nowhere.invalid/").startswith("can't be fetched (")
    assert problem("http:///a.png") == "it has no host"
    assert problem("http://127.0.0.1:99999/").startswith("it isn't a valid URL (")
    assert problem("http://[1/").startswith("it isn't a valid URL (")
    # It doesn't speak TLS.
    assert "can't be fetched (" in problem(server.url.replace("http", "https") + "/file")


def test_large_files_are_refused_without_reading_them(server):
    assert problem(f"{server.url}/file", len(BODY) - 1).startswith("it has more than 10239 bytes")
    assert problem(f"{server.url}/claimed") == (
        "it has 5000000000 bytes, at most 1048576 are allowed"
    )
    assert problem(f"{server.url}/endless") == "it has more than 1048576 bytes, the most allowed"


@pytest.mark.parametrize("path", ["/slow", "/slow_headers"])
def test_a_slow_server_is_left_in_time(server, monkeypatch, path):
    monkeypatch.setattr(remote, "SECONDS", 0.5)
    before = set(threading.enumerate())
    start = time.monotonic()
    assert problem(f"{server.url}{path}") == "fetching it takes longer than 0.5 s"
    assert time.monotonic() - start < 2
    # The thread of the download ends, too.
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive()


def test_proxies_are_those_of_the_environment(server, monkeypatch):
    monkeypatch.setenv("http_proxy", server.url)
    assert fetched("http://example.invalid/a.png", len(BODY)) == BODY
    assert server.requests[-1][0] == "http://example.invalid/a.png"


def test_only_http_and_https_are_urls():
    assert all(map(is_url, ["http://a/b.png", "HTTPS://a", b"https://a/b"]))
    others = ["file:///a", "ftp://a/b", "http:/a", "a/http://b", "", b"\xff", "data:image/png,a"]
    assert not any(map(is_url, others))
