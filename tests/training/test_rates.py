"""Schedules that can't be meant, rates of another batch, targets that are all alike: told at the
start.
"""

import pytest
from support.training_runs import train

from config import get_config
from errors import InputError
from training.setup import batch_size_warning, recipe_batch, rising_rate_warning

# ------------------------------------------------------------------ warm-up


@pytest.mark.parametrize(("warmup", "epochs"), [(32, 10), (5, 5)])
def test_a_warm_up_that_fills_the_run_is_an_error(warmup, epochs):
    options = ["TRAIN.NUM_EPOCHS", str(epochs), "TRAIN.WARMUP_EPOCHS", str(warmup)]
    with pytest.raises(InputError) as error:
        get_config(None, options)
    assert str(error.value) == (
        f"TRAIN.WARMUP_EPOCHS is {warmup}.0, expected fewer than TRAIN.NUM_EPOCHS, {epochs} (a tenth of them is"
        " usual); otherwise the run ends before it reaches BASE_LR"
    )
    assert (
        get_config(None, ["TRAIN.NUM_EPOCHS", "1", "TRAIN.WARMUP_EPOCHS", "0"]).TRAIN.NUM_EPOCHS
        == 1
    )


# -------------------------------------------------------------- the batch


def test_who_said_for_which_batch_the_rates_are(tmp_path):
    for name, batch in {
        "vit_small_patch16_224": 4096, "vit_small_patch16_384": 512, "vit_huge_patch14_224": 4096,
        "augreg_vit_small_patch16_224": 4096, "deit3_small_patch16_224": 2048,
        "deit3_finetune_base": 512, "beit_base_patch16_224": 1024, "beit_large_patch16_512": 512,
        "vit_digits": None, "swin_tiny_patch4_window7_224": None, "cifar10": None, "small_data": None,
    }.items():  # fmt: skip
        assert recipe_batch(get_config(name)) == batch, name
    assert recipe_batch(get_config("beit_base_patch16_224", ["TRAIN.BASE_LR", "1e-4"])) is None
    assert (
        recipe_batch(get_config("beit_base_patch16_224", ["TRAIN.LINEAR_SCALED_LR", "1024"]))
        is None
    )
    own = tmp_path / "own.yaml"
    own.write_text("BASE: ''\nTRAIN:\n  RECIPE_BATCH: 96\n")
    assert recipe_batch(get_config(own)) == 96


def test_rates_of_a_far_batch_are_told_with_what_they_would_scale_to(tmp_path, tiny):
    vit = get_config("vit_small_patch16_224")
    told = (
        "warning: the recipe's rates are for a batch of 4096, the effective batch is {}: BASE_LR {} would scale to"
        " {}; set TRAIN.BASE_LR, or TRAIN.LINEAR_SCALED_LR 4096, which scales the rates"
    )
    assert batch_size_warning(vit, 64) == told.format(64, "0.001", "1.56e-05")
    assert batch_size_warning(vit, 1023) == told.format(1023, "0.001", "0.00025")
    assert (
        batch_size_warning(vit, 1024)
        == batch_size_warning(vit, 4096)
        == batch_size_warning(vit, 16384)
        == ""
    )
    assert batch_size_warning(vit, 16385) == told.format(16385, "0.001", "0.004")
    # the user's
    assert (
        batch_size_warning(get_config("vit_small_patch16_224", ["TRAIN.BASE_LR", "0.001"]), 64)
        == ""
    )
    assert batch_size_warning(get_config("vit_digits"), 64) == ""
    train([*tiny, "DATA.BATCH_SIZE", "8", "TRAIN.ACCUM_ITER", "2"], tmp_path, 16)
    assert told.format(16, "0.003", "1.17e-05") in (tmp_path / "log.txt").read_text()


