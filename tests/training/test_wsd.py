"""Cool-downs from one trunk (WSD): the same bits as runs that were so from the beginning."""

import pytest
from conftest import without
from support.training_runs import assert_same_run, records, train


@pytest.mark.smoke
def test_two_lengths_come_of_one_trunk_in_the_same_bits(tmp_path, tiny):
    options = [
        *without(tiny, "TRAIN.NUM_EPOCHS", "TRAIN.WARMUP_EPOCHS"),
        "TRAIN.WARMUP_EPOCHS",
        "0.5",
    ]
    options += [
        "DATA.BATCH_SIZE",
        "8",
        "TRAIN.BASE_LR",
        "0.01",
        "TRAIN.LR_SCHEDULER.NAME",
        "wsd",
        "SAVE_FREQ",
        "1",
    ]
    options += [
        "KEEP_LAST",
        "1000",
        "MODEL.DROPOUT",
        "0.1",
        "TRAIN.MIXUP_ALPHA",
        "0.8",
        "REPORT_FREQ",
        "1",
    ]
    trunk = [*options, "TRAIN.NUM_EPOCHS", "4", "TRAIN.LR_SCHEDULER.WSD_DECAY_EPOCHS", "1"]
    train(trunk, tmp_path / "trunk", 37)
    for start, fall in ((1, "1"), (2, "1.5")):
        shorter = ["TRAIN.NUM_EPOCHS", str(start + 2), "TRAIN.LR_SCHEDULER.WSD_DECAY_EPOCHS", fall]
        train([*options, *shorter], tmp_path / f"own {start}", 37)
        checkpoint = str(tmp_path / "trunk" / "checkpoints" / f"epoch_{start:04d}")
        train([*trunk, "MODEL.RESUME", checkpoint], tmp_path / f"cooled {start}", 37, named=shorter)
        assert_same_run(tmp_path / f"own {start}", tmp_path / f"cooled {start}")
        rates = [
            record["lr"]
            for record in records(tmp_path / f"cooled {start}")
            if record["split"] == "train"
        ]
        assert rates[0] == 0.01
        assert rates[-1] == pytest.approx(
            0.01 * (1 - ((4 * float(fall) - 1) / (4 * float(fall))) ** 0.5)
        )
