"""MobileViT against timm's outputs and numbers."""

import numpy as np
import paddle
import pytest
from golden.mobilevit import CASES, SIZES, array
from parity import assert_parity

from config import get_config
from errors import InputError
from models import build_model
from models.mobilevit import MobileViT, expanded


def small(name="mobilevit", **changes):
    """The MobileViT of golden/mobilevit.py's case NAME, with changes."""
    return MobileViT(**{"image_size": SIZES[name]} | CASES[name] | changes)


ZOO = {"mobilevit": small}


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_logits_features_and_gradients_are_timms(tmp_path, name):
    assert_parity(small(name), name, tmp_path, array)
