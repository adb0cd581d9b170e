"""Servers (tools/serve.py) as processes, with well-behaved and hostile clients."""

import http.client
import io
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
import zlib
from contextlib import contextmanager, suppress
from pathlib import Path

import paddle
import pytest
from PIL import Image
from sklearn.datasets import load_sample_images

from config import get_config
from models import build_model
from support.programs import ROOT, descendants
from training.checkpoint import describe
from training.checkpoint.description import METADATA
from weights import file_arrays
from weights.formats import write_weights

TINY = [
    "DATA.IMAGE_SIZE", "32", "MODEL.PATCH_SIZE", "8", "MODEL.EMBED_DIM", "16", "MODEL.DEPTH", "2",
    "MODEL.NUM_HEADS", "2",
]  # fmt: skip
CLASSES = ("bridge", "<img src=x onerror=alert(1)>", "flower, red")


def write_checkpoint(file, task="classification", classes=CLASSES):
    """Writes the random weights of a small model with its description."""
    paddle.seed(0)
    config = get_config(None, [*TINY, "MODEL.NUM_CLASSES", str(len(classes))])
    told = {METADATA: describe(config, list(classes), task).to_json()}
    write_weights(Path(file), file_arrays(build_model(config)), told)
    return Path(file)


class Served:
    """A started server: its process, its port, and its output so far."""

    def __init__(self, path, *flags, folder, **environment):
        self.log = Path(folder) / f"serve-{time.monotonic_ns()}"
        command = [
            sys.executable,
            str(ROOT / "tools" / "serve.py"),
            str(path),
            "-port=0",
            *map(str, flags),
        ]
        with open(f"{self.log}.out", "w") as out, open(f"{self.log}.err", "w") as err:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=err, env=os.environ | environment, cwd=folder
            )
        self.port = int(self.said(r"serving .* at http://[^ ]*:(\d+)/"))

    def text(self, stream="out"):
        return Path(f"{self.log}.{stream}").read_text(encoding="utf-8")

    def said(self, pattern, stream="out", seconds=60, times=1):
        """Waits until the server has printed a pattern; returns the pattern's group."""
        until = time.monotonic() + seconds
        while True:
            found = re.findall(pattern, self.text(stream))
            if len(found) >= times:
                return found[times - 1]
            assert self.process.poll() is None, (
                f"it ended with {self.process.returncode}: {self.text('err')}"
            )
            assert time.monotonic() < until, (
                f"no {pattern!r} within {seconds} s: {self.text('out')}{self.text('err')}"
            )
            time.sleep(0.02)

    def ready(self):
        self.said(r"ready after")
        return self

    def ask(self, method, path, body=None, headers=None, timeout=30):
        """Sends a request. Returns (status, answer, headers); an answer in JSON is parsed."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            data = answer.read()
        finally:
            connection.close()
        headers = {name.lower(): value for name, value in answer.getheaders()}
        if data and "json" in headers.get("content-type", ""):
            data = json.loads(data)
        return answer.status, data, headers

    def raw(self, *parts, timeout=5, half=False):
        """Sends bytes as they are. Returns all that comes until the server closes the connection,
        or until the time is up.
        """
        with socket.create_connection(("127.0.0.1", self.port), timeout) as client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # The server may have closed the connection already.
            with suppress(OSError):
                for part in parts:
                    client.sendall(part)
                if half:
                    client.shutdown(socket.SHUT_WR)
            return read_all(client)

    def workers(self):
        return [
            pid
            for pid, (_, words) in descendants(self.process.pid).items()
            if "compute.py" in words
        ]

    def memory(self):
        """Returns the memory of all its processes, in bytes."""
        pids = [self.process.pid, *self.workers()]
        rows = [Path(f"/proc/{pid}/statm").read_text().split() for pid in pids]
        return sum(int(row[1]) for row in rows) * os.sysconf("SC_PAGE_SIZE")

    def metric(self, name):
        """Returns the sum of a metric's values."""
        text = self.ask("GET", "/metrics")[1].decode()
        return sum(
            float(row.rpartition(" ")[2])
            for row in text.splitlines()
            if re.match(rf"{name}[{{ ]", row)
        )

    def end(self, number=signal.SIGTERM, seconds=30):
        """Sends a signal; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(seconds)
        finally:
            self.process.kill()


def wait_until(condition, seconds=30):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"not within {seconds} s"
        time.sleep(0.02)


def read_all(client):
    parts = []
    try:
        while part := client.recv(1 << 16):
            parts.append(part)
    except (TimeoutError, ConnectionError):
        pass
    return b"".join(parts)


@contextmanager
def serving(path, *flags, folder, **environment):
    server = Served(path, *flags, folder=folder, **environment)
    try:
        yield server
    finally:
        # Its workers end with it, even suspended ones.
        server.end(signal.SIGKILL)


def form(*files, boundary="frontier"):
    """Returns (body, headers) of an upload. Files are (field, name, bytes)."""
    parts = []
    for field, name, data in files:
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="{field}"; filename="{name}"\r\n\r\n'
        parts += [head.encode(), data, b"\r\n"]
    body = b"".join([*parts, f"--{boundary}--\r\n".encode()])
    return body, {"Content-Type": f"multipart/form-data; boundary={boundary}"}


def png_of(width, height):
    """A PNG's head, that says so many pixels."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + head
    return (
        b"\x89PNG\r\n\x1a\n"
        + struct.pack(">I", 13)
        + chunk
        + struct.pack(">I", zlib.crc32(chunk))
        + b"\0\0\0\0IDAT"
    )


# ------------------------------------------------------------ fixtures, which tests/conftest.py
# gives to all


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("served") / "tiny.safetensors")


@pytest.fixture(scope="session")
def server(checkpoint):
    with serving(
        checkpoint, "-max_images=8", "-max_request_mb=4", folder=checkpoint.parent
    ) as server:
        yield server.ready()


@pytest.fixture(scope="session")
def photographs():
    """Image files: two photographs as JPEG and PNG."""
    files = []
    for photograph, kind in zip(load_sample_images().images, ("JPEG", "PNG"), strict=True):
        file = io.BytesIO()
        Image.fromarray(photograph[::2, ::2]).save(file, kind)
        files.append(file.getvalue())
    return files
