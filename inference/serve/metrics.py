"""What Prometheus reads at /metrics."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """A server's counts, from its start."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own = {"registry": self.registry, "namespace": "paddle_vit"}
        self.requests = Counter(
            "requests", "Requests that were answered.", ["path", "status"], **own
        )
        self.seconds = Histogram(
            "request_seconds", "From head to answer.", ["path"], buckets=_SECONDS, **own
        )
        self.images = Counter("images", "Images, by what became of them.", ["outcome"], **own)
        sizes = (1, 2, 4, 8, 16, 32, 64, 128)
        self.batches = Histogram("batch_images", "Images of a batch.", buckets=sizes, **own)
        self.waiting = Gauge("queue_images", "Images that wait.", **own)
        self.ready = Gauge("workers_ready", "Workers that have loaded the model.", **own)
        self.restarts = Counter("worker_restarts", "Workers that ended and were replaced.", **own)

    def text(self) -> bytes:
        """Returns all of it, as Prometheus reads it."""
        return generate_latest(self.registry)
