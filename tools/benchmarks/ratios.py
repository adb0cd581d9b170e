"""Compares images that keep their ratio with squashed and cropped ones, at the same tokens.

    python tools/benchmarks/ratios.py OUTPUT [--seeds 0 1 2]

The task is to tell seven photographs apart by small grey crops, whose ratios lie between 1:4 and
4:1. The photographs are those of tools/make_photographs.py. A small NaFlexViT is trained from
scratch with DATA.NUM_TOKENS, and twice with square images of as many tokens: squashed, and cropped in
the centre. For each seed and each way it prints acc1, and at the end the mean and the deviation.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
from main_multi_gpu import import_paddle, main_worker
from tools.make_photographs import photographs

TRAIN = 100
VALIDATION = 50
PATCH = 8
TOKENS = 36
SIDE = 48
WAYS = {
    "ratios kept": ["DATA.NUM_TOKENS", str(TOKENS)],
    "squashed": ["DATA.CROP_MODE", "squash", "DATA.CROP_PCT", "1.0"],
    "cropped": ["DATA.CROP_PCT", "1.0"],
}
OPTIONS = [
    *("MODEL.TYPE", "NaFlexViT", "MODEL.NUM_CLASSES", "auto", "MODEL.PATCH_SIZE", str(PATCH)),
    *("MODEL.EMBED_DIM", "96", "MODEL.DEPTH", "4", "MODEL.NUM_HEADS", "3", "MODEL.POS_GRID", "6"),
    *("DATA.IMAGE_SIZE", str(SIDE), "DATA.IMAGE_CHANNELS", "1"),
    *("DATA.IMAGENET_MEAN", "0.5", "DATA.IMAGENET_STD", "0.25", "DATA.DATASET", "folder"),
    *("DATA.NUM_WORKERS", "0", "DATA.BATCH_SIZE", "32", "TRAIN.NUM_EPOCHS", "60"),
    *("TRAIN.WARMUP_EPOCHS", "5", "TRAIN.BASE_LR", "0.001", "TRAIN.MIXUP_ALPHA", "0"),
    *("TRAIN.CUTMIX_ALPHA", "0", "TRAIN.CROP_SCALE", "[0.5, 1.0]", "VALIDATE_FREQ", "60"),
    *("REPORT", "False"),
]


def write_crops(folder: Path) -> None:
    """Writes the crops, in the layout of -dataset=folder."""
    for label, (name, image) in enumerate(photographs().items()):
        grey = image.convert("L")
        for index in range(TRAIN + VALIDATION):
            rng = np.random.default_rng([label, index])
            area = (rng.uniform(0.1, 0.2) * min(grey.size)) ** 2
            ratio = np.exp(rng.uniform(-np.log(4), np.log(4)))
            width = max(8, round((area * ratio) ** 0.5))
            height = max(8, round((area / ratio) ** 0.5))
            left = int(rng.integers(grey.width - width))
            top = int(rng.integers(grey.height - height))
            part = "train" if index < TRAIN else "val"
            file = folder / part / name / f"{index:03}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            grey.crop((left, top, left + width, top + height)).save(file)


def accuracy(output: Path, options: list[str]) -> float:
    """Returns acc1 after the last epoch of a training."""
    from config import get_config
    from datasets import get_datasets

    config = get_config(None, [*OPTIONS, *options, "OUTPUT", str(output)])
    main_worker(*get_datasets(config))
    return json.loads((output / "result.json").read_text())["acc1"]


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("output", type=Path)
    parser.add_argument("--seeds", nargs="+", default=["0", "1", "2"])
    arguments = parser.parse_args()
    import_paddle()
    write_crops(arguments.output / "crops")
    scores: dict[str, list[float]] = {way: [] for way in WAYS}
    for seed in arguments.seeds:
        for way, options in WAYS.items():
            options = [*options, "SEED", seed, "DATA.DATA_PATH", str(arguments.output / "crops")]
            scores[way].append(accuracy(arguments.output / f"{way} {seed}", options))
            print(f"{way}, seed {seed}: {scores[way][-1]:.2f}", flush=True)
    for way, values in scores.items():
        print(f"{way}: {np.mean(values):.1f} +- {np.std(values, ddof=min(1, len(values) - 1)):.1f}")


if __name__ == "__main__":
    main()
