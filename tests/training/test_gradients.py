"""Clipping against torch and timm, the loss scaler against torch's, alone and on two ranks."""

from pathlib import Path

import numpy as np
import paddle
import pytest
from golden.optim_problem import CLIPS, OVERFLOWS, SHAPES, gradients
from paddle import nn
from support.optim_model import Small
from support.ranks import run_ranks

from config import get_config, with_values
from errors import RunError
from training.optim import LossScaler, build_optimizer, clip_gradients

GOLDEN = np.load(Path(__file__).parent.parent / "golden" / "optim.npz")


def gradient(parameter):
    return parameter.grad


@pytest.mark.smoke
@pytest.mark.parametrize("mode", CLIPS)
def test_clipping_is_torchs_and_timms(mode):
    model = Small()
    model.set_gradients(gradients(0))
    options = ["TRAIN.GRAD_CLIP", str(CLIPS[mode]), "TRAIN.GRAD_CLIP_MODE", mode]
    norm = clip_gradients(get_config(None, options), model)
    assert norm.shape == []
    assert norm.item() == pytest.approx(GOLDEN["norm"].item(), rel=1e-6)  # before clipping
    for name, found in model.arrays(gradient).items():
        np.testing.assert_allclose(
            found, GOLDEN[f"{mode}/{name}"], rtol=2e-6, atol=1e-9, err_msg=name
        )


@pytest.mark.parametrize(
    ("limit", "mode"),
    [(None, "norm"), (1e3, "norm"), (1e3, "parameter"), (1e3, "value"), (1e3, "agc")],
)
def test_gradients_within_the_limit_keep_their_bits(limit, mode):
    model = Small()
    model.set_gradients(gradients(0))
    clip_gradients(
        with_values(get_config(), TRAIN__GRAD_CLIP=limit, TRAIN__GRAD_CLIP_MODE=mode), model
    )
    for name, found in model.arrays(gradient).items():
        np.testing.assert_array_equal(found, gradients(0)[name], err_msg=name)


@pytest.mark.parametrize("mode", CLIPS)
def test_parameters_without_a_gradient_are_passed_over(mode):
    model = Small()
    model.fc.weight.stop_gradient = True
    model.set_gradients(gradients(0))
    model.conv.bias.clear_gradient(False)  # trained, and not used in this update
    norm = clip_gradients(
        get_config(None, ["TRAIN.GRAD_CLIP", "0.01", "TRAIN.GRAD_CLIP_MODE", mode]), model
    )
    rest = [g for name, g in gradients(0).items() if name not in ("fc.weight", "conv.bias")]
    assert norm.item() == pytest.approx(np.sqrt(sum((g**2).sum() for g in rest)), rel=1e-6)


def test_each_parameter_is_clipped_by_its_own_norm():
    model = Small()
    model.set_gradients(gradients(0))
    limit = CLIPS["parameter"]
    clip_gradients(
        get_config(None, ["TRAIN.GRAD_CLIP", str(limit), "TRAIN.GRAD_CLIP_MODE", "parameter"]),
        model,
    )
    clipped = []
    for name, found in model.arrays(gradient).items():
        before = np.linalg.norm(gradients(0)[name])
        assert np.linalg.norm(found) == pytest.approx(min(before, limit), rel=1e-5), name
        if before > limit:
            clipped.append(name)
        else:
            np.testing.assert_array_equal(found, gradients(0)[name], err_msg=name)
    assert 0 < len(clipped) < len(SHAPES)


def test_ranks_that_share_out_gradients_add_squares_parameter_by_parameter(monkeypatch):
    model = Small()
    seen = []
    model.set_gradients(gradients(0))
    model.conv.bias.clear_gradient(False)  # its owner has it
    monkeypatch.setattr(
        "training.optim.gradients.all_reduce_sum",
        lambda squares: (seen.append(squares), 4 * squares)[1],
    )
    alone = clip_gradients(get_config(), model)
    config = with_values(get_config(), DIST__ENGINE="fleet", DIST__STRATEGY__sharding=True)
    assert clip_gradients(config, model).item() == pytest.approx(2 * alone.item(), rel=1e-6)
    expected = [
        0 if name == "conv.bias" else (gradients(0)[name] ** 2).sum()
        for name, _ in model.named_parameters()
    ]
    np.testing.assert_allclose(seen[0].numpy(), expected, rtol=1e-6)


