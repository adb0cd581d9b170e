"""Going on from a checkpoint: the same bits as a run that was never stopped, or one line that says
why not.
"""

import json
import shutil
from collections import Counter
from unittest import mock

import numpy as np
import pytest
from conftest import without
from support.optim_model import OPTIMIZERS
from support.ranks import run_ranks
from support.sharding import STAGE_1, STAGE_2
from support.training_runs import (
    SAVE_EVERY_STEP,
    assert_close,
    assert_same_run,
    optimizer_state,
    records,
    refused,
    train,
    weights,
    work,
)

from config import get_config
from datasets import ArrayDataset, get_datasets
from loading import samplers
from models import build_model
from training.checkpoint import saver
from training.checkpoint.resume import changes_of_behaviour
from training.command_line import config_from_arguments
from training.task import Task

RECIPE = [
    "DATA.BATCH_SIZE", "8", "TRAIN.NUM_EPOCHS", "2", "TRAIN.ACCUM_ITER", "3", "TRAIN.MIXUP_ALPHA", "0.8",
    "TRAIN.CUTMIX_ALPHA", "1.0", "MODEL.DROPOUT", "0.1", "MODEL.DROPPATH", "0.2", "TRAIN.MODEL_EMA", "True",
    "TRAIN.MODEL_EMA_DECAY", "0.9", "TRAIN.AFFINE", "[10.0,0.1,0.1]", "TRAIN.WARMUP_EPOCHS", "1",
    "TRAIN.BASE_LR", "0.01", "TRAIN.GRAD_CLIP", "1.0", "REPORT_FREQ", "4",
]  # fmt: skip


def train_all(runs):
    """Trains several times in the same processes: [(options, output, length)]."""
    for run in runs:
        train(*run)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.smoke)])
def test_a_run_goes_on_from_every_update_in_the_same_bits(tmp_path, tiny, ranks):
    options = [*tiny, *RECIPE, *SAVE_EVERY_STEP]
    length = 8 * 8 * ranks
    # Eight steps an epoch make updates after 3, 6 and 8 of them.
    middles = [
        f"epoch_{epoch:04d}_sample_{24 * ranks * part:09d}" for epoch in (1, 2) for part in (1, 2)
    ]
    runs = [(options, tmp_path / "whole", length)]
    for name in (*middles, "epoch_0001"):
        path = str(tmp_path / "whole" / "checkpoints" / name)
        runs.append(([*options, "MODEL.RESUME", path], tmp_path / name, length))
    run_ranks(train_all, runs, ranks=ranks)
    found = sorted(folder.name for folder in (tmp_path / "whole" / "checkpoints").glob("epoch_*"))
    assert found == sorted([*middles, "epoch_0001", "epoch_0002"])
    for _, output, _ in runs[1:]:
        assert_same_run(tmp_path / "whole", output)


# -------------------------------------------------------------------- recipes


WITH_OPTIMIZER = {
    "LARS": ["TRAIN.OPTIMIZER.TRUST_COEFFICIENT", "0.02"],
    "Muon": ["TRAIN.LAYER_DECAY", "0.7"],
}


@pytest.mark.parametrize(
    "recipe",
    [
        *(["TRAIN.OPTIMIZER.NAME", name, *WITH_OPTIMIZER.get(name, [])] for name in OPTIMIZERS),
        [
            "TRAIN.REPEATED_AUGMENT",
            "3",
            "TRAIN.RANDOM_ERASE_PROB",
            "0.5",
            "TRAIN.AUTO_AUGMENT",
            "rand-m9-mstd0.5-inc1",
        ],
        [
            "TRAIN.WEIGHT_DECAY_END",
            "0.9",
            "TRAIN.GRAD_CLIP",
            "0.1",
            "TRAIN.GRAD_CLIP_MODE",
            "parameter",
            "TRAIN.PATCH_EMBED_LR",
            "0.2",
        ],
        ["DATA.SAMPLER", "balanced", "DATA.DROP_LAST", "False", "TRAIN.LR_SCHEDULER.NAME", "poly"],
    ],
)
def test_every_recipe_is_resumed_in_the_same_bits(tmp_path, tiny, recipe):
    options = [
        *tiny,
        "DATA.BATCH_SIZE",
        "8",
        "TRAIN.BASE_LR",
        "0.01",
        "REPORT_FREQ",
        "3",
        *SAVE_EVERY_STEP,
        *recipe,
    ]
    train(options, tmp_path / "whole", 37)
    middle = tmp_path / "whole" / "checkpoints" / "epoch_0001_sample_000000016"
    train([*options, "MODEL.RESUME", str(middle)], tmp_path / "resumed", 37)
    assert_same_run(tmp_path / "whole", tmp_path / "resumed")


