"""FCMAE's encoder against sparse convolutions in NumPy, and its loss against its definition."""

import math

import numpy as np
import paddle
import pytest
from scipy.special import erf
from support.small_models import SMALL_MODELS

from errors import InputError
from models.convnext import ConvNeXt
from models.pretraining.fcmae import ConvolutionalMaskedAutoencoder

# [2 images, 2 x 3 squares]
MASKED = np.array([[[1, 0, 1], [0, 1, 1]], [[0, 1, 1], [1, 1, 0]]], np.uint8)


def network_of(image_size=(64, 96), **changes):
    """A network whose norms, biases and scales have an effect."""
    paddle.seed(0)
    sizes = {"stage_depths": (1, 2, 1, 1), "embed_dims": (4, 8, 12, 16), "num_classes": 0}
    options = {"init_values": None, "use_grn": True} | changes
    network = ConvolutionalMaskedAutoencoder(ConvNeXt(image_size, **sizes, **options))
    for parameter in network.parameters():
        parameter.set_value(parameter + 0.2 * paddle.randn(parameter.shape))
    network.eval()
    return network


def images_of(network):
    return paddle.to_tensor(np.random.RandomState(0).randn(2, 3, *network.image_size), "float32")


# ------------------------------------------------------- sparse convolutions


def values(layer, name):
    return getattr(layer, name).numpy().astype(np.float64)


def dense(layer, x):
    """A Linear or a 1 x 1 convolution of [..., channels]."""
    weight = values(layer, "weight")
    if weight.ndim == 4:
        weight = weight[:, :, 0, 0].T
    return x @ weight + values(layer, "bias")


def norm(layer, x):
    """A norm of the channels."""
    x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    return x * values(layer, "weight") + values(layer, "bias")


def sparse_block(block, sites):
    """A block of the sites {place: channels}: no other place exists."""
    weight = values(block.conv_dw, "weight")[:, 0]
    places = list(sites)
    rows = []
    for row, column in places:
        total = values(block.conv_dw, "bias").copy()
        for i in range(7):
            for j in range(7):
                other = (row + i - 3, column + j - 3)
                if other in sites:
                    total += weight[:, i, j] * sites[other]
        rows.append(total)
    x = dense(block.mlp.fc1, norm(block.norm, np.stack(rows)))
    x = x * (1 + erf(x / math.sqrt(2))) / 2
    if hasattr(block.mlp.grn, "weight"):
        size = np.sqrt((x * x).sum(0))
        share = size / (size.mean() + 1e-6)
        x = x * (1 + values(block.mlp.grn, "weight") * share) + values(block.mlp.grn, "bias")
    x = dense(block.mlp.fc2, x)
    if block.gamma is not None:
        x = x * block.gamma.numpy()
    return {place: sites[place] + x[index] for index, place in enumerate(places)}


def patches(conv, sites, side):
    """A convolution with a stride of its kernel's side, of sites that have all their pixels."""
    weight = values(conv, "weight")
    merged = {}
    for row, column in sites:
        place = (row // side, column // side)
        product = weight[:, :, row % side, column % side] @ sites[row, column]
        merged[place] = merged.get(place, values(conv, "bias")) + product
    return merged


def normed(layer, sites):
    return {place: norm(layer, x) for place, x in sites.items()}


def sparse_encode(encoder, image, masked):
    hidden = masked.repeat(32, axis=0).repeat(32, axis=1)
    sites = {
        (row, column): image[:, row, column].astype(np.float64)
        for row, column in np.argwhere(hidden == 0).tolist()
    }
    sites = normed(encoder.stem[1], patches(encoder.stem[0], sites, 4))
    for index, stage in enumerate(encoder.stages):
        if index:
            sites = patches(stage.downsample[1], normed(stage.downsample[0], sites), 2)
        for block in stage.blocks:
            sites = sparse_block(block, sites)
    return sites


@pytest.mark.parametrize(
    "options", [{}, {"conv_mlp": True}, {"use_grn": False, "init_values": 0.5}]
)
def test_what_is_seen_is_encoded_as_by_sparse_convolutions(options):
    network = network_of(**options)
    images = images_of(network)
    found = network.encode(images, paddle.to_tensor(MASKED)).numpy()
    for image, masked, features in zip(images.numpy(), MASKED, found, strict=True):
        expected = sparse_encode(network.encoder, image, masked)
        assert set(expected) == set(map(tuple, np.argwhere(masked == 0).tolist()))
        for (row, column), channels in expected.items():
            # The largest difference of a hundred thousand sums in float32.
            np.testing.assert_allclose(
                features[:, row, column], channels, atol=2e-5 * np.abs(channels).max(), rtol=0
            )


def test_masked_pixels_have_no_effect_on_the_prediction():
    network = network_of()
    images = images_of(network)
    mask = paddle.to_tensor(MASKED)
    hidden = network.mask_of_pixels(mask)
    expected = network._predict(images, mask).numpy()
    noise = paddle.randn(images.shape)
    np.testing.assert_allclose(
        network._predict(images + noise * hidden, mask).numpy(), expected, atol=1e-5
    )
    seen = network._predict(images + noise * (1 - hidden), mask).numpy()
    assert np.abs(seen - expected).max() > 1e-2


def test_the_loss_is_of_normalised_masked_squares():
    network = network_of()
    images = images_of(network)
    mask = paddle.to_tensor(MASKED)
    losses = network(images, mask).numpy()
    reconstructed = network.reconstruct(images, mask).numpy()
    for image, masked, loss, found in zip(
        images.numpy(), MASKED, losses, reconstructed, strict=True
    ):
        errors = []
        for row, column in np.argwhere(masked).tolist():
            place = np.s_[:, 32 * row : 32 * row + 32, 32 * column : 32 * column + 32]
            # What the prediction differs by is in units of the square's deviation.
            deviation = np.sqrt(image[place].var(ddof=1) + 1e-6)
            errors.append((((found[place] - image[place]) / deviation) ** 2).mean())
        assert loss == pytest.approx(np.mean(errors), rel=1e-5)


def test_every_parameter_but_the_heads_is_trained():
    gradients = []
    for recompute in (False, True):
        network = network_of(recompute=recompute)
        network.train()
        network(images_of(network), paddle.to_tensor(MASKED)).sum().backward()
        trained = {
            name: each.grad for name, each in network.named_parameters() if not each.stop_gradient
        }
        assert network.state_dict().keys() - trained.keys() == {
            "encoder.head.norm.weight",
            "encoder.head.norm.bias",
        }
        gradients.append({name: each.numpy() for name, each in trained.items()})
    # Activations that are computed again are of the same mask.
    for name, gradient in gradients[0].items():
        np.testing.assert_array_equal(gradient, gradients[1][name], err_msg=name)
    last = network.layer_groups()[-1]
    assert last[-4:] == ("proj", "decoder", "pred", "mask_token")


@pytest.mark.parametrize("kind", sorted(SMALL_MODELS.keys() - {"convnext"}))
def test_other_architectures_are_refused(kind):
    with pytest.raises(InputError, match="FCMAE can't train this .*: it needs a ConvNeXt with"):
        ConvolutionalMaskedAutoencoder(SMALL_MODELS[kind](num_classes=0))


def test_other_stems_and_sizes_are_refused():
    with pytest.raises(InputError, match="can't train this ConvNeXt: it needs a ConvNeXt with"):
        network_of(stem_type="overlap")
    with pytest.raises(
        InputError, match="squares of 32 x 32 pixels, which don't divide images of 64 x 72"
    ):
        network_of(image_size=(64, 72))
