"""Moving averages of tensors against NumPy."""

import numpy as np
import paddle
import pytest

from models.layers.moving_average import MovingAverage


@pytest.mark.smoke
def test_averages_follow_in_place_and_others_are_copied():
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(2, 3, 4)).astype("float32")
    average, new = paddle.to_tensor(first), paddle.to_tensor(second)
    double, new_double = paddle.to_tensor(first, "float64"), paddle.to_tensor(second, "float64")
    count, new_count = paddle.to_tensor([1, 2]), paddle.to_tensor([5, 6])
    averages = MovingAverage([(average, new), (double, new_double), (count, new_count)])
    expected = first
    for weight in (0.25, 0.004, 0.0, 1.0):
        new.set_value(new * 1.5 + weight)
        expected = expected + weight * (new.numpy() - expected)
        averages.update(weight)
        np.testing.assert_allclose(average.numpy(), expected, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(double.numpy(), second.astype("float64"))
    assert count.tolist() == [5, 6]
    assert new_count.tolist() == [5, 6]
    new.set_value(new * 0)
    assert np.abs(average.numpy()).min() > 0


def test_no_gradient_flows_and_an_average_of_two_names_moves_once():
    average = paddle.create_parameter([2], "float32", default_initializer=None)
    average.set_value(paddle.to_tensor([0.0, 8.0]))
    new = paddle.create_parameter([2], "float32")
    new.set_value(paddle.to_tensor([4.0, 0.0]))
    MovingAverage([(average, new), (average, new)]).update(0.25)
    assert average.tolist() == [1.0, 6.0]
    assert average.grad is None


def test_nothing_to_average():
    MovingAverage([]).update(0.5)
