"""PiT against timm's outputs and numbers."""

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.make_names_vit import values
from golden.pit import CASES
from support.parity import assert_parity, load_formula
from support.small_models import small_pit

from config import get_config
from errors import InputError
from inference.visualization.attention import attention, has_rollout
from inference.visualization.cam import cam
from inference.visualization.positions import similarities
from models import build_model
from models.pit import PoolingVisionTransformer
from weights import load_weights, save_weights
from weights.resize import bicubic_matrix


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_logits_features_and_gradients_are_timms(tmp_path, name):
    assert_parity(small_pit(name), name, tmp_path, values)


def test_a_distilled_model_trains_both_heads_when_told(tmp_path):
    model = load_formula(small_pit("pit_distilled"), tmp_path, values)
    golden = np.load(ROOT / "tests" / "golden" / "pit_distilled.npz")
    images = paddle.to_tensor(values("images", (2, 3, *model.image_size)))
    model.train()
    mean = model(images).numpy()
    model.distilled_training = True
    logits, distilled = (out.numpy() for out in model(images))
    for found, key in ((logits, "train_logits"), (distilled, "train_logits_dist")):
        np.testing.assert_allclose(found, golden[key], atol=1e-5 * np.ptp(golden[key]), rtol=0)
    np.testing.assert_allclose(mean, (logits + distilled) / 2, atol=1e-6 * np.ptp(mean), rtol=0)
    assert model.classifier_names() == ("head", "head_dist")


def test_initialisation_is_timms():
    paddle.seed(0)
    model = PoolingVisionTransformer(
        64, num_classes=200, base_dims=(32, 32, 32), stage_depths=(1, 1, 1)
    )
    block = model.transformers[1].blocks[0]
    pool = model.transformers[2].pool
    inputs = {
        model.patch_embed.conv: 3 * 16 * 16,
        pool.conv: 9,
        pool.fc: 128,
        block.attn.qkv: 128,
        block.mlp.fc2: 512,
    }
    for layer, fan_in in {**inputs, model.head: 256}.items():  # PyTorch's own, uniform
        for parameter in (layer.weight, layer.bias):
            assert float(parameter.abs().max()) == pytest.approx(fan_in**-0.5, rel=0.1)
        assert float(layer.weight.std()) == pytest.approx((3 * fan_in) ** -0.5, rel=0.05)
    assert float(model.pos_embed.std()) == pytest.approx(0.02, rel=0.05)
    assert float(model.cls_token.std()) == pytest.approx(0.02, rel=0.3)
    assert model.norm._epsilon == block.norm1._epsilon == 1e-6


def test_drop_path_rises_over_all_blocks_and_dropout_is_theirs_alike():
    model = small_pit(droppath=0.3, dropout=0.1, attention_dropout=0.2)
    calls = []
    for block in model.blocks:
        for layer in (
            block.attn.attn_drop,
            block.attn.proj_drop,
            block.drop_path1,
            block.mlp.drop,
            block.drop_path2,
        ):
            layer.register_forward_post_hook(
                lambda layer, *_: calls.append(getattr(layer, "p", "path"))
            )
    model(paddle.zeros([1, 3, 44, 44]))
    assert calls == 4 * [0.2, 0.1, "path", 0.1, 0.1, "path"]
    assert model.pos_drop.p == 0.1
    for rates in zip(
        *((b.drop_path1.drop_prob, b.drop_path2.drop_prob) for b in model.blocks), strict=True
    ):
        assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3])


def test_layer_groups_are_in_order_and_hold_every_parameter_once():
    model = small_pit(distilled=True)
    groups = model.layer_groups()
    assert groups == [
        ("cls_token", "pos_embed", "patch_embed"),
        ("transformers.0.blocks.0",),
        ("transformers.1.blocks.0", "transformers.1.pool"),
        ("transformers.1.blocks.1",),
        ("transformers.2.blocks.0", "transformers.2.pool"),
        ("norm", "head", "head_dist"),
    ]
    for name, _ in model.named_parameters():
        assert (
            sum(f"{name}.".startswith(f"{prefix}.") for group in groups for prefix in group) == 1
        ), name
    assert model.no_weight_decay() == {"pos_embed", "cls_token"}


def test_the_classifier_reads_the_normalised_class_token():
    model = small_pit()
    model.eval()
    images = paddle.to_tensor(values("images", (2, 3, 44, 44)))
    features = model.forward_features(images)
    assert features.shape == [2, 1, 24]
    model.reset_classifier(7)
    assert model(images).shape == [2, 7]
    model.reset_classifier(0)
    np.testing.assert_allclose(model(images).numpy(), features[:, 0].numpy(), atol=1e-6)
    maps = model.forward_intermediates(
        images, norm=True, return_prefix_tokens=True, intermediates_only=True
    )
    assert [(one.shape, token.shape) for one, token in maps] == [
        ([2, 8, 10, 10], [2, 1, 8]), ([2, 8, 5, 5], [2, 1, 8]), ([2, 24, 3, 3], [2, 1, 24]),
    ]  # fmt: skip


def test_positions_fit_another_image(tmp_path):
    model = small_pit()
    larger = small_pit(image_size=(36, 44))
    save_weights(model, tmp_path / "model.safetensors")
    assert load_weights(larger, tmp_path).resized == ["pos_embed resized from 10 x 10 to 8 x 10"]
    expected = np.einsum("nr,drc->dnc", bicubic_matrix(10, 8), model.pos_embed[0].numpy())
    np.testing.assert_allclose(larger.pos_embed[0].numpy(), expected, atol=1e-6)
    assert larger(paddle.zeros([1, 3, 36, 44])).shape == [1, 5]


def test_what_it_looks_at_has_each_stages_grid():
    model = small_pit("pit_distilled")
    model.eval()
    image = paddle.to_tensor(values("images", (1, 3, 23, 30)))
    assert [attention(model, image, block).shape for block in (0, 2)] == [(2, 6, 8), (3, 3, 4)]
    assert cam(model, image, None).shape == (3, 4)
    assert not has_rollout(model)
    places = model.pos_embed[0].numpy()
    expected = (
        places[:, 1, 2]
        @ places[:, 4, 3]
        / np.linalg.norm(places[:, 1, 2])
        / np.linalg.norm(places[:, 4, 3])
    )
    assert similarities(model)[1, 2, 4, 3] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["MODEL.NUM_HEADS", "[2, 4]"],
            r"NUM_HEADS is \[2, 4\], expected 3 numbers: one per stage of STAGE_DEPTHS",
        ),
        (["MODEL.BASE_DIMS", "[32]"], r"BASE_DIMS is \[32\], expected 3 numbers"),
        (
            ["MODEL.NUM_HEADS", "[2, 5, 8]"],
            r"NUM_HEADS is \[64, 160, 256\], expected each a multiple of the one before",
        ),
        (
            ["DATA.IMAGE_SIZE", "15"],
            "IMAGE_SIZE 15 x 15 is smaller than PATCH_SIZE 16; choose a larger one",
        ),
        (["MODEL.EMBED_DIM", "64"], "MODEL.EMBED_DIM is 64, but PiT takes no EMBED_DIM"),
    ],
)
def test_sizes_that_do_not_fit_are_named(options, message):
    with pytest.raises(InputError, match=message):
        build_model(get_config("pit_ti_224", options))
