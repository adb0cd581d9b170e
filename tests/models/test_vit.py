"""The ViT and its options against their definitions and timm's outputs."""

import contextlib
import math

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden import convolutions
from golden.formula import array
from golden.vit import CASES, WAVES
from support.layer_groups import assert_one_group_each
from support.parity import assert_parity, load_formula
from support.ranks import run_ranks
from support.small_models import small_vit

import utils
from config import get_config
from errors import InputError
from models import build_model, create_model
from models.layers.attention import attention_layers, attention_weights
from weights import load_weights, save_weights

OPTIONS = [
    {},
    {"init_values": 0.1, "no_embed_class": True},
    {"global_pool": "avg", "class_token": False},
    {"pos_embed": "sincos2d"},
    {"distilled": True},
    {"reg_tokens": 2, "pre_norm": True, "qk_norm": True},
]


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_logits_features_and_gradients_are_timms(tmp_path, name):
    assert_parity(small_vit(name), name, tmp_path, convolutions.array if name in WAVES else array)


def test_a_distilled_model_trains_both_heads_when_told(tmp_path):
    model = load_formula(small_vit("vit_distilled"), tmp_path)
    golden = np.load(ROOT / "tests" / "golden" / "vit_distilled.npz")
    images = paddle.to_tensor(array("images", (2, 3, 16, 16)))
    model.train()
    mean = model(images).numpy()
    model.distilled_training = True
    logits, distilled = (out.numpy() for out in model(images))
    span = np.ptp(golden["logits"])
    np.testing.assert_allclose(logits, golden["train_logits"], atol=1e-5 * span, rtol=0)
    np.testing.assert_allclose(distilled, golden["train_logits_dist"], atol=1e-5 * span, rtol=0)
    np.testing.assert_allclose(mean, (logits + distilled) / 2, atol=1e-6 * span, rtol=0)
    model.eval()
    assert (model(images).numpy() == mean).all()


@pytest.mark.parametrize("block", ["serial", "parallel"])
def test_a_differential_heads_share_begins_as_published(block):
    paddle.seed(0)
    model = small_vit("vit_differential", depth=4, embed_dim=192, block=block)
    heads = [one if block == "parallel" else one.attn for one in model.blocks]
    expected = [
        0.2,
        0.8 - 0.6 * math.exp(-0.3),
        0.8 - 0.6 * math.exp(-0.6),
        0.8 - 0.6 * math.exp(-0.9),
    ]
    assert [one.first_share for one in heads] == pytest.approx(expected)
    drawn = paddle.concat([one.lambda_q1 for one in heads]).numpy()
    assert 0.08 < drawn.std() < 0.12
    with attention_weights(model, attention_layers(model)) as kept:
        model(paddle.randn([2, 3, 16, 16]))
    # two maps of three heads
    assert [tuple(weights.shape) for weights in kept.values()] == [(2, 6, 17, 17)] * 4
    assert all(np.allclose(weights.sum(-1).numpy(), 1, atol=1e-5) for weights in kept.values())


def test_initialisation_is_timms():
    paddle.seed(0)
    timm = {"weight_init": "timm", "head_init_scale": 1.0, "head_init_bias": 0.0, "num_classes": 10}
    model = create_model("vit_tiny_patch16_224", **timm)
    assert abs(float(model.blocks[0].mlp.fc1.weight.std()) - 0.02) < 2e-4
    assert abs(float(model.pos_embed.std()) - 0.02) < 5e-4
    assert float(model.cls_token.abs().max()) < 1e-5
    assert float(model.blocks[0].attn.qkv.bias.abs().max()) == 0.0
    bound = (3 * 16 * 16) ** -0.5
    assert bound * 0.99 < float(model.patch_embed.proj.weight.abs().max()) <= bound
    assert 0 < float(model.patch_embed.proj.bias.abs().max()) <= bound
    model = create_model("vit_tiny_patch16_224", depth=1, distilled=True, init_values=1e-5, **timm)
    assert abs(float(model.dist_token.std()) - 0.02) < 3e-3
    assert abs(float(model.head_dist.weight.std()) - 0.02) < 2e-3
    assert (model.blocks[0].ls1.gamma.numpy() == np.float32(1e-5)).all()
    assert (model.blocks[0].ls2.gamma.numpy() == np.float32(1e-5)).all()


