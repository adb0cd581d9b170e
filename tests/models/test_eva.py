"""EVA-02 and DINOv3 against timm's outputs."""

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.convolutions import array
from golden.eva import CASES, LARGER
from support.parity import assert_parity, load_formula
from support.small_models import small_eva

from config import get_config
from errors import InputError
from inference.visualization.attention import attention, rollout
from models import build_model
from models.layers.rotary import RotaryEmbedding, rotate
from weights.arrays import to_bfloat16


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_logits_features_and_gradients_are_timms(tmp_path, name):
    assert_parity(small_eva(name), name, tmp_path, array)


@pytest.mark.parametrize("name", ["eva_dinov3", "eva_gated"])
def test_images_of_other_sizes_give_timms_logits(tmp_path, name):
    model = load_formula(small_eva(name), tmp_path, array)
    expected = np.load(ROOT / "tests" / "golden" / f"{name}.npz")["larger"]
    found = model(paddle.to_tensor(array("images", (2, 3, *LARGER)))).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.ptp(expected), rtol=0)


def test_training_without_rates_gives_the_evaluations_logits():
    for name in CASES:
        model = small_eva(name)
        images = paddle.to_tensor(array("images", (2, 3, *model.image_size)))
        model.train()
        found = model(images).numpy()
        model.eval()
        np.testing.assert_allclose(found, model(images).numpy(), atol=1e-6)


def test_places_turn_queries_and_keys_by_their_distance():
    """A score depends on how far two places are from each other, not on where they are; other
    tokens aren't turned.
    """
    table = RotaryEmbedding("cat", (4, 5), head_dim=8, temperature=100.0, prefix=2)((4, 5))
    q, k = (paddle.to_tensor(array(name, (1, 1, 1, 8))).expand([1, 22, 1, 8]) for name in "qk")
    for halves in (False, True):
        one, other = (rotate(x, table, halves).numpy()[0, :, 0] for x in (q, k))
        scores = (one @ other.T)[2:, 2:].reshape(4, 5, 4, 5)
        np.testing.assert_allclose(scores[0, 0, 2, 1], scores[1, 3, 3, 4], rtol=1e-5)
        np.testing.assert_allclose(scores[2, 1, 0, 0], scores[3, 4, 1, 3], rtol=1e-5)
        assert abs(scores[0, 0, 2, 1] - scores[0, 0, 1, 2]) > 1e-3
        assert (one[:2] == q.numpy()[0, :2, 0]).all()
        # turned, not stretched
        np.testing.assert_allclose((one**2).sum(1), float((q[0, 0] ** 2).sum()), rtol=1e-5)


def test_half_queries_are_turned_in_float32_and_stay_half():
    table = RotaryEmbedding("dinov3", (2, 2), head_dim=8, temperature=100.0)((2, 2))
    x = paddle.to_tensor(array("images", (1, 5, 1, 8))).astype("bfloat16")
    found = rotate(x, table, True)
    assert found.dtype == paddle.bfloat16
    expected = rotate(x.astype("float32"), table, True).astype("bfloat16").astype("float32")
    np.testing.assert_array_equal(found.astype("float32").numpy(), expected.numpy())


def test_periods_are_rounded_to_bfloat16():
    # of the ties the even one
    values = np.float32([1, 3.1622777, -31.622776, 1.00390625, 1.01171875, 0])
    np.testing.assert_array_equal(
        to_bfloat16(values), np.float32([1, 3.15625, -31.625, 1, 1.015625, 0])
    )


def test_initialisation_is_timms():
    paddle.seed(0)
    model = small_eva(
        "eva_gated",
        embed_dim=48,
        num_classes=100,
        qkv_fused=False,
        init_values=1e-5,
        head_init_scale=0.001,
    )
    for i, block in enumerate(model.blocks, start=1):
        for layer in (block.attn.q_proj, block.attn.k_proj, block.mlp.fc1_g, block.mlp.fc1_x):
            assert float(layer.weight.std()) == pytest.approx(0.02, rel=0.06)
        for layer in (block.attn.proj, block.mlp.fc2):
            assert float(layer.weight.std()) == pytest.approx(0.02 / (2 * i) ** 0.5, rel=0.06)
        for zero in (
            block.attn.q_proj.bias,
            block.attn.v_proj.bias,
            block.mlp.fc1_g.bias,
            block.mlp.fc2.bias,
        ):
            assert not zero.numpy().any()
        assert (block.gamma_1.numpy() == np.float32(1e-5)).all()
        assert (block.gamma_2.numpy() == np.float32(1e-5)).all()
    assert not small_eva().blocks[0].attn.q_bias.numpy().any()
    assert float(small_eva().pos_embed.std()) == pytest.approx(0.02, rel=0.1)
    for token in (model.cls_token, model.reg_token):
        assert float(token.std()) == pytest.approx(0.02, rel=0.3)
    assert float(model.head.weight.std()) == pytest.approx(0.02 * 0.001, rel=0.05)


