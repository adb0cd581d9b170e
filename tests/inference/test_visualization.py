"""What a model looks at: attention weights against timm's, maps against formulas, what isn't
defined is a line.
"""

import math
from pathlib import Path

import numpy as np
import paddle
import pytest
from golden.convolutions import array as convolutions
from golden.formula import array
from golden.make_names_vit import values
from golden.visualization import ATTENTION, CAM
from support.parity import load_formula
from support.small_models import SMALL_MODELS

from errors import InputError
from inference.visualization.attention import attention, rollout, rollout_matrix
from inference.visualization.cam import METHODS, cam
from models.convmixer import ConvMixer
from models.layers.attention import attention_layers, attention_weights
from models.resnet import ResNet
from models.vit import VisionTransformer

GOLDEN = np.load(Path(__file__).parent.parent / "golden" / "visualization.npz")
ATTEND = ("vit", "beit", "swin", "pvtv2")


def golden(name, folder):
    """The case's model with the formula's weights, and its first image."""
    by = {"pvt": values, "con": convolutions}.get(name[:3], array)
    model = load_formula(SMALL_MODELS[name.partition("_")[0]](name), folder, by)
    return model, paddle.to_tensor(by("images", (2, 3, *model.image_size)))[:1]


def drawn(kind, **options):
    """A small model of an architecture whose weights matter, and an image."""
    model = SMALL_MODELS[kind](**options)
    rng = np.random.default_rng(0)
    for parameter in model.parameters():
        shape = tuple(parameter.shape)
        spread = (
            0.5
            if len(shape) < 2
            else 1.5 / math.sqrt(max(1, math.prod(shape) / max(shape[0], shape[-1])))
        )
        parameter.set_value(
            (parameter.numpy() * (len(shape) < 2) + rng.normal(0, spread, shape)).astype("float32")
        )
    model.eval()
    return model, paddle.to_tensor(
        rng.normal(0, 1, (1, model.in_channels, *model.image_size)).astype("float32")
    )


@pytest.mark.smoke
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_weights_are_timms(tmp_path, name):
    model, image = golden(name, tmp_path)
    expected = {
        key.split("/")[2]: GOLDEN[key] for key in GOLDEN if key.startswith(f"attention/{name}/")
    }
    with paddle.no_grad(), attention_weights(model, list(attention_layers(model))) as kept:
        model(image)
    assert list(kept) == list(expected)
    for key, weights in expected.items():
        np.testing.assert_allclose(kept[key].numpy(), weights, atol=2e-6, rtol=0, err_msg=key)
        np.testing.assert_allclose(kept[key].numpy().sum(-1), 1, atol=1e-6)


def test_weights_are_kept_while_asked_for_alone():
    model, image = drawn("vit")
    with paddle.no_grad():
        before = model(image).numpy()
        with pytest.raises(KeyError), attention_weights(model, ["blocks.1.attn"]) as kept:
            asked = model(image).numpy()
            raise KeyError
        assert list(kept) == ["blocks.1.attn"]
        kept.clear()
        assert (model(image).numpy() == before).all()
    assert not kept
    np.testing.assert_allclose(asked, before, atol=1e-5 * np.ptp(before))
    assert all(not layer.attn_drop._forward_pre_hooks for layer in attention_layers(model).values())


def test_a_map_is_what_the_tokens_that_the_classifier_reads_attend_to(tmp_path):
    model, image = golden("vit", tmp_path)
    for block in (0, 1, 2, -1):
        weights = GOLDEN[f"attention/vit/blocks.{block % 3}.attn"][0]
        np.testing.assert_allclose(
            attention(model, image, block), weights[:, 0, 1:].reshape(3, 4, 4), atol=2e-6
        )
    model, image = golden("beit_shared", tmp_path)  # reads the mean of its 3 x 5 patches
    weights = GOLDEN["attention/beit_shared/blocks.0.attn"][0]
    np.testing.assert_allclose(
        attention(model, image, 0), weights[:, 1:, 1:].mean(1).reshape(3, 3, 5), atol=2e-6
    )
    model, image = drawn("vit", distilled=True)
    with attention_weights(model, ["blocks.2.attn"]) as kept:
        model(image)
    weights = kept["blocks.2.attn"].numpy()[0]
    expected = (weights[:, 0, 2:] + weights[:, 1, 2:]).reshape(3, 4, 4) / 2
    np.testing.assert_allclose(attention(model, image), expected, atol=2e-6)


def test_the_class_tokens_blocks_show_its_queries_and_those_before_the_patches():
    model, image = drawn("cait")
    names = list(attention_layers(model))
    assert names == [
        "blocks.0.attn",
        "blocks.1.attn",
        "blocks.2.attn",
        *(f"blocks_token_only.{i}.attn" for i in (0, 1)),
    ]
    with paddle.no_grad(), attention_weights(model, names) as kept:
        model(image)
    first, last = kept[names[0]].numpy()[0], kept[names[-1]].numpy()[0]
    np.testing.assert_allclose(attention(model, image), last[:, 0, 1:].reshape(4, 4, 4), atol=2e-6)
    np.testing.assert_allclose(
        attention(model, image, 0), first.mean(1).reshape(4, 4, 4), atol=2e-6
    )


