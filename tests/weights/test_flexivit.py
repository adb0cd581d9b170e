"""Weights of one patch size, in a model of another one (FlexiViT, arXiv:2212.08013)."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden import make_flexivit_training as training
from golden.formula import array, places
from golden.make_flexivit import PATCH_SIZES, SMALL
from support.parity import load_formula

import ops
from config import get_config
from inference import Predictor
from models import build_model
from models.pretrained import patch_size_warning
from models.vit import VisionTransformer
from training.setup import load_pretrained
from weights import load_weights
from weights.fit import resampled_patches

OPTIONS = {("image_size" if key == "img_size" else key): value for key, value in SMALL.items()}


@pytest.mark.smoke
@pytest.mark.parametrize("size", PATCH_SIZES)
def test_logits_at_each_patch_size_are_timms(tmp_path, size):
    load_formula(VisionTransformer(patch_size=16, **OPTIONS), tmp_path)
    model = VisionTransformer(patch_size=size, **OPTIONS)
    report = str(load_weights(model, tmp_path / "timm.safetensors"))
    model.eval()
    logits = model(paddle.to_tensor(array("images", (2, 3, 48, 48)))).numpy()
    with np.load(ROOT / "tests" / "golden" / "flexivit.npz") as file:
        golden = dict(file)
    expected = golden[str(size)]
    np.testing.assert_allclose(logits, expected, atol=1e-5 * np.ptp(expected), rtol=0)
    if size == 16:
        assert "resampled" not in report
    else:
        # The patch size matters, and the change is told.
        assert np.abs(expected - golden["16"]).max() > 0.005 * np.ptp(expected)
        assert f"resampled from 16 x 16 to {size} x {size} pixels" in report


def test_sizes_of_resampled_patches():
    assert resampled_patches([]) is None
    assert resampled_patches(["pos_embed resized from 7 x 7 to 3 x 3"]) is None
    lines = ["pos_embed resized from 7 x 7 to 3 x 3", "proj resampled from 8 x 16 to 4 x 2 pixels"]
    assert resampled_patches(lines) == ("8 x 16", "4 x 2")


@pytest.mark.parametrize(
    ("size", "name", "stored", "warns"),
    [
        (2, "vit_digits", {}, False),
        (4, "vit_digits", {}, True),
        (4, "vit_digits", {"architecture": "vit_tiny_patch16_224"}, True),
        (4, "vit_digits", {"architecture": "flexivit_small"}, False),
        (4, "flexivit_small", {}, False),
    ],
)
def test_a_patch_size_that_weights_have_not_seen_is_warned_of(size, name, stored, warns):
    options = ["MODEL.PATCH_SIZE", str(size)]
    model = build_model(get_config("vit_digits", options))
    report = replace(load_weights(model, "digits"), config=stored)
    config = get_config("vit_digits", [*options, "MODEL.NAME", name])
    expected = (
        "the model has patches of 4 x 4 pixels, its weights were trained with 2 x 2: without"
        " fine-tuning, accuracy drops a lot; keep MODEL.PATCH_SIZE, or"
        " fine-tune with the new one"
    )
    assert patch_size_warning(config, report) == (expected if warns else "")


@pytest.mark.smoke
def test_evaluations_and_predictors_warn_and_trainings_do_not():
    options = ["MODEL.PATCH_SIZE", "4"]
    warning = "the model has patches of 4 x 4 pixels, its weights were trained with 2 x 2: "
    for strict in (True, False):
        config = get_config("vit_digits", [*options, "MODEL.PRETRAINED", "digits"])
        lines = []
        run = SimpleNamespace(info=lines.append, classes=[])
        load_pretrained(config, build_model(config), run, strict)
        assert "resampled from 2 x 2 to 4 x 4 pixels" in lines[0]
        assert sum(line.startswith(f"warning: {warning}") for line in lines) == strict
    assert Predictor("digits", "vit_digits", options).warning.startswith(warning)
    assert Predictor("digits", "vit_digits").warning == ""


@pytest.mark.smoke
@pytest.mark.parametrize("operators", [True, False])
@pytest.mark.parametrize("size", training.PATCH_SIZES)
def test_gradients_at_each_patch_size_are_timms(tmp_path, size, operators):
    model = VisionTransformer(patch_size=16, patch_sizes=training.PATCH_SIZES, **OPTIONS)
    load_formula(model, tmp_path)
    model.train()
    model.patch_embed.step_size = size
    ops.enable(operators)
    try:
        images = paddle.to_tensor(array("images", (2, 3, 48, 48)))
        logits = model(images)
        tokens = model._embed(images)
        factors = paddle.to_tensor(array("loss", tuple(tokens.shape)))
        (tokens * factors).sum().backward()
    finally:
        ops.enable(True)
    with np.load(ROOT / "tests" / "golden" / "flexivit_training.npz") as file:
        golden = dict(file)
    expected = golden[f"{size}/logits"]
    np.testing.assert_allclose(logits.numpy(), expected, atol=1e-5 * np.ptp(expected), rtol=0)
    parameters = dict(model.named_parameters())
    for name in training.NAMES:
        expected = golden[f"{size}/{name}"]
        found = places(parameters[name].grad.numpy(), training.PLACES)
        scale = np.abs(expected).max()
        assert scale > 1e-4
        np.testing.assert_allclose(found, expected, atol=1e-5 * scale, rtol=0, err_msg=name)
    # An evaluation has the patches of the weights again, or those of a model that loads them.
    model.eval()
    with paddle.no_grad():
        found = model(images).numpy()
    expected = golden["16/logits"]
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.ptp(expected), rtol=0)
    assert model.grid(9) == (3, 3)