def test_the_norm_of_many_small_gradients_is_exact():
    layer = nn.Linear(2000, 500)
    value = np.random.default_rng(0).normal(size=(2000, 500)).astype(np.float32)
    layer.weight.grad = paddle.to_tensor(value)
    exact = np.sqrt((value.astype(np.float64) ** 2).sum())
    assert clip_gradients(get_config(None), layer).item() == pytest.approx(exact, rel=1e-6)


def strided_gradients():
    """A parameter whose gradient is a view of other strides, and one whose gradient is plain; the
    values of both.
    """
    parameters = [paddle.create_parameter(shape, "float32") for shape in ([4, 6], [3])]
    value = np.arange(24.0)
    wanted = paddle.to_tensor(value.reshape(6, 4), dtype="float32")
    ((parameters[0].t() * wanted).sum() + parameters[1].sum()).backward()
    return parameters, [value.reshape(6, 4).T, np.ones(3)]


@pytest.fixture
def views():
    """A transposed tensor is a view, which it isn't after a test that set this process's flags for
    speed.
    """
    before = paddle.get_flags("FLAGS_use_stride_kernel")
    paddle.set_flags({"FLAGS_use_stride_kernel": True})
    yield
    paddle.set_flags(before)


def test_gradients_of_other_strides_are_measured_and_scaled(views):
    (strided, plain), values = strided_gradients()
    assert not strided.grad.is_contiguous()
    LossScaler(scale=4.0).unscale([strided, plain])
    np.testing.assert_array_equal(strided.grad.numpy(), values[0] / 4)
    np.testing.assert_array_equal(plain.grad.numpy(), values[1] / 4)
    layer = nn.Layer()
    layer.strided = strided
    layer.plain = plain
    exact = np.sqrt(sum((value**2).sum() for value in values)) / 4
    assert clip_gradients(
        get_config(None, ["TRAIN.GRAD_CLIP", "0.5"]), layer
    ).item() == pytest.approx(exact, rel=1e-6)
    np.testing.assert_allclose(strided.grad.numpy(), values[0] / 4 * 0.5 / exact, rtol=1e-6)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_gradient_that_is_not_finite_shows_in_the_norm_after_scaling(bad):
    for place in ("embed", "head.bias"):
        model = Small()
        values = dict(gradients(0))
        values[place] = np.full_like(values[place], bad)
        model.set_gradients(values)
        LossScaler().unscale(model.parameters())
        norm = clip_gradients(get_config(None, ["TRAIN.GRAD_CLIP", "0.5"]), model).item()
        assert not np.isfinite(norm)


def test_all_gradients_are_scaled_by_one_operator(monkeypatch, counted_tensors):
    called = []
    scale = paddle._C_ops.check_finite_and_unscale_
    monkeypatch.setattr(
        paddle._C_ops,
        "check_finite_and_unscale_",
        lambda xs, by: (called.append(len(xs)), scale(xs, by))[1],
    )
    model = Small()
    model.set_gradients(gradients(0))
    with counted_tensors() as made:
        LossScaler().unscale(model.parameters())
        clip_gradients(get_config(None, ["TRAIN.GRAD_CLIP", "0.5"]), model)
    assert called == [7, 7]
    assert made == ["full", "zeros"]


# ------------------------------------------------------------------ the scaler


def update(scaler, optimizer, parameter, factor=1.0):
    """One update with a gradient of ``factor``; returns whether it was done."""
    scaler.scale((parameter * factor).sum()).backward()
    scaler.unscale([parameter])
    done = scaler.step(optimizer, parameter.grad.square().sum().sqrt())
    optimizer.clear_grad()
    return done


def weight_and_sgd():
    layer = nn.Linear(1, 1, bias_attr=False)
    layer.weight.set_value(np.ones([1, 1], np.float32))
    return layer.weight, paddle.optimizer.SGD(0.25, [layer.weight])


