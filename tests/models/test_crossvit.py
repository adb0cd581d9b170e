"""CrossViT against timm's outputs and numbers."""

import numpy as np
import paddle
import pytest
from golden.crossvit import CASES
from golden.make_names_vit import values
from support.parity import assert_parity
from support.small_models import small_crossvit

from config import get_config
from errors import InputError
from inference.visualization.attention import attention, has_rollout
from inference.visualization.cam import cam
from inference.visualization.positions import similarities
from models import build_model
from models.crossvit import CrossViT


class Joined(CrossViT):
    """The features of both branches are one tensor, as golden/crossvit.py records them."""

    def forward(self, x):
        return self.forward_head(CrossViT.forward_features(self, x))

    def forward_features(self, x):
        return paddle.concat([one.flatten(1) for one in CrossViT.forward_features(self, x)], axis=1)

    def _collect(self, *given):
        features, found = CrossViT._collect(self, *given)
        return paddle.concat([one.flatten(1) for one in features], axis=1), found


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_logits_features_and_gradients_are_timms(tmp_path, name):
    model = small_crossvit(name)
    model.__class__ = Joined
    assert_parity(model, name, tmp_path, values)


def test_initialisation_is_timms():
    paddle.seed(0)
    model = CrossViT(
        240, depth=1, embed_dims=(64, 128), num_heads=(2, 4), num_classes=300, multi_conv=True
    )
    block = model.blocks[0]
    linears = [
        block.blocks[1][0].attn.qkv,
        block.blocks[0][0].mlp.fc2,
        block.projs[0][2],
        block.revert_projs[0][2],
    ]
    for layer in (*linears, block.fusion[0].attn.wk, *model.head):
        assert float(layer.weight.std()) == pytest.approx(0.02, rel=0.05)
        assert not layer.bias.numpy().any()
    for layer, fan_in in (
        (model.patch_embed[1].proj[0], 3 * 49),
        (model.patch_embed[0].proj[4], 32 * 9),
    ):
        assert float(layer.weight.abs().max()) == pytest.approx(fan_in**-0.5, rel=0.02)
    for tokens in (model.cls_token_1, model.pos_embed_0, model.pos_embed_1):
        assert float(tokens.std()) == pytest.approx(0.02, rel=0.15)
    norms = (
        model.norm[0],
        block.projs[1][0],
        block.revert_projs[1][0],
        block.fusion[1].norm1,
        block.blocks[0][0].norm1,
    )
    assert {norm._epsilon for norm in norms} == {1e-6}


def test_drop_path_rises_over_all_blocks_and_dropout_is_theirs_alike():
    model = small_crossvit(droppath=0.3, dropout=0.1, attention_dropout=0.2)
    found = []
    for stage in model.blocks:
        fine, coarse = ([block.drop_path1.drop_prob for block in branch] for branch in stage.blocks)
        found.append((*fine, *coarse, *(block.drop_path.drop_prob for block in stage.fusion)))
    # Both branches' blocks begin at one rate; class tokens meet at the last one.
    np.testing.assert_allclose(found, [(0, 0, 0.1, 0.1, 0.1), (0.2, 0.2, 0.3, 0.3, 0.3)])
    for attn in (model.blocks[0].blocks[0][0].attn, model.blocks[1].fusion[1].attn):
        assert (attn.attn_drop.p, attn.proj_drop.p) == (0.2, 0.1)
    assert (model.pos_drop.p, model.blocks[0].blocks[1][1].mlp.drop.p) == (0.1, 0.1)


def test_layer_groups_are_in_order():
    model = small_crossvit()
    tokens = ("cls_token_0", "cls_token_1", "pos_embed_0", "pos_embed_1")
    assert model.layer_groups() == [
        (*tokens, "patch_embed"),
        ("blocks.0",),
        ("blocks.1",),
        ("norm", "head"),
    ]
    assert model.no_weight_decay() == set(tokens)


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_each_branch_has_a_classifier(pool):
    model = small_crossvit(global_pool=pool)
    model.eval()
    images = paddle.to_tensor(values("images", (2, 3, 30, 60)))
    pooled = [
        one[:, 0] if pool == "token" else one[:, 1:].mean(axis=1)
        for one in model.forward_features(images)
    ]
    model.reset_classifier(7)
    assert [head.weight.shape for head in model.head] == [[8, 7], [12, 7]]
    mean = (model.head[0](pooled[0]) + model.head[1](pooled[1])) / 2
    np.testing.assert_allclose(model(images).numpy(), mean.numpy(), atol=1e-6)
    model.reset_classifier(0)
    np.testing.assert_allclose(
        model(images).numpy(), np.concatenate([one.numpy() for one in pooled], 1), atol=1e-6
    )


def test_what_it_looks_at_has_each_branchs_grid():
    model = small_crossvit()
    model.eval()
    image = paddle.to_tensor(values("images", (1, 3, 30, 60)))
    # By stage: the fine branch's block, the coarse one's two; the fine token among coarse patches,
    # and the other way.
    grids = [(2, 5, 10), (3, 3, 6), (3, 3, 6), (3, 3, 6), (2, 5, 10)]
    assert [attention(model, image, block).shape for block in range(10)] == 2 * grids
    assert float(attention(model, image, 9).sum()) < 2  # the class token itself has the rest
    assert cam(model, image, None).shape == (3, 6)
    assert not has_rollout(model)
    assert model.cls_token is model.cls_token_0
    model = small_crossvit(global_pool="avg")
    model.eval()
    assert cam(model, image, None).shape == (3, 6)
    places = model.pos_embed[0, 1:].numpy().reshape(5, 10, 8)
    expected = (
        places[1, 2] @ places[4, 3] / np.linalg.norm(places[1, 2]) / np.linalg.norm(places[4, 3])
    )
    assert similarities(model)[1, 2, 4, 3] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["MODEL.NUM_HEADS", "[4]"],
            r"NUM_HEADS is \[4\], expected two numbers: of the fine and of the coarse patches",
        ),
        (
            ["MODEL.BRANCH_DEPTHS", "[1, 2, 3]"],
            r"BRANCH_DEPTHS is \[1, 2, 3\], expected two numbers",
        ),
        (
            ["MODEL.NUM_HEADS", "[4, 5]"],
            "EMBED_DIMS has 256, not a multiple of its NUM_HEADS 5",
        ),
        (
            ["MODEL.PATCH_SIZE", "[8, 16]"],
            "MULTI_CONV supports PATCH_SIZE 12 and 16 with EMBED_DIMS that are multiples of 4, found 8 with 128",
        ),
        (
            ["MODEL.IMAGE_SCALES", "[1, 0.001]"],
            "IMAGE_SCALES reduces images to 0 x 0 pixels; raise it",
        ),
        (
            ["DATA.IMAGE_SIZE", "256"],
            "times IMAGE_SCALES is not a multiple of PATCH_SIZE 12 and 16; choose one that is: 240 or 360",
        ),
        (
            ["DATA.IMAGE_SIZE", "252"],
            "IMAGE_SIZE 252 times IMAGE_SCALES is not a multiple of PATCH_SIZE 12 and 16",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_named(options, message):
    with pytest.raises(InputError, match=message):
        build_model(get_config("crossvit_9_dagger_224", options))
