"""Names that the authors give TinyViT's tensors, and tables of biases for other windows.

golden/names_tinyvit.json was made by hand: the authors' module, reduced, with the weights of
golden/tinyvit.py under their names.
"""

import json

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.tinyvit import array
from support.small_models import small_tinyvit

from models.tinyvit import TinyViT
from weights import load_weights, save_weights
from weights.formats import write_weights
from weights.resize import bicubic_matrix

CASE = json.loads((ROOT / "tests" / "golden" / "names_tinyvit.json").read_text())["microsoft/Cream"]


@pytest.mark.smoke
def test_the_authors_files_give_their_logits(tmp_path):
    write_weights(
        tmp_path / "a.safetensors",
        {name: array(name, tuple(shape)) for name, shape in CASE["shapes"].items()},
    )
    model = small_tinyvit()
    report = load_weights(model, tmp_path / "a.safetensors")
    assert report.changes == []
    model.eval()
    logits = model(paddle.to_tensor(array("images", (2, 3, 64, 64)))).numpy()
    expected = np.array(CASE["logits"])
    assert np.abs(np.diff(expected, axis=0)).max() > 1e-3 * np.ptp(expected)  # the images matter
    np.testing.assert_allclose(logits, expected, atol=1e-5 * np.ptp(expected), rtol=0)


def test_biases_fit_other_windows(tmp_path):
    model = small_tinyvit()
    biases = model.stages[1].blocks[0].attn.attention_biases
    biases.set_value(paddle.randn(biases.shape))
    save_weights(model, tmp_path / "a.safetensors")
    other = TinyViT(128, embed_dims=(4, 8, 12, 16), stage_depths=(1, 2, 1, 1), num_heads=(1, 2, 3, 4), num_classes=5,
                    window_sizes=(7, 6, 4, 3))  # fmt: skip
    report = load_weights(other, tmp_path / "a.safetensors")
    assert report.resized == [
        "2 attention_biases resized from 4 x 4 to 6 x 6",
        "1 attention_biases resized from 2 x 2 to 3 x 3",
    ]
    matrix = bicubic_matrix(4, 6)
    expected = matrix @ biases.numpy().reshape(2, 4, 4) @ matrix.T
    found = other.stages[1].blocks[0].attn.attention_biases.numpy()
    np.testing.assert_allclose(found, expected.reshape(2, 36), atol=1e-6)
