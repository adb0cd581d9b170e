"""Names that PaddleViT gives HaloNet's tensors: with its weights our logits are its own.

golden/names_halonet.json: PaddleViT's module (HaloNet/halonet.py, 5ac7d89) with paddle 3.3.1, in a
size like that of golden/halonet.py's first case, with weights and images by its ``array``
(statistics under PyTorch's names); kept are names, shapes and logits.
"""

import json

import numpy as np
import paddle
from conftest import ROOT
from golden.halonet import array

from models.halonet import HaloNet
from weights import load_weights
from weights.formats import write_weights
from weights.layout import file_name

GOLDEN = json.loads((ROOT / "tests" / "golden" / "names_halonet.json").read_text())["PaddleViT"]


def test_paddlevits_weights_give_its_logits(tmp_path):
    expected = np.array(GOLDEN["logits"])
    assert np.abs(np.diff(expected, axis=0)).max() > 1e-2 * np.ptp(expected)  # the images matter
    arrays = {
        name: array(file_name(name), tuple(shape)) for name, shape in GOLDEN["shapes"].items()
    }
    write_weights(tmp_path / "model.pdparams", arrays)
    sizes = {
        "stage_depths": (1, 2, 2, 1),
        "embed_dims": (32, 64, 64, 64),
        "attention_every": (0, 2, 1, 1),
    }
    model = HaloNet(64, num_heads=(0, 2, 2, 2), block_size=2, halo_size=1, num_classes=5, **sizes)
    report = load_weights(model, tmp_path / "model.pdparams")
    assert len(report.loaded) == len(model.state_dict()) == len(arrays)
    assert not report.fresh
    model.eval()
    found = model(paddle.to_tensor(array("images", (2, 3, 64, 64)))).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.ptp(expected), rtol=0)
