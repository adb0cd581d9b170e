"""Weights of plain ViTs become those of a NaFlexViT, which gives the same logits."""

import numpy as np
import paddle
import pytest
from golden.convolutions import array
from support.parity import load_formula
from support.small_models import small_naflexvit, small_vit

from errors import InputError
from models.naflexvit import NaFlexVit
from weights import load_weights, save_weights
from weights.names import differences, naflexvit
from weights.names.guess import guess_type

# A plain ViT's case of golden/vit.py, its changes, and what the NaFlexViT of its weights has.
CASES = {
    "gap": (
        {"class_token": False, "global_pool": "avg", "reg_tokens": 2, "no_embed_class": True},
        {"global_pool": "avg", "reg_tokens": 2},
    ),
    "token": ({}, {"global_pool": "token", "class_token": True}),
    "map": ({"class_token": False, "global_pool": "map"}, {"global_pool": "map"}),
    "registers": (
        {"reg_tokens": 3},
        {"global_pool": "token", "class_token": True, "reg_tokens": 3},
    ),
}
SIZES = {
    "image_size": 16,
    "patch_size": 4,
    "embed_dim": 24,
    "depth": 3,
    "num_heads": 3,
    "num_classes": 7,
    "pos_grid": 4,
}


@pytest.mark.smoke
@pytest.mark.parametrize("case", CASES)
def test_a_plain_vits_weights_give_its_logits(tmp_path, case):
    changes, ours = CASES[case]
    plain = load_formula(small_vit(**changes), tmp_path, array)
    save_weights(plain, tmp_path / "plain.safetensors")
    model = NaFlexVit(**SIZES, **ours)
    load_weights(model, tmp_path / "plain.safetensors")
    model.eval()
    images = paddle.to_tensor(array("images", (2, 3, 16, 16)))
    expected = plain(images).numpy()
    found = model(images).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.ptp(expected), rtol=0)


def test_a_patch_is_read_pixel_by_pixel(tmp_path):
    # [out, in, h, w] of a convolution becomes [(h, w, in), out].
    kernel = np.arange(2 * 3 * 2 * 2, dtype=np.float32).reshape(2, 3, 2, 2)
    wanted = {"embeds.proj.weight"}
    for layout in ("torch", "paddle"):
        arrays = {"patch_embed.proj.weight": kernel}
        found = naflexvit.timm_names(arrays, layout, wanted)["embeds.proj.weight"]
        expected = kernel.transpose(0, 2, 3, 1).reshape(2, 12)
        assert (found == (expected.T if layout == "paddle" else expected)).all()
    # A Linear reads pixel by pixel already.
    linear = np.arange(24, dtype=np.float32).reshape(2, 12)
    found = naflexvit.timm_names({"patch_embed.proj.weight": linear}, "torch", wanted)
    assert (found["embeds.proj.weight"] == linear).all()


def test_positions_of_another_grid_are_resized(tmp_path):
    plain = small_vit(class_token=False, global_pool="avg")
    save_weights(plain, tmp_path / "plain.safetensors")
    model = NaFlexVit(**SIZES | {"pos_grid": 6}, global_pool="avg")
    report = load_weights(model, tmp_path / "plain.safetensors")
    assert "pos_embed resized from 4 x 4 to 6 x 6" in str(report)
    assert model.embeds.pos_embed.shape == [1, 6, 6, 24]


@pytest.mark.parametrize("channels", [1, 5])
def test_weights_of_three_channels_become_those_of_others(tmp_path, channels):
    plain = load_formula(small_vit(class_token=False, global_pool="avg"), tmp_path, array)
    save_weights(plain, tmp_path / "plain.safetensors")
    expected = small_vit(class_token=False, global_pool="avg", in_channels=channels)
    load_weights(expected, tmp_path / "plain.safetensors")
    model = NaFlexVit(**SIZES, global_pool="avg", in_channels=channels)
    report = load_weights(model, tmp_path / "plain.safetensors")
    assert f"adapted from 3 channels to {channels}" in str(report)
    images = paddle.to_tensor(array("images", (2, channels, 16, 16)))
    model.eval()
    expected.eval()
    found = model(images).numpy()
    wanted = expected(images).numpy()
    np.testing.assert_allclose(found, wanted, atol=1e-5 * np.ptp(wanted), rtol=0)


def test_keys_tell_a_files_model():
    model = small_naflexvit("naflexvit_radio_v4")
    state = model.state_dict()
    other = small_naflexvit("naflexvit_parfac", qkv_bias=False).state_dict()
    assert differences(naflexvit, other, state) == {
        "CLASS_TOKEN": False,
        "REG_TOKENS": 4,
        "POS_EMBED": "factorized",
        "INIT_VALUES": 1e-5,
        "FINAL_NORM": True,
        "QKV_BIAS": False,
        "GLOBAL_POOL": "avg",
        "FC_NORM": True,
    }
    assert differences(naflexvit, state, state) == {}
    assert naflexvit.model_keys({}) == {}
    assert guess_type(state) == "naflexvit"


def test_weights_of_another_kind_are_refused_with_the_key(tmp_path):
    save_weights(small_naflexvit("naflexvit_map"), tmp_path / "map.safetensors")
    with pytest.raises(InputError, match="MODEL.GLOBAL_POOL") as caught:
        load_weights(small_naflexvit("naflexvit"), tmp_path / "map.safetensors")
    assert "\n" not in str(caught.value)
