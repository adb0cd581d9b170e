"""Losses, schedule and optimizer against formulas."""

import math

import numpy as np
import paddle
import pytest
from paddle import nn

from config import get_config
from losses import CrossEntropy, build_criterion
from models import create_model
from optim import build_optimizer, build_schedule, decayed_parameters, warmup_cosine


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_is_numpys_per_sample(smoothing):
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(6, 5)).astype(np.float32) * 3, rng.integers(0, 5, 6)
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    target = np.full((6, 5), smoothing / 5) + np.eye(5)[labels] * (1 - smoothing)
    criterion = build_criterion(get_config(None, ["TRAIN.SMOOTHING", str(smoothing)]))
    found = criterion(paddle.to_tensor(logits), paddle.to_tensor(labels))
    assert found.shape == [6]
    np.testing.assert_allclose(found.numpy(), -(target * log_p).sum(1), rtol=1e-5)
    half = CrossEntropy()(paddle.to_tensor(logits).astype("bfloat16"), paddle.to_tensor(labels))
    assert half.dtype == paddle.float32


def test_the_schedule_is_linear_then_a_cosine():
    rate = {update: warmup_cosine(update, 110, 10, 1.0, 0.1, 0.2) for update in range(111)}
    np.testing.assert_allclose([rate[u] for u in (0, 5, 10)], [0.1, 0.55, 1.0])
    np.testing.assert_allclose(rate[60], 0.6)  # half way down
    np.testing.assert_allclose(rate[35], 0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 4)))
    np.testing.assert_allclose(rate[110], 0.2)
    assert warmup_cosine(0, 10, 0, 1.0) == 1.0


def test_rates_scale_with_the_effective_batch_when_asked():
    options = ["TRAIN.BASE_LR", "0.1", "TRAIN.WARMUP_EPOCHS", "1", "TRAIN.NUM_EPOCHS", "3", "TRAIN.END_LR", "0.02"]
    plain = build_schedule(get_config(None, options), 10, 1024)
    scaled = build_schedule(get_config(None, [*options, "TRAIN.LINEAR_SCALED_LR", "256"]), 10, 1024)
    assert plain(10) == pytest.approx(0.1)
    for update in (0, 7, 10, 22, 30):
        assert scaled(update) == pytest.approx(4 * plain(update))


def test_weight_decay_leaves_biases_norms_and_embeddings_alone():
    model = create_model("vit_digits")
    decayed = decayed_parameters(model)
    assert len(decayed) == 2 + 4 * 4  # patch projection, head, and four matrices in each of four blocks
    assert not {"pos_embed", "cls_token", "norm.weight", "blocks.0.norm1.weight", "head.bias"} & set(decayed)
    optimizer = build_optimizer(get_config("vit_digits", ["TRAIN.WEIGHT_DECAY", "0.5", "TRAIN.BASE_LR", "0.1"]), model)
    before = {name: parameter.numpy().copy() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = paddle.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():  # with no gradient, decay is all that AdamW does
        factor = 1 - 0.1 * 0.5 if name in decayed else 1.0
        np.testing.assert_allclose(parameter.numpy(), before[name] * factor, rtol=1e-6, atol=1e-9, err_msg=name)


def test_adamw_is_the_papers():
    config = get_config(
        None, ["TRAIN.BASE_LR", "0.01", "TRAIN.WEIGHT_DECAY", "0.1", "TRAIN.OPTIMIZER.BETAS", "[0.8,0.9]"]
    )

    class Model(nn.Linear):
        def no_weight_decay(self):
            return set()

    model = Model(3, 2)
    w, m, v = model.weight.numpy().astype(np.float64), 0.0, 0.0
    optimizer = build_optimizer(config, model)
    for t in range(1, 5):
        g = np.random.default_rng(t).normal(size=(3, 2))
        (model.weight * paddle.to_tensor(g, dtype="float32")).sum().backward()
        optimizer.step()
        optimizer.clear_grad()
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
        w = w * (1 - 0.01 * 0.1)
        w -= 0.01 * (m / (1 - 0.8**t)) / (np.sqrt(v / (1 - 0.9**t)) + 1e-8)
    np.testing.assert_allclose(model.weight.numpy(), w, rtol=1e-5)
