"""What Mobile-Former refuses, and where its stages begin. golden/paddlevit_models.py has its parity."""

import pytest
from support.small_models import small_mobileformer

from errors import InputError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"hidden_dims": (16, 16)},
            r"HIDDEN_DIMS is \[16, 16\], expected 3 numbers: one per block",
        ),
        ({"strides": (1, 2, 3)}, r"STRIDES is \[1, 2, 3\], expected 1 or 2 for each block"),
        ({"lite_dims": (16,)}, r"LITE_DIMS is \[16\], expected two numbers"),
        ({"num_heads": 3}, "NUM_HEADS is 3, expected a divisor of 16 channels"),
        ({"conv_groups": 3}, "CONV_GROUPS is 3, expected a divisor of 8 channels"),
        ({"relu_reduction": 17.0}, "RELU_REDUCTION is 17, too high for 16 channels"),
        ({"mlp_ratio": 0.01}, "MLP_RATIO is 0.01, too low for 16 channels"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        small_mobileformer(**options)


def test_a_relu_reduction_may_leave_one_channel():
    model = small_mobileformer(relu_reduction=16.0)
    assert model.blocks[0].mobile.bneck.act.project[0].fc1.weight.shape == [16, 1]


@pytest.mark.parametrize(
    ("strides", "stages", "reductions"),
    [
        ((1, 2, 2), [[0], [1], [2]], [4, 8, 16, 16]),
        ((2, 1, 1), [[0, 1, 2]], [8, 8]),
        ((1, 1, 2), [[0, 1], [2]], [4, 8, 8]),
    ],
)
def test_a_block_of_stride_2_begins_a_stage(strides, stages, reductions):
    model = small_mobileformer(strides=strides)
    assert model.stage_blocks == stages
    assert [stage["reduction"] for stage in model.feature_info] == reductions
