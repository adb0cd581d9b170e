"""BoTNet against timm's outputs."""

import numpy as np
import paddle
import pytest
from golden.botnet import CASES
from golden.halonet import array
from support.parity import assert_parity
from support.small_models import small_botnet

import ops
from config import get_config
from errors import InputError
from models import build_model, create_model
from models.botnet import Attention, BoTNet


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_logits_features_and_gradients_are_timms(tmp_path, name):
    assert_parity(small_botnet(name), name, tmp_path, array)


@pytest.mark.smoke
@pytest.mark.parametrize(("stride", "scaled"), [(1, True), (2, False)])
def test_attention_is_the_same_with_and_without_operators(compiled_operators, stride, scaled):
    layer = Attention(8, 2, side=4, stride=stride, scale_pos_embed=scaled)
    found = []
    x = paddle.randn([3, 8, 4, 4])
    x.stop_gradient = False
    for enabled in (True, False):
        ops.enable(enabled)
        output = layer(x)
        found.append([output, *paddle.grad([(output**2).sum()], [x, *layer.parameters()])])
    for own, plain in zip(*found, strict=True):
        np.testing.assert_allclose(
            own.numpy(), plain.numpy(), rtol=0, atol=1e-5 * np.abs(plain.numpy()).max()
        )


def test_scores_of_positions_are_scaled_where_it_says_so():
    layer = Attention(8, 2, side=4, stride=1, scale_pos_embed=False)
    scaled = Attention(8, 2, side=4, stride=1, scale_pos_embed=True)
    state = layer.state_dict()
    # The square root of a head's four channels.
    for name in ("pos_embed.height_rel", "pos_embed.width_rel"):
        state[name] = 2 * state[name]
    scaled.set_state_dict(state)
    x = paddle.randn([2, 8, 4, 4])
    np.testing.assert_allclose(layer(x).numpy(), scaled(x).numpy(), atol=1e-6)


def test_paddlevits_last_stage_keeps_its_places():
    config = get_config("botnet50", ["DATA.IMAGE_SIZE", "64", "MODEL.STAGE_DEPTHS", "[1, 1, 1, 2]"])
    model = build_model(config)
    model.eval()
    maps = model.forward_intermediates(paddle.zeros([1, 3, 64, 64]), intermediates_only=True)
    assert [one.shape[2] for one in maps] == [32, 16, 8, 4, 4]
    assert [info["reduction"] for info in model.feature_info] == [2, 4, 8, 16, 16]
    assert model.feature_info[0]["module"] == "stem"
    # The activation follows the convolution of the shortcuts beside attention.
    assert model.stages[3][0].shortcut.act is not None
    assert model.stages[2][0].shortcut.act is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_size": (64, 32)}, "IMAGE_SIZE is 64 x 32, BoTNet takes square images"),
        ({"image_size": 48}, "IMAGE_SIZE 48 is not a multiple of 32"),
        ({"last_stride": 3}, "LAST_STRIDE is 3, expected 1 or 2"),
        ({"stem_dim": 12}, "STEM_DIM is 12, expected a multiple of 8"),
        ({"embed_dims": (32, 64, 64, 98)}, r"EMBED_DIMS is \[32, 64, 64, 98\], expected multiples"),
        (
            {"num_heads": (0, 2, 2, 0)},
            "NUM_HEADS has 0 for stage 3, whose attention has 24 channels",
        ),
        ({"num_heads": (0, 2, 2)}, "NUM_HEADS is .* expected 4 numbers"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        small_botnet(**options)


def test_images_of_another_size_are_refused():
    with pytest.raises(InputError, match="the model takes images of 64 x 64, found 32 x 32"):
        small_botnet()(paddle.zeros([1, 3, 32, 32]))


def test_timms_models_have_timms_parameters():
    with paddle.LazyGuard():
        model = create_model("botnet26t_256")
    assert isinstance(model, BoTNet)
    assert sum(parameter.size for parameter in model.parameters()) == 12_488_672
