"""Measures how many flipped labels tools/find_label_errors.py finds, on scikit-learn's digits.

    python tools/benchmarks/wrong_labels.py OUTPUT [--shares 5 10] [--seeds 0 1 2] [--folds 5]
        [--epochs 60] [--keys KEY VALUE ...]

For each share (in percent) and seed, it writes the training digits as a folder dataset in which this
share of the labels is flipped at random. Then it trains vit_digits for each fold, and finds wrong
labels by every filter, and by the features of the first fold's run. It prints precision and recall
in percent, and the mean and the deviation over the seeds. A run that OUTPUT holds already isn't
trained again.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
from main_multi_gpu import import_paddle, main_worker

_KEYS = ["REPORT", "False", "VALIDATE_FREQ", "1000", "SAVE_FREQ", "1000"]


def write_digits(folder: Path, share: float, seed: int) -> set[str]:
    """Writes the training digits into folders of classes; returns the names of flipped images."""
    from config import get_config
    from datasets import get_dataset

    digits: Any = get_dataset(get_config("vit_digits"), "train")
    rng = np.random.default_rng(seed)
    chosen = rng.permutation(len(digits))[: round(share * len(digits))]
    labels = digits.labels.copy()
    labels[chosen] = (labels[chosen] + rng.integers(1, 10, len(chosen))) % 10
    for index, label in enumerate(labels):
        file = folder / "train" / str(label) / f"{index:04}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(digits.images[index]).save(file)
    return {f"{index:04}.png" for index in chosen}


def train_fold(
    data: Path, output: Path, folds: int, fold: int, epochs: int, more: Sequence[str]
) -> None:
    from config import get_config
    from datasets import get_datasets

    keys = ["DATA.DATASET", "folder", "DATA.DATA_PATH", str(data), "OUTPUT", str(output)]
    keys += ["DATA.FOLDS", str(folds), "DATA.FOLD", str(fold), "TRAIN.NUM_EPOCHS", str(epochs)]
    keys += ["DATA.CACHE", str(output.parent / "cache"), *more]
    main_worker(*get_datasets(get_config("vit_digits", [*_KEYS, *keys])))


def scored(found: Sequence[str], wrong: set[str]) -> tuple[float, float]:
    """Returns precision and recall in percent."""
    right = sum(name in wrong for name in found)
    return 100 * right / max(1, len(found)), 100 * right / len(wrong)


def measured(runs: Sequence[Path], wrong: set[str]) -> dict[str, tuple[float, ...]]:
    """Returns precision and recall of each way to find wrong labels, in percent.

    Of each score it is the average precision of the ranking of all labels.
    """
    from sklearn.metrics import average_precision_score

    from inference import label_errors
    from inference.confident_learning import FILTERS, SCORES, quality
    from loading.label_sets import every_label

    parts = label_errors.held_out([str(run) for run in runs], workers=0)
    images = label_errors.all_images(str(runs[0]), workers=0)
    features = label_errors.features_of(images)
    place = runs[0].parent
    k = label_errors.NEIGHBOURS
    results: dict[str, tuple[float, ...]] = {}
    for way, judged, probabilities in (
        ("folds", parts, label_errors.probabilities_of(parts, place)),
        ("features", [images], label_errors.votes_of(images, features, k, place)),
    ):
        labels = np.concatenate([every_label(part.dataset.labels) for part in judged])
        names = [part.name(index) for part in judged for index in range(len(part.dataset))]
        is_wrong = [Path(name).name in wrong for name in names]
        with probabilities as values:
            for method in FILTERS:
                found = label_errors.find(judged, values, method)
                files = [Path(suspect.name).name for suspect in found.suspects]
                results[f"{way}, {method}"] = scored(files, wrong)
            for score in SCORES:
                ranking = -quality(labels, values, score)
                precision = 100 * float(average_precision_score(is_wrong, ranking))
                results[f"{way}, ranked by {score}"] = (precision,)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("output", type=Path)
    parser.add_argument("--shares", nargs="+", type=float, default=[5, 10])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--keys", nargs="+", default=[])
    arguments = parser.parse_args()
    import_paddle()
    for share in arguments.shares:
        by_way: dict[str, list[tuple[float, ...]]] = {}
        for seed in arguments.seeds:
            place = arguments.output / f"{share:g}-{seed}"
            wrong = write_digits(place / "data", share / 100, seed)
            runs = [place / f"fold_{fold}" for fold in range(arguments.folds)]
            for fold, run in enumerate(runs):
                if not (run / "result.json").exists():
                    keys = arguments.keys
                    train_fold(place / "data", run, arguments.folds, fold, arguments.epochs, keys)
            for name, score in measured(runs, wrong).items():
                by_way.setdefault(name, []).append(score)
                numbers = " ".join(f"{number:.1f}" for number in score)
                print(f"{share:g} %, seed {seed}, {name}: {numbers}", flush=True)
        for name, scores in by_way.items():
            mean = np.mean(scores, axis=0)
            deviation = np.std(scores, axis=0, ddof=min(1, len(scores) - 1))
            pairs = [f"{m:.1f} +- {d:.1f}" for m, d in zip(mean, deviation, strict=True)]
            heads = ("precision", "recall") if len(pairs) == 2 else ("average precision",)
            told = ", ".join(f"{head} {pair}" for head, pair in zip(heads, pairs, strict=True))
            print(f"{share:g} % flipped, {name}: {told}", flush=True)


if __name__ == "__main__":
    main()
