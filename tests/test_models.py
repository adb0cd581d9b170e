"""The ViT against its definition and timm's published sizes."""

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.formula import VIT, array
from paddle import nn
from safetensors.numpy import save_file

from config import CONFIG_DIR, get_config
from errors import InputError
from models import build_model, create_model, list_models
from models.layers import DropPath
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
}


def test_every_vit_of_paddlevit_is_shipped_under_its_name():
    assert set(list_models("vit_*")) == {*PARAMETERS, "vit_digits"}
    for file in CONFIG_DIR.glob("*/*.yaml"):
        assert file.stem == get_config(file).MODEL.NAME


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_parameter_counts_are_timms(name):
    c = get_config(name)
    d, hidden = c.MODEL.EMBED_DIM, int(c.MODEL.EMBED_DIM * c.MODEL.MLP_RATIO)
    block = 2 * 2 * d + (3 * d * d + 3 * d) + (d * d + d) + (d * hidden + hidden) + (hidden * d + d)
    tokens = (c.DATA.IMAGE_SIZE // c.MODEL.PATCH_SIZE) ** 2 + 1
    patches = 3 * c.MODEL.PATCH_SIZE**2 * d + d
    assert d + tokens * d + patches + c.MODEL.DEPTH * block + 2 * d + d * 1000 + 1000 == PARAMETERS[name]
    if d <= 384:  # the formula is the model's: checked on the small ones, which build in a second
        assert sum(p.size for p in create_model(name).parameters()) == PARAMETERS[name]


def golden_vit(folder, **changes):
    """The reduced ViT of golden/make_golden.py, its weights read from a file in timm's layout."""
    sizes = {("image_size" if key == "img_size" else key): value for key, value in VIT.items()}
    model = VisionTransformer(**{**sizes, **changes})
    linear = {f"{name}.weight" for name, layer in model.named_sublayers() if isinstance(layer, nn.Linear)}
    shapes = {
        name: tuple(t.shape)[::-1] if name in linear else tuple(t.shape) for name, t in model.state_dict().items()
    }
    save_file({name: array(name, shape) for name, shape in shapes.items()}, folder / "timm.safetensors")
    load_weights(model, folder / "timm.safetensors")
    return model, linear


@pytest.mark.smoke
def test_logits_features_and_gradients_are_timms(tmp_path):
    golden = np.load(ROOT / "tests" / "golden" / "vit.npz")
    model, linear = golden_vit(tmp_path)
    model.eval()
    images = paddle.to_tensor(array("images", (2, 3, 16, 16)))
    logits = model(images)
    span = np.ptp(golden["logits"])
    np.testing.assert_allclose(logits.numpy(), golden["logits"], atol=1e-5 * span, rtol=0)
    np.testing.assert_allclose(model.forward_features(images).numpy(), golden["features"], atol=1e-5, rtol=0)
    (logits * paddle.to_tensor(array("loss", (2, 7)))).sum().backward()
    for name, parameter in model.named_parameters():
        expected, found = golden[f"grad/{name}"], parameter.grad.numpy()
        found = found.T if name in linear else found
        np.testing.assert_allclose(found, expected, atol=1e-5 * max(np.ptp(expected), 1e-3), rtol=0, err_msg=name)


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
        (["MODEL.TYPE", "Vitt"], "MODEL.TYPE is 'Vitt', expected one of vit"),
        (["MODEL.NUM_CLASSES", "auto"], "MODEL.NUM_CLASSES is 'auto'"),
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
