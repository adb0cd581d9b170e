"""FixMatch and pseudo-labels: the loss, whose gradients it has, runs on any number of processes."""

import json
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from conftest import without, write_images
from paddle.nn import functional as F
from support.ranks import run_ranks
from support.training_runs import assert_close, assert_same_run, records, refused, train, weights

import utils
from config import get_config
from datasets import ArrayDataset, get_datasets
from errors import InputError
from models import build_model
from settings.registry import tasks
from training.fixmatch import pseudo_label_losses

METHOD = [
    *("TASK", "fixmatch", "METHOD.LABELS_PER_CLASS", "1", "METHOD.UNLABELLED_RATIO", "2"),
    # Of ten classes a fresh model is never surer.
    *("METHOD.THRESHOLD", "0.12"),
    *("TRAIN.AUTO_AUGMENT", "rand-m9-n2", "TRAIN.RANDOM_ERASE_PROB", "1.0"),
    *("TRAIN.RANDOM_ERASE_MODE", "const", "TRAIN.SMOOTHING", "0.1", "DATA.BATCH_SIZE", "8"),
]


@pytest.fixture
def options(tiny):
    """Options of a small training. Of 48 images, each class has one with a label."""
    return [*tiny, *METHOD]


def softmax(logits):
    exponentials = np.exp(logits - logits.max(1, keepdims=True))
    return exponentials / exponentials.sum(1, keepdims=True)


def reference(predicted, logits, threshold):
    """Returns the losses and the mask [N] by the paper's formula, in NumPy and float64."""
    probabilities = softmax(np.asarray(predicted, np.float64))
    labels = probabilities.argmax(1)
    sure = probabilities.max(1) >= threshold
    own = softmax(np.asarray(logits, np.float64))[np.arange(len(labels)), labels]
    return np.where(sure, -np.log(own), 0), 100 * sure


