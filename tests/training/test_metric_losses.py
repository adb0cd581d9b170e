"""Metric losses against pytorch-metric-learning (golden/make_metric_losses.py)."""

import json
from pathlib import Path

import numpy as np
import paddle
import pytest
from conftest import without
from golden.metric_problem import ARCFACE, CLASSES, IMAGES, PROXY_ANCHOR, TRIPLET, problem
from PIL import Image
from support.ranks import run_ranks
from support.small_models import small_vit
from support.training_runs import assert_close, records, train, weights

from config import get_config
from datasets import get_datasets
from errors import InputError
from inference.feature_store import FeatureExtractor
from models.layers.cosine import CosineClassifier
from training.classification import Classification
from training.embeddings import Embeddings
from training.losses import ArcFace, ProxyAnchor, Triplet, build_criterion
from training.retrieval import normalised, percentages, retrieval_sums
from utils import rank, world_size

GOLDEN = np.load(Path(__file__).parent.with_name("golden") / "metric_losses.npz")
LOSSES = [
    *((f"arcface/{margin}/{scale}", scale) for margin, scale in ARCFACE),
    *((f"proxy_anchor/{margin}/{alpha}", 64.0) for margin, alpha in PROXY_ANCHOR),
    *((f"triplet/{margin}", 64.0) for margin in TRIPLET),
]


def criterion_of(name, scale):
    kind, *numbers = name.split("/")
    if kind == "arcface":
        criterion = ArcFace()
        criterion.margin = float(numbers[0])
        criterion.scale = scale
        return criterion
    if kind == "proxy_anchor":
        return ProxyAnchor(scale, *map(float, numbers))
    return Triplet(None if numbers[0] == "None" else float(numbers[0]))


def values_and_gradients(name, scale, embeddings, vectors, labels):
    """Returns the losses [B], and the gradients that a step has of its embeddings and vectors."""
    x = paddle.to_tensor(embeddings, stop_gradient=False)
    head = CosineClassifier(*vectors.shape, scale)
    head.weight.set_value(vectors)
    logits = head(x)
    criterion = criterion_of(name, scale)
    outputs = (logits, x) if isinstance(criterion, Triplet) else logits
    losses = criterion(outputs, paddle.to_tensor(labels))
    assert (losses.shape, losses.dtype) == ([len(labels)], paddle.float32)
    (losses.sum() / len(labels)).backward()
    return losses.numpy(), x.grad.numpy(), head.weight.grad.numpy()


