"""MAE's network against transformers' (golden/make_mae.py), its masks, targets and reconstructions."""

import re

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.make_names_vit import positive, values
from support.layer_groups import assert_one_group_each
from support.small_models import SMALL_MODELS, small_beit, small_eva, small_vit
from support.transformers_names import mae_authors_names, mae_transformers_names

from errors import InputError
from models.pretraining.mae import MaskedAutoencoder, patch_order, visible_count
from models.vit import VisionTransformer
from weights import file_arrays, load_weights
from weights.formats import write_weights
from weights.layout import linear_weights
from weights.names import timm_names

GOLDEN = np.load(ROOT / "tests" / "golden" / "mae.npz")
# CASES of make_mae.py: image size, channels, MASK_RATIO, NORM_TARGET
CASES = {
    "normalised": ((16, 16), 3, 0.75, True),
    "pixels": ((16, 16), 1, 0.6, False),
    "rectangle": ((8, 32), 3, 0.75, True),
}
SMALL = {"decoder_width": 8, "decoder_depth": 1, "decoder_heads": 2}


def of_case(case, **changes):
    size, channels, ratio, normalised = CASES[case]
    encoder = VisionTransformer(
        image_size=size,
        patch_size=4,
        in_channels=channels,
        num_classes=0,
        embed_dim=16,
        depth=2,
        num_heads=2,
        **changes,
    )
    return MaskedAutoencoder(encoder, ratio, 24, 1, 3, normalised)


def theirs(case, part="grad"):
    """Returns a case's arrays by transformers' names: gradients, or with "weights" its weights."""
    prefix = f"{case}/grad/"
    grads = {key.removeprefix(prefix): GOLDEN[key] for key in GOLDEN if key.startswith(prefix)}
    if part == "grad":
        return grads
    prefix = f"{case}/positions/"
    positions = {key.removeprefix(prefix): GOLDEN[key] for key in GOLDEN if key.startswith(prefix)}
    return {name: positive(name, array.shape) for name, array in grads.items()} | positions


def loaded(case, folder, arrays=None, **changes):
    model = of_case(case, **changes)
    arrays = arrays or theirs(case, "weights")
    report = load_weights(model, written(folder / "mae.safetensors", arrays))
    assert not report.changes
    return model


def written(file, arrays):
    write_weights(file, {name: np.ascontiguousarray(array) for name, array in arrays.items()})
    return file


def images_of(model):
    return paddle.to_tensor(values("images", (2, model.in_channels, *model.image_size)))


def random_order(model, images=2, seed=0):
    patches = model.encoder.patch_embed.num_patches
    noise = np.random.RandomState(seed).random_sample((images, patches))
    return paddle.to_tensor(patch_order(noise))


