"""Layers that several architectures share."""

from unittest import mock

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.nn import functional as F

import ops
from models import create_model
from models.layers import Attention, DropPath, LayerNorm, PatchDropout, linear
from models.layers.conv import Conv2D, MaxPool2D
from models.layers.drop import ChannelDropout
from models.layers.relative import RelativePositionBias


def test_drop_path_drops_whole_samples_and_keeps_the_mean():
    paddle.seed(0)
    layer = DropPath(0.25)
    out = layer(paddle.ones([4000, 2, 3])).numpy()
    assert set(np.unique(out).tolist()) == {0.0, np.float32(1 / 0.75)}
    assert (out == out[:, :1, :1]).all()
    assert abs(out.mean() - 1) < 0.03
    layer.eval()
    assert (layer(paddle.ones([2, 2])).numpy() == 1).all()


@pytest.mark.smoke
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_layer_norms_gradient_is_the_formulas_where_the_weights_is_not_wanted(
    compiled, frozen, monkeypatch
):
    if not compiled:
        monkeypatch.setattr(ops, "usable", lambda _: False)
    layer = LayerNorm(8, epsilon=1e-6)
    rng = np.random.default_rng(0)
    values = rng.normal(size=(3, 8))
    weight = rng.normal(size=8)
    wanted = rng.normal(size=(3, 8))
    layer.weight.set_value(weight.astype("float32"))
    layer.weight.stop_gradient = frozen
    x = paddle.to_tensor(values, "float32", stop_gradient=False)
    [found] = paddle.grad([layer(x)], [x], [paddle.to_tensor(wanted, "float32")])
    deviation = np.sqrt(values.var(axis=-1, keepdims=True) + 1e-6)
    normed = (values - values.mean(axis=-1, keepdims=True)) / deviation
    grad = wanted * weight
    along = normed * (grad * normed).mean(axis=-1, keepdims=True)
    expected = (grad - grad.mean(axis=-1, keepdims=True) - along) / deviation
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("vit_digits", None, [0.0, 0.1, 0.2, 0.3]),
        ("vit_digits", "constant", [0.3] * 4),
        ("mixer_b16_224", None, [0.3] * 4),
        ("mixer_b16_224", "linear", [0.0, 0.1, 0.2, 0.3]),
    ],
)
def test_drop_path_takes_its_shape_over_the_blocks(name, shape, expected):
    model = create_model(name, droppath=0.3, droppath_shape=shape, depth=4, embed_dim=48)
    drops = [
        [layer.drop_prob for layer in block.sublayers() if isinstance(layer, DropPath)]
        for block in model.blocks
    ]
    np.testing.assert_allclose([rates[0] for rates in drops], expected)
    assert all(len(set(rates)) == 1 for rates in drops)


@pytest.mark.parametrize("name", ["vit_digits", "mixer_b16_224"])
def test_a_fresh_classifiers_bias_starts_where_it_is_told(name):
    model = create_model(name, head_init_bias=-6.9, head_init_scale=0.0, depth=1, embed_dim=48)
    for classes in (model.num_classes, 7):
        model.reset_classifier(classes)
        np.testing.assert_array_equal(model.head.bias.numpy(), np.full(classes, -6.9, "float32"))
        assert not model.head.weight.numpy().any()


