"""Images of several classes: figures are scikit-learn's on any number of processes; a run from data
to answers.
"""

import json
from unittest import mock

import numpy as np
import paddle
import pytest
from conftest import without
from PIL import Image
from safetensors import safe_open
from sklearn.metrics import average_precision_score, f1_score, precision_recall_curve
from support.ranks import run_ranks
from support.training_runs import assert_same_run, refused, train, work

import utils
from config import get_config
from datasets import get_datasets
from errors import InputError
from inference import Predictor
from inference.exporting import write_export
from inference.quantise import training_images
from loading.label_sets import LabelSets
from loading.transforms import BatchTransform, Mixup
from main_multi_gpu import read_datasets
from training import multilabel
from training.checkpoint.description import METADATA, thresholds_of
from training.multilabel import MultiLabel
from training.multilabel_metrics import (
    average_precision,
    best_threshold,
    count_predictions,
    rank_images,
    sigmoid,
)
from training.report import write_report
from training.report.run_files import read_predictions
from utils import all_gather, all_to_all

CLASSES = ["left", "right", "below", "never"]


def drawn(count=400, classes=6, seed=0):
    """Logits, many of them equal, and truths; nobody has the last class."""
    rng = np.random.default_rng(seed)
    truth = rng.random((count, classes)) < np.linspace(0.5, 0.02, classes)
    truth[:, -1] = False
    return np.round(rng.normal(size=truth.shape) + truth, 1).astype(np.float32), truth


@pytest.mark.smoke
def test_average_precisions_and_thresholds_are_scikit_learns():
    logits, truth = drawn()
    shares = sigmoid(logits)
    np.testing.assert_allclose(shares, 1 / (1 + np.exp(-logits.astype(np.float64))), rtol=1e-14)
    assert (np.diff(sigmoid(np.float32([-800, -99, -98, 0, 30]))) > 0).all()
    for column, there in list(zip(shares.T, truth.T, strict=True))[:-1]:
        ranked = rank_images(column, there)
        assert average_precision(ranked) == pytest.approx(
            average_precision_score(there, column), abs=1e-12
        )
        precision, recall, levels = precision_recall_curve(there, column)
        best = (2 * precision * recall / np.maximum(precision + recall, 1e-12)).max()
        chosen = best_threshold(ranked)
        for level in (0.0, 0.5, chosen, column.max(), 1.0):
            told = column >= level
            assert count_predictions(ranked, level) == (
                (told & there).sum(),
                told.sum(),
                there.sum(),
            )
        assert f1_score(there, column >= chosen) == pytest.approx(best, abs=1e-12)
        assert np.abs(levels - chosen).min() > 1e-3  # between two of them
    nobody = rank_images(shares[:, -1], truth[:, -1])
    assert (average_precision(nobody), best_threshold(nobody)) == (None, 0.5)
    alone = np.array([0.25, 0.25])
    assert average_precision(rank_images(alone, np.array([True, False]))) == 0.5
    assert best_threshold(rank_images(alone, np.array([True, True]))) == 0.125
    broken = rank_images(np.array([np.nan, 1.0, 0.5, 0.0]), np.array([True, True, False, False]))
    assert [part.tolist() for part in broken] == [[1.0, 0.5, 0.0], [1, 1, 2], [1, 2, 4]]


def evaluated(count, batch, thresholds=None):
    """This rank's share of ``drawn``, evaluated as the engine does."""
    logits, truth = drawn(count)
    own = range(paddle.distributed.get_rank(), count, paddle.distributed.get_world_size())
    rows = [list(own[start : start + batch]) for start in range(0, len(own), batch)]
    task = MultiLabel(
        get_config(None, ["TASK", "multilabel", "MODEL.NUM_CLASSES", "6"]), list("abcdef")
    )
    task.thresholds, task.normalize = thresholds, lambda pixels: pixels
    batches = (
        {
            "pixels": paddle.to_tensor(logits[r]),
            "labels": paddle.to_tensor(truth[r].astype("uint8")),
        }
        for r in rows
    )
    with mock.patch.object(multilabel, "_MOST_SCORES", 2 * count):  # two classes at a time
        return task.evaluate(lambda pixels: pixels, batches)