def test_a_highest_rate_that_scales_below_the_lowest_is_told(tmp_path, tiny):
    deit = get_config("deit_base_patch16_384")
    told = (
        "warning: for the effective batch of {} BASE_LR scales to {}, below END_LR {}, which doesn't scale: the rate"
        " rises; use a larger batch, or set TRAIN.END_LR"
    )
    assert rising_rate_warning(deit, 64) == told.format(64, "6.25e-07", "5e-06")
    assert rising_rate_warning(deit, 512) == ""  # the source's: all its rates are equal
    for options in (
        ["TRAIN.LR_SCALED", "all"],
        ["TRAIN.END_LR", "0"],
        ["TRAIN.LR_SCALING", "sqrt", "TRAIN.END_LR", "1e-6"],
    ):
        assert rising_rate_warning(get_config("deit_base_patch16_384", options), 64) == ""
    assert (
        rising_rate_warning(get_config("deit3_finetune_base"), 8)
        == rising_rate_warning(get_config("swin_tiny_patch4_window7_224"), 8)
        == ""
    )
    scaled = ["TRAIN.LINEAR_SCALED_LR", "4096", "TRAIN.LR_SCALED", "base", "TRAIN.END_LR", "1e-5"]
    train([*tiny, "DATA.BATCH_SIZE", "8", *scaled], tmp_path, 16)
    assert told.format(8, "5.86e-06", "1e-05") in (tmp_path / "log.txt").read_text()


# ------------------------------------------------------------ binary targets


def bce(threshold, smoothing, classes="10", *options):
    words = [
        "TRAIN.LOSS",
        "bce",
        "TRAIN.BCE_TARGET_THRESH",
        threshold,
        "TRAIN.SMOOTHING",
        smoothing,
        *options,
    ]
    return get_config(None, [*words, "MODEL.NUM_CLASSES", classes])


def test_a_threshold_that_makes_all_targets_alike_is_an_error():
    for threshold, smoothing, expected in (
        (
            "0.0",
            "0.1",
            "above 0.01 (SMOOTHING / NUM_CLASSES, the target of other classes): otherwise all targets are 1",
        ),
        (
            "0.01",
            "0.1",
            "above 0.01 (SMOOTHING / NUM_CLASSES, the target of other classes): otherwise all targets are 1",
        ),
        ("0.91", "0.1", "below 0.91 (the target of the label): otherwise all targets are 0"),
        ("1.0", "0.0", "below 1 (the target of the label): otherwise all targets are 0"),
    ):
        for mixed in ([], ["TRAIN.MIXUP_ALPHA", "0.8"]):
            with pytest.raises(InputError) as error:
                bce(threshold, smoothing, "10", *mixed)
            assert (
                str(error.value)
                == f"TRAIN.BCE_TARGET_THRESH is {float(threshold)}, expected {expected}"
            )
    for threshold, smoothing, classes in (
        ("0.0", "0.0", "10"), ("0.2", "0.1", "10"), ("none", "0.1", "10"), ("0.01", "0.1", "auto"),
        ("0.0", "0.0", "auto"),
    ):  # fmt: skip
        assert bce(threshold, smoothing, classes).TRAIN.LOSS == "bce"
    with pytest.raises(InputError, match="BCE_TARGET_THRESH is 0.0, expected above"):
        bce("0.0", "0.1", "auto")


def test_the_datas_number_of_classes_decides_before_the_run(tmp_path, tiny):
    """0.02 is above 0.1 / 10, and below it of fewer classes: "auto" is known once the data are
    read.
    """
    smooth = ["TRAIN.LOSS", "bce", "TRAIN.SMOOTHING", "0.5", "MODEL.NUM_CLASSES", "auto"]
    train([*tiny, *smooth, "TRAIN.BCE_TARGET_THRESH", "0.06"], tmp_path / "run", 256)
    with pytest.raises(
        InputError, match=r"BCE_TARGET_THRESH is 0\.05, expected above 0\.05 \(SMOOTHING"
    ):
        train([*tiny, *smooth, "TRAIN.BCE_TARGET_THRESH", "0.05"], tmp_path / "refused", 256)
    assert not (tmp_path / "refused").exists()
