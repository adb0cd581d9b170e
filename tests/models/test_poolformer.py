"""PoolFormer against timm's outputs and numbers."""

import numpy as np
import paddle
import pytest
from golden.make_names_vit import values
from golden.poolformer import CASES
from paddle.nn import functional as F
from support.parity import assert_parity
from support.small_models import small_poolformer

from config import get_config
from errors import InputError
from models import build_model, create_model


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_logits_features_and_gradients_are_timms(tmp_path, name):
    assert_parity(small_poolformer(name), name, tmp_path, values)


def test_the_last_norm_is_the_authors_before_the_pooling():
    model = create_model("poolformer_s12", stage_depths="[1, 1, 1, 1]", embed_dims="[4, 8, 12, 16]")
    assert not model.fc_norm
    features = paddle.to_tensor(values("images", (2, 16, 3, 5)))
    # sail-sg/poolformer's GroupNorm has one group: channels and places
    whole = features.numpy().reshape(2, -1)
    expected = (whole - whole.mean(1, keepdims=True)) / np.sqrt(whole.var(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(model.norm(features).numpy().reshape(2, -1), expected, atol=1e-5)
    assert not [name for name, _ in model.named_parameters() if name.startswith("head.norm")]


def test_epsilons_are_timms():
    found = {
        name: layer._epsilon
        for name, layer in small_poolformer().named_sublayers()
        if "norm" in name and name != "norm"
    }
    assert found.pop("head.norm") == 1e-6
    assert len(found) == 10
    assert set(found.values()) == {1e-5}
    assert small_poolformer(fc_norm=False).norm._epsilon == 1e-5


def test_initialisation_is_timms():
    paddle.seed(0)
    model = small_poolformer(embed_dims=(32, 64, 64, 128), num_classes=200)
    block = model.stages[1].blocks[0]
    for layer in (
        model.stem.conv,
        model.stages[1].downsample.conv,
        block.mlp.fc1,
        block.mlp.fc2,
        model.head.fc,
    ):
        assert float(layer.weight.std()) == pytest.approx(0.02, rel=0.05)
        assert not layer.bias.numpy().any()
    assert (block.layer_scale1.scale.numpy() == np.float32(1e-5)).all()
    assert float(
        small_poolformer(num_classes=500, head_init_scale=0.1).head.fc.weight.std()
    ) == pytest.approx(0.002, rel=0.05)
    scales = (
        create_model("poolformer_s36", stage_depths="[1, 1, 1, 1]")
        .stages[3]
        .blocks[0]
        .layer_scale2.scale
    )
    assert (scales.numpy() == np.float32(1e-6)).all()


def test_drop_path_rises_over_all_blocks_and_dropout_is_theirs_alike():
    model = small_poolformer(droppath=0.4, dropout=0.1)
    calls = []
    blocks = [block for stage in model.stages for block in stage.blocks]
    for block in blocks:
        for layer in (block.mlp.drop, block.drop_path1, block.drop_path2):
            layer.register_forward_post_hook(
                lambda layer, *_: calls.append(getattr(layer, "p", "path"))
            )
    model(paddle.zeros([1, 3, 64, 64]))
    assert calls == 5 * ["path", 0.1, 0.1, "path"]
    for rates in (
        [block.drop_path1.drop_prob for block in blocks],
        [block.drop_path2.drop_prob for block in blocks],
    ):
        assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])


def test_layer_groups_are_in_order_and_hold_every_parameter_once():
    model = small_poolformer()
    groups = model.layer_groups()
    assert groups == [
        ("stem",),
        ("stages.0.blocks.0", "stages.0.downsample"),
        ("stages.1.blocks.0", "stages.1.downsample"),
        ("stages.1.blocks.1",),
        ("stages.2.blocks.0", "stages.2.downsample"),
        ("stages.3.blocks.0", "stages.3.downsample"),
        ("norm", "head"),
    ]
    for name, _ in model.named_parameters():
        assert sum(name.startswith(f"{prefix}.") for group in groups for prefix in group) == 1, name
    assert model.no_weight_decay() == set()


def test_the_classifier_is_exchangeable():
    model = small_poolformer()
    images = paddle.to_tensor(values("images", (2, 3, 64, 64)))
    features = model.forward_features(images)
    assert features.shape == [2, 16, 2, 2]
    model.reset_classifier(7)
    assert (model.classifier_names(), model.head.fc.weight.shape) == (("head.fc",), [16, 7])
    assert model(images).shape == [2, 7]
    model.reset_classifier(0)
    expected = F.layer_norm(features.mean(axis=[2, 3]), 16, epsilon=1e-6)
    np.testing.assert_allclose(model(images).numpy(), expected.numpy(), atol=1e-6)


def test_images_of_any_size_from_three_pixels():
    assert small_poolformer(image_size=3)(paddle.zeros([1, 3, 3, 40])).shape == [1, 5]
    with pytest.raises(
        InputError, match="IMAGE_SIZE is 2, PoolFormer takes images of at least 3 x 3"
    ):
        small_poolformer(image_size=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["MODEL.STAGE_DEPTHS", "[2, 2]"], r"STAGE_DEPTHS is \[2, 2\], expected four numbers"),
        (["MODEL.EMBED_DIMS", "[64]"], r"EMBED_DIMS is \[64\], expected four numbers"),
        (["MODEL.MLP_RATIO", "2"], "MODEL.MLP_RATIO is 2, but PoolFormer takes no MLP_RATIO"),
    ],
)
def test_sizes_that_do_not_fit_are_named(options, message):
    with pytest.raises(InputError, match=message):
        build_model(get_config("poolformer_s12", options))
