"""Training and evaluation give the same numbers on one process and on two."""

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import paddle
import pytest
from support.ranks import run_ranks
from support.training_runs import RESNET_OPTIONS, assert_close, train, weights

import utils
from config import get_config, with_values
from datasets import ArrayDataset, get_dataloader, get_datasets
from errors import InputError, RunError
from models import build_model
from training import engine, requests, setup, shared_gradients
from training.checkpoint import Saver, classes_of
from training.classification import Classification, any_of, best_class, hits
from training.optim import LossScaler
from training.run import Run
from weights import load_weights


def records(output):
    return [json.loads(line) for line in (Path(output) / "metrics.jsonl").read_text().splitlines()]


def counted_collectives(options, output, length):
    """Trains; returns how often each collective was called, and the waits for gradients.

    Collectives whose number depends on the clock aren't counted: meetings for requests, and the
    repeated question whether a checkpoint is written.
    """
    calls = Counter()
    met = Counter()

    def counted(name, function):
        return lambda *args, **kwargs: calls.update([name]) or function(*args, **kwargs)

    for name in ("all_reduce", "all_gather", "all_gather_object", "broadcast", "barrier", "reduce"):
        setattr(utils.dist, name, counted(name, getattr(utils.dist, name)))
    saver_status = Saver._status

    def status_of_an_ended_save(saver):
        # Ranks that still write meet again every 0.2 s: how often depends on the disk.
        if saver.thread is not None:
            saver.thread.join()
        return saver_status(saver)

    Saver._status = status_of_an_ended_save
    for module in (requests, shared_gradients):
        module.all_reduce_sum = lambda tensor, to=module: met.update([to]) or utils.all_reduce_sum(
            tensor
        )
    train(options, output, length)
    return calls - Counter(all_reduce=met.total()), met[shared_gradients]


def counted_in_all(runs):
    return [counted_collectives(*run) for run in runs]


def test_a_step_has_no_collective_but_its_gradients(tmp_path, tiny):
    """Three times the steps between reports, as many collectives; for gradients there are two waits
    in each.
    """
    options = [*tiny, "DATA.BATCH_SIZE", "4"]
    runs = [
        ([*options, "REPORT_FREQ", freq], tmp_path / freq, length)
        for freq, length in (("4", 64), ("12", 192))  # 8 and 24 steps, in 2 reports
    ]
    (one, longer), (other, last) = run_ranks(counted_in_all, runs)
    assert one == other == (longer[0], 2 * 8)
    assert longer == last == (one[0], 2 * 24)
    assert one[0]["all_reduce"] > 2


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("one", "two", "length"),
    [
        # (batch, accumulation) of 1 rank and of 2, images: one update from the same global batch
        ((16, 1), (8, 1), 16),
        ((16, 1), (4, 2), 16),
        # a short last group and a short last batch: the divisor is what was really accumulated
        ((20, 1), (4, 3), 20),
    ],
)
def test_an_update_on_two_ranks_is_the_update_on_one(tmp_path, tiny, one, two, length):
    # SGD: Adam divides by its own gradient, so that rounding noise in gradients that are zero would
    # decide.
    options = [
        *tiny,
        "TRAIN.OPTIMIZER.NAME",
        "SGD",
        "TRAIN.BASE_LR",
        "0.1",
        "DATA.DROP_LAST",
        "False",
    ]
    options += [
        "TRAIN.GRAD_CLIP",
        "0.5",
        "TRAIN.SMOOTHING",
        "0.1",
        "TRAIN.AFFINE",
        "[10.0,0.1,0.1]",
    ]
    for ranks, (batch, accumulation) in ((1, one), (2, two)):
        sizes = ["DATA.BATCH_SIZE", str(batch), "TRAIN.ACCUM_ITER", str(accumulation)]
        run_ranks(train, [*options, *sizes], tmp_path / str(ranks), length, ranks=ranks)
    paddle.seed(0)
    utils.seed_everything(0)
    initial = build_model(get_config(None, tiny))
    moved = np.abs(initial.head.weight.numpy().T - weights(tmp_path / "1")["head.weight"]).max()
    assert moved > 1e-3
    assert_close(weights(tmp_path / "1"), weights(tmp_path / "2"), atol=1e-6)
    first = records(tmp_path / "1")
    second = records(tmp_path / "2")
    assert [r["samples"] for r in first if r["split"] == "train"] == [length]
    for key in ("loss", "acc1", "acc5"):
        assert first[0][key] == pytest.approx(second[0][key], abs=1e-4)
        assert first[-1][key] == pytest.approx(second[-1][key], abs=1e-4)


