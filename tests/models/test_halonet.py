"""HaloNet against timm's outputs and numbers."""

import pytest
from golden.halonet import CASES, SIZES, array
from parity import assert_parity

from models.halonet import HaloNet


def small(name="halonet", **changes):
    """The HaloNet of golden/halonet.py's case NAME, with changes."""
    keys = ("stage_depths", "embed_dims", "attention_every", "num_heads")
    options = {key: value for key, value in CASES[name].items() if key != "stages"}
    options |= dict(zip(keys, map(list, zip(*CASES[name]["stages"], strict=True)), strict=True))
    return HaloNet(**{"image_size": SIZES[name], "num_classes": 5} | options | changes)


ZOO = {"halonet": small}


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_logits_features_and_gradients_are_timms(tmp_path, name):
    assert_parity(small(name), name, tmp_path, array)
