"""PaddleViT's YAML files and weights give what its own code computes with them.

golden/paddlevit_models.py has the reduced models, and records PaddleViT's side in float64.
"""

import json

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.paddlevit_models import CASES, CLASSES, IMAGES, array, file_name, labels

from config import get_config
from models import build_model
from models.layers.batch_norm import BATCH_NORMS
from tools.benchmarks.paddlevit_reference import convert, without_drops
from weights import load_weights
from weights.formats import write_weights


@pytest.fixture(params=CASES)
def golden(request):
    """The text of a case's YAML file, PaddleViT's arrays, and the shapes of its parameters."""
    arrays = dict(np.load(ROOT / "tests" / "golden" / f"paddlevit_step_{request.param}.npz"))
    return CASES[request.param].text, arrays, json.loads(str(arrays.pop("shapes")))


@pytest.fixture
def load(golden, tmp_path):
    """Returns a function that builds the model with arrays in the place of its weights."""
    text, arrays, _ = golden
    (tmp_path / "model.yaml").write_text(text)
    buffers = {key.removeprefix("buffer/"): arrays[key] for key in arrays if "buffer/" in key}

    def load(weights):
        model = build_model(get_config(tmp_path / "model.yaml"), head_init_scale=1.0)
        write_weights(tmp_path / "model.pdparams", weights | buffers)
        assert not load_weights(model, tmp_path / "model.pdparams").fresh
        return model

    return load


@pytest.fixture
def model(golden, load):
    _, _, shapes = golden
    return load({key: array(file_name(key), tuple(shape)) for key, shape in shapes.items()})


def images_of(model):
    return paddle.to_tensor(array("images", (IMAGES, 3, *model.image_size)))


def assert_near(found, expected, within, what):
    np.testing.assert_allclose(
        found, expected, atol=within * np.ptp(expected), rtol=0, err_msg=what
    )


@pytest.mark.smoke
def test_logits_are_paddlevits(golden, model):
    expected = golden[1]["logits"]
    # The images have an effect.
    assert np.abs(np.diff(expected, axis=0)).max() > 1e-2 * np.ptp(expected)
    model.eval()
    assert_near(model(images_of(model)).numpy(), expected, 1e-5, "logits")


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_training_step_is_paddlevits(dtype, golden, load, model):
    """With float32, the compiled operators compute the step. Batch norms magnify its rounding."""
    _, arrays, shapes = golden
    if not any(key.startswith("grad/") for key in arrays):
        pytest.skip("too large for its gradients: tools/check_paddlevit.py -double compares them")
    has_batch_norms = any(isinstance(layer, BATCH_NORMS) for layer in model.sublayers())
    within = 1e-3 if has_batch_norms and dtype == "float32" else 1e-5
    # The gradients and the running means come from PaddleViT's names to ours as weights do.
    after = {key: np.zeros(shape, np.float32) for key, shape in shapes.items()}
    for key, values in arrays.items():
        kind, _, name = key.partition("/")
        if kind in ("grad", "mean"):
            after[name] = values
    expected = {key: tensor.numpy() for key, tensor in load(after).state_dict().items()}

    convert(model, dtype)
    without_drops(model)
    logits = model(images_of(model).astype(dtype))
    # PaddleViT's RepMLP has 1,000 classes whatever its file says.
    assert logits.shape == [IMAGES, model.num_classes]
    assert model.num_classes in (CLASSES, 1000)
    loss = paddle.nn.functional.cross_entropy(logits, paddle.to_tensor(labels()))
    loss.backward()
    assert_near(logits.numpy(), arrays["training_logits"], within, "logits in training")
    np.testing.assert_allclose(loss.item(), arrays["loss"], rtol=within)

    gradients = {
        key: tensor for key, tensor in model.named_parameters() if not tensor.stop_gradient
    }
    # A gradient whose terms cancel out is only rounding.
    least = 2e-2 * max(np.ptp(expected[key]) for key in gradients)
    for key, parameter in gradients.items():
        wanted = expected[key]
        found = np.zeros(wanted.shape) if parameter.grad is None else parameter.grad.numpy()
        tolerance = within * max(np.ptp(wanted), least)
        np.testing.assert_allclose(found, wanted, atol=tolerance, rtol=0, err_msg=key)
    for key, tensor in model.state_dict().items():
        if key.endswith("._mean"):
            assert_near(tensor.numpy(), expected[key], within, key)
