"""NaFlexViT against timm's outputs, and what its masks and positions promise."""

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.naflexvit import CASES, GRIDS, LENGTH, array
from support.layer_groups import assert_one_group_each
from support.parity import assert_parity, load_formula
from support.small_models import small_naflexvit

from errors import InputError
from models.layers import PatchDropout
from models.layers.naflex import neighbours_of, packed_coordinates, weights_of
from weights.layout import linear_weights
from weights.resize import bicubic_matrix, bilinear_matrix


def packed():
    """Returns the golden files' batch of patches, their coordinates and the mask."""
    coord, valid = packed_coordinates(paddle.to_tensor(GRIDS), LENGTH)
    return paddle.to_tensor(array("patches", (len(GRIDS), LENGTH, 48))), coord, valid


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_logits_features_and_gradients_of_images_are_timms(tmp_path, name):
    assert_parity(small_naflexvit(name), name, tmp_path, array)


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_of_packed_images_are_timms(tmp_path, name):
    golden = np.load(ROOT / "tests" / "golden" / f"{name}.npz")
    model = load_formula(small_naflexvit(name), tmp_path, array)
    logits = model(*packed())
    expected = golden["packed"]
    span = np.ptp(expected)
    # Each image has an effect.
    assert np.abs(np.diff(expected, axis=0)).max(1).min() > 1e-2 * span
    np.testing.assert_allclose(logits.numpy(), expected, atol=1e-5 * span, rtol=0)
    (logits * paddle.to_tensor(array("loss", tuple(logits.shape)))).sum().backward()
    found = {key: parameter.grad for key, parameter in model.named_parameters()}
    keys = [key.removeprefix("packed_grad/") for key in golden if key.startswith("packed_grad/")]
    assert "embeds.proj.weight" in keys
    least = 2e-2 * max(np.ptp(golden[f"packed_grad/{key}"]) for key in keys)
    for key in keys:
        value = found[key].numpy()
        value = value.T if key in linear_weights(model) else value
        gradient = golden[f"packed_grad/{key}"]
        within = 1e-5 * max(np.ptp(gradient), least)
        np.testing.assert_allclose(value, gradient, atol=within, rtol=0, err_msg=key)


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_an_images_logits_depend_neither_on_padding_nor_on_the_other_images(tmp_path, name):
    model = load_formula(small_naflexvit(name), tmp_path, array)
    values, coord, valid = packed()
    together = model(values, coord, valid).numpy()
    # Values of places that aren't patches are large, and have no effect.
    noise = 1e4 * paddle.ones_like(values) * (1 - valid.astype("float32")).unsqueeze(2)
    noisy = model(values + noise, coord, valid).numpy()
    span = np.ptp(together)
    np.testing.assert_allclose(noisy, together, atol=1e-6 * span, rtol=0)
    for number, (rows, columns) in enumerate(GRIDS):
        one = slice(number, number + 1)
        count = rows * columns
        alone = model(values[one, :count], coord[one, :count], valid[one, :count]).numpy()
        np.testing.assert_allclose(alone[0], together[number], atol=2e-6 * span, rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_an_image_and_its_patches_have_the_same_logits(tmp_path, name):
    model = load_formula(small_naflexvit(name), tmp_path, array)
    for size in ((20, 20), (8, 40), (4, 4), (52, 12)):
        images = paddle.to_tensor(array("images", (2, 3, *size)))
        cut, coord = model.embeds.cut(images)
        coord = coord.expand([2, -1, -1])
        valid = paddle.ones(coord.shape[:2], "bool")
        of_images = model(images).numpy()
        of_patches = model(cut, coord, valid).numpy()
        as_dict = {"patches": cut, "patch_coord": coord, "patch_valid": valid}
        assert (model(as_dict).numpy() == of_patches).all()
        span = max(np.ptp(of_images), 1e-3)
        np.testing.assert_allclose(of_patches, of_images, atol=1e-6 * span, rtol=0)


def test_patches_are_pixel_by_pixel_and_row_by_row():
    model = small_naflexvit()
    images = paddle.arange(2 * 3 * 8 * 12, dtype="float32").reshape([2, 3, 8, 12])
    cut, coord = model.embeds.cut(images)
    assert cut.shape == [2, 6, 48]
    assert coord.numpy().tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    expected = images[1, :, 4:8, 8:12].transpose([1, 2, 0]).flatten()
    assert (cut[1, 5] == expected).all()


@pytest.mark.parametrize("new", [1, 2, 4, 5, 7, 13, 40])
def test_weights_of_positions_are_those_of_pytorchs_interpolation(new):
    place = paddle.arange(new).unsqueeze(0)
    side = paddle.to_tensor([[new]])
    cubic = weights_of(place, side, 5, "bicubic")[0].numpy()
    np.testing.assert_allclose(cubic, bicubic_matrix(5, new), atol=1e-6)
    linear = weights_of(place, side, 5, "bilinear")[0].numpy()
    np.testing.assert_allclose(linear, bilinear_matrix(5, new), atol=1e-6)
    first, following, share = (x[0].numpy() for x in neighbours_of(place, side, 5, "bilinear"))
    gathered = np.zeros((new, 5))
    np.add.at(gathered, (np.arange(new), first), 1 - share)
    np.add.at(gathered, (np.arange(new), following), share)
    np.testing.assert_allclose(gathered, bilinear_matrix(5, new), atol=1e-6)
    smooth = weights_of(place, side, 5, "antialiased")[0].numpy()
    np.testing.assert_allclose(smooth.sum(1), 1, atol=1e-6)
    if new >= 5:
        # Nothing is smoothed where positions become more.
        np.testing.assert_allclose(smooth, bilinear_matrix(5, new), atol=1e-6)


def test_outer_positions_stay_in_the_outer_patches_with_corners():
    place = paddle.arange(9).unsqueeze(0)
    first, following, share = neighbours_of(place, paddle.to_tensor([[9]]), 5, "corners")
    at = first.astype("float32") + share * (following - first).astype("float32")
    np.testing.assert_allclose(at[0].numpy(), np.arange(9) / 2)


@pytest.mark.parametrize("method", ["bicubic", "antialiased", "bilinear"])
def test_positions_of_the_same_grid_stay_bit_for_bit(method):
    weights = weights_of(paddle.arange(7).unsqueeze(0), paddle.to_tensor([[7]]), 7, method)
    assert (weights[0].numpy() == np.eye(7)).all()


def test_coordinates_of_short_images_are_padded():
    coord, valid = packed_coordinates(paddle.to_tensor([[2, 2], [1, 3], [1, 5]]), 5)
    assert coord[0].numpy().tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [0, 0]]
    assert coord[1].numpy().tolist() == [[0, 0], [0, 1], [0, 2], [0, 0], [0, 0]]
    assert valid.astype("int32").numpy().tolist() == [
        [1, 1, 1, 1, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1],
    ]


