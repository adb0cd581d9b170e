"""Our side of ``segmentation`` of tools/benchmark.py, in a process of its own.

The argument is a request as one word of JSON (``tools.benchmarks.segmentation``). ``measure`` is
"train" or "eval". The answer is one line: ``images_per_s`` of each report, and ``peak_memory`` of
this process in MB.
"""

import gc
import json
import sys
import time
import zlib  # noqa: F401  (before Paddle: errors.py says why)
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

# Reports that don't count: memory is returned to the system meanwhile.
WARM_UP = 2


def main() -> None:
    import numpy as np
    import paddle

    from config import get_config
    from ops.device import trim_buffers, tune_cpu
    from settings.registry import tasks
    from training.optim import build_optimizer
    from training.window import peak_memory

    request = json.loads(sys.argv[1])
    tune_cpu(1)
    config = get_config(request["cfg"], request["options"])
    task = tasks.choose(config)(config)
    task.ignored = 255
    model = task.build_network()
    rng = np.random.default_rng(0)
    batch_size = request["batch_size"]
    channels, height, width = request["image"]
    pixels = rng.integers(0, 256, (batch_size, height, width, channels), np.uint8)
    mask = rng.integers(0, request["classes"], (batch_size, height, width), np.uint8)
    batch = {"pixels": paddle.to_tensor(pixels), "mask": paddle.to_tensor(mask)}
    # An evaluation takes one image at a time.
    singles = [
        {"pixels": paddle.to_tensor(image[None]), "mask": paddle.to_tensor(classes[None])}
        for image, classes in zip(pixels, mask, strict=True)
    ]
    optimizer = build_optimizer(config, model)

    def train() -> None:
        task.step(model, batch, 0)["loss"].mean().backward()
        optimizer.step()
        optimizer.clear_grad(set_to_zero=False)
        trim_buffers()

    def evaluate() -> None:
        with paddle.no_grad():
            task.evaluate(model, iter(singles))
        trim_buffers()

    if request["measure"] == "train":
        step = train
        model.train()
    else:
        step = evaluate
        model.eval()
    rates = _rates(step, request)
    print(json.dumps({"images_per_s": rates, "peak_memory": peak_memory()}))


def _rates(step: Callable[[], None], request: dict[str, Any]) -> list[float]:
    gc.collect()
    gc.freeze()
    rates = []
    for _ in range(WARM_UP + request["reports"]):
        started = time.perf_counter()
        for _ in range(request["steps"]):
            step()
        elapsed = time.perf_counter() - started
        rates.append(request["steps"] * request["batch_size"] / elapsed)
    return rates[WARM_UP:]


if __name__ == "__main__":
    from errors import reporting

    with reporting():
        main()
