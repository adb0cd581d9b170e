"""Which parameters decay, learn at which rate, and stay as they are."""

import json
import re

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.optim_problem import (
    SCALES,
)
from support.optim_model import PROBLEM, Small, with_options
from support.small_models import SMALL_MODELS

from config import get_config
from errors import InputError
from models import create_model
from models.pretraining.dino import Dino
from models.pretraining.mae import MaskedAutoencoder
from models.pretraining.network import PretrainingNetwork
from models.pretraining.simmim import SimMIM
from training.optim import build_optimizer, decayed_parameters, freeze, layer_scales


def test_weight_decay_leaves_biases_norms_and_embeddings_alone():
    model = create_model("vit_digits")
    decayed = decayed_parameters(get_config(), model)
    # patch projection, head, and four matrices in each of four blocks
    assert len(decayed) == 2 + 4 * 4
    assert not {
        "pos_embed",
        "cls_token",
        "norm.weight",
        "blocks.0.norm1.weight",
        "head.bias",
    } & set(decayed)
    optimizer = build_optimizer(
        get_config("vit_digits", ["TRAIN.WEIGHT_DECAY", "0.5", "TRAIN.BASE_LR", "0.1"]), model
    )
    before = {name: parameter.numpy().copy() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = paddle.zeros_like(parameter)
    optimizer.step()
    # with no gradient, decay is all that AdamW does
    for name, parameter in model.named_parameters():
        factor = 1 - 0.1 * 0.5 if name in decayed else 1.0
        np.testing.assert_allclose(
            parameter.numpy(), before[name] * factor, rtol=1e-6, atol=1e-9, err_msg=name
        )


@pytest.mark.parametrize("groups", ["authors", "timm"])
def test_layer_decay_is_the_authors_or_timms_for_twelve_blocks(groups):
    model = create_model(
        "vit_base_patch16_224", embed_dim=12, num_heads=3, num_classes=10, image_size=32
    )
    decay = ["TRAIN.LAYER_DECAY", "0.75", "TRAIN.LAYER_DECAY_GROUPS", groups]
    found = layer_scales(get_config(None, decay), model)
    expected = json.loads((ROOT / "tests" / "golden" / "layer_scales.json").read_text())
    if groups == "authors":
        # the last block's, in timm
        assert {expected.pop(name) for name in ("norm.weight", "norm.bias")} == {0.75}
        # the classifier's, in BEiT and MAE
        assert {found.pop(name) for name in ("norm.weight", "norm.bias")} == {1.0}
    assert found == pytest.approx(expected, rel=1e-12)
    assert set(layer_scales(get_config(None), model).values()) == {1.0}


def test_the_classifier_has_a_rate_of_its_own():
    model = Small()
    assert layer_scales(with_options(PROBLEM), model) == SCALES
    alone = layer_scales(get_config(None, ["TRAIN.HEAD_LR", "10"]), model)
    assert alone == {name: 10.0 if name.startswith("head.") else 1.0 for name in SCALES}


@pytest.mark.parametrize(
    ("groups", "count"), [([("fc",), ("head",)], 0), ([("embed", "conv"), ("embed",)], 2)]
)
def test_a_parameter_belongs_to_one_layer_group(groups, count):
    model = Small()
    model.layer_groups = lambda: groups
    with pytest.raises(
        ValueError, match=f"embed is in {count} of the model's layer groups, expected one"
    ):
        layer_scales(get_config(None, ["TRAIN.LAYER_DECAY", "0.5"]), model)


@pytest.mark.parametrize(
    ("patterns", "frozen"),
    [
        (None, []),
        ("backbone", ["embed", "conv.weight", "conv.bias", "fc.weight", "fc.bias"]),
        ("['*.bias', 'embed']", ["embed", "conv.bias", "fc.bias", "head.bias"]),
        ("[cf]*.weight", ["conv.weight", "fc.weight"]),
    ],
)
def test_freezing_takes_patterns_and_returns_names(patterns, frozen):
    model = Small()
    assert freeze(get_config(None, ["TRAIN.FREEZE", str(patterns)]), model) == frozen
    assert [name for name, p in model.named_parameters() if p.stop_gradient] == frozen


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (
            "cnv.*",
            "'cnv.*' matches no parameter, expected a pattern of names from embed to head.bias; .*mean conv\\.\\*\\?",
        ),
        (
            "['backbone', 'hed.bias']",
            "'hed.bias' matches no parameter, .*; did you mean head.bias?",
        ),
        ("backbon", "did you mean backbone?"),
        ("*", re.escape("TRAIN.FREEZE ['*'] freezes all 7 parameters; nothing would be trained")),
        ("['backbone', 'head.*']", "freezes all 7"),
    ],
)
def test_freezing_nothing_or_everything_is_an_error(patterns, message):
    with pytest.raises(InputError, match=message):
        freeze(get_config(None, ["TRAIN.FREEZE", patterns]), Small())


def test_the_layer_that_reads_the_image_has_a_rate_of_its_own():
    model = create_model("vit_digits")
    found = layer_scales(get_config(None, ["TRAIN.PATCH_EMBED_LR", "0.2"]), model)
    expected = {name: 0.2 if "patch_embed" in name else 1.0 for name in found}  # DINOv2's rule
    assert found == expected
    assert [name for name, scale in found.items() if scale == 0.2] == [
        "patch_embed.proj.weight",
        "patch_embed.proj.bias",
    ]
    decayed = layer_scales(with_options(PROBLEM | {"TRAIN.PATCH_EMBED_LR": 0.2}), Small())
    expected = {name: scale * (0.2 if "conv" in name else 1) for name, scale in SCALES.items()}
    assert decayed == pytest.approx(expected, rel=1e-12)


def test_the_layer_that_reads_the_image_is_found_in_every_architecture():
    config = get_config(None, ["TRAIN.PATCH_EMBED_LR", "0.2"])
    for name, small in SMALL_MODELS.items():
        model = small()
        found = layer_scales(config, model)
        names = [name for name, scale in found.items() if scale == 0.2]
        assert set(found.values()) == {0.2, 1.0}, name
        for convolution in (model.first_conv, *model.beside_first_conv):
            assert f"{convolution}.weight" in names, name
        # It is the one layer: at the top, except in LeNet's sequence of layers.
        depth = 2 if name == "lenet" else 1
        layers = {tuple(name.split(".")[:depth]) for name in names}
        assert len(layers) == 1, (name, layers)


def test_a_mask_token_that_the_encoder_reads_decays_as_its_first_layer():
    encoder = create_model("vit_digits", num_classes=0)
    config = get_config(None, ["TRAIN.LAYER_DECAY", "0.5"])
    for network in (SimMIM(encoder, mask_patch=2), Dino(encoder, 8, 8, 8, max_masked=4)):
        found = layer_scales(config, network)
        assert found["mask_token"] == found["encoder.cls_token"] == 0.5**5
        assert found["encoder.norm.weight"] == 1.0
    # MAE's decoder reads its own.
    assert layer_scales(config, MaskedAutoencoder(encoder, 0.75, 8, 1, 2))["mask_token"] == 1.0


def test_the_layer_of_an_encoder_is_found_under_its_name():
    network = PretrainingNetwork(create_model("vit_digits", num_classes=0))
    found = layer_scales(get_config(None, ["TRAIN.PATCH_EMBED_LR", "0.2"]), network)
    assert [name for name, scale in found.items() if scale == 0.2] == [
        "encoder.patch_embed.proj.weight",
        "encoder.patch_embed.proj.bias",
    ]
