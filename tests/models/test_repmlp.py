"""RepMLPNet's merged linear layers, ends and errors; PaddleViT's own code computes its logits and
gradients in test_paddlevit_models.py.
"""

import numpy as np
import paddle
import pytest
from golden.paddlevit_models import array
from support.small_models import small_repmlp

from config import get_config
from errors import InputError
from models import build_model, with_switches
from models.repmlp import RepMLPNet, SetLinear
from weights import load_weights, save_weights
from weights.layout import file_name


def randomised(**changes):
    """The small model in evaluation mode, none of whose tensors is at its start."""
    model = small_repmlp(**changes)
    for name, tensor in model.state_dict().items():
        tensor.set_value(array(file_name(name), tuple(tensor.shape)))
    model.eval()
    return model


@pytest.mark.smoke
@pytest.mark.parametrize("kernels", [(1, 3), (5,), ()])
def test_merged_linear_layers_keep_the_logits(tmp_path, kernels):
    model = randomised(reparam_conv_k=kernels, image_size=(64, 96))
    images = paddle.to_tensor(array("images", (2, 3, 64, 96)))
    names = list(model.state_dict())
    expected = model(images).numpy()
    merged = model.inference_model()
    np.testing.assert_allclose(
        merged(images).numpy(), expected, atol=1e-5 * np.ptp(expected), rtol=0
    )
    assert merged.deploy
    assert merged.inference_model() is merged
    assert not merged.training
    plain = small_repmlp(deploy=True, image_size=(64, 96))
    assert {key: tensor.shape for key, tensor in merged.state_dict().items()} == {
        key: tensor.shape for key, tensor in plain.state_dict().items()
    }
    save_weights(merged, tmp_path / "merged.safetensors")
    load_weights(plain, tmp_path / "merged.safetensors")
    plain.eval()
    assert (plain(images).numpy() == merged(images).numpy()).all()
    assert list(model.state_dict()) == names  # it can be trained on
    assert (model(images).numpy() == expected).all()


def test_all_channels_of_a_set_have_one_linear_layer_over_places():
    paddle.seed(0)
    layer = SetLinear(6, sets=2, bias=True)
    layer.bias.set_value(paddle.randn([12]))
    x = paddle.randn([5, 2, 2, 3])
    weight = layer.weight.numpy().reshape(2, 6, 6)
    expected = np.einsum("sqp,nsp->nsq", weight, x.numpy().reshape(5, 2, 6))
    expected += layer.bias.numpy().reshape(2, 6)
    np.testing.assert_allclose(layer(x).numpy().reshape(5, 2, 6), expected, atol=1e-5)


@pytest.mark.parametrize("deploy", [False, True])
def test_a_file_tells_whether_its_layers_are_merged(tmp_path, deploy):
    small = small_repmlp(deploy=deploy)
    file = tmp_path / "weights.safetensors"
    save_weights(small, file)
    options = ["MODEL.STAGE_DEPTHS", "[1, 1, 2, 1]", "MODEL.EMBED_DIMS", "[8, 12, 16, 24]"]
    options += ["MODEL.SHARESETS_NUMS", "[1, 2, 4, 8]", "MODEL.NUM_CLASSES", "5"]
    config = with_switches(get_config("repmlp_b_224", [*options, "DATA.IMAGE_SIZE", "64"]), file)
    assert deploy == config.MODEL.DEPLOY
    assert not load_weights(build_model(config), file).fresh
    with pytest.raises(InputError, match=f"set MODEL.DEPLOY {deploy}"):
        load_weights(small_repmlp(deploy=not deploy), file)


def test_initialisation_is_pytorchs():
    paddle.seed(0)
    model = RepMLPNet(64, embed_dims=(64, 64, 128, 128), sharesets_nums=(1, 4, 32, 128))
    block = model.stages[1][0].repmlp_block
    for layer, fan_in in (
        (model.conv_embedding.conv, 48),
        (block.fc3, 64),
        (block.repconv3.conv, 9),
        (block.gp.fc1, 64),
        (model.head, 128),
    ):
        values = np.abs(layer.weight.numpy())
        assert 0.9 * fan_in**-0.5 < values.max() <= fan_in**-0.5 * (1 + 1e-6)
    assert (block.fc3_bn.weight.numpy() == 1).all()


def test_the_classifier_reads_the_mean_of_the_last_norm():
    model = randomised()
    images = paddle.to_tensor(array("images", (2, 3, 64, 64)))
    features = model.forward_features(images)
    assert features.shape == [2, 24, 2, 2]
    [last] = model.forward_intermediates(images, 1, intermediates_only=True)
    norm = model.head_norm
    scale = norm.weight / (norm._variance + 1e-5).sqrt()
    shift = norm.bias - norm._mean * scale
    expected = last * scale.reshape([-1, 1, 1]) + shift.reshape([-1, 1, 1])
    np.testing.assert_allclose(features.numpy(), expected.numpy(), atol=1e-5)
    model.reset_classifier(0)
    np.testing.assert_allclose(model(images).numpy(), features.mean([2, 3]).numpy(), atol=1e-5)


def test_layer_groups_are_the_units():
    model = small_repmlp()
    groups = model.layer_groups()
    assert groups[:3] == [("conv_embedding",), ("stages.0.0",), ("stages.1.0", "embeds.0")]
    assert (len(groups), groups[-1]) == (7, ("head_norm", "head"))
    for name, _ in model.named_parameters():
        assert sum(name.startswith(f"{prefix}.") for group in groups for prefix in group) == 1, name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["MODEL.EMBED_DIMS", "[8, 8]"], r"EMBED_DIMS is \[8, 8\], expected four numbers"),
        (["MODEL.SHARESETS_NUMS", "[1, 1]"], r"SHARESETS_NUMS is \[1, 1\], expected 4 numbers"),
        (
            ["MODEL.SHARESETS_NUMS", "[5, 4, 32, 128]"],
            "EMBED_DIMS has 96, expected a multiple of SHARESETS_NUMS' 5",
        ),
        (["MODEL.REPARAM_CONV_K", "[1, 2]"], r"REPARAM_CONV_K is \[1, 2\], expected odd numbers"),
        (["DATA.IMAGE_SIZE", "100"], "DATA.IMAGE_SIZE is 100.*, RepMLPNet takes multiples of 32"),
    ],
)
def test_sizes_that_do_not_fit_are_named(options, message):
    with pytest.raises(InputError, match=message):
        build_model(get_config("repmlp_b_224", options))