def assert_near(found, expected):
    """Both are equal to 1e-6 of the largest value."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * max(1, np.abs(expected).max()))


@pytest.mark.smoke
@pytest.mark.parametrize(("name", "scale"), LOSSES)
def test_losses_and_gradients_are_those_of_pytorch_metric_learning(name, scale):
    losses, of_embeddings, of_vectors = values_and_gradients(name, scale, *problem())
    assert_near(losses, GOLDEN[name])
    # The reference's gradients are of the sum, and those of Proxy-Anchor of the batch's one number.
    images = 1 if name.startswith("proxy_anchor") else IMAGES
    assert_near(of_embeddings * images, GOLDEN[f"{name}/embeddings"])
    if f"{name}/vectors" in GOLDEN:
        assert_near(of_vectors * images, GOLDEN[f"{name}/vectors"])


def of_this_rank(name, scale):
    embeddings, vectors, labels = problem()
    count = IMAGES // world_size()
    own = slice(rank() * count, (rank() + 1) * count)
    return values_and_gradients(name, scale, embeddings[own], vectors, labels[own])


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_mean_gradient_of_ranks_is_that_of_one_process(ranks):
    found = run_ranks(of_all_losses, ranks=ranks)
    for place, (name, scale) in enumerate(LOSSES):
        losses, of_embeddings, of_vectors = values_and_gradients(name, scale, *problem())
        by_rank = [each[place] for each in found]
        assert_near(np.concatenate([each[0] for each in by_rank]), losses)
        # A rank's gradient is averaged with those of others, which are 0 for its embeddings.
        assert_near(np.concatenate([each[1] for each in by_rank]) / ranks, of_embeddings)
        assert_near(np.mean([each[2] for each in by_rank], axis=0), of_vectors)


def of_all_losses():
    return [of_this_rank(name, scale) for name, scale in LOSSES]


@pytest.mark.smoke
@pytest.mark.parametrize(("name", "scale"), LOSSES)
@pytest.mark.parametrize("case", ["one class", "all apart", "all equal", "zeros", "one image"])
def test_gradients_are_finite_at_the_ends(name, scale, case):
    embeddings, vectors, labels = problem()
    if case == "one class":
        labels = np.zeros_like(labels)
    elif case == "all apart":
        embeddings, labels = embeddings[:CLASSES], np.arange(CLASSES)
    elif case == "all equal":
        # The cosine to the first class is 1, to the second -1.
        vectors[:, 1] = -vectors[:, 0]
        embeddings = np.tile(vectors[:, 0], [IMAGES, 1])
        labels = np.arange(IMAGES) % 2
    elif case == "zeros":
        embeddings = np.zeros_like(embeddings)
    else:
        embeddings, labels = embeddings[:1], labels[:1]
    losses, of_embeddings, of_vectors = values_and_gradients(
        name, scale, embeddings, vectors, labels
    )
    for values in (losses, of_embeddings, of_vectors):
        assert np.isfinite(values).all()
    if name.startswith("triplet"):
        no_triplet = case in ("one class", "all apart", "one image")
        margin = criterion_of(name, scale).margin
        same_place = np.log(2) if margin is None else margin
        # Of one place all distances are 0. The image that is alone in its class has no triplet.
        expected = np.full(len(labels), 0 if no_triplet else same_place)
        if case == "zeros":
            expected[5] = 0
        if no_triplet or case in ("all equal", "zeros"):
            np.testing.assert_allclose(losses, expected, atol=1e-6)
            assert not of_embeddings.any()


def test_the_margin_at_angles_of_0_and_pi():
    logits = paddle.to_tensor([[1.0, -1.0], [-1.0, 1.0]]) * 64
    logits.stop_gradient = False
    losses = ArcFace()(logits, paddle.to_tensor([0, 0]))
    # cos(0.5) against -1, and -1 - 0.5 sin(0.5) against 1.
    assert losses[0].item() < 1e-6
    assert losses[1].item() == pytest.approx(64 * (2 + 0.5 * np.sin(0.5)), rel=1e-6)
    losses.sum().backward()
    assert np.isfinite(logits.grad.numpy()).all()


def test_without_a_margin_arcface_is_the_cross_entropy():
    smooth = ["TRAIN.MIXUP_ALPHA=0", "TRAIN.SMOOTHING=0.1"]
    config = get_config(
        "vit_digits",
        ["MODEL.HEAD_COSINE=20", "TRAIN.LOSS=arcface", "TRAIN.ARCFACE_MARGIN=0", *smooth],
    )
    plain = get_config("vit_digits", ["TRAIN.LOSS=cross_entropy", *smooth])
    logits = paddle.to_tensor(np.random.default_rng(0).uniform(-20, 20, (6, 10)), "float32")
    labels = paddle.arange(6)
    found = build_criterion(config)(None, logits, labels).numpy()
    np.testing.assert_allclose(found, build_criterion(plain)(None, logits, labels), rtol=1e-5)


def test_triplets_add_the_classifiers_cross_entropy():
    embeddings, vectors, labels = problem()
    logits = paddle.to_tensor(embeddings @ vectors)
    both = Triplet(0.2, 0.5)((logits, paddle.to_tensor(embeddings)), paddle.to_tensor(labels))
    loss = paddle.nn.functional.cross_entropy(
        logits, paddle.to_tensor(labels), reduction="none"
    ).flatten()
    assert_near(both.numpy(), GOLDEN["triplet/0.2"] + 0.5 * loss.numpy())


@pytest.mark.smoke
def test_logits_of_a_cosine_classifier_are_cosines():
    model = small_vit("vit", head_cosine=30.0, neck_dim=5)
    model.eval()
    kept = Embeddings()
    kept.watch(model, "this test")
    images = paddle.to_tensor(np.random.default_rng(0).normal(size=(3, 3, 16, 16)), "float32")
    logits = model(images).numpy()
    x = kept.last.numpy()
    assert x.shape == (3, 5)
    weight = model.head.weight.numpy()
    cosines = (x / np.linalg.norm(x, axis=1, keepdims=True)) @ (
        weight / np.linalg.norm(weight, axis=0)
    )
    np.testing.assert_allclose(logits, 30 * cosines, atol=1e-5)
    # The classifier's lengths have no effect.
    model.head.weight.set_value(model.head.weight * 7)
    np.testing.assert_allclose(model(images).numpy(), logits, atol=1e-5)
    model.reset_classifier(0)
    np.testing.assert_allclose(model(images).numpy(), x, atol=1e-6)


def test_two_classifiers_have_no_one_input():
    with pytest.raises(
        InputError, match=r"triplet needs the input of one classifier, but Vision.* 2: "
    ):
        Embeddings().watch(small_vit("vit_distilled"), "TRAIN.LOSS triplet")


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["TRAIN.LOSS", "arcface"], "MODEL.HEAD_COSINE is None, expected a scale of the cosines"),
        (
            ["TRAIN.LOSS", "proxy_anchor"],
            "MODEL.HEAD_COSINE is None, expected a scale of the cosines",
        ),
        (
            ["TRAIN.LOSS", "proxy_anchor", "MODEL.HEAD_COSINE", "64", "TRAIN.SMOOTHING", "0.1"],
            "TRAIN.SMOOTHING is 0.1, expected 0.0 with TRAIN.LOSS proxy_anchor",
        ),
        (
            ["TRAIN.LOSS=triplet", "TRAIN.TRIPLET_CROSS_ENTROPY=0", "TRAIN.CLASS_WEIGHTS=auto"],
            "TRAIN.CLASS_WEIGHTS is 'auto', expected None with TRAIN.LOSS triplet",
        ),
        (
            ["TRAIN.ARCFACE_MARGIN", "0.3"],
            "ARCFACE_MARGIN has no effect without TRAIN.LOSS arcface",
        ),
        (["TRAIN.LOSS", "triplet", "TO_STATIC", "True"], "TO_STATIC is True, expected False"),
        (
            ["TRAIN.LOSS", "triplet", "TRAIN.MIXUP_ALPHA", "0.2"],
            "TRAIN.LOSS is 'triplet', expected",
        ),
    ],
)
def test_what_does_not_fit_a_metric_loss_is_refused(options, message):
    with pytest.raises(InputError) as caught:
        get_config(None, options)
    assert message in str(caught.value)


# ------------------------------------------------ whole trainings, on any number of processes

KEYS = {
    "arcface": ["TRAIN.LOSS=arcface", "MODEL.HEAD_COSINE=16"],
    "proxy_anchor": ["TRAIN.LOSS=proxy_anchor", "MODEL.HEAD_COSINE=16", "MODEL.NECK_DIM=6"],
    "triplet": ["TRAIN.LOSS=triplet", "DATA.SAMPLER=per_class", "DATA.PER_CLASS=2"],
}
RETRIEVAL = ["RETRIEVAL=[1,4]", "BEST_METRIC=mAP_R", "TRAIN.OPTIMIZER.NAME=SGD"]


def train_all(runs):
    for options, output in runs:
        train(options, output, 48)


@pytest.mark.long
def test_two_processes_train_as_one(tmp_path, tiny):
    """The losses are of the batch of both, and retrieval is measured among all images."""
    options = ["TRAIN.BASE_LR=0.01", "DATA.GLOBAL_BATCH=16", *RETRIEVAL]
    for ranks in (1, 2):
        runs = [
            ([*tiny, *as_words(options), *as_words(keys)], tmp_path / f"{loss}_{ranks}")
            for loss, keys in KEYS.items()
        ]
        run_ranks(train_all, runs, ranks=ranks)
    for loss in KEYS:
        one, two = (tmp_path / f"{loss}_{ranks}" for ranks in (1, 2))
        assert_close(weights(one), weights(two), atol=1e-5)
        found, other = (records(run)[-1] for run in (one, two))
        assert found["loss"] == pytest.approx(other["loss"], abs=1e-4)
        # Of embeddings that are this near to each other, the last bits decide which is nearest.
        assert found["mAP"] == pytest.approx(other["mAP"], abs=1)
        assert {"recall_1", "recall_4", "mAP_R"} <= found.keys()


def as_words(options):
    return [word for option in options for word in option.split("=")]


def evaluated(runs):
    for path, options, output in runs:
        train([*options, "EVAL", "True", "MODEL.PRETRAINED", str(path)], output, 48)


@pytest.mark.long
def test_retrieval_is_the_same_however_the_images_are_shared_out(tmp_path, tiny):
    options = [*tiny, *as_words(["RETRIEVAL=[1,2,4,8]", "DATA.BATCH_SIZE=16"])]
    train([*options, "TRAIN.MODEL_EMA", "True"], tmp_path / "run", 48)
    path = tmp_path / "run" / "checkpoints" / "best"
    words = without(options, "TRAIN.")
    results = []
    for batch, ranks in (("32", 1), ("5", 1), ("7", 2), ("64", 3)):
        output = tmp_path / f"{batch}_{ranks}"
        run_ranks(evaluated, [(path, [*words, "DATA.BATCH_SIZE_EVAL", batch], output)], ranks=ranks)
        results.append(json.loads((output / "result.json").read_text()))
    names = ("recall_1", "recall_2", "recall_4", "recall_8", "mAP", "mAP_R")
    for result in results[1:]:
        for name in names:
            assert result[name] == pytest.approx(results[0][name], abs=1e-9)
    # The same from stored features: what the classifier reads.
    _, _, val = get_datasets(get_config(None, words))
    predictor = FeatureExtractor(path)
    pixels = np.stack([predictor.pixels(Image.fromarray(image.squeeze())) for image in val.images])
    features = predictor.logits(pixels[:91])
    sums = retrieval_sums(normalised(features), val.labels[:91], np.arange(91), (1, 2, 4, 8))
    for name, value in percentages(sums, (1, 2, 4, 8)).items():
        assert results[0][name] == pytest.approx(value, abs=0.2)


def test_retrieval_without_two_images_of_a_class_is_refused(tmp_path, tiny):
    config = get_config(None, [*tiny, "RETRIEVAL", "[1]"])
    task = Classification(config)
    with pytest.raises(InputError, match=r"RETRIEVAL is \[1\], but no two of the 5 validation"):
        task.prepare_data(Few(np.arange(5)), "val")
    task.prepare_data(Few(np.arange(5)), "train")
    task.prepare_data(Few(np.array([0, 1, 1])), "val")


class Few:
    """A dataset of some labels."""

    def __init__(self, labels):
        self.labels = labels

    def __len__(self):
        return len(self.labels)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["RETRIEVAL", "[1,1]"], "RETRIEVAL is [1, 1], expected each K once"),
        (["RETRIEVAL", "[0]"], "RETRIEVAL is [0], expected"),
        (
            ["RETRIEVAL", "[1]", "TASK", "mae"],
            "RETRIEVAL has no effect without TASK classification",
        ),
        (["BEST_METRIC", "mAP"], "BEST_METRIC is 'mAP', expected one of"),
        (
            ["BEST_METRIC", "recall_2", "RETRIEVAL", "[1]"],
            "BEST_METRIC is 'recall_2', expected one",
        ),
        (
            ["RETRIEVAL", "[1]", "EVAL", "True", "EVAL_ENGINE", "inference"],
            "EVAL_ENGINE is 'inference', expected eager with RETRIEVAL",
        ),
    ],
)
def test_what_does_not_fit_retrieval_is_refused(options, message):
    with pytest.raises(InputError) as caught:
        get_config(None, options)
    assert message in str(caught.value)