@pytest.mark.parametrize(
    ("name", "block"), [("swin", 1), ("swin_odd", 1), ("swin_odd", 3), ("swin", 4)]
)
def test_windows_come_to_their_places(tmp_path, name, block):
    model, image = golden(name, tmp_path)
    key = list(attention_layers(model))[block]
    layer = model.layers[int(key[7])].blocks[int(key[16])]
    weights = GOLDEN[f"attention/{name}/{key}"]
    (rows, columns), (height, width), shift = layer.resolution, layer.window_size, layer.shift_size
    expected = np.zeros((weights.shape[1], rows, columns))
    for y, x in np.ndindex(rows, columns):  # of the shifted map
        window = weights[y // height * -(-columns // width) + x // width].mean(1)
        place = (y + shift[0]) % rows, (x + shift[1]) % columns
        expected[(slice(None), *place)] = window[:, y % height * width + x % width]
    np.testing.assert_allclose(attention(model, image, block), expected, atol=2e-6)


@pytest.mark.parametrize("block", [0, 1, 2, 3, 4])
def test_mask_units_come_to_their_places(block):
    model, image = drawn("hiera")
    name = list(attention_layers(model))[block]
    with paddle.no_grad(), attention_weights(model, [name]) as kept:
        model(image)
    # [units or 1, heads, keys]
    weights = kept[name].numpy().mean(2)
    found = attention(model, image, block)
    side = (8, 8, 4, 4, 2)[block]  # places along a unit's side, of 2 x 3 units
    assert found.shape == (2 ** (0, 1, 1, 2, 3)[block], 2 * side, 3 * side)
    for y, x in np.ndindex(2 * side, 3 * side):
        # the finest digits of row and column come first
        unit = y // side * 3 + x // side
        place = 0
        rest = side
        row = y % side
        column = x % side
        while rest > 1:
            place = 4 * place + 2 * (row % 2) + column % 2
            row = row // 2
            column = column // 2
            rest = rest // 2
        expected = weights[unit, :, place] if block < 4 else weights[0, :, unit * side**2 + place]
        np.testing.assert_allclose(found[:, y, x], expected, atol=1e-6)


def test_a_key_of_several_places_gives_its_weight_to_each(tmp_path):
    # 15 x 19 places, keys of 5 x 5: 3 x 3; 8 x 10, of 3 x 3: 2 x 3
    model, image = golden("pvtv2_plain", tmp_path)
    found = attention(model, image, 0)
    weights = GOLDEN["attention/pvtv2_plain/stages.0.blocks.0.attn"][0].mean(1)
    assert found.shape == (1, 15, 19)
    for y, x in np.ndindex(15, 15):
        assert found[0, y, x] == pytest.approx(weights[0, y // 5 * 3 + x // 5], abs=2e-6)
    assert not found[:, :, 15:].any()  # these make no key
    model, image = drawn("pvtv2", case="pvtv2_linear")
    with attention_weights(model, ["stages.0.blocks.0.attn"]) as kept:  # 13 x 16 places, 7 x 7 keys
        found = attention(model, image, 0)
        model(image)
    weights = kept["stages.0.blocks.0.attn"].numpy()[0].mean(1).reshape(-1, 7, 7)
    expected = [[weights[0, y * 7 // 13, x * 7 // 16] for x in range(16)] for y in range(13)]
    np.testing.assert_allclose(found[0], expected, atol=2e-6)


@pytest.mark.smoke
@pytest.mark.parametrize("kind", ["vit", "beit"])
def test_rollout_is_its_formula(kind):
    model, image = drawn(kind)
    names = list(attention_layers(model))
    with paddle.no_grad(), attention_weights(model, names) as kept:
        model(image)
    product = np.eye(17)
    for name in names:
        mean = kept[name].numpy()[0].mean(0)
        product = (0.5 * mean + 0.5 * np.eye(17)) @ product
    np.testing.assert_allclose(product.sum(1), 1, atol=1e-6)
    rows = product[:1, 1:] if kind == "vit" else product[1:, 1:]
    np.testing.assert_allclose(rollout(model, image), rows.mean(0).reshape(4, 4), atol=1e-7)
    np.testing.assert_allclose(
        rollout_matrix([np.array([[0, 1], [0.5, 0.5]])] * 2), [[0.375, 0.625], [0.3125, 0.6875]]
    )


@pytest.mark.parametrize(
    ("kind", "method", "message"),
    [
        (
            "swin",
            rollout,
            "rollout isn't defined for SwinTransformer: its blocks don't attend from all tokens",
        ),
        (
            "cait",
            rollout,
            "rollout isn't defined for Cait: its blocks don't attend from all tokens",
        ),
        (
            "pvtv2",
            rollout,
            "isn't defined for PyramidVisionTransformerV2: .*; use attention or cam",
        ),
        ("resnet", rollout, "rollout isn't defined for ResNet: it has no attention; use cam"),
        (
            "mixer",
            attention,
            "MlpMixer has no attention that can be drawn; use cam instead",
        ),
        (
            "vit",
            lambda *a: attention(*a, 3),
            "-block is 3, but the model has 3 of them: give 0 to 2, or -1 for the last",
        ),
        ("vit", lambda *a: attention(*a, -4), "-block is -4"),
        ("vit", lambda *a: cam(*a, 7), "-class is 7, but the model has the outputs 0 to 6"),
    ],
)
def test_what_isnt_defined_is_a_line(kind, method, message):
    with pytest.raises(InputError, match=message):
        method(*drawn(kind))


@pytest.mark.smoke
@pytest.mark.parametrize("name", CAM)
@pytest.mark.parametrize("method", METHODS)
def test_maps_of_a_class_are_grad_cams(tmp_path, name, method):
    model, image = golden(name, tmp_path)
    expected = GOLDEN[f"{method.replace('++', 'plusplus')}/{name}"]
    np.testing.assert_allclose(
        cam(model, image, CAM[name], method), expected, atol=2e-5 * expected.max(), rtol=1e-4
    )


@pytest.mark.parametrize("kind", SMALL_MODELS)
def test_every_architecture_has_a_map_of_a_class(kind):
    model, image = drawn(kind)
    logits = model(image).numpy()[0]
    found = [cam(model, image, output) for output in range(len(logits))]
    assert (cam(model, image) == found[logits.argmax()]).all()
    [last] = model.forward_intermediates(image, [-1], intermediates_only=True)
    assert {one.shape for one in found} == {tuple(last.shape[2:])}
    assert all(np.isfinite(one).all() and one.min() >= 0 for one in found)
    assert any(np.ptp(one) > 0 for one in found) or found[0].size == 1


def squares(side, rng):
    """32 images of noise with a square of a class's colour in a quadrant, of the last class with
    none.
    """
    images, labels = (
        rng.normal(0, 0.3, (32, 3, side, side)).astype("float32"),
        rng.integers(0, 4, 32),
    )
    length = side * 3 // 8
    quadrants = rng.integers(0, 4, 32)
    for image, label, quadrant in zip(images, labels, quadrants, strict=True):
        y, x = side // 2 * np.array(divmod(quadrant, 2)) + rng.integers(0, side // 8 + 1, 2)
        if label < 3:
            image[label, y : y + length, x : x + length] += 2
    return paddle.to_tensor(images), paddle.to_tensor(labels), quadrants


def within(values, quadrant):
    """The share of a map that lies in a quadrant."""
    (y, x), half = divmod(int(quadrant), 2), np.array(values.shape) // 2
    return values[y * half[0] : (y + 1) * half[0], x * half[1] : (x + 1) * half[1]].sum() / max(
        values.sum(), 1e-12
    )


MODELS = {
    "vit": (lambda: VisionTransformer(32, 4, 3, 4, embed_dim=32, depth=1, num_heads=2), 100, 3e-3),
    "convmixer": (
        lambda: ConvMixer(16, num_classes=4, embed_dim=32, depth=1, patch_size=4, kernel_size=3),
        60,
        3e-3,
    ),
    "resnet": (lambda: ResNet(16, 3, 4, 18, small_stem=True), 30, 1e-3),
}


@pytest.mark.parametrize(
    "kind", ["vit", "convmixer", pytest.param("resnet", marks=pytest.mark.slow)]
)
def test_a_trained_model_looks_where_the_class_is(kind):
    paddle.seed(0)
    rng = np.random.default_rng(0)
    model, steps, rate = MODELS[kind][0](), *MODELS[kind][1:]
    optimizer = paddle.optimizer.AdamW(rate, parameters=model.parameters())
    for _ in range(steps):
        images, labels, _ = squares(model.image_size[0], rng)
        paddle.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.clear_grad()
    model.eval()
    images, labels, quadrants = squares(model.image_size[0], rng)
    assert (model(images).numpy().argmax(1) == labels.numpy()).mean() > (
        0.5 if kind == "resnet" else 0.9
    )
    seen = [i for i in range(32) if int(labels[i]) < 3]
    for method in ("gradcam", "hirescam") if kind == "resnet" else METHODS:  # its 30 steps are few
        shares = [
            within(cam(model, images[i : i + 1], int(labels[i]), method), quadrants[i])
            for i in seen
        ]
        assert np.mean(shares) > 0.5, method
    if kind == "vit":
        for values in (
            lambda image: attention(model, image).mean(0),
            lambda image: rollout(model, image),
        ):
            assert np.mean([within(values(images[i : i + 1]), quadrants[i]) for i in seen]) > 0.5
