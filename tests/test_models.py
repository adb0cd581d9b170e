"""The ViT and its options against their definitions, timm's outputs and timm's published sizes."""

import contextlib

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.formula import VARIANTS, VIT, array
from ranks import run_ranks
from safetensors.numpy import save_file

import utils
from config import get_config
from errors import InputError
from models import build_model, create_model, list_models
from models.layers import DropPath, PatchDropout, linear_weights
from models.vit import VisionTransformer
from weights import load_weights

# Parameters of timm 1.0.31's models of the same names (num_classes=1000).
PARAMETERS = {
    "vit_tiny_patch16_224": 5_717_416,
    "vit_tiny_patch16_384": 5_790_376,
    "vit_small_patch16_224": 22_050_664,
    "vit_small_patch16_384": 22_196_584,
    "vit_small_patch32_224": 22_878_952,
    "vit_small_patch32_384": 22_915_432,
    "vit_base_patch16_224": 86_567_656,
    "vit_base_patch16_384": 86_859_496,
    "vit_base_patch32_224": 88_224_232,
    "vit_base_patch32_384": 88_297_192,
    "vit_large_patch16_224": 304_326_632,
    "vit_large_patch16_384": 304_715_752,
    "vit_large_patch32_224": 306_535_400,
    "vit_large_patch32_384": 306_632_680,
    "vit_huge_patch14_224": 632_045_800,
    "deit_tiny_patch16_224": 5_717_416,
    "deit_small_patch16_224": 22_050_664,
    "deit_base_patch16_224": 86_567_656,
    "deit_base_patch16_384": 86_859_496,
    "deit_tiny_distilled_patch16_224": 5_910_800,
    "deit_small_distilled_patch16_224": 22_436_432,
    "deit_base_distilled_patch16_224": 87_338_192,
    "deit_base_distilled_patch16_384": 87_630_032,
    "deit3_small_patch16_224": 22_059_496,
    "deit3_medium_patch16_224": 38_849_512,
    "deit3_base_patch16_224": 86_585_320,
    "deit3_large_patch16_224": 304_374_760,
    "deit3_huge_patch14_224": 632_126_440,
}
OPTIONS = [{}, {"init_values": 0.1, "no_embed_class": True}, {"global_pool": "avg"}, {"distilled": True}]


def test_every_model_of_paddlevit_is_shipped_under_its_name():
    assert {*list_models("vit_*"), *list_models("deit*")} == {*PARAMETERS, "vit_digits"}
    for name in list_models():
        assert name == get_config(name).MODEL.NAME


