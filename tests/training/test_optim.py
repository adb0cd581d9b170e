"""Optimizers against torch and timm."""

from pathlib import Path

import numpy as np
import paddle
import pytest
from golden.formula import array
from golden.optim_problem import (
    BETAS,
    CASES,
    DECAYED,
    LATE,
    SCALES,
    SHAPES,
    STEPS,
    WEIGHT_DECAY,
    WEIGHT_DECAY_END,
    gradients,
    rate,
)
from paddle import nn
from support.optim_model import OPTIMIZER_CASES, PROBLEM, Small, with_options

from config import get_config
from errors import InputError
from settings.registry import optimizers
from training.optim import (
    adamw,
    build_optimizer,
    create_state,
    freeze,
    set_weight_decay,
    weight_decay_at,
)
from training.optim.adamw import AdamW
from training.optim.muon import orthogonalize
from training.optim.optimizer_base import WithMomentum

FOLDER = Path(__file__).parent.parent / "golden"
GOLDEN = np.load(FOLDER / "optim.npz")


def test_adamw_is_the_papers():
    config = get_config(
        None,
        [
            "TRAIN.BASE_LR",
            "0.01",
            "TRAIN.WEIGHT_DECAY",
            "0.1",
            "TRAIN.OPTIMIZER.BETAS",
            "[0.8,0.9]",
        ],
    )

    class Model(nn.Linear):
        def no_weight_decay(self):
            return set()

    model = Model(3, 2)
    w = model.weight.numpy().astype(np.float64)
    m = 0.0
    v = 0.0
    optimizer = build_optimizer(config, model)
    for t in range(1, 5):
        g = np.random.default_rng(t).normal(size=(3, 2))
        (model.weight * paddle.to_tensor(g, dtype="float32")).sum().backward()
        optimizer.step()
        optimizer.clear_grad()
        m = 0.8 * m + 0.2 * g
        v = 0.9 * v + 0.1 * g * g
        w = w * (1 - 0.01 * 0.1)
        w -= 0.01 * (m / (1 - 0.8**t)) / (np.sqrt(v / (1 - 0.9**t)) + 1e-8)
    np.testing.assert_allclose(model.weight.numpy(), w, rtol=1e-5)


def problem(case, model, *options):
    """The optimizer of a case of the golden file, over ``model``."""
    name, *nesterov = case.split()
    chosen = {"TRAIN.OPTIMIZER.NAME": name, "TRAIN.OPTIMIZER.NESTEROV": bool(nesterov)}
    return build_optimizer(
        with_options(PROBLEM | chosen | dict(zip(options[::2], options[1::2], strict=True))), model
    )


def run_steps(optimizer, model, steps, late=()):
    """Makes steps; a parameter in ``late`` has no gradient before its step."""
    for step in steps:
        optimizer.clear_grad(False)
        optimizer.set_lr(rate(step))
        model.set_gradients(gradients(step))
        for name, parameter in model.named_parameters():
            if name in late and step < late[name]:
                parameter.clear_gradient(False)
        optimizer.step()


def assert_reference(model, case):
    for name, found in model.arrays().items():
        expected = GOLDEN[f"{case}/{name}"]
        assert np.abs(expected - array(name, expected.shape)).max() > 1e-3  # it has moved
        assert np.abs(found - expected).max() < 1e-6 * np.abs(expected).max(), name


@pytest.mark.smoke
@pytest.mark.parametrize("case", CASES)
def test_ten_steps_are_the_references(case):
    model = Small()
    run_steps(problem(case, model), model, range(STEPS))
    assert_reference(model, case)


RISING = with_options(PROBLEM | {"TRAIN.WEIGHT_DECAY_END": WEIGHT_DECAY_END})


def run_rising(optimizer, model):
    """Makes the steps with a weight decay that goes from WEIGHT_DECAY to WEIGHT_DECAY_END."""
    for step in range(STEPS):
        set_weight_decay(optimizer, weight_decay_at(RISING, step / STEPS))
        run_steps(optimizer, model, [step])


