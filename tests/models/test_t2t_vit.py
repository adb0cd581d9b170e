"""T2T-ViT against the authors' outputs and numbers."""

import numpy as np
import paddle
import pytest
from golden.t2t_vit import CASES
from golden.trained import array
from paddle import nn
from paddle.nn import functional as F
from support.parity import assert_as_the_authors
from support.small_models import small_t2t_vit

from config import get_config
from errors import InputError
from inference.visualization.attention import attention
from inference.visualization.positions import similarities
from models import build_model, create_model
from models.t2t_vit import TokenPerformer
from weights import load_weights, save_weights


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_are_the_authors(tmp_path, name):
    assert_as_the_authors(small_t2t_vit(name), name, tmp_path, array)


def test_the_authors_tables_are_no_parameters_and_paddlevits_are():
    paddle.seed(0)
    model = small_t2t_vit()
    table = model.pos_embed.numpy()
    assert table.shape == (1, 10, 24)
    # position 3, channels 4 and 5: the frequency is 10,000 ** (-4 / 24)
    angle = 3 * 10_000 ** (-4 / 24)
    np.testing.assert_allclose(table[0, 3, 4:6], [np.sin(angle), np.cos(angle)], rtol=1e-6)
    features = model.tokens_to_token.attention1.w.numpy()
    # orthogonal rows of the length sqrt(4)
    np.testing.assert_allclose(features @ features.T, 4 * np.eye(4), atol=1e-5)
    fixed = {"pos_embed", "tokens_to_token.attention1.w", "tokens_to_token.attention2.w"}
    trained = small_t2t_vit(fixed_tables=False)
    names = {name for name, _ in model.named_parameters()}
    assert {name for name, _ in trained.named_parameters()} - names == fixed
    assert model.state_dict().keys() == trained.state_dict().keys() == names | fixed
    assert not trained.pos_embed.numpy().any()
    assert trained.tokens_to_token.attention1.w.numpy().any()


@paddle.no_grad()
def test_a_performer_approximates_attention():
    """The mean over many draws of the random features comes close to the softmax."""
    paddle.seed(0)
    x = paddle.randn([1, 6, 16]) / 4
    layer = TokenPerformer(16, 16, drop=0.0, fixed=True)
    features = 20_000
    layer.features = features
    layer.w = paddle.randn([features, 16])
    expected = F.softmax(x @ x.transpose([0, 2, 1]), axis=-1) @ x
    np.testing.assert_allclose(layer._attend(x, x, x).numpy(), expected.numpy(), atol=0.05)


def test_initialisation_is_the_authors():
    paddle.seed(0)
    model = create_model("t2t_vit_7")
    for name, layer in model.named_sublayers():
        if isinstance(layer, nn.Linear):
            assert float(layer.weight.std()) == pytest.approx(0.02, rel=0.05), name
            assert layer.bias is None or not layer.bias.numpy().any()
    assert float(model.cls_token.std()) == pytest.approx(0.02, rel=0.2)
    assert model.tokens_to_token.attention1.dp.p == model.tokens_to_token.attention1.mlp[3].p == 0.1


def test_layer_groups_are_in_order():
    model = small_t2t_vit()
    first = ("tokens_to_token", "cls_token", "pos_embed")
    assert model.layer_groups() == [first, ("blocks.0",), ("blocks.1",), ("norm", "head")]
    assert model.no_weight_decay() == {"cls_token", "pos_embed"}


@paddle.no_grad()
def test_the_classifier_reads_the_class_token():
    model = small_t2t_vit()
    model.eval()
    images = paddle.to_tensor(array("images", (2, 3, 48, 48)))
    features = model.forward_features(images)
    assert features.shape == [2, 10, 24]
    [last] = model.forward_intermediates(images, [-1], norm=True, intermediates_only=True)
    expected = features[:, 1:].reshape([2, 3, 3, 24]).transpose([0, 3, 1, 2])
    np.testing.assert_array_equal(last.numpy(), expected.numpy())
    model.reset_classifier(0)
    np.testing.assert_array_equal(model(images).numpy(), features[:, 0].numpy())


@paddle.no_grad()
def test_grey_images_look_the_same_to_a_model_of_one_channel(tmp_path):
    """A file's three channels become one: the first norm's factors and the first Linear with it."""
    model = small_t2t_vit()
    norm = model.tokens_to_token.attention1.norm1
    norm.weight.set_value(paddle.tile(1 + paddle.randn([49]) / 5, [3]))
    norm.bias.set_value(paddle.tile(paddle.randn([49]) / 5, [3]))
    save_weights(model, tmp_path / "model.safetensors")
    grey = small_t2t_vit(in_channels=1)
    load_weights(grey, tmp_path)
    images = paddle.to_tensor(array("images", (2, 1, 48, 48)))
    for each in (model, grey):
        each.eval()
    expected = model(images.tile([1, 3, 1, 1])).numpy()
    np.testing.assert_allclose(grey(images).numpy(), expected, atol=1e-5 * np.ptp(expected))


def test_positions_fit_another_image(tmp_path):
    model = small_t2t_vit(fixed_tables=False)
    model.pos_embed.set_value(paddle.to_tensor(array("pos_embed", (1, 10, 24))))
    save_weights(model, tmp_path / "model.safetensors")
    larger = small_t2t_vit(image_size=(48, 80))
    assert load_weights(larger, tmp_path).resized == ["pos_embed resized from 3 x 3 to 3 x 5"]
    np.testing.assert_array_equal(larger.pos_embed[0, 0].numpy(), model.pos_embed[0, 0].numpy())


def test_what_it_looks_at_has_the_grid_of_its_tokens():
    model = small_t2t_vit()
    model.eval()
    image = paddle.to_tensor(array("images", (1, 3, 48, 48)))
    assert attention(model, image, -1).shape == (3, 3, 3)
    assert similarities(model).shape == (3, 3, 3, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["MODEL.NUM_HEADS", "5"], "EMBED_DIM is 256, not a multiple of NUM_HEADS 5"),
        (["MODEL.TOKEN_DIM", "7"], "TOKEN_DIM is 7, expected an even number"),
        (["DATA.IMAGE_SIZE", "200"], "IMAGE_SIZE 200 is not a multiple of 16, the side of a token"),
    ],
)
def test_sizes_that_do_not_fit_are_named(options, message):
    with pytest.raises(InputError, match=message):
        build_model(get_config("t2t_vit_7", options))
