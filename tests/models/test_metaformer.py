"""CAFormer and ConvFormer against timm's outputs and numbers."""

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.metaformer import CASES, array
from paddle.nn import functional as F
from support.parity import assert_parity, load_formula
from support.small_models import small_metaformer

from config import get_config
from errors import InputError
from inference.visualization.attention import attention
from models import build_model, create_model
from models.layers import Attention, LayerNorm
from models.layers.attention import attention_weights
from models.layers.mlp import StarReLU


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_logits_features_and_gradients_are_timms(tmp_path, name):
    model = small_metaformer(name)
    for parameter in model.parameters():
        parameter.stop_gradient = parameter.shape == [1]  # those have a test of their own
    assert_parity(model, name, tmp_path, array)


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_single_numbers_are_timms_but_for_rounding(tmp_path, name):
    golden = np.load(ROOT / "tests" / "golden" / f"{name}.npz")
    model = load_formula(small_metaformer(name), tmp_path, array)
    logits = model(paddle.to_tensor(array("images", (2, 3, *model.image_size))))
    (logits * paddle.to_tensor(array("loss", tuple(logits.shape)))).sum().backward()
    least = 1e-2 * max(np.ptp(golden[key]) for key in golden if key.startswith("grad/"))
    found = {f"sum/{key}": p.grad.numpy() for key, p in model.named_parameters() if p.shape == [1]}
    assert found.keys() == {key for key in golden if key.startswith("sum/")}
    for key, value in found.items():
        np.testing.assert_allclose(
            value, golden[key], atol=5e-5 * max(abs(golden[key].item()), least), err_msg=key
        )


def test_norms_have_timms_epsilons_and_the_blocks_no_shift():
    model = small_metaformer(head_norm_eps=1e-5)
    found = {name: layer for name, layer in model.named_sublayers() if isinstance(layer, LayerNorm)}
    assert {name for name, layer in found.items() if layer.bias is not None} == {
        "head.norm",
        "head.fc.norm",
    }
    assert len(found) == 1 + 3 + 2 * 5 + 2  # stem, downsampling, two a block, head
    assert {name for name, layer in found.items() if layer._epsilon != 1e-6} == {"head.fc.norm"}
    assert found["head.fc.norm"]._epsilon == 1e-5
    assert get_config("caformer_s18").MODEL.HEAD_NORM_EPS == 1e-6


def test_star_relu_is_its_formula():
    layer = StarReLU()
    layer.scale.set_value(np.float32([3.0]))
    layer.bias.set_value(np.float32([-0.5]))
    found = layer(paddle.to_tensor([-2.0, 0.0, 0.5, 4.0]))
    assert found.tolist() == [-0.5, -0.5, 0.25, 47.5]


def test_initialisation_is_timms():
    paddle.seed(0)
    model = small_metaformer(embed_dims=(32, 64, 64, 64), num_classes=200)
    block = model.stages[1].blocks[0]
    last = model.stages[3].blocks[0]
    drawn = [
        model.stem.conv,
        model.stages[1].downsample.conv,
        block.token_mixer.dwconv,
        block.token_mixer.pwconv1,
    ]
    drawn += [block.mlp.fc1, last.mlp.fc2, last.token_mixer.qkv, last.token_mixer.proj]
    for layer in (*drawn, model.head.fc.fc1, model.head.fc.fc2):
        assert float(layer.weight.std()) == pytest.approx(0.02, rel=0.05)
        assert layer.bias is None or not layer.bias.numpy().any()
    assert [layer.bias is None for layer in drawn] == [False, False, *6 * [True]]
    assert (last.res_scale1.scale.numpy() == 1).all()
    assert not hasattr(block.res_scale1, "scale")
    assert (float(block.mlp.act.scale), float(block.mlp.act.bias)) == (1, 0)
    scaled = small_metaformer(num_classes=500, head_init_scale=0.1).head.fc
    assert float(scaled.fc2.weight.std()) == pytest.approx(0.002, rel=0.05)
    assert float(scaled.fc1.weight.std()) == pytest.approx(0.02, rel=0.1)


def test_drop_path_and_dropouts():
    model = small_metaformer(droppath=0.4, dropout=0.1, attention_dropout=0.2)
    blocks = [block for stage in model.stages for block in stage.blocks]
    for rates in (
        [block.drop_path1.drop_prob for block in blocks],
        [block.drop_path2.drop_prob for block in blocks],
    ):
        assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])
    found = [
        block.token_mixer.attn_drop.p
        for block in blocks
        if isinstance(block.token_mixer, Attention)
    ]
    assert (found, model.head.fc.head_drop.p) == ([0.2, 0.2], 0.1)


