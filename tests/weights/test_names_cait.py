"""Names that other toolkits give CaiT's tensors: with their weights our logits are theirs.

golden/names_cait.json: made by PaddleViT's CaiT/cait.py and by facebookresearch/deit's
cait_models.py, at the commits that the cases name, with weights and images by ``values``; kept are
names, shapes and logits.
"""

import json

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.make_names_vit import values
from support.small_models import small_cait

from models.cait import Cait
from weights import file_arrays, load_weights
from weights.formats import write_weights
from weights.names import cait, timm_names

GOLDEN = json.loads((ROOT / "tests" / "golden" / "names_cait.json").read_text())


@pytest.mark.smoke
@pytest.mark.parametrize("case", GOLDEN)
def test_weights_of_other_toolkits_give_their_logits(tmp_path, case):
    golden = GOLDEN[case]
    file = tmp_path / ("theirs.pdparams" if golden["layout"] == "paddle" else "theirs.safetensors")
    write_weights(
        file, {name: values(name, tuple(shape)) for name, shape in golden["shapes"].items()}
    )
    model = Cait(**golden["model"])
    report = load_weights(model, file)
    assert not report.fresh
    model.eval()
    found = model(paddle.to_tensor(values("images", (2, 3, *golden["size"])))).numpy()
    expected = np.array(golden["logits"])
    assert np.abs(np.diff(expected, axis=0)).max() > 1e-2 * np.ptp(expected)  # the images matter
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.ptp(expected), rtol=0)


def test_timms_names_pass_untouched():
    arrays = file_arrays(small_cait())
    named = timm_names(cait, arrays, "torch", arrays.keys())
    assert named.keys() == arrays.keys()
    assert all(named[key] is value for key, value in arrays.items())


def test_positions_are_resized_to_another_image(tmp_path):
    write_weights(tmp_path / "small.safetensors", file_arrays(small_cait()))
    report = load_weights(small_cait(image_size=24), tmp_path / "small.safetensors")
    assert report.resized == ["pos_embed resized from 4 x 4 to 6 x 6"]
