"""Focal Transformer: its windows, biases and errors. golden/paddlevit_models.py has its values."""

import numpy as np
import paddle
import pytest
from golden.paddlevit_models import array
from support.small_models import small_focal

import ops
from config import get_config
from errors import InputError
from inference.visualization.attention import attention
from models import build_model
from models.focal import FocalAttention, outside_mask, surrounding_ranks
from models.layers.windows import neighbourhoods, surrounded_windows


def randomized(layer):
    for name, parameter in layer.named_parameters():
        parameter.set_value(array(name, tuple(parameter.shape)))
    layer.eval()
    return layer


@pytest.mark.smoke
@pytest.mark.parametrize(("size", "halo"), [(5, 2), (5, 5), (15, 3)])
def test_a_windows_surroundings_go_on_at_the_maps_other_side(compiled_operators, size, halo):
    maps = array("maps", (2, 15, 30, 3))
    whole = np.pad(maps, ((0, 0), (halo, halo), (halo, halo), (0, 0)), mode="wrap")
    side = size + 2 * halo
    expected = [
        whole[image, y : y + side, x : x + side].reshape(-1, 3)
        for image in range(2)
        for y in range(0, 15, size)
        for x in range(0, 30, size)
    ]
    x = paddle.to_tensor(maps, stop_gradient=False)
    gradients = []
    for enabled in (True, False):
        ops.enable(enabled)
        found = surrounded_windows(x, size, halo)
        np.testing.assert_array_equal(found.numpy(), expected)
        gradients.append(paddle.grad([found.square().sum()], [x])[0].numpy())
    np.testing.assert_allclose(*gradients, rtol=1e-6)


@pytest.mark.smoke
@pytest.mark.parametrize("reach", [0, 1, 3])
def test_a_neighbourhood_has_zeros_beyond_the_map(compiled_operators, reach):
    maps = array("maps", (2, 2, 3, 4))
    whole = np.pad(maps, ((0, 0), (reach, reach), (reach, reach), (0, 0)))
    side = 2 * reach + 1
    expected = [
        whole[image, y : y + side, x : x + side].reshape(-1, 4)
        for image in range(2)
        for y in range(2)
        for x in range(3)
    ]
    x = paddle.to_tensor(maps, stop_gradient=False)
    gradients = []
    for enabled in (True, False):
        ops.enable(enabled)
        found = neighbourhoods(x, reach)
        np.testing.assert_array_equal(found.numpy(), expected)
        gradients.append(paddle.grad([found.square().sum()], [x])[0].numpy())
    np.testing.assert_allclose(*gradients, rtol=1e-6)


def test_a_place_of_two_copies_has_the_sum_of_both_exponentials():
    layer = randomized(FocalAttention(8, 2, 5, 2, 0, (3, 3), True, 0.0, 0.0))
    ranks, pairs = surrounding_ranks(5, 2)
    # Each copy has a row or column beyond each side of the window in common with another one.
    assert (len(ranks), len(pairs)) == (81, 8)
    bias = layer.bias().numpy()
    assert bias.shape == (2, 25, 81)
    inside = layer.position_bias().numpy()
    around = layer.relative_position_bias_table_to_neighbors.numpy()[0]
    single = np.concatenate([inside, around], axis=2)
    for key, rank in enumerate(ranks):
        if rank < single.shape[2]:
            expected = single[:, :, rank]
        else:
            first, second = pairs[rank - single.shape[2]]
            expected = np.logaddexp(single[:, :, first], single[:, :, second])
        np.testing.assert_allclose(bias[:, :, key], expected, atol=1e-6)
    # The window's own places stand in the middle.
    assert ranks.reshape(9, 9)[2:7, 2:7].ravel().tolist() == list(range(25))


def test_pooled_windows_beyond_the_map_are_masked():
    mask = outside_mask((2, 3), 3, near=4, area=2)
    assert mask.shape == (6, 2, 13)
    assert (mask[:, :, :4] == 0).all()
    # The first window has none above and to its left.
    expected = [[-100, -100, -100], [-100, 0, 0], [-100, 0, 0]]
    assert mask[0, 1, 4:].reshape(3, 3).tolist() == expected


def test_a_map_of_one_window_attends_to_nothing_around():
    model = small_focal()
    assert [stage.blocks[0].window_size for stage in model.layers] == [5, 5, 4, 2]
    assert [stage.blocks[0].attn.expand_size for stage in model.layers] == [2, 1, 0, 0]
    assert (model.layers[0].blocks[0].pool_layers[0].weight.numpy() == np.float32(1 / 25)).all()


def test_attention_is_drawn_with_what_is_around():
    model = randomized(small_focal())
    image = paddle.to_tensor(array("images", (1, 3, 64, 64)))
    drawn = [attention(model, image, block) for block in range(4)]
    assert [one.shape for one in drawn] == [(1, 16, 16), (2, 8, 8), (2, 4, 4), (4, 2, 2)]
    # 16 windows of the padded map, each with a sum of 1; some is on pooled windows and on padding.
    assert 0 < drawn[0].sum() < 16
    np.testing.assert_allclose(drawn[3].sum((1, 2)), np.ones(4), atol=0.9)


def test_layer_groups_are_in_order_and_tables_do_not_decay():
    model = small_focal(droppath=0.3)
    assert model.layer_groups() == [
        ("patch_embed",),
        ("layers.0.blocks.0", "layers.0.downsample"),
        ("layers.1.blocks.0", "layers.1.downsample"),
        ("layers.2.blocks.0", "layers.2.downsample"),
        ("layers.3.blocks.0",),
        ("norm", "head"),
    ]
    rates = [block.drop_path1.drop_prob for stage in model.layers for block in stage.blocks]
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3])
    attn = "layers.0.blocks.0.attn.relative_position_bias_table"
    assert {name for name in model.no_weight_decay() if name.startswith(attn)} == {
        attn,
        f"{attn}_to_neighbors",
        f"{attn}_to_windows.0",
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["MODEL.NUM_HEADS", "[3, 6, 12]"], r"NUM_HEADS is \[3, 6, 12\], expected 4 numbers"),
        (
            ["MODEL.NUM_HEADS", "[3, 6, 12, 25]"],
            "NUM_HEADS has 25, expected a divisor of the 768 channels",
        ),
        (["MODEL.EXPAND_SIZES", "[4, 3, 3, 3]"], "EXPAND_SIZES has 4, expected at most half of"),
        (["MODEL.FOCAL_WINDOWS", "[7, 4, 3, 1]"], "FOCAL_WINDOWS has 4, expected odd numbers"),
        (
            ["DATA.IMAGE_SIZE", "200"],
            "IMAGE_SIZE 200 is not a multiple of 32, a position of the last",
        ),
        (["MODEL.CONV_EMBED", "True", "MODEL.PATCH_SIZE", "2"], "PATCH_SIZE is 2, expected 4"),
    ],
)
def test_sizes_that_do_not_fit_are_named(options, message):
    with pytest.raises(InputError, match=message):
        build_model(get_config("focal_tiny_patch4_window7_224", options))


def test_images_of_other_sizes_are_named():
    with pytest.raises(InputError, match="takes images of 64 x 64, found 64 x 32"):
        small_focal()(paddle.zeros([1, 3, 64, 32]))
