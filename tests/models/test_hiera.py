"""Hiera against timm's outputs, of whole images and of such whose mask units were left out."""

import math

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.hiera import CASES, MASK, TRAINED, array
from support.parity import assert_parity, load_formula
from support.small_models import small_hiera

from config import get_config
from errors import InputError
from models import build_model
from models.hiera import Hiera
from models.layers.units import from_units, pool_units, to_units, unit_maps


def images_of(model):
    return paddle.to_tensor(array("images", (2, 3, *model.image_size)))


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_logits_features_and_gradients_are_timms(tmp_path, name):
    assert_parity(small_hiera(name), name, tmp_path, array)


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_what_masked_images_give_is_timms(tmp_path, name):
    golden = np.load(ROOT / "tests" / "golden" / f"{name}.npz")
    model = load_formula(small_hiera(name), tmp_path, array)
    found, stages = model.forward_features(
        images_of(model), paddle.to_tensor(MASK), return_intermediates=True
    )
    assert (
        np.abs(golden["masked"] - golden["features"][:, : golden["masked"].shape[1]]).max() > 1e-2
    )
    numbers = paddle.to_tensor(np.nonzero(MASK)[1].reshape(2, -1))
    np.testing.assert_array_equal(
        model.forward_features(images_of(model), numbers).numpy(), found.numpy()
    )
    for one, key in ((found, "masked"), *zip(stages, (f"stage{i}" for i in range(4)), strict=True)):
        np.testing.assert_allclose(
            one.numpy(), golden[key], atol=1e-5 * np.ptp(golden[key]), rtol=0, err_msg=key
        )
    (found * paddle.to_tensor(array("loss", tuple(found.shape)))).sum().backward()
    parameters = dict(model.named_parameters())
    for key in TRAINED:
        expected = golden[f"masked/{key}"]
        np.testing.assert_allclose(
            parameters[key].grad.numpy(), expected, atol=1e-5 * np.ptp(expected), rtol=0
        )


def test_a_mask_that_keeps_all_changes_nothing(tmp_path):
    model = load_formula(small_hiera(), tmp_path, array)
    images = images_of(model)
    every = paddle.ones([2, 6], "bool")
    whole, maps = model.forward_features(images, return_intermediates=True)
    masked, units = model.forward_features(images, every, return_intermediates=True)
    np.testing.assert_allclose(masked.numpy(), whole.numpy(), atol=1e-6)
    assert [one.shape for one in maps] == [
        [2, 16, 24, 4],
        [2, 8, 12, 8],
        [2, 4, 6, 16],
        [2, 2, 3, 32],
    ]
    np.testing.assert_allclose(units[0][:, 4].numpy(), maps[0][:, 8:, 8:16].numpy(), atol=1e-5)


def test_what_is_left_out_is_not_seen(tmp_path):
    model = load_formula(small_hiera(), tmp_path, array)
    images = images_of(model)
    mask = paddle.to_tensor(MASK)
    seen = paddle.to_tensor(MASK.reshape(2, 1, 2, 3).repeat(32, 2).repeat(32, 3))
    other = paddle.where(seen, images, paddle.full_like(images, 7.0))
    np.testing.assert_array_equal(
        model.forward_features(other, mask).numpy(), model.forward_features(images, mask).numpy()
    )


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (np.ones((2, 5), bool), r"the mask is \[2, 5\], expected \[2, 6\]: images x mask units"),
        (
            np.arange(12).reshape(2, 6) < 7,
            r"the mask keeps \[1, 6\] units, expected one number of 1 to 6",
        ),
        (np.zeros((2, 6), bool), r"the mask keeps \[0\] units, expected one number of 1 to 6"),
    ],
)
def test_masks_that_do_not_fit_are_named(mask, message):
    model = small_hiera()
    with pytest.raises(InputError, match=message):
        model.forward_features(images_of(model), paddle.to_tensor(mask))


def test_training_leaves_out_a_share_of_the_units():
    model = small_hiera(patch_drop=0.4)
    whole = small_hiera()
    whole.set_state_dict(model.state_dict())
    images = images_of(model)
    paddle.seed(3)
    features = model.forward_features(images)
    assert features.shape == [2, 3, 32]  # int(6 x 0.6) units
    paddle.seed(3)
    kept = np.sort(paddle.rand([2, 6]).argsort(axis=1)[:, :3].numpy())
    mask = np.zeros((2, 6), bool)
    np.put_along_axis(mask, kept, True, axis=1)
    expected = whole.forward_features(images, paddle.to_tensor(mask))
    np.testing.assert_allclose(
        np.sort(features.numpy(), 1), np.sort(expected.numpy(), 1), atol=1e-5
    )
    with pytest.raises(
        InputError, match="12 tokens don't form a map: PATCH_DROP drops some in training"
    ):
        model.forward_intermediates(images, [2])
    with pytest.raises(InputError, match="a mask was passed, but PATCH_DROP drops units as well"):
        model.forward_features(images, paddle.to_tensor(mask))
    model.eval()
    whole.eval()
    np.testing.assert_array_equal(model(images).numpy(), whole(images).numpy())


