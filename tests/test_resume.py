"""Going on from a checkpoint: the same bits as a run that was never stopped, or one line that says why not."""

import pytest
from ranks import run_ranks
from runs import assert_same_run, train

RECIPE = [
    "DATA.BATCH_SIZE", "8", "TRAIN.NUM_EPOCHS", "3", "TRAIN.ACCUM_ITER", "3", "TRAIN.MIXUP_ALPHA", "0.8",
    "TRAIN.CUTMIX_ALPHA", "1.0", "MODEL.DROPOUT", "0.1", "MODEL.DROPPATH", "0.2", "TRAIN.MODEL_EMA", "True",
    "TRAIN.MODEL_EMA_DECAY", "0.9", "TRAIN.AFFINE", "[10.0,0.1,0.1]", "TRAIN.WARMUP_EPOCHS", "1",
    "TRAIN.BASE_LR", "0.01", "TRAIN.GRAD_CLIP", "1.0", "REPORT_FREQ", "5", "SAVE_STEPS", "1", "KEEP_LAST", "1000",
]  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_goes_on_from_every_step_in_the_same_bits(tmp_path, tiny, ranks):
    options = [*tiny, *RECIPE]
    run_ranks(train, options, tmp_path / "whole", 8 * 8 * ranks, ranks=ranks)
    found = sorted(folder.name for folder in (tmp_path / "whole" / "checkpoints").glob("epoch_*"))
    # Eight steps an epoch make updates after 3, 6 and 8 of them.
    expected = [f"epoch_{epoch:04d}_sample_{24 * ranks * part:09d}" for epoch in (1, 2, 3) for part in (1, 2)]
    assert found == sorted([*expected, *(f"epoch_{epoch:04d}" for epoch in (1, 2, 3))])
    for name in found[:-3]:
        middle = str(tmp_path / "whole" / "checkpoints" / name)
        run_ranks(train, [*options, "MODEL.RESUME", middle], tmp_path / name, 8 * 8 * ranks, ranks=ranks)
        assert_same_run(tmp_path / "whole", tmp_path / name)
