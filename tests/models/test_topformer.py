"""TopFormer against the same layers in PyTorch."""

import numpy as np
import paddle
import pytest
from golden.topformer import CASES, array
from support.parity import assert_parity
from support.small_models import small_topformer

from config import get_config
from errors import InputError
from models import build_model


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_logits_features_and_gradients_are_the_references(tmp_path, name):
    assert_parity(small_topformer(name), name, tmp_path, array)


def test_the_places_of_the_attention_follow_the_last_stage():
    for stride, places in ((1, [3, 4]), (2, [2, 2]), (3, [1, 2])):
        model = small_topformer(pool_stride=stride)
        model.eval()
        images = paddle.to_tensor(array("images", (1, 3, 70, 100)))
        assert model.forward_features(images).shape == [1, 80, *places]
        assert model.feature_info[-1]["reduction"] == 32 * stride


def test_drop_path_rises_over_the_blocks_of_attention():
    model = small_topformer(droppath=0.3, depth=4)
    rates = [block.drop_path1.drop_prob for block in model.blocks]
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert rates == [block.drop_path2.drop_prob for block in model.blocks]


def test_layer_groups_are_in_order_and_hold_every_parameter_once():
    model = small_topformer()
    groups = model.layer_groups()
    assert groups[:3] == [("stem",), ("stages.0.0",), ("stages.0.1",)]
    assert groups[-3:] == [("blocks.0",), ("blocks.1",), ("head",)]
    for name, _ in model.named_parameters():
        assert sum(name.startswith(f"{prefix}.") for group in groups for prefix in group) == 1, name


def test_images_of_any_size_are_taken():
    model = small_topformer(image_size=1)
    model.eval()
    for side in (1, 2, 33, 65):
        logits = model(paddle.ones([1, 3, side, side + 1]))
        assert np.isfinite(logits.numpy()).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["MODEL.EMBED_DIMS", "[8, 8]"], r"EMBED_DIMS is \[8, 8\], expected four numbers"),
        (["MODEL.KERNEL_SIZE", "[3, 5]"], r"KERNEL_SIZE is \[3, 5\], expected 10 numbers: one per"),
        (["MODEL.EXPAND_RATIO", "[6]"], r"EXPAND_RATIO is \[6\], expected 10 numbers: one per"),
    ],
)
def test_sizes_that_do_not_fit_are_named(options, message):
    with pytest.raises(InputError, match=message):
        build_model(get_config("topformer_base", options))
