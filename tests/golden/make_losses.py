"""Writes losses.npz beside this file: losses per sample of torch, timm and torchvision (made with
timm 1.0.31, torch 2.13.0).

Each sample goes through timm's module as a batch of its own, so that its mean is that sample's
loss. DeiT's distillation is written down here from its formula.

PYTHONPATH=.:tests python tests/golden/make_losses.py
"""

import sys
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from golden.formula import array

# torchvision's operators don't load beside a CPU torch
for name in ("_meta_registrations", "_autograd_registrations"):
    sys.modules[f"torchvision.{name}"] = types.ModuleType(f"torchvision.{name}")
from timm.loss import (  # noqa: E402
    AsymmetricLossMultiLabel,
    BinaryCrossEntropy,
    LabelSmoothingCrossEntropy,
    SoftTargetCrossEntropy,
)
from torchvision.ops import sigmoid_focal_loss  # noqa: E402

COUNT = 6
CLASSES = 5


def main() -> None:
    logits, student, teacher = (
        torch.from_numpy(array(name, (COUNT, CLASSES)) * 20)
        for name in ("logits", "student", "teacher")
    )
    labels = torch.arange(COUNT) * 3 % CLASSES
    soft = torch.from_numpy(array("targets", (COUNT, CLASSES)) * 10).softmax(-1)
    weight = torch.arange(1, CLASSES + 1) / 2

    def each(loss: Callable, *inputs: torch.Tensor) -> np.ndarray:
        return np.array([loss(*(x[i : i + 1] for x in inputs)).item() for i in range(COUNT)])

    arrays = {"soft_target": each(SoftTargetCrossEntropy(), logits, soft)}
    arrays["soft_target/weight"] = F.cross_entropy(logits, soft, weight, reduction="none").numpy()
    for smoothing in (0.0, 0.1):
        arrays[f"cross_entropy/{smoothing}"] = each(
            LabelSmoothingCrossEntropy(smoothing), logits, labels
        )
        arrays[f"cross_entropy/{smoothing}/weight"] = F.cross_entropy(
            logits, labels, weight, label_smoothing=smoothing, reduction="none"
        ).numpy()
        for threshold in (None, 0.2):
            for sums in (False, True):
                for name, factors in (("", None), ("/weight", weight)):
                    loss = BinaryCrossEntropy(smoothing, threshold, factors, sum_classes=sums)
                    for kind, targets in (("labels", labels), ("soft", soft)):
                        arrays[f"bce/{kind}/{smoothing}/{threshold}/{sums}{name}"] = each(
                            loss, logits, targets
                        )

    def divergence(found: torch.Tensor, wanted: torch.Tensor, tau: float) -> torch.Tensor:
        found, wanted = (F.log_softmax(x / tau, dim=1) for x in (found, wanted))
        return F.kl_div(found, wanted, reduction="sum", log_target=True) * tau**2 / found.numel()

    arrays["hard"] = each(
        lambda found, wanted: F.cross_entropy(found, wanted.argmax(1)), student, teacher
    )
    for tau in (1.0, 3.0):
        arrays[f"soft/{tau}"] = each(
            lambda found, wanted, tau=tau: divergence(found, wanted, tau), student, teacher
        )
    hot = torch.from_numpy(array("hot", (COUNT, CLASSES)) > 0).float()
    for name, targets in (("hot", hot), ("mixed", 0.7 * hot + 0.3 * hot.flip(0))):
        arrays[f"bce/pos/{name}"] = (
            F.binary_cross_entropy_with_logits(
                logits, targets, weight, reduction="none", pos_weight=weight * 3
            )
            .mean(1)
            .numpy()
        )
        for gamma, alpha in ((2.0, 0.25), (0.0, -1), (1.5, 0.6)):
            each_class = sigmoid_focal_loss(logits, targets, alpha, gamma)
            arrays[f"focal/{name}/{gamma}/{alpha}"] = each_class.mean(1).numpy()
        for settings in ((4, 1, 0.05), (2, 0, 0.0), (0, 0, 0.2)):
            arrays[f"asymmetric/{name}/{settings}"] = each(
                AsymmetricLossMultiLabel(*settings), logits, targets
            )
    np.savez_compressed(Path(__file__).with_name("losses.npz"), **arrays)


if __name__ == "__main__":
    main()
