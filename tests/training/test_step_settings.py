"""What changes of a model from step to step: the share of patches that is left out, and their size."""

import math
from pathlib import Path
from unittest import mock

import numpy as np
import paddle
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
from models.layers import PatchEmbed
from models.pretrained import patch_size_warning
from training import engine
from training.checkpoint import describe
from training.step_settings import begin_step, changing_layers
from weights import LoadReport, load_weights, save_weights

FALLING = ["MODEL.PATCH_DROP", "0.5", "MODEL.PATCH_DROP_END", "0"]
SIZES = ["MODEL.PATCH_SIZES", "[2,4,8]"]
# Six steps an epoch, with one process and with two.
SHORT = ["DATA.GLOBAL_BATCH", "8", "TRAIN.NUM_EPOCHS", "2", "REPORT_FREQ", "1"]
LENGTH = 48


def train_all(runs):
    """Trains several times in the same processes; returns the shares, or sizes, of each run's steps."""
    found = []
    for run in runs:
        shares = []

        def record(layers, share, seeds, shares=shares):
            begin_step(layers, share, seeds)
            shares += [
                layer.step_size if isinstance(layer, PatchEmbed) else layer.drop_prob
                for layer in layers
            ]

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
@pytest.mark.parametrize(("keys", "different"), [(FALLING, 12), (SIZES, 3)])
def test_a_step_is_the_same_on_all_ranks_and_after_a_resume(tmp_path, tiny, ranks, keys, different):
    options = [*tiny, *SHORT, *keys, *SAVE_EVERY_STEP]
    runs = [(options, tmp_path / "whole", LENGTH)]
    middles = {"epoch_0001_sample_000000016": 2, "epoch_0001": 6}
    for name in middles:
        path = str(tmp_path / "whole" / "checkpoints" / name)
        runs.append(([*options, "MODEL.RESUME", path], tmp_path / name, LENGTH))
    of_ranks = run_ranks(train_all, runs, ranks=ranks)
    assert all(settings == of_ranks[0] for settings in of_ranks)
    whole, *resumed = of_ranks[0]
    assert len(set(whole)) == different
    for (name, first), settings in zip(middles.items(), resumed, strict=True):
        assert settings == whole[first:]
        assert_same_run(tmp_path / "whole", tmp_path / name)


def test_each_architecture_with_patch_dropout_changes_it():
    sizes = ["DATA.IMAGE_SIZE", "64", "MODEL.NUM_CLASSES", "3"]
    for name in ("vit_tiny_patch16_224", "hiera_tiny_224", "naflexvit_base_patch16_gap"):
        options = [*sizes, *FALLING]
        config = get_config(name, options)
        model = build_model(config)
        [layer] = changing_layers(model)
        begin_step([layer], 1.0, (0, 1))
        assert (layer.drop_start, layer.drop_prob) == (0.5, 0.0)
        assert changing_layers(build_model(get_config(name, sizes))) == []


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("vit_tiny_patch16_224", ["MODEL.PATCH_DROP_END", "0.1"], "has no effect without MODEL.PATCH_DROP above 0"),
        ("vit_tiny_patch16_224", [*FALLING, "MODEL.PATCH_DROP_END", "1"], "expected 0 <= value < 1"),
        ("vit_tiny_patch16_224", [*FALLING, "EVAL", "True"], "has no effect under EVAL"),
        ("swin_tiny_patch4_window7_224", FALLING[2:], "MODEL.PATCH_DROP_END"),
        (
            "hiera_tiny_224",
            [*FALLING, "TO_STATIC", "True"],
            "TO_STATIC is True, expected False with MODEL.PATCH_DROP_END: a graph keeps one share",
        ),
    ],
)  # fmt: skip
def test_a_share_that_could_not_change_is_refused(name, options, message):
    with pytest.raises(InputError, match=message) as caught:
        get_config(name, options)
    assert "\n" not in str(caught.value)


# -------------------------------------------------------------------- sizes of patches


