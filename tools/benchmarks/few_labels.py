"""Compares a fine-tuning with a training from scratch where few images have labels.

    PYTHONPATH=. python tools/benchmarks/few_labels.py OUTPUT [SEED ...]

For each seed it pre-trains mae_vit_digits on all training digits without labels. Then it trains
vit_digits on ten labelled digits a class, from scratch and from this encoder, for 100 epochs with a
batch of 20. It prints acc1 on the 364 validation digits, the mean and the deviation over the seeds.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from main_multi_gpu import import_paddle, main_worker

# Labelled images of each class.
_LABELS = 10
_BASE = ["REPORT", "False"]
_FEW = [*_BASE, "TRAIN.NUM_EPOCHS", "100", "DATA.BATCH_SIZE", "20", "VALIDATE_FREQ", "100"]


def train(name: str, output: Path, options: list[str], labels: int | None = None) -> dict:
    """Trains a recipe in this process; returns what result.json says.

    Args:
        labels: the number of training images of each class; None: all images.
    """
    from config import get_config
    from datasets import get_datasets

    train: Any
    config, train, val = get_datasets(get_config(name, ["OUTPUT", str(output), *options]))
    if labels is not None:
        rng = np.random.default_rng(config.SEED)
        by_class = [
            rng.permutation(np.flatnonzero(train.labels == label))[:labels]
            for label in range(len(train.classes))
        ]
        chosen = np.sort(np.concatenate(by_class))
        train.images = train.images[chosen]
        train.labels = train.labels[chosen]
    main_worker(config, train, val)
    return json.loads((output / "result.json").read_text())


def main() -> None:
    import_paddle()
    output = Path(sys.argv[1])
    seeds = sys.argv[2:] or ["0", "1", "2", "3", "4"]
    scores = []
    for seed in seeds:
        folder = output / seed
        train("mae_vit_digits", folder / "mae", [*_BASE, "SEED", seed])
        encoder = ["MODEL.PRETRAINED", str(folder / "mae" / "checkpoints" / "last")]
        scratch = train("vit_digits", folder / "scratch", [*_FEW, "SEED", seed], _LABELS)
        tuned = train("vit_digits", folder / "tuned", [*_FEW, "SEED", seed, *encoder], _LABELS)
        scores.append([scratch["acc1"], tuned["acc1"]])
        print(f"seed {seed}: from scratch {scores[-1][0]:.2f}, fine-tuned {scores[-1][1]:.2f}")
    for name, values in zip(("from scratch", "fine-tuned"), np.transpose(scores), strict=True):
        print(f"{name}: {values.mean():.1f} +- {values.std(ddof=min(1, len(values) - 1)):.1f}")


if __name__ == "__main__":
    main()