@pytest.mark.smoke
@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.6, 1.0])
def test_the_losses_are_the_papers(threshold):
    rng = np.random.default_rng(0)
    predicted = 2 * rng.normal(size=(40, 5)).astype(np.float32)
    logits = rng.normal(size=(40, 5)).astype(np.float32)
    losses, mask = reference(predicted, logits, threshold)
    share = {0.0: 1.0, 1.0: 0.0}.get(threshold, (mask > 0).mean())
    assert (mask > 0).mean() == share
    found = pseudo_label_losses(paddle.to_tensor(predicted), paddle.to_tensor(logits), threshold)
    np.testing.assert_allclose(found["unlabelled_loss"].numpy(), losses, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(found["mask"].numpy(), mask)


def test_a_probability_at_the_threshold_counts_and_the_first_of_equal_classes_is_the_label():
    # softmax of equal logits is exactly 0.5, and the others' is 0
    predicted = np.full((2, 3), -1000, np.float32)
    predicted[:, 1:] = 0
    logits = np.array([[0, 3, 1], [2, 0, 0]], np.float32)
    for threshold, sure in ((0.5, True), (np.nextafter(np.float32(0.5), np.float32(1)), False)):
        found = pseudo_label_losses(
            paddle.to_tensor(predicted), paddle.to_tensor(logits), float(threshold)
        )
        assert found["mask"].numpy().tolist() == [100 * sure] * 2
        expected = -np.log(softmax(logits.astype(np.float64))[:, 1]) * sure
        np.testing.assert_allclose(found["unlabelled_loss"].numpy(), expected, rtol=1e-6)


def test_far_logits_and_nan_predictions_are_no_trouble():
    predicted = np.array([[500, 0], [np.nan, 0]], np.float32)
    logits = np.array([[-300, 100], [0, 0]], np.float32)
    found = pseudo_label_losses(paddle.to_tensor(predicted), paddle.to_tensor(logits), 0.95)
    # a loss above 64, which Paddle's own would cut off; a prediction of NaN is unsure
    assert found["unlabelled_loss"].numpy().tolist() == [400, 0]
    assert found["mask"].numpy().tolist() == [100, 0]


def randomized(network):
    """Returns a network with random weights. A fresh one gives all images the same logits."""
    for parameter in network.parameters():
        parameter.set_value(parameter + 0.1 * paddle.randn(parameter.shape))
    return network


class Setting:
    """A task with its network and a batch of its samples, as a training has them."""

    def __init__(self, options, size=48, count=4):
        options = [*options, "DATA.BATCH_SIZE", str(count)]
        self.config, train, _ = get_datasets(get_config(None, options))
        train = ArrayDataset(
            self.config, "train", train.images[:size], train.labels[:size], train.classes
        )
        utils.seed_everything(3)
        self.task = tasks.choose(self.config)(self.config, train.classes)
        self.network = randomized(self.task.build_network())
        self.task.prepare(self.network, train, SimpleNamespace(info=lambda _: None))
        data = self.task.samples(train)
        samples = [data.sample((1, index, 0)) for index in range(count)]
        self.batch = {
            name: paddle.to_tensor(np.stack([sample[name] for sample in samples]))
            for name in data.columns
        }

    def average(self, seed):
        """Gives the task an average of weights that are others than the network's."""
        utils.seed_everything(seed)
        self.task.average = randomized(build_model(self.config))
        self.task.average.eval()
        for parameter in self.task.average.parameters():
            parameter.stop_gradient = True

    def gradients(self, loss):
        self.network.clear_gradients()
        loss.sum().backward()
        return {
            name: parameter.grad.numpy().copy()
            for name, parameter in self.network.named_parameters()
            if parameter.grad is not None
        }

    def logits(self, column, network=None):
        """Returns the logits of one view alone."""
        return (network or self.network)(self.task._views(self.batch)[column])


@pytest.mark.smoke
@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("strong", [False, True])
def test_a_step_is_the_formula_and_only_the_learnt_views_have_gradients(options, strong, average):
    options += ["METHOD.UNLABELLED_WEIGHT", "0.7", "METHOD.STRONG_VIEW", str(strong)]
    if not strong:
        options = without(options, "TRAIN.AUTO_AUGMENT", "TRAIN.RANDOM_ERASE")
    if average:
        options += ["TRAIN.MODEL_EMA", "True", "METHOD.PSEUDO_LABELS", "average"]
    setting = Setting(options)
    if average:
        setting.average(seed=5)
    predicted = setting.logits("weak", setting.task.average).detach()
    # between the fourth and the fifth of eight
    setting.task.threshold = float(np.median(softmax(predicted.numpy()).max(1)))
    values = setting.task.step(setting.network, setting.batch, 1)
    found = setting.gradients(values["loss"])

    learnt = setting.logits("strong" if strong else "weak")
    unlabelled, mask = reference(predicted.numpy(), learnt.numpy(), setting.task.threshold)
    assert mask.mean() == 50
    of_labelled = setting.logits("pixels")
    labels = setting.batch["labels"]
    smooth = np.full([4, 10], 0.01)
    smooth[np.arange(4), labels.numpy()] += 0.9
    labelled = -(smooth * np.log(softmax(of_labelled.numpy().astype(np.float64)))).sum(1)
    right = predicted.numpy().argmax(1) == setting.batch["true_labels"].numpy().flatten()
    expected = {
        "loss": labelled + 0.7 * unlabelled.reshape(4, 2).mean(1),
        "labelled_loss": labelled,
        "unlabelled_loss": unlabelled.reshape(4, 2).mean(1),
        "mask": mask.reshape(4, 2).mean(1),
        "mask_right": (mask * right).reshape(4, 2).mean(1),
        "acc1": 100 * (of_labelled.numpy().argmax(1) == labels.numpy()),
    }
    for name, of_name in expected.items():
        np.testing.assert_allclose(values[name].numpy(), of_name, rtol=1e-4, atol=1e-5)

    # the same with constants for what has no gradient
    sure = paddle.to_tensor(mask / 100, "float32")
    pseudo = F.cross_entropy(learnt, predicted.argmax(1), reduction="none").flatten()
    loss = setting.task.criterion(None, of_labelled, labels)
    loss = loss + 0.7 * (sure * pseudo).reshape([4, 2]).mean(1)
    wanted = setting.gradients(loss)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        np.testing.assert_allclose(found[name], gradient, rtol=2e-3, atol=2e-5, err_msg=name)
    if average:
        assert all(p.grad is None for p in setting.task.average.parameters())
        setting.average(seed=6)
        other = setting.task.step(setting.network, setting.batch, 1)
        assert (other["unlabelled_loss"] != values["unlabelled_loss"]).any().item()


def test_nothing_but_the_labelled_images_is_learnt_below_the_threshold(options):
    setting = Setting([*options, "METHOD.THRESHOLD", "1.0"])
    values = setting.task.step(setting.network, setting.batch, 1)
    assert values["mask"].numpy().tolist() == values["unlabelled_loss"].numpy().tolist() == [0] * 4
    found = setting.gradients(values["loss"])
    labels = setting.batch["labels"]
    wanted = setting.gradients(setting.task.criterion(None, setting.logits("pixels"), labels))
    for name, gradient in wanted.items():
        np.testing.assert_allclose(found[name], gradient, rtol=2e-3, atol=2e-5, err_msg=name)


def test_boxes_are_erased_from_strong_views_alone(options):
    erased = Setting([*options, "METHOD.STRONG_LABELLED", "True"])
    whole = Setting([*without(options, "TRAIN.RANDOM_ERASE"), "METHOD.STRONG_LABELLED", "True"])
    found = erased.task._views(erased.batch)
    expected = whole.task._views(whole.batch)
    np.testing.assert_array_equal(found["weak"].numpy(), expected["weak"].numpy())
    for name, count in (("pixels", 4), ("strong", 8)):
        assert len(found[name]) == count
        # each has a box of its own, which holds the mean colour
        changed = found[name].numpy() != expected[name].numpy()
        assert changed.any(axis=(1, 2, 3)).mean() > 0.8
        assert (found[name].numpy()[changed] == 0).all()
    drawn = erased.batch["erased"].numpy()
    top, left, bottom, right = drawn[1, 1 + 1, 0, :4].astype(int)
    box = found["strong"].numpy()[2 * 1 + 1, 0, top:bottom, left:right]
    assert box.size
    assert (box == 0).all()


def test_the_weight_rises_over_the_first_epochs(options):
    def weights_of(*changes):
        config = get_config(None, [*options, *changes])
        task = tasks.choose(config)(config)
        return [task.weight_at(epoch) for epoch in (1, 2, 3, 4, 5, 6)]

    assert weights_of("METHOD.UNLABELLED_WEIGHT", "2") == [2] * 6
    rising = ["METHOD.UNLABELLED_WEIGHT", "2", "METHOD.RAMP_EPOCHS", "4"]
    assert weights_of(*rising) == [0, 0.5, 1, 1.5, 2, 2]


def train_all(runs):
    for run in runs:
        train(*run)


AVERAGE = ["TRAIN.MODEL_EMA", "True", "METHOD.PSEUDO_LABELS", "average"]
# 48 images are 24 samples, an epoch of three updates.
STEPS = ["DATA.GLOBAL_BATCH", "8", "SAVE_STEPS", "1", "KEEP_LAST", "9"]


@pytest.mark.smoke
@pytest.mark.parametrize("further", [[], AVERAGE], ids=["model", "average"])
def test_a_run_is_resumed_in_the_same_bits_and_is_the_same_on_two_processes(
    tmp_path, options, further
):
    options = [*without(options, "DATA.BATCH_SIZE"), *STEPS, *further]
    options += ["TRAIN.OPTIMIZER.NAME", "SGD", "TRAIN.BASE_LR", "0.1"]

    def runs(name):
        middle = str(tmp_path / name / "checkpoints" / "epoch_0001_sample_000000008")
        resumed = [*options, "MODEL.RESUME", middle]
        return [(options, tmp_path / name, 48), (resumed, tmp_path / f"{name}_resumed", 48)]

    train_all(runs("one"))
    run_ranks(train_all, runs("two"))
    for name in ("one", "two"):
        assert_same_run(tmp_path / name, tmp_path / f"{name}_resumed")
    one, two = (weights(tmp_path / name) for name in ("one", "two"))
    assert_close(one, two, atol=1e-6)
    lines = [records(tmp_path / name) for name in ("one", "two")]
    for first, second in zip(*lines, strict=True):
        assert first == pytest.approx(second, abs=1e-3)
    assert lines[0][0]["samples"] == 24
    assert 0 < lines[0][0]["mask"] < 100
    assert lines[0][0]["unlabelled_loss"] > 0
    # evaluated as any classification
    assert {"acc1", "acc5", "mean_class_acc"} < lines[0][1].keys()


def test_accumulated_steps_are_one_update_and_workers_change_nothing(tmp_path, options):
    options += ["TRAIN.OPTIMIZER.NAME", "SGD", "TRAIN.BASE_LR", "0.1", *AVERAGE]
    train(options, tmp_path / "one", 48)
    halves = ["DATA.BATCH_SIZE", "4", "TRAIN.ACCUM_ITER", "2"]
    train([*options, *halves], tmp_path / "halves", 48)
    workers = ["DATA.NUM_WORKERS", "2"]
    train([*without(options, "DATA.NUM_WORKERS"), *halves, *workers], tmp_path / "workers", 48)
    one, halves, workers = (weights(tmp_path / name) for name in ("one", "halves", "workers"))
    assert_close(one, halves, atol=1e-6)
    assert_close(halves, workers, atol=0)


def test_without_a_weight_the_run_is_that_of_labelled_images(tmp_path, options):
    options = without(options, "TRAIN.AUTO_AUGMENT", "TRAIN.RANDOM_ERASE")
    options = [*without(options, "METHOD.THRESHOLD"), "METHOD.UNLABELLED_WEIGHT", "0"]
    train(options, tmp_path / "run", 48)
    line = records(tmp_path / "run")[0]
    assert line["samples"] == 24
    assert line["mask"] == 0
    assert "unlabelled_loss" not in line


def test_trained_weights_are_a_classifiers(tmp_path, options, tiny):
    train(options, tmp_path / "run", 48)
    path = ["EVAL", "True", "MODEL.PRETRAINED", str(tmp_path / "run" / "checkpoints" / "last")]
    results = []
    for name, given in (("own", [*tiny, "TASK", "fixmatch"]), ("other", tiny)):
        train([*without(given, "TRAIN."), *path], tmp_path / name, 48)
        results.append(json.loads((tmp_path / name / "result.json").read_text())["acc1"])
    assert results == [pytest.approx(records(tmp_path / "run")[-1]["acc1"], abs=1e-4)] * 2


def of_folders(folders, *options):
    """Returns options of a training on five images of two classes, and eleven in another folder."""
    write_images(folders / "data" / "train", {"a": 3, "b": 2})
    write_images(folders / "data" / "val", {"a": 2, "b": 2}, seed=2)
    write_images(folders / "more", {"": 5, "deep/er": 6}, seed=1)
    return [
        *("TASK", "fixmatch", "DATA.DATASET", "folder", "DATA.DATA_PATH", str(folders / "data")),
        *("DATA.IMAGE_SIZE", "8", "DATA.NUM_WORKERS", "0", "DATA.CROP_PCT", "1.0"),
        *("MODEL.NUM_CLASSES", "auto", "MODEL.PATCH_SIZE", "4", "MODEL.EMBED_DIM", "16"),
        *("MODEL.DEPTH", "1", "MODEL.NUM_HEADS", "2", "TRAIN.NUM_EPOCHS", "1"),
        *("TRAIN.WARMUP_EPOCHS", "0", "REPORT", "False", "DATA.BATCH_SIZE", "2"),
        *("TRAIN.AUTO_AUGMENT", "rand-m9-n2", "METHOD.UNLABELLED_RATIO", "4"),
        *("METHOD.UNLABELLED", str(folders / "more"), *options),
    ]


def test_a_folder_of_further_images_is_trained_on(tmp_path):
    train(of_folders(tmp_path), tmp_path / "run")
    line = records(tmp_path / "run")[0]
    assert line["samples"] == 4  # 16 images, four a sample
    assert "mask" in line
    # the labels of these aren't known
    assert "mask_right" not in line


def refused_of_folders(options, output):
    refused("the unlabelled images differ between rank 0 and rank 1: ", options, output, None)


def remove_on_rank_1(options, output, folder):
    """Trains, on rank 1 with another folder that lacks an image."""
    if utils.rank():
        options = [*options, "METHOD.UNLABELLED", str(folder)]
    refused_of_folders(options, output)


def test_ranks_with_other_unlabelled_images_are_refused(tmp_path):
    options = of_folders(tmp_path, "DATA.BATCH_SIZE", "1")
    write_images(tmp_path / "less", {"": 5, "deep/er": 5}, seed=1)
    run_ranks(remove_on_rank_1, options, tmp_path / "run", tmp_path / "less")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["METHOD.LABELS_PER_CLASS", "9"], "METHOD.LABELS_PER_CLASS is 9, but class '"),
        (["METHOD.LABELS_PER_CLASS", "0"], "METHOD.LABELS_PER_CLASS is 0, expected 1 to"),
        (["METHOD.LABELS_PER_CLASS", "None"], "TASK fixmatch needs images without labels: METHOD"),
        (["METHOD.UNLABELLED_RATIO", "0"], "METHOD.UNLABELLED_RATIO is 0, expected 1 to"),
        (
            ["METHOD.UNLABELLED_RATIO", "9"],
            "48 unlabelled images make ",
        ),
        (["METHOD.THRESHOLD", "1.5"], "METHOD.THRESHOLD is 1.5, expected 0 to 1"),
        (["METHOD.THRESHOLD", "nan"], "METHOD.THRESHOLD takes float, found 'nan'"),
        (["METHOD.UNLABELLED_WEIGHT", "-1"], "METHOD.UNLABELLED_WEIGHT is -1.0, expected 0 to"),
        (["METHOD.PSEUDO_LABELS", "teacher"], "METHOD.PSEUDO_LABELS is 'teacher', expected one of"),
        (["METHOD.PSEUDO_LABELS", "average"], "needs TRAIN.MODEL_EMA True, found False"),
        (["METHOD.UNLABELLED", "nowhere"], "nowhere"),
        (["BEST_METRIC", "knn", "PROBE.FREQ", "1"], "knn, which reads the labels that METHOD.LAB"),
        (
            ["METHOD.STRONG_VIEW", "False"],
            "TRAIN.AUTO_AUGMENT is rand-m9-n2, but no strong view is used",
        ),
        (["METHOD.UNLABELLED_WEIGHT", "0"], "METHOD.THRESHOLD has no effect without METHOD.UNLAB"),
        (["TRAIN.MIXUP_ALPHA", "0.2"], "TRAIN.MIXUP_ALPHA is 0.2, expected 0.0 with TASK fixmatch"),
        (["TRAIN.LOSS", "bce"], "TRAIN.LOSS is bce, expected auto or cross_entropy with TASK fix"),
        (["DATA.SAMPLER", "balanced"], "DATA.SAMPLER is balanced, expected shuffle with TASK fix"),
        (["TRAIN.REPEATED_AUGMENT", "3"], "TRAIN.REPEATED_AUGMENT is 3, expected 1 with TASK fixm"),
        (["DATA.SHUFFLE_MODE", "shard"], "DATA.SHUFFLE_MODE is shard, expected global with TASK"),
    ],
)
def test_what_does_not_fit_is_one_line(tmp_path, options, changes, message):
    refused(message, [*options, *changes], tmp_path / "run", 48)
    assert not (tmp_path / "run").exists()


def test_a_strong_view_has_to_be_stronger(tmp_path, options):
    message = (
        "a strong view differs from a weak one by TRAIN.AUTO_AUGMENT, TRAIN.COLOR_JITTER, TRAIN."
    )
    weak = without(options, "TRAIN.AUTO_AUGMENT", "TRAIN.RANDOM_ERASE")
    refused(message, weak, tmp_path / "run", 48)
    train([*weak, "METHOD.STRONG_VIEW", "False"], tmp_path / "run", 48)


def test_an_evaluation_takes_no_keys_of_the_training(options):
    options = [*without(options, "TRAIN.", "METHOD."), "EVAL", "True"]
    for key, value in (("LABELS_PER_CLASS", "4"), ("THRESHOLD", "0.9"), ("STRONG_VIEW", "False")):
        with pytest.raises(InputError, match=f"METHOD.{key} has no effect under EVAL"):
            get_config(None, [*options, f"METHOD.{key}", value])
