"""The compiled operators on resized maps give what float64 does: the maps themselves, the loss of a
class for each pixel, and the answers.
"""

import numpy as np
import paddle
import pytest
from threadpoolctl import threadpool_limits

import ops
from models.heads.base import resized
from models.heads.windows import strips
from training.losses.pixels import PixelLoss
from training.pixel_metrics import answers_of_strips

pytestmark = [pytest.mark.usefixtures("compiled_operators"), pytest.mark.smoke]

IGNORED = 255
# (rows, columns) before and after: larger, smaller, as large, one place, one after.
SIZES = {
    "four times": ((9, 40), (36, 160)),
    "odd": ((33, 7), (50, 131)),
    "a row less": ((20, 37), (19, 37)),
    "smaller": ((33, 190), (12, 33)),
    "the same": ((19, 130), (19, 130)),
    "of one place": ((1, 1), (8, 35)),
    "to one place": ((5, 7), (1, 1)),
}


def shares(before, after, align_corners):
    """Returns how much of each place is in each place of the resized axis: [after, before].

    A place has a share of those that are less than one place away.
    """
    places = np.arange(after)
    if align_corners:
        places = places * ((before - 1) / max(after - 1, 1))
    else:
        places = (places + 0.5) * before / after - 0.5
    places = places.clip(0, before - 1)
    return (1 - abs(places[:, None] - np.arange(before))).clip(0)


def exactly_resized(x, size, align_corners=False):
    """Returns maps resized in float64."""
    rows, columns = (
        paddle.to_tensor(shares(before, after, align_corners))
        for before, after in zip(x.shape[2:], size, strict=True)
    )
    return rows @ x.astype("float64") @ columns.t()


def exact_losses(logits, mask, weight=None, align_corners=False):
    """Returns the loss of each image in float64, from its definition."""
    logits = exactly_resized(logits, mask.shape[1:], align_corners)
    one_hot = np.arange(logits.shape[1]).reshape(-1, 1, 1) == mask[:, None]
    factors = one_hot if weight is None else one_hot * weight.reshape(-1, 1, 1)
    logarithms = logits - logits.logsumexp(1, keepdim=True)
    sums = (logarithms * paddle.to_tensor(factors.astype(np.float64))).sum([1, 2, 3])
    return -sums / paddle.to_tensor(factors.sum((1, 2, 3)).clip(1e-12).astype(np.float64))


def with_gradient(function, x, dtype="float32"):
    """Returns the output of a function, and the gradient of its input."""
    x = paddle.to_tensor(x, dtype, stop_gradient=False)
    output = function(x)
    cotangent = np.random.default_rng(1).standard_normal(output.shape)
    gradient = paddle.grad([output], [x], [paddle.to_tensor(cotangent, output.dtype)])[0]
    return output.numpy(), gradient.numpy()


def assert_close(found, expected):
    for own, exact in zip(found, expected, strict=True):
        assert own.shape == exact.shape
        np.testing.assert_allclose(own, exact, rtol=0, atol=3e-6 * max(1, abs(exact).max()))


def logits_and_mask(classes, before, after, images=2):
    rng = np.random.default_rng(classes)
    logits = 4 * rng.standard_normal((images, classes, *before))
    mask = rng.integers(0, classes, (images, *after))
    mask[rng.random(mask.shape) < 0.2] = IGNORED
    mask[0, 0, 0] = 0
    mask[-1, -1, -1] = classes - 1
    return logits.astype(np.float32), mask.astype(np.uint8)


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_maps_and_their_gradients_are_those_of_float64(sizes, align_corners):
    before, after = SIZES[sizes]
    x = np.random.default_rng(0).standard_normal((2, 3, *before)).astype(np.float32)
    expected = with_gradient(lambda x: exactly_resized(x, after, align_corners), x, "float64")
    for threads in (1, 2):
        with threadpool_limits(threads):
            found = with_gradient(lambda x: ops.resize(x, after, align_corners), x)
        assert_close(found, expected)