def test_drop_path_rises_over_the_blocks_and_dropout_is_theirs_alike():
    model = small_eva("eva_gated", droppath=0.4, dropout=0.1, attention_dropout=0.2, depth=3)
    assert {(b.attn.attn_drop.p, b.attn.proj_drop.p, b.mlp.drop.p) for b in model.blocks} == {
        (0.2, 0.1, 0.1)
    }
    assert (model.pos_drop.p, small_eva(dropout=0.1).blocks[0].mlp.drop.p) == (0.1, 0.1)
    assert [block.drop_path1.drop_prob for block in model.blocks] == pytest.approx([0.0, 0.2, 0.4])
    assert [block.drop_path2.drop_prob for block in model.blocks] == pytest.approx([0.0, 0.2, 0.4])


def test_layer_groups_are_the_authors_and_tokens_have_no_weight_decay():
    expected = [
        ("cls_token", "reg_token", "pos_embed", "patch_embed"),
        ("blocks.0",),
        ("blocks.1",),
        ("norm", "fc_norm", "head"),
    ]
    for name in CASES:
        model = small_eva(name)
        assert model.layer_groups() == expected
        assert model.no_weight_decay() == {"pos_embed", "cls_token", "reg_token"}
        # no angles in files
        assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


def test_the_classifier_is_exchangeable():
    model = small_eva("eva_dinov3")
    model.eval()
    images = paddle.to_tensor(array("images", (2, 3, 16, 16)))
    model.reset_classifier(5)
    assert (model.classifier_names(), model(images).shape) == (("head",), [2, 5])
    model.reset_classifier(0)
    expected = model.forward_features(images)[:, 3:].mean(axis=1)
    np.testing.assert_allclose(model(images).numpy(), expected.numpy(), atol=1e-6)


def test_intermediates_and_attention_follow_the_images_size():
    model = small_eva("eva_dinov3")
    model.eval()
    image = paddle.to_tensor(array("images", (1, 3, *LARGER)))
    maps = model.forward_intermediates(image, intermediates_only=True)
    assert [one.shape for one in maps] == [[1, 24, 6, 2]] * 2
    found = attention(model, image)
    assert (found.shape, rollout(model, image).shape) == ((3, 6, 2), (6, 2))
    assert (found > 0).all()
    assert model(paddle.zeros([1, 3, 16, 16])).shape == [1, 7]
    assert model.patch_embed.grid_size == (4, 4)


def test_images_that_do_not_fit_are_named():
    model = small_eva("eva_dinov3")
    assert (model.input_sizes, small_eva().input_sizes) == (
        "images of multiples of 4 pixels",
        "images of 16 x 24",
    )
    for height, width in ((18, 16), (16, 18), (0, 4)):
        with pytest.raises(
            InputError, match=f"takes images of multiples of 4 pixels, found {height} x {width}"
        ):
            model(paddle.zeros([1, 3, height, width]))
    with pytest.raises(InputError, match="the model takes images of 16 x 24, found 24 x 24"):
        small_eva()(paddle.zeros([1, 3, 24, 24]))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "eva02_tiny_patch14_224",
            ["MODEL.NUM_HEADS", "7"],
            "EMBED_DIM 192 is not a multiple of NUM_HEADS 7",
        ),
        (
            "eva02_tiny_patch14_224",
            ["MODEL.NUM_HEADS", "32"],
            "EMBED_DIM / NUM_HEADS is 6, expected a multiple of 4",
        ),
        (
            "eva02_tiny_patch14_224",
            ["DATA.IMAGE_SIZE", "220"],
            "IMAGE_SIZE 220 is not a multiple of PATCH_SIZE 14",
        ),
        (
            "eva02_base_patch14_224",
            ["MODEL.SWIGLU_MLP", "False"],
            "SWIGLU_MLP is False, but SWIGLU_ALIGN_TO and SCALE",
        ),
        (
            "vit_small_patch16_dinov3",
            ["MODEL.MLP_RATIO", "0.001"],
            "MLP_RATIO is 0.001, too low for 384",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_named(name, options, message):
    with pytest.raises(InputError, match=message):
        build_model(get_config(name, options))
