"""SimMIM's networks against the losses, gradients and weights of transformers and the authors."""

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.simmim import DEPTHS, PATCH, SHARED_BIAS, SIZES, SWIN, VIT, array, images_of, masked
from safetensors.numpy import load_file, save_file
from support.layer_groups import assert_one_group_each
from support.small_models import SMALL_MODELS, small_swin, small_vit
from support.transformers_names import transformers_names

from errors import InputError
from models.beit import Beit
from models.pretraining.simmim import SimMIM
from models.swin import SwinTransformer
from models.swinv2 import SwinTransformerV2
from models.vit import VisionTransformer
from weights import file_arrays, load_weights, save_weights
from weights.layout import linear_weights
from weights.names import simmim, timm_names

# transformers 5.24.0's and, at d3e29bc, microsoft/SimMIM's.


def encoder_of(case):
    side, _ = SIZES[case]
    sizes = {"image_size": side, "patch_size": PATCH, "num_classes": 0}
    if case == "simmim_vit":
        return VisionTransformer(**sizes, **VIT)
    if case == "simmim_authors_vit":
        return Beit(**sizes, **VIT, **SHARED_BIAS, global_pool="token")
    kind = SwinTransformerV2 if case == "simmim_swinv2" else SwinTransformer
    return kind(**sizes, **SWIN, stage_depths=DEPTHS)