@pytest.mark.parametrize("side", [1, 2, 4, 8])
def test_units_are_pooled_as_maps_are(side):
    maps = paddle.rand([2, 16, 24, 3])
    units = to_units(maps, side)
    first = unit_maps(units, side)[:, 0].numpy()
    np.testing.assert_array_equal(first, maps[:, :side, :side].numpy())
    np.testing.assert_array_equal(
        from_units(units, side, (16 // side, 24 // side)).numpy(), maps.numpy()
    )
    if side > 1:
        found = from_units(pool_units(units, side * side), side // 2, (16 // side, 24 // side))
        np.testing.assert_array_equal(
            found.numpy(), maps.numpy().reshape(2, 8, 2, 12, 2, 3).max((2, 4))
        )


@pytest.mark.smoke
def test_equal_values_share_the_gradient():
    x = paddle.ones([1, 4, 2])
    x.stop_gradient = False
    pool_units(x, 4).sum().backward()
    np.testing.assert_array_equal(x.grad.numpy().sum(axis=1), [[1, 1]])


@pytest.mark.parametrize("kind", ["timm", "jax"])
def test_initialisation_is_timms(kind):
    paddle.seed(0)
    model = Hiera(
        64,
        embed_dim=32,
        stage_depths=(1, 1, 1, 1),
        num_classes=300,
        weight_init=kind,
        global_pos_size=(14, 14),
    )
    last = model.blocks[3]
    shares = [math.sqrt(2), 2, math.sqrt(6), math.sqrt(8)]
    glorot = lambda layer: math.sqrt(2 / sum(layer.weight.shape))  # noqa: E731
    plain = (lambda _: 0.02) if kind == "timm" else glorot
    for layer in (last.attn.qkv, last.mlp.fc1, last.proj):
        assert float(layer.weight.std()) == pytest.approx(plain(layer), rel=0.03)
        bias = layer.bias.numpy()
        if kind == "timm":
            np.testing.assert_array_equal(bias, np.float32(0.02))
        else:
            assert np.abs(bias).max() == 0 or (
                layer is last.mlp.fc1 and 0.7e-6 < bias.std() < 1.3e-6
            )
    for block, share in zip(model.blocks, shares, strict=True):
        for layer in (block.attn.proj, block.mlp.fc2):
            assert float(layer.weight.std()) == pytest.approx(plain(layer) / share, rel=0.1)
    fc = model.head.fc
    assert float(fc.weight.std()) == pytest.approx(0.001 * plain(fc), rel=0.03)
    stem = model.patch_embed.proj
    assert float(stem.weight.std()) == pytest.approx(
        0.02 if kind == "timm" else 147**-0.5, rel=0.05
    )
    bound = 147**-0.5 if kind == "timm" else 0.0
    assert 0.7 * bound <= np.abs(stem.bias.numpy()).max() <= bound
    for one in (model.pos_embed, model.pos_embed_win):
        assert float(one.std()) == pytest.approx(0.02, rel=0.05)


def test_drop_path_rises_over_all_blocks():
    model = small_hiera(droppath=0.4, dropout=0.1)
    rates = [[block.drop_path1.drop_prob, block.drop_path2.drop_prob] for block in model.blocks]
    np.testing.assert_allclose(rates, np.linspace([0, 0], [0.4, 0.4], 5))
    assert model.head.drop.p == 0.1


def test_layer_groups_are_the_authors():
    model = small_hiera("hiera_windows")
    blocks = [(f"blocks.{i}",) for i in range(4)]
    stem = ("pos_embed", "pos_embed_win", "patch_embed")
    assert model.layer_groups() == [stem, *blocks, ("blocks.4", "head")]
    assert model.no_weight_decay() == {"pos_embed"}


def test_the_classifier_is_exchangeable():
    model = small_hiera()
    model.eval()
    images = images_of(model)
    features = model.forward_features(images)
    model.reset_classifier(7)
    assert (model.classifier_names(), model.head.fc.weight.shape) == (("head.fc",), [32, 7])
    model.reset_classifier(0)
    np.testing.assert_allclose(
        model(images).numpy(), model.head.norm(features.mean(axis=1)).numpy(), atol=1e-6
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["DATA.IMAGE_SIZE", "240"],
            "IMAGE_SIZE 240 is not a multiple of 32, a mask unit's side; choose one that is",
        ),
        (
            ["MODEL.MASK_UNIT_ATTN", "[True]"],
            r"MASK_UNIT_ATTN is \[True\], expected 4 numbers: one per stage",
        ),
        (["MODEL.NUM_HEADS", "5"], "EMBED_DIM 96 is not a multiple of NUM_HEADS 5"),
        (["MODEL.Q_POOL", "4"], "Q_POOL is 4, expected 0 to 3: STAGE_DEPTHS has 4 stages"),
        (
            ["MODEL.GLOBAL_POS_SIZE", "[14]"],
            r"GLOBAL_POS_SIZE is \[14\], expected two numbers: rows and columns",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_named(options, message):
    with pytest.raises(InputError, match=message):
        build_model(get_config("hiera_tiny_224", options))


def test_gradients_lie_in_one_piece():
    """Paddle's DataParallel leaves others as they are on each rank."""
    model = small_hiera("hiera_windows")
    model(images_of(model)).square().sum().backward()
    assert [
        name for name, parameter in model.named_parameters() if not parameter.grad.is_contiguous()
    ] == []
