"""The settings of a server."""

from collections.abc import Sequence
from dataclasses import dataclass

from errors import InputError, printable
from inference.serve.image_formats import ALWAYS, OTHERS

# Pixels of an image, unless -o DATA.MAX_PIXELS is given. Decoding takes up to 8 bytes for each.
LARGEST = 50_000_000
# Hosts that only programs of this machine can reach.
LOOPBACK = ("127.0.0.1", "::1", "localhost")
# The largest number of workers.
WORKERS = 1024
# Bytes of all requests together that are being received or answered.
HELD = 128 << 20


@dataclass(frozen=True)
class Settings:
    """The settings of a server.

    Attributes:
        path, cfg, options: as for a ``Predictor``.
        classes: a file of the classes' names, or imagenet1k; None: the names in the weights.
        host, port: where the server listens. Port 0 means any that is free.
        workers: number of processes that compute.
        batch_size: the most images of a batch.
        max_delay_ms: how long an image waits for others to fill its batch.
        max_queue: the most images that wait.
        max_images: the most images of a request.
        max_request_mb: the most MiB of a request's body.
        formats: accepted formats of ``image_formats.OTHERS``.
        timeout: the most seconds until an answer.
        token: the token that requests need; None: they need none.
        quiet: whether requests aren't logged.
    """

    path: str
    cfg: str | None = None
    options: Sequence[str] = ()
    classes: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    batch_size: int = 32
    max_delay_ms: float = 5.0
    max_queue: int = 256
    max_images: int = 64
    max_request_mb: float = 32.0
    formats: Sequence[str] = ()
    timeout: float = 30.0
    token: str | None = None
    quiet: bool = False

    def __post_init__(self) -> None:
        least = {
            "workers": 1,
            "batch_size": 1,
            "max_delay_ms": 0,
            "max_images": 1,
            "max_queue": self.max_images,
        }
        for name, low in least.items():
            if not low <= getattr(self, name) < 1_000_000:
                raise InputError(f"-{name} is {getattr(self, name)}, expected {low} or more")
        if self.workers > WORKERS:
            raise InputError(f"-workers is {self.workers}, expected {WORKERS} at most")
        for name, high in {"max_request_mb": HELD >> 20, "timeout": 3600}.items():
            if not 0 < getattr(self, name) <= high:
                raise InputError(
                    f"-{name} is {getattr(self, name)}, expected more than 0, at most {high}"
                )
        for name in self.formats:
            if name not in OTHERS:
                raise InputError(
                    f"-formats has {printable(name, 20)}, expected any of {', '.join(OTHERS)};"
                    f" {', '.join(ALWAYS)} are always accepted"
                )
        if not 0 <= self.port < 1 << 16:
            raise InputError(f"-port is {self.port}, expected 0 to 65535 (0: any that is free)")

    @property
    def private(self) -> bool:
        """Returns whether only programs of this machine reach the server, without a token."""
        return self.host in LOOPBACK and not self.token

    @property
    def largest_body(self) -> int:
        """Returns the most bytes of a request's body."""
        return int(self.max_request_mb * (1 << 20))
