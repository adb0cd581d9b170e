"""SegFormer's MiT, a PVTv2 of other sizes, against transformers' outputs and gradients."""

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.make_names_vit import positive, values
from support.small_models import small_pvtv2

from config import get_config
from models import build_model, with_switches
from models import pvtv2 as architecture
from weights import load_weights
from weights.formats import write_weights
from weights.layout import linear_weights
from weights.names import timm_names

GOLDEN = np.load(ROOT / "tests" / "golden" / "segformer.npz")
# Sides of which no multiple of 32 is left.
SIDES = (70, 45)


def file_of(folder):
    """Writes the weights of the golden classifier, under transformers' names."""
    prefix = "classes/grad/"
    names = [name.removeprefix(prefix) for name in GOLDEN if name.startswith(prefix)]
    arrays = {name: positive(name, GOLDEN[prefix + name].shape) for name in names}
    write_weights(folder / "model.safetensors", arrays)
    return folder / "model.safetensors"


@pytest.fixture
def model(tmp_path):
    """The small MiT with the golden weights, in evaluation mode."""
    found = small_pvtv2(mlp_ratio=4, norm_eps=1e-5, image_size=SIDES)
    load_weights(found, file_of(tmp_path))
    found.eval()
    return found


@pytest.mark.smoke
def test_logits_stages_and_gradients_are_transformers(model):
    images = paddle.to_tensor(values("images", (2, 3, *SIDES)))
    logits = model(images)
    expected = GOLDEN["classes/logits"]
    # The images have an effect.
    assert np.abs(np.diff(expected, axis=0)).max() > 1e-2 * np.ptp(expected)
    np.testing.assert_allclose(logits.numpy(), expected, atol=1e-5 * np.ptp(expected), rtol=0)
    stages = model.forward_intermediates(images, intermediates_only=True)
    assert [info["reduction"] for info in model.feature_info] == [4, 8, 16, 32]
    for i, stage in enumerate(stages):
        expected = GOLDEN[f"stage/{i}"]
        np.testing.assert_allclose(stage.numpy(), expected, atol=1e-5 * np.ptp(expected), rtol=0)
    (logits * paddle.to_tensor(values("loss", tuple(logits.shape)))).sum().backward()
    assert_gradients(model)


def assert_gradients(model):
    prefix = "classes/grad/"
    stored = {name.removeprefix(prefix): GOLDEN[name] for name in GOLDEN if name.startswith(prefix)}
    # Gradients are renamed and joined as the weights are.
    expected = timm_names(architecture.names, stored, "torch", ())
    found = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    assert found.keys() == expected.keys()
    for name in linear_weights(model):
        found[name] = found[name].T
    # A gradient whose terms cancel out is only rounding.
    least = 2e-2 * max(np.ptp(value) for value in expected.values())
    for name, value in expected.items():
        tolerance = 1e-5 * max(np.ptp(value), least)
        np.testing.assert_allclose(found[name], value, atol=tolerance, rtol=0, err_msg=name)


def test_names_alone_tell_the_epsilon_of_transformers(tmp_path):
    sizes = ["MODEL.EMBED_DIMS", "[4, 8, 12, 16]", "MODEL.NUM_HEADS", "[1, 2, 3, 4]"]
    sizes += ["MODEL.NUM_CLASSES", "5"]
    config = with_switches(get_config("mit_b0", sizes), file_of(tmp_path))
    assert config.MODEL.NORM_EPS == 1e-5
    assert any(
        note.startswith("MODEL.NORM_EPS 1e-05, according to the names in") for note in config.notes
    )


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("mit_b0", 3_319_392),
        ("mit_b1", 13_151_424),
        ("mit_b2", 24_196_288),
        ("mit_b3", 44_072_128),
        ("mit_b4", 60_842_688),
        ("mit_b5", 81_443_008),
    ],
)
def test_the_sizes_are_transformers(name, parameters):
    """The counts are those of transformers' SegformerModel."""
    with paddle.LazyGuard():
        model = build_model(get_config(name, ["MODEL.NUM_CLASSES", "0"]))
    assert sum(parameter.size for parameter in model.parameters()) == parameters