def test_recipes_are_configurations_but_no_models(tmp_path, monkeypatch):
    for folder in ("vit", "recipes"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"of_{folder}.yaml").write_text("MODEL:\n  DEPTH: 3\n")
    monkeypatch.setattr("models.CONFIG_DIR", tmp_path)
    monkeypatch.setattr("config.CONFIG_DIR", tmp_path)
    assert list_models() == ["of_vit"]
    assert get_config("of_recipes").MODEL.DEPTH == 3
    with pytest.raises(InputError, match="no model of_recipes"):
        create_model("of_recipes")


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_parameter_counts_are_timms(name):
    c = get_config(name)
    d, hidden = c.MODEL.EMBED_DIM, int(c.MODEL.EMBED_DIM * c.MODEL.MLP_RATIO)
    block = 2 * 2 * d + (3 * d * d + 3 * d) + (d * d + d) + (d * hidden + hidden) + (hidden * d + d)
    block += 2 * d * (c.MODEL.INIT_VALUES is not None)
    prefix = 1 + c.MODEL.DISTILLED
    positions = (c.DATA.IMAGE_SIZE // c.MODEL.PATCH_SIZE) ** 2 + prefix * (not c.MODEL.NO_EMBED_CLASS)
    patches, heads = 3 * c.MODEL.PATCH_SIZE**2 * d + d, prefix * (d * 1000 + 1000)
    assert prefix * d + positions * d + patches + c.MODEL.DEPTH * block + 2 * d + heads == PARAMETERS[name]
    if d <= 384:  # the formula is the model's: checked on the small ones, which build in a second
        assert sum(p.size for p in create_model(name).parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", list_models("deit*"))
def test_images_are_read_as_timm_reads_them(name):
    data = get_config(name).DATA
    assert (data.IMAGE_SIZE, data.CROP_PCT) in ((224, 0.9), (384, 1.0))
    assert str(data.IMAGE_SIZE) in name
    assert (data.IMAGENET_MEAN, data.IMAGENET_STD) == ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    assert data.INTERPOLATION == "bicubic"


def small(**changes):
    """The ViT of golden/formula.py, 16 x 16 pixels and 16 patches."""
    sizes = {("image_size" if key == "img_size" else key): value for key, value in {**VIT, **changes}.items()}
    return VisionTransformer(**sizes)


def golden_vit(folder, name):
    """The model of golden/NAME.npz, its weights read from a file in timm's layout."""
    model = small(distilled=name == "vit_distilled", **VARIANTS[name])
    shapes = {
        key: tuple(t.shape)[::-1] if key in linear_weights(model) else tuple(t.shape)
        for key, t in model.state_dict().items()
    }
    save_file({key: array(key, shape) for key, shape in shapes.items()}, folder / "timm.safetensors")
    load_weights(model, folder / "timm.safetensors")
    model.eval()
    return model, np.load(ROOT / "tests" / "golden" / f"{name}.npz"), paddle.to_tensor(array("images", (2, 3, 16, 16)))


@pytest.mark.smoke
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_features_and_gradients_are_timms(tmp_path, name):
    model, golden, images = golden_vit(tmp_path, name)
    logits = model(images)
    span = np.ptp(golden["logits"])
    np.testing.assert_allclose(logits.numpy(), golden["logits"], atol=1e-5 * span, rtol=0)
    np.testing.assert_allclose(model.forward_features(images).numpy(), golden["features"], atol=1e-5, rtol=0)
    (logits * paddle.to_tensor(array("loss", (2, 7)))).sum().backward()
    gradients = {key: parameter.grad.numpy() for key, parameter in model.named_parameters()}
    assert {f"grad/{key}" for key in gradients} == {key for key in golden if key.startswith("grad/")}
    for key, found in gradients.items():
        expected, found = golden[f"grad/{key}"], found.T if key in linear_weights(model) else found
        np.testing.assert_allclose(found, expected, atol=1e-5 * max(np.ptp(expected), 1e-3), rtol=0, err_msg=key)


def test_a_distilled_model_trains_both_heads_when_told(tmp_path):
    model, golden, images = golden_vit(tmp_path, "vit_distilled")
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


def test_initialisation_is_timms():
    paddle.seed(0)
    model = create_model("vit_tiny_patch16_224", num_classes=10)
    assert abs(float(model.blocks[0].mlp.fc1.weight.std()) - 0.02) < 2e-4
    assert abs(float(model.pos_embed.std()) - 0.02) < 5e-4
    assert float(model.cls_token.abs().max()) < 1e-5
    assert float(model.blocks[0].attn.qkv.bias.abs().max()) == 0.0
    bound = (3 * 16 * 16) ** -0.5
    assert bound * 0.99 < float(model.patch_embed.proj.weight.abs().max()) <= bound
    assert 0 < float(model.patch_embed.proj.bias.abs().max()) <= bound
    model = create_model("vit_tiny_patch16_224", num_classes=10, depth=1, distilled=True, init_values=1e-5)
    assert abs(float(model.dist_token.std()) - 0.02) < 3e-3
    assert abs(float(model.head_dist.weight.std()) - 0.02) < 2e-3
    assert (model.blocks[0].ls1.gamma.numpy() == np.float32(1e-5)).all()
    assert (model.blocks[0].ls2.gamma.numpy() == np.float32(1e-5)).all()


@pytest.mark.parametrize("distilled", [False, True])
def test_head_init_scale_multiplies_fresh_heads_alone(distilled):
    states = []
    for scale in (1.0, 1e-3):
        paddle.seed(0)
        model = small(head_init_scale=scale, distilled=distilled)
        states.append({name: tensor.numpy().copy() for name, tensor in model.state_dict().items()})
        paddle.seed(1)
        model.reset_classifier(5)
        states[-1] |= {f"new {name}": getattr(model, name).weight.numpy() for name in model.classifier_names()}
    for name, value in states[0].items():
        scale = np.float32(1e-3 if "head" in name else 1)
        assert (states[1][name] == value * scale).all(), name
    assert 0.015 < states[0]["new head"].std() < 0.025


@pytest.mark.parametrize("options", OPTIONS)
def test_every_parameter_is_in_one_layer_group(options):
    model = small(**options)
    groups = model.layer_groups()
    assert groups[0] == ("cls_token", "dist_token", "reg_token", "pos_embed", "patch_embed", "norm_pre")
    assert groups[1:-1] == [("blocks.0",), ("blocks.1",), ("blocks.2",)]
    assert groups[-1] == ("norm", "fc_norm", "head", "head_dist")
    for name, _ in model.named_parameters():
        owners = [group for group in groups for prefix in group if name == prefix or name.startswith(f"{prefix}.")]
        assert len(owners) == 1, name
    assert model.no_weight_decay() == {"pos_embed", "cls_token", "dist_token", "reg_token"}


def test_reset_classifier_replaces_every_head():
    images = paddle.zeros([2, 3, 16, 16])
    model = small(distilled=True)
    assert (small().classifier_names(), model.classifier_names()) == (("head",), ("head", "head_dist"))
    model.reset_classifier(5)
    assert (model.num_classes, model.head.weight.shape, model.head_dist.weight.shape) == (5, [24, 5], [24, 5])
    assert model(images).shape == [2, 5]
    model.reset_classifier(0)
    tokens = model.forward_features(images)
    np.testing.assert_allclose(model(images).numpy(), tokens[:, :2].mean(axis=1).numpy(), atol=1e-6)


def test_create_model_takes_overrides_and_names_what_is_wrong():
    model = create_model("vit_tiny_patch16_224", num_classes=3, image_size=32, depth=1)
    assert model(paddle.zeros([2, 3, 32, 32])).shape == [2, 3]
    model.reset_classifier(5)
    assert model(paddle.zeros([1, 3, 32, 32])).shape == [1, 5]
    model.reset_classifier(0)
    assert model(paddle.zeros([1, 3, 32, 32])).shape == [1, 192]
    with pytest.raises(InputError, match="takes images of 32 x 32"):
        model(paddle.zeros([1, 3, 48, 48]))
    with pytest.raises(InputError, match="no model vit_bas_patch16_224; did you mean vit_base_patch16_224"):
        create_model("vit_bas_patch16_224")
    with pytest.raises(InputError, match="unknown key MODEL.NUM_CLASES; did you mean MODEL.NUM_CLASSES"):
        create_model("vit_tiny_patch16_224", num_clases=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["MODEL.PATCH_SIZE", "15"], "IMAGE_SIZE 224 is not a multiple of PATCH_SIZE 15"),
        (["MODEL.NUM_HEADS", "7"], "EMBED_DIM 768 is not a multiple of NUM_HEADS 7"),
        (["MODEL.TYPE", "Vitt"], "MODEL.TYPE is 'Vitt', expected one of deit, vit"),
        (["MODEL.NUM_CLASSES", "auto"], "MODEL.NUM_CLASSES is 'auto'"),
        (["MODEL.DISTILLED", "True", "MODEL.GLOBAL_POOL", "avg"], "GLOBAL_POOL is 'avg', expected 'token'"),
    ],
)
def test_sizes_that_do_not_fit_are_named(options, message):
    with pytest.raises(InputError, match=message):
        build_model(get_config(None, options))


