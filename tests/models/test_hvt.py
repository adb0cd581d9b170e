"""HVT against the authors' outputs and numbers."""

import numpy as np
import paddle
import pytest
from golden.hvt import CASES
from golden.trained import array
from support.parity import assert_as_the_authors
from support.small_models import small_hvt

from config import get_config
from errors import InputError
from models import build_model, create_model


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_are_the_authors(tmp_path, name):
    assert_as_the_authors(small_hvt(name), name, tmp_path, array)


@paddle.no_grad()
def test_windows_of_three_tokens_keep_the_largest():
    block = small_hvt().blocks[0]
    block.eval()
    x = paddle.randn([2, 24, 24])
    tokens = super(type(block), block).forward(x).numpy()
    # 24 tokens: the last one is in no window
    windows = [tokens[:, start : start + 3].max(axis=1) for start in range(0, 22, 2)]
    expected = np.stack(windows, axis=1) + block.pos_embed.numpy()
    assert expected.shape == (2, 11, 24)
    np.testing.assert_array_equal(block(x).numpy(), expected)


def test_every_so_many_th_block_pools():
    names = {"hvt_s0_patch16_224": [], "hvt_s1_patch16_224": [97], "hvt_s2_patch16_224": [97, 48]}
    names |= {"hvt_s3_patch16_224": [97, 48, 23], "scale_hvt_ti_4_patch16_224": [97, 48, 23, 11]}
    for name, lengths in names.items():
        with paddle.LazyGuard():
            model = create_model(name)
        pooling = [block for block in model.blocks if hasattr(block, "pos_embed")]
        assert [block.pos_embed.shape[1] for block in pooling] == lengths, name


@paddle.no_grad()
def test_pooled_tokens_are_a_single_row():
    model = small_hvt()
    model.eval()
    images = paddle.to_tensor(array("images", (2, 3, 48, 32)))
    maps = model.forward_intermediates(images, intermediates_only=True)
    assert [x.shape for x in maps] == [[2, 24, 1, 11], [2, 24, 1, 11], [2, 24, 1, 5]]
    whole = small_hvt(pool_block_width=0)
    whole.eval()
    maps = whole.forward_intermediates(images, intermediates_only=True)
    assert {tuple(x.shape) for x in maps} == {(2, 24, 6, 4)}


@paddle.no_grad()
def test_the_classifier_reads_the_mean_of_the_tokens():
    model = small_hvt()
    model.eval()
    images = paddle.to_tensor(array("images", (2, 3, 48, 32)))
    features = model.forward_features(images)
    assert features.shape == [2, 5, 24]
    model.reset_classifier(0)
    np.testing.assert_allclose(model(images).numpy(), features.mean(axis=1).numpy(), atol=1e-6)


def test_drop_path_rises_or_is_constant():
    for shape, expected in (("linear", [0.0, 0.1, 0.2]), ("constant", [0.2] * 3)):
        model = small_hvt(droppath=0.2, droppath_shape=shape)
        rates = [block.drop_path2.drop_prob for block in model.blocks]
        assert rates == pytest.approx(expected)


def test_layer_groups_and_undecayed_names_are_the_authors():
    model = small_hvt()
    blocks = [(f"blocks.{i}",) for i in range(3)]
    assert model.layer_groups() == [("patch_embed", "pos_embed"), *blocks, ("norm", "head")]
    expected = {"pos_embed", "blocks.0.pos_embed", "blocks.2.pos_embed"}
    assert model.no_weight_decay() == expected


def test_initialisation_is_the_authors():
    paddle.seed(0)
    model = create_model("hvt_ti_1_patch16_224")
    for tensor in (model.pos_embed, model.blocks[0].pos_embed, model.blocks[3].mlp.fc1.weight):
        assert float(tensor.std()) == pytest.approx(0.02, rel=0.05)
    assert not model.blocks[3].mlp.fc1.bias.numpy().any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["MODEL.NUM_HEADS", "5"], "EMBED_DIM is 384, not a multiple of NUM_HEADS 5"),
        (["DATA.IMAGE_SIZE", "200"], "IMAGE_SIZE 200 is not a multiple of PATCH_SIZE 16"),
        (
            ["DATA.IMAGE_SIZE", "16"],
            "POOL_KERNEL_SIZE is 3, but block 0 has 1 tokens; choose a smaller one or larger images",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_named(options, message):
    with pytest.raises(InputError, match=message):
        build_model(get_config("hvt_s1_patch16_224", options))
