"""The metrics that Prometheus reads at /metrics."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """Counts of a server since its start."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        common = {"registry": self.registry, "namespace": "paddle_vit"}
        self.requests = Counter(
            "requests", "Requests that were answered.", ["path", "status"], **common
        )
        self.seconds = Histogram(
            "request_seconds",
            "Time from the request's head to the answer.",
            ["path"],
            buckets=_SECONDS,
            **common,
        )
        self.images = Counter("images", "Images by outcome.", ["outcome"], **common)
        sizes = (1, 2, 4, 8, 16, 32, 64, 128)
        self.batches = Histogram("batch_images", "Images per batch.", buckets=sizes, **common)
        self.waiting = Gauge("queue_images", "Images that are waiting.", **common)
        self.ready = Gauge("workers_ready", "Workers that have loaded the model.", **common)
        self.restarts = Counter(
            "worker_restarts", "Workers that ended and were replaced.", **common
        )

    def text(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return generate_latest(self.registry)