@pytest.mark.smoke
@pytest.mark.parametrize("case", CASES)
def test_ten_steps_with_another_weight_decay_each_are_the_references(case):
    model = Small()
    run_rising(problem(case, model, "TRAIN.WEIGHT_DECAY_END", WEIGHT_DECAY_END), model)
    assert_reference(model, f"decay {case}")
    for name in DECAYED:  # and the decay's course is seen
        assert np.abs(GOLDEN[f"decay {case}/{name}"] - GOLDEN[f"{case}/{name}"]).max() > 1e-4


def test_the_weight_decays_course_is_dinos():
    """Its schedule is an array over all updates: cosine_scheduler(0.04, 0.4, epochs, updates)."""
    config = get_config(None, ["TRAIN.WEIGHT_DECAY", "0.04", "TRAIN.WEIGHT_DECAY_END", "0.4"])
    updates = np.arange(35)
    expected = 0.4 + 0.5 * (0.04 - 0.4) * (1 + np.cos(np.pi * updates / 35))
    found = [weight_decay_at(config, update / 35) for update in range(35)]
    np.testing.assert_allclose(found, expected, rtol=1e-14)
    assert found[0] == pytest.approx(0.04)
    assert weight_decay_at(config, 1.0) == 0.4
    assert weight_decay_at(get_config(None, ["TRAIN.WEIGHT_DECAY", "0.04"]), 0.7) == 0.04


def test_an_optimizer_whose_weight_decay_cannot_change_is_refused(monkeypatch):
    """One that a user wrote may keep its decay elsewhere."""

    def own(trained, **_):
        return WithMomentum(trained.rate, parameters=trained.parameters)

    problem("Lion", Small())  # which registers it
    monkeypatch.setitem(optimizers.registered, "Lion", (own, {}))
    problem("Lion", Small())
    with pytest.raises(
        InputError,
        match="TRAIN.WEIGHT_DECAY_END is 0.8, but the weight decay of Lion can't be changed"
        " during training; leave it out",
    ):
        problem("Lion", Small(), "TRAIN.WEIGHT_DECAY_END", WEIGHT_DECAY_END)


@pytest.mark.smoke
@pytest.mark.parametrize("case", CASES)
def test_parameters_whose_first_gradient_comes_late_are_the_references(case):
    """Neither moments nor weights change until then, and the correction of a bias begins there."""
    model = Small()
    optimizer = problem(case, model)
    create_state(optimizer)
    run_steps(optimizer, model, range(min(LATE.values())), LATE)
    start = array("fc.weight", SHAPES["fc.weight"])
    np.testing.assert_array_equal(model.arrays()["fc.weight"], start)
    run_steps(optimizer, model, range(min(LATE.values()), STEPS), LATE)
    assert_reference(model, f"late {case}")


@pytest.mark.smoke
@pytest.mark.parametrize("case", OPTIMIZER_CASES)
def test_the_state_that_is_made_ahead_has_the_bits_of_paddles(case):
    plain = Small()
    ahead = Small()
    others = problem(case, plain)
    run_steps(others, plain, range(5), LATE)
    optimizer = problem(case, ahead)
    create_state(optimizer)
    state = {
        (kind, name): tensor.numpy()
        for kind, tensors in optimizer._accumulators.items()
        for name, tensor in tensors.items()
    }
    # As many as after all parameters were updated, of zeros and the first powers of beta.
    assert len(state) == len(others.state_dict())
    for (kind, _), value in state.items():
        first = {"beta1_pow_acc": BETAS[0], "beta2_pow_acc": BETAS[1]}.get(kind, 0.0)
        np.testing.assert_array_equal(value, np.full_like(value, first))
    run_steps(optimizer, ahead, range(5), LATE)
    for name, expected in plain.arrays().items():
        np.testing.assert_array_equal(ahead.arrays()[name], expected, err_msg=name)