@pytest.mark.smoke
@pytest.mark.parametrize("options", [{}, {"global_pool": "avg"}])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_transformers(case, options, tmp_path):
    model = loaded(case, tmp_path, **options)
    order = patch_order(GOLDEN[f"{case}/noise"])
    mask = np.ones_like(GOLDEN[f"{case}/mask"])
    np.put_along_axis(mask, order[:, : model.num_visible], 0, axis=1)
    np.testing.assert_array_equal(mask, GOLDEN[f"{case}/mask"])

    losses = model(images_of(model), paddle.to_tensor(order))
    assert losses.shape == [2]
    losses.mean().backward()
    np.testing.assert_allclose(losses.numpy().mean(), GOLDEN[f"{case}/loss"], rtol=1e-5)

    state = model.state_dict()
    expected = timm_names(model.weight_names, theirs(case), "torch", list(state))
    found = {
        name: parameter.grad.numpy()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    assert found.keys() == expected.keys()
    for name in linear_weights(model):
        found[name] = found[name].T
    for name, array in expected.items():
        within = 1e-5 * np.abs(array).max()
        np.testing.assert_allclose(found[name], array, atol=within, rtol=0, err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_both_positions_are_those_of_transformers(case):
    model = of_case(case)
    stored = theirs(case, "weights")
    encoder = stored["vit.embeddings.position_embeddings"]
    np.testing.assert_allclose(model.encoder.pos_embed.numpy(), encoder, atol=1e-6, rtol=0)
    decoder = stored["decoder.decoder_pos_embed"][:, 1:]
    np.testing.assert_allclose(model.decoder_pos_embed.numpy(), decoder, atol=1e-6, rtol=0)
    assert model.encoder.pos_embed.stop_gradient
    assert "decoder_pos_embed" not in model.state_dict()


def as_4(name):
    """Returns a name of transformers 5 as release 4 and the files on the Hub have it."""
    for new, old in (
        (r"^vit\.layers\.", "vit.encoder.layer."),
        (r"\.attention\.([qkv])_proj\.", r".attention.attention.\1."),
        (r"\.attention\.o_proj\.", ".attention.output.dense."),
        (r"\.mlp\.fc1\.", ".intermediate.dense."),
        (r"\.mlp\.fc2\.", ".output.dense."),
    ):
        name = re.sub(new, old, name)
    parts = {".attention.q.": "query", ".attention.k.": "key", ".attention.v.": "value"}
    for letter, word in parts.items():
        name = name.replace(letter, f".attention.{word}.")
    return name


def test_all_names_of_transformers_load_and_come_back(tmp_path):
    """Release 5.24 has other names in memory than in the files that it writes."""
    case = "normalised"
    arrays = theirs(case, "weights")
    model = loaded(case, tmp_path)
    order = random_order(model)
    losses = model(images_of(model), order).numpy()
    old = {as_4(name): array for name, array in arrays.items()}
    written = {
        name.replace("decoder_layers.", "decoder_encoder.layer."): array
        for name, array in old.items()
    }
    for named in (old, written):
        again = loaded(case, tmp_path, named)
        np.testing.assert_array_equal(again(images_of(again), order).numpy(), losses)
    for options in ({}, {"global_pool": "avg"}):
        ours = file_arrays(loaded(case, tmp_path, **options))
        back = mae_transformers_names(ours, model.decoder_pos_embed.numpy())
        assert back.keys() == old.keys()
        for name, array in old.items():
            np.testing.assert_allclose(back[name], array, atol=1e-6, rtol=0, err_msg=name)


def test_the_authors_names_load_and_come_back(tmp_path):
    model = of_case("normalised")
    arrays = mae_authors_names(file_arrays(model), model.decoder_pos_embed.numpy())
    assert {name.partition(".")[0] for name in arrays} == {
        "blocks",
        "cls_token",
        "decoder_blocks",
        "decoder_embed",
        "decoder_norm",
        "decoder_pos_embed",
        "decoder_pred",
        "mask_token",
        "norm",
        "patch_embed",
        "pos_embed",
    }
    assert arrays["decoder_pos_embed"].shape == (1, 17, 24)
    again = loaded("normalised", tmp_path, arrays)
    order = random_order(model)
    images = images_of(model)
    np.testing.assert_array_equal(again(images, order).numpy(), model(images, order).numpy())


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_an_encoder_comes_out_of_the_files_of_both(pool, tmp_path):
    model = loaded("normalised", tmp_path)
    positions = model.decoder_pos_embed.numpy()
    ours = file_arrays(model)
    files = {
        "authors": mae_authors_names(ours, positions),
        "transformers": theirs("normalised", "weights"),
        "transformers 4": mae_transformers_names(ours, positions),
    }
    images = images_of(model)
    encoder = of_case("normalised", global_pool=pool).encoder
    load_weights(
        encoder,
        written(
            tmp_path / "timm.safetensors",
            {
                name.removeprefix("encoder."): array
                for name, array in ours.items()
                if name.startswith("encoder.")
            },
        ),
    )
    expected = encoder(images).numpy()
    for name, arrays in files.items():
        encoder = of_case("normalised", global_pool=pool).encoder
        load_weights(encoder, written(tmp_path / f"{name}.safetensors", arrays), strict=False)
        np.testing.assert_array_equal(encoder(images).numpy(), expected)


def test_a_target_is_the_patch_at_its_own_place():
    """Each patch of the image has one colour. PaddleViT's MAE cut its targets out of the rows of
    the whole image, and threw its patches away.
    """
    model = MaskedAutoencoder(small_vit(num_classes=0), norm_target=False, **SMALL)
    colours = np.arange(4 * 4 * 3, dtype=np.float32).reshape(1, 3, 4, 4)
    images = paddle.to_tensor(colours.repeat(4, axis=2).repeat(4, axis=3))
    order = random_order(model, images=1)
    targets = []
    # The prediction becomes 0, so the loss is the mean square of the targets.
    for parameter in model.decoder_pred.parameters():
        parameter.set_value(parameter * 0)
    original = model._targets
    model._targets = lambda patches: targets.append(original(patches)) or targets[-1]
    loss = model(images, order)
    masked = order.numpy()[0, model.num_visible :]
    expected = colours.reshape(3, 16).T[masked]
    found = targets[0].numpy().reshape(12, 16, 3)
    for pixel in range(16):
        np.testing.assert_array_equal(found[:, pixel], expected)
    np.testing.assert_allclose(loss.numpy(), [(expected**2).mean()], rtol=1e-6)


def test_a_target_has_its_rows_columns_and_channels_in_this_order():
    model = MaskedAutoencoder(small_vit(num_classes=0), norm_target=False, **SMALL)
    images = values("images", (1, 3, 16, 16))
    patches = model.encoder.patch_embed.cut(paddle.to_tensor(images))
    targets = model._targets(patches).numpy()[0]
    patch = images[0, :, 4:8, 8:12]
    np.testing.assert_array_equal(targets[1 * 4 + 2], patch.transpose(1, 2, 0).ravel())
    model.norm_target = True
    normalised = model._targets(patches).numpy()[0, 6]
    pixels = patch.transpose(1, 2, 0).ravel().astype("float64")
    expected = (pixels - pixels.mean()) / np.sqrt(pixels.var(ddof=1) + 1e-6)
    np.testing.assert_allclose(normalised, expected, atol=1e-5, rtol=0)


def test_what_is_masked_reaches_the_loss_by_its_targets_alone():
    model = MaskedAutoencoder(small_vit(num_classes=0), norm_target=False, **SMALL)
    model.eval()
    images = images_of(model)
    order = random_order(model)
    patches = model.encoder.patch_embed.cut(images)
    before = model._predict(patches, order).numpy()
    hidden = order.numpy()[:, model.num_visible :]
    changed = patches.numpy()
    for image, places in enumerate(hidden):
        changed[image, places] += 7
    after = model._predict(paddle.to_tensor(changed), order).numpy()
    np.testing.assert_array_equal(after, before)
    changed[0, order.numpy()[0, 0]] += 7
    assert np.abs(model._predict(paddle.to_tensor(changed), order).numpy() - before).max() > 1e-4


def test_equal_noise_leaves_patches_in_their_order():
    # NumPy's other sorts of a few numbers keep their order, too.
    noise = np.tile(np.array([0.5, 0.25], np.float32), [1, 128])
    expected = [*range(1, 256, 2), *range(0, 256, 2)]
    np.testing.assert_array_equal(patch_order(noise), [expected])


@pytest.mark.parametrize("shape", [(16, 16), (12, 20), (18, 15)])
@pytest.mark.parametrize("normalised", [False, True])
def test_a_reconstruction_shows_visible_patches_and_predictions(shape, normalised):
    encoder = small_vit(num_classes=0, image_size=shape, cut_images=True)
    model = MaskedAutoencoder(encoder, norm_target=normalised, **SMALL)
    images = images_of(model)
    order = random_order(model)
    masked, reconstructed = (tensor.numpy() for tensor in model.reconstruct(images, order))
    predicted = model._predict(model.encoder.patch_embed.cut(images), order).numpy()
    _, columns = model.encoder.patch_embed.grid_size
    images = images.numpy()
    assert masked.shape == reconstructed.shape == images.shape
    for image, places in enumerate(order.numpy()):
        for rank, place in enumerate(places):
            row, column = divmod(place, columns)
            box = (
                image,
                slice(None),
                slice(4 * row, 4 * row + 4),
                slice(4 * column, 4 * column + 4),
            )
            if rank < model.num_visible:
                np.testing.assert_array_equal(masked[box], images[box])
                np.testing.assert_array_equal(reconstructed[box], images[box])
                continue
            assert not masked[box].any()
            expected = predicted[image, rank - model.num_visible]
            expected = expected.reshape(4, 4, 3).transpose(2, 0, 1)
            if normalised:
                pixels = images[box]
                expected = expected * np.sqrt(pixels.var(ddof=1) + 1e-6) + pixels.mean()
            np.testing.assert_allclose(reconstructed[box], expected, atol=1e-5, rtol=0)


ENCODERS = {
    "vit": lambda: small_vit(num_classes=0),
    "distilled": lambda: small_vit("vit_distilled", num_classes=0),
    "registers": lambda: small_vit("vit_registers", num_classes=0),
    "no class token": lambda: small_vit("vit_gap", num_classes=0),
    "registers alone": lambda: small_vit("vit_registers_gap", num_classes=0),
    "deit3": lambda: small_vit("vit_deit3", num_classes=0),
    "sincos2d": lambda: small_vit(num_classes=0, pos_embed="sincos2d"),
    "parallel": lambda: small_vit("vit_parallel", num_classes=0),
    "differential": lambda: small_vit("vit_differential", num_classes=0),
    "gated": lambda: small_vit("vit_gated", num_classes=0),
    "no norm": lambda: small_vit("vit_no_norm", num_classes=0),
    "mae": lambda: small_vit(num_classes=0, weight_init="mae"),
    "beit": lambda: small_beit("beit_absolute", num_classes=0),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", ENCODERS)
def test_with_all_patches_visible_the_encoder_computes_its_features(name):
    """In any order of the patches, and everything that is trained has a gradient."""
    encoder = ENCODERS[name]()
    model = MaskedAutoencoder(encoder, **SMALL)
    for token in ("cls_token", "dist_token", "reg_token"):
        if token in encoder._parameters:
            parameter = getattr(encoder, token)
            parameter.set_value(values(token, parameter.shape))
    if "pos_embed" in encoder._parameters:
        encoder.pos_embed.set_value(values("pos_embed", encoder.pos_embed.shape))
    images = images_of(model)
    features = encoder.forward_features(images)
    features = encoder.fc_norm(features).numpy()
    order = random_order(model)
    cut = encoder.patch_embed.cut(images)
    found = model._encode(cut, order).numpy()
    prefix = encoder.num_prefix_tokens
    np.testing.assert_allclose(found[:, :prefix], features[:, :prefix], atol=2e-5, rtol=0)
    patches = np.take_along_axis(features[:, prefix:], order.numpy()[..., None], axis=1)
    np.testing.assert_allclose(found[:, prefix:], patches, atol=2e-5, rtol=0)

    model(images, order).mean().backward()
    for key, parameter in model.named_parameters():
        assert parameter.stop_gradient == (key == "encoder.pos_embed"), key
        assert parameter.stop_gradient or parameter.grad is not None, key


def test_every_parameter_belongs_to_one_group():
    for make in ENCODERS.values():
        model = MaskedAutoencoder(make(), **SMALL)
        for groups in (model.layer_groups(), model.timm_layer_groups()):
            assert_one_group_each(model, groups)
        undecayed = model.no_weight_decay()
        assert {"mask_token", "encoder.pos_embed"} <= undecayed
        assert model.classifier_names()[0] == "encoder.head"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: small_eva(num_classes=0), "MAE can't train Eva: it needs a Hiera, or an"),
        (lambda: small_beit(num_classes=0), "MAE can't train Beit: it needs a Hiera, or an"),
        (
            lambda: small_beit("beit_all_but_tables", num_classes=0),
            "set USE_REL_POS_BIAS and USE_SHARED_REL_POS_BIAS False",
        ),
        (lambda: small_vit(num_classes=0, prompt_tokens=2), "MAE doesn't train prompts"),
        (lambda: small_vit(num_classes=0, patch_drop=0.5), "MODEL.PATCH_DROP is 0.5, expected 0"),
        (
            lambda: small_vit("vit_siglip", num_classes=0),
            "GLOBAL_POOL is map, expected token or avg",
        ),
    ],
)
def test_an_encoder_that_cant_be_trained_so_is_one_line(make, message):
    with pytest.raises(InputError, match=message):
        MaskedAutoencoder(make(), **SMALL)


