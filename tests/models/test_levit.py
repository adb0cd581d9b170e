"""LeViT against timm's outputs, its two classifiers, and the equal model with folded batch norms."""

import numpy as np
import paddle
import pytest
from golden.convolutions import array
from golden.levit import CASES
from paddle import nn
from support.parity import assert_parity, load_formula
from support.small_models import small_levit

from config import get_config
from errors import InputError
from models import build_model
from models.levit import Block, LeViT, distance_index


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_logits_features_and_gradients_are_timms(tmp_path, name):
    assert_parity(small_levit(name), name, tmp_path, array)


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_the_deployed_model_is_equal_and_has_no_batch_norm(tmp_path, name):
    model = load_formula(small_levit(name), tmp_path, array)
    images = paddle.to_tensor(array("images", (3, 3, *model.image_size)))
    state = {key: tensor.numpy() for key, tensor in model.state_dict().items()}
    expected = model(images).numpy()
    deployed = model.inference_model()
    assert not [layer for layer in deployed.sublayers() if isinstance(layer, nn.BatchNorm2D)]
    assert len(deployed.state_dict()) < len(state) / 2
    np.testing.assert_allclose(
        deployed(images).numpy(), expected, atol=1e-6 * np.ptp(expected), rtol=0
    )
    for found, one in zip(
        *(each.forward_intermediates(images)[1] for each in (deployed, model)), strict=True
    ):
        np.testing.assert_allclose(
            found.numpy(), one.numpy(), atol=1e-6 * np.ptp(one.numpy()), rtol=0
        )
    assert model(images).numpy().tolist() == expected.tolist()  # the model itself is as it was
    assert all((model.state_dict()[key].numpy() == value).all() for key, value in state.items())
    assert deployed.inference_model() is deployed
    assert deployed.classifier_names() == (("head", "head_dist") if name == "levit" else ("head",))


def test_initialisation_is_timms():
    paddle.seed(0)
    model = LeViT(32, stage_depths=(1, 1), embed_dims=(128, 192), num_heads=(4, 4), num_classes=200)
    block = model.stages[1].blocks[0]
    down = model.stages[1].downsample.attn_downsample
    for layer, fan_in in (
        (model.stem.conv3, 9 * 32),
        (block.attn.qkv, 192),
        (block.mlp.ln2, 384),
        (down.q.ln, 128),
    ):
        assert float(layer.linear.weight.abs().max()) == pytest.approx(fan_in**-0.5, rel=0.01)
        assert float(layer.linear.weight.std()) == pytest.approx((3 * fan_in) ** -0.5, rel=0.05)
        assert layer.linear.bias is None
    starts = {"attn.qkv": 1, "attn.proj.ln": 0, "mlp.ln1": 1, "mlp.ln2": 0}
    assert {
        name: {*layer.bn.weight.tolist()}
        for name, layer in block.named_sublayers()
        if name in starts
    } == {name: {start} for name, start in starts.items()}
    assert {*down.proj.ln.bn.weight.tolist(), *down.kv.bn.weight.tolist()} == {1}
    for head in (model.head, model.head_dist):
        assert float(head.linear.weight.std()) == pytest.approx(0.02, rel=0.05)
        assert not head.linear.bias.numpy().any()
    assert not block.attn.attention_biases.numpy().any()


def test_distances_count_rows_and_columns_whatever_the_direction():
    whole = distance_index((2, 3), 1)
    assert whole.tolist()[4] == [4, 3, 4, 1, 0, 1]
    assert (whole == whole.T).all()
    assert distance_index((3, 3), 2).tolist() == [
        whole for i, whole in enumerate(distance_index((3, 3), 1).tolist()) if i in (0, 2, 6, 8)
    ]


def test_drop_path_is_the_same_at_all_blocks_and_drops_whole_samples():
    model = small_levit(droppath=0.5, stage_depths=(1, 2, 1))
    rates = [layer.drop_prob for name, layer in model.named_sublayers() if "drop_path" in name]
    assert rates == [0.5] * 10  # two of each block, one of what is between stages
    paddle.seed(0)
    block = Block(8, nn.Identity(), 2.0, 0.5, "hardswish")
    tokens = paddle.randn([64, 6, 8])
    dropped = (block(tokens) == tokens).numpy().all(axis=(1, 2)).sum()
    assert 4 < dropped < 32  # a quarter loses both branches


def test_the_classifiers_are_exchangeable():
    model = small_levit()
    model.eval()
    images = paddle.to_tensor(array("images", (2, 3, *model.image_size)))
    features = model.forward_features(images)
    assert features.shape == [2, 2, 24]
    model.reset_classifier(7)
    assert model.classifier_names() == ("head.linear", "head_dist.linear")
    assert model(images).shape == [2, 7]
    assert float(model.head.linear.weight.abs().max()) > 0
    model.reset_classifier(0)
    np.testing.assert_allclose(model(images).numpy(), features.mean(axis=1).numpy(), atol=1e-6)
    assert model.classifier_names() == ("head", "head_dist")


def test_distillation_training_gives_both_classifiers():
    model = small_levit()
    images = paddle.to_tensor(array("images", (2, 3, *model.image_size)))
    mean = model(images)
    model.distilled_training = True
    logits, distilled = model(images)
    np.testing.assert_allclose(((logits + distilled) / 2).numpy(), mean.numpy(), atol=1e-6)
    assert (logits.numpy() != distilled.numpy()).any()
    model.eval()
    assert model(images).shape == [2, 5]


def test_dropout_comes_between_norm_and_classifier():
    paddle.seed(0)
    model = small_levit(dropout=0.5, distilled=False)
    found = []
    model.head.linear.register_forward_pre_hook(lambda _, x: found.append(x[0].numpy()))
    tokens = paddle.randn([8, 2, 24])
    model.forward_head(tokens)
    model.head.drop.p = 0.0
    model.forward_head(tokens)
    kept = found[0] != 0
    assert 48 < kept.sum() < 144
    np.testing.assert_allclose(found[0][kept], 2 * found[1][kept], rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["DATA.IMAGE_SIZE", "200"], "IMAGE_SIZE 200 is not a multiple of 16"),
        (
            ["MODEL.STAGE_DEPTHS", "[2, 3]"],
            r"STAGE_DEPTHS is \[2, 3\], expected 3 numbers: one per stage",
        ),
        (["MODEL.NUM_HEADS", "[4]"], r"NUM_HEADS is \[4\], expected 3 numbers"),
        (
            ["MODEL.EMBED_DIMS", "[100, 200, 300]"],
            "EMBED_DIMS begins with 100, not a multiple of 8",
        ),
        (
            ["MODEL.EMBED_DIMS", "[128, 200, 384]"],
            "EMBED_DIMS has 200 before its last, not a multiple of KEY_DIM 16",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_named(options, message):
    with pytest.raises(InputError, match=message):
        build_model(get_config("levit_128s", options))
