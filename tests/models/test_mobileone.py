"""MobileOne against timm's outputs, as it is trained and folded."""

import numpy as np
import paddle
import pytest
from golden import trained
from golden.convolutions import array
from golden.mobileone import CASES
from paddle import nn
from support.parity import assert_parity, load_formula
from support.small_models import small_mobileone

from config import get_config
from errors import InputError
from models import build_model, create_model
from models.layers.conv_norm import ConvNorm
from models.mobileone import Block
from weights import load_weights, save_weights


def images_of(model):
    return paddle.to_tensor(array("images", (2, 3, *model.image_size)))


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_logits_features_and_gradients_are_timms(tmp_path, name):
    assert_parity(small_mobileone(name), name, tmp_path, array)


def test_a_folded_model_is_timms_folded_model(tmp_path):
    assert_parity(small_mobileone(deploy=True), "mobileone_folded", tmp_path, trained.array)


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_folding_keeps_the_logits_and_leaves_one_convolution_in_a_block(tmp_path, name):
    model = load_formula(small_mobileone(name), tmp_path, array)
    images = images_of(model)
    names = list(model.state_dict())
    expected = model(images).numpy()
    folded = model.inference_model()
    np.testing.assert_allclose(
        folded(images).numpy(), expected, atol=1e-5 * np.ptp(expected), rtol=0
    )
    assert folded.deploy
    assert not folded.training
    assert folded.inference_model() is folded
    assert not [
        layer for layer in folded.sublayers() if isinstance(layer, nn.BatchNorm2D | ConvNorm)
    ]
    plain = small_mobileone(name, deploy=True)
    assert {key: t.shape for key, t in folded.state_dict().items()} == {
        key: t.shape for key, t in plain.state_dict().items()
    }
    save_weights(folded, tmp_path / "folded.safetensors")
    load_weights(plain, tmp_path / "folded.safetensors")
    plain.eval()
    assert (plain(images).numpy() == folded(images).numpy()).all()
    assert list(model.state_dict()) == names  # it can be trained on
    assert (model(images).numpy() == expected).all()


def test_a_block_of_groups_is_folded():
    paddle.seed(0)
    block = Block(12, 12, 3, groups=4, branches=2)
    for norm in (layer for layer in block.sublayers() if isinstance(layer, nn.BatchNorm2D)):
        for tensor in (norm.weight, norm.bias, norm._mean, norm._variance):
            tensor.set_value(paddle.rand(tensor.shape) + 0.5)
    block.eval()
    images = paddle.randn([2, 12, 5, 7])
    expected = block(images).numpy()
    block.fold()
    np.testing.assert_allclose(
        block(images).numpy(), expected, atol=1e-5 * np.ptp(expected), rtol=0
    )


def test_initialisation_is_timms():
    paddle.seed(0)
    model = create_model("mobileone_s0", num_classes=100, num_branches=2)
    first = model.stages[2][0]
    second = model.stages[2][1]
    fan_outs = [(model.stem.conv_kxk[0], 9 * 48), (first.conv_kxk[1], 9), (first.conv_scale, 1)]
    for layer, fan_out in [*fan_outs, (second.conv_kxk[0], 256)]:
        assert float(layer.conv.weight.std()) == pytest.approx((2 / fan_out) ** 0.5, rel=0.2)
    assert float(model.head.fc.weight.std()) == pytest.approx(0.01, rel=0.05)
    assert not model.head.fc.bias.numpy().any()
    assert (first.conv_scale.bn.weight.numpy() == 1).all()
    assert (first.identity, second.identity) == (None, None)
    assert isinstance(model.stages[2][3].identity, nn.BatchNorm2D)
    folded = create_model("mobileone_s0", num_classes=100, deploy=True)
    assert float(folded.stages[2][1].reparam_conv.weight.std()) == pytest.approx(
        (2 / 256) ** 0.5, rel=0.05
    )
    assert not folded.stages[2][1].reparam_conv.bias.numpy().any()


def test_drop_path_rises_linearly_where_the_input_remains():
    blocks = [block for stage in small_mobileone(droppath=0.44).stages for block in stage]
    rates = [block.drop_path.drop_prob for block in blocks]
    expected = [0.04 * i if block.identity is not None else 0 for i, block in enumerate(blocks)]
    assert rates == pytest.approx(expected)
    assert [i for i, rate in enumerate(rates) if rate] == [1, 2, 3, 5, 8, 9]


def test_drop_path_drops_the_convolutions_of_whole_samples():
    paddle.seed(0)
    block = Block(8, 8, 3, groups=8, drop_path=0.5)
    images = paddle.randn([64, 8, 3, 3])
    left = nn.functional.relu(block.identity(images))
    dropped = ((block(images) - left).abs() < 1e-6).numpy().all(axis=(1, 2, 3)).sum()
    assert 16 < dropped < 48


def test_squeezing_is_in_half_of_the_third_stage_and_in_the_fourth():
    stages = create_model("mobileone_s4", num_classes=0, embed_dims=[16] * 4).stages
    squeezed = [[not isinstance(block.attn, nn.Identity) for block in stage] for stage in stages]
    assert squeezed == [[False] * 4, [False] * 16, [False] * 10 + [True] * 10, [True] * 2]


def test_the_classifier_is_exchangeable_and_dropout_is_before_it():
    model = small_mobileone()
    model.eval()
    images = images_of(model)
    features = model.forward_features(images)
    assert features.shape == [2, 32, 2, 2]
    model.reset_classifier(7)
    assert model(images).shape == [2, 7]
    model.reset_classifier(0)
    np.testing.assert_allclose(model(images).numpy(), features.mean(axis=[2, 3]).numpy(), atol=1e-6)
    paddle.seed(0)
    head = small_mobileone(dropout=0.5, num_classes=0).forward_head
    assert np.unique(head(paddle.ones([8, 32, 2, 2])).numpy()).tolist() == [0, 2]


def test_layer_groups_are_the_blocks():
    groups = small_mobileone().layer_groups()
    assert groups[:3] == [("stem",), ("stages.0.0",), ("stages.0.1",)]
    assert (len(groups), groups[-1]) == (14, ("head",))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["MODEL.STAGE_DEPTHS", "[2, 8]"], r"STAGE_DEPTHS is \[2, 8\], expected four numbers"),
        (["MODEL.NUM_BRANCHES", "0"], "MODEL.NUM_BRANCHES is 0, expected 1 to"),
    ],
)
def test_sizes_that_do_not_fit_are_named(options, message):
    with pytest.raises(InputError, match=message):
        build_model(get_config("mobileone_s0", options))
