"""Hiera's masked autoencoder against transformers' (golden/make_mae_hiera.py), its targets and
reconstructions.
"""

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.make_mae_hiera import CASES, SIZES, array
from support.layer_groups import assert_one_group_each
from support.small_models import small_hiera
from support.transformers_names import hiera_authors_names, hiera_transformers_names

from errors import InputError
from models.hiera import Hiera
from models.pretraining.mae import patch_order
from models.pretraining.mae_hiera import MaskedAutoencoderHiera
from weights import file_arrays, load_weights
from weights.formats import write_weights
from weights.layout import linear_weights
from weights.names import timm_names

GOLDEN = np.load(ROOT / "tests" / "golden" / "mae_hiera.npz")
SMALL = {"decoder_width": 8, "decoder_depth": 1, "decoder_heads": 2}


def encoder_of(case):
    options = CASES[case]
    return Hiera(
        options["image_size"],
        options.get("num_channels", 3),
        num_classes=0,
        embed_dim=SIZES["embed_dim"],
        stage_depths=SIZES["depths"],
        q_pool=options["num_query_pool"],
    )


def network_of(case):
    options = CASES[case]
    return MaskedAutoencoderHiera(
        encoder_of(case),
        options.get("mask_ratio", 0.6),
        SIZES["decoder_hidden_size"],
        SIZES["decoder_depth"],
        SIZES["decoder_num_heads"],
        options["normalize_pixel_loss"],
    )


def gradients_of(case):
    """Returns the gradients by transformers' names."""
    prefix = f"{case}/grad/"
    return {name.removeprefix(prefix): GOLDEN[name] for name in GOLDEN if name.startswith(prefix)}


def weights_of(case):
    return {name: array(name, gradient.shape) for name, gradient in gradients_of(case).items()}


def written(file, arrays):
    write_weights(file, {name: np.ascontiguousarray(values) for name, values in arrays.items()})
    return file


def loaded(case, folder, arrays=None):
    network = network_of(case)
    arrays = weights_of(case) if arrays is None else arrays
    report = load_weights(network, written(folder / "hiera.safetensors", arrays))
    assert not report.changes
    return network


def images_of(network):
    return paddle.to_tensor(array("images", (2, network.in_channels, *network.image_size)))


def order_of(network, images=2):
    units = network.units[0] * network.units[1]
    noise = np.random.RandomState(0).random_sample((images, units))
    return paddle.to_tensor(patch_order(noise))


