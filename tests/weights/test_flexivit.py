"""Weights of one patch size, in a model of another one (FlexiViT, arXiv:2212.08013)."""

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.formula import array
from golden.make_flexivit import PATCH_SIZES, SMALL
from support.parity import load_formula

from models.vit import VisionTransformer
from weights import load_weights

OPTIONS = {("image_size" if key == "img_size" else key): value for key, value in SMALL.items()}


@pytest.mark.smoke
@pytest.mark.parametrize("size", PATCH_SIZES)
def test_logits_at_each_patch_size_are_timms(tmp_path, size):
    load_formula(VisionTransformer(patch_size=16, **OPTIONS), tmp_path)
    model = VisionTransformer(patch_size=size, **OPTIONS)
    report = str(load_weights(model, tmp_path / "timm.safetensors"))
    model.eval()
    logits = model(paddle.to_tensor(array("images", (2, 3, 48, 48)))).numpy()
    golden = np.load(ROOT / "tests" / "golden" / "flexivit.npz")
    expected = golden[str(size)]
    np.testing.assert_allclose(logits, expected, atol=1e-5 * np.ptp(expected), rtol=0)
    if size == 16:
        assert "resampled" not in report
    else:
        # The patch size matters, and the change is told.
        assert np.abs(expected - golden["16"]).max() > 0.005 * np.ptp(expected)
        assert f"resampled from 16 x 16 to {size} x {size} pixels" in report
