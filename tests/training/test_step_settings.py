"""What changes of a model from step to step: the share of patches that is left out."""

import math
from unittest import mock

import pytest
from support.ranks import run_ranks
from support.training_runs import (
    SAVE_EVERY_STEP,
    assert_same_run,
    train,
)

from config import get_config
from errors import InputError
from models import build_model
from training import engine
from training.step_settings import begin_step, changing_layers

FALLING = ["MODEL.PATCH_DROP", "0.5", "MODEL.PATCH_DROP_END", "0"]
# Six steps an epoch, with one process and with two.
SHORT = ["DATA.GLOBAL_BATCH", "8", "TRAIN.NUM_EPOCHS", "2", "REPORT_FREQ", "1"]
LENGTH = 48


def train_all(runs):
    """Trains several times in the same processes; returns the shares of each run's steps."""
    found = []
    for run in runs:
        shares = []

        def record(layers, share, shares=shares):
            begin_step(layers, share)
            shares += [layer.drop_prob for layer in layers]

        with mock.patch.object(engine, "begin_step", record):
            train(*run)
        found.append(shares)
    return found


def cosine(start, end, share):
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2


def test_the_share_goes_along_a_cosine_from_the_first_step_to_the_last(tmp_path, tiny):
    [shares] = train_all([([*tiny, *SHORT, *FALLING], tmp_path / "run", LENGTH)])
    assert shares == pytest.approx([cosine(0.5, 0, step / 11) for step in range(12)], abs=1e-12)
    assert shares[0] == 0.5
    # The last step sees all patches.
    assert 1 - shares[-1] == 1
    assert "; patch dropout 0.5 to 0" in (tmp_path / "run" / "log.txt").read_text()


def test_steps_of_one_update_have_one_share(tmp_path, tiny):
    options = [*tiny, *SHORT, *FALLING, "TRAIN.ACCUM_ITER", "4", "TRAIN.NUM_EPOCHS", "1"]
    [shares] = train_all([(options, tmp_path / "run", LENGTH)])
    # Of two updates, the second one of two steps.
    assert shares == pytest.approx([0.5] * 4 + [0.0] * 2, abs=1e-12)


def test_a_single_update_has_the_share_of_the_first_step(tmp_path, tiny):
    options = [*tiny, *SHORT, *FALLING, "TRAIN.NUM_EPOCHS", "1"]
    [shares] = train_all([(options, tmp_path / "run", 8)])
    assert shares == [0.5]


def test_an_end_equal_to_the_start_computes_the_same_bits(tmp_path, tiny):
    constant = [*tiny, *SHORT, "MODEL.PATCH_DROP", "0.3"]
    shares = train_all(
        [
            (constant, tmp_path / "constant", LENGTH),
            ([*constant, "MODEL.PATCH_DROP_END", "0.3"], tmp_path / "equal", LENGTH),
            ([*constant, "MODEL.PATCH_DROP_END", "0"], tmp_path / "falling", LENGTH),
        ]
    )
    assert shares[:2] == [[], [0.3] * 12]
    assert_same_run(tmp_path / "constant", tmp_path / "equal")
    with pytest.raises(AssertionError):
        assert_same_run(tmp_path / "constant", tmp_path / "falling")


@pytest.mark.smoke
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_share_is_the_same_on_all_ranks_and_after_a_resume(tmp_path, tiny, ranks):
    options = [*tiny, *SHORT, *FALLING, *SAVE_EVERY_STEP]
    runs = [(options, tmp_path / "whole", LENGTH)]
    middles = {"epoch_0001_sample_000000016": 2, "epoch_0001": 6}
    for name in middles:
        path = str(tmp_path / "whole" / "checkpoints" / name)
        runs.append(([*options, "MODEL.RESUME", path], tmp_path / name, LENGTH))
    of_ranks = run_ranks(train_all, runs, ranks=ranks)
    assert all(shares == of_ranks[0] for shares in of_ranks)
    whole, *resumed = of_ranks[0]
    assert len(set(whole)) == 12
    for (name, first), shares in zip(middles.items(), resumed, strict=True):
        assert shares == whole[first:]
        assert_same_run(tmp_path / "whole", tmp_path / name)


def test_each_architecture_with_patch_dropout_changes_it():
    sizes = ["DATA.IMAGE_SIZE", "64", "MODEL.NUM_CLASSES", "3"]
    for name in ("vit_tiny_patch16_224", "hiera_tiny_224"):
        options = [*sizes, *FALLING]
        config = get_config(name, options)
        model = build_model(config)
        [layer] = changing_layers(model)
        begin_step([layer], 1.0)
        assert (layer.drop_start, layer.drop_prob) == (0.5, 0.0)
        assert changing_layers(build_model(get_config(name, sizes))) == []


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("vit_tiny_patch16_224", ["MODEL.PATCH_DROP_END", "0.1"], "does nothing without MODEL.PATCH_DROP above 0"),
        ("vit_tiny_patch16_224", [*FALLING, "MODEL.PATCH_DROP_END", "1"], "expected 0 <= value < 1"),
        ("vit_tiny_patch16_224", [*FALLING, "EVAL", "True"], "does nothing under EVAL"),
        ("swin_tiny_patch4_window7_224", FALLING[2:], "MODEL.PATCH_DROP_END"),
        (
            "hiera_tiny_224",
            [*FALLING, "TO_STATIC", "True"],
            "TO_STATIC is True, expected False with MODEL.PATCH_DROP_END: a graph has one share",
        ),
    ],
)  # fmt: skip
def test_a_share_that_could_not_change_is_refused(name, options, message):
    with pytest.raises(InputError, match=message) as caught:
        get_config(name, options)
    assert "\n" not in str(caught.value)
