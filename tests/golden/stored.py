"""The arrays of the weight files weights* and checkpoint*: any dtype holds their values exactly."""

import numpy as np

DTYPES = {
    "half": "float16", "single": "float32", "double": "float64", "brain": "bfloat16", "char": "int8", "short": "int16",
    "int": "int32", "long": "int64", "byte": "uint8", "word": "uint16", "bool": "bool",
}  # fmt: skip
SHAPES = {
    "scalar": (),
    "empty": (0, 3),
    "parameter": (2, 2),
    "turned": (4, 3),
    "slice": (2, 2),
    "expanded": (3, 2),
}
SHAPES |= dict.fromkeys(DTYPES, (2, 3))
FLOATS = ("half", "single", "double", "brain", *(name for name in SHAPES if name not in DTYPES))


def values(name: str) -> np.ndarray:
    """Returns what reading the array ``name`` gives: floats are float32, others have their own
    type.
    """
    shape = SHAPES[name]
    count = np.arange(np.prod(shape, dtype=np.int64)).reshape(shape)
    if name == "expanded":
        return np.zeros(shape, np.float32) + np.float32([0.5, -2])
    return np.asarray((count - 2) / 8, np.float32) if name in FLOATS else count.astype(DTYPES[name])
