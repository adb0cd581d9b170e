"""BEiT v2's tokenizer: the authors' weights, tokens, loss and gradients, and how their codes move."""

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden import vqkd
from paddle.nn import functional as F
from safetensors.numpy import save_file
from support.ranks import run_ranks

from models.beit import Beit
from models.pretraining import codebook
from models.pretraining.tokenizer import Tokenizer
from weights import load_weights, save_weights
from weights.layout import linear_weights
from weights.names import timm_names

GOLDEN = np.load(ROOT / "tests" / "golden" / "vqkd.npz")


def network(kmeans=False):
    encoder = Beit(image_size=vqkd.SIZE, patch_size=vqkd.PATCH, num_classes=0, **vqkd.SMALL)
    sizes = (vqkd.VOCABULARY, vqkd.CODE_DIM, "nearest", vqkd.SMALL["embed_dim"], 1, 3)
    return Tokenizer(encoder, *sizes, outputs=vqkd.OUTPUTS, kmeans=kmeans)


@pytest.fixture(scope="module")
def authors_file(tmp_path_factory):
    """A file as the authors', with the teacher that their training stores."""
    shapes = {
        name.removeprefix("shape/"): tuple(GOLDEN[name])
        for name in GOLDEN
        if name.startswith("shape/")
    }
    arrays = {name: vqkd.weight(name, shape) for name, shape in shapes.items()}
    arrays |= {"teacher_model.conv1.weight": np.ones(1, np.float32)}
    arrays |= {"scaling_layer.shift": np.ones(1, np.float32)}
    file = tmp_path_factory.mktemp("vqkd") / "vqkd.safetensors"
    save_file(arrays, file)
    return file


def normalised_images():
    return paddle.to_tensor(vqkd.images() * 2 - 1)


@pytest.mark.smoke
def test_tokens_loss_and_every_gradient_of_the_authors_weights_are_the_authors(authors_file):
    model = network()
    report = load_weights(model, authors_file)
    assert (report.missing, report.unexpected) == ([], [])
    model.eval()
    images = normalised_images()
    np.testing.assert_array_equal(model.tokens(images).numpy(), GOLDEN["tokens"])
    values = model(images, paddle.to_tensor(vqkd.targets()))
    np.testing.assert_array_equal(values["tokens"].numpy(), GOLDEN["tokens"])
    quantisation = values["quantisation"].mean()
    np.testing.assert_allclose(float(quantisation), GOLDEN["quantisation"], rtol=1e-5)
    loss = values["reconstruction"].mean() + quantisation
    np.testing.assert_allclose(float(loss), GOLDEN["loss"], rtol=1e-5)
    loss.backward()
    gradients = {
        name.removeprefix("grad/"): GOLDEN[name] for name in GOLDEN if name.startswith("grad/")
    }
    expected = timm_names(model.weight_names, gradients, "torch", list(model.state_dict()))
    found = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    for name in linear_weights(model):
        found[name] = found[name].T
    assert found.keys() == expected.keys()
    least = 2e-2 * max(np.ptp(value) for value in expected.values())
    for name, value in expected.items():
        tolerance = 1e-5 * max(np.ptp(value), least)
        np.testing.assert_allclose(found[name], value, atol=tolerance, rtol=0, err_msg=name)


def test_our_own_file_gives_the_same_tokens(tmp_path, authors_file):
    model = network()
    load_weights(model, authors_file)
    save_weights(model, tmp_path / "ours.safetensors")
    again = network(kmeans=True)
    assert load_weights(again, tmp_path / "ours.safetensors").changes == []
    again.eval()
    np.testing.assert_array_equal(again.tokens(normalised_images()).numpy(), GOLDEN["tokens"])


def features_of(step, rank=0, ranks=1):
    """Features of a step's patches, [N, code_dim] of length 1: a rank's images of two."""
    share = np.split(vqkd.features(step), ranks)[rank]
    return F.normalize(paddle.to_tensor(share), axis=-1).flatten(0, 1)


