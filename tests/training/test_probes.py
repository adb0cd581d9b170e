"""Linear probes and transfers: the batch norm before the classifier, frozen backbones, images that
are enlarged.
"""

import numpy as np
import paddle
import pytest
from conftest import TINY
from PIL import Image
from support.dataset_files import CIFAR10, CIFAR100, cifar_archive
from support.ranks import run_ranks
from support.training_runs import assert_same_run, train, weights

from config import get_config
from datasets import get_datasets
from errors import InputError
from models import build_model, create_model
from models.layers.batch_norm import hold_frozen_statistics, synchronise
from models.layers.classifier_norm import ClassifierNorm
from models.paddle_inference import Program, export
from training.optim import freeze
from training.setup import share_batch
from utils import seed_everything
from weights import file_arrays, load_weights, save_weights

NORM = {"head.0._mean", "head.0._variance"}
PROBE = [
    "MODEL.HEAD_BATCH_NORM",
    "True",
    "TRAIN.FREEZE",
    "backbone",
    "TRAIN.OPTIMIZER.NAME",
    "LARS",
]
RNG = np.random.default_rng


def digits(**options):
    paddle.seed(0)
    return create_model("vit_digits", **options)


def values(model):
    return {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}


# -------------------------------------------------------- the batch norm itself


@pytest.mark.smoke
def test_the_norm_is_torchs_without_scale_and_shift():
    """In torch the running variance takes in n / (n - 1) of the batch's; both statistics move by a
    tenth.
    """
    norm = ClassifierNorm(4)
    mean = np.zeros(4)
    variance = np.ones(4)
    for seed in range(3):
        x = RNG(seed).normal(2, 3, (5, 4))
        found = norm(paddle.to_tensor(x, dtype="float32")).numpy()
        np.testing.assert_allclose(
            found, (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-6), rtol=1e-5, atol=1e-6
        )
        mean = 0.9 * mean + 0.1 * x.mean(0)
        variance = 0.9 * variance + 0.1 * x.var(0, ddof=1)
    norm.eval()
    for _ in range(2):
        found = norm(paddle.to_tensor(x, dtype="float32")).numpy()
        np.testing.assert_allclose(
            found, (x - mean) / np.sqrt(variance + 1e-6), rtol=1e-5, atol=1e-6
        )
    np.testing.assert_allclose(norm._mean.numpy(), mean, rtol=1e-6)
    np.testing.assert_allclose(norm._variance.numpy(), variance, rtol=1e-6)
    assert not list(norm.parameters())


def test_its_gradient_is_that_of_a_batch_norm():
    x = paddle.to_tensor(RNG(0).normal(size=(6, 3)), dtype="float32")
    factors = paddle.to_tensor(RNG(1).normal(size=(6, 3)), dtype="float32")
    gradients = []
    for norm in (ClassifierNorm(3), paddle.nn.BatchNorm1D(3, epsilon=1e-6)):
        x.stop_gradient = False
        (norm(x) * factors).sum().backward()
        gradients.append(x.grad.numpy())
        x.clear_gradient()
    np.testing.assert_allclose(*gradients, rtol=1e-4, atol=1e-6)


def test_one_image_has_no_variance():
    with pytest.raises(
        InputError,
        match="^HEAD_BATCH_NORM got a batch of 1 image in training, expected two or more",
    ):
        ClassifierNorm(4)(paddle.ones([1, 4]))
    alone = ["DATA.BATCH_SIZE", "1", "MODEL.HEAD_BATCH_NORM", "True"]
    with pytest.raises(
        InputError,
        match="^DATA.BATCH_SIZE is 1, expected 2 or more with MODEL.HEAD_BATCH_NORM: a",
    ):
        get_config(None, alone)
    assert get_config(None, [*alone, "EVAL", "True"]).DATA.BATCH_SIZE == 1
    shared = get_config(None, ["DATA.GLOBAL_BATCH", "2", "MODEL.HEAD_BATCH_NORM", "True"])
    with pytest.raises(
        InputError,
        match="^DATA.BATCH_SIZE is 1, expected 2 or more with MODEL.HEAD_BATCH_NORM: a",
    ):
        share_batch(shared, 2)


