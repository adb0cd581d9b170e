"""Layers that several architectures share."""

import numpy as np
import paddle
import pytest

from models import create_model
from models.layers import DropPath, PatchDropout


def test_drop_path_drops_whole_samples_and_keeps_the_mean():
    paddle.seed(0)
    layer = DropPath(0.25)
    out = layer(paddle.ones([4000, 2, 3])).numpy()
    assert set(np.unique(out).tolist()) == {0.0, np.float32(1 / 0.75)}
    assert (out == out[:, :1, :1]).all()
    assert abs(out.mean() - 1) < 0.03
    layer.eval()
    assert (layer(paddle.ones([2, 2])).numpy() == 1).all()


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
    drops = [[layer.drop_prob for layer in block.sublayers() if isinstance(layer, DropPath)] for block in model.blocks]
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
    assert len({tuple(sorted(row)) for row in (chosen % (prefix + patches)).tolist()}) > 1  # drawn per sample
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