def network_of(case):
    side, units = SIZES[case]
    return SimMIM(encoder_of(case), side // units)


def golden_of(case):
    golden = dict(np.load(ROOT / "tests" / "golden" / f"{case}.npz"))
    gradients = {
        name.removeprefix("grad/"): golden.pop(name) for name in list(golden) if "grad/" in name
    }
    return golden, gradients


def with_reference(case, folder):
    """The network with the reference's weights, read from a file as the reference writes it."""
    _, gradients = golden_of(case)
    weights = {name: array(name, gradient.shape) for name, gradient in gradients.items()}
    save_file(weights, folder / "model.safetensors")
    network = network_of(case)
    load_weights(network, folder / "model.safetensors")
    network.eval()
    return network


def inputs_of(case):
    return paddle.to_tensor(images_of(case)), paddle.to_tensor(masked(case))


@pytest.mark.smoke
@pytest.mark.parametrize("case", SIZES)
def test_loss_and_every_gradient_are_the_references(tmp_path, case):
    golden, gradients = golden_of(case)
    network = with_reference(case, tmp_path)
    losses = network(*inputs_of(case))
    assert losses.shape == [2]
    # Equally many pixels of each image are masked. So the mean over all of them, which is the
    # references' loss, is that over the images.
    np.testing.assert_allclose(losses.mean().item(), golden["loss"], rtol=1e-6)
    if "reconstruction" in golden:
        expected = golden["reconstruction"]
        found = network.reconstruct(*inputs_of(case)).numpy()
        np.testing.assert_allclose(found, expected, atol=1e-5 * np.ptp(expected), rtol=0)

    losses.mean().backward()
    found = {name: parameter.grad.numpy() for name, parameter in network.named_parameters()}
    for name in linear_weights(network):
        found[name] = found[name].T
    expected = timm_names(simmim, gradients, "torch", list(found))
    assert found.keys() == expected.keys()
    # A gradient whose terms cancel out is only rounding.
    least = 2e-2 * max(np.ptp(gradient) for gradient in expected.values())
    for name, gradient in expected.items():
        np.testing.assert_allclose(
            found[name], gradient, atol=1e-5 * max(np.ptp(gradient), least), rtol=0, err_msg=name
        )


def test_the_loss_is_the_mean_over_the_masked_pixels():
    paddle.seed(0)
    network = network_of("simmim_swin")
    images = paddle.to_tensor(images_of("simmim_swin"))
    mask = np.zeros((2, 4, 4), np.uint8)
    # One unit of the first image, four of the second one.
    mask[0, 1, 2] = 1
    mask[1, 2:, 2:] = 1
    predicted = network.reconstruct(images, paddle.to_tensor(mask)).numpy()
    differences = np.abs(predicted - images.numpy())
    expected = [differences[0, :, 8:16, 16:24].mean(), differences[1, :, 16:, 16:].mean()]
    losses = network(images, paddle.to_tensor(mask)).numpy()
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


def test_masked_pixels_are_not_seen():
    paddle.seed(0)
    network = network_of("simmim_swin")
    images, mask = inputs_of("simmim_swin")
    hidden = paddle.to_tensor(masked("simmim_swin").repeat(8, axis=1).repeat(8, axis=2))
    hidden = hidden.unsqueeze(1).astype("float32")
    noise = paddle.rand(images.shape)
    expected = network.reconstruct(images, mask).numpy()
    np.testing.assert_array_equal(
        network.reconstruct(images + noise * hidden, mask).numpy(), expected
    )
    seen = network.reconstruct(images + noise * (1 - hidden), mask).numpy()
    assert np.abs(seen - expected).max() > 1e-3


def network_of_small(kind, **changes):
    """A network of a small model whose mask units are patches."""
    encoder = SMALL_MODELS[kind](num_classes=0, **changes)
    return SimMIM(encoder, encoder.feature_info[0]["reduction"])


TYPES = ("beit", "eva", "gmlp", "mixer", "resmlp", "swin", "swinv2", "vit")


@pytest.mark.parametrize(
    ("kind", "options"),
    [*((kind, {}) for kind in TYPES), ("vit", {"global_pool": "avg", "reg_tokens": 2})],
)
def test_every_parameter_is_trained(kind, options):
    paddle.seed(0)
    network = network_of_small(kind, image_size=32, **options)
    images = paddle.randn([2, network.in_channels, *network.image_size])
    mask = np.zeros((2, *network.units), np.uint8)
    mask[:, 0] = 1
    network(images, paddle.to_tensor(mask)).sum().backward()
    untrained = {name for name, parameter in network.named_parameters() if parameter.grad is None}
    assert untrained == set()
    assert_one_group_each(network, network.layer_groups())
    assert "mask_token" in network.no_weight_decay()


@pytest.mark.parametrize("kind", sorted(SMALL_MODELS.keys() - set(TYPES)))
def test_architectures_without_patches_are_refused_with_the_others_names(kind):
    with pytest.raises(
        InputError, match="patches that don't overlap, unlike those of .*; MODEL.TYPE can be BEiT"
    ):
        network_of_small(kind)


def test_sizes_that_do_not_fit_are_one_line():
    for encoder, mask_patch, message in (
        (small_vit(), 6, "METHOD.MASK_PATCH is 6, not a multiple of MODEL.PATCH_SIZE 4"),
        (
            small_vit(image_size=(12, 16)),
            8,
            "METHOD.MASK_PATCH is 8, which doesn't divide images of 12 x 16",
        ),
        (
            small_swin(image_size=(24, 40)),
            8,
            "the encoder's last map covers 16 x 16 pixels, which don't divide images of 24 x 40",
        ),
        (small_vit(patch_drop=0.5), 4, "MODEL.PATCH_DROP is 0.5, expected 0"),
        (small_vit("vit_map"), 4, "GLOBAL_POOL is map, expected token or avg"),
    ):
        with pytest.raises(InputError, match=message):
            SimMIM(encoder, mask_patch)


@pytest.mark.parametrize("case", SIZES)
def test_files_are_read_as_they_were_written(tmp_path, case):
    network = with_reference(case, tmp_path)
    save_weights(network, tmp_path / "ours.safetensors")
    other = network_of(case)
    load_weights(other, tmp_path / "ours.safetensors")
    expected = network.state_dict()
    for name, tensor in other.state_dict().items():
        np.testing.assert_array_equal(tensor.numpy(), expected[name].numpy(), err_msg=name)


@pytest.mark.parametrize("case", ["simmim_vit", "simmim_swin", "simmim_swinv2"])
def test_the_encoder_of_transformers_files_is_a_model(tmp_path, case):
    network = with_reference(case, tmp_path)
    model = encoder_of(case)
    report = load_weights(model, tmp_path / "model.safetensors")
    assert not report.unexpected
    for name, tensor in model.state_dict().items():
        expected = network.state_dict()[f"encoder.{name}"].numpy()
        np.testing.assert_array_equal(tensor.numpy(), expected, err_msg=name)


@pytest.mark.parametrize("case", ["simmim_vit", "simmim_swin", "simmim_swinv2"])
def test_transformers_names_load_and_come_back(tmp_path, case):
    """No tensor is lost or changed on the way, so its file can be written of ours."""
    network = with_reference(case, tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    back = transformers_names(file_arrays(network), case.removeprefix("simmim_"))
    assert back.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(back[name], values, err_msg=name)
