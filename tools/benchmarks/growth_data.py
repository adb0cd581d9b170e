"""Subjects of ``growth`` about data: samplers, metrics of several labels, listings and caches."""

import multiprocessing
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tools.benchmarks.growth_measure import Growth

# Images of a class: ImageNet-22k has 14.2 million images of 21,841 classes.
_CLASS = 650
# classes of the images with several labels
_LABELS = 100
# files that ranks share
_LISTED = 20_000


class _Labels:
    """Stands in for a dataset, of which a sampler needs the length and the labels."""

    def __init__(self, labels: np.ndarray) -> None:
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)


def balanced_sampler(size: int, _: Path) -> Callable[[], object]:
    """Measures the start of an epoch with DATA.SAMPLER balanced, up to its first batch."""
    from config import get_config
    from loading.samplers import TrainBatchSampler

    labels = np.random.default_rng(0).integers(0, max(2, size // _CLASS), size)
    config = get_config(None, ["DATA.SAMPLER", "balanced"])
    sampler = TrainBatchSampler(config, _Labels(labels), 0, 1)
    return lambda: next(iter(sampler))


def multilabel_metrics(size: int, _: Path) -> Callable[[], object]:
    """Measures an evaluation of images with several labels, whose outputs are already known."""
    import paddle

    from config import get_config
    from training.multilabel import MultiLabel

    rng = np.random.default_rng(0)
    words = ["TASK", "multilabel", "MODEL.NUM_CLASSES", str(_LABELS), "REPORT", "False"]
    task: Any = MultiLabel(get_config(None, words))
    task.normalize = lambda pixels: pixels

    def batches() -> Iterator[dict[str, paddle.Tensor]]:
        for first in range(0, size, 1000):
            logits = rng.standard_normal((min(1000, size - first), _LABELS), np.float32)
            labels = (logits > 2).astype(np.uint8)
            yield {"pixels": paddle.to_tensor(logits), "labels": paddle.to_tensor(labels)}

    made = list(batches())
    return lambda: task.evaluate(lambda pixels: pixels, iter(made))


def list_folder(size: int, folder: Path) -> Callable[[], object]:
    """Measures how a start lists the images of a folder of classes."""
    from loading.sources import Split
    from loading.sources import class_folders as read

    _write_names(folder, size)
    return lambda: read(Split("train", alone=True), data_path=str(folder))


def list_by_ranks(size: int, folder: Path) -> Callable[[], object]:
    """Measures how launched ranks list the same folder, for any number of ranks. The ranks are
    processes that do nothing else.
    """
    from launch import secret, sharing
    from loading.sources import Split
    from loading.sources import class_folders as read

    _write_names(folder, _LISTED)
    context = multiprocessing.get_context("fork")
    key = secrets.token_hex(secret.MAC_SIZE)

    def be_rank(ready: Any) -> None:
        secret.set_run_key(key)
        os.environ["PADDLE_TRAINERS_NUM"] = str(size)
        sharing.read_once(lambda: (read(Split("train", alone=True), data_path=str(folder)),), b"")
        ready.release()
        # Ranks wait for one another, so this one shares what it has read until it is killed.
        while True:
            sharing.answer()
            time.sleep(0.02)

    def run() -> None:
        ready = context.Semaphore(0)
        ranks = [context.Process(target=be_rank, args=(ready,)) for _ in range(size)]
        for rank in ranks:
            rank.start()
        for _ in ranks:
            ready.acquire()
        for rank in ranks:
            rank.kill()
            rank.join()

    return run


def hand_over(size: int, _: Path) -> Callable[[], object]:
    """Measures how a rank opens names and labels that another process has read."""
    from launch.spawned import SharedObjects
    from loading.files import Paths

    paths = Paths(
        f"train/n{place % 1000:08}/n{place % 1000:08}_{place}.JPEG" for place in range(size)
    )
    handed = SharedObjects(paths, np.arange(size) % 1000)
    return handed.open


def open_cache(size: int, folder: Path) -> Callable[[], object]:
    """Measures a start with a DATA.CACHE whose images were decoded before. The sizes and times of
    the source files aren't compared.
    """
    from loading.cache import Sources, cached_images

    image = np.zeros((32, 32, 3), np.uint8)

    def read() -> object:
        sources = Sources(lambda: ())
        images = (image for _ in range(size))
        return cached_images(folder, "cache", sources, lambda: (images, np.zeros(size, int), ["a"]))

    read()
    return read


def _write_names(folder: Path, size: int) -> None:
    for place in range(min(10, size)):
        (folder / f"{place}").mkdir()
    for place in range(size):
        (folder / f"{place % 10}" / f"n{place:08}.JPEG").touch()


_EPOCHS = (500_000, 1_000_000, 4_000_000, 14_200_000)
MEASURES = {
    "balanced_sampler": Growth("images", _EPOCHS, balanced_sampler, 1, (2000, 4000)),
    "multilabel_metrics": Growth(
        "images", (62_500, 125_000, 250_000, 500_000), multilabel_metrics, 1, (200, 400)
    ),
    "list_folder": Growth("images", (25_000, 50_000, 100_000, 200_000), list_folder, 1, (100, 200)),
    "list_by_ranks": Growth("ranks", (2, 4, 8, 16), list_by_ranks, 0, (2, 3)),
    "hand_over": Growth(
        "images", (250_000, 500_000, 1_000_000, 2_000_000), hand_over, 0, (1000, 2000)
    ),
    "open_cache": Growth("images", (25_000, 50_000, 100_000, 200_000), open_cache, 0, (100, 200)),
}