def test_equal_values_stay_what_they_are():
    x = paddle.full([1, 1, 3, 5], 0.1)
    assert ops.resize(x, [7, 33], False).unique().tolist() == x.unique().tolist()


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("classes", [1, 2, 16, 37, 150])
@pytest.mark.parametrize("sizes", SIZES)
def test_losses_and_their_gradients_are_those_of_float64(sizes, classes, weighted, align_corners):
    logits, mask = logits_and_mask(classes, *SIZES[sizes])
    weight = np.float32(np.random.default_rng(2).random(classes) + 0.1) if weighted else None
    given = paddle.to_tensor(weight) if weighted else None
    found = with_gradient(
        lambda x: ops.pixel_loss(x, paddle.to_tensor(mask), IGNORED, given, align_corners), logits
    )
    expected = with_gradient(
        lambda x: exact_losses(x, mask, weight, align_corners), logits, "float64"
    )
    assert_close(found, expected)
    if classes > 1:
        # The gradients are small: each pixel has a share of them.
        assert abs(found[1] - expected[1]).max() < 1e-5 * abs(expected[1]).max()


@pytest.mark.parametrize("dtype", ["uint8", "int32", "int64"])
def test_a_mask_may_have_any_of_three_types(dtype):
    logits, mask = logits_and_mask(5, (4, 5), (9, 11))
    ignored = IGNORED if dtype == "uint8" else 65535
    other = np.where(mask == IGNORED, ignored, mask.astype(np.int64))
    found = ops.pixel_loss(paddle.to_tensor(logits), paddle.to_tensor(other, dtype), ignored)
    expected = exact_losses(paddle.to_tensor(logits), mask)
    np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-6)


def test_an_image_without_classes_has_no_loss_and_no_gradient():
    logits, mask = logits_and_mask(5, (4, 5), (9, 11))
    mask[1] = IGNORED
    losses, gradients = with_gradient(
        lambda x: ops.pixel_loss(x, paddle.to_tensor(mask), IGNORED), logits
    )
    assert losses[0] > 0
    assert losses[1] == 0
    assert abs(gradients[0]).max() > 0
    assert not gradients[1].any()


def test_the_bits_do_not_depend_on_the_number_of_threads():
    logits, mask = logits_and_mask(21, (37, 20), (148, 90))
    found = []
    for threads in (1, 2):
        with threadpool_limits(threads):
            found.append(
                with_gradient(lambda x: ops.pixel_loss(x, paddle.to_tensor(mask), IGNORED), logits)
            )
    for one, other in zip(*found, strict=True):
        assert np.array_equal(one, other)


def test_far_logits_are_not_cut_off():
    logits = paddle.to_tensor([1e4, 0.0, -1e4]).reshape([1, 3, 1, 1])
    mask = paddle.full([1, 2, 2], 2, "uint8")
    assert ops.pixel_loss(logits, mask, IGNORED).item() == 2e4
    assert ops.pixel_answers(logits, mask, IGNORED)[0].item() == 2e4


def test_what_is_no_number_shows_in_the_loss():
    logits, mask = logits_and_mask(3, (2, 2), (4, 4))
    logits[1, 2, 1, 1] = np.nan
    x = paddle.to_tensor(logits)
    losses = ops.pixel_loss(x, paddle.to_tensor(mask), IGNORED).numpy()
    others, answers = ops.pixel_answers(x, paddle.to_tensor(mask), IGNORED)
    for found in (losses, others.numpy()):
        assert np.isfinite(found[0])
        assert np.isnan(found[1])
    assert set(answers.flatten().tolist()) <= {0, 1, 2}


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_answers_are_the_largest_of_the_resized_logits(sizes, align_corners):
    before, after = SIZES[sizes]
    logits, mask = logits_and_mask(37, before, after)
    x = paddle.to_tensor(logits)
    for threads in (1, 2):
        with threadpool_limits(threads):
            losses, answers = ops.pixel_answers(x, paddle.to_tensor(mask), IGNORED, align_corners)
        assert np.array_equal(answers, ops.resize(x, after, align_corners).argmax(1))
        expected = exact_losses(x, mask, align_corners=align_corners).numpy()
        np.testing.assert_allclose(losses.numpy(), expected, rtol=2e-6)