def test_micro_batches_are_one_batch(tmp_path, tiny):
    options = [
        *tiny,
        "TRAIN.OPTIMIZER.NAME",
        "SGD",
        "TRAIN.BASE_LR",
        "0.1",
        "DATA.DROP_LAST",
        "False",
    ]
    for batch, accumulation in ((20, 1), (4, 5), (8, 3)):  # the last with a short batch
        sizes = ["DATA.BATCH_SIZE", batch, "TRAIN.ACCUM_ITER", accumulation]
        train([*options, *sizes], tmp_path / str(batch), 20)
    for batch in ("4", "8"):
        assert_close(weights(tmp_path / "20"), weights(tmp_path / batch), atol=1e-6)


def test_an_update_lets_its_gradients_go_and_finds_the_parameters_once(tmp_path, tiny, monkeypatch):
    left = []
    walked = []
    clear = paddle.optimizer.Optimizer.clear_grad
    walk = paddle.nn.Layer.parameters

    def cleared(optimizer, *args):
        clear(optimizer, *args)
        left.extend(p.grad for p in optimizer._parameter_list)
        walked.append(len(calls))

    calls = []
    monkeypatch.setattr(paddle.optimizer.Optimizer, "clear_grad", cleared)
    monkeypatch.setattr(
        paddle.nn.Layer, "parameters", lambda *args, **how: (calls.append(1), walk(*args, **how))[1]
    )
    train([*tiny, "DATA.BATCH_SIZE", "8", "TRAIN.GRAD_CLIP", "0.5"], tmp_path, 32)
    assert len(walked) == 4
    assert left == [None] * len(left)
    assert len(set(walked)) == 1  # updates after the first don't walk the layers


def train_scaled(options, output, length):
    """Trains as on a GPU in float16, with a loss scale that is too much for float32 until it has
    come to 2 ** 127.
    """
    setup.LossScaler = lambda enabled: LossScaler(scale=2.0**130)
    return train(options, output, length)


def test_updates_that_overflow_are_skipped_on_all_ranks_and_told(tmp_path, tiny):
    options = [*tiny, "DATA.BATCH_SIZE", "8", "TRAIN.BASE_LR", "0.01", "REPORT_FREQ", "5"]
    first, second = run_ranks(train_scaled, options, tmp_path, 160)
    assert first == second
    train_records = [r for r in records(tmp_path) if r["split"] == "train"]
    assert [r["skipped_updates"] for r in train_records] == [3, 0]
    assert [r["loss_scale"] for r in train_records] == [2.0**127, 2.0**127]
    # unscaled, of the updates that were made
    assert all(0 < r["grad_norm"] < 100 for r in train_records)
    state = json.loads((tmp_path / "checkpoints" / "last" / "state.json").read_text())
    assert state["scaler"] == {"loss_scale": 2.0**127, "good_updates": 7}


def test_ranks_agree_on_the_statistics_of_batch_norm(tmp_path):
    """Each rank normalises its own half of a batch; what it evaluates and saves is the mean."""
    first, second = run_ranks(train, [*RESNET_OPTIONS, "TRAIN.MODEL_EMA", "True"], tmp_path, 32)
    assert first == second
    statistics = weights(tmp_path)["bn1.running_mean"]
    assert np.abs(statistics).max() > 1e-3


def test_what_is_frozen_keeps_its_statistics(tmp_path):
    train(
        [*RESNET_OPTIONS, "TRAIN.FREEZE", "['conv1.*','bn1.*','layer1.0.bn1.weight']"], tmp_path, 16
    )
    found = weights(tmp_path)
    assert (found["bn1.running_mean"] == 0).all()
    assert (found["bn1.running_var"] == 1).all()
    for trained in ("layer1.0.bn1", "layer4.0.bn2"):  # of the first, a bias trains
        assert np.abs(found[f"{trained}.running_mean"]).max() > 1e-4


def test_ranks_hold_the_same_parameters_after_20_steps(tmp_path, tiny):
    options = [
        *tiny,
        "DATA.BATCH_SIZE",
        "8",
        "MODEL.DROPOUT",
        "0.1",
        "MODEL.DROPPATH",
        "0.1",
        "TRAIN.BASE_LR",
        "0.01",
    ]
    first, second = run_ranks(train, options, tmp_path, 320)
    assert first == second
    train_records = [r for r in records(tmp_path) if r["split"] == "train"]
    assert [r["step"] for r in train_records] == [20]
    assert train_records[0]["samples"] == 320


EVALUATIONS = [(length, batch) for length in (1, 7, 16, 17) for batch in (1, 3, 8)]


