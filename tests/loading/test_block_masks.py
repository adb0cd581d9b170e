"""BEiT's masks against statistics of the authors' code (golden/make_block_masks.py)."""

import numpy as np
import pytest
from conftest import ROOT
from golden.make_block_masks import CASES, statistics
from scipy.stats import chi2_contingency

from errors import InputError
from loading.block_masks import _add_block, block_mask, check_blocks


def equal_share(ours, theirs):
    """Returns the p-value of two histograms being of one distribution (chi-square).

    Entries that are rare in both are joined.
    """
    ours, theirs = ours.reshape(-1), theirs.reshape(-1)
    rare = ours + theirs < 20
    table = [[*each[~rare], each[rare].sum()] for each in (ours, theirs)]
    table = np.array(table)[:, np.sum(table, 0) > 0]
    # One entry alone: both are constant.
    return 1.0 if table.shape[1] == 1 else chi2_contingency(table).pvalue


@pytest.mark.parametrize("name", CASES)
def test_counts_places_and_shapes_are_those_of_the_authors_masks(name):
    rows, columns, count, least = CASES[name]
    stored = np.load(ROOT / "tests" / "golden" / "block_masks.npz")
    rng = np.random.default_rng(1)

    def draw():
        return block_mask(rng, (rows, columns), count, least).reshape(rows, columns)

    def first_block():
        mask = np.zeros((rows, columns), np.uint8)
        _add_block(rng, mask, count, least, 0.3)
        return mask

    ours = statistics(draw, first_block, (rows, columns))
    for key, histogram in ours.items():
        if key == "places":
            # The patches of a mask depend on each other, so that their variance is larger.
            spread = np.abs(histogram - stored[f"{name}/places"]) / histogram.mean()
            assert spread.max() < 0.06, key
        else:
            assert equal_share(histogram, stored[f"{name}/{key}"]) > 0.01, key
    # It tells other aspect ratios apart.
    rng = np.random.default_rng(1)
    squares = np.zeros((rows, columns), np.int64)
    for _ in range(2000):
        mask = np.zeros((rows, columns), np.uint8)
        _add_block(rng, mask, count, least, 0.5)
        squares[mask.reshape(rows, columns).any(1).sum() - 1, mask.any(0).sum() - 1] += 1
    assert equal_share(squares, stored[f"{name}/shapes"]) < 1e-6


def test_a_mask_is_a_function_of_its_generator():
    draws = [block_mask(np.random.default_rng([7, 2, 3]), (14, 14), 75) for _ in range(2)]
    np.testing.assert_array_equal(*draws)
    other = block_mask(np.random.default_rng([7, 2, 4]), (14, 14), 75)
    assert (other != draws[0]).any()
    assert draws[0].shape == (196,)
    assert draws[0].dtype == np.uint8


@pytest.mark.parametrize("grid", [(4, 4), (3, 9), (2, 2), (14, 14)])
def test_a_mask_has_at_least_one_patch_and_at_most_the_count(grid):
    patches = grid[0] * grid[1]
    rng = np.random.default_rng(0)
    for count in {1, patches // 2, patches - 1}:
        for least in {1, count}:
            try:
                check_blocks(grid, count, least)
            except InputError:
                continue
            masked = [int(block_mask(rng, grid, count, least).sum()) for _ in range(50)]
            assert min(masked) >= 1
            assert max(masked) <= count


@pytest.mark.parametrize(
    ("count", "least", "message"),
    [
        (0, 1, "MASK_RATIO masks 0 of 4 x 4 patches, expected 1 to 15"),
        (16, 1, "MASK_RATIO masks 16 of 4 x 4 patches, expected 1 to 15"),
        (
            6,
            16,
            "MIN_BLOCK is 16, but no block of this size fits into the 6 masked of 4 x 4 patches",
        ),
    ],
)
def test_masks_of_nothing_or_everything_are_refused(count, least, message):
    with pytest.raises(InputError, match=message):
        check_blocks((4, 4), count, least)


def test_an_image_of_one_patch_is_refused():
    with pytest.raises(InputError, match="an image has 1 patch, but masking needs several"):
        check_blocks((1, 1), 1, 1)
