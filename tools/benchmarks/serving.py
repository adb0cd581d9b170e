"""``serve`` measures how many images tools/serve.py answers for several clients at once, beside the
plain model on the same images.

The plain model is a Predictor that computes prepared images, batch after batch. A server gets them
as JPEG files of about 500 x 375, one in each request. Each client has a connection of its own, and
sends the next request as soon as it has an answer. The clients run in one process on the same
machine, so they take time from the server.
"""

import argparse
import contextlib
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from errors import RunError, counted
from launch.files import temporary_folder
from launch.startup import end_with_parent
from tools.benchmarks.loading import photographs
from tools.benchmarks.measure import (
    ROOT,
    Benchmark,
    Ratio,
    ask,
    environment,
    measure,
    option_words,
    positive,
)

_RATE = "images/s"
_SCRIPT = "our_serving.py"


def serving(arguments: argparse.Namespace) -> None:
    """Measures a server.

    Raises:
        InputError: a number below 1, or keys that aren't free here.
        RunError: the server ends.
    """
    positive(arguments, "batch_size", "clients", "seconds", "workers", "threads")
    options = option_words(arguments, {})
    with temporary_folder() as folder:
        request: dict[str, Any] = {
            "weights": f"{folder}/weights.safetensors",
            "batch_size": arguments.batch_size,
            "seconds": arguments.seconds,
            "images": str(photographs(folder)),
        }
        made = request | {"measure": "weights", "cfg": arguments.cfg, "options": options}
        ask(_SCRIPT, made, arguments.threads)

        def plain() -> dict[str, list[float]]:
            return ask(_SCRIPT, request | {"measure": "plain"}, arguments.threads)

        def served(clients: int) -> dict[str, list[float]]:
            with _server(request["weights"], arguments) as port:
                asked = request | {"measure": "clients", "clients": clients, "port": port}
                return ask(_SCRIPT, asked, threads=1)

        kinds = {"plain model": plain}
        for clients in arguments.clients:
            name = counted(clients, "client")
            kinds[name] = functools.partial(served, clients)
        title = (
            f"{arguments.cfg}, batch {arguments.batch_size}, workers {arguments.workers},"
            f" {arguments.threads} threads, {arguments.seconds} s a run after the first fifth"
        )
        compared = [Ratio(_RATE, name, "plain model") for name in list(kinds)[1:]]
        measure(Benchmark(title, kinds, {_RATE: "", "p50": "ms", "p99": "ms"}, compared), arguments)


@contextlib.contextmanager
def _server(weights: str, arguments: argparse.Namespace) -> Iterator[int]:
    """Starts a server; yields its port once the model is loaded."""
    command = [sys.executable, str(ROOT / "tools" / "serve.py"), weights, "-port=0", "-quiet"]
    command += [f"-workers={arguments.workers}", f"-batch_size={arguments.batch_size}"]
    threads = environment(max(1, arguments.threads // arguments.workers))
    with subprocess.Popen(
        command, env=threads, stdout=subprocess.PIPE, text=True, preexec_fn=end_with_parent
    ) as process:
        try:
            printed = ""
            for line in process.stdout or ():
                printed += line
                if line.startswith("ready"):
                    break
            if not (port := re.search(r":(\d+)/", printed)) or "ready" not in printed:
                raise RunError(
                    f"the server ended with status {process.wait()}; its own line says why"
                )
            yield int(port[1])
        finally:
            process.terminate()