@pytest.mark.parametrize(("patches", "rate", "kept"), [(16, 0.3, 11), (196, 0.5, 98), (3, 0.9, 1)])
@pytest.mark.parametrize("prefix", [1, 2])
def test_patch_dropout_keeps_whole_tokens_and_the_prefix(patches, rate, kept, prefix):
    paddle.seed(0)
    layer = PatchDropout(rate, prefix)
    x = paddle.arange(8 * (prefix + patches) * 5, dtype="float32").reshape([8, -1, 5])
    x.stop_gradient = False
    out = layer(x)
    assert out.shape == [8, prefix + kept, 5]
    assert (out[:, :prefix].numpy() == x[:, :prefix].numpy()).all()
    chosen = (out[:, prefix:, 0] / 5).numpy().round().astype(int)
    assert (out[:, prefix:].numpy() == x.numpy().reshape(-1, 5)[chosen]).all()
    assert (chosen // (prefix + patches) == np.arange(8)[:, None]).all()  # each sample's own
    assert all(len(set(row)) == kept for row in chosen.tolist())
    # drawn per sample
    assert len({tuple(sorted(row)) for row in (chosen % (prefix + patches)).tolist()}) > 1
    out.sum().backward()
    assert x.grad.numpy().sum() == 8 * (prefix + kept) * 5
    layer.eval()
    assert layer(x) is x


def test_patch_dropout_keeps_every_patch_equally_often():
    paddle.seed(0)
    x = paddle.arange(9, dtype="float32").reshape([1, 9, 1]).expand([4000, 9, 1])
    counts = np.bincount(PatchDropout(0.5, 1)(x).numpy().astype(int).ravel())
    assert counts[0] == 4000
    assert abs(counts[1:] / 4000 - 0.5).max() < 0.04


def test_autocast_leaves_softmax_and_layer_norm_in_float32():
    for dtype in ("float16", "bfloat16"):
        assert {"softmax", "layer_norm"} <= set(paddle.amp.black_list()[dtype]["O1"])


def outputs_and_gradients(function, *arrays):
    tensors = [paddle.to_tensor(array, stop_gradient=False) for array in arrays]
    out = function(*tensors)
    (out * paddle.arange(out.size, dtype="float32").reshape(out.shape)).sum().backward()
    return [out.numpy(), *(tensor.grad.numpy() for tensor in tensors)]


def assert_same_bits(one, two):
    assert len(one) == len(two)
    assert all((a == b).all() for a, b in zip(one, two, strict=True))


@pytest.mark.smoke
def test_a_bias_that_is_added_apart_gives_the_same_bits(monkeypatch):
    monkeypatch.setattr(ops, "_enabled", False)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape, np.float32) for shape in ((2, 7, 24), (24, 40), (40,))]
    assert not linear._bias_is_fused()  # it is on GPUs alone
    assert_same_bits(
        outputs_and_gradients(linear.plain_linear, *arrays),
        outputs_and_gradients(F.linear, *arrays),
    )
    images = rng.standard_normal((2, 6, 9, 9), np.float32)
    for options in (
        {"padding": 1},
        {"stride": 2},
        {"padding": "same", "groups": 6},
        {"bias_attr": False},
    ):
        layer = Conv2D(6, 12, 3, **options)
        bias = [] if layer.bias is None else [layer.bias]
        for parameter in bias:
            parameter.set_value(rng.standard_normal(12, np.float32))
        found = []
        for forward in (Conv2D.forward, nn.Conv2D.forward):
            layer.clear_gradients()
            found.append(
                outputs_and_gradients(
                    lambda x, layer=layer, forward=forward: forward(layer, x), images
                )
            )
            found[-1] += [parameter.grad.numpy() for parameter in (layer.weight, *bias)]
        assert_same_bits(*found)


@pytest.mark.smoke
def test_a_bias_takes_the_products_type():
    # no half sums on a CPU
    product = paddle.ones([2, 3], "float64")
    bias = paddle.to_tensor([1.0, 2.0, 3.0])
    total = linear.add_bias(product, bias)
    assert total.dtype == paddle.float64
    assert total.tolist() == [[2.0, 3.0, 4.0]] * 2
    assert linear.add_bias(bias, bias).dtype == paddle.float32


@pytest.mark.smoke
def test_where_linear_is_one_operator_it_is_left_alone(monkeypatch):
    monkeypatch.setattr(linear, "_bias_is_fused", lambda: True)
    with mock.patch.object(linear.F, "linear", return_value="out") as called:
        assert linear.plain_linear("x", "weight", "bias") == "out"
    called.assert_called_once_with("x", "weight", "bias")