def test_the_sizes_depend_on_the_seed_and_are_drawn_equally_often():
    layer = PatchEmbed((48, 48), 16, 3, 8, sizes=(8, 12, 16))
    drawn = {}
    for seed in (0, 1):
        drawn[seed] = []
        for step in range(3000):
            begin_step([layer], 0.0, (seed, step))
            drawn[seed].append(layer.step_size)
    assert drawn[0] != drawn[1]
    for size in layer.sizes:
        assert drawn[0].count(size) == pytest.approx(1000, abs=100)


def test_the_only_size_of_the_weights_computes_the_same_bits(tmp_path, tiny):
    options = [*tiny, *SHORT, "TRAIN.NUM_EPOCHS", "1"]
    sizes = train_all(
        [
            (options, tmp_path / "fixed", LENGTH),
            ([*options, "MODEL.PATCH_SIZES", "[4]"], tmp_path / "drawn", LENGTH),
        ]
    )
    assert sizes == [[], [4] * 6]
    assert_same_run(tmp_path / "fixed", tmp_path / "drawn")


@pytest.mark.parametrize("size", [2, 8])
def test_an_evaluation_at_a_size_computes_what_training_did(tmp_path, tiny, size):
    """Without dropout a step's outputs are those of the model that loads its weights."""
    config = get_config(None, [*tiny, *SIZES])
    model = build_model(config)
    save_weights(model, tmp_path / "model.safetensors")
    model.train()
    model.patch_embed.step_size = size
    images = paddle.randn([2, 1, 8, 8])
    again = build_model(get_config(None, [*tiny, "MODEL.PATCH_SIZE", str(size)]))
    load_weights(again, tmp_path / "model.safetensors")
    again.eval()
    with paddle.no_grad():
        expected = again(images).numpy()
        found = model(images).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-6)
    model.eval()
    with paddle.no_grad():
        assert np.abs(model(images).numpy() - expected).max() > 1e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["MODEL.PATCH_SIZES", "[8,12,9]", "DATA.IMAGE_SIZE", "48"],
         r"PATCH_SIZES is \[8, 12, 9\], expected different divisors of DATA.IMAGE_SIZE 48: 1, 2, 3, 4, 6, 8, 12, 16, 24, 48"),
        (["MODEL.PATCH_SIZES", "[16,16]"], "different divisors"),
        (["MODEL.PATCH_SIZES", "[16,32]", "DATA.IMAGE_SIZE", "[64,48]"], ": 1, 2, 4, 8, 16"),
        (["MODEL.PATCH_SIZES", "[0]"], "expected 1 to 1000000"),
        (["MODEL.PATCH_SIZES", "[16,32]", "TO_STATIC", "True"], "TO_STATIC is True, expected False"),
        (["MODEL.PATCH_SIZES", "[16,32]", "DATA.MULTI_SCALE", "[192,224]"], "expected None with MODEL.PATCH_SIZES"),
        (["MODEL.PATCH_SIZES", "[16,32]", "TRAIN.LOSS", "token_label"], "expected None if patches are"),
    ],
)  # fmt: skip
def test_sizes_that_could_not_be_trained_with_are_refused(options, message):
    with pytest.raises(InputError, match=message) as caught:
        get_config("vit_tiny_patch16_224", options)
    assert "\n" not in str(caught.value)


def test_other_tasks_and_architectures_do_not_have_sizes():
    for name in ("mae_vit_base_patch16_224", "swin_tiny_patch4_window7_224"):
        with pytest.raises(InputError, match="MODEL.PATCH_SIZES"):
            get_config(name, ["MODEL.PATCH_SIZES", "[8,16]"])


def test_an_evaluation_may_have_images_that_not_every_size_divides():
    options = ["MODEL.PATCH_SIZES", "[16,32]", "DATA.IMAGE_SIZE", "240", "MODEL.DEPTH", "1"]
    config = get_config("vit_tiny_patch16_224", [*options, "EVAL", "True"])
    model = build_model(config)
    assert model.patch_embed.sizes == (16, 32)
    assert describe(config, []).values["MODEL.PATCH_SIZES"] == [16, 32]
    assert patch_size_warning(config, LoadReport(Path(), resized=[
        "patch_embed.proj.weight resampled from 16 x 16 to 30 x 30 pixels"])) == ""  # fmt: skip
