"""RegNet against timm's outputs; it is DeiT's teacher."""

import numpy as np
import paddle
import pytest
from golden.convolutions import array
from golden.regnet import CASES
from paddle import nn
from support.parity import assert_parity
from support.small_models import small_regnet

from config import get_config
from errors import InputError
from models import build_model, create_model, list_models
from models.regnet import Block, RegNet

# what timm makes of CASES


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_logits_features_and_gradients_are_timms(tmp_path, name):
    assert_parity(small_regnet(name), name, tmp_path, array)


def test_regnety_160_is_timms():
    model = get_config("regnety_160").MODEL
    group = model.GROUP_WIDTH
    parameters = 3 * 9 * 32 + 2 * 32
    dims = [32, *model.EMBED_DIMS]
    for before, dim, depth in zip(dims, dims[1:], model.STAGE_DEPTHS, strict=False):
        for in_dim in (before, *[dim] * (depth - 1)):
            squeezed = round(in_dim * model.SE_RATIO)
            convolutions = in_dim * dim + 9 * group * dim + dim * dim + 6 * dim
            parameters += convolutions + 2 * dim * squeezed + dim + squeezed
        parameters += before * dim + 2 * dim
    assert parameters + dims[-1] * 1000 + 1000 == 83_590_140
    # The formula is the model's.
    model = create_model(
        "regnety_160", stage_depths=[1, 1, 1, 1], embed_dims=[112, 112, 112, 224], num_classes=0
    )
    squeezed = [8, 28, 28, 28]
    expected = 3 * 9 * 32 + 64
    for before, dim, hidden in zip(
        (32, 112, 112, 112), (112, 112, 112, 224), squeezed, strict=True
    ):
        expected += (
            before * dim + 9 * 112 * dim + dim * dim + 6 * dim + 2 * dim * hidden + dim + hidden
        )
        expected += before * dim + 2 * dim
    assert sum(p.size for p in model.parameters()) == expected


def test_initialisation_is_timms():
    paddle.seed(0)
    model = RegNet(32, embed_dims=(112, 112, 224, 224), stage_depths=(1, 1, 1, 1))
    block = model.s4.b1
    fan_outs = [(model.stem.conv, 9 * 32), (block.conv1.conv, 224), (block.conv2.conv, 9 * 112)]
    fan_outs += [(block.se.fc1, 56), (block.se.fc2, 224), (block.downsample.conv, 224)]
    for layer, fan_out in fan_outs:
        assert float(layer.weight.std()) == pytest.approx((2 / fan_out) ** 0.5, rel=0.06)
        assert layer.bias is None or not layer.bias.numpy().any()
    assert float(model.head.fc.weight.std()) == pytest.approx(0.01, rel=0.05)
    assert not model.head.fc.bias.numpy().any()
    norms = {
        name: layer for name, layer in model.named_sublayers() if isinstance(layer, nn.BatchNorm2D)
    }
    for name, norm in norms.items():
        assert (norm.weight.numpy() == (0 if name.endswith("conv3.bn") else 1)).all(), name
        assert (norm._momentum, norm._epsilon) == (0.9, 1e-5)
    assert len(norms) == 17


def test_drop_path_rises_linearly_over_all_blocks():
    model = small_regnet(droppath=0.4)
    blocks = [block for stage in (model.s1, model.s2, model.s3, model.s4) for block in stage]
    assert [block.drop_path.drop_prob for block in blocks] == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])


def test_every_parameter_is_in_one_layer_group():
    model = small_regnet()
    groups = model.layer_groups()
    assert groups == [
        ("stem",),
        ("s1.b1",),
        ("s2.b1",),
        ("s3.b1",),
        ("s3.b2",),
        ("s4.b1",),
        ("head",),
    ]
    for name, _ in model.named_parameters():
        assert (
            sum(f"{name}.".startswith(f"{prefix}.") for group in groups for prefix in group) == 1
        ), name
    assert model.no_weight_decay() == set()


def test_the_classifier_is_exchangeable_and_images_are_of_any_size():
    model = small_regnet()
    model.eval()
    images = paddle.to_tensor(array("images", (2, 3, 64, 64)))
    features = model.forward_features(images)
    assert features.shape == [2, 48, 2, 2]
    model.reset_classifier(100)
    assert model(images).shape == [2, 100]
    assert float(model.head.fc.weight.std()) == pytest.approx(0.01, rel=0.05)
    model.reset_classifier(0)
    np.testing.assert_allclose(model(images).numpy(), features.mean(axis=[2, 3]).numpy(), atol=1e-6)
    assert model(paddle.zeros([1, 3, 1, 3])).shape == [1, 48]


def test_dropout_comes_before_the_classifier():
    paddle.seed(0)
    head = small_regnet(dropout=0.5, num_classes=0).forward_head
    assert np.unique(head(paddle.ones([8, 48, 2, 2])).numpy()).tolist() == [0, 2]


def test_drop_path_drops_the_branch_of_whole_samples():
    paddle.seed(0)
    block = Block(8, 8, 1, group_width=8, se_ratio=0.25, drop_path=0.5)
    block.conv3.bn.weight.set_value(paddle.ones([8]))
    images = paddle.randn([64, 8, 3, 3])
    left = paddle.nn.functional.relu(images)
    dropped = (block(images) == left).numpy().all(axis=(1, 2, 3)).sum()
    assert 16 < dropped < 48
    block.eval()
    assert not (block(images) == left).numpy().all(axis=(1, 2, 3)).any()


def test_batch_norms_statistics_are_buffers():
    model = small_regnet()
    names = [name for name, _ in model.named_parameters()]
    assert not [name for name in names if "_mean" in name or "_variance" in name]
    buffers = [name for name, _ in model.named_buffers()]
    assert len(buffers) == 2 * 20
    assert set(names) | set(buffers) == set(model.state_dict())
    before = model.s1.b1.conv1.bn._mean.numpy()
    model(paddle.to_tensor(array("images", (2, 3, 64, 64))))
    assert (model.s1.b1.conv1.bn._mean.numpy() != before).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["MODEL.STAGE_DEPTHS", "[2, 4]"], r"STAGE_DEPTHS is \[2, 4\], expected four numbers"),
        (
            ["MODEL.GROUP_WIDTH", "100"],
            "EMBED_DIMS holds 224, which is not a multiple of GROUP_WIDTH 100",
        ),
        (["MODEL.SE_RATIO", "-1"], "MODEL.SE_RATIO is -1.0, expected 0 to 1000000"),
    ],
)
def test_sizes_that_do_not_fit_are_named(options, message):
    with pytest.raises(InputError, match=message):
        build_model(get_config("regnety_160", options))


@pytest.mark.parametrize("name", list_models("deit*distilled*"))
def test_it_is_deits_teacher(name):
    student = get_config(name)
    teacher = get_config("regnety_160")
    assert student.TRAIN.TEACHER_MODEL == "regnety_160"
    for key in ("IMAGENET_MEAN", "IMAGENET_STD"):
        assert student.DATA[key] == teacher.DATA[key]
