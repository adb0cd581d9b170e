"""Where operators have corners, ties and ends: the inputs of each row of
tests/training/test_derivatives.py.
"""

import numpy as np


def _row(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def _both_signs(*values: float) -> np.ndarray:
    return np.array([sign * value for value in values for sign in (1, -1)], np.float32)


LINE = _both_signs(0, 1e-30, 1e-7, 0.5, 1, 3, 6, 17, 20, 40, 88, 100, 1e4)
LINE_TO_ITS_END = np.concatenate([LINE, _both_signs(1e15, 1e30)])
LOGITS = _both_signs(0, 1e-30, 1e-7, 0.5, 5, 30)
LIMIT = np.log(np.float32(100))
BELOW, ABOVE = np.nextafter(LIMIT, np.float32([0, 9]))
TARGETS = np.resize(_row(0, 1, 0.25, 0.9, 0.5), (5, len(LOGITS))).astype(np.float32)
EQUAL_ROWS = np.array(
    [[0, 0, 0, 0], [1, 1, 0, 1], [-0.0, 0, 0, -0.0], [2, 1, 2, 3], [5, 5, 5, -5], [0, 0, 0, 1]],
    np.float32,
)
FAR_ROWS = np.array(
    [
        [1e4, 0, 0, -1e4],
        [100, 0, -100, 50],
        [88, 88, -88, 0],
        [0, 65, 0, 0],
        [1e30, -1e30, 0, 1],
        [-1e30] * 4,
    ],
    np.float32,
)
ROWS = np.concatenate([EQUAL_ROWS, FAR_ROWS])
MASKED_ROWS = np.array(
    [[0, -100, 1, -100], [-np.inf, 2, -np.inf, 2], [0, -np.inf, -np.inf, -np.inf]], np.float32
)
SMALL_ROWS = np.array(
    [[0, 0, 0, 0], [1e-10, 0, 0, 0], [1, 1, 1, 1], [1, 2, 3, 4], [-3, 1e-3, 0, 3]], np.float32
)
CONSTANT_ROWS = np.array(
    [[3, 3, 3, 3], [0, 0, 0, 0], [1e-10, 0, 0, 0], [1, 2, 3, 4], [-9, -9, 9, 9]], np.float32
)
PLATEAUS = np.array([[1, 1, 0, 0], [1, 1, 0, 0], [-0.0, 0, -1, -1], [0, 0, -1, -1]], np.float32)
# A channel is constant in every image, another in one of two.
MAPS = np.stack([np.full((2, 2, 2), 3), [[[0, 0], [0, 0]], [[1, 2], [3, 4]]]], axis=1).astype(
    np.float32
)
GROUPS = np.concatenate(
    [np.full((1, 2, 2, 2), 3), np.arange(8).reshape(1, 2, 2, 2)], axis=1
).astype(np.float32)
DEAD_CHANNEL = np.array([[[[0, 1, 2], [0, 3, 0]]], [[[0, 0, 0], [0, 0, 0]]]], np.float32)
# Equal queries and keys, opposite ones, and some whose scores are far apart.
VECTORS = np.array([[[1, 1, 1, 1], [1, 1, 1, 1], [-1, -1, -1, -1], [20, 0, 0, -20]]], np.float32)
VALUES = np.array([[[1, 0, 0, 2], [0, 1, 0, 2], [0, 0, 1, 2], [3, 0, 0, 2]]], np.float32)
DIFFERENCES = _both_signs(0, 1e-30, 1, 2, 2.5, 1e30)

POINTS: dict[str, list[np.ndarray]] = {
    "relu": [LINE_TO_ITS_END],
    "gelu": [LINE_TO_ITS_END],
    "gelu_tanh": [LINE],
    "quick_gelu": [LINE_TO_ITS_END],
    "silu": [LINE_TO_ITS_END],
    "hardswish": [LINE_TO_ITS_END],
    "sigmoid": [LINE_TO_ITS_END],
    "star_relu": [LINE],
    "swiglu": [LINE[None], np.full_like(LINE[None], 2)],
    "swiglu, packed": [np.stack([LINE, np.full_like(LINE, 2)], axis=1)],
    "mlp": [LINE[:, None]],
    "exp": [_both_signs(0, 1e-30, 1, 40)],
    "logit scale": [_row(LIMIT, BELOW, ABOVE, 0, -9, 9).reshape(6, 1, 1)],
    "softmax": [ROWS],
    "softmax, masked": [MASKED_ROWS],
    "log_softmax": [ROWS],
    "cross_entropy": [ROWS],
    "cross_entropy, smoothed": [ROWS],
    "soft_target": [ROWS],
    "distillation": [ROWS, np.roll(ROWS, 1, axis=0)],
    "bce": [np.resize(LINE_TO_ITS_END, (1, len(LINE_TO_ITS_END)))],
    "bce, soft": [np.resize(LOGITS, TARGETS.shape)],
    "bce, pos_weight": [np.resize(LOGITS, TARGETS.shape)],
    "focal": [np.resize(LOGITS, TARGETS.shape)],
    "focal, gamma 0.5": [np.resize(LOGITS, TARGETS.shape)],
    "focal, gamma 0": [np.resize(LOGITS, TARGETS.shape)],
    "asymmetric": [np.resize(LOGITS, TARGETS.shape)],
    "asymmetric, plain": [np.resize(LOGITS, TARGETS.shape)],
    "smooth_l1": [DIFFERENCES],
    "max_pool, 2": [PLATEAUS[None, None]],
    "max_pool, 3": [PLATEAUS[None, None]],
    "pooling": [PLATEAUS[None, None]],
    "the first of the largest": [np.stack([EQUAL_ROWS.T, EQUAL_ROWS.T[::-1]])],
    "layer_norm": [CONSTANT_ROWS],
    "layer_norm, frozen": [CONSTANT_ROWS],
    "group_norm": [GROUPS],
    "batch_norm": [MAPS],
    "batch_norm, relu": [MAPS],
    "batch_norm, gelu": [MAPS],
    "batch_norm, silu": [MAPS],
    "batch_norm, evaluated": [MAPS],
    "classifier_norm": [CONSTANT_ROWS],
    "rms_norm": [CONSTANT_ROWS],
    "response_norm": [DEAD_CHANNEL],
    "response_norm, channels first": [DEAD_CHANNEL],
    "unit": [SMALL_ROWS[1:]],
    "attention": [VECTORS, VECTORS, VALUES],
    "attention, masked": [VECTORS, VECTORS, VALUES],
    "attention, cosine": [VECTORS, VECTORS, VALUES],
}
MASK = np.array(
    [[[0, -100, 0, -100], [0, 0, 0, 0], [-100, -100, -100, 0], [0, -100, 0, 0]]], np.float32
)


def out_gradient(shape: tuple[int, ...] | list[int]) -> np.ndarray:
    """Returns what the gradient of an output of this shape is: a quarter, two quarters, and so on
    to two, again.
    """
    return (
        (np.arange(np.prod(shape, dtype=int)) % 8 * 0.25 + 0.25).reshape(shape).astype(np.float32)
    )
