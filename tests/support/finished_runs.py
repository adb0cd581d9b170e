"""Folders of finished runs, made without a training."""

import json

import numpy as np
from conftest import TINY

from config import get_config, resolved_yaml

RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 10, 200)
DRAWN = RNG.random((8, 200))


def make_run(folder, share, seed=0, draw=0, task="classification", **options):
    """Makes the folder of a run that got ``share`` of 200 images right.

    Args:
        draw: which images are right differs from draw to draw.
        options: keys of the configuration, with ``__`` for a dot.

    Returns:
        The folder, and the accuracy in percent.
    """
    folder.mkdir(parents=True)
    right = DRAWN[draw] < share
    words = [
        word for key, value in options.items() for word in (key.replace("__", "."), str(value))
    ]
    words += ["TASK", task, "SEED", str(seed), "OUTPUT", str(folder)]
    (folder / "config.yaml").write_text(resolved_yaml(get_config(None, [*TINY, *words])))
    accuracy = 100 * float(right.mean())
    told = {
        "acc1": accuracy,
        "loss": 1 - share,
        "num_samples": 200,
        "best": {"epoch": 2, "acc1": accuracy},
    }
    (folder / "result.json").write_text(json.dumps(told))
    rows = [
        f"sample {i},{label},{label if ok else (label + 1) % 10},0.5"
        for i, (label, ok) in enumerate(zip(LABELS, right, strict=True))
    ]
    (folder / "predictions.csv").write_text(
        "\n".join(["image,label,predicted,probability", *rows]) + "\n"
    )
    records = [
        {"split": split, "epoch": epoch, "step": 10 * epoch, "loss": share, "lr": 0.1, "acc1": 50}
        for epoch in (1, 2)
        for split in ("train", "val")
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    return folder, accuracy
