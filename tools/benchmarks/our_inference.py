"""Our side of tools/benchmark.py infer, in a process of its own: exports a model, or runs it one
way and times that.

It takes a request as one word of JSON. With ``make`` it writes the exports of random weights below
``folder`` and answers which there are. Otherwise it answers with [images/s] of ``side``: "eager",
or an export's "FORMAT, PRECISION".
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import numpy as np
import paddle

from config import get_config
from errors import RunError, reporting
from inference.backends import open_export
from inference.exporting import write_export
from inference.fidelity import photographs
from models import build_model
from ops.device import set_device_flags
from settings.options import pair
from tools.benchmarks.rates import calls_rate


def make(request: dict) -> list[str]:
    """Writes an export for each of ``sides``; returns those that could be written."""
    config = get_config(request["cfg"], request["options"])
    paddle.seed(0)
    model = build_model(config)
    for name, tensor in model.named_parameters():
        # some begin at zero, and every logit would be the same
        if name.startswith(model.classifier_names()):
            tensor.set_value(paddle.randn(tensor.shape) * 0.05)
    pictures = photographs(config, 32)
    made = []
    for side in request["sides"]:
        kind, precision = side.split(", ")
        images = pictures if precision == "int8" else None
        try:
            write_export(
                config,
                model,
                Path(request["folder"], side),
                [],
                kind,
                precision,
                "classification",
                images,
                0,
            )
            made.append(side)
        except RunError as error:
            print(f"{request['cfg']}: {side}: {error}", file=sys.stderr)
    return made


def rate(request: dict) -> list[float]:
    """Returns [images/s]."""
    config = get_config(request["cfg"], request["options"])
    data = config.DATA
    batch = request["batch_size"]
    shape = (batch, data.IMAGE_CHANNELS, *pair(data.IMAGE_SIZE))
    images = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    set_device_flags(config, 1)
    if request["side"] == "eager":
        model = build_model(config)
        tensor = paddle.to_tensor(images)
        model.eval()
        with paddle.no_grad():
            return [
                calls_rate(
                    lambda: model(tensor).numpy(), batch, request["warm_up"], request["seconds"]
                )
            ]
    run = open_export(Path(request["folder"], request["side"]))
    return [calls_rate(lambda: run(images), batch, request["warm_up"], request["seconds"])]


def main() -> None:
    request = json.loads(sys.argv[1])
    print(json.dumps(make(request) if "sides" in request else rate(request)))


if __name__ == "__main__":
    with reporting():
        main()
