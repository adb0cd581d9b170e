"""Swin Transformer V2 against its definition and timm's outputs."""

import math

import numpy as np
import paddle
import pytest
from golden.swinv2 import CASES, array
from support.parity import assert_parity
from support.small_models import small_swinv2

from config import get_config
from errors import InputError
from models import build_model
from models.layers.attention import l2_normalize
from models.swinv2 import SwinTransformerV2, relative_coords_table


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_logits_features_and_gradients_are_timms(tmp_path, name):
    assert_parity(small_swinv2(name), name, tmp_path, array)


def test_offsets_are_measured_by_the_window_of_the_pre_training():
    own = relative_coords_table((4, 3), (4, 3))
    larger = relative_coords_table((4, 4), (2, 2))
    assert own.shape == (7 * 5, 2)
    np.testing.assert_allclose(
        own[[0, -1]], [[-math.log(9, 8)] * 2, [math.log(9, 8)] * 2], rtol=1e-6
    )
    np.testing.assert_allclose(
        own[2 * 5 + 3], [-math.log(1 + 8 / 3, 8), math.log(1 + 8 / 2, 8)], rtol=1e-6
    )
    assert larger[-1] == pytest.approx([math.log(1 + 8 * 3, 8)] * 2)
    assert not relative_coords_table((1, 1), (1, 1)).any()
    assert small_swinv2().pretrained_window_sizes == [3, 4]
    assert small_swinv2("swinv2_plain").pretrained_window_sizes == [
        4,
        4,
        2,
    ]  # the last map is 2 x 2


def test_a_vector_of_padding_gives_no_gradient():
    x = paddle.to_tensor([[3.0, 4.0], [0.0, 0.0]], stop_gradient=False)
    y = l2_normalize(x)
    y.sum().backward()
    np.testing.assert_allclose(y.numpy(), [[0.6, 0.8], [0, 0]], rtol=1e-6)
    np.testing.assert_allclose(x.grad.numpy(), [[4 / 125, -3 / 125], [0, 0]], rtol=1e-5, atol=1e-7)
    half = paddle.to_tensor(np.full((1, 3), 300, np.float16))  # its square is beyond float16
    np.testing.assert_allclose(l2_normalize(half).numpy(), np.full((1, 3), 3**-0.5), rtol=1e-6)


def test_the_bias_lies_between_0_and_16_and_keys_have_none():
    attention = small_swinv2().layers[0].blocks[0].attn
    for weight, most in ((1e3, 16), (-1e3, 0)):
        attention.cpb_mlp[2].weight.set_value(paddle.full([512, 1], weight))
        bias = attention.position_bias().numpy()
        assert (bias.max(), bias.min()) == (max(most, 8), min(most, 8))
        # offset 0: the MLP's bias is 0 at first
        assert (np.diagonal(bias, axis1=1, axis2=2) == 8).all()
    attention.qkv.weight.set_value(paddle.zeros([8, 24]))
    attention.q_bias.set_value(paddle.full([8], 2.0))
    attention.v_bias.set_value(paddle.full([8], 3.0))
    np.testing.assert_array_equal(
        attention._project(paddle.ones([8])).numpy(), [2] * 8 + [0] * 8 + [3] * 8
    )


def test_initialisation_is_timms():
    paddle.seed(0)
    model = SwinTransformerV2(
        image_size=64, embed_dim=48, stage_depths=(1, 1), num_heads=(12, 24), num_classes=50
    )
    block = model.layers[0].blocks[0]
    for layer in (
        block.attn.qkv,
        block.attn.cpb_mlp[2],
        model.layers[1].downsample.reduction,
        model.head.fc,
    ):
        assert float(layer.weight.std()) == pytest.approx(0.02, rel=0.03)
    assert not any(
        one.numpy().any()
        for one in (block.attn.q_bias, block.attn.v_bias, block.attn.cpb_mlp[0].bias)
    )
    assert (block.attn.logit_scale.numpy() == np.float32(math.log(10))).all()
    x = paddle.randn([2, 16, 16, 48])
    assert (block(x) == x).numpy().all()  # the norms of both branches are 0
    assert (model.layers[1].downsample.norm.weight.numpy() == 1).all()


def test_drop_path_rises_over_all_blocks_and_dropout_is_theirs_alike():
    model = small_swinv2("swinv2_plain", droppath=0.4, dropout=0.1, attention_dropout=0.2)
    blocks = [block for stage in model.layers for block in stage.blocks]
    assert {(b.attn.attn_drop.p, b.attn.proj_drop.p, b.mlp.drop.p) for b in blocks} == {
        (0.2, 0.1, 0.1)
    }
    for rates in (
        [block.drop_path1.drop_prob for block in blocks],
        [block.drop_path2.drop_prob for block in blocks],
    ):
        assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])


def test_layer_groups_are_swins_and_what_gives_the_scores_has_no_weight_decay():
    model = small_swinv2()
    assert model.layer_groups() == [
        ("patch_embed",),
        ("layers.0.blocks.0",),
        ("layers.0.blocks.1", "layers.1.downsample"),
        ("layers.1.blocks.0",),
        ("norm", "head"),
    ]
    kinds = ("logit_scale", "cpb_mlp.0.weight", "cpb_mlp.0.bias", "cpb_mlp.2.weight")
    blocks = ("layers.0.blocks.0", "layers.0.blocks.1", "layers.1.blocks.0")
    assert model.no_weight_decay() == {f"{block}.attn.{kind}" for block in blocks for kind in kinds}
    # no derived buffers
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


def test_reset_classifier_replaces_the_head():
    model = small_swinv2()
    model.eval()
    images = paddle.randn([2, 3, 36, 20])
    model.reset_classifier(5)
    assert (model.head.fc.weight.shape, model(images).shape) == ([16, 5], [2, 5])
    assert 0.015 < float(model.head.fc.weight.std()) < 0.025
    model.reset_classifier(0)
    features = model.forward_features(images)
    assert features.shape == [2, 5, 3, 16]
    np.testing.assert_allclose(model(images).numpy(), features.mean(axis=[1, 2]).numpy(), atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["MODEL.PRETRAINED_WINDOW_SIZES", "[12, 6]"],
            r"PRETRAINED_WINDOW_SIZES is \[12, 6\], expected 4 numbers: one per stage, as in STAGE_DEPTHS",
        ),
        (["MODEL.NUM_HEADS", "[3, 6, 12]"], r"NUM_HEADS is \[3, 6, 12\], expected 4 numbers"),
        (["DATA.IMAGE_SIZE", "254"], "IMAGE_SIZE 254 is not a multiple of PATCH_SIZE 4"),
    ],
)
def test_sizes_that_do_not_fit_are_named(options, message):
    with pytest.raises(InputError, match=message):
        build_model(get_config("swinv2_tiny_window8_256", options))


@pytest.mark.smoke
def test_what_is_deployed_computes_no_bias_anew():
    model = small_swinv2("swinv2")
    model.eval()
    deployed = model.inference_model()
    assert not any("cpb_mlp" in name for name, _ in deployed.named_parameters())
    assert any("cpb_mlp" in name for name, _ in model.named_parameters())
    assert deployed.inference_model() is deployed
    images = paddle.to_tensor(array("images", (2, 3, *model.image_size)))
    np.testing.assert_array_equal(deployed(images).numpy(), model(images).numpy())
