"""Our side of tools/benchmark.py infer, in a process of its own: exports a model, or measures one
way to run it.

The argument is a request as one word of JSON. With ``sides``, the exports of random weights are
written below ``folder``, and the answer is the list of those that could be written. Otherwise the
answer is [images/s] of ``side``: "eager", or an export's "FORMAT, PRECISION".
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
from settings.configuration import pair
from tools.benchmarks.rates import calls_rate


def make(request: dict) -> list[str]:
    """Writes an export for each of ``sides``; returns those that could be written."""
    config = get_config(request["cfg"], request["options"])
    paddle.seed(0)
    model = build_model(config)
    for name, tensor in model.named_parameters():
        # Some classifiers begin at zero, and all logits would be the same.
        if name.startswith(model.classifier_names()):
            tensor.set_value(paddle.randn(tensor.shape) * 0.05)
    pictures = photographs(config, 32)
    made = []
    for side in request["sides"]:
        kind, precision = side.split(", ")
        images = pictures if precision == "int8" else None
        try:
            path = Path(request["folder"], side)
            write_export(config, model, path, [], kind, precision, "classification", images, 0)
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
        model.eval()
        tensor = paddle.to_tensor(images)

        def call() -> object:
            return model(tensor).numpy()
    else:
        run = open_export(Path(request["folder"], request["side"]))

        def call() -> object:
            return run(images)

    with paddle.no_grad():
        return [calls_rate(call, batch, request["warm_up"], request["seconds"])]


def main() -> None:
    request = json.loads(sys.argv[1])
    print(json.dumps(make(request) if "sides" in request else rate(request)))


if __name__ == "__main__":
    with reporting():
        main()
