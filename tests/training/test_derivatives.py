"""Every operator that training differentiates, at corners, ties and ends: values and gradients are
torch's.

Its rows are in golden/derivative_points.py, its figures in golden/make_derivatives.py. Whoever uses
another operator with such points in training adds a row.
"""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from golden.derivative_points import EQUAL_ROWS, MASK, POINTS, TARGETS, out_gradient
from paddle.nn import functional as F

import ops
from models.layers import LayerNorm
from models.layers.activations import (
    GELU,
    Hardswish,
    QuickGELU,
    ReLU,
    SiLU,
    TanhGELU,
    gelu,
    relu,
    silu,
    softmax,
)
from models.layers.attention import attend_heads, l2_normalize
from models.layers.batch_norm import BatchNorm2D
from models.layers.classifier_norm import ClassifierNorm
from models.layers.conv import MaxPool2D
from models.layers.differential import RMSNorm
from models.layers.grn import GlobalResponseNorm
from models.layers.group_norm import GroupNorm
from models.layers.mlp import Mlp, StarReLU
from models.layers.swiglu import swiglu
from models.layers.units import pool_units
from models.poolformer import Pooling
from models.swinv2 import WindowAttention
from models.volo import VOLO
from training.feature_distillation import BETA
from training.losses import (
    Asymmetric,
    BinaryCrossEntropy,
    CrossEntropy,
    Focal,
    SoftTargetCrossEntropy,
    TrainingLoss,
)
from training.losses.softmax import log_softmax

GOLDEN = np.load(Path(__file__).parent.with_name("golden") / "derivatives.npz")
ANSWERS = paddle.to_tensor(TARGETS)


def labels(logits):
    return paddle.arange(len(logits)) % logits.shape[1]


def of(criterion, targets=ANSWERS):
    return lambda x: criterion(x, targets(x) if callable(targets) else targets)


def distil(found, wanted):
    return TrainingLoss(CrossEntropy(), lambda _: wanted.detach(), "soft", 1.0, 2.0)(
        None, found, labels(found)
    )


def layer_norm(frozen=False):
    norm = LayerNorm(4, epsilon=1e-6)
    norm.weight.set_value(paddle.full([4], 2.0))
    norm.weight.stop_gradient = norm.bias.stop_gradient = frozen
    return norm


def mlp(x):
    layer = Mlp(1, 1)
    for linear in (layer.fc1, layer.fc2):
        linear.weight.set_value(paddle.ones([1, 1]))
    return layer(x)


def response_norm(x, channels_first):
    norm = GlobalResponseNorm(x.shape[1 if channels_first else -1], channels_first)
    norm.weight.set_value(paddle.ones_like(norm.weight))
    return norm(x)


def evaluated(x):
    norm = BatchNorm2D(2)
    norm.eval()
    return norm(x, relu)


def first_of_the_largest(x):
    """VOLO's logits of a token and of the patches after it."""
    model = SimpleNamespace(head=lambda x: x, aux_head=lambda x: x, num_classes=6, training=True)
    return VOLO.forward_head(model, x)


def attention(scale=0.5, mask=None):
    mask = None if mask is None else paddle.to_tensor(mask)
    return lambda q, k, v: attend_heads([q, k, v], 1, 4, scale, mask=mask)


