"""Compares the rules of tools/choose_images.py with a random choice, on scikit-learn's digits.

    python tools/benchmarks/label_next.py OUTPUT [--seeds 0 1 2 3 4] [--rounds 4] [--count 20]
        [--updates 200] [--rules random margin energy coverage mixed] [--keys KEY VALUE ...]

Of each seed, two random digits of each class have labels at first. A round trains vit_digits from
scratch on the labelled digits, with about the same number of updates in each round, and measures
acc1 on the validation digits. Then --count more of the training digits are chosen by the rule, and
get their labels. The first round is the same for all rules. It prints acc1 in percent for each
number of labels, the mean and the deviation over the seeds.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
from main_multi_gpu import import_paddle, main_worker

_KEYS = ["REPORT", "False", "VALIDATE_FREQ", "1000", "SAVE_FREQ", "1000"]
_BATCH = 20
_FIRST = 2  # labels of each class
RULES = ("random", "margin", "energy", "coverage", "mixed")


def subset(dataset: Any, config: Any, rows: np.ndarray) -> Any:
    from datasets import ArrayDataset

    images = dataset.images[rows]
    return ArrayDataset(config, "train", images, dataset.labels[rows], dataset.classes)


def train(output: Path, rows: np.ndarray, seed: int, updates: int, more: list[str]) -> float:
    """Trains on some of the training digits; returns acc1 on the validation digits."""
    from config import get_config
    from datasets import get_datasets

    result = output / "result.json"
    if not result.exists():
        epochs = max(1, round(updates * _BATCH / len(rows)))
        keys = ["OUTPUT", str(output), "SEED", str(seed), "TRAIN.NUM_EPOCHS", str(epochs)]
        keys += ["DATA.BATCH_SIZE", str(_BATCH), *more]
        config, digits, val = get_datasets(get_config("vit_digits", [*_KEYS, *keys]))
        main_worker(config, subset(digits, config, rows), val)
    return json.loads(result.read_text())["acc1"]


def chosen(run: Path, rows: np.ndarray, rule: Any, count: int, known: Any, seed: int) -> np.ndarray:
    """Returns the rows of the training digits that a rule chooses, besides those with labels.

    Args:
        known: (training digits, their files, their hashes).
    """
    from inference import selection
    from inference.acquisition import alike, unlike
    from inference.label_errors import Images, all_images
    from loading.files import Paths

    digits, files, hashes = known
    rest = np.setdiff1d(np.arange(len(files)), rows)
    if rule == "random":
        return np.random.default_rng([seed, len(rows)]).permutation(rest)[:count]
    images = all_images(str(run / "checkpoints" / "last"), workers=0)
    images = images._replace(
        dataset=subset(digits, images.config, rows).as_evaluated(images.config)
    )
    usable = rest[~alike(hashes[rest], hashes[rows])]
    usable = usable[unlike(hashes[usable])]
    pool = selection.Pool(Paths(map(str, files)), usable, [], 0, 0, 0)
    labelled: Images = images
    return np.array(selection.choose(pool, labelled, count, rule, workers=0).rows)


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("output", type=Path)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--keys", nargs="+", default=[])
    parser.add_argument("--rules", nargs="+", choices=RULES, default=RULES)
    arguments = parser.parse_args()
    import_paddle()
    from config import get_config
    from datasets import get_dataset
    from loading.check.duplicates import perceptual_hashes

    digits: Any = get_dataset(get_config("vit_digits"), "train")
    files = []
    copies = []
    for index, pixels in enumerate(digits.images):
        files.append(arguments.output / "digits" / f"{index:04}.png")
        files[-1].parent.mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray(pixels)
        picture.save(files[-1])
        copies.append(np.asarray(picture.convert("RGB").resize((64, 64), Image.Resampling.BOX)))
    known = digits, files, perceptual_hashes(np.stack(copies))
    scores: dict[str, list[list[float]]] = {rule: [] for rule in arguments.rules}
    for seed in arguments.seeds:
        rng = np.random.default_rng(seed)
        first = [rng.permutation(np.flatnonzero(digits.labels == c))[:_FIRST] for c in range(10)]
        for rule in arguments.rules:
            rows = np.sort(np.concatenate(first))
            run = arguments.output / f"{seed}-first"
            accuracies = [train(run, rows, seed, arguments.updates, arguments.keys)]
            for number in range(1, arguments.rounds + 1):
                more = chosen(run, rows, rule, arguments.count, known, seed)
                rows = np.sort(np.concatenate([rows, more]))
                run = arguments.output / f"{seed}-{rule}-{number}"
                accuracies.append(train(run, rows, seed, arguments.updates, arguments.keys))
            scores[rule].append(accuracies)
            print(
                f"seed {seed}, {rule}: {' '.join(f'{one:.2f}' for one in accuracies)}", flush=True
            )
    labels = [10 * _FIRST + number * arguments.count for number in range(arguments.rounds + 1)]
    print("labels", *labels)
    for rule, values in scores.items():
        mean = np.mean(values, axis=0)
        deviation = np.std(values, axis=0, ddof=min(1, len(values) - 1))
        cells = (f"{m:.1f} +- {d:.1f}" for m, d in zip(mean, deviation, strict=True))
        print(rule, *cells, sep=" | ")


if __name__ == "__main__":
    main()
