"""Maps of whole images, computed at once or in windows that slide over them."""

from collections.abc import Callable
from typing import Any

import paddle
from paddle.nn import functional as F


def maps(
    forward: Callable[[paddle.Tensor], paddle.Tensor],
    images: paddle.Tensor,
    window: tuple[int, int],
    stride: tuple[int, int] | None,
) -> paddle.Tensor:
    """Returns the logits of images of any size: [B, C, H, W] -> [B, K, H, W].

    The last window of a row or a column ends at the image's border. Where windows overlap, the mean
    of their logits is taken. An image that is smaller than a window is padded with zeros, which the
    mean colour is after the normalisation.

    Args:
        forward: a ``SegmentationModel`` in evaluation mode.
        window: (height, width) of the windows.
        stride: how many pixels the next window is further down and to the right; None: there is one
            window, the whole image.
    """
    if stride is None:
        return forward(images)
    height, width = images.shape[2:]
    bottom = max(window[0] - height, 0)
    right = max(window[1] - width, 0)
    if bottom or right:
        images = F.pad(images, [0, right, 0, bottom])
    size = images.shape[2:]
    total: Any = 0
    count = paddle.zeros([1, 1, *size])
    for top in _starts(size[0], window[0], stride[0]):
        for left in _starts(size[1], window[1], stride[1]):
            rows = slice(top, top + window[0])
            columns = slice(left, left + window[1])
            logits = forward(images[:, :, rows, columns]).astype("float32")
            if not isinstance(total, paddle.Tensor):
                total = paddle.zeros([*logits.shape[:2], *size])
            total[:, :, rows, columns] += logits
            count[:, :, rows, columns] += 1
    mean = total / count.expand_as(total)
    return mean[:, :, :height, :width]


def _starts(length: int, window: int, stride: int) -> list[int]:
    """Returns where windows begin along a side of ``length`` pixels."""
    return [*range(0, length - window, stride), length - window]