@pytest.mark.smoke
@pytest.mark.parametrize("legacy", [False, True, None])
def test_linear_is_one_operator_on_gpus_from_paddle_3_3_on(legacy, monkeypatch):
    def get_flags(name):
        if legacy is None:
            raise ValueError(f"Flag {name} cannot get its value through this function.")
        return {name: legacy}

    monkeypatch.setattr("paddle.get_flags", get_flags)
    for cuda in (True, False):
        monkeypatch.setattr("paddle.is_compiled_with_cuda", lambda cuda=cuda: cuda)
        assert linear._bias_is_fused.__wrapped__() == (cuda and legacy is False)


@pytest.mark.smoke
def test_flash_attention_drops_in_training_alone_and_gets_one_type(monkeypatch):
    """Paddle 2.6 doesn't hand ``training`` on, and its kernel takes queries, keys and values of one
    type.
    """
    paddle.seed(0)
    monkeypatch.setattr("ops.usable", lambda x: False)
    monkeypatch.setattr("ops.flash_attention_takes", lambda x, width: True)
    layer = Attention(16, 2, attn_drop=0.25, qk_norm=True)
    x = paddle.randn([2, 5, 16])
    for norm in (layer.q_norm, layer.k_norm):  # under autocast norms give a wider type
        norm.register_forward_post_hook(lambda layer, inputs, out: out.astype("float64"))
    for training in (True, False):
        layer.train() if training else layer.eval()
        with mock.patch.object(
            F, "scaled_dot_product_attention", side_effect=lambda q, k, v, **_: v
        ) as called:
            layer(x)
        (q, k, v), options = called.call_args
        assert q.shape == k.shape == v.shape == [2, 5, 2, 8]
        assert q.dtype == k.dtype == v.dtype == paddle.float32
        assert options["dropout_p"] == (0.25 if training else 0.0)


@pytest.mark.smoke
@pytest.mark.parametrize("class_token", [False, True])
def test_the_gradient_of_relative_positions_has_the_bits_of_a_gather(class_token):
    layer = RelativePositionBias((3, 4), 2, class_token, std=0.02)
    index = layer.relative_position_index

    def gathered(table):
        return (
            paddle.gather(table, index.flatten()).reshape([*index.shape, -1]).transpose([2, 0, 1])
        )

    expected = outputs_and_gradients(gathered, layer.relative_position_bias_table.numpy())
    bias = layer.position_bias()
    (bias * paddle.arange(bias.size, dtype="float32").reshape(bias.shape)).sum().backward()
    assert_same_bits([bias.numpy(), layer.relative_position_bias_table.grad.numpy()], expected)


@pytest.mark.smoke
def test_max_pooling_is_in_float32_and_gives_its_inputs_type():
    images = paddle.randn([2, 3, 9, 9])
    pool = MaxPool2D(3, 2, 1)
    assert (pool(images) == nn.MaxPool2D(3, 2, 1)(images)).all()
    with mock.patch.object(nn.MaxPool2D, "forward", side_effect=lambda layer, x: x) as called:
        assert pool(images.astype("bfloat16")).dtype == paddle.bfloat16
    assert called.call_args.args[1].dtype == paddle.float32


@pytest.mark.parametrize("compiled", [False, True])
def test_channel_dropout_drops_whole_channels(compiled, compiled_operators):
    ops.enable(compiled)
    paddle.seed(0)
    layer = ChannelDropout(0.25)
    x = paddle.full([4, 500, 2, 3], 3.0)
    out = layer(x).numpy().reshape(2000, 6)
    assert (out == out[:, :1]).all()
    assert {round(float(value), 5) for value in out[:, 0]} == {0.0, 4.0}
    # 2,000 draws: four deviations of the share are 0.04.
    assert abs((out[:, 0] == 0).mean() - 0.25) < 0.04
    layer.eval()
    assert layer(x) is x
