"""RepMLP-ResNet's merged layers, ends and errors. tools/check_paddlevit.py compares it with
PaddleViT's code of 2021, whose channels can't be reduced.
"""

import numpy as np
import paddle
import pytest
from golden.paddlevit_models import array
from paddle import nn
from support.small_models import small_repmlp_resnet

from config import get_config
from errors import InputError
from models import build_model
from models.repmlp_resnet import BaseBlock, BottleneckBlock, LightBlock, RepMLP, RepMLPResNet
from weights import load_weights, save_weights
from weights.layout import file_name


def randomised(layer):
    """The layer in evaluation mode, none of whose tensors is at its start."""
    for name, tensor in layer.state_dict().items():
        tensor.set_value(array(file_name(name), tuple(tensor.shape)))
    layer.eval()
    return layer


@pytest.mark.smoke
@pytest.mark.parametrize("block_type", ["light", "bottleneck"])
def test_merged_layers_keep_the_logits(tmp_path, block_type):
    model = randomised(small_repmlp_resnet(block_type=block_type, image_size=(64, 128)))
    images = paddle.to_tensor(array("images", (2, 3, 64, 128)))
    names = list(model.state_dict())
    expected = model(images).numpy()
    merged = model.inference_model()
    np.testing.assert_allclose(
        merged(images).numpy(), expected, atol=1e-5 * np.ptp(expected), rtol=0
    )
    assert merged.deploy
    assert merged.inference_model() is merged
    plain = small_repmlp_resnet(block_type=block_type, image_size=(64, 128), deploy=True)
    assert {key: tensor.shape for key, tensor in merged.state_dict().items()} == {
        key: tensor.shape for key, tensor in plain.state_dict().items()
    }
    save_weights(merged, tmp_path / "merged.safetensors")
    load_weights(plain, tmp_path / "merged.safetensors")
    plain.eval()
    assert (plain(images).numpy() == merged(images).numpy()).all()
    assert list(model.state_dict()) == names  # it can be trained on
    assert (model(images).numpy() == expected).all()


def test_a_part_is_read_with_what_all_parts_add_to_it():
    """The same by the definition, part by part."""
    layer = randomised(RepMLP(4, (6, 4), (3, 2), (1, 3), 2, 2, deploy=False))
    x = paddle.to_tensor(array("x", (2, 4, 6, 4)))
    means = x.reshape([2, 4, 2, 3, 2, 2]).mean([3, 5])
    added = layer.fc1_fc2(layer.avg.bn(means).flatten(1)).reshape([2, 4, 2, 2])
    weight = layer.fc3.weight.reshape([2, 12, 12])
    expected = np.zeros((2, 4, 6, 4), np.float32)
    for row in range(2):
        for column in range(2):
            rows = slice(3 * row, 3 * row + 3)
            columns = slice(2 * column, 2 * column + 2)
            part = x[:, :, rows, columns] + added[:, :, row, column].unsqueeze([2, 3])
            groups = part.reshape([2, 2, 12])
            joined = paddle.einsum("ngi,goi->ngo", groups, weight).reshape([2, 24])
            out = layer.fc3_bn(joined).reshape([2, 4, 3, 2])
            out = out + layer.repconv1(part) + layer.repconv3(part)
            expected[:, :, rows, columns] = out.numpy()
    np.testing.assert_allclose(layer(x).numpy(), expected, atol=1e-5)


def test_a_map_of_one_part_has_no_means():
    layer = RepMLP(4, (3, 2), (3, 2), (1,), 1, 2, deploy=False)
    assert layer.fc1_fc2 is None
    assert layer(paddle.randn([2, 4, 3, 2])).shape == [2, 4, 3, 2]


def test_repmlps_are_in_the_second_and_third_stage_after_their_first_blocks():
    model = small_repmlp_resnet(stage_depths=(2, 3, 2, 2), block_type="bottleneck")
    kinds = [[type(block) for block in stage] for stage in model._stages()]
    assert kinds == [
        [BaseBlock] * 2,
        [BaseBlock, BottleneckBlock, BottleneckBlock],
        [BaseBlock, BottleneckBlock],
        [BaseBlock] * 2,
    ]
    # The paper's r: 2 in the second stage, 4 in the third.
    assert [model.stage2[1].btnk_repmlp.dim, model.stage3[1].btnk_repmlp.dim] == [4, 4]
    light = small_repmlp_resnet().stage2[1]
    assert (type(light), light.light_repmlp.dim) == (LightBlock, 4)
    assert isinstance(model.stage2[1].btnk_repmlp.avg.bn, nn.BatchNorm2D)


def test_initialisation_is_pytorchs():
    paddle.seed(0)
    model = RepMLPResNet(64, embed_dims=(64, 128, 256, 64), part_size=4, stage_depths=(1, 2, 2, 1))
    layer = model.stage2[1].light_repmlp
    for linear, fan_in in ((model.stage0[0].conv, 147), (layer.fc3, 64), (layer.fc1_fc2.fc1, 64)):
        values = np.abs(linear.weight.numpy())
        assert 0.9 * fan_in**-0.5 < values.max() <= fan_in**-0.5 * (1 + 1e-6)


def test_the_classifier_reads_the_mean_of_the_last_stage():
    model = randomised(small_repmlp_resnet())
    images = paddle.to_tensor(array("images", (2, 3, 64, 64)))
    features = model.forward_features(images)
    assert features.shape == [2, 64, 2, 2]
    model.reset_classifier(0)
    np.testing.assert_allclose(model(images).numpy(), features.mean([2, 3]).numpy(), atol=1e-5)


def test_layer_groups_are_the_blocks():
    model = small_repmlp_resnet()
    groups = model.layer_groups()
    assert groups[:3] == [("stage0",), ("stage1.0",), ("stage2.0",)]
    assert (len(groups), groups[-1]) == (8, ("linear",))
    for name, _ in model.named_parameters():
        assert sum(name.startswith(f"{prefix}.") for group in groups for prefix in group) == 1, name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["MODEL.EMBED_DIMS", "[8, 8]"], r"EMBED_DIMS is \[8, 8\], expected four numbers"),
        (["MODEL.REPARAM_CONV_K", "[2]"], r"REPARAM_CONV_K is \[2\], expected odd numbers"),
        (["DATA.IMAGE_SIZE", "256"], "expected a multiple of 16 times PART_SIZE 7"),
    ],
)
def test_sizes_that_do_not_fit_are_named(options, message):
    with pytest.raises(InputError, match=message):
        build_model(get_config("repmlpres50_light_224_train", options))
