"""Names that other toolkits give CrossViT's tensors: with their weights our logits are theirs.
Positions that fit.

golden/names_crossvit.json: the modules of IBM/CrossViT (models/crossvit.py, 3f7ab77) with torch
2.13.0 and timm 1.0.31, and of PaddleViT (CrossViT/crossvit.py, 5ac7d89) with paddle 3.3.1, in the
size of golden/crossvit.py's first case, with weights and images by ``values``; kept are names,
shapes and logits.
"""

import json

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.make_names_vit import values
from support.small_models import small_crossvit

from weights import load_weights, save_weights
from weights.formats import write_weights
from weights.resize import bicubic_matrix

GOLDEN = json.loads((ROOT / "tests" / "golden" / "names_crossvit.json").read_text())


@pytest.mark.smoke
@pytest.mark.parametrize("case", GOLDEN)
def test_weights_of_other_toolkits_give_their_logits(tmp_path, case):
    golden = GOLDEN[case]
    expected = np.array(GOLDEN[case]["logits"])
    assert np.abs(np.diff(expected, axis=0)).max() > 1e-2 * np.ptp(expected)  # the images matter
    file = tmp_path / ("model.pdparams" if golden["layout"] == "paddle" else "model.safetensors")
    write_weights(
        file, {name: values(name, tuple(shape)) for name, shape in golden["shapes"].items()}
    )
    model = small_crossvit(image_size=30)
    report = load_weights(model, file)
    assert len(report.loaded) == len(model.state_dict()) == len(golden["shapes"])
    assert not report.fresh
    if case == "PaddleViT":  # it has another epsilon there
        for block in model.blocks:
            for projection in block.revert_projs:
                projection[0]._epsilon = 1e-5
    model.eval()
    found = model(paddle.to_tensor(values("images", (2, 3, 30, 30)))).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.ptp(expected), rtol=0)


def test_positions_of_both_branches_fit_another_image(tmp_path):
    model = small_crossvit(image_size=30)
    larger = small_crossvit(image_size=(60, 30))
    save_weights(model, tmp_path / "model.safetensors")
    assert load_weights(larger, tmp_path).resized == [
        "pos_embed_0 resized from 5 x 5 to 10 x 5",
        "pos_embed_1 resized from 3 x 3 to 6 x 3",
    ]
    for i, side in enumerate((5, 3)):
        old, new = (getattr(one, f"pos_embed_{i}")[0].numpy() for one in (model, larger))
        expected = np.einsum(
            "nr,rcd->ncd", bicubic_matrix(side, 2 * side), old[1:].reshape(side, side, -1)
        )
        np.testing.assert_allclose(new[1:], expected.reshape(2 * side**2, -1), atol=1e-6)
        np.testing.assert_array_equal(new[0], old[0])
