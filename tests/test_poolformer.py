"""PoolFormer against timm's outputs, and its authors' recipe."""

import numpy as np
import paddle
import pytest
from golden.make_names_vit import values
from golden.poolformer import CASES, SIZES
from parity import assert_parity

from config import get_config
from errors import InputError
from models import build_model, create_model
from models.poolformer import PoolFormer
from optim import build_schedule
from options import leaves


def small(name="poolformer", **changes):
    """The PoolFormer of golden/poolformer.py's case NAME, with changes."""
    words = {"depths": "stage_depths", "dims": "embed_dims"}
    return PoolFormer(SIZES[name], **{words.get(key, key): value for key, value in CASES[name].items()} | changes)


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_logits_features_and_gradients_are_timms(tmp_path, monkeypatch, name):
    monkeypatch.setattr("parity.array", values)
    assert_parity(small(name), name, tmp_path)
