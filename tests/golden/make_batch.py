"""Writes batch.npz beside this file: mixup, CutMix and random erasing of timm (made with timm
1.0.31, torch 2.13.0).

PYTHONPATH=.:tests python tests/golden/make_batch.py
"""

import random
import sys
import types
from pathlib import Path

import numpy as np
import torch

from golden.formula import array

# torchvision's operators don't load beside a CPU torch
for name in ("_meta_registrations", "_autograd_registrations"):
    sys.modules[f"torchvision.{name}"] = types.ModuleType(f"torchvision.{name}")
from timm.data import mixup  # noqa: E402
from timm.data.random_erasing import RandomErasing  # noqa: E402

COUNT = 6
CHANNELS = 2
SIZE = 9
CLASSES = 5
# timm's partner of place p is at COUNT - 1 - p: of sample i so its neighbour i ^ 1
ORDER = [0, 2, 4, 5, 3, 1]
KINDS = {
    "mixup": {"mixup_alpha": 0.8},
    "cutmix": {"mixup_alpha": 0.0, "cutmix_alpha": 1.0},
    "both": {"mixup_alpha": 0.8, "cutmix_alpha": 1.0, "prob": 0.8},
    "minmax": {"mixup_alpha": 0.0, "cutmix_minmax": (0.2, 0.8)},
}


def mixed(mode: str, options: dict) -> dict[str, np.ndarray]:
    """timm's images and targets in the order of samples, and what timm drew: a row for each of its
    draws.
    """
    transform = mixup.Mixup(mode=mode, label_smoothing=0.1, num_classes=CLASSES, **options)
    drawn = []
    integers = []
    name = "_params_per_batch" if mode == "batch" else "_params_per_elem"
    parameters = getattr(transform, name)
    boxes = mixup.cutmix_bbox_and_lam
    randint = np.random.randint

    def recorded_parameters(*arguments):
        drawn.append([np.array(value, np.float64) for value in parameters(*arguments)])
        return parameters_copy(drawn[-1], mode)

    def recorded_boxes(*arguments, **keywords):
        integers.append([])
        return boxes(*arguments, **keywords)

    def recorded_randint(*arguments, **keywords):
        integers[-1].append(randint(*arguments, **keywords))
        return integers[-1][-1]

    setattr(transform, name, recorded_parameters)
    mixup.cutmix_bbox_and_lam, np.random.randint = recorded_boxes, recorded_randint
    images = torch.from_numpy(array("images", (COUNT, CHANNELS, SIZE, SIZE)) * 10)[ORDER]
    images, targets = transform(images.clone(), (torch.arange(COUNT) * 3 % CLASSES)[ORDER])
    mixup.cutmix_bbox_and_lam, np.random.randint = boxes, randint
    lam, cut = (np.atleast_1d(value) for value in drawn[0])
    rows = np.zeros((len(lam), 4), np.int64)  # centre; or sides and start
    rows[(cut > 0) & (lam < 1)] = [row + [0] * (4 - len(row)) for row in integers] or np.zeros(
        (0, 4)
    )
    back = np.argsort(ORDER)
    found = {
        "images": images.numpy()[back],
        "targets": targets.numpy()[back],
        "lam": lam,
        "cut": cut,
        "integers": rows,
    }
    if mode == "elem":
        found |= {key: found[key][back] for key in ("lam", "cut", "integers")}
    return found


def parameters_copy(values: list[np.ndarray], mode: str) -> tuple:
    """timm writes corrected shares into what it drew."""
    lam, cut = values
    return (
        (float(lam), bool(cut)) if mode == "batch" else (lam.astype(np.float32), cut.astype(bool))
    )


def erased(count: int) -> np.ndarray:
    """Where timm erases one image of 16 x 16 after random.seed(i), for i in 0..199: packed bits."""
    transform = RandomErasing(0.8, max_count=count, device="cpu")
    masks = []
    for seed in range(200):
        random.seed(seed)
        masks.append(transform(torch.ones(1, 16, 16))[0].numpy() == 0)
    return np.packbits(masks)


def main() -> None:
    np.random.seed(4)
    arrays = {
        f"{kind}/{mode}/{key}": value
        for kind, options in KINDS.items()
        for mode in ("batch", "pair", "elem")
        for key, value in mixed(mode, options).items()
    }
    arrays |= {f"erased/{count}": erased(count) for count in (1, 3)}
    np.savez_compressed(Path(__file__).with_name("batch.npz"), **arrays)


if __name__ == "__main__":
    main()