def test_initialisation_is_big_visions():
    """Flax's defaults: xavier_uniform for each of query, key and value, lecun_normal for the
    patches.
    """
    paddle.seed(0)
    model = create_model(
        "vit_tiny_patch16_224", weight_init="big_vision", num_classes=10, head_init_scale=0
    )
    block = model.blocks[0]
    dim = 192
    for weight, fan in (
        (block.attn.qkv.weight, 2 * dim), (block.attn.proj.weight, 2 * dim), (block.mlp.fc1.weight, 5 * dim),
        (block.mlp.fc2.weight, 5 * dim),
    ):  # fmt: skip
        bound = (6 / fan) ** 0.5
        assert bound * 0.999 < float(weight.abs().max()) <= bound
        assert float(weight.std()) == pytest.approx((2 / fan) ** 0.5, rel=0.01)
    patches = model.patch_embed.proj
    assert float(patches.weight.std()) == pytest.approx(768**-0.5, rel=0.01)
    assert float(patches.weight.abs().max()) == pytest.approx(2 * 768**-0.5 / 0.87962566, rel=0.01)
    assert float(model.pos_embed.std()) == pytest.approx(dim**-0.5, rel=0.01)
    for bias in (
        patches.bias,
        block.attn.qkv.bias,
        block.attn.proj.bias,
        model.cls_token,
        model.head.weight,
    ):
        assert not bias.numpy().any()
    for bias in (block.mlp.fc1.bias, block.mlp.fc2.bias):
        assert float(bias.std()) == pytest.approx(1e-6, rel=0.15)
    model.reset_classifier(7)
    assert (model.head.weight.shape, float(model.head.weight.abs().max())) == ([192, 7], 0.0)


def positions(rows, columns, channels):
    """By the formula of big_vision/models/vit.py:34-44 (0127fb6), value by value."""
    quarter = channels // 4
    table = np.zeros((rows * columns, channels))
    for place in range(rows * columns):
        row, column = divmod(place, columns)
        for i in range(quarter):
            frequency = 10_000 ** (-i / (quarter - 1))
            x, y = column * frequency, row * frequency
            table[place, i::quarter] = math.sin(x), math.cos(x), math.sin(y), math.cos(y)
    return table


def test_fixed_positions_are_big_visions(tmp_path):
    for size, rows, columns in ((16, 4, 4), ((8, 20), 2, 5)):
        model = small_vit(
            image_size=size, pos_embed="sincos2d", class_token=False, global_pool="avg"
        )
        found = model.pos_embed.numpy()
        assert (found.shape, found.dtype) == ((1, rows * columns, 24), np.float32)
        np.testing.assert_allclose(found[0], positions(rows, columns, 24), atol=1e-6)
    assert "pos_embed" not in {*model.state_dict(), *dict(model.named_parameters())}
    # The class token has no position: the patches' are those of a model without one.
    model = small_vit(pos_embed="sincos2d")
    assert (model.num_prefix_tokens, model.pos_embed_prefix) == (1, 0)
    images = paddle.to_tensor(array("images", (2, 3, 16, 16)))
    model.blocks, model.norm = paddle.nn.LayerList(), paddle.nn.Identity()
    tokens = model.forward_features(images).numpy()
    np.testing.assert_allclose(
        tokens[:, 1:], (model.patch_embed(images) + model.pos_embed).numpy(), atol=1e-6
    )
    np.testing.assert_array_equal(tokens[:, 0], np.repeat(model.cls_token.numpy()[0], 2, axis=0))


def test_weights_with_fixed_positions_go_to_another_size_and_learned_ones_do_not_fit(tmp_path):
    sincos = {"pos_embed": "sincos2d", "class_token": False, "global_pool": "avg"}
    source = small_vit(**sincos)
    save_weights(source, tmp_path / "fixed.safetensors")
    larger = small_vit(image_size=32, **sincos)
    report = load_weights(larger, tmp_path / "fixed.safetensors")
    assert (report.resized, larger.pos_embed.shape) == ([], [1, 64, 24])
    np.testing.assert_allclose(larger.pos_embed.numpy()[0], positions(8, 8, 24), atol=1e-6)
    save_weights(small_vit(**sincos | {"pos_embed": "learn"}), tmp_path / "learned.safetensors")
    with pytest.raises(InputError, match="unexpected pos_embed"):
        load_weights(source, tmp_path / "learned.safetensors")
    with pytest.raises(InputError, match="missing pos_embed"):
        load_weights(small_vit(**sincos | {"pos_embed": "learn"}), tmp_path / "fixed.safetensors")


