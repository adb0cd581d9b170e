"""Runs that are interrupted again and again end in the same bits."""

import signal

import pytest
from ranks import run_ranks
from runs import assert_same_run, records, train
from stops import each, stop_at

RECIPE = [
    "DATA.BATCH_SIZE", "8", "TRAIN.NUM_EPOCHS", "3", "TRAIN.ACCUM_ITER", "3", "TRAIN.MIXUP_ALPHA", "0.8",
    "MODEL.DROPOUT", "0.1", "MODEL.DROPPATH", "0.2", "TRAIN.MODEL_EMA", "True", "TRAIN.MODEL_EMA_DECAY", "0.9",
    "REPORT_FREQ", "5", "DATA.BATCH_SIZE_EVAL", "60", "MODEL.RESUME", "auto",
]  # fmt: skip
CONVMIXER = [
    "MODEL.TYPE", "ConvMixer", "MODEL.PATCH_SIZE", "2", "MODEL.KERNEL_SIZE", "3", "MODEL.NUM_HEADS", "12",
    "DATA.BATCH_SIZE", "8", "TRAIN.NUM_EPOCHS", "3", "TRAIN.ACCUM_ITER", "3", "TRAIN.MODEL_EMA", "True",
    "REPORT_FREQ", "5", "VALIDATE_FREQ", "3", "MODEL.RESUME", "auto",
]  # fmt: skip


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.smoke)])
def test_a_run_stopped_again_and_again_ends_in_the_same_bits(tmp_path, tiny, ranks):
    options, whole, stopped = [*tiny, *RECIPE], tmp_path / "whole", tmp_path / "stopped"
    evaluated = 364 // ranks // 60  # batches that every rank has
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
    options, whole, stopped = [*tiny, *CONVMIXER], tmp_path / "whole", tmp_path / "stopped"
    # The first epoch isn't evaluated, and nothing is saved at its end: two steps later its state is.
    moments = [(8 + 2, "epoch_0001"), (5, f"epoch_0002_sample_{24 * ranks:09d}")]
    stops = [(stop_at, call, options, stopped, 64 * ranks, signal.SIGINT) for call, _ in moments]
    runs = [(train, options, whole, 64 * ranks), *stops, (train, options, stopped, 64 * ranks)]
    for found in run_ranks(each, runs, ranks=ranks):
        assert found[1:-1] == [(130, name) for _, name in moments]
    assert_same_run(whole, stopped)
    assert records(whole) == records(stopped)
