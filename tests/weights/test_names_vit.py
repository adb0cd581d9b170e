"""Names that other toolkits give a ViT's tensors: their files give their logits; what is dropped,
what is left.
"""

import json

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.make_names_vit import IMAGES, SIZES, values

from errors import InputError
from models.vit import VisionTransformer
from weights import names
from weights.layout import linear_weights
from weights.names import encoder_arrays, timm_names, vit
from weights.names.vit import google_names

CASES = {}
for file in ("names_vit", "names_vit_timm"):
    CASES |= json.loads((ROOT / "tests" / "golden" / f"{file}.json").read_text())
SMALL = SIZES | {"image_size": 16}


def stored(case):
    return {name: values(name, shape) for name, shape in CASES[case]["shapes"].items()}


def plain(**options):
    """The small model's arrays by ``values``, in torch's layout."""
    model = VisionTransformer(**SMALL | options)
    linear = linear_weights(model)
    state = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    return {
        name: values(name, shape[::-1] if name in linear else shape)
        for name, shape in state.items()
    }


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert all((found[name] == value).all() for name, value in expected.items())


@pytest.mark.smoke
@pytest.mark.parametrize("case", CASES)
def test_weights_of_other_toolkits_give_their_logits(case):
    golden = CASES[case]
    model = VisionTransformer(**SMALL | golden["model"])
    state = model.state_dict()
    linear = linear_weights(model)
    arrays = stored(case)
    before = {name: value.copy() for name, value in arrays.items()}
    model_arrays, _ = encoder_arrays(arrays, state.keys())
    named = timm_names(vit, model_arrays, golden["layout"], state.keys())
    assert named.keys() == state.keys()
    assert_same(arrays, before)
    for name, tensor in state.items():
        turned = golden["layout"] != "paddle" and name in linear
        tensor.set_value(np.ascontiguousarray(named[name].T if turned else named[name]))
    model.eval()
    logits = model(paddle.to_tensor(IMAGES)).numpy()
    expected = np.array(golden["logits"])
    span = np.ptp(expected)
    assert np.abs(np.diff(expected, axis=0)).max() > 1e-2 * span  # the images matter
    np.testing.assert_allclose(logits, expected, atol=1e-5 * span, rtol=0)


@pytest.mark.parametrize(
    "options", [{}, {"distilled": True}, {"init_values": 1, "reg_tokens": 2, "qk_norm": True}]
)
def test_timms_names_and_unknown_ones_pass_untouched(options):
    arrays = plain(**options) | {"classifier.0.weight": np.ones(2), "extra": np.ones(1)}
    assert_same(timm_names(vit, arrays, "torch", plain(**options)), arrays)
    assert_same(timm_names(None, arrays, "torch", ()), arrays)


@pytest.mark.parametrize(
    ("length", "alone"), [(1, True), (2, False), (3, False), (4, True), (16, True), (17, False)]
)
def test_positions_that_make_a_square_without_the_class_token_are_of_patches_alone(length, alone):
    arrays = {
        "blocks.0.norm1.weight": np.ones(8),
        "cls_token": np.ones((1, 1, 8)),
        "pos_embed": np.ones((1, length, 8)),
    }
    assert vit.model_keys(arrays)["NO_EMBED_CLASS"] is alone
    del arrays["cls_token"]
    assert vit.model_keys(arrays)["NO_EMBED_CLASS"] is False


def test_queries_keys_and_values_are_joined_in_this_order():
    arrays = stored("Google")
    named = timm_names(vit, arrays, "jax", ())
    for i in range(2):
        layer = f"Transformer/encoderblock_{i}/MultiHeadDotProductAttention_1"
        parts = [
            arrays[f"{layer}/{part}/kernel"].reshape(24, 24).T for part in ("query", "key", "value")
        ]
        assert (named[f"blocks.{i}.attn.qkv.weight"] == np.concatenate(parts)).all()
        parts = [arrays[f"{layer}/{part}/bias"].reshape(24) for part in ("query", "key", "value")]
        assert (named[f"blocks.{i}.attn.qkv.bias"] == np.concatenate(parts)).all()
        assert (
            named[f"blocks.{i}.attn.proj.weight"] == arrays[f"{layer}/out/kernel"].reshape(24, 24).T
        ).all()


