"""Files of a replayed step: its batch and the weights before it (``tools/replay.py -output``)."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from training.checkpoint import describe
from training.checkpoint.description import METADATA
from training.checkpoint.storage import write_file
from training.setup import Training
from training.task import Batch
from utils import rank
from weights import file_arrays

WEIGHTS = "weights.safetensors"
STEP = "step.json"


def batch_name(number: int) -> str:
    """Returns the name of the file with the batch of a rank."""
    return f"batch_rank{number}.npz"


def write_weights(folder: Path, training: Training) -> None:
    """Writes the current weights into a new folder, as a checkpoint's model.safetensors."""
    config = training.config
    description = describe(config, training.run.classes, config.TASK)
    metadata = {METADATA: description.to_json()}
    write_file(folder / WEIGHTS, file_arrays(training.model), metadata)


def write_batch(
    folder: Path, batch: Batch, inputs: Sequence[paddle.Tensor], names: Sequence[str]
) -> None:
    """Writes this rank's batch into a new folder.

    Args:
        batch: the loader's columns.
        inputs: what the network was given: the images are normalised by then, and perhaps mixed.
        names: of the samples.
    """
    arrays: dict[str, Any] = {name: column.numpy() for name, column in batch.items()}
    for number, tensor in enumerate(inputs):
        arrays[f"input_{number}"] = tensor.numpy()
    with open(folder / batch_name(rank()), "xb") as file:
        np.savez(file, names=np.array(names), **arrays)
        file.flush()
        os.fsync(file.fileno())
