"""Schedules against timm's curves and against formulas."""

import math
from pathlib import Path

import numpy as np
import pytest

from config import get_config
from errors import InputError
from training.optim import build_schedule

CURVES = np.load(Path(__file__).parent.parent / "golden" / "schedule.npz")
# what tests/golden/make_schedule.py gives timm, at 5 updates an epoch
COMMON = [
    "TRAIN.NUM_EPOCHS", "12", "TRAIN.WARMUP_EPOCHS", "2", "TRAIN.BASE_LR", "0.5", "TRAIN.WARMUP_START_LR", "0.01",
]  # fmt: skip
FALLING = [*COMMON, "TRAIN.COOLDOWN_EPOCHS", "2", "TRAIN.END_LR", "0.002"]
BY_EPOCH = ["TRAIN.LR_SCHEDULER.WARMUP_PREFIX", "False", "TRAIN.LR_SCHEDULER.PER_EPOCH", "start"]
STEPS = [*COMMON, "TRAIN.LR_SCHEDULER.DECAY_RATE", "0.3", "TRAIN.END_LR", "0"]


def curve(options, updates_per_epoch=5, batch=256):
    schedule = build_schedule(get_config(None, options), updates_per_epoch, batch)
    return np.array([schedule(update) for update in range(12 * updates_per_epoch + 1)])


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("name", "golden", "options"),
    [
        ("warmupcosine", "cosine", FALLING),
        ("cosine", "cosine", FALLING),
        ("cosine", "from_start", [*FALLING, "TRAIN.LR_SCHEDULER.WARMUP_PREFIX", "False"]),
        ("cosine", "epochs", [*FALLING, *BY_EPOCH]),
        ("linear", "linear", FALLING),
        ("poly", "poly", [*FALLING, "TRAIN.LR_SCHEDULER.POWER", "0.9"]),
        ("wsd", "wsd", [*FALLING, "TRAIN.LR_SCHEDULER.WSD_DECAY_EPOCHS", "3"]),
        ("wsd", "wsd_linear", [*FALLING, "TRAIN.LR_SCHEDULER.WSD_DECAY", "linear"]),
        ("step", "step", [*STEPS, "TRAIN.LR_SCHEDULER.DECAY_EPOCHS", "3"]),
        ("multi-step", "multistep", [*STEPS, "TRAIN.LR_SCHEDULER.MILESTONES", "[4,7]"]),
        # PaddleViT's way to write it
        ("multistep", "multistep", [*STEPS, "TRAIN.LR_SCHEDULER.MILESTONES", "4, 7"]),
    ],
)
def test_the_whole_curve_is_timms(name, golden, options):
    found = curve([*options, "TRAIN.LR_SCHEDULER.NAME", name])
    np.testing.assert_allclose(found, CURVES[golden], rtol=1e-9, atol=1e-15)


def test_a_late_schedule_is_an_epoch_behind_and_one_by_its_ends_ahead():
    """main.py of facebookresearch/deit: epoch 0 has the warm-up's rate, and step(epoch) comes after
    the epoch.
    """
    found = curve([*FALLING, *BY_EPOCH[:-1], "late"])
    np.testing.assert_allclose(found[:5], CURVES["epochs"][:5], rtol=1e-9)
    np.testing.assert_allclose(found[5:], CURVES["epochs"][:-5], rtol=1e-9)
    assert set(found[:10]) == {0.01}
    ahead = curve([*FALLING, *BY_EPOCH[:-1], "end"])  # PaddleViT's
    np.testing.assert_allclose(ahead[:-5], CURVES["epochs"][5:], rtol=1e-9)


def test_the_cosine_takes_known_values():
    options = [*COMMON, "TRAIN.BASE_LR", "1", "TRAIN.WARMUP_START_LR", "0.1", "TRAIN.END_LR", "0.2"]
    rate = curve(options, updates_per_epoch=10)
    np.testing.assert_allclose(rate[[0, 10, 20]], [0.1, 0.55, 1.0])
    np.testing.assert_allclose(rate[70], 0.6)  # half way down
    np.testing.assert_allclose(rate[45], 0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 4)))
    np.testing.assert_allclose(rate[120], 0.2)
    assert (
        build_schedule(get_config(None, ["TRAIN.WARMUP_EPOCHS", "0", "TRAIN.BASE_LR", "1"]), 10, 1)(
            0
        )
        == 1
    )