def test_an_evaluation_is_scikit_learns():
    logits, truth = drawn(101)
    alone = evaluated(101, 8)
    shares = sigmoid(logits)
    entropy = np.logaddexp(0, np.where(truth, -logits, logits)).mean()
    assert (alone["num_samples"], alone["loss"]) == (101, pytest.approx(entropy, rel=1e-5))
    precisions = [100 * average_precision_score(truth[:, k], shares[:, k]) for k in range(5)]
    assert list(alone["class_ap"].values()) == [*map(pytest.approx, precisions), None]
    assert alone["mAP"] == pytest.approx(np.mean(precisions))
    at_half = alone["f1_micro_at_half"], alone["f1_macro_at_half"]
    for level, found in (
        (alone["thresholds"], (alone["f1_micro"], alone["f1_macro"])),
        (0.5, at_half),
    ):
        told = shares >= level
        assert found[0] == pytest.approx(100 * f1_score(truth, told, average="micro"))
        assert found[1] == pytest.approx(100 * f1_score(truth[:, :5], told[:, :5], average="macro"))
    assert alone["class_f1"]["f"] is None
    kept = evaluated(101, 8, np.array(alone["thresholds"]))
    assert kept == alone
    assert evaluated(101, 8, np.full(6, 0.5))["f1_micro"] == at_half[0]


def evaluated_with_counts(count, batch):
    """(The figures, how many classes this rank ranked, how many scores it held of other ranks at a
    time at most).

    Pickles are exchanged twice, however many classes there are: the ranks' numbers of images, and
    their figures.
    """
    ranked = []
    held = []
    gathered = []

    def rank(shares, truth):
        ranked.append(len(shares))
        return rank_images(shares, truth)

    def exchange(parts, lengths):
        found = all_to_all(parts, lengths)
        held.append(sum(part.size for part in found))
        return found

    def gather(data):
        gathered.append(data)
        return all_gather(data)

    with (
        mock.patch.object(multilabel, "rank_images", rank),
        mock.patch.object(multilabel, "all_to_all", exchange),
        mock.patch.object(multilabel, "all_gather", gather),
        mock.patch.object(utils, "all_gather", gather),
    ):
        figures = evaluated(count, batch)
    assert set(ranked) == {count}
    assert len(gathered) == 2
    return figures, len(ranked), max(held)


@pytest.mark.parametrize(
    "ranks",
    [1, pytest.param(2, marks=pytest.mark.smoke), 3, pytest.param(5, marks=pytest.mark.long)],
)
@pytest.mark.parametrize(("count", "batch"), [(101, 8), (2, 4)])
def test_ranks_share_the_classes_out_and_find_the_same_bits(ranks, count, batch):
    alone, ranked, held = evaluated_with_counts(count, batch)
    assert (ranked, held) == (6, 2 * count)  # two classes at a time
    for own, ranked, held in run_ranks(evaluated_with_counts, count, batch, ranks=ranks):
        assert own.pop("loss") == pytest.approx(alone["loss"], rel=1e-6)
        assert own == {name: value for name, value in alone.items() if name != "loss"}
        assert ranked == {1: 6, 2: 3, 3: 2, 5: 2}[ranks]
        assert held <= 2 * count


# ------------------------------------------------------------------- a run


def write_data(root, train=48, val=21):
    """Grey pictures whose parts are bright or not: a table of what they show."""
    rng = np.random.default_rng(0)
    for mode, count in (("train", train), ("val", val)):
        (root / mode).mkdir(parents=True)
        rows = [f"image,{','.join(CLASSES)}"]
        for index in range(count):
            has = [(index >> place) % 2 for place in range(3)]
            pixels = rng.integers(0, 60, (8, 8))
            for part, there in zip((np.s_[:4, :4], np.s_[:4, 4:], np.s_[4:]), has, strict=True):
                pixels[part] += 150 * there
            Image.fromarray(pixels.astype(np.uint8)).save(root / mode / f"{index}.png")
            rows.append(f"{mode}/{index}.png,{','.join(map(str, has))},0")
        (root / f"{mode}.csv").write_text("\n".join(rows) + "\n")
    return root


@pytest.fixture
def options(tmp_path, tiny):
    data = str(write_data(tmp_path / "data"))
    dropped = ("DATA.DATASET", "MODEL.NUM_CLASSES", "TRAIN.NUM_EPOCHS", "REPORT")
    words = [*without(tiny, *dropped), "TASK", "multilabel"]
    words += ["DATA.DATASET", "multilabel_csv", "DATA.DATA_PATH", data, "MODEL.NUM_CLASSES", "auto"]
    return [
        *words,
        "TRAIN.NUM_EPOCHS",
        "3",
        "TRAIN.BASE_LR",
        "0.01",
        "TRAIN.CROP",
        "squash",
        "TRAIN.CROP_PCT",
        "1.0",
    ]


