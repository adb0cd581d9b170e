"""Tokenizers: their tokens, codes, losses and noise."""

import numpy as np
import paddle
import pytest
from paddle.nn import functional as F
from scipy.stats import kstest
from support.small_models import SMALL_MODELS, small_beit

from errors import InputError
from models.pretraining.tokenizer import Tokenizer, gumbel_noise

# Their last features are no map, or not those that a classifier reads.
WITHOUT_MAP = {"cait", "crossvit", "cvt", "hvt", "lenet", "mobileformer", "pit", "volo", "xcit"}

# Their small models take images whose last places are cut.
ODD_SIZES = {"metaformer", "pit", "resnet", "swinv2"}


def small(quantizer, encoder=None, **options):
    paddle.seed(0)
    encoder = encoder or small_beit(num_classes=0)
    return Tokenizer(encoder, 7, 5, quantizer, 24, 1, 3, **options)


def images(model, count=2):
    paddle.seed(1)
    return paddle.randn([count, model.in_channels, *model.image_size])


@pytest.mark.parametrize("kind", SMALL_MODELS)
@pytest.mark.parametrize("quantizer", ["gumbel", "nearest"])
def test_every_architecture_with_a_map_makes_tokens_and_trains_all_its_weights(kind, quantizer):
    if kind == "levit":
        pytest.skip("its small model's last place has 64 x 64 pixels of 64 x 96")
    size = {"image_size": 64} if kind in ODD_SIZES else {}
    encoder = SMALL_MODELS[kind](num_classes=0, **size)
    if kind in WITHOUT_MAP:
        with pytest.raises(InputError, match="has no map of last features"):
            small(quantizer, encoder)
        return
    model = small(quantizer, encoder)
    values = model(images(model), seeds=paddle.to_tensor([3, 4]))
    assert list(values["tokens"].shape) == [2, model.grid[0] * model.grid[1]]
    losses = [value for key, value in values.items() if key not in ("tokens", "features")]
    sum(loss.sum() for loss in losses).backward()
    trained = [each for each in model.named_parameters() if not each[1].stop_gradient]
    assert [name for name, parameter in trained if parameter.grad is None] == []


def test_images_with_a_cut_place_are_refused():
    with pytest.raises(InputError, match="IMAGE_SIZE is 33 x 33, expected multiples of 32"):
        small("gumbel", SMALL_MODELS["resnet"](num_classes=0))


def test_the_codes_are_the_nearest_ones_and_the_gradient_passes_by():
    model = small("nearest")
    batch = images(model)
    tokens = model.tokens(batch)
    features = F.normalize(model.encode_task_layer(model._features(batch)), axis=-1).numpy()
    codebook = F.normalize(model.codebook, axis=-1).numpy()
    distances = ((features[:, :, None] - codebook) ** 2).sum(-1)
    np.testing.assert_array_equal(tokens.numpy(), distances.argmin(-1))
    values = model(batch)
    np.testing.assert_array_equal(values["tokens"].numpy(), tokens.numpy())
    distances = ((features - codebook[tokens.numpy()]) ** 2).mean((1, 2))
    np.testing.assert_allclose(values["quantisation"].numpy(), distances, rtol=1e-5)
    np.testing.assert_allclose(values["features"].numpy(), features, rtol=1e-5)
    decoded = model.decode(model.codes(tokens))
    error = ((decoded - model.patches(batch)) ** 2).mean([1, 2])
    np.testing.assert_allclose(values["reconstruction"].numpy(), error.numpy(), rtol=1e-5)
    # The pixels' error reaches the encoder, though the codes are chosen by argmax.
    values["reconstruction"].sum().backward()
    assert np.abs(model.encode_task_layer[2].weight.grad.numpy()).max() > 0