@pytest.mark.parametrize("kind", sorted(SMALL_MODELS.keys() - {"vit"}))
def test_other_architectures_are_refused_with_the_names_of_those_that_serve(kind):
    with pytest.raises(InputError, match="MAE can't train .*: it needs a Hiera, or .*: ViT, DeiT"):
        MaskedAutoencoder(SMALL_MODELS[kind](num_classes=0), **SMALL)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask_ratio": 0.95}, "MASK_RATIO 0.95 leaves 0 of 16 patches visible, expected 1 to 15"),
        ({"mask_ratio": 0.0}, "MASK_RATIO 0.0 leaves 16 of 16 patches visible"),
        ({"decoder_heads": 3}, "DECODER_WIDTH 8 is not a multiple of METHOD.DECODER_HEADS 3"),
        ({"decoder_width": 6}, "METHOD.DECODER_WIDTH is 6, expected a multiple of 4"),
    ],
)
def test_sizes_that_dont_fit_are_one_line(options, message):
    with pytest.raises(InputError, match=message):
        MaskedAutoencoder(small_vit(num_classes=0), **SMALL | options)


def test_visible_patches_are_whole_ones():
    assert visible_count(196, 0.75, "patches") == 49
    assert visible_count(256, 0.75, "patches") == 64
    assert visible_count(15, 0.75, "patches") == 3


def test_fresh_weights_are_those_of_the_paper():
    paddle.seed(0)
    encoder = VisionTransformer(
        32, 8, num_classes=0, embed_dim=64, depth=1, num_heads=4, weight_init="mae"
    )
    model = MaskedAutoencoder(encoder, decoder_width=48, decoder_depth=1, decoder_heads=4)
    for name, parameter in model.named_parameters():
        array = parameter.numpy()
        if name == "encoder.pos_embed" or "norm" in name:
            continue
        if parameter.ndim == 1:
            bias = np.abs(array).max()
            assert bias <= (3 * 64) ** -0.5 if "patch_embed" in name else bias == 0
        elif "token" in name:
            assert 0.01 < array.std() < 0.03
        else:
            # Xavier's bound; the patches' kernel is a Linear of all their pixels.
            fan = array.reshape(array.shape[0], -1).shape
            bound = (6 / sum(fan)) ** 0.5
            assert 0.97 * bound < np.abs(array).max() <= bound * (1 + 1e-6), name
