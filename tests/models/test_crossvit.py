"""CrossViT against timm's outputs and numbers."""

import numpy as np
import paddle
import pytest
from golden.crossvit import CASES
from golden.make_names_vit import values
from parity import assert_parity

from models.crossvit import CrossViT


def small(name="crossvit", **changes):
    """The CrossViT of golden/crossvit.py's case NAME, with changes."""
    words = {"img_size": "image_size", "img_scale": "image_scales", "embed_dim": "embed_dims"}
    options = {words.get(key, key): value for key, value in CASES[name].items() if key != "depth"}
    options |= {"depth": len(CASES[name]["depth"]), "branch_depths": CASES[name]["depth"][0][:2]}
    return CrossViT(**options | changes)


ZOO = {"crossvit": small}


class Joined(CrossViT):
    """The features of both branches are one tensor, as golden/crossvit.py records them."""

    def forward(self, x):
        return self.forward_head(CrossViT.forward_features(self, x))

    def _features(self, x, last):
        found = CrossViT._features(self, x, last)
        return found

    def forward_features(self, x):
        return paddle.concat([one.flatten(1) for one in CrossViT.forward_features(self, x)], axis=1)

    def _collect(self, *given):
        features, found = CrossViT._collect(self, *given)
        return paddle.concat([one.flatten(1) for one in features], axis=1), found


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_logits_features_and_gradients_are_timms(tmp_path, name):
    model = small(name)
    model.__class__ = Joined
    assert_parity(model, name, tmp_path, values)
