"""Of equal logits the lowest class comes first: in evaluations, predictions, exports and reports
alike.
"""

import json

import numpy as np
import paddle
import pytest
from conftest import without
from PIL import Image
from support.training_runs import work

from config import get_config
from datasets import get_datasets
from inference import Predictor
from inference.exporting import write_export
from models import build_model
from training.report.run_files import read_predictions
from training.report.statistics import confusions
from weights import save_weights

CLASSES = 20
BIASES = {"all": {}, "two at the edge": {7: 4, 9: 3, 11: 2, 3: 2, 12: 1, 5: 1}}
FIRST_FIVE = {"all": [0, 1, 2, 3, 4], "two at the edge": [7, 9, 3, 11, 5]}


@pytest.fixture(params=BIASES)
def kind(request):
    return request.param


@pytest.fixture
def options(tiny, tmp_path, kind):
    """A picture of each class, and weights that give all of them the same logits."""
    for label in range(CLASSES):
        folder = tmp_path / "data" / "val" / f"{label:02}"
        folder.mkdir(parents=True)
        Image.fromarray(np.full((8, 8), 10 * label, np.uint8)).save(folder / "a.png")
    kept = without(tiny, "TRAIN.", "DATA.DATASET", "MODEL.NUM_CLASSES", "REPORT")
    options = [
        *kept,
        "DATA.DATASET",
        "folder",
        "DATA.DATA_PATH",
        str(tmp_path / "data"),
        "EVAL",
        "True",
    ]
    options += ["MODEL.NUM_CLASSES", str(CLASSES), "DATA.BATCH_SIZE_EVAL", "8"]
    model = build_model(get_config(None, options))
    model.head.weight.set_value(paddle.zeros_like(model.head.weight))
    bias = np.zeros(CLASSES, np.float32)
    bias[list(BIASES[kind])] = list(BIASES[kind].values())
    model.head.bias.set_value(bias)
    save_weights(model, tmp_path / "w.safetensors")
    return [*options, "MODEL.PRETRAINED", str(tmp_path / "w.safetensors")]


@pytest.mark.parametrize("engine", [pytest.param("eager", marks=pytest.mark.smoke), "inference"])
def test_an_evaluation_and_its_table_take_the_lowest_class(tmp_path, options, kind, engine):
    output = tmp_path / "run"
    config, _, val = get_datasets(
        get_config(None, [*options, "OUTPUT", str(output), "EVAL_ENGINE", engine])
    )
    work(config, None, val)
    result = json.loads((output / "result.json").read_text())
    best = FIRST_FIVE[kind][0]
    assert (result["acc1"], result["acc5"], result["mean_class_acc"]) == (
        100 / CLASSES,
        500 / CLASSES,
        100 / CLASSES,
    )
    assert [int(name) for name, share in result["class_acc"].items() if share] == [best]
    told = read_predictions(output / "predictions.csv")
    assert set(told.predicted.tolist()) == {best}
    assert told.right.sum() == 1
    assert confusions(told.label, told.predicted).predicted.tolist() == [best] * CLASSES


@pytest.mark.parametrize(
    "form", [pytest.param("weights", marks=pytest.mark.smoke), "paddle", "onnx", "openvino"]
)
def test_predictions_take_the_lowest_classes(tmp_path, options, kind, form):
    (tmp_path / "small.yaml").write_text("TAG: of a test\n")
    options = without(options, "EVAL", "MODEL.PRETRAINED", "DATA.DATASET", "DATA.DATA_PATH")
    predictor = Predictor(tmp_path / "w.safetensors", str(tmp_path / "small.yaml"), options)
    if form != "weights":
        pytest.importorskip("onnx", reason="the extra export isn't installed")
        write_export(predictor.config, predictor.model, tmp_path / "out", [], form, "float32")
        predictor = Predictor(tmp_path / "out")
    for answer in predictor(
        [tmp_path / "data" / "val" / f"{label:02}" / "a.png" for label in (0, 7, 19)]
    ):
        assert answer.outputs == FIRST_FIVE[kind]