@pytest.mark.smoke
@pytest.mark.parametrize("case", OPTIMIZER_CASES)
def test_a_late_parameters_state_is_saved_before_its_first_gradient(case):
    straight = Small()
    first = Small()
    second = Small()
    run_steps(problem(case, straight), straight, range(6), LATE)
    saved = problem(case, first)
    create_state(saved)
    run_steps(saved, first, range(2), LATE)
    names = {p.name: q.name for p, q in zip(first.parameters(), second.parameters(), strict=True)}
    state = {}
    for key, value in saved.state_dict().items():
        (own,) = [name for name in names if key.startswith(f"{name}_")]
        state[names[own] + key[len(own) :]] = paddle.to_tensor(value.numpy())
    loaded = problem(case, second)
    loaded.set_state_dict(state)
    create_state(loaded)
    assert loaded.state_dict().keys() == state.keys()
    second.set_state_dict({name: p.clone() for name, p in first.state_dict().items()})
    run_steps(loaded, second, range(2, 6), LATE)
    for name, expected in straight.arrays().items():
        np.testing.assert_array_equal(second.arrays()[name], expected, err_msg=name)


def test_every_optimizer_has_a_reference():
    """LARS has a formula below: neither torch nor timm computes MAE's."""
    assert {*CASES, "LARS"} == set(OPTIMIZER_CASES)


def lars(steps, momentum=0.9, trust=0.001, zero=(), decay=lambda step: WEIGHT_DECAY):
    """The parameters after MAE's LARS (main_linprobe.py, util/lars.py), in float64; those in
    ``zero`` start at 0. A step's weight decay is ``decay(step)``.
    """
    arrays = {name: array(name, shape) * (name not in zero) for name, shape in SHAPES.items()}
    arrays = {name: value.astype(np.float64) for name, value in arrays.items()}
    sums = dict.fromkeys(arrays, 0.0)
    for step in range(steps):
        for name, gradient in gradients(step).items():
            value = arrays[name]
            size = np.linalg.norm
            update = gradient + decay(step) * value * (name in DECAYED)
            if value.ndim > 1 and size(value) > 0:
                update = update * (trust * size(value) / size(update))
            sums[name] = momentum * sums[name] + update
            arrays[name] = value - rate(step) * SCALES[name] * sums[name]
    return arrays


@pytest.mark.parametrize(
    ("momentum", "trust", "zero"), [(0.9, 0.001, ()), (0.5, 0.1, ("head.weight", "conv.bias"))]
)
def test_ten_steps_of_lars_are_maes(momentum, trust, zero):
    model = Small()
    for name, parameter in model.named_parameters():
        if name in zero:
            parameter.set_value(paddle.zeros_like(parameter))
    start = model.arrays()
    options = ["TRAIN.OPTIMIZER.MOMENTUM", momentum, "TRAIN.OPTIMIZER.TRUST_COEFFICIENT", trust]
    run_steps(problem("LARS", model, *options), model, range(STEPS))
    for name, expected in lars(STEPS, momentum, trust, zero).items():
        moved = np.abs(expected - start[name]).max()
        assert moved > 1e-5
        assert np.abs(model.arrays()[name] - expected).max() < 1e-6 * np.abs(expected).max(), name
        # the updates' norms are the parameters': the steps' too
        if trust == 0.001 and expected.ndim > 1:
            assert moved < 0.02, name


def test_ten_steps_of_lars_with_another_weight_decay_each_are_maes():
    model = Small()
    run_rising(problem("LARS", model, "TRAIN.OPTIMIZER.TRUST_COEFFICIENT", 0.1), model)
    expected = lars(STEPS, trust=0.1, decay=lambda step: weight_decay_at(RISING, step / STEPS))
    constant = lars(STEPS, trust=0.1)
    for name, found in model.arrays().items():
        assert np.abs(found - expected[name]).max() < 1e-6 * np.abs(expected[name]).max(), name
    for name in DECAYED:
        assert np.abs(constant[name] - expected[name]).max() > 1e-4