def whole_life(options, output, training):
    """Trains, goes on from the middle of it, evaluates by the run's weights; what ``evaluated``
    gives besides.
    """
    train([*options, *training], output / "whole")
    middle = output / "whole" / "checkpoints" / "epoch_0002_sample_000000016"
    train([*options, *training, "MODEL.RESUME", str(middle)], output / "resumed")
    weights = str(output / "whole" / "checkpoints" / "last")
    own = [*without(options, "TRAIN."), "DATA.BATCH_SIZE_EVAL", "4", "MODEL.PRETRAINED", weights]
    evaluate(own, output / "again")
    return evaluated(101, 7), evaluated(1, 4)


def evaluate(options, output):
    config, _, val = get_datasets(
        get_config(None, [*options, "OUTPUT", str(output), "EVAL", "True"])
    )
    work(config, None, val)


def told_thresholds(file):
    with safe_open(file, "np") as opened:
        return json.loads(opened.metadata()[METADATA])["thresholds"]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.smoke)])
def test_a_run_trains_goes_on_evaluates_and_answers_by_its_thresholds(tmp_path, options, ranks):
    more = [
        "DATA.BATCH_SIZE",
        str(16 // ranks),
        "TRAIN.MODEL_EMA",
        "True",
        "SAVE_STEPS",
        "1",
        "KEEP_LAST",
        "99",
    ]
    for found in run_ranks(whole_life, options, tmp_path, more, ranks=ranks):
        for own, expected in zip(found, (evaluated(101, 3), evaluated(1, 3)), strict=True):
            assert own.pop("loss") == pytest.approx(expected.pop("loss"), rel=1e-6)
            assert own == expected  # to the bit, on any number of processes
    assert_same_run(tmp_path / "whole", tmp_path / "resumed")
    ends = [tmp_path / name / "checkpoints" / "last" for name in ("whole", "resumed")]
    result = json.loads((tmp_path / "whole" / "result.json").read_text())
    for file, found in (("model.safetensors", result), ("ema.safetensors", result["ema"])):
        assert [told_thresholds(end / file) for end in ends] == [found["thresholds"]] * 2
    middle = tmp_path / "whole" / "checkpoints" / "epoch_0002_sample_000000016"
    assert thresholds_of(middle) == []  # nothing was evaluated there
    assert json.loads((tmp_path / "whole" / "classes.json").read_text()) == CLASSES
    assert result["best"]["mAP"] == pytest.approx(
        max(r["mAP"] for r in _validations(tmp_path / "whole")), abs=1e-6
    )
    again = json.loads((tmp_path / "again" / "result.json").read_text())
    for name in (
        "mAP",
        "f1_micro",
        "f1_macro",
        "f1_micro_at_half",
        "class_ap",
        "class_f1",
        "thresholds",
    ):
        assert again[name] == result[name], name
    assert again["loss"] == pytest.approx(result["loss"], rel=1e-6)
    files = [(tmp_path / name / "predictions.csv").read_text() for name in ("whole", "resumed")]
    assert files[0] == files[1]
    page = write_report(tmp_path / "whole", None).read_text()
    row = (
        f"{result['class_ap']['left']:.2f}",
        f"{result['class_f1']['left']:.2f}",
        f"{result['thresholds'][0]:.3g}",
    )
    assert "<tr><th>left</th>" + "".join(f'<td class="n">{value}</td>' for value in row) in page
    assert page.count("<figure") == sum(
        not own for own in read_predictions(tmp_path / "whole" / "predictions.csv").right
    )
    assert "thresholds: the weights' own; " in (tmp_path / "again" / "log.txt").read_text()
    if ranks == 1:
        own = [*without(options, "TRAIN."), "MODEL.PRETRAINED", str(middle)]
        evaluate(own, tmp_path / "plain")
        plain = json.loads((tmp_path / "plain" / "result.json").read_text())
        assert (plain["f1_micro"], plain["thresholds"]) == (plain["f1_micro_at_half"], [0.5] * 4)
        assert (
            "thresholds: 0.5 for each class (the weights have no thresholds); "
            in (tmp_path / "plain" / "log.txt").read_text()
        )
        _answers(tmp_path, ends[0], result)


def _validations(run):
    return [
        r
        for r in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        if r["split"] == "val"
    ]


def _answers(tmp_path, weights, result):
    """What a Predictor of the weights, and of their export, says of the validation set is what was
    counted.
    """
    predictor = Predictor(weights)
    assert (predictor.task, predictor.classes, predictor.thresholds) == (
        "multilabel",
        CLASSES,
        result["thresholds"],
    )
    paths = [str(tmp_path / "data" / "val" / f"{index}.png") for index in range(21)]
    truth = np.array([[(index >> place) % 2 for place in range(3)] + [0] for index in range(21)])
    write_export(
        predictor.config,
        predictor.model,
        tmp_path / "out",
        CLASSES,
        task="multilabel",
        thresholds=predictor.thresholds,
    )
    for own in (predictor, Predictor(tmp_path / "out")):
        told = np.zeros_like(truth)
        for row, answer in zip(told, own(paths), strict=True):
            row[answer.outputs] = 1
            assert answer.probabilities == sorted(answer.probabilities, reverse=True)
        assert 100 * f1_score(truth, told, average="micro") == pytest.approx(result["f1_micro"])
        kept = read_predictions(tmp_path / "whole" / "predictions.csv")
        np.testing.assert_array_equal(kept.right, (told == truth).all(1))
        np.testing.assert_array_equal(kept.predicted, truth[range(21), kept.label])
    everything = predictor(paths[:1], threshold=0.0)[0]
    assert (
        len(everything.classes),
        len(predictor(paths[:1], threshold=0.0, top=2)[0].classes),
    ) == (4, 2)


def test_parts_of_a_few_pictures_are_learned(tmp_path, options):
    more = [
        "TRAIN.NUM_EPOCHS",
        "25",
        "DATA.BATCH_SIZE",
        "8",
        "TRAIN.HFLIP",
        "0",
        "VALIDATE_FREQ",
        "25",
    ]
    train([*without(options, "TRAIN.NUM_EPOCHS"), *more], tmp_path / "run")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["mAP"] > 85  # 53 by chance
    assert result["class_ap"]["below"] > 99
    assert result["class_ap"]["never"] is None
    log = (tmp_path / "run" / "log.txt").read_text()
    assert f"summary: mAP: {result['mAP']:.2f}, f1_micro: {result['f1_micro']:.2f}, " in log
    assert "an evaluation takes 20 bytes per image in each process\n" in log


# ---------------------------------------------------------- batches, refusals


@pytest.mark.parametrize("mixup", [[], ["TRAIN.MIXUP_ALPHA", "0.8", "TRAIN.CUTMIX_ALPHA", "1.0"]])
def test_targets_are_smoothed_by_halves_and_mixed_by_shares(mixup):
    words = [
        "TASK",
        "multilabel",
        "MODEL.NUM_CLASSES",
        "3",
        "TRAIN.SMOOTHING",
        "0.1",
        "DATA.IMAGE_SIZE",
        "8",
        *mixup,
    ]
    config = get_config(None, words)
    labels = np.uint8([[0, 0, 0], [1, 0, 1], [1, 1, 1], [0, 1, 0]])
    columns = {"pixels": paddle.zeros([4, 8, 8, 3], "uint8"), "labels": paddle.to_tensor(labels)}
    expected = np.where(labels, 0.95, 0.05)
    if mixup:
        mixed = Mixup(config).draw(1, 1, 4)
        columns["mixed"] = paddle.to_tensor(mixed)
        expected = expected * mixed[:, 1:2] + expected[[1, 0, 3, 2]] * (1 - mixed[:, 1:2])
    _, targets = BatchTransform(config)(columns, 1)
    np.testing.assert_allclose(targets.numpy(), expected, rtol=1e-5)
    assert targets.dtype == paddle.float32


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["TRAIN.LOSS", "cross_entropy"],
            r"'cross_entropy', expected one of (?!.*cross_ent).*bce, .* with TASK multilabel, which",
        ),
        (
            ["TRAIN.LOSS", "token_label"],
            r"'token_label', expected one of (?!.*token).*bce, .* with TASK multilabel, which",
        ),
        (
            ["TRAIN.DISTILLATION_TYPE", "hard"],
            "'hard', expected None with TASK multilabel: distillation needs",
        ),
        (
            ["DATA.SAMPLER", "balanced"],
            "'balanced', expected shuffle with TASK multilabel: an image",
        ),
        (
            ["BEST_METRIC", "acc1"],
            "BEST_METRIC is 'acc1', expected one of auto, mAP, f1_micro, f1_macro, loss",
        ),
        (
            ["TRAIN.LOSS", "focal", "TRAIN.POS_WEIGHT", "[2]"],
            "TRAIN.POS_WEIGHT has no effect without TRAIN.LOSS bce, or",
        ),
        (
            ["TRAIN.LOSS", "bce", "TRAIN.SMOOTHING", "0.2", "TRAIN.BCE_TARGET_THRESH", "0.1"],
            "THRESH is 0.1, expected above 0.1",
        ),
        (
            ["TASK", "multilable"],
            r"'multilable', expected one of .*classification, .*; did you mean multilabel",
        ),
        (
            ["TASK", "classification", "BEST_METRIC", "mAP"],
            "'mAP', expected one of auto, acc1, acc5, mean",
        ),
    ],
)
def test_what_an_image_of_several_classes_has_no_use_for_is_refused(words, message):
    with pytest.raises(InputError, match=message):
        get_config(None, ["TASK", "multilabel", *words])