@pytest.mark.parametrize(
    ("name", "options"),
    [("vit_digits", {}), ("vit_digits", {"distilled": True}), ("beit_base_patch16_224", {})],
)
def test_it_stands_before_each_classifier_and_a_new_one_has_it_too(name, options):
    if name.startswith("beit"):
        options = {"embed_dim": 24, "depth": 1, "num_heads": 3, "image_size": 32, "num_classes": 10}
    model = create_model(name, head_batch_norm=True, head_init_scale=0.5, **options)
    plain = create_model(name, head_init_scale=0.5, **options)
    heads = model.classifier_names()
    added = set(model.state_dict()) - set(plain.state_dict())
    parts = ("0._mean", "0._variance", "1.weight", "1.bias")
    assert added == {f"{head}.{part}" for head in heads for part in parts}
    assert model.head[1].weight.numpy().std() == pytest.approx(0.01, rel=0.2)
    model.eval()
    size = (1, model.in_channels, *model.image_size)
    images = paddle.to_tensor(RNG(0).normal(size=size), dtype="float32")
    logits = model(images).numpy()
    for head in heads:
        layer = getattr(model, head)
        layer[0]._mean.set_value(paddle.ones_like(layer[0]._mean))
    assert np.abs(model(images).numpy() - logits).max() > 1e-3
    model.reset_classifier(7)
    assert [type(layer).__name__ for layer in model.head] == ["ClassifierNorm", "Linear"]
    assert (model.head[1].weight.shape[1], model.head[0]._mean.numpy().any()) == (7, False)
    model.reset_classifier(0)
    assert type(model.head).__name__ == "Identity"


@pytest.mark.parametrize(
    ("patterns", "moves"), [("backbone", True), ("head.*", False), ("null", True)]
)
def test_it_is_frozen_with_the_classifier_not_with_the_backbone(patterns, moves):
    model = digits(head_batch_norm=True)
    freeze(get_config("vit_digits", ["TRAIN.FREEZE", patterns]), model)
    before = values(model)
    model.train()
    hold_frozen_statistics(model)
    model(paddle.to_tensor(RNG(0).normal(size=(4, 1, 8, 8)), dtype="float32"))
    after = values(model)
    assert {name for name in after if (after[name] != before[name]).any()} == (
        NORM if moves else set()
    )


def test_other_processes_images_are_not_asked_for():
    with pytest.raises(
        InputError, match="TRAIN.SYNC_BN is True, but VisionTransformer has no batch norm"
    ):
        synchronise(digits(head_batch_norm=True))


def test_an_exported_program_gives_its_logits(tmp_path):
    model = digits(head_batch_norm=True)
    for index, buffer in enumerate((model.head[0]._mean, model.head[0]._variance)):
        buffer.set_value(
            paddle.to_tensor(RNG(index).uniform(0.5, 2, buffer.shape), dtype="float32")
        )
    model.eval()
    images = paddle.to_tensor(RNG(0).normal(size=(3, 1, 8, 8)), dtype="float32")
    export(model, tmp_path)
    expected = model(images).numpy()
    np.testing.assert_allclose(
        Program(tmp_path)(images).numpy(), expected, atol=1e-5 * np.ptp(expected), rtol=0
    )


# ----------------------------------------------------------------------- weights


def saved(folder, **options):
    model = digits(**options)
    for name, tensor in model.state_dict().items():
        tensor.set_value(tensor + (2 if name.startswith("head.") else 1))
    save_weights(model, folder / "model.safetensors")
    return values(model)


