"""A small problem for optimizers that NumPy, Paddle and torch state alike: parameters, gradients,
rates, settings.
"""

import zlib

import numpy as np

# torch's layout: a Linear's weight is [out, in]; the classifier last, as timm expects it
SHAPES = {
    "embed": (1, 4, 5),
    "conv.weight": (4, 3, 2, 2),
    "conv.bias": (4,),
    "fc.weight": (6, 5),
    "fc.bias": (6,),
    "head.weight": (3, 6),
    "head.bias": (3,),
}
DECAYED = ("conv.weight", "fc.weight", "head.weight")
# LAYER_DECAY 0.5, HEAD_LR 3
SCALES = {name: {"fc": 0.5, "head": 3.0}.get(name.split(".")[0], 0.25) for name in SHAPES}
WEIGHT_DECAY = 0.1
BETAS = (0.8, 0.95)
EPS = 1e-6
MOMENTUM = 0.9
STEPS = 10
CASES = ("AdamW", "Adam", "SGD", "SGD nesterov", "LAMB", "Lion", "Muon", "Muon nesterov")
# a decay that rises; parameters that have no gradient in the first steps, as DINO's last layer
WEIGHT_DECAY_END = 0.8
LATE = {"conv.weight": 2, "fc.weight": 3, "fc.bias": 3}
# "parameter" clips some of the parameters, not all
CLIPS = {"norm": 0.5, "parameter": 0.3, "value": 0.05, "agc": 0.3}
# updates of a scaler that grows after three
OVERFLOWS = [False] * 7 + [True, False, False, True, True] + [False] * 4


def rate(step: int) -> float:
    """The learning rate of a step: it rises, then falls."""
    return 0.02 * float(1 + np.sin(step))


def gradients(step: int) -> dict[str, np.ndarray]:
    """The gradients of a step, in torch's layout; of full rank, or Muon would blow their rounding
    up.
    """
    starts = {name: zlib.crc32(f"{name} {step}".encode()) % 1000 for name in SHAPES}
    indices = {
        name: starts[name] + np.arange(np.prod(shape)).reshape(shape)
        for name, shape in SHAPES.items()
    }
    return {
        name: (np.sin(0.7 * index**2) / 5).astype(np.float32) for name, index in indices.items()
    }