def test_data_and_weights_of_the_other_task_are_refused(tmp_path, options, tiny):
    message = "DATA.DATASET 'digits' is for TASK classification, but TASK is multilabel; change one of the two"
    refused(message, [*tiny, "TASK", "multilabel"], tmp_path / "a", None)
    swapped = [*without(options, "TASK"), "TASK", "classification"]
    refused(
        "DATA.DATASET 'multilabel_csv' is for TASK multilabel, but TASK is",
        swapped,
        tmp_path / "b",
        None,
    )
    train([*tiny, "DATA.BATCH_SIZE", "32"], tmp_path / "digits", 64)
    weights = str(tmp_path / "digits" / "checkpoints" / "last")
    asked = [*without(options, "TRAIN."), "MODEL.PRETRAINED", weights]
    with pytest.raises(
        InputError,
        match="the weights are for TASK classification, found TASK multilabel; pass -o TASK classific",
    ):
        read_datasets(get_config(None, [*asked, "EVAL", "True"]))
    adapted = [
        *options,
        "DATA.BATCH_SIZE",
        "16",
        "MODEL.PRETRAINED",
        weights,
        "TRAIN.ADAPTER.NAME",
        "bitfit",
    ]
    # an adapter of several labels, on a base of one class per image
    train(adapted, tmp_path / "adapted")
    result = json.loads((tmp_path / "adapted" / "result.json").read_text())
    own = str(tmp_path / "adapted" / "checkpoints" / "last")
    evaluate([*asked, "MODEL.PRETRAINED_ADAPTER", own], tmp_path / "d")
    again = json.loads((tmp_path / "d" / "result.json").read_text())
    assert again["mAP"] == pytest.approx(result["mAP"])
    assert again["thresholds"] == result["thresholds"]
    asked = [*without(asked, "TASK", "DATA."), "TASK", "classification", "DATA.DATASET", "digits"]
    with pytest.raises(
        InputError,
        match="adapted.*: the weights are for TASK multilabel, found TASK classification",
    ):
        words = [*asked, "MODEL.PRETRAINED_ADAPTER", own, "EVAL", "True"]
        read_datasets(get_config(None, words))


