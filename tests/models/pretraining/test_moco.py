"""MoCo v3 against the pseudo-code of its paper in torch (golden/make_moco.py), on one and two
processes.
"""

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.make_moco import (
    BATCH,
    HIDDEN,
    MOMENTUM,
    OUTPUTS,
    RATE,
    SIZE,
    STEPS,
    TEMPERATURE,
    VIT,
    views_of,
    weight,
)
from safetensors.numpy import save_file
from support.layer_groups import assert_one_group_each
from support.ranks import run_ranks
from support.small_models import SMALL_MODELS, small_vit

import utils
from models.layers.batch_norm import hold_frozen_statistics
from models.layers.positions import sincos_2d
from models.pretraining.moco import MoCo
from models.vit import VisionTransformer
from training.moco import contrast
from training.optim.schedule import cosine_between
from weights import load_weights
from weights.layout import file_name, linear_weights

GOLDEN = np.load(ROOT / "tests" / "golden" / "moco.npz")


def network_of_the_paper(folder):
    encoder = VisionTransformer(image_size=SIZE, num_classes=0, **VIT)
    network = MoCo(encoder, HIDDEN, OUTPUTS)
    transposed = linear_weights(network)
    arrays = {}
    for name, tensor in network.state_dict().items():
        shape = tuple(tensor.shape)[::-1] if name in transposed else tuple(tensor.shape)
        arrays[file_name(name)] = weight(file_name(name), shape)
    file = folder / f"moco_{utils.rank()}.safetensors"
    save_file(arrays, file)
    load_weights(network, file)
    return network


def trained(folder):
    """Trains as make_moco.py does; returns the losses, accuracies, first gradients and last tensors
    by the golden file's names.
    """
    network = network_of_the_paper(folder)
    network.train()
    parameters = [p for p in network.parameters() if not p.stop_gradient]
    optimizer = paddle.optimizer.SGD(RATE, parameters)
    images = BATCH // utils.world_size()
    first = utils.rank() * images
    losses = []
    accuracies = []
    grads = {}
    transposed = linear_weights(network)

    def theirs(tensors):
        return {
            file_name(name): value.numpy().T if name in transposed else value.numpy()
            for name, value in tensors
        }

    for step in range(STEPS):
        queries, keys = network(paddle.to_tensor(views_of(step)[first : first + images]))
        assert keys.stop_gradient
        all_keys = utils.all_gather_tensor(keys.transpose([1, 0, 2])).transpose([1, 0, 2])
        values = contrast(queries, all_keys, first, TEMPERATURE)
        values["loss"].mean().backward()
        for parameter in parameters:
            parameter.grad = utils.all_reduce_mean(parameter.grad)
        if step == 0:
            named = [(n, p.grad) for n, p in network.named_parameters() if p.grad is not None]
            grads = theirs(named)
        optimizer.step()
        optimizer.clear_grad(False)
        network.follow(cosine_between(MOMENTUM, 1.0, step / STEPS))
        losses.append(utils.all_reduce_mean(values["loss"].mean()).item())
        accuracies.append(utils.all_reduce_mean(values["contrast_acc"].mean()).item())
    return losses, accuracies, grads, theirs(network.state_dict().items())


def golden(prefix):
    return {key.removeprefix(prefix): GOLDEN[key] for key in GOLDEN.files if key.startswith(prefix)}


@pytest.mark.smoke
@pytest.mark.parametrize("ranks", [1, 2])
def test_twenty_steps_are_those_of_the_paper(tmp_path, ranks):
    for losses, accuracies, grads, state in run_ranks(trained, tmp_path, ranks=ranks):
        np.testing.assert_allclose(losses, GOLDEN["loss"], atol=1e-5)
        np.testing.assert_allclose(accuracies, GOLDEN["accuracy"], atol=1e-4)
        for found, expected in ((grads, golden("grad/")), (state, golden("end/"))):
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                np.testing.assert_allclose(found[name], value, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("kind", ["convnext", "crossvit", "resnet", "swin", "vit", "xcit"])
def test_encoders_of_other_architectures_are_trained(kind):
    paddle.seed(0)
    encoder = SMALL_MODELS[kind](num_classes=0)
    network = MoCo(encoder, HIDDEN, OUTPUTS)
    network.train()
    hold_frozen_statistics(network)
    images = paddle.randn([4, 2, encoder.in_channels, *encoder.image_size])
    queries, keys = network(images)
    for found in (queries, keys):
        assert found.shape == [2, 4, OUTPUTS]
        np.testing.assert_allclose(found.norm(axis=-1).numpy(), 1, rtol=1e-5)
    contrast(queries, keys, 0, TEMPERATURE)["loss"].mean().backward()
    for name, parameter in network.named_parameters():
        is_trained = not parameter.stop_gradient
        assert is_trained == (parameter.grad is not None), name
        assert not (is_trained and name.startswith("momentum.")), name
    assert_one_group_each(network, network.layer_groups())
    # The keys' batch norms, within the encoder, too, have statistics of their own.
    for name, buffer in network.named_buffers():
        if name.startswith("momentum.") and name.endswith("_mean"):
            assert buffer.any(), name


def test_positions_are_the_papers_and_fixed():
    encoder = small_vit(num_classes=0)
    MoCo(encoder, HIDDEN, OUTPUTS)
    rows, columns = encoder.patch_embed.grid_size
    expected = sincos_2d(rows, columns, encoder.num_features, endpoint=True)
    np.testing.assert_array_equal(encoder.pos_embed[:, 1:].numpy(), expected)
    assert not encoder.pos_embed[:, :1].any()
    assert encoder.pos_embed.stop_gradient


def test_views_are_normalised_one_by_one():
    """The features of one view have no effect on the queries of the other."""
    paddle.seed(0)
    network = MoCo(small_vit(num_classes=0), HIDDEN, OUTPUTS)
    network.train()
    encoder = network.encoder
    images = paddle.randn([4, 2, encoder.in_channels, *encoder.image_size])
    others = images.clone()
    others[:, 1] = paddle.randn(others[:, 1].shape) * 3
    for one, other in zip(network(images), network(others), strict=True):
        np.testing.assert_allclose(one[0].numpy(), other[0].numpy(), atol=1e-5)
        assert np.abs(one[1].numpy() - other[1].numpy()).max() > 0.1