def test_without_seeds_the_code_with_the_highest_logit_is_taken():
    model = small("gumbel")
    batch = images(model)
    logits = model.encode_task_layer(model._features(batch))
    values = model(batch)
    np.testing.assert_array_equal(values["tokens"].numpy(), logits.argmax(-1).numpy())
    decoded = model.decode(model.codes(values["tokens"]))
    error = ((decoded - model.patches(batch)) ** 2).mean([1, 2])
    np.testing.assert_allclose(values["reconstruction"].numpy(), error.numpy(), rtol=1e-5)
    shares = F.softmax(logits, axis=-1).numpy()
    divergence = (shares * np.log(shares * 7)).sum(-1).mean(1)
    np.testing.assert_allclose(values["kl"].numpy(), divergence, rtol=1e-4, atol=1e-7)


def test_at_a_low_temperature_a_noisy_code_is_drawn_by_the_logits_probabilities():
    model = small("gumbel")
    batch = images(model, 1).expand([400, -1, -1, -1])
    seeds = paddle.arange(400) * 1_000_003
    logits = model.encode_task_layer(model._features(batch))
    drawn = (logits + gumbel_noise(seeds, logits.shape[1:])).argmax(-1).numpy()
    frequency = np.bincount(drawn[:, 5], minlength=7) / 400
    expected = F.softmax(logits[0, 5]).numpy()
    assert np.abs(frequency - expected).max() < 4 * np.sqrt(expected.max() / 400)


def test_a_teachers_features_are_compared_by_their_cosine():
    model = small("nearest", outputs=9)
    batch = images(model)
    targets = paddle.randn([2, 16, 9])
    decoded = model.decode(model.codes(model.tokens(batch))).numpy()
    cosine = (decoded * targets.numpy()).sum(-1) / np.linalg.norm(decoded, axis=-1)
    expected = 1 - (cosine / np.linalg.norm(targets.numpy(), axis=-1)).mean(1)
    found = model(batch, targets)["reconstruction"].numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_patches_are_each_tokens_pixels_and_make_the_images_again():
    model = small("nearest")
    batch = images(model)
    patches = model.patches(batch)
    first = batch.numpy()[1, :, 4:8, 8:12].transpose(1, 2, 0).reshape(-1)
    np.testing.assert_array_equal(patches.numpy()[1, 4 + 2], first)
    np.testing.assert_array_equal(model.pictures(patches).numpy(), batch.numpy())


def test_noise_is_computed_in_whole_numbers():
    seeds = [0, 5, 1_234_567_890, 2**31 - 2]
    states = []
    for seed in seeds:
        for index in range(12):
            state = (seed + index * 1_103_515_245) % (2**31 - 1)
            for factor in (48_271, 69_621, 39_373):
                state = (state * state % (2**31 - 1) + (state + seed + 1) * factor) % (2**31 - 1)
            states.append(state)
    uniform = (np.asarray(states) + 0.5) / (2**31 - 1)
    expected = -np.log(-np.log(uniform)).reshape(4, 3, 4)
    noise = gumbel_noise(paddle.to_tensor(seeds), [3, 4]).numpy()
    np.testing.assert_allclose(noise, expected, rtol=1e-5, atol=1e-6)


def test_noise_is_gumbels_and_a_function_of_each_seed():
    seeds = paddle.to_tensor([5, 6, 2**31 - 2])
    noise = gumbel_noise(seeds, [50, 2000]).numpy()
    for each in noise:
        assert kstest(np.exp(-np.exp(-each.ravel().astype("d"))), "uniform").pvalue > 0.01
    # Neighbours, places and seeds don't depend on each other.
    rows = noise.reshape(3, -1)
    lagged = [np.corrcoef(row[:-lag], row[lag:])[0, 1] for row in rows for lag in (1, 2, 2000)]
    pairs = np.corrcoef(rows)[np.triu_indices(3, 1)]
    assert np.abs([*lagged, *pairs]).max() < 0.015
    alone = gumbel_noise(seeds[1:2], [50, 2000]).numpy()
    np.testing.assert_array_equal(alone[0], noise[1])


def test_tokens_and_codes_have_no_weight_decay_and_every_parameter_one_group():
    model = small("gumbel")
    assert {"codebook", "encoder.cls_token", "decoder.cls_token"} < model.no_weight_decay()
    for name, _ in model.named_parameters():
        owners = [
            prefix
            for group in model.layer_groups()
            for prefix in group
            if f"{name}.".startswith(f"{prefix}.")
        ]
        assert len(owners) == 1, name
