"""PaddleViT's side of ``tools/benchmark.py paddlevit``, in a process of its own: PaddleViT's modules
have the names of this toolkit's.

The argument is a request as one word of JSON: ``file`` (a YAML file in a checkout of PaddleViT),
``batch_size``, ``steps`` of a report, and ``reports``. The answer is a line with ``images_per_s`` of
each report, and ``peak_memory`` in MB. A report before them isn't timed.
"""

import json
import resource
import sys
import time
from pathlib import Path

import paddle
from paddlevit_reference import build, without_drops


def main() -> None:
    request = json.loads(sys.argv[1])
    file = Path(request["file"])
    config, model = build(file.parent.parent, file)
    without_drops(model)
    optimizer = paddle.optimizer.AdamW(parameters=model.parameters(), weight_decay=0.05)
    side = config.DATA.IMAGE_SIZE
    images = paddle.randn([request["batch_size"], 3, side, side])
    labels = paddle.arange(request["batch_size"])
    rates = []
    for _ in range(request["reports"] + 1):
        started = time.perf_counter()
        for _ in range(request["steps"]):
            loss = paddle.nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
        loss.item()
        rates.append(request["steps"] * len(labels) / (time.perf_counter() - started))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    print(json.dumps({"images_per_s": rates[1:], "peak_memory": peak}))


if __name__ == "__main__":
    main()
