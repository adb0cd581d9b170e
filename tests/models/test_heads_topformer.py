"""TopFormer with its head, against PaddleViT's logits."""

import json

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.make_names_vit import values
from golden.make_paddlevit_heads import array
from support.small_models import small_topformer

from errors import InputError
from models.heads.base import Maps
from models.heads.network import SegmentationModel
from models.heads.topformer import TopFormerHead
from weights import load_weights
from weights.formats import write_weights

GOLDEN_FOLDER = ROOT / "tests" / "golden"
GOLDEN = json.loads((GOLDEN_FOLDER / "paddlevit_topformer.json").read_text())
LOGITS = np.load(GOLDEN_FOLDER / "paddlevit_topformer.npz")["logits"]
CHANNELS = [8, 16, 24, 32, 80]


def small(**head):
    """A small model with the sizes of the golden file."""
    encoder = small_topformer(image_size=GOLDEN["size"], num_classes=0)
    maps = Maps(CHANNELS, [4, 8, 16, 32, 64], encoder.image_size)
    options = {"injected_channels": 24, "depthwise_fusion": True}
    return SegmentationModel(encoder, TopFormerHead(maps, 5, **options | head), range(5), 5, None)


def logits(model, folder):
    """The model's logits of the golden images with PaddleViT's weights, [2, 5, H, W]."""
    path = folder / "model.pdparams"
    shapes = GOLDEN["shapes"]
    write_weights(path, {name: array(name, shape) for name, shape in shapes.items()})
    load_weights(model, path)
    model.eval()
    return model(paddle.to_tensor(values("images", (2, 3, *GOLDEN["size"])))).numpy()


@pytest.mark.smoke
def test_logits_are_paddlevits(tmp_path):
    # The images have an effect.
    assert np.abs(np.diff(LOGITS, axis=0)).max() > 0.1 * np.ptp(LOGITS)
    found = logits(small(gated_twice=True), tmp_path)
    np.testing.assert_allclose(found, LOGITS, atol=1e-5 * np.ptp(LOGITS), rtol=0)


def test_the_papers_gate_is_applied_once(tmp_path):
    """PaddleViT's is in 1/2..2/3 after the second hard sigmoid; the paper's is in 0..1."""
    found = logits(small(), tmp_path)
    assert np.abs(found - LOGITS).max() > 0.05 * np.ptp(LOGITS)
    model = small()
    model.eval()
    gates = []
    inject = model.decode_head.injections[0]
    inject.global_act.register_forward_post_hook(
        lambda layer, inputs, outputs: gates.append(outputs.numpy())
    )
    local = paddle.ones([1, 16, 4, 4])
    semantics = paddle.to_tensor(values("semantics", (1, 16, 4, 4)))
    answer = inject(local, semantics).numpy()
    gate = np.clip(gates[0] / 6 + 0.5, 0, 1)
    expected = (
        inject.local_embedding(local).numpy() * gate + inject.global_embedding(semantics).numpy()
    )
    np.testing.assert_allclose(answer, expected, atol=1e-6)


def test_other_encoders_are_refused():
    with pytest.raises(InputError, match="expected the last one to have as many as all others"):
        TopFormerHead(Maps([8, 16, 24, 32], [4, 8, 16, 32], (64, 64)), 5)


def test_all_parameters_learn():
    model = small()
    model.train()
    images = paddle.to_tensor(values("images", (2, 3, 128, 128)))
    [outputs] = model(images)
    assert outputs.shape == [2, 5, 16, 16]
    (outputs * paddle.to_tensor(values("loss", (2, 5, 16, 16)))).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert np.abs(parameter.grad.numpy()).max() > 0, name
