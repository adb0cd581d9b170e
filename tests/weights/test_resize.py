"""Resizing of weights: timm's results, what must not change, what is refused."""

import math

import numpy as np
import pytest
from conftest import ROOT
from golden.formula import array
from golden.make_resize import CHANNELS, KERNELS, POS_EMBEDS, TABLES, name

from errors import InputError
from weights.resize import (
    adapt_input_channels,
    bicubic_matrix,
    bilinear_matrix,
    resample_patch_kernel,
    resize_pos_embed,
    resize_rel_pos_bias_table,
)


def assert_timms(found, *case, atol=1e-6):
    golden = np.load(ROOT / "tests" / "golden" / "resize.npz")[name(*case)]
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, golden, atol=atol, rtol=0)


@pytest.mark.smoke
@pytest.mark.parametrize(("prefix", "old", "new"), POS_EMBEDS)
def test_position_embeddings_are_resized_as_timm_does(prefix, old, new):
    stored = array("resize", (1, prefix + math.prod(old), 3))
    resized = resize_pos_embed(stored, prefix, new, old)
    assert_timms(resized, "pos_embed", prefix, old, new)
    if old[0] == old[1] and new[0] == new[1]:
        assert (resize_pos_embed(stored, prefix, new[0]) == resized).all()
    if old == new:
        assert (resized == stored).all()


@pytest.mark.parametrize(
    ("patches", "old", "message"),
    [
        (6, None, "6 patches, expected a square"),
        (6, (2, 4), "6 patches, expected 2 x 4"),
        (0, None, "0 patches"),
    ],
)
def test_a_position_embedding_of_another_grid_is_refused(patches, old, message):
    with pytest.raises(InputError, match=message):
        resize_pos_embed(np.zeros((1, 1 + patches, 3), np.float32), 1, 4, old)


@pytest.mark.smoke
@pytest.mark.parametrize(("extra", "old", "new"), TABLES)
def test_relative_position_tables_are_resized_as_timm_does(extra, old, new):
    stored = array("resize", ((2 * old[0] - 1) * (2 * old[1] - 1) + extra, 2))
    resized = resize_rel_pos_bias_table(stored, old, new)
    assert_timms(resized, "table", extra, old, new)
    if extra:
        assert (resized[-3:] == stored[-3:]).all()
    if old == new:
        assert (resized == stored).all()


@pytest.mark.parametrize("rows", [24, 26, 27, 29])
def test_a_table_of_another_window_is_refused(rows):
    with pytest.raises(
        InputError, match=f"{rows} relative positions isn't one of 3 x 3 windows, expected 25, or 3"
    ):
        resize_rel_pos_bias_table(np.zeros((rows, 2), np.float32), (3, 3), (4, 4))


@pytest.mark.parametrize(("old", "new"), KERNELS)
def test_patch_kernels_are_resized_as_timm_does(old, new):
    stored = array("resize", (2, 3, *old))
    resized = resample_patch_kernel(stored, new)
    assert_timms(resized, "kernel", old, new, atol=1e-5)  # timm inverts in float32
    if old == new:
        assert (resized == stored).all()


def test_enlarged_patches_are_embedded_as_before():
    patch = array("patch", (5, 7))
    kernel = array("kernel", (2, 1, 5, 7))
    enlarged = bicubic_matrix(5, 9) @ patch @ bicubic_matrix(7, 11).T
    found = (resample_patch_kernel(kernel, (9, 11)) * enlarged).sum(axis=(1, 2, 3))
    np.testing.assert_allclose(found, (kernel * patch).sum(axis=(1, 2, 3)), atol=1e-6)


@pytest.mark.parametrize("count", CHANNELS)
def test_input_channels_are_adapted_as_timm_does(count):
    stored = array("resize", (2, 3, 4, 4))
    assert_timms(adapt_input_channels(stored, count), "channels", count)
    grey = adapt_input_channels(stored, count).sum(axis=1)  # what an image of equal channels meets
    if count % 3 == 0 or count == 1:
        np.testing.assert_allclose(grey, stored.sum(axis=1), atol=1e-6)


def test_only_three_channels_become_others():
    four = np.ones((2, 4, 1, 1), np.float32)
    assert adapt_input_channels(four, 4) is four
    with pytest.raises(InputError, match="has 4 channels, expected 3 for an adaptation to 1"):
        adapt_input_channels(four, 1)


def test_bicubic_weights_of_the_same_size_change_nothing():
    assert (bicubic_matrix(5, 5) == np.eye(5)).all()


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (2, 4, [[1, 0], [0.75, 0.25], [0.25, 0.75], [0, 1]]),
        # Places between the new ones are skipped: the matrix isn't antialiased.
        (5, 2, [[0.25, 0.75, 0, 0, 0], [0, 0, 0, 0.75, 0.25]]),
    ],
)
def test_bilinear_weights_are_those_of_two_neighbours(old, new, expected):
    np.testing.assert_allclose(bilinear_matrix(old, new), expected, atol=1e-12)
