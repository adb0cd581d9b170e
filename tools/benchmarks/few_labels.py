"""Compares a fine-tuning with a training from scratch where few images have labels.

    python tools/benchmarks/few_labels.py OUTPUT [--seeds 0 1 2] [--labels 10]
        [--pretrain RECIPE] [--scratch RECIPE] [--tune RECIPE]
        [--pretrain_keys KEY VALUE ...] [--few_keys KEY VALUE ...] [--keys KEY VALUE ...]

For each seed it pre-trains a model on all training images without labels. Then it trains one with a
few labelled images of each class, from scratch and from this encoder. It prints acc1 on the
validation images, the mean and the deviation over the seeds. The defaults are mae_vit_digits,
vit_digits for both trainings, ten labelled digits a class, and 100 epochs with a batch of 20.
--keys are keys of all trainings, such as DATA.DATASET. A pre-training that OUTPUT holds already
isn't run again.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
from main_multi_gpu import import_paddle, main_worker

_BASE = ["REPORT", "False"]
_FEW = ["TRAIN.NUM_EPOCHS", "100", "DATA.BATCH_SIZE", "20", "VALIDATE_FREQ", "100"]


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
        train.labels = train.labels[chosen]
        if hasattr(train, "paths"):
            train.paths = [train.paths[index] for index in chosen]
        else:
            train.images = train.images[chosen]
    main_worker(config, train, val)
    return json.loads((output / "result.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("output", type=Path)
    parser.add_argument("--seeds", nargs="+", default=["0", "1", "2", "3", "4"])
    parser.add_argument("--labels", type=int, default=10)
    parser.add_argument("--pretrain", default="mae_vit_digits")
    parser.add_argument("--scratch", default="vit_digits")
    parser.add_argument("--tune", default="vit_digits")
    parser.add_argument("--pretrain_keys", nargs="+", default=[])
    parser.add_argument("--few_keys", nargs="+", default=[])
    parser.add_argument("--keys", nargs="+", default=[])
    arguments = parser.parse_args()
    import_paddle()
    scores = []
    for seed in arguments.seeds:
        folder = arguments.output / seed
        options = [*_BASE, *arguments.keys, "SEED", seed]
        if not (folder / "pretrained" / "result.json").exists():
            train(arguments.pretrain, folder / "pretrained", [*options, *arguments.pretrain_keys])
        few = [*options, *_FEW, *arguments.few_keys]
        encoder = ["MODEL.PRETRAINED", str(folder / "pretrained" / "checkpoints" / "last")]
        scratch = train(arguments.scratch, folder / "scratch", few, arguments.labels)
        tuned = train(arguments.tune, folder / "tuned", [*few, *encoder], arguments.labels)
        scores.append([scratch["acc1"], tuned["acc1"]])
        print(f"seed {seed}: from scratch {scores[-1][0]:.2f}, fine-tuned {scores[-1][1]:.2f}")
    for name, values in zip(("from scratch", "fine-tuned"), np.transpose(scores), strict=True):
        print(f"{name}: {values.mean():.1f} +- {values.std(ddof=min(1, len(values) - 1)):.1f}")


if __name__ == "__main__":
    main()
