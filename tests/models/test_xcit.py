"""XCiT against timm's outputs and numbers."""

import math

import numpy as np
import paddle
import pytest
from golden.xcit import CASES, array
from support.parity import assert_parity
from support.small_models import small_xcit

from config import get_config
from errors import InputError
from inference.visualization.attention import attention, describe_queries
from inference.visualization.positions import similarities
from models import build_model
from models.layers.attention import attention_layers, attention_weights
from models.xcit import CrossCovarianceAttention, FourierPositions
from training.losses import SoftTargetCrossEntropy, TrainingLoss


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_logits_features_and_gradients_are_timms(tmp_path, name):
    assert_parity(small_xcit(name), name, tmp_path, array)


def test_initialisation_is_timms():
    paddle.seed(0)
    model = small_xcit(embed_dim=96, num_heads=4, num_classes=200, init_values=1e-5)
    block = model.blocks[1]
    last = model.cls_attn_blocks[0]
    for layer in (block.attn.qkv, block.mlp.fc2, last.attn.k, last.mlp.fc1, model.head):
        assert float(layer.weight.std()) == pytest.approx(0.02, rel=0.05)
        assert not layer.bias.numpy().any()
    assert float(model.cls_token.std()) == pytest.approx(0.02, rel=0.3)
    for layer, fan_in in (
        (model.patch_embed.proj[4][0], 48 * 9),
        (block.local_mp.conv2, 9),
        (model.pos_embed.token_projection, 64),
    ):
        for parameter in layer.parameters():
            assert 0.93 * fan_in**-0.5 < float(parameter.abs().max()) <= fan_in**-0.5
    for scale in (block.gamma1, block.gamma2, block.gamma3, last.gamma1, last.gamma2):
        assert (scale.numpy() == np.float32(1e-5)).all()
    assert (block.attn.temperature.numpy() == 1).all()


def test_channels_attend_to_each_other_whatever_the_order_of_the_tokens():
    """A head's channel is a mean of its values' channels, weighed by the cosine of its query over
    all tokens.
    """
    paddle.seed(0)
    layer = CrossCovarianceAttention(6, 2, qkv_bias=True, attn_drop=0.0, proj_drop=0.0)
    layer.temperature.set_value(paddle.to_tensor([[[3.0]], [[0.5]]]))
    layer.eval()
    x = paddle.randn([1, 5, 6])
    # [heads, channels, tokens]
    q, k, v = layer.qkv(x).numpy()[0].reshape(5, 3, 2, 3).transpose(1, 2, 3, 0)
    q, k = (part / np.linalg.norm(part, axis=2, keepdims=True) for part in (q, k))
    weights = np.exp(np.array([3.0, 0.5]).reshape(2, 1, 1) * (q @ k.transpose(0, 2, 1)))
    mixed = weights / weights.sum(2, keepdims=True) @ v
    expected = layer.proj(paddle.to_tensor(mixed.reshape(6, 5).T[None].astype("float32"))).numpy()
    np.testing.assert_allclose(layer(x).numpy(), expected, atol=1e-6)
    np.testing.assert_allclose(layer(x.flip(1)).numpy(), expected[:, ::-1], atol=1e-6)


def test_any_grid_has_positions():
    layer = FourierPositions(64)
    layer.token_projection.weight.set_value(paddle.eye(64).reshape([64, 64, 1, 1]))
    layer.token_projection.bias.set_value(paddle.zeros([64]))
    waves = layer(3, 5).numpy()[0]
    for row, column in np.ndindex(3, 5):
        for pair in range(16):
            for first, place, count in ((0, row, 3), (32, column, 5)):
                angle = 2 * math.pi * (place + 1) / count / 10_000 ** (pair / 16)
                found = waves[first + 2 * pair : first + 2 * pair + 2, row, column]
                np.testing.assert_allclose(found, [math.sin(angle), math.cos(angle)], atol=5e-6)


def test_rates_are_where_the_authors_have_them():
    model = small_xcit(droppath=0.3, dropout=0.1, attention_dropout=0.2)
    calls = []
    for layer in model.sublayers():
        if hasattr(layer, "drop_prob") or type(layer).__name__ == "Dropout":
            rate = getattr(layer, "drop_prob", getattr(layer, "p", None))
            layer.register_forward_post_hook(lambda *_, rate=rate: calls.append(rate))
    model(paddle.zeros([2, 3, 32, 32]))
    block = [0.2, 0.1, 0.3, 0.3, 0.1, 0.1, 0.3]
    last = [0.2, 0.1, 0.1, 0.1]
    assert calls == [0.1, *block, *block, *last, *last]


