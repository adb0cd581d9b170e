"""ResT and ResTv2 against the authors' outputs and numbers."""

import numpy as np
import paddle
import pytest
from golden.rest import CASES, array
from paddle import nn
from paddle.nn import functional as F
from support.parity import assert_as_the_authors, in_float64
from support.small_models import small_rest, small_restv2

from config import get_config
from errors import InputError
from models import build_model, create_model
from models.layers.attention import attention_weights
from models.rest import UpsampleAttention

SMALL = {"rest": small_rest, "restv2": small_restv2}


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_are_the_authors(tmp_path, name):
    small = small_restv2 if name == "restv2" else small_rest
    with in_float64():
        model = small(name)
    assert_as_the_authors(model, name, tmp_path, array)


@paddle.no_grad()
def test_mixed_weights_have_a_mean_of_zero_and_a_variance_of_one():
    model = small_rest()
    model.eval()
    with attention_weights(model, ["stage2.0.attn"]) as kept:
        model(paddle.to_tensor(array("images", (2, 3, 96, 64))))
    weights = kept["stage2.0.attn"].numpy()
    # two heads; 12 x 8 queries, and as many keys over 4 x 4
    assert weights.shape == (2, 2, 96, 6)
    np.testing.assert_allclose(weights.mean(axis=(2, 3)), 0, atol=1e-5)
    scale = weights.var(axis=(2, 3))
    assert (scale <= 1).all()


@paddle.no_grad()
def test_values_are_enlarged_to_every_place_of_a_map_that_is_no_multiple():
    """Rows and columns beyond the map are cut: they don't change the others."""
    layer = UpsampleAttention(8, 2, 4, qkv_bias=True, attn_drop=0.0, proj_drop=0.0)
    x = paddle.randn([1, 6, 9, 8])
    kv = layer.keys_and_values(x)
    assert kv.shape == [1, 2, 3, 16]
    assert layer(x).shape == x.shape
    values = F.pixel_shuffle(layer.up[0](kv[:, :, :, 8:].transpose([0, 3, 1, 2])), 4)
    attended = layer.attend(layer.q(x).flatten(1, 2), kv.flatten(1, 2)).reshape(x.shape)
    enlarged = layer.up_norm(values.transpose([0, 2, 3, 1])[:, :6, :9])
    expected = layer.proj(attended + enlarged)
    np.testing.assert_allclose(layer(x).numpy(), expected.numpy(), atol=1e-5)


@pytest.mark.parametrize("name", ["rest_lite", "restv2_tiny"])
def test_initialisation_is_the_authors(name):
    paddle.seed(0)
    model = create_model(name)
    for key, layer in model.named_sublayers():
        if isinstance(layer, nn.Linear | nn.Conv2D):
            count = layer.weight.size
            if count > 1000:
                assert float(layer.weight.std()) == pytest.approx(0.02, rel=0.1), key
        if isinstance(layer, nn.Linear) or (name == "restv2_tiny" and hasattr(layer, "bias")):
            assert layer.bias is None or not layer.bias.numpy().any(), key
    if name == "rest_lite":
        # torch's default: uniform up to 1 / sqrt(9)
        bias = model.patch_embed_4.pos.pa_conv.bias.numpy()
        assert bias.min() < -0.3
        assert bias.max() > 0.3
    epsilons = {layer._epsilon for layer in model.sublayers() if isinstance(layer, nn.LayerNorm)}
    assert epsilons == {1e-5 if name == "rest_lite" else 1e-6}


@pytest.mark.parametrize(("kind", "step"), [("rest", "patch_embed"), ("restv2", "patch")])
def test_layer_groups_are_the_authors(kind, step):
    model = SMALL[kind]()
    second = ["stage2.0"] if kind == "rest" else ["stage2.0", "stage2.1"]
    expected = ["stem", "stage1.0", f"{step}_2", *second, f"{step}_3", "stage3.0"]
    expected += [f"{step}_4", "stage4.0"]
    assert model.layer_groups() == [*((name,) for name in expected), ("norm", "head")]
    assert model.no_weight_decay() == set()


@paddle.no_grad()
@pytest.mark.parametrize("kind", SMALL)
def test_the_classifier_reads_the_mean_of_the_last_maps(kind):
    model = SMALL[kind]()
    model.eval()
    images = paddle.to_tensor(array("images", (2, 3, 96, 64)))
    features = model.forward_features(images)
    assert features.shape == [2, 3, 2, 32]
    model.reset_classifier(0)
    np.testing.assert_allclose(model(images).numpy(), features.mean(axis=[1, 2]).numpy(), atol=1e-6)


def test_drop_path_rises_over_all_blocks():
    model = small_restv2(droppath=0.4)
    rates = [
        block.drop_path1.drop_prob for i in range(1, 5) for block in getattr(model, f"stage{i}")
    ]
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["MODEL.STAGE_DEPTHS", "[2, 4]"], r"STAGE_DEPTHS is \[2, 4\], expected four numbers"),
        (["MODEL.NUM_HEADS", "[2, 4]"], r"NUM_HEADS is \[2, 4\], expected 4 numbers"),
        (
            ["MODEL.NUM_HEADS", "[5, 2, 4, 8]"],
            "NUM_HEADS has 5, expected a divisor of the 64 channels",
        ),
        (["MODEL.SR_RATIO", "[3, 2, 2, 1]"], "SR_RATIO has 3, expected 1 or even numbers"),
        (["MODEL.EMBED_DIMS", "[9, 128, 256, 512]"], "EMBED_DIMS begins with 9, expected an even"),
        (["MODEL.MLP_RATIO", "[4, 4]"], r"MLP_RATIO is \[4.0, 4.0\], expected 4 numbers"),
    ],
)
def test_sizes_that_do_not_fit_are_named(options, message):
    with pytest.raises(InputError, match=message):
        build_model(get_config("rest_lite", options))