def test_a_warm_up_may_be_a_part_of_an_epoch():
    """500 of 20,016 updates, as in fine-tuning ViTs: 0.2 of the first of 8 epochs."""
    options = ["TRAIN.NUM_EPOCHS", "8", "TRAIN.WARMUP_EPOCHS", "0.2", "TRAIN.BASE_LR", "0.03"]
    schedule = build_schedule(get_config(None, [*options, "TRAIN.WARMUP_START_LR", "0"]), 2500, 512)
    expected = [
        0,
        0.015,
        0.03 * 499 / 500,
        0.03,
        0.03 * 0.5 * (1 + math.cos(math.pi * 9_500 / 19_500)),
        0,
    ]
    np.testing.assert_allclose(
        [schedule(update) for update in (0, 250, 499, 500, 10_000, 20_000)], expected
    )
    assert get_config(None, ["TRAIN.WARMUP_EPOCHS", "7"]).TRAIN.WARMUP_EPOCHS == 7
    with pytest.raises(InputError, match=r"TRAIN.WARMUP_EPOCHS is -0.5, expected 0 to 1000000"):
        get_config(None, ["TRAIN.WARMUP_EPOCHS", "-0.5"])
    with pytest.raises(InputError, match=r"WARMUP_EPOCHS takes float, found 'two' \(str\)"):
        get_config(None, ["TRAIN.WARMUP_EPOCHS", "two"])


def test_a_constant_rate_is_warmed_up():
    found = curve([*COMMON, "TRAIN.LR_SCHEDULER.NAME", "constant"])
    np.testing.assert_allclose(found[:11], np.linspace(0.01, 0.5, 11))
    assert set(found[10:]) == {0.5}


def test_steps_stop_at_their_lower_bound_and_at_the_cool_down():
    steps = [*STEPS, "TRAIN.LR_SCHEDULER.NAME", "step", "TRAIN.LR_SCHEDULER.DECAY_EPOCHS", "2"]
    bounded = curve([*steps, "TRAIN.END_LR", "0.1"])
    np.testing.assert_allclose(bounded[[10, 20, 30, 60]], [0.15, 0.1, 0.1, 0.1])
    cooled = curve([*steps, "TRAIN.COOLDOWN_EPOCHS", "5"])
    np.testing.assert_allclose(cooled[[30, 35, 60]], 0.5 * 0.3**3)


@pytest.mark.parametrize(("scaling", "factor"), [("linear", 4.0), ("sqrt", 2.0)])
def test_rates_scale_with_the_effective_batch_when_asked(scaling, factor):
    plain = curve(FALLING, batch=1024)
    scaled = curve(
        [*FALLING, "TRAIN.LINEAR_SCALED_LR", "256", "TRAIN.LR_SCALING", scaling], batch=1024
    )
    np.testing.assert_allclose(scaled, factor * plain, rtol=1e-12)


def test_base_alone_scales_when_asked():
    options = ["TRAIN.LINEAR_SCALED_LR", "256", "TRAIN.LR_SCALED", "base"]
    found = curve([*FALLING, *options], batch=1024)
    np.testing.assert_allclose(found[[0, 10, 50]], [0.01, 2.0, 0.002])


def test_one_cycle_is_convmixers():
    """np.interp over the shares 0, 2/5, 4/5 and 1 of the run, which its train.py has."""
    options = [*COMMON, "TRAIN.WARMUP_EPOCHS", "4", "TRAIN.WARMUP_START_LR", "0"]
    options += [
        "TRAIN.END_LR",
        "0.001",
        "TRAIN.LR_SCHEDULER.NAME",
        "onecycle",
        "TRAIN.LR_SCHEDULER.DECAY_RATE",
        "0.05",
    ]
    expected = np.interp(np.arange(61), [0, 20, 40, 60], [0, 0.5, 0.025, 0.001])
    np.testing.assert_allclose(curve(options), expected, rtol=1e-12)
    for epochs in (0, 6):
        with pytest.raises(
            InputError,
            match=f"WARMUP_EPOCHS is {epochs}.0, expected more than 0 and less than half of the 12 epochs",
        ):
            get_config(None, [*options, "TRAIN.WARMUP_EPOCHS", str(epochs)])


def test_a_warm_up_and_cool_down_that_fill_the_run_are_an_error():
    with pytest.raises(
        InputError, match="COOLDOWN_EPOCHS is 11, expected at most NUM_EPOCHS 12 - WARMUP_EPOCHS 2"
    ):
        get_config(None, [*COMMON, "TRAIN.COOLDOWN_EPOCHS", "11"])


def test_onecycle_falls():
    words = ["TRAIN.LR_SCHEDULER.NAME", "onecycle", "TRAIN.LR_SCHEDULER.DECAY_RATE"]
    with pytest.raises(InputError, match="DECAY_RATE is 3.0, expected 1e-12 to 1"):
        get_config(None, [*words, "3.0"])
    assert get_config(None, [*words, "1.0"]).TRAIN.LR_SCHEDULER.DECAY_RATE == 1.0


def test_a_run_may_stay_stable_and_its_fall_has_to_fit():
    words = [*COMMON, "TRAIN.LR_SCHEDULER.NAME", "wsd", "TRAIN.LR_SCHEDULER.WSD_DECAY_EPOCHS"]
    assert set(curve([*words, "0"])[10:60]) == {0.5}
    with pytest.raises(
        InputError,
        match="WSD_DECAY_EPOCHS is 10.5, expected at most the 10 of 12 epochs that are left",
    ):
        get_config(None, [*words, "10.5"])
