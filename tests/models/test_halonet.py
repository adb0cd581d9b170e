"""HaloNet against timm's outputs and numbers."""

import numpy as np
import paddle
import pytest
from golden.halonet import CASES, array
from paddle import nn
from support.parity import assert_parity, load_formula
from support.small_models import small_halonet

import ops
from config import get_config
from errors import InputError
from inference.visualization.attention import attention, has_rollout
from inference.visualization.cam import cam
from models import build_model
from models.halonet import HaloAttention, HaloNet, RelativePositions
from models.layers.attention import attention_weights


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_logits_features_and_gradients_are_timms(tmp_path, name):
    assert_parity(small_halonet(name), name, tmp_path, array)


@pytest.mark.smoke
@pytest.mark.parametrize(("stride", "halo"), [(1, 1), (2, 2), (1, 0), (1, 4)])
def test_attention_is_the_same_with_and_without_operators(compiled_operators, stride, halo):
    layer = HaloAttention(8, 2, block_size=4, halo_size=halo, stride=stride)
    found = []
    x = paddle.randn([3, 8, 8, 12])
    x.stop_gradient = False
    for enabled in (True, False):
        ops.enable(enabled)
        output = layer(x)
        found.append([output, *paddle.grad([(output**2).sum()], [x, *layer.parameters()])])
    for own, plain in zip(*found, strict=True):
        np.testing.assert_allclose(
            own.numpy(), plain.numpy(), rtol=0, atol=1e-5 * np.abs(plain.numpy()).max()
        )