def evaluations(options):
    """The metrics of every length and batch size on this many ranks."""
    config, _, val = get_datasets(get_config(None, options))
    utils.seed_everything(0)
    model = build_model(config)
    found = {}
    for length, batch in EVALUATIONS:
        config = with_values(config, DATA__BATCH_SIZE_EVAL=batch)
        part = ArrayDataset(config, "val", val.images[:length], val.labels[:length], val.classes)
        loader = get_dataloader(config, part, "val", rank=utils.rank(), ranks=utils.world_size())
        found[length, batch] = engine.evaluate(Classification(config), model, loader)
    return found


@pytest.mark.smoke
def test_evaluation_counts_every_sample_once_for_every_world_length_and_batch(tiny):
    (single,) = run_ranks(evaluations, tiny, ranks=1)
    pair = run_ranks(evaluations, tiny, ranks=2)
    assert pair[0] == pair[1]
    config, _, val = get_datasets(get_config(None, tiny))
    utils.seed_everything(0)
    model = build_model(config)
    model.eval()
    for (length, _batch), metrics in single.items():
        pixels = paddle.to_tensor(
            np.stack([val[i][0] for i in range(length)]).astype(np.float32) / 255
        )
        logits = model(((pixels - 0.5) / 0.5).transpose([0, 3, 1, 2])).numpy().astype(np.float64)
        labels = val.labels[:length]
        places = (-logits).argsort(1)
        expected = np.log(np.exp(logits).sum(1)) - logits[np.arange(length), labels]
        assert metrics["num_samples"] == length
        assert metrics["loss"] == pytest.approx(expected.mean(), abs=1e-5)
        assert metrics["acc1"] == pytest.approx(100 * (places[:, 0] == labels).mean())
        assert metrics["acc5"] == pytest.approx(
            100 * (places[:, :5] == labels[:, None]).any(1).mean()
        )
    for key, metrics in pair[0].items():
        assert metrics == {
            name: pytest.approx(value, abs=1e-5) for name, value in single[key].items()
        }


def test_hits_are_in_the_first_and_in_the_first_five_or_all():
    logits = paddle.to_tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 1.0], [0.0, 1.0, 2.0]])
    found = hits(logits, paddle.to_tensor([1, 1, 0]))
    assert {name: values.tolist() for name, values in found.items()} == {
        "acc1": [100, 0, 0],
        "acc5": [100, 100, 100],
    }
    shares = paddle.to_tensor([[0.0] * 6 + [1.0], [0.6] + [0.0] * 5 + [0.4]])
    found = hits(paddle.arange(7.0).expand([2, 7]), shares)
    assert {name: values.tolist() for name, values in found.items()} == {
        "acc1": [100, 0],
        "acc5": [100, 0],
    }


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_of_equal_logits_the_lowest_class_comes_first(dtype):
    rng = np.random.default_rng(0)
    for levels, classes in ((1, 20), (2, 6), (3, 1000), (5, 7), (1, 3), (1, 1)):
        logits = rng.integers(0, levels, (64, classes))
        labels = rng.integers(0, classes, 64)
        order = np.argsort(-logits, 1, kind="stable")
        several = np.eye(classes)[labels] + (rng.random((64, classes)) < 1 / classes) > 0
        tensor = paddle.to_tensor(logits.astype("float32")).astype(dtype)
        assert best_class(tensor).tolist() == order[:, 0].tolist()
        at = np.arange(64)[:, None]
        for found, right in (
            (hits(tensor, paddle.to_tensor(labels)), np.eye(classes)[labels][at, order]),
            (any_of(tensor, paddle.to_tensor(several)), several[at, order]),
        ):
            np.testing.assert_array_equal(found["acc1"].numpy(), 100 * right[:, 0])
            np.testing.assert_array_equal(found["acc5"].numpy(), 100 * right[:, :5].any(1))


@pytest.mark.smoke
def test_a_logit_that_is_no_number_is_never_right():
    """Not even its sample's others are in the first place: it comes before them."""
    nan = float("nan")
    for row, label in (
        ([nan] * 20, 0),
        ([nan] * 3, 2),
        ([nan, 1.0, 2.0], 0),
        ([0.0] * 19 + [nan], 19),
    ):
        found = hits(paddle.to_tensor([row]), paddle.to_tensor([label]))
        assert (found["acc1"].item(), found["acc5"].item()) == (0, 0)
    found = hits(paddle.to_tensor([[nan] + [0.0] * 19] * 2), paddle.to_tensor([1, 5]))
    assert (found["acc1"].tolist(), found["acc5"].tolist()) == ([0, 0], [100, 0])


