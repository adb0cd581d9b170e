"""``serve``: what tools/serve.py answers to several clients at once, against the plain model on the
same images.

The plain model is a Predictor that computes prepared images, batch after batch. A server gets them
as JPEG files of about 500 x 375, one a request. Its clients ask again as soon as they are answered,
each on a connection of its own. They run on the same machine, in one process: what they cost is the
server's loss.
"""

import argparse
import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from errors import RunError
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
        }
        request |= {"seconds": arguments.seconds, "images": str(photographs(folder))}
        ask(
            _SCRIPT,
            request | {"measure": "weights", "cfg": arguments.cfg, "options": options},
            arguments.threads,
        )

        def plain() -> dict[str, list[float]]:
            return ask(_SCRIPT, request | {"measure": "plain"}, arguments.threads)

        def served(clients: int) -> dict[str, list[float]]:
            with _server(request["weights"], arguments) as port:
                return ask(
                    _SCRIPT, request | {"measure": "clients", "clients": clients, "port": port}, 1
                )

        kinds = {"plain model": plain}
        for clients in arguments.clients:
            name = f"{clients} client{'s' * (clients > 1)}"
            kinds[name] = lambda clients=clients: served(clients)
        title = f"{arguments.cfg}, batch {arguments.batch_size}, workers {arguments.workers},"
        title += f" {arguments.threads} threads, {arguments.seconds} s a run after the first fifth"
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
            said = ""
            for line in process.stdout or ():
                said += line
                if line.startswith("ready"):
                    break
            if not (port := re.search(r":(\d+)/", said)) or "ready" not in said:
                raise RunError(
                    f"the server ended with status {process.wait()}; its own line says why"
                )
            yield int(port[1])
        finally:
            process.terminate()