def test_lars_leaves_a_gradient_of_zero_alone():
    model = Small()
    optimizer = problem("LARS", model, "TRAIN.WEIGHT_DECAY", 0.0)
    model.set_gradients({name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()})
    optimizer.step()
    for name, found in model.arrays().items():
        np.testing.assert_array_equal(found, array(name, found.shape))


@pytest.mark.smoke
@pytest.mark.parametrize("case", OPTIMIZER_CASES)
def test_saved_state_goes_on_under_other_names_with_the_same_bits(case):
    straight = Small()
    first = Small()
    second = Small()
    run_steps(problem(case, straight), straight, range(6))
    saved = problem(case, first)
    run_steps(saved, first, range(3))
    names = {p.name: q.name for p, q in zip(first.parameters(), second.parameters(), strict=True)}
    state = {}
    # as a checkpoint does: each key starts with its parameter's name
    for key, value in saved.state_dict().items():
        (own,) = [name for name in names if key.startswith(f"{name}_")]
        state[names[own] + key[len(own) :]] = paddle.to_tensor(value.numpy())
    assert state.keys().isdisjoint(saved.state_dict())
    loaded = problem(case, second)
    loaded.set_state_dict(state)
    second.set_state_dict({name: p.clone() for name, p in first.state_dict().items()})
    run_steps(loaded, second, range(3, 6))
    for name, expected in straight.arrays().items():
        np.testing.assert_array_equal(second.arrays()[name], expected, err_msg=name)


@pytest.mark.parametrize("case", OPTIMIZER_CASES)
def test_frozen_parameters_stay_and_keep_no_state(case):
    model = Small()
    freeze(get_config(None, ["TRAIN.FREEZE", "['fc.*']"]), model)
    optimizer = problem(case, model)
    run_steps(optimizer, model, range(2))
    arrays = model.arrays()
    assert [n for n in arrays if np.array_equal(arrays[n], array(n, arrays[n].shape))] == [
        "fc.weight",
        "fc.bias",
    ]
    assert not [key for key in optimizer.state_dict() if key.startswith(model.fc.weight.name)]


@pytest.fixture
def fused(monkeypatch):
    """The numbers of parameters that each call of the operator for several updates."""
    assert adamw._fused_step_is_right(paddle.float32)  # which calls it once in a process
    sizes = []
    operator = paddle._C_ops.fused_adam_

    def call(parameters, *others):
        sizes.append(len(parameters))
        return operator(parameters, *others)

    monkeypatch.setattr(paddle._C_ops, "fused_adam_", call)
    return sizes


def adamw_of(cls, model):
    """AdamW of the problem, by Paddle's class or the toolkit's."""
    optimizer = problem("AdamW", model)
    if cls is AdamW:
        return optimizer
    keys = {"beta1": optimizer._beta1, "beta2": optimizer._beta2, "epsilon": optimizer._epsilon}
    keys |= {
        "weight_decay": WEIGHT_DECAY,
        "apply_decay_param_fun": optimizer._apply_decay_param_fun,
    }
    return cls(learning_rate=0.1, parameters=optimizer._parameter_list, **keys)


