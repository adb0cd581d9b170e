"""Subjects of ``growth`` about tools: a sweep's own work, a search among features, duplicates,
comparisons and listings.
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

from tools.benchmarks.growth_measure import Growth

_SWEEP = """
command: main_single_gpu.py -cfg=vit_digits -o TRAIN.NUM_EPOCHS 20
keys:
  TRAIN.BASE_LR: {{log_uniform: [1e-5, 1e-1]}}
  TRAIN.WEIGHT_DECAY: {{uniform: [0.0, 0.5]}}
method: {method}
runs: {size}
side_by_side: 2
output: {folder}/swept
"""


def sweep(size: int, folder: Path) -> Callable[[], object]:
    """Measures a sweep without its runs: each leaves its result at once."""
    return _sweep(size, folder, "random")


def sweep_optuna(size: int, folder: Path) -> Callable[[], object]:
    """Measures a sweep with Optuna's points, two at a time. It includes Optuna's own time."""
    return _sweep(size, folder, "optuna")


def sweep_again(size: int, folder: Path) -> Callable[[], object]:
    """Measures the command of a finished sweep: it reads all results, and runs nothing."""
    work = _sweep(size, folder, "random")
    work()
    return work


def _sweep(size: int, folder: Path, method: str) -> Callable[[], object]:
    from launch import side_by_side
    from tools import sweep as tool

    # The measured work would import the module that draws the picture.
    from training.pages import plotting  # noqa: F401

    locks: list[int] = []
    file = folder / "sweep.yaml"
    file.write_text(_SWEEP.format(method=method, size=size, folder=folder))

    def run(
        commands: Sequence[side_by_side.Command],
        environments: object,
        on_end: Callable[[str, int], None],
        *_: object,
    ) -> int:
        for command in commands:
            output = folder / "swept" / command.name
            output.mkdir()
            best = {"acc1": hash(command.name) % 1000 / 10, "loss": 1.0, "epoch": 3}
            (output / "result.json").write_text(
                json.dumps({"best": best, "loss": 2.0, "num_samples": 4})
            )
            on_end(command.name, 0)
        return 0

    lock = tool.results.lock

    def kept_lock(output: Path) -> int:
        locks.append(lock(output))
        return locks[-1]

    def work() -> None:
        with (
            mock.patch.object(tool.results, "lock", kept_lock),
            mock.patch.object(side_by_side, "run", run),
            mock.patch.object(sys, "argv", ["sweep.py", str(file)]),
            open(os.devnull, "w") as nowhere,
            contextlib.redirect_stdout(nowhere),
        ):
            assert tool.main() == 0
        # The tool's own process would end here.
        os.close(locks.pop())

    return work


def search(size: int, folder: Path) -> Callable[[], object]:
    """Measures a search among stored features of 8 channels, whose names were already read."""
    work = search_first(size, folder)
    work()
    return work


def search_first(size: int, folder: Path) -> Callable[[], object]:
    """Measures the first search, which also reads the names in the index."""
    import numpy as np

    from inference.feature_store import array_header, open_features
    from inference.search import nearest_in

    random = np.random.default_rng(0)
    file = folder / "features.npy"
    made = {
        "checkpoint": "/run",
        "sha256": "0" * 64,
        "folder": str(folder),
        "cfg": None,
        "options": [],
        "layer": None,
        "pool": "avg",
        "norm": False,
        "index": "csv",
        "shape": [size, 8],
    }
    with open(file, "wb") as values:
        made["offset"] = values.write(array_header(".npy", made["shape"]))
        for first in range(0, size, 1 << 20):
            values.write(random.normal(size=(min(size - first, 1 << 20), 8)).astype("<f4").data)
    (folder / "features.json").write_text(json.dumps(made))
    with open(folder / "features.csv", "w") as index:
        index.write('"row","file","error"\n')
        index.writelines(
            f'{row},"/data/train/class_{row % 1000:04}/{row:08}.jpg",""\n' for row in range(size)
        )

    def work() -> None:
        assert len(nearest_in(open_features(file), "/data/train/class_0007/00000007.jpg", 10)) == 10

    return work


def duplicates(size: int, folder: Path) -> Callable[[], object]:
    """Measures the search for images that look alike. A tenth of them look like another one."""
    import numpy as np

    from loading.check.findings import ReadableImages, exact_duplicates, near_duplicates

    random = np.random.default_rng(0)
    look = random.integers(0, 1 << 63, size, np.uint64)
    look[: size // 10] = look[size // 10 : 2 * (size // 10)] ^ np.uint64(1)
    content = random.integers(0, 1 << 63, size)
    whole = np.zeros(size, int)
    images = ReadableImages(
        ["train"], whole, np.arange(size), whole, content, look, np.zeros(size, bool)
    )

    def work() -> None:
        assert exact_duplicates(images).same.sum() == 0
        assert near_duplicates(images)[0].same.sum() >= 2 * (size // 10)

    return work


def compare_runs(size: int, folder: Path) -> Callable[[], object]:
    """Measures the comparison of two runs by their answers to the same images, of 1,000 classes."""
    import numpy as np
    import scipy.stats  # noqa: F401  (what a comparison imports when it is needed)

    from config import get_config, resolved_yaml
    from training import classification  # noqa: F401
    from training.report.compare import compare

    random = np.random.default_rng(0)
    labels = random.integers(0, 1000, size)
    runs = [folder / "one", folder / "other"]
    for seed, run in enumerate(runs):
        run.mkdir()
        predicted = np.where(random.random(size) < 0.8, labels, random.integers(0, 1000, size))
        result = {
            "acc1": 100 * float((predicted == labels).mean()),
            "loss": 1.0,
            "num_samples": size,
        }
        (run / "result.json").write_text(json.dumps(result))
        config = get_config("vit_digits", ["SEED", str(seed), "TRAIN.BASE_LR", str(0.1 + seed)])
        (run / "config.yaml").write_text(resolved_yaml(config))
        with open(run / "predictions.csv", "w") as table:
            table.write('"image","label","predicted","probability"\n')
            for image, (label, answer) in enumerate(zip(labels, predicted, strict=True)):
                table.write(f'"class_{label:04}/{image:08}.jpg",{label},{answer},0.5\n')

    def work() -> None:
        assert len(compare(runs).verdicts) == 1

    return work


def list_models(size: int, folder: Path) -> Callable[[], object]:
    """Measures how the table of models is made, by the number of its rows."""
    from config import model_files
    from tools.list_models import describe

    files = model_files()[:size]
    assert len(files) == size
    return lambda: [describe(file) for file in files]


_POINTS = (625, 1250, 2500, 5000, 10_000)
MEASURES = {
    "sweep": Growth("points", _POINTS, sweep, 1, (20, 40, 80)),
    "sweep_again": Growth("points", _POINTS, sweep_again, 1, (20, 40, 80)),
    "sweep_optuna": Growth(
        "points", (1250, 2500, 5000, 10_000), sweep_optuna, 1, (4, 8, 16), needs="optuna"
    ),
    "search": Growth(
        "rows",
        (625_000, 1_250_000, 2_500_000, 5_000_000, 10_000_000),
        search,
        1,
        (200, 400, 800),
        0,
    ),
    "search_first": Growth(
        "rows", (125_000, 250_000, 500_000, 1_000_000), search_first, 1, (200, 400, 800)
    ),
    "duplicates": Growth(
        "images", (100_000, 200_000, 400_000, 800_000), duplicates, 1, (1000, 2000, 4000)
    ),
    "compare_runs": Growth(
        "images", (160_000, 320_000, 640_000, 1_280_000), compare_runs, 1, (100, 200, 400)
    ),
    "list_models": Growth("models", (40, 80, 160, 320), list_models, 1, (5, 10, 20)),
}