def nan_weights(options):
    config, _, val = get_datasets(get_config(None, options))
    model = build_model(config)
    model.head.weight.set_value(paddle.full_like(model.head.weight, float("nan")))
    loader = get_dataloader(config, val, "val", rank=utils.rank(), ranks=utils.world_size())
    engine.evaluate(Classification(config), model, loader)


def test_weights_without_finite_logits_have_no_accuracy(tiny):
    for error in run_ranks(nan_weights, tiny):
        assert isinstance(error, RunError)
        assert "the evaluation's loss is nan" in str(error)


def test_a_loss_that_is_not_finite_stops_every_rank_and_names_the_step(tmp_path, tiny):
    options = [
        *tiny,
        "DATA.BATCH_SIZE",
        "8",
        "TRAIN.BASE_LR",
        "1e6",
        "TRAIN.WEIGHT_DECAY",
        "1e6",
        "REPORT_FREQ",
        "7",
    ]
    errors = run_ranks(train, options, tmp_path, 320)
    assert str(errors[0]) == str(errors[1])
    assert "the loss is " in str(errors[0])
    # long before the epoch ends
    assert re.search(r" at step [2-7] \(epoch 1, rank ", str(errors[0]))
    assert not (tmp_path / "checkpoints").exists()


def test_accumulation_longer_than_an_epoch_is_an_error(tmp_path, tiny):
    with pytest.raises(
        InputError,
        match=r"ACCUM_ITER is 3, but an epoch has only 2 steps, too few for an update",
    ):
        train([*tiny, "DATA.BATCH_SIZE", "8", "TRAIN.ACCUM_ITER", "3"], tmp_path, 16)


def test_last_epoch_starts_after_it_on_the_same_schedule(tmp_path, tiny):
    options = [*tiny, "DATA.BATCH_SIZE", "16", "TRAIN.NUM_EPOCHS", "3"]
    train(options, tmp_path / "whole", 32)
    train([*options, "TRAIN.LAST_EPOCH", "1"], tmp_path / "late", 32)
    rates = {
        run: [(r["epoch"], r["lr"]) for r in records(tmp_path / run) if r["split"] == "train"]
        for run in ("whole", "late")
    }
    assert rates["late"] == rates["whole"][1:]


def test_only_checkpoints_that_serve_are_kept(tmp_path, tiny):
    options = [
        *tiny,
        "DATA.BATCH_SIZE",
        "16",
        "TRAIN.NUM_EPOCHS",
        "7",
        "SAVE_FREQ",
        "3",
        "TRAIN.BASE_LR",
        "0.003",
    ]
    train(options, tmp_path, 64)
    folder = tmp_path / "checkpoints"
    best = (folder / "best").resolve().name
    last = (folder / "last").resolve().name
    assert last == "epoch_0007"
    assert {entry.name for entry in folder.glob("[!lb]*")} == {
        "epoch_0003",
        "epoch_0006",
        best,
        last,
    }
    validated = [r for r in records(tmp_path) if r["split"] == "val"]
    highest = max(r["acc1"] for r in validated)
    state = json.loads((folder / "best" / "state.json").read_text())
    assert state["best"]["val"]["acc1"] == pytest.approx(highest, abs=1e-5)
    assert state["epoch"] == next(r["epoch"] for r in validated if r["acc1"] == highest)