def train_late(runs):
    """Trains as ``train_all``; the classifier has no gradients in the first epoch, as the last
    layer of DINO.
    """

    def cancel(task, model, epoch):
        if epoch == 1:
            for parameter in model.head.parameters():
                parameter.clear_gradient(False)

    with mock.patch.object(Task, "before_update", cancel):
        train_all(runs)


@pytest.mark.smoke
@pytest.mark.parametrize("ranks", [1, 2])
def test_parameters_without_gradients_at_first_are_saved_and_go_on_in_the_same_bits(
    tmp_path, tiny, ranks
):
    options = [*tiny, *SAVE_EVERY_STEP, "DATA.BATCH_SIZE", "8", "TRAIN.BASE_LR", "0.01"]
    options += ["TRAIN.NUM_EPOCHS", "2", "TRAIN.GRAD_CLIP", "1.0", "REPORT_FREQ", "1"]
    options += ["TRAIN.WEIGHT_DECAY_END", "0.9"]
    engines = {"plain": []} if ranks == 1 else {"plain": [], "1": STAGE_1, "2": STAGE_2}
    length = 8 * 3 * ranks
    middles = [f"epoch_0001_sample_{8 * ranks:09d}", "epoch_0001"]
    runs = [([*options, *words], tmp_path / name, length) for name, words in engines.items()]
    for name, words in engines.items():
        for middle in middles:
            path = str(tmp_path / name / "checkpoints" / middle)
            resumed = [*options, *words, "MODEL.RESUME", path]
            runs.append((resumed, tmp_path / f"{name} {middle}", length))
    run_ranks(train_late, runs, ranks=ranks)
    for name in engines:
        first = optimizer_state(tmp_path / name / "checkpoints" / middles[0])
        assert not first["head.weight/moment1_0"].any()
        np.testing.assert_array_equal(first["head.weight/beta1_pow_acc_0"], np.float32([0.9]))
        assert first["cls_token/moment1_0"].any()
        assert_same_run(tmp_path / "plain", tmp_path / name)
        for middle in middles:
            assert_same_run(tmp_path / name, tmp_path / f"{name} {middle}")
    one, two = (
        optimizer_state(tmp_path / "plain" / "checkpoints" / name)
        for name in ("epoch_0001", "epoch_0002")
    )
    assert not one["head.weight/moment1_0"].any()
    assert two["head.weight/moment1_0"].any()
    # Three updates fewer than the others.
    power = two["cls_token/beta1_pow_acc_0"] / two["head.weight/beta1_pow_acc_0"]
    np.testing.assert_allclose(power, 0.9**3, rtol=1e-6)


# --------------------------------------------------- other processes, other batches


def train_seen(options, output, length):
    """Trains; returns (epoch, index) of each sample that this rank was dealt."""
    seen = []
    taken = samplers.TrainBatchSampler.__iter__

    def spied(self):
        for batch in taken(self):
            seen.extend((epoch, index) for epoch, index, _ in batch)
            yield batch

    samplers.TrainBatchSampler.__iter__ = spied
    try:
        train(options, output, length)
    finally:
        samplers.TrainBatchSampler.__iter__ = taken
    return seen


def train_all_seen(runs):
    return [train_seen(*run) for run in runs]


