"""The compiled convolution gives what Paddle's gives in float64: values and gradients of all its
forms.
"""

import numpy as np
import paddle
import pytest
from paddle.nn import functional as F
from threadpoolctl import threadpool_limits

import ops
from models.layers.conv import Conv2D

pytestmark = pytest.mark.usefixtures("compiled_operators")

# x, weight, stride, padding, dilation, groups, bias
FORMS = {
    "1 x 1": ((2, 5, 7, 9), (4, 5, 1, 1), (1, 1), (0, 0), (1, 1), 1, True),
    "1 x 1, many images": ((9, 6, 3, 3), (33, 6, 1, 1), (1, 1), (0, 0), (1, 1), 1, False),
    "1 x 1 of every other place": ((2, 5, 7, 8), (4, 5, 1, 1), (2, 2), (0, 0), (1, 1), 1, True),
    "1 x 1, padded": ((2, 3, 4, 4), (4, 3, 1, 1), (1, 1), (1, 1), (1, 1), 1, False),
    "3 x 3": ((2, 17, 9, 11), (18, 17, 3, 3), (1, 1), (1, 1), (1, 1), 1, True),
    "3 x 3, stride 2": ((3, 16, 9, 9), (32, 16, 3, 3), (2, 2), (1, 1), (1, 1), 1, False),
    "3 x 5, uneven": ((2, 4, 9, 12), (6, 4, 3, 5), (2, 1), (0, 2), (1, 1), 1, True),
    "dilated": ((2, 4, 11, 11), (6, 4, 3, 3), (1, 1), (2, 2), (2, 2), 1, True),
    "patches": ((2, 3, 16, 16), (8, 3, 4, 4), (4, 4), (0, 0), (1, 1), 1, True),
    "patches that leave a rest": ((2, 3, 18, 17), (8, 3, 4, 4), (4, 4), (0, 0), (1, 1), 1, True),
    "groups": ((2, 24, 8, 8), (36, 8, 3, 3), (1, 1), (1, 1), (1, 1), 3, True),
    "depthwise 7 x 7": ((2, 5, 20, 37), (5, 1, 7, 7), (1, 1), (3, 3), (1, 1), 5, True),
    "depthwise 3 x 3": ((3, 16, 7, 7), (16, 1, 3, 3), (1, 1), (1, 1), (1, 1), 16, False),
    "depthwise, stride 2": ((2, 6, 15, 16), (6, 1, 5, 5), (2, 2), (2, 2), (1, 1), 6, True),
    "depthwise, uneven": ((2, 6, 9, 20), (6, 1, 3, 5), (3, 2), (4, 0), (1, 1), 6, True),
    "depthwise, dilated": ((2, 6, 9, 9), (6, 1, 3, 3), (1, 1), (2, 2), (2, 2), 6, True),
    "depthwise, twice as many channels": (
        (2, 4, 8, 8),
        (8, 1, 3, 3),
        (1, 1),
        (1, 1),
        (1, 1),
        4,
        True,
    ),
    "one place": ((2, 40, 1, 1), (3, 40, 1, 1), (1, 1), (0, 0), (1, 1), 1, True),
}


def inputs(x, weight, bias):
    rng = np.random.default_rng(sum(x))
    return [rng.standard_normal(shape) for shape in (x, weight, weight[:1])[: 3 if bias else 2]]


def results(function, arrays, dtype, wanted=None):
    """Returns the output and the gradients of the tensors in ``wanted``, by default of all."""
    tensors = [paddle.to_tensor(array, dtype) for array in arrays]
    wanted = range(len(tensors)) if wanted is None else wanted
    for i in wanted:
        tensors[i].stop_gradient = False
    output = function(*tensors)
    cotangent = paddle.to_tensor(np.random.default_rng(1).standard_normal(output.shape), dtype)
    return [output, *paddle.grad([output], [tensors[i] for i in wanted], [cotangent])]


def assert_close(found, expected):
    for own, exact in zip(found, expected, strict=True):
        assert own.shape == exact.shape
        assert np.abs(own.numpy() - exact.numpy()).max() < 3e-6 * max(
            1, np.abs(exact.numpy()).max()
        )


