"""Files of a step: its batch, and the weights before it.

A run saves the batches of its bad steps, and ``tools/replay.py -output`` a step as a whole.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from errors import InputError, reading
from launch.files import writing_whole
from loading.files import npz
from training.checkpoint import describe
from training.checkpoint.description import METADATA
from training.checkpoint.storage import write_file
from training.setup import Training
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


def write_batch(path: Path, names: Sequence[str], arrays: Mapping[str, Any]) -> None:
    """Writes this rank's batch.

    Args:
        names: of the samples.
        arrays: the loader's columns, and what else belongs to the batch.
    """
    with writing_whole(path, "wb") as file:
        np.savez(file, names=np.array(names), **arrays)


def changed_columns(file: Path, columns: Mapping[str, np.ndarray]) -> list[str]:
    """Returns which of a batch's columns aren't those in a file of ``write_batch``.

    Samples aren't compared by name, because another working folder changes their paths.
    """
    changed = []
    for name, array in columns.items():
        try:
            with reading(file, "a saved batch"):
                [saved] = npz(file, {name: (array.dtype.kind, array.ndim)}).values()
        except InputError:
            changed.append(name)
            continue
        if saved.shape != array.shape or saved.tobytes() != array.tobytes():
            changed.append(name)
    return changed
