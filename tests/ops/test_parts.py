"""The compiled operators on parts of tensors give what Paddle does: split, joined, in windows, the
largest, sums.
"""

import numpy as np
import paddle
import pytest
from threadpoolctl import threadpool_limits

import ops
from models.layers.layout import concat, split
from models.layers.units import pool_units
from models.layers.windows import in_windows

pytestmark = pytest.mark.usefixtures("compiled_operators")
X = np.random.default_rng(0).standard_normal((3, 7, 5, 4000))


def outputs(function, *arrays, dtype="float32"):
    """What the function returns, and its inputs' gradients."""
    inputs = [paddle.to_tensor(array.astype(dtype), stop_gradient=False) for array in arrays]
    found = function(*inputs)
    found = [found] if isinstance(found, paddle.Tensor) else list(found)
    weights = [
        paddle.to_tensor(np.cos(np.arange(one.size)).reshape(one.shape).astype(dtype))
        for one in found
    ]
    return [one.numpy() for one in [*found, *paddle.grad(found, inputs, weights)]]


def check(compiled, plain, *arrays):
    for threads in (1, 2):
        with threadpool_limits(threads):
            found = outputs(compiled, *arrays)
            expected = outputs(plain, *arrays, dtype="float64")
        for own, exact in zip(found, expected, strict=True):
            np.testing.assert_allclose(own, exact, rtol=0, atol=2e-6 * max(1, np.abs(exact).max()))


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("axis", "sizes"), [(1, [1, 6]), (1, [1, 1, 5]), (-1, [2500, 1500]), (0, [1, 1, 1])]
)
def test_parts_and_their_gradient_are_exact(axis, sizes):
    ours, plain = (
        outputs(lambda x: ops.split(x, sizes, axis), X),
        outputs(lambda x: x.split(sizes, axis), X),
    )
    assert len(ours) == len(sizes) + 1
    assert all(np.array_equal(own, other) for own, other in zip(ours, plain, strict=True))
    ours, plain = (
        outputs(lambda *some, put=put: put(some, axis), *ours[:-1])
        for put in (ops.concat, paddle.concat)
    )
    assert all(np.array_equal(own, other) for own, other in zip(ours, plain, strict=True))


@pytest.mark.smoke
@pytest.mark.parametrize("wanted", [0, 1])
def test_a_part_that_nobody_reads_has_no_gradient(wanted):
    [found, gradient] = outputs(lambda x: ops.split(x, [3, 4], 1)[wanted], X)
    rows = slice(0, 3) if wanted == 0 else slice(3, 7)
    assert np.array_equal(found, X[:, rows].astype("float32"))
    assert np.array_equal(
        gradient[:, rows].flatten(), np.cos(np.arange(found.size)).astype("float32")
    )
    assert np.count_nonzero(gradient) == np.count_nonzero(gradient[:, rows])


def test_more_parts_than_the_operator_takes_are_paddle_s():
    x = paddle.to_tensor(X.astype("float32"))
    four = split(x, [1, 2, 3, 1], axis=1)
    assert [part.shape[1] for part in four] == [1, 2, 3, 1]
    assert np.array_equal(concat(four, axis=1).numpy(), x.numpy())
    assert np.array_equal(concat([x], axis=1).numpy(), x.numpy())
    half = [part.astype("bfloat16") for part in four[:2]]
    assert concat(half, axis=1).dtype == paddle.bfloat16


@pytest.mark.smoke
def test_the_largest_and_its_gradient():
    check(ops.amax, lambda x: x.max(axis=1), X)


@pytest.mark.smoke
def test_equal_ones_share_a_gradient_and_what_is_no_number_stays():
    x = paddle.to_tensor(
        [[[1.0, 2, 3, np.nan], [5, 2, 1, 2], [5, 2, 7, 1]]], "float32", stop_gradient=False
    )
    found = ops.amax(x)
    found.backward(paddle.to_tensor([[1.0, 3, 5, 7]]))
    np.testing.assert_array_equal(found.numpy(), [[5, 2, 7, np.nan]])
    expected = np.array([[0, 1, 0], [0.5, 1, 0], [0.5, 1, 5]])
    np.testing.assert_array_equal(x.grad.numpy()[0, :, :3], expected)


def test_units_are_pooled_alike_with_and_without():
    x = X[:, :, 0, :96].reshape(3, 7 * 16, 6)  # units of 16 places
    found = outputs(lambda x: pool_units(x, 16), x)
    ops.enable(False)
    for own, other in zip(found, outputs(lambda x: pool_units(x, 16), x), strict=True):
        np.testing.assert_array_equal(own, other)


@pytest.mark.smoke
def test_a_sum_with_what_all_samples_share():
    check(ops.add_to_all, lambda x, one: x + one, X, X[1:2] * 3)


@pytest.mark.smoke
def test_products_of_elements():
    check(ops.multiply, lambda x, y: x * y, X, X[::-1] * 3)


@pytest.mark.smoke
@pytest.mark.parametrize("shift", [(0, 0), (2, 1), (1, 0), (0, 5)])
@pytest.mark.parametrize("size", [(4, 5), (3, 4)])  # the latter: padded
def test_windows_are_read_and_put_back_alike_with_and_without(size, shift):
    maps = X[:, :, 0, :80].reshape(3, 8, 10, 7)
    weights = X[0, 0, 0, : size[0] * size[1]].reshape(1, -1, 1)
    found = []
    for enabled in (True, False):
        ops.enable(enabled)
        weight = paddle.to_tensor(weights.astype("float32"))
        found.append(
            outputs(
                lambda x, weight=weight: in_windows(x, size, lambda one: one * weight, shift), maps
            )
        )
    assert all(np.array_equal(own, other) for own, other in zip(*found, strict=True))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: ops.split(x, [1, 2], 1),
        lambda x: ops.split(x, [1, 3, 4], 1),
        lambda x: ops.split(x, [-1, 4, 4], 1),
        lambda x: ops.split(x, [0, 3, 4], 1),
        lambda x: ops.split(x, [1, 2, 3, 1], 1),
        lambda x: ops.concat([x, x[:, :2]], 0),
        lambda x: ops.concat([x, x[0]], 0),
        lambda x: ops.amax(x[0, 0]),
        lambda x: ops.add_to_all(x, x[:, :1]),
        lambda x: ops.multiply(x, x[:1]),
        lambda x: ops.into_windows(x, (1, 1), (0, 0)),
        lambda x: ops.into_windows(x.unsqueeze(0), (2, 7), (0, 0)),
        lambda x: ops.into_windows(x.unsqueeze(0), (3, 7), (3, 0)),
        lambda x: ops.from_windows(x, [1, 3, 7, 3], (3, 7), (0, 0)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(call):
    with pytest.raises(Exception, match="shapes don't fit"):
        call(paddle.ones([3, 7, 2]))