def codes_by_step(ranks=1):
    """The codes after k-means and each step, and each step's tokens."""
    rank = paddle.distributed.get_rank()
    first = features_of(0)[: vqkd.VOCABULARY]
    codes = codebook.kmeans(features_of(0, rank, ranks), first)
    for step in range(vqkd.STEPS):
        features = features_of(step, rank, ranks)
        tokens = codebook.nearest(features, codes)
        codes = codebook.updated(codes, features, tokens, vqkd.DECAY)
        yield codes.numpy(), tokens.numpy()


def listed(ranks):
    return list(codes_by_step(ranks))


@pytest.mark.smoke
def test_codes_begin_and_move_as_the_authors():
    unused = []
    for step, (codes, tokens) in enumerate(codes_by_step()):
        np.testing.assert_array_equal(tokens, GOLDEN[f"step {step}/tokens"])
        np.testing.assert_allclose(codes, GOLDEN[f"step {step}/codes"], atol=1e-5, rtol=0)
        unused += set(range(vqkd.VOCABULARY)) - set(tokens.tolist())
    # Codes without a feature were among them.
    assert unused


def test_codes_are_equal_on_two_processes_and_those_of_one():
    first, second = run_ranks(listed, 2)
    for step, (codes, tokens) in enumerate(codes_by_step()):
        np.testing.assert_array_equal(first[step][0], second[step][0])
        np.testing.assert_allclose(first[step][0], codes, atol=1e-6, rtol=0)
        both = np.concatenate([first[step][1], second[step][1]])
        np.testing.assert_array_equal(both, tokens)


def test_a_mean_without_features_stays():
    """Of two equal means, the second one has none."""
    features = features_of(0)[:2]
    first = paddle.stack([features[0], features[0], features[1]])
    means = codebook.kmeans(features, first)
    np.testing.assert_allclose(means.numpy(), first.numpy(), rtol=1e-5)


def drawn_on(ranks):
    own = features_of(0, paddle.distributed.get_rank(), ranks)
    return codebook.sampled(own, 20, np.random.default_rng(3)).numpy()


def test_k_means_begins_with_features_of_all_processes():
    everywhere = features_of(0).numpy()
    drawn = drawn_on(1)
    places = [int(np.flatnonzero((everywhere == each).all(1))[0]) for each in drawn]
    assert len(set(places)) == 20
    assert max(places) >= 16
    for of_rank in run_ranks(drawn_on, 2):
        np.testing.assert_array_equal(of_rank, drawn)
    # There may be fewer features than codes.
    more = codebook.sampled(features_of(0), 50, np.random.default_rng(3)).numpy()
    assert len(np.unique(more, axis=0)) <= 32


def test_codes_begin_once():
    paddle.seed(0)
    model = network(kmeans=True)
    assert not model.codebook.any()
    model.init_codes(normalised_images(), seed=1)
    begun = model.codebook.numpy().copy()
    np.testing.assert_allclose(np.linalg.norm(begun, axis=1), 1, rtol=1e-5)
    model.init_codes(normalised_images(), seed=2)
    np.testing.assert_array_equal(model.codebook.numpy(), begun)
    assert network().codebook.any()


def test_beginning_changes_no_statistics_of_batch_norm():
    from support.small_models import SMALL_MODELS

    paddle.seed(0)
    model = Tokenizer(
        SMALL_MODELS["convmixer"](num_classes=0), 6, 5, "nearest", 24, 1, 3, kmeans=True
    )
    statistics = {n: v.numpy().copy() for n, v in model.state_dict().items() if n.endswith("_mean")}
    assert statistics
    model.train()
    model.init_codes(paddle.randn([2, 3, *model.image_size]), seed=0)
    for name, value in statistics.items():
        np.testing.assert_array_equal(model.state_dict()[name].numpy(), value)
