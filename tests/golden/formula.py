"""Weights and inputs that NumPy and torch make alike: by a formula from name and shape, nothing to store."""

import zlib

import numpy as np

VIT = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 3, "num_heads": 3, "num_classes": 7}


def array(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns sin(0.7 (crc32(name) mod 1000 + i)) / 5 over the flat index i; a norm's weight is 1 more."""
    index = np.arange(np.prod(shape, dtype=np.int64)) + zlib.crc32(name.encode()) % 1000
    values = np.sin(0.7 * index) / 5 + (1.0 if "norm" in name and name.endswith("weight") else 0.0)
    return values.reshape(shape).astype(np.float32)
