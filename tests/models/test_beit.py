"""BEiT against its definition and timm's outputs."""

import itertools

import numpy as np
import paddle
import pytest
from golden.beit import CASES
from support.parity import assert_parity
from support.small_models import small_beit

from config import get_config
from errors import InputError
from models import build_model, create_model
from models.beit import Beit
from models.layers.relative import relative_position_index
from training.optim import decayed_parameters

# timm 1.0.31's.
OPTIONS = [
    {"use_rel_pos_bias": True, "init_values": 0.1},
    {"use_shared_rel_pos_bias": True, "use_abs_pos_emb": True, "global_pool": "token"},
]


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_logits_features_and_gradients_are_timms(tmp_path, name):
    assert_parity(small_beit(name), name, tmp_path)


def test_a_pair_of_tokens_has_the_row_of_its_offset_and_the_class_token_its_own():
    height, width = 3, 2
    places = list(itertools.product(range(height), range(width)))
    rows = {offset: i for i, offset in enumerate(itertools.product(range(-2, 3), range(-1, 2)))}
    expected = np.full((7, 7), 15)  # 5 x 3 offsets come before
    expected[1:, 1:] = [[rows[y - v, x - u] for v, u in places] for y, x in places]
    expected[1:, 0], expected[0, 0] = 16, 17
    np.testing.assert_array_equal(
        relative_position_index((height, width), class_token=True), expected
    )


def test_initialisation_is_timms():
    paddle.seed(0)
    model = small_beit(
        embed_dim=48,
        init_values=1e-5,
        use_abs_pos_emb=True,
        use_shared_rel_pos_bias=True,
        num_classes=100,
    )
    for i, block in enumerate(model.blocks, start=1):
        for layer, std in ((block.attn.qkv, 0.02), (block.mlp.fc1, 0.02)):
            assert float(layer.weight.std()) == pytest.approx(std, rel=0.05)
        for layer in (block.attn.proj, block.mlp.fc2):
            assert float(layer.weight.std()) == pytest.approx(0.02 / (2 * i) ** 0.5, rel=0.05)
        for zero in (
            block.attn.q_bias,
            block.attn.v_bias,
            block.attn.relative_position_bias_table,
            block.mlp.fc1.bias,
        ):
            assert not zero.numpy().any()
        assert (block.gamma_1.numpy() == np.float32(1e-5)).all()
        assert (block.gamma_2.numpy() == np.float32(1e-5)).all()
    assert not model.rel_pos_bias.relative_position_bias_table.numpy().any()
    for token in (model.cls_token, model.pos_embed):
        assert float(token.std()) == pytest.approx(0.02, rel=0.2)
    # HEAD_INIT_SCALE by default
    assert float(model.head.weight.std()) == pytest.approx(0.02 * 0.001, rel=0.05)


def test_drop_path_rises_over_the_blocks_and_dropout_is_theirs_alike():
    model = small_beit(droppath=0.4, dropout=0.1, attention_dropout=0.2, depth=3)
    blocks = model.blocks
    assert {(b.attn.attn_drop.p, b.attn.proj_drop.p, b.mlp.drop.p) for b in blocks} == {
        (0.2, 0.1, 0.1)
    }
    assert model.pos_drop.p == 0.1
    assert [block.drop_path1.drop_prob for block in blocks] == pytest.approx([0.0, 0.2, 0.4])
    assert [block.drop_path2.drop_prob for block in blocks] == pytest.approx([0.0, 0.2, 0.4])


@pytest.mark.parametrize("options", OPTIONS)
def test_every_parameter_is_in_one_of_the_authors_layer_groups(options):
    model = small_beit(**options)
    assert model.layer_groups() == [
        ("cls_token", "pos_embed", "patch_embed"),
        ("blocks.0",),
        ("blocks.1",),
        ("rel_pos_bias", "norm", "fc_norm", "head"),
    ]
    for name, _ in model.named_parameters():
        owners = [
            prefix
            for group in model.layer_groups()
            for prefix in group
            if f"{name}.".startswith(f"{prefix}.")
        ]
        assert len(owners) == 1, name


def test_tokens_have_no_weight_decay_but_tables_have_and_derived_buffers_are_in_no_file():
    model = small_beit(use_shared_rel_pos_bias=True)
    owners = ("rel_pos_bias", "blocks.0.attn", "blocks.1.attn")
    tables = {f"{owner}.relative_position_bias_table" for owner in owners}
    assert model.no_weight_decay() == {"pos_embed", "cls_token"}
    assert tables < set(decayed_parameters(get_config(), model))
    assert tables < set(model.state_dict()) == {name for name, _ in model.named_parameters()}
    assert model.blocks[0].attn.window_size == model.rel_pos_bias.window_size == (4, 4)


def test_reset_classifier_replaces_the_head():
    model = small_beit(head_init_scale=1.0)
    model.eval()
    images = paddle.randn([2, 3, 16, 16])
    model.reset_classifier(5)
    assert (model.classifier_names(), model.head.weight.shape, model(images).shape) == (
        ("head",),
        [24, 5],
        [2, 5],
    )
    assert 0.015 < float(model.head.weight.std()) < 0.025
    model.reset_classifier(0)
    pooled = model.fc_norm(model.forward_features(images)[:, 1:].mean(axis=1))
    np.testing.assert_allclose(model(images).numpy(), pooled.numpy(), atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["MODEL.NUM_HEADS", "7"], "EMBED_DIM 768 is not a multiple of NUM_HEADS 7"),
        (["DATA.IMAGE_SIZE", "220"], "IMAGE_SIZE 220 is not a multiple of PATCH_SIZE 16"),
        (["MODEL.WINDOW_SIZE", "7"], "MODEL.WINDOW_SIZE is 7, but BEiT takes no WINDOW_SIZE"),
    ],
)
def test_sizes_that_do_not_fit_are_named(options, message):
    with pytest.raises(InputError, match=message):
        build_model(get_config("beit_base_patch16_224", options))


def test_images_of_another_size_are_refused():
    with pytest.raises(InputError, match="the model takes images of 16 x 16, found 32 x 16"):
        small_beit()(paddle.zeros([1, 3, 32, 16]))


def test_the_shipped_models_are_built_by_name():
    model = create_model(
        "beit_large_patch16_224", image_size=32, depth=2, embed_dim=48, num_heads=3, num_classes=100
    )
    assert type(model) is Beit
    assert model.pos_embed is None
    assert model.rel_pos_bias is None
    assert model.blocks[1].drop_path1.drop_prob == 0.2
    assert float(model.head.weight.std()) == pytest.approx(2e-5, rel=0.1)