@pytest.mark.parametrize("distilled", [False, True])
def test_head_init_scale_multiplies_fresh_heads_alone(distilled):
    states = []
    for scale in (1.0, 1e-3):
        paddle.seed(0)
        model = small_vit(head_init_scale=scale, distilled=distilled)
        states.append({name: tensor.numpy().copy() for name, tensor in model.state_dict().items()})
        paddle.seed(1)
        model.reset_classifier(5)
        states[-1] |= {
            f"new {name}": getattr(model, name).weight.numpy() for name in model.classifier_names()
        }
    for name, value in states[0].items():
        scale = np.float32(1e-3 if "head" in name else 1)
        assert (states[1][name] == value * scale).all(), name
    assert 0.015 < states[0]["new head"].std() < 0.025


@pytest.mark.parametrize("options", OPTIONS)
def test_every_parameter_is_in_one_layer_group(options):
    model = small_vit(**options)
    groups = model.layer_groups()
    assert groups[0] == (
        "cls_token", "dist_token", "reg_token", "pos_embed", "patch_embed", "norm_pre", "prompt_tokens",
    )  # fmt: skip
    assert groups[1:-1] == [("blocks.0",), ("blocks.1",), ("blocks.2",)]
    assert groups[-1] == ("norm", "attn_pool", "fc_norm", "neck", "head", "head_dist")
    assert_one_group_each(model, groups)
    assert model.no_weight_decay() == {
        "pos_embed",
        "cls_token",
        "dist_token",
        "reg_token",
        "prompt_tokens",
    }


def test_reset_classifier_replaces_every_head():
    images = paddle.zeros([2, 3, 16, 16])
    model = small_vit(distilled=True)
    assert (small_vit().classifier_names(), model.classifier_names()) == (
        ("head",),
        ("head", "head_dist"),
    )
    model.reset_classifier(5)
    assert (model.num_classes, model.head.weight.shape, model.head_dist.weight.shape) == (
        5,
        [24, 5],
        [24, 5],
    )
    assert model(images).shape == [2, 5]
    model.reset_classifier(0)
    tokens = model.forward_features(images)
    np.testing.assert_allclose(model(images).numpy(), tokens[:, :2].mean(axis=1).numpy(), atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["MODEL.PATCH_SIZE", "15"], "IMAGE_SIZE 224 is not a multiple of PATCH_SIZE 15"),
        (["MODEL.NUM_HEADS", "7"], "EMBED_DIM 768 is not a multiple of NUM_HEADS 7"),
        (["MODEL.TYPE", "Vitt"], "MODEL.TYPE is 'Vitt', expected one of beit, "),
        (["MODEL.NUM_CLASSES", "auto"], "MODEL.NUM_CLASSES is 'auto'"),
        (
            ["MODEL.DISTILLED", "True", "MODEL.GLOBAL_POOL", "avg"],
            "GLOBAL_POOL is 'avg', expected 'token'",
        ),
        (["MODEL.DISTILLED", "True", "MODEL.REG_TOKENS", "4"], "REG_TOKENS is 4, expected 0"),
        (["MODEL.CLASS_TOKEN", "False"], "GLOBAL_POOL is 'token', expected 'avg'"),
        (
            ["MODEL.POS_EMBED", "sincos2d", "MODEL.EMBED_DIM", "6", "MODEL.NUM_HEADS", "1"],
            "EMBED_DIM is 6, expected a multiple of 4, 8 or more, for sine-cosine positions",
        ),
        (["MODEL.POS_EMBED", "sine"], "MODEL.POS_EMBED is 'sine', expected one of learn, sincos2d"),
        (
            ["MODEL.WEIGHT_INIT", "jax"],
            "MODEL.WEIGHT_INIT is 'jax', expected one of timm, deit, big_vision",
        ),
        (
            ["MODEL.ATTENTION", "differential", "MODEL.ATTN_HEAD_SIZE", "7"],
            "a head has 7 channels, ATTENTION differential",
        ),
        (
            ["MODEL.BLOCK", "parallel", "MODEL.ACT", "swiglu"],
            "ACT is 'swiglu', which BLOCK parallel doesn't support",
        ),
        (
            ["MODEL.WINDOW_SIZE", "7"],
            "MODEL.WINDOW_SIZE is 7, but ViT takes no WINDOW_SIZE; leave it out",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_named(options, message):
    with pytest.raises(InputError, match=message):
        build_model(get_config(None, options))


def test_attn_head_size_sets_the_width_of_a_head():
    model = create_model(
        "vit_tiny_patch16_224", image_size=32, depth=1, attn_head_size=32, num_classes=2
    )
    assert model.blocks[0].attn.qkv.weight.shape == [192, 3 * 3 * 32]
    assert model.blocks[0].attn.scale == 32**-0.5


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({}, 1),
        ({"init_values": 0.5, "reg_tokens": 2}, 3),
        ({"distilled": True}, 2),
        ({"prompt_tokens": 2, "prompt_deep": True}, 3),
        ({"recompute": True}, 1),
        ({"block": "parallel"}, 17),
        ({"attention": "differential"}, 1),
        ({"global_pool": "avg"}, 17),
        ({"global_pool": "token_avg"}, 17),
    ],
)
def test_the_last_mlp_computes_what_the_head_reads(options, tokens):
    """Logits and all gradients are those of the whole last block."""
    model = small_vit(**options)
    images = paddle.to_tensor(array("images", (2, 3, 16, 16)))
    weights = paddle.arange(14, dtype="float32").reshape([2, 7])
    shapes = []
    model.blocks[-1].register_forward_post_hook(lambda _, __, output: shapes.append(output.shape))
    found = []
    for forward in (model, lambda x: model.forward_head(model.forward_features(x))):
        logits = forward(images)
        (logits * weights).sum().backward()
        gradients = {name: p.grad.numpy() for name, p in model.named_parameters()}
        found.append({"logits": logits.numpy()} | gradients)
        model.clear_gradients(set_to_zero=False)
    assert shapes[0] == [2, tokens, 24]
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        # The terms of a lambda's gradient nearly cancel out.
        share = 1e-3 if "lambda" in name else 1e-5
        atol = share * np.abs(found[1][name]).max()
        np.testing.assert_allclose(value, found[1][name], rtol=0, atol=atol, err_msg=name)


