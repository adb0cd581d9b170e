"""Writes derivatives.npz beside this file: torch's values and gradients at corners, ties and ends,
in float64 (made with timm 1.0.31, torch 2.13.0).

PYTHONPATH=.:tests python tests/golden/make_derivatives.py
"""

import sys
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from golden.derivative_points import LIMIT, MASK, POINTS, TARGETS, out_gradient

# torchvision's operators don't load beside a CPU torch
for name in ("_meta_registrations", "_autograd_registrations"):
    sys.modules[f"torchvision.{name}"] = types.ModuleType(f"torchvision.{name}")
from timm.layers.grn import GlobalResponseNorm  # noqa: E402
from timm.loss import AsymmetricLossMultiLabel  # noqa: E402
from torchvision.ops import sigmoid_focal_loss  # noqa: E402

targets = torch.from_numpy(TARGETS).double()
soft = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)


def labels(logits: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(logits)) % logits.shape[1]


def distillation(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    found, wanted = ((x / 2).log_softmax(-1) for x in (found, wanted.detach()))
    return F.kl_div(found, wanted, reduction="none", log_target=True).sum(-1) * 4 / found.shape[-1]


def asymmetric(*settings: float) -> Callable:
    loss = AsymmetricLossMultiLabel(*settings)
    return lambda x: torch.stack([loss(x[i : i + 1], targets[i : i + 1]) for i in range(len(x))])


def response_norm(x: torch.Tensor, channels_last: bool = True) -> torch.Tensor:
    norm = GlobalResponseNorm(
        x.shape[-1 if channels_last else 1], channels_last=channels_last
    ).double()
    torch.nn.init.ones_(norm.weight)
    return norm(x)


def attention(cosine: bool = False, mask: torch.Tensor | None = None) -> Callable:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if cosine:
            q = F.normalize(q, dim=-1)
            k = F.normalize(k, dim=-1)
        scores = q @ k.transpose(1, 2) * (10 if cosine else 0.5)
        return (scores if mask is None else scores + mask).softmax(-1) @ v

    return attend


def bce(x: torch.Tensor, answers: torch.Tensor, factor: float | None = None) -> torch.Tensor:
    factor = None if factor is None else torch.tensor([factor], dtype=torch.float64)
    return F.binary_cross_entropy_with_logits(x, answers, reduction="none", pos_weight=factor).mean(
        -1
    )


FUNCTIONS: dict[str, Callable] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "hardswish": F.hardswish,
    "sigmoid": torch.sigmoid,
    "star_relu": lambda x: F.relu(x) ** 2,
    "swiglu": lambda gate, x: F.silu(gate) * x,
    "swiglu, packed": lambda x: F.silu(x[:, :1]) * x[:, 1:],
    "mlp": F.gelu,
    "exp": torch.exp,
    "logit scale": lambda x: x.clamp(max=float(LIMIT)).exp(),
    "softmax": lambda x: x.softmax(-1),
    "softmax, masked": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "cross_entropy": lambda x: F.cross_entropy(x, labels(x), reduction="none"),
    "cross_entropy, smoothed": lambda x: F.cross_entropy(
        x, labels(x), reduction="none", label_smoothing=0.1
    ),
    "soft_target": lambda x: F.cross_entropy(x, soft.expand_as(x), reduction="none"),
    "distillation": distillation,
    "bce": lambda x: bce(x, torch.zeros_like(x)),
    "bce, soft": lambda x: bce(x, targets),
    "bce, pos_weight": lambda x: bce(x, targets, 3.0),
    "focal": lambda x: sigmoid_focal_loss(x, targets, 0.25, 2).mean(-1),
    "focal, gamma 0.5": lambda x: sigmoid_focal_loss(x, targets, -1, 0.5).mean(-1),
    "focal, gamma 0": lambda x: sigmoid_focal_loss(x, targets, -1, 0).mean(-1),
    "asymmetric": asymmetric(4, 1, 0.05),
    "asymmetric, plain": asymmetric(0, 0, 0),
    "smooth_l1": lambda x: F.smooth_l1_loss(x, torch.zeros_like(x), reduction="none", beta=2.0),
    "max_pool, 2": lambda x: F.max_pool2d(x, 2),
    "max_pool, 3": lambda x: F.max_pool2d(x, 3, 2, 1),
    "pooling": lambda x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False) - x,
    "the first of the largest": lambda x: x[:, 0] + 0.5 * x[:, 1:].max(1)[0],
    "layer_norm": lambda x: F.layer_norm(x, [4], eps=1e-6) * 2,
    "layer_norm, frozen": lambda x: F.layer_norm(x, [4], eps=1e-6) * 2,
    "group_norm": lambda x: F.group_norm(x, 2),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "batch_norm, relu": lambda x: F.relu(F.batch_norm(x, None, None, training=True)),
    "batch_norm, gelu": lambda x: F.gelu(F.batch_norm(x, None, None, training=True)),
    "batch_norm, silu": lambda x: F.silu(F.batch_norm(x, None, None, training=True)),
    "batch_norm, evaluated": lambda x: F.relu(x / (1 + 1e-5) ** 0.5),
    "classifier_norm": lambda x: F.batch_norm(x, None, None, training=True, eps=1e-6),
    "rms_norm": lambda x: F.rms_norm(x, [4], eps=1e-5),
    "response_norm": response_norm,
    "response_norm, channels first": lambda x: response_norm(x, channels_last=False),
    "unit": lambda x: F.normalize(x, dim=-1),
    "attention": attention(),
    "attention, masked": attention(mask=torch.from_numpy(MASK).double()),
    "attention, cosine": attention(cosine=True),
}


def main() -> None:
    arrays = {}
    for name, points in POINTS.items():
        inputs = [torch.tensor(one, dtype=torch.float64, requires_grad=True) for one in points]
        value = FUNCTIONS[name](*inputs)
        value.backward(torch.from_numpy(out_gradient(list(value.shape))).double())
        gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in inputs]
        for key, array in zip(("value", 0, 1, 2), (value.detach(), *gradients), strict=False):
            assert array.isfinite().all(), (name, key)
            arrays[f"{name}/{key}"] = array.numpy()
    np.savez_compressed(Path(__file__).with_name("derivatives.npz"), **arrays)


if __name__ == "__main__":
    main()
