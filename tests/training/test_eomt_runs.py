"""Trainings of EoMT: resumed, on two processes, and with what it doesn't read."""

import numpy as np
import pytest
from support.mask_files import write_masks
from support.ranks import run_ranks
from support.training_runs import assert_same_run, records, refused, train, weights

from models.heads.eomt import EomtHead

MODEL = [
    "TASK", "segmentation", "MODEL.TYPE", "ViT", "MODEL.PATCH_SIZE", "4", "MODEL.EMBED_DIM", "8", "MODEL.DEPTH", "3",
    "MODEL.NUM_HEADS", "2", "DATA.IMAGE_SIZE", "16", "HEAD.NAME", "eomt", "HEAD.NUM_QUERIES", "5", "HEAD.NUM_BLOCKS", "2",
    "MODEL.NUM_CLASSES", "auto",
]  # fmt: skip


@pytest.fixture
def options(tmp_path):
    """Options of a small training on small images with masks."""
    write_masks(tmp_path / "data", train=8, val=3)
    return [
        *MODEL, "DATA.DATASET", "masks", "DATA.DATA_PATH", str(tmp_path / "data"), "DATA.CROP_MODE", "squash", "DATA.CROP_PCT", "1.0",
        "DATA.NUM_WORKERS", "0", "DATA.GLOBAL_BATCH", "4", "TRAIN.NUM_EPOCHS", "2", "TRAIN.WARMUP_EPOCHS", "0",
        "TRAIN.BASE_LR", "0.01", "REPORT", "False", "SAVE_STEPS", "1", "KEEP_LAST", "99",
    ]  # fmt: skip


def train_all(runs):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EomtHead, "num_points", 256)
        for run in runs:
            train(*run)


@pytest.mark.smoke
def test_a_run_is_resumed_in_the_same_bits_also_on_two_processes(tmp_path, options):
    def runs(name):
        middle = str(tmp_path / name / "checkpoints" / "epoch_0001_sample_000000004")
        resumed = [*options, "MODEL.RESUME", middle]
        return [(options, tmp_path / name), (resumed, tmp_path / f"{name}_resumed")]

    train_all(runs("one"))
    run_ranks(train_all, runs("two"))
    for name in ("one", "two"):
        assert_same_run(tmp_path / name, tmp_path / f"{name}_resumed")
        of_run = weights(tmp_path / name)
        # The last of four updates came after three quarters of the training.
        expected = [0, 0.5**0.9]
        np.testing.assert_allclose(of_run["decode_head.attn_mask_probs"], expected, rtol=1e-6)
        assert {"encoder.blocks.0.attn.qkv.weight", "decode_head.q.weight"} < of_run.keys()
        last = records(tmp_path / name)[-1]
        assert np.isfinite(last["loss"])
        assert 0 < last["mIoU"] <= 100


def test_class_weights_are_refused(tmp_path, options):
    weighted = [*options, "TRAIN.CLASS_WEIGHTS", "[1.0, 2.0, 3.0]"]
    refused(
        "TRAIN.CLASS_WEIGHTS is set, but HEAD.NAME eomt has a loss",
        weighted,
        tmp_path / "run",
        None,
    )
