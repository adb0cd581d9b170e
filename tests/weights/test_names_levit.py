"""Names that other toolkits give LeViT's tensors: with their weights our logits are theirs.

golden/names_levit.json holds names, shapes and logits of reduced models of facebookresearch/LeViT
(3772b8e) and of PaddleViT's LeViT (5ac7d89), run with the weights and images of
golden/convolutions.py.
"""

import json

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.convolutions import array

from errors import InputError
from models.levit import LeViT
from weights import load_weights, save_weights
from weights.formats import write_weights
from weights.layout import file_name
from weights.names import levit as names
from weights.names import timm_names

CASES = json.loads((ROOT / "tests" / "golden" / "names_levit.json").read_text())
SIZES = {
    "stage_depths": (1, 2, 1),
    "embed_dims": (16, 16, 24),
    "num_heads": (2, 3, 2),
    "key_dim": 4,
    "num_classes": 5,
}


def value(name, shape):
    """The weights of the golden files; a table's rows are computed."""
    return (
        np.zeros(shape, np.int64) if name.endswith("idxs") else array(file_name(name), tuple(shape))
    )


@pytest.mark.smoke
@pytest.mark.parametrize("case", CASES)
def test_weights_of_other_toolkits_give_their_logits(tmp_path, case):
    golden = CASES[case]
    model = LeViT(64, **SIZES)
    arrays = {name: value(name, shape) for name, shape in golden["shapes"].items()}
    assert timm_names(names, arrays, golden["layout"], ()).keys() == {
        file_name(name) for name in model.state_dict()
    }
    file = tmp_path / ("model.pdparams" if golden["layout"] == "paddle" else "model.safetensors")
    write_weights(file, arrays)
    load_weights(model, file)
    model.eval()
    expected = np.array(golden["logits"])
    assert np.abs(np.diff(expected, axis=0)).max() > 1e-4 * np.ptp(expected)  # the images matter
    logits = model(paddle.to_tensor(array("images", (2, 3, 64, 64)))).numpy()
    np.testing.assert_allclose(logits, expected, atol=1e-5 * np.ptp(expected), rtol=0)


def test_timms_names_pass():
    state = {
        file_name(name): tensor.numpy() for name, tensor in LeViT(64, **SIZES).state_dict().items()
    }
    named = timm_names(names, state | {"extra": np.ones(1)}, "torch", state)
    assert named.keys() == {*state, "extra"}
    assert all(named[name] is array for name, array in state.items())


def test_a_file_of_one_classifier_tells_it(tmp_path):
    model = LeViT(64, **SIZES, distilled=False)
    save_weights(model, tmp_path / "a.safetensors")
    load_weights(LeViT(64, **SIZES, distilled=False), tmp_path / "a.safetensors")
    with pytest.raises(InputError, match="MODEL.DISTILLED"):
        load_weights(LeViT(64, **SIZES), tmp_path / "a.safetensors")
