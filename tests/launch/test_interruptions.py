"""Runs that are interrupted again and again, in one folder or another: nothing is lost or done
twice.
"""

import json
import shutil
import signal

import pytest
from conftest import without
from support.ranks import run_ranks
from support.stopped_runs import each, stop_at
from support.training_runs import assert_same_run, records, train

from errors import InputError
from training.checkpoint import storage

RECIPE = [
    "DATA.BATCH_SIZE", "8", "TRAIN.NUM_EPOCHS", "3", "TRAIN.ACCUM_ITER", "3", "TRAIN.MIXUP_ALPHA", "0.8",
    "MODEL.DROPOUT", "0.1", "MODEL.DROPPATH", "0.2", "TRAIN.MODEL_EMA", "True", "TRAIN.MODEL_EMA_DECAY", "0.9",
    "REPORT_FREQ", "5", "DATA.BATCH_SIZE_EVAL", "15", "MODEL.RESUME", "auto",
]  # fmt: skip
CONVMIXER = [
    "MODEL.TYPE", "ConvMixer", "MODEL.PATCH_SIZE", "2", "MODEL.KERNEL_SIZE", "3",
    "DATA.BATCH_SIZE", "8", "TRAIN.NUM_EPOCHS", "3", "TRAIN.ACCUM_ITER", "3", "TRAIN.MODEL_EMA", "True",
    "REPORT_FREQ", "5", "VALIDATE_FREQ", "3", "MODEL.RESUME", "auto",
]  # fmt: skip


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.smoke)])
def test_a_run_stopped_again_and_again_ends_in_the_same_bits(tmp_path, tiny, ranks):
    options = [*tiny, *RECIPE]
    whole = tmp_path / "whole"
    stopped = tmp_path / "stopped"
    evaluated = 91 // ranks // 15  # batches that every rank has
    middle, end = (f"epoch_0001_sample_{samples * ranks:09d}" for samples in (24, 64))
    # Eight steps an epoch make updates after 3, 6 and 8 of them.
    moments = [
        (2, "epoch_0000"),  # before the first update
        (5, middle),  # between two updates, just reported
        (3, f"epoch_0001_sample_{48 * ranks:09d}"),  # at an update
        (2, end),  # at the epoch's end
        (2, end),  # at the evaluation's first batch
        (1 + evaluated + 1, end),  # as the average is evaluated
        (1 + 2 * evaluated + 1, "epoch_0001"),  # at the next epoch's first step
        (8 + 2 * evaluated + 4, f"epoch_0003_sample_{24 * ranks:09d}"),
    ]
    stops = [(stop_at, call, options, stopped, 64 * ranks) for call, _ in moments]
    runs = [(train, options, whole, 64 * ranks), *stops, (train, options, stopped, 64 * ranks)]
    for found in run_ranks(each, runs, ranks=ranks):
        assert found[1:-1] == [(143, name) for _, name in moments]
        assert found[0] == found[-1]
    assert_same_run(whole, stopped)
    assert records(whole) == records(stopped)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stop_before_an_epochs_first_update_keeps_batch_norms_statistics(tmp_path, tiny, ranks):
    options = [*without(tiny, "MODEL.NUM_HEADS"), *CONVMIXER]
    whole = tmp_path / "whole"
    stopped = tmp_path / "stopped"
    # The first epoch isn't evaluated, and nothing is saved at its end: two steps later its state
    # is.
    moments = [(8 + 2, "epoch_0001"), (5, f"epoch_0002_sample_{24 * ranks:09d}")]
    stops = [(stop_at, call, options, stopped, 64 * ranks, signal.SIGINT) for call, _ in moments]
    runs = [(train, options, whole, 64 * ranks), *stops, (train, options, stopped, 64 * ranks)]
    for found in run_ranks(each, runs, ranks=ranks):
        assert found[1:-1] == [(130, name) for _, name in moments]
    assert_same_run(whole, stopped)
    assert records(whole) == records(stopped)


def test_metrics_survive_another_batch_size(tmp_path, tiny):
    options = [
        *tiny,
        "TRAIN.NUM_EPOCHS",
        "4",
        "REPORT_FREQ",
        "100",
        "SAVE_STEPS",
        "3",
        "KEEP_LAST",
        "100",
    ]
    options += ["DATA.BATCH_SIZE_EVAL", "91", "MODEL.RESUME", "auto"]
    small = [*options, "DATA.BATCH_SIZE", "8"]
    large = [*options, "DATA.BATCH_SIZE", "16"]
    assert stop_at(2 * 9 + 3, small, tmp_path, 64)[1] == "epoch_0003_sample_000000024"
    # Two batches of 16, until 8 images are left, which DROP_LAST drops; then a step of the fourth
    # epoch.
    assert stop_at(3 + 1, large, tmp_path, 64)[1] == "epoch_0004_sample_000000016"
    train(large, tmp_path, 64)
    trained = [
        (r["epoch"], r["step"], r["samples"]) for r in records(tmp_path) if r["split"] == "train"
    ]
    assert trained == [(1, 8, 64), (2, 16, 64), (3, 12, 56), (4, 16, 64)]
    assert [r["epoch"] for r in records(tmp_path) if r["split"] == "val"] == [1, 2, 3, 4]
    # step 15: SAVE_STEPS
    assert (tmp_path / "checkpoints" / "epoch_0004_sample_000000048").exists()


def test_the_best_that_was_damaged_leaves_no_link(tmp_path, tiny):
    options = [
        *tiny,
        "DATA.BATCH_SIZE",
        "16",
        "SAVE_STEPS",
        "1",
        "DATA.BATCH_SIZE_EVAL",
        "91",
        "MODEL.RESUME",
        "auto",
    ]
    train(options, tmp_path, 32)
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "epoch_0001" / "state.json").unlink()
    assert stop_at(1, options, tmp_path, 32)[1] == "epoch_0001_sample_000000032"
    assert not (checkpoints / "best").is_symlink()
    storage.verify(checkpoints / "last")


def test_a_command_that_goes_on_in_a_new_folder_may_be_given_again(tmp_path, tiny):
    options = [
        *tiny,
        "DATA.BATCH_SIZE",
        "16",
        "TRAIN.BASE_LR",
        "0.0",
        "SAVE_FREQ",
        "1",
        "TRAIN.NUM_EPOCHS",
        "3",
    ]
    train(options, tmp_path / "run", 32)  # nothing is learnt: the first epoch's remains the best
    middle = tmp_path / "run" / "checkpoints" / "epoch_0002"
    options += ["MODEL.RESUME", str(middle)]
    train(options, tmp_path / "whole", 32)
    train(options, tmp_path / "new", 32)
    for name in ("last", "epoch_0003"):  # as if it had been killed before it saved
        path = tmp_path / "new" / "checkpoints" / name
        path.unlink() if path.is_symlink() else shutil.rmtree(path)
    train(options, tmp_path / "new", 32)
    assert_same_run(tmp_path / "whole", tmp_path / "new")
    state = tmp_path / "new" / "checkpoints" / "epoch_0001" / "SHA256SUMS"
    state.write_text(state.read_text().replace("model", "other"))
    shutil.rmtree(tmp_path / "new" / "checkpoints" / "epoch_0003")
    with pytest.raises(InputError, match="contains another run than"):
        train(options, tmp_path / "new", 32)
    assert json.loads((tmp_path / "new" / "result.json").read_text())["best"]["epoch"] == 1