def test_thresholds_of_other_outputs_are_refused(monkeypatch):
    """They would be compared with other classes' probabilities."""
    monkeypatch.setattr(multilabel, "thresholds_of", lambda *_: [0.5, 0.2])
    words = [
        "TASK",
        "multilabel",
        "MODEL.PRETRAINED",
        "w.safetensors",
        "EVAL",
        "True",
        "MODEL.NUM_CLASSES",
    ]
    assert MultiLabel(get_config(None, [*words, "2"])).thresholds.tolist() == [0.5, 0.2]
    with pytest.raises(InputError, match="^w.safetensors has 2 thresholds, the model 3 outputs$"):
        MultiLabel(get_config(None, [*words, "3"]))


def test_classes_that_training_lacks_are_told_and_a_cache_keeps_the_labels(tmp_path, options):
    table = tmp_path / "data" / "val.csv"
    table.write_text(table.read_text().replace("val/3.png,1,1,0,0", "val/3.png,1,1,0,1"))
    config, *plain = get_datasets(get_config(None, options))
    assert "validation has 1 classes without a training image: never" in config.notes
    cached = [*options, "DATA.CACHE", str(tmp_path / "cache")]
    for _ in range(2):
        _, *found = get_datasets(get_config(None, cached))
        for own, other in zip(plain, found, strict=True):
            assert isinstance(other.labels, LabelSets)
            for index in (0, 3, 20):
                np.testing.assert_array_equal(own[index][1], other[index][1])
    np.testing.assert_array_equal(plain[1][3][1], [1, 1, 0, 1])
    data = ["DATA.DATASET", "multilabel_csv", "DATA.DATA_PATH", str(tmp_path / "data")]
    assert training_images(config, data, 7).shape == (7, 1, 8, 8)  # which int8 is calibrated on