def test_initialisation_is_timms():
    paddle.seed(0)
    model = small_naflexvit(embed_dim=192, depth=3, pos_grid=24)
    assert 0.018 < float(model.embeds.pos_embed.std()) < 0.022
    assert float(model.embeds.reg_token.abs().max()) < 1e-5
    stds = [float(block.mlp.fc2.weight.std()) for block in model.blocks]
    expected = [0.02 / (2 * i) ** 0.5 for i in (1, 2, 3)]
    np.testing.assert_allclose(stds, expected, rtol=0.03)
    assert float(model.blocks[2].mlp.fc1.weight.std()) == pytest.approx(0.02, rel=0.03)
    assert not model.blocks[0].attn.qkv.bias.numpy().any()


def test_each_parameter_is_in_one_layer_group():
    for name in CASES:
        model = small_naflexvit(name)
        assert_one_group_each(model, model.layer_groups())


def test_recompute_gives_the_same_gradients(tmp_path):
    gradients = []
    for recompute in (False, True):
        model = load_formula(small_naflexvit(recompute=recompute), tmp_path, array)
        model.train()
        model(*packed()).sum().backward()
        gradients.append(model.blocks[0].attn.qkv.weight.grad.numpy())
    assert (gradients[0] == gradients[1]).all()


def test_training_leaves_out_the_same_share_of_each_images_patches():
    drop = PatchDropout(0.5, num_prefix_tokens=1)
    valid = paddle.arange(10).unsqueeze(0) < paddle.to_tensor([[10], [7], [1]])
    # A token's value is its place. The first one is the prefix.
    x = paddle.arange(11, dtype="float32").reshape([1, 11, 1]).expand([3, -1, -1])
    kept, still = drop.of_padded(x, valid)
    assert kept.shape == [3, 6, 1]
    assert still.astype("int64").sum(1).tolist() == [5, 3, 1]
    for row, count in enumerate((10, 7, 1)):
        places = kept[row, 1:, 0].numpy()[still[row].numpy()]
        assert kept[row, 0, 0] == 0
        assert len(set(places)) == len(places)
        assert ((places >= 1) & (places <= count)).all()
    drop.eval()
    same, mask = drop.of_padded(x, valid)
    assert same is x
    assert mask is valid


def test_patches_that_were_left_out_get_no_gradient():
    model = small_naflexvit(patch_drop=0.5)
    patches, coord, valid = packed()
    patches.stop_gradient = False
    model.train()
    model(patches, coord, valid).sum().backward()
    # The compiled attention's weights of padding are below 1e-37.
    touched = (patches.grad.abs().sum(2) > 1e-30).numpy()
    counts = valid.numpy().sum(1)
    assert touched.sum(1).tolist() == [max(1, count // 2) for count in counts.tolist()]
    assert not (touched & ~valid.numpy()).any()
    # An evaluation sees all of them.
    model.eval()
    whole = small_naflexvit()
    whole.set_state_dict(model.state_dict())
    whole.eval()
    assert (model(patches, coord, valid) == whole(patches, coord, valid)).all()


def test_what_does_not_fit_is_one_line():
    model = small_naflexvit()
    with pytest.raises(InputError, match=r"multiples of 4 pixels, found 18 x 16; crop or resize"):
        model(paddle.zeros([1, 3, 18, 16]))
    with pytest.raises(InputError, match="patches need patch_coord and patch_valid"):
        model(paddle.zeros([1, 4, 48]))
    with pytest.raises(InputError, match="the model has no CLASS_TOKEN"):
        small_naflexvit(global_pool="token")
    with pytest.raises(InputError, match="EMBED_DIM 24 is not a multiple of NUM_HEADS 5"):
        small_naflexvit(num_heads=5)
    with pytest.raises(InputError, match="IMAGE_SIZE 18 is not a multiple of PATCH_SIZE 4"):
        small_naflexvit(image_size=18)
