"""PVTv2 against timm's outputs, and its authors' recipe."""

import numpy as np
import paddle
import pytest
from golden.make_names_vit import values
from golden.pvtv2 import CASES, SIZES
from parity import assert_parity

from config import get_config
from errors import InputError
from models import build_model, create_model
from models.pvtv2 import PyramidVisionTransformerV2
from optim import build_schedule
from options import leaves

PARAMETERS = {
    "pvtv2_b0": 3_666_760,
    "pvtv2_b1": 14_009_000,
    "pvtv2_b2": 25_362_856,
    "pvtv2_b2_linear": 22_553_512,
    "pvtv2_b3": 45_238_696,
    "pvtv2_b4": 62_556_072,
    "pvtv2_b5": 81_956_008,
}


def small(name="pvtv2", **changes):
    """The PVTv2 of golden/pvtv2.py's case NAME, with changes."""
    words = {"depths": "stage_depths", "sr_ratios": "sr_ratio", "mlp_ratios": "mlp_ratio"}
    options = {words.get(key, key): value for key, value in CASES[name].items()}
    return PyramidVisionTransformerV2(**{"image_size": SIZES[name]} | options | changes)


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_logits_features_and_gradients_are_timms(tmp_path, monkeypatch, name):
    monkeypatch.setattr("parity.array", values)
    assert_parity(small(name), name, tmp_path)