@pytest.mark.parametrize("shape", [None, (24, 2, 8), ()])
def test_queries_keys_and_values_that_do_not_fit_together_are_left(shape):
    arrays = stored("Google")
    key = arrays.pop("Transformer/encoderblock_0/MultiHeadDotProductAttention_1/key/kernel")
    if shape is not None:
        arrays["Transformer/encoderblock_0/MultiHeadDotProductAttention_1/key/kernel"] = np.resize(
            key, shape
        )
    named = timm_names(vit, arrays, "jax", ())
    assert {
        "blocks.0.attn.q.weight",
        "blocks.0.attn.v.weight",
        "blocks.0.attn.qkv.bias",
    } < named.keys()
    assert ("blocks.0.attn.k.weight" in named) == (shape is not None)


@pytest.mark.smoke
def test_googles_names_come_back():
    arrays = stored("Google")
    assert_same(google_names(timm_names(vit, arrays, "jax", ()), num_heads=3), arrays)
    assert_same(timm_names(vit, google_names(plain(), num_heads=3), "jax", ()), plain())
    one = VisionTransformer(**SMALL | {"depth": 1})
    assert_same(names.google_names(one, plain(depth=1)), google_names(plain(depth=1), num_heads=3))
    target = {
        f"opt/target/{name}": value
        for name, value in google_names(plain(num_classes=0), num_heads=3).items()
    }
    assert_same(timm_names(vit, target, "jax", ()), plain(num_classes=0))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"distilled": True}, "dist_token"),
        ({"init_values": 1}, r"blocks\.0\.ls1\.gamma"),
        ({"qk_norm": True}, r"blocks\.0\.attn\.q_norm\.weight"),
        ({"global_pool": "avg"}, r"fc_norm\.weight"),
    ],
)
def test_only_a_plain_vit_is_written_under_googles_names(options, name):
    with pytest.raises(InputError, match=f"{name} can't be written to Google's format"):
        google_names(plain(**options), num_heads=3)


def test_dinov2s_blocks_in_chunks_are_numbered_from_the_first_to_the_last():
    backbone = plain(num_classes=0)
    chunked = {name.replace("blocks.1.", "blocks.0.1."): value for name, value in backbone.items()}
    assert_same(timm_names(vit, chunked, "torch", backbone), backbone)


@pytest.mark.parametrize("layer", ["pre_logits.fc.weight", "pre_logits.0.weight"])
def test_a_head_behind_another_layer_is_dropped_with_it(layer):
    assert_same(
        timm_names(vit, plain() | {layer: np.ones(1)}, "torch", plain()), plain(num_classes=0)
    )
    google = google_names(plain(), num_heads=3) | {"pre_logits/kernel": np.ones((24, 24))}
    assert_same(timm_names(vit, google, "jax", plain()), plain(num_classes=0))


def test_a_backbones_norm_serves_as_fc_norm_and_a_classifiers_does_not():
    pooled = plain(global_pool="avg")
    backbone = plain(num_classes=0)
    found = timm_names(vit, backbone, "torch", pooled)
    assert pooled.keys() - found.keys() == {"head.weight", "head.bias"}
    assert (found["fc_norm.bias"] == backbone["norm.bias"]).all()
    assert "norm.weight" not in found
    assert timm_names(vit, plain(), "torch", pooled).keys() == plain().keys()
    assert timm_names(vit, pooled, "torch", plain()).keys() == pooled.keys()


def test_linear_patches_become_a_convolution():
    kernel = values("kernel", (24, 48))
    for layout, value in (("torch", kernel), ("paddle", kernel.T)):
        found = timm_names(vit, {"patch_embed.proj.weight": value}, layout, ())[
            "patch_embed.proj.weight"
        ]
        assert (found == kernel.reshape(24, 3, 4, 4)).all()
    for shape, expected in (((24, 16), (24, 1, 4, 4)), ((24, 20), (24, 20)), ((24, 0), (24, 0))):
        found = timm_names(vit, {"patch_embed.proj.weight": np.zeros(shape)}, "torch", ())
        assert found["patch_embed.proj.weight"].shape == expected


def test_two_arrays_of_one_meaning_are_refused():
    with pytest.raises(
        InputError,
        match=r"head\.bias and classifier\.bias both correspond to head\.bias; remove one of them",
    ):
        timm_names(vit, {"head.bias": np.ones(7), "classifier.bias": np.ones(7)}, "paddle", ())
