"""RepLKNet's merged kernels, ends and errors; PaddleViT's own code computes its logits and gradients
in test_paddlevit_models.py.
"""

import numpy as np
import paddle
import pytest
from golden.paddlevit_models import array
from support.small_models import small_replknet

from config import get_config
from errors import InputError
from models import build_model
from models.replknet import RepLKNet
from weights import load_weights, save_weights
from weights.layout import file_name


def randomised(**changes):
    """The small model in evaluation mode, none of whose tensors is at its start."""
    model = small_replknet(**changes)
    for name, tensor in model.state_dict().items():
        tensor.set_value(array(file_name(name), tuple(tensor.shape)))
    model.eval()
    return model


@pytest.mark.smoke
@pytest.mark.parametrize("small_kernel", [5, None])
def test_merged_kernels_keep_the_logits(tmp_path, small_kernel):
    model = randomised(small_kernel=small_kernel)
    images = paddle.to_tensor(array("images", (2, 3, 64, 70)))
    names = list(model.state_dict())
    expected = model(images).numpy()
    merged = model.inference_model()
    np.testing.assert_allclose(
        merged(images).numpy(), expected, atol=1e-5 * np.ptp(expected), rtol=0
    )
    assert merged.small_kernel_merged
    assert merged.inference_model() is merged
    assert not merged.training
    plain = small_replknet(small_kernel_merged=True)
    assert {key: tensor.shape for key, tensor in merged.state_dict().items()} == {
        key: tensor.shape for key, tensor in plain.state_dict().items()
    }
    save_weights(merged, tmp_path / "merged.safetensors")
    load_weights(plain, tmp_path / "merged.safetensors")
    plain.eval()
    assert (plain(images).numpy() == merged(images).numpy()).all()
    assert list(model.state_dict()) == names  # it can be trained on
    assert (model(images).numpy() == expected).all()


def test_a_merged_kernel_has_the_small_one_in_its_middle():
    layer = randomised().stages[0].blocks[0].large_kernel
    large = layer.lkb_origin
    kernel = layer.fold().lkb_reparam.weight.numpy()
    scale = (large.bn.weight / (large.bn._variance + 1e-5).sqrt()).numpy().reshape([-1, 1, 1, 1])
    added = kernel - large.conv.weight.numpy() * scale
    small = layer.small_conv
    scale = (small.bn.weight / (small.bn._variance + 1e-5).sqrt()).numpy().reshape([-1, 1, 1, 1])
    expected = np.zeros_like(kernel)
    expected[:, :, 4:9, 4:9] = small.conv.weight.numpy() * scale  # 5 x 5 in 13 x 13
    np.testing.assert_allclose(added, expected, atol=1e-6)


def test_initialisation_is_pytorchs():
    paddle.seed(0)
    model = RepLKNet(64, embed_dims=(64, 64, 128, 128), large_kernel_sizes=(9, 9, 7, 5))
    block = model.stages[2].blocks[0]
    for layer, fan_in in (
        (model.stem[0].conv, 27),
        (block.pw1.conv, 128),
        (block.large_kernel.lkb_origin.conv, 49),
        (model.head, 128),
    ):
        values = np.abs(layer.weight.numpy())
        assert 0.95 * fan_in**-0.5 < values.max() <= fan_in**-0.5 * (1 + 1e-6)
        assert values.mean() == pytest.approx(0.5 * fan_in**-0.5, rel=0.1)
    assert (block.prelkb_bn.weight.numpy() == 1).all()


def test_both_blocks_of_a_pair_have_its_rate_of_drop_path():
    stages = small_replknet(droppath=0.4).stages
    rates = [block.drop_path.drop_prob for stage in stages for block in stage.blocks]
    assert rates == pytest.approx([rate for i in range(5) for rate in (0.1 * i, 0.1 * i)])


def test_the_classifier_reads_the_mean_of_the_last_norm():
    model = randomised()
    images = paddle.to_tensor(array("images", (2, 3, 65, 33)))
    features = model.forward_features(images)
    assert features.shape == [2, 24, 3, 2]
    [last] = model.forward_intermediates(images, 1, intermediates_only=True)
    norm = model.norm
    scale = norm.weight / (norm._variance + 1e-5).sqrt()
    shift = norm.bias - norm._mean * scale
    expected = last * scale.reshape([-1, 1, 1]) + shift.reshape([-1, 1, 1])
    np.testing.assert_allclose(features.numpy(), expected.numpy(), atol=1e-5)
    model.reset_classifier(0)
    np.testing.assert_allclose(model(images).numpy(), features.mean([2, 3]).numpy(), atol=1e-5)


def test_layer_groups_are_the_authors():
    """Those of optim_factory.py: two pairs of blocks each of RepLKNet-31B."""
    model = small_replknet(stage_depths=(2, 2, 18, 2))
    groups = model.layer_groups()
    assert len(groups) == 14
    assert groups[0] == ("stem",)
    assert groups[1] == (*(f"stages.0.blocks.{j}" for j in range(4)), "transitions.0")
    assert groups[3] == tuple(f"stages.2.blocks.{j}" for j in range(4))
    assert groups[11] == (*(f"stages.2.blocks.{j}" for j in range(32, 36)), "transitions.2")
    assert groups[12] == tuple(f"stages.3.blocks.{j}" for j in range(4))
    assert groups[13] == ("norm", "head")
    for name, _ in model.named_parameters():
        assert sum(name.startswith(f"{prefix}.") for group in groups for prefix in group) == 1, name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["MODEL.EMBED_DIMS", "[8, 8]"], r"EMBED_DIMS is \[8, 8\], expected four numbers"),
        (["MODEL.LARGE_KERNEL_SIZES", "[9, 9]"], r"LARGE_KERNEL_SIZES is \[9, 9\], expected 4"),
        (
            ["MODEL.LARGE_KERNEL_SIZES", "[31, 28, 27, 13]"],
            r"LARGE_KERNEL_SIZES is \[31, 28, 27, 13\], expected odd numbers",
        ),
        (["MODEL.SMALL_KERNEL", "4"], "SMALL_KERNEL is 4, expected an odd number of at most 13"),
        (["MODEL.SMALL_KERNEL", "15"], "SMALL_KERNEL is 15, expected an odd number of at most 13"),
    ],
)
def test_sizes_that_do_not_fit_are_named(options, message):
    with pytest.raises(InputError, match=message):
        build_model(get_config("replknet_31b", options))
