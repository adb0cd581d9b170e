"""Serves the page of the runs over HTTP, for a browser of this machine."""

import contextlib
import json
import re
import socket
import threading
import traceback
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from errors import InputError, printable
from inference.watch.curves import TITLES
from inference.watch.runs import Runs
from training.pages import page

# Hosts that only programs of this machine can reach.
LOOPBACK = ("127.0.0.1", "::1", "localhost")
# Bytes of the largest file that is served.
_LARGEST = 64 << 20
# The most runs whose curves a request may ask for, and the most requests at once.
_MOST_CURVES = 16
_MOST_REQUESTS = 32
# Seconds for which a client may send nothing, and those that a request may take as a whole.
_TIMEOUT = 10
_LONGEST = 30
_PNG = b"\x89PNG\r\n\x1a\n"
_HTML = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
_PAGE = _HTML.replace("TITLES_OF_CURVES", json.dumps(TITLES)).encode()
_FILE = re.compile(r"/run/([0-9a-f]{16})/(report\.html|curves\.png)")


def _part(name: str) -> str:
    [text] = re.findall(rf"<{name}>(.*?)</{name}>", _PAGE.decode(), re.S)
    return page.script_hash(text)


# A browser runs the page's own script and no other, whatever the names of runs contain.
_POLICY = "; ".join(
    [
        "default-src 'none'",
        f"script-src {_part('script')}",
        f"style-src {_part('style')}",
        "img-src data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
# A run's folder may be a stranger's, and so may its report: it may run the script by which reports
# reload themselves, and has no access to this server.
_REPORT_POLICY = "; ".join(
    [
        "sandbox allow-scripts",
        "default-src 'none'",
        f"script-src {page.script_hash(page.RELOAD)}",
        "style-src 'unsafe-inline'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)


class Answer(NamedTuple):
    """An answer to a request.

    Attributes:
        status: of HTTP.
        kind: the media type.
        body: the content.
        policy: the Content-Security-Policy.
    """

    status: int
    kind: str
    body: bytes
    policy: str = "default-src 'none'; frame-ancestors 'none'"


class Handler(BaseHTTPRequestHandler):
    """Answers a request by ``answer(path, host)``."""

    timeout = _TIMEOUT
    server_version = "watch"
    sys_version = ""
    answer: Callable[[str, str], Answer]

    def do_GET(self) -> None:
        """Answers a request."""
        try:
            answer = type(self).answer(self.path, self.headers.get("Host") or "")
        except Exception:
            traceback.print_exc()
            answer = _refused(500, "tools/watch.py failed; see its terminal")
        self.send_response(answer.status)
        headers = {
            "Content-Type": answer.kind,
            "Content-Length": str(len(answer.body)),
            "Content-Security-Policy": answer.policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cache-Control": "no-store",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing: a page that renews itself would fill the terminal."""


class Server(ThreadingHTTPServer):
    """Serves the runs of a folder.

    Args:
        root: the folder.
        host, port: where to listen. Port 0 means any that is free.

    Raises:
        InputError: the address can't be used.
    """

    daemon_threads = True

    def __init__(self, root: Path, host: str, port: int) -> None:
        self.runs = Runs(root)
        self.private = host in LOOPBACK
        self._free = threading.BoundedSemaphore(_MOST_REQUESTS)
        handler = type("RunsHandler", (Handler,), {"answer": staticmethod(self.answer)})
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            self.address_family = found[0][0]
            super().__init__((host, port), handler)
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or "this isn't a host name"
            raise InputError(
                f"can't listen at {printable(host, 80)}, port {port} ({why}); choose another -host"
                " or -port"
            ) from None

    def server_bind(self) -> None:
        """Binds the socket. The standard library would also look up this machine's name."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        socket.socket.bind(self.socket, self.server_address)  # pyright: ignore[reportArgumentType]
        self.server_address = self.socket.getsockname()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Starts a thread for a request, once fewer than _MOST_REQUESTS are being answered."""
        self._free.acquire()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answers a request, and ends its connection if that takes too long."""
        end = threading.Timer(_LONGEST, _end, [request])
        end.daemon = True
        end.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            end.cancel()
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of a client that has left."""

    @property
    def url(self) -> str:
        """Returns the address for a browser."""
        host, port = self.server_address[:2]
        shown = f"[{host}]" if ":" in str(host) else host
        return f"http://{shown}:{port}/"

    def answer(self, target: str, host: str) -> Answer:
        """Returns the answer to a request.

        Args:
            target: the path and the query.
            host: the header of that name.
        """
        name = re.sub(r":\d*$", "", host).strip("[]").lower()
        if self.private and name not in LOOPBACK:
            # DNS rebinding: a foreign site's name resolves to this machine, to read the answers.
            return _refused(
                403,
                f"found the Host {printable(name, 80)}, expected localhost or 127.0.0.1; to use"
                " another name, start tools/watch.py with -host",
            )
        try:
            parts = urlsplit(target)
            keys = parse_qs(parts.query, max_num_fields=_MOST_CURVES).get("run", [])
        except ValueError:
            return _refused(400, "this isn't an address of this page")
        if parts.path == "/":
            return Answer(200, "text/html; charset=utf-8", _PAGE, _POLICY)
        if parts.path == "/runs":
            folder = printable(str(self.runs.files.root), 400)
            rows = self.runs.rows()
            return _as_json({"folder": folder, "runs": rows, "all": self.runs.files.all_found})
        if parts.path == "/curves":
            return _as_json(self.runs.curves(keys))
        if match := _FILE.fullmatch(parts.path):
            return self._file(match[1], match[2])
        return _refused(404, "there is no such page")

    def _file(self, key: str, name: str) -> Answer:
        try:
            data = self.runs.content(key, name, _LARGEST)
        except (KeyError, OSError, ValueError):
            return _refused(404, f"this run has no {name}")
        if name == "report.html":
            return Answer(200, "text/html; charset=utf-8", data, _REPORT_POLICY)
        if not data.startswith(_PNG):
            return _refused(404, f"{name} isn't a PNG")
        return Answer(200, "image/png", data)


def _end(request: socket.socket) -> None:
    """Ends a connection, on which a thread may be waiting."""
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


def _as_json(content: Any) -> Answer:
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return Answer(200, "application/json", text.encode())


def _refused(status: int, words: str) -> Answer:
    return Answer(status, "text/plain; charset=utf-8", f"{words}\n".encode())
