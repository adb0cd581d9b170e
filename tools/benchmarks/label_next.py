"""Compares the rules of tools/choose_images.py with a random choice, on scikit-learn's digits.

    python tools/benchmarks/label_next.py OUTPUT [--seeds 0 1 2 3 4] [--rounds 5] [--count 20]
        [--rules random margin energy coverage mixed] [--keys KEY VALUE ...]

For each seed, mae_vit_digits is pre-trained on the training digits without labels. A run that
OUTPUT holds already isn't trained again. Then two random digits of each class get their labels. A
round fits a logistic regression to the frozen features of the digits with labels, and measures acc1
on the validation digits. Then --count more of the training digits are chosen by the rule, and get
their labels. The first round is the same for all rules. It prints acc1 in percent for each number
of labels, the mean and the deviation over the seeds, and draws them into OUTPUT/curves.png.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
from launch.files import writing_whole
from main_multi_gpu import import_paddle, main_worker

_KEYS = ["REPORT", "False", "VALIDATE_FREQ", "1000", "SAVE_FREQ", "1000"]
_FIRST = 2  # labels of each class
RULES = ("random", "margin", "energy", "coverage", "mixed")


def pretrain(output: Path, seed: int, more: list[str]) -> None:
    """Trains an encoder without labels, unless ``output`` holds it."""
    from config import get_config
    from datasets import get_datasets

    if not (output / "result.json").exists():
        keys = [*_KEYS, "OUTPUT", str(output), "SEED", str(seed), *more]
        main_worker(*get_datasets(get_config("mae_vit_digits", keys)))


def features_of(run: Path, images: np.ndarray) -> np.ndarray:
    """Returns the features of digits, [n, channels]."""
    from inference.feature_store import FeatureExtractor

    extractor = FeatureExtractor(run / "checkpoints" / "last", batch_size=128)
    return np.concatenate([rows.values for rows in extractor.rows(list(images), workers=0)])


def chosen(
    rule: str, count: int, probe: Any, features: np.ndarray, rows: np.ndarray, rest: np.ndarray
) -> np.ndarray:
    """Returns the rows of the training digits that a rule chooses.

    Args:
        probe: the classifier of the last round.
        features: of all training digits.
        rows: those with labels.
        rest: those that may be chosen.
    """
    from inference.acquisition import distances_to, farthest, margins
    from inference.calibration.rejection import score
    from inference.selection import SHORTLIST

    if rule == "energy":
        energies = score("energy", probe.decision_function(features[rest]))
        return rest[np.argsort(-energies, kind="stable")[:count]]
    if rule in ("margin", "mixed"):
        order = np.argsort(margins(probe.predict_proba(features[rest])), kind="stable")
        if rule == "margin":
            return rest[order[:count]]
        rest = rest[np.sort(order[: SHORTLIST * count])]
    places, _ = farthest(features[rest], distances_to(features[rest], features[rows]), count)
    return rest[places]


def accuracies(
    rule: str, seed: int, rounds: int, count: int, digits: Any, val: Any, sets: Any
) -> list[float]:
    """Returns acc1 on the validation digits after each round, in percent.

    Args:
        digits, val: the training and validation digits.
        sets: (features of the training digits, of the validation digits, hashes of the first).
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    from inference.acquisition import alike, unlike

    features, val_features, hashes = sets
    rng = np.random.default_rng(seed)
    first = [rng.permutation(np.flatnonzero(digits.labels == c))[:_FIRST] for c in range(10)]
    rows = np.sort(np.concatenate(first))
    found = []
    for _ in range(rounds + 1):
        probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
        probe.fit(features[rows], digits.labels[rows])
        found.append(100 * float(probe.score(val_features, val.labels)))
        rest = np.setdiff1d(np.arange(len(features)), rows)
        if rule == "random":
            more = rng.permutation(rest)[:count]
        else:
            rest = rest[~alike(hashes[rest], hashes[rows])]
            rest = rest[unlike(hashes[rest])]
            more = chosen(rule, count, probe, features, rows, rest)
        rows = np.sort(np.concatenate([rows, more]))
    return found


def draw(file: Path, scores: dict[str, list[list[float]]], labels: Sequence[int]) -> None:
    """Writes a PNG of the mean accuracy of each rule over the number of labels.

    Args:
        scores: accuracies by rule, of each seed and round.
        labels: the number of labels of each round.
    """
    from training.pages.plotting import figure, figure_png

    drawn = figure(5.4, 3.6)
    axis = drawn.add_subplot()
    for rule, by_seed in scores.items():
        means = np.mean(by_seed, axis=0)
        deviations = np.std(by_seed, axis=0, ddof=min(1, len(by_seed) - 1))
        line = "--" if rule == "random" else "-"
        axis.errorbar(labels, means, deviations, label=rule, linestyle=line, capsize=2)
    axis.set(xlabel="labels", ylabel="acc1 (%)")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    with writing_whole(file, "wb") as written:
        written.write(figure_png(drawn))


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("output", type=Path)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--keys", nargs="+", default=[])
    parser.add_argument("--rules", nargs="+", choices=RULES, default=RULES)
    arguments = parser.parse_args()
    import_paddle()
    from config import get_config
    from datasets import get_dataset
    from loading.check.duplicates import perceptual_hashes

    config = get_config("vit_digits")
    digits: Any = get_dataset(config, "train")
    val: Any = get_dataset(config, "val")
    copies = [
        np.asarray(Image.fromarray(pixels).convert("RGB").resize((64, 64), Image.Resampling.BOX))
        for pixels in digits.images
    ]
    hashes = perceptual_hashes(np.stack(copies))
    scores: dict[str, list[list[float]]] = {rule: [] for rule in arguments.rules}
    for seed in arguments.seeds:
        run = arguments.output / f"encoder_{seed}"
        pretrain(run, seed, arguments.keys)
        sets = features_of(run, digits.images), features_of(run, val.images), hashes
        for rule in arguments.rules:
            numbers = accuracies(rule, seed, arguments.rounds, arguments.count, digits, val, sets)
            scores[rule].append(numbers)
            print(f"seed {seed}, {rule}: {' '.join(f'{one:.2f}' for one in numbers)}", flush=True)
    labels = [10 * _FIRST + number * arguments.count for number in range(arguments.rounds + 1)]
    print("labels", *labels)
    for rule, values in scores.items():
        mean = np.mean(values, axis=0)
        deviation = np.std(values, axis=0, ddof=min(1, len(values) - 1))
        cells = (f"{m:.1f} +- {d:.1f}" for m, d in zip(mean, deviation, strict=True))
        print(rule, *cells, sep=" | ")
    draw(arguments.output / "curves.png", scores, labels)


if __name__ == "__main__":
    main()
