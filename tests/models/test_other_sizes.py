"""Models that take images of other sizes than their own, against timm's ``dynamic_img_size``."""

import copy
import itertools

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.formula import places
from golden.other_sizes import CASES, formula, key
from golden.vit import CASES as VIT_CASES
from support.parity import load_formula
from support.small_models import SMALL_MODELS, small_eva, small_swin, small_vit

from errors import InputError
from models.layers.constants import Constants
from models.layers.positions import ResizedPositions
from weights import load_weights, save_weights
from weights.layout import linear_weights
from weights.resize import resize_pos_embed

# Options of a ViT that timm lacks.
OF_OURS = {
    "sincos2d": {"pos_embed": "sincos2d"},
    "prompts": {"prompt_tokens": 3},
    "deep prompts": {"prompt_tokens": 2, "prompt_deep": True},
}


def dynamic(model):
    model.take_other_sizes()
    return model


@pytest.mark.smoke
@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_are_timms(tmp_path, case):
    module, sizes = CASES[case]
    array = formula(module)
    golden = np.load(ROOT / "tests" / "golden" / "other_sizes.npz")
    make = SMALL_MODELS[module.__name__.rpartition(".")[2]]
    model = dynamic(load_formula(make(case), tmp_path, array))
    transposed = linear_weights(model)
    # The model's own size comes between others, which it doesn't change.
    for size in sizes:
        model.clear_gradients()
        images = paddle.to_tensor(array("images", (2, 3, *size)))
        logits = model(images)
        expected = golden[f"{key(case, size)}/logits"]
        span = np.ptp(expected)
        assert np.abs(np.diff(expected, axis=0)).max() > 1e-4 * span
        np.testing.assert_allclose(logits.numpy(), expected, atol=1e-5 * span, rtol=0)
        (logits * paddle.to_tensor(array("loss", tuple(logits.shape)))).sum().backward()
        gradients = {name: one.grad for name, one in model.named_parameters()}
        names = golden[f"{case}/names"].tolist()
        assert set(gradients) == set(names)
        spans = golden[f"{key(case, size)}/spans"]
        # A gradient whose terms cancel out is only rounding.
        least = 2e-2 * spans.max()
        stored = golden[f"{key(case, size)}/gradients"]
        for name, values, extent in zip(names, stored, spans, strict=True):
            found = gradients[name].numpy()
            found = places(found.T if name in transposed else found)
            atol = 1e-5 * max(extent, least)
            np.testing.assert_allclose(found, values, atol=atol, rtol=0, err_msg=name)


# ------------------------------------------------------- what timm doesn't tell


def copied(model, size, folder, **options):
    """A ViT of images of another size with the weights of ``model``."""
    save_weights(model, folder / "model.safetensors")
    other = small_vit(image_size=size, **options)
    load_weights(other, folder / "model.safetensors")
    other.eval()
    return other


