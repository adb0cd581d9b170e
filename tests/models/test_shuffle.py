"""Shuffle Transformer: its shuffled windows and errors. golden/paddlevit_models.py has its values."""

import numpy as np
import paddle
import pytest
from golden.paddlevit_models import array
from support.small_models import small_shuffle

import ops
from config import get_config
from errors import InputError
from inference.visualization.attention import attention
from models import build_model
from models.shuffle import WindowAttention, spread
from weights import load_weights, save_weights


@pytest.mark.smoke
def test_places_far_from_each_other_become_neighbours(compiled_operators):
    maps = array("maps", (2, 6, 12, 5))
    # Of 6 rows, 3 that are 2 apart come together.
    rows = [0, 2, 4, 1, 3, 5]
    columns = [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11]
    x = paddle.to_tensor(maps, stop_gradient=False)
    gradients = []
    for enabled in (True, False):
        ops.enable(enabled)
        found = spread(x, 3, 3)
        np.testing.assert_array_equal(found.numpy(), maps[:, rows][:, :, columns])
        np.testing.assert_array_equal(spread(found, 2, 4).numpy(), maps)
        gradients.append(paddle.grad([found.square().sum()], [x])[0].numpy())
    np.testing.assert_allclose(*gradients, rtol=1e-6)


@paddle.no_grad()
def test_a_shuffled_window_sees_all_over_the_map():
    layer = WindowAttention(32, 1, 3, True, False, 0.0)
    layer.eval()
    x = paddle.to_tensor(array("maps", (1, 32, 6, 9)))
    before = layer(x).numpy()
    x[:, :, 1, 4] += 1.0
    changed = np.abs(layer(x).numpy() - before).max(axis=(0, 1)) > 1e-6
    expected = np.zeros((6, 9), bool)
    expected[1::2, 1::3] = True
    assert (changed == expected).all()


def test_a_file_tells_whether_the_queries_have_a_bias(tmp_path):
    save_weights(small_shuffle(qkv_bias=True), tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="QKV_BIAS"):
        load_weights(small_shuffle(), tmp_path / "model.safetensors")


def test_attention_is_drawn_by_places():
    model = small_shuffle()
    model.eval()
    image = paddle.to_tensor(array("images", (1, 3, 96, 96)))
    near, far = (attention(model, image, block) for block in (0, 1))
    assert near.shape == far.shape == (1, 24, 24)
    # Each window has a sum of 1: neighbours, and places that are 8 apart.
    np.testing.assert_allclose(near[0, :3, :3].sum(), 1.0, atol=1e-5)
    np.testing.assert_allclose(far[0, 2::8, 5::8].sum(), 1.0, atol=1e-5)


def test_initialisation_is_the_authors():
    paddle.seed(0)
    model = small_shuffle(mlp_ratio=4)
    assert float(model.stage2.layers[0][0].mlp.fc1.weight.std()) == pytest.approx(0.02, rel=0.05)
    assert (model.to_token.conv1[0].bias.numpy() == 0).all()
    assert model.stage1.layers[0][0].attn.to_qkv.bias is None


def test_layer_groups_are_in_order_and_drop_path_rises_by_stages():
    model = small_shuffle(droppath=0.3, stage_depths=(2, 2, 4, 2))
    assert model.layer_groups() == [
        ("to_token",),
        ("stage1.layers.0.0",),
        ("stage1.layers.0.1",),
        ("stage2.layers.0.0", "stage2.patch_partition"),
        ("stage2.layers.0.1",),
        ("stage3.layers.0.0", "stage3.patch_partition"),
        ("stage3.layers.0.1",),
        ("stage3.layers.1.0",),
        ("stage3.layers.1.1",),
        ("stage4.layers.0.0", "stage4.patch_partition"),
        ("stage4.layers.0.1",),
        ("head",),
    ]
    rates = [[block.drop_path1.drop_prob for block in stage.blocks()] for stage in model._stages()]
    assert [pytest.approx(one) for one in rates] == [[0.0] * 2, [0.1] * 2, [0.2] * 4, [0.3] * 2]
    assert len(model.no_weight_decay()) == 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["MODEL.STAGE_DEPTHS", "[2, 2, 3, 2]"], r"\[2, 2, 3, 2\], expected four even numbers"),
        (
            ["MODEL.NUM_HEADS", "[3, 6, 6, 12]"],
            r"NUM_HEADS is \[3, 6, 6, 12\], expected numbers that",
        ),
        (["MODEL.EMBED_DIM", "64"], "EMBED_DIM is 64, expected 96, 32 for each head"),
        (["MODEL.WINDOW_SIZE", "4"], "WINDOW_SIZE is 4, expected an odd number"),
        (
            ["DATA.IMAGE_SIZE", "256"],
            "IMAGE_SIZE 256 is not a multiple of 224: WINDOW_SIZE positions",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_named(options, message):
    with pytest.raises(InputError, match=message):
        build_model(get_config("shuffle_vit_tiny_patch4_window7_224", options))


def test_images_of_other_sizes_are_named():
    with pytest.raises(InputError, match="takes images of 96 x 96, found 96 x 48"):
        small_shuffle()(paddle.zeros([1, 3, 96, 48]))
