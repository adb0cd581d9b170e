"""Our side of tools/benchmark.py infer, in a process of its own: exports a model, or measures one
way to run it.

The argument is a request as one word of JSON. With ``sides``, exports are written below ``folder``,
of ``pretrained`` or else of random weights. The answer then has, for each side, its megabytes in
"made" or the reason in "refused". "shares" has accuracies, if ``pretrained`` is given. Otherwise the
answer is the images/s of ``side``, which is "eager" or an export's "FORMAT, PRECISION", and the
median and 95th percentile of its latency in ms.
"""

import functools
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import numpy as np
import paddle

from config import get_config
from datasets import get_dataset
from errors import RunError, reporting
from inference import Predictor
from inference.backends import STEMS, Runner, open_export
from inference.exporting import write_export
from inference.fidelity import eager, photographs
from inference.quantise import training_images
from inference.run_data import data_config, data_keys
from loading.transforms import Normalize
from models import build_model
from models.base import ImageModel
from ops.device import set_device_flags
from settings.configuration import Configuration, pair
from tools.benchmarks.rates import call_times

# Images of the training set that calibrate int8, and those that are computed together for an accuracy.
_CALIBRATION = 300
_BATCH = 32


def make(request: dict) -> dict[str, dict]:
    """Writes an export for each of ``sides``."""
    if request.get("pretrained"):
        return _make_trained(request)
    config = get_config(request["cfg"], request["options"])
    paddle.seed(0)
    model = build_model(config)
    for name, tensor in model.named_parameters():
        # Some classifiers begin at zero, and all logits would be the same.
        if name.startswith(model.classifier_names()):
            tensor.set_value(paddle.randn(tensor.shape) * 0.05)
    return _write(request, config, model, photographs(config, 32))


def _make_trained(request: dict) -> dict[str, dict]:
    """Writes the exports of trained weights, and evaluates them on the validation set of
    ``data``.
    """
    trained = Predictor(request["pretrained"], request["cfg"], request["options"])
    trained.check_classifier()
    assert trained.model is not None
    data = data_keys(trained.weights, request["data"], "accuracy needs a labelled set")
    calibration = training_images(trained.config, data, _CALIBRATION)
    answer = _write(request, trained.config, trained.model, calibration)
    config = data_config(trained.config, data)
    dataset = get_dataset(config, "val", alone=True)
    runs: dict[str, Runner] = {"eager": functools.partial(eager, trained.model)}
    for side in answer["made"]:
        runs[side] = open_export(Path(request["folder"], side))
    normalize = Normalize(config.DATA.IMAGENET_MEAN, config.DATA.IMAGENET_STD)
    hits = dict.fromkeys(runs, 0)
    same = dict.fromkeys(runs, 0)
    for start in range(0, len(dataset), _BATCH):
        samples = [dataset[index] for index in range(start, min(start + _BATCH, len(dataset)))]
        pixels = np.stack([sample[0] for sample in samples])
        labels = np.array([sample[1] for sample in samples]).ravel()
        images = normalize(paddle.to_tensor(pixels)).numpy()
        expected = None
        for side, run in runs.items():
            classes = run(images).argmax(1)
            # The eager model comes first.
            expected = classes if expected is None else expected
            hits[side] += int((classes == labels).sum())
            same[side] += int((classes == expected).sum())
    count = len(dataset)
    answer["shares"] = {
        side: {"acc1": 100 * hits[side] / count, "agreement": 100 * same[side] / count}
        for side in runs
    }
    answer["images"] = {"validation": count}
    return answer


def _write(
    request: dict, config: Configuration, model: ImageModel, calibration: np.ndarray
) -> dict[str, dict]:
    made = {}
    refused = {}
    for side in request["sides"]:
        kind, precision = side.split(", ")
        images = calibration if precision == "int8" else None
        path = Path(request["folder"], side)
        try:
            write_export(config, model, path, [], kind, precision, "classification", images, 0)
        except RunError as error:
            refused[side] = str(error)
            continue
        stem = STEMS[kind]
        made[side] = sum(file.stat().st_size for file in path.glob(f"{stem}.*")) / 1e6
    return {"made": made, "refused": refused}


def rate(request: dict) -> dict[str, float]:
    """Returns ``inference`` in images/s, and the latency's ``p50`` and ``p95`` in ms."""
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
        times = call_times(call, request["warm_up"], request["seconds"])
    median, late = np.percentile(times, [50, 95]) * 1e3
    return {"inference": len(times) * batch / sum(times), "p50": median, "p95": late}


def main() -> None:
    request = json.loads(sys.argv[1])
    print(json.dumps(make(request) if "sides" in request else rate(request)))


if __name__ == "__main__":
    with reporting():
        main()
