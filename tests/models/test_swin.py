"""Swin Transformer against its definition and timm's outputs."""

import itertools

import numpy as np
import paddle
import pytest
from golden.swin import CASES
from support.parity import assert_parity
from support.small_models import small_swin

from config import get_config
from errors import InputError
from models import build_model, create_model
from models.layers.relative import relative_position_index
from models.swin import Block, SwinTransformer, shift_mask
from weights import load_weights, save_weights

# timm 1.0.31's.


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_logits_features_and_gradients_are_timms(tmp_path, name):
    assert_parity(small_swin(name), name, tmp_path)


# ------------------------------------------------------- windows and positions


def test_a_pair_of_tokens_has_the_row_of_its_offset():
    height, width = 2, 3
    places = list(itertools.product(range(height), range(width)))
    rows = {offset: i for i, offset in enumerate(itertools.product(range(-1, 2), range(-2, 3)))}
    expected = [[rows[y - v, x - u] for v, u in places] for y, x in places]
    np.testing.assert_array_equal(relative_position_index((height, width)), expected)


def attended(shift, resolution=(8, 6), window_size=4):
    """Which places of a map the place (0, 1) has an influence on."""
    paddle.seed(0)
    block = Block(4, 2, resolution, window_size, shift, 1.0, 0.0, 0.0, qkv_bias=True, attn_drop=0.0)
    x = paddle.randn([2, *resolution, 4])
    y = x.clone()
    y[:, 0, 1] = 3.0
    difference = np.abs((block(x) - block(y)).numpy()).max(axis=(0, 3))
    return {tuple(map(int, place)) for place in np.argwhere(difference > 1e-6)}


def test_tokens_attend_within_their_window():
    assert attended(shift=False) == set(itertools.product(range(4), range(4)))


def test_shifted_windows_keep_opposite_borders_apart():
    # The first window begins at (2, 2). A map of 8 x 6 is rolled by it, then padded to 8 x 8: its
    # first two columns come to stand beside the padding alone, its first two rows beside the last
    # two.
    assert attended(shift=True) == set(itertools.product(range(2), range(2)))
    mask = shift_mask((8, 8), (4, 4), (2, 2)).reshape(2, 2, 4, 4, 4, 4)
    for rows, columns in itertools.product((False, True), repeat=2):
        cut = np.zeros((4, 4), int)
        cut[2:] += 2 * rows
        cut[:, 2:] += columns
        expected = np.where(cut[:, :, None, None] == cut, 0.0, -100.0)
        np.testing.assert_array_equal(mask[int(rows), int(columns)], expected)


def test_windows_are_no_larger_than_the_map_and_shift_where_there_are_two():
    blocks = [block for stage in small_swin("swin_odd").layers for block in stage.blocks]
    assert [block.resolution for block in blocks] == [(9, 5), (9, 5), (5, 3), (5, 3), (3, 2)]
    assert [block.attn.window_size for block in blocks] == [(4, 4), (4, 4), (4, 3), (4, 3), (3, 2)]
    assert [block.shift_size for block in blocks] == [(0, 0), (2, 2), (0, 0), (2, 0), (0, 0)]


def test_windows_that_are_always_partitioned_keep_their_size_and_shift():
    model = small_swin("swin_odd", always_partition=True)
    blocks = [block for stage in model.layers for block in stage.blocks]
    assert {block.attn.window_size for block in blocks} == {(4, 4)}
    assert [block.shift_size for block in blocks] == [(0, 0), (2, 2), (0, 0), (2, 2), (0, 0)]


# ---------------------------------------------------------- what training needs


def test_initialisation_is_timms():
    paddle.seed(0)
    model = SwinTransformer(
        image_size=64, embed_dim=48, stage_depths=(1, 1), num_heads=(12, 24), num_classes=50
    )
    for layer in (
        model.layers[0].blocks[0].attn.qkv,
        model.layers[1].downsample.reduction,
        model.head.fc,
    ):
        assert float(layer.weight.std()) == pytest.approx(0.02, rel=0.03)
    assert not model.layers[0].blocks[0].attn.qkv.bias.numpy().any()
    table = model.layers[0].blocks[0].attn.relative_position_bias_table
    assert table.shape == [13 * 13, 12]
    assert float(table.std()) == pytest.approx(0.02, rel=0.05)
    bound = (3 * 4 * 4) ** -0.5
    assert bound * 0.99 < float(model.patch_embed.proj.weight.abs().max()) <= bound
    assert 0 < float(model.patch_embed.proj.bias.abs().max()) <= bound


def test_drop_path_rises_over_all_blocks_and_dropout_is_theirs_alike():
    model = small_swin(droppath=0.4, dropout=0.1, attention_dropout=0.2)
    blocks = [block for stage in model.layers for block in stage.blocks]
    assert {(b.attn.attn_drop.p, b.attn.proj_drop.p, b.mlp.drop.p) for b in blocks} == {
        (0.2, 0.1, 0.1)
    }
    for rates in (
        [block.drop_path1.drop_prob for block in blocks],
        [block.drop_path2.drop_prob for block in blocks],
    ):
        assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])


