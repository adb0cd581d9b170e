"""The settings of a server."""

from collections.abc import Sequence
from dataclasses import dataclass

from errors import InputError, printable
from inference.serve.image_formats import ALWAYS, OTHERS

# pixels of an image, unless -o DATA.MAX_PIXELS: decoding takes up to 8 bytes for each
LARGEST = 50_000_000
LOOPBACK = ("127.0.0.1", "::1", "localhost")  # hosts that no stranger reaches
WORKERS = 1024
HELD = 128 << 20  # bytes of all requests that are being received or answered


@dataclass(frozen=True)
class Settings:
    """The settings of a server.

    Attributes:
        path, cfg, options: as a Predictor takes them.
        classes: a file of the outputs' names, or imagenet1k; None: what the weights tell.
        host, port: where it listens; port 0: one that is free.
        workers: processes that compute.
        batch_size: images that are computed together, at most.
        max_delay_ms: how long an image waits for others.
        max_queue: images that may wait.
        max_images: of one request.
        max_request_mb: of its body.
        formats: of images, besides those that are always taken (``image_formats.OTHERS``).
        timeout: seconds until an answer.
        token: what requests have to bear; None: nothing.
        quiet: no line per request.
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
                expected = (
                    f"expected any of {', '.join(OTHERS)}; {', '.join(ALWAYS)} are always taken"
                )
                raise InputError(f"-formats has {printable(name, 20)}, {expected}")
        if not 0 <= self.port < 1 << 16:
            raise InputError(f"-port is {self.port}, expected 0 to 65535 (0: any that is free)")

    @property
    def private(self) -> bool:
        """Returns whether only this machine's users may ask, and need no token."""
        return self.host in LOOPBACK and not self.token

    @property
    def largest_body(self) -> int:
        """Bytes of a request's body, at most."""
        return int(self.max_request_mb * (1 << 20))