@pytest.mark.smoke
def test_a_whole_recipe_gives_one_rank_and_two_the_same_update(tmp_path, tiny):
    """Mixup's pairs and draws, erased boxes and augmentation follow the global batch, not the
    ranks.
    """
    options = [
        *tiny,
        "TRAIN.OPTIMIZER.NAME",
        "SGD",
        "TRAIN.BASE_LR",
        "0.1",
        "TRAIN.MIXUP_ALPHA",
        "0.8",
    ]
    options += [
        "TRAIN.CUTMIX_ALPHA",
        "1.0",
        "TRAIN.MIXUP_MODE",
        "elem",
        "TRAIN.SMOOTHING",
        "0.1",
        "TRAIN.HFLIP",
        "0.5",
    ]
    options += ["TRAIN.RANDOM_ERASE_PROB", "0.5", "TRAIN.AUTO_AUGMENT", "rand-m9-mstd0.5-inc1"]
    options += [
        "TRAIN.REPEATED_AUGMENT",
        "3",
        "TRAIN.MODEL_EMA",
        "True",
        "TRAIN.MODEL_EMA_DECAY",
        "0.5",
    ]
    for ranks in (1, 2):
        sizes = ["DATA.BATCH_SIZE", str(24 // ranks)]
        run_ranks(train, [*options, *sizes], tmp_path / str(ranks), 48, ranks=ranks)
    assert_close(weights(tmp_path / "1"), weights(tmp_path / "2"), atol=1e-6)
    first = records(tmp_path / "1")
    second = records(tmp_path / "2")
    assert [r["split"] for r in first] == ["train", "val", "ema"]
    for one, two in zip(first, second, strict=True):
        assert one["loss"] == pytest.approx(two["loss"], abs=1e-4)
    assert first[0]["grad_norm"] == pytest.approx(second[0]["grad_norm"], rel=1e-4)


def test_frozen_parameters_and_drop_path_leave_the_ranks_together(tmp_path, tiny):
    options = [*tiny, "DATA.BATCH_SIZE", "8", "MODEL.DROPPATH", "0.9", "MODEL.PATCH_DROP", "0.5"]
    options += ["TRAIN.FREEZE", "['patch_embed.*','blocks.0.*']", "TRAIN.BASE_LR", "0.01"]
    first, second = run_ranks(train, options, tmp_path, 160)
    assert first == second
    utils.seed_everything(0)
    initial = build_model(get_config(None, tiny)).state_dict()
    trained = weights(tmp_path)
    for name, value in initial.items():
        value = value.numpy().T if trained[name].shape != tuple(value.shape) else value.numpy()
        same = any(
            (trained[name] == v).all() for v in (value, value.T) if v.shape == trained[name].shape
        )
        assert same == name.startswith(("patch_embed.", "blocks.0.")), name
    assert "frozen: 14 tensors" in (tmp_path / "log.txt").read_text()


def test_the_average_is_evaluated_saved_and_has_a_best_of_its_own(tmp_path, tiny):
    options = [
        *tiny,
        "DATA.BATCH_SIZE",
        "16",
        "TRAIN.NUM_EPOCHS",
        "4",
        "SAVE_FREQ",
        "4",
        "TRAIN.BASE_LR",
        "0.01",
    ]
    options += ["TRAIN.MODEL_EMA", "True", "TRAIN.MODEL_EMA_DECAY", "0.8"]
    train(options, tmp_path, 64)
    found = {
        split: [r for r in records(tmp_path) if r["split"] == split] for split in ("val", "ema")
    }
    assert [r["epoch"] for r in found["ema"]] == [1, 2, 3, 4]
    result = json.loads((tmp_path / "result.json").read_text())
    best = max(found["ema"], key=lambda r: r["acc1"])
    assert result["ema"]["best"]["epoch"] == best["epoch"]
    link = (tmp_path / "checkpoints" / "best_ema.safetensors").resolve()
    assert link.parent.name == f"epoch_{best['epoch']:04d}"
    config, _, whole = get_datasets(get_config(None, options))
    val = ArrayDataset(config, "val", whole.images[:91], whole.labels[:91], whole.classes)
    model = build_model(config)
    load_weights(model, tmp_path / "checkpoints" / "best_ema")
    metrics = engine.evaluate(Classification(config), model, get_dataloader(config, val, "val"))
    assert metrics["acc1"] == pytest.approx(best["acc1"], abs=1e-5)
    assert metrics["loss"] == pytest.approx(best["loss"], abs=1e-5)
    assert classes_of(tmp_path / "checkpoints" / "best_ema") == [str(digit) for digit in range(10)]


def test_the_result_tells_each_class(tmp_path, tiny):
    config, _, val = get_datasets(get_config(None, tiny))
    keep = np.flatnonzero(val.labels != 3)[:40]
    part = ArrayDataset(config, "val", val.images[keep], val.labels[keep], val.classes)
    utils.seed_everything(0)
    model = build_model(config)
    metrics = engine.evaluate(
        Classification(config, part.classes), model, get_dataloader(config, part, "val")
    )
    pixels = paddle.to_tensor(np.stack([part[i][0] for i in range(40)]).astype(np.float32) / 255)
    predicted = model(((pixels - 0.5) / 0.5).transpose([0, 3, 1, 2])).numpy().argmax(1)
    expected = [
        100 * (predicted[part.labels == c] == c).mean() if c != 3 else None for c in range(10)
    ]
    assert metrics["class_acc"] == pytest.approx(dict(zip(part.classes, expected, strict=True)))
    assert metrics["mean_class_acc"] == pytest.approx(
        np.mean([e for e in expected if e is not None])
    )


def test_a_runs_configuration_stands_by_itself(tmp_path):
    config = get_config("deit_tiny_patch16_224", ["OUTPUT", str(tmp_path / "run")])
    assert config.BASE != [""]
    Run(config, []).begin()
    assert get_config(tmp_path / "run" / "config.yaml") == with_values(
        config, BASE=[""], OUTPUT=None
    )
