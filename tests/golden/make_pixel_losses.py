"""Writes pixel_losses.npz beside this file: losses of pixels and their gradients, by torch in
float64 (made with torch 2.13.0).

OHEM, focal and Dice are written down here from the papers and mmsegmentation's documentation. Each
image is a batch of its own.

PYTHONPATH=.:tests python tests/golden/make_pixel_losses.py
"""

from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from golden.formula import array

CLASSES = 5
SIZE = (7, 9)
IGNORED = 255
WEIGHT = torch.arange(1, CLASSES + 1, dtype=torch.float64) / 2


def masks() -> np.ndarray:
    """Returns three masks: with ignored pixels, without, and of one class."""
    values = (array("mask", (3, *SIZE)) * 1e4).astype(int) % CLASSES
    values[0, :2] = IGNORED
    values[0, :, 4] = IGNORED
    values[2] = 3
    return values.astype(np.uint8)


def ohem(logits, mask, threshold, keep):
    loss = F.cross_entropy(logits, mask, ignore_index=IGNORED, reduction="none").flatten()
    loss = loss[mask.flatten() != IGNORED]
    of_label = torch.exp(-loss)
    hardest = of_label.argsort()[:keep]
    chosen = torch.zeros(len(loss), dtype=torch.bool)
    chosen[hardest] = True
    chosen |= of_label < threshold
    return loss[chosen].mean()


def focal(logits, mask, gamma):
    loss = F.cross_entropy(logits, mask, ignore_index=IGNORED, reduction="none").flatten()
    loss = loss[mask.flatten() != IGNORED]
    return ((1 - torch.exp(-loss)) ** gamma * loss).mean()


def dice(logits, mask):
    of_pixels = logits.softmax(1)[0].flatten(1).T
    labels = mask.flatten()
    of_pixels = of_pixels[labels != IGNORED]
    labels = labels[labels != IGNORED]
    total = 0
    for number in range(CLASSES):
        target = (labels == number).double()
        found = of_pixels[:, number]
        union = (found**2).sum() + target.sum()
        total = total + 1 - (2 * (found * target).sum() + 1) / (union + 1)
    return total / CLASSES


LOSSES = {
    "cross_entropy": lambda x, y: F.cross_entropy(x, y, ignore_index=IGNORED),
    "weighted": lambda x, y: F.cross_entropy(x, y, WEIGHT, ignore_index=IGNORED),
    "ohem": lambda x, y: ohem(x, y, 0.3, 5),
    "ohem_keep": lambda x, y: ohem(x, y, 0.0, 11),
    "focal": lambda x, y: focal(x, y, 2.0),
    "focal_half": lambda x, y: focal(x, y, 0.5),
    "dice": lambda x, y: F.cross_entropy(x, y, ignore_index=IGNORED) + 0.7 * dice(x, y),
}


def main() -> None:
    logits = torch.from_numpy(array("logits", (3, CLASSES, *SIZE)) * 20).double()
    mask = torch.from_numpy(masks()).long()
    arrays = {}
    for name, loss in LOSSES.items():
        values = []
        gradients = []
        for one, labels in zip(logits.split(1), mask.split(1), strict=True):
            one = one.clone().requires_grad_()
            value = loss(one, labels)
            value.backward()
            values.append(value.item())
            gradients.append(one.grad.numpy()[0])
        arrays[name] = np.array(values)
        arrays[f"grad/{name}"] = np.array(gradients, np.float32)
    np.savez_compressed(Path(__file__).with_suffix("").parent / "pixel_losses.npz", **arrays)


if __name__ == "__main__":
    main()