# Six groups: decayed or not, at each of three rates. Where another set of parameters has gradients
# than in the step before, the step is Paddle's. A bias that has missed an update is alone, until
# its like has missed one, too.
@pytest.mark.parametrize(
    ("without", "groups"),
    [
        ({}, [6] * 9),
        ({2: ["conv.bias"], 5: ["fc.weight", "embed"], 6: ["fc.weight"]}, [6, 7, 6, 6]),
    ],
)
def test_adamw_in_groups_has_the_bits_of_paddles(without, groups, fused):
    left = []
    for cls in (paddle.optimizer.AdamW, AdamW):
        model = Small()
        optimizer = adamw_of(cls, model)
        for step in range(10):
            optimizer.clear_grad()
            optimizer.set_lr(rate(step))
            model.set_gradients(gradients(step))
            for name, parameter in model.named_parameters():
                if name in without.get(step, ()):
                    parameter.clear_gradient(False)
            optimizer.step()
        names = {parameter.name: name for name, parameter in model.named_parameters()}
        state = {
            (kind, names[name]): t
            for kind, of in optimizer._accumulators.items()
            for name, t in of.items()
        }
        left.append(model.arrays() | {key: tensor.numpy() for key, tensor in state.items()})
    paddles, ours = left
    assert paddles.keys() == ours.keys()
    for key, value in paddles.items():
        np.testing.assert_array_equal(ours[key], value, err_msg=str(key))
    assert len(fused) == sum(groups)
    assert sorted(fused[:6]) == [1, 1, 1, 1, 1, 2]


def test_groups_are_made_anew_after_a_state_was_set(fused):
    model = Small()
    optimizer = problem("AdamW", model)
    run_steps(optimizer, model, range(3))
    state = {key: paddle.to_tensor(value.numpy()) for key, value in optimizer.state_dict().items()}
    late = model.fc.bias.name
    for kind, beta in (("beta1_pow_acc", BETAS[0]), ("beta2_pow_acc", BETAS[1])):
        state[optimizer._accumulators[kind][late].name] *= beta  # it has one update more
    optimizer.set_state_dict(state)
    fused.clear()
    run_steps(optimizer, model, range(3, 4))
    assert fused == []  # Paddle's own step
    run_steps(optimizer, model, range(4, 5))
    assert sorted(fused) == [1, 1, 1, 1, 1, 2]


@pytest.mark.parametrize("fault", ["other arguments", "updates not counted", "other values"])
def test_an_operator_that_is_not_as_expected_is_left_for_paddles_step(fused, monkeypatch, fault):
    operator = paddle._C_ops.fused_adam_

    def changed(parameters, *others):
        if fault == "other arguments":
            raise TypeError("fused_adam_(): takes others")
        powers = [kind for kind in others if isinstance(kind, list)][-2:]
        counted = [kind[0].clone() for kind in powers]
        operator(parameters, *others)
        if fault == "other values":
            parameters[0].scale_(2.0)
        else:
            for kind, before in zip(powers, counted, strict=True):
                paddle.assign(before, kind[0])

    monkeypatch.setattr(paddle._C_ops, "fused_adam_", changed)
    adamw._fused_step_is_right.cache_clear()
    assert not adamw._fused_step_is_right(paddle.float32)
    fused.clear()
    model = Small()
    run_steps(problem("AdamW", model), model, range(3))
    assert fused == []  # Paddle's own step
    adamw._fused_step_is_right.cache_clear()


def test_gradients_that_a_gpu_could_not_read_in_fours_are_left_to_paddle(fused, monkeypatch):
    model = Small()
    optimizer = problem("AdamW", model)
    run_steps(optimizer, model, range(2))
    fused.clear()
    monkeypatch.setattr(paddle.Tensor, "data_ptr", lambda tensor: 4)
    run_steps(optimizer, model, range(2, 4))
    assert fused == []


@pytest.mark.parametrize("case", OPTIMIZER_CASES)
def test_a_step_makes_no_tensor_of_a_number(case, counted_tensors):
    model = Small()
    optimizer = problem(case, model)
    run_steps(optimizer, model, range(2))
    with counted_tensors() as made:
        optimizer.step()
    assert made == []


def test_an_optimizer_built_again_leaves_nothing_of_the_last():
    model = Small()
    fresh = Small()
    problem("SGD", model)  # which leaves an L2 term and factors on the parameters
    plain = ["TRAIN.LAYER_DECAY", "None", "TRAIN.HEAD_LR", "1"]
    for one in (model, fresh):
        run_steps(problem("AdamW", one, *plain), one, range(2))
    for name, expected in fresh.arrays().items():
        np.testing.assert_array_equal(model.arrays()[name], expected)


