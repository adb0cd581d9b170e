"""CSWin Transformer: padding, widths and errors. golden/paddlevit_models.py has its values."""

import numpy as np
import paddle
import pytest
from golden.formula import array
from paddle import nn
from support.small_models import small_cswin

import ops
from config import get_config
from errors import InputError
from inference.visualization.attention import attention
from models import build_model
from models.cswin import StripeAttention, in_stripes
from models.layers.attention import attention_layers


def randomized(layer):
    for name, parameter in layer.named_parameters():
        parameter.set_value(array(name, tuple(parameter.shape)))
    layer.eval()
    return layer


@pytest.mark.smoke
@pytest.mark.parametrize("index", [0, 1])
def test_stripes_are_padded_on_both_sides_by_zeros(compiled_operators, index):
    layer = randomized(StripeAttention(8, 2, attn_drop=0.0))
    x = paddle.to_tensor(array("maps", (2, 7, 9, 24)))
    x.stop_gradient = False
    stripe = [7, 9]
    stripe[1 - index] = 5
    padding = {0: ((0, 0), (0, 0), (0, 1), (0, 0)), 1: ((0, 0), (1, 2), (0, 0), (0, 0))}[index]
    padded = paddle.to_tensor(np.pad(x.numpy(), padding))
    cut = list(padded.split(2, 2 - index))
    stripes = paddle.stack([part.flatten(1, 2) for part in cut], axis=1).flatten(0, 1)
    joined = layer(stripes, *stripe).reshape([2, 2, *stripe, 8])
    expected = paddle.concat(list(joined.unbind(1)), 2 - index)
    start = padding[1][0]
    expected = expected[:, start : start + 7, :9].numpy()
    gradients = []
    for enabled in (True, False):
        ops.enable(enabled)
        output = in_stripes(x, stripe, layer)
        np.testing.assert_allclose(output.numpy(), expected, atol=1e-6)
        gradients.append(paddle.grad([output.square().sum()], [x])[0].numpy())
    np.testing.assert_allclose(*gradients, atol=1e-5)


@pytest.mark.parametrize("pad_tokens", [False, True])
def test_padding_has_no_effect_on_maps_that_fit(pad_tokens):
    models = [small_cswin(split_sizes=(4, 2, 2, 2), pad_tokens=value) for value in (False, True)]
    models[1].set_state_dict(models[0].state_dict())
    images = paddle.to_tensor(array("images", (2, 3, 64, 64)))
    found = [randomized(model)(images).numpy() for model in models]
    np.testing.assert_array_equal(*found)
    other = paddle.to_tensor(array("images", (2, 3, 52, 70)))
    found = [model(other).numpy() for model in models]
    assert np.abs(found[0] - found[1]).max() > 1e-4 * np.ptp(found[0])


def test_tokens_of_padding_are_below_and_to_the_right():
    model = randomized(small_cswin(pad_tokens=True))
    block = model.stage1[0]
    x = paddle.to_tensor(array("maps", (1, 8, 13, 8)))
    padded = paddle.to_tensor(np.pad(x.numpy(), ((0, 0), (0, 2), (0, 2), (0, 0))))
    expected = block._attend_in_stripes(padded)[:, :8, :13]
    np.testing.assert_allclose(block._attend(x).numpy(), expected.numpy(), atol=1e-6)


def test_attention_is_drawn_stripe_by_stripe():
    model = randomized(small_cswin())
    image = paddle.to_tensor(array("images", (1, 3, 64, 96)))
    layers = list(attention_layers(model))
    assert layers[:2] == ["stage1.0.attns.0", "stage1.0.attns.1"]
    # The second stage's maps are 8 x 12, its stripes 2 wide, and nothing is padded.
    vertical, horizontal = (attention(model, image, block) for block in (2, 3))
    assert vertical.shape == horizontal.shape == (1, 8, 12)
    np.testing.assert_allclose(vertical.reshape(8, 6, 2).sum((0, 2)), np.ones(6), atol=1e-5)
    np.testing.assert_allclose(horizontal.reshape(4, 2, 12).sum((1, 2)), np.ones(4), atol=1e-5)
    # The first stage's are 16 x 24, in stripes of 5: the last ones reach into the padding.
    vertical = attention(model, image, 0)[0]
    assert vertical.shape == (16, 24)
    assert vertical[:, :5].sum() == pytest.approx(1.0, abs=1e-5)
    assert 0 < vertical[:, 20:].sum() < 1
    last = attention(model, image, -1)
    assert last.shape == (4, 2, 3)
    np.testing.assert_allclose(last.sum((1, 2)), np.ones(4), atol=1e-5)


def test_initialisation_is_the_authors():
    paddle.seed(0)
    model = small_cswin(embed_dim=32)
    assert float(model.stage3[0].mlp.fc1.weight.std()) == pytest.approx(0.02, rel=0.05)
    assert (model.stage1[0].qkv.bias.numpy() == 0).all()
    # PyTorch's own of convolutions: uniform up to 1 / sqrt(9 * 32).
    weight = model.merge1.conv.weight.numpy()
    assert np.abs(weight).max() == pytest.approx((9 * 32) ** -0.5, rel=0.01)
    assert np.abs(model.merge1.conv.bias.numpy()).max() > 0
    norms = [layer for layer in model.sublayers() if isinstance(layer, nn.LayerNorm)]
    assert all(norm._epsilon == 1e-5 for norm in norms)


def test_layer_groups_are_in_order_and_drop_path_rises():
    model = small_cswin(droppath=0.4)
    assert model.layer_groups() == [
        ("stage1_conv_embed",),
        ("stage1.0",),
        ("stage2.0", "merge1"),
        ("stage3.0", "merge2"),
        ("stage3.1",),
        ("stage4.0", "merge3"),
        ("norm", "head"),
    ]
    blocks = [*model.stage1, *model.stage2, *model.stage3, *model.stage4]
    rates = [block.drop_path1.drop_prob for block in blocks]
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])
    assert rates == [block.drop_path2.drop_prob for block in blocks]


def test_images_of_any_size_are_taken():
    model = small_cswin(image_size=3)
    model.eval()
    for side in (3, 5, 33, 65):
        features = model.forward_features(paddle.ones([1, 3, side, side + 1]))
        assert np.isfinite(features.numpy()).all()
        assert features.shape[3] == 64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["MODEL.STAGE_DEPTHS", "[1, 2]"], r"STAGE_DEPTHS is \[1, 2\], expected four numbers"),
        (["MODEL.SPLIT_SIZES", "[7]"], r"SPLIT_SIZES is \[7\], expected 4 numbers: one per"),
        (
            ["MODEL.NUM_HEADS", "[1, 4, 8, 16]"],
            "NUM_HEADS has 1, expected an even divisor of the 64 channels",
        ),
        (
            ["MODEL.NUM_HEADS", "[2, 4, 8, 7]"],
            "NUM_HEADS has 7, expected a divisor of the 512 channels",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_named(options, message):
    with pytest.raises(InputError, match=message):
        build_model(get_config("cswin_tiny_224", options))
