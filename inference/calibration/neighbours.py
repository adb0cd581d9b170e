"""The features of training images that the score "knn" compares with, beside calibrated weights."""

from pathlib import Path

import numpy as np

from errors import InputError, Unreadable, reading
from weights.formats import read_arrays, write_weights
from weights.sums import sha256_of

FILE = "neighbours.safetensors"
_NAME = "features"
_ADVICE = "; copy it from where the weights were calibrated, or calibrate them again"


def write_neighbours(folder: Path, features: np.ndarray) -> str:
    """Writes features [m, channels] of length 1 into a folder; returns the file's SHA-256."""
    write_weights(folder / FILE, {_NAME: features})
    return sha256_of(folder / FILE)


def read_neighbours(weights: Path | None, sha256: str) -> np.ndarray:
    """Returns the features that ``write_neighbours`` wrote beside weights.

    Args:
        weights: the file of the weights.
        sha256: of the file with the features, as the weights say it.

    Raises:
        InputError: the file isn't there, or it is another one.
    """
    if weights is None or not (weights.parent / FILE).is_file():
        raise InputError(
            f"score knn needs {FILE} next to {weights}; copy it from where the weights were"
            " calibrated, or calibrate them again"
        )
    file = weights.parent / FILE
    with reading(file, "features of training images", _ADVICE):
        if sha256_of(file) != sha256:
            raise Unreadable("its SHA-256 differs from that of the calibration")
    return dict(read_arrays(file))[_NAME]