def test_dropout_comes_before_the_last_layer():
    model = small_metaformer(dropout=0.5)
    seen = []
    model.head.fc.head_drop.register_forward_post_hook(lambda _, x, out: seen.append((x[0], out)))
    model.head.fc.fc2.register_forward_pre_hook(lambda _, x: seen.append(x))
    features = paddle.to_tensor(array("features", (2, 32, 2, 3)))
    model.forward_head(features)
    (before, after), (read,) = seen
    fc = model.head.fc
    hidden = F.relu(fc.fc1(F.layer_norm(features.mean([2, 3]), 32, epsilon=1e-6))).square()
    expected = F.layer_norm(hidden, 128, epsilon=1e-6)
    np.testing.assert_allclose(before.numpy(), expected.numpy(), atol=1e-5)
    assert 0.3 < float((after == 0).astype("float32").mean()) < 0.7
    assert (read.numpy() == after.numpy()).all()


def test_layer_groups_are_in_order():
    assert small_metaformer().layer_groups() == [
        ("stem",),
        ("stages.0.blocks.0", "stages.0.downsample"),
        ("stages.1.blocks.0", "stages.1.downsample"),
        ("stages.1.blocks.1",),
        ("stages.2.blocks.0", "stages.2.downsample"),
        ("stages.3.blocks.0", "stages.3.downsample"),
        ("head",),
    ]
    assert small_metaformer().no_weight_decay() == set()


def test_the_classifier_is_exchangeable():
    model = small_metaformer()
    model.eval()
    images = paddle.to_tensor(array("images", (2, 3, 64, 64)))
    features = model.forward_features(images)
    before = model.head.fc.fc1.weight.numpy()
    assert features.shape == [2, 32, 2, 2]
    model.reset_classifier(7)
    assert (model.classifier_names(), model.head.fc.fc2.weight.shape) == (
        ("head.fc.fc2",),
        [128, 7],
    )
    assert (model.head.fc.fc1.weight.numpy() != before).any()
    assert model(images).shape == [2, 7]
    model.reset_classifier(0)
    assert model.classifier_names() == ("head.fc",)
    expected = F.layer_norm(features.mean(axis=[2, 3]), 32, epsilon=1e-6)
    np.testing.assert_allclose(model(images).numpy(), expected.numpy(), atol=1e-6)
    model.reset_classifier(5)
    assert model(images).shape == [2, 5]


def test_variants_differ_in_what_mixes_tokens():
    sizes = {"stage_depths": "[1, 1, 1, 1]", "embed_dims": "[8, 8, 32, 64]"}
    kinds = {name: create_model(name, **sizes) for name in ("caformer_s18", "convformer_s18")}
    found = {
        name: [type(stage.blocks[0].token_mixer).__name__ for stage in model.stages]
        for name, model in kinds.items()
    }
    convolutions = ["SepConv", "SepConv"]
    assert found == {
        "caformer_s18": [*convolutions, "Attention", "Attention"],
        "convformer_s18": 2 * convolutions,
    }
    attention = kinds["caformer_s18"].stages[3].blocks[0].token_mixer
    assert (attention.num_heads, attention.head_dim) == (2, 32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["MODEL.STAGE_DEPTHS", "[2, 2]"], r"STAGE_DEPTHS is \[2, 2\], expected four numbers"),
        (["MODEL.EMBED_DIMS", "[64]"], r"EMBED_DIMS is \[64\], expected four numbers"),
        (
            ["MODEL.ATTENTION_STAGES", "5"],
            "ATTENTION_STAGES is 5, expected a number of stages: 0 to 4",
        ),
        (
            ["MODEL.RES_SCALE_STAGES", "5"],
            "RES_SCALE_STAGES is 5, expected a number of stages: 0 to 4",
        ),
        (["DATA.IMAGE_SIZE", "2"], "IMAGE_SIZE is 2, MetaFormer takes images of at least 3 x 3"),
    ],
)
def test_sizes_that_do_not_fit_are_named(options, message):
    with pytest.raises(InputError, match=message):
        build_model(get_config("caformer_s18", options))


def test_attention_is_at_the_places_of_its_stage():
    model = small_metaformer()
    model.eval()
    image = paddle.to_tensor(array("image", (1, 3, 51, 66)))
    with attention_weights(model, ["stages.2.blocks.0.token_mixer"]) as kept:
        model(image)
    [weights] = kept.values()
    found = attention(model, image, 0)
    assert found.shape == (2, 4, 4)  # places of 13 x 16, 7 x 8, 4 x 4, 2 x 2
    np.testing.assert_allclose(found, weights[0].mean(1).reshape([2, 4, 4]).numpy(), atol=1e-6)
    assert attention(model, image).shape == (1, 2, 2)
