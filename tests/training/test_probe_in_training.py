"""PROBE.FREQ: features are measured during a training, which they don't change."""

import json

import numpy as np
import paddle
import pytest
from conftest import without
from paddle import nn
from support.ranks import run_ranks
from support.small_models import SMALL_MODELS
from support.training_runs import assert_same_run, records, refused, train, weights

import utils
from config import get_config
from datasets import ArrayDataset, get_dataloader, get_datasets
from errors import InputError
from inference.probing import Model, Probes, measure, read_sets
from loading.transforms import multi_crop
from models import build_model
from models.base import without_classifier
from models.pretraining.network import PretrainingNetwork
from training import engine, parallel
from training.probing.probe import Probe
from training.run import Run
from training.task import Task

PROBED = ("knn", "rankme", "feature_std")


def options_of(tiny, *more):
    return [
        *without(tiny, "TRAIN.NUM_EPOCHS", "VALIDATE_FREQ"),
        *("TRAIN.NUM_EPOCHS", "3", "DATA.BATCH_SIZE", "16", "TRAIN.BASE_LR", "0.01"),
        *more,
    ]


def evaluations(output, split="val"):
    return [record for record in records(output) if record["split"] == split]


def test_a_run_with_probes_has_the_same_weights_as_one_without(tmp_path, tiny):
    options = options_of(tiny, "MODEL.DROPOUT", "0.1", "TRAIN.MODEL_EMA", "True")
    train(options, tmp_path / "without", 128)
    train([*options, "PROBE.FREQ", "2"], tmp_path / "with", 128)
    one = weights(tmp_path / "without")
    for name, array in weights(tmp_path / "with").items():
        np.testing.assert_array_equal(array, one[name])
    for split in ("val", "ema"):
        probed = evaluations(tmp_path / "with", split)
        # Every second epoch, and the last.
        assert [set(PROBED) <= set(record) for record in probed] == [False, True, True]
        for record, other in zip(probed, evaluations(tmp_path / "without", split), strict=True):
            assert {key: record[key] for key in record if key not in PROBED} == other
    result = json.loads((tmp_path / "with" / "result.json").read_text())
    last = evaluations(tmp_path / "with")[-1]
    assert {key: round(result[key], 6) for key in PROBED} == {key: last[key] for key in PROBED}
    assert result["ema"]["knn"] >= 0
    log = (tmp_path / "with" / "log.txt").read_text()
    assert f"knn: {last['knn']:.2f}, rankme: {last['rankme']:.2f}, feature_std: " in log


def test_a_probe_during_training_equals_one_of_the_checkpoint(tmp_path, tiny):
    train(options_of(tiny, "PROBE.FREQ", "3"), tmp_path / "run")
    last = evaluations(tmp_path / "run")[-1]
    model = Model(str(tmp_path / "run" / "checkpoints" / "last"))
    config, training, val = read_sets(model, [], workers=0)
    result = measure(model, config, training, val, Probes(("knn",), (20,)))
    assert round(result["knn"]["20"], 6) == last["knn"]
    assert result["rankme"] == pytest.approx(last["rankme"], abs=1e-5)
    assert result["feature_std"] == pytest.approx(last["feature_std"], abs=1e-6)


def test_the_best_may_be_that_of_the_neighbours_and_a_run_goes_on(tmp_path, tiny):
    options = options_of(tiny, "PROBE.FREQ", "1", "BEST_METRIC", "knn", "SAVE_FREQ", "1")
    train(options, tmp_path / "whole", 64)
    accuracies = [record["knn"] for record in evaluations(tmp_path / "whole")]
    result = json.loads((tmp_path / "whole" / "result.json").read_text())
    assert result["best"]["epoch"] == 1 + int(np.argmax(accuracies))
    assert result["best"]["knn"] == pytest.approx(max(accuracies), abs=1e-6)
    middle = tmp_path / "whole" / "checkpoints" / "epoch_0001"
    train([*options, "MODEL.RESUME", str(middle)], tmp_path / "resumed", 64)
    assert_same_run(tmp_path / "whole", tmp_path / "resumed")


def test_images_with_views_are_probed_as_those_without(monkeypatch, tiny):
    options = options_of(tiny, "PROBE.FREQ", "1")
    expected = probed(options)
    monkeypatch.setattr("datasets.view_columns", lambda task: ("pixels", "local"))
    assert probed(options, views=True) == expected


def probed(options, length=None, labels=None, views=False):
    """What a probe of fresh weights measures, on all ranks."""
    config, training, val = get_datasets(get_config(None, options))
    if views:
        for dataset in (training, val):
            dataset.views = multi_crop(config, global_scale=(0.4, 1.0), local_views=2)
    if length:
        labels = training.labels[:length] if labels is None else labels
        training = ArrayDataset(config, "train", training.images[:length], labels, [])
    utils.seed_everything(0)
    model = build_model(config)
    model.eval()
    loader = get_dataloader(config, val, "val", rank=utils.rank(), ranks=utils.world_size())
    probe = Probe(config, model, training, loader)
    return [probe.measure(model, iter, Run(config, [])) for _ in range(2)]


def test_two_processes_and_any_batch_size_measure_the_same(tiny):
    options = options_of(tiny, "PROBE.FREQ", "1")
    one, again = probed(options)
    assert again == one
    for number in (1, 2):
        found = run_ranks(probed, [*options, "DATA.BATCH_SIZE_EVAL", "7"], ranks=number)
        for values, _ in found:
            assert values["knn"] == pytest.approx(one["knn"], abs=0.3)
            assert values["rankme"] == pytest.approx(one["rankme"], rel=1e-4)
            assert values["feature_std"] == pytest.approx(one["feature_std"], rel=1e-4)