def test_the_decay_leaves_the_class_token_alone_as_the_authors_do():
    assert small_xcit().no_weight_decay() == {"cls_token"}
    assert small_xcit().layer_groups() == [
        ("cls_token", "pos_embed", "patch_embed"),
        ("blocks.0",),
        ("blocks.1",),
        ("cls_attn_blocks.0",),
        ("cls_attn_blocks.1",),
        ("norm", "head"),
    ]


def test_the_classifier_is_exchangeable_and_reads_the_token_or_the_patches():
    for name, pooled in (("xcit", lambda x: x[:, 0]), ("xcit_16", lambda x: x[:, 1:].mean(axis=1))):
        model = small_xcit(name)
        model.eval()
        images = paddle.to_tensor(array("images", (2, 3, *model.image_size)))
        features = model.forward_features(images)
        assert features.shape == [2, *((17, 16) if name == "xcit" else (16, 24))]
        model.reset_classifier(5)
        assert (model.classifier_names(), model(images).shape) == (("head",), [2, 5])
        model.reset_classifier(0)
        np.testing.assert_allclose(model(images).numpy(), pooled(features).numpy(), atol=1e-6)


def test_attention_is_shown_of_the_class_tokens_blocks_alone():
    model = small_xcit()
    model.eval()
    assert list(attention_layers(model)) == ["cls_attn_blocks.0.attn", "cls_attn_blocks.1.attn"]
    # another size than the model's: 6 x 4 patches
    image = paddle.to_tensor(array("image", (1, 3, 48, 32)))
    with paddle.no_grad(), attention_weights(model, ["cls_attn_blocks.0.attn"]) as kept:
        model(image)
    weights = kept["cls_attn_blocks.0.attn"].numpy()[0]
    np.testing.assert_allclose(
        attention(model, image, 0), weights[:, 0, 1:].reshape(2, 6, 4), atol=1e-6
    )
    assert describe_queries(model) == "of the class token"
    assert model.cam_layer() is model.cls_attn_blocks[-1].norm1
    assert small_xcit("xcit_16").cam_layer() is None  # it reads the mean of the patches


def test_positions_are_shown_by_their_similarity():
    model = small_xcit(image_size=(24, 40))
    alike = similarities(model)
    places = model.pos_embed(3, 5).numpy()[0]
    assert alike.shape == (3, 5, 3, 5)
    one = places[:, 1, 4]
    other = places[:, 2, 0]
    assert alike[1, 4, 2, 0] == pytest.approx(
        one @ other / np.linalg.norm(one) / np.linalg.norm(other), abs=1e-6
    )


def test_one_classifier_serves_a_teacher_too():
    logits = small_xcit()(paddle.randn([2, 3, 32, 32]))
    targets = paddle.nn.functional.one_hot(paddle.to_tensor([1, 2]), 7)
    taught = paddle.nn.functional.one_hot(paddle.to_tensor([3, 4]), 7)
    loss = TrainingLoss(SoftTargetCrossEntropy(), lambda _: taught, "hard", alpha=0.25)(
        None, logits, targets
    )
    log = paddle.nn.functional.log_softmax(logits, axis=-1)
    np.testing.assert_allclose(
        loss.numpy(),
        (-0.75 * (log * targets) - 0.25 * (log * taught)).sum(axis=-1).numpy(),
        rtol=1e-5,
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["MODEL.PATCH_SIZE", "4"], "PATCH_SIZE is 4, expected 8 or 16"),
        (["MODEL.NUM_HEADS", "5"], "EMBED_DIM 128 is not a multiple of NUM_HEADS 5"),
        (
            ["MODEL.EMBED_DIM", "4"],
            "EMBED_DIM is 4, too low for the first convolution; raise it",
        ),
        (["DATA.IMAGE_SIZE", "15"], "IMAGE_SIZE is 15, XCiT takes images of at least 16 x 16"),
        (
            ["MODEL.MLP_RATIO", "0.001"],
            "MODEL.MLP_RATIO is 0.001, too low for 128 channels",
        ),
        (["MODEL.DISTILLED", "True"], "MODEL.DISTILLED is True, but XCiT takes no DISTILLED"),
    ],
)
def test_sizes_that_do_not_fit_are_named(options, message):
    with pytest.raises(InputError, match=message):
        build_model(get_config("xcit_nano_12_p16_224", options))
