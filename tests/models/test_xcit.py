"""XCiT against timm's outputs and numbers."""

import numpy as np
import paddle
import pytest
from golden.xcit import CASES, array
from parity import assert_parity

from models.xcit import XCiT


def small(name="xcit", **changes):
    """The XCiT of golden/xcit.py's case NAME, with changes."""
    words = {"img_size": "image_size", "eta": "init_values", "cls_attn_layers": "depth_token_only"}
    defaults = {"tokens_norm": False}  # timm's
    return XCiT(**defaults | {words.get(key, key): value for key, value in CASES[name].items()} | changes)


ZOO = {"xcit": small}


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_logits_features_and_gradients_are_timms(tmp_path, name):
    assert_parity(small(name), name, tmp_path, array)
