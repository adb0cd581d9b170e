"""Fetches images by their URLs, within limits of size and time.

Only http and https are spoken, also after a redirect. No credentials are sent: neither those of a
URL, which is refused, nor cookies or the entries of ~/.netrc. Proxies are those of the environment
(http_proxy, https_proxy, no_proxy).
"""

import contextlib
import functools
import http.client
import re
import socket
import threading
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from errors import Unreadable, printable

# The seconds that an image may take, from the look-up of its host to its last byte.
SECONDS = 30
# The redirects that are followed.
_REDIRECTS = 5
_MOVED = (301, 302, 303, 307, 308)
_SCHEMES = ("http", "https")
_BLOCK = 1 << 20
# Characters of a URL that are sent as they are.
_PLAIN = "/%:@!$&'()*+,;=~-._?[]"
_AGENT = "paddle-vit-toolkit"


def is_url(path: str | bytes) -> bool:
    """Returns whether a path is the URL of an image, and not a file's name."""
    start = path[:8]
    if isinstance(start, bytes):
        start = start.decode("latin-1")
    return start.lower().startswith(("http://", "https://"))


def fetched(url: str, most: int) -> bytes:
    """Returns the file at a URL.

    Args:
        most: bytes that it may have.

    Raises:
        Unreadable: it can't be fetched, has more bytes, or takes longer than SECONDS.
    """
    download = _Download(_checked(url), most)
    # A look-up of a host has no time limit, and a server may send headers byte by byte. So the
    # download runs in a thread, which is left behind if it takes too long.
    thread = threading.Thread(target=download.run, daemon=True)
    thread.start()
    thread.join(SECONDS)
    if thread.is_alive():
        download.stop()
        raise Unreadable(f"fetching it takes longer than {SECONDS} s")
    if download.problem:
        raise Unreadable(download.problem)
    return b"".join(download.parts)


def _checked(url: str) -> str:
    """Returns a URL in ASCII.

    Raises:
        Unreadable: it isn't valid, or has a user's name or password.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        host = parts.hostname
        port = parts.port
        if parts.username is not None or parts.password is not None:
            raise Unreadable("it has a user name or a password, which aren't sent; remove them")
        if not host:
            raise Unreadable("it has no host")
        name = host.encode("idna").decode() if not host.isascii() else host
    except Unreadable:
        raise
    except ValueError as error:
        raise Unreadable(f"it isn't a valid URL ({printable(str(error))})") from None
    if ":" in name:
        name = f"[{name}]"
    place = name if port is None else f"{name}:{port}"
    path = urllib.parse.quote(parts.path, safe=_PLAIN)
    query = urllib.parse.quote(parts.query, safe=_PLAIN)
    return urllib.parse.urlunsplit((parts.scheme.lower(), place, path or "/", query, ""))


class _Download:
    """One file, which is downloaded by ``run``.

    Attributes:
        parts: the bytes that were received.
        problem: why it can't be fetched; "": nothing is wrong.
    """

    def __init__(self, url: str, most: int) -> None:
        self.url = url
        self.most = most
        self.parts: list[bytes] = []
        self.problem = ""
        self._stopped = False
        # The socket that is in use.
        self._socket: socket.socket | None = None

    def run(self) -> None:
        try:
            self._fetch()
        except Unreadable as error:
            self.problem = str(error)
        except Exception as error:
            reason: Any = getattr(error, "reason", None) or error
            text = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
            self.problem = f"can't be fetched ({printable(' '.join(text.split()))})"

    def stop(self) -> None:
        """Ends the thread that runs, by closing its connection."""
        self._stopped = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def use(self, connected: socket.socket) -> None:
        """Takes the socket of a connection, which ``stop`` closes."""
        self._socket = connected
        if self._stopped:
            raise TimeoutError

    def _fetch(self) -> None:
        url = self.url
        for _ in range(1 + _REDIRECTS):
            request = urllib.request.Request(url, headers={"User-Agent": _AGENT, "Accept": "*/*"})
            try:
                with _opener(self).open(request, timeout=SECONDS) as response:
                    self._receive(response)
                return
            except urllib.error.HTTPError as error:
                error.close()
                place = error.headers.get("Location")
                if error.code not in _MOVED or not place:
                    reason = printable(" ".join(str(error.reason).split()))
                    raise Unreadable(f"the server answers {error.code} ({reason})") from None
                url = urllib.parse.urljoin(url, place)
            if not is_url(url):
                scheme = printable(url.partition(":")[0], 20)
                raise Unreadable(f"it is redirected to {scheme}:, expected http or https")
            url = _checked(url)
        raise Unreadable(f"it is redirected more than {_REDIRECTS} times")

    def _receive(self, response: Any) -> None:
        """Takes the bytes of a response."""
        if response.headers.get_content_type() == "text/html":
            raise Unreadable("the server answers with a page (text/html), expected an image")
        claimed = response.headers.get("Content-Length") or ""
        length = int(claimed) if re.fullmatch("[0-9]{1,18}", claimed) else 0
        if length > self.most:
            raise Unreadable(f"it has {length} bytes, at most {self.most} are allowed")
        size = 0
        while not self._stopped and (part := response.read1(_BLOCK)):
            size += len(part)
            if size > self.most:
                self.parts.clear()
                raise Unreadable(f"it has more than {self.most} bytes, the most allowed")
            self.parts.append(part)
        if size < length:
            raise Unreadable(f"the server sends {size} of its {length} bytes")


def _opener(download: _Download) -> urllib.request.OpenerDirector:
    """Returns an opener for http and https alone. It follows no redirects: urllib's handler would
    read all that comes with one.
    """
    opener = urllib.request.OpenerDirector()
    proxies = urllib.request.getproxies()
    for handler in (
        urllib.request.ProxyHandler({kind: proxies[kind] for kind in _SCHEMES if kind in proxies}),
        urllib.request.UnknownHandler(),
        _Http(download),
        _Https(download),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
    ):
        opener.add_handler(handler)
    return opener


def _connecting(kind: Any, download: _Download, *arguments: Any, **options: Any) -> Any:
    """Returns a connection of a class of ``http.client``, whose socket ``download`` can close."""

    class Connection(kind):
        def connect(self) -> None:
            super().connect()
            download.use(self.sock)

    return Connection(*arguments, **options)


class _Http(urllib.request.HTTPHandler):
    def __init__(self, download: _Download) -> None:
        super().__init__()
        self._connection: Any = functools.partial(_connecting, http.client.HTTPConnection, download)

    def http_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(self._connection, req)


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, download: _Download) -> None:
        super().__init__()
        self._connection: Any = functools.partial(
            _connecting, http.client.HTTPSConnection, download
        )

    def https_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(self._connection, req)
