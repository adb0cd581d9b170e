"""ConvNeXt against timm's outputs and its authors' layer-wise decay."""

import numpy as np
import paddle
import pytest
from golden.convnext import CASES, SIZES
from golden.convolutions import array
from parity import assert_parity

from config import get_config
from errors import InputError
from models import build_model, create_model
from models.convnext import Block, ConvNeXt


def small(name="convnext", **changes):
    """The ConvNeXt of golden/convnext.py's case NAME, with changes."""
    words = {"depths": "stage_depths", "dims": "embed_dims", "ls_init_value": "init_values"}
    return ConvNeXt(SIZES[name], **{words.get(key, key): value for key, value in CASES[name].items()} | changes)


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_logits_features_and_gradients_are_timms(tmp_path, name):
    assert_parity(small(name), name, tmp_path, array)


def test_initialisation_is_timms():
    paddle.seed(0)
    model = ConvNeXt(32, stage_depths=(1, 1, 1, 1), embed_dims=(32, 64, 64, 128), num_classes=200)
    block = model.stages[3].blocks[0]
    for layer in (model.stages[3].downsample[1], block.conv_dw, block.mlp.fc1, block.mlp.fc2, model.head.fc):
        assert float(layer.weight.std()) == pytest.approx(0.02, rel=0.05)
        assert not layer.bias.numpy().any()
    assert (block.gamma.numpy() == np.float32(1e-6)).all()
    assert (block.norm.weight.numpy() == 1).all()
    scaled = ConvNeXt(32, stage_depths=(1, 1, 1, 1), embed_dims=(32, 64, 64, 128), num_classes=200, head_init_scale=0.1)
    assert float(scaled.head.fc.weight.std()) == pytest.approx(0.002, rel=0.05)
    assert float(scaled.stages[3].blocks[0].mlp.fc1.weight.std()) == pytest.approx(0.02, rel=0.05)


def test_drop_path_rises_linearly_over_all_blocks():
    blocks = [block for stage in small(stage_depths=(1, 2, 1, 1), droppath=0.4).stages for block in stage.blocks]
    assert [block.drop_path.drop_prob for block in blocks] == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])


def test_layer_groups_are_the_authors():
    model = small(stage_depths=(3, 3, 27, 3), embed_dims=(2, 2, 2, 2))
    groups = model.layer_groups()
    assert len(groups) == 14
    names = [name for name, _ in model.named_parameters()]
    found = {}
    for name in names:
        owners = [i for i, group in enumerate(groups) if any(f"{name}.".startswith(f"{prefix}.") for prefix in group)]
        assert len(owners) == 1, name
        found[name] = owners[0]
    for name, group in found.items():  # optim_factory.py of facebookresearch/ConvNeXt, get_num_layer_for_convnext
        part, stage, kind, *rest = name.split(".")
        expected = {"stem": 0, "head": 13}.get(part)
        if expected is None:
            expected = [1, 2, 3, 12][int(stage)]
            expected += int(rest[0]) // 3 if (stage, kind) == ("2", "blocks") else 0
        assert group == expected, name
    assert model.no_weight_decay() == set()
    assert len(create_model("convnext_tiny").layer_groups()) == 8


def test_the_classifier_is_exchangeable():
    model = small()
    images = paddle.to_tensor(array("images", (2, 3, 64, 64)))
    features = model.forward_features(images)
    assert features.shape == [2, 16, 2, 2]
    model.reset_classifier(7)
    assert (model.classifier_names(), model.head.fc.weight.shape) == (("head.fc",), [16, 7])
    assert model(images).shape == [2, 7]
    model.reset_classifier(0)
    expected = model.head.norm(features.mean(axis=[2, 3]))
    np.testing.assert_allclose(model(images).numpy(), expected.numpy(), atol=1e-6)
    assert model(paddle.zeros([1, 3, 32, 40])).shape == [1, 16]


def test_drop_path_drops_the_branch_of_whole_samples():
    paddle.seed(0)
    block = Block(8, init_values=0.1, drop_path=0.5)
    images = paddle.randn([64, 8, 3, 3])
    left = images
    dropped = (block(images) == left).numpy().all(axis=(1, 2, 3)).sum()
    assert 16 < dropped < 48
    block.eval()
    assert not (block(images) == left).numpy().all(axis=(1, 2, 3)).any()


def test_dropout_comes_between_norm_and_classifier():
    paddle.seed(0)
    model, features = small(dropout=0.5, num_classes=0), paddle.randn([8, 16, 2, 2])
    found = model.forward_head(features).numpy()
    model.eval()
    expected = 2 * model.forward_head(features).numpy()
    assert 32 < (found == 0).sum() < 96
    np.testing.assert_allclose(found[found != 0], expected[found != 0], rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["MODEL.STAGE_DEPTHS", "[3, 3, 9]"], r"STAGE_DEPTHS is \[3, 3, 9\], expected four numbers"),
        (["MODEL.EMBED_DIMS", "[96]"], r"EMBED_DIMS is \[96\], expected four numbers"),
        (["DATA.IMAGE_SIZE", "31"], "IMAGE_SIZE is 31, ConvNeXt takes images of at least 32 x 32"),
        (["MODEL.PATCH_SIZE", "4"], "MODEL.PATCH_SIZE is 4, but ConvNeXt takes no PATCH_SIZE"),
    ],
)
def test_sizes_that_do_not_fit_are_named(options, message):
    with pytest.raises(InputError, match=message):
        build_model(get_config("convnext_tiny", options))