@pytest.mark.smoke
@pytest.mark.parametrize("case", CASES)
def test_loss_and_every_gradient_are_those_of_transformers(case, tmp_path):
    network = loaded(case, tmp_path)
    order = patch_order(GOLDEN[f"{case}/noise"])
    rows, columns = network.units
    visible = np.zeros((2, rows * columns), bool)
    np.put_along_axis(visible, order[:, : network.num_visible], True, axis=1)
    side = network.unit_side
    by_place = visible.reshape(2, rows, columns).repeat(side, axis=1).repeat(side, axis=2)
    np.testing.assert_array_equal(by_place.reshape(2, -1), GOLDEN[f"{case}/mask"])

    losses = network(images_of(network), paddle.to_tensor(order))
    assert losses.shape == [2]
    losses.mean().backward()
    np.testing.assert_allclose(losses.numpy().mean(), GOLDEN[f"{case}/loss"], rtol=1e-5)

    found = {name: parameter.grad.numpy() for name, parameter in network.named_parameters()}
    for name in linear_weights(network):
        found[name] = found[name].T
    expected = timm_names(network.weight_names, gradients_of(case), "torch", list(found))
    assert found.keys() == expected.keys()
    # A gradient whose terms cancel out is only rounding.
    least = 2e-2 * max(np.abs(gradient).max() for gradient in expected.values())
    for name, gradient in expected.items():
        within = 1e-5 * max(np.abs(gradient).max(), least)
        np.testing.assert_allclose(found[name], gradient, atol=within, rtol=0, err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_the_names_of_transformers_and_of_the_authors_come_back(case, tmp_path):
    expected = weights_of(case)
    network = loaded(case, tmp_path)
    ours = file_arrays(network)
    back = hiera_transformers_names(ours, SIZES["depths"])
    assert back.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(back[name], values, err_msg=name)

    authors = hiera_authors_names(ours)
    assert {name.partition(".")[0] for name in authors} == {
        "blocks",
        "decoder_blocks",
        "decoder_embed",
        "decoder_norm",
        "decoder_pos_embed",
        "decoder_pred",
        "encoder_norm",
        "mask_token",
        "multi_scale_fusion_heads",
        "patch_embed",
        "pos_embed",
    }
    again = loaded(case, tmp_path, authors)
    for name, tensor in network.state_dict().items():
        np.testing.assert_array_equal(again.state_dict()[name].numpy(), tensor.numpy())


@pytest.mark.parametrize("kind", ["ours", "authors", "transformers"])
def test_the_encoder_of_each_file_is_a_model(kind, tmp_path):
    case = "normalised"
    network = loaded(case, tmp_path)
    ours = file_arrays(network)
    files = {
        "ours": ours,
        "authors": hiera_authors_names(ours),
        "transformers": hiera_transformers_names(ours, SIZES["depths"]),
    }
    model = encoder_of(case)
    report = load_weights(model, written(tmp_path / "file.safetensors", files[kind]))
    assert not report.unexpected
    assert not report.missing
    for name, tensor in model.state_dict().items():
        expected = network.state_dict()[f"encoder.{name}"].numpy()
        np.testing.assert_array_equal(tensor.numpy(), expected, err_msg=name)


def test_what_is_masked_reaches_the_loss_by_its_targets_alone():
    network = MaskedAutoencoderHiera(small_hiera("hiera_masked", num_classes=0), **SMALL)
    network.eval()
    images = images_of(network)
    order = order_of(network)
    before = network._predict(images, order).numpy()
    hidden = np.ones((2, 6), np.float32)
    np.put_along_axis(hidden, order.numpy()[:, : network.num_visible], 0, axis=1)
    hidden = hidden.reshape(2, 1, 2, 3).repeat(32, axis=2).repeat(32, axis=3)
    changed = images + 7 * paddle.to_tensor(hidden)
    np.testing.assert_array_equal(network._predict(changed, order).numpy(), before)
    changed = images + 7 * paddle.to_tensor(1 - hidden)
    assert np.abs(network._predict(changed, order).numpy() - before).max() > 1e-4


@pytest.mark.parametrize("normalised", [False, True])
def test_a_reconstruction_shows_visible_units_and_predictions(normalised):
    encoder = small_hiera("hiera_masked", num_classes=0)
    network = MaskedAutoencoderHiera(encoder, norm_target=normalised, **SMALL)
    network.eval()
    images = images_of(network)
    order = order_of(network)
    masked, reconstructed = (tensor.numpy() for tensor in network.reconstruct(images, order))
    predicted = network._predict(images, order).numpy()
    images = images.numpy()
    assert masked.shape == reconstructed.shape == images.shape
    # A unit of 32 x 32 pixels has 2 x 2 places.
    for image, units in enumerate(order.numpy()):
        for rank, unit in enumerate(units):
            row, column = divmod(unit, 3)
            box = np.s_[image, :, 32 * row : 32 * row + 32, 32 * column : 32 * column + 32]
            if rank < network.num_visible:
                np.testing.assert_array_equal(masked[box], images[box])
                np.testing.assert_array_equal(reconstructed[box], images[box])
                continue
            assert not masked[box].any()
            for place in range(4):
                down, right = (16 * part for part in divmod(place, 2))
                part = np.s_[:, down : down + 16, right : right + 16]
                expected = predicted[image, 4 * (rank - network.num_visible) + place]
                expected = expected.reshape(3, 16, 16)
                if normalised:
                    pixels = images[box][part]
                    expected = expected * np.sqrt(pixels.var(ddof=1) + 1e-6) + pixels.mean()
                found = reconstructed[box][part]
                np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("case", ["hiera", "hiera_windows", "hiera_masked"])
def test_everything_is_trained_and_belongs_to_one_group(case):
    network = MaskedAutoencoderHiera(small_hiera(case, num_classes=0), **SMALL)
    network(images_of(network), order_of(network)).mean().backward()
    untrained = [name for name, parameter in network.named_parameters() if parameter.grad is None]
    assert untrained == []
    for groups in (network.layer_groups(), network.timm_layer_groups()):
        assert_one_group_each(network, groups)
    # As the authors: tokens and positions of the decoder decay.
    assert network.no_weight_decay() == {"encoder.pos_embed"}


def test_recomputed_activations_give_the_same_gradients():
    gradients = []
    for recompute in (False, True):
        paddle.seed(0)
        encoder = small_hiera("hiera_masked", num_classes=0, recompute=recompute)
        network = MaskedAutoencoderHiera(encoder, **SMALL)
        network(images_of(network), order_of(network)).mean().backward()
        gradients.append([parameter.grad.numpy() for parameter in network.parameters()])
    for first, second in zip(*gradients, strict=True):
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"patch_drop": 0.5}, {}, "MODEL.PATCH_DROP is 0.5, expected 0"),
        (
            {},
            {"mask_ratio": 0.9},
            "MASK_RATIO 0.9 leaves 0 of 6 mask units visible, expected 1 to 5",
        ),
        ({}, {"decoder_heads": 3}, "DECODER_WIDTH 8 is not a multiple of METHOD.DECODER_HEADS 3"),
    ],
)
def test_what_does_not_fit_is_one_line(changes, options, message):
    encoder = small_hiera("hiera_masked", num_classes=0, **changes)
    with pytest.raises(InputError, match=message):
        MaskedAutoencoderHiera(encoder, **SMALL | options)


def test_fresh_weights_are_those_of_the_authors():
    paddle.seed(0)
    encoder = Hiera(64, num_classes=0, embed_dim=32, stage_depths=(1, 1, 1, 1), weight_init="mae")
    network = MaskedAutoencoderHiera(encoder, decoder_width=48, decoder_depth=1, decoder_heads=4)
    for name, parameter in network.named_parameters():
        values = parameter.numpy()
        if "norm" in name:
            assert (values == float(name.endswith("weight"))).all(), name
        elif "token" in name or "pos_embed" in name:
            assert 0.015 < values.std() < 0.025, name
        elif name.startswith("multi_scale_fusion_heads") or name.endswith("proj.bias"):
            fan_in = np.prod(network.state_dict()[f"{name.rpartition('.')[0]}.weight"].shape[1:])
            if "attn" in name or "blocks" in name:
                assert (values == 0).all(), name
            else:
                assert np.abs(values).max() <= fan_in**-0.5 * (1 + 1e-6), name
        elif values.ndim == 1:
            assert (values == 0).all(), name
        else:
            fans = values.reshape(len(values), -1).shape
            bound = (6 / sum(fans)) ** 0.5
            assert 0.97 * bound < np.abs(values).max() <= bound * (1 + 1e-6), name
