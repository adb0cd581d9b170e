"""CaiT against timm's outputs and numbers."""

import numpy as np
import paddle
import pytest
from golden.cait import CASES
from golden.make_names_vit import values
from support.parity import assert_parity
from support.small_models import small_cait

from config import get_config
from errors import InputError
from models import build_model
from models.layers.class_attention import ClassAttention
from training.optim.groups import within


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_logits_features_and_gradients_are_timms(tmp_path, name):
    assert_parity(small_cait(name), name, tmp_path, values)


def test_initialisation_is_timms():
    paddle.seed(0)
    model = small_cait(embed_dim=96, num_classes=200, init_values=1e-5, image_size=64)
    block = model.blocks[1]
    last = model.blocks_token_only[0]
    for layer in (block.attn.qkv, block.mlp.fc2, last.attn.k, last.mlp.fc1, model.head):
        assert float(layer.weight.std()) == pytest.approx(0.02, rel=0.05)
        assert not layer.bias.numpy().any()
    assert float(block.attn.proj_l.weight.abs().max()) < 0.1
    assert float(model.pos_embed.std()) == pytest.approx(0.02, rel=0.05)
    assert float(model.cls_token.std()) == pytest.approx(0.02, rel=0.3)
    for scale in (block.gamma_1, block.gamma_2, last.gamma_1, last.gamma_2):
        assert (scale.numpy() == np.float32(1e-5)).all()
    assert float(
        small_cait(num_classes=500, head_init_scale=0.1).head.weight.std()
    ) == pytest.approx(0.002, rel=0.05)


def test_drop_path_is_one_rate_and_the_class_tokens_blocks_drop_nothing():
    model = small_cait(droppath=0.3, dropout=0.1, attention_dropout=0.2)
    calls = []
    for layer in model.sublayers():
        if hasattr(layer, "drop_prob") or type(layer).__name__ == "Dropout":
            rate = getattr(layer, "drop_prob", getattr(layer, "p", None))
            layer.register_forward_post_hook(lambda *_, rate=rate: calls.append(rate))
    model(paddle.zeros([1, 3, 16, 16]))
    assert [rate for rate in calls if rate] == [0.1, *3 * [0.2, 0.1, 0.3, 0.1, 0.1, 0.3]]


def test_layer_groups_are_in_order_and_hold_every_parameter_once():
    model = small_cait()
    groups = model.layer_groups()
    assert groups == [
        ("cls_token", "pos_embed", "patch_embed"),
        ("blocks.0",),
        ("blocks.1",),
        ("blocks.2",),
        ("blocks_token_only.0",),
        ("blocks_token_only.1",),
        ("norm", "head"),
    ]
    assert model.timm_layer_groups()[2:4] == [
        ("blocks.1", "blocks_token_only.0"),
        ("blocks.2", "blocks_token_only.1", "norm"),
    ]
    for name, _ in model.named_parameters():
        assert sum(within(name, group) for group in groups) == 1, name
    assert model.no_weight_decay() == {"cls_token", "pos_embed"}


def test_the_classifier_is_exchangeable():
    model = small_cait()
    images = paddle.to_tensor(values("images", (2, 3, 16, 16)))
    features = model.forward_features(images)
    assert features.shape == [2, 17, 16]
    model.reset_classifier(5)
    assert (model.classifier_names(), model(images).shape) == (("head",), [2, 5])
    model.reset_classifier(0)
    np.testing.assert_allclose(model(images).numpy(), features[:, 0].numpy(), atol=1e-6)


def test_the_class_token_alone_asks_in_its_blocks():
    """Its output doesn't depend on the order of the patches."""
    paddle.seed(0)
    layer = ClassAttention(8, 2)
    x = paddle.randn([2, 6, 8])
    found = layer(x)
    assert found.shape == [2, 1, 8]
    turned = layer(paddle.concat([x[:, :1], x[:, 1:].flip(1)], axis=1))
    np.testing.assert_allclose(found.numpy(), turned.numpy(), atol=1e-6)
    assert float((layer(x[:, 1:]) - found).abs().max()) > 1e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["MODEL.NUM_HEADS", "5"], "EMBED_DIM 192 is not a multiple of NUM_HEADS 5"),
        (["DATA.IMAGE_SIZE", "225"], "IMAGE_SIZE 225 is not a multiple of PATCH_SIZE 16"),
        (
            ["MODEL.MLP_RATIO", "0.001"],
            "MODEL.MLP_RATIO is 0.001, too low for 192 channels",
        ),
        (["MODEL.DISTILLED", "True"], "MODEL.DISTILLED is True, but CaiT takes no DISTILLED"),
    ],
)
def test_sizes_that_do_not_fit_are_named(options, message):
    with pytest.raises(InputError, match=message):
        build_model(get_config("cait_xxs24_224", options))
