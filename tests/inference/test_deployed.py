"""What is exported and what a Predictor runs is the model as it is deployed: its batch norms are
folded.
"""

import numpy as np
import paddle
import pytest
from golden.trained import array_of
from paddle import nn
from support.parity import load_formula

from config import get_config
from inference import Predictor
from inference.exporting import write_export
from models import build_model
from weights import save_weights

SMALL = """
BASE: ''
DATA: {IMAGE_SIZE: 32}
MODEL: {TYPE: LeViT, STAGE_DEPTHS: [1, 1], EMBED_DIMS: [16, 24], NUM_HEADS: [2, 3], KEY_DIM: 8, NUM_CLASSES: 5}
"""


@pytest.fixture
def trained(tmp_path):
    """A LeViT with statistics: (its YAML file, its weights, the model)."""
    (tmp_path / "small.yaml").write_text(SMALL)
    model = load_formula(
        build_model(get_config(tmp_path / "small.yaml", [])), tmp_path, array_of("levit")
    )
    save_weights(model, tmp_path / "model.safetensors")
    return str(tmp_path / "small.yaml"), tmp_path / "model.safetensors", model


def images(config):
    return np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)


def test_a_predictor_runs_the_folded_model(trained):
    cfg, weights, model = trained
    predictor = Predictor(weights, cfg)
    assert not [layer for layer in predictor.model.sublayers() if isinstance(layer, nn.BatchNorm2D)]
    pixels = images(predictor.config)
    expected = model(predictor._normalize(paddle.to_tensor(pixels))).numpy()
    assert np.abs(np.diff(expected, axis=0)).max() > 1e-3 * np.ptp(expected)  # the images matter
    np.testing.assert_allclose(
        predictor.logits(pixels), expected, atol=1e-5 * np.ptp(expected), rtol=0
    )


def test_an_export_is_of_the_folded_model(trained, tmp_path):
    onnx = pytest.importorskip("onnx", reason="the extra export isn't installed")
    cfg, _, model = trained
    found = write_export(get_config(cfg, []), model, tmp_path / "export", [], "onnx")
    assert found.difference < 1e-5  # from the model that isn't folded
    nodes = [node.op_type for node in onnx.load(tmp_path / "export" / "model.onnx").graph.node]
    assert "BatchNormalization" not in nodes
