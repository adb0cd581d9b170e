"""An evaluation among some of a model's outputs: those of an evaluation set's classes
(DATA.CLASSES).
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
from paddle import nn

LOW = 1e30  # off a logit, leaves nothing of its probability; infinities would make NaN of a sum


def among(
    model: Callable[..., Any], outputs: np.ndarray, count: int
) -> Callable[..., paddle.Tensor]:
    """Returns ``model``, in evaluation mode, with logits [B, count] float32. All but ``outputs``
    [k] are too low to be chosen, or to have a probability: the answers are those of a model of
    ``outputs`` alone.
    """
    if isinstance(model, nn.Layer):
        model.eval()
    low = np.full(count, -LOW, np.float32)
    low[outputs] = 0
    added = paddle.to_tensor(low)
    return lambda *inputs: model(*inputs).astype("float32") + added
