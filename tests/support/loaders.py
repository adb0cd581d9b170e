"""A dataset of numbers and loaders of it, for tests of the order and of workers."""

import os
import time

import numpy as np
import paddle

from config import get_config
from loading.samplers import TrainBatchSampler
from loading.workers import ProcessLoader


class Numbers(paddle.io.Dataset):
    """Sample i has 2 x 2 pixels of value i, the label i, its epoch, and the process that read it."""

    labels = np.arange(20)
    columns = ("pixels", "labels", "epochs", "processes")

    def __len__(self):
        return 20

    def shapes(self, size):
        return {"pixels": ((*size, 3), np.dtype(np.uint8))}

    def name(self, index):
        return f"number {index}"

    def __getitem__(self, key):
        epoch, index, _ = key if isinstance(key, tuple) else (0, key, 0)
        if index % 3 == 0:
            time.sleep(0.003)
        return (
            np.full((2, 2, 3), index, np.uint8),
            np.int64(index),
            np.int64(epoch),
            np.int64(os.getpid()),
        )


def loader_config(workers, prefetch=2, batch_size=4, epochs=9):
    values = {
        "DATA.NUM_WORKERS": workers,
        "DATA.BATCH_SIZE": batch_size,
        "DATA.IMAGE_SIZE": 2,
        "TRAIN.NUM_EPOCHS": epochs,
        "TRAIN.WARMUP_EPOCHS": 0,
    }
    # Without workers, DATA.PREFETCH would have no effect.
    if workers:
        values["DATA.PREFETCH"] = prefetch
    return get_config(None, [str(word) for pair in values.items() for word in pair])


def training_loader(workers, prefetch=2, epochs=9, dataset=None):
    """Returns a loader of batches of four, in the order of a training on one rank."""
    config = loader_config(workers, prefetch, epochs=epochs)
    dataset = dataset or Numbers()
    return ProcessLoader(config, dataset, TrainBatchSampler(config, dataset, 0, 1))