OPERATORS = {
    "relu": ReLU(),
    "gelu": GELU(),
    "gelu_tanh": TanhGELU(),
    "quick_gelu": QuickGELU(),
    "silu": SiLU(),
    "hardswish": Hardswish(),
    "sigmoid": F.sigmoid,
    "star_relu": StarReLU(),
    "swiglu": swiglu,
    "swiglu, packed": swiglu,
    "mlp": mlp,
    "exp": paddle.exp,
    "logit scale": lambda x: WindowAttention._scale(SimpleNamespace(logit_scale=x)),
    "softmax": softmax,
    "softmax, masked": softmax,
    "log_softmax": log_softmax,
    "cross_entropy": of(CrossEntropy(), labels),
    "cross_entropy, smoothed": of(CrossEntropy(0.1), labels),
    "soft_target": of(
        SoftTargetCrossEntropy(), lambda x: paddle.to_tensor([[0.1, 0.2, 0.3, 0.4]]).expand(x.shape)
    ),
    "distillation": distil,
    "bce": of(BinaryCrossEntropy(), paddle.zeros_like),
    "bce, soft": of(BinaryCrossEntropy()),
    "bce, pos_weight": of(BinaryCrossEntropy(pos_weight=[3.0])),
    "focal": of(Focal(0.0, 2.0, 0.25)),
    "focal, gamma 0.5": of(Focal(0.0, 0.5, None)),
    "focal, gamma 0": of(Focal(0.0, 0.0, None)),
    "asymmetric": of(Asymmetric(0.0, 4, 1, 0.05)),
    "asymmetric, plain": of(Asymmetric(0.0, 0, 0, 0)),
    "smooth_l1": lambda x: F.smooth_l1_loss(x, paddle.zeros_like(x), reduction="none", delta=BETA)
    / BETA,
    "max_pool, 2": MaxPool2D(2, 2),
    "max_pool, 3": MaxPool2D(3, 2, 1),
    "pooling": Pooling(),
    "the first of the largest": first_of_the_largest,
    "layer_norm": layer_norm(),
    "layer_norm, frozen": layer_norm(frozen=True),
    "group_norm": GroupNorm(2, 4),
    "batch_norm": BatchNorm2D(2),
    "batch_norm, relu": lambda x: BatchNorm2D(2)(x, relu),
    "batch_norm, gelu": lambda x: BatchNorm2D(2)(x, gelu),
    "batch_norm, silu": lambda x: BatchNorm2D(2)(x, silu),
    "batch_norm, evaluated": evaluated,
    "classifier_norm": ClassifierNorm(4),
    "rms_norm": RMSNorm(4, 1e-5),
    "response_norm": lambda x: response_norm(x, channels_first=False),
    "response_norm, channels first": lambda x: response_norm(x, channels_first=True),
    "unit": l2_normalize,
    "attention": attention(),
    "attention, masked": attention(mask=MASK),
    "attention, cosine": attention(scale=paddle.full([1, 1, 1], 10.0)),
}


@pytest.fixture(params=["compiled", "Paddle's"])
def operators(request):
    """A test has the compiled operators, and Paddle's."""
    if request.param == "compiled":
        request.getfixturevalue("compiled_operators")
    ops.enable(request.param == "compiled")
    yield
    ops.enable(True)


def test_every_row_has_an_operator():
    assert list(OPERATORS) == list(POINTS)


@pytest.mark.smoke
@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("name", POINTS)
def test_values_and_gradients_are_torchs(name):
    inputs = [paddle.to_tensor(points, stop_gradient=False) for points in POINTS[name]]
    value = OPERATORS[name](*inputs)
    value.backward(paddle.to_tensor(out_gradient(value.shape)))
    found = {"value": value} | {str(place): one.grad for place, one in enumerate(inputs)}
    for key, array in found.items():
        wanted = GOLDEN[f"{name}/{key}"].astype(np.float32)
        array = np.zeros_like(wanted) if array is None else array.numpy()
        np.testing.assert_allclose(array, wanted, rtol=2e-5, atol=2e-6, err_msg=f"{name}, {key}")


@pytest.mark.smoke
@pytest.mark.usefixtures("operators")
def test_equal_largest_ones_of_a_mask_unit_have_one_gradient_together():
    """PyTorch's ``max`` gives it to one of them; so does Paddle 2.6. Others share it."""
    x = paddle.to_tensor(EQUAL_ROWS.reshape(1, -1, 1), stop_gradient=False)
    pooled = pool_units(x.reshape([6, 4, 1]), 4)
    pooled.backward(paddle.ones_like(pooled))
    shares = x.grad.numpy().reshape(6, 4)
    largest = EQUAL_ROWS.max(1, keepdims=True) == EQUAL_ROWS
    np.testing.assert_allclose(shares.sum(1), 1)
    assert (shares >= 0).all()
    assert (shares[~largest] == 0).all()


@pytest.mark.smoke
@pytest.mark.usefixtures("operators")
def test_queries_of_zeros_have_a_cosine_of_0_and_no_gradient():
    """PyTorch's gradient is 1e12 times the output's: see ``models.layers.attention.l2_normalize``."""
    x = paddle.to_tensor([[[0.0, 0, 0, 0], [1, 2, 3, 4]]], stop_gradient=False)
    attend_heads([x, x, x.detach()], 1, 4, paddle.full([1, 1, 1], 10.0)).sum().backward()
    assert (x.grad.numpy()[0, 0] == 0).all()
    assert np.isfinite(x.grad.numpy()).all()