def test_training_drops_patches_and_evaluation_does_not():
    model = small_vit(patch_drop=0.5, no_embed_class=True)
    assert model.forward_features(paddle.zeros([2, 3, 16, 16])).shape == [2, 1 + 8, 24]
    model.eval()
    assert model.forward_features(paddle.zeros([2, 3, 16, 16])).shape == [2, 1 + 16, 24]


def gradients(recompute, parallel=False, frozen=("nothing",)):
    """Two backward passes with all that is random: (calls of the last block, gradients). In
    parallel the first has no synchronisation.
    """
    paddle.seed(0)
    random = {"dropout": 0.2, "attention_dropout": 0.2, "droppath": 0.4, "patch_drop": 0.3}
    model = small_vit(init_values=0.5, recompute=recompute, **random)
    calls = []
    model.blocks[2].register_forward_post_hook(lambda *_: calls.append(1))
    for name, parameter in model.named_parameters():
        parameter.stop_gradient = name.startswith(frozen)
    paddle.seed(1 + utils.rank())
    images = paddle.randn([4, 3, 16, 16])
    trained = paddle.DataParallel(model) if parallel else model
    with trained.no_sync() if parallel else contextlib.nullcontext():
        trained(images).square().sum().backward()
    trained(images).square().sum().backward()
    return len(calls), {
        name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None
    }


@pytest.mark.smoke
@pytest.mark.parametrize(
    "frozen", [("nothing",), ("cls_token", "pos_embed", "patch_embed", "blocks.0")]
)
def test_recompute_gives_the_same_gradients(frozen):
    calls, expected = gradients(False, frozen=frozen)
    calls_again, found = gradients(True, frozen=frozen)
    assert (calls, calls_again) == (2, 4)
    assert (
        list(found)
        == list(expected)
        == [n for n, _ in small_vit(init_values=1).named_parameters() if not n.startswith(frozen)]
    )
    for name, value in expected.items():
        assert (found[name] == value).all(), name


def parallel_gradients():
    return [gradients(recompute, parallel=True) for recompute in (False, True)]


def test_recompute_gives_the_same_gradients_on_two_ranks():
    results = [result for ranks in run_ranks(parallel_gradients) for result in ranks]
    assert [calls for calls, _ in results] == [2, 4, 2, 4]
    expected = results[0][1]
    for name, value in expected.items():
        assert all((found[name] == value).all() for _, found in results), name
    alone = gradients(False)[1]
    # ranks were averaged
    assert any(abs(alone[name] - value).max() > 1e-3 for name, value in expected.items())


def test_recompute_leaves_evaluation_alone():
    model = small_vit(recompute=True)
    calls = []
    model.blocks[0].register_forward_post_hook(lambda *_: calls.append(1))
    model.eval()
    model(paddle.zeros([1, 3, 16, 16])).sum().backward()
    assert len(calls) == 1