def test_two_ranks_go_on_as_one_and_one_as_two(tmp_path, tiny):
    options = [
        *tiny,
        "TRAIN.NUM_EPOCHS",
        "2",
        "TRAIN.BASE_LR",
        "0.01",
        "TRAIN.OPTIMIZER.NAME",
        "SGD",
        *SAVE_EVERY_STEP,
    ]
    options += ["TRAIN.MIXUP_ALPHA", "0.8", "TRAIN.AFFINE", "[10.0,0.1,0.1]", "REPORT_FREQ", "3"]
    options += ["DATA.DROP_LAST", "False", "DATA.GLOBAL_BATCH", "16"]

    def resumed(ranks, others):
        middle = tmp_path / str(others) / "checkpoints" / "epoch_0001_sample_000000032"
        return ([*options, "MODEL.RESUME", str(middle)], tmp_path / f"on {ranks}", 72)

    train(options, tmp_path / "1", 72)
    on_two = run_ranks(train_all_seen, [(options, tmp_path / "2", 72), resumed(2, 1)])
    on_one = [train_all_seen([resumed(1, 2)])]
    sampler = samplers.TrainBatchSampler(
        get_config(None, [*options[:-2], "DATA.BATCH_SIZE", "16"]), range(72), 0, 1
    )
    sampler.set_epoch(1)
    order = [index for batch in sampler for _, index, _ in batch]
    expected = records(tmp_path / "1")
    for ranks, seen in ((1, on_one), (2, on_two)):
        first = sorted(index for own in seen for epoch, index in own[-1] if epoch == 1)
        assert first == sorted(order[32:])  # what hadn't been taken, each once
        found = records(tmp_path / f"on {ranks}")
        assert [(r["step"], r["split"]) for r in found] == [
            (r["step"], r["split"]) for r in expected
        ]
        assert found[-1]["loss"] == pytest.approx(expected[-1]["loss"], abs=1e-5)
        # the whole window, that part of it which the others did among it
        assert found[0]["samples"] == 48
        assert_close(weights(tmp_path / "1"), weights(tmp_path / f"on {ranks}"), atol=1e-6)


def test_ranks_go_on_with_their_own_parts_and_no_other_number_of_ranks_does(tmp_path, tiny):
    options = [*tiny, "DATA.GLOBAL_BATCH", "16", "DATA.SHUFFLE_MODE", "shard", *SAVE_EVERY_STEP]
    middle = tmp_path / "whole" / "checkpoints" / "epoch_0001_sample_000000032"
    going_on = [*options, "MODEL.RESUME", str(middle)]
    run_ranks(train_all, [(options, tmp_path / "whole", 72), (going_on, tmp_path / "resumed", 72)])
    assert_same_run(tmp_path / "whole", tmp_path / "resumed")
    message = (
        "is within an epoch that 2 processes share (DATA.SHUFFLE_MODE shard), found 1; use 2, or a"
    )
    refused(message, going_on, tmp_path / "alone", 72)