def test_attn_head_size_sets_the_width_of_a_head():
    model = create_model("vit_tiny_patch16_224", image_size=32, depth=1, attn_head_size=32, num_classes=2)
    assert model.blocks[0].attn.qkv.weight.shape == [192, 3 * 3 * 32]
    assert model.blocks[0].attn.scale == 32**-0.5


def test_drop_path_drops_whole_samples_and_keeps_the_mean():
    paddle.seed(0)
    layer = DropPath(0.25)
    out = layer(paddle.ones([4000, 2, 3])).numpy()
    assert set(np.unique(out).tolist()) == {0.0, np.float32(1 / 0.75)}
    assert (out == out[:, :1, :1]).all()
    assert abs(out.mean() - 1) < 0.03
    layer.eval()
    assert (layer(paddle.ones([2, 2])).numpy() == 1).all()
    rates = [block.drop_path1.drop_prob for block in create_model("vit_digits", droppath=0.3).blocks]
    np.testing.assert_allclose(rates, [0.0, 0.1, 0.2, 0.3])


@pytest.mark.parametrize(("patches", "rate", "kept"), [(16, 0.3, 11), (196, 0.5, 98), (3, 0.9, 1)])
@pytest.mark.parametrize("prefix", [1, 2])
def test_patch_dropout_keeps_whole_tokens_and_the_prefix(patches, rate, kept, prefix):
    paddle.seed(0)
    layer = PatchDropout(rate, prefix)
    x = paddle.arange(8 * (prefix + patches) * 5, dtype="float32").reshape([8, -1, 5])
    x.stop_gradient = False
    out = layer(x)
    assert out.shape == [8, prefix + kept, 5]
    assert (out[:, :prefix].numpy() == x[:, :prefix].numpy()).all()
    chosen = (out[:, prefix:, 0] / 5).numpy().round().astype(int)
    assert (out[:, prefix:].numpy() == x.numpy().reshape(-1, 5)[chosen]).all()
    assert (chosen // (prefix + patches) == np.arange(8)[:, None]).all()  # each sample's own
    assert all(len(set(row)) == kept for row in chosen.tolist())
    assert len({tuple(sorted(row)) for row in (chosen % (prefix + patches)).tolist()}) > 1  # drawn per sample
    out.sum().backward()
    assert x.grad.numpy().sum() == 8 * (prefix + kept) * 5
    layer.eval()
    assert layer(x) is x


def test_patch_dropout_keeps_every_patch_equally_often():
    paddle.seed(0)
    x = paddle.arange(9, dtype="float32").reshape([1, 9, 1]).expand([4000, 9, 1])
    counts = np.bincount(PatchDropout(0.5, 1)(x).numpy().astype(int).ravel())
    assert counts[0] == 4000
    assert abs(counts[1:] / 4000 - 0.5).max() < 0.04


def test_training_drops_patches_and_evaluation_does_not():
    model = small(patch_drop=0.5, no_embed_class=True)
    assert model.forward_features(paddle.zeros([2, 3, 16, 16])).shape == [2, 1 + 8, 24]
    model.eval()
    assert model.forward_features(paddle.zeros([2, 3, 16, 16])).shape == [2, 1 + 16, 24]


def gradients(recompute, parallel=False, frozen=("nothing",)):
    """Two backward passes with all that is random: (calls of the last block, gradients). In parallel the first has no
    synchronisation.
    """
    paddle.seed(0)
    random = {"drop": 0.2, "attn_drop": 0.2, "drop_path": 0.4, "patch_drop": 0.3}
    model = small(init_values=0.5, recompute=recompute, **random)
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
    return len(calls), {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.smoke
@pytest.mark.parametrize("frozen", [("nothing",), ("cls_token", "pos_embed", "patch_embed", "blocks.0")])
def test_recompute_gives_the_same_gradients(frozen):
    calls, expected = gradients(False, frozen=frozen)
    calls_again, found = gradients(True, frozen=frozen)
    assert (calls, calls_again) == (2, 4)
    assert (
        list(found)
        == list(expected)
        == [n for n, _ in small(init_values=1).named_parameters() if not n.startswith(frozen)]
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
    assert any(abs(alone[name] - value).max() > 1e-3 for name, value in expected.items())  # ranks were averaged


def test_recompute_leaves_evaluation_alone():
    model = small(recompute=True)
    calls = []
    model.blocks[0].register_forward_post_hook(lambda *_: calls.append(1))
    model.eval()
    model(paddle.zeros([1, 3, 16, 16])).sum().backward()
    assert len(calls) == 1


def test_autocast_leaves_softmax_and_layer_norm_in_float32():
    for dtype in ("float16", "bfloat16"):
        assert {"softmax", "layer_norm"} <= set(paddle.amp.black_list()[dtype]["O1"])
