"""The moving average against timm's."""

from pathlib import Path

import numpy as np
import paddle
import pytest
from golden.formula import array
from paddle import nn

from models import create_model
from optim import ModelEma

GOLDEN = np.load(Path(__file__).parent / "golden" / "ema.npz")


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
