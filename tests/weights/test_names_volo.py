"""Names that other toolkits give VOLO's tensors: with their weights our logits are theirs.

golden/names_volo.json: the modules of sail-sg/volo (models/volo.py, cf35775) with torch 2.13.0, and
of PaddleViT (VOLO/volo.py, 182b5b2) with paddle 3.3.1, in the size of golden/volo.py's first case,
with weights and images by its ``array``; kept are names, shapes and logits.
"""

import json

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.volo import array
from support.small_models import small_volo

from weights import load_weights
from weights.formats import write_weights

GOLDEN = json.loads((ROOT / "tests" / "golden" / "names_volo.json").read_text())


@pytest.mark.smoke
@pytest.mark.parametrize("case", GOLDEN)
def test_weights_of_other_toolkits_give_their_logits(tmp_path, case):
    golden = GOLDEN[case]
    model = small_volo(image_size=32)
    expected = np.array(golden["logits"])
    assert np.abs(np.diff(expected, axis=0)).max() > 5e-3 * np.ptp(expected)  # the images matter
    file = tmp_path / ("model.pdparams" if golden["layout"] == "paddle" else "model.safetensors")
    shapes = {name: shape for name, shape in golden["shapes"].items() if "num_batches" not in name}
    arrays = {
        name: array(name.replace("_variance", "running_var"), tuple(shape))
        for name, shape in shapes.items()
    }
    write_weights(file, arrays)
    report = load_weights(model, file)
    assert len(report.loaded) == len(model.state_dict()) == len(shapes)
    model.eval()
    found = model(paddle.to_tensor(array("images", (2, 3, 32, 32)))).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.ptp(expected), rtol=0)