def test_workers_and_a_part_of_the_images(tiny):
    options = options_of(tiny, "PROBE.FREQ", "1", "PROBE.IMAGES", "100")
    one = probed(options)
    assert probed([*without(options, "DATA.NUM_WORKERS"), "DATA.NUM_WORKERS", "2"]) == one
    assert one != probed([*without(options, "PROBE.IMAGES")])
    assert run_ranks(probed, options)[0][0]["rankme"] == pytest.approx(one[0]["rankme"], rel=1e-4)


def test_training_images_are_prepared_as_for_an_evaluation(tiny):
    options = options_of(tiny, "PROBE.FREQ", "1")
    augmented = [*options, "TRAIN.AFFINE", "[30.0,0.2,0.2]", "TRAIN.RANDOM_ERASE_PROB", "1.0"]
    assert probed(augmented) == probed(options)


def test_images_without_labels_are_measured_without_neighbours(tmp_path, tiny):
    unlabelled = np.full(64, -1)
    values, _ = probed(options_of(tiny, "PROBE.FREQ", "1"), 64, unlabelled)
    assert values.keys() == {"rankme", "feature_std"}
    with pytest.raises(InputError, match="BEST_METRIC is knn, but the images don't have one label"):
        probed(options_of(tiny, "PROBE.FREQ", "1", "BEST_METRIC", "knn"), 64, unlabelled)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["PROBE.FREQ", "1"], "PROBE.K is 20, but only 16 training images are compared; lower it"),
        (["PROBE.FREQ", "1", "VALIDATE_FREQ", "2"], "PROBE.FREQ is 1, expected a multiple of"),
        (
            ["PROBE.FREQ", "2", "BEST_METRIC", "knn"],
            "PROBE.FREQ is 2, expected VALIDATE_FREQ (1), because BEST_METRIC is knn",
        ),
        (["BEST_METRIC", "knn"], "BEST_METRIC is 'knn', expected one of auto, acc1"),
        (["PROBE.K", "3"], "PROBE.K has no effect without PROBE.FREQ"),
    ],
)
def test_what_does_not_fit_is_one_line(tmp_path, tiny, more, message):
    refused(message, options_of(tiny, *more), tmp_path / "run", 16)
    assert not (tmp_path / "run").exists()


def test_a_collapse_is_logged(tmp_path, tiny):
    config, training, val = get_datasets(get_config(None, options_of(tiny, "PROBE.FREQ", "1")))
    model = build_model(config)
    model.eval()
    # The same features for all images.
    model.norm.weight.set_value(1e-6 * model.norm.weight)
    model.norm.bias.set_value(model.norm.bias + 1)
    lines = []
    run = Run(config, [])
    run.info = lines.append
    probe = Probe(config, model, training, get_dataloader(config, val, "val"))
    probe.measure(model, iter, run)
    assert len(lines) == 1
    assert lines[0].startswith("warning: collapse: all images have nearly the same features")


def test_features_are_the_classifiers_input_for_every_architecture():
    for kind, small in SMALL_MODELS.items():
        paddle.seed(0)
        model = small()
        model.eval()
        images = paddle.randn([2, 3, *model.image_size])
        with paddle.no_grad():
            logits = model(images).numpy()
            names = list(model.state_dict())
            with without_classifier(model):
                features = model(images).numpy()
            assert list(model.state_dict()) == names, kind
            np.testing.assert_array_equal(model(images).numpy(), logits, err_msg=kind)
            model.reset_classifier(0)
            np.testing.assert_array_equal(model(images).numpy(), features, err_msg=kind)


class Brightness(PretrainingNetwork):
    """An encoder, from whose features the brightness is read."""

    def __init__(self, encoder):
        super().__init__(encoder)
        self.head = nn.Linear(encoder.num_features, 1)

    def forward(self, images):
        return self.head(self.encoder(images))[:, 0]


class BrightnessTask(Task):
    def errors(self, network, batch):
        images = batch["pixels"].astype("float32").transpose([0, 3, 1, 2]) / 255
        return (network(images) - images.mean([1, 2, 3])).square()

    def step(self, network, batch, epoch):
        return {"loss": self.errors(network, batch)}

    def evaluate(self, forward, batches):
        losses = [self.errors(forward, batch) for batch in batches]
        losses = np.concatenate(sum(utils.all_gather([loss.numpy() for loss in losses]), []))
        return {"loss": float(losses.mean()), "num_samples": len(losses)}


def test_the_encoder_of_a_training_without_labels_is_probed(tmp_path, tiny):
    options = options_of(
        tiny, "PROBE.FREQ", "1", "BEST_METRIC", "knn", "OUTPUT", str(tmp_path / "r")
    )
    config, training, val = get_datasets(get_config(None, options))
    utils.seed_everything(0)
    network = Brightness(build_model(config))
    network.encoder.reset_classifier(0)
    for dataset in (training, val):
        # The task ignores the labels; the probe reads them.
        dataset.own_columns = ["pixels"]
    task = BrightnessTask(config)
    network = parallel.wrap_model(config, network)
    engine.fit(task, network, training, val, Run(config, []))
    lines = evaluations(tmp_path / "r")
    assert all(set(PROBED) <= set(line) for line in lines)
    assert json.loads((tmp_path / "r" / "result.json").read_text())["best"]["knn"] > 20
    curves = (tmp_path / "r" / "curves.png").read_bytes()
    assert curves.startswith(b"\x89PNG")


def test_a_network_without_features_is_refused(tiny):
    config, training, val = get_datasets(get_config(None, options_of(tiny, "PROBE.FREQ", "1")))
    with pytest.raises(InputError, match="the network of TASK classification has no features"):
        Probe(config, nn.Linear(2, 2), training, get_dataloader(config, val, "val"))
