"""PaddleViT's YAML files and weights give what its own code computes with them.

golden/paddlevit_models.py has the reduced models, and records PaddleViT's side.
"""

import json

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.paddlevit_models import (
    CASES,
    CLASSES,
    IMAGES,
    array,
    file_name,
    labels,
    without_dropout,
)

from config import get_config
from models import build_model
from weights import load_weights
from weights.formats import write_weights


@pytest.fixture
def read(tmp_path):
    """Returns a function that builds the model of a YAML file, with the weights of an array each."""

    def read(text, arrays):
        (tmp_path / "model.yaml").write_text(text)
        model = build_model(get_config(tmp_path / "model.yaml"), head_init_scale=1.0)
        write_weights(tmp_path / "model.pdparams", arrays)
        report = load_weights(model, tmp_path / "model.pdparams")
        assert not report.fresh
        return model

    return read


def assert_near(found, expected, what):
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.ptp(expected), rtol=0, err_msg=what)


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_a_training_step_is_paddlevits(name, read):
    golden = dict(np.load(ROOT / "tests" / "golden" / f"paddlevit_{name}.npz"))
    shapes = json.loads(str(golden["shapes"]))
    buffers = {
        key.removeprefix("buffer/"): values
        for key, values in golden.items()
        if key.startswith("buffer/")
    }
    arrays = {key: array(file_name(key), tuple(shape)) for key, shape in shapes.items()}
    model = read(CASES[name].text, arrays | buffers)
    images = paddle.to_tensor(array("images", (IMAGES, 3, *model.image_size)))
    model.eval()
    logits = model(images).numpy()
    # The images have an effect.
    assert np.abs(np.diff(golden["logits"], axis=0)).max() > 1e-2 * np.ptp(golden["logits"])
    assert_near(logits, golden["logits"], "logits in evaluation")

    model.train()
    without_dropout(model)
    logits = model(images)
    assert logits.shape == [IMAGES, CLASSES]
    loss = paddle.nn.functional.cross_entropy(logits, paddle.to_tensor(labels()))
    loss.backward()
    assert_near(logits.numpy(), golden["training_logits"], "logits in training")
    np.testing.assert_allclose(loss.item(), golden["loss"], rtol=1e-5)

    # The gradients and the running means come from PaddleViT's names to ours as weights do.
    zeros = {key: np.zeros(shape, np.float32) for key, shape in shapes.items()}
    after = zeros | {
        key.partition("/")[2]: values
        for key, values in golden.items()
        if key.startswith(("grad/", "mean/"))
    }
    expected = dict(read(CASES[name].text, after | buffers).state_dict())
    # A gradient whose terms cancel out is only rounding.
    gradients = {key for key, parameter in model.named_parameters() if not parameter.stop_gradient}
    least = 2e-2 * max(np.ptp(expected[key].numpy()) for key in gradients)
    for key, tensor in model.state_dict().items():
        if key in gradients:
            values = np.zeros(tensor.shape) if tensor.grad is None else tensor.grad.numpy()
            wanted = expected[key].numpy()
            tolerance = 1e-5 * max(np.ptp(wanted), least)
            np.testing.assert_allclose(values, wanted, atol=tolerance, rtol=0, err_msg=key)
        elif key.endswith("._mean"):
            assert_near(tensor.numpy(), expected[key].numpy(), key)