@pytest.mark.parametrize(("batch", "accumulation"), [(8, 2), (12, 3), (64, 1)])
def test_another_batch_size_goes_on_after_the_last_sample(tmp_path, tiny, batch, accumulation):
    options = [*tiny, "TRAIN.NUM_EPOCHS", "2", *SAVE_EVERY_STEP]
    train([*options, "DATA.BATCH_SIZE", "16"], tmp_path / "whole", 100)
    middle = tmp_path / "whole" / "checkpoints" / "epoch_0001_sample_000000048"
    other = [
        "DATA.BATCH_SIZE",
        str(batch),
        "TRAIN.ACCUM_ITER",
        str(accumulation),
        "MODEL.RESUME",
        str(middle),
    ]
    seen = train_seen([*options, *other], tmp_path / "resumed", 100)
    counts = Counter(index for epoch, index in seen if epoch == 1)
    assert sum(counts.values()) == max(0, 100 // batch * batch - 48) // batch * batch
    assert not counts or max(counts.values()) == 1
    assert sum(epoch == 2 for epoch, _ in seen) == 100 // batch * batch
    assert [r["epoch"] for r in records(tmp_path / "resumed") if r["split"] == "val"] == [1, 2]


# ------------------------------------------------------------------------- auto


def test_auto_begins_afresh_where_there_is_nothing_and_ends_where_all_is_done(
    tmp_path, tiny, capsys
):
    options = [*tiny, "DATA.BATCH_SIZE", "16", "MODEL.RESUME", "auto"]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_bytes(
        b'{"split": "train", "step": 1, "epoch": 1}\n[1]\n\xff\n{"split": 1, "step": [], "epoch": 1}\n'
        + b"[" * 100_000
        + b'\n{"split": "tr'  # of a machine that went down
    )
    train(options, tmp_path / "run", 32)
    assert (
        f"-resume=auto: no checkpoint in {tmp_path}/run/checkpoints; starting a new run"
        in capsys.readouterr().out
    )
    assert [(r["split"], r["step"]) for r in records(tmp_path / "run")] == [
        ("train", 2),
        ("val", 2),
    ]
    result = tmp_path / "run" / "result.json"
    first = json.loads(result.read_text())
    result.unlink()
    train(options, tmp_path / "run", 32)
    second = json.loads(result.read_text())
    for key in ("loss", "acc1", "best", "weights"):
        assert second[key] == first[key]


def test_auto_takes_the_newest_whole_checkpoint_and_sets_damaged_ones_aside(tmp_path, tiny, capsys):
    options = [*tiny, *RECIPE, *SAVE_EVERY_STEP]
    train(options, tmp_path / "whole", 64)
    shutil.copytree(tmp_path / "whole", tmp_path / "run", symlinks=True)
    checkpoints = tmp_path / "run" / "checkpoints"
    (checkpoints / "epoch_0002" / "ema.safetensors").unlink()
    (checkpoints / ".epoch_0002.4711").mkdir()  # of a writing that was cut short
    (checkpoints / ".last.4711").symlink_to("nowhere")
    for link in ("best", "best_ema.safetensors"):
        (checkpoints / link).unlink()
    (checkpoints / "best").symlink_to("epoch_0002")
    train([*options, "MODEL.RESUME", "auto"], tmp_path / "run", 64)
    told = capsys.readouterr().out
    assert (
        "epoch_0002: damaged checkpoint: ema.safetensors: can't be read as a file (FileNotFoundError: "
        in told
    )
    assert (
        f"resumed after epoch 1, 48 samples into the next, from {checkpoints}/epoch_0002_sample_000000048"
        in told
    )
    assert (checkpoints / "damaged_epoch_0002").is_dir()
    assert not list(checkpoints.glob(".*"))
    assert_same_run(tmp_path / "whole", tmp_path / "run")
    assert records(tmp_path / "run") == records(tmp_path / "whole")
    for link in ("last", "best", "best_ema.safetensors"):
        expected = (
            (tmp_path / "whole" / "checkpoints" / link).resolve().relative_to(tmp_path / "whole")
        )
        assert (checkpoints / link).resolve().relative_to(tmp_path / "run") == expected
    for folder in checkpoints.glob("epoch_*"):
        (folder / "state.json").write_text("{}")
    refused(
        "none of its 6 checkpoints is complete",
        [*options, "MODEL.RESUME", "auto"],
        tmp_path / "run",
        64,
    )


def test_a_new_folder_gets_the_best_along(tmp_path, tiny):
    options = [
        *tiny,
        "DATA.BATCH_SIZE",
        "16",
        "TRAIN.NUM_EPOCHS",
        "3",
        "TRAIN.BASE_LR",
        "0.0",
        "TRAIN.MODEL_EMA",
        "True",
    ]
    options += ["SAVE_FREQ", "1"]  # nothing is learnt: the first epoch's remains the best
    train(options, tmp_path / "run", 32)
    middle = tmp_path / "run" / "checkpoints" / "epoch_0002"
    train([*options, "MODEL.RESUME", str(middle)], tmp_path / "new", 32)
    new = tmp_path / "new" / "checkpoints"
    assert (new / "best").resolve() == new / "epoch_0001"
    assert (new / "best_ema.safetensors").resolve() == new / "epoch_0001" / "ema.safetensors"
    result = json.loads((tmp_path / "new" / "result.json").read_text())
    assert (result["best"]["epoch"], result["best"]["checkpoint"]) == (1, "epoch_0001")
    (tmp_path / "run" / "checkpoints" / "epoch_0001" / "state.json").unlink()
    # the best there is from now on
    train([*options, "MODEL.RESUME", str(middle)], tmp_path / "alone", 32)
    assert (tmp_path / "alone" / "checkpoints" / "best").resolve().name == "epoch_0003"


def test_the_best_is_by_the_metric_that_was_chosen(tmp_path, tiny):
    options = [*tiny, "DATA.BATCH_SIZE", "16", "TRAIN.NUM_EPOCHS", "6", "TRAIN.BASE_LR", "0.01"]
    for metric, sign in (("loss", -1), ("acc5", 1)):
        train([*options, "BEST_METRIC", metric], tmp_path / metric, 64)
        found = [r for r in records(tmp_path / metric) if r["split"] == "val"]
        best = max(found, key=lambda r, metric=metric, sign=sign: sign * r[metric])
        link = (tmp_path / metric / "checkpoints" / "best").resolve()
        assert link.name == f"epoch_{best['epoch']:04d}"


# -------------------------------------------------------------------- upgrades

NORMS = "its batch norms averaged variances over n values; from now on over n - 1, as in PyTorch"
TABLES = "its tables of relative positions had no weight decay; from now on they have, as in the code of BEiT's authors"
BEIT = [
    "MODEL.TYPE", "BEiT", "MODEL.EMBED_DIM", "8", "MODEL.DEPTH", "1", "MODEL.NUM_HEADS", "1",
    "DATA.IMAGE_SIZE", "16", "MODEL.PATCH_SIZE", "8", "MODEL.USE_REL_POS_BIAS", "True",
]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        (["MODEL.TYPE", "ConvMixer", "MODEL.EMBED_DIM", "8", "MODEL.DEPTH", "1"], [NORMS]),
        (["MODEL.TYPE", "ResNet", "MODEL.DEPTH", "18"], [NORMS]),
        (BEIT, [TABLES]),
        ([*BEIT, "TRAIN.DECAY_ALL", "True"], []),
        ([*BEIT, "TRAIN.WEIGHT_DECAY", "0.0"], []),
        (
            [
                "MODEL.TYPE",
                "ViT",
                "MODEL.EMBED_DIM",
                "8",
                "MODEL.DEPTH",
                "1",
                "MODEL.NUM_HEADS",
                "1",
            ],
            [],
        ),
    ],
)
def test_what_an_older_release_trained_otherwise_is_told(options, lines):
    config = get_config(None, [*options, "MODEL.NUM_CLASSES", "2"])
    model = build_model(config)
    assert list(changes_of_behaviour(config, model, 1)) == lines
    assert list(changes_of_behaviour(config, model, 2)) == []


def test_a_run_of_an_older_release_tells_it_when_it_goes_on(tmp_path, tiny, capsys, monkeypatch):
    options = [
        *without(tiny, "MODEL.NUM_HEADS"),
        "MODEL.TYPE",
        "ConvMixer",
        "DATA.BATCH_SIZE",
        "16",
    ]
    monkeypatch.setattr(saver, "BEHAVIOUR", 1)
    train(options, tmp_path / "run", 32)
    monkeypatch.undo()
    last = str(tmp_path / "run" / "checkpoints" / "last")
    options += ["TRAIN.NUM_EPOCHS", "2", "MODEL.RESUME", last]
    config = config_from_arguments(
        "main_multi_gpu.py", ["-o", *options, "OUTPUT", str(tmp_path / "more")]
    )
    _, dataset, val = get_datasets(config)
    dataset = ArrayDataset(
        config, "train", dataset.images[:32], dataset.labels[:32], dataset.classes
    )
    capsys.readouterr()
    work(config, dataset, val)
    assert NORMS in capsys.readouterr().out