@pytest.mark.parametrize(
    ("theirs", "ours", "reason"),
    [
        ({}, {"head_batch_norm": True}, "another kind in the file"),
        ({"head_batch_norm": True}, {}, "another kind in the file"),
        ({"num_classes": 0}, {"head_batch_norm": True}, "none in the file, 10 in the model"),
        (
            {"head_batch_norm": True, "num_classes": 3},
            {"head_batch_norm": True},
            "3 classes in the file, 10 in the",
        ),
        (
            {"head_batch_norm": True, "num_classes": 64},
            {"head_batch_norm": True},
            "64 classes in the file, 10 in the",
        ),
        ({"head_batch_norm": True}, {"head_batch_norm": True}, None),
    ],
)
def test_a_probe_takes_a_backbone_and_a_classifier_of_its_own_kind(tmp_path, theirs, ours, reason):
    stored = saved(tmp_path, **theirs)
    model = digits(**ours)
    fresh = values(model)
    report = load_weights(model, tmp_path, strict=False)
    assert bool(report.fresh) == (reason is not None)
    assert (reason or "") in str(report)
    for name, value in values(model).items():
        expected = fresh if reason and name.startswith("head.") else stored
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


@pytest.mark.parametrize(("theirs", "ours"), [(True, False), (False, True)])
def test_an_evaluation_names_the_key(tmp_path, theirs, ours):
    saved(tmp_path, head_batch_norm=theirs)
    with pytest.raises(
        InputError,
        match=rf"according to the names of its tensors, set MODEL.HEAD_BATCH_NORM {theirs}$",
    ):
        load_weights(digits(head_batch_norm=ours), tmp_path)


def test_a_backbone_tells_nothing_of_the_key(tmp_path):
    saved(tmp_path, num_classes=0, init_values=0.1)
    with pytest.raises(
        InputError,
        match=r"unexpected blocks.0.ls1.gamma.*according to the names of its tensors, set MODEL.INIT_VALUES 1e-05",
    ):
        load_weights(digits(head_batch_norm=True), tmp_path, strict=False)


# -------------------------------------------------------------------------- runs


def train_all(runs):
    for run in runs:
        train(*run)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_probe_goes_on_in_the_same_bits_and_leaves_the_backbone_alone(tmp_path, ranks):
    options = [
        *TINY,
        *PROBE,
        "DATA.BATCH_SIZE",
        "8",
        "TRAIN.ACCUM_ITER",
        "2",
        "TRAIN.BASE_LR",
        "2",
        "SAVE_STEPS",
        "2",
    ]
    options += ["KEEP_LAST", "100", "REPORT_FREQ", "2"]
    middle = tmp_path / "whole" / "checkpoints" / f"epoch_0001_sample_{16 * ranks:09d}"
    resumed = [*options, "MODEL.RESUME", str(middle)]
    run_ranks(
        train_all,
        [(options, tmp_path / "whole", 64), (resumed, tmp_path / "resumed", 64)],
        ranks=ranks,
    )
    assert_same_run(tmp_path / "whole", tmp_path / "resumed")
    seed_everything(0)  # as the run began
    start = file_arrays(build_model(get_config(None, options)))
    found = weights(tmp_path / "whole")
    assert found.keys() == start.keys()
    moved = {name for name in found if not np.array_equal(found[name], start[name])}
    assert moved == {"head.0.running_mean", "head.0.running_var", "head.1.weight", "head.1.bias"}


# --------------------------------------------------------------------- transfers


@pytest.mark.parametrize(
    ("name", "layout", "label_key", "meta"),
    [
        ("transfer_cifar10", CIFAR10, b"labels", ("batches.meta", b"label_names")),
        ("transfer_cifar100", CIFAR100, b"fine_labels", ("meta", b"fine_label_names")),
    ],
)
def test_small_images_are_enlarged_as_torchvision_does(tmp_path, name, layout, label_key, meta):
    contents = cifar_archive(tmp_path, *layout, label_key, meta)
    classes = ["MODEL.NUM_CLASSES", "auto"]
    _, dataset, val = get_datasets(get_config(name, ["DATA.DATA_PATH", str(tmp_path), *classes]))
    member = "test_batch" if "test_batch" in contents else "test"
    pixels = contents[member][b"data"][0].reshape(3, 32, 32).transpose(1, 2, 0)
    whole = Image.fromarray(pixels).resize((256, 256), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(val[0][0], np.asarray(whole.crop((16, 16, 240, 240))))
    assert dataset[0][0].shape == (224, 224, 3)