def test_layer_groups_are_simmims():
    model = small_swin()
    groups = model.layer_groups()
    assert groups == [
        ("patch_embed",),
        ("layers.0.blocks.0",),
        ("layers.0.blocks.1", "layers.1.downsample"),
        ("layers.1.blocks.0",),
        ("layers.1.blocks.1", "layers.2.downsample"),
        ("layers.2.blocks.0",),
        ("norm", "head"),
    ]
    for name, _ in model.named_parameters():
        assert sum(name.startswith(f"{prefix}.") for group in groups for prefix in group) == 1, name


def test_tables_have_no_weight_decay_and_derived_buffers_are_in_no_file():
    model = small_swin()
    tables = [
        f"layers.{i}.blocks.{j}.attn.relative_position_bias_table"
        for i, j in ((0, 0), (0, 1), (1, 0), (1, 1))
    ]
    assert model.no_weight_decay() == {
        *tables,
        "layers.2.blocks.0.attn.relative_position_bias_table",
    }
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


def test_reset_classifier_replaces_the_head():
    model = small_swin()
    model.eval()
    images = paddle.randn([2, 3, 32, 32])
    model.reset_classifier(5)
    assert (model.classifier_names(), model.head.fc.weight.shape, model(images).shape) == (
        ("head.fc",),
        [32, 5],
        [2, 5],
    )
    assert 0.015 < float(model.head.fc.weight.std()) < 0.025
    model.reset_classifier(0)
    features = model.forward_features(images)
    assert features.shape == [2, 2, 2, 32]
    np.testing.assert_allclose(model(images).numpy(), features.mean(axis=[1, 2]).numpy(), atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["MODEL.NUM_HEADS", "3"],
            r"NUM_HEADS is \[3\], expected 4 numbers: one per stage, as in STAGE_DEPTHS",
        ),
        (["MODEL.NUM_HEADS", "[3, 6, 12]"], r"NUM_HEADS is \[3, 6, 12\], expected 4 numbers"),
        (["MODEL.MLP_RATIO", "[4, 4]"], r"MLP_RATIO is \[4.0, 4.0\], expected 4 numbers"),
        (
            ["MODEL.NUM_HEADS", "[3, 6, 12, 25]"],
            "NUM_HEADS has 25, expected a divisor of the 768 channels",
        ),
        (["DATA.IMAGE_SIZE", "222"], "IMAGE_SIZE 222 is not a multiple of PATCH_SIZE 4"),
        (["MODEL.DEPTH", "3"], "MODEL.DEPTH is 3, but Swin takes no DEPTH"),
    ],
)
def test_sizes_that_do_not_fit_are_named(options, message):
    with pytest.raises(InputError, match=message):
        build_model(get_config("swin_tiny_patch4_window7_224", options))


def test_images_of_another_size_are_refused():
    with pytest.raises(InputError, match="the model takes images of 32 x 32, found 64 x 32"):
        small_swin()(paddle.zeros([1, 3, 64, 32]))


def test_the_shipped_models_are_built_by_name():
    model = create_model(
        "swin_tiny_patch4_window7_224",
        image_size=32,
        stage_depths=[1, 1],
        num_heads=[3, 6],
        embed_dim=12,
    )
    assert type(model) is SwinTransformer
    assert model.layers[1].blocks[0].drop_path1.drop_prob == 0.2
    assert model.layers[0].blocks[0].attn.window_size == (7, 7)


def test_fine_tuning_from_22k_keeps_1ks_classes_and_others_classifiers_start_at_zero(
    tmp_path, program
):
    sizes = [
        "MODEL.EMBED_DIM",
        "16",
        "MODEL.STAGE_DEPTHS",
        "[1,1]",
        "MODEL.NUM_HEADS",
        "[1,2]",
        "DATA.IMAGE_SIZE",
        "32",
    ]
    name = "swin_tiny_patch4_window7_224_21k_1k"
    source = build_model(get_config(name, [*sizes, "MODEL.NUM_CLASSES", "21841"]))
    for parameter in source.head.parameters():  # at zero otherwise
        parameter.set_value(paddle.randn(parameter.shape))
    save_weights(source, tmp_path / "22k.safetensors")
    options = ["-batch_size=8", "-o", *sizes, "DATA.SYNTHETIC_SIZE", "16", "DATA.NUM_WORKERS", "0"]
    command = [
        "main_single_gpu.py",
        f"-cfg={name}",
        "-dataset=synthetic",
        "-pretrained=22k.safetensors",
        "-output=run",
    ]
    status, _, errors = program(*command, "-eval", *options)
    assert status == 0, errors
    assert (
        "classifier: 1,000 of its 21,841 classes kept (imagenet22k_swin)"
        in (tmp_path / "run/log.txt").read_text()
    )
    status, _, errors = program(*command[:-1], "-output=own", *options, "MODEL.NUM_CLASSES", "7")
    assert status == 2
    assert (
        "imagenet22k_swin, which keeps ImageNet-1k's 1000 classes, but the data has 7 classes; set it with -o"
        in errors
    )
    assert not (tmp_path / "own").exists()
    own = build_model(get_config(name, [*sizes, "MODEL.NUM_CLASSES", "7"]))
    report = load_weights(own, tmp_path / "22k.safetensors", strict=False)
    assert report.changes == [
        "classifier initialised randomly: 21841 classes in the file, 7 in the model"
    ]
    assert not own.head.fc.weight.numpy().any()