@pytest.mark.smoke
def test_the_scale_grows_and_falls_as_torchs():
    weight, optimizer = weight_and_sgd()
    scaler = LossScaler(growth_interval=3)
    scales = []
    assert (scaler.loss_scale, LossScaler().growth_interval) == (65536, 2000)
    for overflow in OVERFLOWS:
        before = weight.item()
        assert update(scaler, optimizer, weight, np.inf if overflow else 1.0) is not overflow
        # a power of two scales without rounding
        assert weight.item() == (before if overflow else before - 0.25)
        scales.append(scaler.loss_scale)
    np.testing.assert_array_equal(scales, GOLDEN["loss_scales"])


def test_a_scaler_goes_on_where_it_was_saved():
    weight, optimizer = weight_and_sgd()
    straight = LossScaler(growth_interval=3)
    scales = []
    for overflow in OVERFLOWS:
        resumed = LossScaler(growth_interval=3)
        resumed.load_state_dict(straight.state_dict())
        for scaler in (straight, resumed):
            update(scaler, optimizer, weight, np.nan if overflow else 1.0)
        assert resumed.state_dict() == straight.state_dict()
        scales.append(straight.state_dict()["good_updates"])
    assert 2 in scales  # it was saved half way to a growth


def test_a_scaler_that_is_off_passes_everything_on():
    weight, optimizer = weight_and_sgd()
    # a norm that it can't look at
    scaler = LossScaler(enabled=False)
    loss = (weight * 3).sum()
    norm = object()
    assert scaler.scale(loss) is loss
    loss.backward()
    scaler.unscale([weight])
    assert weight.grad.item() == 3
    assert scaler.step(optimizer, norm)
    assert weight.item() == 1 - 0.25 * 3


def test_gradients_that_are_never_finite_end_the_run():
    weight, optimizer = weight_and_sgd()
    scaler = LossScaler()
    skipped = 0
    with pytest.raises(
        RunError, match="gradients aren't finite in float16 at a loss scale of 0.00012; lower"
    ) as error:
        while not update(scaler, optimizer, weight, np.nan):
            skipped += 1
    assert (skipped, error.value.shared, weight.item()) == (29, True, 1)


def test_the_scale_stays_a_float32():
    weight, optimizer = weight_and_sgd()
    scaler = LossScaler(scale=2.0**126, growth_interval=1)
    scales = []
    for _ in range(3):
        assert update(scaler, optimizer, weight, 2.0**-100)
        scales.append(scaler.loss_scale)
    assert scales == [2.0**127] * 3


def overflowing_updates():
    """Three updates on this rank's data; the second overflows on rank 1 alone. Returns what each
    left.
    """
    import utils

    model = Small()
    network = paddle.DataParallel(model.fc)
    config = get_config(None, ["TRAIN.BASE_LR", "0.1", "TRAIN.GRAD_CLIP", "1.0"])
    optimizer = build_optimizer(config, model)
    scaler = LossScaler()
    left = []
    for step in range(3):
        images = np.random.default_rng([step, utils.rank()]).normal(size=(4, 5)).astype(np.float32)
        if step == 1 and utils.rank() == 1:
            images[2, 3] = np.inf
        scaler.scale(network(paddle.to_tensor(images)).square().mean()).backward()
        scaler.unscale(model.parameters())
        done = scaler.step(optimizer, clip_gradients(config, model))
        optimizer.clear_grad()
        left.append((done, scaler.loss_scale, model.fc.weight.numpy().copy()))
    return left


def test_an_overflow_on_one_rank_skips_the_update_on_all():
    first, second = run_ranks(overflowing_updates)
    assert [row[:2] for row in first] == [row[:2] for row in second]
    assert [row[:2] for row in first] == [(True, 65536), (False, 32768), (True, 32768)]
    weights = [row[2] for row in first]
    for mine, theirs in zip(weights, [row[2] for row in second], strict=True):
        np.testing.assert_array_equal(mine, theirs)
    np.testing.assert_array_equal(weights[1], weights[0])
    assert np.isfinite(weights[2]).all()
    assert np.abs(weights[2] - weights[1]).min() > 0