@pytest.mark.parametrize("options", OF_OURS.values(), ids=OF_OURS)
@pytest.mark.parametrize("size", [(8, 8), (12, 20)])
def test_our_options_follow_the_size(tmp_path, options, size):
    model = dynamic(load_formula(small_vit(**options), tmp_path))
    images = paddle.to_tensor(formula(None)("images", (2, 3, *size)))
    other = copied(model, size, tmp_path, **options)
    if "pos_embed" in options:
        # A fixed embedding, which no file has, is resized as a learnt one.
        resized = resize_pos_embed(model.pos_embed.numpy(), 0, (size[0] // 4, size[1] // 4))
        other.pos_embed.set_value(resized)
    np.testing.assert_allclose(model(images).numpy(), other(images).numpy(), atol=1e-6)


@pytest.mark.parametrize("case", VIT_CASES)
def test_each_vit_follows_the_size(tmp_path, case):
    model = dynamic(load_formula(small_vit(case), tmp_path))
    size = (20, 8)
    other = load_formula(small_vit(case, image_size=size), tmp_path)
    positions = resize_pos_embed(
        model.pos_embed.numpy(), model.pos_embed_prefix, (5, 2), model.patch_embed.grid_size
    )
    other.pos_embed.set_value(positions)
    images = paddle.to_tensor(formula(None)("images", (2, 3, *size)))
    found = model(images).numpy()
    span = np.ptp(found)
    np.testing.assert_allclose(found, other(images).numpy(), atol=1e-6 * max(span, 1), rtol=0)


def test_positions_are_resized_as_those_of_weight_files():
    rng = np.random.default_rng(0)
    for old, new, prefix in itertools.product([(4, 4), (3, 5)], [(2, 2), (7, 1)], (0, 2)):
        stored = rng.standard_normal((1, prefix + old[0] * old[1], 3)).astype(np.float32)
        resized = ResizedPositions(old, prefix).resized(paddle.to_tensor(stored), new)
        expected = resize_pos_embed(stored, prefix, new, old)
        np.testing.assert_allclose(resized.numpy(), expected, atol=1e-6)


def test_positions_of_the_models_own_size_stay_the_parameter():
    model = dynamic(small_vit())
    assert model.resized_positions.resized(model.pos_embed, (4, 4)) is model.pos_embed


@pytest.mark.smoke
def test_positions_are_resized_in_float32_under_autocast():
    positions = paddle.to_tensor(formula(None)("positions", (1, 16, 8)))
    resize = ResizedPositions((4, 4), 0)
    expected = resize.resized(positions, (3, 2))
    with paddle.amp.auto_cast(dtype="bfloat16", level="O1"):
        found = resize.resized(positions, (3, 2))
    assert found.dtype == paddle.float32
    assert (found == expected).all()


def test_sizes_in_turns_leave_the_models_own_as_it_was():
    for make in (small_vit, small_eva, small_swin):
        model = make()
        model.eval()
        height, width = model.image_size
        images = paddle.to_tensor(formula(None)("images", (2, 3, height, width)))
        before = model(images).numpy()
        dynamic(model)
        model(paddle.zeros([1, 3, 40, 24]))
        assert (model(images).numpy() == before).all()
        assert model.patch_embed.grid_size == (height // 4, width // 4)
        twin = copy.deepcopy(model)
        assert (twin(images).numpy() == before).all()


def test_maps_and_files_after_another_size(tmp_path):
    model = dynamic(small_vit())
    save_weights(model, tmp_path / "model.safetensors")
    maps = model.forward_intermediates(paddle.zeros([1, 3, 24, 8]), intermediates_only=True)
    assert [one.shape for one in maps] == [[1, 24, 6, 2]] * 3
    before = model.pos_embed.numpy()
    load_weights(model, tmp_path / "model.safetensors")
    assert (model.pos_embed.numpy() == before).all()


@pytest.mark.parametrize("kind", SMALL_MODELS)
def test_an_architecture_takes_other_sizes_or_is_named(kind):
    model = SMALL_MODELS[kind]()
    if kind in ("vit", "eva", "swin", "swinv2", "naflexvit"):
        model.take_other_sizes()
        side = model.patch_embed.patch_size
        assert model.input_sizes == f"images of multiples of {side} pixels"
    elif model.min_image_size:
        sizes = model.input_sizes
        model.take_other_sizes()
        assert model.input_sizes == sizes
    else:
        sizes = model.input_sizes
        with pytest.raises(InputError, match=f"{type(model).__name__} needs images of one size"):
            model.take_other_sizes()
        assert model.input_sizes == sizes


@pytest.mark.parametrize("size", [(18, 16), (16, 3), (0, 4)])
def test_images_that_are_no_multiples_of_a_patch_are_named(size):
    found = "found {} x {}; crop or resize".format(*size)
    with pytest.raises(InputError, match=f"takes images of multiples of 4 pixels, {found}"):
        dynamic(small_vit())(paddle.zeros([1, 3, *size]))


def test_a_model_that_cuts_images_takes_any_of_a_patch():
    model = dynamic(small_vit("vit_siglip"))
    assert model.input_sizes == "images of at least 4 x 4"
    assert model.forward_features(paddle.zeros([1, 3, 11, 7])).shape == [1, 2, 24]
    with pytest.raises(InputError, match="at least 4 x 4, found 11 x 3"):
        model(paddle.zeros([1, 3, 11, 3]))


def test_constants_of_the_last_sizes_are_kept():
    computed = []

    def compute(size):
        computed.append(size)
        return [np.full([1], size, np.float32)]

    constants = Constants(compute)
    for size in (*range(16), 0, 16, 1, 15, 0):
        assert constants.at(size)[0].item() == size
    # The seventeenth size takes the place of the first one.
    assert computed == [*range(17), 0]
