"""Names that other toolkits give PiT's tensors: with their weights our logits are theirs.

golden/names_pit.json: the modules of naver-ai/pit (pit.py, 9d97a62) with torch 2.13.0 and timm
1.0.31, and of PaddleViT (PiT/pit.py, ff73a80) with paddle 3.3.1, in the size of golden/pit.py's
first case, with weights and images by ``values``; kept are names, shapes and logits.
"""

import json

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.make_names_vit import values
from support.small_models import small_pit

from errors import InputError
from weights import load_weights
from weights.formats import write_weights

GOLDEN = json.loads((ROOT / "tests" / "golden" / "names_pit.json").read_text())


def file_of(case, folder):
    """A file of the case's toolkit."""
    golden = GOLDEN[case]
    file = folder / ("model.pdparams" if golden["layout"] == "paddle" else "model.safetensors")
    write_weights(
        file, {name: values(name, tuple(shape)) for name, shape in golden["shapes"].items()}
    )
    return file


@pytest.mark.smoke
@pytest.mark.parametrize("case", GOLDEN)
def test_weights_of_other_toolkits_give_their_logits(tmp_path, case):
    expected = np.array(GOLDEN[case]["logits"])
    assert np.abs(np.diff(expected, axis=0)).max() > 1e-2 * np.ptp(expected)  # the images matter
    model = small_pit(distilled="distilled" in case)
    report = load_weights(model, file_of(case, tmp_path))
    assert len(report.loaded) == len(model.state_dict()) == len(GOLDEN[case]["shapes"])
    assert not report.fresh
    model.eval()
    found = model(paddle.to_tensor(values("images", (2, 3, 44, 44)))).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.ptp(expected), rtol=0)


def test_a_distilled_models_weights_ask_for_the_distilled_model(tmp_path):
    for case, distilled in (("naver-ai/pit, distilled", False), ("PaddleViT", True)):
        with pytest.raises(InputError, match=f"MODEL.DISTILLED {not distilled}"):
            load_weights(small_pit(distilled=distilled), file_of(case, tmp_path))
