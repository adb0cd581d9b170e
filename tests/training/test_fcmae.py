"""Pre-training by FCMAE on one process and two."""

import numpy as np
import pytest
from PIL import Image
from support.ranks import run_ranks
from support.training_runs import assert_close, assert_same_run, records, refused, train, weights

# ConvNeXt V2 on enlarged digits of 2 x 2 squares.
OPTIONS = [
    "TASK", "fcmae", "DATA.DATASET", "digits", "DATA.IMAGE_SIZE", "64", "DATA.IMAGE_CHANNELS", "1",
    "DATA.IMAGENET_MEAN", "0.5", "DATA.IMAGENET_STD", "0.5", "DATA.NUM_WORKERS", "0",
    "MODEL.TYPE", "ConvNeXt", "MODEL.STAGE_DEPTHS", "[1,1,1,1]", "MODEL.EMBED_DIMS", "[4,4,8,8]",
    "MODEL.INIT_VALUES", "0", "MODEL.USE_GRN", "True", "REPORT", "False",
    "TRAIN.NUM_EPOCHS", "1", "TRAIN.WARMUP_EPOCHS", "0", "TRAIN.OPTIMIZER.NAME", "SGD",
    "TRAIN.BASE_LR", "0.1", "DATA.GLOBAL_BATCH", "16",
]  # fmt: skip


def train_all(runs):
    for run in runs:
        train(*run)


def test_a_run_is_resumed_in_the_same_bits_and_is_the_same_on_two_processes(tmp_path):
    options = [*OPTIONS, "SAVE_STEPS", "1", "KEEP_LAST", "9"]
    middle = str(tmp_path / "one" / "checkpoints" / "epoch_0001_sample_000000016")
    runs = [
        (options, tmp_path / "one", 32),
        ([*options, "MODEL.RESUME", middle], tmp_path / "resumed", 32),
    ]
    train_all(runs)
    assert_same_run(tmp_path / "one", tmp_path / "resumed")
    run_ranks(train_all, [(options, tmp_path / "two", 32)])
    one, two = (weights(tmp_path / name) for name in ("one", "two"))
    assert_close(one, two, atol=1e-6)
    assert {"mask_token", "pred.weight", "encoder.stem.0.weight"} < one.keys()
    losses = [records(tmp_path / name)[-1]["loss"] for name in ("one", "two")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)

    # A column of three pictures for each of eight images.
    with Image.open(tmp_path / "one" / "reconstructions.png") as picture:
        rows = np.asarray(picture).reshape(3, 132, 8, 132)[:, :128:2, :, :128:2]
    for image, seen, predicted in rows.transpose(2, 0, 1, 3):
        # Three of the four squares are masked: 0.6 of them, rounded up. 0 is the mean colour.
        assert (seen == 128).mean() >= 0.75
        assert (predicted == image).mean() < 0.75


def test_images_of_one_square_and_other_architectures_are_one_line(tmp_path):
    for changes, message in (
        (["DATA.IMAGE_SIZE", "32"], "masks the whole image, which has 1 squares of 32 x 32 pixels"),
        (["DATA.IMAGE_SIZE", "48"], "squares of 32 x 32 pixels, which don't divide images of 48"),
        (["MODEL.STEM_TYPE", "overlap"], "it needs a ConvNeXt with MODEL.STEM_TYPE patch"),
        (["METHOD.MASK_PATCH", "16"], "METHOD.MASK_PATCH has no effect without TASK simmim"),
    ):
        refused(message, [*OPTIONS, *changes], tmp_path / "run")
    assert not (tmp_path / "run").exists()
