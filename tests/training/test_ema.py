"""The moving average against timm's."""

from pathlib import Path

import numpy as np
import paddle
import pytest
from golden.formula import array
from paddle import nn

from models import create_model
from training.optim import ModelEma

GOLDEN = np.load(Path(__file__).parent.parent / "golden" / "ema.npz")


@pytest.mark.smoke
@pytest.mark.parametrize("warmup", [False, True])
def test_the_average_is_timms(warmup):
    model = nn.Linear(3, 2)

    def set_to(index):
        model.weight.set_value(array(f"weight{index}", (2, 3)).T)
        model.bias.set_value(array(f"bias{index}", (2,)))

    set_to(0)
    ema = ModelEma(model, 0.7, warmup)
    for update, expected in enumerate(GOLDEN["warmup" if warmup else "plain"]):
        set_to(update + 1)
        ema.update(model, update)
        found = np.concatenate([ema.model.weight.numpy().T.ravel(), ema.model.bias.numpy()])
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_the_average_shares_nothing_with_its_model():
    model = create_model("vit_digits")
    model.register_buffer("seen", paddle.to_tensor([1, 2]))
    model.train()
    ema = ModelEma(model, 0.5)
    before = model.head.weight.numpy().copy()
    images = paddle.rand([2, 1, 8, 8])
    model.eval()
    assert (ema.model(images) == model(images)).all()
    with paddle.no_grad():
        for parameter in model.parameters():
            parameter.scale_(3.0)
    model.seen.set_value(paddle.to_tensor([5, 6]))
    assert (ema.model.head.weight.numpy() == before).all()
    ema.update(model, 1)
    np.testing.assert_allclose(ema.model.head.weight.numpy(), 2 * before, rtol=1e-6)
    assert ema.model.seen.tolist() == [5, 6]
    assert (model.head.weight.numpy() == 3 * before).all()
    assert not ema.model.training
    assert all(parameter.stop_gradient for parameter in ema.model.parameters())
    assert not any(parameter.stop_gradient for parameter in model.parameters())


class Tied(nn.Layer):
    """A parameter of two names, a frozen one, and buffers of two kinds."""

    def __init__(self):
        super().__init__()
        self.one, self.frozen = nn.Linear(3, 3), nn.Linear(2, 2)
        self.other = nn.Linear(3, 3)
        self.other.weight = self.one.weight
        self.frozen.weight.stop_gradient = True
        self.register_buffer("mean", paddle.ones([3]))
        self.register_buffer("count", paddle.to_tensor([1]))

    def forward(self, x):
        return self.other(self.one(x))


def change(model, factor):
    for tensor in {id(tensor): tensor for tensor in model.state_dict().values()}.values():
        tensor.set_value((tensor.astype("float32") * factor + 1).astype(tensor.dtype))


@pytest.mark.parametrize("traced", [False, True])
def test_the_bits_are_those_of_lerp_and_a_tensor_of_two_names_is_averaged_once(traced):
    paddle.seed(0)
    model = Tied()
    ema = ModelEma(model, 0.9)
    if traced:
        paddle.jit.to_static(model, full_graph=True)(paddle.ones([1, 3]))
    expected = {name: tensor.clone() for name, tensor in ema.model.state_dict().items()}
    for update in range(4):
        change(model, 1.5)  # by set_value, as a resume does it
        ema.update(model, update)
        with paddle.no_grad():
            for name, new in model.state_dict().items():
                if new.is_floating_point():
                    expected[name].lerp_(new, 1 - ema.decay_at(update))
                else:
                    expected[name] = new.clone()
    assert ema.model.other.weight is ema.model.one.weight
    for name, tensor in ema.model.state_dict().items():
        np.testing.assert_array_equal(tensor.numpy(), expected[name].numpy(), err_msg=name)


def test_an_update_makes_one_tensor(counted_tensors):
    model = create_model("vit_digits")
    ema = ModelEma(model, 0.9)
    for update in range(3):
        with counted_tensors() as made:
            ema.update(model, update)
        assert made == ["full"]


def test_an_average_takes_in_another_model():
    first = create_model("vit_digits")
    second = create_model("vit_digits")
    ema = ModelEma(first, 0.5)
    ema.update(first, 0)
    ema.update(second, 1)
    mean = (first.head.weight.numpy() + second.head.weight.numpy()) / 2
    np.testing.assert_allclose(ema.model.head.weight.numpy(), mean, atol=1e-7)