def test_of_equal_logits_the_lowest_class_is_the_answer():
    logits = np.zeros((1, 40, 3, 3), np.float32)
    logits[:, [7, 20, 39]] = 0.3
    mask = paddle.zeros([1, 7, 150], "uint8")
    for size in ((3, 3), (7, 150)):
        maps = ops.resize(paddle.to_tensor(logits), size, False)
        assert (ops.pixel_answers(maps, mask, IGNORED)[1].numpy() == 7).all()


@pytest.mark.parametrize("function", [ops.pixel_loss, ops.pixel_answers])
@pytest.mark.parametrize("wrong", [3, 254])
def test_a_class_that_there_are_no_logits_of_is_refused(function, wrong):
    logits, mask = logits_and_mask(3, (4, 5), (9, 11))
    mask[1, 4, 7] = wrong
    with pytest.raises(Exception, match="a mask has a class that there are no logits of"):
        function(paddle.to_tensor(logits), paddle.to_tensor(mask), IGNORED)


@pytest.mark.parametrize(
    "call",
    [
        lambda: ops.resize(paddle.ones([2, 3, 4]), [5, 6], False),
        lambda: ops.resize(paddle.ones([2, 3, 4, 4]), [0, 6], False),
        lambda: ops.pixel_loss(paddle.ones([2, 3, 4, 4]), paddle.zeros([3, 8, 8], "uint8"), 255),
        lambda: ops.pixel_loss(paddle.ones([2, 3, 4, 4]), paddle.zeros([2, 8], "uint8"), 255),
        lambda: ops.pixel_loss(paddle.ones([2, 3, 4, 4]), paddle.zeros([2, 8, 8]), 255),
        lambda: ops.pixel_loss(
            paddle.ones([2, 3, 4, 4]), paddle.zeros([2, 8, 8], "uint8"), 255, paddle.ones([4])
        ),
        lambda: ops.pixel_answers(paddle.ones([2, 3, 4, 4]), paddle.zeros([1, 8, 8], "uint8"), 255),
    ],
)
def test_shapes_that_do_not_fit_are_refused(call):
    with pytest.raises(Exception, match="shapes don't fit"):
        call()


@pytest.mark.skipif(
    not hasattr(paddle.base.core, "host_memory_stat_reset_peak_value"),
    reason="this Paddle doesn't tell the peak of a part of a process",
)
def test_the_resized_logits_are_never_held():
    logits, mask = logits_and_mask(64, (32, 32), (256, 256), images=1)
    x = paddle.to_tensor(logits, stop_gradient=False)
    mask = paddle.to_tensor(mask)
    memory = paddle.base.core
    for function in (
        lambda: ops.pixel_loss(x, mask, IGNORED).backward(),
        lambda: ops.pixel_answers(x, mask, IGNORED),
    ):
        memory.host_memory_stat_reset_peak_value("Allocated", 0)
        before = memory.host_memory_stat_current_value("Allocated", 0)
        function()
        most = memory.host_memory_stat_peak_value("Allocated", 0) - before
        # float32 logits of all pixels have 16 MiB.
        assert most < 4 << 20


def test_losses_and_maps_are_the_same_without_the_operators():
    logits, mask = logits_and_mask(21, (7, 9), (23, 40))
    weight = paddle.to_tensor(np.float32(np.random.default_rng(2).random(21)))
    found = []
    for enabled in (True, False):
        ops.enable(enabled)
        of_all = with_gradient(
            lambda x: PixelLoss(weight=weight)(x, paddle.to_tensor(mask), IGNORED), logits
        )
        found.append([*of_all, resized(paddle.to_tensor(logits), [23, 40]).numpy()])
    for own, other in zip(*found, strict=True):
        np.testing.assert_allclose(own, other, rtol=0, atol=1e-5)


def test_answers_are_those_of_strips():
    logits, mask = logits_and_mask(21, (7, 9), (23, 40))
    x = paddle.to_tensor(logits)
    losses, answers = ops.pixel_answers(x, paddle.to_tensor(mask), IGNORED)
    others, other_losses = answers_of_strips(
        strips(x, (23, 40)), paddle.to_tensor(mask, "int64"), IGNORED
    )
    np.testing.assert_allclose(losses.numpy(), other_losses.numpy(), rtol=1e-5)
    assert (answers.numpy() == others.numpy()).all()