@pytest.mark.parametrize("stride", [1, 2])
@paddle.no_grad()
def test_a_block_attends_to_itself_and_its_halo(stride):
    layer = HaloAttention(8, 2, block_size=4, halo_size=1, stride=stride)
    x = paddle.randn([1, 8, 8, 12])
    expected = layer(x).numpy()
    assert expected.shape == (1, 8, 8 // stride, 12 // stride)
    x[0, :, 2, 7] += 1.0  # in the second block of the first row, and in the third's halo
    moved = np.abs(layer(x).numpy() - expected).max(axis=(0, 1)) > 1e-7
    blocks = np.zeros((2, 3), bool)
    blocks[0, 1:] = True  # all their queries, also where the place itself is none
    assert (moved == blocks.repeat(4 // stride, 0).repeat(4 // stride, 1)).all()


@paddle.no_grad()
def test_a_query_meets_the_vector_of_each_keys_distance():
    layer = RelativePositions(block_size=2, window_size=3, head_dim=4)
    q = paddle.randn([2, 1, 4, 4])
    found, rows, columns = (one.numpy() for one in (layer(q), layer.height_rel, layer.width_rel))
    for query in range(4):
        for key in range(9):
            (y, x), (row, column) = divmod(query, 2), divmod(key, 3)
            vector = rows[row - y + 2] + columns[column - x + 2]
            np.testing.assert_allclose(
                found[:, 0, query, key], q.numpy()[:, 0, query] @ vector, atol=1e-5
            )


def test_initialisation_is_timms():
    paddle.seed(0)
    model = HaloNet(256, embed_dims=(64, 128, 512, 512), stage_depths=(1, 1, 2, 1))
    block = model.stages[2][1]
    fan_outs = [
        (model.stem.conv2.conv, 9 * 32),
        (block.conv1_1x1.conv, 128),
        (model.stages[2][0].shortcut.conv, 512),
    ]
    for layer, fan_out in fan_outs:
        assert float(layer.weight.std()) == pytest.approx((2 / fan_out) ** 0.5, rel=0.06)
    for layer in (block.self_attn.q, block.self_attn.kv):
        assert float(layer.weight.std()) == pytest.approx(128**-0.5, rel=0.05)
    positions = block.self_attn.pos_embed  # of 16 channels
    assert [tuple(one.shape) for one in positions.parameters()] == [(23, 16), (23, 16)]
    assert float(positions.height_rel.std()) == pytest.approx(0.25, rel=0.15)
    assert float(model.head.fc.weight.std()) == pytest.approx(0.01, rel=0.05)
    norms = {
        name: layer for name, layer in model.named_sublayers() if isinstance(layer, nn.BatchNorm2D)
    }
    for name, norm in norms.items():
        assert (norm.weight.numpy() == (0 if name.endswith("conv3_1x1.bn") else 1)).all(), name
    assert len(norms) == 3 + 5 * 3 + 3
    assert (HaloNet(256, zero_init_last=False).stages[3][0].conv3_1x1.bn.weight.numpy() == 1).all()


def test_every_so_many_th_block_attends_and_drop_path_rises():
    model = build_model(
        get_config(
            "halonet_50ts_256", ["MODEL.EMBED_DIMS", "[32,64,64,64]", "MODEL.DROPPATH", "0.3"]
        )
    )
    blocks = [[hasattr(block, "self_attn") for block in stage] for stage in model.stages]
    assert blocks == [[False] * 3, [False] * 3 + [True], [False, True] * 3, [False, True, False]]
    rates = [block.drop_path.drop_prob for stage in model.stages for block in stage]
    assert rates == pytest.approx([0.02 * i for i in range(16)])


def test_layer_groups_are_in_order():
    model = small_halonet()
    names = ["stages.0.0", "stages.1.0", "stages.1.1", "stages.2.0", "stages.2.1", "stages.3.0"]
    assert model.layer_groups() == [("stem",), *((name,) for name in names), ("head",)]
    assert model.no_weight_decay() == set()


def test_the_classifier_reads_the_mean_of_the_last_maps():
    model = small_halonet(dropout=0.5)
    model.eval()
    images = paddle.to_tensor(array("images", (2, 3, 64, 128)))
    features = model.forward_features(images)
    assert features.shape == [2, 96, 2, 4]
    model.reset_classifier(7)
    assert (model.classifier_names(), model.head.fc.weight.shape, model.head.drop.p) == (
        ("head.fc",),
        [96, 7],
        0.5,
    )
    model.reset_classifier(0)
    np.testing.assert_allclose(model(images).numpy(), features.mean(axis=[2, 3]).numpy(), atol=1e-6)


def test_overlapping_windows_are_added_where_it_looks(tmp_path):
    model = load_formula(small_halonet(), tmp_path, array)
    image = paddle.to_tensor(array("images", (1, 3, 64, 128)))
    assert [attention(model, image, block).shape for block in range(4)] == [
        (2, 8, 16),
        (2, 8, 16),
        (2, 4, 8),
        (3, 4, 8),
    ]
    with attention_weights(model, ["stages.2.1.self_attn"]) as kept, paddle.no_grad():
        model(image)
    weights = kept["stages.2.1.self_attn"].numpy()  # heads, 2 x 4 blocks, 2 x 2 queries, 4 x 4 keys
    assert weights.shape == (2, 8, 4, 16)
    np.testing.assert_allclose(weights.sum(3), 1, rtol=1e-5)
    found = attention(model, image, 2)
    # Place (1, 2) is in the second block at (1, 0), which is (2, 1) in its window; in the first
    # one's it is (2, 3), in the fifth one's, below that, (0, 3), in the sixth one's (0, 1).
    keys = weights.mean(2).reshape(2, 2, 4, 4, 4)
    expected = keys[:, 0, 1, 2, 1] + keys[:, 0, 0, 2, 3] + keys[:, 1, 0, 0, 3] + keys[:, 1, 1, 0, 1]
    np.testing.assert_allclose(found[:, 1, 2], expected, rtol=1e-5)
    assert cam(model, image, None).shape == (2, 4)
    assert not has_rollout(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["MODEL.STAGE_DEPTHS", "[2, 2, 6]"],
            r"STAGE_DEPTHS is \[2, 2, 6\], expected four numbers",
        ),
        (["MODEL.ATTENTION_EVERY", "[2]"], r"ATTENTION_EVERY is \[2\], expected 4 numbers"),
        (
            ["MODEL.NUM_HEADS", "[0, 0, 6, 8]"],
            r"NUM_HEADS has 6 for stage 2, whose attention has 256 channels \(a quarter of the",
        ),
        (
            ["MODEL.NUM_HEADS", "[0, 0, 8, 0]"],
            "NUM_HEADS has 0 for stage 3, whose attention has 512 channels",
        ),
        (["MODEL.STEM_DIM", "20"], "STEM_DIM is 20, expected a multiple of 8"),
        (
            ["MODEL.EMBED_DIMS", "[32, 30, 64, 64]"],
            r"EMBED_DIMS is \[32, 30, 64, 64\], expected multiples of 4",
        ),
        (
            ["MODEL.BLOCK_SIZE", "7"],
            "BLOCK_SIZE is 7, expected an even number, because stride 2 halves it",
        ),
        (["MODEL.HALO_SIZE", "9"], "HALO_SIZE is 9, expected at most BLOCK_SIZE 8"),
        (
            ["DATA.IMAGE_SIZE", "224"],
            "IMAGE_SIZE 224 is not a multiple of 128: stage 2 is cut into blocks",
        ),
        (
            ["DATA.IMAGE_SIZE", "384"],
            "IMAGE_SIZE 384 is not a multiple of 256: stage 3 is cut into blocks",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_named(options, message):
    with pytest.raises(InputError, match=message):
        build_model(get_config("halonet_26t_256", options))
