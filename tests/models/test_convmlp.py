"""ConvMLP's ends and errors; PaddleViT's own code computes its logits and gradients in
test_paddlevit_models.py.
"""

import math

import numpy as np
import paddle
import pytest
from golden.paddlevit_models import array
from support.small_models import small_convmlp

from config import get_config
from errors import InputError
from models import build_model
from models.convmlp import ConvMLP


def test_intermediates_come_before_the_convolutions_between_stages():
    model = small_convmlp()
    model.eval()
    images = paddle.to_tensor(array("images", (2, 3, 65, 96)))
    maps = model.forward_intermediates(images, intermediates_only=True)
    assert [one.shape[1:] for one in maps] == [[8, 17, 24], [12, 9, 12], [16, 5, 6], [24, 3, 3]]
    x = model.conv_stages.downsample(maps[0]).transpose([0, 2, 3, 1])
    for block in model.stages[0].blocks:
        x = block(x)
    np.testing.assert_allclose(x.transpose([0, 3, 1, 2]).numpy(), maps[1].numpy(), atol=1e-5)


def test_the_connection_between_both_mlps_has_no_shortcut():
    block = small_convmlp().stages[0].blocks[0]
    for layer in (block.channel_mlp1.fc2, block.channel_mlp2.fc2):
        layer.weight.set_value(paddle.zeros_like(layer.weight))
        layer.bias.set_value(paddle.zeros_like(layer.bias))
    x = paddle.randn([2, 5, 6, 12])
    expected = block.connect(block.connect_norm(x).transpose([0, 3, 1, 2])).transpose([0, 2, 3, 1])
    np.testing.assert_allclose(block(x).numpy(), expected.numpy(), atol=1e-6)


def test_initialisation_is_the_authors():
    paddle.seed(0)
    model = ConvMLP(64, embed_dims=(64, 96, 128), stem_dim=64)
    block = model.stages[0].blocks[0]
    # The authors' fan out of a depthwise convolution counts all of its channels.
    for layer, fan_out in (
        (model.tokenizer.block._sub_layers["3"], 9 * 32),
        (block.connect, 9 * 64),
        (model.stages[0].downsample_mlp.downsample, 9 * 96),
    ):
        assert float(layer.weight.std()) == pytest.approx(math.sqrt(2 / fan_out), rel=0.1)
    bias = np.abs(model.conv_stages.downsample.bias.numpy())
    assert 0.5 * (9 * 64) ** -0.5 < bias.max() <= (9 * 64) ** -0.5
    assert float(block.channel_mlp1.fc1.weight.std()) == pytest.approx(0.02, rel=0.15)
    assert not block.channel_mlp1.fc1.bias.numpy().any()


def test_drop_path_rises_within_each_stage():
    stages = small_convmlp(droppath=0.3, stage_depths=(4, 1, 2)).stages
    rates = [[block.drop_path.drop_prob for block in stage.blocks] for stage in stages]
    assert [rate for stage in rates for rate in stage] == pytest.approx(
        [0.0, 0.1, 0.2, 0.3, 0.0, 0.0, 0.3]
    )


def test_the_classifier_reads_the_mean_of_normalised_places():
    model = small_convmlp()
    model.eval()
    images = paddle.to_tensor(array("images", (2, 3, 64, 64)))
    features = model.forward_features(images)
    assert features.shape == [2, 2, 2, 24]
    np.testing.assert_allclose(features.mean(-1).numpy(), 0, atol=1e-5)
    model.reset_classifier(0)
    np.testing.assert_allclose(model(images).numpy(), features.mean([1, 2]).numpy(), atol=1e-5)


def test_layer_groups_are_in_order_and_hold_every_parameter_once():
    model = small_convmlp()
    groups = model.layer_groups()
    assert groups[:3] == [
        ("tokenizer",),
        ("conv_stages.conv_blocks.0",),
        ("conv_stages.conv_blocks.1", "conv_stages.downsample"),
    ]
    assert groups[3] == ("stages.0.blocks.0", "stages.0.downsample_mlp")
    assert groups[-1] == ("norm", "head")
    for name, _ in model.named_parameters():
        assert sum(name.startswith(f"{prefix}.") for group in groups for prefix in group) == 1, name


@pytest.mark.parametrize("key", ["EMBED_DIMS", "MLP_RATIO"])
def test_sizes_that_do_not_fit_are_named(key):
    with pytest.raises(
        InputError, match=rf"{key} is \[8.*, 8.*\], expected 3 numbers: one per stage"
    ):
        build_model(get_config("convmlp_s", [f"MODEL.{key}", "[8, 8]"]))