@pytest.mark.smoke
@pytest.mark.parametrize(("threads", "last"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("form", FORMS)
def test_values_and_gradients_are_those_of_float64(form, threads, last):
    x, weight, *options, bias = FORMS[form]
    arrays = inputs(x, weight, bias)

    def plain(x, w, b=None):
        if not last:
            return F.conv2d(x, w, b, *options)
        return F.conv2d(x.transpose([0, 3, 1, 2]), w, b, *options).transpose([0, 2, 3, 1])

    if last:
        arrays[0] = arrays[0].transpose([0, 2, 3, 1])
    with threadpool_limits(threads):
        found = results(
            lambda x, w, b=None: ops.convolution(x, w, b, *options, last), arrays, "float32"
        )
    assert_close(found, results(plain, arrays, "float64"))


@pytest.mark.parametrize("form", ["1 x 1", "3 x 3", "depthwise 7 x 7"])
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (1, 2)])
def test_gradients_that_are_not_wanted_change_nothing(form, wanted):
    x, weight, stride, padding, dilation, groups, bias = FORMS[form]
    arrays = inputs(x, weight, bias)
    found = results(
        lambda x, w, b: ops.convolution(x, w, b, stride, padding, dilation, groups),
        arrays,
        "float32",
        wanted,
    )
    expected = results(
        lambda x, w, b: F.conv2d(x, w, b, stride, padding, dilation, groups),
        arrays,
        "float64",
        wanted,
    )
    assert_close(found, expected)


def test_infinite_weights_stay_where_they_are():
    """What pads a plane for the vectors is no value of it."""
    x = np.zeros((1, 2, 5, 5))
    x[0, 0, 2, 2] = np.inf
    _, _, grad = results(
        lambda x, w: ops.convolution(x, w, None, (1, 1), (1, 1), (1, 1), 2),
        [x, np.ones((2, 1, 3, 3))],
        "float32",
    )
    assert np.isinf(grad.numpy()[0]).all()
    np.testing.assert_array_equal(grad.numpy()[1], 0)


@pytest.mark.parametrize(
    "call",
    [
        lambda: ops.convolution(
            paddle.ones([1, 3, 4, 4]), paddle.ones([2, 4, 1, 1]), None, [1, 1], [0, 0], [1, 1], 1
        ),
        lambda: ops.convolution(
            paddle.ones([1, 3, 4, 4]), paddle.ones([2, 3, 5, 5]), None, [1, 1], [0, 0], [1, 1], 1
        ),
        lambda: ops.convolution(
            paddle.ones([1, 4, 4, 4]), paddle.ones([3, 2, 1, 1]), None, [1, 1], [0, 0], [1, 1], 2
        ),
        lambda: ops.convolution(
            paddle.ones([1, 3, 4, 4]),
            paddle.ones([2, 3, 1, 1]),
            paddle.ones([3]),
            [1, 1],
            [0, 0],
            [1, 1],
            1,
        ),
    ],
)
def test_shapes_that_do_not_fit_are_refused(call):
    with pytest.raises(Exception, match="shapes don't fit"):
        call()


@pytest.mark.smoke
@pytest.mark.parametrize(
    "options",
    [{"padding": 1}, {"padding": "same"}, {"padding": "valid"}, {"padding": [1, 0], "stride": 2}],
)
def test_a_layer_is_the_same_with_and_without(options):
    layer = Conv2D(3, 4, 3, **options)
    x = paddle.randn([2, 3, 8, 8])
    with_them = [layer(x), layer(x.transpose([0, 2, 3, 1]), last=True)]
    ops.enable(False)
    try:
        for own, plain in zip(
            with_them, [layer(x), layer(x.transpose([0, 2, 3, 1]), last=True)], strict=True
        ):
            np.testing.assert_allclose(own.numpy(), plain.numpy(), rtol=0, atol=1e-5)
    finally:
        ops.enable(True)
    np.testing.assert_allclose(
        with_them[0].transpose([0, 2, 3, 1]).numpy(), with_them[1].numpy(), rtol=0, atol=1e-5
    )
