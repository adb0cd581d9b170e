"""The formula for convolutional models, which would forget its waves: they average places, and name
norms ``bn1``.
"""

import numpy as np

from golden import formula


def array(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns ``formula.array``, but waves of rising frequency as images, and 1 more for each
    vector called weight.
    """
    if name == "images":
        index = np.arange(np.prod(shape, dtype=np.int64))
        return np.sin(0.7 * index + 1e-3 * index**2).reshape(shape).astype(np.float32)
    vector = len(shape) == 1 and name.endswith("weight")
    return formula.array(f"norm.{name}" if vector else name, shape)