def test_lions_momentum_keeps_the_shares_that_are_asked():
    model = Small()
    optimizer = problem(
        "Lion", model, "TRAIN.OPTIMIZER.BETAS", [0.3, 0.4], "TRAIN.WEIGHT_DECAY", 0.0
    )
    value = array("fc.weight", SHAPES["fc.weight"])
    momentum = 0.0
    for step in range(3):
        run_steps(optimizer, model, [step])
        gradient = gradients(step)["fc.weight"]
        value = value - rate(step) * SCALES["fc.weight"] * np.sign(0.3 * momentum + 0.7 * gradient)
        momentum = 0.4 * momentum + 0.6 * gradient
    np.testing.assert_allclose(model.arrays()["fc.weight"], value, rtol=1e-5, atol=1e-7)


def test_muons_momentum_keeps_the_share_that_is_asked():
    model = Small()
    optimizer = problem("Muon", model, "TRAIN.OPTIMIZER.MOMENTUM", 0.3)
    run_steps(optimizer, model, range(2))
    found = optimizer._accumulators["momentum"][model.fc.weight.name].numpy().T
    first, second = (gradients(step)["fc.weight"] for step in range(2))
    np.testing.assert_allclose(found, 0.3 * 0.7 * first + 0.7 * second, rtol=1e-5, atol=1e-7)


def test_the_muon_update_is_nearly_orthogonal():
    for shape in ((8, 30), (30, 8)):
        matrix = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        u, _, v = np.linalg.svd(matrix, full_matrices=False)
        found = orthogonalize(paddle.to_tensor(matrix)).numpy()
        singular = np.diag(u.T @ found @ v.T)
        assert 0.6 < singular.min() < singular.max() < 1.25
        np.testing.assert_allclose(found, (u * singular) @ v, atol=1e-5)  # the same directions


class TwoAccumulators(WithMomentum):
    """Adam without bias correction, whose buffers have names of their own."""

    accumulators = ("mean", "square")

    def update(self, parameter, gradient, mean, square, rate):
        mean.scale_(0.5)
        mean.add_(gradient)
        square.scale_(0.25)
        square.add_(gradient * gradient)
        parameter.subtract_(rate * mean / (square.sqrt() + 1))


def test_an_optimizer_declares_its_accumulators():
    first = nn.Linear(3, 2)
    second = nn.Linear(3, 2)
    start = first.weight.numpy().astype(np.float64)
    second.set_state_dict(first.state_dict())

    def step(optimizer, model, number):
        gradient = array(f"gradient {number}", (3, 2))
        model.weight.grad = paddle.to_tensor(gradient)
        optimizer.step()
        return gradient

    saved = TwoAccumulators(0.1, [first.weight])
    mean = square = 0.0
    value = start
    for number in range(2):
        gradient = step(saved, first, number)
        mean = 0.5 * mean + gradient
        square = 0.25 * square + gradient * gradient
        value = value - 0.1 * mean / (np.sqrt(square) + 1)
    np.testing.assert_allclose(first.weight.numpy(), value, rtol=1e-6)
    state = saved.state_dict()
    assert [key for key in state if key.startswith(first.weight.name)] == [
        f"{first.weight.name}_mean_0",
        f"{first.weight.name}_square_0",
    ]

    # From its state, the third step has the same bits.
    renamed = {
        key.replace(first.weight.name, second.weight.name): paddle.to_tensor(tensor.numpy())
        for key, tensor in state.items()
        if key.startswith(first.weight.name)
    }
    second.weight.set_value(first.weight)
    loaded = TwoAccumulators(0.1, [second.weight])
    loaded.set_state_dict(renamed)
    step(saved, first, 2)
    step(loaded, second, 2)
    np.testing.assert_array_equal(first.weight.numpy(), second.weight.numpy())
