"""Names that other toolkits give XCiT's tensors: with their weights our logits are theirs.

golden/names_xcit.json: made by PaddleViT's XCiT/xcit.py, whose logits are those of its tree of
2021-12, and by facebookresearch/xcit's xcit.py, at the commits that the cases name, with weights
and images by golden/xcit.py's ``array``; kept are names, shapes and logits.
"""

import json

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.xcit import array
from support.small_models import small_xcit

from errors import InputError
from models.xcit import XCiT
from weights import file_arrays, load_weights
from weights.formats import write_weights
from weights.names import timm_names, xcit

GOLDEN = json.loads((ROOT / "tests" / "golden" / "names_xcit.json").read_text())


@pytest.mark.smoke
@pytest.mark.parametrize("case", GOLDEN)
def test_weights_of_other_toolkits_give_their_logits(tmp_path, case):
    golden = GOLDEN[case]
    file = tmp_path / ("theirs.pdparams" if golden["layout"] == "paddle" else "theirs.safetensors")
    write_weights(
        file, {name: array(name, tuple(shape)) for name, shape in golden["shapes"].items()}
    )
    model = XCiT(**golden["model"])
    assert not load_weights(model, file).fresh
    model.eval()
    found = model(paddle.to_tensor(array("images", (2, 3, *model.image_size)))).numpy()
    expected = np.array(golden["logits"])
    assert np.abs(np.diff(expected, axis=0)).max() > 1e-2 * np.ptp(expected)  # the images matter
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.ptp(expected), rtol=0)


def test_timms_names_pass_untouched():
    arrays = file_arrays(small_xcit())
    named = timm_names(xcit, arrays, "torch", arrays.keys())
    assert named.keys() == arrays.keys()
    assert all(named[key] is value for key, value in arrays.items())


@pytest.mark.parametrize("shape", [(), (47,), (3, 16)])
def test_what_cant_be_queries_keys_and_values_is_a_line(tmp_path, shape):
    arrays = {"cls_attn_blocks.0.attn.qkv.weight": np.ones(shape, np.float32)}
    write_weights(tmp_path / "a.safetensors", arrays)
    with pytest.raises(InputError, match=r"a\.safetensors.*cls_attn_blocks\.0\.attn"):
        load_weights(small_xcit(), tmp_path / "a.safetensors")
