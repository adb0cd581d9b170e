"""The plain model, and clients of a server, for tools/benchmark.py serve.

The argument is a request as one word of JSON: ``measure`` ("weights", "plain" or "clients"),
``weights``, ``images``, ``batch_size`` and ``seconds``. For weights, ``cfg`` and ``options`` are
added, for clients their number and the server's ``port``. The answer is one line: {what: [value]}.
The first fifth of the seconds doesn't count.
"""

import asyncio
import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from errors import RunError, reporting

_WARM_UP = 0.2


def write_weights(request: dict[str, Any]) -> dict[str, list[float]]:
    """Writes random weights, with a description of their model."""
    from config import get_config
    from models import build_model
    from training.checkpoint import describe
    from training.checkpoint.description import METADATA
    from weights import file_arrays, formats

    config = get_config(request["cfg"], request["options"])
    metadata = {METADATA: describe(config, []).to_json()}
    formats.write_weights(Path(request["weights"]), file_arrays(build_model(config)), metadata)
    return {}


def plain(request: dict[str, Any]) -> dict[str, list[float]]:
    """Computes one batch of prepared images again and again."""
    import numpy as np

    from inference import Predictor

    size = request["batch_size"]
    seconds = request["seconds"]
    predictor = Predictor(request["weights"], batch_size=size)
    files = itertools.islice(itertools.cycle(_files(request)), size)
    pixels = np.stack([predictor.pixels(file) for file in files])
    began = time.perf_counter()
    counted = 0.0
    batches = 0
    while not counted or time.perf_counter() - counted < (1 - _WARM_UP) * seconds:
        predictor.probabilities(predictor.logits(pixels))
        batches += 1
        if not counted and time.perf_counter() - began > _WARM_UP * seconds:
            counted = time.perf_counter()
            batches = 0
    return {"images/s": [batches * size / (time.perf_counter() - counted)]}


def clients(request: dict[str, Any]) -> dict[str, list[float]]:
    """Measures a server. Each client sends the next request as soon as it has an answer."""
    return asyncio.run(_clients(request))


async def _clients(request: dict[str, Any]) -> dict[str, list[float]]:
    files = itertools.cycle([file.read_bytes() for file in _files(request)])
    began = time.perf_counter()
    seconds = request["seconds"]
    counted = began + _WARM_UP * seconds
    until = began + seconds
    asking = [_client(request["port"], files, counted, until) for _ in range(request["clients"])]
    taken = sorted(itertools.chain.from_iterable(await asyncio.gather(*asking)))
    if not taken:
        raise RunError(f"no request was answered within {seconds} s; give more --seconds")
    p50, p99 = (1000 * taken[int(share * len(taken))] for share in (0.5, 0.99))
    return {"images/s": [len(taken) / (until - counted)], "p50": [p50], "p99": [p99]}


async def _client(port: int, files: Iterator[bytes], counted: float, until: float) -> list[float]:
    """Returns the seconds of each answer that came between ``counted`` and ``until``."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    taken = []
    while (began := time.perf_counter()) < until:
        file = next(files)
        head = "POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: image/jpeg\r\n"
        writer.write(f"{head}Content-Length: {len(file)}\r\n\r\n".encode() + file)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        if not answer.startswith(b"http/1.1 200"):
            raise RunError(
                f"the server answered {answer.splitlines()[0].decode()}; lower --clients"
            )
        await reader.readexactly(int(answer.partition(b"content-length:")[2].split(b"\r\n")[0]))
        if counted <= (ended := time.perf_counter()) < until:
            taken.append(ended - began)
    writer.close()
    return taken


def _files(request: dict[str, Any]) -> list[Path]:
    return sorted(Path(request["images"]).rglob("*.jpg"))[:256]


def main() -> None:
    request = json.loads(sys.argv[1])
    functions = {"weights": write_weights, "plain": plain, "clients": clients}
    print(json.dumps(functions[request["measure"]](request)))


if __name__ == "__main__":
    with reporting():
        main()
